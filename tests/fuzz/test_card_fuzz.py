"""Random chains through the GPU's passes, forward and backward, by Triton's interpreter in float64.

`POSTLUDE_FUZZ=500` draws that many, anew every time.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from torch import Tensor

from fuzz.drawing import Drawn, draws, under_autocast
from fuzz.test_cpu_fuzz import perturbed, reduced_size
from postlude import reference
from postlude.chain import Chain
from postlude.check import scale_of, tensors_for
from postlude.check.compare import nonfinite_problem
from postlude.plan import Refusal, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.run.execute import prepare
from run.test_gpu import CARD, fused

ASKED = os.environ.get("POSTLUDE_FUZZ")
EXAMPLES = int(ASKED or 30)
COUNTS: Counter[str] = Counter()
pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def _library_convolution(noted: Callable[[str], None]) -> Iterator[None]:
    """The interpreter takes seconds for a product of ours, which have tests of their own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("postlude.plan.gpu.own_convolution", lambda *_: "not in this test")
        yield
    report = ", ".join(f"{count} {what}" for what, count in sorted(COUNTS.items(), key=lambda item: -item[1]))
    noted(f"fuzz of the GPU's passes: {report}")


def agrees(drawn: Drawn) -> None:
    COUNTS["chains"] += 1
    drawn = dataclasses.replace(drawn, dtype="float64")
    chain, tensors = drawn.chain, drawn.tensors(0)
    with torch.no_grad():
        plan = lower_for_gpu(chain, problem_of(tensors), CARD, even_if_slower=True)
        if isinstance(plan, Refusal):
            COUNTS[f"left to PyTorch ({plan.reasons[0]})"] += 1
            return
        ours, truth = fused(chain, tensors), reference.evaluate(chain, tensors)
        moved = perturbed(chain, tensors, torch.float64, 0)
    assert (ours.dtype, ours.shape) == (truth.dtype, truth.shape)
    problem = nonfinite_problem(ours, truth, truth, str(drawn.nonfinite))
    assert problem is None, problem
    finite = torch.isfinite(truth) & torch.isfinite(moved)
    size = max(1.0, scale_of(truth, torch.float64).rms, reduced_size(chain, tensors))
    allowed = 1e-11 * size + 1e4 * float((moved - truth)[finite].abs().max()) if finite.any() else 0.0
    assert not finite.any() or float((ours - truth)[finite].abs().max()) <= allowed
    COUNTS["right"] += 1
    gradients_agree(drawn)


def gradients_agree(drawn: Drawn) -> None:
    """Every gradient of a training step, as a part of its largest element. A chain may have no gradient but rounding:
    what is less than 1e-4 of the result's gradient is measured by that."""
    chain = drawn.chain
    tensors = tensors_for(chain, drawn.shape, torch.float64, "cpu", 0, "normal", drawn.layout)
    problem = dataclasses.replace(problem_of(tensors), device="cuda", needs_grad=True)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    if isinstance(plan, Refusal):
        COUNTS[f"trained by PyTorch ({plan.reasons[0]})"] += 1
        return
    runs = (prepare(chain, plan), partial(reference.evaluate, chain))
    ours, truth = (_gradients(run, chain, tensors) for run in runs)
    if not truth:  # all of it is detached
        assert not any(one.count_nonzero() for one in ours)
        return
    least = max(1e-4, *(float(one.abs().max()) for one in truth if one.numel()))
    assert all(float((one - true).abs().max()) <= 1e-7 * least for one, true in zip(ours, truth) if one.numel())
    COUNTS["right in their gradients"] += 1


def _gradients(run: Callable[[list[Tensor]], Tensor], chain: Chain, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of all tensors, for one of the result that is of about 1; none where none is needed."""
    leaves = [tensor.clone().requires_grad_(slot not in chain.moved) for slot, tensor in enumerate(tensors)]
    result = run(leaves)
    if not result.requires_grad:
        return []
    dy = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=result.dtype)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return list(torch.autograd.grad(result, wanted, dy, allow_unused=True, materialize_grads=True))


DRAWN = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=ASKED is None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
)


@DRAWN
@given(draws(on_card=True))
def test_random_chains_are_right(drawn: Drawn) -> None:
    note(repr(drawn))
    agrees(drawn)


def agrees_under_autocast(drawn: Drawn) -> None:
    """In float16, the result no further from float64 than what eager and one rounding of every value make of it."""
    chain, tensors = drawn.chain, drawn.tensors(0)
    COUNTS["under autocast"] += drawn.is_autocast
    with torch.no_grad():
        plan = lower_for_gpu(chain, problem_of(tensors), CARD, even_if_slower=True)
        if isinstance(plan, Refusal):
            COUNTS[f"left to PyTorch ({plan.reasons[0]})"] += 1
            return
        ours, theirs = fused(chain, tensors), reference.evaluate(chain, tensors)
        truth = reference.evaluate(chain, tensors, dtype=torch.float64)
        moved = perturbed(chain, tensors, torch.float16, 0)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    finite = torch.isfinite(truth) & torch.isfinite(theirs) & torch.isfinite(moved)
    assert bool(torch.isfinite(ours[finite]).all())
    size = max(scale_of(truth, torch.float16).rms, reduced_size(chain, tensors))
    errors = [float((t.double() - truth)[finite].abs().max()) if finite.any() else 0.0 for t in (ours, theirs, moved)]
    assert errors[0] <= 2 * errors[1] + 4 * errors[2] + 2e-3 * size
    COUNTS["right under autocast"] += 1


@DRAWN
@given(draws(on_card=True).flatmap(lambda drawn: under_autocast(in_halves(drawn), ("cuda",))))
def test_random_chains_under_autocast_are_right(drawn: Drawn) -> None:
    note(repr(drawn))
    agrees_under_autocast(drawn)


def in_halves(drawn: Drawn) -> Drawn:
    """Numbers that float16 holds: an offset of many spreads would leave nothing of them."""
    return dataclasses.replace(drawn, dtype="float16", family="normal", nonfinite=None)
