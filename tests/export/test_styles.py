"""Files as people lay them out: what is exported runs, and keeps the comments of statements in the usual form."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from postlude import problem_file
from postlude.export.export_model import export
from postlude.export.syntax import plain_source
from postlude.export.syntax.layout import WIDTH, fold

FILE = """\
import torch
import torch.nn.functional as F
from torch import nn


# The model.
class Model(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv3d(cin, cout, 3)  # no padding
        self.norm = nn.GroupNorm(4, cout)

    # What it does.
    def forward(self, x):
        x = F.relu(self.conv(x))  # first
        return self.norm(x)


def get_inputs():
    return [torch.randn(2, 8, 6, 6, 6)]


def get_init_inputs():
    return [8, 16]
"""
BODY = "        x = F.relu(self.conv(x))  # first\n        return self.norm(x)\n"
INIT = "        super().__init__()\n        self.conv = nn.Conv3d(cin, cout, 3)  # no padding\n"


def _with(old: str, new: str) -> str:
    assert old in FILE
    return FILE.replace(old, new)


LONG = (
    "self.conv = nn.Conv3d(cin, cout, 3); self.a_name_that_takes_room = None; self.another_name_that_takes_room = None"
)
SUM = " + ".join(["0"] * 30)
STYLES = {
    "usual": FILE,
    "body beside its header": _with("(self, x):\n" + BODY, "(self, x): return self.norm(F.relu(self.conv(x)))\n"),
    "several statements in a line": _with(INIT, f"        super().__init__(); {LONG}\n"),
    "tabs": FILE.replace("    ", "\t"),
    "two spaces": FILE.replace("    ", "  "),
    "carriage returns": FILE.replace("\n", "\r\n"),
    "form feed": _with("# The model.\n", "\f\n# The model.\n"),
    "spaces around the bases": _with("class Model(nn.Module):", "class  Model (nn.Module) :"),
    "super with arguments": _with("super()", "super(Model,self)"),
    "names its class": _with(BODY, "        return self.norm(Model.act(self.conv(x)))\n").replace(
        "    # What", "    SCALE = 2.0\n    @staticmethod\n    def act(x): return F.relu(x) * Model.SCALE\n    # What"
    ),
    "names its class elsewhere": _with(BODY, "        return self.norm(act(self.conv(x)))\n").replace(
        "# The model.\n", "def act(x):\n    return F.relu(x) if issubclass(Model, nn.Module) else x\n\n\n"
    ),
    "a keyword of that name": _with(INIT, INIT + "        self.sizes = dict(Model=1, é=2)\n"),
    "star imports": _with("from torch import nn", "from torch.nn import *\nfrom torch import nn, relu").replace(
        "F.relu(", "relu("
    ).replace("nn.Conv3d(", "Conv3d("),
    "functions called like ours": _with("# The model.\n", "SHAPES = 2.0\n\n\ndef fits(x):\n    return x * SHAPES\n\n\n")
    .replace("F.relu(self.conv(x))", "F.relu(fits(self.conv(x)))"),
    "a long argument": _with("3)  # no padding", f"3,\n            padding={SUM}{' ' * 9},\n        )"),
    "branches": _with(
        INIT,
        INIT + "        if cin == 1:\n            self.e = 1\n        elif cin == 8:  # kept\n            self.e = 2\n"
        "        else:\n            self.e = 3\n        try:\n            self.f = 1\n        finally:\n"
        "            self.g = 2\n        match cin:\n            case 8:\n                self.h = 1  # kept too\n",
    ),
    "a text over several lines": _with(
        INIT, INIT + "        self.t = f'''a\n{cin}\n  b'''; assert self.t == 'a\\n8\\n  b'\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("style", STYLES)
def test_a_file_of_any_layout_is_exported_and_runs(style: str, training: bool, tmp_path: Path) -> None:
    path = tmp_path / "problem.py"
    path.write_bytes(STYLES[style].encode())
    problem = problem_file.load(path)
    model, inputs = problem.build("cpu"), problem.inputs("cpu")
    made = export(
        path.read_text(), model, inputs, problem.init_arguments(), training=training, even_if_slower=True
    )  # fmt: skip
    (tmp_path / "made.py").write_text(made.text)
    spec = importlib.util.spec_from_file_location("made", tmp_path / "made.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments, keywords = problem.init_arguments()
    new = module.ModelNew(*arguments, **keywords)
    new.load_state_dict(model.state_dict())
    assert torch.equal(new(*inputs), model(*inputs))
    for kept in ("# What it does.", "# no padding", "# kept", "# kept too"):
        if kept in STYLES[style] and style in ("usual", "branches", "carriage returns", "form feed"):
            assert kept in made.text


def test_a_plain_file_stays_as_it_is() -> None:
    expected = FILE.replace("class Model(", "class ModelNew(")
    assert plain_source.plain_source(FILE) == expected
    assert plain_source.plain_source(FILE.replace("super()", "super(Model, self)")) == expected


def test_one_method_in_another_form_leaves_its_neighbours_comments() -> None:
    text = plain_source.plain_source(STYLES["body beside its header"])
    assert "# no padding" in text
    assert "    # What it does.\n    def forward(self, x):\n        return self.norm(F.relu(self.conv(x)))\n" in text


def test_a_line_that_cannot_be_broken_without_another_meaning_stays() -> None:
    text = f"f(\n    padding={SUM}{' ' * 9},\n)"  # in brackets of its own, the value would be a tuple
    assert max(map(len, text.split("\n"))) > WIDTH
    assert ast.dump(ast.parse(fold(text))) == ast.dump(ast.parse(text))


def test_a_long_line_that_is_no_single_statement_stays() -> None:
    text = f"first = 1; second = {SUM} + {SUM}\n"  # as inside a text over several lines
    assert fold(text) == text
