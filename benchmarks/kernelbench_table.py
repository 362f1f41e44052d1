"""KernelBench's level 2 from its record file: means by class of problem, the rows that gain least, and all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rows import (
    GPU_SOURCES,
    KERNELBENCH_RESULTS,
    TRAINING_SOURCES,
    Case,
    cases,
    error,
    geometric_means,
    line,
    milliseconds,
    number,
    rows_of,
    since,
    times,
    where,
)

from postlude.check import records
from postlude.check.records import Record

PROBLEMS = 100
CLASSES = ("convolution", "transposed convolution", "linear")
PRECISIONS = {"auto": "with PyTorch's defaults", "tf32": "with TF32 allowed", "fp32": "in strict fp32"}
OTHER = " at other shapes"
WORST = 5
UNCHECKED = "not checked"
_HEAD = (
    "| | problem | eager ms | compile ms | max-autotune ms | postlude ms | × eager | × compile | of the roofline | "
    "error | PyTorch's | verdict | code since |\n|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|"
)
_MEANS = (
    "| problems | | × eager | × compile | at least eager's speed | at least torch.compile's | of the roofline |\n"
    "|---|--:|--:|--:|--:|--:|--:|"
)
_WORST = "| | problem | shapes | precision | × eager | × compile |\n|--:|---|---|---|--:|--:|"


def class_of(name: str) -> str:
    words = name.partition("_")[2].lower()
    return CLASSES[1] if words.startswith("convtranspose") else CLASSES[0] if words.startswith("conv") else CLASSES[2]


def measured_as(name: str, precision: str) -> str:
    """The precision under which a problem is recorded. PyTorch's defaults allow TF32 in convolutions only: a linear
    layer's product is strict fp32 with them."""
    return "fp32" if precision == "auto" and class_of(name) == CLASSES[2] else precision


def place_of(name: str) -> int:
    return int(name.split("_")[0])


def known(mode: str, path: Path | None = None) -> dict[str, list[Case]]:
    """The problems of exactly this mode, by precision, those of which most were measured first."""
    found: dict[str, list[Case]] = {}
    for case in cases(path or KERNELBENCH_RESULTS, mode):
        if case.ours.mode == mode:
            found.setdefault(case.ours.precision, []).append(case)
    if "auto" in found:
        found["auto"] += [case for case in found.get("fp32", []) if measured_as(case.ours.chain, "auto") == "fp32"]
    shown = {name: sorted(each, key=lambda case: place_of(case.ours.chain)) for name, each in found.items()}
    order = list(PRECISIONS)
    return dict(sorted(shown.items(), key=lambda item: (-len(item[1]), order.index(item[0]))))


def problems(mode: str) -> list[Case]:
    """At the files' own shapes, in the precision in which most were measured."""
    return next(iter(known(mode).values()))


@dataclass(frozen=True)
class Means:
    """What is said of several problems together."""

    eager: float
    compiled: float
    count: int
    not_slower: int  # than eager
    compared: int  # with torch.compile, which fails in some
    not_slower_compiled: int
    roofline: float | None

    @staticmethod
    def of(shown: Sequence[Case]) -> Means:
        eager, compiled = geometric_means(shown)
        shares = sorted(share for case in shown if (share := share_of(case)) is not None)
        return Means(
            eager,
            compiled,
            len(shown),
            sum(case.times_eager >= 1 for case in shown),
            sum(case.times_compile is not None for case in shown),
            sum((case.times_compile or 0) >= 1 for case in shown),
            shares[len(shares) // 2] if shares else None,
        )

    @property
    def slower(self) -> int:
        """How many are slower than torch.compile."""
        return self.compared - self.not_slower_compiled

    def cells(self) -> list[str]:
        share = "" if self.roofline is None else f"{self.roofline:.0%}"
        return [
            *(str(self.count), f"{self.eager:.2f}", f"{self.compiled:.2f}"),
            *(f"{self.not_slower} of {self.count}", f"{self.not_slower_compiled} of {self.compared}", share),
        ]


def share_of(case: Case) -> float | None:
    """Of the speed at which the card's memory and tensor cores would do the problem."""
    return None if not case.ours.floor_ms or not case.ours.ms_p50 else case.ours.floor_ms / case.ours.ms_p50


def sentence() -> str:
    """For the README."""
    forward, training = problems("forward"), problems("training step")
    one, step = Means.of(forward), Means.of(training)
    words = PRECISIONS[forward[0].ours.precision]
    how_many = f"all {PROBLEMS}" if one.count == PROBLEMS else f"{one.count} of the {PROBLEMS}"
    return (
        f"Over {how_many} problems of KernelBench's level 2 {words}, inference is {one.eager:.2f}× eager and "
        f"{one.compiled:.2f}× torch.compile by geometric mean, a training step {step.eager:.2f}× and "
        f"{step.compiled:.2f}×; {_losses(one.slower, step.slower)}."
    )


def _losses(inference: int, training: int) -> str:
    if not inference + training:
        return "none of them is slower than torch.compile"
    return f"{inference or 'none'} of them slower than torch.compile in inference and {training or 'none'} in training"


def render(mode: str) -> str:
    """Means by class for each precision and set of shapes, the rows that gain least, then every row."""
    sources = GPU_SOURCES if mode == "forward" else TRAINING_SOURCES
    own, other = known(mode), known(mode + OTHER)
    shown = [case for found in (own, other) for each in found.values() for case in each]
    parts = [_means(own, other), _worst(shown)]
    for where_, found in (("", own), (OTHER, other)):
        parts += [_rows(each, sources, f"{PRECISIONS[name]}{where_}") for name, each in found.items()]
    return "\n\n".join([*parts, *_failures(mode), _exceptions(own, other), where(rows_of(shown), intervals=False)])


def _exceptions(own: dict[str, list[Case]], other: dict[str, list[Case]]) -> str:
    """The rows that are slower than torch.compile, and those that were not checked."""
    slower, unchecked = [], []
    for shapes, found in (("", own), (OTHER, other)):
        for name, each in found.items():
            words = f"{PRECISIONS[name]}{shapes}"
            slower += _named([case for case in each if (case.times_compile or 1) < 1], words)
            unchecked += _named([case for case in each if case.ours.verdict == UNCHECKED], words)
    told = f"Slower than torch.compile: {'; '.join(slower)}." if slower else "No row is slower than torch.compile."
    return f"{told} Not checked against float64: {'; '.join(unchecked)}." if unchecked else told


def _named(some: Sequence[Case], words: str) -> list[str]:
    numbers = ", ".join(str(place_of(case.ours.chain)) for case in some)
    return [f"{numbers} ({words})"] if some else []


def _means(own: dict[str, list[Case]], other: dict[str, list[Case]]) -> str:
    lines = [_MEANS]
    for shapes, found in (("", own), (OTHER, other)):
        for name, each in found.items():
            words = f"{PRECISIONS[name]}{shapes}"
            for kind in CLASSES:
                some = [case for case in each if class_of(case.ours.chain) == kind]
                lines += [line(f"{kind}, {words}", *Means.of(some).cells())] if some else []
            lines.append(line(f"all, {words}", *Means.of(each).cells()))
    return "\n".join(lines)


def _worst(shown: Sequence[Case]) -> str:
    least = sorted(shown, key=lambda case: min(case.times_eager, case.times_compile or case.times_eager))[:WORST]
    lines = [f"The {len(least)} rows that gain least against either:", "", _WORST]
    for case in least:
        ours = case.ours
        shapes = "other" if ours.mode.endswith(OTHER) else "the file's"
        about = str(place_of(ours.chain)), _words(ours.chain), shapes, ours.precision
        lines.append(line(*about, number(case.times_eager), number(case.times_compile)))
    return "\n".join(lines)


def _rows(each: Sequence[Case], sources: list[Path], words: str) -> str:
    """Every row, folded away: a hundred lines."""
    autotuned = {
        (row.chain, row.shape, row.precision, row.mode): row
        for row in records.read(KERNELBENCH_RESULTS)
        if row.variant.endswith("max-autotune")
    }
    lines = [f'<details markdown="1"><summary>All {len(each)} rows {words}</summary>', "", _HEAD]
    for case in each:
        ours = case.ours
        tuned = autotuned.get((ours.chain, ours.shape, ours.precision, ours.mode))
        eager, compiled, own = times(case)
        share = share_of(case)
        cells = [str(place_of(ours.chain)), _words(ours.chain), eager, compiled, milliseconds(tuned), own]
        cells += [number(case.times_eager), number(case.times_compile), "" if share is None else f"{share:.0%}"]
        lines.append(line(*cells, error(ours), error(case.eager), ours.verdict, since(ours, sources)))
    return "\n".join([*lines, "", "</details>"])


def _words(name: str) -> str:
    return name.partition("_")[2].replace("_", " ")


def _failures(mode: str) -> list[str]:
    """Problems without a time of ours, with the reason."""
    rows = [row for row in records.read(KERNELBENCH_RESULTS) if row.mode in (mode, mode + OTHER)]
    failed = [row for row in rows if row.variant == "postlude" and row.ms_p50 is None]
    return [] if not failed else ["Not timed: " + "; ".join(map(_reason, failed)) + "."]


def _reason(row: Record) -> str:
    shapes = OTHER if row.mode.endswith(OTHER) else ""
    return f"{place_of(row.chain)}{shapes} ({row.verdict}{': ' if row.reason else ''}{row.reason.rstrip('.')})"
