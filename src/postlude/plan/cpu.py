"""What runs on the CPU: the slab size, who convolves and where to, and when to leave a chain to eager PyTorch.

The thresholds were measured with 2 threads (benchmarks/cpu.py; results in benchmarks/results/cpu.csv). Memory matters
more than arithmetic: the C library maps and unmaps large buffers on every call, and a page fault costs about 1 µs per
4 KiB, ten times as much as writing the page. With a C++ compiler the passes are our own kernels (cpu_passes.py), and so
is a convolution of few channels (cpu_few_channels.py).
"""

from __future__ import annotations

import dataclasses
import math

from postlude.amounts import shown_bytes
from postlude.chain import POINTWISE, Chain, Normalize, Pointwise
from postlude.hardware import Machine
from postlude.plan.barriers import MomentsOnly, first_barrier, moments_only, takes_the_batch
from postlude.plan.cpu_few_channels import CpuFewChannels, few_channels_for
from postlude.plan.cpu_passes import compiled_passes, turns, why_not_compiled
from postlude.plan.passes import CppPasses, Keep, KeepMoments, Pass, Store, TorchPasses, first_source
from postlude.plan.plan import Library, Plan, Refusal
from postlude.plan.problem import (
    Layout,
    Problem,
    body_bytes,
    body_layout,
    body_spec,
    cpu_library,
    handed_on_layout,
    result_dtype,
    result_layout,
)

MIB = 1 << 20
SLAB = 8 * MIB  # of the convolution's result. 4 to 8 are equally fast; smaller costs calls, larger leaves the cache
SMALLEST_REDUCED = 8 * MIB  # for chains that keep only moments or sums: below it, eager's buffers are recycled as well
SMALLEST_STORED = MIB  # for chains that store: below it, eager's operators take well under a millisecond
MAPPED = 16 * MIB  # from here on the C library maps or trims eager's buffers on every call
SURELY_MAPPED = 32 * MIB  # glibc's limit: from here on it maps them whatever was allocated before
LARGE_SAMPLE = 8 * MIB  # a larger sample does not stay in cache
WORTH_A_CALL = 10_000_000  # FLOPs: oneDNN takes 70 µs to set up, PyTorch's own small convolution 10
FEW_CHANNELS = 4  # of the input: with 3, channels-last takes 8.7 ms against 11.3; with 8 both are equal
STREAMED = 3 / 8  # of the last-level cache: from there on a result beside its value is evicted before it is read
_ASKED = "PyTorch's own convolution was asked for: one call over the batch; every step after it in place"
_LEAVES = "PyTorch leaves oneDNN for this batch of one; it is called directly"
BUSY = 600  # FLOPs per element of the result, above which the convolution dominates and slabs gain nothing


def lower_for_cpu(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool) -> Plan | Refusal:
    against = _reason_against(chain, problem, machine)
    if against is not None:
        return Refusal((against,))
    if not chain.steps and not _leaves_onednn(chain, problem, machine):
        return Refusal(("a convolution alone, which PyTorch runs",))
    moments = moments_only(chain)
    size = body_bytes(chain, problem)
    is_stored = moments is None or _own(chain, problem, machine, moments) is not None
    smallest = SMALLEST_STORED if is_stored else SMALLEST_REDUCED
    if size < smallest and not even_if_slower and not _leaves_onednn(chain, problem, machine):
        amounts = f"a value of {shown_bytes(size)}, fusing pays from {shown_bytes(smallest)} on"
        return Refusal((f"too small to gain: {amounts}",))
    if not even_if_slower and _is_one_short_step(chain, problem, machine):
        return Refusal(("one short step after PyTorch's convolution takes no longer in eager",))
    if why_not_compiled(chain, problem, machine) is None:
        return _compiled_plan(chain, problem, machine, moments)
    if moments is None:
        return _stored_plan(chain, problem, machine)
    if chain.producer is None and problem.x.layout != "contiguous":
        return Refusal(("channels-last moments without a convolution are no faster than PyTorch's norm",))
    return _moments_plan(chain, problem, machine, moments)


def _reason_against(chain: Chain, problem: Problem, machine: Machine) -> str | None:
    conv = chain.producer
    if conv is not None:
        reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel)]
        # Seen in eager PyTorch 2.13 without Postlude: a transposed convolution with kernel 1, stride 2 and
        # output_padding 1 corrupts the heap; channels-last, kernel 1, stride 2 and padding 1 along an axis of size 1
        # crashes. A plan that changes the layout would crash where eager does not.
        if any(extra > far for extra, far in zip(conv.output_padding, reach)):
            return "PyTorch's transposed convolution on the CPU writes outside of its result for this output_padding"
        if not conv.transposed and any(padding > far for padding, far in zip(conv.padding, reach)):
            return "padding is wider than the kernel's reach, for which oneDNN may crash in another layout"
    if handed_on_layout(chain, problem, machine) == "strided":
        return "the result takes its layout from a tensor that is neither contiguous nor channels-last"
    return None


def _compiled_plan(chain: Chain, problem: Problem, machine: Machine, moments: MomentsOnly | None) -> Plan:
    """C++ kernels after one convolution over the whole batch.

    Parallel regions are few, because on a busy machine each waits for threads that are not scheduled; there slabs took
    twice eager's time.
    """
    own = _own(chain, problem, machine, moments)
    how: Library = "eager"
    if own is not None:
        reasons = ["only moments are needed: our own convolution stores nothing"]
    elif _leaves_onednn(chain, problem, machine):
        how, reasons = "direct", [_LEAVES]
    else:
        reasons = [] if chain.producer is None else ["one convolution over the batch, by PyTorch"]
    is_handed_on = moments is None and not turns(chain, problem, machine)
    layout = handed_on_layout(chain, problem, machine) if is_handed_on else body_layout(chain, problem)
    passes = compiled_passes(chain, moments, is_own=own is not None)
    reasons.append("what follows it is one kernel in C++" if chain.producer is not None else "one kernel in C++")
    by = CppPasses(streams=moments is None and body_bytes(chain, problem) >= STREAMED * machine.cache_bytes)
    return dataclasses.replace(_build(chain, problem, machine, passes, by, how, reasons, layout), own=own)


def _own(chain: Chain, problem: Problem, machine: Machine, moments: MomentsOnly | None) -> CpuFewChannels | None:
    if moments is None or problem.convolution == "pytorch" or why_not_compiled(chain, problem, machine) is not None:
        return None
    return few_channels_for(chain, moments, problem.x.shape[2:])


def _moments_plan(chain: Chain, problem: Problem, machine: Machine, moments: MomentsOnly) -> Plan:
    conv = chain.producer
    passes = (Pass(first_source(chain), 1, moments.before, KeepMoments(moments.squares)),)
    if conv is not None and problem.convolution == "pytorch":
        whole = _by_pytorch(chain, problem, machine, problem.x.shape[0])
        return _build(chain, problem, machine, passes, whole, "eager", [_ASKED], problem.x.layout)
    slab = _slab(chain, problem, machine) if conv is not None else problem.x.shape[0]
    reasons = ["only moments are needed: nothing of the convolution's size is kept"]
    inside = problem.x.layout
    if conv is not None and conv.in_channels <= FEW_CHANNELS:
        inside = "channels_last"
        reasons.append("few input channels convolve faster channels-last, and the input is cheap to convert")
    how: Library = "direct" if _is_direct(chain, problem, machine) else "eager"
    if how == "direct" and inside == "channels_last" and machine.maps_large_buffers:
        how = "buffer"
        reasons.append("the convolution writes into a reused buffer, so there are no page faults")
    by = _by_pytorch(chain, problem, machine, slab)
    return _build(chain, problem, machine, passes, by, how, reasons, inside)


def _stored_plan(chain: Chain, problem: Problem, machine: Machine) -> Plan:
    barrier, steps = first_barrier(chain), len(chain.steps)
    if barrier is None:
        passes: tuple[Pass, ...] = (Pass(first_source(chain), 1, steps, Store()),)
    else:
        passes = (Pass(first_source(chain), 1, barrier - 1, Keep()), Pass("load", barrier, steps, Store()))
    slab, how, reasons = _stored_way(chain, problem, machine)
    if any(isinstance(step, Normalize) and step.op == "instance_norm" for step in chain.steps):
        reasons.append("instance_norm runs as group_norm with one group per channel")
    by, inside = _by_pytorch(chain, problem, machine, slab), handed_on_layout(chain, problem, machine)
    return _build(chain, problem, machine, passes, by, how, reasons, inside)


def _stored_way(chain: Chain, problem: Problem, machine: Machine) -> tuple[int, Library, list[str]]:
    batch, size = problem.x.shape[0], body_bytes(chain, problem)
    if problem.convolution == "pytorch" and chain.producer is not None:
        return batch, "eager", [_ASKED]
    if _leaves_onednn(chain, problem, machine):
        return batch, "direct", [_LEAVES]
    if size < MAPPED or batch == 1 or not machine.maps_large_buffers or not _is_direct(chain, problem, machine):
        return batch, "eager", ["one convolution over the batch; every step after it in place"]
    if takes_the_batch(chain):
        return batch, "eager", ["statistics of the whole batch: one convolution over it; every step after it in place"]
    if size // batch > LARGE_SAMPLE or _flops_per_element(chain) > BUSY:
        return batch, "eager", ["the convolution dominates: one call over the batch; every step after it in place"]
    return _slab(chain, problem, machine), "direct", ["slabs of the batch stay in cache until they are finished"]


def _build(
    chain: Chain,
    problem: Problem,
    machine: Machine,
    passes: tuple[Pass, ...],
    by: CppPasses | TorchPasses,
    how: Library,
    reasons: list[str],
    layout_inside: Layout,
) -> Plan:
    return Plan(
        chain=chain,
        problem=problem,
        passes=passes,
        by=by,
        library=how,
        input=problem.x,
        value=body_spec(chain, problem, layout_inside),
        result_layout=result_layout(chain, problem, machine),
        result_dtype=result_dtype(chain, problem),
        reasons=tuple(reasons),
    )


def _by_pytorch(chain: Chain, problem: Problem, machine: Machine, slab: int) -> TorchPasses:
    size = body_bytes(chain, problem) * slab // problem.x.shape[0]
    return TorchPasses(slab, norms_in_place=machine.maps_large_buffers and size >= SURELY_MAPPED)


def _slab(chain: Chain, problem: Problem, machine: Machine) -> int:
    """Samples per slab; all slabs but the last are of one size."""
    batch = problem.x.shape[0]
    sample = body_bytes(chain, problem) // batch
    return max(1, min(batch, min(SLAB, machine.cache_bytes // 4) // sample))


def _is_direct(chain: Chain, problem: Problem, machine: Machine) -> bool:
    """Whether oneDNN can be called directly, without PyTorch's choice of library."""
    conv = chain.producer
    is_plain = conv is not None and conv.dtype is None and conv.as_plain() is not None
    return is_plain and machine.has_onednn and {spec.dtype for spec in problem.tensors} == {"float32"}


def _leaves_onednn(chain: Chain, problem: Problem, machine: Machine) -> bool:
    """Whether oneDNN is called directly because PyTorch would use its own slow loops: it does so for a single small
    sample."""
    conv = chain.producer
    if problem.convolution == "pytorch" or conv is None or not _is_direct(chain, problem, machine):
        return False
    return cpu_library(chain, problem) == "loops" and conv.flops(1, problem.x.shape[2:]) >= WORTH_A_CALL


def _is_one_short_step(chain: Chain, problem: Problem, machine: Machine) -> bool:
    """Whether only one short step follows the convolution, as in conv → relu, so that PyTorch is as fast: fusing gains
    a factor of 1.00 to 1.06, and 0.89 next to busy processes. Where a large buffer is mapped anew at every call, or
    PyTorch leaves oneDNN, there is more to gain than the step."""
    if chain.producer is None or len(chain.steps) != 1 or not isinstance(chain.steps[0], Pointwise):
        return False
    is_mapped = machine.maps_large_buffers and body_bytes(chain, problem) >= MAPPED
    return not (POINTWISE[chain.steps[0].op].long or is_mapped or _leaves_onednn(chain, problem, machine))


def _flops_per_element(chain: Chain) -> float:
    conv = chain.producer
    return 0.0 if conv is None else 2 * math.prod(conv.kernel) * conv.in_channels / conv.groups
