"""What is checked while variants are timed: results of randomly chosen calls, the second clock, the machine's load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from postlude import hardware
from postlude.check.clock import Window
from postlude.check.distribution import belongs
from postlude.check.floor import clocks_apart
from postlude.cli.race import Runnable

CROWDED = 0.5  # of the cores, besides the one that we use ourselves
RANDOM = "results of timed calls: the model's own result differs from call to call, so they were not compared"


@dataclass
class Watch:
    """Sees every window that counts."""

    reference: Runnable | None  # PyTorch's model; None if its result is random
    mode: str
    device: str
    allowed: Mapping[str, float] = field(default_factory=dict)  # variant → RMS, where a verdict says it
    wrong: dict[str, str] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    clocks: list[int] = field(default_factory=list)
    host: dict[str, list[float]] = field(default_factory=dict)
    events: dict[str, list[float]] = field(default_factory=dict)
    per_call: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, name: str, window: Window) -> None:
        if window.event_seconds is not None:
            self.host.setdefault(name, []).append(window.seconds)
            self.events.setdefault(name, []).append(window.event_seconds)
            self.per_call.setdefault(name, []).append(window.event_seconds / window.calls)
        if (clock := hardware.clock_mhz(self.device)) is not None:
            self.clocks.append(clock)
        self.judge(name, window)

    def judge(self, name: str, window: Window) -> None:
        """Compares the result of a timed call with PyTorch's for the same inputs."""
        if window.inputs is None or self.reference is None or name in self.wrong:
            return
        with torch.no_grad():
            expected = self.reference(*window.inputs)
        self.checked[name] = self.checked.get(name, 0) + 1
        problem = belongs(window.output, expected, self.mode, self.allowed.get(name, 0.0))
        if problem is not None:
            self.wrong[name] = f"the result of a timed call of {name} {problem}"

    @property
    def disagreements(self) -> list[str]:
        found = (clocks_apart(name, self.host[name], self.events[name]) for name in self.events)
        return [sentence for sentence in found if sentence is not None]

    @property
    def clock_words(self) -> str:
        return f"{min(self.clocks)} to {max(self.clocks)} MHz" if self.clocks else ""

    def event_seconds(self, name: str) -> float | None:
        found = sorted(self.per_call.get(name, ()))
        return found[len(found) // 2] if found else None


def crowded(device: str) -> str | None:
    """A finding if other processes use the CPU before ours is timed."""
    load, cores = hardware.load_average(), hardware.usable_cores()
    if device != "cpu" or load is None or load <= CROWDED * cores + 1:
        return None
    return (
        f"the machine had a load of {load:.1f} on {cores} cores before anything was timed: other processes use it too"
    )


def is_random(model: Runnable, inputs: tuple[Any, ...], mode: str) -> bool:
    """Whether a second call gives another result than the first."""
    with torch.no_grad():
        first = model(*inputs).detach().clone()
        return belongs(model(*inputs), first, mode) is not None
