"""The options of the commands. Those of one command that fit in a line are in commands.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from postlude import __version__
from postlude.cli import output


def _print_version(wanted: bool) -> None:
    if wanted:
        output.say(f"postlude {__version__}")
        raise typer.Exit


File = Annotated[Path, typer.Argument(metavar="FILE.py", help="The problem: Model, get_inputs, get_init_inputs.")]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda", help="Where to run; by default the GPU where there is one.")
]
Precision = Annotated[str, typer.Option(metavar="auto|fp32|tf32", help="auto follows PyTorch's own switches.")]
Convolution = Annotated[
    str,
    typer.Option(
        "--convolution",
        metavar="auto|pytorch",
        help="pytorch keeps PyTorch's own convolution, bit for bit, and fuses what follows it.",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the results to this file as well.")]
Baselines = Annotated[
    str | None,
    typer.Option(
        "--baselines",
        metavar="few|usual|all",
        help="few: eager only; all: also max-autotune, which takes minutes. Default: all on a GPU, usual on a CPU.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", metavar="N", help="Prepare N problems side by side; each is timed alone.")]
Again = Annotated[
    str,
    typer.Option("--again", metavar="none|failed|all", help="Which problems to run again although they have a result."),
]
ResultsFolder = Annotated[
    Path, typer.Option("--results", metavar="PATH", help="The folder that keeps a file for each problem.")
]
Results = Annotated[
    Path,
    typer.Argument(
        metavar="RESULTS", help="The .json of `bench` or `suite`, the results folder of `suite`, or a .csv of records."
    ),
]
Shapes = Annotated[
    str,
    typer.Option(
        "--shapes",
        metavar="own|other",
        help="other: three quarters of each file's batch less one, one less along each axis of space.",
    ),
]
ReportPath = Annotated[
    Path | None,
    typer.Option("--report", metavar="PATH", help="Write a report: .html (one file, no network), .json or .csv."),
]
DemoReport = Annotated[Path, typer.Option("--report", metavar="PATH", help="Where to write the report of the demo.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the warnings of libraries.")]
Train = Annotated[
    bool,
    typer.Option(
        "--train",
        "--training",
        help="With -o: also write kernels for the gradients instead of PyTorch's derivative.",
    ),
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="With -o: write the file without checking it.")]
SelfCheck = Annotated[
    bool,
    typer.Option("--self-check", help="Try the points on mutants of the reference, which must all be rejected."),
]
DeclaredOnly = Annotated[
    bool,
    typer.Option(
        "--declared-only", help="Check only the declared shape and layout, for kernels that are made for them."
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Repeat an earlier run; random by default.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Start no new round of a race after this many seconds.")]
Limit = Annotated[
    float, typer.Option(min=1, max=1e6, help="Time limit for one problem in seconds, not counting waiting.")
]
OnCard = Annotated[
    str | None,
    typer.Option("--card", metavar="NAME", help="Plan for this card, such as H200, without running anything."),
]
LikeKernelBench = Annotated[
    bool, typer.Option("--like-kernelbench", help="Use KernelBench's rule instead, which is weaker.")
]
OutputFile = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="OUT.py", help="Write ModelNew, with its kernels, to this file."),
]
Repro = Annotated[
    str | None, typer.Option(metavar="SITE", help="Write a small script of this chain, for a bug report.")
]
TimedCandidate = Annotated[
    Path | None,
    typer.Argument(metavar="[CANDIDATE.py]", help="A file with ModelNew, verified before it is timed."),
]
ClearCache = Annotated[
    bool, typer.Option("--clear-cache", help="Delete compiled kernels, tuned tiles and verdicts that are kept.")
]
Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and stop.")
]
