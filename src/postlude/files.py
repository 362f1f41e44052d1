"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from postlude.errors import PostludeError


def write_whole(path: Path, text: str) -> None:
    """Writes beside the file and moves it into place, so that nobody ever reads half of it."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        partial = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            partial.chmod(0o666 & ~_umask())  # mkstemp's files are for their owner alone
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PostludeError(f"{path}: it cannot be written ({error.strerror}).") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
