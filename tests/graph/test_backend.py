"""Capture, match and splice on models that are easy to get wrong: same numbers, same gradients, right chains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode

from graph.models import CAPTURES, Capture, Written
from postlude import cards
from postlude.graph.backend import Backend
from postlude.graph.fusion import Fusion
from postlude.hardware import machine_on

# Dynamo warns about its own use of torch, which the suite would turn into errors inside it.
pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "refused_chains_too"), pytest.mark.filterwarnings("ignore")]


def _both(capture: Capture, seed: int = 0) -> tuple[nn.Module, nn.Module, Backend]:
    torch.manual_seed(seed)
    eager = Written(capture.body)
    fused, backend = copy.deepcopy(eager), Backend()
    fused.compile(backend=backend)
    return eager, fused, backend


def _step(model: nn.Module, x: Tensor, seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)  # dropout must draw the same mask
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    assert x.grad is not None
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return [y.detach(), x.grad, *grads]


def _assert_trains_like_eager(fused: nn.Module, eager: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for ours, theirs in zip(_step(fused, x), _step(eager, x)):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda c: c.name)
def test_training_and_inference_equal_eager_and_the_expected_chains_are_found(capture: Capture) -> None:
    eager, fused, backend = _both(capture)
    _assert_trains_like_eager(fused, eager, (2, 4, 5, 6, 4))
    found = tuple(str(site.chain) for captured in backend.captured for site in captured.sites)
    assert found == capture.chains
    for model in (eager, fused):
        model.eval()
    with torch.no_grad():
        x = torch.randn(2, 4, 5, 6, 4)
        torch.testing.assert_close(fused(x), eager(x), rtol=0, atol=0)
    for ours, theirs in zip(fused.state_dict().values(), eager.state_dict().values()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert list(fused.state_dict()) == list(eager.state_dict())
    assert backend.failure is None


# What reads sizes, or is captured in another way: a graph with symbols for sizes takes seconds to trace.
SHAPED = ("modules", "negative axes", "one batch norm three times", "layer norm", "checkpoint")


@pytest.mark.parametrize("capture", [c for c in CAPTURES if c.name in SHAPED], ids=lambda c: c.name)
def test_training_with_another_shape_equals_eager(capture: Capture) -> None:
    eager, fused, backend = _both(capture)
    for shape in ((2, 4, 5, 6, 4), (3, 4, 6, 5, 7)):
        _assert_trains_like_eager(fused, eager, shape)
    assert [str(site.chain) for site in backend.captured[-1].sites] == list(capture.chains)


@pytest.mark.parametrize("capture", [CAPTURES[0], CAPTURES[4]], ids=lambda c: c.name)
def test_ambient_autocast_gives_pytorchs_dtypes(capture: Capture) -> None:
    eager, fused, backend = _both(capture)
    x = torch.randn(2, 4, 5, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = fused(x), eager(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert "bfloat16" in str(backend.captured[0].sites[0].chain)


def test_hooks_fire_and_a_hook_that_keeps_a_value_shortens_the_chain() -> None:
    eager, fused, backend = _both(CAPTURES[0])
    seen: list[tuple[int, ...]] = []
    for model in (eager, fused):
        model.relu.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape)))  # type: ignore[union-attr]
    x = torch.randn(2, 4, 5, 5, 5)
    torch.testing.assert_close(fused(x), eager(x), rtol=0, atol=0)
    assert len(seen) == 2
    kept: list[Tensor] = []
    fused.conv.register_forward_hook(lambda _m, _i, out: kept.append(out))  # type: ignore[union-attr]
    torch.testing.assert_close(fused(x), eager(x), rtol=0, atol=0)
    assert kept[0].shape == (2, 4, 5, 5, 5)
    assert not any(str(site.chain).startswith("conv3d") for site in backend.captured[-1].sites)


def test_changing_shapes_settle_on_a_dynamic_graph_and_keep_fusing() -> None:
    eager, fused, backend = _both(CAPTURES[0])
    with torch.no_grad():
        for size in range(4, 14):
            x = torch.randn(1 + size % 3, 4, size, size + 1, 4)
            torch.testing.assert_close(fused(x), eager(x), rtol=0, atol=0)
    assert len(backend.captured) <= 4
    assert all(len(captured.sites) == 1 for captured in backend.captured)


def test_frozen_parameters_and_channels_last_inputs() -> None:
    eager, fused, _ = _both(CAPTURES[0])
    for model in (eager, fused):
        model.conv.weight.requires_grad_(False)  # type: ignore[union-attr]
    x = torch.randn(2, 4, 5, 6, 4).to(memory_format=torch.channels_last_3d)
    ours, theirs = fused(x), eager(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert ours.stride() == theirs.stride()


def test_every_convolution_outside_a_chain_has_a_reason() -> None:
    operators = dict.fromkeys(("used outside", "active dropout", "autocast ends mid-chain"), "conv3d")
    for name, operator in {**operators, "checkpoint": "checkpoint"}.items():
        _, fused, backend = _both(next(c for c in CAPTURES if c.name == name))
        fused(torch.randn(2, 4, 5, 6, 4))
        declined = backend.captured[0].declined
        assert [item.what for item in declined if operator in item.what], name
        assert all(len(item.reason) > 10 for item in declined)


def test_a_capture_that_fails_runs_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an interface moved")

    monkeypatch.setattr("postlude.graph.backend.capture", broken)
    eager, fused, backend = _both(CAPTURES[0])
    x = torch.randn(2, 4, 5, 6, 4)
    torch.testing.assert_close(fused(x), eager(x), rtol=0, atol=0)
    assert backend.failure == "RuntimeError: an interface moved"
    assert "could not be captured" in caplog.text


class _WithNumbers(nn.Module):
    """Its numbers are symbols to Dynamo under dynamic=True, until AOTAutograd wants them as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.share = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), 0.3
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv(x)))
        self.mean.mul_(1 - self.share).add_(h.detach().mean((0, 2, 3)), alpha=self.share)
        return h


def test_a_graph_that_is_traced_again_is_no_failure_of_inductors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_fx(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    monkeypatch.setattr(Fusion, "_rest", lambda *_: "inductor")
    eager = _WithNumbers()
    fused, backend = copy.deepcopy(eager), Backend()
    fused.compile(backend=backend, dynamic=True)
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(fused(x), eager(x))
    torch.testing.assert_close(fused.mean, eager.mean)
    assert [record.message for record in caplog.records if record.name == "postlude"] == []
    assert len(backend.captured) == 1


def test_rest_inductor_runs_chains_as_operators() -> None:
    torch.manual_seed(0)
    eager = Written(CAPTURES[0].body).double()
    fused, backend = copy.deepcopy(eager), Backend(rest="inductor")
    fused.compile(backend=backend)
    x = torch.randn(2, 4, 8, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), eager(x))
    for model in (fused, eager):
        model(x).sum().backward()
    for captured in backend.captured:
        assert [str(site.chain) for site in captured.sites] == list(CAPTURES[0].chains)
    for ours, theirs in zip(fused.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("architecture", "is_fast"), [("sm_75", False), ("sm_80", True)])
def test_fp32_is_fast_on_cards_with_tf32(architecture: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere convolutions in fp32 gain nothing from channels-last."""
    card = cards.card_for("a card", architecture, (40, 65536, 4 << 20), 1.6e9, 3e11)
    monkeypatch.setattr("postlude.hardware.machine_for", lambda _: machine_on(card))
    with FakeTensorMode():
        x = torch.empty(1, device="cuda:1")
    graph = fx.GraphModule(nn.Module(), fx.Graph())
    assert Fusion(Backend(precision="tf32"), graph, [2, x], "cuda", "auto")._is_fp32_fast() == is_fast
    assert Fusion(Backend(precision="tf32"), graph, [torch.ones(1)], "cpu", "auto")._is_fp32_fast()
    assert not Fusion(Backend(precision="fp32"), graph, [x], "cuda", "auto")._is_fp32_fast()
