"""The autograd function of what direct_result.py writes: backward in PyTorch's operators, from the tiles' moments."""

from __future__ import annotations

import math
from collections.abc import Mapping

from postlude.chain import Normalize
from postlude.export.direct_result import gives_result
from postlude.plan import Plan

_TRAINER = '''\
class {name}(torch.autograd.Function):
    """The kernels forward. Backward, the gradient at the convolution's result v is, for
    each sample and channel, shift + slope · (v − mean of v)."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        value, moments = {function}(*tensors)
        ctx.save_for_backward(*tensors, moments)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, gamma, _, moments = ctx.saved_tensors
        # [N, {groups}, {per}]: groups and their channels, in float64 as the moments are
        count, total, squares = moments.sum(1).view(len(x), {groups}, {per}, 3).unbind(3)
        variance = (squares / count - (total / count) ** 2).clamp(min=0)
        mean = total / count + bias.view({groups}, {per})
        apart = mean - mean.mean(2, keepdim=True)
        rstd = ((variance + apart**2).mean(2, keepdim=True) + {eps!r}).rsqrt()
        grad = grad.view(-1, 1, 1) / {channels}
        sent = grad * gamma.view({groups}, {per}) / count  # to each element of a channel
        slope = -(rstd**3) * (sent * apart).mean(2, keepdim=True)
        shift = rstd * (sent - sent.mean(2, keepdim=True)) + slope * apart
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = input_gradient(x, weight, shift, slope)
        if ctx.needs_input_grad[1]:
            weight_grad = weight_gradient(x, weight, shift, slope)
        bias_grad = (shift * count).sum(0).flatten().to(x.dtype)
        gamma_grad = (grad * apart * rstd).sum(0).flatten().to(x.dtype)
        beta_grad = grad.sum().expand({channels})
        return x_grad, weight_grad, bias_grad, gamma_grad, beta_grad
'''
_WEIGHT = '''\
def weight_gradient(x: Tensor, weight: Tensor, shift: Tensor, slope: Tensor) -> Tensor:
    """From the sums and covariances of the input's taps alone, for v is linear in them:
    PyTorch's own takes 40 ms where there are few input channels."""
    result = torch.zeros({groups}, {per}, {taps}, dtype=torch.float64, device=x.device)
    parts = (tensor.split(SAMPLES) for tensor in (x, shift, slope))
    for part, shifts, slopes in zip(*parts):
        center = part.mean((2, 3, 4), keepdim=True)
        taps = (part - center){unfolded}
        taps = taps.permute(0, 1, 5, 6, 7, 2, 3, 4).reshape(len(part), {taps}, -1)
        sums, count = taps.sum(2), taps.shape[2]
        products = torch.bmm(taps, taps.mT) - sums[:, :, None] * sums[:, None] / count
        slopes = torch.einsum("ngi,nkl->gkl", slopes, products.double())
        result += weight.view({groups}, {per}, {taps}).double() @ slopes
        sums = sums + count * center.flatten(1).repeat_interleave({volume}, dim=1)
        result += torch.einsum("ngi,nk->gik", shifts, sums.double())
    return result.view_as(weight).to(x.dtype)
'''
_INPUT = '''\
def input_gradient(x: Tensor, weight: Tensor, shift: Tensor, slope: Tensor) -> Tensor:
    """The convolution again, {samples} samples at a time, and back through it."""
    slope = slope.expand_as(shift)
    parts = (tensor.split(SAMPLES) for tensor in (x, shift, slope))
    result = []
    for part, shifts, slopes in zip(*parts):
        shifts, slopes = (t.to(x.dtype).view(-1, {channels}, 1, 1, 1) for t in (shifts, slopes))
        v = F.conv3d(part, weight)
        v = shifts + slopes * (v - v.mean((2, 3, 4), keepdim=True))
        result.append(F.conv_transpose3d(v, weight))
    return torch.cat(result)
'''
_SAMPLES_BYTES = 100 << 20  # of the taps that are unfolded at a time


def can_train(plan: Plan) -> bool:
    conv = plan.chain.producer
    is_plain = conv is not None and not conv.transposed and not any(conv.padding) and plan.chain.dims == 3
    return is_plain and gives_result(plan) and plan.passes[-1].last + 2 == len(plan.chain.steps)


def direct_trainer(plan: Plan, function: str, class_name: str) -> tuple[str, Mapping[str, str], int]:
    """The class, the functions that it calls, and the samples that they take at a time."""
    conv = plan.chain.producer
    norm = plan.chain.steps[plan.passes[-1].last]
    assert conv is not None
    assert isinstance(norm, Normalize)
    channels, volume = conv.out_channels, math.prod(conv.kernel)
    groups, taps = norm.groups or channels, conv.in_channels * volume
    samples = max(1, _SAMPLES_BYTES // (4 * taps * math.prod(plan.value.shape[2:])))
    unfolded = "".join(f".unfold({axis}, {size}, 1)" for axis, size in enumerate(conv.kernel, 2))
    words = {
        "name": class_name,
        "function": function,
        "groups": groups,
        "per": channels // groups,
        "channels": channels,
        "eps": norm.eps,
        "taps": taps,
        "volume": volume,
        "unfolded": unfolded,
        "samples": samples,
    }
    helpers = {"weight_gradient": _WEIGHT.format(**words), "input_gradient": _INPUT.format(**words)}
    return _TRAINER.format(**words), helpers, samples
