"""Upsampling in a graph that trains: replaced by an operator whose gradient is a gather."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from postlude.errors import raises_errors
from postlude.graph.names import site_name
from postlude.plan.problem import memory_format
from postlude.plan.upsample import Upsampling
from postlude.run.ahead import load_all, start_all
from postlude.run.apart import apart
from postlude.run.upsample import by_pytorch, jobs_for, layout_for, text_of

log = logging.getLogger("postlude")
aten = torch.ops.aten
_LINEAR = (aten.upsample_bilinear2d, aten.upsample_trilinear3d)
_NEAREST = (aten.upsample_nearest2d, aten.upsample_nearest3d)
_EXACT = (aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d)
# Largest error against float64, relative to the result's RMS: rounding of the result and of fp32 sums.
_ALLOWED = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def gather_gradients(graph: fx.GraphModule, wanting: Collection[fx.Node], checks: bool) -> list[str]:
    """Replaces upsampling that needs a gradient which our kernel can compute; returns the modules' names."""
    found = []
    for node, how in _served(graph, wanting):
        why_not = apart(_why_not, node.args[0].meta["val"], how, checks)
        if why_not:
            log.warning("the gathered gradient of %s %s: PyTorch computes it", site_name((node,)), why_not)
            continue
        node.args, node.kwargs = (node.args[0], text_of(how)), {}
        node.target = torch.ops.postlude.upsample.default
        found.append(site_name((node,)))
    return found


def _why_not(x: Tensor, how: Upsampling, checks: bool) -> str:
    """Why our gradient cannot be used; empty if it can."""
    try:
        load_all(jobs_for(x, how), str(x.device))
        return "" if not checks or gradient_is_right(x, how) else "is wrong"
    except torch.OutOfMemoryError:
        return "could not be checked for lack of memory"
    except Exception as error:
        if raises_errors():
            raise
        return f"could not be built ({type(error).__name__})"


def expect_gathers(graph: fx.GraphModule, wanting: Collection[fx.Node]) -> None:
    """Begins to compile the kernels that `gather_gradients` will need if layouts stay as they are."""
    for node, how in _served(graph, wanting):
        x = node.args[0].meta["val"]
        start_all(apart(jobs_for, x, how), str(x.device))


def _served(graph: fx.GraphModule, wanting: Collection[fx.Node]) -> list[tuple[Any, Upsampling]]:
    found = [(node, _upsampling_of(node)) for node in graph.graph.nodes if node in wanting]
    return [(node, how) for node, how in found if how is not None and _is_served(node.args[0].meta["val"], how)]


def _upsampling_of(node: fx.Node) -> Upsampling | None:
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in (*_LINEAR, *_NEAREST, *_EXACT):
        return None
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = {**dict(zip(names, node.args)), **node.kwargs}
    given_shape, shape = (tuple(value.meta["val"].shape) for value in (node.args[0], node))  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in (*given_shape, *shape)):
        return None  # our kernel is compiled and checked for a known size, that of the batch included
    small, large = given_shape[2:], shape[2:]
    factors = given.get("scale_factors") or [given.get(f"scales_{axis}") for axis in "dhw"[3 - len(small) :]]
    known = tuple(float(factor or 0) for factor in factors) if any(factors) else ()
    if known and tuple(int(size * factor) for size, factor in zip(small, known)) != large:
        return None  # the size contradicts the factors
    return Upsampling(small, large, packet in _LINEAR, bool(given.get("align_corners")), packet in _EXACT, known)


def _is_served(x: Tensor, how: Upsampling) -> bool:
    return x.is_cuda and x.dtype in _ALLOWED and how.is_served


def gradient_is_right(like: Tensor, how: Upsampling) -> bool:
    """Whether our gradient agrees with PyTorch's in float64, on the problem itself."""
    layout = layout_for(like)
    form = memory_format(layout, len(how.small))
    with torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        dy = torch.randn((*like.shape[:2], *how.large), dtype=like.dtype, device=like.device).contiguous(
            memory_format=form
        )
    ours = torch.ops.postlude.upsample_gradient(dy, text_of(how), layout)
    x = torch.zeros(like.shape, dtype=torch.float64, device=like.device, requires_grad=True)
    with torch.enable_grad():
        (truth,) = torch.autograd.grad(by_pytorch(x, how), x, dy.double())
    error = (ours - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    return bool(error <= _ALLOWED[like.dtype])
