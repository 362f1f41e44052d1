"""Who multiplies in a linear layer, and in which passes the rest runs."""

from __future__ import annotations

import dataclasses

import pytest

from cases import Builder, conv
from kernels.test_compile_linear import CHAINS, problem_of
from machines import A100, H200
from postlude import cards
from postlude.chain import Chain
from postlude.hardware import Machine, machine_on
from postlude.plan import Plan, Refusal, lower
from postlude.plan.barriers import last_fused_step, row_parts, rows_from
from postlude.plan.linear import LinearGemm
from postlude.plan.passes import KeepMoments, Store
from postlude.plan.trained import MOST_TRAINED, trained_part

L40S = machine_on(cards.L40S)
CPU = Machine("cpu", 2, 32 << 20, has_triton=True, has_onednn=True, compiles_cpp=True)


def layer(inner: int, outer: int) -> Builder:
    return Builder(0, conv(0, (inner, outer)))


def planned(name: str, machine: Machine = H200, **changes: object) -> Plan:
    chain, rows = CHAINS[name]
    found = lower(chain, dataclasses.replace(problem_of(chain, rows), **changes), machine)  # type: ignore[arg-type]
    assert isinstance(found, Plan), found
    return found


@pytest.mark.parametrize("name", [name for name in CHAINS if name != "odd"])
def test_fp32_is_ours_where_tensor_cores_are_three_times_as_fast(name: str) -> None:
    for machine in (H200, A100):
        assert isinstance(planned(name, machine).own, LinearGemm)
    chain, rows = CHAINS[name]
    theirs = lower(chain, problem_of(chain, rows), L40S)
    assert isinstance(theirs, Refusal) or theirs.own is None


def test_a_large_weight_for_few_rows_is_cut_where_it_lies() -> None:
    own = planned("cut").own
    assert isinstance(own, LinearGemm)
    assert own.cuts_weight
    assert own.shared_bytes * 2 <= H200.card.shared_bytes  # two blocks of a multiprocessor
    own = planned("pointwise").own
    assert isinstance(own, LinearGemm)
    assert not own.cuts_weight


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_cublass(dtype: str) -> None:
    chain, rows = CHAINS["softmax"]
    plan = lower(chain, problem_of(chain, rows, dtype), H200)
    assert isinstance(plan, Plan)
    assert plan.own is None
    single = layer(8192, 8192).op("relu").chain()
    refused = lower(single, problem_of(single, 1024, dtype), H200)
    assert isinstance(refused, Refusal)
    assert "one pass after it is what eager has" in str(refused)


def test_tf32_follows_the_switch_of_matrix_products_alone() -> None:
    assert planned("gelu", allows_tf32=True).own is not None  # convolutions' switch
    assert planned("gelu", multiplies_tf32=True).own is None
    asked = planned("gelu", multiplies_tf32=True, precision="fp32").own
    assert isinstance(asked, LinearGemm)
    assert asked.arithmetic.planes == 2
    asked = planned("gelu", precision="tf32").own
    assert isinstance(asked, LinearGemm)
    assert asked.arithmetic.planes == 1


def test_small_products_and_cpus_are_pytorchs() -> None:
    chain = layer(64, 64).op("relu").op("mul", 2.0).chain()
    assert isinstance(lower(chain, problem_of(chain, 64), H200), Refusal)
    chain, rows = CHAINS["pointwise"]
    refused = lower(chain, dataclasses.replace(problem_of(chain, rows), device="cpu"), CPU)
    assert "PyTorch runs linear layers on a CPU" in str(refused)


def test_passes() -> None:
    assert [type(item.sink) for item in planned("pointwise").passes] == [Store]
    groups = planned("groups").passes
    assert [(item.first, item.last) for item in groups] == [(1, 2), (3, 3)]
    batch = planned("batch").passes
    assert [type(item.sink) for item in batch] == [KeepMoments, Store]
    assert planned("groups").launches == 4  # two to pack, the product, the rows
    assert planned("cut").launches == 2


def rows_of(chain: Chain) -> tuple[int | None, int, int]:
    return rows_from(chain), row_parts(chain), last_fused_step(chain)


def test_what_a_pass_by_rows_takes_in() -> None:
    assert rows_of(layer(8, 8).op("relu").norm(4).op("tanh").reduce("max", "channels").chain()) == (2, 4, 3)
    assert rows_of(layer(8, 8).norm(1).softmax().reduce("max", "channels").op("abs").chain()) == (1, 1, 4)
    assert rows_of(layer(8, 8).softmax().norm(4).op("abs").chain()) == (1, 1, 1)
    assert rows_of(layer(8, 8).batch_norm().softmax().chain()) == (None, 1, 1)
    assert rows_of(layer(8, 8).op("relu").chain()) == (None, 1, 1)


def covered(chain: Chain) -> Chain:
    return trained_part(chain, problem_of(chain, 64))


def test_in_training_barriers_over_features_are_covered() -> None:
    for built in (
        layer(8, 8).op("relu").norm(4).op("tanh"),
        layer(8, 8).softmax(),
        layer(8, 8).layer_norm().softmax().reduce("max", "channels").op("tanh"),
        layer(8, 8).op("relu").batch_norm().op("tanh"),
    ):
        chain = built.chain()
        assert covered(chain) is chain
    rest = layer(8, 8).op("relu").norm(4).reduce("max", "channels").chain()
    assert str(covered(rest)) == "linear(8→8) → relu → group_norm(4)"


def test_in_training_long_rows_and_second_norms_are_pytorchs() -> None:
    long = layer(128, 2 * MOST_TRAINED).op("relu").softmax().chain()
    assert str(covered(long)) == f"linear(128→{2 * MOST_TRAINED}) → relu"
    assert covered(layer(128, 2 * MOST_TRAINED).norm(4).chain()).steps
    many = layer(128, MOST_TRAINED).op("mul", "channel").layer_norm().chain()
    assert str(covered(many)) == f"linear(128→{MOST_TRAINED}) → mul(per channel)"
    twice = layer(8, 8).op("relu").layer_norm().op("tanh").layer_norm().chain()
    assert str(covered(twice)) == "linear(8→8) → relu"


def test_a_mutant_that_takes_moments_for_rows_is_seen() -> None:
    """A linear layer's mean over all but the batch is no mean over positions."""
    from postlude.plan.barriers import moments_only

    chain = layer(8, 8).reduce("mean", "sample").chain()
    assert moments_only(chain) is None
    assert moments_only(dataclasses.replace(chain, dims=2, producer=conv(2, (8, 8)))) is not None


def test_rows_that_are_too_long_are_refused() -> None:
    chain = layer(128, 65536).softmax().chain()
    refused = lower(chain, problem_of(chain, 1024), H200)
    assert "do not fit a tile" in str(refused)
    chain = layer(128, 65536).norm(16).chain()
    assert isinstance(lower(chain, problem_of(chain, 1024), H200), Plan)
