"""Random chains on the CPU against float64, by the rule in check/: any option, shape, dtype and layout.

`POSTLUDE_FUZZ=20000` draws that many, anew every time; without it 300, the same ones every time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from torch import Tensor

from cases import Builder, conv
from fuzz.drawing import Drawn, draws
from postlude import hardware, moments, reference
from postlude.chain import Chain, Normalize, Reduce, Value
from postlude.check import Errors, Measured, deviation, judge, scale_of
from postlude.check.compare import OFFSET_SLACK, nonfinite_problem, same_bits
from postlude.check.deviations import Deviation
from postlude.plan import Plan, lower, problem_of
from postlude.plan import cpu as plan_cpu
from postlude.run import cpu
from postlude.run.execute import execute

ASKED = os.environ.get("POSTLUDE_FUZZ")
EXAMPLES = int(ASKED or 300)
LUCK = 2.0 if ASKED else 1.0  # among ten thousand chains are some where PyTorch's rounding errors happen to cancel
POINTS = 5
COUNTS: Counter[str] = Counter()
SMALL_CACHE = hardware.Machine("cpu", 2, 16 << 10, False, hardware.has_onednn())

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _counted(noted: Callable[[str], None]) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on more
    yield
    torch.set_num_threads(threads)
    report = ", ".join(f"{count} {what}" for what, count in sorted(COUNTS.items(), key=lambda item: -item[1]))
    noted(f"fuzz on the CPU: {report}")


@contextlib.contextmanager
def ways_of(drawn: Drawn) -> Iterator[hardware.Machine]:
    machine = SMALL_CACHE if drawn.in_slabs else hardware.machine_for("cpu")
    sizes = {"MAPPED": 0, "SURELY_MAPPED": 0} if drawn.as_large else {}
    with contextlib.ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(mock.patch.object(plan_cpu, name, size))
        stack.enter_context(torch.inference_mode() if drawn.inference_mode else torch.no_grad())
        yield machine


def strides(tensor: Tensor) -> list[int]:
    """Of the axes that have any: PyTorch's in-place operators leave the others as they are, its new tensors do not."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and tensor.numel()]


def error_of(call: Callable[..., object], *given: object) -> type[Exception] | None:
    try:
        call(*given)
    except Exception as error:
        return type(error)
    return None


def perturbed(chain: Chain, tensors: list[Tensor], dtype: torch.dtype, seed: int) -> Tensor:
    """In float64 with every value moved by up to one rounding of `dtype`: what the chain makes of that is the error
    of computing in it, where PyTorch's own may be small by luck."""
    generator, eps = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps

    def moved(value: Tensor) -> Tensor:
        return value * (1 + eps * (2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1))

    with torch.no_grad():
        given = [moved(tensor.double()) for tensor in tensors]
        values: list[Tensor | None] = [moved(reference.evaluate(dataclasses.replace(chain, steps=()), given))]
        for step in chain.steps:
            values.append(moved(reference.apply(chain, step, values, given, keep_dtype=True)))
    assert values[-1] is not None
    return values[-1]


def agrees(drawn: Drawn) -> None:
    COUNTS["chains"] += 1
    COUNTS["under autocast"] += drawn.is_autocast
    points = []
    for seed in range(POINTS):
        tensors = drawn.tensors(seed)
        before = [tensor.clone() for tensor in tensors]
        with ways_of(drawn) as machine:
            outcome = lower(drawn.chain, problem_of(tensors), machine, even_if_slower=True)
            refused = error_of(reference.evaluate, drawn.chain, tensors)
            if refused is not None:
                assert error_of(execute, drawn.chain, outcome, tensors) is refused
                COUNTS[f"refused by PyTorch ({refused.__name__})"] += 1
                return
            ours = execute(drawn.chain, outcome, tensors)
            right = [before[slot].clone() if slot in drawn.chain.moved else t for slot, t in enumerate(tensors)]
            theirs = reference.evaluate(drawn.chain, right, moves=True)
            _check_what_moved(drawn, tensors, before, right)
            truth = reference.evaluate(drawn.chain, tensors, dtype=torch.float64)
        assert (ours.dtype, ours.shape, strides(ours)) == (theirs.dtype, theirs.shape, strides(theirs))
        problem = nonfinite_problem(ours, theirs, truth, str(drawn.nonfinite))
        assert problem is None, problem
        if not isinstance(outcome, Plan):
            assert outcome.reasons
            assert same_bits(ours, theirs)
            COUNTS[f"left to PyTorch ({outcome.reasons[0]})"] += 1
            return
        # Under autocast a result may be wider than what it was computed in.
        moved = perturbed(drawn.chain, before, getattr(torch, drawn.dtype) if drawn.is_autocast else ours.dtype, seed)
        deviations = [_deviation(y, truth) for y in (ours, theirs, moved)]
        if ours.dtype == torch.float64:  # as the truth: only what rounding does to it can be compared
            size = max(1.0, scale_of(truth, ours.dtype).rms, reduced_size(drawn.chain, tensors))
            assert deviations[0].errors.worst <= 1e-12 * size + 1e3 * deviations[2].errors.worst
        points.append(Measured(scale_of(truth, ours.dtype), *deviations, floor=reduced_size(drawn.chain, tensors)))
    if drawn.dtype == "float64":
        COUNTS["fused and right"] += 1
        return
    judged = judge("output", points, slack=OFFSET_SLACK if drawn.family == "large offset" else LUCK)
    assert judged.outcome != "wrong", judged.reasons
    COUNTS["fused and right" if judged.outcome == "right" else "fused, truth too flat to tell"] += 1


def _check_what_moved(drawn: Drawn, tensors: list[Tensor], before: list[Tensor], right: list[Tensor]) -> None:
    """Running statistics are as PyTorch leaves them; everything else is as it was, and they are put back as well."""
    chain = drawn.chain
    fixed = [slot for slot in range(len(tensors)) if slot not in chain.moved]
    assert all(same_bits(tensors[slot], before[slot]) for slot in fixed), "an input was changed"
    first = next((step for step in chain.steps if isinstance(step, Normalize)), None)
    for slot in chain.moved:
        now, true = tensors[slot].clone(), right[slot]
        tensors[slot].copy_(before[slot])
        # Another norm before it, or a large offset, may have made rounding errors as large as the statistics.
        if first is not None and first.over == "batch" and drawn.family != "large offset":
            eps = 200 * torch.finfo(now.dtype).eps
            size = 1 + float(true.abs().nan_to_num(posinf=0.0).max())
            torch.testing.assert_close(now, true, rtol=eps, atol=eps * size, equal_nan=True)
            COUNTS["running statistics right"] += 1


def reduced_size(chain: Chain, tensors: list[Tensor]) -> float:
    """The size of what a reduction adds up, where there is one: its result may vanish in truth, its rounding not."""
    for number, step in enumerate(chain.steps):
        if isinstance(step, Reduce):
            with torch.no_grad():
                before = dataclasses.replace(chain, steps=chain.steps[:number])
                value = reference.evaluate(before, tensors, dtype=torch.float64)
            size = float(value[torch.isfinite(value)].square().mean().nan_to_num().sqrt())
            return size * math.sqrt(value[0].numel()) if step.op == "sum" else size
    return 0.0


def _deviation(result: Tensor, truth: Tensor) -> Deviation:
    """Where the truth is finite; what is not has been compared before."""
    kept_ones = torch.isfinite(truth) & torch.isfinite(result)
    return deviation(result[kept_ones], truth[kept_ones]) if kept_ones.any() else Deviation(Errors(0.0, 0.0), 0.0)


# What the search found, kept.
FOUND = [
    # The caller's tensor was centred in place: detach had made no new value.
    Drawn(Builder(2).op("detach").norm(None, affine=False).reduce("mean", "space").chain(), (1, 1, 1, 2)),
    # The strides of what is pooled, and of what follows.
    Drawn(
        Builder(2, conv(2, (2, 3), 1)).reduce("adaptive_avg_pool", "space", True).op("relu").chain(),
        (1, 2, 1, 2),
        layout="channels_last",
    ),
    # A channel that is constant after the clamp: its mean was rounded, and the norm multiplied that by 316.
    Drawn(
        Builder(2, conv(2, (1, 2), 1, bias=False)).op("clamp_min", bound=0.1).norm(None, affine=False).chain(),
        (2, 1, 1, 7),
        family="hierarchical",
        as_large=True,
    ),
    # One channel fits both layouts, and its strides chose PyTorch's cancelling kernel.
    Drawn(
        Builder(2, conv(2, (3, 1), 1, bias=False)).norm(None, affine=False).chain(),
        (1, 3, 1, 4),
        layout="channels_last",
        family="hierarchical",
    ),
    # A value minus itself, in place.
    Drawn(Builder(2).op("relu").op("rsub", Value(1)).op("add", "full").chain(), (2, 3, 4, 5), nonfinite=math.inf),
    # Written as tensor / value, with the tensor in another layout.
    Drawn(
        Builder(3, conv(3, (1, 2), 2, transposed=True)).op("abs").op("add", 0.5).op("rdiv", "full").chain(),
        (1, 1, 1, 1, 1),
        layout="channels_last",
    ),
    # An infinity's running mean became NaN.
    Drawn(
        Builder(2).batch_norm(affine=False, running=True).reduce("mean", "space").chain(),
        (1, 1, 1, 2),
        nonfinite=math.inf,
    ),
    # A running variance had lost digits: the mean was subtracted in 16 bits.
    Drawn(
        Builder(3, dataclasses.replace(conv(3, (1, 2), transposed=True, bias=False), kernel=(2, 1, 1)))
        .batch_norm(affine=False, running=True)
        .norm(None, affine=False)
        .reduce("mean", "space")
        .chain(),
        (1, 1, 1, 1, 1),
        dtype="bfloat16",
        parameters="float32",
    ),
]


FAR = Drawn(
    Builder(2, conv(2, (3, 4), 1)).norm(2).chain(), (2, 3, 6, 7), family="large offset", as_large=True, in_slabs=True
)


@pytest.mark.parametrize("drawn", FOUND, ids=lambda d: str(d.chain))
def test_what_was_found_once_stays_right(drawn: Drawn) -> None:
    agrees(drawn)


@pytest.mark.parametrize(
    ("drawn", "where", "name", "fault"),
    [
        (FOUND[0], cpu, "_share_memory", lambda *_: False),
        (FAR, moments, "_FAR", math.inf),
        (FOUND[4], cpu, "IN_PLACE", {"rsub": lambda x, y: x.neg_().add_(y)}),
    ],
    ids=["an input overwritten", "a variance that cancels", "a value read after it was overwritten"],
)
def test_a_fault_is_seen(drawn: Drawn, where: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: two of what the search found, put back, and one more."""
    agrees(drawn)
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(AssertionError):
        agrees(drawn)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=ASKED is None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
)
@given(draws())
def test_random_chains_are_right(drawn: Drawn) -> None:
    note(repr(drawn))
    agrees(drawn)
