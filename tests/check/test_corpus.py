"""Every cheat of tests/corpus is rejected and every honest kernel is accepted, over the real, isolated path."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from check import corpus
from check.corpus import Entry, entries
from postlude.check.verdict import Verdict

CHEATS, HONEST = entries("cheats"), entries("honest")
WORKERS = 2  # processes at a time
LEAST = 30


def run_all(chosen: list[Entry]) -> dict[str, Verdict]:
    """Those that tamper with their process get one of their own; the tame ones share a few."""
    for entry in chosen:
        corpus.problem(entry.reference, entry.backward)  # made here: the workers only read it
    tame = [entry for entry in chosen if not entry.alone]
    shares = [tame[first::WORKERS] for first in range(WORKERS)]
    batches = [*shares, *([entry] for entry in chosen if entry.alone)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(WORKERS) as pool, pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # of the candidates: two processes at a time are enough
            found = pool.map(lambda batch: list(corpus.verdicts(batch)), batches)
            return {entry.name: verdict for batch in found for entry, verdict in batch}
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def on_cheats() -> dict[str, Verdict]:
    return run_all(CHEATS)


@pytest.fixture(scope="module")
def on_honest() -> dict[str, Verdict]:
    return run_all([entry for entry in HONEST if not entry.interpreted])


def test_there_are_enough_of_both_and_each_says_what_it_does() -> None:
    assert len(CHEATS) >= LEAST
    assert len(HONEST) >= LEAST
    for entry in (*CHEATS, *HONEST):
        sentence = entry.path.read_text(encoding="utf-8").split('"""')[1].strip().splitlines()[0]
        assert sentence.endswith("."), entry.name


def test_the_readme_counts_them() -> None:
    readme = " ".join((corpus.FOLDER.parent.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"{len(CHEATS)} cheats, all rejected, and {len(HONEST)} honest kernels" in readme


@pytest.mark.parametrize("entry", CHEATS, ids=lambda entry: entry.name)
def test_cheat_is_rejected(on_cheats: dict[str, Verdict], entry: Entry) -> None:
    verdict = on_cheats[entry.name]
    assert verdict.outcome == "wrong", verdict
    assert all("running the file fails" not in reason for reason in verdict.reasons), verdict


@pytest.mark.parametrize("entry", [e for e in HONEST if not e.interpreted], ids=lambda entry: entry.name)
def test_honest_kernel_is_accepted(on_honest: dict[str, Verdict], entry: Entry) -> None:
    verdict = on_honest[entry.name]
    assert verdict.right, verdict


@pytest.mark.interpret
def test_honest_triton_kernels_are_accepted() -> None:
    """In one process: they are tame, and it imports torch and Triton once."""
    found = {entry.name: verdict for entry, verdict in corpus.verdicts([e for e in HONEST if e.interpreted])}
    assert len(found) > 1
    assert {name: verdict for name, verdict in found.items() if not verdict.right} == {}


# What each of these tries is found for the reason that it should be.
REASONS = {
    "stale_memory": "output: rms error",
    "relies_on_zeroed_memory": "output: rms error",
    "changes_its_input": "changed its inputs",
    "changes_its_parameters": "changed its parameters: linear.weight",
    "changes_its_parameters_in_evaluation": "changed its parameters: linear.weight",
    "one_buffer": "an earlier result changed",
    "lazy_subclass": "subclass tensor",
    "answers_in_double": "dtype torch.float64",
    "answers_transposed": "strides (63, 1, 7)",
    "drops_nan": "NaN in the input the result lost it",
    "cancels": "large offset",
    "other_state": "state_dict has in addition: kernel",
    "hangs": "failed: a call took longer than 1 seconds.",
    "crashes": "failed: the candidate's process was ended by SIGSEGV",
    "ends_the_process": "failed: the candidate's process ended with exit code 0",
    "no_gradient": "gradient of input[0]: missing",
    "wrong_gradient": "gradient of input[0]: rms error",
    "drops_nan_of_the_second_input": "NaN (input 2) in the input the result lost it",
    "learns_nothing_from_frozen_inputs": "the output has no gradient",
    "masked_rows_become_nan": "-infinity in the input spreads",
    "one_buffer_for_gradients": "an earlier gradient changed",
    "returns_a_view_with_gaps": "a view with gaps",
    "skips_nan_in_a_search": "NaN in the input gives other integers",
    "writes_to_the_incoming_gradient": "writes to the gradient that it is given",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_the_right_one(on_cheats: dict[str, Verdict], name: str) -> None:
    assert any(REASONS[name] in reason for reason in on_cheats[name].reasons), on_cheats[name]


PLACES = {
    "ignores_the_storage_offset": "unaligned inputs",
    "knows_the_row_length": "more along axis 1",
    "wrong_in_gradient_mode": "gradient mode on",
    "wrong_without_gradient_mode": "gradient mode off",
}


@pytest.mark.parametrize("name", PLACES)
def test_the_point_that_tells_is_named(on_cheats: dict[str, Verdict], name: str) -> None:
    assert f"the largest error of the output is at the point “{PLACES[name]}”" in on_cheats[name].notes
