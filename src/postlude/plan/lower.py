"""Chain + problem + machine → plan, or a refusal with reasons. A pure function that runs nothing."""

from __future__ import annotations

import dataclasses
import math

from postlude.chain import Chain, Pool, Softmax
from postlude.hardware import Machine
from postlude.plan.barriers import takes_the_batch
from postlude.plan.cpu import lower_for_cpu
from postlude.plan.cpu_trained import lower_for_cpu_training
from postlude.plan.gpu import lower_for_gpu, tile_for
from postlude.plan.passes import Pass, Store, TorchPasses
from postlude.plan.plan import Plan, Refusal
from postlude.plan.problem import Problem, body_shape, body_spec, result_dtype, result_layout, result_shape
from postlude.plan.through import through_for
from postlude.plan.trained import trained_part, why_not_ours

_ASKED = "it was asked for"
_THROUGH = "no product of this size is needed"
_FOLDED = (
    "the pool is part of the convolution's weight: an infinity in the input stays one where PyTorch's average of "
    "infinities of both signs is NaN"
)


def lower(chain: Chain, problem: Problem, machine: Machine, *, even_if_slower: bool = False) -> Plan | Refusal:
    """Decides how this chain runs for this problem. The plan may end before the chain: PyTorch then runs the last
    steps.

    Args:
        chain: What is computed.
        problem: Shapes, dtypes, layouts, device and precision.
        machine: The machine it runs on.
        even_if_slower: Plan a fused program even if eager PyTorch is expected to be faster.

    Returns:
        The plan, or a refusal with its reasons.
    """
    reasons = _unsupported(chain, problem)
    if reasons:
        return Refusal(reasons)
    trains_on_cpu = problem.needs_grad and problem.device == "cpu"
    is_forced = even_if_slower and problem.device == "cuda"
    through = None if trains_on_cpu else _through(chain, problem, machine, is_forced)
    if through is not None:
        return through
    planned = before_features(chain)
    planned = trained_part(planned, problem) if problem.needs_grad else planned
    if problem.device == "cuda":
        asked = _ASKED if problem.convolution == "pytorch" else None
        why = asked or (None if even_if_slower else why_not_ours(planned, problem))
        found = lower_for_gpu(planned, problem, machine, even_if_slower, why)
    elif problem.needs_grad:
        found = lower_for_cpu_training(planned, problem, machine, even_if_slower)
    elif chain.is_linear:
        return Refusal(("PyTorch runs linear layers on a CPU, where the product takes nearly all of the time",))
    else:
        found = lower_for_cpu(planned, problem, machine, even_if_slower)
    if planned is chain or isinstance(found, Refusal):
        return found
    rest = " → ".join(chain.words()[len(planned.steps) :])
    more = ", with its gradients" if problem.needs_grad else ""
    return dataclasses.replace(found, reasons=(*found.reasons, f"{rest}: PyTorch's{more}"))


def before_features(chain: Chain) -> Chain:
    """The chain up to a pool over a linear layer's features, which no pass computes."""
    number = chain.first(Pool)
    return chain if chain.dims or number is None else dataclasses.replace(chain, steps=chain.steps[: number - 1])


def _through(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool) -> Plan | None:
    """A plan without the producer, if a sum goes through it; or with a smaller one, if a pool does (through.py)."""
    own = through_for(chain, problem, machine.card, even_if_slower)
    if own is None:
        return None
    planned = dataclasses.replace(chain, steps=chain.steps[: own.reduction]) if problem.needs_grad else chain
    value, is_gpu = body_spec(chain, problem, "contiguous"), problem.device == "cuda"
    by = tile_for(chain, problem, machine, "contiguous") if is_gpu else TorchPasses(problem.x.shape[0])
    return Plan(
        chain=planned,
        problem=problem,
        input=problem.x,
        value=value,
        passes=(Pass("own convolution", 1, own.reduction, Store()),),
        by=by,
        result_layout=result_layout(planned, problem, machine),
        result_dtype=result_dtype(planned, problem),
        reasons=(_THROUGH if own.folding is None else _FOLDED,),
        own=own,
    )


def _unsupported(chain: Chain, problem: Problem) -> tuple[str, ...]:
    reasons = []
    if problem.device not in ("cpu", "cuda"):
        reasons.append(f"there are no fused passes for {problem.device} devices")
    if any(isinstance(step, Pool | Softmax) for step in chain.steps) and problem.device == "cpu":
        reasons.append("PyTorch runs pools, softmax and norms over channels on a CPU")
    has_pool, is_empty = any(isinstance(step, Pool) for step in chain.steps), 0 in problem.x.shape
    if has_pool and not is_empty and min(result_shape(chain, problem)) < 1:
        reasons.append("a window of the pool is larger than what it goes over, for which PyTorch raises its own error")
    if any(spec.elements == 0 for spec in problem.tensors):
        reasons.append("the input is empty")
    batch, _, *space = body_shape(chain, problem)
    if takes_the_batch(chain) and batch * math.prod(space) == 1:
        reasons.append(
            "batch_norm in training needs more than one value per channel, for which PyTorch raises its own error"
        )
    if not problem.x.dtype.startswith(("float", "bfloat")):
        reasons.append(f"{problem.x.dtype} is not a floating dtype")
    if problem.x.layout == "strided":
        reasons.append("the input is neither contiguous nor channels-last")
    return tuple(reasons)
