"""Where the time of a network goes: each chain alone, before and after."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import postlude
from postlude.cli import site_times

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "small_values_fuse")


def test_every_site_has_its_times_and_equal_ones_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Conv2d(8, 2, 1), nn.ReLU()).eval()
    with torch.no_grad():
        sites = postlude.optimize(model, torch.randn(2, 8, 40, 40), verify=False).sites
    assert [site.is_fused for site in sites] == [True, True, True, False]
    timed: list[object] = []
    said: list[str] = []
    plain = site_times._seconds

    def counted(*args: object) -> tuple[float, float]:
        timed.append(args[0])
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(site_times, "_seconds", counted)
    found = site_times.site_seconds(sites, 1.0, said.append)
    assert len(timed) == 2
    assert said == ["chain 1 of 2", "chain 2 of 2"]
    assert found[0] == found[1] == found[2]
    assert all(before > 0 and after > 0 for before, after in found)
    assert found[3][0] == found[3][1]  # it runs as it did
