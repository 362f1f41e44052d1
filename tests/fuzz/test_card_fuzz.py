"""Random chains through the GPU's passes, forward and backward, by Triton's interpreter in float64.

`POSTLUDE_FUZZ=500` draws that many, anew every time.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings

from cases import Case
from fuzz.drawing import Drawn, draws, under_autocast
from fuzz.test_cpu_fuzz import perturbed, reduced_size
from postlude import reference
from postlude.check import scale_of
from postlude.check.compare import nonfinite_problem
from postlude.plan import Refusal, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.program import last_fused_step
from postlude.reverse import unsupported_gradient
from run.test_gpu import CARD, fused
from run.test_gradient import compared

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
    leaf = tensors[0].detach().clone().requires_grad_()
    has_gradient = reference.evaluate(chain, [leaf, *tensors[1:]]).requires_grad  # not where all of it is detached
    if has_gradient and drawn.nonfinite is None and unsupported_gradient(chain, last_fused_step(chain)) is None:
        assert compared(Case("drawn", chain, drawn.shape), torch.float64, drawn.layout, nothing=1e-4) < 1e-7
        COUNTS["right in their gradients"] += 1


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
