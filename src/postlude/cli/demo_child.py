"""Times the demo's problems again in a process with another malloc setting; one line of JSON per event."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from postlude import hardware
from postlude.check.clock import Estimate
from postlude.cli.demo_case import CASES, compile_case, time_case
from postlude.cli.doctor import TUNED_MALLOC
from postlude.cli.frame import Settings, quiet
from postlude.cli.session import fuse_silently
from postlude.errors import PostludeError

Timings = dict[str, dict[str, Estimate]]


def time_elsewhere(settings: Settings, update: Callable[[str], None]) -> Timings:
    """Case key → timings, measured in another process with the other malloc setting."""
    command = [sys.executable, "-m", "postlude.cli.demo_child", settings.device, settings.precision]
    found: Timings = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            command, env=_other_malloc(), stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )
        with child:
            try:
                for line in child.stdout or ():
                    event = json.loads(line)
                    if "timings" in event:
                        found[event["case"]] = {name: estimate_from(data) for name, data in event["timings"].items()}
                    else:
                        update(event["update"])
                failed = child.wait() != 0
            finally:
                child.kill()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["no message"])[-1]
    if failed:
        raise PostludeError(f"the process with the other malloc setting failed ({last}).")
    return found


def estimate_from(data: Mapping[str, Any]) -> Estimate:
    return Estimate(**{**data, "samples": tuple(data["samples"])})


def _other_malloc() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in TUNED_MALLOC}
    if not hardware.malloc_is_tuned():
        return kept | TUNED_MALLOC
    if "jemalloc" in kept.get("LD_PRELOAD", ""):
        del kept["LD_PRELOAD"]
    return kept


def main(device: str, precision: str) -> None:
    settings = Settings(device, precision)
    events = sys.stdout

    def tell(**event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)

    # Only events go to stdout; everything else that is printed goes to stderr.
    with quiet(debug=False), contextlib.redirect_stdout(sys.stderr):
        for case in (case for case in CASES if case.has_other_malloc):
            opened, fused = case.open(device), case.open(device).model
            fuse_silently(settings, fused, opened.inputs)
            tell(update=f"compiling {case.title} with torch.compile")
            compiled, _ = compile_case(case, settings, opened)
            tell(update=f"timing {case.title}")
            timings = time_case(opened, fused, compiled, None)
            tell(case=case.key, timings={name: asdict(timing) for name, timing in timings.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
