"""How long each chain of a network takes alone, as PyTorch runs it and as it runs now."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from postlude.check.clock import time_interleaved
from postlude.check.points import tensors_like
from postlude.optimized import SiteReport
from postlude.plan.problem import empty
from postlude.run.execute import call, call_plain, prepare

ROUNDS = 5
WINDOW_S = 0.01
Seconds = tuple[float, float]


def site_seconds(
    sites: Sequence[SiteReport], budget_s: float, progress: Callable[[str], None] | None = None
) -> list[Seconds]:
    """Before and after, for every site; equal sites are timed once, within `budget_s` in all."""
    unlike = list(dict.fromkeys((site.chain, site.problem, site.is_fused) for site in sites))
    known: dict[object, Seconds] = {}
    for number, key in enumerate(unlike, 1):
        if progress:
            progress(f"chain {number} of {len(unlike)}")
        site = next(site for site in sites if (site.chain, site.problem, site.is_fused) == key)
        known[key] = _seconds(site, budget_s / len(unlike))
    return [known[site.chain, site.problem, site.is_fused] for site in sites]


def _seconds(site: SiteReport, budget_s: float) -> Seconds:
    blank = [empty(spec, site.chain.dims, site.problem.place) for spec in site.problem.tensors]
    tensors = list(tensors_like(site.chain, blank, seed=0))
    ways: dict[str, Callable[[], object]] = {"before": functools.partial(call_plain, site.chain, tensors)}
    if site.is_fused:
        ways["after"] = functools.partial(call, prepare(site.chain, site.outcome), tensors)
    with torch.no_grad():
        found = time_interleaved(
            {name: lambda _, way=way: way() for name, way in ways.items()},  # type: ignore[misc]
            rounds=ROUNDS,
            min_window_s=WINDOW_S,
            budget_s=budget_s,
        )
    before = found["before"].median
    return before, found["after"].median if site.is_fused else before
