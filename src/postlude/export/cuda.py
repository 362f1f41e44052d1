"""CUDA C++ cut down to one launch: includes put in, conditions of the preprocessor decided, sizes as constants."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from importlib import resources

from postlude.plan.calls import CudaCall

_WIDTH = 116
_MACROS = (
    "#define DEVICE __device__ __forceinline__",
    '#define UNROLL _Pragma("unroll")',
    '#define ROLLED _Pragma("unroll 1")',
)
COMPILE = '''\
@functools.cache
def compiled(source: str, name: str, shared_bytes: int, device: int) -> Any:
    """CUDA C++, compiled once for each card by the NVRTC that torch brings along. What
    comes back launches it; torch's own way of launching takes some 40 µs."""
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, name)
        kernel.set_shared_memory_config(shared_bytes)
    start = ctypes.CDLL("libcuda.so.1").cuLaunchKernel

    def launch(grid: Any, block: Any, arguments: Any, shared: int = 0) -> None:
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        count, values = len(numbers), (ctypes.c_int64 * len(numbers))(*numbers)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = start(kernel.func, *grid, *block, shared, stream, places, None)
        if code != 0:
            raise RuntimeError(f"CUDA refused to launch {name}: error {code}")

    return launch
'''


def cuda_text(call: CudaCall) -> str:
    """The source of a kernel of kernels/cuda for one launch, which gives it pointers and nothing else."""
    macros = dict(call.macros)
    text = _preprocessed(_included(call.source), macros)
    text = _with_numbers(text, call)
    text = _without_unused(_decided(text, macros))
    return re.sub(r"\n{3,}", "\n\n", _rewrapped(_compact(text))).strip("\n") + "\n"


def launch_lines(call: CudaCall, source: str, words: list[str], first: str) -> list[str]:
    """The statements of a launcher: `words` are the tensors that are no null pointers, `first` is one on the card."""
    block, shared = (call.threads, 1, 1), call.shared_bytes
    return [
        f'kernel = compiled({source}, "{call.kernel}", {shared}, {first}.device.index)',
        f"kernel({(*call.grid, 1)}, {block}, ({', '.join(words)}, 0), {shared})",
    ]


def _with_numbers(text: str, call: CudaCall) -> str:
    """The integers of the kernel's signature as constants; what it must not know to be 0 stays an argument."""
    start = text.index(f"{call.kernel}(")
    open_, close = text.index("(", start), text.index("\n{\n", start)
    names = re.findall(r"(?:int|long long|u32) (\w+)(?=[,)])", re.sub(r"//.*", "", text[open_:close]))
    values = dict(zip(names, call.numbers, strict=True))
    pointers = re.findall(r"(?m)^ +(?:const )?\w+\* __restrict__ p_\w+,.*$", text[open_:close])
    nulls = [line for line, argument in zip(pointers, call.arguments, strict=True) if argument is None]
    kept = [line for line in pointers if line not in nulls]
    body = text[close + 3 :]
    constants = [("long long" if "stride_n" in name else "int", name, value) for name, value in values.items()]
    used = [item for item in constants if item[1] != "zero" and re.search(rf"\b{item[1]}\b", body)]
    lines = _constants(used)
    for line in nulls:
        kind, name = re.findall(r"((?:const )?\w+\*) __restrict__ (\w+),", line)[0]
        lines.append(f"    constexpr {kind} {name} = nullptr;")
    signature = "(\n" + "\n".join(kept) + "\n    u32 zero)  // 0, which the compiler cannot know"
    return text[:open_] + signature + "\n{\n" + "\n".join(lines) + "\n" + body


def _constants(items: list[tuple[str, str, int]]) -> list[str]:
    """Constants of one type side by side, as far as a line goes."""
    lines: list[str] = []
    for kind, name, value in items:
        joined = f"{lines[-1][:-1]}, {name} = {value};" if lines else ""
        if lines and lines[-1].startswith(f"    constexpr {kind} ") and len(joined) <= _WIDTH:
            lines[-1] = joined
        else:
            lines.append(f"    constexpr {kind} {name} = {value};")
    return lines


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


def _decided(text: str, values: Mapping[str, int]) -> str:
    text = re.sub(r"static_assert\(.*?\);\n", "", text, flags=re.DOTALL)
    text = re.sub(r"constexpr int WORDS = .*\n", "", text)
    text = re.sub(r"(?<=; )1 && ", "", text)  # where planes are scaled
    text = text.replace(
        "exponent = 1 ? exponent_of(warp_max(largest)) : 14;", "exponent = exponent_of(warp_max(largest));"
    )
    for name in ("PD", "PH", "PW"):
        if values[name] == 0:
            text = re.sub(rf" - {name}\b", "", text)
    used = [name for name in values if re.search(rf"\b{name}\b", re.sub(r"//.*", "", text))]
    lines = [f"constexpr int {', '.join(f'{name} = {values[name]}' for name in row)};" for row in _rows(used)]
    start = text.index("typedef unsigned int u32;")
    head = re.sub(r"//\n// Compile-time: (?:.*\n//)*.*\n", "", text[:start])
    return head + "\n".join([*_MACROS, *lines]) + "\n" + text[start:]


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
    groups = (("CIN", "COUT", "NFRAG"), ("KD", "KH", "KW", "PD", "PH", "PW", "FLIP"), ("PLANES", "TD", "TH", "R"),
              ("WARPS", "BLOCKS", "SPLITS", "PROMOTE", "WEIGHT", "INPUT"))  # fmt: skip
    rows = [[name for name in group if name in names] for group in groups]
    return [row for row in rows if row]


def _without_unused(text: str) -> str:
    """Functions that nobody calls any more go, with the comments above them."""
    body = r"(?:\s*\{.*\}\n\n?|\n\{\n(?:.*\n)*?\}\n\n?)"
    pattern = rf"(?:^//.*\n)*(?:^template <.*\n)?^__device__ __forceinline__ [\w ]+ (\w+)\((?:[^{{]|\n)*?\){body}"
    while True:
        code = re.sub(r"//.*", "", text)
        unused = [m for m in re.finditer(pattern, text, re.MULTILINE) if len(re.findall(rf"\b{m[1]}\b", code)) == 1]
        if not unused:
            return text
        text = text[: unused[0].start()] + text[unused[0].end() :]
