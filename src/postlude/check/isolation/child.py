"""The entry point of the candidate's process: sets limits, loads the parts of Postlude that it needs, serves requests.

It runs by path in Python's isolated mode, without importing the package, so that neither the comparison nor the clock
nor anything else that judges is in this process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import sys
from pathlib import Path

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
PACKAGE = "postlude.check.isolation"


def main() -> None:
    connection = take_standard_input()
    skipped = guard(int(sys.argv[1]))
    if sys.argv[2] not in sys.path:  # isolated mode leaves out the user's site packages, where torch may be
        sys.path.append(sys.argv[2])
    for name in ("wire", "turns", "results", "host", "server"):
        load_neighbour(name)
    from postlude.check.isolation.server import Server

    Server(connection, skipped).serve()


def take_standard_input() -> socket.socket:
    """The connection to the verifier, which is standard input at first; the candidate has none."""
    connection, nothing = socket.socket(fileno=os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def guard(file_bytes: int) -> list[str]:
    """Sets limits on this process before any of the candidate's code runs; returns what could not be set."""
    skipped = []
    try:
        import resource

        for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, file_bytes)):
            hard = resource.getrlimit(limit)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (bound, bound))
    except (ImportError, OSError, ValueError) as error:
        skipped.append(f"the size of files is not limited ({error})")
    try:
        if not sys.platform.startswith("linux") or ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL):
            skipped.append("the candidate may outlive a verifier that is killed")
    except (OSError, AttributeError) as error:
        skipped.append(f"the candidate may outlive a verifier that is killed ({error})")
    return skipped


def load_neighbour(name: str) -> None:
    """Loads a neighbouring file under its full module name, so that imports find it without importing its packages."""
    path = Path(__file__).with_name(f"{name}.py")
    found = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)


if __name__ == "__main__":
    main()
