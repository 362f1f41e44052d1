"""One side of a comparison of modules: it gets a state and inputs and returns its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from postlude.check.compare import GRADIENT, Quantities, cotangent, same_bits
from postlude.check.isolation.wire import distinct_part
from postlude.check.kinks import Shift
from postlude.check.nested import map_tensors, named_tensors, tensors_in
from postlude.check.points import laid_out_like
from postlude.errors import first_line

SHOWN = 5  # names listed in one finding
# What needs a gradient: nothing, in a mode without gradients; or the parameters, whose gradients are not taken if the
# word is "recorded"; or the inputs; or both.
Wants = Literal["none", "recorded", "all", "inputs", "parameters"]
StateKeys = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class CandidateError(Exception):
    """The candidate gave no result where the reference does."""


class UnanswerableError(Exception):
    """The reference cannot answer, so nothing can be told."""


def lacks_memory(error: Exception) -> bool:
    """Whether it is for lack of memory that nothing can be told. A candidate that lacks some has failed."""
    says = any(text in str(error) for text in ("can't allocate memory", "out of memory"))
    return (says and not isinstance(error, CandidateError)) or isinstance(error, MemoryError)


@dataclass(frozen=True)
class Question:
    """What every side is asked at one point."""

    state: dict[str, Tensor]
    inputs: list[Any]
    seed: int
    training: bool = True
    wants: Wants = "none"
    # One weight per tensor of the result, with which gradients are taken; shaped like the reference's results.
    cotangents: tuple[Tensor | None, ...] = ()
    interrupted: bool = False  # whether a candidate is called once more before gradients are taken
    shifts: tuple[Shift, ...] = ()  # put elements within rounding of a kink on one side, and on the other
    unaligned: bool = False  # whether a candidate's inputs begin behind the start of their memory

    @property
    def backward(self) -> bool:
        """Whether gradients are taken."""
        return self.wants not in ("none", "recorded")


@dataclass(frozen=True)
class Answer:
    """A candidate's results, and how it broke its contract, if it did."""

    quantities: Quantities
    findings: tuple[str, ...] = field(default=())
    gapped: frozenset[str] = frozenset()  # results that were views with gaps


class Answering(Protocol):
    """A candidate: a module in this process or in a separate one."""

    def state_keys(self) -> StateKeys: ...

    def ask(self, question: Question, *, keep: bool = False) -> Answer:
        """The results for a question; raises CandidateError if there are none."""

    def kept(self) -> Quantities:
        """The results of the last question asked with `keep`, as they are now."""


class Side:
    """The reference, or another trusted module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Writes a state in place without changing version counters, so that a cache keyed on them is exposed."""
        for key, tensor in self.module.state_dict().items():
            if isinstance(tensor, Tensor):
                tensor.data.copy_(state[key])

    def ask(self, question: Question, weigh_like: Quantities | None = None) -> Quantities:
        """Outputs, buffers that the module may update and, on request, gradients of inputs and parameters."""
        with torch.set_grad_enabled(question.wants != "none"):
            inputs, outputs = self.forward(question)
            found = {name: tensor.detach() for name, tensor in outputs.items()}
            if question.backward:
                found.update(self._gradients(outputs, inputs, question, weigh_like or outputs))
        for name, buffer in self.module.named_buffers():
            if name in question.state:
                found[f"buffer {name}"] = buffer.detach().clone()
        return found

    def forward(self, question: Question) -> tuple[list[Any], Quantities]:
        """The inputs as they were used, and the outputs with their graph."""
        self.load(question.state)
        self.module.train(question.training)
        torch.manual_seed(question.seed)  # dropout draws the same mask on every side
        follows = question.wants in ("all", "inputs")
        inputs = map_tensors(lambda tensor: _leaf(tensor, follows), question.inputs)
        outputs = named_tensors("output", self.module(*inputs))
        if not outputs:
            raise TypeError("the module returns no tensor")
        return inputs, outputs

    def _gradients(
        self, outputs: Quantities, inputs: list[Any], question: Question, weigh_like: Quantities
    ) -> Quantities:
        leaves = named_tensors("input", inputs)
        named = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
        if question.wants != "inputs":
            named.update((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        if not roots:
            raise RuntimeError("its result has no gradient; leave out --backward")
        if not named:
            return {}
        given = dict(zip(outputs, question.cotangents, strict=False))
        weights = [
            _weight(given.get(name), weigh_like.get(name, root), question.seed).to(root.dtype)
            for name, root in roots.items()
        ]
        gradients: Sequence[Any] = torch.autograd.grad(
            list(roots.values()), list(named.values()), weights, allow_unused=True
        )
        return {GRADIENT + name: grad for name, grad in zip(named, gradients, strict=True) if grad is not None}


class InProcess:
    """A candidate in this process: for our own modules, never for a file of others."""

    def __init__(self, module: nn.Module) -> None:
        self.side = Side(module)
        self._live: list[Any] = []
        self._kept: Quantities = {}

    def state_keys(self) -> StateKeys:
        return keys_of(self.side.module)

    def ask(self, question: Question, *, keep: bool = False) -> Answer:
        live = self._refreshed(question.inputs)
        asked = replace(question, inputs=live)
        try:
            found = self.side.ask(asked)
        except Exception as error:
            raise CandidateError(f"the candidate raised {first_line(error)}") from error
        pairs = zip(tensors_in(live), tensors_in(question.inputs), strict=True)
        findings = [] if all(same_bits(*pair) for pair in pairs) else ["the candidate changed its inputs"]
        parameters = {name: one.detach() for name, one in self.side.module.named_parameters()}
        findings += parameter_findings(parameters, question.state)
        if keep:
            self._kept, found = found, {name: tensor.clone() for name, tensor in found.items()}
        return Answer(found, tuple(findings))

    def kept(self) -> Quantities:
        return self._kept

    def _refreshed(self, inputs: list[Any]) -> list[Any]:
        """The inputs at the same addresses as before, so that results cached by address are exposed."""
        new, old = tensors_in(inputs), tensors_in(self._live)
        if [(t.shape, t.stride(), t.dtype) for t in new] != [(t.shape, t.stride(), t.dtype) for t in old]:
            old = tensors_in(map_tensors(lambda tensor: laid_out_like(tensor.detach(), tensor), inputs))
        buffers = iter(old)
        self._live = map_tensors(lambda _: next(buffers), inputs)  # numbers among the inputs are new
        for buffer, values in zip(tensors_in(self._live), new, strict=True):
            # Through .data, which keeps the version counter, as some optimizers do.
            distinct_part(buffer.data).copy_(distinct_part(values))
        return self._live


def parameter_findings(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Findings for parameters that a call changed. Buffers may change; they are compared as quantities."""
    changed = [name for name, value in parameters.items() if name in state and not same_bits(value, state[name])]
    return [f"the candidate changed its parameters: {some(changed)}"] if changed else []


def unread_counters(module: nn.Module) -> set[str]:
    """The counters of calls that nothing reads: those of batch_norms with a momentum."""
    norms = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    kept = [path for path, part in norms if part.momentum is not None]
    return {f"buffer {path}.num_batches_tracked".replace(" .", " ") for path in kept}


def keys_of(module: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    tensors = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}


def key_findings(theirs: StateKeys, ours: StateKeys) -> list[str]:
    """Differences of the candidate's state dict from the reference's in names, shapes and dtypes."""
    findings: list[str] = []
    differences = {"lacks": theirs.keys() - ours.keys(), "has in addition": ours.keys() - theirs.keys()}
    findings += [f"the candidate's state_dict {what}: {some(sorted(k))}" for what, k in differences.items() if k]
    for key in theirs.keys() & ours.keys():
        for what, is_, should_be in zip(("shape", "dtype"), ours[key], theirs[key]):
            if is_ != should_be:
                findings.append(f"the candidate's {key} has {what} {is_}, it should be {should_be}")
    return sorted(findings)


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _weight(given: Tensor | None, like: Tensor, seed: int) -> Tensor:
    """The given weight, or a new one for a result of another shape, which is a finding already."""
    return given if given is not None and given.shape == like.shape else cotangent(like, seed)


def _leaf(tensor: Tensor, backward: bool) -> Tensor:
    return tensor.detach().requires_grad_(backward and tensor.is_floating_point())
