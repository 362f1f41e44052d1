"""Wrong kernels, seen to fail: one line of a kernel is changed and the very checks that accept it must object."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.run.programs import HEADER, compose
from run.test_gpu import fused

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
    ("pack", "tap = ROWS * KW * UNFOLDED - 1 - tap", "tap = tap", TURNED, "normal"),
    ("pack", "kw = (o // CP) % SPAN - i_w", "kw = (o // CP) % SPAN", BLOCK, "normal"),
    ("pack", "tl.store(p_high + out + o_zero, zeros, mask=m_zero)", "pass", BLOCK, "normal"),
    ("pack", "scale_for(largest)[None, :]", "(2.0 * scale_for(largest))[None, :]", BLOCK, "normal"),
    ("convolve", "part = tl.dot(low, w_high.T)", "part = tl.dot(low * 0, w_high.T)", BLOCK, "normal"),
    ("convolve", "(x < OW // ALIGN)", "(x < OW // ALIGN + 1)", BLOCK, "normal"),
    ("convolve", "* ALIGN + o_p % ALIGN", "* ALIGN", VALID, "normal"),
    ("convolve", "FIRST - z_last", "FIRST + 1 - z_last", BY_NAME["61 small"].chain, "normal"),
    ("channels", 'tl.where(m_c[None, :], b_x, float("-inf"))', "b_x", SOFT, "normal"),
    ("channels", "exp(b_x - shift[:, None])", "exp(b_x)", SOFT, "normal"),
    ("channels", "o_g = (i_n * C + o_c) // PER_GROUP", "o_g = o_c // PER_GROUP", GROUPS, "normal"),
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
    module = importlib.import_module(f"postlude.kernels.triton.{name}")
    source = Path(str(module.__file__)).read_text()
    assert right in source
    shape = (2, 6, 13, 12) if chain.dims == 2 else BY_NAME["61 small"].shape
    tensors = tensors_for(chain, shape, torch.float32, family=family)
    assert (chain, family) in SEEN_RIGHT or error(chain, tensors) < 5e-6
    SEEN_RIGHT.add((chain, family))
    for key, made in compose(HEADER + source.replace(right, wrong)).items():
        if key.endswith("_kernel"):
            monkeypatch.setattr(module, key, made)
    assert error(chain, tensors) > 2e-5
