"""The whole file: docstring, imports, kernels, launchers, the check whether tensors fit, and the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from postlude.export.autograd import class_name
from postlude.export.chain_text import ChainText
from postlude.export.device_text import Kernel
from postlude.export.fits import fits_text, shapes_text
from postlude.export.layout import fold
from postlude.export.original import Original, model_text

_WORDS = {
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "triton": "import triton",
    "tl": "import triton.language as tl",
    "math": "import math",
    "functools": "import functools",
    "ctypes": "import ctypes",
}


def assemble(
    original: Original,
    chains: Sequence[ChainText],
    forward: Sequence[str],
    values: Mapping[str, Any],
    heading: str,
    architecture: str,
    reads_settings: bool = False,
) -> str:
    """The chains' plans are for cards of this architecture; `reads_settings` as in original.py."""
    kernels: dict[str, str] = {}
    functions: dict[str, str] = {}
    for chain in chains:
        kernels.update({kernel.name: kernel.text for kernel in chain.kernels})
        functions.update(chain.functions)
    model = model_text(original, forward, values, reads_settings)
    body = [*kernels.values(), *functions.values(), fits_text(chains, architecture), *original.helpers, model]
    sources = {name: source for chain in chains for name, source in chain.sources.items()}
    cuda = [f'{name} = r"""\n{source}"""\n' for name, source in sources.items()]
    text = "".join(f"{part.rstrip()}\n\n\n" for part in body).rstrip() + "\n"
    imports = import_text(text + "\n".join(cuda), original.imports, chains)
    shapes = "\n".join(dict.fromkeys(shapes_text(chain) for chain in chains))
    parts = ["# SPDX-License-Identifier: Apache-2.0", heading.rstrip(), "", imports, "", shapes, ""]
    return "\n".join([*parts, *cuda, ""]) + f"\n{text}"


def import_text(body: str, own: Sequence[str], chains: Sequence[ChainText]) -> str:
    """What the text reads, sorted as formatters sort imports."""
    lines = set(own)
    for word, line in _WORDS.items():
        if re.search(rf"(?<![\w.]){word}\.", body):
            lines.add(line)
    names = {line.removeprefix("from torch import ") for line in own if line.startswith("from torch import ")}
    names |= {name for name in ("Tensor", "nn") if re.search(rf"(?<![\w.]){name}\b", body)}
    lines = {line for line in lines if not line.startswith("from torch import ")}
    if names:
        lines.add(f"from torch import {', '.join(sorted(names, key=lambda n: (not n[0].isupper(), n)))}")
    if any("TensorDescriptor" in chain.imports for chain in chains):
        lines.add("from triton.tools.tensor_descriptor import TensorDescriptor")
    if any("CUDA_HOME" in chain.imports for chain in chains):
        lines.add("from torch.utils.cpp_extension import CUDA_HOME")
    if "@once_differentiable" in body:
        lines.add("from torch.autograd.function import once_differentiable")
    if re.search(r"(?<![\w.])Any\b", body):
        lines.add("from typing import Any")
    standard = [line for line in lines if line.split()[1].split(".")[0] not in ("torch", "triton")]
    others = lines - set(standard)
    groups = [sorted(group, key=_import_order) for group in (standard, others) if group]
    return "\n\n".join("\n".join(group) for group in groups)


def _import_order(line: str) -> tuple[bool, str]:
    return line.startswith("from "), line.split()[1]


def without_clashes(chains: Sequence[ChainText]) -> list[ChainText]:
    """Names that two chains give to different things get a number in the later one."""
    taken: dict[str, str] = {}
    result = []
    for number, chain in enumerate(chains, 1):
        mine = _definitions(chain)
        clashing = [name for name, text in mine.items() if taken.get(name, text) != text]
        # What reads one of those by its name is then another function too.
        words = {name: set(re.findall(r"\w+", text)) for name, text in mine.items()}
        while more := [n for n in mine if n not in clashing and n in taken and not words[n].isdisjoint(clashing)]:
            clashing += more
        renamed = {name: f"{name}{'_' * (not name[0].isupper())}{number}" for name in clashing}
        if chain.name in renamed:
            renamed[class_name(chain.name)] = class_name(renamed[chain.name])
        chain = _renamed(chain, renamed) if renamed else chain
        taken |= _definitions(chain)
        result.append(chain)
    return result


def _definitions(chain: ChainText) -> dict[str, str]:
    """What a chain defines in its file, by name."""
    mine = {kernel.name: kernel.text for kernel in chain.kernels} | dict(chain.functions)
    mine[chain.shapes_name] = shapes_text(chain)
    return mine | dict(chain.sources)


def _renamed(chain: ChainText, names: Mapping[str, str]) -> ChainText:
    def words(text: str) -> str:
        return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m[0], m[0]), text)

    return replace(
        chain,
        name=names.get(chain.name, chain.name),
        called=words(chain.called),
        kernels=tuple(Kernel(names.get(k.name, k.name), _outside(k, names), k.parameters) for k in chain.kernels),
        functions={names.get(name, name): fold(words(text)) for name, text in chain.functions.items()},
        shapes_name=names.get(chain.shapes_name, chain.shapes_name),
        sources={names.get(name, name): source for name, source in chain.sources.items()},
    )


def _outside(kernel: Kernel, names: Mapping[str, str]) -> str:
    """Functions by their new names; a kernel's own parameters are no names of the file."""
    kept = {old: new for old, new in names.items() if old not in kernel.parameters}
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: kept.get(m[0], m[0]), kernel.text)
