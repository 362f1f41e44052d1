"""One problem of KernelBench's format as variants that take turns: prepared first, timed when it is its turn."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rows import CPU_SOURCES, GPU_SOURCES, TRAINING_SOURCES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import postlude
from postlude import cards, problem_file
from postlude.check import clock, records
from postlude.check.ceilings import held_bytes
from postlude.check.floor import Ceilings, Work
from postlude.check.modes import pytorch_switches
from postlude.cli.other_shapes import OTHER, at_other_shapes
from postlude.cli.variants import AUTOTUNED, Runnable, training_step
from postlude.errors import first_line
from postlude.hardware import machine_for
from postlude.optimized import Optimized
from postlude.plan import Plan
from postlude.plan.through import Through
from postlude.problem_file import ProblemFile
from postlude.report.model import COMPILE, EAGER, POSTLUDE
from postlude.run.ledger import Ledger

MODES = {"forward": "forward", "train": "training step"}  # and what records call them
VARIANTS = {"eager": EAGER, "compile": COMPILE, "max-autotune": AUTOTUNED, "postlude": POSTLUDE}
WINDOW_S = 0.02
QUICK, QUICK_S, IDLE_LIMIT_S = 50, 0.5e-3, 20.0  # kernels in a row, of so many seconds each; a time slice takes 2 ms
PRODUCTS = {"fp32": 3, "tf32": 1}  # of half precision that one of the mode's takes on tensor cores


@dataclass(frozen=True)
class Task:
    """What is asked of one problem."""

    file: str
    modes: tuple[str, ...] = ("forward",)
    variants: tuple[str, ...] = ("eager", "compile", "postlude")
    precision: str = "tf32"
    shapes: str = "own"
    rounds: int = 7
    device: str = "cuda"

    @property
    def name(self) -> str:
        return Path(self.file).stem

    def recorded_mode(self, mode: str) -> str:
        return MODES[mode] + (" at other shapes" if self.shapes == OTHER else "")

    def opened(self) -> ProblemFile:
        problem = problem_file.load(self.file)
        return at_other_shapes(problem) if self.shapes == OTHER else problem

    def sources(self, mode: str) -> Sequence[Path]:
        """What a time depends on."""
        if self.device == "cpu":
            return CPU_SOURCES
        return TRAINING_SOURCES if mode == "train" else GPU_SOURCES


@dataclass(frozen=True)
class Outline:
    """What is known of a problem without running it: its inputs' shapes, the work of each mode, and the memory that
    its variants need at a time."""

    shape: str
    dtype: str
    work: dict[str, Work]
    memory: int


class _Values(TorchDispatchMode):
    """Bytes of all that operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_made = not any(one.alias_info for one in func._schema.returns)  # neither a view nor changed in place
        if isinstance(result, Tensor) and is_made:
            self.bytes += result.numel() * result.element_size()
        return result


def outline_of(task: Task) -> Outline:
    """Counted on the meta device. In a step every tensor that is given is read once in each pass, the result's
    gradient is read, and every gradient is written."""
    with torch.device("meta"):
        problem = task.opened()
        model, inputs = problem.build("meta"), problem.inputs("meta")
        with torch.no_grad(), FlopCounterMode(display=False) as forward, _Values() as values:
            result = model(*inputs)
        given = sum(map(held_bytes, [*(x for x in inputs if isinstance(x, Tensor)), *model.parameters()]))
        own, made = held_bytes(result), values.bytes
        work = {"forward": Work(given + own, int(forward.get_total_flops()))}
        if "train" in task.modes:
            with torch.enable_grad(), FlopCounterMode(display=False) as both:
                training_step(model, torch.empty_like(result))(*inputs)
            work["train"] = Work(3 * given + 2 * own, int(both.get_total_flops()))
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    shape = " ".join("×".join(map(str, tensor.shape)) for tensor in tensors)
    memory = 3 * given + 3 * made if "train" in task.modes else 2 * given + 2 * made
    return Outline(shape, str(tensors[0].dtype).removeprefix("torch."), work, memory)


def floor_seconds(work: Work, precision: str, device: str, is_summed: bool) -> float | None:
    """What the compulsory bytes and operations take at the card's published rates; operations that sums of the input
    take the place of are not compulsory."""
    card = machine_for(device).card if device == "cuda" else None
    if not isinstance(card, cards.Card):
        return None
    products = PRODUCTS.get(precision, 1)
    ceilings = Ceilings(card.rates.bandwidth, card.rates.peak.half / products)
    return Work(work.bytes, 0 if is_summed else work.operations).floor_seconds(ceilings)


@dataclass
class Prepared:
    """Every variant of every mode after its first call."""

    task: Task
    outline: Outline
    inputs: tuple[Any, ...]
    calls: dict[str, dict[str, Runnable]] = field(default_factory=dict)  # by mode, by variant
    found: dict[str, Optimized] = field(default_factory=dict)
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)  # mode and variant, and why

    def measure(self) -> list[records.Record]:
        if self.task.device == "cuda":
            wait_for_an_idle_card()
        rows: list[records.Record] = []
        for mode, calls in self.calls.items():
            with switched(self.task, mode):
                rows += self._timed(mode, calls)
        return rows

    def _timed(self, mode: str, calls: dict[str, Runnable]) -> list[records.Record]:
        found = self.found.get(mode)
        verdict, reasons = ("", "") if found is None else judged(found)
        shown = {name: call for name, call in calls.items() if not (name == POSTLUDE and verdict == "wrong")}
        timings = clock.time_interleaved(
            {name: clock.rotating(call, [self.inputs]) for name, call in shown.items()},
            rounds=self.task.rounds,
            min_window_s=WINDOW_S,
        )
        base, errors = timings.get(EAGER, next(iter(timings.values()))), {} if found is None else errors_of(found)
        rows = []
        for name, timing in timings.items():
            row = self._row(mode, name, errors.get(name))
            times = dict(zip(_TIMES, records.times_of(timing, base), strict=True))
            ours = {"verdict": verdict, "reason": reasons, "launches": launches_of(found)} if name == POSTLUDE else {}
            rows.append(records.Record(**{**row, **times, **ours}))
        if len(shown) < len(calls):
            rows.append(records.Record(**{**self._row(mode, POSTLUDE), "verdict": "wrong", "reason": reasons}))
        missing = {name: why for (of, name), why in self.left_out.items() if of == mode}
        rows += [records.Record(**{**self._row(mode, name), "reason": why}) for name, why in missing.items()]
        return rows

    def _row(self, mode: str, variant: str, error: float | None = None) -> dict[str, Any]:
        task, found = self.task, self.found.get(mode)
        is_summed = found is not None and any(
            isinstance(site.outcome, Plan) and isinstance(site.outcome.own, Through) for site in found.sites
        )
        floor = floor_seconds(self.outline.work[mode], task.precision, task.device, is_summed)
        return {
            **row_of(task, mode, variant, self.outline),
            "floor_ms": None if floor is None else 1e3 * floor,
            "error_rms": error,
        }


_TIMES = ("ms_p20", "ms_p50", "ms_p80", "ms_low", "ms_high", "speedup", "speedup_low", "speedup_high")


def row_of(task: Task, mode: str, variant: str, outline: Outline | None) -> dict[str, Any]:
    """The columns that say what was measured, where and when."""
    shape, dtype = ("", "float32") if outline is None else (outline.shape, outline.dtype)
    return {
        "chain": task.name,
        "shape": shape,
        "dtype": dtype,
        "layout": "contiguous",
        "precision": task.precision,
        "mode": task.recorded_mode(mode),
        "variant": variant,
        "kernel_hash": records.kernel_hash(task.sources(mode)),
        **records.environment(task.device),
    }


@contextmanager
def switched(task: Task, mode: str) -> Iterator[None]:
    """PyTorch's switches for the precision; "auto" leaves its defaults."""
    with torch.set_grad_enabled(mode == "train"), pytorch_switches(task.precision, torch.device(task.device)):
        yield


def prepare(task: Task) -> Prepared:
    """The models share their parameters, and inputs are made on the card: a problem of gigabytes is held once."""
    problem = task.opened()
    with torch.device(task.device):
        inputs = problem.inputs(task.device)
        eager = problem.build(task.device)
        # One for each mode: to optimize a model again changes how it runs in the mode before.
        copies = [problem.build(task.device) if "postlude" in task.variants else None for _ in task.modes]
    for ours in copies:
        if ours is not None:
            ours.load_state_dict(eager.state_dict(keep_vars=True), assign=True)
    ready = Prepared(task, outline_of(task), inputs)
    ways: dict[str, Callable[[], Runnable]] = {
        EAGER: lambda: eager,
        COMPILE: lambda: torch.compile(eager),
        AUTOTUNED: lambda: torch.compile(eager, mode="max-autotune-no-cudagraphs"),
    }
    models = {name: ways[name]() for name in (VARIANTS[word] for word in task.variants) if name in ways}
    for mode, ours in zip(task.modes, copies):
        with switched(task, mode):
            _prepare_mode(ready, mode, eager, models, ours)
        gc.collect()
    return ready


def _prepare_mode(
    ready: Prepared, mode: str, eager: nn.Module, models: dict[str, Runnable], ours: nn.Module | None
) -> None:
    task, inputs = ready.task, ready.inputs
    calls = dict(models)
    if ours is not None:
        with one_check_at_a_time(task.device):
            ready.found[mode] = postlude.optimize(ours, inputs, precision=task.precision)
        calls[POSTLUDE] = ours
    if mode == "train":
        with torch.no_grad():
            dy = torch.randn_like(eager(*inputs))
        calls = {name: training_step(model, dy) for name, model in calls.items()}
    failed = {name: why for name, call in calls.items() if (why := _why_not(name, call, inputs)) is not None}
    ready.calls[mode] = {name: call for name, call in calls.items() if name not in failed}
    ready.left_out |= {(mode, name): why for name, why in failed.items()}


@contextmanager
def one_check_at_a_time(device: str) -> Iterator[None]:
    """Checks in float64 take the memory that they find: processes take turns."""
    honest = Ledger._checked
    lock = Path(tempfile.gettempdir()) / f"postlude-check-{os.getuid()}.lock"

    def checked(*asked: Any) -> Any:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                return honest(*asked)
            finally:
                if device == "cuda":
                    torch.cuda.empty_cache()

    Ledger._checked = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ledger._checked = honest  # type: ignore[method-assign]


def _why_not(name: str, call: Runnable, inputs: Sequence[Any]) -> str | None:
    """The first call; torch.compile may fail alone."""
    try:
        call(*inputs)
    except Exception as error:  # anything between Dynamo and the compiler
        if name not in (COMPILE, AUTOTUNED):
            raise
        return first_line(error)
    return None


def errors_of(found: Optimized) -> dict[str, float]:
    """The worst site's error by the spread, and PyTorch's own there; nothing where no point could tell."""
    judged = [] if found.verdict is None else [one for one in found.verdict.quantities if one.errors and one.own]
    errors = {
        POSTLUDE: max((one.errors.rms for one in judged if one.errors), default=math.nan),
        EAGER: max((one.own.rms for one in judged if one.own), default=math.nan),
    }
    return {name: error for name, error in errors.items() if not math.isnan(error)}


def judged(found: Optimized) -> tuple[str, str]:
    """The verdict on what runs, and its reasons."""
    refused = [f"{site.name}: {reason}" for site in found.sites if not site.is_fused for reason in site.outcome.reasons]
    if found.verdict is not None:
        return found.verdict.outcome, "; ".join(found.verdict.reasons or refused)
    declined = [f"{one.name}: {one.reason}" for one in found.declined]
    return ("not checked" if any(site.is_fused for site in found.sites) else "nothing is fused"), "; ".join(
        refused or declined
    )


def wait_for_an_idle_card() -> None:
    """Waits until small kernels run at once: what other processes had queued when they were stopped still runs, and a
    float64 convolution takes seconds."""
    small, since, quick = torch.zeros(1, device="cuda"), time.monotonic(), 0
    while quick < QUICK and time.monotonic() - since < IDLE_LIMIT_S:
        begin = time.perf_counter()
        small.add_(1)
        torch.cuda.synchronize()
        quick = quick + 1 if time.perf_counter() - begin < QUICK_S else 0


def launches_of(found: Optimized | None) -> int | None:
    sites = [] if found is None else found.sites
    return sum(site.outcome.launches for site in sites if isinstance(site.outcome, Plan))
