"""Exported files with active dropout: the mask is drawn beside the kernels, and only where they run; interpreted."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export.exporting import SMALL_CARD, Problem, export_text, ruff

pytestmark = pytest.mark.filterwarnings("ignore")  # of the interpreter, about infinities

# KernelBench's level 2 problem 66, small.
MATMUL = Problem(
    "66",
    "self.matmul = nn.Linear(cin, cout); self.drop = nn.Dropout(0.2)",
    "return torch.softmax(self.drop(self.matmul(x)), dim=1)",
    (4, 16),
    24,
    ("linear_kernel",),
)
# Level 2 problem 83, small and channels-last, with two masks before norms that have tensors of their own.
LAST = Problem(
    "83",
    "self.conv = nn.Conv2d(cin, cout, 3); self.drop = nn.Dropout(0.3); self.norm = nn.GroupNorm(2, cout); "
    "self.features = nn.Dropout2d(0.4)",
    "x = self.features(self.drop(self.conv(x))); return torch.clamp(self.norm(x), 0.0, 1.0)",
    (2, 4, 4, 4),
    8,
    ("finish_kernel",),
    is_last=True,
)


def test_a_file_draws_masks_after_the_check_and_is_laid_out(tmp_path: Path) -> None:
    made, _, _ = export_text(LAST.text, tmp_path, is_last=True)
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    (chain,) = made.chains
    assert chain.chain.roles[-2:] == ("full", "row")
    assert len(chain.given) == len(chain.chain.roles) - 2
    forward = made.text[made.text.index("def forward(self") :]
    assert forward.index("self.drop.training") < forward.index("fits(") < forward.index("mask = ")


def assert_like_the_model(problem: Problem, folder: Path, change: tuple[str, str] = ("", "")) -> None:
    """The file's kernels against the model with the same seed: results, gradients, and what is drawn next."""
    made, model, (x,) = export_text(problem.text, folder, is_last=problem.is_last, machine=SMALL_CARD)
    path = folder / f"exported_{problem.name}.py"
    path.write_text(made.text.replace(*change), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.fits = lambda *_: True  # type: ignore[attr-defined]
    ours = module.ModelNew(problem.shape[1], problem.cout)
    ours = ours.to(memory_format=torch.channels_last) if problem.is_last else ours
    ours.load_state_dict(model.state_dict())
    found = []
    for one in (ours, model):
        torch.manual_seed(5)
        leaf = x.detach().clone().requires_grad_()
        result = one(leaf)
        after = torch.rand(3)
        grads = torch.autograd.grad(result.square().sum(), [leaf, *one.parameters()])
        found.append([result.detach(), after, *grads])
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)
    for one in (ours, model):
        torch.manual_seed(5)
        found.append([one.eval()(x)])
    torch.testing.assert_close(*found[2:])


@pytest.mark.interpret
@pytest.mark.parametrize("problem", [MATMUL, LAST], ids=["66", "83"])
def test_a_file_drops_what_the_model_drops(problem: Problem, tmp_path: Path) -> None:
    assert_like_the_model(problem, tmp_path)


@pytest.mark.interpret
def test_a_file_with_another_mask_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_like_the_model(MATMUL, tmp_path, (", 0.2, True)[1]", ", 0.8, True)[1]"))


def test_a_chain_ends_before_a_dropout_if_something_else_draws_before_its_end(tmp_path: Path) -> None:
    """A file draws where its kernels run: the other numbers would then be drawn first."""
    between = "y = self.drop(self.matmul(x)); z = torch.rand_like(x[:, :1]); return torch.relu(y) * z"
    made, _, _ = export_text(replace(MATMUL, forward=between).text, tmp_path)
    assert [str(chain.chain) for chain in made.chains] == ["linear(16→24)"]
    assert "mask" not in made.text[made.text.index("def forward(self") :]
