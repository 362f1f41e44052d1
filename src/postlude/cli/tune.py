"""`postlude tune`: measures tiles for a model's passes on this card and keeps the best for later processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from postlude import hardware
from postlude.chain import Chain
from postlude.cli.frame import DONE, Answer, Settings
from postlude.cli.output import say, show_table, working
from postlude.cli.session import machine_data, open_problem
from postlude.cli.tuning import CardBench, Found, TileBench, search
from postlude.errors import PostludeError
from postlude.hardware import Machine
from postlude.pipeline import optimize
from postlude.plan import Plan, Problem, lower
from postlude.plan.candidates import candidates, with_row
from postlude.plan.tile_uses import uses_of
from postlude.tile_table import NO_TILES, Row, TileTable, TileUse, write_table

NO_CARD = "tune needs an NVIDIA GPU: only the GPU kernels have tile sizes to choose from."
MakeBench = Callable[[Chain, Problem, int], TileBench]


@dataclass(frozen=True)
class Options:
    file: Path
    train: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Case:
    """A chain of the model with the tensors that it gets."""

    name: str
    chain: Chain
    problem: Problem


def tune(settings: Settings, options: Options, make_bench: MakeBench = CardBench) -> Answer:
    if settings.device != "cuda":
        raise PostludeError(NO_CARD)
    machine, folder = hardware.machine_for("cuda"), _folder()
    cases = list(_cases(settings, options))
    asked = [(case, use) for case in cases for use in _uses(case, machine)]
    unique = {use: (case, use) for case, use in reversed(asked)}  # the first chain with this use
    work = [pair for pair in asked if unique[pair[1]] == pair]
    if not work:
        say("Nothing to tune: no chain of this model runs in Postlude's kernels on this card.", "bold")
    elif options.dry_run:
        return _listed(settings, options, machine, work)
    rows: list[tuple[Case, TileUse, Found]] = []
    bench: TileBench | None = None
    for case, use in work:
        if bench is None or case != rows[-1][0]:
            bench = None  # frees its tensors before the next ones are allocated
            bench = make_bench(case.chain, case.problem, machine.cache_bytes)
        found = _tuned(case, use, machine, bench)
        if found.best is not None:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            row = Row(use, found.best.row.settings, tuned=now)
            write_table(folder, hardware.tile_key(), TileTable((row,)))  # at once: the rest may be interrupted
            machine = with_row(machine, row)
        rows.append((case, use, found))
    _show(rows, folder)
    return Answer(DONE, {**_head(settings, options), "questions": [_data(*row) for row in rows]})


def _folder() -> Path:
    """The folder for tiles; raises if it cannot be used, before the work and not after it."""
    folder = hardware.cache_folder()
    if folder is None:
        raise PostludeError("there is no folder to keep tiles in; name one in POSTLUDE_CACHE_DIR.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PostludeError(f"{folder}: tiles cannot be kept there ({error.strerror}).") from error
    return folder


def _cases(settings: Settings, options: Options) -> Iterator[Case]:
    """The chains of the model, each problem once. For a list of candidates no GPU is needed, so the CPU is used."""
    where = Settings("cpu", "auto") if options.dry_run else settings
    opened = open_problem(where, options.file)
    with working("Finding chains"), torch.set_grad_enabled(options.train):
        sites = optimize(opened.model, opened.inputs, precision=where.precision, rest="eager", verify=False).sites
    seen: set[tuple[Chain, Problem]] = set()
    for site in sites:
        tf32 = hardware.default_fp32_precision() == "tf32"
        problem = dataclasses.replace(site.problem, device="cuda", precision=settings.precision, allows_tf32=tf32)
        if (site.chain, problem) not in seen:
            seen.add((site.chain, problem))
            yield Case(site.name, site.chain, problem)


def _uses(case: Case, machine: Machine) -> list[TileUse]:
    plan = lower(case.chain, case.problem, machine)
    return uses_of(plan, machine) if isinstance(plan, Plan) else []


def _tuned(case: Case, use: TileUse, machine: Machine, bench: TileBench) -> Found:
    untuned = lower(case.chain, case.problem, dataclasses.replace(machine, tiles=NO_TILES))
    present = lower(case.chain, case.problem, machine)
    assert isinstance(untuned, Plan)
    assert isinstance(present, Plan)
    with working(f"{case.name}: {use}", timed=True) as progress:
        given = candidates(case.chain, case.problem, machine, use)
        return search(bench, untuned, present, given, progress)


def _listed(settings: Settings, options: Options, machine: Machine, work: list[tuple[Case, TileUse]]) -> Answer:
    data: list[dict[str, Any]] = []
    for case, use in work:
        given = candidates(case.chain, case.problem, machine, use)
        say(f"{case.name}: {use}", "bold")
        for candidate in given:
            say(f"  {candidate}")
        data.append({"where": case.name, "question": str(use), "candidates": [str(one) for one in given]})
    say(f"{sum(len(one['candidates']) for one in data)} candidates; nothing was run.", "bold")
    return Answer(DONE, {**_head(settings, options), "questions": data})


def _show(rows: list[tuple[Case, TileUse, Found]], folder: Path) -> None:
    if not rows:
        return
    columns = ["where", "tiles of", "tried", "left out", "best", "gain"]
    show_table(columns, [_cells(*row) for row in rows], numbers=("tried", "gain"))
    kept = sum(found.best is not None for _, _, found in rows)
    say(f"{kept} of {len(rows)} tiles are better than before and kept in {folder}." if kept else _NO_GAIN, "bold")


_NO_GAIN = "No tile is better than the current one beyond noise: nothing was kept."


def _cells(case: Case, use: TileUse, found: Found) -> list[str]:
    left = ", ".join(f"{count} {reason}" for reason, count in found.dropped.most_common()) or "–"
    best = "as it was" if found.best is None else str(found.best)
    gain = "–" if found.gain is None else f"{found.gain.median:.3f} ({found.gain.low:.2f}–{found.gain.high:.2f})"
    return [case.name, str(use), str(found.tried), left, best, gain]


def _data(case: Case, use: TileUse, found: Found) -> dict[str, Any]:
    gain = found.gain
    return {
        "where": case.name,
        "question": dataclasses.asdict(use),
        "tried": found.tried,
        "left_out": dict(found.dropped),
        "settings": None if found.best is None else found.best.row.values,
        "gain": None if gain is None else {"median": gain.median, "low": gain.low, "high": gain.high},
    }


def _head(settings: Settings, options: Options) -> dict[str, Any]:
    return {"file": str(options.file), "train": options.train, **machine_data(settings)}
