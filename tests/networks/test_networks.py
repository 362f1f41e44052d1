"""Networks of five packages under bfloat16 autocast on the CPU: what eager gives, in training and in evaluation.

`make install` installs the packages. Where one is missing its networks are skipped, unless POSTLUDE_NETWORKS=required,
as tests/rungs.py sets it.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import postlude
from networks.standins import stand_ins
from networks.zoo import NETWORKS, Network
from postlude import reference
from postlude.optimized import Optimized
from postlude.plan import Plan, cpu

pytestmark = [
    pytest.mark.networks,
    pytest.mark.usefixtures("fresh_dynamo", "plans_of_any_size", "refused_chains_too"),
    # diffusers asks for torch's version while it runs.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
# Of eager's own error, which bfloat16 causes: the fused passes round less often than eager, not more.
MOST = 1.25
NEEDS_PYTHON = {"diffusers": (3, 11), "pytorch3dunet": (3, 11)}
# Attention there reads transposed values in its linear layers. PyTorch's layer rounds such a product before it adds the
# bias, a chain adds it first: other bits. A CPU leaves these chains to PyTorch; graph/test_rows.py has them.
WITHOUT_LINEAR = ("diffusers",)
AGAIN = 1e-6  # of a tensor's size: sums in another order, where eager's own error happens to be none


@pytest.fixture
def plans_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below some size eager's operators are as fast, and are taken: these networks are far below it."""
    for name in ("SMALLEST_STORED", "SMALLEST_REDUCED"):
        monkeypatch.setattr(cpu, name, 0)


def built(network: Network) -> nn.Module:
    if sys.version_info < NEEDS_PYTHON.get(network.package, (3,)):
        pytest.skip(f"{network.package} is not for this Python")
    if importlib.util.find_spec(network.package) is None:
        if os.environ.get("POSTLUDE_NETWORKS") == "required":
            pytest.fail(f"{network.package} is not installed: `make install` installs it")
        pytest.skip(f"{network.package} is not installed")
    with warnings.catch_warnings(), stand_ins():
        warnings.simplefilter("ignore")  # what the packages say of each other
        torch.manual_seed(0)
        model = network.build()
    with torch.no_grad():  # γ and β that can tell
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def result_of(returned: Any) -> Tensor:
    """A network's result: diffusers wraps it, deep supervision brings others with it."""
    returned = getattr(returned, "sample", returned)
    found = returned[0] if isinstance(returned, (tuple, list)) else returned
    assert isinstance(found, Tensor)
    return found


def evaluated(model: nn.Module, network: Network, autocast: bool = True) -> Tensor:
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return result_of(model(network.inputs(), **network.more))


def trained(model: nn.Module, network: Network, autocast: bool = True) -> list[Tensor]:
    """The result, each parameter's gradient, and the buffers after the step."""
    model.train()
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = result_of(model(network.inputs(), **network.more))
    wanted = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
    (result.float() * wanted).sum().backward()
    found = [*(p.grad for p in model.parameters()), *model.buffers()]
    return [result.detach(), *(t.detach().clone() for t in found if t is not None)]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())


def optimized(model: nn.Module, network: Network) -> Optimized:
    with torch.autocast("cpu", torch.bfloat16):
        inputs = {_first_argument(model): network.inputs(), **network.more}
        only = (lambda _, chain: not chain.is_linear) if network.package in WITHOUT_LINEAR else None
        return postlude.optimize(model, inputs, verify=False, only=only)


def _first_argument(model: nn.Module) -> str:
    code = type(model).forward.__code__
    return code.co_varnames[1]


def assert_trains_like_eager(model: nn.Module, twin: nn.Module, network: Network) -> None:
    """On the CPU training is PyTorch's, operator by operator: the same bits, but for the order in which the gradients
    of a value with several users are added."""
    exact = trained(copy.deepcopy(twin), network, autocast=False)  # a copy: running statistics move
    ours, eager = trained(model, network), trained(twin, network)
    torch.testing.assert_close(ours[0], eager[0], rtol=0, atol=0)
    for one, theirs, true in zip(ours, eager, exact, strict=True):
        assert (one.dtype, one.shape) == (theirs.dtype, theirs.shape)
        assert distance(one, theirs) <= distance(theirs, true) + AGAIN * float(true.double().norm())


def assert_evaluates_like_eager(model: nn.Module, twin: nn.Module, network: Network) -> None:
    ours, eager, exact = (
        evaluated(model, network),
        evaluated(twin, network),
        evaluated(twin, network, autocast=False),
    )
    assert (ours.shape, ours.dtype, ours.stride()) == (eager.shape, eager.dtype, eager.stride())
    assert distance(ours, exact) <= MOST * distance(eager, exact)


@pytest.mark.parametrize("name", NETWORKS)
def test_gives_what_eager_gives(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Trained first, then evaluated, as people do: the second graph has chains of its own."""
    network = NETWORKS[name]
    model = built(network)
    twin, state = copy.deepcopy(model), {key: value.clone() for key, value in model.state_dict().items()}
    result = optimized(model.train(), network)
    assert result.failure is None
    assert len(result.sites) > 0
    assert_equal(model.state_dict(), state)
    assert_trains_like_eager(model, twin, network)
    assert_evaluates_like_eager(model, twin, network)
    in_evaluation = [site for captured in result.backend.captured[1:] for site in captured.sites]
    known = result.backend.ledger.latest
    assert any(isinstance(known[site.name, site.chain].outcome, Plan) for site in in_evaluation)
    assert_equal(model.state_dict(), twin.state_dict())
    assert [record.getMessage() for record in caplog.records if record.name == "postlude"] == []


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for value, expected in zip(one.values(), other.values()):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: PReLU as it was, which raised."""
    faulty: Callable[..., Tensor] = lambda x, weight: torch.prelu(x, weight.reshape(-1))  # noqa: E731
    monkeypatch.setitem(reference.POINTWISE, "prelu", faulty)
    network = NETWORKS["MONAI UNet"]
    with torch.no_grad(), pytest.raises(RuntimeError, match="Type promoting not supported"):
        optimized(built(network).eval(), network)
