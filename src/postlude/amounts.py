"""Amounts of memory as reasons say them."""

from __future__ import annotations


def shown_bytes(count: int) -> str:
    """An amount in MiB; in KiB or bytes where that would be less than 0.1. Rounded down: less than a limit shows so."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if 10 * count >= unit:
            return f"{10 * count // unit / 10:.1f} {name}"
    return f"{count} bytes"
