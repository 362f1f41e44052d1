"""The launcher's text for the passes over a value in memory, and for the end of chains that need only moments."""

from __future__ import annotations

from postlude.chain import Chain, Convolution, Normalize, Reduce
from postlude.export.kernels import Kernel, cut, inlined, library, moments_helpers, moments_program, program
from postlude.export.parts import Draft, times
from postlude.export.pieces import COMBINE
from postlude.export.specialise import Inline, Name
from postlude.plan.gemm import Gemm
from postlude.plan.problem import power_of_two
from postlude.plan.types import Moments
from postlude.steps import pass_slots

_FLOAT = Name("tl.float32")
_MOMENTS_TILE = 2048  # partial moments of a tile, all channels together


def library_convolution(draft: Draft) -> None:
    """`value` and its sizes, by PyTorch's convolution without its bias, or the chain's input itself."""
    conv = draft.plan.chain.producer
    if conv is None:
        draft.add("value = x")
    else:
        draft.add("# The kernels add the bias: PyTorch would in a pass of its own." if conv.has_bias else "")
        draft.lines = [line for line in draft.lines if line.strip()]
        function, arguments = _convolution(conv, draft.plan.library_tf32)
        draft.call(function, arguments, "value = ")
    draft.add("batch, positions = value.shape[0], value[0, 0].numel()")
    draft.add("align = min(16, positions & -positions)")


def _convolution(conv: Convolution, tf32: bool | None) -> tuple[str, list[str]]:
    sizes = [f"{name}={getattr(conv, name)}" for name in ("stride", "padding", "dilation")]
    sizes = [
        text for text, usual in zip(sizes, (1, 0, 1)) if any(s != usual for s in getattr(conv, text.split("=")[0]))
    ]
    if tf32 is not None:
        name = f"torch.ops.aten.cudnn_convolution{'_transpose' * conv.transposed}"
        shapes = [conv.padding, *([conv.output_padding] if conv.transposed else []), conv.stride, conv.dilation]
        # benchmark, deterministic, allow_tf32
        return name, ["x", "weight", *map(str, shapes), str(conv.groups), "False", "False", str(tf32)]
    if conv.transposed and any(conv.output_padding):
        sizes.append(f"output_padding={conv.output_padding}")
    if conv.groups != 1:
        sizes.append(f"groups={conv.groups}")
    return f"F.{conv.name}", ["x", "weight", *sizes]


def moments_pass(draft: Draft) -> None:
    plan, item, tile = draft.plan, draft.plan.passes[0], draft.plan.tile
    assert isinstance(item.sink, Moments)
    assert tile is not None
    slots = pass_slots(plan.chain, item.last)
    before = program(plan.chain, "before", item.last, draft.names, scalar_channel=True)
    channels = plan.value.shape[1]
    constants = {
        "BEFORE": draft.use(before),
        "SQUARES": item.sink.squares,
        "BLOCK": tile.moments_block,
        "ACC": _FLOAT,
        "C": channels,
    }
    names = {f"a{number}": f"p_{draft.names[slot]}" for number, slot in enumerate(slots)}
    names["row_moments_kernel"] = "moments_kernel"
    kernel = cut(library()["row_moments_kernel"], constants, names, ("BLOCK",))
    block = draft.constant("SUMMED", tile.moments_block, "elements of a tile of the moments pass")
    tiles = draft.constant("SUMMED_TILES", tile.tiles, "that one program takes")
    draft.add(f"chunks = triton.cdiv(positions, {block} * {tiles})")
    draft.call("torch.empty", ("batch", str(channels), "chunks", "dtype=torch.float32", "device=x.device"), "means = ")
    draft.add(
        *(["squares = torch.empty_like(means)"] if item.sink.squares else []),
        "counts = torch.empty(batch, chunks, dtype=torch.float32, device=x.device)",
    )
    arguments = {
        "p_x": "value",
        "p_mean": "means",
        "p_m2": "squares",
        "p_count": "counts",
        "S": "positions",
        "CHUNKS": "chunks",
        "TILES": tiles,
        "BLOCK": block,
        "ALIGN": "align",
        **{f"p_{draft.names[slot]}": draft.names[slot] for slot in slots},
    }
    draft.launch(kernel, f"({times('batch', channels, 'chunks')},)", arguments)


def finish(draft: Draft, keeps: bool) -> str:
    """Everything up to the last fused step, into the value's own memory where it is ours and nobody wants it kept.

    Gives the result's name."""
    plan, last, tile = draft.plan, draft.plan.passes[-1].last, draft.plan.tile
    assert tile is not None
    norm = next((step for step in plan.chain.steps[:last] if isinstance(step, Normalize)), None)
    channels = plan.value.shape[1]
    groups = channels if norm is None else norm.groups or channels
    if norm is not None:
        combine(draft, norm, channels, groups)
    slots = pass_slots(plan.chain, last)
    whole = program(plan.chain, "whole", last, draft.names, scalar_channel=True)
    constants = {
        "WHOLE": whole.inline,
        "HAS_NORM": norm is not None,
        "BLOCK": tile.block,
        "ACC": _FLOAT,
        "C": channels,
        "PER_GROUP": channels // groups,
    }
    names = {f"a{number}": f"p_{draft.names[slot]}" for number, slot in enumerate(slots)}
    names["row_finish_kernel"] = "finish_kernel"
    kernel = cut(library()["row_finish_kernel"], constants, names, ("BLOCK",))
    if whole.function is not None:
        kernel = inlined(kernel, whole.function)
    block = draft.constant("BLOCK", tile.block, "elements of a tile of the last pass")
    result = "value"
    if plan.chain.producer is None or keeps:
        is_ours = plan.chain.producer is not None
        draft.add(f"result = torch.empty_like(value){' if keep else value' * is_ours}")
        result = "result"
    if not any("align = " in line for line in draft.lines):
        draft.add("align = min(16, positions & -positions)")
    draft.add(f"chunks = triton.cdiv(positions, {block})")
    arguments = {
        "p_x": "value",
        "p_y": result,
        "p_mean": "mean",
        "p_rstd": "rstd",
        "S": "positions",
        "CHUNKS": "chunks",
        "BLOCK": block,
        "ALIGN": "align",
        **{f"p_{draft.names[slot]}": draft.names[slot] for slot in slots},
    }
    draft.launch(kernel, f"({times('batch', channels, 'chunks')},)", arguments)
    return result


def combine(draft: Draft, norm: Normalize, channels: int, groups: int) -> None:
    """`mean` and `rstd` of each sample and group: by a kernel, or by PyTorch's operators after a product of two planes,
    which takes so long that theirs (0.05 ms on an H200) do not count, and fills the file."""
    own = draft.plan.own
    if isinstance(own, Gemm) and own.arithmetic.planes == 2:
        draft.helpers["group_moments"] = COMBINE
        draft.add(f"mean, rstd = group_moments(means, squares, counts, {groups}, {norm.eps!r})")
        return
    chunks, per_group = "tiles" if own is not None else "chunks", channels // groups
    block = 1024 if per_group > 1 else 256
    constants = {"GROUPS": groups, "eps": norm.eps, "BLOCK": block, "ACC": _FLOAT}
    kernel = cut(library()["combine_moments_kernel"], constants, {"combine_moments_kernel": "combine_kernel"})
    draft.call("torch.empty", ("2", times("batch", groups), "dtype=torch.float32", "device=x.device"), "mean, rstd = ")
    arguments = {
        "p_mean": "means",
        "p_m2": "squares",
        "p_count": "counts",
        "p_group_mean": "mean",
        "p_group_rstd": "rstd",
        "PARTS": times(per_group, chunks),
        "CHUNKS": chunks,
        "count": f"float({times(per_group, 'positions')})",
    }
    draft.launch(kernel, f"({times('batch', groups)},)", arguments)


def finish_moments(draft: Draft, chunks: str) -> int:
    """From partial moments to the reduction's result, `value`; the number of the step that it is."""
    plan, item = draft.plan, draft.plan.passes[-1]
    assert isinstance(item.sink, Moments)
    first, channels = item.last + 1, plan.value.shape[1]
    last, reduce = _reduction(plan.chain, first)
    slots = pass_slots(plan.chain, last, first)
    made = moments_program(plan.chain, first, last, draft.names, channels)
    block_c = max(16, power_of_two(channels))
    constants = {
        "MOMENTS": draft.use(made),
        "SQUARES": item.sink.squares,
        "OVER_SPACE": reduce.over == "space",
        "C": channels,
        "BLOCK_C": block_c,
        "BLOCK": _MOMENTS_TILE // block_c,
    }
    names = {f"a{number}": f"p_{draft.names[slot]}" for number, slot in enumerate(slots)}
    helper = cut(library()["combine_chunks"], constants, {"combine_chunks": "combine"})
    places = ("p_mean", "p_m2", "p_count", "i_n", "o_c", "CHUNKS")
    call = ", ".join(f"{{{places.index(name)}}}" for name in helper.parameters)
    draft.kernels = [*moments_helpers(plan.chain, first, last, channels), *draft.kernels, helper]
    constants["combine_chunks"] = Inline(f"combine({call})")
    source = library()["finish_moments_kernel"].replace(".to(p_out.dtype.element_ty)", "")
    kernel = cut(source.replace(", read where SQUARES", ""), constants, names)
    read = made.inline.text if made.function is None else "".join(f"{{{name}}}" for name in made.function.parameters)
    words = (("count", "{2}"), ("var", "{1}"))  # by name in a function, by place in an expression
    count, var = (word if f"{{{word}}}" in read or place in read else "_" for word, place in words)
    text = kernel.text.replace("count, mean, var = ", f"{count}, mean, {var} = ")
    kernel = Kernel(kernel.name, text, kernel.parameters)
    shape = f"batch, {channels}" if reduce.over == "space" else "batch"
    if reduce.keepdim:
        shape += ", 1" * (plan.chain.dims + (reduce.over != "space"))
    draft.add(f"value = torch.empty({shape}, dtype=x.dtype, device=x.device)")
    arguments = {
        "p_mean": "means",
        "p_m2": "squares",
        "p_count": "counts",
        "p_out": "value",
        "CHUNKS": chunks,
        **{f"p_{draft.names[slot]}": draft.names[slot] for slot in slots},
    }
    draft.launch(kernel, "(batch,)", arguments, 8)
    return last


def _reduction(chain: Chain, first: int) -> tuple[int, Reduce]:
    steps = enumerate(chain.steps[first - 1 :], first)
    return next((number, step) for number, step in steps if isinstance(step, Reduce))
