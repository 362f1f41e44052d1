"""The kernels of the exported files compiled ahead of time, for the cards that `fits` lets them run on."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from export.exporting import Problem, export_named, export_text
from kernels import offline
from postlude.hardware import has_nvrtc
from postlude.run import nvrtc

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]


class CompiledOnly:
    """A kernel whose launches are compiled and not run."""

    def __init__(self, kernel: Any, found: list[Any]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_instead(*arguments: Any, **settings: Any) -> None:
            self.found.append(self.kernel.warmup(*arguments, grid=grid, **settings))

        return compile_instead


def loaded(name: str, folder: Path, precision: str = "fp32") -> tuple[ModuleType, list[Any]]:
    path = folder / f"{name}_{precision}.py"
    path.write_text(export_named(name, precision).text, encoding="utf-8")
    return imported(path)


def imported(path: Path) -> tuple[ModuleType, list[Any]]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[Any] = []
    for word, item in list(vars(module).items()):
        if word.endswith("_kernel") and hasattr(item, "warmup"):
            setattr(module, word, CompiledOnly(item, found))
    return module, found


def check(found: list[Any], card: int) -> None:
    for made in found:
        assert made.metadata.shared <= offline.CARDS[card], made.metadata.name
        used = offline.resources(made.asm["ptx"], card)
        assert used.registers * 32 * made.metadata.num_warps <= 65_536, (made.metadata.name, used)
        assert used.spilled <= (1024 if made.metadata.name == "convolve_kernel" else 0), (made.metadata.name, used)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_61_compiles_for_hopper(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    module, found = loaded("conv_transpose3d_relu_group_norm", tmp_path, precision)
    shapes = ((16, 64, 32, 32, 32), (64, 128, 3, 3, 3), (128,), (128,))
    result = module.conv_relu_norm(*[torch.empty(shape, device="meta") for shape in shapes])
    assert result.shape == (16, 128, 34, 34, 34)
    assert len(found) == (3 if precision == "fp32" else 4)  # one plane has a kernel for the moments of groups
    check(found, 90)
    assert "capability == (9, 0)" in (tmp_path / f"{module.__name__}.py").read_text("utf-8")


@pytest.mark.parametrize("card", [80, 90])
def test_a_reduction_over_channels_compiles(card: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, card)
    forward = "return torch.logsumexp(F.relu(self.norm(x)), 1)"
    text = Problem("", "self.norm = nn.GroupNorm(3, cin)", forward, (2, 24, 50, 70), 4, ()).text
    (tmp_path / "soft.py").write_text(export_text(text, tmp_path)[0].text, encoding="utf-8")
    module, found = imported(tmp_path / "soft.py")
    result = module.norm_relu_logsumexp(*[torch.empty(s, device="meta") for s in ((5, 24, 51, 70), (24,), (24,))])
    assert result.shape == (5, 51, 70)
    assert len(found) == 3
    check(found, card)


@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: install nvidia-cuda-nvrtc")
def test_23_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    module, found = loaded("conv3d_group_norm_mean", tmp_path)
    launched: dict[str, Any] = {}
    monkeypatch.setattr(module, "compiled", lambda name, device: lambda *arguments: launched.update({name: arguments}))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("H", (), {"multi_processor_count": 132})
    )
    shapes = ((128, 3, 24, 32, 32), (24, 3, 3, 3, 3), (24,), (24,), (24,))
    assert module.conv_norm_mean(*[torch.empty(shape, device="meta") for shape in shapes]).shape == (128,)
    assert not found  # no kernel of Triton's
    assert [given[:2] for given in launched.values()] == [((264, 1, 1), (256, 1, 1)), ((128, 1, 1), (32, 1, 1))]
    options = ("--gpu-architecture=sm_90", "--ptxas-options=-v")
    _, log = nvrtc.compile_source(nvrtc.Source("exported.cu", module.SOURCE), options)
    assert sum(int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", log)) == 0, log
    assert len(re.findall(r"Used \d+ registers", log)) == len(launched)
    (registers,) = [int(n) for n in re.findall(r"moments_kernel'.*?Used (\d+) registers", log, re.DOTALL)]
    assert registers * 256 * 2 <= 65_536
    for name, given in launched.items():
        signature = re.sub(r"//.*", "", module.SOURCE).split(f"{name}(")[1].split("{")[0]
        assert signature.count(",") + 1 == len(given[2]), name
