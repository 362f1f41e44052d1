"""CUDA C++ specialised to one launch: includes inlined, preprocessor conditions resolved, sizes as constants."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from importlib import resources

from postlude.plan.program import CudaCall

_WIDTH = 116
_UNROLL = '#define UNROLL _Pragma("unroll")'
# Constants that share a line; the strides of a tensor get a line of their own.
_ROWS = {
    "kernel": "C_IN C_OUT NFRAG C_PER_GROUP TILES KD KH KW PD PH PW",
    "tensor": "D H W X_N X_C X_D X_H X_W",
    "tile": "BLOCK_D BLOCK_H ROWS_PER_WARP WARPS BLOCKS_PER_SM PLANES HAS_DW HAS_DX",
    "tiles": "TILES_D TILES_H TILES_W TILE_SLOTS",
}
COMPILE = '''\
@functools.cache
def compiled(source: str, name: str, shared_bytes: int, device: int) -> Any:
    """What launches CUDA C++, which the NVRTC that torch brings along compiles once for each card. torch's own way of
    launching takes some 40 µs."""
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, name)
        kernel.set_shared_memory_config(max(shared_bytes, 48 << 10))  # beside its own
    start = ctypes.CDLL("libcuda.so.1").cuLaunchKernel

    def launch(grid: Any, block: Any, arguments: Any, shared: int = 0) -> None:
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        count, values = len(numbers), (ctypes.c_int64 * len(numbers))(*numbers)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = start(kernel.func, *grid, *block, shared, stream, places, None)
        if code == 201:  # no context yet in this thread; an event binds torch's
            torch.cuda.Event().record()
            code = start(kernel.func, *grid, *block, shared, stream, places, None)
        if code != 0:
            raise RuntimeError(f"CUDA refused to launch {name}: error {code}")

    return launch
'''


def cuda_text(call: CudaCall, before: str = "") -> str:
    """The source of a kernel of kernels/cuda for one launch, with macros as constants. `before` is the text before it,
    whose definitions it may use."""
    macros = dict(call.macros)
    text = _with_constants(_preprocessed(_included(call.source), macros), macros, before)
    text = re.sub(r"\n{3,}", "\n\n", _rewrapped(_compact(_plain_types(_without_unused(text)), before)))
    return text.strip("\n") + "\n"


def launch_lines(call: CudaCall, source: str, words: list[str], first: str) -> list[str]:
    """The statements of a launcher: `words` are the tensors, `first` is one on the card."""
    block, shared = (call.threads, 1, 1), [str(call.shared_bytes)] if call.shared_bytes else []
    arguments = f"({', '.join([*words, *map(str, call.numbers)])})"
    return [
        f'kernel = compiled({source}, "{call.kernel}", {call.shared_bytes}, {first}.device.index)',
        f"kernel({', '.join([str((*call.grid, 1)), str(block), arguments, *shared])})",
    ]


def _included(name: str) -> str:
    text = (resources.files("postlude.kernels") / "cuda" / name).read_text("utf-8")
    if name.endswith(".cuh"):
        text = re.sub(r"\A(?://.*\n)+\n?", "", text)  # what the file is and needs
    return re.sub(r'#include "(.+)"\n', lambda m: _included(m[1]) + "\n", text)


def _preprocessed(text: str, macros: Mapping[str, float]) -> str:
    """The text with #if and the like resolved by `macros`; a #define adds to them."""
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
    return "\n".join(kept)


def _value(expression: str, known: Mapping[str, float]) -> int:
    words = re.sub(r"\b[A-Z_]+\b", lambda m: str(known[m[0]]), expression.split("//")[0])
    python = words.replace("&&", " and ").replace("||", " or ").replace("!", " not ").replace(" not =", "!=")
    return int(eval(python, {"__builtins__": {}}))


def _with_constants(text: str, values: Mapping[str, float], before: str) -> str:
    """The text with the macros that it reads as constants below its top comment; terms for zero padding are removed."""
    text = re.sub(r"static_assert\(.*?\);\n", "", text, flags=re.DOTALL)
    for name in ("PD", "PH", "PW"):
        if values.get(name) == 0:
            text = re.sub(rf" \+ 2 \* {name}\b| - {name}\b", "", text)
    code = re.sub(r"//.*", "", text)
    used = [name for name in values if re.search(rf"\b{name}\b", code) and not re.search(rf"\b{name} = ", before)]
    lines = [f"constexpr {kind} {', '.join(f'{name} = {values[name]}' for name in row)};" for kind, row in _rows(used)]
    top, rest = re.sub(r"//\n// Compile-time: (?:.*\n//)*.*\n", "", text).split("\n\n", 1)
    return "\n".join([top, "", *lines, rest])


def _plain_types(text: str) -> str:
    """The text with typedefs replaced by their types, and without conversions from float to float."""
    for name, word in re.findall(r"(?m)^typedef (\w+) (\w+_t);", text):
        text = re.sub(rf"\b{word}\b", name, text.replace(f"typedef {name} {word};\n", ""))
    if "as_float(u16" not in text:
        text = re.sub(r"__device__ .* as_float\(.*\n+", "", text)
        text = re.sub(r"\bas_float\((p_\w+\[.*?\])\)", r"\1", text).replace("(float)0", "0.0f")
    return text


def _compact(text: str, before: str) -> str:
    """The text with pragmas on the line of their loop, and signatures on one line with their brace if they fit."""
    text = text.replace("__device__ __forceinline__", "__device__")
    text = re.sub(r"(?m)^#pragma (unroll.*?)(?:  (//.*))?\n( +)for (.*)$", _loop, text)
    text = re.sub(r"(?m)^(__device__ [^{;]*?\))\n\{", lambda m: _signature(m[1]), text)
    text = re.sub(r"(?m)^(__device__ .*) \{\n    (return .*;)\n\}$", _one_line, text)
    return text if _UNROLL in before else text.replace("\n\n", f"\n\n{_UNROLL}\n", 1)


def _rewrapped(text: str) -> str:
    """The text with the paragraphs of its top comment rewrapped, because words were removed from them."""
    top, rest = text.split("\n\n", 1)
    paragraphs = re.split(r"\n//\n", top)
    words = [" ".join(line.removeprefix("//").strip() for line in part.split("\n")) for part in paragraphs]
    wrapped = [textwrap.wrap(part, _WIDTH, initial_indent="// ", subsequent_indent="// ") for part in words]
    return "\n//\n".join("\n".join(part) for part in wrapped) + "\n\n" + rest


def _loop(match: re.Match[str]) -> str:
    word = "UNROLL" if match[1] == "unroll" else f'_Pragma("{match[1]}")'
    remark = f"  {match[2]}" if match[2] else ""
    return f"{match[3]}{word} for {match[4]}{remark}"


def _signature(text: str) -> str:
    words = re.sub(r"\s*\n\s*", " ", text)
    return f"{words if len(words) <= _WIDTH else text} {{"


def _one_line(match: re.Match[str]) -> str:
    line = f"{match[1]} {{ {match[2]} }}"
    return line if len(line) <= _WIDTH else match[0]


def _rows(names: list[str]) -> list[tuple[str, list[str]]]:
    """The constants by line: kernel, tensors, tiles."""
    rows: dict[str, list[str]] = {}
    for name in names:
        kind = next((key for key, members in _ROWS.items() if name in members.split()), name.rpartition("_")[0])
        rows.setdefault(kind, []).append(name)
    return [("double" if row == ["EPS"] else "int", row) for row in rows.values()]


def _without_unused(text: str) -> str:
    """The text without functions that are no longer called, and without the comments above them."""
    body = r"(?:\s*\{.*\}\n\n?|\n\{\n(?:.*\n)*?\}\n\n?)"
    pattern = rf"(?:^//.*\n)*(?:^template <.*\n)?^__device__ __forceinline__ [\w ]+ (\w+)\((?:[^{{]|\n)*?\){body}"
    while True:
        code = re.sub(r"//.*", "", text)
        unused = [m for m in re.finditer(pattern, text, re.MULTILINE) if len(re.findall(rf"\b{m[1]}\b", code)) == 1]
        if not unused:
            return text
        text = text[: unused[0].start()] + text[unused[0].end() :]
