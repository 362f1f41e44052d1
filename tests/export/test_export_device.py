"""Exported files on a card: both passes against float64, with gradient mode on and off."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from export.exporting import SMALL_PROBLEMS, Problem, export_text
from postlude.check.modes import pytorch_switches
from postlude.hardware import machine_for

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """Where PyTorch convolves in a file, it follows its own switch."""
    with pytorch_switches("fp32", torch.device("cuda")):
        yield


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("problem", SMALL_PROBLEMS, ids=lambda problem: problem.name)
def test_a_file_runs_its_kernels_with_gradients(problem: Problem, training: bool, tmp_path: Path) -> None:
    if training and problem.precision == "tf32":
        pytest.skip("PyTorch's backward convolutions follow its own switch")
    settings = {"dtype": problem.dtype, "precision": problem.precision, "is_last": problem.is_last}
    made, model, inputs = export_text(
        problem.text,
        tmp_path,
        **settings,  # type: ignore[arg-type]
        training=training,
        machine=machine_for("cuda"),
    )
    path = tmp_path / "file.py"
    path.write_text(made.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"exported_{tmp_path.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    answers: list[bool] = []
    fits = module.fits
    module.fits = lambda *given: answers.append(fits(*given)) or answers[-1]
    state = {n: torch.rand_like(v) if v.is_floating_point() else v for n, v in model.state_dict().items()}
    model.load_state_dict(state)
    exact = copy.deepcopy(model).double()
    truths = [item.double().requires_grad_() for item in inputs]
    truth = exact(*truths)
    truth.square().sum().backward()
    ours = module.ModelNew(problem.shape[1], problem.cout).to(problem.dtype).cuda()
    if problem.is_last:
        ours = ours.to(memory_format=torch.channels_last)
    ours.load_state_dict(state)
    leaves = [item.detach().cuda().requires_grad_() for item in inputs]
    result = ours(*leaves)
    result.square().sum().backward()
    assert answers == [True] * len(made.chains)
    assert float((result.detach().cpu().double() - truth.detach()).abs().max()) <= problem.tolerance
    found = [leaf.grad for leaf in leaves] + [parameter.grad for parameter in ours.parameters()]
    expected = [leaf.grad for leaf in truths] + [parameter.grad for parameter in exact.parameters()]
    largest = max(float(grad.abs().max()) for grad in expected if grad is not None)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert float((one.cpu().double() - other).abs().max()) <= 10 * problem.tolerance * largest
    ours.load_state_dict(state)
    with torch.no_grad():
        assert float((ours(*leaves).cpu().double() - truth.detach()).abs().max()) <= problem.tolerance
