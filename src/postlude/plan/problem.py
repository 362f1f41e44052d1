"""One instance of a chain: shapes, dtypes, layouts, device and precision, as a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from postlude.chain import (
    POINTWISE,
    SOFTMAXES,
    Cast,
    Chain,
    Normalize,
    Pointwise,
    Pool,
    Reduce,
    Slot,
    Softmax,
    Value,
    values_of,
)
from postlude.hardware import Machine, default_fp32_precision
from postlude.plan.barriers import channels_end

Layout = Literal["contiguous", "channels_last", "strided"]
PRECISIONS = ("auto", "fp32", "tf32")
CONVOLUTIONS = ("auto", "pytorch")  # who convolves: whoever is faster, or always PyTorch
TF32_CHANNELS = 16  # with fewer, cuDNN ignores its TF32 switch for contiguous fp32 (seen on an H200)
LAID_OUT_LIKE_THE_OTHER = ("rsub", "rdiv")  # words whose second operand is PyTorch's first one
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}  # by spatial axes


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * item_size(self.dtype)


class Settings(NamedTuple):
    """What is asked of a chain, the same for every problem; see `Problem`."""

    precision: str = "auto"
    memory: str = "default"
    convolution: str = "auto"
    hands_on: str = ""


@dataclass(frozen=True)
class Problem:
    tensors: tuple[Spec, ...]  # one per slot of the chain
    device: str  # torch's device type
    precision: str
    needs_grad: bool
    allows_tf32: bool = False  # PyTorch's switch for fp32 convolutions on a GPU, which "auto" follows
    memory: str = "default"  # or "lean"
    convolution: str = "auto"  # or "pytorch": PyTorch's own call, bit for bit
    hands_on: str = ""  # the layout that the graph needs for the result; "" means PyTorch's
    index: int = 0  # of the device: two GPUs of one machine may be different cards
    multiplies_tf32: bool = False  # PyTorch's switch for fp32 matrix products, which linear layers follow

    @property
    def place(self) -> str:
        return f"cuda:{self.index}" if self.device == "cuda" else self.device

    @property
    def x(self) -> Spec:
        return self.tensors[0]

    @property
    def settings(self) -> Settings:
        return Settings(self.precision, self.memory, self.convolution, self.hands_on)


def item_size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def problem_of(
    tensors: Sequence[Tensor],
    precision: str = "auto",
    memory: str = "default",
    convolution: str = "auto",
    hands_on: str = "",
    *,
    has_sizes: bool = True,
) -> Problem:
    """The problem that these tensors pose. Without `has_sizes`, their sizes are a compiler's symbols and are left
    out."""
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    device = tensors[0].device
    is_gpu = device.type == "cuda"
    return Problem(
        tuple(map(spec_of, tensors)) if has_sizes else (),
        device.type,
        precision,
        needs_grad,
        allows_tf32=is_gpu and default_fp32_precision() == "tf32",
        memory=memory,
        convolution=convolution,
        hands_on=hands_on,
        index=device.index or 0,
        multiplies_tf32=is_gpu and default_fp32_precision(is_linear=True) == "tf32",
    )


def spec_of(tensor: Tensor) -> Spec:
    return Spec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), layout_of(tensor))


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a tensor. If it is both (one channel or one position), contiguous, as PyTorch's convolutions
    decide."""
    if tensor.is_contiguous():
        return "contiguous"
    last = CHANNELS_LAST.get(tensor.dim() - 2)
    return "channels_last" if last is not None and tensor.is_contiguous(memory_format=last) else "strided"


def memory_format(layout: Layout, dims: int) -> torch.memory_format:
    """PyTorch's memory format for a layout. A linear layer's values are matrices and have only one."""
    return CHANNELS_LAST[dims] if layout == "channels_last" and dims else torch.contiguous_format


def empty(spec: Spec, dims: int, device: str) -> Tensor:
    """A tensor of this shape, dtype and layout. One with another number of axes than a value is contiguous."""
    layout = memory_format(spec.layout if len(spec.shape) == dims + 2 else "contiguous", dims)
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device, memory_format=layout)


def body_shape(chain: Chain, problem: Problem) -> tuple[int, ...]:
    """The shape of the chain's first value: the convolution's result, or the input."""
    x = problem.x.shape
    if chain.producer is None:
        return x
    return (x[0], chain.producer.out_channels, *chain.producer.output_space(x[2:]))


def body_dtype(chain: Chain, problem: Problem) -> str:
    return problem.x.dtype if chain.producer is None else (chain.producer.dtype or problem.x.dtype)


def body_spec(chain: Chain, problem: Problem, layout: Layout) -> Spec:
    return Spec(body_shape(chain, problem), body_dtype(chain, problem), layout)


def result_shape(chain: Chain, problem: Problem) -> tuple[int, ...]:
    shape = body_shape(chain, problem)
    for step in chain.steps:
        if isinstance(step, Reduce):
            shape = reduced_shape(step, shape)
        elif isinstance(step, Pool):
            kept = 2 if chain.dims else 1  # windows of positions, or of features
            shape = (*shape[:kept], *step.windows.output_space(shape[kept:]))
    return shape


def reduced_shape(step: Reduce, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what a reduction gives of a value of this shape."""
    first, last = {"space": (2, len(shape)), "sample": (1, len(shape)), "channels": (1, 2)}[step.over]
    return (*shape[:first], *[1] * ((last - first) * step.keepdim), *shape[last:])


def value_dtypes(chain: Chain, problem: Problem) -> list[str]:
    """The dtypes of the chain's values by PyTorch's promotion rules: the first value's, then that of each step."""
    dtypes = [getattr(torch, body_dtype(chain, problem))]
    for step in chain.steps:
        dtype = dtypes[values_of(step)[0].index]
        if isinstance(step, Cast):
            dtype = getattr(torch, step.dtype)
        if isinstance(step, Pointwise) and not POINTWISE[step.op].vectors:
            for operand in step.operands:
                if isinstance(operand, Slot) and problem.tensors[operand.index].shape:  # 0-d promotes like a number
                    dtype = torch.promote_types(dtype, getattr(torch, problem.tensors[operand.index].dtype))
                elif isinstance(operand, Value):
                    dtype = torch.promote_types(dtype, dtypes[operand.index])
        dtypes.append(dtype)
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def result_dtype(chain: Chain, problem: Problem) -> str:
    return value_dtypes(chain, problem)[-1]


def fp32_mode(chain: Chain, problem: Problem) -> str:
    """ "fp32" or "tf32": the precision asked for, or what PyTorch would use; with few channels that is fp32."""
    if problem.precision != "auto":
        return problem.precision
    conv = chain.producer
    if conv is not None and conv.is_linear:
        return "tf32" if problem.multiplies_tf32 else "fp32"
    return "tf32" if problem.allows_tf32 and conv is not None and conv.in_channels >= TF32_CHANNELS else "fp32"


def body_bytes(chain: Chain, problem: Problem) -> int:
    return math.prod(body_shape(chain, problem)) * item_size(body_dtype(chain, problem))


def compulsory_bytes(chain: Chain, problem: Problem) -> int:
    """The bytes that any implementation of the chain must move: every tensor read once, the result written once."""
    result = math.prod(result_shape(chain, problem)) * item_size(result_dtype(chain, problem))
    return sum(spec.bytes for spec in problem.tensors) + result


def body_layout(chain: Chain, problem: Problem) -> Layout:
    """The layout of the chain's first value. A convolution's result is channels-last if one of its operands is, unless
    PyTorch's own loops compute it."""
    if chain.producer is None:
        return problem.x.layout
    if cpu_library(chain, problem) == "loops":
        return "contiguous"
    return "channels_last" if problem.tensors[1].layout == "channels_last" else problem.x.layout


def cpu_library(chain: Chain, problem: Problem) -> Literal["oneDNN", "loops"] | None:
    """What computes a convolution of volumes in fp32 if PyTorch chooses; None where that depends on more."""
    conv = chain.producer
    if conv is None or conv.dims != 3 or problem.device != "cpu" or conv.dtype is not None:
        return None
    if {spec.dtype for spec in problem.tensors[:2]} != {"float32"}:
        return None
    if is_convolved_by_loops(problem.x.shape, conv.kernel, conv.groups):
        return "loops"
    return None if conv.kernel[-2:] == (1, 1) else "oneDNN"  # for 1 × 1 also on the number of threads


def is_convolved_by_loops(x: Sequence[int], kernel: Sequence[int], groups: int) -> bool:
    """Whether PyTorch computes a convolution of volumes in fp32 on a CPU by loops of its own instead of by oneDNN: it
    does so for one small sample. Their result is contiguous, and chains take 6 to 22 times as long with them."""
    return x[0] == 1 and groups == 1 and math.prod(x[:4]) <= 20480 and not min(kernel[-2:]) > 3


def result_layout(chain: Chain, problem: Problem, machine: Machine) -> Layout:
    """The layout of the chain's result. Without channels there is only one, and with one channel both are the same."""
    if channels_end(chain) is not None:
        return "contiguous"
    return handed_on_layout(chain, problem, machine)


def handed_on_layout(chain: Chain, problem: Problem, machine: Machine) -> Layout:
    """The layout of the last value if eager's operators ran.

    A norm or a pool may return a contiguous result for a channels-last input. With two tensors, PyTorch's first operand
    gives the result its layout. A graph may ask for channels-last throughout.
    """
    if problem.hands_on == "channels_last":
        return "channels_last"
    layout = body_layout(chain, problem)
    for step in chain.steps:
        if isinstance(step, Normalize) and step.op not in machine.keeping_layout:
            layout = "contiguous"
        if isinstance(step, Softmax) and step.op in SOFTMAXES:  # on every device
            layout = "contiguous"
        if isinstance(step, Pool) and f"{step.op}{chain.dims}d" not in machine.keeping_layout:
            layout = "contiguous"
        if isinstance(step, Pointwise) and step.op in LAID_OUT_LIKE_THE_OTHER:
            other = step.operands[1]
            if isinstance(other, Slot) and chain.roles[other.index] == "full":
                layout = problem.tensors[other.index].layout
    return layout


def power_in(number: int, most: int) -> int:
    """The largest power of two up to `most` that divides `number`."""
    return min(most, number & -number)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
