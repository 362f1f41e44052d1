"""`postlude bench`: variants in turns, and no speed-up for what is not right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from postlude import problem_file
from postlude.check import records
from postlude.check.clock import Estimate, ratio
from postlude.check.verdict import Verdict
from postlude.cli.chains import verdict_words
from postlude.cli.frame import DONE, NO, Answer, Settings
from postlude.cli.judge import judged_candidate
from postlude.cli.output import check_writable, say, show_table, working
from postlude.cli.race import (
    CANDIDATE,
    COMPILE,
    EAGER,
    POSTLUDE,
    Call,
    Course,
    comparison,
    compile_model,
    estimate_data,
    interval_cell,
    race,
    ratio_cell,
    time_cell,
)
from postlude.cli.session import Opened, fuse, machine_data, open_problem, result_data
from postlude.errors import PostludeError
from postlude.pipeline import Optimized
from postlude.plan.problem import spec_of


@dataclass(frozen=True)
class Options:
    file: Path
    candidate: Path | None
    train: bool
    rounds: int
    seconds: float
    csv: Path | None


@dataclass
class Field:
    """The variants that take part, and what is known about each."""

    models: dict[str, Call] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, Verdict | None] = field(default_factory=dict)

    def may_show(self, name: str) -> bool:
        verdict = self.verdicts.get(name)
        return verdict is None or verdict.right


def bench(settings: Settings, options: Options) -> Answer:
    _check_csv(options.csv)
    candidate = None if options.candidate is None else problem_file.load(options.candidate, "ModelNew")
    opened = open_problem(settings, options.file)
    runners = Field({EAGER: opened.model}, {EAGER: "PyTorch as it is"})
    if candidate is not None:
        model, verdict = judged_candidate(settings, opened, candidate, backward=options.train)
        runners.verdicts[CANDIDATE], runners.notes[CANDIDATE] = verdict, verdict_words(verdict)
        if model is not None and verdict.right:
            runners.models[CANDIDATE] = model
    # Two sets of inputs in turn, so that no call finds its own input in the cache.
    inputs = [opened.inputs, opened.problem.inputs(settings.device, seed=1)]
    course = Course(inputs, opened.output, options.train, options.rounds, options.seconds)
    result = _enter_postlude(settings, opened, course, runners)
    _enter_compile(settings, opened, course, runners)
    with working("Timing", timed=True) as update:
        timings = race(runners.models, course, update)
    _show(timings, runners)
    failed = not runners.may_show(CANDIDATE)
    if options.csv is not None:
        records.update(options.csv, _rows(settings, opened, options, timings, runners, result))
    return Answer(NO if failed else DONE, _data(settings, options, timings, runners, result))


def _enter_postlude(settings: Settings, opened: Opened, course: Course, runners: Field) -> Optimized:
    model = opened.problem.build(settings.device)
    result = fuse(settings, model, opened.inputs, train=course.train)
    fused = sum(site.is_fused for site in result.sites)
    runners.models[POSTLUDE], runners.verdicts[POSTLUDE] = model, result.verdict
    runners.notes[POSTLUDE] = f"{fused} of {len(result.sites)} chains fused"
    if result.failure is not None:
        runners.notes[POSTLUDE] = f"not captured ({result.failure})"
    elif result.verdict is not None:
        runners.notes[POSTLUDE] += f", {verdict_words(result.verdict)}"
    return result


def _enter_compile(settings: Settings, opened: Opened, course: Course, runners: Field) -> None:
    with working("Compiling with torch.compile, which can take half a minute"):
        compiled, why_not = compile_model(opened.problem.build(settings.device), course, settings.device)
    runners.notes[COMPILE] = why_not
    if compiled is not None:
        runners.models[COMPILE] = compiled


def _show(timings: Mapping[str, Estimate], runners: Field) -> None:
    eager = timings[EAGER]
    rows = []
    for name in (EAGER, COMPILE, POSTLUDE, CANDIDATE):
        timing = timings.get(name)
        if timing is None and name not in runners.notes:
            continue
        faster = ratio_cell(eager, timing) if runners.may_show(name) else "–"
        interval = "–" if timing is None else interval_cell(timing)
        rows.append([name, time_cell(timing), interval, faster, runners.notes.get(name, "")])
    show_table(["variant", "ms", "interval", "× eager", ""], rows, numbers=["ms", "interval", "× eager"])
    say(f"Medians of {len(eager.samples)} rounds; intervals hold them with {eager.coverage:.0%} confidence.")
    for name in (POSTLUDE, CANDIDATE):
        if name in timings and runners.may_show(name):
            say(comparison(eager, timings[name], name.capitalize(), "eager PyTorch"))
            if COMPILE in timings:
                say(comparison(timings[COMPILE], timings[name], name.capitalize(), "torch.compile"))
    if not runners.may_show(CANDIDATE):
        say("The candidate failed verification: it was not timed.", "bold")


def _data(
    settings: Settings, options: Options, timings: Mapping[str, Estimate], runners: Field, result: Optimized
) -> dict[str, Any]:
    shown = [name for name in timings if name != EAGER and runners.may_show(name)]
    return {
        "file": str(options.file),
        "candidate": None if options.candidate is None else str(options.candidate),
        "mode": "train" if options.train else "inference",
        **machine_data(settings),
        "seconds": {name: estimate_data(timing) for name, timing in timings.items()},
        "times_eager": {name: estimate_data(ratio(timings[EAGER], timings[name])) for name in shown},
        "notes": runners.notes,
        "verdicts": {name: None if v is None else v.as_dict() for name, v in runners.verdicts.items()},
        "postlude": result_data(result),
    }


def _rows(
    settings: Settings,
    opened: Opened,
    options: Options,
    timings: Mapping[str, Estimate],
    runners: Field,
    result: Optimized,
) -> list[records.Record]:
    x = spec_of(next(item for item in opened.inputs if isinstance(item, Tensor)))
    machine = machine_data(settings)
    common: dict[str, Any] = {
        "chain": " + ".join(str(site.chain) for site in result.sites) or options.file.stem,
        "shape": "×".join(map(str, x.shape)),
        "dtype": x.dtype,
        "layout": x.layout,
        "precision": settings.precision,
        "mode": "train" if options.train else "inference",
        "threads": machine["threads"],
        **records.environment(settings.device),
    }
    return [_row(common, name, timings, runners) for name in timings]


def _row(common: Mapping[str, Any], name: str, timings: Mapping[str, Estimate], runners: Field) -> records.Record:
    timing, verdict = timings[name], runners.verdicts.get(name)
    quantiles = {f"ms_p{percent}": 1e3 * timing.quantile(percent / 100) for percent in (20, 50, 80)}
    columns: dict[str, Any] = {**quantiles, "ms_low": 1e3 * timing.low, "ms_high": 1e3 * timing.high}
    if runners.may_show(name):
        faster = ratio(timings[EAGER], timing)
        columns |= {"speedup": faster.median, "speedup_low": faster.low, "speedup_high": faster.high}
    if verdict is not None and verdict.errors is not None and verdict.budget is not None:
        columns |= {"error_rms": verdict.errors.rms, "error_worst": verdict.errors.worst}
        columns |= {"budget_rms": verdict.budget.rms, "budget_worst": verdict.budget.worst}
    return records.Record(**common, variant=name, **columns)


def _check_csv(path: Path | None) -> None:
    check_writable(path)
    if path is not None and path.exists():
        try:
            records.read(path)
        except (ValueError, OSError) as error:
            raise PostludeError(f"{path}: this file exists and is no record file ({error}).") from error
