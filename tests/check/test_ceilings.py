"""What must be done is counted, and how fast the machine is was measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from postlude.check import ceilings
from postlude.check.ceilings import best_seconds, held_bytes, memory_speed, work_of


def test_bytes_and_operations_of_a_model() -> None:
    model = nn.Conv3d(3, 4, 3)
    x = torch.rand(2, 3, 6, 6, 6)
    work = work_of(model, (x,), model(x).detach())
    assert work.bytes == 4 * (x.numel() + 4 * 3 * 27 + 4 + 2 * 4 * 64)
    assert work.operations == 2 * (2 * 4 * 64) * 3 * 27


def test_an_expanded_tensor_is_read_once() -> None:
    assert held_bytes(torch.rand(1, 8).expand(1000, 8)) == 32
    assert held_bytes(torch.rand(4, 8)[:2]) == 64


def test_a_ceiling_is_the_best_that_was_seen() -> None:
    now, durations = [0.0], iter([5.0, 1.0, 3.0, 2.0, 4.0, 4.0, 4.0, 9.0])

    def call(_: int) -> None:
        now[0] += next(durations)

    assert best_seconds(call, lambda: now[0]) == 1.0


def test_a_copy_is_not_faster_than_any_memory() -> None:
    assert 1e8 < memory_speed(1 << 22, "cpu") < 1e13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.SIDES, "cpu", 64)
    monkeypatch.setitem(ceilings.VOLUMES, "cpu", (1, 8, 8))
    monkeypatch.setattr(ceilings, "WINDOW_S", 0.0001)
    assert 1e6 < ceilings.product_speed(dtype, "fp32", "cpu") < 1e14
