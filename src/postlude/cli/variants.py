"""The variants of one model that take turns: PyTorch's own ways at the same precision, Postlude's, a candidate's."""

from __future__ import annotations

import contextlib
import functools
import io
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from postlude import hardware
from postlude.check.clock import Calls, Contestant, CudaEvents, Stopwatch, Window
from postlude.check.isolation import Candidate
from postlude.check.nested import map_tensors
from postlude.check.points import inputs_like
from postlude.check.supply import Supply
from postlude.cli.race import Runnable
from postlude.cli.session import Opened
from postlude.errors import PostludeError, first_line
from postlude.report.model import COMPILE, EAGER

BENCHMARKED, CHANNELS_LAST = "eager, cudnn.benchmark", "eager, channels-last"
AUTOTUNED = "torch.compile, max-autotune"
FORWARD, WITH_GRAPH, STEP = "forward", "forward with gradients", "training step"
SETS = 3
SOONEST_S = 2e-5  # about as soon as a signal can be given
TRIES, FEWEST = 6, 3  # windows until the signal picks a call that nobody could foresee; calls that leave one to pick
LEVELS = ("few", "usual", "all")  # how many of PyTorch's own variants take part


@dataclass(frozen=True)
class Runner:
    """A model in this process, with its inputs in its own layout."""

    name: str
    model: Runnable
    sets: Sequence[tuple[Any, ...]]
    note: str = ""
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def contestant(
        self,
        work: str,
        output: Tensor,
        supply: Supply,
        device: str,
        flush: Callable[[], object] | None = None,
    ) -> Contestant:
        stopwatch: Callable[[], Stopwatch] | None = CudaEvents if device == "cuda" else None
        model = _work(self.model, work, output)
        return Supplied(model, supply, flush, stopwatch, lambda: self._mode(work))

    @contextlib.contextmanager
    def _mode(self, work: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(work != FORWARD))
            stack.enter_context(self.around())
            yield


@dataclass(frozen=True)
class Supplied:
    """A model in this process, on new inputs in every window."""

    model: Runnable
    supply: Supply
    flush: Callable[[], object] | None
    stopwatch: Callable[[], Stopwatch] | None
    around: Callable[[], AbstractContextManager[object]]

    def window(self, first: int, calls: int, kept: int | None) -> Window:
        turns = self.supply.draw(calls)
        given = [turns.inputs(call) for call in range(calls)]
        call = _after(self.flush, lambda index: self.model(*given[index - first]))
        window = Calls(call, stopwatch=self.stopwatch, around=self.around).window(first, calls, kept)
        return window if kept is None else replace(window, inputs=given[kept - first])


@dataclass
class Isolated:
    """A candidate in its process, where nobody knows before a call whether its result will be judged.

    One result is judged in every window, also in those that only find out how many calls fill one: a candidate that
    skips calls there would get windows that are long enough for a few answers to be remembered.
    """

    candidate: Candidate
    supply: Supply
    judge: Callable[[Window], None]
    training: bool = False  # as the variants in this process are: a batch_norm's result depends on it
    pace_s: float = SOONEST_S  # seconds per call in the last window

    def window(self, first: int, calls: int, kept: int | None) -> Window:
        del first, kept  # which result is judged is decided while the calls run
        for _ in range(TRIES if calls > FEWEST else 1):
            turns = self.supply.draw(calls)
            signal_s = _moment(calls * self.pace_s)
            timed = self.candidate.time_calls(turns, training=self.training, signal_s=signal_s)
            self.pace_s = timed.seconds / calls
            self.judge(Window(timed.seconds, calls, timed.call, timed.outputs, inputs=turns.inputs(timed.call)))
            if 0 < timed.call < calls - 1:  # the first call, and the last if no signal came, can be foreseen
                break
        return Window(timed.seconds, calls)


def _moment(expected_s: float) -> float:
    """A random time in a window. Calls on a GPU may all be queued in a small part of it, so early times are likelier
    than late ones in every second window."""
    source, latest = random.SystemRandom(), max(expected_s, SOONEST_S)
    if source.random() < 0.5:
        return source.uniform(0.0, latest)
    return float(SOONEST_S * (latest / SOONEST_S) ** source.random())


@dataclass
class Baselines:
    runners: list[Runner] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, runner: Runner) -> None:
        self.runners.append(runner)


def input_sets(opened: Opened, device: str) -> list[tuple[Any, ...]]:
    """The file's own inputs, drawn twice, and one set whose samples and channels differ, so that mix-ups show."""
    telling = inputs_like(opened.inputs, "hierarchical", seed=SETS)
    return [opened.inputs, opened.problem.inputs(device, seed=1), tuple(telling)]


def with_state(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model


def pytorch_ways(
    opened: Opened, device: str, state: dict[str, Tensor], sets: Sequence[tuple[Any, ...]], level: str
) -> Baselines:
    """Variants of eager PyTorch that people use, and notes on those that do not apply."""
    found = Baselines([Runner(EAGER, opened.model, sets, "PyTorch as it is")])
    if level == "few":
        found.left_out.append("all of PyTorch's own variants except eager: --baselines few")
        return found
    if device == "cuda":
        found.add(Runner(BENCHMARKED, opened.model, sets, "cuDNN tries its algorithms", _cudnn_benchmark))
    else:
        found.left_out.append(f"{BENCHMARKED}: cuDNN only, on a GPU")
    form = _channels_last_form(opened.inputs)
    if form is None:
        found.left_out.append(f"{CHANNELS_LAST}: no input has four or five dimensions")
    else:
        model = with_state(opened.problem.build(device), state).to(memory_format=form)  # type: ignore[call-overload]
        theirs = [map_tensors(lambda x: _to_form(x, form), inputs) for inputs in sets]
        found.add(Runner(CHANNELS_LAST, model, theirs, "weights and inputs in that layout"))
    if level != "all":
        found.left_out.append(f"{AUTOTUNED}: --baselines all adds it and takes minutes")
    return found


def compiled_ways(
    opened: Opened,
    device: str,
    state: dict[str, Tensor],
    sets: Sequence[tuple[Any, ...]],
    works: Sequence[str],
    level: str,
) -> Baselines:
    """torch.compile's modes after their first calls, or the reason why one is missing."""
    if why := no_compiler(device):
        return Baselines(left_out=[f"{COMPILE}: {why}"])
    found = Baselines()
    for name, mode in ((COMPILE, None), (AUTOTUNED, "max-autotune-no-cudagraphs"))[: 2 if level == "all" else 1]:
        model = with_state(opened.problem.build(device), state)
        compiled, why = compile_model(model, device, works, sets[:2], opened.output, mode)
        if compiled is None:
            found.left_out.append(f"{name}: {why}")
        else:
            found.add(Runner(name, compiled, sets))
    return found


def compile_model(
    model: nn.Module,
    device: str,
    works: Sequence[str],
    sets: Sequence[tuple[Any, ...]],
    output: Tensor,
    mode: str | None = None,
) -> tuple[Runnable | None, str]:
    """The model under torch.compile after its first calls, or None and the reason."""
    if why := no_compiler(device):
        return None, why
    compiled = torch.compile(model, mode=mode)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the autotuner prints its tables there
            first_calls(compiled, works, sets, output)
    except Exception as error:  # anything between Dynamo and the C++ compiler
        return None, f"it failed ({first_line(error)})"
    return compiled, ""


def no_compiler(device: str) -> str:
    """Why torch.compile cannot run here; empty if it can."""
    if device == "cpu" and hardware.cpp_compiler() is None:
        return "no C++ compiler here, which torch.compile needs on a CPU"
    if device == "cuda" and not hardware.has_triton():
        return "Triton is not installed, which torch.compile needs on a GPU"
    return ""


def first_calls(model: Runnable, works: Sequence[str], sets: Sequence[tuple[Any, ...]], output: Tensor) -> None:
    for work in works:
        call = _work(model, work, output)
        with torch.set_grad_enabled(work != FORWARD):
            for inputs in sets:
                call(*inputs)


def flusher(device: str) -> Callable[[], object]:
    """A function that flushes the caches by writing twice the size of the last-level cache."""
    size = 2 * hardware.machine_for(device).cache_bytes
    scratch = torch.empty(max(size // 4, 1), device=device)
    return lambda: scratch.fill_(0.0)


def training_step(model: Runnable, weights: Tensor) -> Runnable:
    """Forward, and backward from `weights`, of the result's shape, to every parameter and input."""
    parameters = list(getattr(model, "parameters", tuple)())

    def step(*inputs: Any) -> None:
        for parameter in parameters:
            parameter.grad = None
        result = model(*as_leaves(inputs))
        if not result.requires_grad:
            raise PostludeError("--train needs a model whose result has a gradient.")
        result.backward(weights)

    return step


@functools.lru_cache(maxsize=1)
def _direction(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random gradient of the result's shape, the same for all variants."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def as_leaves(inputs: Sequence[Any]) -> list[Any]:
    """The inputs as leaves that need a gradient, as for a layer inside a network."""
    return [x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]


def _work(model: Runnable, work: str, output: Tensor) -> Runnable:
    if work == STEP:
        return training_step(model, _direction(output.shape, output.dtype, output.device))
    if work == WITH_GRAPH:
        return lambda *inputs: model(*as_leaves(inputs))
    return model


def _after(flush: Callable[[], object] | None, call: Callable[[int], object]) -> Callable[[int], object]:
    if flush is None:
        return call

    def flushed(index: int) -> object:
        flush()
        return call(index)

    return flushed


@contextlib.contextmanager
def _cudnn_benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _channels_last_form(inputs: Sequence[Any]) -> torch.memory_format | None:
    """The channels-last format of the first input that can have one."""
    forms = {4: torch.channels_last, 5: torch.channels_last_3d}
    ranks = [item.dim() for item in inputs if isinstance(item, Tensor) and item.dim() in forms]
    return forms[ranks[0]] if ranks else None


def _to_form(x: Tensor, form: torch.memory_format) -> Tensor:
    return x.to(memory_format=form) if x.dim() == (4 if form is torch.channels_last else 5) else x
