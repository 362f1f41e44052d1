"""The function of a file that packs a convolution's weight as a matrix, by PyTorch's operators: it is small."""

from __future__ import annotations

from postlude.chain import Convolution
from postlude.export.layout import call, docstring
from postlude.plan.gemm import Gemm


def pack_weight_text(gemm: Gemm, conv: Convolution) -> str:
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
