"""Wrong gradients, seen to fail: one line of a kernel or of an emitted text is changed, and the comparison objects."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import BY_NAME, Case
from postlude.run import launch
from postlude.run.compose import HEADER, compose
from run.test_gpu import library_convolution  # noqa: F401, a fixture
from run.test_gradient import ALL, compared

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("library_convolution", "poisoned_memory"),
]
SMALL = next(case for case in ALL if case.name == "relu norm")
MUTANTS: list[tuple[str, str, str, Case]] = [
    # where the text is, the right text, the wrong text, a case that tells them apart
    ("emitted", " - A - ", " - ", SMALL),
    ("emitted", " - x_hat * B", "", SMALL),
    ("emitted", "rstd * (", "(", SMALL),
    ("emitted", "d0 = d4 + ", "d0 = ", BY_NAME["value used twice"]),
    ("emitted", "d2 * x_hat", "d2 * v1", SMALL),
    ("emitted", "base // a5 * 6", "0", next(case for case in ALL if case.name == "a row shared over the norm")),
    ("derivatives", "tl.where(x <= 0, 0.0, g)", "tl.where(x < 0, 0.0, g)", SMALL),
    (
        "derivatives",
        "tl.where(x > 0, g, g * slope)",
        "tl.where(x > 0, g, 0.0)",
        BY_NAME["conv instance_norm leaky_relu"],
    ),
    ("gradient", "b_b *= b_gamma", "pass", SMALL),
    ("gradient", "(i_chunk * TILES_PER_PROGRAM + i_tile) * BLOCK_S", "i_tile * BLOCK_S", SMALL),
    ("gradient", "tl.where(mask, blocks[i], 0.0)", "blocks[0]", SMALL),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2][:40]}")
def test_a_wrong_gradient_is_seen_to_fail(mutant: tuple[str, str, str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    where, right, wrong, case = mutant
    assert compared(case, torch.float32, "contiguous") < 2e-5
    seen = []

    def changed(text: str) -> dict[str, Any]:
        # Another text than before, so that it is composed anew and finds what is in its place now.
        seen.append(right in text)
        return compose((text.replace(right, wrong) if where == "emitted" else text) + f"# {right} → {wrong}\n")

    monkeypatch.setattr(launch, "compose", changed)
    if where != "emitted":
        module = importlib.import_module(f"postlude.kernels.triton.{where}")
        source = Path(str(module.__file__)).read_text()
        seen.append(right in source)
        for key, made in compose(HEADER + source.replace(right, wrong)).items():
            if key.endswith(("_kernel", "_gradient")) and hasattr(module, key):  # not what compose lends every text
                monkeypatch.setattr(module, key, made)
    assert compared(case, torch.float32, "contiguous") > 1e-3
    assert any(seen)
