"""What Postlude keeps in the user's cache folder."""

from __future__ import annotations

import re

from postlude.hardware import cache_folder
from postlude.tile_table import NAME as TILES

# .cubin by nvrtc.py, .so by cpp.py, .note by found_again.py, .verdict by site_check.py; .tmp: an interrupted write.
_KEPT = re.compile(r"\w+-[0-9a-f]{64}(\.cubin|\.so|\.note|\.verdict|\w*\.tmp)")


def clear_cache() -> tuple[int, int]:
    """Deletes the kernels and tiles that earlier processes cached, and no other files; returns files and bytes."""
    folder = cache_folder()
    files = size = 0
    for path in folder.glob("*") if folder else ():
        if (_KEPT.fullmatch(path.name) or TILES.fullmatch(path.name)) and path.is_file():
            size += path.stat().st_size
            path.unlink(missing_ok=True)
            files += 1
    return files, size
