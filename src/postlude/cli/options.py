"""The options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(metavar="FILE.py", help="The problem: Model, get_inputs, get_init_inputs.")]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda", help="Where to run; by default the GPU where there is one.")
]
Precision = Annotated[str, typer.Option(metavar="auto|fp32|tf32", help="auto follows PyTorch's own switches.")]
ConvolutionOption = Annotated[
    str,
    typer.Option(
        "--convolution",
        metavar="auto|pytorch",
        help="pytorch keeps PyTorch's own convolution, bit for bit, and fuses what follows it.",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the results to this file as well.")]
BaselinesOption = Annotated[
    str | None,
    typer.Option(
        "--baselines",
        metavar="few|usual|all",
        help="few: eager only; all: also max-autotune, which takes minutes. Default: all on a GPU, usual on a CPU.",
    ),
]
JobsOption = Annotated[
    int, typer.Option("--jobs", metavar="N", help="Prepare N problems side by side; each is timed alone.")
]
ReportPath = Annotated[
    Path | None,
    typer.Option("--report", metavar="PATH", help="Write a report: .html (one file, no network), .json or .csv."),
]
DemoReport = Annotated[Path, typer.Option("--report", metavar="PATH", help="Where to write the report of the demo.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the warnings of libraries.")]
