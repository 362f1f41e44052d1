"""Odd models, devices and arguments: they run, or are refused in one sentence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import postlude
from cases import Builder, conv
from postlude.graph.compiled import has_frame

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "fresh_verdicts"),
    pytest.mark.filterwarnings("ignore"),
]
SHAPE = (2, 4, 6, 6)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.ReLU())


class Around(nn.Module):
    """A model with a part of TorchScript."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.rest = part, nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.part(x))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_part_in_torchscript_stays_as_it_is(how: str, trains: bool) -> None:
    part, x = layers().train(trains), torch.randn(SHAPE)
    scripted = torch.jit.script(part) if how == "script" else torch.jit.trace(part, x, check_trace=False)
    plain = Around(scripted).train(trains)
    model = Around(scripted).train(trains)
    model.load_state_dict(plain.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = postlude.optimize(model, x)
    assert [site.name for site in result.sites] == ["rest.0"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name  # running statistics too
    assert not has_frame(model.part)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


def test_a_model_of_torchscript_is_refused_in_one_sentence() -> None:
    with pytest.raises(postlude.PostludeError, match="from which TorchScript made this one"):
        postlude.optimize(torch.jit.script(layers()), torch.randn(SHAPE))


@pytest.mark.parametrize("only", [3, [3], ["0", None]])
def test_wrong_names_of_chains_are_refused_in_one_sentence(only: Any) -> None:
    model = layers()
    with pytest.raises(postlude.PostludeError, match="only= takes names with wildcards, or a function"):
        postlude.optimize(model, torch.randn(SHAPE), only=only)
    assert model._compiled_call_impl is None


def test_on_the_meta_device_shapes_are_pytorchs() -> None:
    """PyTorch raises where it is asked whether autocast is on for that device."""
    fused = postlude.nn.FusedChain(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()).to("meta")
    x = torch.empty(SHAPE, device="meta")
    assert fused(x).shape == (2, 8, 4, 4)
    chain = Builder(2, conv(2, (4, 8))).op("relu").chain()
    tensors = [x, *(torch.empty(shape, device="meta") for shape in ((8, 4, 3, 3), (8,)))]
    assert postlude.functional.run(chain, *tensors).shape == (2, 8, 4, 4)
    model = copy.deepcopy(layers()).to("meta").eval()
    result = postlude.optimize(model, x)
    assert "there are no fused passes for meta devices" in str(result)
    assert model(x).is_meta


def test_a_chains_tensors_are_named_where_one_is_none() -> None:
    chain = Builder(2, conv(2, (4, 8))).op("relu").chain()
    with pytest.raises(postlude.PostludeError, match="this chain's weight must be a tensor, not NoneType"):
        postlude.functional.run(chain, torch.randn(SHAPE), None, torch.randn(8))  # type: ignore[arg-type]
    with pytest.raises(postlude.PostludeError, match="run needs a Chain"):
        postlude.functional.run("relu", torch.randn(SHAPE))  # type: ignore[arg-type]
