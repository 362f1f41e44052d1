"""Models that Dynamo cannot trace run as they were, and their own errors stay their own."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

import postlude
from postlude.errors import PostludeError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Trying(nn.Module):
    """Tries whether a tensor fits, which Dynamo does not trace: it raises where the operator does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.batch = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self.conv(x[:, :3])
        except RuntimeError:
            y = self.conv(x)
        return torch.relu(self.norm(self.batch(y)))


def test_a_model_that_dynamo_raises_on_runs_as_it_was_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    plain, x = Trying(), torch.randn(2, 4, 6, 6)
    model = copy.deepcopy(plain)
    with caplog.at_level(logging.WARNING, "postlude"):
        result = postlude.optimize(model, x)
        assert result.failure is not None
        assert result.failure.startswith("TorchRuntimeError")
        assert result.sites == ()
        for _ in range(2):
            torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
    assert [record.getMessage() for record in caplog.records] == [
        f"this model could not be captured and runs as it was ({result.failure})"
    ]
    torch.testing.assert_close(model.batch.running_mean, plain.batch.running_mean, rtol=0, atol=0)


def test_dynamo_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Trying(), torch.randn(2, 4, 6, 6)
    result = postlude.optimize(model, x)
    monkeypatch.setattr("postlude.graph.compiled.is_untraceable", lambda _: False)  # a failure would reach the caller
    model(x)
    assert result.backend.has_given_up


def test_a_models_own_error_is_raised_as_it_is_and_disables_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()).eval()
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        result = postlude.optimize(model, x)
        with pytest.raises(RuntimeError, match="to have 4 channels") as raised:
            model(torch.randn(2, 3, 6, 6))
        assert type(raised.value) is RuntimeError
        model(x)
    assert result.failure is None
    assert not result.backend.has_given_up


def test_a_backend_that_fails_is_not_taken_for_code_that_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PostludeError("as asked.")

    monkeypatch.setattr("postlude.graph.backend.check_precision", fail)
    with pytest.raises(Exception, match="as asked"):
        postlude.optimize(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()), torch.randn(2, 4, 6, 6))
