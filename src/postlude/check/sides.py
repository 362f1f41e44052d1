"""One side of a comparison of modules: it is given a state and inputs and asked for its answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from postlude.check.compare import GRADIENT, Quantities, cotangent, same_bits
from postlude.check.points import map_tensors

SHOWN = 5  # names listed in one finding


class CandidateError(Exception):
    """The candidate raised where the reference does not."""


class UnanswerableError(Exception):
    """The reference cannot answer, so nothing can be told."""


class Side:
    """A module and whether its gradients are asked for."""

    def __init__(self, module: nn.Module, backward: bool) -> None:
        self.module = module
        self.backward = backward

    def load(self, state: dict[str, Tensor]) -> None:
        """Writes a state in place, leaving version counters alone, so that a cache keyed on them shows."""
        for key, tensor in self.module.state_dict().items():
            if isinstance(tensor, Tensor):
                tensor.data.copy_(state[key])

    def ask(
        self, state: dict[str, Tensor], inputs: list[Any], seed: int, weigh_like: Quantities | None = None
    ) -> Quantities:
        """Outputs, buffers that the module may update and, on request, gradients of inputs and parameters."""
        self.load(state)
        torch.manual_seed(seed)  # dropout draws the same mask on every side
        with nullcontext() if self.backward else torch.no_grad():
            inputs = map_tensors(self._leaf, inputs)
            outputs = named_tensors("output", self.module(*inputs))
            if not outputs:
                raise TypeError("the module returns no tensor")
            found = {name: tensor.detach() for name, tensor in outputs.items()}
            if self.backward:
                found.update(self._gradients(outputs, inputs, seed, weigh_like or outputs))
        for name, buffer in self.module.named_buffers():
            if name in state and buffer.is_floating_point():
                found[f"buffer {name}"] = buffer.detach().clone()
        return found

    def _gradients(self, outputs: Quantities, inputs: list[Any], seed: int, weigh_like: Quantities) -> Quantities:
        leaves = named_tensors("input", inputs)
        named = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
        named.update((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        if not roots:
            raise RuntimeError("the output has no gradient")
        if not named:
            return {}
        weights = [cotangent(weigh_like.get(name, root), seed).to(root.dtype) for name, root in roots.items()]
        gradients: Sequence[Any] = torch.autograd.grad(
            list(roots.values()), list(named.values()), weights, allow_unused=True
        )
        return {GRADIENT + name: grad for name, grad in zip(named, gradients, strict=True) if grad is not None}

    def _leaf(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(self.backward and tensor.is_floating_point())

    def state_findings(self, state: dict[str, Tensor]) -> list[str]:
        """Parameters may not change in a call; buffers are compared as quantities."""
        known = [(name, p) for name, p in self.module.named_parameters() if name in state]
        changed = [name for name, parameter in known if not same_bits(parameter, state[name])]
        return [f"the candidate changed its parameters: {_some(changed)}"] if changed else []


def key_findings(reference: nn.Module, candidate: nn.Module) -> list[str]:
    """Differences between the two state dicts in names and shapes."""
    theirs, ours = reference.state_dict(), candidate.state_dict()
    findings: list[str] = []
    differences = {"lacks": theirs.keys() - ours.keys(), "has in addition": ours.keys() - theirs.keys()}
    findings += [f"the candidate's state_dict {what}: {_some(sorted(k))}" for what, k in differences.items() if k]
    for key in theirs.keys() & ours.keys():
        pair = [value.shape if isinstance(value, Tensor) else None for value in (ours[key], theirs[key])]
        if pair[0] != pair[1]:
            ours_is, should_be = map(_shape, pair)
            findings.append(f"the candidate's {key} has shape {ours_is}, it should be {should_be}")
    return sorted(findings)


def named_tensors(name: str, item: Any) -> dict[str, Tensor]:
    """Every tensor in a nested value, with its place in the name."""
    if isinstance(item, Tensor):
        return {name: item}
    if isinstance(item, dict):
        pairs = [(f"{name}[{key!r}]", part) for key, part in item.items()]
    elif isinstance(item, (list, tuple)):
        pairs = [(f"{name}[{index}]", part) for index, part in enumerate(item)]
    else:
        return {}
    return {place: tensor for path, part in pairs for place, tensor in named_tensors(path, part).items()}


def leaves_of(item: Any) -> list[Tensor]:
    return list(named_tensors("", item).values())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _shape(shape: torch.Size | None) -> object:
    return None if shape is None else tuple(shape)
