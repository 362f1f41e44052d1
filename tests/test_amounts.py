"""Amounts in reasons are never 0.0 of a unit, and never reach a limit that they are below."""

from __future__ import annotations

import pytest

from postlude.amounts import shown_bytes


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (47 << 20, "47.0 MiB"),
        ((32 << 20) - 1, "31.9 MiB"),  # not 32.0, from which on fusing may pay
        (104858, "0.1 MiB"),
        (104857, "102.3 KiB"),
        (4096, "4.0 KiB"),
        (103, "0.1 KiB"),
        (102, "102 bytes"),
        (0, "0 bytes"),
    ],
)
def test_the_unit_fits_the_amount(count: int, shown: str) -> None:
    assert shown_bytes(count) == shown
