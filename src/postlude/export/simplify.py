"""What is always true of a kernel for one call: conditions that hold in every lane, arithmetic that changes nothing.

Each of them must be in the kernel's text; a change of the kernel that forgets this table is an error, not another file.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from postlude.export.device_text import changed
from postlude.export.source import parse, text_of
from postlude.plan.calls import KernelCall

# Without a depth there is no plane to leave out.
_FLAT = {
    """        # Taps that meet only the padding in front of or behind the volume are left out.
        z_last = tl.minimum(s0 + BM * WIDTH - 1, OD * PLANE - 1) // PLANE
        kd_first = tl.maximum(0, FIRST - z_last)
        kd_end = tl.minimum(KD, LAST_PLANE + 1 - s0 // PLANE)
""": "",
    "tl.range(kd_first * (KH * KB), kd_end * (KH * KB), num_stages=STAGES)": "tl.range(KH * KB, num_stages=STAGES)",
    "tl.range(kd_first * (KH * KB), kd_end * (KH * KB))": "tl.range(KH * KB)",
    """            i_zy = i // KB
            offset = (i_zy // KH) * PLANE + (i_zy % KH) * PITCH
""": "            offset = i // KB * PITCH\n",
    "row = row0 + (i // KB // KH) * PLANE + (i // KB % KH) * PITCH  # WIDTH is 1 where KEEPS": (
        "row = row0 + i // KB * PITCH"
    ),
}


def simplified(call: KernelCall, source: str) -> str:
    known = dict(call.numbers) | dict(call.constants)
    function = parse(changed(source, _changes(call.kernel, known)))
    holding = _holding(call, known)
    if absent := [condition for condition in holding if condition not in source]:
        raise ValueError(f"the kernel says no {absent[0]!r}")
    _Without(holding, {"m_c"} if has_all_channels(call) else set()).visit(function)
    return text_of(function)


class _Without(ast.NodeTransformer):
    """Conjunctions without the conditions that hold, through any index, and loads and stores without their masks."""

    def __init__(self, holding: set[str], masks: set[str]) -> None:
        self.holding, self.masks = holding, holding | masks

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.BitAnd) and _condition(node.left) in self.holding:
            return node.right
        return node.left if isinstance(node.op, ast.BitAnd) and _condition(node.right) in self.holding else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if any(word.arg == "mask" and _condition(word.value) in self.masks for word in node.keywords):
            node.keywords = [word for word in node.keywords if word.arg not in ("mask", "other")]
        return self.generic_visit(node)


def _condition(node: ast.expr) -> str:
    return ast.unparse(node.value if isinstance(node, ast.Subscript) else node)


def _fills(known: Mapping[str, int]) -> bool:
    """Whether a packed position holds channels and nothing else."""
    return bool(known["C"] * known.get("UNFOLDED", 1) == known["CP"])


def has_all_channels(call: KernelCall) -> bool:
    """Whether no lane of a tile lies past the last channel."""
    known = dict(call.numbers) | dict(call.constants)
    if "FULL" in known and call.kernel.startswith("convolve"):
        return bool(known["FULL"])
    if "CP" in known and not _fills(known):
        return False
    if "BLOCK_C" in known and call.kernel != "finish_moments_kernel":
        return not known["BLOCK_C"] or bool(known["C"] % known["BLOCK_C"] == 0)  # 0: one channel's row
    return False


def _holding(call: KernelCall, known: Mapping[str, int]) -> set[str]:
    """Conditions that are true of every lane of every program."""
    found = set[str]()
    if call.kernel == "pack_input_kernel":
        found |= {"o_c < CP"}  # blocks of channels divide the packed ones; the given ones may be fewer
        found |= {"m_c"} if known["C"] == known["CP"] else set()
        rows = known["N"] * known["D"] * known["H"]
        if not (known["PD"] or known["PH"]) and rows == call.grid[0] == known["N"] * known["SAMPLE_ROWS"]:
            found |= {"is_row"}
        if known["PW"] == known["PAD"]:
            found |= {"o_pad < PW", "m_zero"}
    if call.kernel in ("pack_weight_kernel", "pack_phases_kernel") and _fills(known):
        found |= {"o_c < C"}
        found |= {"i_o < COUT"} if call.grid[0] == known["COUT"] else set()
    if call.kernel == "pack_weight_kernel" and known["WIDTH"] == 1:
        found |= {"kw >= 0", "kw < KW"}
    if call.kernel == "largest_kernel" and known["BLOCK_C"] == 1:
        found |= {"o_c < C"}
    return found


def _changes(kernel: str, known: Mapping[str, int]) -> dict[str, str]:
    """Other words for parts of a kernel's text."""
    changes: dict[str, str] = {}
    if kernel == "pack_input_kernel" and not known["PW"]:
        changes["    if tl.program_id(1) == 0:\n"] = "    if False:\n"
    if kernel == "pack_weight_kernel" and known["UNFOLDED"] == 1:
        changes["tap = o // CP * UNFOLDED + o % CP % UNFOLDED"] = "tap = o // CP"
        changes["((o // (CP * SPAN)) * KW + kw) * UNFOLDED + o % CP % UNFOLDED"] = "o // (CP * SPAN) * KW + kw"
    if kernel == "pack_phases_kernel":
        changes["tap = o // CP * 1 + o % CP % 1"] = "tap = o // CP"
    if kernel == "pack_weight_kernel" and known["WIDTH"] == 1:
        changes["column = (i_o // BLOCK_O) * (WIDTH * BLOCK_O) + i_w * BLOCK_O + i_o % BLOCK_O"] = "column = i_o"
    if kernel == "largest_kernel" and known["BLOCK_C"] == 1:
        changes["blocks = tl.cdiv(C, BLOCK_C)"] = "blocks = C"
    if kernel == "convolve_kernel":
        changes["S = OD * OH * OW // ALIGN * ALIGN"] = "S = OD * OH * OW"
        changes["  # the same number, seen to be a multiple: stores are as wide as that"] = ""
        if known["KD"] == known["OD"] == 1:
            changes |= _FLAT
        if known["WIDTH"] == 1:
            reshape, scaling = "        b_v = tl.reshape(acc, [BM * WIDTH, BC])\n", "b_v = b_v * tl.load(p_unscale"
            plain = {reshape: "        b_v = acc\n"}
            changes |= {reshape: "", scaling: scaling.replace("b_v *", "acc *")} if known["SCALED"] else plain
    return changes


def simplified_helper(name: str, source: str, known: Mapping[str, object]) -> str:
    """The same for a device function, of whose parameters these are known."""
    if name == "phase_sum" and known.get("C") == known.get("BK"):
        return source.replace(" + i % KB * BK", "").replace("i % KB * BK", "0")
    return source
