"""Is a module of our own a drop-in for another one? Strangers' files are judged in a process of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from postlude.check.compare import Progress
from postlude.check.exam import Exam, Rules, examine
from postlude.check.sides import InProcess, Side, UnanswerableError, key_findings, keys_of
from postlude.check.verdict import Verdict


def verify_modules(
    reference: nn.Module,
    candidate: nn.Module,
    inputs: Sequence[Any],
    *,
    precision: str = "auto",
    seeds: int = 5,
    backward: bool = False,
    seed: int = 0,
    seconds: float = 60.0,
    progress: Progress = None,
) -> Verdict:
    """Judges `candidate` by `reference` in this process, both on the device that they are on.

    Both get the same random states and inputs, the file's own inputs among them; the candidate always answers
    first. Its state and mode are put back afterwards, the reference is only copied.
    """
    findings = key_findings(keys_of(reference), keys_of(candidate))
    if findings:
        return Verdict("wrong", tuple(findings), precision)
    before = {key: value.clone() for key, value in candidate.state_dict().items() if isinstance(value, Tensor)}
    was_training = candidate.training
    try:
        exam = Exam(reference, inputs, Rules(precision, seeds, backward, seconds, seed))
        return examine(exam, InProcess(candidate), progress)
    except UnanswerableError as error:
        return Verdict("cannot tell", (str(error),), precision)
    finally:
        Side(candidate).load(before)
        candidate.train(was_training)
