"""Kernels with one deliberate fault."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest


def replace_text(monkeypatch: pytest.MonkeyPatch, name: str, right: str, wrong: str) -> None:
    """Puts `wrong` in place of `right`, which must be there, in a file of kernels/triton.

    What the file defines is replaced wherever other kernels have it from there.
    """
    import postlude.kernels.triton as kernels
    from postlude.run.compose import HEADER, compose

    modules = [
        importlib.import_module(f"{kernels.__name__}.{info.name}") for info in pkgutil.iter_modules(kernels.__path__)
    ]
    (module,) = [found for found in modules if found.__name__.endswith(f".{name}")]
    source = Path(str(module.__file__)).read_text()
    assert right in source
    for key, made in compose(HEADER + source.replace(right, wrong)).items():
        honest = vars(module).get(key)
        if honest is None or honest is made or not hasattr(made, "fn"):
            continue
        for user in modules:
            if vars(user).get(key) is honest:
                monkeypatch.setattr(user, key, made)
