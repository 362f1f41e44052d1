"""Chains in training on a CPU: what has a backward pass in C++, and what PyTorch runs."""

from __future__ import annotations

import dataclasses

from postlude.chain import Chain
from postlude.hardware import Machine
from postlude.plan.barriers import fused_norm, last_fused_step, moments_only
from postlude.plan.cpu import MIB, lower_for_cpu
from postlude.plan.cpu_passes import why_not_compiled
from postlude.plan.plan import Plan, Refusal
from postlude.plan.problem import Problem, body_bytes
from postlude.reverse import unsupported_gradient

SMALLEST_TRAINED = MIB  # below this, PyTorch's own operators take well under a millisecond


def lower_for_cpu_training(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool) -> Plan | Refusal:
    """A plan for a chain that `trained_part` left."""
    reason = _reason_against(chain, problem, machine)
    if reason is None and not even_if_slower:
        reason = _why_too_small(chain, problem, machine)
    if reason is not None:
        return Refusal(
            (f"gradients are needed, and the fused passes for cpu devices have no backward pass here: {reason}",)
        )
    found = lower_for_cpu(chain, problem, machine, even_if_slower=True)
    if isinstance(found, Refusal):
        return found
    reasons = (*found.reasons, "so is the backward pass up to the convolution's gradients, which are PyTorch's")
    return dataclasses.replace(found, reasons=reasons)


def _why_too_small(chain: Chain, problem: Problem, machine: Machine) -> str | None:
    size, norm = body_bytes(chain, problem), fused_norm(chain)
    if size < SMALLEST_TRAINED:
        return f"a value below {SMALLEST_TRAINED // MIB} MiB is too small to gain"
    # While caches hold a value and its gradient, PyTorch's passes cost little: on an EPYC with 32 MiB of them, fused
    # group_norm → relu is 0.75, 0.89, 1.02, 1.09 and 1.29 times as fast for 1, 9, 14, 19 and 67 MB. PyTorch's
    # instance_norm is slower at every size.
    is_grouped = norm is not None and norm.op == "group_norm" and problem.x.layout == "contiguous"
    if is_grouped and 2 * size < machine.cache_bytes:
        return f"below {machine.cache_bytes // (2 * MIB)} MiB PyTorch's contiguous group_norm is as fast"
    return None


def _reason_against(chain: Chain, problem: Problem, machine: Machine) -> str | None:
    if chain.is_linear:
        return "a linear layer's product takes nearly all of the time"
    if (reason := why_not_compiled(chain, problem, machine)) is not None:
        return reason
    if moments_only(chain) is not None:
        return "a chain that ends in a reduction of moments has no backward pass there"
    if fused_norm(chain) is None:
        return "there is no norm"
    last = last_fused_step(chain)
    if last < len(chain.steps):
        return "a step after the last fused one reads a value from inside of the fused passes"
    return unsupported_gradient(chain, last)
