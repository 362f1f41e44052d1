"""CUDA C++ cut down to one case: includes put in, conditions of the preprocessor decided, unused functions left out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from importlib import resources

from postlude.export.kernels import changed
from postlude.plan.few_channels import FewChannels, Geometry

# Input and weight come contiguous, so that their strides follow from their sizes, and offsets of samples fit: torch's
# launcher passes integers of 32 bits alone.
_CONTIGUOUS = {
    "    long long stride_n, int stride_c, int stride_d, int stride_h, int stride_w,\n    int d, int h, int w,\n": (
        "    int d, int h, int w,\n"
    ),
    "    int w_stride_o, int w_stride_c, int w_stride_d, int w_stride_h, int w_stride_w,\n": "",
    "Volume in = {d, h, w, stride_c, stride_d, stride_h, stride_w};": "Volume in = {d, h, w, d * h * w, h * w, w, 1};",
    "p_x + i_n * stride_n": "p_x + (long long)i_n * CIN * d * h * w",
    "    Weight weight = {w_stride_o, w_stride_c, w_stride_d, w_stride_h, w_stride_w};\n": "",
    "p_w, p_bias, weight, c0, fragments": "p_w, p_bias, c0, fragments",
    "const Weight& w, int c0,\n": "int c0,\n",
}


def cuda_text(settings: FewChannels, shape: Geometry, has_bias: bool, shared: int) -> str:
    """The source of the direct convolution for one case."""
    values = _values(settings, shape)
    text = _included("few_channels.cu")
    text = _preprocessed(text, {**values, "SHARED_BYTES": shared})
    text = _contiguous(text)
    text = _with_types(text, shape)
    if not has_bias:
        text = _without_bias(text)
    text = _without_unused(_decided(text, values))
    return re.sub(r"\n{3,}", "\n\n", _rewrapped(_compact(text))).strip("\n") + "\n"


def _values(settings: FewChannels, shape: Geometry) -> dict[str, int]:
    return {
        "CIN": shape.cin,
        "COUT": shape.cout,
        "NFRAG": shape.fragments,
        **dict(zip(("KD", "KH", "KW"), shape.kernel)),
        **dict(zip(("PD", "PH", "PW"), shape.padding)),
        "FLIP": 0,
        "INPUT_BITS": 32 if shape.dtype == "float32" else 16,
        "BFLOAT": int(settings.operand == "bfloat16"),
        "PLANES": settings.planes,
        "TD": settings.depth,
        "TH": settings.height,
        "R": settings.rows,
        "WARPS": settings.warps,
        "BLOCKS": settings.blocks,
    }


def _included(name: str) -> str:
    text = (resources.files("postlude.kernels") / "cuda" / name).read_text("utf-8")
    if name.endswith(".cuh"):
        text = re.sub(r"\A(?://.*\n)+\n?", "", text)  # what the file is and needs
    return re.sub(r'#include "(.+)"\n', lambda m: _included(m[1]), text)


def _preprocessed(text: str, macros: Mapping[str, int]) -> str:
    """#if and its like decided by `macros`; what is defined on the way joins them."""
    known = dict(macros)
    kept: list[str] = []
    stack: list[tuple[bool, bool]] = []  # of each open #if: is this branch taken, was one taken before
    for line in text.split("\n"):
        word, _, rest = line.strip().partition(" ")
        is_on = all(taken for taken, _ in stack)
        if word in ("#if", "#ifndef"):
            truth = rest.strip() not in known if word == "#ifndef" else bool(_value(rest, known))
            stack.append((truth, truth))
        elif word == "#elif":
            _, before = stack.pop()
            truth = not before and bool(_value(rest, known))
            stack.append((truth, before or truth))
        elif word == "#else":
            _, before = stack.pop()
            stack.append((not before, True))
        elif word == "#endif":
            stack.pop()
        elif word == "#define" and is_on:
            name, _, expression = rest.partition(" ")
            known[name] = int(_value(expression, known))
        elif is_on:
            kept.append(line)
    scaled = known["SCALED"]
    return re.sub(r"\bSCALED\b", str(scaled), "\n".join(kept))


def _value(expression: str, known: Mapping[str, int]) -> int:
    words = re.sub(r"\b[A-Z_]+\b", lambda m: str(known[m[0]]), expression.split("//")[0])
    python = words.replace("&&", " and ").replace("||", " or ").replace("!", " not ").replace(" not =", "!=")
    return int(eval(python, {"__builtins__": {}}))


def _contiguous(text: str) -> str:
    text = changed(text, _CONTIGUOUS)
    text = re.sub(r"struct Weight \{.*?\n\};\n\n", "", text, flags=re.DOTALL)
    text = re.sub(r"__device__ __forceinline__ int tap_offset\(.*?\n\}\n\n", "", text, flags=re.DOTALL)
    text = text.replace(" through its strides", "")
    return changed(
        text,
        {
            "            int at = tap_offset(w, tap / (KH * KW), tap / KW % KH, tap % KW);\n": "",
            "p_w[(c0 + c) * w.stride_o + i % CIN * w.stride_c + at]": "p_w[((c0 + c) * CIN + i % CIN) * TAPS + tap]",
            "                int at = tap_offset(w, chunk / (KH * CW), chunk / CW % KH, kw);\n": (
                "                int tap = chunk / CW * KW + kw;\n"
            ),
            "p_w[(c0 + c) * w.stride_o + s % CIN * w.stride_c + at]": "p_w[((c0 + c) * CIN + s % CIN) * TAPS + tap]",
        },
    )


def _with_types(text: str, shape: Geometry) -> str:
    """The input's type by its own name, and no conversion where it is float."""
    text = re.sub(r"typedef (\w+) input_t;\n\n?", "", text)
    kind = "float" if shape.dtype == "float32" else "u16"
    text = re.sub(r"\binput_t\b", kind, text)
    if kind == "float":
        text = re.sub(r"as_float\((p_\w+\[(?:[^\[\]])+\])\)", r"\1", text)
        text = re.sub(r"__device__ __forceinline__ float as_float\(.*\n", "", text)
        text = re.sub(r"__device__ __forceinline__ slot_t make_slot\(const u16.*?\n\}\n", "", text, flags=re.DOTALL)
    else:
        text = re.sub(r"__device__ __forceinline__ slot_t make_slot\(const float.*?\n\}\n\n", "", text, flags=re.DOTALL)
        text = re.sub(r"__device__ __forceinline__ float as_float\(float.*?\n", "", text)
    return text


def _without_bias(text: str) -> str:
    text = re.sub(r"    const \w+\* __restrict__ p_bias,.*\n", "", text)
    text = text.replace("real && p_bias != nullptr ? p_bias[c0 + c] : 0.0f", "0.0f").replace("p_w, p_bias, ", "p_w, ")
    return re.sub(r"const \w+\* p_bias, ", "", text)


def _decided(text: str, values: Mapping[str, int]) -> str:
    text = text.replace("real && p_bias != nullptr ?", "real ?")
    text = re.sub(r"static_assert\(.*?\);\n", "", text, flags=re.DOTALL)
    text = re.sub(r"constexpr int WORDS = .*\n", "", text)
    text = re.sub(r"\b1 && ", "", text).replace("int exponent = 1 ? exponent_of(warp_max(largest)) : 14;",
                                                "int exponent = exponent_of(warp_max(largest));")  # fmt: skip
    for name in ("PD", "PH", "PW"):
        if values[name] == 0:
            text = re.sub(rf" - {name}\b", "", text)
    if 4 // values["CIN"] == 1:
        text = _one_position(text)
    used = [name for name in values if re.search(rf"\b{name}\b", re.sub(r"//.*", "", text))]
    lines = [f"constexpr int {', '.join(f'{name} = {values[name]}' for name in row)};" for row in _rows(used)]
    text = text.replace("CIN * KD * KH * KW", "CIN * TAPS")
    start = text.index("typedef unsigned int u32;")
    head = re.sub(r"//\n// Compile-time: (?:.*\n//)*.*\n", "", text[:start])
    taps = "constexpr int TAPS = KD * KH * KW;\n"
    return head + "\n".join([*_MACROS, *lines]) + "\n" + taps + text[start:]


_SLOT_OF_MORE = (
    r"its channels, and, where there are fewer than 3, those of its right neighbours \(XS positions in all\)\.\n"
    r"// Such a slot serves the XS taps next to one another in x, so the taps of the kernel are TAPS slots, each "
    r"with its\n// own"
)


def _one_position(text: str) -> str:
    """With 3 or 4 channels a slot holds one position: what counts positions of a slot goes."""
    for before, after in (
        ("constexpr int XS = 4 / CIN;\n", ""),
        (r"constexpr int CW = .*\n", ""),
        (r"constexpr int CHUNKS = KD \* KH \* CW;\n", ""),
        (r" \* XS\b", ""),
        (r" \+ s / CIN \* in\.stride_w", ""),
        (r"\(u32\)\(x \+ s / CIN\)", "(u32)x"),
        (r"            int kw = chunk % CW \+ s / CIN;\n", ""),
        (r"chunk < CHUNKS && kw < KW && s < CIN", "chunk < TAPS && s < CIN"),
        (r"                int tap = chunk / CW \* KW \+ kw;\n", ""),
        (r"s % CIN\) \* TAPS \+ tap", "s) * TAPS + chunk"),
        (r"offset \+ s % CIN \* in", "offset + s * in"),
        (r"\bCW\b", "KW"),
        (r"\bCHUNKS\b", "TAPS"),
        (_SLOT_OF_MORE, "its channels. The taps of the kernel are TAPS slots, each with its own"),
    ):
        text = re.sub(before, after, text)
    return text


_WIDTH = 116
_MACROS = (
    "#define DEVICE __device__ __forceinline__",
    '#define UNROLL _Pragma("unroll")',
    '#define ROLLED _Pragma("unroll 1")',
)


def _compact(text: str) -> str:
    """Pragmas on the line of their loop, and signatures on one line with their brace where that has room."""
    text = re.sub(r"(?m)^(?!#)__device__ __forceinline__", "DEVICE", text)
    text = re.sub(r"(?m)^#pragma unroll(| 1)(?:  (//.*))?\n( +)for (.*)$", _loop, text)
    return re.sub(r"(?m)^(DEVICE [^{;]*?\))\n\{", lambda m: _signature(m[1]), text)


def _rewrapped(text: str) -> str:
    """The comment at the top, its paragraphs wrapped anew: words have gone from it."""
    top, rest = text.split("\n\n", 1)
    paragraphs = re.split(r"\n//\n", top)
    words = [" ".join(line.removeprefix("//").strip() for line in part.split("\n")) for part in paragraphs]
    wrapped = [textwrap.wrap(part, _WIDTH, initial_indent="// ", subsequent_indent="// ") for part in words]
    return "\n//\n".join("\n".join(part) for part in wrapped) + "\n\n" + rest


def _loop(match: re.Match[str]) -> str:
    word = "ROLLED" if match[1] else "UNROLL"
    remark = f"  {match[2]}" if match[2] else ""
    return f"{match[3]}{word} for {match[4]}{remark}"


def _signature(text: str) -> str:
    words = re.sub(r"\s*\n\s*", " ", text)
    return f"{words if len(words) <= _WIDTH else text} {{"


def _rows(names: list[str]) -> list[list[str]]:
    """Channels, taps, then tiles, a line each."""
    groups = (("CIN", "COUT", "NFRAG"), ("KD", "KH", "KW", "PD", "PH", "PW"), ("PLANES", "TD", "TH", "R"),
              ("WARPS", "BLOCKS"))  # fmt: skip
    rows = [[name for name in group if name in names] for group in groups]
    return [row for row in rows if row]


def _without_unused(text: str) -> str:
    """Functions that nobody calls any more go, with the comments above them."""
    body = r"(?:\s*\{.*\}\n\n?|\n\{\n(?:.*\n)*?\}\n\n?)"
    pattern = rf"(?:^//.*\n)*^__device__ __forceinline__ [\w ]+ (\w+)\((?:[^{{]|\n)*?\){body}"
    while True:
        unused = [m for m in re.finditer(pattern, text, re.MULTILINE) if len(re.findall(rf"\b{m[1]}\(", text)) == 1]
        if not unused:
            return text
        text = text[: unused[0].start()] + text[unused[0].end() :]
