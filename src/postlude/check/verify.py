"""Is an implementation of a chain right? Its answers against float64, PyTorch's own, and null candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.check.compare import (
    GRADIENT,
    LARGE_OFFSET,
    Answers,
    Progress,
    Quantities,
    Round,
    compare,
    contract_problem,
    cotangent,
    first_line,
    nonfinite_problem,
    poison,
    same_bits,
    verdict_of,
)
from postlude.check.modes import FORMATS, RoundedOperands, pytorch_switches, resolve
from postlude.check.nulls import chain_nulls
from postlude.check.points import ChainPoint
from postlude.check.verdict import Verdict
from postlude.reference import evaluate

Run = Callable[[Chain, Sequence[Tensor]], Tensor]
Backward = bool | Sequence[bool]
NONFINITE = (("NaN", math.nan), ("infinity", math.inf))


class CandidateError(Exception):
    """Carries what the implementation under test raised, apart from errors of our own."""


def verify_chain(
    run: Run,
    chain: Chain,
    points: Iterable[ChainPoint | Sequence[Tensor]],
    precision: str = "auto",
    *,
    backward: Backward = False,
    nonfinite: bool = True,
    progress: Progress = None,
) -> Verdict:
    """Judges `run` on the points given (see `chain_points`), with gradients on request: all of them, or one word for
    each slot.

    Two more points carry a NaN and an infinity in one sample of the first point, and must keep them in place.
    """
    findings: list[str] = []
    rounds: list[Round] = []
    mode = precision
    for seed, given in enumerate(points):
        point = given if isinstance(given, ChainPoint) else ChainPoint(tuple(given))
        mode = resolve(precision, _product_dtype(chain, point.tensors), point.tensors[0].device)
        try:
            answers = _answers(run, chain, point, mode, seed, backward, findings)
            rounds.append(Round(point.family, compare(answers, findings)))
            if seed == 0 and nonfinite:
                findings += _nonfinite_findings(run, chain, point.tensors, mode)
        except CandidateError as error:
            return Verdict("wrong", (str(error),), mode)
        if progress:
            progress(f"point {seed + 1} ({point.family})")
        if findings:
            break
    return verdict_of(rounds, findings, mode)


def _answers(
    run: Run, chain: Chain, point: ChainPoint, mode: str, seed: int, backward: Backward, findings: list[str]
) -> Answers:
    tensors = point.tensors
    before = [tensor.clone() for tensor in tensors]
    result = _candidate(run, chain, tensors, seed, backward)
    if not all(same_bits(old, new) for old, new in zip(before, tensors, strict=True)):
        findings.append("the implementation changed its input tensors")
        tensors = tuple(before)
    with pytorch_switches(mode, tensors[0].device):
        own = _quantities(_by_pytorch, chain, tensors, seed, backward)
    repeated = None
    if seed == 0:
        poison(own["output"])
        repeated = _candidate(run, chain, tensors, seed, backward)
    doubles = [tensor.double() for tensor in tensors]
    weigh = own["output"]
    truth = _quantities(_in_double, chain, doubles, seed, backward, weigh)
    rounded = FORMATS[mode]
    bare = None
    if rounded is not None:
        with RoundedOperands(rounded):
            bare = _quantities(_in_double, chain, doubles, seed, backward, weigh)
    nulls = chain_nulls(chain, tensors, seed) if point.family != LARGE_OFFSET else None
    single = _single(chain, tensors, seed, backward) if weigh.dtype == torch.float64 else None
    return Answers(result, own, truth, bare, repeated, nulls, single)


def _single(chain: Chain, tensors: Sequence[Tensor], seed: int, backward: Backward) -> tuple[Quantities, Quantities]:
    """PyTorch in float32 and the truth for the same rounded tensors."""
    singles = [tensor.float() for tensor in tensors]
    own = _quantities(_by_pytorch, chain, singles, seed, backward)
    doubles = [one.double() for one in singles]
    return own, _quantities(_in_double, chain, doubles, seed, backward, own["output"])


def _candidate(run: Run, chain: Chain, tensors: Sequence[Tensor], seed: int, backward: Backward) -> Quantities:
    try:
        return _quantities(run, chain, tensors, seed, backward)
    except Exception as error:
        raise CandidateError(f"the implementation raised {first_line(error)}") from error


def _quantities(
    run: Callable[..., Tensor],
    chain: Chain,
    tensors: Sequence[Tensor],
    seed: int,
    backward: Backward,
    weigh_like: Tensor | None = None,
) -> Quantities:
    """The output, what running statistics became, and on request the gradients of every slot.

    Cotangents have the dtype of `weigh_like`.
    """
    with nullcontext() if backward else torch.no_grad():
        leaves = [
            tensor.detach().clone()
            if slot in chain.moved
            else tensor.detach().requires_grad_(backward if isinstance(backward, bool) else backward[slot])
            for slot, tensor in enumerate(tensors)
        ]
        output = run(chain, leaves)
        found: Quantities = {"output": output.detach()}
        if backward:
            weights = cotangent(output if weigh_like is None else weigh_like, seed).to(output.dtype)
            wanted = [slot for slot, leaf in enumerate(leaves) if leaf.requires_grad]
            sources = [leaves[slot] for slot in wanted]
            gradients: Sequence[Any] = torch.autograd.grad(output, sources, weights, allow_unused=True)
            for slot, gradient in zip(wanted, gradients, strict=True):
                if gradient is not None:
                    found[f"{GRADIENT}slot {slot} ({chain.roles[slot]})"] = gradient
        # After the gradients: a backward pass must not move them again.
        found.update({f"slot {slot} (running)": leaves[slot].detach() for slot in chain.moved})
    return found


def _in_double(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return evaluate(chain, tensors, dtype=torch.float64, moves=True)


def _by_pytorch(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return evaluate(chain, tensors, moves=True)


def _nonfinite_findings(run: Run, chain: Chain, tensors: Sequence[Tensor], mode: str) -> list[str]:
    findings = []
    for what, value in NONFINITE:
        x = tensors[0].clone()
        # In the middle of the last sample, so that a tile that stops early or a wrong sample shows.
        place = (-1, *(size // 2 for size in x.shape[1:]))
        x[place] = value
        changed = (x, *tensors[1:])
        result = _candidate(run, chain, changed, 0, False)["output"]
        with torch.no_grad(), pytorch_switches(mode, x.device):
            own, truth = evaluate(chain, changed), evaluate(chain, changed, dtype=torch.float64)
        problem = contract_problem("output", result, own) or nonfinite_problem(result, own, truth, what)
        findings += [problem] if problem else []
    return findings


def _product_dtype(chain: Chain, tensors: Sequence[Tensor]) -> torch.dtype:
    """What the convolution multiplies in: autocast's dtype where there is one."""
    if chain.producer is not None and chain.producer.dtype is not None:
        dtype: torch.dtype = getattr(torch, chain.producer.dtype)
        return dtype
    return tensors[0].dtype
