"""Writes docs/support.md: for every operator what `lower` plans, by device, dtype and layout, and why not.

python tools/support_table.py          # prints it
python tools/support_table.py --write  # and puts it where it belongs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from postlude import cards
from postlude.chain import (
    Chain,
    Convolution,
    Normalize,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    Role,
    Scalar,
    Slot,
    Softmax,
    Step,
    Value,
    linear,
)
from postlude.hardware import Machine, machine_on
from postlude.plan import Plan, Problem, Refusal, lower
from postlude.plan.channels import MOST_CHANNELS
from postlude.plan.problem import Spec
from postlude.tested import TESTED, tested_span
from postlude.windows import Windows
from postlude.words import LENGTHS, NORMS, POINTWISE, POOLS, REDUCTIONS, SOFTMAXES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
CHANNELS, SPACE, BATCH = 32, 32, 8
CPU = Machine("cpu", 2, 32 << 20, has_triton=True, has_onednn=True, compiles_cpp=True)
TURING = cards.estimated("Turing", "sm_75", (72, 65_536, 6 << 20), 1.77e9, 672e9)
ROCM = cards.estimated("ROCm", "gfx942", (304, 65_536, 4 << 20), 2.1e9, 5.3e12)
MACHINES = {
    "CPU": CPU,
    **{card.architecture: machine_on(card) for card in (cards.A100, cards.H200, TURING)},
    "ROCm": machine_on(ROCM),
    "MPS": Machine("mps", 0, 0, has_triton=False),
}
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
LAYOUTS = ("contiguous", "channels_last")
OPERANDS: dict[Role, str] = {
    "channel": "per channel",
    "full": "tensor",
    "row": "per sample and channel",
    "one": "one number",
}
SETTINGS = {"approximate": "none", "exponent": 2, "low": -1.0, "high": 1.0}


def convolution(dims: int, *, transposed: bool = False, stride: int = 1, groups: int = 1) -> Convolution:
    each = (1,) * dims
    size = tuple(3 * one for one in each)
    strides = tuple(stride * one for one in each)
    return Convolution(transposed, CHANNELS, CHANNELS, size, strides, each, each, (0,) * dims, groups, True)


def chain_of(producer: Convolution | None, *steps: Step, roles: tuple[Role, ...] = ()) -> Chain:
    dims = 3 if producer is None else producer.dims
    first: tuple[Role, ...] = ("input",) if producer is None else ("input", "weight", "bias")
    return Chain(dims, producer, steps, (*first, *roles))


def word(op: str, roles: tuple[Role, ...]) -> Chain:
    """Conv3d → the word → group_norm."""
    row = POINTWISE[op]
    others: list[Operand] = [Slot(3 + place) for place in range(len(roles))] or [Scalar(0.5)] * (row.arity - 1)
    settings = tuple((name, SETTINGS.get(name, 1.0)) for name in row.settings)
    step = Pointwise(op, (Value(0), *others), settings)
    return chain_of(convolution(3), step, Normalize("group_norm", Value(1), 8, 1e-5), roles=roles)


def norm_name(op: str) -> str:
    """batch_norm is a word as well, in evaluation."""
    return f"{op}, the batch's statistics" if NORMS[op] == "batch" else op


def rows() -> Iterator[tuple[str, Chain]]:
    relu, norm = Pointwise("relu", (Value(0),)), Normalize("group_norm", Value(1), 8, 1e-5)
    for dims in (2, 3):
        for transposed in (False, True):
            for extra, options in (("", {}), (", stride 2", {"stride": 2}), (", groups", {"groups": 4})):
                producer = convolution(dims, transposed=transposed, **options)
                yield f"{producer.name}{extra}", chain_of(producer, relu, norm)
    yield "no convolution", chain_of(None, relu, norm)
    layer, last = linear(CHANNELS, CHANNELS, has_bias=True), Value(1)
    yield "linear", chain_of(layer, relu, Pointwise("tanh", (last,)))
    for op, step in {
        "group_norm": Normalize("group_norm", last, 8, 1e-5),
        "layer_norm": Normalize("layer_norm", last, None, 1e-5, axes=1),
        "batch_norm": Normalize("batch_norm", last, None, 1e-5),
        "a reduction over features": Reduce("logsumexp", last, "channels"),
    }.items():
        yield f"linear, then {op}", chain_of(layer, relu, step)
    for op, row in POINTWISE.items():
        roles: tuple[Role, ...] = ("channel",) * (row.arity - 1) if row.vectors else ()
        yield op, word(op, roles)
    for role, name in (
        ("channel", "per channel"),
        ("full", "tensor"),
        ("row", "per sample and channel"),
        ("one", "one"),
    ):
        yield f"mul, {name}", word("mul", (role,))  # type: ignore[arg-type]
    for op, over in NORMS.items():
        groups, axes = 8 if op == "group_norm" else None, 1 if over == "row" else 0
        yield norm_name(op), chain_of(convolution(3), Normalize(op, Value(0), groups, 1e-5, axes=axes))
    for op, spans in REDUCTIONS.items():
        step = Normalize("group_norm", Value(0), 8, 1e-5)
        yield f"{op} over {spans[0]}", chain_of(convolution(3), step, Reduce(op, Value(1), spans[0], True))  # type: ignore[arg-type]
    for op in (*SOFTMAXES, *LENGTHS):
        yield (
            f"{op} over channels",
            chain_of(convolution(3), Normalize("group_norm", Value(0), 8, 1e-5), Softmax(op, Value(1))),
        )
    for op in POOLS:
        step = Normalize("group_norm", Value(0), 8, 1e-5)
        yield op, chain_of(convolution(3), step, Pool(op, Value(1), Windows((2,) * 3, (2,) * 3, (0,) * 3)))


def problem_for(chain: Chain, dtype: str, layout: str, device: str, needs_grad: bool = False) -> Problem:
    full = (BATCH, CHANNELS, *[SPACE] * chain.dims)
    conv = chain.producer
    value = full if conv is None else (BATCH, CHANNELS, *conv.output_space(full[2:]))
    weight = () if conv is None else (CHANNELS, CHANNELS // conv.groups, *conv.kernel)
    row = (BATCH, CHANNELS, *[1] * chain.dims)
    shapes = {"input": full, "full": value, "weight": weight, "row": row, "one": (1,)}
    specs = [
        Spec(shapes.get(role, (CHANNELS,)), dtype, layout if chain.dims and role in ("input", "full") else "contiguous")  # type: ignore[arg-type]
        for role in chain.roles
    ]
    return Problem(tuple(specs), device, "auto", needs_grad)


def outcomes(chain: Chain, machine: Machine, needs_grad: bool = False) -> dict[tuple[str, str], Plan | Refusal]:
    return {
        (dtype, layout): lower(
            chain, problem_for(chain, dtype, layout, machine.device, needs_grad), machine, even_if_slower=True
        )
        for dtype in DTYPES
        for layout in LAYOUTS
    }


class Notes:
    """Reasons, numbered in the order in which they are first met."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cell(self, found: dict[tuple[str, str], Plan | Refusal]) -> str:
        planned = [key for key, outcome in found.items() if isinstance(outcome, Plan)]
        reasons = dict.fromkeys(o.reasons[0] for o in found.values() if isinstance(o, Refusal))
        marks = ", ".join(str(self.numbers.setdefault(reason, len(self.numbers) + 1)) for reason in reasons)
        if not reasons:
            return "yes" + _convolved_by_us(found) + _in_cpp(found)
        if not planned:
            return f"no ({marks})"
        dtypes = [name for dtype, name in DTYPES.items() if all((dtype, layout) in planned for layout in LAYOUTS)]
        return f"{', '.join(dtypes) or 'in part'} ({marks})"


def _in_cpp(found: dict[tuple[str, str], Plan | Refusal]) -> str:
    """The dtypes in which passes on the CPU are kernels of ours where there is a compiler."""
    ours = {key for key, outcome in found.items() if isinstance(outcome, Plan) and outcome.is_compiled}
    dtypes = [name for dtype, name in DTYPES.items() if all((dtype, layout) in ours for layout in LAYOUTS)]
    return f", C++ in {', '.join(dtypes)}" if dtypes else ""


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _convolved_by_us(found: dict[tuple[str, str], Plan | Refusal]) -> str:
    """In which dtypes the convolution is ours too, where it is in some."""
    names = dict.fromkeys(DTYPES[dtype] for (dtype, _), outcome in found.items() if _is_ours(outcome))
    return f", ours in {', '.join(names)}" if names else ""


def _is_ours(outcome: Plan | Refusal) -> bool:
    """Whether the convolution or linear layer is ours. In float64 it is only in tests: PyTorch's is always faster."""
    own = outcome.own if isinstance(outcome, Plan) else None
    arithmetic = getattr(own, "arithmetic", None)
    return own is not None and not (arithmetic is not None and arithmetic.is_exact)


def page() -> str:
    notes = Notes()
    lines = ["| operator | " + " | ".join(MACHINES) + " |", "| --- |" + " --- |" * len(MACHINES)]
    for name, chain in rows():
        cells = [notes.cell(outcomes(chain, machine)) for machine in MACHINES.values()]
        if chain.producer != convolution(3) or name == "conv3d":
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
            continue
        cells = [cell.split(", ours")[0] for cell in cells]  # as for conv3d
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name in (
        "conv3d",
        "linear",
        *map(norm_name, NORMS),
        "logsumexp over channels",
        "softmax over channels",
        *POOLS,
    ):
        cells = [notes.cell(outcomes(dict(rows())[name], machine, needs_grad=True)) for machine in MACHINES.values()]
        cells = cells if name in ("conv3d", "linear") else [cell.split(", ours")[0] for cell in cells]
        lines.append(f"| {name}, with gradients | " + " | ".join(cells) + " |")
    versions = "\n".join(f"- {tested_span(package)}" for package in TESTED)
    numbered = "\n".join(f"{number}. {reason}" for reason, number in notes.numbers.items())
    return TEXT.format(
        table="\n".join(lines),
        notes=numbered,
        versions=versions,
        dtypes=_listed(list(DTYPES.values())),
        channels=MOST_CHANNELS,
    )


TEXT = """# What is fused where

Written by `tools/support_table.py` from `lower` itself; `tests/test_support.py` says when it is out of date.

*yes*: a fused plan exists in {dtypes}, contiguous and channels-last. *ours in*: with
Postlude's own convolution or GEMM in these dtypes; in fp64 PyTorch convolves and multiplies, because it is faster.
*C++ in*: with C++ kernels if there is a compiler. *no* and missing dtypes have their reason below. PyTorch's own
operators run the chain there, and also for inputs that are empty or neither contiguous nor channels-last. A word is
tested between a conv3d and a group_norm. Whether a plan pays at a given size is another question, which `postlude
explain` answers.

{table}

{notes}

batch_norm uses the batch's statistics in training. A layer_norm's row may have 8192 elements on a GPU, and is shown
over the last axis. mean and sum also go over channels. On a GPU PyTorch runs a reduction or softmax over more than
{channels} channels, after the fused passes before it, and one after a pool.

A linear layer takes [N, F] or more axes, such as [B, T, F] and [B, H, W, F]; its features, the last axis, are its
channels. With more than two axes a chain is one of the matrix of all rows. It has steps that work on each row alone:
elementwise steps with numbers, vectors over features and contiguous tensors of the value's shape, layer_norm, softmax
and reductions over the last axis. It ends before batch_norm, group_norm and instance_norm, whose channels are the
second axis, and before everything over another axis. An input that is not contiguous is copied, as PyTorch's layer
does. Where PyTorch runs the product of a layer with four or five axes, a chain may begin after it.

On a GPU the GEMM of a linear layer is Postlude's in strict fp32, on cards whose tensor cores are three times as fast as
ordinary instructions, and cuBLAS's in TF32 and 16 bits. In training PyTorch runs norms, softmax and reductions over
more than 8192 features, and everything from a second norm on, after Postlude's GEMM.

Active dropout (`dropout`, `dropout2d`, `dropout3d`, in place too) is part of a chain on a GPU: a chain shows it as
`mul(tensor) → mul(1.25)`, or `mul(per sample and channel)` for whole channels. The mask has one byte per element and is
drawn beside the chain by PyTorch's own operator, where the dropout was. With `rest="eager"`, and in exported files, it
is the mask that eager draws with the same seed, except in place in channels-last memory; Inductor draws other numbers,
as in torch.compile. A chain ends before alpha_dropout, before dropout on a CPU or with p = 1, and where sizes are
symbols (`dynamic=True`). If a chain with a mask is refused, for example because its passes read too many tensors, it
ends before that dropout.

A pool may have any stride up to its window, padding, ceil_mode and up to 256 positions in a window. Elementwise steps
after it are fused too, except in training. PyTorch runs a pool after a layer_norm; on a CPU a chain ends before its
pool.

Tested with the versions below; with others Postlude says so once, and works as far as it can.

{versions}
"""

if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page(), end="")
