"""Our own plans on a real card, in training: none is called wrong, whatever rounding does at a kink.

`POSTLUDE_HONEST=1000` runs that many.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from cases import CHAIN_61, Builder, conv
from check.honest import DTYPES
from postlude import hardware
from postlude.chain import Chain
from postlude.check import chain_sides
from postlude.check.draws import Family
from postlude.check.points import ChainPoint, tensors_for
from postlude.check.verdict import Verdict
from postlude.check.verify import verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.run.execute import Runner, prepare

pytestmark = pytest.mark.gpu
RUNS = int(os.environ.get("POSTLUDE_HONEST", "200"))
FAMILIES: tuple[Family, ...] = ("hierarchical", "normal", "uniform", "hierarchical", "normal", "hierarchical")
# Large enough that some value of nearly every point lies within rounding of a kink.
CHAINS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "61": (CHAIN_61, (2, 64, 16, 16, 16)),
    "leaky_relu after a norm": (
        Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain(),
        (2, 32, 24, 24, 24),
    ),
    "clamp, norm, relu": (
        Builder(3, conv(3, (32, 48), padding=1)).op("clamp", low=-0.5, high=0.5).norm(8).op("relu").chain(),
        (2, 32, 20, 20, 20),
    ),
    "no norm": (
        Builder(2, conv(2, (32, 64), padding=1)).op("leaky_relu", slope=0.1).op("mul", "channel").op("relu").chain(),
        (4, 32, 64, 64),
    ),
}


def points(chain: Chain, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Iterator[ChainPoint]:
    for place, family in enumerate(FAMILIES):
        yield ChainPoint(tensors_for(chain, shape, dtype, "cuda", 1000 * seed + place, family), family)


def plan_for(name: str, precision: str) -> Runner:
    chain, shape = CHAINS[name]
    tensors = tensors_for(chain, shape, DTYPES[precision], "cuda")
    problem = problem_of(tensors, precision if precision in ("fp32", "tf32") else "auto")
    plan = lower(
        chain, dataclasses.replace(problem, needs_grad=True), hardware.machine_for("cuda"), even_if_slower=True
    )
    assert isinstance(plan, Plan), plan
    return prepare(chain, plan)


def verdict_on(run: Runner, name: str, precision: str, seed: int) -> Verdict:
    chain, shape = CHAINS[name]

    def fused(_: Chain, tensors: Sequence[Tensor]) -> Tensor:
        return run(tensors)

    asked = points(chain, shape, DTYPES[precision], seed)
    return verify_chain(fused, chain, asked, precision, backward=True, nonfinite=False)


def test_no_plan_is_called_wrong(noted: Callable[[str], None]) -> None:
    combinations = [(name, precision) for name in CHAINS for precision in DTYPES]
    wrong, doubted = {}, 0
    for place, (name, precision) in enumerate(combinations):
        run = plan_for(name, precision)
        for seed in range(place, RUNS, len(combinations)):
            verdict = verdict_on(run, name, precision, seed)
            doubted += verdict.outcome == "cannot tell"
            if verdict.outcome == "wrong":
                wrong[name, precision, seed] = str(verdict)
    noted(f"{RUNS} honest runs of our plans: {len(wrong)} called wrong, {doubted} undecided")
    assert not wrong, wrong


def test_how_many_would_be_without_sparing(noted: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """No assertion on the number, which is luck; that it is printed says whether the runs above tried anything."""
    monkeypatch.setattr(chain_sides, "all_ambiguous", lambda *_: None)
    run = plan_for("61", "fp32")
    verdicts = [verdict_on(run, "61", "fp32", seed) for seed in range(16)]
    noted(
        f"16 runs of 61 in fp32 without sparing kinks: {sum(one.outcome == 'wrong' for one in verdicts)} called wrong"
    )
    assert len(verdicts) == 16
