"""Postlude: fused kernels for what follows a model's convolutions, each checked against float64.

result = postlude.optimize(model, inputs)            # in place, undoable, verified against float64
torch.compile(model, backend="postlude")             # the same, the PyTorch way
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postlude import functional, nn
    from postlude.chain import Chain
    from postlude.errors import PostludeError
    from postlude.optimized import Optimized, is_optimized
    from postlude.pipeline import optimize

__version__ = "0.1.0"
__all__ = ["Chain", "Optimized", "PostludeError", "functional", "is_optimized", "nn", "optimize"]

# Loaded on first use: importing the package costs nothing beyond torch, and optimize pulls in Dynamo.
_HOMES = {
    "Chain": "postlude.chain",
    "PostludeError": "postlude.errors",
    "Optimized": "postlude.optimized",
    "is_optimized": "postlude.optimized",
    "optimize": "postlude.pipeline",
    "functional": "postlude.functional",
    "nn": "postlude.nn",
}


def __getattr__(name: str) -> Any:
    import importlib

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'postlude' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home == f"postlude.{name}" else getattr(module, name)
    globals()[name] = value
    return value
