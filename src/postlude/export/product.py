"""The launcher's text for our convolution as a matrix product: pack both operands, multiply, keep moments."""

from __future__ import annotations

import re

from postlude.chain import Convolution
from postlude.export.kernels import Kernel, changed, cut, library, program
from postlude.export.parts import Draft, plus, times
from postlude.export.pieces import SCALES
from postlude.export.specialise import Inline, Name
from postlude.export.weight import pack_weight_text
from postlude.plan.gemm import Gemm, Volume
from postlude.plan.problem import power_of_two
from postlude.plan.types import Moments, Store
from postlude.steps import pass_slots

# Where files say something else than the library's kernels; each text must be there once.
#
# In the library a scale belongs to a channel and is found by a kernel; in files to a sample, found by PyTorch. A sample
# with an infinity becomes NaN in the norm anyway, so none has to be kept out of its scale.
_PER_SAMPLE = {
    "tl.load(p_largest + o_c, mask=m_c, other=0).to(tl.float32, bitcast=True)": (
        "tl.load(p_largest + i_n, mask=i_n < N, other=1.0)"
    ),
    "scale_for(largest)[None, :]": "largest",
    "p_largest,  # [C] where SCALED": "p_largest,  # [N] where SCALED",
}
_UNSCALE_PER_SAMPLE = {
    "tl.load(p_unscale + o_c, mask=m_c, other=0.0)": "tl.load(p_unscale + i_n * COUT + o_c, mask=m_c, other=0.0)",
    "p_unscale,  # [COUT] where SCALED": "p_unscale,  # [N, COUT] where SCALED",
}
# Masks that are true everywhere: the channels fill the packed volume, or the tiles of the product.
_ALL_PACKED = {
    "m_c[:, None] & m_w[None, :]": "m_w[None, :]",
    "(o_w < W)[:, None] & (o_c < CP)[None, :]": "(o_w < W)[:, None]",
    "(o_pad < PW)[:, None] & (o_c < CP)[None, :]": "(o_pad < PW)[:, None]",
}
# A row's padding is as wide as the block that stores it: a power of two.
_ALL_PADDING = {
    "        m_zero = (o_pad < PW)[:, None]\n": "",
    "tl.store(p_high + out + o_zero, zeros, mask=m_zero)": "tl.store(p_high + out + o_zero, zeros)",
    "tl.store(p_low + out + o_zero, zeros, mask=m_zero)": "tl.store(p_low + out + o_zero, zeros)",
}
_ONE_BLOCK = {"tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)": "tl.arange(0, BLOCK_C)"}
_ALL_CHANNELS = {
    "o_c, mask=m_c, other=0.0)": "o_c)",
    "tl.store(p_mean + o_out, b_mean, mask=m_c)": "tl.store(p_mean + o_out, b_mean)",
    "tl.store(p_m2 + o_out, tl.sum(b_diff * b_diff, axis=0), mask=m_c)": (
        "tl.store(p_m2 + o_out, tl.sum(b_diff * b_diff, axis=0))"
    ),
    "tl.store(p_mean + o_out, b_sum, mask=m_c)": "tl.store(p_mean + o_out, b_sum)",
}
_NARROW = {  # one output a row: the sums have their shape already
    "        b_v = tl.reshape(acc, [BM * WIDTH, BC])\n": "",
    "b_v = b_v * tl.load(p_unscale": "b_v = acc * tl.load(p_unscale",
}
_AXES = ("depth", "height", "width")


def why_no_product(gemm: Gemm, channels: int, even_if_slower: bool) -> str | None:
    """Why our convolution has no text; PyTorch's then stands in the file."""
    if gemm.phases is not None:
        return "files have no kernel for strides"
    if gemm.arithmetic.keeps_infinities:
        return "without a norm after it, the scales of a file could not keep an infinity"
    if channels < 8 and not even_if_slower:
        return "with so few input channels most products would be with zeros"
    return None


def product(draft: Draft, gemm: Gemm) -> None:
    """Leaves `value` where it is stored, `means`, `squares` and `counts` where moments are wanted."""
    conv = draft.plan.chain.producer
    assert conv is not None
    _sizes(draft, gemm.volume)
    if gemm.arithmetic.scaled:
        _scale(draft)
    _pack_input(draft, gemm, conv)
    _pack_weight(draft, gemm, conv)
    _descriptors(draft, gemm)
    _multiply(draft, gemm, conv)


def _sizes(draft: Draft, volume: Volume) -> None:
    used = _AXES[3 - draft.plan.chain.dims :]
    pads = dict(zip(_AXES, volume.padding))
    draft.add(f"batch, _, {', '.join(used)} = x.shape")
    outs = [plus(axis, 2 * p - k + 1) for axis, p, k in zip(_AXES, volume.padding, volume.kernel) if axis in used]
    draft.add(f"out = ({', '.join(outs)})", "positions = math.prod(out)")
    draft.add("# The packed volume: what pads an axis lies in front of it, the next row's behind.")
    draft.add(f"pitch, plane_rows = {plus('width', pads['width'])}, {plus('height', pads['height'])}")
    planes = plus("depth", pads["depth"]) if "depth" in used else "1"
    rows = times(planes, "plane_rows")
    if volume.width > 1:
        draft.add(f"step = {volume.width} // math.gcd({volume.width}, pitch)  # a row of the product may span rows")
        rows = f"triton.cdiv({rows}, step) * step"
    if volume.width > 1:
        draft.add(f"sample_rows = {rows}", "plane = plane_rows * pitch")
    else:
        draft.add(f"sample_rows, plane = {rows}, plane_rows * pitch")
    draft.imports.add("math")


def _scale(draft: Draft) -> None:
    """A power of two for each sample. The library has one for each channel, which takes a search of its own."""
    draft.helpers["scales"] = SCALES
    draft.add("scale = scales(torch.linalg.vector_norm(x.flatten(1), torch.inf, dim=1))")


def _pack_input(draft: Draft, gemm: Gemm, conv: Convolution) -> None:
    volume, planes, dtype = gemm.volume, gemm.arithmetic.planes, gemm.arithmetic.operands
    block = min(64, max(16, power_of_two(volume.space[2])))
    block_c = min(64, gemm.channels & -gemm.channels)
    constants: dict[str, object] = {
        "CP": gemm.channels,
        "C": conv.in_channels,
        "PLANES": planes,
        "SCALED": gemm.arithmetic.scaled,
        "KEEPS": False,
        "LAST": False,
        "BLOCK": block,
        "BLOCK_C": block_c,
        "PAD": power_of_two(max(1, volume.padding[2])),
        **dict(zip(("PD", "PH", "PW"), volume.padding)),
    }
    if draft.plan.chain.dims == 2:
        constants["D"] = 1
    names = {"p_largest": "p_scale", "largest": "scale"}
    blocks = gemm.channels // block_c
    kernel = cut(_pack_source(gemm, conv, volume.padding[2] == constants["PAD"], blocks), constants, names, ("BLOCK",))
    name = draft.constant("PACK", block, "positions of a tile that is packed")
    tail = f"triton.cdiv({volume.width + volume.kernel[2]}, pitch)"
    draft.add(f"rows = batch * sample_rows + {tail}  # the last taps reach further")
    shape = f"(rows, pitch, {gemm.channels})"
    draft.call("torch.empty", (shape, f"dtype=torch.{dtype}", "device=x.device"), "high = ")
    if planes == 2:
        draft.add("low = torch.empty_like(high)")
    arguments = {
        "p_x": "x",
        "p_high": "high",
        "p_low": "low",
        "p_scale": "scale",
        "N": "batch",
        "D": "depth",
        "H": "height",
        "W": "width",
        "PITCH": "pitch",
        "PLANE_ROWS": "plane_rows",
        "SAMPLE_ROWS": "sample_rows",
        "BLOCK": name,
    }
    tiles = f"triton.cdiv(width, {name})"
    draft.add(f"grid = (rows, {tiles}{f', {blocks}' if blocks > 1 else ''})")
    draft.launch(kernel, "grid", arguments)


def _pack_source(gemm: Gemm, conv: Convolution, pads_all: bool, blocks: int) -> str:
    """`pads_all`: the block that stores a row's padding is no wider than it."""
    source = changed(library()["pack_input_kernel"], _PER_SAMPLE)
    for plane in ("p_high", "p_low"):
        source = source.replace(f"{plane}.dtype.element_ty", f"tl.{gemm.arithmetic.operands}")
    if conv.in_channels == gemm.channels:
        source = changed(source, {**_ALL_PACKED, **(_ALL_PADDING if pads_all else {})})
    return changed(source, _ONE_BLOCK) if blocks == 1 else source


def _pack_weight(draft: Draft, gemm: Gemm, conv: Convolution) -> None:
    draft.helpers["pack_weight"] = pack_weight_text(gemm, conv)
    if gemm.arithmetic.scaled:
        draft.add("columns, weight_scale = pack_weight(weight)")
        draft.add("unscale = (1 / scale)[:, None] * (1 / weight_scale)")
    else:
        draft.add("columns = pack_weight(weight)")


def _descriptors(draft: Draft, gemm: Gemm) -> None:
    volume = gemm.volume
    row, span = volume.width * gemm.channels, volume.span * gemm.channels + (volume.width - 1) * gemm.channels
    rows = "batch * sample_rows * pitch" + (f" // {volume.width}" if volume.width > 1 else "")
    tile = f"{gemm.rows}, {gemm.block_c}, {gemm.block_k}, {gemm.stages}"
    draft.constants["BM"] = f"BM, BC, BK, STAGES = {tile}  # of a tile of the product"
    draft.imports.add("TensorDescriptor")
    draft.add(f"shape, stride = [{rows}, {span}], [{row}, 1]")
    draft.add("d_high = TensorDescriptor(high, shape, stride, [BM, BK])")
    if gemm.arithmetic.planes == 2:
        draft.add("d_low = TensorDescriptor(low, shape, stride, [BM, BK])")
    block = "BC" if volume.width == 1 else f"{volume.width} * BC"
    size = gemm.arithmetic.planes * volume.kernel[0] * volume.kernel[1] * volume.span * gemm.channels
    shape = f"[{-(-draft.plan.value.shape[1] // gemm.block_c) * gemm.block_c * volume.width}, {size}]"
    draft.call("TensorDescriptor", ("columns", shape, f"[{size}, 1]", f"[{block}, BK]"), "d_weight = ")
    draft.shared_bytes = (
        gemm.stages * gemm.arithmetic.planes * 2 * gemm.block_k * (gemm.rows + gemm.block_c * volume.width)
    )


def _multiply(draft: Draft, gemm: Gemm, conv: Convolution) -> None:
    volume, item, out = gemm.volume, draft.plan.passes[0], conv.out_channels
    moments, store = "no", "raw" if item.sink == Store(raw=True) else "done"
    if isinstance(item.sink, Moments):
        moments = "both" if item.sink.squares else "sums"
        store = "raw" if item.sink.stores else "no"
    slots = () if (moments, store) == ("no", "raw") else pass_slots(draft.plan.chain, item.last)
    kernel = _kernel(draft, gemm, out, slots, {"STORE": store, "MOMENTS": moments})
    per_tile = "BM" if volume.width == 1 else f"BM * {volume.width}"
    planes = "out[0] * " if draft.plan.chain.dims == 3 else ""
    draft.add(f"tiles = triton.cdiv({planes}plane, {per_tile})")
    draft.add(f"units = {times('batch', 'tiles', -(-out // gemm.block_c))}")
    if store != "no":
        draft.add(f"value = torch.empty(batch, {out}, *out, dtype=x.dtype, device=x.device)")
    if moments != "no":
        _empty_moments(draft, out, "tiles", moments == "both")
    if "ALIGN" in kernel.parameters:
        draft.add("align = min(16, positions & -positions)")
    arguments = {f"p_{draft.names[slot]}": draft.names[slot] for slot in slots}
    draft.launch(kernel, "(units,)", {**_arguments(draft, volume), **arguments}, gemm.warps)


def _kernel(draft: Draft, gemm: Gemm, out: int, slots: tuple[int, ...], sinks: dict[str, object]) -> Kernel:
    """The product with what follows it, for this case."""
    chain, volume, last = draft.plan.chain, gemm.volume, draft.plan.passes[0].last
    is_full = out % gemm.block_c == 0
    before: object = Inline("{0}")  # where nothing reads it
    if (sinks["MOMENTS"], sinks["STORE"]) != ("no", "raw"):
        steps = program(chain, "before", last, draft.names, scalar_channel=is_full, spread="[None, :]")
        before = draft.use(steps)
    constants: dict[str, object] = {
        "BEFORE": before,
        "KD": volume.kernel[0],
        "KH": volume.kernel[1],
        "COUT": out,
        "SPAN_C": volume.span * gemm.channels,
        "C": gemm.channels,
        "WIDTH": volume.width,
        "PLANES": gemm.arithmetic.planes,
        "SCALED": gemm.arithmetic.scaled,
        "KEEPS": False,
        "LAST": False,
        "DENSE": volume.is_dense,
        "WIDE": False,
        "FULL": is_full,
        "BLOCKS_C": -(-out // gemm.block_c),
        "ACC": Name("tl.float32"),
        "FIRST": volume.padding[0],
        **dict(zip(("BM", "BC", "BK", "STAGES"), (gemm.rows, gemm.block_c, gemm.block_k, gemm.stages))),
        **sinks,
        **({"OD": 1} if chain.dims == 2 else {}),
        **({} if volume.is_dense else {"ALIGN": 1}),
    }
    names = {f"a{number}": f"p_{draft.names[slot]}" for number, slot in enumerate(slots)}
    source = changed(library()["convolve_kernel"], _UNSCALE_PER_SAMPLE)
    if is_full:
        source = changed(source, _ALL_CHANNELS)
    if volume.width == 1 and gemm.arithmetic.scaled:
        source = changed(source, _NARROW)
    return cut(_one_unit(source), constants, names, ("BM", "BC", "BK", "STAGES"))


def _one_unit(source: str) -> str:
    """A program for each unit: no loop over them."""
    loop = "    for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):\n"
    head, body = changed(source, {loop: "\f"}).split("\f")
    return f"{head}    unit = tl.program_id(0)\n" + re.sub(r"(?m)^    (?=    )", "", body)


def _arguments(draft: Draft, volume: Volume) -> dict[str, str]:
    """The product's parameters as expressions of the launcher."""
    is_flat = draft.plan.chain.dims == 2
    sizes = ("OH", "OW") if is_flat else ("OD", "OH", "OW")
    return {
        "d_w": "d_weight",
        "p_unscale": "unscale",
        "p_y": "value",
        "p_mean": "means",
        "p_m2": "squares",
        "p_count": "counts",
        "TILES": "tiles",
        "UNITS": "units",
        "PITCH": "pitch",
        "PLANE": "plane",
        "SAMPLE_ROWS": "sample_rows * pitch" + (f" // {volume.width}" if volume.width > 1 else ""),
        "LAST_PLANE": "0" if is_flat else plus("depth", volume.padding[0] - 1),
        "ALIGN": "align",
        **{name: f"out[{axis}]" for axis, name in enumerate(sizes)},
    }


def _empty_moments(draft: Draft, channels: int, chunks: str, squares: bool) -> None:
    draft.add(f"means = torch.empty(batch, {channels}, {chunks}, dtype=torch.float32, device=x.device)")
    if squares:
        draft.add("squares = torch.empty_like(means)")
    draft.add(f"counts = torch.empty(batch, {chunks}, dtype=torch.float32, device=x.device)")
