"""Variants of one model timed in turns, with the ratios that may be shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from postlude import hardware
from postlude.check.clock import Estimate, ratio, rotating, time_interleaved
from postlude.cli.output import between, milliseconds, times
from postlude.errors import PostludeError

EAGER, COMPILE, POSTLUDE, CANDIDATE = "eager", "torch.compile", "postlude", "candidate"
Call = Callable[..., Any]


@dataclass(frozen=True)
class Course:
    """What all variants run: these inputs in turn, with or without a backward."""

    inputs: Sequence[tuple[Any, ...]]
    output: Tensor
    train: bool = False
    rounds: int = 20
    seconds: float = 30.0

    def call(self, model: Call) -> Call:
        return _training_step(model, self.output) if self.train else model


def compile_model(model: nn.Module, course: Course, device: str) -> tuple[Call | None, str]:
    """The model under torch.compile after its first calls, or None and why there is none."""
    if device == "cpu" and hardware.cpp_compiler() is None:
        return None, "no C++ compiler here, which torch.compile needs on a CPU"
    if device == "cuda" and not hardware.has_triton():
        return None, "Triton is not installed, which torch.compile needs on a GPU"
    compiled = torch.compile(model)
    try:
        with torch.set_grad_enabled(course.train):
            for inputs in course.inputs:
                course.call(compiled)(*inputs)
    except Exception as error:  # anything between Dynamo and the C++ compiler
        return None, f"it failed ({_first_line(error)})"
    return compiled, ""


def race(
    models: Mapping[str, Call], course: Course, progress: Callable[[str], None] | None = None
) -> dict[str, Estimate]:
    """Seconds per call of each model."""
    if course.train and not course.output.is_floating_point():
        raise PostludeError("--train needs a model whose result has a gradient.")
    variants = {name: rotating(course.call(model), course.inputs) for name, model in models.items()}
    with torch.set_grad_enabled(course.train):
        return time_interleaved(variants, rounds=course.rounds, budget_s=course.seconds, progress=progress)


def estimate_data(estimate: Estimate) -> dict[str, Any]:
    return {
        "median": estimate.median,
        "low": estimate.low,
        "high": estimate.high,
        "coverage": estimate.coverage,
        "samples": list(estimate.samples),
    }


def estimate_from(data: Mapping[str, Any]) -> Estimate:
    return Estimate(data["median"], data["low"], data["high"], data["coverage"], tuple(data["samples"]))


def time_cell(timing: Estimate | None) -> str:
    return "–" if timing is None else milliseconds(timing.median)


def interval_cell(timing: Estimate) -> str:
    return f"{milliseconds(timing.low)}–{milliseconds(timing.high)}"


def ratio_cell(base: Estimate | None, timing: Estimate | None) -> str:
    if base is None or timing is None:
        return "–"
    found = ratio(base, timing)
    return f"{times(found.median)} ({between(found.low, found.high)})"


def comparison(base: Estimate, timing: Estimate, name: str, other: str) -> str:
    """How `name` fares beside `other`, in words that do not flatter it."""
    found = ratio(base, timing)
    if found.low > 1:
        return f"{name} is {times(found.median)} as fast as {other}."
    if found.high < 1:
        return f"{name} is slower than {other} here: {times(found.median)} its speed."
    return f"{name} and {other} are not clearly apart here ({between(found.low, found.high)}×)."


def _training_step(model: Call, output: Tensor) -> Call:
    # One fixed direction, as large as the result: what a loss would send back.
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    parameters = list(getattr(model, "parameters", tuple)())

    def step(*inputs: Any) -> None:
        for parameter in parameters:
            parameter.grad = None
        leaves = [_leaf(item) for item in inputs]
        result = model(*leaves)
        if not result.requires_grad:
            raise PostludeError("--train needs a model whose result has a gradient.")
        result.backward(weights)

    return step


def _leaf(item: Any) -> Any:
    """Inputs get a gradient too, as they do for a layer inside a network."""
    return item.detach().requires_grad_() if isinstance(item, Tensor) and item.is_floating_point() else item


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def bytes_of(inputs: Sequence[Any]) -> int:
    return sum(math.prod(item.shape) * item.itemsize for item in inputs if isinstance(item, Tensor))
