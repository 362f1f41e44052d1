"""Linear layers as graphs spell them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from postlude import reference
from postlude.graph.capture import capture_function
from postlude.graph.match import Match, match
from postlude.graph.tidy import functionalise

LINEAR = nn.Linear(6, 10)
WEIGHT, VECTOR, NUMBER = torch.randn(10, 6), torch.randn(10), torch.randn(1)
NORM, GROUPS = nn.BatchNorm1d(10), nn.GroupNorm(5, 10)
SPELLINGS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "linear(6→10) → relu": [
        lambda x: LINEAR(x).relu(),
        lambda x: F.linear(x, WEIGHT).relu(),
        lambda x: (x @ WEIGHT.T).relu(),
        lambda x: torch.matmul(x, WEIGHT.t()).relu(),
        lambda x: torch.mm(x, WEIGHT.transpose(0, 1)).relu(),
        lambda x: torch.addmm(VECTOR, x, WEIGHT.permute(1, 0)).relu(),
    ],
    "linear(6→10) → mul(per channel) → add(one number)": [lambda x: LINEAR(x) * VECTOR + NUMBER],
    "linear(6→10)": [
        LINEAR,
        lambda x: F.max_pool1d(LINEAR(x).unsqueeze(1), 2).squeeze(1),
        lambda x: LINEAR(x) + VECTOR[:1].expand(2)[None, :].sum() * x.new_ones(5, 1),
    ],
    "linear(6→10) → batch_norm(batch)": [lambda x: NORM(LINEAR(x))],
    "linear(6→10) → group_norm(5) → tanh": [lambda x: GROUPS(LINEAR(x)).tanh()],
    "linear(6→10) → layer_norm over the last axis": [
        lambda x: F.layer_norm(LINEAR(x), (10,)),
        lambda x: F.instance_norm(LINEAR(x)[:, None]).squeeze(1),
        lambda x: F.instance_norm(LINEAR(x).unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1),
    ],
    "linear(6→10) → softmax over features": [lambda x: LINEAR(x).softmax(1), lambda x: F.softmax(LINEAR(x), dim=-1)],
    "linear(6→10) → sum over features → mul(1.5)": [lambda x: LINEAR(x).sum(1, keepdim=True) * 1.5],
    "linear(6→10) → mean over features": [lambda x: LINEAR(x).mean(-1)],
    "linear(6→10) → max over features → abs": [lambda x: LINEAR(x).max(1, keepdim=True)[0].abs()],
    "linear(6→10) → avg_pool(5) → gelu → max over features": [
        lambda x: F.gelu(F.avg_pool1d(LINEAR(x).unsqueeze(1), 5).squeeze(1)).max(1)[0]
    ],
    "linear(6→10) → logsumexp over features → gelu": [lambda x: F.gelu(LINEAR(x).logsumexp(1))],
}
ROWS = [
    pytest.param(line, body, id=f"{line} {n}") for line, bodies in SPELLINGS.items() for n, body in enumerate(bodies)
]


def found_in(body: Callable[[Tensor], Tensor], x: Tensor) -> list[Match]:
    graph = capture_function(body, [x])
    functionalise(graph)
    return match(graph)[0]


@pytest.mark.parametrize(("line", "body"), ROWS)
def test_spellings(line: str, body: Callable[[Tensor], Tensor]) -> None:
    (found,) = found_in(body, torch.randn(5, 6))
    assert str(found.chain) == line


# What begins no chain: a weight that is no transpose, one axis, a bias for each sample.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "not a transpose": lambda x: (x @ torch.randn(6, 10)).relu(),
    "twice turned": lambda x: (x @ torch.randn(6, 10).permute(0, 1)).relu(),
    "a vector": lambda x: LINEAR(x[0]).relu(),
    "a bias for each sample": lambda x: torch.addmm(torch.randn(5, 10), x, WEIGHT.t()).relu(),
    "half a bias": lambda x: torch.addmm(VECTOR, x, WEIGHT.t(), beta=0.5).relu(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_linear_layer(name: str) -> None:
    assert [found for found in found_in(OTHERS[name], torch.randn(5, 6)) if found.chain.is_linear] == []


ENDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "softmax over rows": (lambda x: LINEAR(x).relu().softmax(0), "linear(6→10) → relu"),
    "softmax in another dtype": (lambda x: LINEAR(x).relu().softmax(1, dtype=torch.float64), "linear(6→10) → relu"),
    "a sum over rows": (lambda x: LINEAR(x).relu().sum(0), "linear(6→10) → relu"),
    "a sum of everything": (lambda x: LINEAR(x).relu().sum(), "linear(6→10) → relu"),
    "instance_norm of a matrix": (lambda x: F.instance_norm(LINEAR(x)[None]).squeeze(0), "linear(6→10)"),
    "overlapping windows": (lambda x: F.avg_pool1d(LINEAR(x).unsqueeze(1), 4, 2).squeeze(1), "linear(6→10)"),
    "windows of what is no layer's": (
        lambda x: F.avg_pool1d(LINEAR(x).relu().unsqueeze(1), 5).squeeze(1),
        "linear(6→10) → relu",
    ),
    "a residual after a reduction": (
        lambda x: LINEAR(x).mean(1, keepdim=True) + x,
        "linear(6→10) → mean over features",
    ),
    "a number with more axes than what is left": (
        lambda x: LINEAR(x).mean(1) + NUMBER[None],
        "linear(6→10) → mean over features",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_where_a_chain_ends(name: str) -> None:
    body, line = ENDS[name]
    assert [str(found.chain) for found in found_in(body, torch.randn(5, 6))] == [line]


def test_an_instance_norm_of_features_is_layer_norms() -> None:
    """A mutant of the reader would be seen: other axes than the second make other norms."""
    x = torch.randn(5, 6, dtype=torch.float64)
    (found,) = found_in(lambda x: F.instance_norm((x @ x.t()).unsqueeze(1)).squeeze(1), x)
    truth = F.instance_norm((x @ x.t()).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(reference.evaluate(found.chain, [x, x]), truth)
    wrong = found_in(lambda x: F.instance_norm((x @ x.t()).unsqueeze(0)).squeeze(0), x)
    assert [str(one.chain) for one in wrong] == ["linear(6→5)"]


def test_autocasts_dtype_is_the_layers() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = found_in(lambda x: LINEAR(x).relu(), torch.randn(5, 6))
    assert str(found.chain) == "linear(6→10, bfloat16) → relu"
