"""Inductor's settings for each pass, and short launches: by the launcher that a kernel has chosen, unless somebody
watches."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch.autograd import profiler

from postlude.graph import inductor
from postlude.graph.backend import Backend
from postlude.graph.inductor import READS, reads_for, short_launches, shorten


class StaticKernel:
    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.launched.append(args)


def launcher_of(kernel: StaticKernel, **config: Any) -> Any:
    """As Inductor makes one: a function whose globals have the kernel's `run` under the name `runner`."""
    scope: dict[str, Any] = {"runner": kernel.run}
    exec("def launcher(x, *, stream): runner(x, stream)", scope)
    scope["launcher"].config = SimpleNamespace(**config)
    scope["launcher"].store_cubin = False
    return scope["launcher"]


class Tuner:
    """The part of Inductor's CachingAutotuner that counts here: two configurations until the first launch."""

    triton_interpret = False

    def __init__(self, **meta: Any) -> None:
        self.kernel, self.inductor_meta, self.whole_launches = StaticKernel(), meta, 0
        self.launchers = [launcher_of(self.kernel), launcher_of(self.kernel)]

    def run(self, *args: Any, stream: int, **kwargs: Any) -> None:
        self.whole_launches += 1
        del self.launchers[1:]
        self.launchers[0](*args, stream=stream)


@pytest.mark.parametrize("times", [1, 2])
def test_later_launches_are_short(times: int) -> None:
    tuner = Tuner()
    for _ in range(times):
        shorten(tuner)
    for x in range(4):
        tuner.run(x, stream=7)
    assert tuner.kernel.launched == [(0, 7), (1, 7), (2, 7), (3, 7)]
    assert tuner.whole_launches == 1


@pytest.mark.parametrize("is_settled", [False, True])
def test_two_threads_may_launch_first(is_settled: bool) -> None:
    """The second one is still inside of its first launch when the first one's has ended."""
    tuner = Tuner(coordinate_descent_tuning=not is_settled)
    tuner.launchers[0].config.found_by_coordesc = False
    shorten(tuner)
    first = tuner.run
    for x in range(2):
        first(x, stream=7)
    tuner.run(2, stream=7)
    assert tuner.kernel.launched == [(0, 7), (1, 7), (2, 7)]


def test_a_profiler_sees_whole_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner()
    shorten(tuner)
    tuner.run(0, stream=7)
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    tuner.run(1, stream=7)
    assert tuner.whole_launches == 2


def test_options_of_a_launch_are_not_lost() -> None:
    tuner = Tuner()
    shorten(tuner)
    tuner.run(0, stream=7)
    tuner.run(1, stream=7, benchmark_run=True)
    assert tuner.whole_launches == 2


def test_a_shortened_kernel_can_be_copied_and_pickled() -> None:
    """Inductor does so for its cache when another graph has the same kernel; else it warned and cached nothing."""
    kernel = Pickled()
    for was_run in (False, True):
        shorten(kernel)
        if was_run:
            kernel.run(0, stream=7)
        assert "run" in vars(kernel)
        kept, kernel.launchers = kernel.launchers, []  # as Inductor does before
        for found in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
            assert set(vars(found)) == {"launchers", "inductor_meta", "lock"}
            assert found.run.__func__ is Pickled.run
        kernel.launchers = kept


class Pickled:
    """What of Inductor's CachingAutotuner concerns its state."""

    triton_interpret = False

    def __init__(self) -> None:
        self.launchers, self.inductor_meta, self.lock = [launcher_of(StaticKernel())], {}, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        assert not self.launchers
        return {**self.__dict__, "lock": None}

    def run(self, *args: Any, stream: int) -> None:
        self.launchers[0](*args, stream=stream)


@pytest.mark.parametrize("change", ["a product's template is not tuned", "an attribute of Inductor's is gone"])
def test_a_first_launch_never_raises(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(coordinate_descent_tuning=True)
    if change == "an attribute of Inductor's is gone":
        monkeypatch.delattr(Tuner, "triton_interpret")
    shorten(tuner)
    for x in range(2):
        tuner.run(x, stream=7)
    assert tuner.whole_launches == 2  # as always: Inductor tries to tune before every launch


@pytest.mark.parametrize("why", ["is tuned later", "saves its binary", "allocates", "has two configurations"])
def test_a_kernel_that_is_not_settled_runs_as_always(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner()
    if why == "is tuned later":
        tuner.inductor_meta["coordinate_descent_tuning"] = True
        tuner.launchers[0].config.found_by_coordesc = False
    elif why == "saves its binary":
        tuner.launchers[0].store_cubin = True
    elif why == "allocates":  # a launcher of Triton's own, which asks for scratch memory
        tuner.launchers[0].__globals__["runner"] = lambda *_: None
    else:
        monkeypatch.setattr(Tuner, "run", lambda self, *_, **__: setattr(self, "whole_launches", 1))
    shorten(tuner)
    tuner.run(0, stream=7)
    assert "run" not in vars(tuner)


def test_only_what_is_loaded_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_heuristics

    seen: list[Any] = []
    earlier, inside = StaticKernel(), StaticKernel()
    monkeypatch.setattr(triton_heuristics, "CachingAutotuner", StaticKernel)
    monkeypatch.setattr("postlude.graph.inductor.shorten", seen.append)
    monkeypatch.setattr(PyCodeCache, "modules", [SimpleNamespace(triton_0=earlier)])
    with short_launches():
        PyCodeCache.modules.append(SimpleNamespace(triton_0=inside, call=print))
    assert seen == [inside]


def test_gradients_are_computed_again_on_a_gpu_unless_the_user_says_otherwise() -> None:
    assert reads_for(True, {}, is_backward=True) == READS
    assert reads_for(True, {}, is_inference=True) == reads_for(True, {}) == reads_for(False, {}, is_backward=True) == {}
    asked = {"realize_reads_threshold": 4, "triton.cudagraphs": True}
    assert reads_for(True, asked, is_backward=True) == {"realize_acc_reads_threshold": 16}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_each_pass_is_compiled_with_its_settings(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    before = {name: getattr(config, name) for name in READS}
    assert all((before[name] or 0) < READS[name] for name in READS)  # a version that is as generous needs no settings
    seen: list[tuple[bool, dict[str, int]]] = []

    def compile_fx_inner(graph: torch.fx.GraphModule, _: Any, **kwargs: Any) -> Any:
        seen.append((kwargs.get("is_backward", False), {name: getattr(config, name) for name in READS}))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr(
        inductor, "reads_for", lambda on_gpu, settings, is_backward=False, **_: READS if is_backward else {}
    )
    x = torch.randn(2, 3, 5, 5, requires_grad=trains)
    with torch.set_grad_enabled(trains):
        y = torch.compile(nn.Conv2d(3, 4, 3), backend=Backend(rest="inductor"))(x)
        if trains:
            y.sum().backward()
    assert seen == [(False, before), (True, READS)][: 1 + trains]
    assert {name: getattr(config, name) for name in READS} == before


@pytest.mark.gpu
@pytest.mark.parametrize("trains", [False, True])
def test_a_network_on_the_gpu(trains: bool) -> None:
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.SiLU()]
    model = nn.Sequential(*layers).cuda().train(trains)
    x = torch.randn(2, 8, 20, 20, device="cuda", requires_grad=trains)
    before = len(PyCodeCache.modules)
    compiled = torch.compile(model, backend=Backend(rest="inductor"))
    with torch.set_grad_enabled(trains):
        for _ in range(3):
            found, expected = compiled(x), model(x)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            if trains:
                ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
                torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    kernels = [
        kernel
        for module in PyCodeCache.modules[before:]
        for kernel in vars(module).values()
        if isinstance(kernel, CachingAutotuner)
    ]
    assert kernels
    assert all("run" in vars(kernel) or hasattr(kernel, "_cached_launcher") for kernel in kernels)
