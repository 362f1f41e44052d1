"""Reports from the rows of a record file, which the repository's benchmarks write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from postlude.check.records import Record
from postlude.report import model

_PROBLEM = ("chain", "shape", "dtype", "layout", "precision", "mode", "malloc", "device")
NOTHING = "Recorded rows hold no budget, roofline or chain: only times, errors and memory are shown."


def from_records(rows: Iterable[Record]) -> list[model.Report]:
    """One report per problem, in the order of the rows."""
    problems: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        problems.setdefault(tuple(str(getattr(row, name)) for name in _PROBLEM), []).append(row)
    # Rows without eager PyTorch to compare with are not about speed, but for example about start-up.
    return [_report(found) for found in problems.values() if model.EAGER in {row.variant for row in found}]


def _report(rows: Sequence[Record]) -> model.Report:
    first = rows[0]
    known = {row.variant: row.ms_p50 for row in rows if row.ms_p50 is not None}
    fastest = model.fastest_compile(known)
    compiled = None if fastest is None else known[fastest]
    direction = "training step" if first.mode in ("train", "training step") else "forward"
    entries = [entry for row in rows if (entry := _entry(row, compiled)) is not None]
    mode = first.dtype if first.precision == "auto" else first.precision
    names = ("torch", "triton", "python", "postlude", "commit", "kernel_hash", "malloc")
    return model.Report(
        title=first.chain,
        subject=model.POSTLUDE,
        judgement=model.Judgement(model.NOT_CHECKED, ("recorded; errors beside PyTorch's own are below",), mode),
        precision=mode,
        device=first.device,
        made=first.timestamp,
        shape=f"{first.shape}, {first.layout.replace('_', '-')}, {mode}",
        races=(model.Race(direction, "warm", tuple(entries)),),
        variants=tuple(map(_variant, rows)),
        left_out=(NOTHING,),
        environment={name: getattr(first, name) for name in names if getattr(first, name)} | _clock(rows),
    )


def _entry(row: Record, compiled_ms: float | None) -> model.Entry | None:
    if row.ms_p50 is None or row.ms_low is None or row.ms_high is None:
        return None
    seconds = model.Interval(row.ms_p50 / 1e3, row.ms_low / 1e3, row.ms_high / 1e3)
    gain = None
    if row.speedup is not None and row.variant != model.EAGER:
        gain = model.Interval(row.speedup, row.speedup_low or row.speedup, row.speedup_high or row.speedup)
    beside = None
    if compiled_ms is not None and gain is not None and not row.variant.startswith(model.COMPILE):
        # Rows hold no samples, so the ends of the interval come from the row's own times.
        beside = model.Interval(compiled_ms / row.ms_p50, compiled_ms / row.ms_high, compiled_ms / row.ms_low)
    return model.Entry(row.variant, seconds, gain, beside)


def _variant(row: Record) -> model.Variant:
    note = "" if row.error_rms is None else f"error {row.error_rms:.1e} rms, {row.error_worst or 0:.1e} worst"
    peak = None if row.peak_mib is None else round(row.peak_mib * 2**20)
    return model.Variant(row.variant, note, peak_bytes=peak, launches=row.launches)


def _clock(rows: Sequence[Record]) -> dict[str, str]:
    clocks = [row.clock_mhz for row in rows if row.clock_mhz is not None]
    return {"GPU clock": f"{min(clocks)} to {max(clocks)} MHz"} if clocks else {}
