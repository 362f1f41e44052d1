"""Times variants of one model in turns, with the ratios that may be shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from postlude import hardware
from postlude.check.clock import Estimate, ratio, rotating, time_interleaved
from postlude.errors import first_line
from postlude.report import gather, words
from postlude.report.model import COMPILE, EAGER, POSTLUDE

__all__ = ["COMPILE", "EAGER", "POSTLUDE", "Course", "compile_model", "race"]
Runnable = Callable[..., Any]


@dataclass(frozen=True)
class Course:
    """What all variants run: these inputs in turn."""

    inputs: Sequence[tuple[Any, ...]]
    rounds: int = 20
    seconds: float = 30.0


def no_compiler(device: str) -> str:
    """Why torch.compile cannot run here; empty if it can."""
    if device == "cpu" and hardware.cpp_compiler() is None:
        return "no C++ compiler here, which torch.compile needs on a CPU"
    if device == "cuda" and not hardware.has_triton():
        return "Triton is not installed, which torch.compile needs on a GPU"
    return ""


def compile_model(model: nn.Module, course: Course, device: str) -> tuple[Runnable | None, str]:
    """The model under torch.compile after its first calls, or None and the reason."""
    if why := no_compiler(device):
        return None, why
    compiled = torch.compile(model)
    try:
        with torch.no_grad():
            for inputs in course.inputs:
                compiled(*inputs)
    except Exception as error:  # anything between Dynamo and the C++ compiler
        return None, f"it failed ({first_line(error)})"
    return compiled, ""


def race(
    models: Mapping[str, Runnable], course: Course, progress: Callable[[str], None] | None = None
) -> dict[str, Estimate]:
    """Seconds per call of each model."""
    variants = {name: rotating(model, course.inputs) for name, model in models.items()}
    with torch.no_grad():
        return time_interleaved(variants, rounds=course.rounds, budget_s=course.seconds, progress=progress)


def time_cell(timing: Estimate | None) -> str:
    return "–" if timing is None else words.milliseconds(timing.median)


def ratio_cell(base: Estimate | None, timing: Estimate | None) -> str:
    if base is None or timing is None:
        return "–"
    return words.times_in_range(gather.interval_of(ratio(base, timing)))
