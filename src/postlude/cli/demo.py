"""`postlude demo`: two models before and after, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from postlude import __version__, hardware
from postlude.check.clock import Estimate, ratio
from postlude.check.verdict import Errors
from postlude.cli.chains import explain_site
from postlude.cli.demo_case import CASES, Case, compile_case, time_case
from postlude.cli.demo_child import time_elsewhere
from postlude.cli.frame import DONE, NO, Answer, Settings
from postlude.cli.output import say, show_table, times, working
from postlude.cli.race import (
    COMPILE,
    EAGER,
    POSTLUDE,
    estimate_data,
    ratio_cell,
    time_cell,
)
from postlude.cli.session import fuse, machine_data, malloc_word, result_data
from postlude.cli.watch import crowded
from postlude.errors import PostludeError
from postlude.pipeline import Optimized

COLUMNS = [
    "problem",
    "memory from",
    "eager ms",
    "compile ms",
    "postlude ms",
    "× eager",
    "× compile",
    "error",
    "PyTorch's",
]


@dataclass
class Shown:
    """One problem of the demo and everything that was found out about it."""

    case: Case
    shape: str
    result: Optimized
    timings: dict[str, dict[str, Estimate]]  # malloc → variant → timing
    no_compile: str = ""

    @property
    def name(self) -> str:
        return self.case.title + self.case.layout

    @property
    def is_right(self) -> bool:
        return self.result.verdict is None or self.result.verdict.right


def demo(settings: Settings) -> Answer:
    _introduce(settings)
    shown = [_show(case, settings) for case in CASES]
    if settings.device == "cpu" and hardware.has_glibc():
        _time_with_other_malloc(settings, shown)
    _conclude(settings, shown)
    code = DONE if all(one.is_right for one in shown) else NO
    return Answer(code, {**machine_data(settings), "problems": [_data(one) for one in shown]})


def _introduce(settings: Settings) -> None:
    machine = hardware.machine_for(settings.device)
    if settings.device == "cuda":
        where = hardware.versions()["gpu"]
    else:
        where = f"{hardware.cpu_name()}, {machine.threads} threads, {malloc_word()}"
    say(f"Postlude {__version__} on {where}; PyTorch {hardware.versions()['torch']}", "bold")
    if settings.device == "cpu":
        say("No GPU is used, so the problems are smaller than KernelBench's.")
    if (busy := crowded(settings.device)) is not None:
        say(f"Take the times as they are: {busy}.")


def _show(case: Case, settings: Settings) -> Shown:
    with working(f"Building {case.title}"):
        opened, model = case.open(settings.device), case.open(settings.device).model
    shape = "×".join(map(str, opened.inputs[0].shape))
    say()
    say(f"{case.title}{case.layout}, on {shape}", "bold")
    result = fuse(settings, model, opened.inputs)
    if result.failure is not None:
        say(f"  not captured: {result.failure}")
    for site in result.sites:
        explain_site(site)
    for item in result.declined:
        say(f"  left as it is: {item.what} ({item.reason})")
    with working(f"Compiling {case.title} with torch.compile to compare with, the slow part"):
        compiled, no_compile = compile_case(case, settings, opened)
    with working(f"Timing {case.title}", timed=True) as update:
        timings = time_case(opened, model, compiled, update)
    return Shown(case, shape, result, {malloc_word(): timings}, no_compile)


def _time_with_other_malloc(settings: Settings, shown: list[Shown]) -> None:
    other = "system malloc" if hardware.malloc_is_tuned() else "tuned malloc"
    try:
        with working(f"Timing everything again with {other}, in a process of its own", timed=True) as update:
            found = time_elsewhere(settings, update)
    except PostludeError as error:
        say(f"There are no numbers for {other}: {error}")
        return
    for one in shown:
        one.timings[other] = found[one.case.key]


def _interval(coverage: float) -> str:
    if coverage < 0.5:
        return "the least and the most that was seen: too few rounds fitted into the time for an interval"
    return f"an interval with {coverage:.0%} confidence"


def _conclude(settings: Settings, shown: list[Shown]) -> None:
    say()
    columns = [name for name in COLUMNS if settings.device == "cpu" or name != "memory from"]
    rows = [row for one in shown for row in _rows(one, with_malloc=settings.device == "cpu")]
    show_table(columns, rows, numbers=[name for name in columns if name not in ("problem", "memory from")])
    surely = min(timing.coverage for one in shown for of in one.timings.values() for timing in of.values())
    say(f"× is how many times as fast Postlude is: the median, and {_interval(surely)}.")
    say("Errors are RMS distances from float64, relative to the spread of the result.")
    if settings.device == "cpu":
        say("On a CPU fresh memory costs page faults; a tuned malloc keeps its pages, which helps eager as well.")
    for sentence in _disappointments(shown):
        say(sentence)
    say()
    say("Your own model:      result = postlude.optimize(model, inputs), then use model as before")
    say("A KernelBench file:  postlude explain FILE.py, then postlude bench FILE.py")


def _rows(one: Shown, with_malloc: bool) -> list[list[str]]:
    rows = []
    for number, (malloc, timings) in enumerate(sorted(one.timings.items())):
        eager, compiled, ours = (timings.get(name) for name in (EAGER, COMPILE, POSTLUDE))
        speed = [ratio_cell(base, ours) if one.is_right else "–" for base in (eager, compiled)]
        errors = _errors(one) if number == 0 else ("", "")
        names = [one.case.title, f"  {one.shape}{one.case.layout}"]
        title = names[number] if len(one.timings) > 1 else "\n".join(names)
        memory = [malloc] if with_malloc else []
        rows.append([title, *memory, time_cell(eager), time_cell(compiled), time_cell(ours), *speed, *errors])
    return rows


def _errors(one: Shown) -> tuple[str, str]:
    verdict = one.result.verdict
    if verdict is None:
        return "not fused", ""
    if not verdict.right:
        return verdict.outcome, ""
    first = verdict.quantities[0] if verdict.quantities else None
    pair: tuple[Errors | None, Errors | None] = (None, None) if first is None else (first.errors, first.own)
    ours, theirs = ("–" if errors is None else f"{errors.rms:.1e}" for errors in pair)
    return ours, theirs


def _disappointments(shown: list[Shown]) -> list[str]:
    """What a reader of the table should not have to find for himself."""
    sentences = [f"{one.name}: {one.result.verdict}; no speed-up is shown." for one in shown if not one.is_right]
    for base, name in ((EAGER, "eager PyTorch"), (COMPILE, "torch.compile")):
        slower: list[str] = []
        level: list[str] = []
        for one, malloc, timings in _pairs(shown):
            if base in timings and (found := ratio(timings[base], timings[POSTLUDE])).low <= 1:
                where = f" with {malloc}" if len(one.timings) > 1 else ""
                (slower if found.high < 1 else level).append(f"{one.name}{where} ({times(found.median)})")
        sentences += [f"Slower than {name}: {'; '.join(slower)}."] if slower else []
        sentences += [f"Not clearly faster than {name}: {'; '.join(level)}."] if level else []
    missing = next((one.no_compile for one in shown if one.no_compile), "")
    return sentences + ([f"torch.compile was not timed: {missing}."] if missing else [])


def _pairs(shown: list[Shown]) -> list[tuple[Shown, str, dict[str, Estimate]]]:
    return [(one, *pair) for one in shown if one.is_right for pair in sorted(one.timings.items())]


def _data(one: Shown) -> dict[str, Any]:
    speeds = {
        malloc: {
            name: estimate_data(ratio(timings[name], timings[POSTLUDE])) for name in (EAGER, COMPILE) if name in timings
        }
        for malloc, timings in one.timings.items()
    }
    return {
        "problem": one.case.title,
        "shape": one.shape,
        "seconds": {
            malloc: {name: estimate_data(timing) for name, timing in timings.items()}
            for malloc, timings in one.timings.items()
        },
        "postlude_is_times_as_fast_as": speeds if one.is_right else None,
        **result_data(one.result),
    }
