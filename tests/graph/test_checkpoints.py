"""Activation checkpoints inside an optimized model and around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import postlude
from gpu_plans import planned_for_a_gpu
from postlude.graph import backend
from postlude.run import ledger

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning")


def keeping_convolutions() -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operator is torch.ops.aten.convolution.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "non-reentrant": lambda body, x: checkpoint(body, x, use_reentrant=False),
    "reentrant": lambda body, x: checkpoint(body, x, use_reentrant=True),
    "nested": lambda body, x: checkpoint(
        lambda z: checkpoint(body, z, use_reentrant=False).relu(), x, use_reentrant=False
    ),
    "selective": lambda body, x: checkpoint(body, x, use_reentrant=False, context_fn=keeping_convolutions),
}


class Dropping(nn.Module):
    """Its bias's gradient is the number of outputs that dropout lets through, times their factor."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.conv, self.drop, self.way = nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5), way
        nn.init.constant_(self.conv.bias, 9.0)  # type: ignore[arg-type]  # no output is 0 otherwise

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](lambda z: self.drop(self.conv(z)), x)


def masks_agree(way: str) -> bool:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Dropping(way), torch.randn(1, 4, 8, 8, requires_grad=True)
    assert postlude.optimize(model, x).failure is None
    torch.manual_seed(1)
    result = model(x)
    result.sum().backward()
    kept = (result.detach() != 0).float().sum((0, 2, 3)) * 2
    assert model.conv.bias.grad is not None
    return torch.equal(model.conv.bias.grad, kept)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_has_the_same_mask_when_it_is_recomputed(way: str) -> None:
    assert masks_agree(way)


@pytest.mark.parametrize("way", ["non-reentrant", "selective"])
def test_another_mask_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: Dynamo's operator as it is."""
    if way == "non-reentrant" and torch.__version__.startswith("2.11."):
        pytest.skip("in PyTorch 2.11 the operator as it is recomputes nothing")
    monkeypatch.setattr(backend, "keep_random_state", lambda _: None)
    assert not masks_agree(way)


def around_new_shapes(channels: int) -> None:
    """A checkpoint compares what is saved the first time with what is saved when it recomputes.

    Chains of other channels have not been checked before.
    """
    torch._dynamo.reset()
    block = nn.Sequential(nn.InstanceNorm2d(channels, affine=True), nn.LeakyReLU(0.01))
    with planned_for_a_gpu():
        result = postlude.optimize(block, torch.randn(2, channels, 6, 6, requires_grad=True))
        for size in (6, 5, 4):
            x = torch.randn(2, channels, size, size, requires_grad=True)
            checkpoint(block, x, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    assert all(site.is_fused for site in result.sites)
    assert result.verdict.right


@pytest.mark.interpret
def test_a_checkpoint_around_a_model_takes_new_shapes() -> None:
    around_new_shapes(4)


@pytest.mark.interpret
@pytest.mark.parametrize(("module", "channels"), [(backend, 5), (ledger, 6)])
def test_what_a_check_saves_is_seen(module: Any, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: tracing, or checking, inside of the checkpoint's hooks."""
    monkeypatch.setattr(module, "without_saving_hooks", torch.enable_grad)
    with pytest.raises(CheckpointError):
        around_new_shapes(channels)
