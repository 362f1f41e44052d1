"""Inductor, which compiles what is not fused: started early, and its kernels launched with little host time."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch.autograd import profiler

from postlude.run.direct import tell_inductor

log = logging.getLogger("postlude")

# How many reads a value of a backward pass may have that Inductor computes again for each of its readers instead of
# writing it; 4 and 8 by default. The gradient behind an activation reads a convolution's result, its bias, four vectors
# of a norm and one or two gradients, of which only the first and the last are large. Written in fp32 and read by two
# passes it takes 16 bytes for each element, computed twice 8.
READS = {"realize_reads_threshold": 8, "realize_acc_reads_threshold": 16}


@functools.cache
def start_workers() -> None:
    """Starts the processes in which Inductor compiles kernels. They need seconds to import PyTorch, and until they are
    ready, Inductor compiles one kernel after the other."""
    try:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()
    except Exception as error:  # private, and only a matter of time
        log.debug("Inductor's workers are not started early (%s: %s)", type(error).__name__, error)


def compile_rest(graph: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    tell_inductor()
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)

    def compile_pass(*args: Any, **kwargs: Any) -> Any:  # the backward pass is compiled when it first runs
        with config.patch(reads_for(on_gpu, settings, **kwargs)), short_launches():
            return compile_fx_inner(*args, **kwargs)

    with short_launches():
        compiled = compile_fx(graph, list(inputs), inner_compile=compile_pass, config_patches=settings or None)
    return cast("Callable[..., Any]", compiled)


def reads_for(on_gpu: bool, settings: dict[str, Any], is_backward: bool = False, **_: Any) -> dict[str, int]:
    """Inductor's settings for one pass, except those that the user has set. Forward passes keep Inductor's: in training
    they write most values anyway, and in inference some networks would read more than they save (MONAI's AttentionUnet
    a fifth, where its VNet reads a quarter less). So does a CPU, where computing twice takes longer."""
    from torch._inductor import config

    if not on_gpu or not is_backward:
        return {}
    return {name: count for name, count in READS.items() if name not in settings and hasattr(config, name)}


@contextlib.contextmanager
def short_launches() -> Iterator[None]:
    """Shortens the launches of all kernels in code that Inductor loads inside.

    Before PyTorch 2.13, which does this itself, a launch looks for a debugger, sets an allocator, counts configurations
    and asks for switches that cannot have changed: 4 µs, for which the GPU waits in networks of many small kernels
    (0.6 of the 5.5 ms of resnet50_gn's inference on an H200's machine).
    """
    from torch._inductor.codecache import PyCodeCache

    modules: list[Any] = getattr(PyCodeCache, "modules", [])
    before = len(modules)
    yield
    try:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        kernels = [kernel for module in modules[before:] for kernel in vars(module).values()]
        for kernel in kernels:
            if isinstance(kernel, CachingAutotuner) and not hasattr(kernel, "_cached_launcher"):
                shorten(kernel)
    except Exception as error:  # Inductor's interfaces are private
        log.debug("Inductor's kernels are launched as always (%s: %s)", type(error).__name__, error)


def shorten(kernel: Any) -> None:
    """Lets a kernel of Inductor's run once as always, then by the launcher that it has chosen."""
    if "run" in vars(kernel):  # shortened already: the forward pass is compiled inside of the whole
        return
    whole = kernel.run  # bound to the kernel
    state_of = getattr(kernel, "__getstate__", lambda: dict(vars(kernel)))

    def first(*args: Any, **kwargs: Any) -> Any:
        result = whole(*args, **kwargs)
        vars(kernel).pop("run", None)  # another thread's first launch may have ended before
        try:
            launcher = _settled(kernel)
        except Exception as error:  # Inductor's interfaces are private
            log.debug("%s is launched as always (%s: %s)", kernel, type(error).__name__, error)
            return result
        if launcher is not None:
            kernel.run = _short(launcher, whole)
        return result

    def state() -> dict[str, Any]:
        return {name: value for name, value in state_of().items() if name not in ("run", "__getstate__")}

    kernel.run = first
    # Inductor copies and pickles a kernel for its cache if a later graph has the same one; a function here would not.
    kernel.__getstate__ = state


def _short(launcher: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    debug_mode = getattr(torch.utils, "_debug_mode", None)
    is_debugged = getattr(debug_mode, "get_active_debug_mode", lambda: None)

    def run(*args: Any, stream: Any, **kwargs: Any) -> Any:
        if kwargs or profiler._is_profiler_enabled or is_debugged() is not None:
            return whole(*args, stream=stream, **kwargs)
        return launcher(*args, stream=stream)

    return run


def _settled(kernel: Any) -> Callable[..., Any] | None:
    """The kernel's only launcher, if every later launch would just call it."""
    if len(kernel.launchers) != 1 or kernel.triton_interpret:
        return None
    (launcher,) = kernel.launchers
    # Inductor tunes some kernels never, such as matrix products made from templates: they are not marked.
    is_tuned = getattr(launcher.config, "found_by_coordesc", False)
    is_tuned = is_tuned or not kernel.inductor_meta.get("coordinate_descent_tuning")
    # Other launchers may allocate scratch memory through the allocator that a whole launch sets.
    is_static = type(getattr(launcher.__globals__.get("runner"), "__self__", None)).__name__.startswith("Static")
    writes = launcher.store_cubin or getattr(kernel, "dump_launch_params", False)
    writes = writes or getattr(kernel, "dump_launch_tensors", False)
    return launcher if is_tuned and is_static and not writes else None
