"""Is a module a drop-in for another one? Plain candidates in the form of `ModelNew` against `Model`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from postlude.check.compare import (
    Answers,
    Progress,
    Quantities,
    Round,
    compare,
    first_line,
    poison,
    same_bits,
    verdict_of,
)
from postlude.check.modes import FORMATS, RoundedOperands, pytorch_switches, resolve
from postlude.check.points import (
    families,
    input_family,
    inputs_like,
    laid_out_like,
    map_tensors,
    random_state,
)
from postlude.check.sides import CandidateError, Side, UnanswerableError, key_findings, leaves_of
from postlude.check.verdict import Verdict


def verify_modules(
    reference: nn.Module,
    candidate: nn.Module,
    inputs: Sequence[Any],
    *,
    precision: str = "auto",
    seeds: int = 5,
    backward: bool = False,
    progress: Progress = None,
) -> Verdict:
    """Judges `candidate` by `reference`, both on the device and in the mode (train or eval) that they are in.

    Both get the same random states and inputs, the file's own inputs among them; the candidate always answers
    first. Its state is put back afterwards, the reference is only copied.
    """
    findings = key_findings(reference, candidate)
    if findings:
        return Verdict("wrong", tuple(findings), precision)
    before = {key: value.clone() for key, value in candidate.state_dict().items() if isinstance(value, Tensor)}
    devices = {tensor.device for tensor in leaves_of(list(inputs)) if tensor.device.type == "cuda"}
    checker = _Checker(reference, candidate, list(inputs), precision, backward)
    try:
        with (
            torch.random.fork_rng(devices=sorted(devices, key=str)),
            torch.autocast(checker.device.type, enabled=False),
        ):
            return checker.check(seeds, progress)
    except CandidateError as error:
        return Verdict("wrong", (str(error),), checker.mode)
    except UnanswerableError as error:
        return Verdict("cannot tell", (str(error),), checker.mode)
    finally:
        Side(candidate, backward).load(before)


class _Checker:
    """The three sides of a comparison, and what was found so far."""

    def __init__(
        self, reference: nn.Module, candidate: nn.Module, inputs: list[Any], precision: str, backward: bool
    ) -> None:
        self.reference = reference
        self.inputs = inputs
        self.candidate = Side(candidate, backward)
        self.own = Side(copy.deepcopy(reference), backward)
        self.exact = Side(copy.deepcopy(reference).double(), backward)
        self.device = _device_of(reference, inputs)
        dtype = _dtype_of(reference, inputs)
        self.mode = resolve(precision, dtype, self.device)
        self.in_double = dtype == torch.float64
        # The candidate's inputs keep their place in memory, so that answers remembered by address show.
        self.live = map_tensors(lambda tensor: laid_out_like(tensor.detach(), tensor), inputs)
        self.findings: list[str] = []

    def check(self, seeds: int, progress: Progress) -> Verdict:
        rounds = []
        kept: tuple[Tensor, Tensor] | None = None
        for seed, family in enumerate(["given", *families(seeds)]):
            answers = self._answers(seed, family)
            rounds.append(Round(family, compare(answers, self.findings)))
            if kept is not None and not same_bits(*kept):
                self.findings.append("an earlier result changed when the candidate was called again")
            first = answers.result.get("output")
            kept = None if kept is not None or first is None else (first, first.clone())
            if progress:
                progress(f"point {seed + 1} ({family}): {len(self.findings) or 'no'} findings")
            if self.findings:
                break
        return verdict_of(rounds, self.findings, self.mode)

    def _answers(self, seed: int, family: Any) -> Answers:
        state = random_state(self.reference, seed, "normal" if family == "given" else family)
        values = self.inputs if family == "given" else inputs_like(self.inputs, input_family(family, seed), seed)
        result = self._ask_candidate(state, values, seed)
        with pytorch_switches(self.mode, self.device):
            own = self._ask(self.own, state, values, seed)
        repeated = None
        if seed == 0:
            for tensor in own.values():
                poison(tensor)
            repeated = self._ask_candidate(state, values, seed)
        doubles = map_tensors(_as(torch.float64), values)
        truth = self._ask(self.exact, state, doubles, seed, own)
        bare, rounded = None, FORMATS[self.mode]
        if rounded is not None:
            with RoundedOperands(rounded):
                bare = self._ask(self.exact, state, doubles, seed, own)
        nulls = self._nulls(state, doubles, seed) if seed == 1 else None
        return Answers(result, own, truth, bare, repeated, nulls, self._single(state, values, seed))

    def _single(self, state: dict[str, Tensor], values: list[Any], seed: int) -> tuple[Quantities, Quantities] | None:
        if not self.in_double:
            return None
        side = Side(copy.deepcopy(self.reference).float(), self.exact.backward)
        rounded = {key: _as(torch.float32)(value) for key, value in state.items()}
        singles = map_tensors(_as(torch.float32), values)
        own = self._ask(side, rounded, singles, seed)
        return own, self._ask(self.exact, rounded, map_tensors(_as(torch.float64), singles), seed, own)

    def _ask_candidate(self, state: dict[str, Tensor], values: list[Any], seed: int) -> Quantities:
        buffers, fresh = leaves_of(self.live), leaves_of(values)
        for buffer, new in zip(buffers, fresh, strict=True):
            _overwrite(buffer, new)
        try:
            result = self.candidate.ask(state, self.live, seed)
        except Exception as error:
            self._ask(self.own, state, values, seed)  # raises where the reference does too
            raise CandidateError(f"the candidate raised {first_line(error)}") from error
        if not all(same_bits(buffer, new) for buffer, new in zip(buffers, fresh, strict=True)):
            self.findings.append("the candidate changed its inputs")
        self.findings += self.candidate.state_findings(state)
        return result

    def _ask(
        self,
        side: Side,
        state: dict[str, Tensor],
        values: list[Any],
        seed: int,
        weigh_like: Quantities | None = None,
    ) -> Quantities:
        try:
            return side.ask(state, map_tensors(torch.clone, values), seed, weigh_like)
        except Exception as error:
            what = "the reference in float64" if side is self.exact else "the reference"
            raise UnanswerableError(f"{what} raised {first_line(error)}") from error

    def _nulls(self, state: dict[str, Tensor], doubles: list[Any], seed: int) -> dict[str, Quantities]:
        """The truth for another input and for other parameters: where they pass, nothing depends on them."""
        forward = Side(self.exact.module, backward=False)
        other = inputs_like(doubles, "hierarchical", seed + 10_000)
        nulls = {"the answer for another input": self._ask(forward, state, other, seed)}
        if any(True for _ in self.reference.parameters()):
            changed = random_state(self.reference, seed + 10_000)
            nulls["the answer for other parameters"] = self._ask(forward, changed, doubles, seed)
        return nulls


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor


def _overwrite(buffer: Tensor, values: Tensor) -> None:
    # Through .data: the version counter stays, as with optimisers that write that way.
    distinct = [1 if stride == 0 else size for size, stride in zip(buffer.shape, buffer.stride(), strict=True)]
    place = tuple(slice(size) for size in distinct)
    buffer.data[place].copy_(values[place])


def _dtype_of(module: nn.Module, inputs: Sequence[Any]) -> torch.dtype:
    tensors = [*module.parameters(), *leaves_of(inputs)]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _device_of(module: nn.Module, inputs: Sequence[Any]) -> torch.device:
    tensors = [*leaves_of(inputs), *module.parameters()]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
