"""What is made ready for a call, and what is brought to it."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cases import BY_NAME, Builder
from postlude import functional, reference
from postlude.check import tensors_for
from postlude.plan import Plan
from postlude.run import chain_run
from postlude.run.chain_run import Inference, Training
from postlude.run.site import Site, run_chain

SCALED = Builder(3).norm(2).op("mul", "one").chain()


@pytest.mark.parametrize("runs", [Inference, Training])
def test_a_number_on_another_device_is_brought_to_the_input(
    runs: type[Inference] | type[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def run(*tensors: Tensor) -> tuple[Tensor]:
        seen.extend(tensors)
        return (tensors[0],)

    monkeypatch.setattr(chain_run, "runner_of", lambda *_: run)
    monkeypatch.setattr(Inference, "program", lambda *_: SimpleNamespace(given=(), forward=(), result=None))
    monkeypatch.setattr(chain_run._ChainFunction, "apply", lambda _, *tensors: run(*tensors)[0])
    plan = object.__new__(Plan)
    object.__setattr__(plan, "chain", SCALED)
    runs(plan, SCALED)([torch.empty(2, 4, 3, 3, 3, device="meta"), torch.tensor(2.0)])
    assert [tensor.device.type for tensor in seen] == ["meta", "meta"]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_number_in_pinned_memory_is_waited_for(is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the caller could change it before it is read."""
    seen: list[bool] = []

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        seen.append(non_blocking)
        return torch.empty_like(self, device=device)

    monkeypatch.setattr(Tensor, "is_pinned", lambda self: is_pinned)
    monkeypatch.setattr(Tensor, "to", to)
    chain_run._on_one_device([torch.empty(2, device="meta"), torch.tensor(2.0)])
    assert seen == [not is_pinned]


@pytest.mark.gpu
def test_a_number_on_the_cpu_scales_a_value_on_a_card() -> None:
    tensors = [*tensors_for(SCALED, (2, 4, 64, 128, 128), torch.float32, "cuda")]
    expected = reference.evaluate(SCALED, tensors)
    tensors[-1] = tensors[-1].cpu()
    with torch.no_grad():
        ours = run_chain(SCALED, tensors)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_known", [False, True])
def test_tensors_on_several_devices_are_pytorchs_to_refuse(is_known: bool) -> None:
    """A kernel would take an address of another device, of tensors that are otherwise like those of an earlier call."""
    case = BY_NAME["61 small"]
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", "contiguous")
    site = Site("here", case.chain)
    with torch.no_grad():
        if is_known:
            site(*tensors)

        def launched(*_: object) -> NoReturn:
            raise AssertionError("the plan ran")

        site.ledger.enter = launched  # type: ignore[method-assign]
        for key, entry in site._table.items():
            site._table[key] = dataclasses.replace(entry, runner=launched)
        with pytest.raises(RuntimeError, match="device"):
            site(tensors[0], *(tensor.to("meta") for tensor in tensors[1:]))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.func.jvp's own
def test_forward_mode_derivatives_are_not_lost() -> None:
    """A kernel sees values alone: a site that ran its plan would return no tangent, without a word."""
    case = BY_NAME["61 small"]
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", "contiguous")
    site = Site("here", case.chain)

    def launched(*_: object) -> NoReturn:
        raise AssertionError("the plan ran")

    site.ledger.enter = launched  # type: ignore[method-assign]
    direction = torch.ones_like(tensors[0])
    rest = tensors[1:]
    _, expected = torch.func.jvp(lambda x: reference.evaluate(case.chain, [x, *rest]), (tensors[0],), (direction,))
    for run in (site, functools.partial(functional.run, case.chain)):
        with forward_ad.dual_level():
            result = run(forward_ad.make_dual(tensors[0], direction), *rest)
            torch.testing.assert_close(forward_ad.unpack_dual(result).tangent, expected)
    with pytest.raises(AssertionError, match="the plan ran"):
        site(*tensors)
