"""The work of one call, and how fast this machine copies and multiplies, measured when needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from postlude.check.clock import Calls
from postlude.check.floor import Ceilings, Work
from postlude.check.modes import pytorch_switches
from postlude.check.nested import tensors_in
from postlude.check.operations import Operations

LEAST_BYTES = 8 << 20  # below this, the launch would be timed and not the memory
MOST_BYTES = 1 << 30
SIDES = {"cuda": 8192, "cpu": 1024}  # of the matrices
VOLUMES = {"cuda": (64, 256, 64), "cpu": (8, 64, 56)}  # batch, channels and space of the convolution
TRIES = 7
WINDOW_S = 0.01


def work_of(model: nn.Module, inputs: Any, output: Tensor) -> Work:
    """The work of one call, counted on the original model."""
    tensors = [*tensors_in(list(inputs)), *model.parameters(), *model.buffers(), output]
    with torch.no_grad(), Operations() as operations:
        model(*inputs)
    return Work(sum(map(held_bytes, tensors)), operations.count)


def held_bytes(tensor: Tensor) -> int:
    """The bytes that a tensor really holds: an expanded axis counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def ceilings_of(work: Work, dtype: torch.dtype, mode: str, device: str) -> Ceilings:
    size = min(max(work.bytes, LEAST_BYTES), MOST_BYTES)
    own = product_speed(dtype, mode, device)
    low = {"cuda": torch.float16, "cpu": torch.bfloat16 if _multiplies_tiles() else dtype}[device]
    lowest = own if low == dtype else product_speed(low, mode, device)
    return Ceilings(memory_speed(size, device), own, max(own, lowest))


def _multiplies_tiles() -> bool:
    """Whether the CPU has units for products in half precision (AMX); without them, those are not faster than fp32."""
    return bool(torch.cpu._is_amx_tile_supported())


def memory_speed(size: int, device: str) -> float:
    """Bytes per second when `size` bytes are copied or read, whichever is faster."""
    values = torch.ones(size // 4, device=device)
    source, target = values[: size // 8], values[size // 8 :][: size // 8]
    copied, read = 2 * source.numel() * 4, values.numel() * 4
    copy = copied / best_seconds(lambda _: target.copy_(source))
    return max(copy, read / best_seconds(lambda _: values.sum()))


def product_speed(dtype: torch.dtype, mode: str, device: str) -> float:
    """Operations per second of a large matrix product or a convolution, whichever is faster."""
    side, (batch, channels, space) = SIDES[device], VOLUMES[device]
    kind = dtype if dtype.is_floating_point else torch.float32
    a, b = (torch.ones(side, side, dtype=kind, device=device) for _ in range(2))
    x = torch.ones(batch, channels, space, space, dtype=kind, device=device)
    weight = torch.ones(channels, channels, 3, 3, dtype=kind, device=device)
    with torch.no_grad(), pytorch_switches(mode, torch.device(device)):
        product = 2.0 * side**3 / best_seconds(lambda _: a @ b)
        places = batch * space * space
        convolution = 2.0 * places * channels**2 * 9 / best_seconds(lambda _: F.conv2d(x, weight, padding=1))
    return max(product, convolution)


def best_seconds(call: Callable[[int], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The shortest time per call over several windows: a ceiling is the machine's best, not its average."""
    contestant, count, best = Calls(call, clock), 1, float("inf")
    for _ in range(TRIES):
        window = contestant.window(0, count)
        best = min(best, max(window.seconds, 1e-9) / window.calls)
        count = max(1, min(1000, round(WINDOW_S / best)))
    return best
