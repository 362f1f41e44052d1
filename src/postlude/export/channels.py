"""The launcher's text for a last pass that ends in a reduction over channels."""

from __future__ import annotations

import math
from collections.abc import Mapping

from postlude.chain import Normalize
from postlude.export.kernels import Kernel, changed, cut, inlined, library, program
from postlude.export.parts import Draft
from postlude.export.passes import combine
from postlude.export.specialise import Inline, Name
from postlude.plan.channels import CHANNELS_WARPS, channels_kind, channels_tile
from postlude.steps import pass_slots

# Masks that are true everywhere: the channels fill their lanes.
_ALL_CHANNELS = {
    " & m_c[None, :]": "",
    "tl.load(p_mean + o_g, mask=m_c, other=0.0)": "tl.load(p_mean + o_g)",
    "tl.load(p_rstd + o_g, mask=m_c, other=0.0)": "tl.load(p_rstd + o_g)",
    '    b_x = tl.where(m_c[None, :], b_x, float("-inf"))\n': "",
}


def finish_channels(draft: Draft) -> str:
    """Everything up to the reduction, and the reduction; gives the result's name."""
    plan, end = draft.plan, draft.plan.channels_end
    assert end is not None
    before, channels = plan.passes[-1].last - 1, plan.value.shape[1]
    norm = next((step for step in plan.chain.steps[:before] if isinstance(step, Normalize)), None)
    groups = channels if norm is None else norm.groups or channels
    if norm is not None:
        combine(draft, norm, channels, groups)
    slots = pass_slots(plan.chain, before)
    sizes = {"HAS_NORM": norm is not None, "C": channels, "PER_GROUP": channels // groups}
    block, block_c = channels_tile(channels, math.prod(plan.value.shape[2:]))
    constants = {**sizes, "OP": channels_kind(end), "BLOCK": block, "BLOCK_C": block_c}
    kernel = _kernel(draft, before, slots, constants)
    name = draft.constant("BLOCK", block, "positions of a tile of the last pass")
    shape = f"batch, {'1, ' * end.keepdim}*value.shape[2:]"
    draft.add(f"result = torch.empty({shape}, dtype=x.dtype, device=x.device)")
    if not any("align = " in line for line in draft.lines):
        draft.add("align = min(16, positions & -positions)")
    draft.add(f"chunks = triton.cdiv(positions, {name})")
    arguments = {
        "p_x": "value",
        "p_y": "result",
        "p_mean": "mean",
        "p_rstd": "rstd",
        "S": "positions",
        "CHUNKS": "chunks",
        "BLOCK": name,
        "ALIGN": "align",
        **{f"p_{draft.names[slot]}": draft.names[slot] for slot in slots},
    }
    draft.launch(kernel, "(batch * chunks,)", arguments, CHANNELS_WARPS)
    return "result"


def _kernel(draft: Draft, before: int, slots: tuple[int, ...], constants: Mapping[str, object]) -> Kernel:
    """The pass for this case, steps 1 to `before` in it."""
    chain, is_full = draft.plan.chain, constants["BLOCK_C"] == constants["C"]
    whole = program(chain, "whole", before, draft.names, scalar_channel=is_full, spread="[None, :]")
    given = {
        **constants,
        "WHOLE": whole.inline,
        "LAST": False,
        "WIDE": False,
        "places": Inline("{1}[None, :] * {3} + {0}[:, None]"),
        "ACC": Name("tl.float32"),
    }
    names = {f"a{number}": f"p_{draft.names[slot]}" for number, slot in enumerate(slots)}
    names["channels_kernel"] = "finish_kernel"
    source = library()["channels_kernel"]
    kernel = cut(changed(source, _ALL_CHANNELS) if is_full else source, given, names, ("BLOCK",))
    return kernel if whole.function is None else inlined(kernel, whole.function)
