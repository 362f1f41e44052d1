"""Python functions that an exported file may hold, written for people; what each is for stands in its docstring."""

from __future__ import annotations

SCALES = '''\
def scales(largest: Tensor) -> Tensor:
    """Powers of two that bring `largest` to 2¹⁴…2¹⁵, near the end of fp16's range."""
    exponent = (largest.view(torch.int32) >> 23).clamp(min=27)  # 2¹¹⁴ at most
    return ((268 - exponent) << 23).view(torch.float32)  # 2^(141 - exponent)
'''

COMBINE = '''\
def group_moments(
    means: Tensor, squares: Tensor, counts: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    """One mean and one 1 / deviation per sample and group, by Chan's formula."""
    batch, channels, _ = means.shape
    weights = counts[:, None].expand(-1, channels // groups, -1).reshape(batch, 1, -1)
    total = weights[:, 0].sum(1, keepdim=True)
    means, squares = means.view(batch, groups, -1), squares.view(batch, groups, -1)
    mean = (means * weights).sum(2) / total
    squares = squares + weights * (means - mean[..., None]) ** 2
    return mean, torch.rsqrt(squares.sum(2) / total + eps)
'''
