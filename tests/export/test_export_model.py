"""Exported files as texts: laid out as ruff would, of the promised size, or refused in one sentence."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from export.exporting import PACKED, SMALL_PROBLEMS, TWO_BLOCKS, Problem, export_named, export_text, ruff
from postlude.errors import PostludeError
from postlude.export.figures import figures


@pytest.mark.parametrize(
    ("name", "precision", "most"),
    [
        ("conv_transpose3d_relu_group_norm", "fp32", 300),
        ("conv_transpose3d_relu_group_norm", "tf32", 300),
        ("conv3d_group_norm_mean", "fp32", 250),
        ("conv3d_group_norm_mean", "tf32", 540),  # the library's kernel, cut
    ],
)
def test_the_named_chains_files_are_short_and_laid_out(name: str, precision: str, most: int, tmp_path: Path) -> None:
    made = export_named(name, precision)
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    assert figures(made.text).lines < most
    assert figures(made.text).longest_function[0] in ("convolve_kernel", "moments_kernel", "few_channels_moments")
    assert "postlude." not in made.text
    assert re.findall(r"^(?:import|from) (\w+)", made.text, re.MULTILINE) != []
    packages = set(re.findall(r"^(?:import|from) (\w+)", made.text, re.MULTILINE))
    assert packages <= {"math", "functools", "typing", "torch", "triton"}
    assert "Measured   " in made.text
    assert "not at this size" not in made.text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("conv_transpose3d_relu_group_norm", "ConvReluNorm"), ("conv3d_group_norm_mean", "ConvNormMean")],
)
def test_training_takes_a_class_more(name: str, wanted: str, tmp_path: Path) -> None:
    made = export_named(name, training=True)
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    assert figures(made.text).lines < 400
    assert f"class {wanted}(torch.autograd.Function):" in made.text


def test_training_is_refused_where_nothing_could_start_it() -> None:
    with pytest.raises(PostludeError, match=r"no chain whose kernels could train.*leave out --training"):
        export_named("conv3d_group_norm_mean", "tf32", training=True)


def test_several_chains_share_what_is_the_same(tmp_path: Path) -> None:
    made, _, _ = export_text(TWO_BLOCKS, tmp_path)
    assert len(made.chains) == 3
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    for name in ("group_moments", "scales", "leaky_relu", "convolve_kernel", "fits"):
        assert made.text.count(f"def {name}(") == 1
    assert made.text.count("def pack_input_kernel(") == made.text.count("def pack_input_kernel_2(") == 1
    defined = re.findall(r"^def (\w+)\(", made.text, re.MULTILINE)
    assert len(defined) == len(set(defined))


def test_what_is_not_fused_says_why(tmp_path: Path) -> None:
    made, _, _ = export_text(TWO_BLOCKS.replace("6, 6, 6)", "64, 64, 64)"), tmp_path, even_if_slower=False)
    assert len(made.chains) == 2
    words = re.sub(r"\n *# ", " ", made.text)
    assert re.search(r"Left to PyTorch: conv3d\(8→8, k3, s2, p1\) .*: too small to gain", words)
    assert "self.norm(self.strided(x))" not in made.text  # one call a line where nothing is fused


REFUSED = {
    "data decide": ("first = self.enc(x)", "first = self.enc(x) if x.sum() > 0 else x", "one straight line of calls"),
    "a with block": ("first = self.enc(x)", "with torch.no_grad():\n            first = self.enc(x)", "`with` block"),
    "another module": ("width = 8", "import numpy\n\nwidth = numpy.int64(8).item()", "needs numpy"),
    "a local module": ("width = 8", "from .sizes import width", "its own package|needs sizes"),
    "modes differ": (
        "first = self.enc(x)",
        "first = self.enc(x if self.training else x + 1)",
        "training and evaluation",
    ),
    "a tensor of its own": ("first = self.enc(x)", "first = self.enc(x + torch.ones(1))", "a tensor of its own"),
    "star arguments": ("cout: int, hidden=width)", "cout: int, *rest, hidden=width)", "takes \\*rest"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    before, after, says = REFUSED[name]
    text = TWO_BLOCKS.replace(before, after, 1)
    if name == "a local module":
        text = text.replace("from .sizes", "from sizes")
        (tmp_path / "sizes.py").write_text("width = 8\n", encoding="utf-8")
    with pytest.raises(PostludeError, match=says) as raised:
        export_text(text, tmp_path)
    assert str(raised.value).count(". ") == 0
    assert str(raised.value).endswith(".")


def test_nothing_to_write_says_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(PostludeError, match=r"no chain in this model that kernels could be written for \(.+\)"):
        export_text(TWO_BLOCKS, tmp_path, even_if_slower=False)


def written(text: str, folder: Path) -> ModuleType:
    """An exported text as a module."""
    (folder / "file.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("exported_otherwise", folder / "file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NORMS = Problem(
    "norms",
    "self.first = nn.Conv2d(cin, cout, 3); self.norm = nn.GroupNorm(2, cout); "
    "self.second = nn.Conv2d(cout, cout, 3); self.bn = nn.BatchNorm2d(cout); "
    "self.third = nn.Conv2d(cout, cout, 3); self.rows = nn.LayerNorm(3)",
    "x = F.relu(self.norm(self.first(x))); x = self.bn(F.mish(self.second(x))); "
    "return F.gelu(self.rows(self.third(x)))",
    (2, 16, 9, 9),
    16,
    PACKED,
)


def test_batch_norm_in_training_and_layer_norm_stay_plain(tmp_path: Path) -> None:
    made, model, inputs = export_text(NORMS.text, tmp_path)
    found = [str(text.plan.chain) for text in made.chains]
    assert found == ["conv2d(16→16, k3) → group_norm(2) → relu", "conv2d(16→16, k3) → mish"]
    words = re.sub(r"\n *# ", " ", made.text)
    reason = "no kernels are written for batch_norm in training and layer_norm"
    assert words.count(reason) == 3
    assert "self.bn(" in made.text
    assert "self.rows(" in made.text
    module = written(made.text, tmp_path)
    assert ruff(tmp_path / "file.py") == ""
    plain = module.ModelNew(16, 16)
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(plain(*inputs), model(*inputs), rtol=0, atol=0)
    for ours, theirs in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


MAX = Problem(
    "values of max",
    "self.norm = nn.GroupNorm(3, cin); self.head = nn.Linear(5, cout)",
    "return self.head(torch.max(F.relu(self.norm(x)), dim=1)[0].mean(2))",
    (2, 6, 5, 7),
    4,
    (),
)


@pytest.mark.parametrize("taken", ["[0]", ".values"])
def test_values_of_a_pair_are_the_chains(taken: str, tmp_path: Path) -> None:
    made, _, _ = export_text(MAX.text.replace("[0]", taken), tmp_path)
    assert [str(chain.plan.chain) for chain in made.chains] == ["group_norm(3) → relu → max over channels"]
    assert f"            x = torch.max(F.relu(self.norm(x)), dim=1){taken}\n        x = x.mean(2)\n" in made.text
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""


@pytest.mark.parametrize("used", ["p[0] + p.values", "p[0] * p.indices"])
def test_a_pair_that_is_used_as_such_stays_plain(used: str, tmp_path: Path) -> None:
    forward = f"p = torch.max(F.relu(self.norm(x)), dim=1)\n        return {used}"
    made, _, _ = export_text(MAX.text.replace(MAX.forward, forward), tmp_path)
    assert [str(chain.plan.chain) for chain in made.chains] == ["group_norm(3) → relu"]
    assert "x = torch.max(x, dim=1)\n" in made.text


def test_in_training_a_reduction_over_channels_stays_plain(tmp_path: Path) -> None:
    text = MAX.text.replace("torch.max(F.relu(self.norm(x)), dim=1)[0]", "torch.logsumexp(F.relu(self.norm(x)), 1)")
    chains = [export_text(text, tmp_path, training=training)[0].chains[0] for training in (False, True)]
    assert [str(chain.plan.chain) for chain in chains] == [
        "group_norm(3) → relu → logsumexp over channels",
        "group_norm(3) → relu",
    ]
    assert [bool(chain.trainer) for chain in chains] == [False, True]


def test_more_channels_than_a_tile_holds_are_reduced_by_pytorch(tmp_path: Path) -> None:
    text = MAX.text.replace("torch.max(F.relu(self.norm(x)), dim=1)[0]", "F.relu(self.norm(x)).amin(1)")
    made, _, _ = export_text(text.replace("randn(2, 6,", "randn(2, 516,").replace("[6, 4]", "[516, 4]"), tmp_path)
    assert "result = torch.amin(result, dim=1)" in made.text
    assert "row_largest" not in made.text


def test_a_long_docstring_keeps_its_quotes(tmp_path: Path) -> None:
    """Where its first line is empty, and a later one is too long for a file."""
    words = "A " + "very " * 20 + "long line."
    text = MAX.text.replace("class Model(nn.Module):\n", f'class Model(nn.Module):\n    """\n    {words}\n    """\n\n')
    made, _, _ = export_text(text, tmp_path)
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    assert 'class ModelNew(nn.Module):\n    """\n    A very very' in made.text


def test_only_such_norms_are_nothing_to_write(tmp_path: Path) -> None:
    text = NORMS.text.replace("nn.GroupNorm(2, cout)", "nn.BatchNorm2d(cout)").replace("F.mish", "")
    with pytest.raises(PostludeError, match="no kernels are written for batch_norm in training"):
        export_text(text, tmp_path)


def test_a_file_built_otherwise_runs_without_kernels(tmp_path: Path) -> None:
    problem = SMALL_PROBLEMS[0]
    made, _, _ = export_text(problem.text, tmp_path)
    module = written(made.text, tmp_path)
    module.fits = lambda *_: True  # type: ignore[attr-defined]
    other = module.ModelNew(4, 16)  # the kernels are for 16 and 128 channels
    assert not other.has_kernels
    assert other(torch.randn(1, 4, 3, 3, 3)).shape == (1, 16, 5, 5, 5)
    assert module.ModelNew(16, 128).has_kernels


def test_two_sources_of_cuda_have_a_launcher_each(tmp_path: Path) -> None:
    problem = Problem(
        "two directs",
        "self.conv = nn.Conv3d(cin, cout, 3); self.norm = nn.GroupNorm(2, cout); "
        "self.conv2 = nn.Conv3d(cin, 2 * cout, 3); self.norm2 = nn.GroupNorm(2, 2 * cout)",
        "a = self.norm(self.conv(x)).mean((1, 2, 3, 4)); return a + self.norm2(self.conv2(x)).mean((1, 2, 3, 4))",
        (2, 3, 5, 6, 7),
        8,
        (),
    )
    made, _, _ = export_text(problem.text, tmp_path)
    assert len(made.chains) == 2
    first, second = made.chains
    assert "_compile_kernel(SOURCE, name)" in first.helpers["compiled"]
    assert "_compile_kernel(SOURCE2, name)" in second.helpers["compiled_2"]
    assert 'compiled_2("moments_kernel"' in second.launcher
    assert "compiled_2" not in first.launcher
    compile(made.text, "two_directs.py", "exec")


def test_a_tile_too_small_for_its_lanes_moments_goes_the_longer_way(tmp_path: Path) -> None:
    init = "self.conv = nn.Conv2d(cin, cout, 3); self.norm = nn.GroupNorm(2, cout)"
    forward = "return self.norm(self.conv(x)).mean((1, 2, 3))"
    small = Problem("small tile", init, forward, (2, 3, 6, 6), 32, ())
    large = Problem("large tile", init, forward, (2, 3, 22, 22), 8, ())
    names = [set(export_text(problem.text, tmp_path)[0].chains[0].helpers) for problem in (small, large)]
    assert names == [{"moments_kernel"}, {"compiled"}]


class Fake:
    """As much of a tensor as `fits` asks."""

    def __init__(self, *shape: int, **other: object) -> None:
        self.shape, self.requires_grad, self.is_cuda = torch.Size(shape), False, True
        self.dtype, self.device, self.contiguous = torch.float32, "cuda:0", True
        vars(self).update(other)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def is_contiguous(self) -> bool:
        return self.contiguous


X, WEIGHT = (2, 64, 5, 6, 7), (64, 128, 3, 3, 3)
UNFIT = {
    "another dtype": ({"dtype": torch.float16}, {}),
    "another layout": ({"contiguous": False}, {}),
    "a gradient is wanted": ({}, {"requires_grad": True}),
    "the weight elsewhere": ({}, {"device": "cpu"}),
    "no sample": ({"shape": torch.Size((0, *X[1:]))}, {}),
    "no batch axis": ({"shape": torch.Size(X[1:])}, {}),
    "other channels": ({"shape": torch.Size((2, 32, 5, 6, 7))}, {}),
    "offsets beyond 32 bits": ({"shape": torch.Size((1, 64, 256, 256, 256))}, {}),
}


def test_fits_what_the_kernels_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file.py").write_text(export_named("conv_transpose3d_relu_group_norm").text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("exported_61", tmp_path / "file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.fits(64, torch.empty(X), torch.empty(WEIGHT))  # the CPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert module.fits(64, Fake(*X), Fake(*WEIGHT))
    for name, (x, weight) in UNFIT.items():
        assert not module.fits(64, Fake(*X, **x), Fake(*WEIGHT, **weight)), name
    with torch.no_grad():
        assert module.fits(64, Fake(*X), Fake(*WEIGHT, requires_grad=True))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: True)
        assert not module.fits(64, Fake(*X), Fake(*WEIGHT))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not module.fits(64, Fake(*X), Fake(*WEIGHT))
