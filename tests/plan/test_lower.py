"""`lower` is a pure function: plans and refusals for machines that are not here."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cases import BY_NAME, CASES, CHAIN_23, CHAIN_61, LINEAR, Builder, Case, conv
from machines import H200
from postlude import cards, reference
from postlude.chain import Chain, Value
from postlude.check import tensors_for
from postlude.hardware import Machine, machine_on
from postlude.plan import Keep, KeepMoments, Plan, Problem, Refusal, Spec, Store, lower, problem_of
from postlude.plan.barriers import MomentsOnly, moments_only
from postlude.plan.gemm import Gemm
from postlude.plan.gpu import tile_for
from postlude.plan.problem import Layout, power_of_two, result_dtype, result_layout, result_shape
from postlude.plan.tiles import pass_warps, short_rows

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CPU = Machine("cpu", 2, 32 << 20, True, True, True)


def problem(chain: Chain, shape: tuple[int, ...], layout: str = "contiguous", **changes: object) -> Problem:
    small = (1, shape[1], *[4] * chain.dims)  # parameters do not depend on space
    tensors = tensors_for(chain, small, torch.float32, "cpu", 0, "normal", "contiguous")
    specs = [Spec(tuple(t.shape), "float32", "contiguous") for t in tensors]
    specs[0] = Spec(shape, "float32", layout)  # type: ignore[arg-type]
    return dataclasses.replace(Problem(tuple(specs), "cpu", "auto", False), **changes)  # type: ignore[arg-type]


def plan(chain: Chain, given: Problem, machine: Machine = CPU) -> Plan:
    found = lower(chain, given, machine)
    assert isinstance(found, Plan), found
    return found


def test_chain_23_keeps_only_moments_of_one_slab() -> None:
    found = plan(CHAIN_23, problem(CHAIN_23, (128, 3, 24, 32, 32)))
    assert [item.sink for item in found.passes] == [KeepMoments(squares=True)]
    assert (found.library, found.value.layout) == ("buffer", "channels_last")
    tuned = plan(CHAIN_23, problem(CHAIN_23, (128, 3, 24, 32, 32)), dataclasses.replace(CPU, maps_large_buffers=False))
    assert tuned.library == "direct"
    assert found.slab_bytes <= 8 << 20
    assert found.slab * (found.slabs - 1) < 128 <= found.slab * found.slabs
    assert found.moved_bytes < found.eager_bytes / 10
    assert found.describe() == ["pass 1: conv3d(3→24, k3) → moments per channel"]


def test_chain_61_is_two_passes_and_names_them() -> None:
    found = plan(CHAIN_61, problem(CHAIN_61, (2, 64, 16, 16, 16)))
    assert [item.sink for item in found.passes] == [Keep(), Store()]
    assert found.describe() == [
        "pass 1: conv_transpose3d(64→128, k3) → relu → store",
        "pass 2: value in memory → group_norm(8) → store",
    ]
    assert (found.library, found.own) == ("eager", None)


def test_a_chain_without_a_norm_is_one_pass() -> None:
    case = BY_NAME["conv gelu residual"]
    found = plan(case.chain, problem(case.chain, (8, 4, 32, 32, 32)))
    assert [item.sink for item in found.passes] == [Store()]


def test_large_values_go_in_slabs_and_large_samples_whole() -> None:
    chain = Builder(2, conv(2, (16, 32), padding=1)).norm(8).op("silu").chain()
    many = plan(chain, problem(chain, (32, 16, 128, 128)))
    assert (many.library, many.slab) == ("direct", 4)
    tuned = dataclasses.replace(CPU, maps_large_buffers=False)
    assert plan(chain, problem(chain, (32, 16, 128, 128)), tuned).slabs == 1
    huge = plan(CHAIN_61, problem(CHAIN_61, (2, 64, 32, 32, 32)))
    assert (huge.library, huge.own, huge.slabs) == ("eager", None, 1)


def test_slabs_follow_the_cache() -> None:
    small = dataclasses.replace(CPU, cache_bytes=8 << 20)
    given = problem(CHAIN_23, (128, 3, 24, 32, 32))
    assert plan(CHAIN_23, given, small).slab < plan(CHAIN_23, given).slab


def test_a_batch_of_one_that_pytorch_takes_out_of_onednn_is_called_directly() -> None:
    chain = Builder(3, conv(3, (8, 16))).op("relu").chain()
    assert plan(chain, problem(chain, (1, 8, 48, 48, 48))).library == "direct"
    chain = Builder(3, conv(3, (8, 16))).op("relu").op("add", "full").chain()
    two = plan(chain, problem(chain, (2, 8, 48, 48, 48)))
    assert (two.library, two.own) == ("eager", None)
    without = dataclasses.replace(CPU, has_onednn=False)
    other = plan(chain, problem(chain, (1, 8, 48, 48, 48)), without)
    assert (other.library, other.own) == ("eager", None)


def test_one_short_step_after_a_convolution_is_left_to_pytorch() -> None:
    tuned = dataclasses.replace(CPU, maps_large_buffers=False)
    for word, is_refused in (("relu", True), ("silu", False)):
        chain = Builder(3, conv(3, (8, 16))).op(word).chain()
        for machine, shape in ((CPU, (4, 8, 24, 32, 32)), (tuned, (4, 8, 48, 48, 48))):
            found = lower(chain, problem(chain, shape), machine)
            assert isinstance(found, Refusal) == is_refused
            assert not is_refused or "one short step" in str(found)
    chain = Builder(3, conv(3, (8, 16))).op("relu").chain()
    assert isinstance(lower(chain, problem(chain, (4, 8, 48, 48, 48)), CPU), Plan)  # mapped anew at every call


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "mps"}, "no fused passes for mps"),
        ({"needs_grad": True}, "gradients are needed"),
    ],
)
def test_refusals_say_why(changes: dict[str, object], reason: str) -> None:
    refusal = lower(CHAIN_23, problem(CHAIN_23, (128, 3, 24, 32, 32), **changes), CPU)
    assert isinstance(refusal, Refusal)
    assert reason in str(refusal)


def test_small_strided_and_empty_problems_are_left_to_pytorch() -> None:
    for shape, layout, reason in (
        ((2, 3, 8, 8, 8), "contiguous", "too small"),
        ((128, 3, 24, 32, 32), "strided", "neither contiguous nor channels-last"),
        ((0, 3, 24, 32, 32), "contiguous", "empty"),
    ):
        refusal = lower(CHAIN_23, problem(CHAIN_23, shape, layout), CPU)
        assert isinstance(refusal, Refusal)
        assert reason in str(refusal)
    assert isinstance(lower(CHAIN_23, problem(CHAIN_23, (2, 3, 8, 8, 8)), CPU, even_if_slower=True), Plan)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [*CASES, *LINEAR], ids=lambda c: c.name)
def test_predicted_results_are_pytorchs(case: Case, layout: str) -> None:
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", layout)
    given, result = problem_of(tensors), reference.evaluate(case.chain, tensors)
    assert result_shape(case.chain, given) == tuple(result.shape)
    assert result_dtype(case.chain, given) == str(result.dtype).removeprefix("torch.")
    if case.chain.dims and result.dim() == case.chain.dims + 2 and result.shape[2] > 1:
        form = torch.channels_last if case.chain.dims == 2 else torch.channels_last_3d
        expected = (
            result.contiguous(memory_format=form)
            if result_layout(case.chain, given, CPU) == "channels_last"
            else result.contiguous()
        )
        assert result.stride() == expected.stride()


def test_moments_suffice_only_where_every_step_is_affine() -> None:
    assert moments_only(CHAIN_23) == MomentsOnly(0, 2, True)
    assert moments_only(CHAIN_61) is None
    assert moments_only(BY_NAME["conv relu mean over space"].chain) == MomentsOnly(1, 2, False)
    assert moments_only(BY_NAME["conv norm affine sum over space"].chain) == MomentsOnly(0, 4, True)
    assert moments_only(BY_NAME["conv relu norm mean relu"].chain) == MomentsOnly(1, 3, True)
    assert moments_only(BY_NAME["transposed conv mul batch_norm mean"].chain) == MomentsOnly(0, 3, True)
    scaled = Builder(2, conv(2, (3, 4))).op("mul", "channel").op("add", 1.0)
    assert moments_only(scaled.norm(2).reduce("mean", "space").chain()) == MomentsOnly(0, 4, True)
    twice = Builder(2).op("mul", 2.0).op("add", Value(0)).norm(2).reduce("mean", "space").chain()
    assert moments_only(twice) == MomentsOnly(2, 4, True)
    kept = Builder(2).op("mul", 2.0).norm(2).op("add", Value(1)).reduce("mean", "space").chain()
    assert moments_only(kept) is None
    assert moments_only(Builder(2).layer_norm().reduce("mean", "space").chain()) is None
    curved = Builder(3, conv(3, (4, 6))).norm(2).op("relu").reduce("mean", "space").chain()
    assert moments_only(curved) is None
    residual = Builder(3, conv(3, (4, 6))).norm(2).op("add", "full").reduce("mean", "space").chain()
    assert moments_only(residual) is None
    twice = Builder(3, conv(3, (4, 6))).norm(2).op("add", Value(0)).reduce("mean", "space").chain()
    assert moments_only(twice) is None


CARD = H200
DILATED = Builder(3, conv(3, (64, 64), dilation=2)).op("relu").norm(8).chain()


def test_on_a_gpu_a_norm_is_two_passes_over_our_convolution() -> None:
    found = plan(CHAIN_61, problem(CHAIN_61, (16, 64, 32, 32, 32), device="cuda"), CARD)
    assert [item.sink for item in found.passes] == [KeepMoments(squares=True, stores=True, finished=True), Store()]
    assert found.describe() == [
        "pass 1: conv_transpose3d(64→128, k3) [matrix product of float16 in two planes, scaled; "
        "tiles of 128 × 128 × 64] → relu → store, moments per channel",
        "pass 2: value in memory → group_norm(8) → store",
    ]
    assert "twice" not in str(found.reasons)
    assert found.launches == 6  # largest, input, weight, product, combine, finish


def test_on_a_gpu_a_norm_is_two_passes_over_the_librarys_convolution() -> None:
    found = plan(DILATED, problem(DILATED, (4, 64, 64, 64, 64), device="cuda"), CARD)
    assert [item.sink for item in found.passes] == [KeepMoments(squares=True), Store()]
    assert found.describe() == [
        "pass 1: conv3d(64→64, k3, d2) → relu → moments per channel",
        "pass 2: value in memory → relu → group_norm(8) → store",
    ]
    assert "Postlude has no kernel for dilated convolutions" in str(found.reasons)
    assert found.launches == 3
    assert found.tile is not None
    assert found.tile.block_c == 0
    keeping = dataclasses.replace(CARD, keeping_layout=frozenset({"group_norm"}))
    last = plan(DILATED, problem(DILATED, (4, 64, 64, 64, 64), "channels_last", device="cuda"), keeping)
    assert last.tile is not None
    assert last.tile.block * last.tile.block_c == 8192


def test_on_a_gpu_chain_23_stores_nothing_of_the_convolutions_size() -> None:
    found = plan(CHAIN_23, problem(CHAIN_23, (128, 3, 24, 32, 32), device="cuda"), CARD)
    assert found.describe() == [
        "pass 1: conv3d(3→24, k3) [direct, products of float16 in two planes; tiles of 11 × 10 × 32] → "
        "moments per channel"
    ]
    assert (found.slab_bytes, found.launches) == (0, 2)


@pytest.mark.parametrize(
    ("chain", "precision", "allowed", "planes"),
    [
        (CHAIN_61, "auto", True, 1),
        (CHAIN_61, "auto", False, 2),
        (CHAIN_61, "fp32", True, 2),
        (CHAIN_61, "tf32", False, 1),
        (CHAIN_23, "auto", True, 2),  # cuDNN does not use TF32 with three channels
        (CHAIN_23, "tf32", True, 1),
    ],
)
def test_a_precision_is_what_was_asked_for_or_what_pytorch_would_do(
    chain: Chain, precision: str, allowed: bool, planes: int
) -> None:
    shape = (16, 64, 32, 32, 32) if chain is CHAIN_61 else (128, 3, 24, 32, 32)
    found = plan(chain, problem(chain, shape, device="cuda", precision=precision, allows_tf32=allowed), CARD)
    assert (found.own.arithmetic.planes if isinstance(found.own, Gemm) else found.own.planes) == planes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("precision", "allowed", "told"), [("auto", True, None), ("fp32", True, False), ("tf32", False, True)]
)
def test_pytorchs_convolution_is_told_a_precision_that_its_switch_does_not_say(
    precision: str, allowed: bool, told: bool | None
) -> None:
    for shape in ((4, 64, 64, 64, 64), (1, 64, 8, 8, 8)):  # planned, and refused for its size
        given = problem(DILATED, shape, device="cuda", precision=precision, allows_tf32=allowed)
        assert lower(DILATED, given, CARD).library_tf32 is told


def test_on_a_gpu_small_values_and_moments_of_the_librarys_convolution_stay_with_pytorch() -> None:
    small = lower(CHAIN_61, problem(CHAIN_61, (1, 64, 8, 8, 8), device="cuda"), CARD)
    assert "too small to gain" in str(small)
    chain = Builder(3, conv(3, (3, 24), stride=2)).norm(8).reduce("mean", "sample").chain()
    moments = lower(chain, problem(chain, (128, 3, 24, 32, 32), device="cuda"), CARD)
    assert "only moments are needed" in str(moments)


@pytest.mark.parametrize("architecture", ["sm_75", ""])
def test_cards_before_ampere_are_declined(architecture: str) -> None:
    old = machine_on(cards.estimated("an old card", architecture, (72, 65_536, 4 << 20), 1.5e9, 672e9))
    refusal = lower(CHAIN_61, problem(CHAIN_61, (16, 64, 32, 32, 32), device="cuda"), old)
    assert "Ampere or later" in str(refusal)


def test_on_a_gpu_a_tail_that_reads_an_early_value_is_declined() -> None:
    chain = Builder(3).norm(2).op("relu").norm(2).op("add", Value(1)).chain()
    refusal = lower(chain, problem(chain, (2, 8, 128, 128, 128), device="cuda"), CARD)
    assert "reads a value from inside the fused passes" in str(refusal)


def test_a_gpu_without_triton_is_declined() -> None:
    bare = dataclasses.replace(CARD, has_triton=False)
    refusal = lower(CHAIN_61, problem(CHAIN_61, (16, 64, 32, 32, 32), device="cuda"), bare)
    assert "Triton is not installed" in str(refusal)


def test_tiles_grow_with_the_problem_and_stay_powers_of_two() -> None:
    chain = Builder(3).norm(8).op("relu").chain()
    tiles = [
        tile_for(chain, problem(chain, (2, 32, s, s, s), device="cuda"), CARD, "contiguous") for s in (4, 16, 64, 128)
    ]
    assert [tile.block for tile in tiles] == [128, 1024, 1024, 1024]  # in fp32; 16 bits have twice as many
    assert [tile.moments_block for tile in tiles] == [128, 1024, 1024, 1024]
    assert [tile.tiles for tile in tiles] == [1, 1, 15, 16]
    assert [(tile.rows, tile.moments_rows) for tile in tiles] == [(16, 16), (0, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize("positions", [1, 7, 128, 225, 900, 1024, 2048, 4097])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_tiles_of_short_rows_are_filled(positions: int, layout: Layout) -> None:
    """No tile is twice as long as a row or larger than the table says, and no program has one that is all masked."""
    chain = Builder(2).norm(8).op("relu").chain()
    tile = tile_for(chain, problem(chain, (512, 128, 1, positions), layout, device="cuda"), CARD, layout)
    row = power_of_two(positions)
    assert row < 2 * positions
    if layout == "channels_last":
        assert (tile.rows, tile.moments_rows) == (0, 0)
        assert max(tile.block, tile.moments_block) <= row
    else:
        filled = min(128, 1024 // row) if positions <= 1024 else 0
        assert (tile.rows, tile.moments_rows) == (filled, filled)
    assert (tile.tiles - 1) * tile.moments_block < positions


def test_short_rows_of_few_channels_get_few_warps() -> None:
    assert [short_rows(2048, channels, 225) for channels in (1, 3, 8, 128)] == [1, 4, 8, 8]
    assert short_rows(2048, 65_536, 225) == 0  # more tiles than a grid has along its second axis
    assert [pass_warps(256 * rows, 4, 8) for rows in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert [pass_warps(elements, 4, 32) for elements in (8, 1024, 2048, 8192)] == [1, 1, 2, 4]


def test_a_small_chain_is_trained_by_pytorch_unless_its_convolutions_are_slow() -> None:
    chain = Builder(3, conv(3, (128, 128), padding=1)).norm(None).op("relu").chain()
    fast = problem(chain, (2, 128, 24, 24, 24), device="cuda", needs_grad=True, allows_tf32=True)
    found = lower(chain, fast, CARD)
    assert isinstance(found, Refusal)
    assert any("too small to gain" in reason for reason in found.reasons)
    assert plan(chain, dataclasses.replace(fast, needs_grad=False), CARD).launches > 0
    assert plan(chain, dataclasses.replace(fast, allows_tf32=False), CARD).trains
