"""Steps that spell one word become it, and mean the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import postlude
from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain, Value
from postlude.check import tensors_for
from postlude.graph.idioms import with_idioms


def spelled(*words: str, mul: tuple[int, int]) -> Builder:
    """A convolution, these words one after the other, and the product of two values."""
    builder = Builder(2, conv(2, (3, 4)))
    for word in words:
        builder = builder.op(word, **({"beta": 1.0, "threshold": 20.0} if word == "softplus" else {}))
    first, second = mul
    assert first == len(words)
    return builder.op("mul", Value(second))


CASES: dict[str, tuple[Chain, str]] = {
    "silu": (spelled("sigmoid", mul=(1, 0)).norm(2).chain(), "conv2d(3→4, k3) → silu → group_norm(2)"),
    "mish": (spelled("softplus", "tanh", mul=(2, 0)).norm(2).chain(), "conv2d(3→4, k3) → mish → group_norm(2)"),
    "after a step": (
        Builder(2, conv(2, (3, 4))).op("relu").op("sigmoid").op("mul", Value(1)).op("add", Value(1)).chain(),
        "conv2d(3→4, k3) → relu → silu → add(value 1)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_that_spell_a_word_become_it(name: str) -> None:
    chain, expected = CASES[name]
    shorter = with_idioms(chain)
    assert str(shorter) == expected
    tensors = tensors_for(chain, (2, 3, 6, 7), torch.float64, "cpu")
    torch.testing.assert_close(reference.evaluate(shorter, tensors), reference.evaluate(chain, tensors))


@pytest.mark.parametrize(
    "chain",
    [
        # Another value than the one that the words began with.
        Builder(2, conv(2, (3, 4))).op("relu").op("sigmoid").op("mul", Value(0)).chain(),
        # Somebody else reads what is in between.
        Builder(2, conv(2, (3, 4))).op("sigmoid").op("mul", Value(0)).op("add", Value(1)).chain(),
        # Not the usual softplus.
        Builder(2, conv(2, (3, 4))).op("softplus", beta=2.0, threshold=20.0).op("tanh").op("mul", Value(0)).chain(),
        Builder(2, conv(2, (3, 4))).op("tanh").op("mul", Value(0)).chain(),
        Builder(2, conv(2, (3, 4))).op("sigmoid").op("add", Value(0)).chain(),
    ],
    ids=str,
)
def test_others_stay(chain: Chain) -> None:
    assert with_idioms(chain) is chain


def test_a_model_that_spells_mish_is_seen_to() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv3d(4, 8, 3), nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.norm(torch.multiply(torch.tanh(nn.functional.softplus(x)), x))

    found = postlude.optimize(Model().eval(), torch.randn(2, 4, 8, 8, 8), verify=True)
    assert [str(site.chain) for site in found.sites] == ["conv3d(4→8, k3) → mish → group_norm(2)"]
    assert found.verdict is None or found.verdict.right
