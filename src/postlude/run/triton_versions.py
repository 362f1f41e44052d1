"""What differs between versions of Triton below its public interface, as far as a launch and a look-up need it.

Triton 3.6 generates a launcher in C for each signature. From 3.7 on one launcher serves all kernels; it takes the
arguments as one tuple, with a description of their types. A version that is not in the table uses its own launch path
and its own look-up.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[..., None]  # takes the stream, then what comes before the fixed arguments


@dataclass(frozen=True)
class Version:
    # Of a compiled kernel, a grid and the arguments that are the same at every launch.
    call: Callable[[Any, tuple[int, ...], tuple[Any, ...]], Call]
    # What Triton's function that makes a descriptor's arguments takes after the descriptor and its metadata.
    after_metadata: tuple[Any, ...] = ()

    def expanded(self, descriptor: Any, metadata: Any) -> list[Any]:
        """A descriptor as the launcher takes it: a tensor map or a pointer, then sizes and strides."""
        return list(_make_tensordesc_arg()(descriptor, metadata, *self.after_metadata))


def version() -> Version | None:
    """The Triton that is installed; None if it is not in the table."""
    import triton

    return VERSIONS.get(".".join(re.findall(r"\d+", triton.__version__)[:2]))


# Every call passes no scratch memory and no hooks (`bound` says when a launch needs them). In the place of what a hook
# would be called with, it passes the kernel: from 3.8 on Triton unloads a kernel that nobody holds.


def _generated(compiled: Any, grid: tuple[int, ...], after: tuple[Any, ...]) -> Call:
    run = compiled.run
    launcher = run.launch
    if not inspect.isbuiltin(launcher):  # a function in Python around it makes the descriptors' maps
        launcher = inspect.getclosurevars(launcher).nonlocals["launcher"]
    how = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
    fixed = (compiled.function, *how, compiled, None, None)
    return lambda stream, *given: launcher(*grid, stream, *fixed, *given, *after)


def _shared(compiled: Any, grid: tuple[int, ...], after: tuple[Any, ...]) -> Call:
    from triton.runtime import driver

    run = compiled.run
    launcher = driver.active.utils.launch
    how = (run.launch_cooperative_grid, run.launch_pdl, compiled.packed_metadata, compiled, None, None, None, None)
    fixed = (compiled.function, *how, run.arg_annotations, run.kernel_signature)
    return lambda stream, *given: launcher(*grid, stream, *fixed, (*given, *after))


VERSIONS = {
    "3.6": Version(_generated),
    "3.7": Version(_shared),
    "3.8": Version(_shared, (None,)),
    "3.9": Version(_shared, (None,)),
}


@functools.cache
def _make_tensordesc_arg() -> Callable[..., Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg  # type: ignore[no-any-return]
