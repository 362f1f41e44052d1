"""How much memory of a host can still be allocated: of the whole machine, and within the limits of its containers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

# Of each version of control groups: the controller's name in the list of a process, its folder, and the files' names.
_VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes(proc: Path, groups: Path) -> float:
    """The least of what the machine has left and what each limit leaves; infinite where the system says nothing.

    `proc` and `groups` are a Linux system's folders for processes and for control groups. A container sees
    the whole machine's memory. Beyond its own limit the system ends the process.
    """
    found = re.search(r"^MemAvailable: +(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    machine = 1024.0 * int(found[1]) if found else math.inf
    return min(machine, *_left_by_limits(_text(proc / "self" / "cgroup"), groups), math.inf)


def _left_by_limits(memberships: str, groups: Path) -> Iterator[float]:
    """What the limit of each group around this process leaves."""
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, folder, limit, usage, cached in _VERSIONS:
            if controller not in controllers.split(","):
                continue
            inner = Path(path.lstrip("/"))
            for place in (inner, *inner.parents):  # a limit holds for groups inside as well
                here = groups / folder / place
                most, used = (_text(here / name).strip() for name in (limit, usage))
                if most.isdigit() and used.isdigit():  # "max": no limit
                    # The system takes cached files back before it ends a process.
                    files = re.search(rf"^{cached} (\d+)", _text(here / "memory.stat"), re.MULTILINE)
                    yield max(0.0, float(most) - float(used) + (float(files[1]) if files else 0.0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
