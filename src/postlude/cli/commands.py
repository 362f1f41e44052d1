"""The commands and their options; what a command does is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from postlude.cli import frame, options
from postlude.errors import PostludeError

app = typer.Typer(
    name="postlude",
    help="Fuses chains of a PyTorch model's operators, checks them against float64, and measures the gain.",
    epilog="FILE.py is in KernelBench's format: a class Model and the functions get_inputs and get_init_inputs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _common(version: options.Version = False) -> None:
    pass


@app.command(short_help="Find a model's chains, say how each will run, check them; or write a file.")
def optimize(
    file: options.File,
    report: options.ReportPath = None,
    output_file: options.OutputFile = None,
    train: options.Train = False,
    convolution: options.Convolution = "auto",
    no_verify: options.NoVerify = False,
    device: options.Device = None,
    precision: options.Precision = "auto",
    json: options.Json = None,
    debug: options.Debug = False,
) -> None:
    """Find the chains of a model, say how each one will run and why, and check it against float64.

    With -o, write a self-contained file instead: ModelNew with the same constructor and parameters, which needs only
    torch and Triton. An existing file is replaced by a complete and verified one or not at all.

    Exit code: 0 fused (or written) and right, 1 nothing to fuse, no file possible, or wrong, 2 could not run.
    """

    def command(settings: frame.Settings) -> frame.Answer:
        if output_file is not None and report is not None:
            raise PostludeError("--report describes the model as it runs here, -o writes a file; use only one of them.")
        if output_file is not None:
            from postlude.cli import export

            return export.export(settings, file, output_file, training=train, verify=not no_verify)
        if no_verify or train:
            raise PostludeError("--train and --no-verify apply to the file that -o writes; add -o.")
        from postlude.cli import chains

        return chains.optimize(settings, file, report)

    frame.run("optimize", frame.Request(device, precision, json, debug, convolution), command)


@app.command(short_help="Show the passes, the traffic saved, and the reasons.")
def explain(
    file: options.File,
    repro: options.Repro = None,
    train: Annotated[bool, typer.Option("--train", help="Show the plans of training.")] = False,
    card: options.OnCard = None,
    convolution: options.Convolution = "auto",
    device: options.Device = None,
    precision: options.Precision = "auto",
    json: options.Json = None,
    debug: options.Debug = False,
) -> None:
    """Show each chain's passes, the memory traffic they should save, and why the rest is left alone.

    Exit code: 0 done, 2 could not run.
    """

    def command(settings: frame.Settings) -> frame.Answer:
        from postlude.cli import card_plans, chains

        if card is not None and (device is not None or repro is not None):
            raise PostludeError("--card runs nothing, so it takes neither --device nor --repro; leave those out.")
        if card is not None:
            return card_plans.explain_for_card(file, card, precision, settings.convolution, train)
        return chains.explain(settings, file, repro, train)

    here = precision if card is None else "auto"
    frame.run("explain", frame.Request(device, here, json, debug, convolution), command)


@app.command(short_help="Judge a candidate (ModelNew) against the float64 truth.")
def verify(
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE.py", help="The problem, with its Model.")],
    candidate: Annotated[Path | None, typer.Argument(metavar="CANDIDATE.py", help="A file with ModelNew.")] = None,
    self_check: options.SelfCheck = False,
    backward: Annotated[bool, typer.Option("--backward", help="Check the gradients as well.")] = False,
    seeds: Annotated[int, typer.Option(min=5, help="Points of each kind; more find rarer faults.")] = 5,
    seed: options.Seed = None,
    time_budget: Annotated[float, typer.Option(min=1, help="Start no further point after this many seconds.")] = 60.0,
    timeout: Annotated[float, typer.Option(min=0.1, max=1e6, help="Seconds for one call of the candidate.")] = 60.0,
    declared_only: options.DeclaredOnly = False,
    like_kernelbench: options.LikeKernelBench = False,
    device: options.Device = None,
    precision: options.Precision = "auto",
    json: options.Json = None,
    debug: options.Debug = False,
) -> None:
    """Judge a candidate against the float64 truth, on random states and inputs that tell right from wrong.

    The candidate runs in a separate process, as your user: docs/security.md says what that does not protect against.

    Exit code: 0 right, 1 wrong (also if ModelNew cannot be built, raises, hangs or crashes), 2 cannot tell, or could
    not run: a file is missing, is not Python, fails when it is imported, or has no ModelNew.
    """

    def command(settings: frame.Settings) -> frame.Answer:
        if like_kernelbench:
            if self_check or backward or declared_only:
                raise PostludeError("--like-kernelbench judges one result at the declared shapes; use it alone.")
            from postlude.cli import kernelbench

            return kernelbench.verify(settings, reference, candidate)
        from postlude.check.exam import Rules
        from postlude.cli import judge

        drawn = judge.any_seed() if seed is None else seed
        rules = Rules(settings.precision, seeds, backward, time_budget, drawn, declared_only)
        return judge.verify(settings, reference, candidate, rules, timeout, self_check)

    frame.run("verify", frame.Request(device, precision, json, debug), command)


@app.command(short_help="Time eager, torch.compile and Postlude in turns.")
def bench(
    file: options.File,
    candidate: options.TimedCandidate = None,
    train: Annotated[bool, typer.Option("--train", help="Time the backward pass and a training step too.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="How often the variants take turns.")] = 20,
    seconds: options.Seconds = 30.0,
    flush: Annotated[bool, typer.Option(help="A second race with the caches flushed before every call.")] = True,
    baselines: options.Baselines = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="PATH", help="Merge the rows into this file.")] = None,
    report: options.ReportPath = None,
    device: options.Device = None,
    precision: options.Precision = "auto",
    json: options.Json = None,
    debug: options.Debug = False,
) -> None:
    """Time eager PyTorch, torch.compile and Postlude in turns; a speed-up is shown only for right results.

    Exit code: 0 done, 1 something failed verification, 2 could not run.
    """

    def command(settings: frame.Settings) -> frame.Answer:
        from postlude.cli import bench as work
        from postlude.cli.bench_state import Options

        asked = Options(file, candidate, train, rounds, seconds, flush, baselines, csv, report)
        return work.bench(settings, asked)

    frame.run("bench", frame.Request(device, precision, json, debug), command)


@app.command(short_help="Optimize, verify and time every problem of a folder.")
def suite(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of problem files, such as KernelBench's.")],
    results: options.ResultsFolder = Path("postlude-suite"),
    only: Annotated[str, typer.Option(metavar="GLOB", help="Only files whose name matches, such as '61_*'.")] = "*",
    again: options.Again = "none",
    train: Annotated[bool, typer.Option("--train", help="Check and time gradients and training steps too.")] = False,
    shapes: options.Shapes = "own",
    limit: options.Limit = 600.0,
    jobs: options.Jobs = 1,
    rounds: Annotated[int, typer.Option(min=3, help="How often the variants take turns.")] = 12,
    seconds: options.Seconds = 10.0,
    baselines: options.Baselines = None,
    report: options.ReportPath = None,
    device: options.Device = None,
    precision: options.Precision = "auto",
    json: options.Json = None,
    debug: options.Debug = False,
) -> None:
    """Optimize, verify and time every problem of a folder, each in a separate process; resume where it stopped.

    Exit code: 0 nothing failed and nothing is wrong, 1 something did or is, 2 could not run.
    """

    def command(settings: frame.Settings) -> frame.Answer:
        from postlude.cli import suite as work

        asked = work.Options(
            folder, results, only, again, limit, rounds, seconds, baselines, report, train, jobs, shapes
        )
        return work.suite(settings, asked)

    frame.run("suite", frame.Request(device, precision, json, debug), command)


@app.command(short_help="Measure the tiles of a model's passes on this card.")
def tune(
    file: options.File,
    train: Annotated[bool, typer.Option("--train", help="For training: the passes of the gradients too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be tried, and run none of it.")] = False,
    device: options.Device = None,
    precision: options.Precision = "auto",
    json: options.Json = None,
    debug: options.Debug = False,
) -> None:
    """Measure other tiles for the model's chains on this card, and keep what is better for later processes.

    Each candidate must give the untuned tiles' result before it is timed. Running a model never measures anything.

    Exit code: 0 done, 2 could not run.
    """

    def command(settings: frame.Settings) -> frame.Answer:
        from postlude.cli import tune as work

        return work.tune(settings, work.Options(file, train, dry_run))

    frame.run("tune", frame.Request(device, precision, json, debug), command)


@app.command(short_help="Turn results that were written earlier into a page.")
def report(
    source: options.Results,
    target: Annotated[Path, typer.Argument(metavar="REPORT", help="The file to write: .html, .json or .csv.")],
    debug: options.Debug = False,
) -> None:
    """Write a report of results that were measured earlier; nothing is run.

    Exit code: 0 done, 2 could not run.
    """

    def command(_: frame.Settings) -> frame.Answer:
        from postlude.cli import report as work

        return work.report(source, target)

    frame.run("report", frame.Request("cpu", "auto", None, debug), command)


@app.command(short_help="Show two chains and a network stage before and after.")
def demo(
    device: options.Device = None,
    precision: options.Precision = "auto",
    report: options.DemoReport = Path("postlude-demo.html"),
    json: options.Json = None,
    debug: options.Debug = False,
) -> None:
    """Show two chains and a stage of a network before and after, on this machine, in about a minute.

    The same table has the times that were recorded on an NVIDIA H200, and a report is written at the end.

    Exit code: 0 done, 1 a result was wrong, 2 could not run.
    """

    def command(settings: frame.Settings) -> frame.Answer:
        from postlude.cli import demo as work

        return work.demo(settings, report)

    frame.run("demo", frame.Request(device, precision, json, debug), command)


@app.command()
def doctor(
    device: options.Device = None,
    json: options.Json = None,
    debug: options.Debug = False,
    clear_cache: options.ClearCache = False,
) -> None:
    """Check this machine and run a tiny self-test; or delete the compiled kernels that are cached on disk.

    Exit code: 0 all well, 1 something is bad, with what to change.
    """

    def command(settings: frame.Settings) -> frame.Answer:
        from postlude.cli import doctor as work

        return work.doctor(settings, clear_cache)

    frame.run("doctor", frame.Request(device, "auto", json, debug), command)
