"""Models with batch_norm in training: what moves, when, and what is left to PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import postlude
from postlude import PostludeError
from postlude import nn as fused_modules
from postlude.graph.backend import Backend
from postlude.nn import FusedChain

pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "refused_chains_too"), pytest.mark.filterwarnings("ignore")]


class Net(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, **options), nn.Mish()  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


def assert_same_state(ours: nn.Module, theirs: nn.Module, tolerance: float = 0.0) -> None:
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=name)


def test_optimize_verifies_and_leaves_statistics_and_counter_alone() -> None:
    """A value large enough for a plan of ours: verified, then run by it, in inference without eval()."""
    eager, x = Net(), torch.randn(32, 3, 34, 34)
    model = copy.deepcopy(eager)
    with torch.no_grad():
        result = postlude.optimize(model, x)
        assert [str(site.chain) for site in result.sites] == ["conv2d(3→8, k3) → batch_norm(batch) → mish"]
        assert result.sites[0].is_fused
        assert result.verdict is not None
        assert result.verdict.right, result.verdict
        assert_same_state(model, eager)
        for _ in range(3):
            x = torch.randn(32, 3, 34, 34)
            torch.testing.assert_close(model(x), eager(x), rtol=1e-5, atol=1e-5)
    assert_same_state(model, eager, 1e-6)
    result.undo()
    torch.testing.assert_close(model(x), eager(x), rtol=1e-5, atol=1e-5)
    assert_same_state(model, eager, 1e-6)


def test_gradients_on_the_cpu_are_pytorchs_to_the_bit() -> None:
    eager = Net()
    model = copy.deepcopy(eager)
    model.compile(backend=Backend())
    for _ in range(2):
        x = torch.randn(2, 3, 8, 7)
        for one in (model, eager):
            one(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    assert_same_state(model, eager)


@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"track_running_stats": False}, {"momentum": 1.0, "affine": False}], ids=str
)
def test_options_are_pytorchs(options: dict[str, object]) -> None:
    """A cumulative average reads its counter, which breaks the graph: right, and not fused."""
    eager = Net(**options)
    model, backend = copy.deepcopy(eager), Backend()
    model.compile(backend=backend)
    for is_training in (True, True, False):
        x = torch.randn(3, 3, 6, 7)
        torch.testing.assert_close(model.train(is_training)(x), eager.train(is_training)(x), rtol=0, atol=0)
    assert_same_state(model, eager)
    chains = [str(site.chain) for captured in backend.captured for site in captured.sites]
    assert any("batch_norm(batch) → mish" in chain for chain in chains) == (options != {"momentum": None})


def test_one_value_per_channel_is_pytorchs_error() -> None:
    model = Net()
    model.compile(backend=Backend())
    with pytest.raises(RuntimeError, match="more than 1 value per channel"):  # by Dynamo, before any backend
        model(torch.randn(1, 3, 3, 3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        FusedChain(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))(torch.randn(1, 3, 3, 3))


def test_statistics_move_as_declared_where_the_operator_runs() -> None:
    """Under Inductor's tracing they are results of the operator, which the graph copies back."""
    eager = Net()
    model, x = copy.deepcopy(eager), torch.randn(2, 3, 5, 5)
    model.compile(backend=Backend(rest="inductor"))
    for _ in range(2):
        torch.testing.assert_close(model(x), eager(x))
    assert_same_state(model, eager, 1e-6)
    fused = FusedChain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    plain, compiled = copy.deepcopy(fused), torch.compile(fused, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), plain(x))
    assert_same_state(fused, plain, 1e-6)


def steps_of_a_fused_chain() -> None:
    eager = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    fused = FusedChain(*copy.deepcopy(eager))
    for is_training in (True, True, False):
        x = torch.randn(2, 3, 6, 5)
        torch.testing.assert_close(fused.train(is_training)(x), eager.train(is_training)(x), rtol=0, atol=0)
    assert_same_state(fused, eager)


def test_a_fused_chain_counts_its_batches() -> None:
    steps_of_a_fused_chain()


def test_a_counter_that_does_not_move_is_seen_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_modules, "_COUNT", None)
    with pytest.raises(AssertionError, match="num_batches_tracked"):
        steps_of_a_fused_chain()


def test_a_compiled_fused_chain_with_statistics_is_its_modules() -> None:
    eager = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    fused = FusedChain(*copy.deepcopy(eager))
    compiled, x = torch.compile(fused, backend="aot_eager", fullgraph=True), torch.randn(2, 3, 6, 5)
    torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
    assert_same_state(fused, eager)


def test_a_fused_chain_declines_a_cumulative_average() -> None:
    with pytest.raises(PostludeError, match="momentum=None"):
        FusedChain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))(torch.randn(2, 3, 5, 5))
