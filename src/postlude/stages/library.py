"""PyTorch's convolution on a GPU, with autocast's casts before it and with TF32 on or off as the plan says."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude import reference
from postlude.chain import Chain, Convolution

CONVOLVED = ("input", "weight", "bias")  # roles of the tensors that the convolution takes


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Turns autocast off. A chain has its casts as steps, so its operators must not be cast a second time.

    A backward pass may be called inside an autocast region, and a forward pass may be traced there.
    """
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # "meta" has none
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def cast_for_convolution(chain: Chain, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, with those of the convolution cast to its dtype if autocast gave it one."""
    conv = chain.producer
    if conv is None or conv.dtype is None:
        return tensors
    dtype = getattr(torch, conv.dtype)
    return [t.to(dtype) if role in CONVOLVED else t for t, role in zip(tensors, chain.roles)]


def as_plain(conv: Convolution, weight: Tensor) -> tuple[Convolution, Tensor]:
    """A transposed convolution of stride 1 as an ordinary one: the weight's channels swapped, its taps flipped."""
    plain = conv.as_plain()
    if plain is None:
        raise ValueError(f"{conv} has no plain form")
    return plain, weight.transpose(0, 1).flip(*range(2, 2 + conv.dims)) if conv.transposed else weight


def convolve_by_pytorch(conv: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool | None) -> Tensor:
    """PyTorch's convolution. If `tf32` is None, PyTorch's switch decides; else cuDNN is told directly."""
    if tf32 is None:
        return reference.convolve(conv, x, weight, bias)
    cudnn = torch.backends.cudnn
    settings = (cudnn.benchmark, cudnn.deterministic, tf32)
    sizes = (conv.stride, conv.dilation, conv.groups, *settings)
    result: Tensor
    if conv.transposed:
        result = torch.ops.aten.cudnn_convolution_transpose(x, weight, conv.padding, conv.output_padding, *sizes)
    else:
        result = torch.ops.aten.cudnn_convolution(x, weight, conv.padding, *sizes)
    return result if bias is None else result + reference.per_channel(bias, conv.dims)
