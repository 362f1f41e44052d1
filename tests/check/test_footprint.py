"""Memory and launches are counted as they are."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from postlude.check.footprint import count_kernels, highest, peak_bytes, saved_bytes

MIB = 1 << 20


def test_the_peak_is_the_highest_point_of_the_walk() -> None:
    assert highest([4, 4, -4, 2, -6]) == 8
    assert highest([]) == 0


def test_peak_of_a_call() -> None:
    x = torch.rand(MIB // 4)  # 1 MiB

    def chain() -> Tensor:
        y = x + 1
        z = y + 1  # two live values
        del y
        return z + 1  # again two

    assert 2 * MIB <= peak_bytes(chain, "cpu") < 2.1 * MIB
    assert peak_bytes(lambda: x.add_(1), "cpu") < MIB // 2


def test_saved_memory_counts_each_value_once_and_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    x = torch.rand(1024, 256)
    # The second layer keeps relu's result, which relu keeps as well.
    assert saved_bytes(lambda: model(x), [x, *model.parameters()]) == 1024 * 256 * 4
    assert saved_bytes(lambda: model(x), []) > 1024 * 256 * 4


def test_kernels_are_what_ran_on_the_device() -> None:
    kinds = torch.profiler.DeviceType
    events = [SimpleNamespace(device_type=kind) for kind in (kinds.CPU, kinds.CUDA, kinds.CUDA)]
    named = SimpleNamespace(device_type=kinds.CUDA, is_user_annotation=True)
    assert count_kernels([*events, named]) == 2
