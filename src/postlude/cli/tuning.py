"""The search for better tiles: a candidate is checked first, timed in turns, and kept only if it is clearly faster."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.check.clock import Estimate, ratio, rotating, time_interleaved
from postlude.check.points import tensors_for
from postlude.plan import Plan, Problem
from postlude.plan.candidates import Candidate
from postlude.run import launch
from postlude.run.execute import prepare
from postlude.run.nvrtc import CudaError

FINALISTS = 3
SCREENING = {"rounds": 5, "min_window_s": 0.02}
FINAL = {"rounds": 15, "min_window_s": 0.05}
LEAST_GAIN = 1.01  # the lower end of the gain's interval must be above this
# How far two tiles' results may differ, relative to their size: only the order of summation differs.
_APART = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}
_WORST = 16  # times as much for a single element
_SMALL = 1e-2  # of the largest result: results that should be zero are measured relative to this


class UnfitError(Exception):
    """A plan that this card cannot run."""


@dataclass(frozen=True)
class Results:
    tensors: list[Tensor]
    spills: int = 0  # spilled registers of all kernels


class TileBench(Protocol):
    """What runs plans and times them."""

    def results(self, plan: Plan) -> Results:
        """The results of one call; raises UnfitError if the card cannot run it."""

    def race(self, plans: Mapping[str, Plan], rounds: int, min_window_s: float) -> dict[str, Estimate]: ...


@dataclass(frozen=True)
class Found:
    """What came of one use."""

    best: Candidate | None  # None: nothing is better than the present tile
    gain: Estimate | None  # of the best finalist, kept or not
    tried: int
    dropped: Counter[str] = field(default_factory=Counter)  # reasons, and how often


def search(
    bench: TileBench, untuned: Plan, present: Plan, given: Sequence[Candidate], progress: Callable[[str], None]
) -> Found:
    """The best of the candidates for one use, compared with the present plan."""
    dropped: Counter[str] = Counter()
    truth = bench.results(untuned)
    right: dict[str, Candidate] = {}
    for number, candidate in enumerate(given, 1):
        progress(f"candidate {number} of {len(given)}: {candidate}")
        try:
            results = bench.results(candidate.plan)
            problem = difference(results.tensors, truth.tensors, untuned.value.dtype)
            if problem is None and results.spills > truth.spills:
                problem = "spills registers"
        except UnfitError as error:
            problem = str(error)
        if problem is None:
            right[str(candidate)] = candidate
        else:
            dropped[problem] += 1
    if not right:
        return Found(None, None, len(given), dropped)
    progress(f"timing {len(right)} candidates")
    times = bench.race({name: one.plan for name, one in right.items()}, **SCREENING)  # type: ignore[arg-type]
    finalists = sorted(right, key=lambda name: times[name].median)[:FINALISTS]
    progress("timing the best ones beside the current tile")
    final = {"": present, **{name: right[name].plan for name in finalists}}
    times = bench.race(final, **FINAL)  # type: ignore[arg-type]
    best = min(finalists, key=lambda name: times[name].median)
    gain = ratio(times[""], times[best])
    return Found(right[best] if gain.low > LEAST_GAIN else None, gain, len(given), dropped)


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor], dtype: str) -> str | None:
    """Why two results differ by more than rounding, or None."""
    allowed = _APART[dtype]
    sizes = [_rms(tensor) for tensor in theirs]
    for one, other, size in zip(ours, theirs, sizes, strict=True):
        if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
            return "its result differs from the untuned tiles'"
        apart = (one.double() - other.double()).nan_to_num_(0.0, 0.0, 0.0).abs()
        scale = max(size, _SMALL * max(sizes), 1e-30)
        if _rms(apart) > allowed * scale or (apart.numel() and float(apart.max()) > _WORST * allowed * scale):
            return "its result differs from the untuned tiles'"
    return None


def _rms(tensor: Tensor) -> float:
    finite = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


class CardBench:
    """The real bench: one chain and problem on the current GPU."""

    def __init__(self, chain: Chain, problem: Problem, cache_bytes: int) -> None:
        self.chain, self.problem = chain, problem
        sets = 1 + min(3, 2 * cache_bytes // max(1, sum(spec.bytes for spec in problem.tensors)))
        self.inputs = [self._tensors(seed) for seed in range(sets)]
        self.dy: Tensor | None = None

    def _tensors(self, seed: int) -> list[Tensor]:
        x = self.problem.x
        layout: Any = x.layout
        made = tensors_for(self.chain, x.shape, torch.float32, "cuda", seed, "normal", layout)
        tensors = [t.to(getattr(torch, spec.dtype)) for t, spec in zip(made, self.problem.tensors)]
        return [t.requires_grad_(self.problem.needs_grad) for t in tensors]

    def results(self, plan: Plan) -> Results:
        try:
            with _spills() as spilled:
                tensors = self._step(plan)(*self.inputs[0])
            torch.cuda.synchronize()
        except CudaError as error:
            raise UnfitError("does not compile for this card") from error
        except Exception as error:
            if type(error).__name__ not in ("OutOfResources", "CompilationError", "PTXASError", "OutOfMemoryError"):
                raise
            raise UnfitError("does not fit this card") from error
        return Results(tensors, sum(spilled))

    def race(self, plans: Mapping[str, Plan], rounds: int, min_window_s: float) -> dict[str, Estimate]:
        variants = {name: rotating(self._step(plan), self.inputs) for name, plan in plans.items()}
        return time_interleaved(variants, rounds=rounds, min_window_s=min_window_s)

    def _step(self, plan: Plan) -> Callable[..., list[Tensor]]:
        runner = prepare(self.chain, plan)

        def forward(*tensors: Tensor) -> list[Tensor]:
            with torch.no_grad():
                return [runner(tensors)]

        def step(*tensors: Tensor) -> list[Tensor]:
            y = runner(tensors)
            if self.dy is None:
                generator = torch.Generator("cuda").manual_seed(0)
                self.dy = torch.randn(y.shape, generator=generator, device="cuda").to(y.dtype)
            found = torch.autograd.grad(y, tensors, self.dy, allow_unused=True, materialize_grads=True)
            return [y.detach(), *found]

        return step if plan.trains else forward


@contextlib.contextmanager
def _spills() -> Iterator[list[int]]:
    """Collects the spilled registers of every Triton kernel that is launched for the first time inside."""
    found: list[int] = []

    def watch(_: str, compiled: Any) -> None:
        found.append(int(getattr(compiled, "n_spills", 0) or 0))

    launch.watchers.append(watch)
    try:
        yield found
    finally:
        launch.watchers.remove(watch)
