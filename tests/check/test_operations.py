"""The count of operations."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from postlude.check.operations import Operations

MODELS = {
    "convolutions": (
        nn.Sequential(nn.Conv3d(2, 4, 3, groups=2), nn.ReLU(), nn.ConvTranspose3d(4, 3, 2)),
        (2, 2, 5, 6, 7),
    ),
    "products": (nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4, bias=False)), (3, 7, 6)),
    "attention": (nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8)),
    "none": (nn.Softmax(1), (3, 4)),
}


def _call(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x, x, x) if isinstance(model, nn.MultiheadAttention) else model(x)


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_pytorchs(name: str) -> None:
    model, shape = MODELS[name]
    x = torch.randn(shape)
    with torch.no_grad(), FlopCounterMode(display=False) as theirs:
        _call(model, x)
    with torch.no_grad(), Operations() as ours:
        _call(model, x)
    assert ours.count == theirs.get_total_flops()
    assert (ours.count > 0) == (name != "none")


def test_gradients_in_another_thread_are_left_alone() -> None:
    assert _error_in_another_thread(Operations()) is None


def test_pytorchs_counter_disturbs_them() -> None:
    """The fault that `Operations` avoids: without it the test above would prove nothing."""
    assert "_will_engine_execute_node" in str(_error_in_another_thread(FlopCounterMode(display=False)))


def _error_in_another_thread(counter: AbstractContextManager[Any]) -> Exception | None:
    found: list[Exception] = []
    model, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)

    def differentiate() -> None:
        try:
            torch.autograd.grad(model(x).sum(), [x])
        except RuntimeError as error:
            found.append(error)

    with counter:
        other = threading.Thread(target=differentiate)
        other.start()
        other.join()
    return found[0] if found else None
