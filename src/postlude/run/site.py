"""A place in a model where a chain runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from postlude.chain import Chain
from postlude.hardware import default_fp32_precision
from postlude.plan import problem_of
from postlude.run.execute import call, call_plain, is_transformed
from postlude.run.ledger import Ledger, Question


class Site(nn.Module):
    """Runs one chain of a captured graph. Holds no parameters: they arrive as arguments, every call. What is known
    about the chain is in the model's ledger."""

    def __init__(
        self,
        name: str,
        chain: Chain,
        precision: str = "auto",
        memory: str = "default",
        convolution: str = "auto",
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__()
        self.name, self.chain = name, chain
        self.precision, self.memory, self.convolution = precision, memory, convolution
        self.ledger = Ledger() if ledger is None else ledger
        self._table = self.ledger.table(name, chain)

    def forward(self, *tensors: Tensor) -> Tensor:
        if is_transformed():
            return call_plain(self.chain, tensors)
        # Hashing a chain and its problem costs more than a small layer: the key is what a tensor says at once.
        grad = torch.is_grad_enabled()
        switch = (tensors[0].get_device(), default_fp32_precision()) if tensors[0].is_cuda else ""
        key = (switch, *((t.shape, t.stride(), t.dtype, grad and t.requires_grad) for t in tensors))
        entry = self._table.get(key)
        if entry is None:
            entry = self.ledger.enter(self.question(tensors), key, tensors)
        return call(entry.runner, tensors)

    def question(self, tensors: tuple[Tensor, ...]) -> Question:
        problem = problem_of(tensors, self.precision, self.memory, self.convolution)
        needs = tuple(problem.needs_grad and tensor.requires_grad for tensor in tensors)
        return Question(self.name, self.chain, problem, needs)


@functools.lru_cache(maxsize=1024)
def _site(chain: Chain, precision: str) -> Site:
    return Site(str(chain), chain, precision)


def run_chain(chain: Chain, tensors: Sequence[Tensor], precision: str = "auto") -> Tensor:
    """A chain on tensors of the caller's own, outside of any model."""
    result: Tensor = _site(chain, precision)(*tensors)
    return result
