"""Checks what runs at a site against float64: the same plan, kernels and tiles, on the problem that they are for.

The chain runs on its whole batch. The truth is computed for a few samples, different ones at every point: float64 costs
far more than the kernels do, and a sample's result must be right whatever the other samples hold. Only if one whole
sample exceeds the limits below, a crop of it is checked, with the plan for that crop.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from postlude import encoded, hardware
from postlude.chain import Chain
from postlude.check.budget import MIN_POINTS
from postlude.check.draws import Family
from postlude.check.effort import Budget, affordable_shape, is_affordable
from postlude.check.points import ChainPoint, tensors_like
from postlude.check.verdict import Errors, Judged, Verdict
from postlude.check.verify import verify_chain
from postlude.code_hash import source_digest
from postlude.files import read_kept, write_kept
from postlude.plan import Problem, lower, problem_of
from postlude.plan.barriers import takes_the_batch
from postlude.plan.problem import empty, result_shape
from postlude.plan.rules import FOLDED, rules_of
from postlude.run.chain_run import laid_out
from postlude.run.crop import cut_space, of_batch
from postlude.run.execute import call as call_runner
from postlude.run.execute import call_plain, execute
from postlude.run.ledger import PlannedRun

RANDOM_POINTS = 5
MOST_SAMPLES = 3  # for which the truth is computed at one point
HEAVY = 1 << 22  # elements of a weight that is drawn once, for all random points
LARGE = 1 << 20  # elements of a result that tell as much as five points of a small one
# Limits of the truth's cost. An H200 computes float64 convolutions with gradients at 1 to 5 TFLOP/s, so this takes a
# second or two; two CPU cores reach 10 GFLOP/s.
FLOPS = {"cuda": 4e12, "cpu": 2e10}
ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 23}  # unless memory is short
BUFFERS = 16  # float64 buffers of the largest value's size that exist at a time during a check


class SiteCheck:
    """Judges calls, each once: verdicts are remembered in this process and, unless they are "wrong", on disk."""

    def __init__(self) -> None:
        self.known: dict[str, Verdict] = {}

    def __call__(self, call: PlannedRun, tensors: Sequence[Tensor] | None) -> Verdict:
        key = _key(call)
        if key not in self.known:
            kept = _read(key)
            self.known[key] = _judge(call, tensors) if kept is None else kept
            if kept is None and self.known[key].outcome != "wrong":
                _write(key, self.known[key])
        return self.known[key]


check_site = SiteCheck()


def _judge(call: PlannedRun, tensors: Sequence[Tensor] | None) -> Verdict:
    given = _drawn(call) if tensors is None else [tensor.detach() for tensor in tensors]
    budget, is_large = _budget(call.problem), _is_large(call)
    samples, run, among, notes = _piece(call, given, budget, _count(is_large))
    device = given[0].device
    random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with random, torch.autocast(device.type, enabled=False), torch.set_grad_enabled(call.plan.trains):
        verdict = verify_chain(
            run,
            call.chain,
            _points(call.chain, samples, is_large),
            call.problem.precision,
            backward=call.needs if call.plan.trains else False,
            tells_infinities=FOLDED not in rules_of(call.plan),
            least=1 if is_large else MIN_POINTS,
            among=among,
        )
    return replace(verdict, notes=(*verdict.notes, *notes))


def _points(chain: Chain, samples: Sequence[Tensor], is_large: bool) -> list[ChainPoint | Sequence[Tensor]]:
    """The points: what the site received, and random ones, with and without a large offset.

    A heavy weight is the same at all random points. To draw, copy and convert 67 million numbers again for each point
    takes three quarters of a check on a CPU, and they tell nothing new: each output has weights of its own already.
    """
    plain, offset = (1, 1) if is_large else (RANDOM_POINTS, RANDOM_POINTS)
    points: list[ChainPoint | Sequence[Tensor]] = [samples]
    weight: Tensor | None = None
    series: list[tuple[Family | None, int]] = [(None, plain), ("large offset", offset)]
    for family, count in series:
        for seed in range(count):
            drawn = tensors_like(chain, samples, seed, family, weight)
            points.append(drawn if family is None else ChainPoint(drawn, family))
            weight = _heavy_weight(chain, drawn)
    return points


def _heavy_weight(chain: Chain, tensors: Sequence[Tensor]) -> Tensor | None:
    weights = [one for one, role in zip(tensors, chain.roles) if role == "weight" and one.numel() >= HEAVY]
    return weights[0] if weights else None


def _count(is_large: bool) -> int:
    return 3 if is_large else 1 + 2 * RANDOM_POINTS


def _is_large(call: PlannedRun) -> bool:
    """Whether few points are enough, because the result is large for each sample."""
    return math.prod(result_shape(call.chain, call.problem)[1:]) >= LARGE


def _budget(problem: Problem) -> Budget:
    room = hardware.available_bytes(problem.place) / 2 / (8 * BUFFERS)
    return Budget(FLOPS.get(problem.device, FLOPS["cpu"]), min(room, ELEMENTS.get(problem.device, ELEMENTS["cpu"])))


Run = Callable[[Chain, Sequence[Tensor]], Tensor]


def _piece(
    call: PlannedRun, tensors: Sequence[Tensor], budget: Budget, points: int
) -> tuple[list[Tensor], Run, Run | None, tuple[str, ...]]:
    """The tensors for which the truth is computed, the candidate's function of them, PyTorch's if other samples are
    computed with them, and a note for the verdict."""
    chain, problem, (batch, *rest) = call.chain, call.problem, tensors[0].shape
    counts = [batch, *range(min(batch - 1, MOST_SAMPLES), 0, -1)] if not takes_the_batch(chain) else [batch]
    for count in counts:
        if is_affordable(chain, (count, *rest), points, budget, backward=call.plan.trains):
            if count == batch:
                return list(tensors), lambda _, given: call_runner(call.runner, given), None, ()
            runners = (lambda given: call_runner(call.runner, given), lambda given: call_plain(chain, given))
            ours, pytorchs = (_Embedded(runner, tensors, count) for runner in runners)
            return of_batch(chain, tensors, slice(count)), ours, pytorchs, ()
    shape = affordable_shape(chain, (min(batch, 2), *rest), points, budget, backward=call.plan.trains)
    note = f"checked on a crop of {'×'.join(map(str, shape))}: float64 for a whole sample is more than the budget"

    def run(chain: Chain, given: Sequence[Tensor]) -> Tensor:
        planned = problem_of(given, *problem.settings)
        machine = hardware.machine_for(problem.place)
        return execute(chain, lower(chain, planned, machine, even_if_slower=True), given)

    return cut_space(chain, of_batch(chain, tensors, slice(shape[0])), shape[2:]), run, None, (note,)


class _Embedded:
    """Runs a chain on its whole batch with a few samples replaced, at different places for each question."""

    def __init__(self, runner: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor], count: int) -> None:
        self.runner, self.tensors, self.count = runner, tensors, count
        self.seen: dict[int, int] = {}  # by the first tensor's address: a repeated question gets the same places

    def __call__(self, _: Chain, samples: Sequence[Tensor]) -> Tensor:
        turn = self.seen.setdefault(samples[0].data_ptr(), len(self.seen))
        batch = self.tensors[0].shape[0]
        step = max(1, (batch - 1) // max(1, self.count - 1))
        places = [(turn + number * step) % batch for number in range(self.count)]
        where = torch.tensor(places, device=self.tensors[0].device)
        # index_copy may change the layout, and the plan is not for that one.
        whole = [
            sample
            if sample.shape == full.shape
            else laid_out(full.index_copy(0, where, sample), full.shape, full.stride(), full.dtype)
            for sample, full in zip(samples, self.tensors)
        ]
        return self.runner(whole).index_select(0, where)


def _drawn(call: PlannedRun) -> list[Tensor]:
    """Random tensors for the problem, if there are none yet."""
    blank = [empty(spec, call.chain.dims, call.problem.place) for spec in call.problem.tensors]
    return list(tensors_like(call.chain, blank, seed=RANDOM_POINTS))


def _key(call: PlannedRun) -> str:
    """A key of everything on which the verdict depends; for a GPU its card, not its index."""
    problem, card = replace(call.problem, index=0), hardware.machine_for(call.problem.place).card
    what = (
        call.chain.dumps(),
        repr(problem),
        call.needs,
        repr(call.plan),
        str(card),
        source_digest(),
        json.dumps(hardware.versions()),
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _path(key: str) -> Path | None:
    folder = hardware.cache_folder()
    return None if folder is None else folder / f"site-{key}.verdict"


def _read(key: str) -> Verdict | None:
    path = _path(key)
    kept = None if path is None else read_kept(path)
    if kept is None:
        return None
    found: Verdict = encoded.loads(kept.decode(), {one.__name__: one for one in (Verdict, Judged, Errors)})
    return found


def _write(key: str, verdict: Verdict) -> None:
    path = _path(key)
    if path is not None:
        write_kept(path, encoded.dumps(verdict).encode())
