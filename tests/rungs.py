"""Run the tests as six rungs, each in a pytest process of its own and inside a time budget.

Rung names as arguments run only those; --list names them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit code when nothing was selected
GRACE_S = 5  # what pytest gets, once interrupted, to say where it stood


@dataclass(frozen=True)
class Rung:
    name: str  # also the pytest marker
    budget_s: float
    proves: str
    when_empty: str
    workers: int = 1  # processes that share its tests


RUNGS = (
    # Three for two cores: a fifth of its time is spent on waiting, for processes that hang on purpose and for timers.
    Rung("pure", 600, "pure logic and the CPU path, no Triton needed", "no tests yet, nothing to run", 3),
    Rung("interpret", 600, "kernels under TRITON_INTERPRET=1", "no kernels yet, nothing to run", 2),
    Rung("compile", 360, "kernels compiled ahead of time", "no kernels yet, nothing to compile", 2),
    Rung("export", 300, "exported files run without the package", "no exporter yet, nothing to run", 2),
    Rung("networks", 300, "networks of other packages under autocast", "no networks yet, nothing to run", 2),
    Rung("record", 60, "README and documents show the recorded results", "no results yet, nothing to compare"),
)


@dataclass
class Outcome:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def environment(rung: Rung) -> dict[str, str]:
    # Settings of the caller's shell would change a rung. Without bytecode on disk each of some hundred processes would
    # compile the package and its tests again.
    outside = ("TRITON_INTERPRET", "PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")
    env = {key: value for key, value in os.environ.items() if key not in outside}
    # .venv may show the packages of the Python it was made from: their pytest plugins are not ours to run.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if rung.name == "interpret":
        env["TRITON_INTERPRET"] = "1"
    if rung.name == "networks":
        env["POSTLUDE_NETWORKS"] = "required"  # a package that is missing is a failure here
    if rung.workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores already
    return env


def run_pytest(rung: Rung, report: Path) -> int | None:
    """The exit code of the rung's pytest process, or None when its budget ran out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hypothesispytest", "-m", rung.name]
    # A worker that is done takes tests from the other: a long test at the end would leave one core idle otherwise.
    shared = ["-p", "xdist", "-n", str(rung.workers), "--dist", "worksteal"] if rung.workers > 1 else []
    process = subprocess.Popen(
        [*command, *shared, f"--junitxml={report}"],
        cwd=ROOT,
        env=environment(rung),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a process group of its own, so that what the tests started dies with them
    )
    try:
        return process.wait(timeout=rung.budget_s)
    except BaseException as stop:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            process.wait(timeout=GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(stop, subprocess.TimeoutExpired):
            return None
        raise


def count(report: Path) -> Outcome:
    """Count by test: one that fails, and again while it is torn down, stands in the report twice."""
    worst: dict[tuple[str | None, str | None], int] = {}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        tags = {child.tag for child in case}
        verdict = 2 if tags & {"failure", "error"} else int("skipped" in tags)
        test = case.get("classname"), case.get("name")
        worst[test] = max(verdict, worst.get(test, 0))
    passed, skipped, failed = (list(worst.values()).count(verdict) for verdict in range(3))
    return Outcome(passed, failed, skipped)


def climb(rung: Rung, folder: Path) -> Outcome:
    print(f"\n{rung.name}: {rung.proves}", flush=True)
    report = folder / f"{rung.name}.xml"
    start = time.monotonic()
    code = run_pytest(rung, report)
    outcome = count(report)
    outcome.seconds = time.monotonic() - start
    if code is None:
        # The test that was running stands in the report without a verdict, like a passed one.
        outcome.passed = max(outcome.passed - 1, 0)
        outcome.failed += 1
        outcome.note = f"killed when its budget of {rung.budget_s:g} s ran out"
    elif code == NO_TESTS:
        outcome.note = rung.when_empty
    elif code != 0 and not outcome.failed:
        outcome.failed = 1
        outcome.note = f"pytest ended with exit code {code} and named no failed test"
    print(f"{rung.name}: {outcome.note or outcome}", flush=True)
    return outcome


def print_table(results: dict[str, Outcome]) -> None:
    print(f"\n{'rung':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for name, one in results.items():
        numbers = f"{one.passed:>8}{one.failed:>8}{one.skipped:>9}{one.seconds:>9.1f}"
        print(f"{name:<10}{numbers}  {one.note}".rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests rung by rung.")
    parser.add_argument("rungs", nargs="*", metavar="rung", help="run only these (default: all)")
    parser.add_argument("--list", action="store_true", help="name the rungs and stop")
    args = parser.parse_args()
    if unknown := set(args.rungs) - {rung.name for rung in RUNGS}:
        parser.error(f"no such rung: {', '.join(sorted(unknown))} (--list names them)")
    if args.list:
        print(*(f"{rung.name:<10} {rung.budget_s:>4g} s  {rung.proves}" for rung in RUNGS), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        chosen = [rung for rung in RUNGS if not args.rungs or rung.name in args.rungs]
        results = {rung.name: climb(rung, Path(folder)) for rung in chosen}
    print_table(results)
    ones = results.values()
    total = Outcome(sum(o.passed for o in ones), sum(o.failed for o in ones), sum(o.skipped for o in ones))
    print(f"\n{total}")
    return int(total.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
