"""Chains in training on a GPU: what our backward passes cover and keep, and who computes a convolution's gradients."""

from __future__ import annotations

import dataclasses

from postlude.chain import Chain, values_of
from postlude.hardware import Machine
from postlude.plan.barriers import (
    fused_pool,
    has_norm,
    last_before_pool,
    last_fused_step,
    moments_only,
    over_channels,
    row_parts,
    rows_from,
)
from postlude.plan.channels import takes_channels
from postlude.plan.convolve import Own, gradient_products, packs_gradient, spreads_nan
from postlude.plan.few_channels import FewChannels
from postlude.plan.few_channels_gradient import few_channels_gradient_for
from postlude.plan.plan import Gradients
from postlude.plan.problem import Layout, Problem, body_dtype, body_shape, fp32_mode, result_layout, value_dtypes
from postlude.reverse import keeps_inside, needs_first_value, needs_no_more_than_its_result, unsupported_gradient
from postlude.steps import pass_slots

MOST_TRAINED = 8192  # features of a row whose gradients one tile computes: more would exceed the registers
_FEW_VECTORS = 2


def trained_part(chain: Chain, problem: Problem) -> Chain:
    """The part of a chain that our backward passes cover; PyTorch runs the steps after it, which read no value inside
    it.

    For a chain that needs only moments: a convolution with a norm directly after it. Otherwise the fused steps up to a
    pool, including the pool if its gradient is ours, or including the steps over channels.
    """
    moments, last, rows = moments_only(chain), last_fused_step(chain), rows_from(chain)
    if chain.is_linear and rows is not None and why_rows_are_pytorchs(chain, problem) is not None:
        reads = [value.index for step in chain.steps[rows - 1 :] for value in values_of(step)]
        return dataclasses.replace(chain, steps=chain.steps[: rows - 1]) if min(reads) >= rows - 1 else chain
    if (pool := fused_pool(chain)) is not None:
        is_taken = unsupported_gradient(chain, pool.first - 1, pool.pool) is None
        last = pool.first if is_taken else pool.first - 1
    elif (over := over_channels(chain)) is not None and problem.device == "cuda" and takes_channels(chain, problem):
        last = over.last if unsupported_gradient(chain, over.last) is None else last
    if last in (0, len(chain.steps)) or (moments is not None and not moments.before and chain.producer is not None):
        return chain
    is_apart = all(value.index >= last for step in chain.steps[last:] for value in values_of(step))
    return dataclasses.replace(chain, steps=chain.steps[:last]) if is_apart else chain


def why_rows_are_pytorchs(chain: Chain, problem: Problem) -> str | None:
    """Why PyTorch runs barriers over a linear layer's features in training; None if our passes do."""
    length, last = body_shape(chain, problem)[1] // row_parts(chain), last_fused_step(chain)
    vectors = sum(chain.roles[slot] != "full" for slot in pass_slots(chain, last))
    # Each element takes some registers, and one more per vector whose gradient is summed over rows.
    most = MOST_TRAINED if vectors <= _FEW_VECTORS else MOST_TRAINED // 2
    if length > most:
        return f"rows of more than {most} features, whose gradients do not fit a tile"
    return unsupported_gradient(chain, last)


def last_with_gradient(chain: Chain) -> int:
    """The last step that the gradient passes of a chain in training cover, not counting a pool."""
    over = over_channels(chain)
    return last_before_pool(chain) if over is None or fused_pool(chain) is not None else over.last


def is_lean(chain: Chain, problem: Problem) -> bool:
    return problem.memory == "lean" and chain.producer is not None


def is_trained_from_its_result(chain: Chain, problem: Problem, inside: Layout, machine: Machine) -> bool:
    """Whether the backward pass can read the chain's result instead of its first value: same dtype, same layout."""
    is_alike = set(value_dtypes(chain, problem)) == {body_dtype(chain, problem)}
    is_alike &= inside == result_layout(chain, problem, machine)
    return problem.needs_grad and is_alike and needs_no_more_than_its_result(chain, len(chain.steps))


def why_not_ours(chain: Chain, problem: Problem) -> str | None:
    """Why PyTorch convolves in training although we have the gradients.

    A convolution of one tap without a norm has not been measured. With operands of one plane it is bound by memory, not
    by arithmetic.
    """
    conv = chain.producer
    if conv is None or conv.is_linear or has_norm(chain) or max(conv.kernel) > 1 or not problem.needs_grad:
        return None
    is_two_planes = body_dtype(chain, problem) == "float32" and fp32_mode(chain, problem) == "fp32"
    return (
        None if is_two_planes else "Postlude's convolution of one tap without a norm has not been measured in training"
    )


def reasons_against_training(chain: Chain, problem: Problem, library_tf32: bool | None, from_result: bool) -> list[str]:
    reasons = []
    last, pool = last_with_gradient(chain), fused_pool(chain)
    # PyTorch's pools keep their input, which is as large as the convolution's result.
    can_keep = from_result or is_lean(chain, problem) or pool is not None or keeps_inside(chain, last)
    can_keep |= not needs_first_value(chain, last)
    # A linear layer's result is usually small compared with its weight and the weight's gradient.
    if not has_norm(chain) and not can_keep and chain.producer is not None and not chain.is_linear:
        reasons.append("training would save the convolution's result, where PyTorch saves only the chain's")
    if library_tf32 is not None:
        wanted = "tf32" if library_tf32 else "ieee"
        switch = f'torch.backends.cudnn.conv.fp32_precision = "{wanted}"'
        reasons.append(f"PyTorch's backward convolutions follow only its own switch: set {switch}")
    if trained_part(chain, problem) is not chain:
        reasons.append("the backward passes do not cover a reduction or a second norm")
    if moments_only(chain) is not None or not chain.steps:
        return reasons
    unsupported = unsupported_gradient(chain, last, None if pool is None else pool.pool)
    return reasons if unsupported is None else [*reasons, unsupported]


def gradients_for(chain: Chain, problem: Problem, own: Own | str, machine: Machine, from_result: bool) -> Gradients:
    """Our kernels for the gradients of input and weight, separate or both at once, and what is kept for them."""
    if not problem.needs_grad:
        return Gradients()
    found = Gradients(is_lean=is_lean(chain, problem) and not from_result, from_result=from_result)
    if isinstance(own, str) or chain.producer is None or spreads_nan(chain):
        return found
    few = few_channels_gradient_for(own, chain, problem, machine) if isinstance(own, FewChannels) else None
    if few is not None:
        return dataclasses.replace(found, of_both=few)
    dx, dw = gradient_products(chain, problem, own, machine)
    # A tile that holds all channels cannot write packed rows.
    are_packed = packs_gradient(dx, dw) and over_channels(chain) is None and bool(chain.steps)
    return dataclasses.replace(found, of_input=dx, of_weight=dw, are_packed=are_packed)
