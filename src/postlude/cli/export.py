"""`postlude optimize FILE.py -o OUT.py`: the model as a self-contained file, checked before it is written."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from postlude import hardware, problem_file
from postlude.check.clock import Estimate, ratio
from postlude.check.compare import LARGE_OFFSET
from postlude.check.exam import examine
from postlude.check.sides import InProcess, UnanswerableError
from postlude.check.verdict import Verdict
from postlude.cli.chains import verdict_words
from postlude.cli.frame import DONE, NO, Answer, Settings
from postlude.cli.judge import CODES, exam_for, judge_file, show_verdict, usual_rules
from postlude.cli.output import check_writable, complain, say, show_table, working
from postlude.cli.race import race
from postlude.cli.recorded import measured
from postlude.cli.session import Opened, machine_data, open_problem
from postlude.errors import PostludeError
from postlude.export.export_model import HOPPER, Export
from postlude.export.export_model import export as export_model
from postlude.export.figures import Figures, figures
from postlude.files import write_whole
from postlude.report.model import EAGER, Interval
from postlude.report.words import comparison

FILE = "the file"
SECONDS = 6.0  # of the check, after which only required points are started
LARGE = 1 << 22  # elements of a result: a few points with so many tell as much as many small points
FEW = 3  # points, besides one with a NaN, one with an infinity and one with a large offset
ROUNDS, TIMING_SECONDS = 10, 1.0


def export(settings: Settings, path: Path, output: Path, *, training: bool, verify: bool) -> Answer:
    check_writable(output)
    if output.resolve() == path.resolve():
        raise PostludeError(f"{output}: this is the problem itself; name another file to write to.")
    opened = open_problem(settings, path)
    try:
        made = _made(settings, opened, path, training)
    except PostludeError as error:
        complain(f"{path}: no file was written: {error}")
        return Answer(NO, {"file": str(path), "output": None, "reason": str(error), **machine_data(settings)})
    checked = _checked(settings, opened, made.text, output.name, training) if verify else Checked(None, None)
    verdict = checked.verdict
    if verdict is not None and not verdict.right:
        show_verdict(verdict)
        say(f"Nothing was written: {output} would not be a drop-in replacement.", "bold")
        data = {"file": str(path), "output": None, "verdict": verdict.as_dict(), **machine_data(settings)}
        return Answer(CODES[verdict.outcome], data)
    timings = _timed(settings, opened, checked.model)
    write_whole(output, made.text)
    read = figures(made.text)
    _show(settings, made, checked, timings, read)
    say(f"Written to {output}.", "bold")
    return Answer(DONE, _data(settings, path, output, made, verdict, timings, read))


@dataclass(frozen=True)
class Checked:
    """The verdict on a file, and its model if that can run here."""

    model: nn.Module | None
    verdict: Verdict | None
    ran_kernels: bool = True  # False if no tensors ever fitted the kernels


def _made(settings: Settings, opened: Opened, path: Path, training: bool) -> Export:
    machine = hardware.machine_for("cuda") if settings.device == "cuda" else HOPPER
    source = path.read_text(encoding="utf-8-sig")
    with working("Writing the kernels"):
        return export_model(
            source,
            opened.model,
            opened.inputs,
            opened.problem.init_arguments(),
            machine=machine,
            precision=settings.precision,
            allows_tf32=hardware.default_fp32_precision() == "tf32",
            multiplies_tf32=hardware.default_fp32_precision(is_linear=True) == "tf32",
            measured=measured,
            training=training,
            convolution=settings.convolution,
        )


def _checked(settings: Settings, opened: Opened, text: str, name: str, training: bool) -> Checked:
    """The verdict by the rule of `postlude verify`, including gradients if the file is for training.

    On a GPU the file, which is ours, runs in this process and at the declared shape, for which its kernels are: a
    separate process and the copies to it took most of a minute. Without a GPU it is judged like a candidate's file.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text, encoding="utf-8")
        rules = usual_rules(settings, training)
        if settings.device != "cuda":
            return Checked(None, judge_file(settings, opened, file, rules).verdict)
        made = problem_file.load(file, "ModelNew")
        answers = _counting(made.module)
        model = made.build(settings.device, like=opened.problem)
        is_large = opened.output.numel() >= LARGE
        rules = replace(rules, seconds=SECONDS, declared_only=True)
        rules = replace(rules, least=1, seeds=1) if is_large else rules
        try:
            exam = exam_for(opened, rules)
        except UnanswerableError as error:
            return Checked(None, Verdict("cannot tell", (str(error),), settings.precision))
        cases = [case for case in exam.cases if case.is_nonfinite or case.family == LARGE_OFFSET]
        cases = [*exam.cases[:FEW], *cases] if is_large else exam.cases
        with working("Checking the file against float64") as update:
            verdict = examine(exam, InProcess(model), update, cases)
        return Checked(model if verdict.right else None, verdict, any(answers))


def _counting(module: ModuleType) -> list[bool]:
    """Records from now on what the file's check of its tensors returns."""
    answers: list[bool] = []
    fits = module.fits

    def counted(*arguments: Any) -> bool:
        answers.append(fits(*arguments))
        return answers[-1]

    module.fits = counted  # type: ignore[attr-defined]
    return answers


def _timed(settings: Settings, opened: Opened, model: nn.Module | None) -> dict[str, Estimate]:
    if settings.device != "cuda" or model is None:
        return {}
    inputs = [opened.inputs, opened.problem.inputs(settings.device, seed=1)]
    with working("Timing", timed=True) as update:
        return race({EAGER: opened.model, FILE: model}, inputs, ROUNDS, TIMING_SECONDS, update)


def _show(settings: Settings, made: Export, checked: Checked, timings: dict[str, Estimate], read: Figures) -> None:
    for chain in made.chains:
        say(f"{chain.name}: {chain.chain}")
    if made.left:
        say("Left to PyTorch:")
        show_table(["where", "why"], [[name, reason] for name, reason in made.left.items()])
    rows = [
        ["speed", _speed(settings, timings)],
        ["text to read", str(read)],
        ["correctness", _correctness(settings, checked)],
    ]
    show_table(["of the file", "as measured here"], rows)


def _speed(settings: Settings, timings: dict[str, Estimate]) -> str:
    if not timings:
        return "not measured here: " + ("no GPU" if settings.device != "cuda" else "the file was not verified")
    gain = ratio(timings[EAGER], timings[FILE])
    return comparison(Interval(gain.median, gain.low, gain.high), "The file", "eager PyTorch")


def _correctness(settings: Settings, checked: Checked) -> str:
    if checked.verdict is None:
        return "not verified (--no-verify)"
    where = "" if settings.device == "cuda" else "; on a CPU, where it runs PyTorch's operators: the kernels need a GPU"
    if not checked.ran_kernels:
        where = "; but its kernels did not run, because `fits` rejects these tensors on this card"
    return f"{verdict_words(checked.verdict)}{where}"


def _data(
    settings: Settings,
    path: Path,
    output: Path,
    made: Export,
    verdict: Verdict | None,
    timings: dict[str, Estimate],
    read: Figures,
) -> dict[str, Any]:
    return {
        "file": str(path),
        "output": str(output),
        "chains": _chains(made),
        "left": dict(made.left),
        "verified": verdict is not None,
        "verdict": None if verdict is None else verdict.as_dict(),
        "seconds": {name: asdict(timing) for name, timing in timings.items()},
        "readability": {"lines": read.lines, "kernels": read.kernels, "comment_share": read.comment_share},
        **machine_data(settings),
    }


def _chains(made: Export) -> Sequence[dict[str, Any]]:
    return [{"name": c.name, "chain": str(c.chain), "launches": c.launches} for c in made.chains]
