"""Precision modes: which format a mode rounds to, the mode's own error, and PyTorch's switches for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from postlude.check.doubles import FastDoubles
from postlude.check.interception import Interception
from postlude.errors import PrecisionError
from postlude.hardware import default_fp32_precision, has_tf32
from postlude.reference import round_to_format

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
FORMATS: dict[str, str | None] = {"fp32": None, "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}
_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# Operator → positions of the operands that tensor cores read in the mode's format.
_aten = torch.ops.aten
_PRODUCTS: dict[Any, tuple[int, ...]] = {
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.mv.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.addmv.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
}


def resolve(precision: str, dtype: torch.dtype, device: torch.device, is_linear: bool = False) -> str:
    """The precision mode by name. 16-bit data has its own; "auto" follows PyTorch's switch for convolutions, or with
    `is_linear` the one for matrix products, where the device has TF32."""
    if precision != "auto" and precision not in FORMATS:
        raise PrecisionError(f"unknown precision {precision!r}: choose one of auto, {', '.join(FORMATS)}")
    if dtype in _WORDS:
        return _WORDS[dtype]
    if precision == "auto":
        return default_fp32_precision(is_linear) if device.type == "cuda" and has_tf32(device) else "fp32"
    return precision


def has_no_convolution(model: nn.Module) -> bool:
    """Whether no weight looks like a convolution's: several output channels, and spatial axes after the input channels.

    fp32 then follows PyTorch's switch for matrix products, whose default is IEEE fp32 while that of convolutions is
    TF32.
    """
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 3 and parameter.shape[0] > 1]
    return not weights and not any(isinstance(module, _ConvNd) for module in model.modules())


class RoundedOperands(Interception):
    """Rounds the operands of every matrix product and convolution to a format, forward and backward."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = _PRODUCTS.get(func, ())
        rounded = [
            round_to_format(arg, self.name) if place in places and isinstance(arg, Tensor) else arg
            for place, arg in enumerate(args)
        ]
        return func(*rounded, **kwargs)


@contextmanager
def pytorch_switches(precision: str, device: torch.device) -> Iterator[None]:
    """Sets PyTorch's own switches for "fp32" or "tf32" on a GPU, and restores them afterwards."""
    if device.type != "cuda" or precision not in ("fp32", "tf32"):
        yield
        return
    # Only the new interface is used: once it has been set, reading the old one raises.
    switches: tuple[Any, ...] = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


@contextmanager
def in_double(device: torch.device) -> Iterator[None]:
    """The context for float64 computations: no algorithm search, and on a GPU our faster convolutions (doubles.py)."""
    with library_unsearched(), FastDoubles() if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def library_unsearched() -> Iterator[None]:
    """Turns cuDNN's algorithm search (`benchmark`) off: it takes seconds, and there are only a few calls."""
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.backends.cudnn.benchmark = before
