"""Shapes in the remarks of a kernel's parameters."""

from __future__ import annotations

from postlude.export.device.library import Kernel
from postlude.export.device.sizes import common, remarks_with_sizes, with_remarks
from postlude.export.syntax.source import parse, text_of
from postlude.plan.program import Buffer, Descriptor

TEXT = """\
@triton.jit
def kernel(
    p_x,  # [N, C, 64] in the value's layout
    p_mean,  # [N·G, TILES], out
    p_w,  # [128, taps] through its strides
    p_odd,  # [ROWS, 7]
    p_both,  # [K, L]
    p_turned,  # [64, Q]
    d_x,  # descriptor [S, C_PACKED] over the input
    p_plain,
    C: tl.constexpr = 32,
    TILES: tl.constexpr = 5,
):
    pass
"""


def buffer(*shape: int) -> Buffer:
    return Buffer(0, shape, (), "float32", "scratch", 0)


def kernel(batch: int) -> Kernel:
    words = ("p_x", "p_mean", "p_w", "p_odd", "p_both", "p_turned", "d_x", "p_plain", "C", "TILES")
    given = {
        "p_x": buffer(batch, 32, 4, 16),
        "p_mean": buffer(batch, 8, 5),
        "p_w": buffer(128, 3, 3),
        "p_odd": buffer(3, 5),
        "p_both": buffer(4, 4),
        "p_turned": buffer(32, 64, 2),
        "p_plain": buffer(2),
        "d_x": Descriptor(buffer(8, 64), (8, 64), (64, 1), (4, 64)),
    }
    remarks = remarks_with_sizes(parse(TEXT), given, {"C": 32, "TILES": 5})
    return Kernel("kernel", TEXT, words, remarks)


def test_names_that_the_kernel_does_not_have_become_numbers() -> None:
    made = dict(kernel(16).remarks)
    assert made["p_x"] == "[16, C, 4·16] in the value's layout"  # two axes of the tensor
    assert made["p_mean"] == "[16·8, TILES], out"
    assert made["d_x"] == "descriptor [8, 64] over the input"
    assert dict(kernel(1).remarks)["p_mean"] == "[8, TILES], out"


def test_what_the_tensor_does_not_tell_stays() -> None:
    made = dict(kernel(16).remarks)
    assert made["p_w"] == "[128, taps] through its strides"  # a word, not a name
    assert made["p_odd"] == "[ROWS, 7]"  # 15 elements are no rows of 7
    assert made["p_both"] == "[K, L]"
    assert made["p_turned"] == "[64, 64]"  # whose axes are in another order
    assert made["p_plain"] == ""


def test_a_kernel_of_two_launches_says_what_holds_for_both() -> None:
    one, other = kernel(16), kernel(4)
    assert one == other
    text = text_of(with_remarks(common(one, other)))
    assert "p_x,  # [N, C, 64] in the value's layout" in text
    assert "d_x,  # descriptor [8, 64] over the input" in text
    assert "[16, C, 4·16]" in text_of(with_remarks(one))
