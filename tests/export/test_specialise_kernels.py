"""The real kernels specialised for real plans: no decided name is left, and the text is as ruff would have it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from export.exporting import as_text, specialised
from postlude.export.device.library import library
from postlude.export.syntax.source import text_of
from postlude.export.syntax.specialise import Inline
from postlude.plan.program import Word

# Chain 61 at KernelBench's sizes, as the plans have it.
CONVOLVE: dict[str, object] = {
    "STEPS_FN": Inline("relu({0})"),
    "KD": 3,
    "KH": 3,
    "KW": 3,
    "STRIDE_D": 1,
    "STRIDE_H": 1,
    "STRIDE_W": 1,
    "K_PER_TAP_ROW": 192,
    "C_PACKED": 64,
    "NEIGHBOURS": 1,
    "PLANES": 2,
    "IS_SCALED": True,
    "KEEPS_INF": False,
    "STORE": "raw",
    "MOMENTS": "both",
    "IS_CHANNELS_LAST": False,
    "IS_DENSE": True,
    "USES_INT64": False,
    "ALIGN": 8,
    "IS_EVEN_C": True,
    "BLOCKS_C": 1,
    "BLOCK_M": 128,
    "BLOCK_C": 128,
    "BLOCK_K": 64,
    "STAGES": 3,
    "ACC": Word("tl.float32"),
}
TILES = frozenset({"BLOCK_M", "BLOCK_C", "BLOCK_K", "STAGES"})
LARGEST: dict[str, object] = {
    "IS_CHANNELS_LAST": False,
    "HAS_SHORT_ROWS": False,
    "ALIGN": 1,
    "FLAGS_INF": False,
    "BLOCK_S": 4096,
    "BLOCK_C": 1,
}
HALF: dict[str, object] = {**CONVOLVE, "PLANES": 1, "IS_SCALED": False}
BLOCK: dict[str, object] = {
    **HALF,
    "STEPS_FN": Inline("{0}"),
    "K_PER_TAP_ROW": 6 * 32,
    "C_PACKED": 32,
    "NEIGHBOURS": 4,
    "IS_CHANNELS_LAST": True,
    "USES_INT64": True,
    "IS_DENSE": False,
    "ALIGN": 1,
    "BLOCKS_C": 2,
}


def ruff(*arguments: str, text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length", "120", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_file(text: str) -> str:
    called = sorted(
        set(re.findall(r"(?<![\w.])[a-z_]\w+(?=\()", text)) - {"range", "float", *re.findall(r"def (\w+)", text)}
    )
    imports = "".join(f"from device import {name}\n" for name in called)
    return f"import triton\nimport triton.language as tl\n{imports}\n\n{text}"


REAL: dict[str, tuple[str, dict[str, object], frozenset[str], int]] = {
    "61 fp32": ("convolve_kernel", CONVOLVE, TILES, 75),
    "61 fp32, tiles decided": ("convolve_kernel", CONVOLVE, frozenset(), 71),
    "61 bf16": ("convolve_kernel", HALF, TILES, 64),
    "block, channels-last": ("convolve_kernel", BLOCK, TILES, 72),
    "largest": ("largest_kernel", LARGEST, frozenset({"BLOCK_S"}), 22),
    "pack input": (
        "pack_input_kernel",
        {
            "C_PACKED": 64,
            "PLANES": 2,
            "IS_SCALED": True,
            "KEEPS_INF": False,
            "IS_CHANNELS_LAST": False,
            "BLOCK_W": 32,
            "BLOCK_C": 64,
            "BLOCK_PAD": 2,
        },
        frozenset({"BLOCK_W", "BLOCK_C"}),
        60,
    ),
    "pack weight": (
        "pack_weight_kernel",
        {
            "TAP_ROWS": 9,
            "KW": 3,
            "NEIGHBOURS": 1,
            "SPAN": 3,
            "C_PACKED": 64,
            "BLOCK_C": 128,
            "PLANES": 2,
            "IS_SCALED": True,
        }
        | {"KEEPS_INF": False, "IS_FLIPPED": True, "BLOCK_K": 1024},
        frozenset({"BLOCK_K"}),
        60,
    ),
    "combine": ("combine_moments_kernel", {"BLOCK_PARTS": 1024, "ACC": Word("tl.float32")}, frozenset(), 40),
    "finish": (
        "finish_kernel",
        {"NORM_STEPS_FN": Word("whole"), "HAS_NORM": True, "BLOCK_S": 2048, "ALIGN": 8, "ACC": Word("tl.float32")}
        | {"BLOCK_C": 0, "HAS_SHORT_ROWS": False, "USES_INT64": False, "IS_OUT_CONTIGUOUS": False},
        frozenset({"BLOCK_S"}),
        35,
    ),
    "moments": (
        "moments_kernel",
        {"STEPS_FN": Inline("{0}"), "HAS_M2": False, "BLOCK_S": 1024, "ALIGN": 8, "ACC": Word("tl.float32")}
        | {"BLOCK_C": 0, "HAS_SHORT_ROWS": False, "USES_INT64": False},
        frozenset(),
        35,
    ),
    "channels-last moments": (
        "moments_kernel",
        {"STEPS_FN": Inline("{0}"), "HAS_M2": True, "BLOCK_S": 64, "BLOCK_C": 32}
        | {"HAS_SHORT_ROWS": False, "ALIGN": 1, "USES_INT64": False, "ACC": Word("tl.float32")},
        frozenset(),
        50,
    ),
    "channels-last finish": (
        "finish_kernel",
        {"NORM_STEPS_FN": Inline("whole({0}, {1}, {2}, {3}, a0)"), "HAS_NORM": True, "BLOCK_S": 64, "BLOCK_C": 32}
        | {
            "HAS_SHORT_ROWS": False,
            "ALIGN": 1,
            "USES_INT64": False,
            "IS_OUT_CONTIGUOUS": True,
            "ACC": Word("tl.float32"),
        },
        frozenset(),
        40,
    ),
    "finish from moments": (
        "finish_moments_kernel",
        {
            "C": 24,
            "MOMENTS_FN": Word("moments"),
            "HAS_M2": True,
            "IS_OVER_SPACE": False,
            "BLOCK_C": 32,
            "BLOCK_PARTS": 64,
        },
        frozenset(),
        25,
    ),
    "group mean": ("group_mean", {"C_PER_GROUP": 3}, frozenset(), 8),
    "combine chunks": ("combine_chunks", {"HAS_M2": False, "BLOCK_C": 32, "BLOCK_PARTS": 64}, frozenset(), 20),
}


@pytest.mark.parametrize("name", REAL)
def test_real_kernels(name: str) -> None:
    kernel, constants, keep, most = REAL[name]
    before = text_of(library()[kernel])
    made = as_text(specialised(library()[kernel], constants, keep=keep))
    words = set(re.findall(r"\w+", made.text))
    assert words.isdisjoint(constants.keys() - keep), words & (constants.keys() - keep)
    ast.parse(made.text)
    ruff("check", "--select", "F,E,W", text=in_file(made.text))
    assert ruff("format", text=made.text) == made.text
    assert len(made.text.splitlines()) <= min(most, len(before.splitlines()) - 1)
    assert set(made.parameters) <= set(re.findall(r"\w+", before))


def test_61_in_half_precision_is_a_plain_kernel() -> None:
    made = as_text(specialised(library()["convolve_kernel"], HALF, {"convolve_kernel": "convolve_relu"}, TILES))
    assert made.parameters[:6] == ("d_x", "d_w", "p_y", "p_mean", "p_m2", "p_count")
    assert made.parameters[-4:] == ("BLOCK_M", "BLOCK_C", "BLOCK_K", "STAGES")
    assert made.text.count("if ") == 1  # for one block of channels, as the facts of a launch know
    lines = [line.strip() for line in made.text.splitlines()]
    assert lines[1] == "def convolve_relu("
    assert "d_x,  # descriptor [rows, columns] over the packed input" in lines
    assert "p_y,  # [N, C_OUT, S], out" in lines
    assert "w_high = d_w.load([column0, i * BLOCK_K])  # [BLOCK_C, BLOCK_K]" in lines
    assert "b_v = relu(b_v)" in lines
