"""Stand-ins for packages that the networks' packages import and their networks never use.

torchvision has no build for every CPU torch, scikit-image and the rest are large: installing them would only serve
import statements. A stand-in module has every name that is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

STOOD_IN_FOR = (
    *("torchvision", "skimage", "h5py", "tensorboard", "tqdm", "yaml"),
    *("huggingface_hub", "safetensors", "regex", "requests", "importlib_metadata", "einops", "httpx"),
)

VERSION = "1.0"


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name, cls.__module__)


class StandIn(metaclass=_Meta):
    """A class to derive from, an exception's stand-in, or a decorator that leaves a function as it is."""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else super().__new__(cls)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = "" if name.isupper() else _made(name, self.__name__)  # constants are paths and names
        setattr(self, name, made)
        return made


def _made(name: str, module: str) -> Any:
    return _Meta(name, (StandIn,), {"__module__": module})


class _Distribution(importlib.metadata.Distribution):
    """For packages that look whether another one is installed."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder:
    """Comes last: a package that is installed is imported as it is."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        package, _, inside = name.partition(".")
        if package not in STOOD_IN_FOR or (inside and not isinstance(sys.modules.get(package), _Module)):
            return None  # an installed package looks for submodules that it lacks
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def find_distributions(self, context: Any = None) -> list[Any]:
        return [_Distribution()] if getattr(context, "name", None) in STOOD_IN_FOR else []

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = VERSION  # type: ignore[attr-defined]


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Only inside of this: torch itself looks for some of these packages and would use them."""
    finder = _Finder()
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name, module in list(sys.modules.items()) if isinstance(module, _Module)]:
            del sys.modules[name]
