"""What a model's ledger remembers."""

from __future__ import annotations

import pytest
import torch

from cases import Builder, conv
from postlude.plan import problem_of
from postlude.run import ledger
from postlude.run.ledger import Ledger, SiteProblem


def test_sizes_that_were_symbols_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose sizes are symbols foresees a problem at every new size."""
    monkeypatch.setattr(ledger, "_REMEMBERED", 3)
    chain = Builder(2, conv(2, (3, 4), padding=1)).norm(2).chain()
    weight, vector = torch.empty(4, 3, 3, 3), torch.empty(4)

    def asked(name: str, size: int) -> SiteProblem:
        tensors = (torch.empty(1, 3, size, size), weight, vector, vector, vector)
        return SiteProblem(name, chain, problem_of(tensors), (False,) * 5)

    found, other = Ledger(), asked("other", 4)
    found.foresee(other)
    for size in range(4, 12):
        entry = found.foresee(asked("site", size))
        assert entry.problem.x.shape[-1] == size
        assert found.foreseen(asked("site", size)) is entry
    assert len([one for one in found._foreseen if one.name == "site"]) <= 3
    assert found.foreseen(other) is not None
