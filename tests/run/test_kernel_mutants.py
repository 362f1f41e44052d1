"""Wrong kernels, seen to fail: one line of a kernel is changed and the very checks that accept it must object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from run.test_gpu import fused
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
GROUPS = Builder(2, conv(2, (6, 5), bias=False)).norm(None).reduce("min", "channels").chain()
OFFSET = Builder(2).norm(None).chain()
BLOCK = Builder(2, conv(2, (6, 5), padding=1)).op("relu").norm(None).chain()
TURNED = Builder(2, conv(2, (6, 5), transposed=True)).norm(5).chain()
SOFT = Builder(2, conv(2, (6, 5))).op("add", 3.0).reduce("logsumexp", "channels").chain()  # a lane of 8 for each
VALID = Builder(2, conv(2, (6, 5))).norm(5).chain()  # rows of 12 and of 10: runs of two

MUTANTS: list[tuple[str, str, str, Chain, str]] = [
    # module, the right text, the wrong text, a chain that tells them apart, the family of its input
    ("normalize", "shift + mean, tl.where(m2 < 0.0, 0.0, m2)", "shift + mean, m2 * 0.5", OFFSET, "normal"),
    ("normalize", "b_count * (b_mean - mean) * (b_mean - mean)", "0.0", OFFSET, "hierarchical"),
    ("pack", "tap = TAP_ROWS * KW * UNFOLDED_TAPS - 1 - tap", "tap = tap", TURNED, "normal"),
    ("pack", "kw = (o // C_PACKED) % SPAN - i_w", "kw = (o // C_PACKED) % SPAN", BLOCK, "normal"),
    ("pack", "tl.store(p_high + out + o_zero, zeros, mask=m_zero)", "pass", BLOCK, "normal"),
    ("pack", "* scale[None, :]", "* (2.0 * scale)[None, :]", BLOCK, "normal"),
    ("planes", "part = tl.dot(left_low, right)", "part = tl.dot(left_low * 0, right)", BLOCK, "normal"),
    ("convolve", "(x < OW // ALIGN)", "(x < OW // ALIGN + 1)", BLOCK, "normal"),
    ("convolve", "* ALIGN + o_p % ALIGN", "* ALIGN", VALID, "normal"),
    ("convolve", "FIRST_SLICE - z_last", "FIRST_SLICE + 1 - z_last", BY_NAME["61 small"].chain, "normal"),
    (
        "channels",
        'else float("-inf"))\n        m_s = o_s < S',
        "else b_x)\n        m_s = o_s < S",
        SOFT,
        "normal",
    ),
    ("channels", "exp(b_x - shift[:, None])", "exp(b_x)", SOFT, "normal"),
    ("channels", "own_rows(i_n, o_c, C, BLOCK_C) // C_PER_GROUP", "o_c // C_PER_GROUP", GROUPS, "normal"),
]


SEEN_RIGHT: set[tuple[Chain, str]] = set()


def error(chain: Chain, tensors: tuple[Tensor, ...]) -> float:
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    off = (fused(chain, list(tensors)).double() - truth).abs().max() / truth.std()
    return float(torch.nan_to_num(off, nan=torch.inf))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2][:40]}")
@pytest.mark.usefixtures("poisoned_memory", "packed_product")
def test_a_wrong_kernel_is_seen_to_fail(
    mutant: tuple[str, str, str, Chain, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, right, wrong, chain, family = mutant
    shape = (2, 6, 13, 12) if chain.dims == 2 else BY_NAME["61 small"].shape
    tensors = tensors_for(chain, shape, torch.float32, family=family)
    assert (chain, family) in SEEN_RIGHT or error(chain, tensors) < 5e-6
    SEEN_RIGHT.add((chain, family))
    replace_text(monkeypatch, name, right, wrong)
    assert error(chain, tensors) > 2e-5
