"""The whole file: docstring, imports, kernels, launchers, the check whether tensors fit, and the model."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from postlude.cards import capability_of
from postlude.export.chain_text import ChainText
from postlude.export.device.inlining import put_in_place
from postlude.export.original import Original, model_text
from postlude.export.syntax.analysis import owners, reads
from postlude.export.syntax.layout import laid_out, without_statements
from postlude.plan.program import Buffer
from postlude.plan.through import Through

# The import that a text needs if it reads this name, or an attribute of it if it is a module.
_IMPORTS = {
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "triton": "import triton",
    "tl": "import triton.language as tl",
    "math": "import math",
    "functools": "import functools",
    "ctypes": "import ctypes",
    "Tensor": "from torch import Tensor",
    "nn": "from torch import nn",
    "Any": "from typing import Any",
    "TensorDescriptor": "from triton.tools.tensor_descriptor import TensorDescriptor",
    "CUDA_HOME": "from torch.utils.cpp_extension import CUDA_HOME",
    "once_differentiable": "from torch.autograd.function import once_differentiable",
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
    """The whole text. The chains' plans are for cards of this architecture; `reads_settings` as in original.py."""
    functions = {name: text for chain in chains for name, text in chain.functions.items()}
    sources = {name: source for chain in chains for name, source in chain.sources.items()}
    shapes = {chain.shapes_name: shapes_text(chain) for chain in chains}
    kernels = put_in_place(chains[-1].kernels)
    ours = [*kernels.values(), *functions.values(), fits_text(chains, architecture)]
    also_theirs = original.names & {*kernels, *functions, "fits", *shapes}
    ours, forward, tables = (
        [_apart(text, also_theirs) for text in texts] for texts in (ours, forward, shapes.values())
    )
    model = without_statements(model_text(original, forward, values, reads_settings))
    helpers = [without_statements(helper) for helper in original.helpers]
    body = [*ours, *helpers, model]
    cuda = [f'{name} = r"""\n{source}"""\n' for name, source in sources.items()]
    text = "".join(f"{part.rstrip()}\n\n\n" for part in body).rstrip() + "\n"
    imports = import_text(text, original.imports)
    parts = ["# SPDX-License-Identifier: Apache-2.0", heading.rstrip(), "", imports, "", *tables, ""]
    return "\n".join([*parts, *cuda, ""]) + f"\n{text}"


def _apart(text: str, also_theirs: Collection[str]) -> str:
    """Our text with other words for functions of ours that the problem's file has as well, such as an imported relu."""
    for name in also_theirs:  # where code uses it, not a sentence
        text = re.sub(rf"(?<![\w.]){name}(?=[(\[):]| =|\.apply)", f"fused_{name}", text)
    return text


def import_text(body: str, own: Sequence[str]) -> str:
    """The imports that the text needs, sorted as formatters sort them."""
    tree = ast.parse(body)
    modules, read = owners(tree), reads(tree)
    lines = {line for name, line in _IMPORTS.items() if name in (modules if line.startswith("import ") else read)}
    lines |= set(own)
    start = "from torch import "
    names = sorted({line for line in lines if line.startswith(start)}, key=lambda n: (not n[len(start)].isupper(), n))
    lines -= set(names)
    if names:
        lines.add(start + ", ".join(line.removeprefix(start) for line in names))
    standard = {line for line in lines if line.split()[1].split(".")[0] not in ("torch", "triton")}
    groups = [sorted(group, key=lambda line: (line.startswith("from "), line.split()[1]))
              for group in (standard, lines - standard) if group]  # fmt: skip
    return "\n\n".join("\n".join(group) for group in groups)


def _is_plain(chain: ChainText) -> bool:
    """Whether all tensors are contiguous and have one dtype, so that shapes describe them completely."""
    return len({buffer.dtype for buffer in chain.given}) == 1 and all(buffer.is_contiguous for buffer in chain.given)


def shapes_text(chain: ChainText) -> str:
    """The tensors that a chain's kernels accept, one entry for each."""
    parts = [str(buffer.shape) if _is_plain(chain) else _entry(buffer) for buffer in chain.given]
    return "\n".join(laid_out("", parts if len(parts) > 1 else [f"{parts[0]},"], f"{chain.shapes_name} = ", indent=0))


def _entry(buffer: Buffer) -> str:
    return f"({buffer.shape}, {buffer.strides}, torch.{buffer.dtype})"


_FITS = '''\
def fits(tensors: tuple[Tensor, ...], expected: tuple[tuple, ...]) -> bool:
    """Whether the kernels take these tensors; PyTorch's operators take all others."""
    x = tensors[0]
    is_card = x.is_cuda and torch.cuda.get_device_capability(x.device) {card}
{checks}
'''


def fits_text(chains: Sequence[ChainText], architecture: str) -> str:
    """The check for exactly the shapes, dtypes and layouts of the kernels; PyTorch runs anything else."""
    if all(chain.plan.own is None or isinstance(chain.plan.own, Through) for chain in chains):
        card = ">= (8, 0)"
    else:
        major, minor = capability_of(architecture)
        card = f"== ({major}, {minor})  # what the tiles were chosen for"
    if all(map(_is_plain, chains)):
        dtypes = {chain.given[0].dtype for chain in chains}
        assert len(dtypes) == 1, "chains of several dtypes say so in their entries"
        same, what = f"t.dtype == torch.{dtypes.pop()} and t.is_contiguous() and ", "t.shape"
    else:
        same, what = "", "(t.shape, t.stride(), t.dtype)"
    lines = []
    if any(chain.sources for chain in chains):
        lines.append("is_card = is_card and CUDA_HOME is not None  # torch's way to NVRTC asks for it")
    lines.append(f"is_plain = all({same}t.device == x.device for t in tensors)")
    if any(chain.is_aligned for chain in chains):
        lines.append("is_plain = is_plain and is_card and x.data_ptr() % 16 == 0  # as tensor descriptors ask")
    lines.append(f"is_like = tuple({what} for t in tensors) == expected")
    lines.append('return is_card and is_plain and is_like and not torch.is_autocast_enabled("cuda")')
    return _FITS.replace("{card}", card).replace("{checks}", "\n".join(f"    {line}" for line in lines))
