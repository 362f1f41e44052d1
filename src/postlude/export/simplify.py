"""What is always true of a kernel for one call: masks that hide nothing, and arithmetic that changes nothing.

Each text must be in the kernel once; a change of the kernel that forgets this table is an error, not another file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from postlude.export.device_text import changed
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
_MASKED = re.compile(r", mask=m_c(?:, other=0(?:\.0)?)?(?=\))")


def simplified(call: KernelCall, source: str) -> str:
    known = dict(call.numbers) | dict(call.constants)
    changes: dict[str, str] = {}
    if call.kernel == "pack_input_kernel":
        changes |= _packed(call, known)
    elif call.kernel == "pack_weight_kernel":
        changes |= _weight(call, known)
    elif call.kernel == "largest_kernel":
        changes |= _largest(known)
    elif call.kernel == "convolve_kernel":
        remark = "  # the same number, seen to be a multiple: stores are as wide as that"
        changes[f"S = OD * OH * OW // ALIGN * ALIGN{remark}"] = "S = OD * OH * OW"
        if known["KD"] == known["OD"] == 1:
            changes |= _FLAT
        if known["WIDTH"] == 1 and known["SCALED"]:
            changes |= {
                "        b_v = tl.reshape(acc, [BM * WIDTH, BC])\n": "",
                "b_v = b_v * tl.load(p_unscale": "b_v = acc * tl.load(p_unscale",
            }
    elif call.kernel == "pack_phases_kernel" and known["C"] == known["CP"] and call.grid[0] == known["COUT"]:
        source = re.sub(r"\(o_c < C\) & (.+) & \(i_o < COUT\)", _only, source)
    if call.kernel.startswith("pack_") and _fills(known):
        source = source.replace("tl.load(p_largest + o_c, mask=o_c < C, other=0)", "tl.load(p_largest + o_c)")
    source = changed(source, changes)
    if has_all_channels(call):
        source = _MASKED.sub("", source)
    return source


def _only(match: re.Match[str]) -> str:
    """What is left of a conjunction, without brackets where it is one comparison."""
    return match[1][1:-1] if match[1].count("(") == 1 else match[1]


def _fills(known: Mapping[str, int]) -> bool:
    """Whether a packed position holds channels and nothing else."""
    return bool(known["C"] * known.get("UNFOLDED", 1) == known["CP"])


def has_all_channels(call: KernelCall) -> bool:
    """Whether no lane of a tile lies past the last channel."""
    known = dict(call.numbers) | dict(call.constants)
    if "FULL" in known and call.kernel.startswith("convolve"):
        return bool(known["FULL"])
    if call.kernel.startswith("row_"):
        return True
    if "CP" in known and not _fills(known):
        return False
    if "BLOCK_C" in known and call.kernel != "finish_moments_kernel":
        return bool(known["C"] % known["BLOCK_C"] == 0)
    return False


def _packed(call: KernelCall, known: Mapping[str, int]) -> dict[str, str]:
    """Blocks of channels divide the packed ones; the given ones may be fewer."""
    changes = {
        "(o_w < W)[:, None] & (o_c < CP)[None, :]": "(o_w < W)[:, None]",
        "(o_pad < PW)[:, None] & (o_c < CP)[None, :]": "(o_pad < PW)[:, None]",
    }
    if known["C"] == known["CP"]:
        changes |= {
            "m_c[:, None] & m_w[None, :]": "m_w[None, :]",
            "m_w[:, None] & m_c[None, :]": "m_w[:, None]",
        }
    if not known["PW"]:
        start = "    if tl.program_id(1) == 0:\n"
        changes[start] = "    if False:\n"
    rows = known["N"] * known["D"] * known["H"]
    if not (known["PD"] or known["PH"]) and rows == call.grid[0] == known["N"] * known["SAMPLE_ROWS"]:
        changes["is_row = (z >= 0) & (z < D) & (y >= 0) & (y < H) & (i_n < N)"] = "is_row = True"
        changes["m_w = (o_w < W) & is_row"] = "m_w = o_w < W"
    if known["PW"] == known["PAD"]:
        changes |= {
            "        m_zero = (o_pad < PW)[:, None]\n": "",
            "tl.store(p_high + out + o_zero, zeros, mask=m_zero)": "tl.store(p_high + out + o_zero, zeros)",
            "tl.store(p_low + out + o_zero, zeros, mask=m_zero)": "tl.store(p_low + out + o_zero, zeros)",
        }
    return changes


def _weight(call: KernelCall, known: Mapping[str, int]) -> dict[str, str]:
    has_all = known["C"] * known["UNFOLDED"] == known["CP"] and call.grid[0] == known["COUT"]
    changes: dict[str, str] = {}
    if known["UNFOLDED"] == 1:
        changes |= {
            "tap = o // CP * UNFOLDED + o % CP % UNFOLDED": "tap = o // CP",
            "((o // (CP * SPAN)) * KW + kw) * UNFOLDED + o % CP % UNFOLDED": "o // (CP * SPAN) * KW + kw",
        }
    if has_all:
        changes["m = (o_c < C) & (o // CP < ROWS * KW) & (i_o < COUT)"] = "m = o // CP < ROWS * KW"
        if known["WIDTH"] == 1:
            changes["m = (o_c < C) & (kw >= 0) & (kw < KW) & (o < K) & (i_o < COUT)"] = "m = o < K"
    if known["WIDTH"] == 1:
        changes["column = (i_o // BLOCK_O) * (WIDTH * BLOCK_O) + i_w * BLOCK_O + i_o % BLOCK_O"] = "column = i_o"
    return changes


def _largest(known: Mapping[str, int]) -> dict[str, str]:
    if known["BLOCK_C"] != 1:
        return {}
    return {
        "blocks = tl.cdiv(C, BLOCK_C)": "blocks = C",
        "mask=(o_s < S)[:, None] & (o_c < C)[None, :]": "mask=(o_s < S)[:, None]",
        ", mask=o_c < C, sem": ", sem",
    }


def simplified_helper(name: str, source: str, known: Mapping[str, object]) -> str:
    """The same for a device function, of whose parameters these are known."""
    if name == "phase_sum" and known.get("C") == known.get("BK"):
        return source.replace(" + i % KB * BK", "").replace("i % KB * BK", "0")
    return source
