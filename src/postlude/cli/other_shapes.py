"""A problem at sizes that no tile was chosen for, derived from the file's own by one rule."""

from __future__ import annotations

import torch

from postlude.errors import ProblemFileError
from postlude.problem_file import ProblemFile

OWN, OTHER = "own", "other"
SHAPES = (OWN, OTHER)
_BATCH = ("batch_size",)
_SPACE = ("depth", "height", "width", "D", "H", "W")


def at_other_shapes(problem: ProblemFile) -> ProblemFile:
    """The file after its sizes were set anew: three quarters of the batch less one, and one less along every axis of
    space. Where the model takes no such space, as with a layer_norm over it, only the batch is another."""
    own = {name: getattr(problem.module, name, None) for name in (*_BATCH, *_SPACE)}
    sizes = {name: size for name, size in own.items() if type(size) is int}
    batch = {name: max(1, 3 * size // 4 - 1) for name, size in sizes.items() if name in _BATCH}
    space = {name: size - 1 for name, size in sizes.items() if name in _SPACE and size > 2}
    if not batch and not space:
        raise ProblemFileError(f"{problem.path}: it has no sizes of its own ({', '.join((*_BATCH, *_SPACE))}).")
    problem.with_sizes(**batch, **space)
    if space and not _runs(problem):
        problem.with_sizes(**{name: sizes[name] for name in space})
    return problem


def _runs(problem: ProblemFile) -> bool:
    """Without memory: only shapes can be wrong."""
    try:
        with torch.device("meta"):
            problem.run(problem.build("meta"), problem.inputs("meta"))
    except ProblemFileError:
        return False
    return True
