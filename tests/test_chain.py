"""Chain: a value that prints as one line, survives text, and refuses what makes no sense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import BY_NAME, CASES, CHAIN_23, CHAIN_61, Case, conv
from postlude.chain import Chain, Normalize, Pointwise, Reduce, Scalar, Slot, Softmax, Value


def test_prints_as_one_line() -> None:
    assert str(CHAIN_61) == "conv_transpose3d(64→128, k3) → relu → group_norm(8)"
    assert str(CHAIN_23) == "conv3d(3→24, k3) → group_norm(8) → mean over all but batch"
    assert str(BY_NAME["grouped dilated conv"].chain) == "conv3d(4→8, k3, d2, g2) → relu → group_norm(4)"
    assert str(BY_NAME["conv relu amax"].chain) == "conv2d(3→1, k2) → relu → amax over channels"
    assert str(BY_NAME["value used twice"].chain).endswith("silu → mul(value 0) → group_norm(2) → add(value 0)")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_is_hashable_and_survives_text(case: Case) -> None:
    again = Chain.loads(case.chain.dumps())
    assert again == case.chain
    assert hash(again) == hash(case.chain)


@pytest.mark.parametrize(
    ("steps", "roles", "complaint"),
    [
        ((Pointwise("relu", (Value(1),)),), ("input",), "does not exist yet"),
        ((Pointwise("add", (Value(0), Slot(1))),), ("input",), "slot 1"),
        ((Pointwise("relu", (Value(0), Scalar(1.0))),), ("input",), "takes 1 operands"),
        ((Pointwise("leaky_relu", (Value(0),)),), ("input",), "settings"),
        ((Pointwise("softmax", (Value(0),)),), ("input",), "unknown operation"),
        ((Pointwise("add", (Scalar(1.0), Value(0))),), ("input",), "first operand"),
        ((Pointwise("mul", (Value(0), Scalar(float("inf")))),), ("input",), "not finite"),
        ((Normalize("local_norm", Value(0), 1, 1e-5),), ("input",), "unknown norm"),
        ((Normalize("layer_norm", Value(0), None, 1e-5),), ("input",), "over 0 of the last axes"),
        ((Normalize("group_norm", Value(0), 1, 1e-5, axes=1),), ("input",), "over 1 of the last axes"),
        (
            (Normalize("batch_norm", Value(0), None, 1e-5, running=(Slot(1), Slot(2))),),
            ("input", "channel", "channel"),
            "no running statistic",
        ),
        ((Reduce("max", Value(0), "space"),), ("input",), "unknown reduction max over space"),
        ((Reduce("amax", Value(0), "sample"),), ("input",), "unknown reduction amax over sample"),
        ((Softmax("softmin", Value(0)),), ("input",), "unknown softmax softmin"),
        (
            (Reduce("amax", Value(0), "channels"), Pointwise("add", (Value(1), Slot(1)))),
            ("input", "channel"),
            "after a reduction",
        ),
        (
            (Reduce("mean", Value(0), "space"), Pointwise("add", (Value(1), Slot(1)))),
            ("input", "full"),
            "after a reduction",
        ),
        ((Pointwise("relu", (Value(0),)),), ("weight",), "slots start with"),
    ],
)
def test_refuses_nonsense(steps: tuple[object, ...], roles: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Chain(3, None, steps, roles)  # type: ignore[arg-type]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("stride", "padding", "dilation", "extra"), [(1, 0, 1, 0), (2, 1, 1, 1), (3, 2, 2, 1)])
def test_output_space_is_pytorchs(transposed: bool, stride: int, padding: int, dilation: int, extra: int) -> None:
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    if transposed:
        options["output_padding"] = extra
    module = (nn.ConvTranspose3d if transposed else nn.Conv3d)(2, 3, 3, **options)
    ours = conv(3, (2, 3), transposed=transposed, **options)
    assert ours.output_space((9, 10, 11)) == tuple(module(torch.zeros(1, 2, 9, 10, 11)).shape[2:])


def test_last_uses_keep_a_value_that_is_read_again() -> None:
    uses = BY_NAME["value used twice"].chain.last_uses
    assert uses[0] == 4
    assert uses[1] == 2
    assert uses[4] == 5
