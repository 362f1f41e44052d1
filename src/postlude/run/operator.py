"""`torch.ops.postlude.chain`: a chain as one registered operator, for compilers that trace through the graph.

Eager calls do not come through here: the registered boundary costs them tens of microseconds. Its gradient computes the
forward pass again, for an operator can keep nothing but what it was given and what it returned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude import reference
from postlude.chain import Chain
from postlude.errors import PostludeError
from postlude.plan import problem_of
from postlude.run.chain_run import Training
from postlude.run.execute import prepared
from postlude.run.site import run_chain
from postlude.stages.library import without_autocast


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> Chain:
    return Chain.loads(text)


@torch.library.custom_op("postlude::chain", mutates_args=())
def chain(tensors: list[Tensor], text: str, precision: str) -> Tensor:
    given = _parse(text)
    if given.moved:
        raise PostludeError(
            "torch.ops.postlude.chain cannot move running statistics; "
            "call postlude.functional.run for a batch_norm in training."
        )
    with torch.no_grad():
        result = run_chain(given, tensors, precision)
    # An operator must not return one of its arguments; a chain of no-ops could.
    return result.clone() if any(result is tensor for tensor in tensors) else result


@chain.register_fake
def _(tensors: list[Tensor], text: str, precision: str) -> Tensor:  # noqa: ARG001
    with without_autocast(tensors[0]):
        return reference.evaluate(_parse(text), tensors)


@torch.library.custom_op("postlude::chain_gradient", mutates_args=())
def chain_gradient(dy: Tensor, tensors: list[Tensor], text: str, precision: str, needs: list[bool]) -> list[Tensor]:
    """The gradients of the tensors that need one, like them in dtype and strides."""
    given = _parse(text)
    problem = dataclasses.replace(problem_of(tensors, precision), needs_grad=True)
    _, runner = prepared(given, problem)
    with torch.no_grad(), without_autocast(dy):
        if isinstance(runner, Training):
            found = [gradient for gradient in runner.gradients_again(tensors, dy, needs) if gradient is not None]
        else:
            found = _plain(given, tensors, dy, needs)
    wanted = [tensor for tensor, is_needed in zip(tensors, needs) if is_needed]
    return [torch.empty_like(tensor).copy_(gradient) for tensor, gradient in zip(wanted, found, strict=True)]


@chain_gradient.register_fake
def _(dy: Tensor, tensors: list[Tensor], text: str, precision: str, needs: list[bool]) -> list[Tensor]:  # noqa: ARG001
    return [torch.empty_like(tensor) for tensor, is_needed in zip(tensors, needs) if is_needed]


def _plain(given: Chain, tensors: Sequence[Tensor], dy: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    """By PyTorch's own derivatives. torch.func brings its own autograd, which an operator's inside lacks."""
    places = [place for place, is_needed in enumerate(needs) if is_needed]

    def of_wanted(*values: Tensor) -> Tensor:
        replaced = dict(zip(places, values))
        return reference.evaluate(given, [replaced.get(place, t) for place, t in enumerate(tensors)])

    with torch.enable_grad():
        pulled: Any = torch.func.vjp(of_wanted, *(tensors[place].detach() for place in places))
        return list(pulled[1](dy))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    tensors, ctx.text, ctx.precision = inputs
    ctx.save_for_backward(*tensors)
    ctx.needs = [tensor.requires_grad for tensor in tensors]


def _backward(ctx: Any, dy: Tensor) -> tuple[list[Tensor | None], None, None]:
    found = iter(torch.ops.postlude.chain_gradient(dy, list(ctx.saved_tensors), ctx.text, ctx.precision, ctx.needs))
    return [next(found) if is_needed else None for is_needed in ctx.needs], None, None


chain.register_autograd(_backward, setup_context=_keep)
