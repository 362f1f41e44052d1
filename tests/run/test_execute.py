"""What is made ready for a call, and what is brought to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder
from postlude import reference
from postlude.check import tensors_for
from postlude.plan import Plan
from postlude.run import execute

SCALED = Builder(3).norm(2).op("mul", "one").chain()


def test_a_number_on_another_device_is_brought_to_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def runner(tensors: Sequence[Tensor]) -> Tensor:
        seen.extend(tensors)
        return tensors[0]

    monkeypatch.setitem(execute._PREPARE, "cuda", lambda plan: runner)
    plan = object.__new__(Plan)
    object.__setattr__(plan, "chain", SCALED)
    ready = execute.prepare(SCALED, plan, "cuda")
    ready([torch.empty(2, 4, 3, 3, 3, device="meta"), torch.tensor(2.0)])
    assert [tensor.device.type for tensor in seen] == ["meta", "meta"]


@pytest.mark.gpu
def test_a_number_on_the_cpu_scales_a_value_on_a_card() -> None:
    tensors = [*tensors_for(SCALED, (2, 4, 64, 128, 128), torch.float32, "cuda")]
    expected = reference.evaluate(SCALED, tensors)
    tensors[-1] = tensors[-1].cpu()
    with torch.no_grad():
        ours = execute.run_chain(SCALED, tensors)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
