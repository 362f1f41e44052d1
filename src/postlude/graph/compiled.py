"""A model's calls through Dynamo and a backend, and without them where Dynamo fails."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from postlude.graph.backend import Backend
from postlude.graph.capture import HookWatch, hooks_are_watched, hooks_of_all_modules, is_traced, is_untraceable

_numbers = itertools.count()  # of functions with code of their own
_FRAME = "postlude_frame"  # an attribute of the functions through which containers are called


def install(model: nn.Module, backend: Backend) -> Callable[..., Any]:
    """Lets calls of the model go through the backend, by the function that is returned."""
    run = model._compiled_call_impl = compiled(model, backend)
    return run


def misses_layers(model: nn.Module, backend: Backend) -> bool:
    """Whether a container of torch.nn has layers with parameters that are in none of the graphs."""
    seen = frozenset().union(*(one.modules for one in backend.captured))
    layers = (layer for one in model.modules() if _is_container_of_pytorch(one) for layer in one.children())
    return any(next(layer.children(), None) is None and _is_missed(layer, seen) for layer in layers)


def _is_missed(layer: nn.Module, seen: frozenset[str]) -> bool:
    return next(layer.parameters(), None) is not None and str(id(layer)) not in seen


def uninstall(model: nn.Module) -> None:
    """Lets the model be called as before."""
    model._compiled_call_impl = None
    for module in model.modules():
        if has_frame(module):
            module._compiled_call_impl = None


def compiled(model: nn.Module, backend: Backend) -> Callable[..., Any]:
    """Does what `model.compile(backend=backend)` does, one frame further out.

    Dynamo skips frames inside torch.nn, so a model whose class is PyTorch's own (`nn.Sequential`) would never reach the
    backend. Dynamo also limits recompilations per code object, so each model gets its own.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    both = (backend, _apart(backend))
    plain, hooked = (torch.compile(_with_code_of_its_own(call), backend=one) for one in both)
    backend.model, hooks = weakref.ref(model), HookWatch(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Another tracer needs the model's own operators, and global module hooks need its own modules.
        if backend.has_given_up or is_traced() or hooks_of_all_modules():
            return call(*args, **kwargs)
        try:
            if not hooks.sees_hooks():
                return plain(*args, **kwargs)
            with hooks_are_watched():
                return hooked(*args, **kwargs)
        except Exception as error:
            if not is_untraceable(error):
                raise
            why = error
        # The model's own error reaches the user as it is. Without one, only Dynamo cannot run this code, for example
        # a `try` around an operator that raises.
        result = call(*args, **kwargs)
        backend.give_up(why)
        return result

    return run


def _apart(backend: Backend) -> Callable[..., Any]:
    """The same backend as another one for Dynamo: it keeps what it compiled of a frame for each backend, and frames
    that it meets after a graph break are to be compiled again where hooks are watched."""
    return functools.partial(backend)


def give_frames(model: nn.Module) -> None:
    """Gives every container of torch.nn inside `model` a frame that Dynamo does not skip.

    Dynamo inlines a container that it meets while it traces. After a graph break it meets frames instead, and skips
    those in torch.nn: `DistributedDataParallel` breaks before it calls its module, and of a `Sequential` in it nothing
    would be captured. A function around the container's call is a frame of ours. It costs a call of the model 5 µs for
    each container, so it is given only where layers are missed.
    """
    apart = {inner for one in model.modules() if isinstance(one, nn.DataParallel) for inner in one.modules()}
    for module in model.modules():
        # Replicas of DataParallel have the attributes of their original, so they would call it instead of themselves.
        if module is model or module in apart or module._compiled_call_impl is not None:
            continue
        if _is_container_of_pytorch(module):
            module._compiled_call_impl = _frame_of(module)


def has_frame(module: nn.Module) -> bool:
    """Whether `module` is called through a frame that `give_frames` gave it."""
    return hasattr(module._compiled_call_impl, _FRAME)


def _is_container_of_pytorch(module: nn.Module) -> bool:
    # A TorchScript module's class raises where its forward is asked for.
    forward = getattr(type(module), "forward", None)
    if forward is nn.Module.forward:  # a list, which nobody calls
        return False
    where = getattr(forward, "__module__", None) or ""
    return where.startswith("torch.nn.") and next(module.children(), None) is not None


def _frame_of(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    frame = _with_code_of_its_own(call)
    vars(frame)[_FRAME] = True
    return frame


def _with_code_of_its_own(function: Any) -> types.FunctionType:
    """A copy of `function`. Dynamo limits recompilations per code object, and remembers by a code's place and name
    which sizes have changed between calls: those of another model would become symbols here."""
    name = f"{function.__name__}_{next(_numbers)}"
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)
