"""Hashes of source code. Measurements record them, so that a change of the code shows."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CODE = (".py", ".cu", ".cuh")
# Fields of the syntax tree that say nothing about what the code does, or that only some Python versions have.
_IGNORED_FIELDS = frozenset({"kind", "type_comment", "type_ignores", "type_params"})


def kernel_hash(paths: Path | Sequence[Path]) -> str:
    """A hash of what the Python and CUDA files under `paths` do: comments, docstrings and line breaks do not count."""
    digest = hashlib.sha256()
    for root in [paths] if isinstance(paths, Path) else sorted(paths):
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in _CODE)
        if not files:
            raise ValueError(f"no Python or CUDA files in {root}")
        for file in files:
            name = file.name if file == root else file.relative_to(root).as_posix()
            digest.update(f"{name}\n{_code(file)}\n".encode())
    return digest.hexdigest()[:12]


@functools.cache
def source_digest() -> str:
    """A hash of every byte of this package that can change what runs, for caches that outlive a process."""
    digest = hashlib.sha256()
    code = (*_CODE, ".h")
    for path in sorted(p for p in Path(__file__).parent.rglob("*") if p.suffix in code and "cli" not in p.parts):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _code(file: Path) -> str:
    if file.suffix == ".py":
        return _meaning(ast.parse(file.read_bytes()))
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", file.read_text("utf-8"), flags=re.DOTALL).split())


def _meaning(node: Any) -> str:
    """A syntax tree as text. `ast.dump` would do, if its form were the same in every version of Python."""
    if isinstance(node, list):
        return f"[{','.join(_meaning(part) for part in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name in _IGNORED_FIELDS or value is None or value == []:
            continue
        parts.append(f"{name}={_meaning(_without_docstring(node, value) if name == 'body' else value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _without_docstring(node: ast.AST, body: Any) -> Any:
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return body
    return body if ast.get_docstring(node, clean=False) is None else body[1:]
