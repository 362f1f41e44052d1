"""`postlude bench`: times variants in turns; a wrong result gets no speed-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from postlude.check import records
from postlude.check.budget import RMS_FACTOR
from postlude.check.ceilings import ceilings_of, work_of
from postlude.check.clock import Contestant
from postlude.check.floor import Ceilings, Work, holds, judge_times, unbelievable
from postlude.check.isolation import Candidate, CandidateFailed
from postlude.check.nested import tensors_in
from postlude.cli import bench_show
from postlude.cli.bench_entry import bench_of, candidate_of, enter, warm
from postlude.cli.bench_state import Bench, Options
from postlude.cli.frame import DONE, NO, Answer, Settings, check_word
from postlude.cli.measure import Timer, histograms_of, roofline_of
from postlude.cli.output import check_writable, working
from postlude.cli.report import check_report
from postlude.cli.session import machine_data
from postlude.cli.site_times import site_seconds
from postlude.cli.variants import FORWARD, LEVELS, STEP, Isolated
from postlude.cli.watch import RANDOM, Watch, is_random
from postlude.errors import PostludeError
from postlude.report import gather, model, write
from postlude.report.groups import FEW
from postlude.report.model import CANDIDATE, EAGER, POSTLUDE
from postlude.report.write import to_json

SAME_INPUTS = "new inputs for timed calls: integers stay as they are, so remembered answers are not found"


def bench(settings: Settings, options: Options) -> Answer:
    check_word("--baselines", options.baselines, LEVELS)
    _check_csv(options.csv)
    check_report(options.report)
    report, rows = run(settings, options)
    bench_show.show(report)
    if options.csv is not None:
        records.update(options.csv, rows)
    if options.report is not None:
        write(options.report, report)
    failed = report.variant(CANDIDATE).is_judged and not report.variant(CANDIDATE).may_be_compared
    wrong = report.judgement.outcome == model.WRONG
    data = {"file": str(options.file), "candidate": options.candidate and str(options.candidate)}
    return Answer(NO if failed or wrong else DONE, {**data, **machine_data(settings), **to_json([report])})


def run(
    settings: Settings, options: Options, when_prepared: Callable[[], None] | None = None
) -> tuple[model.Report, list[records.Record]]:
    """Optimizes, verifies and times one problem. `when_prepared` is called before the first measurement and may
    wait."""
    one = bench_of(settings, options)
    enter(one)
    with ExitStack() as stack:
        candidate = candidate_of(one, stack)
        watch, work = _watch(one), work_of(one.opened.model, one.opened.inputs, one.opened.output)
        if when_prepared is not None:
            warm(one)
            when_prepared()
        before = _ceilings(one, work)
        with working("Timing", timed=True) as update:
            _time(one, watch, candidate, update)
            _time_sites(one, update)
        # Measured twice, so that other work on the machine during the first time does not lower the roof.
        ceilings = before.or_faster(_ceilings(one, work))
        _judge(one, watch, work, ceilings)
        histograms, why = _histograms(one, candidate, work)
    one.left_out += why
    report = dataclasses.replace(_report(one, watch, work, ceilings), histograms=tuple(histograms))
    return report, bench_show.rows(report, one.opened, settings)


def _watch(one: Bench) -> Watch:
    is_judged = not is_random(one.opened.model, one.sets[0], one.mode)
    if not is_judged:
        one.left_out.append(RANDOM)
    # A right result and PyTorch's own are each within their share of the budget.
    allowed = {
        name: (1 + RMS_FACTOR) * verdict.budget.rms
        for name, verdict in one.verdicts.items()
        if verdict.budget is not None
    }
    return Watch(one.opened.model if is_judged else None, one.mode, one.settings.device, allowed)


def _ceilings(one: Bench, work: Work) -> Ceilings:
    with working("Measuring how fast this machine copies and multiplies", timed=True):
        return ceilings_of(work, one.opened.output.dtype, one.mode, one.settings.device)


def _time(one: Bench, watch: Watch, candidate: Candidate | None, update: Callable[[str], None]) -> None:
    options = one.options
    timer = Timer(one.runners, one.opened.output, one.settings.device, options.rounds, options.seconds, update)
    others: dict[str, Contestant] = {}
    if candidate is not None:
        supply = timer.supply_of(one.sets)
        one.left_out += [SAME_INPUTS] if supply.repeats else []
        training = one.opened.model.training
        others[CANDIDATE] = Isolated(candidate, supply, lambda window: watch.judge(CANDIDATE, window), training)
    try:
        warm = timer.forward(watch, others)
    except CandidateFailed as error:
        one.reject(CANDIDATE, f"while it was timed, {error.reason}")
        warm = timer.forward(watch, {})
    one.races.append((FORWARD, "warm", warm))
    if options.flushed:
        flushed, lost = timer.flushed(watch)
        one.races.append((FORWARD, "flushed", flushed))
        one.left_out += lost
    if options.train:
        steps, backward, lost = timer.training(watch)
        one.races += [("backward", "warm", backward), (STEP, "warm", steps)]
        one.left_out += lost


def _time_sites(one: Bench, progress: Callable[[str], None]) -> None:
    """Of a network, where the time goes."""
    assert one.result is not None
    if len(one.result.sites) > FEW:
        one.site_seconds = site_seconds(one.result.sites, one.options.seconds, progress)


def _judge(one: Bench, watch: Watch, work: Work, ceilings: Ceilings) -> None:
    """Adds what the races found about results and times."""
    warm = one.races[0][2]
    impossible, questions = judge_times(warm, EAGER, work, ceilings)
    for name, reason in (*watch.wrong.items(), *impossible.items()):
        one.reject(name, reason)
    if CANDIDATE in warm:
        trusted = [timing for name, timing in warm.items() if name not in (CANDIDATE, *one.refused)]
        if (why := unbelievable(CANDIDATE, warm[CANDIDATE], trusted, work, ceilings)) is not None:
            one.reject(CANDIDATE, why, "cannot tell")
    one.questions += questions
    one.findings += watch.disagreements
    if not holds(warm[EAGER], work, ceilings):
        one.left_out.append("the floor of compulsory bytes: PyTorch itself is below it, so not all bytes have to move")
    if one.settings.device == "cpu":
        one.left_out.append("CUDA events and launches: no GPU is used")


def _histograms(one: Bench, candidate: Candidate | None, work: Work) -> tuple[list[model.Histogram], list[str]]:
    answers: dict[str, Any] = {r.name: r.model for r in one.runners if r.name in (EAGER, POSTLUDE)}
    if candidate is not None and candidate.alive:
        training = one.opened.model.training
        answers[CANDIDATE] = lambda *inputs: candidate.forward(inputs, training=training).outputs
    return histograms_of(one.opened.model, answers, one.sets[-1], work, one.settings.device)


def _report(one: Bench, watch: Watch, work: Work, ceilings: Ceilings) -> model.Report:
    assert one.result is not None
    base = one.result.report(title=one.options.file.name)
    verdict = one.verdicts.get(one.subject)
    events = {name: seconds for name in watch.events if (seconds := watch.event_seconds(name)) is not None}
    races = [
        gather.race_of(direction, cache, found, one.refused, events if (direction, cache) == (FORWARD, "warm") else {})
        for direction, cache, found in one.races
    ]
    first = next(x for x in tensors_in(list(one.opened.inputs)))
    sites = [
        dataclasses.replace(site, before_seconds=before, after_seconds=after)
        for site, (before, after) in zip(base.sites, one.site_seconds)
    ]
    warm = {name: timing for name, timing in one.races[0][2].items() if name not in one.refused}
    environment = {**base.environment, **({"clock while timing": watch.clock_words} if watch.clocks else {})}
    environment["timed results compared"] = str(sum(watch.checked.values()))
    return dataclasses.replace(
        base,
        subject=one.subject,
        judgement=base.judgement if verdict is None else gather.judgement_of(verdict),
        precision=one.mode,
        shape=f"{'×'.join(map(str, first.shape))} {str(first.dtype).removeprefix('torch.')}",
        races=tuple(races),
        sites=tuple(sites) or base.sites,
        variants=tuple(bench_show.variants(one)),
        roofline=roofline_of(warm, work, ceilings),
        findings=(*base.findings, *one.findings),
        questions=tuple(one.questions),
        left_out=tuple(one.left_out),
        environment=environment,
    )


def _check_csv(path: Path | None) -> None:
    check_writable(path)
    if path is not None and path.exists():
        try:
            records.read(path)
        except (ValueError, OSError) as error:
            raise PostludeError(f"{path}: this file exists and is not a record file ({error}).") from error
