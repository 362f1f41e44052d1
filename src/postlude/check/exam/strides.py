"""The rule for a result's strides: PyTorch's for contiguous inputs; for other inputs a difference is only noted.

Where PyTorch returns a view with gaps, such as y[:, 0], nobody relies on the layout, and any strides will do.
"""

from __future__ import annotations

from torch import Tensor

from postlude.check.exam.shapes import Shape
from postlude.check.isolation.wire import is_dense


def other_strides(name: str, ours: Tensor, own: Tensor, is_gapped: bool, shape: Shape) -> tuple[str | None, str | None]:
    """The fault if there is one, and otherwise a note. `is_gapped`: the result was a view with gaps."""
    if not is_dense(own.shape, own.stride()):
        return None, None
    if is_gapped:
        return f"{name}: a view with gaps, where PyTorch's result has none", None
    if _telling(ours) == _telling(own):
        return None, None
    text = f"{name}: strides {ours.stride()}, PyTorch gives {own.stride()}"
    return (
        (f"{text}, for contiguous inputs", None) if shape.is_contiguous else (None, f"{text}, for {shape.name} inputs")
    )


def _telling(tensor: Tensor) -> list[int]:
    """The strides of axes with more than one position."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
