"""What runs on a GPU: our convolution with moments in its epilogue, or PyTorch's and a pass for them; then a last
pass."""

from __future__ import annotations

import dataclasses
import math

from postlude.amounts import shown_bytes
from postlude.cards import Card
from postlude.chain import Cast, Chain, Normalize, values_of
from postlude.hardware import Machine
from postlude.plan.barriers import (
    first_barrier,
    fused_pool,
    is_all_that_is_read,
    last_fused_step,
    moments_only,
    over_channels,
    row_norm,
    row_parts,
    rows_from,
    takes_the_batch,
)
from postlude.plan.boxes import Boxes
from postlude.plan.channels import takes_channels, why_apart
from postlude.plan.convolve import Own, own_convolution
from postlude.plan.few_channels import StoredFewChannels
from postlude.plan.gemm import Gemm
from postlude.plan.linear import LinearGemm, own_linear
from postlude.plan.passes import KeepMoments, Pass, Store, Tile, first_source
from postlude.plan.plan import Plan, Refusal
from postlude.plan.pools import why_pool_is_apart
from postlude.plan.problem import (
    Layout,
    Problem,
    body_bytes,
    body_dtype,
    body_layout,
    body_shape,
    body_spec,
    handed_on_layout,
    power_of_two,
    result_dtype,
    result_layout,
    value_dtypes,
)
from postlude.plan.tile_uses import origins
from postlude.plan.tiles import pass_use, row_for, short_rows
from postlude.plan.trained import (
    gradients_for,
    is_lean,
    is_trained_from_its_result,
    reasons_against_training,
)
from postlude.plan.worth import has_moments_apart, pytorch_seconds
from postlude.steps import too_many_tensors

_MOST_TILES = 16  # per program: each adds at most one unit of rounding to the moments
CONVOLVED_AGAIN = 32 << 20  # bytes of a convolution's result that a backward pass recomputes at a time
# About 25 small operators take 0.4 ms. Eager moves five times the bytes of one pass over the value.
_BATCH_MOMENTS = 512 << 20
LONGEST_ROW = 8192  # elements that a layer_norm may go over
MOST_FEATURES = 32768  # of a linear layer in one row: 32 per thread of the largest block
_FROM_RESULT = ("training saves only the result, which determines all gradients",)


def lower_for_gpu(
    chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool = False, not_ours: str | None = None
) -> Plan | Refusal:
    """The plan, or a refusal; `not_ours` is why PyTorch must convolve, if it must."""
    convolution = own_linear if chain.is_linear else own_convolution
    own = not_ours or convolution(chain, problem, machine, even_if_slower)
    is_own = not isinstance(own, str)
    inside = _layout_inside(chain, problem, machine, is_own)
    from_result = is_trained_from_its_result(chain, problem, inside, machine)
    tf32 = library_tf32(chain, problem)
    convolved = own if not isinstance(own, LinearGemm) else "a linear layer's gradients are products of their own"
    gradients = gradients_for(chain, problem, convolved, machine, from_result)
    reasons = _reasons_against(chain, problem, machine) + _reasons_against_rows(chain, problem)
    if problem.needs_grad:
        switch = None if gradients.are_all_ours else tf32
        reasons += reasons_against_training(chain, problem, switch, from_result)
    if not even_if_slower:
        reasons += _reasons_to_stay(chain, problem, machine.card, own)
    if reasons:
        return Refusal(tuple(dict.fromkeys(reasons)), tf32)
    passes = _passes(chain, problem, own, from_result)
    plan = Plan(
        chain=chain,
        problem=problem,
        input=problem.x,
        value=body_spec(chain, problem, inside),
        passes=passes,
        by=tile_for(chain, problem, machine, inside),
        result_layout=result_layout(chain, problem, machine),
        result_dtype=result_dtype(chain, problem),
        reasons=(*_reasons_for(chain, problem, passes, own), *(_FROM_RESULT if from_result else ())),
        own=None if isinstance(own, str) else own,
        library_tf32=tf32,
        gradients=dataclasses.replace(gradients, samples_again=_samples_again(chain, problem, passes)),
    )
    return dataclasses.replace(plan, tiles=tuple(map(str, origins(plan, machine))))


def _passes(chain: Chain, problem: Problem, own: Own | LinearGemm | str, from_result: bool) -> tuple[Pass, ...]:
    """One pass if nothing has to be known of the whole value before its end; else one that finds that out or stores the
    value, a pass for moments where they cost less apart, and the last one."""
    is_own = not isinstance(own, str)
    source = "own convolution" if is_own else first_source(chain)
    moments, last, barrier = moments_only(chain), last_fused_step(chain), first_barrier(chain)
    end = _end(chain, problem)
    if moments is not None:
        # The gradient kernel for few channels recomputes the convolution itself.
        kept = problem.needs_grad and isinstance(own, Gemm | Boxes) and not is_lean(chain, problem)
        return (Pass(source, 1, moments.before, KeepMoments(moments.squares, stores=kept)),)
    if isinstance(own, StoredFewChannels):
        return _after_storing(chain, barrier, last, end)
    if is_own and (rows := rows_from(chain)) is not None:
        if chain.dims or rows > last or not _is_finished_before(chain, problem, rows):
            return (Pass(source, 1, 0, Store(raw=True)), Pass("load", 1, last, Store()))
        return (Pass(source, 1, rows - 1, Store()), Pass("load", rows, last, Store()))
    is_norm = barrier is not None and barrier <= last and isinstance(chain.steps[barrier - 1], Normalize)
    if barrier is not None and is_norm and rows_from(chain) is None:
        finished = is_own and _is_finished_before(chain, problem, barrier)
        if finished and isinstance(own, Gemm) and has_moments_apart(own):
            return (
                Pass(source, 1, barrier - 1, Store()),
                Pass("load", barrier, barrier - 1, KeepMoments(True)),
                Pass("load", barrier, end, Store()),
            )
        sink = KeepMoments(True, stores=is_own, finished=finished)
        return (Pass(source, 1, barrier - 1, sink), Pass("load", barrier if finished else 1, end, Store()))
    is_pooled = fused_pool(chain) is not None
    if is_own and (end > last or is_pooled or (problem.needs_grad and not from_result)):
        return (Pass(source, 1, 0, Store(raw=True)), Pass("load", 1, end, Store()))
    return (Pass(source, 1, end, Store()),)


def _after_storing(chain: Chain, barrier: int | None, last: int, end: int) -> tuple[Pass, ...]:
    """The passes after a convolution that is stored before any step."""
    if end == 0:
        return (Pass("own convolution", 1, 0, Store()),)
    first, rest = Pass("own convolution", 1, 0, Store(raw=True)), Pass("load", 1, end, Store())
    if barrier is not None and barrier <= last and isinstance(chain.steps[barrier - 1], Normalize):
        return first, Pass("load", 1, barrier - 1, KeepMoments(True)), rest
    return first, rest


def _samples_again(chain: Chain, problem: Problem, passes: tuple[Pass, ...]) -> int:
    """As in `Gradients`; 0 if the forward pass stores the convolution's result."""
    sink, batch = passes[-1].sink, problem.x.shape[0]
    if not problem.needs_grad or not isinstance(sink, KeepMoments) or sink.stores:
        return 0
    return max(1, min(batch, CONVOLVED_AGAIN * batch // body_bytes(chain, problem)))


def _end(chain: Chain, problem: Problem) -> int:
    """The last step of the last pass."""
    found = over_channels(chain)
    return found.last if found is not None and takes_channels(chain, problem) else last_fused_step(chain)


def _is_finished_before(chain: Chain, problem: Problem, norm: int) -> bool:
    """Whether the first pass can store the value after the steps that precede a norm.

    Not in training, where the backward pass reads the convolution's result itself. Nor if those steps use a wider
    dtype: between passes a value has the dtype of the convolution's result.
    """
    dtypes = value_dtypes(chain, problem)
    is_as_wide = all(isinstance(s, Cast) or t == dtypes[0] for s, t in zip(chain.steps[: norm - 1], dtypes[1:]))
    return is_as_wide and not problem.needs_grad and is_all_that_is_read(chain, norm)


def _layout_inside(chain: Chain, problem: Problem, machine: Machine, is_own: bool) -> Layout:
    """The layout of the chain's first value."""
    if row_norm(chain) is not None:
        return "contiguous"  # a row must be contiguous
    is_handed_on = is_own or problem.hands_on
    return handed_on_layout(chain, problem, machine) if is_handed_on else body_layout(chain, problem)


def _reasons_for(
    chain: Chain, problem: Problem, passes: tuple[Pass, ...], own: Own | LinearGemm | str
) -> tuple[str, ...]:
    sink = passes[0].sink
    is_twice = len(passes) == 2 and isinstance(sink, KeepMoments) and not sink.finished and passes[0].last > 0
    twice = ("the steps before the norm are computed twice rather than stored",) if is_twice else ()
    apart = tuple(why for why in (why_apart(chain, problem), why_pool_is_apart(chain)) if why is not None)
    if chain.producer is None:
        return (*(twice or ("one pass",)), *apart)
    what = "product" if chain.is_linear else "convolution"
    return (f"PyTorch's {what}: {own}" if isinstance(own, str) else f"our own {what}", *twice, *apart)


def library_tf32(chain: Chain, problem: Problem) -> bool | None:
    """Whether PyTorch's convolution must use TF32, if the precision asked for differs from its switch; else None."""
    conv = chain.producer
    if chain.is_linear:
        return None  # if they differ, our GEMM runs
    is_fp32 = conv is not None and (conv.dtype or problem.x.dtype) == "float32"
    asked = {"fp32": False, "tf32": True}.get(problem.precision)
    return asked if is_fp32 and asked is not None and asked != problem.allows_tf32 else None


def tile_for(chain: Chain, problem: Problem, machine: Machine, layout: Layout) -> Tile:
    """The tiles of the passes over a value in memory."""
    batch, channels, *space = body_shape(chain, problem)
    positions = math.prod(space)
    if chain.is_linear:  # its samples are the positions of a single sample
        batch, positions, layout = 1, batch, "channels_last"
    layout = "channels_last" if layout == "channels_last" else "contiguous"
    dtype = body_dtype(chain, problem)
    last, moments = (
        row_for(machine, pass_use(kind, dtype, channels, layout, machine)).values
        for kind in ("last pass", "moments pass")
    )
    if layout == "channels_last":
        block_c = min(power_of_two(channels), 256)
        row, rows = power_of_two(positions), [0, 0]
        block, moments_block = (min(row, max(1, tile["elements"] // block_c)) for tile in (last, moments))
        tiles_in_all = batch * -(-positions // moments_block) * -(-channels // block_c)
    else:
        row = max(128, power_of_two(positions))
        block_c, block, moments_block = 0, min(last["elements"], row), min(moments["elements"], row)
        rows = [short_rows(tile["elements"], channels, positions) for tile in (last, moments)]
        tiles_in_all = batch * channels * -(-positions // moments_block)
    tiles = min(tiles_in_all // (machine.card.multiprocessors * moments["programs"]), -(-positions // moments_block))
    return Tile(block, block_c, moments_block, max(1, min(_MOST_TILES, tiles)), *rows)


def _reasons_against(chain: Chain, problem: Problem, machine: Machine) -> list[str]:
    reasons = []
    if not machine.has_triton:
        reasons.append("Triton is not installed, which the GPU passes need")
    if not machine.card.is_served:
        reasons.append(
            f"the GPU passes need an NVIDIA card of Ampere or later, not {machine.card.architecture or 'this one'}"
        )
    last = _end(chain, problem)
    if last == 0 and chain.steps and moments_only(chain) is None:
        reasons.append("nothing before the reduction can be fused")
    if any(value.index < last for step in chain.steps[last:] for value in values_of(step)):
        reasons.append("a step after the last fused one reads a value from inside the fused passes")
    too_many = too_many_tensors(chain, last)
    return reasons if too_many is None else [*reasons, too_many]


def _reasons_against_rows(chain: Chain, problem: Problem) -> list[str]:
    if chain.is_linear and rows_from(chain) is not None:
        longest = body_shape(chain, problem)[1] // row_parts(chain)
        too_long = f"rows of more than {MOST_FEATURES} features, which do not fit a tile"
        return [too_long] if longest > MOST_FEATURES else []
    norm = row_norm(chain)
    step = None if norm is None else chain.steps[norm - 1]
    if not isinstance(step, Normalize) or math.prod(body_shape(chain, problem)[-step.axes :]) <= LONGEST_ROW:
        return []
    return [f"a layer_norm over more than {LONGEST_ROW} elements, which do not fit a tile"]


def _reasons_to_stay(chain: Chain, problem: Problem, card: Card, own: Own | LinearGemm | str) -> list[str]:
    size, crossovers = body_bytes(chain, problem), card.crossovers
    if not chain.steps and not chain.is_linear and isinstance(own, str):
        return [f"a convolution alone, which PyTorch runs: {own}"]
    if not isinstance(own, str) and not problem.needs_grad:
        return []
    is_asked = problem.convolution == "pytorch"
    if chain.is_linear and isinstance(own, str) and sum(not isinstance(step, Cast) for step in chain.steps) < 2:
        return [f"PyTorch's product ({own}) adds its bias itself: one pass after it is what eager has, too"]
    if moments_only(chain) is not None and takes_the_batch(chain) and isinstance(own, str) and size < _BATCH_MOMENTS:
        why = "the batch's statistics are combined by PyTorch's small operators"
        return [f"{why}, which pays from a value of {_BATCH_MOMENTS >> 20} MiB on"]
    if isinstance(own, str) and not is_asked and moments_only(chain) is not None and chain.producer is not None:
        why = f"only moments are needed, but PyTorch's convolution stores its result anyway ({own})"
        return [f"{why}: nothing is gained"]
    least = crossovers.smallest
    if problem.needs_grad and 3 * pytorch_seconds(chain, problem, card) < crossovers.step_seconds:
        least = crossovers.smallest_trained
    if size < least:
        return [f"too small to gain: a value of {shown_bytes(size)}, fusing pays from {shown_bytes(least)} on"]
    return []
