"""Both passes of an operator's call whose program is known, on the tensors of a graph."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.plan.program import Buffer
from postlude.run.chain_run import laid_out
from postlude.run.operator_call import program_of, read
from postlude.run.runner import runner_of
from postlude.stages.program import Strided

log = logging.getLogger("postlude")
# By text, which names the device as well. Inductor's code looks here first, where a key of text and device would take
# twice as long.
KNOWN: dict[str, Passes] = {}


def passes(text: str, device: torch.device) -> Passes:
    known = KNOWN.get(text)
    if known is None:
        known = KNOWN[text] = Passes(text, device)
    return known if known.device == device else Passes(text, device)  # a graph may be moved, if it is not Inductor's


class Passes:
    """Both passes; each returns what the call's text says. The caller has set grad mode, autocast and the device."""

    def __init__(self, text: str, device: torch.device) -> None:
        call, program = read(text), program_of(text)
        assert program is not None
        self.device = device
        self.name, self.moved = str(call.chain), call.chain.moved
        self.given, self.made, self.found = call.tensors, _specs(call.made), _specs(call.found)
        # An operator must not return its arguments' memory; a chain of no-ops could.
        self.is_argument = program.result.storage in {buffer.storage for buffer in program.given}
        self.run_forward = runner_of(program.given, program.forward, call.made, str(device))
        if program.gradient is None:
            return
        kept = [*program.kept, program.gradient]
        self.kept, memory = _specs(kept), {buffer.storage for buffer in kept}
        self.are_arguments = [base.storage in memory for base in call.found]
        self.run_backward = runner_of(kept, program.backward, call.found, str(device))

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        given = self._fitted(tensors, self.given)
        for slot in self.moved:
            given[slot] = given[slot].clone()
        made = self._fitted(self.run_forward.run(*given), self.made)
        if self.is_argument:
            made[0] = made[0].clone()
        for slot in self.moved:
            made.append(given[slot])
        return made

    def backward(self, dy: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        found = self._fitted(self.run_backward.run(*self._fitted([*saved, dy], self.kept)), self.found)
        return [base.clone() if shared else base for base, shared in zip(found, self.are_arguments)]

    def _fitted(self, tensors: Sequence[Any], specs: Sequence[Strided]) -> list[Tensor]:
        """The tensors with the strides that programs read and compilers were told; a library may return others."""
        return [
            tensor if tensor.stride() == spec[1] and tensor.dtype is spec[2] else self._copied(tensor, spec)
            for tensor, spec in zip(tensors, specs, strict=True)
        ]

    def _copied(self, tensor: Tensor, spec: Strided) -> Tensor:
        log.debug("%s: a tensor of strides %s is copied to strides %s", self.name, tensor.stride(), spec[1])
        return laid_out(tensor, *spec)


def _specs(buffers: Sequence[Buffer]) -> list[Strided]:
    return [(buffer.shape, buffer.strides, getattr(torch, buffer.dtype)) for buffer in buffers]
