"""What Inductor's code calls for a chain: our function, not the operator; compiled as C++, kernels interpreted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import postlude
from gpu_plans import planned_for_a_gpu
from postlude import hardware
from postlude.run import direct
from postlude.run import layouts as layouts  # defines the operator
from postlude.run.operator_passes import KNOWN, passes

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    counted = Counter[str]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counted[name] += 1
            return function(*args)

        return call

    for name in ("run_forward", "run_backward"):
        monkeypatch.setattr(torch.ops.postlude, name, counting(name, getattr(direct, name)))
    with planned_for_a_gpu():
        yield counted


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(2)).double()


@pytest.mark.skipif(not hardware.cpp_compiler(), reason="Inductor compiles C++")
def test_inductors_code_calls_programs_without_the_dispatcher(calls: Counter[str]) -> None:
    plain = model()
    ours, x = copy.deepcopy(plain), torch.randn(2, 3, 6, 8, dtype=torch.float64)
    postlude.optimize(ours, x, rest="inductor", verify=False)
    calls.clear()
    KNOWN.clear()
    for _ in range(2):
        results = []
        for net in (ours, plain):
            given = x.clone().requires_grad_()
            y = net(given)
            grads = torch.autograd.grad(y.square().sum(), [given, *net.parameters()])
            results.append([y, *grads])
        for found, truth in zip(*results, strict=True):
            torch.testing.assert_close(found, truth)
    assert calls == {"run_forward": 2, "run_backward": 2}
    ((text, known),) = KNOWN.items()
    assert passes(text, x.device) is known  # the operators find the same
    assert passes(text, torch.device("meta")) is not known


def test_a_profiler_is_shown_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setitem(KNOWN, "a text", object())
    monkeypatch.setattr(torch.ops.postlude, "chain_forward", lambda _, text: shown.append(text), raising=False)
    with torch.profiler.profile():
        direct.run_forward([torch.ones(2)], "a text")
    assert shown == ["a text"]


@pytest.mark.skipif(not hardware.cpp_compiler(), reason="Inductor compiles C++")
def test_inductor_takes_the_layout_of_what_is_held() -> None:
    """And drops it otherwise: a version that keeps it would make the operator superfluous."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = ((factor * x).contiguous(memory_format=torch.channels_last_3d) for factor in (2, 3))
        return torch.conv3d(torch.ops.postlude.channels_last(y), weight), torch.conv3d(z, weight)

    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(run), torch.randn(2, 8, 6, 6, 6), torch.randn(16, 8, 3, 3, 3))
    for strides in ("(1728, 1, 288, 48, 8)", "(1728, 216, 36, 6, 1)"):
        assert code.count(f"empty_strided_cpu((2, 8, 6, 6, 6), {strides}") == 1, code
