"""The list of runs for compute-sanitizer launches every kernel that there is; and says so when it does not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machines import SMALL_H200

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools" / "sanitize.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # which the script sets: undone afterwards
        module = importlib.util.module_from_spec(spec)
        patched.setitem(sys.modules, "sanitize", module)  # dataclasses look it up there
        spec.loader.exec_module(module)
        yield module


def test_the_whole_list_launches_every_kernel(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--plan"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    count = len(tool.all_kernels())
    assert last.startswith(
        f"sanitize: {len(tool.runs()) + len(tool.upsamplings())} runs, 0 wrong, {count} of {count} kernels launched"
    )
    assert {"convolve_kernel", "few_channels_moments", "few_channels_gradient"} <= tool.all_kernels()


def test_a_kernel_that_no_run_launches_is_named(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutant: a list without the runs that pack gradients."""
    left = [run for run in tool.runs() if not run.name.startswith(("packed", "back-in-place"))]
    monkeypatch.setattr(tool, "runs", lambda: left)
    assert tool.main(["--plan"]) == 1
    assert "not launched: packed_gradient_kernel" in capsys.readouterr().out


def test_an_inputs_gradient_in_place_is_a_run_of_its_own(tool: Any) -> None:
    (run,) = (run for run in tool.runs() if run.name == "back-in-place-bf16")
    assert {"convolve_kernel", "convolve_boxes_kernel", "packed_gradient_kernel"} <= set(tool.planned(run))


def test_taps_side_by_side_are_a_run_of_their_own(tool: Any) -> None:
    for run in (run for run in tool.runs() if run.name.startswith("side-by-side")):
        assert "unfold_input_kernel" in tool.planned(run)
        assert run.trains == ("pack_input_kernel" in tool.planned(run))  # which both gradients read


def test_both_layouts_and_every_precision_are_there(tool: Any) -> None:
    runs = tool.runs()
    assert len({run.name for run in runs}) == len(runs)
    for layout in ("contiguous", "channels_last"):
        of_layout = [run for run in runs if run.layout == layout]
        modes = {run.precision if run.dtype == "float32" else run.dtype for run in of_layout if run.chain.producer}
        assert {"fp32", "tf32", "float16", "bfloat16"} <= modes, layout
    assert {run.dtype for run in runs} == set(tool.TOLERANCE) - {"tf32"}


def test_a_part_of_the_list(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--plan", "--only", "sums*", "--forward"]) == 0
    assert "sanitize: 2 runs" in capsys.readouterr().out
    for given, why in ((["--only", "nothing", "--plan"], "no run is called nothing"), ([], "there is no GPU")):
        if given or not tool.torch.cuda.is_available():
            with pytest.raises(SystemExit) as ended:
                tool.main(given)
            assert ended.value.code == 2
            assert why in capsys.readouterr().err


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore")
def test_results_are_compared_with_float64(tool: Any) -> None:
    """By Triton's interpreter, forward and backward; a mutant that drops a gate is seen."""
    card = SMALL_H200
    (run,) = (run for run in tool.runs() if run.name == "library-fp32")
    tensors = tool.inputs_of(run, "cpu")
    names: set[str] = set()
    with tool.watched(names):
        ours = tool.called(run, tool.plan_of(run, tool.problem_for(run, tensors), card), tensors)
    assert names == set(tool.planned(run))
    assert tool.apart(run, ours, tensors) < tool.TOLERANCE["float32"]
    ours[0] = ours[0] * 1.01
    assert tool.apart(run, ours, tensors) > tool.TOLERANCE["float32"]
