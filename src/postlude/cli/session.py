"""A problem opened on a device, and the data about what Postlude did with it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from postlude import hardware, problem_file
from postlude.cards import Card
from postlude.cli.frame import Settings
from postlude.cli.other_shapes import OTHER, OWN, at_other_shapes
from postlude.cli.output import working
from postlude.optimized import Optimized, SiteReport
from postlude.pipeline import optimize as optimize_model
from postlude.plan import Plan
from postlude.problem_file import ProblemFile


@dataclass(frozen=True)
class Opened:
    problem: ProblemFile
    model: nn.Module
    inputs: tuple[Any, ...]
    output: Tensor  # the original model's result, or the first of several


def open_problem(settings: Settings, path: Path, shapes: str = OWN, takes_several: bool = False) -> Opened:
    """Loads, builds and runs the model once, so that a problem with the file is reported first.

    With `takes_several` the model may return several tensors.
    """
    problem = problem_file.load(path)
    if shapes == OTHER:
        problem = at_other_shapes(problem)
    with working(f"Running {path.name} as it is"):
        model = problem.build(settings.device)
        inputs = problem.inputs(settings.device)
        return Opened(problem, model, inputs, problem.run(model, inputs, takes_several))


def fuse(settings: Settings, model: nn.Module, inputs: tuple[Any, ...], *, train: bool = False) -> Optimized:
    """`postlude.optimize` in the mode that will be used: training has other plans than inference."""
    with working("Finding chains and checking them against float64") as progress, torch.set_grad_enabled(train):
        precision, convolution = settings.precision, settings.convolution
        return optimize_model(model, inputs, precision=precision, convolution=convolution, progress=progress)


def fuse_silently(settings: Settings, model: nn.Module, inputs: tuple[Any, ...]) -> Optimized:
    """The same for inference, for a model that was checked elsewhere."""
    with torch.no_grad():
        return optimize_model(model, inputs, precision=settings.precision, verify=False)


def machine_data(settings: Settings) -> dict[str, Any]:
    """What measurements depend on, for --json."""
    machine = hardware.machine_for(settings.device)
    return {
        "device": settings.device,
        "precision": settings.precision,
        "threads": machine.threads,
        "card": card_data(machine.card) if machine.device == "cuda" else None,
        "malloc": malloc_word(),
        "versions": hardware.versions(),
    }


def card_data(card: Card) -> dict[str, str]:
    return {"name": card.name, "architecture": card.architecture, "figures": card.figures}


def malloc_word() -> str:
    return "tuned malloc" if hardware.malloc_is_tuned() else "system malloc"


def result_data(result: Optimized) -> dict[str, Any]:
    return {
        "sites": [site_data(site) for site in result.sites],
        "gathered": list(result.gathered),
        "conversions": [dataclasses.asdict(item) for item in result.conversions],
        "declined": [{"name": d.name, "what": d.what, "reason": d.reason} for d in result.declined],
        "failure": result.failure,
        "verdict": None if result.verdict is None else result.verdict.as_dict(),
    }


def site_data(site: SiteReport) -> dict[str, Any]:
    outcome = site.outcome
    how: dict[str, Any] = {"fused": isinstance(outcome, Plan), "reasons": list(outcome.reasons)}
    if isinstance(outcome, Plan):
        how |= {
            "passes": outcome.describe(),
            "training": outcome.describe_training(),
            "slab": outcome.slab,
            "slabs": outcome.slabs,
            "slab_bytes": outcome.slab_bytes,
            "moved_bytes": outcome.moved_bytes,
            "eager_bytes": outcome.eager_bytes,
        }
    return {
        "name": site.name,
        "chain": str(site.chain),
        "inputs": [{"shape": list(t.shape), "dtype": t.dtype, "layout": t.layout} for t in site.problem.tensors],
        "plan": how,
        "verdict": None if site.verdict is None else site.verdict.as_dict(),
    }
