"""The problems that the demo shows, and how one of them is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from postlude import problem_file, problems
from postlude.check.clock import Estimate
from postlude.check.points import inputs_like
from postlude.cli.frame import Settings
from postlude.cli.race import Runnable, race
from postlude.cli.session import Opened
from postlude.cli.variants import FORWARD, compile_model
from postlude.report.model import COMPILE, EAGER, POSTLUDE

ROUNDS = 15
SECONDS = 3.0  # per problem and malloc; with four problems, two mallocs and compiling, about a minute in all


@dataclass(frozen=True)
class Case:
    key: str
    title: str
    file: str
    cpu_sizes: Mapping[str, int] = field(default_factory=dict)  # a GPU runs the file's own sizes, KernelBench's
    channels_last: bool = False
    recorded: tuple[str, str, str] = ("", "", "")  # chain, precision and shape of the H200's row
    note: str = ""  # about that row
    has_other_malloc: bool = True  # timed with the other malloc as well

    @property
    def layout(self) -> str:
        return ", channels-last" if self.channels_last else ""

    def open(self, device: str) -> Opened:
        folder = Path(next(iter(problems.__path__)))
        problem = problem_file.load(folder / f"{self.file}.py")
        if device == "cpu":
            problem.with_sizes(**self.cpu_sizes)
        model, inputs = problem.build(device), problem.inputs(device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
            inputs = tuple(x.to(memory_format=torch.channels_last_3d) for x in inputs)
        return Opened(problem, model, inputs, problem.run(model, inputs))


_PAIR = {"batch_size": 2}
_23 = "conv3d(3→24, k3) → group_norm(8) → mean over all but batch", "fp32", "128×3×24×32×32"
_61 = "conv_transpose3d(64→128, k3) → relu → group_norm(8)", "fp32", "16×64×32×32×32"
_BLOCK = "conv3d(32→32, k3, p1) → instance_norm → leaky_relu(0.01)", "auto", "2×32×128×128×128"
CASES = (
    Case("23", "Conv3d → GroupNorm → mean", "conv3d_group_norm_mean", {"batch_size": 16}, recorded=_23),
    Case("61", "ConvTranspose3d → ReLU → GroupNorm", "conv_transpose3d_relu_group_norm", _PAIR, recorded=_61),
    Case(
        "61cl",
        "ConvTranspose3d → ReLU → GroupNorm",
        "conv_transpose3d_relu_group_norm",
        _PAIR,
        channels_last=True,
    ),
    Case(
        "stage",
        "nnU-Net stage: 2 × (Conv3d → InstanceNorm → LeakyReLU)",
        "unet_stage",
        {"depth": 32, "height": 32, "width": 32},
        recorded=_BLOCK,
        note="half of it, fp16",
        has_other_malloc=False,
    ),
)


def compile_case(case: Case, settings: Settings, opened: Opened) -> tuple[Runnable | None, str]:
    """The case's model under torch.compile, or None and the reason."""
    model, device = case.open(settings.device).model, settings.device
    return compile_model(model, device, (FORWARD,), _sets(opened), opened.output)


def time_case(
    opened: Opened, fused: nn.Module, compiled: Runnable | None, update: Callable[[str], None] | None
) -> dict[str, Estimate]:
    models: dict[str, Runnable] = {EAGER: opened.model, POSTLUDE: fused}
    if compiled is not None:
        models[COMPILE] = compiled
    return race(models, _sets(opened), ROUNDS, SECONDS, update)


def _sets(opened: Opened) -> list[tuple[Any, ...]]:
    return [opened.inputs, inputs_like(opened.inputs, "uniform", seed=1)]
