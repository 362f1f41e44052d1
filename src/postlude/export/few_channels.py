"""The convolution of few channels, its norm and the mean of everything as two kernels of CUDA C++ in as few lines as
they take: fp32 in two planes, for a norm and a mean over all but the batch. All else is the library's own source."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import resources

from postlude.chain import Convolution, Normalize, Reduce
from postlude.export.device_text import changed
from postlude.plan import Plan
from postlude.plan.few_channels import WIDTH, FewChannels, Geometry, layout_of_tile
from postlude.plan.gemm import volume_for

_SLOT = 16  # bytes


def gives_result(plan: Plan) -> bool:
    """Whether these kernels do all of a plan up to its reduction."""
    conv, own, steps = plan.chain.producer, plan.own, plan.chain.steps[plan.passes[-1].last :]
    if not isinstance(own, FewChannels) or conv is None or own.planes != 2 or len(steps) < 2:
        return False
    norm, reduce = steps[:2]
    if not isinstance(norm, Normalize) or not isinstance(reduce, Reduce) or None in (norm.weight, norm.bias):
        return False
    is_mean = (reduce.op, reduce.over, reduce.keepdim) == ("mean", "sample", False)
    if not is_mean or not conv.has_bias or conv.in_channels < 3 or conv.out_channels not in (8, 16, 24, 32):
        return False
    lanes = own.warps * 8 * conv.out_channels * 12  # bytes: their moments take the place of the tile
    return lanes <= _tile_slots(own, _geometry(plan, conv)) * _SLOT


def result_lines(plan: Plan, names: Mapping[int, str]) -> list[str]:
    """The launcher's statements; they leave `value`."""
    conv, norm, settings = plan.chain.producer, plan.chain.steps[plan.passes[-1].last], plan.own
    assert conv is not None
    assert isinstance(norm, Normalize)
    assert isinstance(settings, FewChannels)
    shape, (batch, _, *space) = _geometry(plan, conv), plan.input.shape
    size = [1] * (3 - len(space)) + space
    out = (s + 2 * p - k + 1 for s, p, k in zip(size, shape.padding, shape.kernel))
    tiles = math.prod(settings.tiles(tuple(out)))  # type: ignore[arg-type]
    blocks = min(batch * tiles, settings.programs or batch * tiles)
    assert norm.weight is not None
    assert norm.bias is not None
    gamma, beta = names[norm.weight.index], names[norm.bias.index]
    lines = [f"moments = x.new_empty(({batch}, {tiles}, {shape.cout}, 3), dtype=torch.float64)"]
    if conv.transposed:
        axes = tuple(range(2, 2 + plan.chain.dims))
        lines.append(f"weight = weight.transpose(0, 1).flip{axes}.contiguous()  # gathers now")
    shared, device = shared_bytes(plan), "x.device.index"
    return [
        *lines,
        "# The convolution, of which only the moments of tiles are kept.",
        f'kernel = compiled(SOURCE, "moments_kernel", {shared}, {device})',
        f"arguments = (x, weight, moments, {batch}, {', '.join(map(str, size))}, 0)",
        f"kernel(({blocks}, 1, 1), ({settings.warps * 32}, 1, 1), arguments, {shared})",
        "# The norm and the mean of everything, from the moments.",
        f"value = x.new_empty(({batch},))",
        f'kernel = compiled(SOURCE, "finish_kernel", {shared}, {device})',
        f"kernel(({batch}, 1, 1), (32, 1, 1), (moments, bias, {gamma}, {beta}, value, {tiles}))",
    ]


def result_source(plan: Plan) -> str:
    conv, norm = plan.chain.producer, plan.chain.steps[plan.passes[-1].last]
    assert conv is not None
    assert isinstance(plan.own, FewChannels)
    assert isinstance(norm, Normalize)
    return source(plan.own, _geometry(plan, conv), norm)


def shared_bytes(plan: Plan) -> int:
    """Of a block: a tile's input and the weight."""
    assert plan.chain.producer is not None
    assert isinstance(plan.own, FewChannels)
    shape = _geometry(plan, plan.chain.producer)
    _, steps = layout_of_tile(plan.own, shape, _SLOT)
    return (_tile_slots(plan.own, shape) + steps * shape.fragments * 32) * _SLOT


def _geometry(plan: Plan, conv: Convolution) -> Geometry:
    volume = volume_for(conv, plan.input.shape[2:], 1)
    return Geometry(conv.in_channels, conv.out_channels, volume.kernel, volume.padding, False, plan.input.dtype)


def _tile_slots(settings: FewChannels, shape: Geometry) -> int:
    plane, _ = layout_of_tile(settings, shape, _SLOT)
    return (settings.depth + shape.kernel[0] - 1) * plane


def source(settings: FewChannels, shape: Geometry, norm: Normalize) -> str:
    """CUDA C++ of both kernels: the library's text with this case's numbers."""
    text = (resources.files("postlude.kernels") / "cuda" / "few_channels_file.cu").read_text("utf-8")
    kernel, channels = shape.kernel, shape.cin
    plane, steps = layout_of_tile(settings, shape, _SLOT)
    rows = settings.height + kernel[1] - 1
    values = {
        "CIN": channels,
        "COUT": shape.cout,
        "NFRAG": shape.fragments,
        "PER_GROUP": shape.cout // (norm.groups or shape.cout),
        **dict(zip(("KD", "KH", "KW"), kernel)),
        "TAPS": kernel[0] * kernel[1] * kernel[2],
        "STEPS": steps,
        "TD": settings.depth,
        "TH": settings.height,
        "R": settings.rows,
        "WARPS": settings.warps,
        "THREADS": settings.warps * 32,
        "BLOCKS": settings.blocks,
        "IN_H": rows,
        "COLUMNS": WIDTH + kernel[2] - 1,
        "PITCH": (plane - (0 if settings.height % 2 else 64 // _SLOT)) // rows,  # as layout_of_tile has it
        "PLANE": plane,
    }
    for name, value in values.items():
        text, count = re.subn(rf"(?<=[ ,]){name} = \d+(?=[,;])", f"{name} = {value}", text)
        if count != 1:
            raise ValueError(f"the kernel sets {name} {count} times, not once")
    text = changed(text, {"+ 1e-05)": f"+ {norm.eps!r})"})
    if channels == 4:
        text = changed(text, {f"from[2 * {n}], 0.0f": f"from[2 * {n}], from[3 * {n}]" for n in ("TAPS", "volume")})
    for axis, size, pad, taps in zip("zyx", "dhw", shape.padding, kernel):
        text = changed(text, {f"out_{size} = {size} - 2": f"out_{size} = {plus(size, 2 * pad - taps + 1)}"})
        if pad:
            text = text.replace(f"{axis}0 + {axis} < {size}", f"(unsigned)({axis}0 + {axis} - {pad}) < {size}")
            text = re.sub(rf"{axis}0 \+ {axis}(?! -)\b", f"{axis}0 + {axis} - {pad}", text)
    return text


def plus(name: str, number: int) -> str:
    """`name + number` as a person writes it."""
    if number == 0:
        return name
    return f"{name} {'+' if number > 0 else '-'} {abs(number)}"
