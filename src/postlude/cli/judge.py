"""`postlude verify`: the verdict on somebody's `ModelNew`, which runs in a process of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from postlude import problem_file
from postlude.check.budget import RMS_FACTOR, WORST_FACTOR
from postlude.check.exam import Exam, IsolatedSide, Rules, examine
from postlude.check.isolation import Candidate, CandidateFailed, Limits, protect_this_process
from postlude.check.sides import UnanswerableError, leaves_of
from postlude.check.verdict import Errors, Judged, Verdict
from postlude.cli.frame import COULD_NOT_RUN, DONE, NO, Answer, Settings
from postlude.cli.output import say, show_table, working
from postlude.cli.session import Opened, machine_data, open_problem
from postlude.errors import ProblemFileError
from postlude.problem_file import ProblemFile

CODES = {"right": DONE, "wrong": NO, "cannot tell": COULD_NOT_RUN}
# How the sentence of a file begins that never became a model: it could not be judged.
UNUSABLE = ("an import fails", "running the file fails", "it has no class", "syntax error", "it cannot be compiled")
SPARE_BYTES = 64 << 20
SEED_BITS = 30


@dataclass(frozen=True)
class Options:
    """What the command line says about an examination."""

    backward: bool = False
    seeds: int = 5
    seed: int | None = None  # None: drawn, so that nobody can bring answers along
    seconds: float = 60.0
    timeout: float = 60.0  # per call of the candidate
    declared_only: bool = False

    def rules(self, settings: Settings) -> Rules:
        seed = secrets.randbits(SEED_BITS) if self.seed is None else self.seed
        return Rules(settings.precision, self.seeds, self.backward, self.seconds, seed, self.declared_only)


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    said: str = ""  # what the candidate printed


def verify(settings: Settings, reference: Path, candidate: Path, options: Options) -> Answer:
    protect_this_process()
    opened = open_problem(settings, reference)
    problem_file.check_candidate(candidate)
    rules = options.rules(settings)
    judgement = judge_file(settings, opened, candidate, rules, options.timeout)
    show_verdict(judgement.verdict)
    say(f"Seed {rules.seed}.")
    data = {
        "reference": str(reference),
        "candidate": str(candidate),
        "backward": options.backward,
        "seeds": options.seeds,
        "seed": rules.seed,
        "candidate_printed": judgement.said,
        "verdict": judgement.verdict.as_dict(),
    }
    return Answer(CODES[judgement.verdict.outcome], {**machine_data(settings), **data})


def judge_file(settings: Settings, opened: Opened, path: Path, rules: Rules, timeout: float = 60.0) -> Judgement:
    """The verdict on the file's ModelNew. Nothing of the file runs in this process."""
    with working(f"Checking {path.name} against float64, in a process of its own") as update:
        try:
            exam = Exam(opened.model, opened.inputs, rules)
        except UnanswerableError as error:
            return Judgement(Verdict("cannot tell", (str(error),), settings.precision))
        try:
            with started(settings, opened, path, timeout, poisoned=True) as candidate:
                verdict = examine(exam, IsolatedSide(candidate, opened.model), update)
            return Judgement(verdict, candidate.said)
        except CandidateFailed as error:
            if error.reason.startswith(UNUSABLE):
                raise ProblemFileError(f"{path}: {error.reason.rstrip('.')}.") from error
            return Judgement(Verdict("wrong", (str(error),), exam.truths.mode))


@contextmanager
def started(
    settings: Settings, opened: Opened, path: Path, timeout: float = 60.0, poisoned: bool = False
) -> Iterator[Candidate]:
    """The file's ModelNew in its process, built with the reference's arguments and the seed that it was built with."""
    args, kwargs = opened.problem.init_arguments()
    limits = Limits(start_s=max(120.0, timeout), call_s=timeout, output_bytes=_most_bytes(opened))
    with Candidate(path, args, kwargs, device=settings.device, limits=limits, poisoned=poisoned) as candidate:
        yield candidate


def judged_candidate(
    settings: Settings, opened: Opened, candidate: ProblemFile, backward: bool = False, seeds: int = 5
) -> tuple[nn.Module | None, Verdict]:
    """The verdict, and for a candidate that is right its model in this process, to be timed."""
    rules = Options(backward, seeds).rules(settings)
    verdict = judge_file(settings, opened, candidate.path, rules).verdict
    if not verdict.right:
        return None, verdict
    return candidate.build(settings.device, like=opened.problem), verdict


def show_verdict(verdict: Verdict) -> None:
    """The verdict first, then why, then the numbers."""
    say(f"{verdict.outcome.capitalize()} ({verdict.precision}).", "bold")
    for reason in verdict.reasons:
        say(f"  {reason}")
    measured = [judged for judged in verdict.quantities if judged.errors is not None]
    if measured:
        columns = [
            "quantity",
            "points",
            "RMS error",
            "PyTorch's own",
            "allowed",
            "worst error",
            "own worst",
            "allowed worst",
            "",
        ]
        show_table(columns, [_row(judged) for judged in measured], numbers=columns[1:-1])
        say("Errors are relative to the spread of the float64 truth.")
    for note in verdict.notes:
        say(f"  {note}")


def _row(judged: Judged) -> list[str]:
    errors, own, budget = (value or Errors(0.0, 0.0) for value in (judged.errors, judged.own, judged.budget))
    rms = [errors.rms, own.rms, RMS_FACTOR * budget.rms]
    worst = [errors.worst, own.worst, WORST_FACTOR * budget.worst]
    numbers = [f"{number:.1e}" for number in (*rms, *worst)]
    return [judged.name, str(judged.points), *numbers, judged.outcome]


def _most_bytes(opened: Opened) -> int:
    """What one honest answer can be: the result, gradients of inputs and parameters, or the state; doubled."""
    held = leaves_of([opened.output, list(opened.inputs), dict(opened.model.state_dict())])
    return 2 * sum(tensor.numel() * tensor.element_size() for tensor in held) + SPARE_BYTES
