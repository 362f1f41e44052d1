"""Times models in turns on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from postlude.check.clock import Estimate, rotating, time_interleaved

Runnable = Callable[..., Any]


def race(
    models: Mapping[str, Runnable],
    sets: Sequence[tuple[Any, ...]],
    rounds: int,
    seconds: float,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Estimate]:
    """Seconds per call of each model in inference. Calls take the sets of inputs in turn."""
    variants = {name: rotating(model, sets) for name, model in models.items()}
    with torch.no_grad():
        return time_interleaved(variants, rounds=rounds, budget_s=seconds, progress=progress)
