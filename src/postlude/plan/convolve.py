"""Who convolves on a GPU, and why: our own kernel, with its arithmetic and tiles, or PyTorch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from postlude.card_tiles import TileOrigin
from postlude.chain import POINTWISE, Chain, Convolution, Pointwise
from postlude.hardware import Machine
from postlude.plan.barriers import first_barrier, has_norm, norm_hides_infinities, row_norm
from postlude.plan.boxes import Boxes, boxes_for, gradient_boxes_for
from postlude.plan.few_channels import FewChannels, StoredFewChannels, few_channels_for, stored_few_channels_for
from postlude.plan.gemm import Arithmetic, Gemm, WeightGemm, input_gradient_of, padded_channels, unsupported
from postlude.plan.phases import has_phases
from postlude.plan.problem import Problem, body_dtype, fp32_mode, power_in, power_of_two
from postlude.plan.residues import has_residues
from postlude.plan.tiles import product_uses, rows_for
from postlude.plan.volume import phased_volume, unfolded_volume, volume_for
from postlude.plan.weight_gradient import neighbours_for, weight_gemm_for
from postlude.plan.worth import has_moments_apart, slower

_COLUMNS = 128  # columns of a tile; with few channels, neighbouring outputs fill them (see `width_for`)
_WIDEST_TRAINED = 5  # taps along an axis: each tap, or two or three together, reads the gradient again
_SIDE_BY_SIDE = 32  # most channels of several taps in one packed position, which is one short step of the GEMM

Own = Gemm | Boxes | FewChannels | StoredFewChannels


def own_convolution(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool) -> Own | str:
    """Our convolution for this chain, or the reason why PyTorch convolves."""
    few = few_channels_for(chain, problem, machine)
    if not isinstance(few, str):
        return few
    gemm = gemm_for(chain, problem, machine, even_if_slower)
    # Of a row's taps alone the im2col is a third as large.
    unfolds_planes = isinstance(gemm, Gemm) and gemm.unfolded[0] > 1
    return (stored_few_channels_for(chain, problem, machine) if unfolds_planes else None) or gemm


def gemm_for(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool = False) -> Gemm | Boxes | str:
    """An implicit GEMM, over a channels-last input in place or over a packed one; or the reason why PyTorch
    convolves."""
    conv = chain.producer
    if conv is None:
        return "there is no convolution"
    reason = None if is_strided(conv) else unsupported(conv)
    if reason:
        return reason
    arithmetic, space, boxes = arithmetic_for(chain, problem), problem.x.shape[2:], None
    given = (conv, space, arithmetic, machine)
    if has_phases(conv):
        gemm = phased_product_for(*given)
    elif has_residues(conv):
        gemm = product_for(*given, widens=False, kind="product by residue")
    else:
        # Several neighbours in a row of the GEMM multiply by zeros, which turns an infinity into NaN.
        gemm = unfolded_product_for(*given) or product_for(*given, widens=norm_hides_infinities(chain))
        boxes = boxes_for(chain, problem, arithmetic, machine)
    if gemm.phases is None and (problem.needs_grad or not has_moments_apart(gemm)):
        gemm = _with_room(chain, gemm, machine)
    brings_gradients = problem.needs_grad and not spreads_nan(chain) and _brings_gradients(conv, gemm, machine)
    reason = None if even_if_slower else slower(chain, problem, machine.card, gemm, boxes is not None, brings_gradients)
    return reason or boxes or gemm


def is_strided(conv: Convolution) -> bool:
    """Whether our GEMMs run this convolution, which has strides: by phase if it is transposed, else by residue."""
    return has_phases(conv) or has_residues(conv)


def _with_room(chain: Chain, gemm: Gemm, machine: Machine) -> Gemm:
    """Halves the rows of a tile if long words precede the norm: with them and the moments, 128 accumulators spill.

    With gelu a thread spills 2 KiB. conv_transpose2d(64→64) → gelu → group_norm at 128×64×256² takes 5.3 ms with half
    the rows instead of 7.2.
    """
    norm = first_barrier(chain)
    before = () if norm is None or not has_norm(chain) else chain.steps[: norm - 1]
    is_long = any(isinstance(step, Pointwise) and POINTWISE[step.op].long for step in before)
    sums = gemm.rows * gemm.columns // (32 * gemm.warps)
    if not machine.card.abilities.has_wgmma or not is_long or sums < 128 or gemm.arithmetic.planes == 2:
        return gemm
    return dataclasses.replace(gemm, rows=gemm.rows // 2)


def product_for(
    conv: Convolution,
    space: tuple[int, ...],
    arithmetic: Arithmetic,
    machine: Machine,
    widens: bool = True,
    kind: str = "product",
    group: int = 1,
) -> Gemm:
    """The GEMM of a convolution for which `unsupported` is None, or of a strided one that does not widen; `group` as in
    `Volume`."""
    channels, block_c = padded_channels(conv.in_channels), _block_c(conv, arithmetic)
    width = width_for(conv, block_c) if widens else 1

    def made(tile: Mapping[str, int]) -> Gemm:
        volume = volume_for(conv, space, min(width, tile.get("width", width)), group)
        steps = (16,) if arithmetic.is_exact else (64, 32, 16)
        together = channels if volume.has_residues else volume.span * channels  # contiguous in a row of the GEMM
        block_k = next(k for k in steps if together % k == 0)
        return Gemm(arithmetic, volume, channels, tile["rows"], block_c, block_k, tile["stages"], tile["warps"])

    return _in_the_best_tile(kind, conv, arithmetic, machine, made)


def unfolded_product_for(
    conv: Convolution, space: tuple[int, ...], arithmetic: Arithmetic, machine: Machine
) -> Gemm | None:
    """The GEMM over a partial im2col: the taps along x, or along y and x, in one position, if channels are few."""
    kh, kw = (1, *conv.kernel)[-2:]
    taps = next((taps for taps in ((kh, kw), (1, kw)) if conv.in_channels * math.prod(taps) <= _SIDE_BY_SIDE), (1, 1))
    if taps == (1, 1):
        return None
    channels = max(16, power_of_two(conv.in_channels * math.prod(taps)))
    block_c, block_k = _block_c(conv, arithmetic), 16 if arithmetic.is_exact else channels
    volume = unfolded_volume(conv, space, taps)

    def made(tile: Mapping[str, int]) -> Gemm:
        sizes = (tile["rows"], block_c, block_k, tile["stages"], tile["warps"])
        return Gemm(arithmetic, volume, channels, *sizes, unfolded=taps)

    return _in_the_best_tile("product", conv, arithmetic, machine, made)


def phased_product_for(conv: Convolution, space: tuple[int, ...], arithmetic: Arithmetic, machine: Machine) -> Gemm:
    """The GEMMs of a convolution that `has_phases`.

    If a program computes both phases of a row, each has half of the accumulators that one phase would have.
    """
    volume, phases = phased_volume(conv, space)
    channels = padded_channels(conv.in_channels)
    block_c = _block_c(conv, arithmetic, _COLUMNS // (2 if phases.is_paired else 1))
    block_k = 16 if arithmetic.is_exact else power_in(channels, 64)

    def made(tile: Mapping[str, int]) -> Gemm:
        sizes = (tile["rows"], block_c, block_k, tile["stages"], tile["warps"])
        return Gemm(arithmetic, volume, channels, *sizes, phases)

    return _in_the_best_tile("product by phase", conv, arithmetic, machine, made)


def _in_the_best_tile(
    kind: str,
    conv: Convolution,
    arithmetic: Arithmetic,
    machine: Machine,
    made: Callable[[Mapping[str, int]], Gemm],
) -> Gemm:
    """The first tile that fits the card. A tuned one may have been measured with fewer taps or channels."""
    if arithmetic.is_exact:
        return made({"rows": 32, "stages": 2, "warps": 4})  # correctness only: no card is fast at it
    uses = product_uses(kind, conv, arithmetic, machine)
    for row in rows_for(machine, *uses):
        gemm = dataclasses.replace(made(row.values), origin=TileOrigin(uses[0], row))
        if machine.card.holds(gemm.shared_bytes):
            break
    return gemm


def _block_c(conv: Convolution, arithmetic: Arithmetic, most: int = _COLUMNS) -> int:
    """Output channels of a tile."""
    return min(32 if arithmetic.is_exact else most, max(16, power_of_two(conv.out_channels)))


def gradient_products(
    chain: Chain, problem: Problem, own: Own, machine: Machine
) -> tuple[Gemm | Boxes | None, WeightGemm | None]:
    """Our GEMMs for the gradients of input and weight, if our convolution ran in the forward pass.

    With few channels only the weight's is ours: cuDNN's takes 40 times as long there as its convolution.
    """
    conv = chain.convolution
    if not _brings_gradients(conv, own, machine):
        return None, None
    is_few = isinstance(own, FewChannels)
    if is_few and (conv.dtype or problem.x.dtype) != "float32":
        return None, None
    arithmetic = Arithmetic("float16", own.planes, scaled=True) if isinstance(own, FewChannels) else own.arithmetic
    hides = has_norm(chain) and row_norm(chain) is None  # then an infinity has no finite gradients in any case
    arithmetic = dataclasses.replace(arithmetic, keeps_infinities=arithmetic.keeps_infinities and not hides)
    space = problem.x.shape[2:]
    if is_few:
        return None, weight_gemm_for(conv, space, arithmetic, machine)
    given = (input_gradient_of(conv, space), conv.output_space(space), arithmetic, machine)
    if has_phases(conv):  # both gradients read the gradient at the result, packed by residue
        return product_for(*given, widens=False, kind="input's gradient by residue"), weight_gemm_for(*given)
    if has_residues(conv):  # the weight's gradient reads the input, packed by residue
        return phased_product_for(*given), weight_gemm_for(conv, space, arithmetic, machine)
    boxes, weight = gradient_boxes_for(*given), weight_gemm_for(conv, space, arithmetic, machine)
    if boxes is not None and weight.gradient_volume.is_flat:  # boxes cannot skip rows between samples
        return boxes, weight
    group = neighbours_for(conv, arithmetic)
    back = product_for(*given, widens=hides, kind="input's gradient", group=group)
    return back, weight_gemm_for(conv, space, arithmetic, machine, back.volume.width)


def spreads_nan(chain: Chain) -> bool:
    """Whether our gradients would spread NaN.

    Before a layer_norm an infinity turns only its own row into NaN, but our GEMMs multiply neighbours by zeros. With
    strides they have none.
    """
    return row_norm(chain) is not None and not is_strided(chain.convolution)


def _brings_gradients(conv: Convolution, own: Own, machine: Machine) -> bool:
    """Whether our kernels compute the gradients too.

    Those of a strided convolution only in fp32 and TF32. In fp32 PyTorch's do without tensor cores. In TF32 they
    convert between layouts: a step of conv_transpose2d(64→64, k3, s2) → … at 128×64×128² takes 10.6 ms with them, and
    8.76 with ours in two planes.
    """
    if not machine.card.abilities.has_weight_gradients or max(conv.kernel[-2:]) > _WIDEST_TRAINED:
        return False
    if isinstance(own, Boxes):
        return conv.in_channels <= machine.card.crossovers.trained_channels
    if not isinstance(own, Gemm) or not is_strided(conv):
        return True
    return own.arithmetic.scaled or own.arithmetic.is_exact


def packs_gradient(dx: Gemm | Boxes | None, dw: WeightGemm | None) -> bool:
    """Whether the last gradient pass writes the gradient packed, as both GEMMs read it.

    Not with strides. Not with scaled planes, because the scale is known only after the gradient. Not with short rows:
    rows of 34 with a border between them give uncoalesced accesses (chain 61: 0.27 ms, against 0.20 for two passes).
    Rows of 128 take 0.23 instead of 0.31 ms (2×32×128³).
    """
    if dx is None or dw is None or dx.arithmetic.scaled or dw.volume.has_residues:
        return False
    return isinstance(dx, Boxes) or dx.volume.is_flat or dx.volume.space[2] % 32 == 0


def arithmetic_for(chain: Chain, problem: Problem) -> Arithmetic:
    dtype = body_dtype(chain, problem)
    if dtype != "float32":
        return Arithmetic(dtype)
    planes = 1 if fp32_mode(chain, problem) == "tf32" else 2
    return Arithmetic("float16", planes, scaled=True, keeps_infinities=not norm_hides_infinities(chain))


def width_for(conv: Convolution, block_c: int) -> int:
    """Neighbouring outputs per row of the GEMM: as many as fill the tile's columns, at most 4; 1 if KW is 1."""
    return 1 if conv.kernel[-1] == 1 else min(4, _COLUMNS // block_c)
