"""A place in a model where a chain runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from postlude.chain import Chain
from postlude.hardware import default_fp32_precision
from postlude.plan import Plan, Problem, Refusal, problem_of
from postlude.run.crop import crop
from postlude.run.execute import Runner, call, call_plain, is_transformed, prepare, prepared

_REMEMBERED = 256  # problems per site before the look-up starts anew


class Site(nn.Module):
    """Runs one chain of a captured graph. Holds no parameters: they arrive as arguments, every call."""

    def __init__(self, name: str, chain: Chain, precision: str = "auto", memory: str = "default") -> None:
        super().__init__()
        self.name = name
        self.chain = chain
        self.precision = precision
        self.memory = memory
        self.is_enabled = True  # False: runs through PyTorch's operators, because verification said so
        self.last: tuple[Problem, Plan | Refusal] | None = None
        self.recorded: list[tuple[Tensor, ...]] | None = None  # [] while a crop of the inputs is wanted
        self._known: dict[Any, tuple[Problem, Plan | Refusal, Runner]] = {}

    def forward(self, *tensors: Tensor) -> Tensor:
        if is_transformed():
            return call_plain(self.chain, tensors)
        if self.recorded is not None and not self.recorded:
            self.recorded.append(crop(self.chain, tensors))
        problem, outcome, runner = self._look_up(tensors)
        self.__dict__["last"] = (problem, outcome)  # nn.Module's own way of setting takes 5 µs
        return call(runner, tensors)

    def _look_up(self, tensors: tuple[Tensor, ...]) -> tuple[Problem, Plan | Refusal, Runner]:
        # Hashing a chain and its problem costs more than a small layer: the key is what a tensor says at once.
        grad = torch.is_grad_enabled()
        switch = (tensors[0].get_device(), default_fp32_precision()) if tensors[0].is_cuda else ""
        key = (self.is_enabled, switch, *((t.shape, t.stride(), t.dtype, grad and t.requires_grad) for t in tensors))
        known = self._known.get(key)
        if known is None:
            problem = problem_of(tensors, self.precision, self.memory)
            if self.is_enabled:
                found = prepared(self.chain, problem)
            else:
                found = (DISABLED, prepare(self.chain, DISABLED, problem.device))
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = (problem, *found)
        return known


DISABLED = Refusal(("switched off because its verification failed",))
