"""One problem of a suite, in the process that it has to itself: one JSON file comes out of it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from postlude.cli.frame import Request, quiet, settled
from postlude.errors import PostludeError
from postlude.files import write_whole


def main(asked: str, target: str) -> None:
    request = json.loads(asked)
    try:
        found: dict[str, Any] = {"report": _report(request)}
    except PostludeError as error:
        found = {"error": str(error)}
    except Exception as error:  # the file's own code runs here and may raise anything
        first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        found = {"error": f"{type(error).__name__}: {first}"}
    write_whole(Path(target), json.dumps(found))


def _report(request: dict[str, Any]) -> Any:
    asked = Request(request["device"], request["precision"])
    # The problem's prints go where errors go; the parent keeps the end of them.
    with quiet(debug=False), contextlib.redirect_stdout(sys.stderr), settled(asked) as settings:
        from postlude.cli.bench import Options, run
        from postlude.report.model import as_dict

        options = Options(
            Path(request["file"]),
            rounds=request["rounds"],
            seconds=request["seconds"],
            flushed=False,
            baselines=request["baselines"],
            train=request["train"],
        )
        return as_dict(run(settings, options)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
