"""Problems as text, and their exported files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from postlude import problem_file
from postlude.cli.recorded import measured
from postlude.export.device.library import Kernel
from postlude.export.export_model import HOPPER, Export, export
from postlude.export.syntax.source import text_of
from postlude.export.syntax.specialise import specialise
from postlude.export.syntax.trees import copied
from postlude.hardware import Machine

ROOT = Path(__file__).parents[2]
PROBLEMS = ROOT / "src" / "postlude" / "problems"
GOLDEN = ROOT / "examples" / "kernelbench"

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}


def get_inputs():
    return [torch.randn({shape})]


def get_init_inputs():
    return [{cin}, {cout}]
"""


@dataclass(frozen=True)
class Problem:
    """A model of one small forward; statements of `init` and `forward` are parted by semicolons."""

    name: str
    init: str
    forward: str
    shape: tuple[int, ...]
    cout: int
    kernels: tuple[str, ...]  # that its file must have
    dtype: torch.dtype = torch.float32
    precision: str = "fp32"
    tolerance: float = 2e-5
    is_last: bool = False  # channels-last, its input and its parameters

    @property
    def text(self) -> str:
        lines = {key: getattr(self, key).replace("; ", "\n        ") for key in ("init", "forward")}
        return HEAD.format(**lines, shape=", ".join(map(str, self.shape)), cin=self.shape[1], cout=self.cout)


# For files that are run: gradients of weights then have a few splits, not hundreds.
SMALL_CARD = replace(HOPPER, threads=2)
PACKED = ("convolve_kernel", "finish_kernel")
SMALL_PROBLEMS = [
    Problem(
        "61",
        "self.conv = nn.ConvTranspose3d(cin, cout, 3, bias=False); self.norm = nn.GroupNorm(8, cout)",
        "return self.norm(torch.relu(self.conv(x)))",
        (1, 16, 2, 3, 4),
        32,
        ("largest_kernel", "pack_input_kernel", "pack_weight_kernel", *PACKED),
    ),
    Problem(
        "padded block with few channels",
        "self.conv = nn.Conv3d(cin, cout, 3, padding=1); self.norm = nn.InstanceNorm3d(cout, affine=True)",
        "return F.leaky_relu(self.norm(self.conv(x)), 0.01)",
        (2, 6, 4, 5, 7),
        12,
        PACKED,
    ),
    Problem(
        "one plane, and tensors that go by names of a launcher",
        "self.conv = nn.Conv3d(cin, cout, 3); self.norm = nn.GroupNorm(4, cout); "
        "self.scale = nn.Parameter(torch.randn(cout, 1, 1, 1)); self.v = nn.Parameter(torch.randn(cout, 1, 1, 1))",
        "return F.silu(self.norm(self.conv(x)) * self.scale + self.v)",
        (1, 16, 5, 6, 5),
        16,
        PACKED,
        precision="tf32",
        tolerance=1e-2,
    ),
    Problem(
        "16 bits",
        "self.conv = nn.Conv2d(cin, cout, 3, padding=1); self.norm = nn.GroupNorm(2, cout)",
        "return F.gelu(self.norm(self.conv(x)))",
        (2, 16, 6, 7),
        24,
        PACKED,
        dtype=torch.float16,
        tolerance=2e-2,
    ),
    Problem(
        "PyTorch's convolution, residual",
        "self.conv = nn.Conv3d(cin, cout, 3, stride=2, padding=1, groups=2); self.norm = nn.GroupNorm(2, cout); "
        "self.skip = nn.Conv3d(cin, cout, 1, stride=2, groups=2)",
        "y = self.skip(x); return F.relu(self.norm(self.conv(x)) + y)",
        (2, 4, 6, 6, 6),
        8,
        ("moments_kernel", "finish_kernel"),
    ),
    Problem(
        "chains alike but for a step: the kernels of the two read the same",
        "self.conv = nn.Conv3d(cin, cout, 3, stride=2, groups=2); self.norm = nn.GroupNorm(2, cout); "
        "self.gate = nn.Conv3d(cin, cout, 3, stride=2, groups=2); self.norm2 = nn.GroupNorm(2, cout)",
        "y = F.relu(self.norm(self.conv(x)) * 2.0); "
        "return torch.cat([y, torch.sigmoid(self.norm2(self.gate(x)) * 2.0)])",
        (2, 4, 6, 6, 6),
        8,
        ("finish_kernel", "finish_kernel_2"),
    ),
    Problem(
        "PyTorch's convolution without a norm",
        "self.conv = nn.Conv3d(cin, cout, 3, stride=2, groups=2); self.v = nn.Parameter(torch.randn(cout, 1, 1, 1))",
        "return F.silu(self.conv(x) * self.v + 0.5)",
        (2, 4, 7, 7, 7),
        6,
        ("finish_kernel",),
    ),
    Problem(
        "by residue modulo the strides",
        "self.conv = nn.Conv3d(cin, cout, 3, stride=2, padding=1); self.norm = nn.GroupNorm(2, cout)",
        "return F.leaky_relu(self.norm(self.conv(x)))",
        (2, 4, 6, 5, 7),
        6,
        ("cells_at", "strided_step", "pack_weight_kernel", "convolve_kernel", "finish_kernel"),
    ),
    Problem(
        "by phase of the strides, no norm after it",
        "self.conv = nn.ConvTranspose2d(cin, cout, 3, stride=2, padding=1, output_padding=1)",
        "return torch.tanh(self.conv(x)) * 2.0",
        (2, 4, 5, 6),
        6,
        ("pack_weight_kernel", "phase_sum", "convolve_kernel"),
    ),
    Problem(
        "a convolution alone, in strict fp32",
        "self.conv = nn.Conv2d(cin, cout, 3)",
        "return torch.softmax(torch.min(self.conv(x), dim=2)[0], dim=1)",
        (2, 16, 6, 5),
        16,
        ("convolve_kernel",),
    ),
    Problem(
        "a value read twice",
        "self.conv = nn.Conv3d(cin, cout, 3); self.norm = nn.GroupNorm(2, cout)",
        "h = self.conv(x); return self.norm(h * F.silu(h)) + h",
        (1, 8, 4, 5, 4),
        6,
        PACKED,
    ),
    Problem(
        "sums, their axes kept",
        "self.conv = nn.Conv2d(cin, cout, 3); self.norm = nn.GroupNorm(3, cout)",
        "return (self.norm(self.conv(x)) + 0.25).sum((2, 3), keepdim=True)",
        (2, 8, 6, 5),
        6,
        ("convolve_kernel", "finish_moments_kernel"),
        tolerance=1e-3,
    ),
    Problem(
        "logsumexp over channels that leave lanes",
        "self.conv = nn.Conv2d(cin, cout, 3); self.norm = nn.GroupNorm(3, cout)",
        "y = self.conv(x); return torch.logsumexp(y + torch.tanh(self.norm(y)), dim=1, keepdim=True)",
        (2, 8, 6, 5),
        6,
        ("convolve_kernel", "channels_kernel"),
    ),
    Problem(
        "the smallest of channels, in 16 bits",
        "self.conv = nn.Conv2d(cin, cout, 3)",
        "return F.silu(self.conv(x)).amin(1) * 2.0",
        (2, 16, 6, 5),
        16,
        ("convolve_kernel", "channels_kernel"),
        dtype=torch.float16,
        tolerance=2e-2,
    ),
    Problem(
        "windows of channels that leave lanes",
        "self.conv = nn.Conv2d(cin, cout, 3); self.norm = nn.GroupNorm(3, cout); self.pool = nn.MaxPool2d(2); "
        "self.v = nn.Parameter(torch.randn(cout, 1, 1))",
        "return torch.clamp(self.pool(self.norm(self.conv(x)) * self.v), 0.0, 1.0)",
        (2, 8, 9, 8),
        6,
        ("convolve_kernel", "pools_kernel"),
    ),
    Problem(
        "means over windows in padding",
        "self.conv = nn.Conv3d(cin, cout, 3, stride=2, groups=2)",
        "return F.gelu(F.avg_pool3d(torch.tanh(self.conv(x)), 3, 2, 1))",
        (2, 4, 9, 11, 9),
        6,
        ("pools_kernel",),
    ),
    Problem(
        "softmax and what follows",
        "self.conv = nn.ConvTranspose2d(cin, cout, 3, stride=2); self.v = nn.Parameter(torch.randn(cout, 1, 1))",
        "return torch.sigmoid((torch.softmax(self.conv(x), dim=1) + self.v) * 2.0)",
        (2, 8, 5, 4),
        6,
        ("channels_kernel",),
    ),
    Problem(
        "steps after the smallest of channels",
        "self.conv = nn.Conv2d(cin, cout, 3); self.b = nn.Parameter(torch.randn(1, 1, 1, 1))",
        "x = torch.min(self.conv(x), dim=1, keepdim=True)[0]; return torch.tanh(x * torch.sigmoid(x + 3)) - self.b",
        (2, 8, 6, 5),
        6,
        ("channels_kernel",),
    ),
    Problem(
        "norm alone",
        "self.norm = nn.GroupNorm(3, cin); self.head = nn.Linear(cin, cout)",
        "x = F.relu(self.norm(x)); return self.head(x.mean(dim=(2, 3)))",
        (2, 6, 5, 7),
        4,
        ("moments_kernel",),
    ),
    Problem(
        "moments alone",
        "self.conv = nn.Conv3d(cin, cout, 3); self.norm = nn.GroupNorm(2, cout)",
        "return self.norm(F.relu(self.conv(x))).mean(dim=(2, 3, 4))",
        (2, 8, 5, 5, 6),
        6,
        ("convolve_kernel", "finish_moments_kernel"),
    ),
    Problem(
        "batch_norm in training",
        "self.conv = nn.Conv2d(cin, cout, 3); self.bn = nn.BatchNorm2d(cout); "
        "self.v = nn.Parameter(torch.randn(cout, 1, 1))",
        "return F.relu(self.bn(self.conv(x)) * self.v)",
        (2, 16, 5, 5),
        16,
        ("convolve_kernel", "combine_kernel", "finish_kernel"),
    ),
    Problem(
        "layer_norm",
        "self.conv = nn.ConvTranspose2d(cin, cout, 3, stride=2); self.rows = nn.LayerNorm(11)",
        "return F.gelu(self.rows(self.conv(x)))",
        (2, 8, 3, 5),
        8,
        ("convolve_kernel", "layer_norm_kernel"),
    ),
    Problem(
        "im2col, a copy apart, and a number as a tensor",
        "self.conv = nn.Conv2d(cin, cout, 3); self.scale = nn.Parameter(torch.randn(cout, 1, 1))",
        "y = self.conv(x); z = y.clone().detach(); return torch.min(F.relu(y) * self.scale, torch.tensor(0.5)) + z",
        (1, 3, 5, 6),
        16,
        ("unfold_kernel", "convolve_kernel"),
    ),
    Problem(
        "channels-last in 16 bits, read where it lies",
        "self.conv = nn.Conv2d(cin, cout, 3, padding=1); self.norm = nn.GroupNorm(2, cout)",
        "return F.relu(self.norm(self.conv(x)))",
        (1, 64, 16, 16),
        64,
        ("convolve_kernel", "finish_kernel"),
        dtype=torch.float16,
        tolerance=2e-2,
        is_last=True,
    ),
]
TWO_BLOCKS = (Path(__file__).parent / "two_blocks.txt").read_text("utf-8")


def export_text(
    text: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    precision: str = "fp32",
    even_if_slower: bool = True,
    training: bool = False,
    convolution: str = "auto",
    is_last: bool = False,
    machine: Machine = HOPPER,
) -> tuple[Export, nn.Module, list[Any]]:
    """The file of a problem, with the model and the inputs that it was written for."""
    path = folder / "problem.py"
    path.write_text(text, encoding="utf-8")
    problem = problem_file.load(path)
    model = problem.build().to(dtype)
    inputs = [item.to(dtype) for item in problem.inputs()]
    if is_last:
        form = torch.channels_last if inputs[0].dim() == 4 else torch.channels_last_3d
        model, inputs = model.to(memory_format=form), [item.to(memory_format=form) for item in inputs]
    settings: dict[str, Any] = {"precision": precision, "even_if_slower": even_if_slower, "training": training}
    settings |= {"convolution": convolution, "machine": machine}
    made = export(text, model, inputs, problem.init_arguments(), **settings)
    return made, model, inputs


def export_named(name: str, precision: str = "fp32", training: bool = False) -> Export:
    """The file of one of the named problems, at its own size."""
    path = PROBLEMS / f"{name}.py"
    problem = problem_file.load(path)
    shape = problem.module
    sizes = (shape.batch_size, shape.in_channels, shape.depth, shape.height, shape.width)
    return export(
        path.read_text("utf-8"),
        problem.build(),
        [torch.empty(sizes)],
        problem.init_arguments(),
        machine=HOPPER,
        precision=precision,
        measured=measured,
        training=training,
    )


_STATEMENTS = re.compile(r"\bpass\b|\btry\s*:|\bexcept\b|\bimport\s+threading|_make_subclass|\.wait_stream")


def statements_in(text: str) -> list[str]:
    """The lines for which KernelBench's static checker refuses a file. It reads docstrings as code."""
    return [line for line in text.splitlines() if _STATEMENTS.search(line.partition("#")[0].partition("//")[0])]


def ruff(*paths: Path) -> str:
    """What ruff with its own settings finds wrong with files."""
    found = ""
    for arguments in (["check"], ["format", "--diff"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length=120", "--no-cache"]
        done = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)
        found += done.stdout + done.stderr if done.returncode else ""
    return found


def specialised(
    function: ast.FunctionDef,
    constants: Mapping[str, object],
    names: Mapping[str, str] = {},
    keep: Collection[str] = (),
) -> ast.FunctionDef:
    """A copy that is specialised."""
    made = copied(function)
    specialise(made, constants, names, keep)
    return made


def as_text(function: ast.FunctionDef) -> Kernel:
    """A function as it is before its lines are broken."""
    return Kernel(function.name, text_of(function), tuple(arg.arg for arg in function.args.args))
