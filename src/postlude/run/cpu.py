"""Plans on the CPU without a compiler: the library's convolution over slabs of the batch, the steps while in cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.chain import Chain, Normalize, Pointwise, Step, values_of
from postlude.moments import Moments, channel_moments, finish
from postlude.plan import Plan
from postlude.plan.passes import KeepMoments, TorchPasses
from postlude.plan.problem import LAID_OUT_LIKE_THE_OTHER, memory_format
from postlude.reference import apply, as_tensor, convolve, fetch
from postlude.run.cpu_norms import normalized
from postlude.run.onednn import BufferConvolution, DirectConvolution
from postlude.stages.library import cast_for_convolution

_Library = Callable[[Tensor, "Tensor | None"], Tensor]

aten = torch.ops.aten


def _batch_norm_(x: Tensor, *others: Tensor | float, eps: float) -> Tensor:
    mean, var, weight, bias = (other.reshape(-1) if isinstance(other, Tensor) else None for other in others)
    unused = x.new_empty(0)
    aten.native_batch_norm.out(x, weight, bias, mean, var, False, 0.0, eps, out=x, save_mean=unused, save_invstd=unused)
    return x


# In-place functions of words; words without one allocate a new value.
IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu_,
    "clamp_min": lambda x, bound: torch.clamp_min_(x, bound),
    "clamp_max": lambda x, bound: torch.clamp_max_(x, bound),
    "clamp": lambda x, low, high: torch.clamp_(x, low, high),
    "hardtanh": lambda x, low, high: F.hardtanh_(x, low, high),
    "leaky_relu": lambda x, slope: F.leaky_relu_(x, slope),
    "elu": lambda x, alpha, scale, input_scale: aten.elu_(x, alpha, scale, input_scale),
    "silu": lambda x: F.silu(x, inplace=True),
    "gelu": lambda x, approximate: aten.gelu_(x, approximate=approximate),
    "mish": lambda x: F.mish(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "softplus": lambda x, beta, threshold: aten.softplus.out(x, beta, threshold, out=x),
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "abs": torch.abs_,
    "sqrt": torch.sqrt_,
    "reciprocal": torch.reciprocal_,
    "pow": lambda x, exponent: x.pow_(exponent),
    "detach": lambda x: x,
    "add": Tensor.add_,
    "sub": Tensor.sub_,
    "rsub": lambda x, y: torch.sub(y, x, out=x) if isinstance(y, Tensor) else x.neg_().add_(y),
    "mul": Tensor.mul_,
    "div": Tensor.div_,
    "rdiv": lambda x, y: torch.div(as_tensor(y, x), x, out=x),
    "maximum": lambda x, y: torch.maximum(x, as_tensor(y, x), out=x),
    "minimum": lambda x, y: torch.minimum(x, as_tensor(y, x), out=x),
    "batch_norm": _batch_norm_,
}


def execute(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    last = plan.passes[-1]
    if isinstance(last.sink, KeepMoments):
        moments = _moments(plan, tensors, last.last, last.sink.squares)
        dtype, is_last = getattr(torch, plan.result_dtype), plan.result_layout == "channels_last"
        return finish(plan.chain, moments, last.last + 1, dtype, tensors, is_last, moves=True)
    return _stored(plan, tensors)


def run_steps(plan: Plan, start: Tensor, tensors: Sequence[Tensor], last: int, owned: bool) -> Tensor:
    """Runs steps 1 to `last`, in place where the value is ours, is not read again, and keeps its dtype.

    `owned` says whether the first value may be overwritten: a convolution's result may, a caller's tensor may not.
    """
    chain = plan.chain
    values: list[Tensor | None] = [start]
    may_overwrite = [owned]
    last_uses = chain.last_uses
    result = start
    for number, step in enumerate(chain.steps[:last], 1):
        operand = values_of(step)[0].index
        is_free = may_overwrite[operand] and last_uses[operand] == number
        result = _step(plan, step, values, tensors, is_free)
        is_alias = not is_free and _share_memory(result, values[operand])
        may_overwrite[operand] &= not is_alias  # they share memory
        may_overwrite.append(not is_alias)
        values.append(result)
        for value in values_of(step):
            if last_uses[value.index] == number:
                values[value.index] = None
    return result


def _step(plan: Plan, step: Step, values: list[Tensor | None], tensors: Sequence[Tensor], is_free: bool) -> Tensor:
    if isinstance(step, Normalize):
        assert isinstance(plan.by, TorchPasses)
        x = values[step.operand.index]
        assert x is not None
        return normalized(x, step, tensors, overwrite=is_free and plan.by.norms_in_place)
    if isinstance(step, Pointwise) and is_free and step.op in IN_PLACE:
        operands = [fetch(plan.chain, operand, values, tensors) for operand in step.operands]
        found = [operand for operand in operands if isinstance(operand, Tensor)]
        # The operand that PyTorch has first gives the result its layout.
        is_turned = step.op in LAID_OUT_LIKE_THE_OTHER and found[-1].stride() != found[0].stride()
        if len({operand.dtype for operand in found}) == 1 and not is_turned:
            return IN_PLACE[step.op](*operands, **dict(step.settings))
    return apply(plan.chain, step, values, tensors)


def _share_memory(a: Tensor, b: Tensor | None) -> bool:
    """Whether two tensors share memory, as after a cast to the same dtype or after detach."""
    return b is not None and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _stored(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    """A chain whose result is as large as its value: each slab is finished in cache and written once."""
    chain, batch = plan.chain, tensors[0].shape[0]
    conv = _library(plan, tensors)
    out: Tensor | None = None
    for start, here in _slabs(plan, tensors):
        value = here[0] if conv is None else conv(here[0], _bias(chain, here))
        value = run_steps(plan, value, here, len(chain.steps), owned=conv is not None)
        if plan.slabs == 1:
            return value
        if out is None:
            out = _allocate(plan, batch, value)
        out[start : start + plan.slab].copy_(value)
    assert out is not None
    return out


def _moments(plan: Plan, tensors: Sequence[Tensor], last: int, squares: bool) -> Moments:
    """The mean and variance per sample and channel; each slab's value is discarded."""
    chain = plan.chain
    conv = _library(plan, tensors)
    parts: list[Moments] = []
    for _, here in _slabs(plan, tensors):
        value = here[0] if conv is None else conv(here[0], _bias(chain, here))
        value = run_steps(plan, value, here, last, owned=conv is not None)
        parts.append(channel_moments(value, squares, overwrite=not _share_memory(value, here[0]))[0])
    return Moments.cat(parts)


def _library(plan: Plan, tensors: Sequence[Tensor]) -> _Library | None:
    conv = plan.chain.producer
    if conv is None:
        return None
    weight = tensors[1] if conv.dtype is None else tensors[1].to(getattr(torch, conv.dtype))
    if plan.library == "buffer":
        return BufferConvolution(conv, weight, (plan.slab, *tensors[0].shape[1:]))
    if plan.library == "direct":
        return DirectConvolution(conv, weight, plan.value.layout)
    return lambda x, bias: convolve(conv, x, weight, bias)


def _slabs(plan: Plan, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
    for start in range(0, tensors[0].shape[0], plan.slab):
        here = [
            tensor[start : start + plan.slab] if role in ("input", "full", "row") else tensor
            for tensor, role in zip(tensors, plan.chain.roles)
        ]
        yield start, cast_for_convolution(plan.chain, here)


def _bias(chain: Chain, tensors: Sequence[Tensor]) -> Tensor | None:
    return tensors[2] if chain.producer is not None and chain.producer.has_bias else None


def _allocate(plan: Plan, batch: int, value: Tensor) -> Tensor:
    shape = (batch, *value.shape[1:])
    if value.dim() != plan.chain.dims + 2:  # a reduction removed the spatial axes
        return torch.empty(shape, dtype=value.dtype, device=value.device)
    layout = memory_format(plan.result_layout, plan.chain.dims)
    return torch.empty(shape, dtype=value.dtype, device=value.device, memory_format=layout)
