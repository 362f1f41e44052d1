"""A problem at sizes for which no tile was tuned, derived from the file's own sizes by one rule."""

from __future__ import annotations

import torch

from postlude.errors import ProblemFileError
from postlude.problem_file import ProblemFile

OWN, OTHER = "own", "other"
SHAPES = (OWN, OTHER)
_BATCH = ("batch_size",)
_SPACE = ("depth", "height", "width", "D", "H", "W")


def at_other_shapes(problem: ProblemFile) -> ProblemFile:
    """The file with other sizes: three quarters of the batch minus one, and one less along every spatial axis.

    If the model does not accept that, as with a layer_norm over space, only the batch changes.
    """
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
    """Whether the model accepts its sizes; runs on the meta device, which checks only shapes."""
    try:
        with torch.device("meta"):
            problem.run(problem.build("meta"), problem.inputs("meta"))
    except ProblemFileError:
        return False
    return True
