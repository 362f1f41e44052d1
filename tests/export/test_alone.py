"""Exported files run where Postlude cannot be imported, their kernels by Triton's interpreter."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export.exporting import PROBLEMS, SMALL_CARD, SMALL_PROBLEMS, TWO_BLOCKS, Problem, export_text, ruff, statements_in
from kernels.cuda_host import build as cuda_host
from postlude.export.export_model import Export

pytest.importorskip("triton")
pytestmark = pytest.mark.export
BY_NAME = {problem.name: problem for problem in SMALL_PROBLEMS}
SMALL_23 = (PROBLEMS / "conv3d_group_norm_mean.py").read_text("utf-8").replace("batch_size = 128", "batch_size = 2")
SMALL_23 = SMALL_23.replace("depth, height, width = 24, 32, 32", "depth, height, width = 7, 8, 7")

TRANSPOSED = Problem(
    "one channel, transposed",
    "self.conv = nn.ConvTranspose3d(cin, cout, 3, padding=1, bias=False); self.norm = nn.GroupNorm(2, cout)",
    "return self.norm(self.conv(x)).mean((1, 2, 3, 4))",
    (2, 1, 4, 5, 6),
    8,
    (),
).text


FOUR_CHANNELS = Problem(
    "four channels, padded",
    "self.conv = nn.Conv3d(cin, cout, 3, padding=(1, 0, 2)); self.norm = nn.GroupNorm(4, cout, eps=1e-3)",
    "return torch.tanh(self.norm(self.conv(x)).mean((1, 2, 3, 4)))",
    (2, 4, 12, 4, 35),
    16,
    (),
).text
TWO_AXES = Problem(
    "two axes, transposed",
    "self.conv = nn.ConvTranspose2d(cin, cout, (2, 3)); self.norm = nn.GroupNorm(8, cout)",
    "return self.norm(self.conv(x)).mean((1, 2, 3))",
    (2, 3, 19, 33),
    8,
    (),
).text
KERNELS = ("few_channels_moments", "few_channels_finish")


def case_of(
    folder: Path, file: str, made: Export, model: nn.Module, inputs: list[Any], arguments: list[int], tolerance: float
) -> dict[str, Any]:
    assert statements_in(made.text) == []
    (folder / file).write_text(made.text, encoding="utf-8")
    state = {name: torch.rand_like(value) if value.is_floating_point() else value for name, value in
             model.state_dict().items()}  # fmt: skip
    model.load_state_dict(state)
    exact = copy.deepcopy(model).double()
    leaves = [item.double().requires_grad_() for item in inputs]
    result = exact(*leaves)
    result.square().sum().backward()
    gradients = {str(number): leaf.grad for number, leaf in enumerate(leaves)}
    gradients |= {name: parameter.grad for name, parameter in exact.named_parameters()}
    return {
        "file": file,
        "arguments": arguments,
        "state": state,
        "inputs": inputs,
        "result": result.detach(),
        "tolerance": tolerance,
        "chains": len(made.chains),
        "libraries": {},
        "gradients": gradients,
        "after": {name: buffer.clone() for name, buffer in exact.named_buffers()},
        "is_quick": False,
        "is_last": False,
        "trains": any(chain.trains for chain in made.chains),
        "second": torch.zeros(()),
    }


def with_second(case: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A case that is also asked for second gradients, for some gradients, and for none."""
    exact = copy.deepcopy(model).double()
    leaf = case["inputs"][0].double().requires_grad_()
    (first,) = torch.autograd.grad(exact(leaf).square().sum(), leaf, create_graph=True)
    return {**case, "is_quick": True, "second": torch.autograd.grad(first.square().sum(), leaf)[0]}


def small_case(
    folder: Path, problem: Problem, training: bool = False, is_quick: bool = False, convolution: str = "auto"
) -> dict[str, Any]:
    settings = {"dtype": problem.dtype, "precision": problem.precision, "is_last": problem.is_last}
    made, model, inputs = export_text(
        problem.text,
        folder,
        **settings,  # type: ignore[arg-type]
        training=training,
        convolution=convolution,
        machine=SMALL_CARD,
    )
    names = {kernel.name for chain in made.chains for kernel in chain.kernels}
    if convolution == "auto":
        assert set(problem.kernels) <= names, names
    assert "Measured   " not in made.text  # nothing was at this size
    file = re.sub(r"\W+", "_", problem.name) + f"{'_trained' * training}_{convolution}.py"
    case = case_of(folder, file, made, model, inputs, [problem.shape[1], problem.cout], problem.tolerance)
    return {**(with_second(case, model) if is_quick else case), "is_last": problem.is_last}


def run_alone(folder: Path, cases: list[dict[str, Any]]) -> str:
    torch.save(cases, folder / "cases.pt")
    program = Path(__file__).parent / "alone.py"
    command = [sys.executable, "-W", "ignore", str(program), str(folder)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kind_of_chain_runs_alone(tmp_path: Path) -> None:
    quick = ("norm alone", "PyTorch's convolution without a norm")
    cases = [small_case(tmp_path, problem, is_quick=problem.name in quick) for problem in SMALL_PROBLEMS]
    made, model, inputs = export_text(TWO_BLOCKS, tmp_path)
    assert len(made.chains) == 4  # the head is a linear layer
    cases.append(case_of(tmp_path, "two_blocks.py", made, model, inputs, [4, 5], 2e-5))
    kept = ("61", "im2col, a copy apart, and a number as a tensor")
    cases += [small_case(tmp_path, BY_NAME[name], convolution="pytorch") for name in kept]
    assert ruff(*(tmp_path / case["file"] for case in cases)) == ""
    assert run_alone(tmp_path, cases) == ""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel for the host")
def test_the_direct_convolution_runs_alone(tmp_path: Path) -> None:
    cases = []
    for name, text, arguments in (
        ("chain_23", SMALL_23, [3, 24, 3, 8]),
        ("four_channels_padded", FOUR_CHANNELS, [4, 16]),
        ("two_axes_transposed", TWO_AXES, [3, 8]),
        ("one_channel_transposed", TRANSPOSED, [1, 8]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        made, model, inputs = export_text(text, folder)
        case = case_of(tmp_path, f"{name}.py", made, model, inputs, arguments, 1e-5)
        case["libraries"] = {entry: host_library(folder, made, entry) for entry in KERNELS}
        cases.append(case)
        if name == "chain_23":
            mutant = mutant_of_23(tmp_path / "mutant", case, made)
    cases.append(trained_23(tmp_path))
    assert ruff(*(tmp_path / case["file"] for case in cases)) == ""
    first, *gradients = run_alone(tmp_path, [*cases, mutant]).splitlines()  # the right one says nothing
    assert first.startswith("chain_23.py: its kernels: an error")
    assert all(line.startswith("chain_23.py: the gradient of") for line in gradients)  # twice the result goes back


def trained_23(folder: Path) -> dict[str, Any]:
    """Chain 23 with the library's kernels of both passes."""
    made, model, inputs = export_text(SMALL_23, folder, training=True)
    case = case_of(folder, "trained_23.py", made, model, inputs, [3, 24, 3, 8], 1e-5)
    libraries = {entry: host_library(folder, made, entry) for entry in KERNELS}
    back = host_library(folder, made, "few_channels_gradient", "SOURCE_GRADIENT")
    return {**case, "libraries": {**libraries, "few_channels_gradient": back}}


def mutant_of_23(folder: Path, case: dict[str, Any], made: Export) -> dict[str, Any]:
    """Chain 23's last kernel with the first group's moments for all."""
    source, before = made.chains[0].sources["SOURCE"], "first = c / C_PER_GROUP * C_PER_GROUP;"
    assert source.count(before) == 1
    folder.mkdir()
    library = cuda_host.build_text(folder, source.replace(before, "first = 0;"), "few_channels_finish")
    return {**case, "libraries": {**case["libraries"], "few_channels_finish": str(library)}}


def host_library(folder: Path, made: Export, entry: str, source: str = "SOURCE") -> str:
    return str(cuda_host.build_text(folder, made.chains[0].sources[source], entry))


# Two processes share these tests: the second begins here, and both then take as long.
TRAINED = (
    "PyTorch's convolution, residual",
    "PyTorch's convolution without a norm",
    "norm alone",
    "by phase of the strides, no norm after it",
    "layer_norm",
    "windows of channels that leave lanes",
    "means over windows in padding",
    "softmax and what follows",
)


def test_files_that_train_have_the_librarys_backward_pass(tmp_path: Path) -> None:
    cases = [
        small_case(tmp_path, BY_NAME[name], training=True, is_quick=name.endswith("without a norm")) for name in TRAINED
    ]
    # Both products of gradients, of which the interpreter takes long: one small problem.
    problem = replace(BY_NAME["batch_norm in training"], shape=(2, 16, 3, 3))
    cases.append(small_case(tmp_path, problem, training=True))
    assert "weight_gradient_kernel" in (tmp_path / cases[-1]["file"]).read_text("utf-8")
    assert all(case["trains"] for case in cases)
    assert ruff(*(tmp_path / case["file"] for case in cases)) == ""
    text = (tmp_path / cases[2]["file"]).read_text("utf-8")
    before = "(v0 - mean) * rstd"
    assert text.count(before) == 2
    (tmp_path / "mutant.py").write_text(text.replace(before, "(v0 - mean)"), encoding="utf-8")
    lines = run_alone(tmp_path, [*cases, {**cases[2], "file": "mutant.py"}]).splitlines()
    assert [line for line in lines if not line.startswith("mutant.py: the gradient of")] == []
    assert lines


# γ left out of a kernel; relu left out of what runs without kernels; in the backward pass that PyTorch's functions
# make other groups, and a gradient that is left out.
WRONG = {
    "* (rstd * gamma)": ("* rstd", "its kernels: an error"),
    "F.relu(self.norm(x))": ("self.norm(x)", "PyTorch's operators: an error"),
    "F.group_norm(x, 3,": ("F.group_norm(x, 2,", "the gradient of"),
    "[1](grad)": ("[1](grad * 0)", "the gradient of"),
}


def test_a_wrong_file_is_seen(tmp_path: Path) -> None:
    right = small_case(tmp_path, BY_NAME["norm alone"])
    text = (tmp_path / right["file"]).read_text("utf-8")
    for number, (before, (after, _)) in enumerate(WRONG.items()):
        assert before in text
        (tmp_path / f"mutant_{number}.py").write_text(text.replace(before, after), encoding="utf-8")
    cases = [{**right, "file": f"mutant_{number}.py"} for number in range(len(WRONG))]
    lines = run_alone(tmp_path, [right, *cases]).splitlines()
    assert all(line.startswith("mutant_") for line in lines)
    for number, (_, seen) in enumerate(WRONG.values()):
        assert any(line.startswith(f"mutant_{number}.py: {seen}") for line in lines), (number, lines)


def test_an_import_of_postlude_is_seen(tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text("import postlude\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="must not import postlude"):
        run_alone(tmp_path, [{"file": "importing.py"}])
