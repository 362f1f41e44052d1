"""`FusedChain` follows its modules: what was read once is read again when they are others."""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import postlude.nn as fused_nn
from postlude import PostludeError
from postlude.nn import FusedChain

X = torch.randn(2, 3, 6, 6)


def _set(place: int, name: str, value: object) -> Callable[[nn.Sequential], None]:
    return lambda chain: setattr(chain[place], name, value)


def _hook(chain: nn.Sequential) -> None:
    chain[0].register_forward_hook(lambda module, given, result: 2 * result)


def _other_groups(chain: nn.Sequential) -> None:
    chain[1] = nn.GroupNorm(4, 4)


def _tanh(chain: nn.Sequential) -> None:
    chain.append(nn.Tanh())


CHANGES: dict[str, Callable[[nn.Sequential], None]] = {
    "a slope": _set(2, "negative_slope", 0.5),
    "eps": _set(1, "eps", 0.5),
    "no bias": _set(0, "bias", None),
    "strides": _set(0, "stride", (2, 1)),
    "a method": _set(2, "forward", torch.sigmoid),
    "a module": _other_groups,
    "one more module": _tanh,
    "a hook": _hook,
}


def _chain() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    modules = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.LeakyReLU(0.1)]
    return FusedChain(*copy.deepcopy(modules)), nn.Sequential(*modules)


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_after_a_call_counts(name: str) -> None:
    fused, plain = _chain()
    before = fused(X)
    for chain in (fused, plain):
        CHANGES[name](chain)
    assert torch.equal(fused(X), plain(X))
    assert before.shape != plain(X).shape or not torch.equal(before, plain(X))


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_without_settings_would_not_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_nn, "_settings", lambda module: [])
    monkeypatch.setattr(fused_nn, "HOOKS", ())
    fused, plain = _chain()
    fused(X)
    for chain in (fused, plain):
        CHANGES[name](chain)
    try:
        stale = fused(X)
    except AttributeError:  # "no bias": the tensor that the old chain names is gone
        return
    assert stale.shape != plain(X).shape or not torch.equal(stale, plain(X))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_module_frozen_by_itself_is_frozen(compiled: bool) -> None:
    modules = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)]
    fused, plain = FusedChain(*copy.deepcopy(modules)), nn.Sequential(*modules)
    call = torch.compile(fused, backend="eager") if compiled else fused
    torch.testing.assert_close(call(X), plain(X))
    for chain in (fused, plain):
        chain[1].eval()
    torch.testing.assert_close(call(X), plain(X))
    assert torch.equal(fused[1].running_mean, plain[1].running_mean)


def test_hooks_of_all_modules_see_each_of_them() -> None:
    fused, _ = _chain()
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, result: seen.append(type(module).__name__)
    )
    try:
        fused(X)
    finally:
        handle.remove()
    assert seen == ["Conv2d", "GroupNorm", "LeakyReLU", "FusedChain"]


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([nn.ReLU()], "neither a convolution nor a norm"),
        ([nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.5)], "aten.dropout is not part of it"),
        ([nn.Dropout(0.5), nn.Conv2d(3, 4, 3), nn.ReLU()], "aten.dropout is not part of it"),
        ([nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()], "more than one"),
        ([nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU()], "as a parametrization does"),
    ],
)
def test_what_is_no_chain_says_why(modules: list[nn.Module], reason: str) -> None:
    with pytest.raises(PostludeError, match=reason):
        FusedChain(*modules)(X)


def test_chains_that_are_read_often_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_nn, "_REMEMBERED", 3)
    fused, _ = _chain()
    for number in range(5):
        fused[2].negative_slope = number / 100
        fused(X)
    assert len(fused._read) <= 3


TRANSFORMS: dict[str, Callable[[nn.Module], Tensor]] = {
    "jvp": lambda chain: torch.func.jvp(chain, (X,), (torch.ones_like(X),))[1],
    "vmap": lambda chain: torch.func.vmap(chain)(torch.stack([X, 2 * X])),
    "grad": lambda chain: torch.func.grad(lambda x: chain(x).square().sum())(X),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.func.jvp's own
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations_of_pytorch_go_through(name: str) -> None:
    fused, plain = _chain()
    fused(X)
    torch.testing.assert_close(TRANSFORMS[name](fused), TRANSFORMS[name](plain))


def test_a_compiler_reads_a_chain_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def read(_: FusedChain, example: Tensor) -> None:
        seen.append(example.device)
        raise LookupError

    monkeypatch.setattr(FusedChain, "_read_chain", read)
    with FakeTensorMode():
        chain = FusedChain(nn.GroupNorm(2, 8, device="cuda:1"), nn.ReLU())
    with FakeTensorMode(), pytest.raises(LookupError):
        chain._text(torch.float32, 5, "cuda", None, ())
    assert seen == [torch.device("cuda:1")]


@pytest.mark.parametrize("where", ["postlude.graph.capture.make_fx", "postlude.run.ledger.prepared"])
def test_threads_read_and_plan_one_after_the_other(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's tracer replaces nn.Module.__call__ meanwhile, and two that overlap would leave it replaced."""
    place, _, name = where.rpartition(".")
    work, inside, most = getattr(importlib.import_module(place), name), [0], [0]

    def slow(*args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        try:
            return work(*args, **kwargs)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(where, slow)
    chains = [_chain()[0] for _ in range(4)]
    before = nn.Module.__call__
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda chain: chain(X), chains))
    assert most == [1]
    assert nn.Module.__call__ is before
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
