"""The launcher's text for our convolution as a matrix product: pack both operands, multiply, keep moments."""

from __future__ import annotations

from postlude.chain import Convolution
from postlude.emit import pass_slots
from postlude.export.kernels import changed, cut, library, program
from postlude.export.layout import call, docstring
from postlude.export.parts import Draft, plus, times
from postlude.export.pieces import SCALES
from postlude.export.specialise import Name
from postlude.plan.gemm import Gemm, Volume
from postlude.plan.problem import power_of_two
from postlude.plan.types import Moments

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
_ALL_CHANNELS = {
    "m_s[:, None] & m_c[None, :]": "m_s[:, None]",
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
        "LAST": False,
        "BLOCK": block,
        "BLOCK_C": block_c,
        "PAD": power_of_two(max(1, volume.padding[2])),
        **dict(zip(("PD", "PH", "PW"), volume.padding)),
    }
    if draft.plan.chain.dims == 2:
        constants["D"] = 1
    names = {"p_largest": "p_scale", "largest": "scale"}
    source = changed(library()["pack_input_kernel"], _PER_SAMPLE)
    for plane in ("p_high", "p_low"):
        source = source.replace(f"{plane}.dtype.element_ty", f"tl.{dtype}")
    if conv.in_channels == gemm.channels:
        source = changed(source, _ALL_PACKED)
    kernel = cut(source, constants, names, ("BLOCK",))
    name = draft.constant("PACK", block, "positions of a tile that is packed")
    tail = f"triton.cdiv({volume.width + volume.kernel[2]}, pitch)"
    draft.add(f"rows = batch * sample_rows + {tail}  # the last taps reach further")
    shape = f"(rows, pitch, {gemm.channels})"
    draft.call("torch.empty", (shape, f"dtype=torch.{dtype}", "device=x.device"), "high = ")
    if planes == 2:
        draft.add("low = torch.empty_like(high)")
    arguments = {
        **{"p_x": "x", "p_high": "high", "p_low": "low", "p_scale": "scale", "N": "batch"},
        **{"D": "depth", "H": "height", "W": "width", "PITCH": "pitch", "PLANE_ROWS": "plane_rows"},
        **{"SAMPLE_ROWS": "sample_rows", "BLOCK": name},
    }
    blocks = gemm.channels // block_c
    tiles = f"triton.cdiv(width, {name})"
    draft.add(f"grid = (rows, {tiles}{f', {blocks}' if blocks > 1 else ''})")
    draft.launch(kernel, "grid", arguments)


def _pack_weight(draft: Draft, gemm: Gemm, conv: Convolution) -> None:
    draft.helpers["pack_weight"] = _pack_weight_text(gemm, conv)
    if gemm.arithmetic.scaled:
        draft.add("columns, weight_scale = pack_weight(weight)")
        draft.add("unscale = (1 / scale)[:, None] * (1 / weight_scale)")
    else:
        draft.add("columns = pack_weight(weight)")


def _pack_weight_text(gemm: Gemm, conv: Convolution) -> str:
    arithmetic, volume = gemm.arithmetic, gemm.volume
    scaled, planes = arithmetic.scaled, arithmetic.planes
    size = volume.kernel[0] * volume.kernel[1] * volume.span * gemm.channels
    rows = -(-conv.out_channels // gemm.block_c) * gemm.block_c * volume.width
    result = "tuple[Tensor, Tensor]" if scaled else "Tensor"
    words = f"[{rows}, {size}], " if planes == 1 else f"[{rows}, 2·{size}], two planes side by side, "
    words += "and each row's scale." if scaled else "one row for each output channel."
    lines = [f"def pack_weight(weight: Tensor) -> {result}:", *docstring(words)]
    lines += [f"    {line}" for line in _taps(gemm, conv)]
    if not scaled:
        return "\n".join([*lines, "    return taps.contiguous()", ""])
    lines += [
        "    scale = scales(torch.linalg.vector_norm(taps, torch.inf, dim=1))",
        "    taps = taps * scale[:, None]",
        "    high = taps.half()",
    ]
    if planes == 2:
        lines.append("    low = (taps - high).half()")
    result = "torch.cat([high, low], dim=1)" if planes == 2 else "high"
    return "\n".join([*lines, f"    return {result}, scale{_first_columns(gemm, conv)}", ""])


def _first_columns(gemm: Gemm, conv: Convolution) -> str:
    """The rows' scales are wanted once for each output channel: neighbouring outputs share theirs."""
    is_all = gemm.volume.width == 1 and conv.out_channels % gemm.block_c == 0
    if is_all:
        return ""
    if conv.out_channels <= gemm.block_c:
        return f"[:{conv.out_channels}]"
    return f".view(-1, {gemm.volume.width}, {gemm.block_c})[:, 0].flatten()[:{conv.out_channels}]"


def _taps(gemm: Gemm, conv: Convolution) -> list[str]:
    """Statements that make `taps`, [rows of the matrix, K]."""
    dims, volume, width = len(conv.kernel), gemm.volume, gemm.volume.width
    axes = tuple(range(2, 2 + dims))
    order = (1, *axes, 0) if conv.transposed else (0, *axes, 1)
    turned = f"weight.flip{axes}" if conv.transposed else "weight"
    taps = f"{turned}.permute{order}"
    lines = [f"taps = {taps}  # [{conv.out_channels}, taps, {conv.in_channels}]"]
    missing = gemm.channels - conv.in_channels
    columns = -(-conv.out_channels // gemm.block_c) * gemm.block_c - conv.out_channels
    if missing or columns:
        pads = [0, missing] + [0, 0] * dims + ([0, columns] if columns else [])
        lines.append(f"taps = F.pad(taps, ({', '.join(map(str, pads))}))")
    if width > 1:
        shifted = f"[F.pad(taps, (0, 0, i, {width - 1} - i)) for i in range({width})]"
        blocks = -(-conv.out_channels // gemm.block_c)
        lines.append(f"# Neighbouring outputs read the same row, each {volume.kernel[2]} positions of it.")
        lines += [line[4:] for line in call("torch.stack", (shifted, "dim=1"), "taps = ")]
        if blocks > 1:
            lines.append(f"taps = taps.unflatten(0, ({blocks}, {gemm.block_c})).transpose(1, 2).flatten(0, 2)")
        else:
            lines.append("taps = taps.transpose(0, 1).flatten(0, 1)")
    if len(lines) == 1:
        return [f"taps = {taps}.flatten(1)"]
    return [*lines, "taps = taps.flatten(1)"]


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
    draft.shared_bytes = gemm.stages * gemm.arithmetic.planes * 2 * gemm.block_k * (
        gemm.rows + gemm.block_c * volume.width
    )


def _multiply(draft: Draft, gemm: Gemm, conv: Convolution) -> None:
    volume, item = gemm.volume, draft.plan.passes[0]
    moments, store = "no", "done"
    if isinstance(item.sink, Moments):
        moments = "both" if item.sink.squares else "sums"
        store = "raw" if item.sink.stores else "no"
    out = conv.out_channels
    slots = pass_slots(draft.plan.chain, item.last)
    before = program(draft.plan.chain, "before", item.last, slots, draft.names, scalar_channel=out % gemm.block_c == 0)
    constants: dict[str, object] = {
        **{"BEFORE": draft.use(before), "KD": volume.kernel[0], "KH": volume.kernel[1], "COUT": out},
        **{"SPAN_C": volume.span * gemm.channels, "C": gemm.channels, "WIDTH": volume.width},
        **{"PLANES": gemm.arithmetic.planes, "SCALED": gemm.arithmetic.scaled, "STORE": store, "MOMENTS": moments},
        **{"LAST": False, "DENSE": volume.is_dense, "WIDE": False, "BLOCKS_C": -(-out // gemm.block_c)},
        **{"BM": gemm.rows, "BC": gemm.block_c, "BK": gemm.block_k, "STAGES": gemm.stages},
        **{"ACC": Name("tl.float32"), "FIRST": volume.padding[0]},
    }
    if draft.plan.chain.dims == 2:
        constants["OD"] = 1
    if not volume.is_dense:
        constants["ALIGN"] = 1
    names = {f"a{number}": f"p_{draft.names[slot]}" for number, slot in enumerate(slots)}
    source = changed(library()["convolve_kernel"], _UNSCALE_PER_SAMPLE)
    if out % gemm.block_c == 0:
        source = changed(source, _ALL_CHANNELS)
    if volume.width == 1 and gemm.arithmetic.scaled:
        source = changed(source, _NARROW)
    kernel = cut(source, constants, names, ("BM", "BC", "BK", "STAGES"))
    plane = "plane"
    per_tile = "BM" if volume.width == 1 else f"BM * {volume.width}"
    planes = "out[0] * " if draft.plan.chain.dims == 3 else ""
    draft.add(f"tiles = triton.cdiv({planes}{plane}, {per_tile})")
    draft.add(f"units = {times('batch', 'tiles', -(-out // gemm.block_c))}")
    if store != "no":
        draft.add(f"value = torch.empty(batch, {out}, *out, dtype=x.dtype, device=x.device)")
    if moments != "no":
        _empty_moments(draft, out, "tiles", moments == "both")
    arguments = {
        **{"d_high": "d_high", "d_low": "d_low", "d_w": "d_weight", "p_unscale": "unscale", "p_y": "value"},
        **{"p_mean": "means", "p_m2": "squares", "p_count": "counts", "TILES": "tiles"},
        **{"UNITS": "units", "PITCH": "pitch", "PLANE": plane},
        "SAMPLE_ROWS": "sample_rows * pitch" + (f" // {volume.width}" if volume.width > 1 else ""),
        "LAST_PLANE": plus("depth", volume.padding[0] - 1) if draft.plan.chain.dims == 3 else "0",
        **dict(zip(("OD", "OH", "OW"), ("out[0]", "out[1]", "out[2]"))),
        "ALIGN": "align",
        **{f"p_{draft.names[slot]}": draft.names[slot] for slot in slots},
    }
    if draft.plan.chain.dims == 2:
        arguments |= {"OH": "out[0]", "OW": "out[1]"}
    if "ALIGN" in kernel.parameters:
        draft.add("align = min(16, positions & -positions)")
    draft.launch(kernel, f"({arguments['UNITS']},)", arguments, gemm.warps)


def _empty_moments(draft: Draft, channels: int, chunks: str, squares: bool) -> None:
    draft.add(f"means = torch.empty(batch, {channels}, {chunks}, dtype=torch.float32, device=x.device)")
    if squares:
        draft.add("squares = torch.empty_like(means)")
    draft.add(f"counts = torch.empty(batch, {chunks}, dtype=torch.float32, device=x.device)")
