"""Finds compiled kernels in Triton's cache without Triton's hash of its own library.

Before Triton looks into its cache, it hashes its own library, more than a hundred megabytes, in every process: 0.39 s
of the 0.8 s that the first call of a later process took. We write a note of where in that cache a kernel is. The note's
name is a hash of the kernel's source, its arguments, the card, and the size and time (not the contents) of Triton's
files. Triton still stores and loads the kernel.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from postlude.files import read_kept, write_kept
from postlude.hardware import cache_folder
from postlude.run.triton_versions import version


def find_again(kernel: Any, device: int) -> None:
    """Makes a kernel use `compiled` when it is compiled for this device. Versions that `triton_versions` does not know
    do their own look-up."""
    if version() is not None and _is_plain() and cache_folder() is not None:
        kernel.device_caches[device]  # sets the kernel's own `compile`
        kernel.compile = compiled


def compiled(src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> Any:
    """Like triton.compiler.compile, which it calls if there is no note or the note names no existing kernel."""
    from triton.compiler import CompiledKernel, compile
    from triton.runtime.cache import get_cache_manager

    folder = cache_folder()
    key = f"{src.hash()} {target} {sorted((options or {}).items())} {_triton()}"
    note = folder / f"{src.name[:80]}-{hashlib.sha256(key.encode()).hexdigest()}.note" if folder else None
    if note is not None and (kept := read_kept(note)):
        place, name = kept.decode(), f"{src.name[:150]}.json"
        group = get_cache_manager(place).get_group(name) or {}
        if name in group:  # not if something has deleted it: a group lists the files that are left
            return CompiledKernel(src, group, place)
    made = compile(src, target=target, options=options, _env_vars=_env_vars)
    if note is not None:
        write_kept(note, made.hash.encode())
    return made


def _is_plain() -> bool:
    """Whether Triton is not asked to always compile, or to dump, override or change what it compiles."""
    from triton import knobs

    asked, changed = knobs.compilation, getattr(knobs.runtime, "add_stages_inspection_hook", None)
    return not (asked.always_compile or asked.override or asked.dump_ir or asked.listener or changed)


@functools.cache
def _triton() -> str:
    """Triton's files by size and time, and the environment variables that it reads."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    folder = Path(str(triton.__file__)).parent
    stamps = [triton.__version__, *(_stamp(path) for path in _files(folder))]
    # Triton lists those that change a kernel, but not those that name a tool such as ptxas.
    named = {name: value for name, value in os.environ.items() if name.startswith(("TRITON_", "LLVM_"))}
    asked = sorted((named | get_cache_invalidating_env_vars()).items())
    return hashlib.sha256(json.dumps([stamps, asked]).encode()).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for name in ("_C", "compiler", "backends", "language", "runtime"):
        for place, _, files in os.walk(folder / name):
            yield from (Path(place, file) for file in sorted(files) if not file.endswith(".pyc"))


def _stamp(path: Path) -> str:
    seen = path.stat()
    return f"{path} {seen.st_size} {seen.st_mtime_ns}"
