"""A model's calls through Dynamo and a backend, and without them where Dynamo fails."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from postlude.graph.backend import Backend
from postlude.graph.capture import HookWatch, hooks_are_watched, hooks_of_all_modules, is_traced, is_untraceable


def compiled(model: nn.Module, backend: Backend) -> Callable[..., Any]:
    """Does what `model.compile(backend=backend)` does, one frame further out.

    Dynamo skips frames inside torch.nn, so a model whose class is PyTorch's own (`nn.Sequential`) would never reach the
    backend. Dynamo also limits recompilations per code object, so each model gets its own.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    def compiled_apart() -> Callable[..., Any]:
        own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
        return torch.compile(own, backend=backend)

    plain, hooked, hooks = compiled_apart(), compiled_apart(), HookWatch(model)

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
