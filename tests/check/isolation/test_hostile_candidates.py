"""Whatever a candidate does, the verifier gets one sentence, stays usable, and nothing is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude.check.isolation import Candidate, CandidateFailed, Limits
from postlude.check.isolation.host import load_class
from postlude.check.isolation.process import FOLDER_PREFIX
from postlude.check.isolation.results import RefusedError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into Linux's /proc")

X = torch.ones(3)
# Each function is a way to misbehave; `forward` does what it is told.
HOSTILE = """
import json, os, resource, signal, socket, subprocess, sys, threading, time
import torch
from torch import nn

def control():
    return next(fd for fd in range(3, 64) if is_socket(fd))

def is_socket(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False

def announce(**fields):
    server = sys.modules["postlude.check.isolation.server"]
    plain = server.lay_out
    def lay_out(*args):
        layout = plain(*args).as_json()
        for name, value in fields.items():
            (layout if name == "size" else layout["tensors"][0])[name] = value
        class Fake:
            size = 64
            specs = ()
            def as_json(self): return layout
        return Fake()
    server.lay_out = lay_out

class Ways:
    def abort(x): os.abort()
    def hang(x): time.sleep(1000)
    def hang_on(x):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    def close_control(x): os.close(control()); time.sleep(1000)
    def garbage(x): os.write(control(), b"GET / HTTP/1.1\\r\\n\\r\\n" * 100); return x
    def forged(x):
        data = json.dumps({"reply": 1, "value": None, "tensors": [], "size": 0}).encode()
        os.write(control(), len(data).to_bytes(4, "big") + data); return x
    def outside(x): announce(offset=1 << 30); return x
    def unwritten(x):
        sys.modules["postlude.check.isolation.server"].Server._receive = lambda self: time.sleep(1000); return x
    def too_large(x): return torch.zeros(1 << 21)
    def disk(x):
        for number in range(64):
            with open(f"file{number}", "wb") as file: file.write(bytes(1 << 20))
        time.sleep(1000)
    def children(x):
        for _ in range(5): subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
        os._exit(1)
    def escape(x): subprocess.Popen(["sleep", "3"], start_new_session=True); os._exit(1)
    def forks(x):
        while os.fork() and threading.active_count() < 99:
            time.sleep(0.02)
        time.sleep(1000)

class ModelNew(nn.Module):
    def forward(self, way, *given): return getattr(Ways if given else self, way)(*given)
    def pid(self): return os.getpid()
    def closed_folder(self): os.makedirs("a/b"); open("a/b/c", "w").close(); os.chmod("a/b", 0); os.chmod("a", 0)
"""
ENDS = {
    "abort": "the candidate's process was ended by SIGABRT during a call",
    "hang_on": "a call took longer than 1 seconds",
    "close_control": "the candidate closed its connection to the verifier during a call",
    "garbage": "sent an answer that is 1195725856 bytes long",
    "forged": "sent an answer that belongs to no question",
    "unwritten": "a call took longer than 1 seconds",
    "outside": "sent an answer that has a tensor outside its buffer",
    "too_large": "announces 8388608 bytes of tensors where 4194304 are allowed",
    "disk": "the candidate wrote more than 16777216 bytes into its folder",
    "children": "the candidate's process ended with exit code 1 during a call",
    "escape": "the candidate's process ended with exit code 1 during a call",
    "forks": "a call took longer than 1 seconds",
}
LIMITS = Limits(start_s=60, call_s=1, grace_s=0.2, output_bytes=4 << 20, file_bytes=4 << 20, folder_bytes=16 << 20)


@pytest.fixture(autouse=True)
def own_folder_for_temporaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps this test from finding what candidates of other tests leave while they run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def left_behind() -> dict[str, set[str]]:
    """What candidates left: folders, shared memory, and our own descriptors and threads."""
    shared = Path("/dev/shm")
    return {
        "folders": {str(path) for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")},
        "shared memory": {path.name for path in shared.iterdir()} if shared.exists() else set(),
        "descriptors": set(os.listdir("/proc/self/fd")),  # noqa: PTH208 - the links themselves
        "threads": {thread.name for thread in threading.enumerate() if "postlude" in thread.name},
    }


def running_in(group: int) -> list[str]:
    """Processes of a session that still run; zombies are gone but for their parent."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == group and state not in "ZX":
            found.append(stat.parent.name)
    return found


def group_of(candidate: Candidate) -> int:
    return candidate._running.process.pid


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "candidate.py"
    path.write_text(HOSTILE)
    return path


def ask(candidate: Candidate, what: str, *given: Any) -> Any:
    return candidate.forward([what, *given]).outputs


@pytest.mark.parametrize("way", ENDS)
def test_it_ends_in_one_sentence_and_leaves_nothing(hostile: Path, way: str) -> None:
    before = left_behind()
    with Candidate(hostile, limits=LIMITS) as candidate:
        group, begin = group_of(candidate), time.monotonic()
        with pytest.raises(CandidateFailed) as caught:
            ask(candidate, way, X)
        assert time.monotonic() - begin < 6
        assert ENDS[way] in str(caught.value)
        assert re.fullmatch(r"failed: [^\n]*[^.\n]\.", str(caught.value))
        assert not candidate.alive
        assert running_in(group) == []
        with pytest.raises(CandidateFailed, match="the candidate's process is gone"):
            ask(candidate, "pid")
    assert left_behind() == before


STARTS = {
    "exits": ("import sys; sys.exit(0)", "the candidate ends the process (sys.exit)"),
    "leaves": ("import os; os._exit(0)", "ended with exit code 0 during its start"),
    "constructor": (
        "from torch import nn\nclass ModelNew(nn.Module):\n    def __init__(self, n): super().__init__()",
        "ModelNew.__init__ raises TypeError",
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_file_that_cannot_be_started(tmp_path: Path, name: str) -> None:
    text, reason = STARTS[name]
    path = tmp_path / "candidate.py"
    path.write_text(text)
    before = left_behind()
    with pytest.raises(CandidateFailed, match=r"^failed: ") as caught:
        Candidate(path, limits=LIMITS)
    assert reason in str(caught.value)
    assert left_behind() == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no class ModelNew that is a torch.nn.Module"),
        ("import no_such_module", "an import fails: ModuleNotFoundError: No module named 'no_such_module'"),
        ("ModelNew = 3", "it has no class ModelNew"),
        ("class ModelNew(:\n", "syntax error in line 1: "),
        ("a\0b", "null bytes"),
        ("1 / 0", "running the file fails: ZeroDivisionError: division by zero"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "nonsense.py").write_text(text)
    with pytest.raises(RefusedError, match=reason):
        load_class(tmp_path / "nonsense.py")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    before = left_behind()
    with pytest.raises(CandidateFailed, match=r"absent\.py cannot be read"):
        Candidate(tmp_path / "absent.py")
    assert left_behind() == before


def test_two_at_once_and_one_that_nobody_closes(hostile: Path) -> None:
    before = left_behind()
    first, second = Candidate(hostile, limits=LIMITS), Candidate(hostile, limits=LIMITS)
    groups = [group_of(first), group_of(second)]
    with pytest.raises(CandidateFailed):
        ask(first, "abort", X)
    assert ask(second, "pid") == groups[1]
    ask(second, "closed_folder")
    del first, second
    assert [running_in(group) for group in groups] == [[], []]
    assert left_behind() == before


def test_it_ends_with_a_verifier_that_is_killed(hostile: Path) -> None:
    program = (  # busy, so that it does not notice by itself
        "import os, sys, threading, torch\nfrom postlude.check.isolation import Candidate\n"
        "candidate = Candidate(sys.argv[1])\nprint(candidate._running.process.pid, flush=True)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()\ncandidate.forward(['hang', torch.ones(1)])\n"
    )
    before = left_behind()
    done = subprocess.run([sys.executable, "-c", program, hostile], capture_output=True, text=True, check=False)
    until = time.monotonic() + 5
    while running_in(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.02)
    assert running_in(int(done.stdout)) == []
    after = left_behind()
    assert after["shared memory"] == before["shared memory"]
    for folder in after["folders"] - before["folders"]:  # a killed verifier cannot clean up
        subprocess.run(["rm", "-r", folder], check=True)
