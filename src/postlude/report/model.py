"""The data of a report. Every number on the page, in the JSON and in the CSV is one of these fields.

Times are seconds, memory is bytes. A number that was not measured is None, and `left_out` says why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = 1
EAGER, COMPILE, POSTLUDE, CANDIDATE = "eager", "torch.compile", "postlude", "candidate"
NOT_CHECKED = "not checked"
RIGHT, WRONG, CANNOT_TELL = "right", "wrong", "cannot tell"
DECLINED, FAILED = "declined", "failed"  # nothing was fused; it could not run
OUTCOMES = (RIGHT, WRONG, CANNOT_TELL, NOT_CHECKED, DECLINED, FAILED)


@dataclass(frozen=True)
class Interval:
    """A median and an interval that contains it with probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float = 0.0
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One variant in one race. Ratios are None if they may not be shown."""

    variant: str
    seconds: Interval
    times_eager: Interval | None = None
    times_compile: Interval | None = None
    event_seconds: float | None = None  # by CUDA events, for information


@dataclass(frozen=True)
class Race:
    """Variants that took turns at the same work."""

    direction: str  # forward, backward, training step
    cache: str  # warm, flushed
    entries: tuple[Entry, ...]
    rounds: int = 0

    @property
    def name(self) -> str:
        return f"{self.direction}, {'caches flushed' if self.cache == 'flushed' else 'warm'}"


@dataclass(frozen=True)
class Errors:
    """Relative to the spread of the float64 truth."""

    rms: float
    worst: float


@dataclass(frozen=True)
class Quantity:
    """One judged quantity: the output, a gradient, a buffer."""

    name: str
    outcome: str
    errors: Errors | None = None
    allowed: Errors | None = None  # the budget with its factors
    own: Errors | None = None  # PyTorch's own errors
    points: int = 0


@dataclass(frozen=True)
class Judgement:
    outcome: str
    reasons: tuple[str, ...] = ()
    precision: str = ""
    quantities: tuple[Quantity, ...] = ()


@dataclass(frozen=True)
class Variant:
    """What is known about one variant apart from its times."""

    name: str
    note: str = ""
    judgement: Judgement | None = None
    is_judged: bool = False  # False for PyTorch's own variants, which need no verdict
    peak_bytes: int | None = None  # of one forward pass, beyond what was allocated before
    saved_bytes: int | None = None  # by one forward pass for its backward pass
    launches: int | None = None  # kernels on a GPU, operators on a CPU

    @property
    def may_be_compared(self) -> bool:
        """Whether a speed-up may be shown: only for a right result, or for PyTorch itself."""
        return not self.is_judged or (self.judgement is not None and self.judgement.outcome == RIGHT)


@dataclass(frozen=True)
class RooflinePoint:
    variant: str
    seconds: float
    share: float  # of the speed that the machine's measured ceilings allow


@dataclass(frozen=True)
class Roofline:
    """One forward pass under the measured rates of this machine for copies and for products of the same precision."""

    operations: int
    bytes: int  # inputs and parameters read once, the result written once
    bytes_per_second: float
    operations_per_second: float
    points: tuple[RooflinePoint, ...] = ()

    @property
    def floor_seconds(self) -> float:
        return max(self.bytes / self.bytes_per_second, self.operations / self.operations_per_second)


@dataclass(frozen=True)
class Histogram:
    """How many elements of a result have which error; bin i holds log10 of errors in [edges[i], edges[i+1])."""

    variant: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    exact: int = 0  # elements without any error
    worst: float = 0.0


@dataclass(frozen=True)
class Pass:
    """One step of the work and the bytes that it reads and writes beyond the cache."""

    words: str
    bytes: int | None = None


@dataclass(frozen=True)
class Site:
    """One chain: as PyTorch runs it and as it runs now."""

    name: str
    chain: str
    inputs: tuple[str, ...]
    is_fused: bool
    before: tuple[Pass, ...]
    after: tuple[Pass, ...]
    before_bytes: int | None = None
    after_bytes: int | None = None
    before_launches: int | None = None
    after_launches: int | None = None
    unit: str = "launches"
    reasons: tuple[str, ...] = ()
    judgement: Judgement | None = None
    before_seconds: float | None = None  # of the chain alone, by PyTorch's operators
    after_seconds: float | None = None  # of the chain alone, as it runs now


@dataclass(frozen=True)
class Conversion:
    """A place where a value becomes channels-last, or contiguous again: the border of a region."""

    name: str
    layout: str
    shape: str
    bytes: int


@dataclass(frozen=True)
class Declined:
    name: str
    what: str
    reason: str


@dataclass(frozen=True)
class Report:
    title: str
    subject: str  # the variant that the report is about
    judgement: Judgement
    precision: str
    device: str
    made: str  # the time, ISO 8601
    shape: str = ""
    races: tuple[Race, ...] = ()
    variants: tuple[Variant, ...] = ()
    roofline: Roofline | None = None
    histograms: tuple[Histogram, ...] = ()
    sites: tuple[Site, ...] = ()
    declined: tuple[Declined, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    findings: tuple[str, ...] = ()  # what is wrong with the measurement or the result
    questions: tuple[str, ...] = ()  # what a reader should ask
    left_out: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.judgement.outcome not in OUTCOMES:
            raise ValueError(f"{self.judgement.outcome!r} is not a verdict")
        refused = {variant.name for variant in self.variants if not variant.may_be_compared}
        for race in self.races:
            for entry in race.entries:
                if entry.variant in refused and (entry.times_eager or entry.times_compile):
                    raise ValueError(f"{entry.variant} is not right, so it has no speed-up")

    def variant(self, name: str) -> Variant:
        return next((one for one in self.variants if one.name == name), Variant(name))

    @property
    def main_race(self) -> Race | None:
        """The race that the headline is about: the warm forward pass, if there is one."""
        return next((race for race in self.races if (race.direction, race.cache) == ("forward", "warm")), None) or (
            self.races[0] if self.races else None
        )

    def entry(self, race: Race | None, name: str) -> Entry | None:
        return None if race is None else next((one for one in race.entries if one.variant == name), None)


def fastest_compile(seconds: Mapping[str, float]) -> str | None:
    """The fastest of torch.compile's modes that were timed."""
    modes = [name for name in seconds if name.startswith(COMPILE)]
    return min(modes, key=lambda name: seconds[name], default=None)


def as_dict(value: Any) -> Any:
    """The value for JSON; infinities and NaN are text."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [as_dict(part) for part in value]
    if isinstance(value, dict):
        return {str(key): as_dict(part) for key, part in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
