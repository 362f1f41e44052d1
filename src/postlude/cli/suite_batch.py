"""Problems of a suite that prepare side by side and are timed one at a time, while nothing else of theirs runs."""

from __future__ import annotations

import select
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postlude import hardware
from postlude.cli.suite_process import PREPARING, WAITING, Child, Ended

LOOK_S = 0.1  # between two looks at processes that say nothing


@dataclass(frozen=True)
class Told:
    """Who hears what of a batch."""

    keep: Callable[[int, Ended], None]  # a problem's place and its outcome, as soon as it has ended
    progress: Callable[[str], None]
    prepared: Callable[[str], None]  # once, where there are several


def run_batch(requests: Sequence[Mapping[str, Any]], limit_s: float, told: Told) -> None:
    """All of them prepared, then each one timed; whatever happens, no process is left."""
    with tempfile.TemporaryDirectory(prefix="postlude-suite-") as folder:
        several = len(requests) > 1
        lock = f"{folder}/choices" if several else None
        lines = told.progress if not several else lambda _: None  # what a single problem says itself
        children = [Child({**request, "lock": lock}, limit_s, lines) for request in requests]

        def tell() -> None:
            if several:
                told.progress(counted(children))

        def settle(child: Child) -> None:
            if child.outcome is not None:
                told.keep(children.index(child), child.outcome)

        try:
            for child in children:
                child.start(beside(len(requests), str(requests[0]["device"])))
            prepare(children, settle, tell)
            if several:
                told.prepared(counted(children))
            time_in_turn([child for child in children if child.state == WAITING], settle, tell)
        finally:
            for child in children:
                child.end()


def prepare(children: Sequence[Child], settle: Callable[[Child], None], tell: Callable[[], None]) -> None:
    """Returns when every one of them waits or has ended."""
    while preparing := [child for child in children if child.state == PREPARING]:
        tell()
        speaking, _, _ = select.select([child.line for child in preparing if child.is_heard], [], [], LOOK_S)
        for child in preparing:
            child.look(child.line in speaking)
            if child.state != PREPARING:
                settle(child)


def time_in_turn(waiting: Sequence[Child], settle: Callable[[Child], None], tell: Callable[[], None]) -> None:
    for child in waiting:
        tell()
        child.time()
        settle(child)


def counted(children: Sequence[Child]) -> str:
    """How many prepare, wait and are done with."""
    states = [child.state for child in children]
    over = [child.outcome for child in children if child.outcome is not None]
    timed = sum(outcome.report is not None for outcome in over)
    words = [f"{states.count(PREPARING)} preparing", f"{states.count(WAITING)} ready", f"{timed} timed"]
    return ", ".join([*words, *([f"{len(over) - timed} failed"] if len(over) > timed else [])])


def beside(count: int, device: str) -> dict[str, str]:
    """What is set for each of `count` processes that share the cores while they prepare.

    torch.compile compiles in the process itself: its pool of workers might still be starting when another is timed.
    On a CPU the threads are part of what is timed and stay as they are.
    """
    if count == 1:
        return {}
    threads = {"OMP_NUM_THREADS": str(max(1, hardware.usable_cores() // count))} if device == "cuda" else {}
    return {"TORCHINDUCTOR_COMPILE_THREADS": "1", **threads}
