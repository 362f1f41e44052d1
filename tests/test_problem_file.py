"""Problem files: what a good one gives, and the one sentence for each way in which a file can be bad."""

from __future__ import annotations

import inspect
import pickle
import sys
from pathlib import Path

import pytest
import torch

from postlude import problem_file, problems
from postlude.errors import ProblemFileError

GOOD = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        self.linear = nn.Linear(4, width, bias=bias)

    def forward(self, x):
        return self.linear(x)


def get_inputs():
    return [torch.rand(2, 4)]


def get_init_inputs():
    return [3]
"""


def write(folder: Path, text: str, name: str = "problem.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def go_through(path: Path, class_name: str) -> None:
    problem = problem_file.load(path, class_name)
    problem.run(problem.build(), problem.inputs())


def sentence_for(path: Path, class_name: str = "Model") -> str:
    """What loading, building and running the file ends with."""
    with pytest.raises(ProblemFileError) as caught:
        go_through(path, class_name)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.endswith(".")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


def test_good_file(tmp_path: Path) -> None:
    path = list(sys.path)
    problem = problem_file.load(write(tmp_path, GOOD))
    model, inputs = problem.build(), problem.inputs()
    assert problem.run(model, inputs).shape == (2, 3)
    assert sys.path == path


def test_seeds_decide_parameters_and_inputs_and_leave_the_caller_alone(tmp_path: Path) -> None:
    problem = problem_file.load(write(tmp_path, GOOD))
    before = torch.get_rng_state()
    one, same, other = problem.build(), problem.build(), problem.build(seed=1)
    assert torch.equal(one.state_dict()["linear.weight"], same.state_dict()["linear.weight"])
    assert not torch.equal(one.state_dict()["linear.weight"], other.state_dict()["linear.weight"])
    assert torch.equal(problem.inputs()[0], problem.inputs()[0])
    assert not torch.equal(problem.inputs()[0], problem.inputs(seed=1)[0])
    assert torch.equal(before, torch.get_rng_state())


def test_two_files_of_one_name_stay_apart_and_can_be_inspected(tmp_path: Path) -> None:
    first = problem_file.load(write(tmp_path, GOOD))
    second = problem_file.load(write(tmp_path, GOOD.replace("rand(2", "rand(5")))
    assert first.inputs()[0].shape != second.inputs()[0].shape
    assert first.module.__name__ != second.module.__name__
    assert "self.linear" in inspect.getsource(second.model_class)
    assert pickle.loads(pickle.dumps(second.build())) is not None


@pytest.mark.parametrize("made", ["[3, False]", "[[3], {'bias': False}]", "{'width': 3, 'bias': False}", "(3, False)"])
def test_arguments_by_position_and_by_name(tmp_path: Path, made: str) -> None:
    problem = problem_file.load(write(tmp_path, GOOD.replace("[3]", made)))
    assert set(problem.build().state_dict()) == {"linear.weight"}


def test_a_list_and_a_dict_are_two_arguments_where_the_model_takes_them(tmp_path: Path) -> None:
    """KernelBench calls Model(*get_init_inputs())."""
    text = GOOD.replace("[3]", "[[3], {'bias': False}]")
    text = text.replace(
        "def __init__(self, width, bias=True):",
        "def __init__(self, sizes, options):\n        (width,), bias = sizes, options['bias']",
    )
    assert "sizes, options" in text
    problem = problem_file.load(write(tmp_path, text))
    assert problem.init_arguments() == ([[3], {"bias": False}], {})
    assert set(problem.build().state_dict()) == {"linear.weight"}


def test_candidate_is_built_with_the_reference_arguments(tmp_path: Path) -> None:
    reference = problem_file.load(write(tmp_path, GOOD))
    text = GOOD.replace("Model", "ModelNew").replace("return [3]", "return [7]")
    candidate = problem_file.load(write(tmp_path, text, "candidate.py"), "ModelNew")
    assert candidate.build(like=reference).state_dict()["linear.bias"].shape == (3,)


def test_neighbour_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path, "WIDTH = 4", "neighbour_of_the_problem.py")
    problem_file.load(write(tmp_path, "from neighbour_of_the_problem import WIDTH\n" + GOOD))
    assert str(tmp_path) not in sys.path


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert sentence_for(tmp_path / "no.py") == "there is no such file."
    assert sentence_for(tmp_path) == "this is a directory, not a Python file."
    assert sentence_for(write(tmp_path, " \n")) == "the file is empty."
    binary, latin = tmp_path / "binary.py", tmp_path / "latin.py"
    binary.write_bytes(b"\x7fELF\0\0\x01")
    latin.write_bytes(b"x = 1\n# caf\xe9\n")
    assert sentence_for(binary) == "the file is binary, not Python source."
    assert sentence_for(latin) == "the file is not UTF-8 text (line 2)."


BAD = {
    "syntax": ("class Model(:\n", "syntax error in line 1: "),
    "import": (
        "import torch\nimport no_such_module_at_all\n",
        "an import fails in line 2: ModuleNotFoundError: No mod",
    ),
    "raises at once": (
        "x = 1\n1 / 0\n",
        "running the file fails in line 2: ZeroDivisionError: division by zero.",
    ),
    "exits": ("import sys\nsys.exit(0)\n", "running the file fails in line 2: SystemExit: 0."),
    "no class": (GOOD.replace("Model", "Net"), "it has no class Model (it has Net)."),
    "no class at all": ("x = 1\n", "it has no class Model (it has no classes at all)."),
    "not a module": ("class Model:\n    pass\n", "Model is not a subclass of torch.nn.Module."),
    "no get_inputs": (GOOD.replace("get_inputs", "inputs"), "it has no function get_inputs()."),
    "get_inputs raises": (
        GOOD.replace("[torch.rand(2, 4)]", "undefined"),
        "get_inputs() raises NameError: name 'undefined' is not defined.",
    ),
    "get_init_inputs raises": (
        GOOD.replace("return [3]", "raise KeyError('first\\nsecond')"),
        "get_init_inputs() raises KeyError: 'first",
    ),
    "init raises": (GOOD.replace("[3]", "[]"), "Model.__init__ raises TypeError: "),
    "one tensor, no list": (
        GOOD.replace("[torch.rand(2, 4)]", "torch.rand(2, 4)"),
        "get_inputs() must return a list or a tuple, not a Tensor.",
    ),
    "inputs of None": (
        GOOD.replace("[torch.rand(2, 4)]", "None"),
        "get_inputs() must return a list or a tuple, not None.",
    ),
    "no tensor": (GOOD.replace("[torch.rand(2, 4)]", "[1]"), "get_inputs() returns no tensor."),
    "init inputs of int": (
        GOOD.replace("return [3]", "return 3"),
        "get_init_inputs() must return a list or a tuple, not an int.",
    ),
    "forward raises": (
        GOOD.replace("return self.linear(x)", "raise RuntimeError('five of four')"),
        "Model.forward raises RuntimeError: five of four.",
    ),
    "tuple": (
        GOOD.replace("return self.linear(x)", "return x, x"),
        "Model returns a tuple of 2; this command takes models that return one tensor.",
    ),
    "nothing": (
        GOOD.replace("return self.linear(x)", "pass"),
        "Model returns None; this command takes models that return one tensor.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_sentence_for_each_bad_file(tmp_path: Path, name: str) -> None:
    text, sentence = BAD[name]
    modules = set(sys.modules)
    assert sentence_for(write(tmp_path, text)).startswith(sentence)
    left = [module for module in set(sys.modules) - modules if module.startswith("postlude_problem")]
    assert len(left) <= ("running" not in sentence and "import" not in sentence and "syntax" not in sentence)


def test_candidate_without_its_class(tmp_path: Path) -> None:
    assert sentence_for(write(tmp_path, GOOD), "ModelNew") == "it has no class ModelNew (it has Model)."


def test_sizes_can_be_set_and_unknown_ones_are_refused() -> None:
    folder = Path(next(iter(problems.__path__)))
    problem = problem_file.load(folder / "conv3d_group_norm_mean.py").with_sizes(batch_size=2, depth=4)
    assert problem.inputs()[0].shape == (2, 3, 4, 32, 32)
    with pytest.raises(ProblemFileError, match="no size named hieght"):
        problem.with_sizes(hieght=3)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("conv3d_group_norm_mean", [3, 24, 3, 8], (1,)),
        ("conv_transpose3d_relu_group_norm", [64, 128, 3, 8], (1, 128, 6, 6, 6)),
    ],
)
def test_named_problems(name: str, arguments: list[int], result: tuple[int, ...]) -> None:
    problem = problem_file.load(Path(next(iter(problems.__path__))) / f"{name}.py")
    assert problem.module.get_init_inputs() == arguments
    problem.with_sizes(batch_size=1, depth=4, height=4, width=4)
    assert problem.run(problem.build(), problem.inputs()).shape == result


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(3)\nclass ModelNew: pass\n",
        "from beside import Fast as ModelNew\n",
        "if True:\n    ModelNew = type('ModelNew', (), {})\n",
        "from beside import *\n",
    ],
)
def test_a_candidate_is_looked_at_without_being_run(tmp_path: Path, text: str) -> None:
    problem_file.check_candidate(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GOOD, "it has no class ModelNew (it has Model)."),
        ("ModelOld = 3\n", "it has no class ModelNew (it has no classes at all)."),
        ("class ModelNew(:\n", "syntax error in line 1"),
        ("", "the file is empty."),
    ],
)
def test_what_is_plainly_wrong_with_a_candidate_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ProblemFileError) as caught:
        problem_file.check_candidate(write(tmp_path, text))
    assert sentence in str(caught.value)
