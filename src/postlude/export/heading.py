"""The docstring of an exported file: which chain, how many launches, which arithmetic, what was measured."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from postlude.export.chain_text import ChainText
from postlude.export.syntax.layout import WIDTH
from postlude.plan import Plan
from postlude.plan.cpu_few_channels import CpuFewChannels
from postlude.plan.few_channels import FewChannels
from postlude.plan.through import Through

_LABEL = 10
Measured = Callable[[str, str, str, str], str | None]  # chain, shape, dtype and precision to a sentence


def heading(chains: Sequence[ChainText], precision: str, measured: Measured | None) -> str:
    title = f"{chains[0].chain}, fused." if len(chains) == 1 else f"{len(chains)} fused chains."
    lines = [*textwrap.wrap(f'"""{title}', WIDTH), ""]
    for chain in chains:
        plan = chain.plan
        shape = "×".join(map(str, plan.input.shape))
        mode = precision if plan.input.dtype == "float32" else "auto"
        found = None if measured is None else measured(str(chain.chain), shape, plan.input.dtype, mode)
        if len(chains) > 1:
            lines += _row(chain.name, str(chain.chain))
        layout = plan.input.layout.replace("_", "-")
        lines += _row("Input", f"{shape}, {plan.input.dtype}, {layout}")
        lines += _row("Launches", _launches(chain))
        lines += _row("Arithmetic", _arithmetic(plan))
        lines += _row("Measured", found) if found else []
        lines.append("")
    lines.append("Tensors of other shapes (see `fits`) go through PyTorch's own operators.")
    if any(chain.kernels for chain in chains):
        lines.append("Names in kernels: p_ pointer, i_ index, o_ offsets, m_ mask, b_ block of values.")
    return "\n".join([*lines, '"""'])


def _row(label: str, text: str) -> list[str]:
    pad = " " * (_LABEL + 1)
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:{_LABEL}} ", subsequent_indent=pad)


def _launches(chain: ChainText) -> str:
    conv = chain.plan.chain.producer
    words = f"{chain.launches} of our kernels"
    if conv is not None and chain.plan.own is None:
        words += f" after PyTorch's {'product' if conv.is_linear else 'convolution'}"
    return words


def _arithmetic(plan: Plan) -> str:
    own = plan.own
    if own is None:
        what = "product" if plan.chain.is_linear else "convolution"
        return f"fp32; the {what} is PyTorch's" if plan.chain.producer else "fp32"
    if isinstance(own, Through):
        return "sums in fp32, their product in fp64" if own.folding is None else "fp32; the convolution is PyTorch's"
    if isinstance(own, CpuFewChannels):
        return "fp32"
    planes = own.planes if isinstance(own, FewChannels) else own.arithmetic.planes
    if plan.input.dtype != "float32":
        return f"products of {plan.input.dtype}, summed in fp32"
    if planes == 2:
        return "fp32, as two fp16 planes on the tensor cores: as exact as PyTorch's fp32"
    return "TF32's: numbers rounded to one fp16 plane, which has TF32's mantissa"
