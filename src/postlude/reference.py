"""The truth: a Chain evaluated by plain PyTorch, one operator per step, in any dtype.

With `dtype=None` this is what the model computed before, operator by operator and dtype by dtype. With
`dtype=torch.float64` it is the truth against which every error is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.chain import (
    Cast,
    Chain,
    Convolution,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    Scalar,
    Softmax,
    Step,
    Value,
    values_of,
)

aten = torch.ops.aten


def as_tensor(other: Tensor | float, like: Tensor) -> Tensor:
    return other if isinstance(other, Tensor) else torch.full((), other, dtype=like.dtype, device=like.device)


def _vector(other: Tensor | float) -> Tensor | None:
    """A tensor with one number per channel as a vector; None for a plain number, which means that none was given."""
    return other.reshape(-1) if isinstance(other, Tensor) else None


def _batch_norm(x: Tensor, others: list[Tensor | None], eps: float) -> Tensor:
    mean, variance, weight, bias = others
    assert mean is not None
    assert variance is not None
    # PyTorch refuses statistics that require a gradient.
    return F.batch_norm(x, mean.detach(), variance.detach(), weight, bias, training=False, eps=eps)


POINTWISE: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "clamp_min": lambda x, bound: torch.clamp_min(x, bound),
    "clamp_max": lambda x, bound: torch.clamp_max(x, bound),
    "clamp": lambda x, low, high: torch.clamp(x, low, high),
    "hardtanh": lambda x, low, high: F.hardtanh(x, low, high),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "elu": lambda x, alpha, scale, input_scale: aten.elu(x, alpha, scale, input_scale),
    "silu": F.silu,
    "gelu": lambda x, approximate: F.gelu(x, approximate=approximate),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": lambda x, beta, threshold: F.softplus(x, beta, threshold),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    "pow": lambda x, exponent: torch.pow(x, exponent),
    "detach": Tensor.detach,
    "add": torch.add,
    "sub": torch.sub,
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": torch.div,
    "rdiv": lambda x, y: torch.div(as_tensor(y, x), x),
    "maximum": lambda x, y: torch.maximum(x, as_tensor(y, x)),
    "minimum": lambda x, y: torch.minimum(x, as_tensor(y, x)),
    # PyTorch accepts only a weight of the value's dtype; if it differs here, autocast has cast it.
    "prelu": lambda x, weight: torch.prelu(x, as_tensor(weight, x).reshape(-1).to(x.dtype)),
    "batch_norm": lambda x, *others, eps: _batch_norm(x, [_vector(other) for other in others], eps),
}
# The last two arguments are the running statistics to update, or None.
NORMS: dict[str, Callable[..., Tensor]] = {
    "group_norm": lambda x, step, weight, bias, *_: F.group_norm(x, step.groups, weight, bias, step.eps),
    "instance_norm": lambda x, step, weight, bias, *_: F.instance_norm(x, None, None, weight, bias, eps=step.eps),
    "batch_norm": lambda x, step, weight, bias, mean, variance: F.batch_norm(
        x, mean, variance, weight, bias, training=True, momentum=step.momentum, eps=step.eps
    ),
    "layer_norm": lambda x, step, weight, bias, *_: F.layer_norm(x, x.shape[-step.axes :], weight, bias, step.eps),
}
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "adaptive_avg_pool": lambda x, dim, keepdim: _POOLS[len(dim)](x, 1),  # noqa: ARG005  it always keeps its axes
    "logsumexp": torch.logsumexp,
    "amax": torch.amax,
    "amin": torch.amin,
    "max": lambda x, dim, keepdim: torch.max(x, dim=dim[0], keepdim=keepdim).values,
    "min": lambda x, dim, keepdim: torch.min(x, dim=dim[0], keepdim=keepdim).values,
}
_POOLS: dict[int, Callable[..., Tensor]] = {2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def _max_pool(x: Tensor, step: Pool) -> Tensor:
    function = torch.max_pool2d if x.dim() == 4 else torch.max_pool3d
    windows = step.windows
    return function(x, windows.kernel, windows.stride, windows.padding, 1, windows.is_ceil)


def _avg_pool(x: Tensor, step: Pool) -> Tensor:
    if x.dim() == 2:  # over features
        windows = step.windows
        return F.avg_pool1d(x.unsqueeze(1), windows.kernel, windows.stride, windows.padding).squeeze(1)
    function, windows = F.avg_pool2d if x.dim() == 4 else F.avg_pool3d, step.windows
    how = (windows.kernel, windows.stride, windows.padding, windows.is_ceil, step.counts_padding, step.divisor)
    return function(x, *how)


SOFTMAXES: dict[str, Callable[..., Tensor]] = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
POOLS: dict[str, Callable[[Tensor, Pool], Tensor]] = {"max_pool": _max_pool, "avg_pool": _avg_pool}


def evaluate(
    chain: Chain,
    tensors: Sequence[Tensor],
    *,
    dtype: torch.dtype | None = None,
    rounded_to: str | None = None,
    moves: bool = False,
    start: Tensor | None = None,
) -> Tensor:
    """The chain's result.

    Args:
        chain: What to compute.
        tensors: One tensor per slot.
        dtype: If given, everything is computed in this dtype, and casts inside the chain are skipped.
        rounded_to: "tf32", "float16" or "bfloat16": rounds the convolution's operands to this format first. With
            float64 this gives the error of a precision and nothing else.
        moves: Whether a batch_norm updates its running statistics, as the model did.
        start: The chain's first value, if it is known (`first_value`).
    """
    if dtype is not None:
        tensors = [tensor.to(dtype) for tensor in tensors]
    start = first_value(chain, tensors, dtype, rounded_to) if start is None else start
    values: list[Tensor | None] = [start]
    last_uses = chain.last_uses
    for number, step in enumerate(chain.steps, 1):
        values.append(apply(chain, step, values, tensors, keep_dtype=dtype is not None, moves=moves))
        for value in values_of(step):
            if last_uses[value.index] == number:
                values[value.index] = None  # freed after its last use, as in eager
    return _present(values[-1])


def first_value(
    chain: Chain, tensors: Sequence[Tensor], dtype: torch.dtype | None, rounded_to: str | None = None
) -> Tensor:
    """The convolution's result, or the input of a chain without one."""
    return tensors[0] if chain.producer is None else _convolve(chain.producer, tensors, dtype, rounded_to)


def continue_from(chain: Chain, number: int, value: Tensor, tensors: Sequence[Tensor], moves: bool = False) -> Tensor:
    """The steps after step `number`, whose result is `value`; they must not read anything earlier."""
    values: list[Tensor | None] = [None] * number + [value]
    for step in chain.steps[number:]:
        values.append(apply(chain, step, values, tensors, moves=moves))
    return _present(values[-1])


def apply(
    chain: Chain,
    step: Step,
    values: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    keep_dtype: bool = False,
    moves: bool = False,
) -> Tensor:
    """The result of one step on the values so far."""
    if isinstance(step, Pointwise):
        operands = [fetch(chain, operand, values, tensors) for operand in step.operands]
        return POINTWISE[step.op](*operands, **dict(step.settings))
    x = _present(values[step.operand.index])
    if isinstance(step, Cast):
        return x if keep_dtype else x.to(getattr(torch, step.dtype))
    if isinstance(step, Reduce):
        return REDUCTIONS[step.op](x, dim=reduced_axes(chain, step), keepdim=step.keepdim)
    if isinstance(step, Pool):
        return POOLS[step.op](x, step)
    if isinstance(step, Softmax):
        return F.normalize(x, dim=1, eps=step.eps) if step.op == "normalize" else SOFTMAXES[step.op](x, dim=1)
    weight, bias = (None if slot is None else parameter(tensors[slot.index], x) for slot in (step.weight, step.bias))
    moved = [tensors[slot.index] for slot in step.running] if moves and step.running is not None else [None, None]
    return NORMS[step.op](x, step, weight, bias, *moved)


def fetch(chain: Chain, operand: Operand, values: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> Any:
    if isinstance(operand, Scalar):
        return operand.value
    if isinstance(operand, Value):
        return _present(values[operand.index])
    tensor = tensors[operand.index]
    return per_channel(tensor, chain.dims) if chain.roles[operand.index] == "channel" else tensor


def parameter(vector: Tensor, x: Tensor) -> Tensor:
    """A norm's weight or bias in a dtype that PyTorch's norm accepts.

    It may be wider than the value, but not narrower. If it is narrower, autocast has widened it together with the
    value, as on CUDA for the group_norm of a half-precision model.
    """
    return vector.to(torch.promote_types(vector.dtype, x.dtype))


def per_channel(vector: Tensor, dims: int) -> Tensor:
    """A vector of one number per channel, shaped to broadcast over (N, C, space)."""
    return vector.reshape(-1, *[1] * dims)


def reduced_axes(chain: Chain, step: Reduce) -> list[int]:
    return [1] if step.over == "channels" else list(range(2 if step.over == "space" else 1, 2 + chain.dims))


def convolve(conv: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The library's convolution with this chain's settings."""
    if conv.is_linear:
        return F.linear(x, weight, bias)
    function = getattr(F, conv.name)
    if conv.transposed:
        result = function(x, weight, bias, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
    else:
        result = function(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    return _present(result)


def round_to_format(tensor: Tensor, name: str) -> Tensor:
    """Rounds to the nearest number of a narrower format (ties to even), keeping the tensor's dtype."""
    if name != "tf32":
        return tensor.to(getattr(torch, name)).to(tensor.dtype)
    bits = tensor.float().view(torch.int32)
    # fp32 has 23 mantissa bits, TF32 has 10: add half of the dropped 13, one less where the kept part is even.
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return rounded.view(torch.float32).to(tensor.dtype)


def _convolve(
    conv: Convolution, tensors: Sequence[Tensor], dtype: torch.dtype | None, rounded_to: str | None
) -> Tensor:
    x, weight = tensors[0], tensors[1]
    bias = tensors[2] if conv.has_bias else None
    if rounded_to is not None:
        x, weight = round_to_format(x, rounded_to), round_to_format(weight, rounded_to)
    if conv.dtype is not None and dtype is None:
        target = getattr(torch, conv.dtype)
        x, weight, bias = x.to(target), weight.to(target), None if bias is None else bias.to(target)
    return convolve(conv, x, weight, bias)


def _present(value: Tensor | None) -> Tensor:
    if not isinstance(value, Tensor):
        raise RuntimeError("a step reads a value that was already freed")
    return value
