"""batch_norm in training by Triton's interpreter: values, gradients and running statistics, and mutants of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.run.chain_run import Training
from postlude.run.execute import execute
from postlude.stages.batch import combine_batch
from postlude.stages.normalize import combine_moments
from run.test_gpu import CARD, fused, library_convolution  # noqa: F401, a fixture
from run.test_training import gradients, training
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("poisoned_memory")]
BLOCK = Builder(2, conv(2, (3, 4), padding=1)).op("silu").batch_norm().op("mul", "channel").chain()
PLAIN = Builder(2).batch_norm(affine=False, momentum=0.3).op("tanh").chain()
SCALED = Builder(2, conv(2, (3, 4))).op("mul", -2.0).op("add", "channel").batch_norm().op("mul", 2.0)
POOLED = SCALED.reduce("mean", "space").chain()
SHAPE = (3, 3, 5, 4)


def tensors_of(chain: Chain, dtype: torch.dtype, layout: str = "contiguous", grad: bool = False) -> list[Tensor]:
    made = tensors_for(chain, SHAPE, dtype, layout=layout)  # type: ignore[arg-type]
    return [t.requires_grad_(grad and slot not in chain.moved) for slot, t in enumerate(made)]


def moved_by(run: Callable[[Chain, list[Tensor]], object], chain: Chain, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The running statistics after three steps on other inputs each."""
    tensors = [t.detach().clone() for t in tensors]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tensors[0] = (2 * torch.randn(SHAPE, generator=generator) + step).to(tensors[0].dtype)
        run(chain, tensors)
    return [tensors[slot].double() for slot in chain.moved]


def in_pytorch(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return reference.evaluate(chain, tensors, moves=True)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.float16, 2e-3)], ids=str
)
@pytest.mark.parametrize("chain", [BLOCK, PLAIN, POOLED], ids=str)
@pytest.mark.usefixtures("library_convolution")
def test_running_statistics_are_pytorchs_after_several_steps(
    chain: Chain, dtype: torch.dtype, tolerance: float
) -> None:
    tensors = tensors_of(chain, dtype)
    truth = moved_by(in_pytorch, chain, [t.double() for t in tensors])
    for one, true, old in zip(moved_by(fused, chain, tensors), truth, chain.moved, strict=True):
        torch.testing.assert_close(one, true, rtol=tolerance, atol=tolerance)
        assert (one - tensors[old].double()).abs().max() > 0.01


def trained(chain: Chain, tensors: list[Tensor]) -> Tensor:
    if any(t.requires_grad for t in tensors):
        return training(chain, tensors)(tensors)
    return fused(chain, tensors)


def test_values_gradients_and_statistics_are_right_by_the_rule() -> None:
    found = verify_chain(trained, PLAIN, chain_points(PLAIN, SHAPE, torch.float32, "cpu", seeds=3), backward=True)
    assert found.right, found


@pytest.mark.parametrize("memory", ["default", "lean"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.usefixtures("library_convolution")
def test_a_backward_pass_is_autograds_and_moves_nothing(layout: str, memory: str) -> None:
    tensors = tensors_of(BLOCK, torch.float64, layout, grad=True)
    copies = [t.detach().clone() if slot in BLOCK.moved else t for slot, t in enumerate(tensors)]
    truth = gradients(lambda ts: in_pytorch(BLOCK, ts), copies)
    for ours, true in zip(gradients(training(BLOCK, tensors, memory), tensors), truth, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-9)
    for slot in BLOCK.moved:
        torch.testing.assert_close(tensors[slot], copies[slot], rtol=1e-12, atol=1e-12)


def test_gradients_by_convolutions_of_our_own() -> None:
    tensors = tensors_of(BLOCK, torch.float64, grad=True)
    made = training(BLOCK, tensors)
    assert made.plan.gradients.of_weight is not None
    truth = gradients(lambda ts: reference.evaluate(BLOCK, ts), tensors)
    for ours, true in zip(gradients(made, tensors), truth, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chain", [BLOCK, PLAIN], ids=str)
@pytest.mark.usefixtures("library_convolution")
def test_gradcheck_over_the_real_kernels(chain: Chain) -> None:
    tensors = tensors_of(chain, torch.float64, grad=True)
    moved = [t for slot, t in enumerate(tensors) if slot in chain.moved]
    run = training(chain, tensors)
    given = [t for t in tensors if t.requires_grad]
    assert torch.autograd.gradcheck(lambda *ts: run([*ts, *moved]), given, fast_mode=True)
    if chain is PLAIN:
        assert torch.autograd.gradgradcheck(lambda *ts: run([*ts, *moved]), given, fast_mode=True)


@pytest.mark.usefixtures("library_convolution")
def test_only_moments_are_needed_before_a_mean_in_training_too() -> None:
    tensors = tensors_of(POOLED, torch.float64, grad=True)
    copies = [t.detach().clone() if slot in POOLED.moved else t for slot, t in enumerate(tensors)]
    problem = dataclasses.replace(problem_of(tensors), needs_grad=True)
    plan = lower(POOLED, dataclasses.replace(problem, device="cuda"), CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    truth = gradients(lambda ts: in_pytorch(POOLED, ts), copies)
    for ours, true in zip(gradients(Training(plan, plan.chain), tensors), truth, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-9)
    for slot in POOLED.moved:
        torch.testing.assert_close(tensors[slot], copies[slot], rtol=1e-12, atol=1e-12)


def test_one_value_per_channel_is_an_error_in_pytorchs_words() -> None:
    tensors = [t.detach() for t in tensors_for(PLAIN, (1, 3, 1, 1), torch.float32)]
    problem = dataclasses.replace(problem_of(tensors), device="cuda")
    refusal = lower(PLAIN, problem, CARD, even_if_slower=True)
    assert "more than one value per channel" in str(refusal)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        execute(PLAIN, refusal, tensors)


def test_statistics_with_gaps_move_too() -> None:
    tensors = tensors_of(PLAIN, torch.float32)
    whole = [t.clone() for t in tensors]
    for slot in PLAIN.moved:
        tensors[slot] = torch.stack([tensors[slot], tensors[slot]], 1)[:, 0]
    fused(PLAIN, whole)
    fused(PLAIN, tensors)
    for slot in PLAIN.moved:
        torch.testing.assert_close(tensors[slot], whole[slot], rtol=0, atol=0)


KERNEL_MUTANTS = {
    "the unbiased variance normalises": ("squares / count + eps", "squares / (count - 1.0) + eps"),
    "the biased variance is kept": ("squares / (count - 1.0))", "squares / count)"),
    "means of samples do not differ": ("b_count * (b_mean - mean) * (b_mean - mean)", "0.0"),
    "momentum the other way round": ("momentum * mean", "(1.0 - momentum) * mean"),
    "only the first sample is normalised": ("mask=o < N)", "mask=o < 1)"),
    "the gradient's sums stop at the first sample": (
        "a += tl.load(p_sums + o_x, mask=m,",
        "a += tl.load(p_sums + o_x, mask=o < CHUNKS,",
    ),
}


def worst(chain: Chain = PLAIN) -> float:
    """The largest error of the result, of what moved and of the gradients, as a part of the largest element."""
    tensors = tensors_of(chain, torch.float64, grad=True)
    copies = [t.detach().clone() if slot in chain.moved else t for slot, t in enumerate(tensors)]
    right = gradients(lambda ts: in_pytorch(chain, ts), copies)
    found = gradients(training(chain, tensors), tensors)
    pairs = [*zip(found, right), *((tensors[slot], copies[slot]) for slot in chain.moved)]
    off = torch.tensor([float((ours - true).abs().max() / true.abs().max()) for ours, true in pairs])
    return float(off.nan_to_num(nan=torch.inf).max())


def test_the_honest_kernels_pass_where_the_mutants_fail() -> None:
    assert worst() < 1e-9


@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_a_wrong_kernel_is_seen_to_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = KERNEL_MUTANTS[name]
    shared = name == "means of samples do not differ"
    replace_text(monkeypatch, "normalize" if shared else "batch", right, wrong)
    assert worst() > 1e-3


def _twice(*given: Any) -> tuple[Tensor, Tensor]:
    combine_batch(*given)
    return combine_batch(*given)


RUN_MUTANTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "statistics of each sample": lambda *given: combine_moments(*given[:3]),
    "moved twice": _twice,
    "never moved": lambda *given: combine_batch(*given[:3], None),
}


@pytest.mark.parametrize("name", RUN_MUTANTS)
def test_a_wrong_combination_is_seen_to_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.stages.forward.combine_batch", RUN_MUTANTS[name])
    assert worst() > 1e-3
