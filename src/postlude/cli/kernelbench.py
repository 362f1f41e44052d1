"""`postlude verify --like-kernelbench`: KernelBench's own rule, to know what KernelBench will say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude import problem_file
from postlude.cli.frame import DONE, NO, Answer, Settings
from postlude.cli.output import say, working
from postlude.cli.session import machine_data
from postlude.errors import PostludeError, ProblemFileError
from postlude.problem_file import ProblemFile

SEED = 42
TRIALS = 5  # as in its scripts
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
WEAKER = (
    "KernelBench's rule is weaker than `postlude verify`: parameters at their initial values (γ = 1, β = 0), inputs "
    "of one kind, no gradients, no float64, and the reference in whatever precision PyTorch's switches give it."
)


def verify(settings: Settings, reference: Path, candidate: Path | None) -> Answer:
    """Judges in this process, as KernelBench does: the file may do whatever it likes."""
    if candidate is None:
        raise PostludeError("--like-kernelbench judges a candidate; name its file after the reference's.")
    problem, other = problem_file.load(reference), problem_file.load(candidate, "ModelNew")
    with working(f"Checking {candidate.name} by KernelBench's rule"):
        trials, reason = judged(settings, problem, other)
    for number, worst in enumerate(trials, 1):
        say(f"trial {number}: largest difference {worst:.2e}")
    say(WEAKER)
    passes = reason is None
    say("Passes KernelBench's rule." if passes else f"Fails KernelBench's rule: {reason}.", "bold")
    data: dict[str, Any] = {"reference": str(reference), "candidate": str(candidate), "rule": "kernelbench"}
    data |= {"differences": trials, "passes": passes, "reason": reason, **machine_data(settings)}
    return Answer(DONE if passes else NO, data)


def judged(settings: Settings, problem: ProblemFile, candidate: ProblemFile) -> tuple[list[float], str | None]:
    """The largest difference of each trial up to the first that fails, and why it fails."""
    model = problem.build(settings.device, seed=SEED)
    try:
        new = candidate.build(settings.device, seed=SEED, like=problem)
        found: list[float] = []
        for seed in trial_seeds():
            inputs = problem.inputs(settings.device, seed=seed)
            expected, given = problem.run(model, inputs), candidate.run(new, inputs)
            if expected.shape != given.shape:
                return found, f"the result has shape {tuple(given.shape)}, not {tuple(expected.shape)}"
            found.append(float((expected - given).abs().max()) if expected.numel() else 0.0)
            tolerance = TOLERANCE.get(expected.dtype, 1e-4)
            if not _is_close(expected, given, tolerance):
                return found, f"trial {len(found)} differs by more than {tolerance:g} + {tolerance:g}·|expected|"
    except ProblemFileError as error:
        return [], str(error).rstrip(".")
    return found, None


def trial_seeds() -> list[int]:
    drawn = torch.randint(0, 2**32 - 1, (TRIALS,), generator=torch.Generator().manual_seed(SEED))
    return [int(seed) for seed in drawn]


def _is_close(expected: Tensor, given: Tensor, tolerance: float) -> bool:
    return bool(torch.allclose(expected, given.to(expected.dtype), atol=tolerance, rtol=tolerance))
