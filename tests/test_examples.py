"""The examples run as a newcomer would run them, only shorter."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_u_net_trains_twice_and_is_drawn(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_unet.py"), "--steps", "2", "--size", "8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "largest difference between the curves: 0.0e+00" in done.stdout  # on the CPU PyTorch trains both
    assert (tmp_path / "unet.png").read_bytes().startswith(b"\x89PNG")


def test_a_size_that_cannot_be_halved_twice_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_unet.py", "--size", "10"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "examples" / "train_unet.py"), run_name="__main__")
    assert "--size must be a multiple of 4, not 10" in capsys.readouterr().err
