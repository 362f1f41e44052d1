"""A network's many sites, for a page that stays readable: equal ones together, the most expensive first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from postlude.report import model, words

FEW = 3  # sites that a page shows one by one


@dataclass(frozen=True)
class Group:
    """Sites with the same chain and sizes, that run the same way; `first` stands for all of them."""

    sites: tuple[model.Site, ...]

    @property
    def first(self) -> model.Site:
        return self.sites[0]

    @property
    def before_seconds(self) -> float | None:
        return _sum([site.before_seconds for site in self.sites])

    @property
    def after_seconds(self) -> float | None:
        return _sum([site.after_seconds for site in self.sites])

    @property
    def before_bytes(self) -> float | None:
        return _sum([site.before_bytes for site in self.sites])

    @property
    def after_bytes(self) -> float | None:
        return _sum([site.after_bytes for site in self.sites])

    @property
    def why(self) -> str:
        """What to read in a line: how it runs, or the first reason why it stays as it is."""
        if self.first.is_fused:
            count = self.first.after_launches
            return "fused" if count is None else f"fused: {words.counted(count, self.first.unit)}"
        return self.first.reasons[0] if self.first.reasons else "as it was"


@dataclass(frozen=True)
class Refused:
    """Convolutions and norms that are in no chain, for one reason."""

    what: str
    reason: str
    names: tuple[str, ...]


def groups_of(sites: Sequence[model.Site]) -> list[Group]:
    """Most of what is left to pay first: by time where it was measured, else by bytes."""
    found: dict[object, list[model.Site]] = {}
    for site in sites:
        key = (site.chain, site.inputs, site.is_fused, site.before_bytes, site.after_bytes, site.reasons)
        found.setdefault(key, []).append(site)
    groups = [Group(tuple(members)) for members in found.values()]
    return sorted(groups, key=lambda group: (-(group.after_seconds or 0.0), -(group.after_bytes or 0)))


def declined_by_reason(declined: Sequence[model.Declined]) -> list[Refused]:
    found: dict[tuple[str, str], list[str]] = {}
    for item in declined:
        found.setdefault((item.what, item.reason), []).append(item.name)
    return [Refused(what, reason, tuple(names)) for (what, reason), names in found.items()]


def summary_of(report: model.Report) -> list[str]:
    """What a reader wants to know of a network first."""
    fused = [site for site in report.sites if site.is_fused]
    whole = Group(report.sites)
    lines = [f"{len(fused)} of {len(report.sites)} chains are fused"]
    if whole.before_seconds is not None and whole.after_seconds is not None:
        before, after = map(words.milliseconds, (whole.before_seconds, whole.after_seconds))
        lines.append(f"each alone, the chains take {before} ms as PyTorch runs them and {after} ms as they run now")
    moved = Group(tuple(fused))
    if fused and moved.before_bytes is not None and moved.after_bytes is not None:
        lines.append(
            f"those that are fused move {words.size(moved.after_bytes)} instead of {words.size(moved.before_bytes)}"
        )
    if report.conversions:
        size = words.size(sum(item.bytes for item in report.conversions))
        lines.append(f"values change their layout {words.counted(len(report.conversions), 'times')}, {size} in all")
    return lines


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None
