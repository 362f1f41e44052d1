"""The files of tests/corpus on a card: memory that the allocator hands out again, streams that nobody waits for."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from check import corpus
from check.corpus import Entry, entries
from postlude.check.verdict import Verdict

pytestmark = pytest.mark.gpu
WORKERS = 6  # processes at a time: each brings up CUDA, which takes seconds
CALL_SECONDS = 60.0  # the first call compiles


def run_all(folder: str) -> dict[str, Verdict]:
    chosen = [entry for entry in entries(folder) if entry.name != "hangs"]
    for entry in chosen:
        corpus.problem(entry.reference, entry.backward, "cuda")

    def judge(entry: Entry) -> Verdict:
        patient = dataclasses.replace(entry, timeout=max(entry.timeout, CALL_SECONDS))
        return corpus.verdict_on(patient, device="cuda")

    with ThreadPoolExecutor(WORKERS) as pool:
        return dict(zip((entry.name for entry in chosen), pool.map(judge, chosen)))


def test_every_cheat_is_rejected() -> None:
    accepted = {name: verdict for name, verdict in run_all("cheats").items() if verdict.outcome != "wrong"}
    assert not accepted, accepted


def test_every_honest_kernel_is_accepted() -> None:
    rejected = {name: verdict.reasons for name, verdict in run_all("honest").items() if not verdict.right}
    assert not rejected, rejected
