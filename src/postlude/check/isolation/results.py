"""Inside the candidate's process: whatever a model returns becomes plain tensors on the host, or is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from postlude.check.isolation.wire import DTYPES, flatten, is_dense, rebuild


class RefusedError(Exception):
    """A refusal of the candidate's result, as a sentence."""


def materialise(tensor: Any) -> Tensor:
    """A plain dense tensor on the host with these values, by plain operations."""
    kind = kind_of(tensor)
    if tensor.device.type == "meta" or tensor.is_nested:
        raise RefusedError("the candidate returns a tensor without values, or a nested one")
    tensor = tensor.detach()
    if kind == "sparse":
        tensor = tensor.to_dense()
    elif kind == "quantised":
        tensor = tensor.dequantize()
    elif kind == "subclass":
        plain = torch.empty(tensor.shape, dtype=tensor.dtype)
        plain.copy_(tensor)  # returns a tensor of the subclass again
        tensor = plain
    tensor = tensor.resolve_conj().resolve_neg().cpu()
    if type(tensor) is not torch.Tensor:
        raise RefusedError(f"the candidate returns a {type(tensor).__name__}, which has no plain values")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise RefusedError(f"the candidate returns a tensor of {tensor.dtype}, which cannot be judged")
    keeps_strides = tensor.numel() and is_dense(tensor.shape, tensor.stride())
    return tensor if keeps_strides else torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def kind_of(tensor: Any) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return "subclass"
    if tensor.layout != torch.strided:
        return "sparse"
    return "quantised" if tensor.is_quantized else "plain"


def sent_kind(tensor: Any) -> str:
    """Its kind as the verifier is told. Results are sent without gaps."""
    kind = kind_of(tensor)
    is_gapped = kind == "plain" and tensor.numel() and not is_dense(tensor.shape, tensor.stride())
    return "gapped" if is_gapped else kind


def settled(value: Any) -> Any:
    """Inside a timed window: computes lazy results now, not when they are read."""
    tree, found = flatten(value)
    plain = [one if kind_of(one) == "plain" else materialise(one) for one in found]
    return rebuild(tree, plain)
