"""Which chains the C++ kernels for the CPU can run, and in which passes."""

from __future__ import annotations

from postlude.chain import Chain, Normalize, values_of
from postlude.hardware import Machine
from postlude.plan.barriers import MomentsOnly, channels_end, first_barrier, fused_norm, last_fused_step, moments_only
from postlude.plan.passes import Keep, KeepMoments, Pass, Store, first_source
from postlude.plan.problem import Problem, body_dtype, body_layout, cpu_library, result_dtype
from postlude.steps import pass_slots

_STORED = frozenset({"float32", "bfloat16", "float16"})
_READ = _STORED | {"float64"}


def why_not_compiled(chain: Chain, problem: Problem, machine: Machine) -> str | None:
    if not machine.compiles_cpp:
        return "there is no C++ compiler"
    moments = moments_only(chain)
    last = last_fused_step(chain) if moments is None else moments.before
    if moments is None and last == 0:
        return "nothing before the reduction can be fused"
    steps = chain.steps if moments is not None else chain.steps[:last]
    if channels_end(chain) is not None or any(isinstance(s, Normalize) and s.over != "sample" for s in steps):
        return "rows, reductions over channels and statistics of the batch are PyTorch's on the CPU"
    if moments is None and any(value.index < last for step in chain.steps[last:] for value in values_of(step)):
        return "a step after the last fused one reads a value from inside of the fused passes"
    if {body_dtype(chain, problem), result_dtype(chain, problem)} - _STORED:
        return "values are float32 or of 16 bits"
    if _may_leave_onednn(chain, problem):
        return "PyTorch's convolution may give up channels-last"
    slots = pass_slots(chain, last if moments is None else moments.reduce, 1)
    if {problem.tensors[slot].dtype for slot in slots} - _READ:
        return "the steps read tensors of other dtypes"
    return None


def _may_leave_onednn(chain: Chain, problem: Problem) -> bool:
    """Whether PyTorch may convolve with another library than oneDNN, whose result is contiguous for any input."""
    conv = chain.producer
    if conv is None or body_layout(chain, problem) == "contiguous":
        return False
    is_single = conv.dims == 3 and problem.x.shape[0] == 1 and cpu_library(chain, problem) is None
    return is_single or (conv.transposed and (conv.groups > 1 or any(conv.output_padding)))


def turns(chain: Chain, problem: Problem, machine: Machine) -> bool:
    """Whether the kernel writes a contiguous result from a channels-last value, as PyTorch's norm would."""
    norm = fused_norm(chain)
    if norm is None or norm.op in machine.keeping_layout or problem.hands_on == "channels_last":
        return False
    is_plain = body_dtype(chain, problem) == result_dtype(chain, problem) == "float32" and "full" not in chain.roles
    return is_plain and body_layout(chain, problem) == "channels_last" and moments_only(chain) is None


def compiled_passes(chain: Chain, moments: MomentsOnly | None, is_own: bool) -> tuple[Pass, ...]:
    if moments is not None:
        source = "own convolution" if is_own else first_source(chain)
        return (Pass(source, 1, moments.before, KeepMoments(moments.squares)),)
    last = last_fused_step(chain)
    if fused_norm(chain) is None:
        return (Pass(first_source(chain), 1, last, Store()),)
    barrier = first_barrier(chain) or 1
    return (Pass(first_source(chain), 1, barrier - 1, Keep()), Pass("load", barrier, last, Store()))
