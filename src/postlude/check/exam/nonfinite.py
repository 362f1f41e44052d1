"""The rule for a NaN or an infinity in the last sample of the input.

If PyTorch and the truth both have one, a finite value there is a fault. If both are finite, a non-finite value in
another sample is a fault. Within its own sample it may spread, because exact rewrites (a Fourier transform, operands
split into parts) cannot avoid that; this is only noted. A negative infinity may not spread at all where the reference
has no products: there it masks values, which softmax, logsumexp and maxima leave out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.check.compare import has_error


def lost_or_spread(
    result: Tensor, own: Tensor, truth: Tensor, what: str, samples: int, may_spread: bool = True
) -> tuple[str | None, str | None]:
    """The fault if there is one, and otherwise a note. Of `samples` samples the last has it; 0: the input has none."""
    if not has_error(truth):
        differs = f"{what} in the input gives other integers than PyTorch's"
        return (None, None) if torch.equal(result, own) else (differs, None)
    ours, theirs, exact = (tensor.to(truth.device).isfinite() for tensor in (result, own, truth))
    agreed = theirs == exact
    lost, spread = agreed & ours & ~exact, agreed & ~ours & exact
    if bool(lost.any()):
        return f"with {what} in the input the result lost it: {int(lost.sum())} values are finite", None
    if truth.dim() and truth.shape[0] == samples > 1 and bool(spread[:-1].any()):
        return f"with {what} in one sample the result has {int(spread[:-1].sum())} such values in others", None
    if bool(spread.any()):
        text = f"{what} in the input spreads to {int(spread.sum())} values of its sample that PyTorch keeps finite"
        return (None, text) if may_spread else (text, None)
    return None, None
