"""The environment of a candidate's process: a private folder, few variables, and a bound on its output."""

from __future__ import annotations

import ctypes
import os
import selectors
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

KEPT = frozenset(
    {
        *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "CC", "CXX", "MAX_JOBS"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_CUDA_ARCH_LIST"),
        # How memory is allocated, which PyTorch's own times depend on too.
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_"),
        *("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"),
        *("TRITON_INTERPRET", "TRITON_PTXAS_PATH", "SYSTEMROOT"),
    }
)
KEPT_PREFIXES = ("CUDA_",)
# Variable → a folder inside the private one.
REDIRECTED = {
    "HOME": "home",
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "cache",
    "TORCH_HOME": "cache/torch",
    "TORCH_EXTENSIONS_DIR": "cache/extensions",
    "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "TRITON_HOME": "cache",
    "TRITON_CACHE_DIR": "cache/triton",
    "CUDA_CACHE_PATH": "cache/cuda",
}
WORKING_FOLDER = "work"
CODE_FOLDER = "code"
DUMPABLE = 4  # PR_SET_DUMPABLE


def make_folders(private: Path, surrounding: Mapping[str, str]) -> dict[str, str]:
    """Creates the folders and returns the variables that the candidate gets."""
    for name in (*REDIRECTED.values(), WORKING_FOLDER, CODE_FOLDER):
        (private / name).mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in surrounding.items() if key in KEPT or key.startswith(KEPT_PREFIXES)}
    folders = {variable: str(private / name) for variable, name in REDIRECTED.items()}
    return {**kept, **folders}


def remove(folder: Path) -> None:
    """Deletes a folder, including subfolders whose permissions the candidate removed."""
    for path, folders, _ in os.walk(folder):  # top down: a folder is made accessible before it is entered
        for name in folders:
            inner = Path(path, name)
            if not inner.is_symlink():
                with suppress(OSError):
                    inner.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def bytes_under(folder: Path, enough: int) -> int:
    """Bytes on disk, counted until there are more than `enough`; files that vanish meanwhile do not count."""
    total, folders = 0, [str(folder)]
    while folders and total <= enough:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    found = entry.stat(follow_symlinks=False)
                    total += 512 * getattr(found, "st_blocks", found.st_size // 512)
    return total


def protect_this_process() -> str | None:
    """Closes this process's memory, variables and descriptors to the user's other processes, or says why not.

    For programs such as the command line: debuggers and core dumps no longer work on it. Root and processes with the
    right to trace still have access, and the command line stays readable.
    """
    if not sys.platform.startswith("linux"):
        return "this system cannot protect a process from other processes of the same user"
    try:
        failed = ctypes.CDLL(None, use_errno=True).prctl(DUMPABLE, 0, 0, 0, 0)
    except (OSError, AttributeError) as error:
        return f"the process cannot be protected from others ({error})"
    return f"the process cannot be protected from others ({os.strerror(ctypes.get_errno())})" if failed else None


class OutputReader:
    """Reads what a process prints until it ends or `close` is called; keeps the beginning, drops the rest.

    It runs in a thread, so that a process that prints endlessly neither blocks nor fills our memory.
    """

    def __init__(self, descriptor: int, limit: int) -> None:
        self._descriptor = descriptor
        self._limit = limit
        self._kept = bytearray()
        self.dropped = 0
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="postlude-candidate-output", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        said = bytes(self._kept).decode(errors="replace")
        return f"{said}\n[{self.dropped} more bytes were dropped]" if self.dropped else said

    def close(self, wait_s: float = 1.0) -> None:
        """After the process has ended: reads the rest of the pipe, without waiting for other writers that survived."""
        self._thread.join(wait_s)
        self._wake.close()
        self._thread.join()
        self._woken.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._woken.fileno() in ready:
                    return
                data = os.read(self._descriptor, 1 << 16)
                if not data:
                    return
                room = self._limit - len(self._kept)
                self._kept += data[:room]
                self.dropped += max(0, len(data) - room)
