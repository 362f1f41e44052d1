"""Models that Dynamo cannot trace run as they were, and their own errors stay their own."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Sequence

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import postlude
from postlude.errors import PostludeError
from postlude.graph.capture import capture

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.ReLU())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Lets Dynamo fail as it does on code that it cannot trace; what it was asked to run."""
    from torch._dynamo.exc import TorchRuntimeError

    seen: list[Tensor] = []

    def failing(x: Tensor) -> Tensor:
        seen.append(x)
        raise TorchRuntimeError("as asked")

    monkeypatch.setattr("postlude.graph.compiled.torch.compile", lambda *_, **__: failing)
    return seen


def test_a_model_that_dynamo_raises_on_runs_as_it_was_and_says_so_once(
    asked: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    plain, x = model(), torch.randn(2, 4, 6, 6)
    ours = copy.deepcopy(plain)
    with caplog.at_level(logging.WARNING, "postlude"):
        result = postlude.optimize(ours, x)
        assert result.failure == "TorchRuntimeError: as asked"
        assert result.sites == ()
        for _ in range(2):
            torch.testing.assert_close(ours(x), plain(x), rtol=0, atol=0)
    assert [record.getMessage() for record in caplog.records] == [
        "this model could not be captured and runs as it was (TorchRuntimeError: as asked)"
    ]
    assert len(asked) == 1
    for mine, theirs in zip(ours.buffers(), plain.buffers()):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


class Trying(nn.Module):
    """Tries whether a tensor fits, which some versions of Dynamo do not trace: they raise where the operator does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self.conv(x[:, :3])
        except RuntimeError:
            y = self.conv(x)
        return torch.relu(self.norm(y))


def test_code_that_tries_an_operator_runs() -> None:
    plain, x = Trying(), torch.randn(2, 4, 6, 6)
    ours = copy.deepcopy(plain)
    postlude.optimize(ours, x)
    torch.testing.assert_close(ours(x), plain(x))


def test_a_models_own_error_is_raised_as_it_is_and_disables_nothing() -> None:
    ours, x = model().eval(), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        result = postlude.optimize(ours, x)
        with pytest.raises(RuntimeError, match="to have 4 channels") as raised:
            ours(torch.randn(2, 3, 6, 6))
        assert type(raised.value) is RuntimeError
        ours(x)
    assert result.failure is None
    assert not result.backend.has_given_up


def test_a_backend_that_fails_is_not_taken_for_code_that_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PostludeError("as asked.")

    monkeypatch.setattr("postlude.graph.backend.check_precision", fail)
    with pytest.raises(Exception, match="as asked"):
        postlude.optimize(model(), torch.randn(2, 4, 6, 6))


def test_a_model_runs_as_it_is_while_another_thread_traces() -> None:
    plain, x = model(), torch.randn(2, 4, 6, 6)
    ours = copy.deepcopy(plain)
    postlude.optimize(ours, x, verify=False)
    traces, goes_on = threading.Event(), threading.Event()

    def slow(value: Tensor) -> Tensor:
        traces.set()
        assert goes_on.wait(60)
        return value + 1

    thread = threading.Thread(target=make_fx(slow), args=(torch.ones(1),))
    thread.start()
    try:
        assert traces.wait(60)
        torch.testing.assert_close(ours(x), plain(x))
    finally:
        goes_on.set()
        thread.join()


@pytest.mark.parametrize("has_own", [True, False])
def test_sizes_of_one_model_are_not_symbols_because_another_model_has_others(
    has_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: the functions of all models have one name."""
    if not has_own:
        monkeypatch.setattr("postlude.graph.compiled._numbers", itertools.repeat(0))
    seen: list[bool] = []

    def spied(graph: fx.GraphModule, inputs: Sequence[object]) -> fx.GraphModule:
        seen.append(any(isinstance(given, torch.SymInt) for given in inputs))
        return capture(graph, inputs)

    monkeypatch.setattr("postlude.graph.backend.capture", spied)
    for size in (6, 7, 8):
        postlude.optimize(model(), torch.randn(2, 4, size, size), verify=False)
    assert seen == [False, *[not has_own] * 2]
