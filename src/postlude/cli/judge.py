"""`postlude verify`: the verdict on a candidate's `ModelNew`, which runs in a separate process."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from postlude import problem_file
from postlude.check.budget import RMS_FACTOR, WORST_FACTOR
from postlude.check.exam import Exam, IsolatedSide, Rules, SelfCheck, examine, self_check
from postlude.check.isolation import Candidate, CandidateFailed, Limits, protect_this_process
from postlude.check.nested import tensors_in
from postlude.check.sides import UnanswerableError
from postlude.check.verdict import Errors, Judged, Verdict
from postlude.cli.frame import COULD_NOT_RUN, DONE, NO, Answer, Settings
from postlude.cli.output import say, show_table, working
from postlude.cli.session import Opened, machine_data, open_problem
from postlude.errors import PostludeError, ProblemFileError

CODES = {"right": DONE, "wrong": NO, "cannot tell": COULD_NOT_RUN}
# Prefixes of the message for a file that never became a model, so it could not be judged.
UNUSABLE = ("an import fails", "running the file fails", "it has no class", "syntax error", "it cannot be compiled")
NO_DRIVER = "0 active drivers"  # what Triton says without a GPU
NEEDS_GPU = "Triton finds no GPU for it: judge its kernels where there is one, or set TRITON_INTERPRET=1, which is slow"
SPARE_BYTES = 64 << 20
SEED_BITS = 30


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    said: str = ""  # what the candidate printed
    checked: SelfCheck | None = None  # the self-check, on request


def any_seed() -> int:
    """A random seed, so that a candidate cannot bring answers along."""
    return secrets.randbits(SEED_BITS)


def verify(
    settings: Settings, reference: Path, candidate: Path | None, rules: Rules, timeout: float, with_self_check: bool
) -> Answer:
    if candidate is None and not with_self_check:
        raise PostludeError("verify needs a candidate, or --self-check to test the points on mutants only.")
    opened = open_problem(settings, reference)
    data: dict[str, Any] = {"reference": str(reference), "seed": rules.seed, "backward": rules.backward}
    if candidate is None:
        checked = check_exam(exam_for(opened, rules, remember=True))
        say(f"Self-check: {checked}", "bold")
        code = COULD_NOT_RUN if checked.accepted else DONE
        return Answer(code, {**machine_data(settings), **data, "self_check": checked.as_dict()})
    judgement = judge_file(settings, opened, candidate, rules, timeout, with_self_check)
    show_verdict(judgement.verdict)
    if judgement.checked is not None:
        say(f"Self-check: {judgement.checked}")
        data["self_check"] = judgement.checked.as_dict()
    say(f"Seed {rules.seed}.")
    data |= {
        "candidate": str(candidate),
        "seeds": rules.seeds,
        "candidate_printed": judgement.said,
        "verdict": judgement.verdict.as_dict(),
    }
    return Answer(CODES[judgement.verdict.outcome], {**machine_data(settings), **data})


def judge_file(
    settings: Settings, opened: Opened, path: Path, rules: Rules, timeout: float = 60.0, with_self_check: bool = False
) -> Judgement:
    """The verdict on the file's ModelNew. Nothing of the file runs in this process."""
    problem_file.check_candidate(path)
    protect_this_process()
    try:
        exam = exam_for(opened, rules, remember=with_self_check)
    except UnanswerableError as error:
        return Judgement(Verdict("cannot tell", (str(error),), settings.precision))
    with working(f"Checking {path.name} against float64, in a process of its own") as update:
        try:
            with started(settings, opened, path, timeout, poisoned=True) as candidate:
                verdict = examine(exam, IsolatedSide(candidate, opened.model), update)
            said = candidate.said
        except CandidateFailed as error:
            if error.reason.startswith(UNUSABLE):
                raise ProblemFileError(f"{path}: {error.reason.rstrip('.')}.") from error
            verdict, said = Verdict("wrong", (str(error),), exam.truths.mode), ""
    if any(NO_DRIVER in reason for reason in verdict.reasons):
        verdict = replace(verdict, notes=(*verdict.notes, NEEDS_GPU))
    checked = check_exam(exam) if with_self_check else None
    if checked is not None and checked.accepted and verdict.right:
        reason = f"these points would also accept mutants of the reference: {', '.join(checked.accepted)}"
        verdict = replace(verdict, outcome="cannot tell", reasons=(reason,))
    return Judgement(verdict, said, checked)


def usual_rules(settings: Settings, backward: bool) -> Rules:
    """The rules for a file that is judged before it is timed or written."""
    return Rules(settings.precision, backward=backward, seed=any_seed())


def exam_for(opened: Opened, rules: Rules, remember: bool = False) -> Exam:
    with working("Choosing points that can tell right from wrong"):
        return Exam(opened.model, opened.inputs, rules, remember)


def check_exam(exam: Exam) -> SelfCheck:
    with working("Trying the points on mutants of the reference") as update:
        return self_check(exam, update)


def started(settings: Settings, opened: Opened, path: Path, timeout: float, *, poisoned: bool = False) -> Candidate:
    """The file's ModelNew in its process, built with the reference's arguments and seed; for a `with` block.

    It is poisoned to be checked, not to be timed.
    """
    args, kwargs = opened.problem.init_arguments()
    limits = Limits(start_s=max(120.0, timeout), call_s=timeout, output_bytes=_most_bytes(opened))
    device, precision = settings.device, settings.precision
    return Candidate(path, args, kwargs, device=device, limits=limits, poisoned=poisoned, precision=precision)


def show_verdict(verdict: Verdict) -> None:
    """Shows the verdict, then the reasons, then the numbers."""
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
    """The limit for one answer: twice the result, the gradients of inputs and parameters, or the state."""
    held = tensors_in([opened.output, list(opened.inputs), dict(opened.model.state_dict())])
    return 2 * sum(tensor.numel() * tensor.element_size() for tensor in held) + SPARE_BYTES
