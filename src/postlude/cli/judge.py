"""`postlude verify`: the verdict on somebody's `ModelNew`."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from postlude import problem_file
from postlude.check.budget import RMS_FACTOR, WORST_FACTOR
from postlude.check.modules import verify_modules
from postlude.check.verdict import Errors, Judged, Verdict
from postlude.cli.frame import COULD_NOT_RUN, DONE, NO, Answer, Settings
from postlude.cli.output import say, show_table, working
from postlude.cli.session import Opened, machine_data, open_problem
from postlude.errors import ProblemFileError
from postlude.problem_file import ProblemFile

CODES = {"right": DONE, "wrong": NO, "cannot tell": COULD_NOT_RUN}


def verify(settings: Settings, reference: Path, candidate: Path, backward: bool, seeds: int) -> Answer:
    opened = open_problem(settings, reference)
    _, verdict = judged_candidate(settings, opened, problem_file.load(candidate, "ModelNew"), backward, seeds)
    show_verdict(verdict)
    data = {"reference": str(reference), "candidate": str(candidate), "backward": backward, "seeds": seeds}
    return Answer(CODES[verdict.outcome], {**data, **machine_data(settings), "verdict": verdict.as_dict()})


def judged_candidate(
    settings: Settings, opened: Opened, candidate: ProblemFile, backward: bool = False, seeds: int = 5
) -> tuple[nn.Module | None, Verdict]:
    """The candidate's model, where it could be built, and the verdict on it."""
    with working(f"Checking {candidate.path.name} against float64") as update:
        try:
            model = candidate.build(settings.device, like=opened.problem)
        except ProblemFileError as error:
            return None, Verdict("wrong", (str(error).removeprefix(f"{candidate.path}: "),), settings.precision)
        try:
            verdict = verify_modules(
                opened.model,
                model,
                opened.inputs,
                precision=settings.precision,
                seeds=seeds,
                backward=backward,
                progress=update,
            )
        except SystemExit:  # its exit code would otherwise become ours
            verdict = Verdict("wrong", ("the candidate ends the process (sys.exit)",), settings.precision)
        return model, verdict


def show_verdict(verdict: Verdict) -> None:
    measured = [judged for judged in verdict.quantities if judged.errors is not None]
    if measured:
        columns = [
            "quantity",
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
    for reason in verdict.reasons:
        say(f"  {reason}")
    say(f"{verdict.outcome.capitalize()} ({verdict.precision}).", "bold")


def _row(judged: Judged) -> list[str]:
    errors, own, budget = (value or Errors(0.0, 0.0) for value in (judged.errors, judged.own, judged.budget))
    rms = [errors.rms, own.rms, RMS_FACTOR * budget.rms]
    worst = [errors.worst, own.worst, WORST_FACTOR * budget.worst]
    return [judged.name, *(f"{number:.1e}" for number in (*rms, *worst)), judged.outcome]
