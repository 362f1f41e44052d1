"""The one case that a function is cut down to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """A constant that is put in as it stands: Name("tl.float32")."""

    text: str


@dataclass(frozen=True)
class Inline:
    """A function whose calls become this text, {0} their first argument: Inline("relu({0})")."""

    text: str


@dataclass(frozen=True)
class Case:
    decided: Mapping[str, object]  # put in place of the names
    known: Mapping[str, object]  # these and the ones that stay parameters: enough to decide a condition
