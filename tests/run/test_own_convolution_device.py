"""Our own convolutions on a real card: every precision by the rule, exact at full size, launches and memory counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cases import CHAIN_23, CHAIN_61, Builder, conv
from level2 import LEVEL2, up
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.plan.boxes import Boxes
from postlude.run.chain_run import Inference

pytestmark = pytest.mark.gpu
BLOCK = Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain()
FLAT = Builder(2, conv(2, (24, 40), padding=1)).op("silu").norm(4).chain()
POINTWISE = Builder(3, conv(3, (48, 20), 1)).norm(5).op("relu").chain()
RESIDUAL = Builder(3, conv(3, (16, 16), padding=1)).norm(4).op("add", "full").op("relu").chain()
WIDE = Builder(3, conv(3, (16, 144), transposed=True, padding=1)).op("relu").norm(8).chain()
# Odd sizes, several tiles, every width of the product's rows.
SMALL: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "61": (CHAIN_61, (2, 64, 9, 10, 11)),
    "23": (CHAIN_23, (6, 3, 15, 13, 37)),
    "block": (BLOCK, (2, 32, 13, 12, 17)),
    "2-D": (FLAT, (3, 24, 31, 29)),
    "1×1": (POINTWISE, (2, 48, 7, 11, 9)),
    "residual": (RESIDUAL, (2, 16, 9, 8, 7)),
    "many channels": (WIDE, (2, 16, 8, 9, 7)),
    "phases": (Builder(3, up(3, (32, 40))).op("silu").norm(4).op("relu").chain(), (2, 32, 5, 6, 7)),
    "phases, k2": (Builder(2, up(2, (64, 24), 2, 0, 1)).norm(None).chain(), (3, 64, 13, 11)),
    "phases, no norm": (Builder(2, up(2, (48, 72), 4)).op("mish").op("add", "full").chain(), (3, 48, 13, 17)),
    "phases, layer_norm": (Builder(3, up(3, (32, 40))).layer_norm().op("silu").chain(), (2, 32, 5, 6, 7)),
    "layer_norm": (Builder(2, conv(2, (24, 40), padding=1)).op("add", "one").layer_norm().chain(), (3, 24, 31, 29)),
    "no norm": (Builder(2, conv(2, (24, 40), padding=1)).op("gelu", approximate="none").chain(), (3, 24, 31, 29)),
    "8 channels": (Builder(2, conv(2, (8, 64))).op("relu").op("mul", 2.0).chain(), (3, 8, 29, 131)),
    "8 channels, a norm": (Builder(2, conv(2, (8, 32), padding=1)).op("mish").norm(8).chain(), (3, 8, 31, 29)),
    "channels": (
        Builder(2, conv(2, (8, 60))).norm(15).op("hardswish").op("mul", 2.0).reduce("logsumexp", "channels").chain(),
        (3, 8, 29, 131),
    ),
    "channels, no norm": (Builder(2, conv(2, (24, 40))).op("abs").reduce("amin", "channels").chain(), (3, 24, 31, 29)),
    "3 channels": (Builder(3, conv(3, (3, 16), padding=1)).op("silu").norm(4).chain(), (2, 3, 9, 8, 37)),
    "3 channels, transposed": (Builder(2, conv(2, (3, 20), transposed=True)).op("tanh").chain(), (3, 3, 31, 30)),
}
FULL = {"61": (CHAIN_61, (16, 64, 32, 32, 32)), "23": (CHAIN_23, (128, 3, 24, 32, 32))}


def ready(chain: Chain, tensors: Sequence[Tensor], precision: str) -> Inference:
    problem = dataclasses.replace(problem_of(tensors, precision), needs_grad=False)
    plan = lower(chain, problem, hardware.machine_for("cuda"), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.own is not None
    return Inference(plan, plan.chain)


def fused(precision: str) -> Callable[[Chain, Sequence[Tensor]], Tensor]:
    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return ready(chain, tensors, precision)(tensors)

    return run


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", SMALL)
def test_is_right_by_the_rule_in_every_precision(name: str, precision: str, layout: str) -> None:
    chain, shape = SMALL[name]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    asked = precision if dtype == torch.float32 else "auto"
    points = chain_points(chain, shape, dtype, "cuda", layout=layout)
    verdict = verify_chain(fused(asked), chain, points, asked)
    assert verdict.right, verdict


def test_one_plane_is_seen_not_to_be_fp32() -> None:
    """Mutant: fp32 was asked for and TF32's arithmetic is given."""
    chain, shape = SMALL["61"]
    verdict = verify_chain(fused("tf32"), chain, chain_points(chain, shape, torch.float32, "cuda"), "fp32")
    assert not verdict.right


@pytest.mark.parametrize("family", ["uniform", "normal", "hierarchical", "heavy-tailed"])
@pytest.mark.parametrize("name", [*FULL, *LEVEL2])
def test_fp32_is_exact_at_full_size(name: str, family: str) -> None:
    """allclose(1e-5) against float64 wherever strict PyTorch passes it, and at most twice its error."""
    chain, shape = {**FULL, **LEVEL2}[name]
    tensors = tensors_for(chain, shape, torch.float32, "cuda", 3, family)  # type: ignore[arg-type]
    ours = fused("fp32")(chain, list(tensors))[:2]
    few = [t[:2] if role in ("input", "full") else t for t, role in zip(tensors, chain.roles)]
    truth = reference.evaluate(chain, few, dtype=torch.float64)
    switch = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "ieee"
        theirs = reference.evaluate(chain, few)
    finally:
        switch.fp32_precision = before
    if torch.allclose(theirs.double(), truth, 1e-5, 1e-5):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    ulp = torch.finfo(torch.float32).eps * float(truth.abs().max())
    error, own = (float((y.double() - truth).square().mean().sqrt()) for y in (ours, theirs))
    assert error <= 2 * own + ulp


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", LEVEL2)
def test_tf32_is_right_at_full_size(name: str, layout: str) -> None:
    """Within the rounding of the operands to TF32's mantissa; contiguous ours by `lower`'s own choice."""
    chain, shape = LEVEL2[name]
    tensors = tensors_for(chain, shape, torch.float32, "cuda", 3, "normal", layout)
    plan = lower(
        chain, dataclasses.replace(problem_of(tensors, "tf32"), needs_grad=False), hardware.machine_for("cuda")
    )
    assert isinstance(plan, Plan)
    assert name == "7" or layout != "contiguous" or plan.own is not None, plan.reasons
    ours = fused("tf32")(chain, tensors)
    few = [t[-2:] if role in ("input", "full") else t for t, role in zip(tensors, chain.roles)]
    truth = reference.evaluate(chain, few, dtype=torch.float64)
    error = float((ours[-2:].double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())
    assert error < 1e-3


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", ["no norm", "phases, no norm", "8 channels"])
def test_infinities_come_out_as_of_float64(name: str, precision: str) -> None:
    chain, shape = SMALL[name]
    tensors = [t.clone() for t in tensors_for(chain, shape, torch.float32, "cuda", 0, "normal")]
    tensors[0][0, 3, 2, 2], tensors[0][1, 1, 5, 7], tensors[0][2, 0, 4, 4] = torch.inf, -torch.inf, torch.nan
    tensors[1].view(-1)[1::5] *= 1e-25
    ours, truth = fused(precision)(chain, tensors), reference.evaluate(chain, tensors, dtype=torch.float64)
    assert bool(truth.isinf().any())
    for mine, right in ((ours.isnan(), truth.isnan()), (ours == torch.inf, truth == torch.inf)):
        assert torch.equal(mine, right)
    assert torch.equal(ours == -torch.inf, truth == -torch.inf)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_an_infinity_stays_in_the_rows_of_a_layer_norm(precision: str) -> None:
    chain, shape = SMALL["layer_norm"]
    tensors = [t.clone() for t in tensors_for(chain, shape, torch.float32, "cuda", 0, "normal")]
    tensors[0][0, 3, 2, 2], tensors[0][1, 1, 5, 0], tensors[0][2, 0, 4, 4] = torch.inf, -torch.inf, torch.nan
    ours, truth = fused(precision)(chain, tensors), reference.evaluate(chain, tensors, dtype=torch.float64)
    assert torch.equal(ours.isfinite(), truth.isfinite())
    assert 0 < int(truth.isnan().sum()) < truth.numel() / 2


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", SMALL)
def test_same_bits_every_time_and_in_a_cuda_graph(name: str, precision: str) -> None:
    chain, shape = SMALL[name]
    tensors = tensors_for(chain, shape, torch.float32, "cuda", 0, "normal")
    run = ready(chain, tensors, precision)
    expected = run(tensors)
    assert torch.equal(run(tensors), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(tensors)
    result.zero_()
    graph.replay()
    assert torch.equal(result, expected)


# Read in place: every width of a row, and a box that sticks out of the input.
BOXED: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "32→32": (BLOCK, (2, 32, 5, 48, 64)),
    "32→64": (Builder(3, conv(3, (32, 64), padding=1)).op("relu").norm(8).chain(), (2, 32, 3, 63, 64)),
    "64→64": (Builder(3, conv(3, (64, 64), padding=1)).norm(8).op("silu").chain(), (2, 64, 4, 32, 64)),
    "128→128": (Builder(3, conv(3, (128, 128), padding=1)).norm(None).op("relu").chain(), (2, 128, 3, 32, 31)),
    "48→16": (Builder(3, conv(3, (48, 16), padding=1)).norm(None).chain(), (2, 48, 4, 32, 128)),
    "no norm": (Builder(3, conv(3, (64, 128), padding=1)).op("gelu", approximate="none").chain(), (2, 64, 4, 32, 32)),
    "2-D": (Builder(2, conv(2, (32, 32), 5, padding=2)).norm(4).chain(), (2, 32, 64, 64)),
    "transposed": (Builder(3, conv(3, (64, 64), transposed=True, padding=1)).norm(8).chain(), (2, 64, 4, 32, 64)),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BOXED)
def test_a_convolution_in_place_is_right_by_the_rule(name: str, dtype: torch.dtype, layout: str) -> None:
    chain, shape = BOXED[name]
    tensors = tensors_for(chain, shape, dtype, "cuda", 0, "normal", layout)
    run = ready(chain, tensors, "auto")
    assert isinstance(run.plan.own, Boxes)
    assert torch.equal(run(tensors), run(tensors))
    verdict = verify_chain(fused("auto"), chain, chain_points(chain, shape, dtype, "cuda", layout=layout), "auto")
    assert verdict.right, verdict


def kernels_of(run: Callable[[], object]) -> list[str]:
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]  # a memset, and filling zeros, are no kernels of ours
    return sorted(name for name in names if name.endswith(("_kernel", "_moments", "_finish")))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11, whatever is asked for
def test_launches_are_the_planned_ones() -> None:
    found = {}
    for name, (chain, shape) in FULL.items():
        tensors = tensors_for(chain, (4, *shape[1:]), torch.float32, "cuda")
        run = ready(chain, tensors, "fp32")
        found[name] = kernels_of(lambda run=run, tensors=tensors: run(tensors))  # type: ignore[misc]
        assert len(found[name]) == run.plan.launches
    assert found["61"] == [
        "combine_moments_kernel",
        "convolve_kernel",
        "finish_kernel",
        "largest_kernel",
        "pack_input_kernel",
        "pack_weight_kernel",
    ]
    assert found["23"] == ["few_channels_finish", "few_channels_moments"]


def peak_above_start(run: Callable[[], object]) -> int:
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_the_result_and_the_packed_operands() -> None:
    mib = 1 << 20
    for name, precision, most in (("23", "fp32", 4), ("61", "fp32", 500), ("61", "tf32", 400)):
        chain, shape = FULL[name]
        tensors = tensors_for(chain, shape, torch.float32, "cuda")
        run = ready(chain, tensors, precision)
        ours = peak_above_start(lambda run=run, tensors=tensors: run(tensors))  # type: ignore[misc]
        theirs = peak_above_start(lambda chain=chain, tensors=tensors: reference.evaluate(chain, tensors))  # type: ignore[misc]
        assert ours < most * mib, (name, ours / mib)
        assert ours < theirs, (name, ours / mib, theirs / mib)


def test_a_precision_other_than_pytorchs_reaches_its_convolution_too() -> None:
    """Dilated: no convolution of ours. The switch is left as it was."""
    chain = Builder(3, conv(3, (32, 32), dilation=2)).norm(8).chain()
    tensors = tensors_for(chain, (2, 32, 17, 18, 19), torch.float32, "cuda", 0, "normal")
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    errors = {}
    before = hardware.default_fp32_precision()
    for precision in ("fp32", "tf32"):
        plan = lower(chain, problem_of(tensors, precision), hardware.machine_for("cuda"), even_if_slower=True)
        assert isinstance(plan, Plan)
        errors[precision] = float((Inference(plan, chain)(tensors).double() - truth).square().mean().sqrt())
    assert errors["fp32"] < 1e-6 < 1e-5 < errors["tf32"] < 1e-2
    assert hardware.default_fp32_precision() == before
