"""What runs on the CPU: slab size, layout inside the slab, and when eager's own way is best."""

from __future__ import annotations

import math

from postlude.chain import Chain, Normalize
from postlude.hardware import Machine
from postlude.plan.problem import Problem, body_shape, item_size, result_dtype, result_layout, result_shape
from postlude.plan.program import MomentsOnly, first_barrier, moments_only
from postlude.plan.types import Keep, Moments, Pass, Plan, Refusal, Source, Store

MIB = 1 << 20
_SMALLEST = 2 * MIB  # of the convolution's result: below, planning and slicing cost more than they save
_SLAB_SHARE = 0.25  # of the last-level cache; the rest is for weights, the input slab and other threads
_BUSY = 600  # FLOPs per element from which on the convolution alone fills the time


def lower_for_cpu(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool) -> Plan | Refusal:
    body_bytes = math.prod(body_shape(chain, problem)) * item_size(problem.x.dtype)
    if body_bytes < _SMALLEST and not even_if_slower:
        return Refusal(
            (f"too small to gain: the value is {body_bytes / MIB:.2f} MiB, slabs pay from {_SMALLEST // MIB}",)
        )
    moments = moments_only(chain)
    if moments is not None:
        return _moments_plan(chain, problem, machine, moments)
    return _stored_plan(chain, problem, machine)


def _moments_plan(chain: Chain, problem: Problem, machine: Machine, moments: MomentsOnly) -> Plan:
    conv = chain.producer
    in_buffer = (
        conv is not None
        and problem.x.dtype == "float32"
        and conv.dtype is None
        and conv.as_plain() is not None
        and machine.has_onednn
    )
    reasons = ["only moments are needed: nothing of the convolution's size is kept"]
    centres = (
        conv is not None
        and conv.dtype is None
        and moments.before == 0
        and moments.squares
        and problem.x.dtype in ("float32", "float64")
        and conv.reads_every_position(problem.x.shape[2:])
    )
    if centres:
        reasons.append("the mean follows from the input; the bias subtracts it, so squares cannot cancel")
    return _build(
        chain,
        problem,
        (Pass(_source(chain), 1, moments.before, Moments(moments.squares)),),
        _slab(chain, problem, machine),
        in_buffer,
        in_buffer,
        centres,
        reasons,
    )


def _stored_plan(chain: Chain, problem: Problem, machine: Machine) -> Plan:
    barrier = first_barrier(chain)
    steps = len(chain.steps)
    if barrier is None:
        passes: tuple[Pass, ...] = (Pass(_source(chain), 1, steps, Store()),)
    else:
        passes = (Pass(_source(chain), 1, barrier - 1, Keep()), Pass("load", barrier, steps, Store()))
    batch = problem.x.shape[0]
    slab = batch if _flops_per_element(chain) >= _BUSY else _slab(chain, problem, machine)
    inside = result_layout(chain, problem) == "channels_last"
    if inside and problem.x.dtype != "float32":
        slab = batch  # PyTorch's layout depends on which library serves: leave the call as eager makes it
    reasons = []
    if slab == batch:
        reasons.append("the convolution fills the time, so it runs on the whole batch")
    else:
        reasons.append("slabs of the batch stay in cache from the convolution to the result")
    if any(isinstance(step, Normalize) and step.op == "instance_norm" for step in chain.steps):
        reasons.append("instance_norm runs as group_norm with one group per channel")
    return _build(chain, problem, passes, slab, inside, False, False, reasons)


def _build(
    chain: Chain,
    problem: Problem,
    passes: tuple[Pass, ...],
    slab: int,
    channels_last_inside: bool,
    in_buffer: bool,
    centres_by_bias: bool,
    reasons: list[str],
) -> Plan:
    body = math.prod(body_shape(chain, problem))
    size = item_size(problem.x.dtype)
    result_bytes = math.prod(result_shape(chain, problem)) * item_size(result_dtype(chain, problem))
    given = sum(spec.bytes for spec in problem.tensors)
    batch = problem.x.shape[0]
    return Plan(
        chain,
        passes,
        slab,
        -(-batch // slab),
        body * size * slab // batch,
        channels_last_inside,
        in_buffer,
        centres_by_bias,
        result_layout(chain, problem),
        result_dtype(chain, problem),
        given + result_bytes,
        given + result_bytes + 2 * body * size * len(chain.steps),
        tuple(reasons),
    )


def _slab(chain: Chain, problem: Problem, machine: Machine) -> int:
    """Samples whose value fills a share of the cache; all slabs but the last are of one size."""
    batch = problem.x.shape[0]
    sample = math.prod(body_shape(chain, problem)[1:]) * item_size(problem.x.dtype)
    return max(1, min(batch, int(machine.cache_bytes * _SLAB_SHARE) // sample))


def _source(chain: Chain) -> Source:
    return "load" if chain.producer is None else "library convolution"


def _flops_per_element(chain: Chain) -> float:
    conv = chain.producer
    return 0 if conv is None else 2 * math.prod(conv.kernel) * conv.in_channels / conv.groups
