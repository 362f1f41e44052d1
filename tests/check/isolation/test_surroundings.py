"""What a candidate finds around it, and what it survives: few variables, no reference, one process throughout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude.check.isolation import Candidate, CandidateFailed, Limits
from postlude.check.isolation.environment import make_folders
from postlude.check.isolation.process import CHILD, FOLDER_PREFIX

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into Linux's /proc")

CURIOUS = """
import ctypes, json, os, resource, sys
import torch
from torch import nn

def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None

class ModelNew(nn.Module):
    def forward(self, way): return getattr(self, way)()
    def shout(self):
        block = b"x" * (1 << 20)
        for _ in range(1 << 10): os.write(1, block)
        return "done"
    def message(self):
        print(json.dumps({"reply": 1, "raised": "printed", "details": ""}), flush=True)
        return "returned"
    def large_file(self):
        with open("large", "wb") as file: file.write(bytes(8 << 20))
    def leave_politely(self): sys.exit(0)
    def several_lines(self): raise ValueError("the \\x1b[1mfirst line\\nand the second")
    def interrupt(self): raise KeyboardInterrupt
    def patch(self):
        torch.allclose = torch.equal = lambda *_: True
        return "patched"
    def limits(self): return [resource.getrlimit(resource.RLIMIT_CORE)[0], resource.getrlimit(resource.RLIMIT_FSIZE)[1]]
    def surroundings(self):
        return {"variables": dict(os.environ), "path": sys.path, "arguments": sys.argv, "folder": os.getcwd(),
                "neighbours": os.listdir(os.path.dirname(sys.argv[0])), "modules": sorted(sys.modules),
                "descriptors": [link for link in map(target, range(64)) if link]}
    def parents_command(self): return open(f"/proc/{os.getppid()}/cmdline").read()
    def pid(self): return os.getpid()
    def command(self): return open("/proc/self/cmdline").read() + open("/proc/self/environ").read()
    def fresh_memory(self):
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        return ctypes.string_at(library.malloc(4096), 4096)[100]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("curious")
    (path / "candidate.py").write_text(CURIOUS)
    (path / "reference.py").write_text("raise RuntimeError('nobody should read this')\n")
    return path


@pytest.fixture(scope="module")
def curious(folder: Path) -> Iterator[Candidate]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_TOKEN", "hidden")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        with (folder / "reference.py").open() as opened:
            os.set_inheritable(opened.fileno(), True)
            with Candidate(
                folder / "candidate.py", limits=Limits(call_s=30, output_bytes=4 << 20, file_bytes=4 << 20)
            ) as candidate:
                yield candidate


def ask(candidate: Candidate, what: str) -> Any:
    return candidate.forward([what]).outputs


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("leave_politely", "failed: the candidate ends the process (sys.exit)."),
        ("several_lines", "failed: the candidate raised ValueError: the [1mfirst line."),
        ("interrupt", "failed: the candidate raised KeyboardInterrupt."),
        ("large_file", "failed: the candidate raised OSError: [Errno 27] File too large."),
    ],
)
def test_an_exception_is_one_sentence_and_the_next_call_works(curious: Candidate, way: str, sentence: str) -> None:
    with pytest.raises(CandidateFailed) as caught:
        ask(curious, way)
    assert str(caught.value) == sentence
    assert caught.value.details.startswith("Traceback")
    assert ask(curious, "pid") == curious._running.process.pid


def test_a_gigabyte_of_output_is_dropped(curious: Candidate) -> None:
    assert ask(curious, "shout") == "done"
    assert len(curious.said) < 70_000
    assert "more bytes were dropped]" in curious.said


def test_what_is_printed_is_no_message(curious: Candidate) -> None:
    assert ask(curious, "message") == "returned"


def test_patching_torch_reaches_the_candidate_only(curious: Candidate) -> None:
    assert ask(curious, "patch") == "patched"
    assert not torch.equal(torch.zeros(1), torch.ones(1))


def test_limits_of_the_system_are_set(curious: Candidate) -> None:
    assert ask(curious, "limits") == [0, 4 << 20]
    assert curious.skipped == ()


def test_the_reference_is_nowhere_around(curious: Candidate, folder: Path) -> None:
    found = ask(curious, "surroundings")
    assert str(folder) not in repr(found)
    assert "reference" not in repr({key: value for key, value in found.items() if key != "modules"})
    assert found["neighbours"] == ["candidate.py"]
    assert str(CHILD.parent) not in found["path"]
    assert not [name for name in found["modules"] if name.startswith("postlude.check.") and "isolation" not in name]


def test_variables_and_descriptors_are_few(curious: Candidate) -> None:
    found = ask(curious, "surroundings")
    private = str(Path(found["folder"]).parent)
    assert Path(private).name.startswith(FOLDER_PREFIX)
    assert "SECRET_TOKEN" not in found["variables"]
    assert found["variables"]["CUDA_VISIBLE_DEVICES"] == ""
    for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert found["variables"][name].startswith(private)
    kinds = sorted(re.sub(r":.*", "", link) for link in found["descriptors"])
    assert kinds == ["/dev/null", "pipe", "pipe", "socket"]


def test_the_verifiers_command_line_can_be_read(curious: Candidate) -> None:
    """The package says that this is not protected; were it so, the text should go."""
    assert "python" in ask(curious, "parents_command")


def test_a_program_can_close_itself_to_others() -> None:
    program = (
        "import ctypes\nfrom postlude.check.isolation import protect_this_process\n"
        "assert protect_this_process() is None\nassert ctypes.CDLL(None).prctl(3) == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_memory_is_poisoned_for_checking_and_not_for_timing(tmp_path: Path) -> None:
    """Nothing but the memory says so: variables, arguments and descriptors are the same."""
    path = tmp_path / "candidate.py"
    path.write_text(CURIOUS)
    found = {}
    for poisoned in (True, False):
        with Candidate(path, poisoned=poisoned) as candidate:
            around = {**ask(candidate, "surroundings"), "command": ask(candidate, "command")}
            private = str(Path(around["folder"]).parent)
            found[poisoned] = re.sub(r"\[\d+\]", "", repr(around).replace(private, ""))
            assert (ask(candidate, "fresh_memory") == 0xFE) == poisoned
    assert found[True] == found[False]
    assert not make_folders(tmp_path, {"PATH": "/bin", "SECRET": "1", "MALLOC_PERTURB_": "7"}).keys() & {
        "SECRET",
        "MALLOC_PERTURB_",
    }


def test_a_candidate_allocates_as_we_do(tmp_path: Path) -> None:
    """Otherwise eager PyTorch would gain from a tuned allocator and the candidate would not."""
    tuned = {
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
        "PYTORCH_ALLOC_CONF": "x:1",
    }
    assert make_folders(tmp_path, {**tuned, "MALLOC_PERTURB_": "7"}).items() >= tuned.items()
