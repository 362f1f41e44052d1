"""DDP and FSDP2 in two processes on the CPU, around an optimized model and inside; kernels by Triton's interpreter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpret
CHILD = Path(__file__).with_name("distributed.py")
TESTS = CHILD.parents[1]


def test_gradients_are_the_plain_models() -> None:
    """Wrapped before it is optimized, so that Dynamo splits its graph at DDP's buckets, and after, by FSDP2.

    DDP around an optimized model is a recipe, which tests/networks runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(port)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
        errors = [float(line.split()[-1]) for line in out.splitlines()]
        assert len(errors) == 2
        assert max(errors) < 1e-6, out
