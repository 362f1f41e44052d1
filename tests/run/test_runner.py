"""The runner: calls in order, memory no longer than it is needed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude.plan.program import Buffer, Call, KernelCall, TorchCall, launches, live, traffic
from postlude.run import runner
from postlude.stages.trace import Tracer, empty_strided
from tracing import flat, run_stage


def traced(stage: Callable[..., Any], *tensors: Tensor) -> tuple[list[Buffer], list[Call], list[Buffer]]:
    given, tracer = [empty_strided(tensor) for tensor in tensors], Tracer()
    slots = [tracer.buffer(tensor, "given") for tensor in given]
    with torch.no_grad(), tracer:
        results = flat(stage(*given))
    return slots, tracer.calls, [tracer.buffer(result) for result in results if result is not None]


def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Views, memory written in place, several results of one call, an index that is assigned."""
    z = torch.empty_like(x)
    z[:2] = x[:2] * 2
    z[2:] = torch.addcmul(x[2:], y[2:], y[2:])
    low, high = z.aminmax(dim=1)
    first, *_ = z.t().contiguous().unbind(0)
    y.mul_(2)
    return z, low, high, first, y.to(torch.float64).sum(1, keepdim=True)


def test_a_program_does_what_the_stage_says() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    expected = mixed(x.clone(), kept := y.clone())
    found = run_stage(mixed, x, y)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(y, kept)


def three(x: Tensor) -> Tensor:
    """Large values, each read by the next alone."""
    for _ in range(3):
        made = torch.empty_like(x)
        made.copy_(x)
        x = made
    return x + 1


def most_alive(calls: Sequence[Call], given: Sequence[Buffer], results: Sequence[Buffer], x: Tensor) -> int:
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    plain = torch.empty_strided

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made = plain(*args, **kwargs)
        alive.append(weakref.ref(made))
        counts.append(sum(one() is not None for one in alive))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_strided", counted)
        runner.runner_of(given, calls, results, "cpu")(x)
    return max(counts)


def test_memory_is_let_go_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 1024)
    given, calls, results = traced(three, x)
    assert most_alive(calls, given, results, x) == 2
    monkeypatch.setattr(runner._Writer, "_last_uses", lambda _: {})  # mutant: everything stays to the end
    assert most_alive(calls, given, results, x) == 3


def launching(monkeypatch: pytest.MonkeyPatch, made: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr(runner, "launch_of", lambda _: lambda *given: made.append(given))


def test_small_scratch_that_only_kernels_touch_is_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    launching(monkeypatch, made)
    x = Buffer(0, (8,), (1,), "float32", "given", 0)
    small = [Buffer(number, (5, number), (number, 1), "float32", "scratch", number) for number in (1, 2, 3)]
    read = Buffer(4, (5,), (1,), "float32", "scratch", 4)
    result = Buffer(5, (5,), (1,), "float32", "scratch", 5)
    calls: list[Call] = [TorchCall("torch.empty", (b.shape,), (), (b,)) for b in (*small, read)]
    calls.append(KernelCall("pack", "largest_kernel", (1,), ("a", "b", "c", "d", "e"), (x, *small, read), (), (), 4))
    calls.append(TorchCall("Tensor.add", (read, 1), (), (result,)))
    runner.runner_of([x], calls, [result], "cpu")(torch.zeros(8))
    ((_, one, two, three, alone),) = made
    storages = {tensor.untyped_storage().data_ptr() for tensor in (one, two, three)}
    assert len(storages) == 1
    assert alone.untyped_storage().data_ptr() not in storages
    assert alone.shape == (5,)
    starts = [tensor.data_ptr() for tensor in (one, two, three)]
    assert all(start % runner.ALIGNED == 0 for start in starts)
    assert all(b - a >= 4 * 5 * n for n, (a, b) in enumerate(itertools.pairwise(starts), 1))


def test_what_nobody_reads_is_not_computed() -> None:
    x = torch.randn(3)
    _, calls, results = traced(lambda x: (x.exp(), x + 1)[1], x)
    assert len(calls) == 2
    assert [call.function for call in live(calls, results) if isinstance(call, TorchCall)] == ["Tensor.add"]


def test_traffic_counts_reading_and_writing_and_no_views() -> None:
    x = torch.randn(4, 256)
    _, calls, _ = traced(lambda x: torch.empty_like(x[:2].view(-1)).copy_(x[:2].reshape(-1)) * 2, x)
    half = 2 * 256 * 4
    assert traffic(calls) == half + 2 * half  # copied into memory that is there, then read and written
    assert launches(calls) == []
