"""Memory that is left, by files of a machine and of its containers that are not here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from postlude.hardware import available_bytes
from postlude.host_memory import available_host_bytes

GIB = 1 << 30
MACHINE = f"MemTotal: 9 kB\nMemAvailable:   {64 * GIB // 1024} kB\n"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text))


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc", meminfo=MACHINE)
    write(tmp_path / "proc" / "self", cgroup="0::/work/job\n")
    return tmp_path / "proc"


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "groups"


def test_without_limits_it_is_the_machines(proc: Path, groups: Path) -> None:
    assert available_host_bytes(proc, groups) == 64 * GIB
    write(groups / "work" / "job", memory__max="max\n", memory__current=GIB)
    assert available_host_bytes(proc, groups) == 64 * GIB


def test_a_limit_counts_without_cached_files(proc: Path, groups: Path) -> None:
    write(groups / "work" / "job", memory__max=8 * GIB, memory__current=5 * GIB)
    assert available_host_bytes(proc, groups) == 3 * GIB
    write(groups / "work" / "job", memory__stat=f"anon 1\ninactive_file {2 * GIB}\n")
    assert available_host_bytes(proc, groups) == 5 * GIB


@pytest.mark.parametrize("outer", ["work", "."])
def test_a_group_around_it_may_have_less(proc: Path, groups: Path, outer: str) -> None:
    """In a container its own group is often the root that it sees."""
    write(groups / "work" / "job", memory__max=8 * GIB, memory__current=0)
    write(groups / outer, memory__max=6 * GIB, memory__current=4 * GIB)
    assert available_host_bytes(proc, groups) == 2 * GIB


def test_limits_of_the_first_version_count(proc: Path, groups: Path) -> None:
    write(proc / "self", cgroup="5:cpu,cpuacct:/\n4:memory:/docker/1\n0::/\n")
    # A container's folder shows its own group at the top, under another path than the one that it is said to have.
    write(groups / "memory", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=3 * GIB)
    assert available_host_bytes(proc, groups) == GIB
    write(groups / "memory", memory__stat=f"total_inactive_file {GIB}\n")
    assert available_host_bytes(proc, groups) == 2 * GIB


def test_a_system_that_says_nothing_has_no_limit(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path / "proc", tmp_path / "groups") == math.inf


def test_this_machine_has_some() -> None:
    assert available_bytes("cpu") > 0
