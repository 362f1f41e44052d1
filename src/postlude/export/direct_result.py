"""The convolution of few channels, its norm and the mean of everything as two kernels of CUDA C++ in as few lines as
they take: fp32 in two planes, for a norm and a mean over all but the batch. `direct.py` writes everything else."""

from __future__ import annotations

import re
from importlib import resources

from postlude.chain import Convolution, Normalize, Reduce
from postlude.export.kernels import changed
from postlude.export.parts import Draft, launcher_sizes, plus
from postlude.plan import Plan
from postlude.plan.few_channels import WIDTH, FewChannels, Geometry, layout_of_tile
from postlude.plan.gemm import volume_for

_SLOT = 16  # bytes
_COMPILE = '''\
@functools.cache
def compiled(name: str, device: int) -> Any:
    """CUDA C++, compiled once for each card by the NVRTC that torch brings along."""
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(SOURCE, name)
        kernel.set_shared_memory_config(SHARED_BYTES)
    return kernel
'''


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


def direct_result(draft: Draft, settings: FewChannels) -> int:
    """Leaves `value`; the number of the reduction's step."""
    plan, conv = draft.plan, draft.plan.chain.producer
    assert conv is not None
    last = plan.passes[-1].last
    norm = plan.chain.steps[last]
    assert isinstance(norm, Normalize)
    shape = _geometry(plan, conv)
    _, steps = layout_of_tile(settings, shape, _SLOT)
    shared = (_tile_slots(settings, shape) + steps * shape.fragments * 32) * _SLOT
    draft.cuda = f'SOURCE = r"""\n{source(settings, shape, norm)}"""\n\n'
    draft.helpers["compiled"] = _COMPILE
    draft.imports |= {"CUDA_HOME"}
    draft.constant("SHARED_BYTES", shared, "of a block: a tile's input and the weight")
    draft.shared_bytes = shared
    _launch(draft, settings, shape, conv, norm)
    return last + 2


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


def _launch(draft: Draft, settings: FewChannels, shape: Geometry, conv: Convolution, norm: Normalize) -> None:
    sizes = launcher_sizes(draft)
    outs = [plus(size, 2 * p - k + 1) for size, p, k in zip(sizes, shape.padding, shape.kernel)]
    counts = [f"-(-({size}) // {part})" for size, part in zip(outs, (settings.depth, settings.height, WIDTH))]
    draft.add(f"tiles = {' * '.join(count for size, count in zip(sizes, counts) if size != '1')}")
    draft.add(f"moments = torch.empty(batch, tiles, {shape.cout}, 3, dtype=torch.float64, device=x.device)")
    draft.add("value = torch.empty(batch, dtype=x.dtype, device=x.device)")
    if conv.transposed:
        axes = tuple(range(2, 2 + draft.plan.chain.dims))
        draft.add(f"weight = weight.transpose(0, 1).flip{axes}.contiguous()  # gathers now")
    draft.add("card = torch.cuda.get_device_properties(x.device)")
    draft.add(f"blocks = min(batch * tiles, {settings.blocks} * card.multi_processor_count)")
    draft.add(f"arguments = (x, weight, moments, batch, {', '.join(sizes)}, 0)")
    draft.add('kernel = compiled("moments_kernel", x.device.index)')
    draft.add(f"kernel((blocks, 1, 1), ({settings.warps * 32}, 1, 1), arguments, SHARED_BYTES)")
    assert norm.weight is not None
    assert norm.bias is not None
    gamma, beta = draft.names[norm.weight.index], draft.names[norm.bias.index]
    draft.add('kernel = compiled("finish_kernel", x.device.index)')
    draft.add(f"kernel((batch, 1, 1), (32, 1, 1), (moments, bias, {gamma}, {beta}, value, tiles))")
    draft.launches += 2
