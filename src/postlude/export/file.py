"""The whole file: docstring, imports, tiles, kernels, launchers, the check whether tensors fit, and the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from postlude.cards import capability_of
from postlude.export.chain_text import ChainText
from postlude.export.kernels import Kernel
from postlude.export.original import Original, model_text
from postlude.export.training import NEEDS_GRAD, class_name

_WANTED = "    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)"


def assemble(
    original: Original,
    chains: Sequence[ChainText],
    forward: Sequence[str],
    values: Mapping[str, Any],
    heading: str,
    architecture: str,
) -> str:
    """The chains' plans are for cards of this architecture."""
    kernels: dict[str, str] = {}
    helpers: dict[str, str] = {}
    constants: dict[str, str] = {}
    for chain in chains:
        kernels.update({kernel.name: kernel.text for kernel in chain.kernels})
        helpers.update(chain.helpers)
        constants.update(chain.constants)
    model = model_text(original, forward, values)
    functions = [*kernels.values(), *helpers.values(), *dict.fromkeys(chain.launcher for chain in chains)]
    functions += dict.fromkeys(chain.trainer for chain in chains if chain.trainer)
    training = any(chain.trainer for chain in chains)
    functions += [NEEDS_GRAD] if training else []
    functions.append(fits_text(chains, architecture, training))
    body = [*functions, *original.helpers, model]
    cuda = list(dict.fromkeys(chain.cuda for chain in chains if chain.cuda))
    text = "".join(f"{part.rstrip()}\n\n\n" for part in body).rstrip() + "\n"
    imports = import_text(text + "\n".join(cuda), original.imports, chains)
    tiles = "\n".join(constants.values())
    parts = ["# SPDX-License-Identifier: Apache-2.0", heading.rstrip(), "", imports, ""]
    if tiles:
        parts += [tiles, "", *([] if cuda else [""])]
    parts += cuda
    return "\n".join(parts) + f"\n{text}"


def import_text(body: str, own: Sequence[str], chains: Sequence[ChainText]) -> str:
    """What the text reads, sorted as formatters sort imports."""
    lines = set(own)
    for word, line in {
        "torch": "import torch",
        "F": "import torch.nn.functional as F",
        "triton": "import triton",
        "tl": "import triton.language as tl",
        "math": "import math",
        "functools": "import functools",
    }.items():
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
        lines |= {"from typing import Any", "from torch.utils.cpp_extension import CUDA_HOME"}
    if any(chain.trainer for chain in chains):
        lines |= {"from typing import Any", "from torch.autograd.function import once_differentiable"}
    standard = [line for line in lines if line.split()[1].split(".")[0] not in ("torch", "triton")]
    others = lines - set(standard)
    groups = [sorted(group, key=_import_order) for group in (standard, others) if group]
    return "\n\n".join("\n".join(group) for group in groups)


def _import_order(line: str) -> tuple[bool, str]:
    return line.startswith("from "), line.split()[1]


def fits_text(chains: Sequence[ChainText], architecture: str, training: bool) -> str:
    """What the kernels take. Everything else goes through PyTorch's operators."""
    plan = chains[0].plan
    smallest = max(_smallest(chain) for chain in chains)
    channels = max(max(chain.plan.value.shape[1], chain.plan.input.shape[1]) for chain in chains)
    positions = 1 << ((2**31 // channels).bit_length() - 3)  # a border may make the result larger than the input
    checks = [
        f"x.dim() == {2 + plan.chain.dims}",
        "x.shape[1] == channels",
        "all((t.device, t.dtype) == expected and t.is_contiguous() for t in tensors)",
        "x.numel() > 0",
        f"x.shape[2:].numel() <= 1 << {positions.bit_length() - 1}  # offsets in a sample have 32 bits",
    ]
    if smallest > 1:
        checks.append(f"min(x.shape[2:]) >= {smallest}")
    if any(chain.cuda for chain in chains):
        checks.append("CUDA_HOME is not None  # torch's way to NVRTC asks for it")
    if any(chain.plan.own is not None for chain in chains):
        major, minor = capability_of(architecture)
        checks.insert(0, f"capability == ({major}, {minor})  # what the tiles were chosen for")
    else:
        checks.insert(0, "capability >= (8, 0)")
    lines = [
        "def fits(channels: int, *tensors: Tensor) -> bool:",
        '    """Whether the kernels take these tensors; PyTorch\'s operators take all others."""',
        "    x = tensors[0]",
        *([] if training else [_WANTED]),
        f'    if not x.is_cuda or {"" if training else "needs_grad or "}torch.is_autocast_enabled("cuda"):',
        "        return False",
        f"    expected = (x.device, torch.{plan.input.dtype})",
        "    capability = torch.cuda.get_device_capability(x.device)",
    ]
    return "\n".join([*lines, "    return (", *_anded(checks), "    )", ""])


def _anded(checks: Sequence[str]) -> list[str]:
    return [f"        {'and ' if number else ''}{check}" for number, check in enumerate(checks)]


def _smallest(chain: ChainText) -> int:
    """Positions along an axis below which the convolution has no result."""
    conv = chain.plan.chain.producer
    if conv is None or conv.transposed:
        return 1
    return max(d * (k - 1) + 1 - 2 * p for k, p, d in zip(conv.kernel, conv.padding, conv.dilation))


def without_clashes(chains: Sequence[ChainText]) -> list[ChainText]:
    """Names that two chains give to different things get a number in the later one."""
    taken: dict[str, str] = {}
    result = []
    for number, chain in enumerate(chains, 1):
        mine = {kernel.name: kernel.text for kernel in chain.kernels} | dict(chain.helpers) | dict(chain.constants)
        mine |= {chain.name: chain.launcher, "SOURCE": chain.cuda or taken.get("SOURCE", "")}
        clashing = [name for name, text in mine.items() if taken.get(name, text) != text]
        # What reads one of those by its name is then another function too.
        words = {name: set(re.findall(r"\w+", text)) for name, text in chain.helpers.items()}
        clashing += [name for name in chain.helpers if name not in clashing and not words[name].isdisjoint(clashing)]
        renamed = {name: f"{name}{'_' * (not name.isupper())}{number}" for name in clashing}
        if chain.name in renamed:
            renamed[class_name(chain.name)] = class_name(renamed[chain.name])
        chain = _renamed(chain, renamed) if renamed else chain
        taken |= {kernel.name: kernel.text for kernel in chain.kernels} | dict(chain.helpers) | dict(chain.constants)
        taken[chain.name] = chain.launcher
        if chain.cuda:
            taken[chain.cuda.split(" ", 1)[0]] = chain.cuda
        result.append(chain)
    return result


def _renamed(chain: ChainText, names: Mapping[str, str]) -> ChainText:
    def words(text: str) -> str:
        return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m[0], m[0]), text)

    return replace(
        chain,
        name=names.get(chain.name, chain.name),
        kernels=tuple(Kernel(names.get(k.name, k.name), _outside(k, names), k.parameters) for k in chain.kernels),
        helpers={names.get(name, name): words(text) for name, text in chain.helpers.items()},
        constants={names.get(name, name): words(text) for name, text in chain.constants.items()},
        launcher=words(chain.launcher),
        trainer=words(chain.trainer),
        cuda=re.sub(r"^SOURCE", names.get("SOURCE", "SOURCE"), chain.cuda),
    )


def _outside(kernel: Kernel, names: Mapping[str, str]) -> str:
    """Functions by their new names; a kernel's own parameters are no names of the file."""
    kept = {old: new for old, new in names.items() if old not in kernel.parameters}
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: kept.get(m[0], m[0]), kernel.text)
