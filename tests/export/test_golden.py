"""The files in examples/kernelbench are what the exporter writes now."""

from __future__ import annotations

import pytest

from export.exporting import GOLDEN, PROBLEMS, ROOT, export_named


@pytest.mark.parametrize("name", ["conv_transpose3d_relu_group_norm", "conv3d_group_norm_mean"])
def test_the_examples_are_up_to_date(name: str) -> None:
    path = GOLDEN / f"{name}.py"
    problem, example = (file.relative_to(ROOT) for file in (PROBLEMS / f"{name}.py", path))
    command = f"postlude optimize {problem} -o {example} --precision fp32 --device cpu"
    assert path.read_text("utf-8") == export_named(name).text, f"out of date; write it anew with: {command}"


def test_the_page_says_how_long_they_are() -> None:
    sizes = [len(path.read_text("utf-8").splitlines()) for path in sorted(GOLDEN.glob("*.py"), reverse=True)]
    page = (ROOT / "docs" / "kernelbench.md").read_text("utf-8")
    assert f"| lines, with `--precision fp32` | {sizes[0]} | {sizes[1]}, of which" in page
