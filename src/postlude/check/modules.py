"""Judges whether one module can replace another, in this process. Files of others are judged in a separate process."""

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

    Both get the same random states and inputs, including the file's own inputs; the candidate always runs first. Its
    state and mode are restored afterwards; the reference is only copied.
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
