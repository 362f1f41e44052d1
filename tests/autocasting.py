"""The chain that autocast makes of a plain one; PyTorch is asked on fake tensors, so the device need not be there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from postlude import reference
from postlude.chain import Chain
from postlude.graph.match import match
from postlude.graph.tidy import functionalise

PARAMETERS = ("weight", "bias", "channel", "last", "running")  # roles of what a model holds


@contextlib.contextmanager
def autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Like torch.autocast, which turns itself off if the device is missing."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def autocasted(chain: Chain, tensors: Sequence[Tensor], device: str, dtype: torch.dtype) -> Chain | str:
    """What capture reads off the model that computes `chain`, called with such tensors under autocast; or why it reads
    more than one chain, as where a value is cast for one step and not for another."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors]
        with autocast(device, dtype), torch.no_grad():
            graph = make_fx(model_of(chain), pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(
                *fakes
            )
    functionalise(graph)
    found, declined = match(graph)
    if len(found) != 1 or found[0].nodes[-1] is not graph.graph.output_node().args[0]:
        return "; ".join(f"{item.what}: {item.reason}" for item in declined) or f"{len(found)} chains"
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    sources = [_source(node) for node in found[0].tensors]
    if None in sources:
        return "the model makes a tensor of a number"
    assert sources == places, "another order of slots"
    return found[0].chain


def model_of(chain: Chain) -> Callable[..., Tensor]:
    """The operators as a model calls them, without the casts that the reference makes in autocast's place."""

    def model(*given: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(reference.POINTWISE, "prelu", lambda x, weight: torch.prelu(x, weight.reshape(-1)))
            patched.setattr(reference, "parameter", lambda tensor, _: tensor)
            return reference.evaluate(chain, given, moves=True)

    return model


def _source(node: fx.Node) -> fx.Node | None:
    """The placeholder behind a vector that was shaped to broadcast."""
    while node.op != "placeholder":
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return node


def with_parameters(chain: Chain, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors with those that a model holds in another dtype than what flows through it."""
    return [t.to(dtype) if role in PARAMETERS else t for t, role in zip(tensors, chain.roles)]
