"""Every test belongs to one rung (see tests/rungs.py); what carries no other mark is `pure`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

RUNGS = {"interpret", "compile", "export", "record", "gpu"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if RUNGS.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker(pytest.mark.pure)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so an element that nobody writes fails the comparison."""
    for name in ("empty", "empty_like", "empty_strided"):
        plain = getattr(torch, name)

        def poisoned(*args: object, _plain: object = plain, **kwargs: object) -> torch.Tensor:
            tensor: torch.Tensor = _plain(*args, **kwargs)  # type: ignore[operator]
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
