"""What a call determines of single kernels that the facts of its launch do not prove, or would keep.

Each pattern must occur in the kernel's text: if a kernel changes and this table does not, export raises an error.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from postlude.export.device.library import from_library
from postlude.export.syntax.source import parse, text_of
from postlude.plan.program import KernelCall

# im2col along x alone: all taps of a position lie in one row of the input.
_IN_ONE_ROW = {
    " - PH + t_y  # [C_PACKED]": " - PH",
    "((y >= 0) & (y < H) & (z >= 0) & (z < D))[:, None]": "((y >= 0) & (y < H) & (z >= 0) & (z < D))",
    "row[:, None] + o_x": "row + o_x",
}


# Of kernels that loop over a chunk, tile by tile: a condition, and the sizes of chunk and tile and of the whole.
_OF_SLICES = ("o_z < end", "SLICES_PER_PROGRAM", "BLOCK_D", "D")
_IN_CHUNKS = {
    "column_sums_kernel": ("o_r < end", "ROWS_PER_PROGRAM", "BLOCK_ROWS", "ROWS"),
    "tap_sums_kernel": _OF_SLICES,
    "tap_sums_gradient_kernel": _OF_SLICES,
}


def with_special_cases(call: KernelCall) -> ast.FunctionDef:
    """The kernel of a call without conditions that hold, and with other pieces of text."""
    known = dict(call.numbers) | dict(call.constants)
    function, holding = from_library(call.kernel), _holding(call, known)
    source = text_of(function)
    if absent := [condition for condition in holding if condition not in source]:
        raise ValueError(f"the kernel says no {absent[0]!r}")
    if changes := _changes(call, known):
        function = parse(changed(source, changes))
    _Without(holding).visit(function)
    return function


def changed(source: str, changes: Mapping[str, str]) -> str:
    """A kernel's text with pieces replaced; each piece must occur exactly once."""
    for before, after in changes.items():
        if source.count(before) != 1:
            raise ValueError(f"the kernel says {before!r} {source.count(before)} times, not once")
        source = source.replace(before, after)
    return source


class _Without(ast.NodeTransformer):
    """Removes conditions that hold from conjunctions, whatever their index, and such masks from loads and stores."""

    def __init__(self, holding: set[str]) -> None:
        self.holding = holding

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.BitAnd) and _condition(node.left) in self.holding:
            return node.right
        return node.left if isinstance(node.op, ast.BitAnd) and _condition(node.right) in self.holding else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if any(word.arg == "mask" and _condition(word.value) in self.holding for word in node.keywords):
            node.keywords = [word for word in node.keywords if word.arg not in ("mask", "other")]
        return self.generic_visit(node)


def _condition(node: ast.expr) -> str:
    return ast.unparse(node.value if isinstance(node, ast.Subscript) else node)


def _fills(known: Mapping[str, int]) -> bool:
    """Whether a packed position holds channels and nothing else."""
    channels = known.get("C_IN", known.get("C", 0))
    return bool(channels * known.get("UNFOLDED_TAPS", 1) == known["C_PACKED"])


def has_all_channels(call: KernelCall) -> bool:
    """Whether no lane of a tile lies past the last channel."""
    known = dict(call.numbers) | dict(call.constants)
    if "IS_EVEN_C" in known:
        return bool(known["IS_EVEN_C"])
    if "C_PACKED" in known and not _fills(known):
        return False
    by_group = ("finish_moments_kernel", "moments_gradient_kernel")  # tiles of all channels, or of a group's
    if "BLOCK_C" in known and "C" in known and call.kernel not in by_group:
        return not known["BLOCK_C"] or bool(known["C"] % known["BLOCK_C"] == 0)  # 0: one channel's row
    return False


def _holding(call: KernelCall, known: Mapping[str, int]) -> set[str]:
    """Conditions that are true in every lane of every program, and that proved.py cannot prove or would keep: of large
    tiles, because some of their kernels then spill. Those of packing do not."""
    found = set[str]()
    if call.kernel == "pack_input_kernel":
        found |= {"o_c < C_PACKED"}  # blocks divide the packed channels; the input may have fewer
        found |= {"m_c"} if known["C"] == known["C_PACKED"] else set()
        rows = known["N"] * known["D"] * known["H"]
        if not (known["PD"] or known["PH"]) and rows == call.grid[0] == known["N"] * known["SAMPLE_ROWS"]:
            found |= {"is_row"}
        if known["PW"] == known["BLOCK_PAD"]:
            found |= {"m_zero"}
    if call.kernel in _IN_CHUNKS:
        condition, *sizes = _IN_CHUNKS[call.kernel]
        found |= {condition} if _is_even(*(known[size] for size in sizes)) else set()
    return found


def _is_even(program: int, tile: int, rows: int) -> bool:
    """Whether every tile of every program is full of rows."""
    return program % tile == 0 and rows % program == 0


def _changes(call: KernelCall, known: Mapping[str, int]) -> dict[str, str]:
    """Replacements for parts of a kernel's text."""
    changes: dict[str, str] = {}
    kernel = call.kernel
    if kernel == "unfold_input_kernel" and known["UNFOLDED_H"] == 1:
        changes |= _IN_ONE_ROW
    if kernel == "pack_weight_kernel" and call.grid[0] == known["C_OUT"]:
        changes["  # up to C_OUT rounded to BLOCK_C"] = ""
    if kernel == "convolve_kernel" and known["NEIGHBOURS"] == 1:
        changes["                        # NEIGHBOURS is 1 where KEEPS_INF.\n"] = ""
    return changes
