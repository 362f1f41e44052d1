"""Upsampling whose gradient our kernel gathers: an operator that replaces PyTorch's in a graph.

Compilers decompose PyTorch's upsampling into indexing, whose gradient is a scatter with atomics. The forward pass of
this operator is PyTorch's, so that a compiler can fuse it with its neighbours; only the gradient differs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from postlude import encoded
from postlude.plan.problem import Layout, layout_of, memory_format
from postlude.plan.program import Program
from postlude.plan.upsample import Upsampling
from postlude.run.ahead import Job, jobs_of
from postlude.run.chain_run import on_device_of
from postlude.run.operator import LIBRARY
from postlude.run.runner import Run, runner_of
from postlude.stages.program import traced
from postlude.stages.upsample import upsample_gradient

LIBRARY.define("upsample(Tensor x, str how) -> Tensor")
LIBRARY.define("upsample_gradient(Tensor dy, str how, str layout) -> Tensor")


def text_of(how: Upsampling) -> str:
    """The settings as text, which the operators take."""
    return encoded.dumps(how)


@functools.lru_cache(maxsize=256)
def _read(text: str) -> Upsampling:
    found = encoded.loads(text, {"Upsampling": Upsampling})
    assert isinstance(found, Upsampling)
    return found


def layout_for(x: Tensor) -> Layout:
    """The layout of the gradient of `x`."""
    return "channels_last" if layout_of(x) == "channels_last" else "contiguous"


def by_pytorch(x: Tensor, how: Upsampling) -> Tensor:
    """PyTorch's upsampling, by the overload that compilers decompose.

    The other overloads remain calls of a library kernel, which reads and writes only contiguous fp32 or fp16: 3.4 of
    the 27 ms of a SegResNet training step.
    """
    dims = len(how.small)
    if how.is_linear:
        word, more = "upsample_bilinear2d" if dims == 2 else "upsample_trilinear3d", [how.aligns_corners]
    else:
        word, more = f"{'_upsample_nearest_exact' if how.is_exact else 'upsample_nearest'}{dims}d", []
    size, factors = (None, how.factors) if how.factors else (how.large, None)
    result: Tensor = getattr(torch.ops.aten, word).vec(x, size, *more, factors)
    return result


class _Upsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, text: str) -> Tensor:
        ctx.text, ctx.layout = text, layout_for(x)
        return by_pytorch(x, _read(text))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return torch.ops.postlude.upsample_gradient(dy, ctx.text, ctx.layout), None


def _upsample(x: Tensor, text: str) -> Tensor:
    result: Tensor = _Upsample.apply(x, text)  # type: ignore[no-untyped-call]
    return result


def _program(shape: tuple[int, ...], dtype: torch.dtype, how: Upsampling, layout: Layout) -> Program:
    like = torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format(layout, len(how.small)))
    return traced(lambda given: upsample_gradient(given[0], how, layout), [like])


@functools.lru_cache(maxsize=256)
def _runner(shape: tuple[int, ...], dtype: torch.dtype, how: Upsampling, layout: Layout, device: str) -> Run:
    program = _program(shape, dtype, how, layout)
    return runner_of(program.given, program.forward, [program.result], device)


def jobs_for(x: Tensor, how: Upsampling) -> list[Job]:
    """The kernels of the gradient of upsampling `x`, which take seconds to compile: up to 125 taps are unrolled."""
    program = _program((*x.shape[:2], *how.large), x.dtype, how, layout_for(x))
    return jobs_of(program, x.device.index or 0)


def _gradient(dy: Tensor, text: str, layout: Layout) -> Tensor:
    how = _read(text)
    dy = dy.contiguous(memory_format=memory_format(layout, len(how.small)))
    with torch.no_grad(), on_device_of(dy):
        (dx,) = _runner(tuple(dy.shape), dy.dtype, how, layout, str(dy.device))(dy)
    assert dx is not None
    return dx


def _gradient_shape(dy: Tensor, text: str, layout: Layout) -> Tensor:
    how = _read(text)
    shape = (*dy.shape[:2], *how.small)
    return torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=memory_format(layout, len(how.small)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, ctx.text, _ = inputs


def _derivative(ctx: Any, ddx: Tensor) -> tuple[Tensor, None, None]:
    """The derivative of the gradient, which is linear in `dy`: upsampling itself."""
    return torch.ops.postlude.upsample(ddx, ctx.text), None, None


LIBRARY.impl("upsample", _upsample, "CompositeImplicitAutograd")
LIBRARY.impl("upsample_gradient", _gradient, "CompositeExplicitAutograd")
torch.library.register_fake("postlude::upsample_gradient", _gradient_shape, lib=LIBRARY)
torch.library.register_autograd("postlude::upsample_gradient", _derivative, setup_context=_save, lib=LIBRARY)
