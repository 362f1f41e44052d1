"""`postlude demo`: two chains and a stage of a network before and after, on this machine and as recorded on a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from postlude import __version__, hardware
from postlude.check.clock import Estimate, ratio
from postlude.cli import demo_table
from postlude.cli.chains import explain_site
from postlude.cli.demo_case import CASES, Case, compile_case, time_case
from postlude.cli.demo_child import time_elsewhere
from postlude.cli.frame import DONE, NO, Answer, Settings
from postlude.cli.output import say, working
from postlude.cli.report import check_report
from postlude.cli.session import fuse, machine_data, malloc_word, result_data
from postlude.cli.watch import crowded
from postlude.errors import PostludeError
from postlude.optimized import Optimized
from postlude.report import Report, gather, words, write
from postlude.report.model import COMPILE, EAGER, POSTLUDE


@dataclass
class Shown:
    """One problem of the demo and its results."""

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


def demo(settings: Settings, report: Path) -> Answer:
    check_report(report)
    _introduce(settings)
    shown = [_show(case, settings) for case in CASES]
    if settings.device == "cpu" and hardware.has_glibc():
        _time_with_other_malloc(settings, shown)
    _conclude(settings, shown)
    write(report, [_report(one) for one in shown], title="Postlude's demo")
    say(f"The report of all four: {report}", "bold")
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
        say("No GPU is used: the problems are smaller than KernelBench's, and a GPU's times are recorded ones.")
    if (busy := crowded(settings.device)) is not None:
        say(f"The times may be disturbed: {busy}.")


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
        say(f"  left to PyTorch: {item.what} ({item.reason})")
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
        say(f"No times for {other}: {error}")
        return
    for one in shown:
        if one.case.has_other_malloc:
            one.timings[other] = found[one.case.key]


def _interval(coverage: float) -> str:
    if coverage < 0.5:
        return "the smallest and largest value seen, because there were too few rounds for an interval"
    return f"an interval with {coverage:.0%} confidence"


def _conclude(settings: Settings, shown: list[Shown]) -> None:
    say()
    demo_table.show(shown, "CPU" if settings.device == "cpu" else "this GPU")
    say()
    surely = min(timing.coverage for one in shown for of in one.timings.values() for timing in of.values())
    say(f"× is how many times as fast Postlude is: the median, and {_interval(surely)}.")
    if recorded := demo_table.date_of(shown):
        say(f"Recorded: not measured now, but on an NVIDIA H200, {recorded}.")
    say("Errors are RMS distances from float64, relative to the spread of the result.")
    if settings.device == "cpu":
        say("On a CPU fresh memory costs page faults; a tuned malloc keeps its pages, which helps eager as well.")
    for sentence in _disappointments(shown):
        say(sentence)
    say()
    say("Your own model:      result = postlude.optimize(model, inputs)")
    say("A KernelBench file:  postlude explain FILE.py, then postlude bench FILE.py")


def _report(one: Shown) -> Report:
    """The report of a problem, with the times under this process's malloc."""
    found = one.result.report(title=one.name)
    refused = frozenset() if one.is_right else frozenset({POSTLUDE})
    races = (gather.race_of("forward", "warm", one.timings[malloc_word()], refused),)
    left_out = (f"torch.compile was not timed: {one.no_compile}",) if one.no_compile else ()
    return replace(found, shape=f"{one.shape}{one.case.layout}", races=races, left_out=left_out)


def _disappointments(shown: list[Shown]) -> list[str]:
    """Losses that the table shows, said in words."""
    sentences = [f"{one.name}: {one.result.verdict}; no speed-up is shown." for one in shown if not one.is_right]
    for base, name in ((EAGER, "eager PyTorch"), (COMPILE, "torch.compile")):
        slower: list[str] = []
        level: list[str] = []
        for one, malloc, timings in _pairs(shown):
            if base in timings and (found := ratio(timings[base], timings[POSTLUDE])).low <= 1:
                where = f" with {malloc}" if len(one.timings) > 1 else ""
                (slower if found.high < 1 else level).append(f"{one.name}{where} ({words.times(found.median)})")
        sentences += [f"Slower than {name}: {'; '.join(slower)}."] if slower else []
        sentences += [f"Not clearly faster than {name}: {'; '.join(level)}."] if level else []
    missing = next((one.no_compile for one in shown if one.no_compile), "")
    return sentences + ([f"torch.compile was not timed: {missing}."] if missing else [])


def _pairs(shown: list[Shown]) -> list[tuple[Shown, str, dict[str, Estimate]]]:
    return [(one, *pair) for one in shown if one.is_right for pair in sorted(one.timings.items())]


def _data(one: Shown) -> dict[str, Any]:
    speeds = {
        malloc: {name: asdict(ratio(timings[name], timings[POSTLUDE])) for name in (EAGER, COMPILE) if name in timings}
        for malloc, timings in one.timings.items()
    }
    return {
        "problem": one.case.title,
        "shape": one.shape,
        "seconds": {
            malloc: {name: asdict(timing) for name, timing in timings.items()}
            for malloc, timings in one.timings.items()
        },
        "postlude_is_times_as_fast_as": speeds if one.is_right else None,
        **result_data(one.result),
    }
