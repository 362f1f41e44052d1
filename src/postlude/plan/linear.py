"""The GEMM of a linear layer on a GPU: ours, with its arithmetic and tiles, or PyTorch's, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from postlude.cards import Card
from postlude.chain import Chain, Convolution
from postlude.hardware import Machine
from postlude.plan.gemm import SHARED_BESIDE, Arithmetic
from postlude.plan.problem import Problem, body_dtype, fp32_mode, item_size, power_of_two

# The share of the fp32 peak that cuBLAS reaches without tensor cores: 51 of an H200's 67 TFLOP/s at 1024×8192×8192.
_LIBRARY = 0.76
# How much longer the GEMM takes if it splits the weight into planes itself: each element passes through registers once
# per tile of rows (1024×8192×8192 on an H200: 1.25 ms in all, 0.91 with the weight packed before).
_CUTTING = 0.5
_ROWS, _FEATURES, _DEPTH = 128, 128, 64  # of a tile
# If the GEMM splits the weight: two blocks fit, one splits while one multiplies (1.25, not 1.35 ms).
_SMALL_FEATURES = 64
_DESCRIPTOR = 16  # a descriptor's rows are a multiple of so many bytes


@dataclass(frozen=True)
class LinearGemm:
    """One way to run the GEMM of rows and a weight, both [.., features]."""

    arithmetic: Arithmetic
    rows: int  # samples of a tile
    block_c: int  # output features of a tile
    block_k: int
    stages: int
    warps: int
    # The GEMM reads the weight in place and splits it into planes in registers. With few rows that costs less than
    # packing.
    cuts_weight: bool = False

    @property
    def shared_bytes(self) -> int:
        """Upper bound of a block's shared memory."""
        item = 8 if self.arithmetic.is_exact else 2
        both = item * self.arithmetic.planes * self.block_k
        if self.cuts_weight:  # in fp32, one stage later than the rest, and again as planes
            weight = (4 * self.block_k * (self.stages - 1) + both) * self.block_c
        else:
            weight = both * self.block_c * self.stages
        return both * self.rows * self.stages + weight + SHARED_BESIDE

    def __str__(self) -> str:
        cut = ", the weight split inside the product" if self.cuts_weight else ""
        return f"matrix product of {self.arithmetic}{cut}; tiles of {self.rows} × {self.block_c} × {self.block_k}"


def own_linear(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool) -> LinearGemm | str:
    """Our GEMM for this linear layer, or the reason why PyTorch multiplies."""
    layer, rows = chain.convolution, problem.x.shape[0]
    if problem.tensors[1].layout == "strided":
        return "the weight is not contiguous"
    dtype = body_dtype(chain, problem)
    if dtype not in ("float32", "float64"):
        return "cuBLAS is as fast in 16 bits"
    gemm = linear_gemm(layer, rows, linear_arithmetic(chain, problem), machine)
    if even_if_slower:
        return gemm
    if gemm.arithmetic.is_exact:
        return "PyTorch is faster in float64"
    mode = fp32_mode(chain, problem)
    if mode != ("tf32" if problem.multiplies_tf32 else "fp32"):
        return gemm  # PyTorch's GEMM follows its own switch only
    if mode == "tf32":
        return "cuBLAS is as fast in TF32"
    return _slower(layer, rows, gemm, machine.card) or gemm


def linear_arithmetic(chain: Chain, problem: Problem) -> Arithmetic:
    dtype = body_dtype(chain, problem)
    if dtype != "float32":
        return Arithmetic(dtype)
    return Arithmetic("float16", 1 if fp32_mode(chain, problem) == "tf32" else 2, scaled=True, keeps_infinities=True)


def linear_gemm(layer: Convolution, rows: int, arithmetic: Arithmetic, machine: Machine) -> LinearGemm:
    """The largest tile that fits the card."""
    if arithmetic.is_exact:
        return LinearGemm(arithmetic, 32, 32, 16, 2, 4)  # correctness only
    height, width = min(_ROWS, max(16, power_of_two(rows))), min(_FEATURES, max(64, power_of_two(layer.out_channels)))
    pipelines = [(3, _DEPTH), (2, _DEPTH), (3, _DEPTH // 2), (2, _DEPTH // 2)]
    cuts = _cuts_weight(layer, rows, arithmetic, machine.card)
    width = _SMALL_FEATURES if cuts else width
    # Two blocks that split the weight share a multiprocessor's memory. Without wgmma the epilogue takes up to 48 KiB of
    # it.
    for stages, depth in pipelines[cuts or not machine.card.abilities.has_wgmma :]:
        gemm = LinearGemm(arithmetic, height, width, depth, stages, 8 if height * width > 8192 else 4, cuts)
        if machine.card.holds(gemm.shared_bytes):
            break
    return gemm


def gradient_gemm(forward: LinearGemm, packs: bool = False) -> LinearGemm:
    """The GEMM of a layer's gradients, given that of its forward pass.

    A weight that is split inside the product is read as it lies, transposed, and needs the registers of a shallower
    step. The weight's own gradient packs its operands, which are smaller than the weight. Its sums are as short as the
    batch: more and smaller blocks hide the beginning and the end of each (on an H200 1024×8192×8192 takes 0.81 ms,
    0.85 in tiles of 128 × 128 × 64; 128×32768×32768 2.7 and 3.3 ms).
    """
    cuts = forward.cuts_weight and not packs
    if forward.arithmetic.planes == 2 and forward.rows == _ROWS and (cuts or packs):
        return LinearGemm(forward.arithmetic, _ROWS, _SMALL_FEATURES, _DEPTH // 2, 3, 4, cuts)
    return replace(forward, cuts_weight=cuts)


def _cuts_weight(layer: Convolution, rows: int, arithmetic: Arithmetic, card: Card) -> bool:
    """Whether the GEMM should split the weight: packing costs a pass over it, splitting makes every tile slower."""
    if arithmetic.planes != 2 or layer.in_channels * item_size("float32") % _DESCRIPTOR:
        return False
    packing = 2 * layer.in_channels * layer.out_channels * item_size("float32") / card.rates.copy
    return packing > _CUTTING * _product_seconds(layer, rows, arithmetic, card)


def _product_seconds(layer: Convolution, rows: int, arithmetic: Arithmetic, card: Card) -> float:
    return layer.flops(max(rows, _ROWS), ()) * arithmetic.products / card.rates.product


def _slower(layer: Convolution, rows: int, gemm: LinearGemm, card: Card) -> str | None:
    """Why cuBLAS is expected to be faster in fp32; None if ours is."""
    if layer.flops(rows, ()) < card.crossovers.packing["fp32"]:
        return "the product is too small for packing its operands to pay"
    theirs = layer.flops(rows, ()) / (_LIBRARY * card.rates.peak.fp32)
    product = _product_seconds(layer, rows, gemm.arithmetic, card)
    if gemm.cuts_weight:
        product *= 1 + _CUTTING
    packed = layer.in_channels * (rows + (0 if gemm.cuts_weight else layer.out_channels))
    ours = product + 2 * packed * item_size("float32") / card.rates.copy
    # The weight is read at least once.
    theirs = max(theirs, layer.in_channels * layer.out_channels * item_size("float32") / card.rates.copy)
    if ours < theirs:
        return None
    return f"about {ours * 1e3:.2g} ms are expected of Postlude's product, {theirs * 1e3:.2g} of cuBLAS's"
