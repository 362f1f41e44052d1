"""Stands in for the process of a suite's problem: no torch, and the name of the problem's file says what it does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PREPARES_S, TIMED_S = 0.3, 0.1


def main(asked: str, target: str, number: str) -> None:
    request = json.loads(asked)
    file, line = Path(request["file"]), socket.socket(fileno=int(number))
    log = file.parent / "times.jsonl"
    (file.parent / f"{os.getpid()}.pid").touch()
    _note(log, file.stem, "preparing", request["started"], lambda: _prepare(file.stem))
    beside_others = request["lock"] is not None
    if "memory" in file.stem and beside_others:
        return _write(target, {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."})
    line.sendall(b"ready\n")
    if "waits_badly" in file.stem:
        sys.exit("no patience")
    if line.recv(3) != b"go\n":
        sys.exit("gone")
    _note(log, file.stem, "timing", time.time(), lambda: time.sleep(300 if "hangs_late" in file.stem else TIMED_S))
    report = json.loads((file.parent / "report.json").read_text(encoding="utf-8"))
    if "partly" in file.stem and beside_others:
        report["left_out"] = ["torch.compile: it failed (OutOfMemoryError: CUDA out of memory)"]
    return _write(target, {"report": {**report, "title": file.name}, "times": {"timing": [1.0, 2.0]}})


def _prepare(name: str) -> None:
    if "dies" in name:
        print("about to fail", file=sys.stderr, flush=True)
        os.abort()
    if "hangs" in name and "late" not in name:
        subprocess.Popen(["sleep", "300"])
        time.sleep(300)
    time.sleep(PREPARES_S * (1 + int(name.split("_")[0]) % 3))


def _note(log: Path, name: str, what: str, start: float, action: Any) -> None:
    action()
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps([name, what, start, time.time()]) + "\n")


def _write(target: str, found: dict[str, Any]) -> None:
    Path(target).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
