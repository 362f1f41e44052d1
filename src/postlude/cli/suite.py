"""`postlude suite`: every problem of a folder optimised, verified and timed; one that fails never stops the rest."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from postlude import __version__
from postlude.check import records
from postlude.cli.frame import DONE, NO, Answer, Settings, check_word
from postlude.cli.other_shapes import OWN, SHAPES
from postlude.cli.output import complain, say, show_table, working
from postlude.cli.report import check_report, natural
from postlude.cli.suite_batch import Told, run_batch
from postlude.cli.suite_process import Ended
from postlude.cli.variants import AUTOTUNED, LEVELS
from postlude.cli.watch import crowded
from postlude.errors import PostludeError
from postlude.files import write_whole
from postlude.report import Report, gather, model, words, write
from postlude.report.decode import decode
from postlude.report.model import COMPILE, EAGER, POSTLUDE
from postlude.report.suite import Row, Summary, geometric_mean, row_of, summary
from postlude.report.write import to_json

AGAIN = ("none", "failed", "all")
LONGEST_NAME = 160
COLUMNS = ["problem", "verdict", "eager ms", "compile ms", "postlude ms", "× eager", "× compile"]
STEPS = ["step ms", "× eager's", "× compile's"]
ERRORS = ["of the roofline", "error", "PyTorch's"]


@dataclass(frozen=True)
class Options:
    folder: Path
    results: Path
    only: str = "*"
    again: str = "none"
    limit: float = 600.0
    rounds: int = 12
    seconds: float = 10.0
    baselines: str | None = None
    report: Path | None = None
    train: bool = False
    jobs: int = 1
    shapes: str = OWN


@dataclass(frozen=True)
class Task:
    """One problem: where it is, what it is called, and where its result is kept under which key."""

    path: Path
    name: str
    place: str
    key: str
    target: Path


def suite(settings: Settings, options: Options) -> Answer:
    check_word("--again", options.again, AGAIN)
    check_word("--baselines", options.baselines, LEVELS)
    check_word("--shapes", options.shapes, SHAPES)
    check_report(options.report)
    if options.jobs < 1:
        raise PostludeError(f"--jobs {options.jobs} would prepare no problem; use 1 or more.")
    tasks = _tasks(settings, options)
    try:
        options.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PostludeError(f"{options.results}: results cannot be kept there ({error.strerror}).") from error
    known = {task.path: report for task in tasks if (report := _kept(task.target, task.key, options.again))}
    # Where several prepare, the machine's load is our own as soon as they have begun.
    work = _Work(settings, options, crowded(settings.device) if options.jobs > 1 else None)
    work.do([task for task in tasks if task.path not in known])
    known |= work.found
    reports = [known[task.path] for task in tasks]
    found = summary(reports)
    _show(found)
    if options.report is not None:
        write(options.report, reports, title=options.folder.resolve().name)
    failed = sum(row.outcome in (model.WRONG, model.FAILED) for row in found.rows)
    data = {"folder": str(options.folder), "failed": failed, "fast": _fast_data(found)}
    return Answer(NO if failed else DONE, {**data, **to_json(reports)})


def problem_files(folder: Path, only: str = "*") -> list[Path]:
    """The files that have a class Model, numbers in their names in order."""
    if not folder.is_dir():
        raise PostludeError(f"{folder}: there is no such folder.")
    fitting = [path for path in folder.rglob("*.py") if fnmatch.fnmatchcase(path.name, only) and path.is_file()]
    found = [path for path in fitting if _may_have_a_model(path)]
    if not found:
        raise PostludeError(f"{folder}: no file fits {only} and has a class Model.")
    return sorted(found, key=lambda path: natural(path.relative_to(folder)))


def _may_have_a_model(path: Path) -> bool:
    try:
        return re.search(rb"^class Model\b", path.read_bytes(), re.MULTILINE) is not None
    except OSError:
        return True  # its row says why it cannot be read


def _tasks(settings: Settings, options: Options) -> list[Task]:
    files = problem_files(options.folder, options.only)
    names = [str(path.relative_to(options.folder).with_suffix("")) for path in files]
    return [
        Task(
            path,
            name,
            f"{number} of {len(files)}",
            _key(settings, options, path),
            options.results / f"{_file_name(name)}{_suffix(options)}.json",
        )
        for number, (path, name) in enumerate(zip(files, names, strict=True), 1)
    ]


def _file_name(name: str) -> str:
    """A name of ASCII letters, which every file system takes; a long one is cut and told apart by its hash."""
    raw = os.fsencode(name.replace(os.sep, "__"))
    quoted = quote(raw, safe="")
    return quoted if len(quoted) <= LONGEST_NAME else f"{quoted[:LONGEST_NAME]}-{hashlib.sha256(raw).hexdigest()[:16]}"


def _suffix(options: Options) -> str:
    """Results at other shapes are kept beside those at the file's own."""
    return "" if options.shapes == OWN else f".{options.shapes}-shapes"


class _Work:
    """The problems that have no result yet, in batches; each result is kept as soon as it is there."""

    def __init__(self, settings: Settings, options: Options, busy: str | None) -> None:
        self.settings, self.options, self.busy = settings, options, busy
        self.found: dict[Path, Report] = {}
        self.alone: list[Task] = []

    def do(self, tasks: Sequence[Task]) -> None:
        for first in range(0, len(tasks), self.options.jobs):
            self._batch(tasks[first : first + self.options.jobs])
        if self.alone:
            names = ", ".join(task.name for task in self.alone)
            complain(f"There was not enough memory for {names} beside others: run again alone.")
        for task in self.alone:
            self._batch([task])

    def _batch(self, tasks: Sequence[Task]) -> None:
        requests = [self._request(task) for task in tasks]

        def keep(place: int, outcome: Ended) -> None:
            if outcome.lacked_memory and len(tasks) > 1:
                self.alone.append(tasks[place])
            else:
                self._keep(tasks[place], outcome)

        words = f"{tasks[0].place}: {tasks[0].name}"
        if len(tasks) > 1:
            words = f"{tasks[0].place.split()[0]} to {tasks[-1].place}"
        with _progress(words) as update:
            run_batch(requests, self.options.limit, Told(keep, update, lambda text: _note(f"{words}: {text}")))

    def _request(self, task: Task) -> dict[str, Any]:
        names = ("rounds", "seconds", "baselines", "train", "shapes")
        return {
            "file": str(task.path),
            **{name: getattr(self.options, name) for name in names},
            **asdict(self.settings),
        }

    def _keep(self, task: Task, outcome: Ended) -> None:
        settings, report = self.settings, outcome.report
        if report is None:
            reason = outcome.reason.removeprefix(f"{task.path}: ")
            report = gather.failure(task.path.name, reason, settings.device, settings.precision)
        elif self.busy is not None:
            report = replace(report, findings=(*report.findings, self.busy))
        kept = {"key": task.key, "seconds": round(outcome.seconds, 1), **outcome.times, **to_json([report])}
        write_whole(task.target, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        complain(f"{task.place}: {task.name}: {_words(row_of(report))}, {outcome.seconds:.0f} s")
        self.found[task.path] = report


def _note(text: str) -> None:
    """For a log; on a terminal the line of progress says it."""
    if not sys.stderr.isatty():
        complain(f"{text} …")


@contextmanager
def _progress(text: str) -> Iterator[Callable[[str], None]]:
    if sys.stderr.isatty():
        with working(text, timed=True) as update:
            yield update
    else:
        yield lambda _: None


def _key(settings: Settings, options: Options, path: Path) -> str:
    """A result holds for this file, these settings and this code."""
    asked = (settings.device, settings.precision, options.rounds, options.seconds, options.baselines, options.train)
    shapes = () if options.shapes == OWN else (options.shapes,)
    known = json.dumps([__version__, records.commit(), *asked, *shapes])
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    return hashlib.sha256(known.encode() + content).hexdigest()[:16]


def _kept(target: Path, key: str, again: str) -> Report | None:
    """The result of an earlier run, if it is still valid and not to be repeated."""
    if again == "all" or not target.exists():
        return None
    try:
        data: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        report = decode(data["reports"][0])
    except (ValueError, KeyError, IndexError, TypeError, OSError):
        return None  # not a result, or one of another version: it is replaced
    if data.get("key") != key or (again == "failed" and report.judgement.outcome in (model.FAILED, model.WRONG)):
        return None
    return report


def _words(row: Row) -> str:
    gains = [f"{words.times(row.ratios[base].median)} {base}" for base in (EAGER, COMPILE) if base in row.ratios]
    shown = gains if row.outcome == model.RIGHT else [row.note] if row.note else []
    return ", ".join([words.VERDICTS[row.outcome].lower(), *shown])


def _show(found: Summary) -> None:
    has_steps = any(row.steps for row in found.rows)
    tuned = [AUTOTUNED] if any(AUTOTUNED in row.seconds for row in found.rows) else []
    timed = [EAGER, COMPILE, *tuned, POSTLUDE]
    columns = [*COLUMNS[:4], *(["max-autotune ms"] * len(tuned)), *COLUMNS[4:], *(STEPS if has_steps else []), *ERRORS]
    rows = [
        [
            row.title,
            words.VERDICTS[row.outcome].lower(),
            *(words.milliseconds(row.seconds[name]) if name in row.seconds else "–" for name in timed),
            *_times(row.ratios),
            *(_step(row) if has_steps else []),
            *_errors(row),
            "" if row.outcome == model.RIGHT else row.note,
        ]
        for row in found.rows
    ]
    show_table([*columns, ""], rows, numbers=columns[2:])
    for of_steps in (False, True):
        means = {base: geometric_mean(found.rows, base, of_steps=of_steps) for base in (EAGER, COMPILE)}
        known = [f"{words.times(mean)} {base}" for base, mean in means.items() if mean is not None]
        if known:
            say(f"{'Training steps' if of_steps else 'Forward'}, geometric means: {', '.join(known)}.")
    for base, shares in found.fast.items():
        known = [f"fast_{speed:g} {words.percent(share)}" for speed, share in shares.items() if share is not None]
        say(f"Against {base}: {', '.join(known) if known else 'not timed'}.")
    counts = {one: sum(row.outcome == one for row in found.rows) for one in model.OUTCOMES}
    said = ", ".join(f"{count} {words.VERDICTS[one].lower()}" for one, count in counts.items() if count)
    say(f"{words.counted(found.total, 'problems')}: {said}.", "bold")


def _times(ratios: Mapping[str, model.Interval]) -> list[str]:
    return [words.times(ratios[base].median) if base in ratios else "–" for base in (EAGER, COMPILE)]


def _step(row: Row) -> list[str]:
    return [words.milliseconds(row.steps[POSTLUDE]) if POSTLUDE in row.steps else "–", *_times(row.step_ratios)]


def _errors(row: Row) -> list[str]:
    errors = ["–" if one is None else words.error(one) for one in (row.error, row.own_error)]
    return ["–" if row.share is None else words.percent(row.share), *errors]


def _fast_data(found: Summary) -> dict[str, dict[str, float | None]]:
    return {base: {f"{speed:g}": share for speed, share in shares.items()} for base, shares in found.fast.items()}
