"""Files that are written completely or not at all: the user's files, and caches that outlive a process."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from postlude.errors import PostludeError


def write_whole(path: Path, text: str) -> None:
    """Writes a temporary file and moves it into place, so that no reader sees an incomplete one.

    A link stays one. A pipe or a device is written to directly: it must not be replaced by a file.
    """
    # A file name may hold bytes that are no text.
    content = text.encode("utf-8", errors="backslashreplace")
    try:
        if is_special(path):
            path.write_bytes(content)
            return
        path = Path(os.path.realpath(path))
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            partial.chmod(0o666 & ~_umask())  # mkstemp's files are readable by their owner only
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PostludeError(f"{path}: it cannot be written ({error.strerror}).") from error


def is_special(path: Path) -> bool:
    """Whether this is a pipe or a device, or /dev/stdout, which a shell may have made a file."""
    return path.parts[:2] == ("/", "dev") or (path.exists() and not path.is_file() and not path.is_dir())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def kept_or_made(folder: Path | None, name: str, make: Callable[[], bytes]) -> bytes:
    """The content of a cached file, made now or by an earlier process. Without a folder nothing is cached."""
    path = None if folder is None else folder / name
    if path is not None and (kept := read_kept(path)):
        return kept
    made = make()
    if path is not None:
        write_kept(path, made)
    return made


def read_kept(path: Path) -> bytes | None:
    """The content of a cached file; None if it does not exist or its hash does not match."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, content = kept[:32], kept[32:]
    return content if content and hashlib.sha256(content).digest() == digest else None


def write_kept(path: Path, content: bytes) -> None:
    """Writes a cached file completely or not at all. If the folder cannot be written, nothing is cached."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(hashlib.sha256(content).digest() + content)
        temporary.replace(path)
    except OSError:
        if temporary:
            with suppress(OSError):
                temporary.unlink()
