"""Exported files as texts: laid out as ruff would, of the promised size, or refused in one sentence."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from export.exporting import (
    PACKED,
    SMALL_PROBLEMS,
    TWO_BLOCKS,
    Problem,
    export_named,
    export_text,
    ruff,
    statements_in,
)
from postlude.errors import PostludeError
from postlude.export.figures import figures


@pytest.mark.parametrize(
    ("name", "precision", "most"),
    [
        ("conv_transpose3d_relu_group_norm", "fp32", 340),
        ("conv_transpose3d_relu_group_norm", "tf32", 320),
        ("conv3d_group_norm_mean", "fp32", 380),
        ("conv3d_group_norm_mean", "tf32", 375),
    ],
)
def test_the_named_chains_files_are_short_and_laid_out(name: str, precision: str, most: int, tmp_path: Path) -> None:
    made = export_named(name, precision)
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    assert figures(made.text).lines < most
    assert figures(made.text).longest_function[0] in ("convolve_kernel", "few_channels_moments")
    assert "postlude." not in made.text
    packages = set(re.findall(r"^(?:import|from) (\w+)", made.text, re.MULTILINE))
    assert packages
    assert packages <= {"ctypes", "functools", "typing", "torch", "triton"}
    assert "Measured   " in made.text
    assert "not at this size" not in made.text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("conv_transpose3d_relu_group_norm", "ConvReluNorm"), ("conv3d_group_norm_mean", "ConvNormMean")],
)
def test_training_has_kernels_for_the_gradients(name: str, wanted: str) -> None:
    made = export_named(name, training=True)
    compile(made.text, "trained.py", "exec")
    assert made.chains[0].trains
    text = made.text[made.text.index(f"class {wanted}(torch.autograd.Function):") :]
    assert "@once_differentiable" in text
    assert "_by_pytorch" not in made.text
    assert ("weight_gradient_kernel[" in text) == (wanted == "ConvReluNorm")
    assert ("SOURCE_GRADIENT" in text) == (wanted == "ConvNormMean")


@pytest.mark.parametrize("word", ["torch.tanh", "F.leaky_relu", "F.gelu"])
def test_a_word_twice_has_its_gradient_on_its_own_gradient(word: str, tmp_path: Path) -> None:
    forward = f"return {word}({word}(torch.min(self.conv(x), dim=1, keepdim=True)[0]))"
    asked = Problem("", "self.conv = nn.Conv2d(cin, cout, 3)", forward, (2, 16, 6, 5), 16, ())
    made, _, _ = export_text(asked.text, tmp_path, training=True)
    (tmp_path / "made.py").write_text(made.text, encoding="utf-8")
    assert made.chains[0].trains
    assert ruff(tmp_path / "made.py") == ""  # no name is undefined


def test_gradients_that_nobody_wants_are_not_computed(tmp_path: Path) -> None:
    problem = next(problem for problem in SMALL_PROBLEMS if problem.name == "batch_norm in training")
    made, _, _ = export_text(problem.text, tmp_path, training=True)
    body = made.text[made.text.index("def backward(") :]
    assert body.index("if needs[1]:") < body.index("weight_gradient_kernel[") < body.index("if needs[0]:")
    assert body.index("if needs[0]:") < body.index("input_gradient_kernel[")


def test_what_a_kernel_is_given_exists_whichever_gradients_are_wanted() -> None:
    """The kernel of the norm's gradients runs always, and writes the table that only the convolution's read."""
    text = export_named("conv3d_group_norm_mean", training=True).text
    body = text[text.index("def backward(") : text.index("moments_gradient_kernel[")]
    assert "\n        table = " in body
    assert "if needs" not in body


_SHUFFLE = """
class Gate(nn.Module):
    def forward(self, x):
        \"\"\"
        Forward pass of the gate, over all axes except the batch.
        \"\"\"
        return torch.sigmoid(x)


class Model"""


@pytest.mark.parametrize("training", [False, True])
def test_docstrings_of_the_problem_have_no_word_that_kernelbench_takes_for_a_statement(
    training: bool, tmp_path: Path
) -> None:
    asked = Problem(
        "",
        "self.conv = nn.Conv2d(cin, cout, 3); self.norm = nn.GroupNorm(2, cout); self.gate = Gate()",
        '"""Forward pass of the model, which does not bypass anything."""; '
        "return self.gate(self.norm(self.conv(x)))  # all axes except the batch pass",
        (2, 8, 6, 5),
        8,
        (),
    )
    made, _, _ = export_text(asked.text.replace("\nclass Model", _SHUFFLE), tmp_path, training=training)
    assert statements_in(asked.text) != []  # as KernelBench reads it
    assert statements_in(made.text) == []
    assert "Forward call of the gate, over all axes but the batch." in made.text
    assert "Forward call of the model, which does not bypass anything." in made.text


@pytest.mark.parametrize(("norm", "is_asked"), [("InstanceNorm2d(cout)", False), ("BatchNorm2d(cout)", True)])
def test_the_mode_is_asked_for_where_it_matters(norm: str, is_asked: bool, tmp_path: Path) -> None:
    """An instance_norm without running statistics is the same in training and in evaluation."""
    asked = Problem(
        "",
        f"self.conv = nn.Conv2d(cin, cout, 3); self.norm = nn.{norm}",
        "return torch.relu(self.norm(self.conv(x)))",
        (2, 8, 6, 5),
        8,
        (),
    )
    made, _, _ = export_text(asked.text, tmp_path)
    assert ("self.norm.training" in made.text) == is_asked


def test_a_file_without_kernels_asks_for_no_card_that_tiles_were_chosen_for(tmp_path: Path) -> None:
    """An average pool that is part of the weight leaves a convolution of PyTorch's; a sum over features, two kernels
    that run on any card."""
    pooled = Problem("", "self.conv = nn.Conv2d(cin, cout, 3)", "return F.avg_pool2d(self.conv(x), 4)",
                     (64, 3, 130, 130), 64, ())  # fmt: skip
    made, _, _ = export_text(pooled.text, tmp_path)
    assert "avg_pool(4), by fewer operations." in made.text
    assert "kernels forward" not in made.text
    assert ">= (8, 0)" in made.text
    summed = Problem("", "self.linear = nn.Linear(cin, cout)", "return self.linear(x).sum(1)", (64, 512), 512, ())
    made, _, _ = export_text(summed.text, tmp_path)
    assert "sum over features, by kernels." in made.text
    assert ">= (8, 0)" in made.text


def test_pytorchs_own_convolution_stays_the_models_call(tmp_path: Path) -> None:
    problem = SMALL_PROBLEMS[0]
    made, _, _ = export_text(problem.text, tmp_path, convolution="pytorch")
    assert [str(chain.chain) for chain in made.chains] == ["relu → group_norm(8)"]
    assert "        x = self.conv(x)\n        tensors = (x, self.norm.weight, self.norm.bias)\n" in made.text
    assert "convolve_kernel" not in made.text


def test_a_chain_of_one_tensor_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are a tuple of one, not the tensor, which would be compared sample by sample."""
    text = SMALL_PROBLEMS[0].text.replace("self.norm(torch.relu(self.conv(x)))", "torch.tanh(F.mish(self.conv(x)))")
    made, _, inputs = export_text(text, tmp_path, convolution="pytorch")
    module = written(made.text, tmp_path)
    asked: list[object] = []
    monkeypatch.setattr(module, "fits", lambda tensors, expected: bool(asked.append((tensors, expected))))
    module.ModelNew(16, SMALL_PROBLEMS[0].cout)(*inputs)
    ((tensors, expected),) = asked
    assert isinstance(tensors, tuple)
    assert [tuple(one.shape) for one in tensors] == list(expected)


def test_several_chains_share_what_is_the_same(tmp_path: Path) -> None:
    made, _, _ = export_text(TWO_BLOCKS, tmp_path)
    assert len(made.chains) == 4  # the head is a linear layer
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    for name in ("scale_for", "leaky_relu", "fits"):
        assert made.text.count(f"def {name}(") == 1
    assert made.text.count("def convolve_kernel(") == made.text.count("def convolve_kernel_2(") == 1
    defined = re.findall(r"^(?:def|class) (\w+)\(", made.text, re.MULTILINE)
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
    "a tensor of its own": ("first = self.enc(x)", "first = self.enc(x + torch.ones(2))", "a tensor of its own"),
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


def test_batch_norm_runs_kernels_in_the_mode_it_was_written_for(tmp_path: Path) -> None:
    made, model, inputs = export_text(NORMS.text, tmp_path)
    found = [str(text.chain) for text in made.chains]
    assert found == [
        "conv2d(16→16, k3) → group_norm(2) → relu",
        "conv2d(16→16, k3) → mish → batch_norm(batch)",
        "conv2d(16→16, k3) → layer_norm over the last axis → gelu",
    ]
    assert "if self.has_kernels and self.bn.training and fits(tensors, SHAPES2):" in made.text
    assert "            self.bn.num_batches_tracked.add_(1)\n" in made.text
    module = written(made.text, tmp_path)
    assert ruff(tmp_path / "file.py") == ""
    plain = module.ModelNew(16, 16)
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(plain(*inputs), model(*inputs), rtol=0, atol=0)
    for ours, theirs in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    module.fits = lambda *_: 1 / 0  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        plain.eval()(*inputs)  # the first chain has no mode
    assert export_text(NORMS.text.replace("self.bn =", "self.bn2 =").replace("self.bn(", "self.bn2.eval()("), tmp_path)


def test_numbers_of_the_constructor_stay_the_models_own(tmp_path: Path) -> None:
    """A file holds the calls of a forward; a model that was built with other numbers must not run with these."""
    init = "self.norm = nn.GroupNorm(3, cin); self.by = cout"
    for forward in ("return F.relu(self.norm(x)) * self.by", "return F.max_pool2d(F.relu(self.norm(x)) * self.by, 2)"):
        problem = Problem("numbers", init, forward, (2, 6, 5, 7), 4, ())
        made, _, inputs = export_text(problem.text, tmp_path)
        assert str(made.chains[0].chain).startswith("group_norm(3) → relu → mul(4)")
        module = written(made.text, tmp_path)
        four, eight = module.ModelNew(6, 4), module.ModelNew(6, 8)
        torch.testing.assert_close(2 * four(*inputs), eight(*inputs))


MAX = Problem(
    "values of max",
    "self.norm = nn.GroupNorm(3, cin); self.head = nn.LayerNorm(5)",
    "return self.head(torch.max(F.relu(self.norm(x)), dim=1)[0].mean(2))",
    (2, 6, 5, 7),
    4,
    (),
)


@pytest.mark.parametrize("taken", ["[0]", ".values"])
def test_values_of_a_pair_are_the_chains(taken: str, tmp_path: Path) -> None:
    made, _, _ = export_text(MAX.text.replace("[0]", taken), tmp_path)
    assert [str(chain.chain) for chain in made.chains] == ["group_norm(3) → relu → max over channels"]
    assert f"            x = torch.max(F.relu(self.norm(x)), dim=1){taken}\n        x = x.mean(2)\n" in made.text
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""


def test_values_of_a_pair_that_are_taken_twice_are_one_value(tmp_path: Path) -> None:
    forward = "p = torch.max(F.relu(self.norm(x)), dim=1)\n        return p[0] + p.values"
    made, _, _ = export_text(MAX.text.replace(MAX.forward, forward), tmp_path)
    chain = "group_norm(3) → relu → max over channels → add(value 3)"
    assert [str(one.chain) for one in made.chains] == [chain]


def test_a_pair_that_is_used_as_such_stays_plain(tmp_path: Path) -> None:
    forward = "p = torch.max(F.relu(self.norm(x)), dim=1)\n        return p[0] * p.indices"
    made, _, _ = export_text(MAX.text.replace(MAX.forward, forward), tmp_path)
    assert [str(chain.chain) for chain in made.chains] == ["group_norm(3) → relu"]
    assert "x = torch.max(x, dim=1)\n" in made.text


def test_in_training_a_reduction_over_channels_is_part_of_the_chain_too(tmp_path: Path) -> None:
    text = MAX.text.replace("torch.max(F.relu(self.norm(x)), dim=1)[0]", "torch.logsumexp(F.relu(self.norm(x)), 1)")
    chains = [export_text(text, tmp_path, training=training)[0].chains[0] for training in (False, True)]
    assert {str(chain.chain) for chain in chains} == {"group_norm(3) → relu → logsumexp over channels"}
    assert [chain.trains for chain in chains] == [False, True]


def test_more_channels_than_a_tile_holds_are_reduced_by_pytorch(tmp_path: Path) -> None:
    text = MAX.text.replace("torch.max(F.relu(self.norm(x)), dim=1)[0]", "F.relu(self.norm(x)).amin(1)")
    made, _, _ = export_text(text.replace("randn(2, 6,", "randn(2, 516,").replace("[6, 4]", "[516, 4]"), tmp_path)
    assert re.search(r"torch\.amin\(\w+, dim=\[?1\]?", made.text)
    assert "channels_kernel" not in made.text


def test_a_long_docstring_keeps_its_quotes(tmp_path: Path) -> None:
    """Where its first line is empty, and a later one is too long for a file."""
    words = "A " + "very " * 30 + "long line."
    text = MAX.text.replace("class Model(nn.Module):\n", f'class Model(nn.Module):\n    """\n    {words}\n    """\n\n')
    made, _, _ = export_text(text, tmp_path)
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    assert 'class ModelNew(nn.Module):\n    """A very very' in made.text


def test_a_file_built_otherwise_runs_without_kernels(tmp_path: Path) -> None:
    problem = SMALL_PROBLEMS[0]
    made, _, _ = export_text(problem.text, tmp_path)
    module = written(made.text, tmp_path)
    module.fits = lambda *_: True  # type: ignore[attr-defined]
    other = module.ModelNew(4, 16)  # the kernels are for 16 and 32 channels
    assert not other.has_kernels
    assert other(torch.randn(1, 4, 3, 3, 3)).shape == (1, 16, 5, 5, 5)
    assert module.ModelNew(16, 32).has_kernels


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
    assert [set(first.sources), set(second.sources)] == [{"SOURCE"}, {"SOURCE2"}]
    assert 'compiled(SOURCE2, "few_channels_moments"' in second.functions[second.name]
    assert "SOURCE2" not in first.functions[first.name]
    compile(made.text, "two_directs.py", "exec")


class Fake:
    """A stand-in for a tensor with what `fits` reads."""

    def __init__(self, *shape: int, **other: object) -> None:
        self.shape, self.is_cuda = torch.Size(shape), True
        self.dtype, self.device, self.contiguous = torch.float32, "cuda:0", True
        vars(self).update(other)

    def is_contiguous(self) -> bool:
        return self.contiguous


SHAPES = ((16, 64, 32, 32, 32), (64, 128, 3, 3, 3), (128,), (128,))
UNFIT = {
    "another dtype": (0, {"dtype": torch.float16}),
    "another layout": (0, {"contiguous": False}),
    "the weight elsewhere": (1, {"device": "cuda:1"}),
    "the weight in 16 bits": (1, {"dtype": torch.float16}),
    "another batch": (0, {"shape": torch.Size((8, 64, 32, 32, 32))}),
    "no batch axis": (0, {"shape": torch.Size((64, 32, 32, 32))}),
    "other channels": (1, {"shape": torch.Size((64, 64, 3, 3, 3))}),
}


def test_fits_exactly_what_the_kernels_were_cut_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = written(export_named("conv_transpose3d_relu_group_norm").text, tmp_path)
    assert SHAPES == module.SHAPES

    def fits(place: int = 0, **other: object) -> bool:
        tensors = tuple(Fake(*s, **(other if n == place else {})) for n, s in enumerate(SHAPES))
        found: bool = module.fits(tensors, SHAPES)
        return found

    assert not module.fits(tuple(map(torch.empty, SHAPES)), SHAPES)  # the CPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fits()
    assert fits(requires_grad=True)  # a gradient is no reason against them
    for name, (place, other) in UNFIT.items():
        assert not fits(place, **other), name
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: True)
        assert not fits()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not fits()


def test_channels_last_tensors_fit_by_their_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(problem for problem in SMALL_PROBLEMS if problem.is_last)
    made, model, inputs = export_text(problem.text, tmp_path, dtype=problem.dtype, is_last=True)
    module = written(made.text, tmp_path)
    assert ruff(tmp_path / "file.py") == ""
    assert module.SHAPES[0] == (inputs[0].shape, inputs[0].stride(), torch.float16)
    assert "x.data_ptr() % 16 == 0" in made.text  # its descriptor lies over the input itself
    conv = next(model.children())
    assert module.SHAPES[1] == (conv.weight.shape, conv.weight.stride(), torch.float16)
