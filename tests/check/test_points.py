"""Test points are reproducible, varied, and keep the form of what they replace."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import mutants
from postlude.check.budget import MIN_POINTS
from postlude.check.draws import Family, draw, generator_for, offset_for
from postlude.check.points import (
    families,
    inputs_like,
    random_state,
    tensors_for,
    tensors_like,
)

SHAPE = (6, 5, 7, 8)
ALL: tuple[Family, ...] = ("uniform", "normal", "hierarchical", "large offset", "heavy-tailed")


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_seed_gives_one_point(family: Family, dtype: torch.dtype) -> None:
    a, b, c = (draw(SHAPE, family, generator_for(seed), dtype) for seed in (1, 1, 2))
    assert a.dtype == dtype
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert bool(torch.isfinite(a).all())
    assert len(a.unique()) > 30  # 16-bit formats still hold the spread


def test_families_are_what_they_are_called() -> None:
    x = {family: draw((16, 8, 40, 40), family, generator_for(0), torch.float32) for family in ALL}
    assert 0 <= float(x["uniform"].min()) < float(x["uniform"].max()) <= 1
    assert float(x["large offset"].mean() / x["large offset"].std()) > 100
    assert float(x["heavy-tailed"].abs().max() / x["heavy-tailed"].std()) > 10
    means = {family: values.mean((2, 3)).std() for family, values in x.items()}
    assert means["hierarchical"] > 20 * means["normal"]  # offsets per sample and channel survive the mean
    offsets = [offset_for(torch.finfo(dtype).eps) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert offsets == sorted(set(offsets))


def test_enough_points_in_each_pool_even_if_all_independent_noise_is_refused() -> None:
    count = Counter(families(5))
    assert count["hierarchical"] >= MIN_POINTS
    assert count["large offset"] >= MIN_POINTS
    assert set(count) == set(ALL)


def test_inputs_keep_structure_strides_and_everything_that_is_not_floating() -> None:
    base = torch.zeros(4, 6, 8, 10)
    example = [
        base.to(memory_format=torch.channels_last),
        {"sliced": base[:, ::2, 1:-1], "expanded": torch.zeros(4, 1, 3).expand(4, 5, 3)},
        (torch.arange(3), 7, "text", None),
        torch.zeros(2, 3, dtype=torch.float16, requires_grad=True),
    ]
    new = inputs_like(example, "normal", seed=3)
    assert new[0].is_contiguous(memory_format=torch.channels_last)
    assert new[1]["sliced"].stride() == example[1]["sliced"].stride()  # type: ignore[index]
    assert new[1]["expanded"].stride() == (3, 0, 1)
    assert float(new[1]["expanded"].std()) > 0
    assert torch.equal(new[2][0], torch.arange(3))
    assert new[2][1:] == (7, "text", None)
    assert new[3].requires_grad
    assert new[3].dtype == torch.float16
    assert float(base.abs().max()) == 0  # the example is left alone


def test_random_state_draws_every_parameter_and_keeps_integers() -> None:
    module = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.GroupNorm(2, 64), nn.Linear(4, 4))
    module.register_parameter("scale", nn.Parameter(torch.ones(5)))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    state = random_state(module, seed=1)
    assert state.keys() == before.keys()
    for key, value in state.items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key]) == (not value.is_floating_point()), key
    assert float(state["1.running_var"].min()) > 0
    for gamma in (state["1.weight"], state["2.weight"]):
        assert float(gamma.min()) < -0.4
        assert float(gamma.max()) > 0.4
        assert float(gamma.abs().min()) >= 0.5
    assert 0.8 < float(state["0.weight"].std() * 27**0.5) < 1.2
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert torch.equal(random_state(module, seed=1)["0.weight"], state["0.weight"])


def test_tied_parameters_stay_tied() -> None:
    module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    module[1].weight = module[0].weight
    state = random_state(module, seed=0)
    assert torch.equal(state["0.weight"], state["1.weight"])
    assert not torch.equal(state["0.bias"], state["1.bias"])


def test_large_offset_sits_in_the_bias_at_even_seeds() -> None:
    for seed in (0, 1):
        x, _, bias, _, beta = tensors_for(
            mutants.CHAIN_23, mutants.INPUT_SHAPE, torch.float32, seed=seed, family="large offset"
        )
        large = (float(x.mean()) > 100, float(bias.mean()) > 100, float(beta.mean()) > 100)
        assert large == ((False, True, False) if seed == 0 else (True, False, False))


def test_chain_tensors_have_their_slots_shapes_and_layout() -> None:
    tensors = tensors_for(mutants.CHAIN_61, mutants.INPUT_SHAPE, torch.float16, seed=2, layout="channels_last")
    assert [tuple(tensor.shape) for tensor in tensors] == [mutants.INPUT_SHAPE, (4, 8, 3, 3, 3), (8,), (8,)]
    assert tensors[0].is_contiguous(memory_format=torch.channels_last_3d)
    assert {tensor.dtype for tensor in tensors} == {torch.float16}
    again = tensors_like(mutants.CHAIN_61, tensors, seed=2)
    assert [new.stride() for new in again] == [old.stride() for old in tensors]
    assert not any(
        torch.equal(new, old) for new, old in zip(again, tensors_like(mutants.CHAIN_61, tensors, 3), strict=True)
    )
