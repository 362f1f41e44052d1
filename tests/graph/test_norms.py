"""The norms of real networks: each fused and right by the rule, or declined with its reason."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import postlude
from postlude.graph.capture import capture_function
from postlude.graph.match import match

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "small_values_fuse")


class Rms(nn.Module):
    """As Wan's VAE has it: 16-bit inputs are normalised in fp32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        length_one = F.normalize(wide, dim=1)
        return (length_one.to(x.dtype) if wide is not x else length_one) * x.shape[1] ** 0.5 * self.gamma


class OverLastAxis(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class Standardised(nn.Conv3d):
    """A convolution by a weight that is normalised first, as timm's StdConv2d."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv3d(x, weight, self.bias, padding=1)


def chain(norm: nn.Module, conv: type[nn.Conv3d] = nn.Conv3d) -> nn.Module:
    model = nn.Sequential(conv(3, 8, 3, padding=1), norm, nn.SiLU())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # γ, β and statistics that can tell
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator).abs() + 0.2)
                tensor.mul_(-1 if "weight" in name else 1)
    return model


FUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one group": (lambda: chain(nn.GroupNorm(1, 8)), "group_norm(1) → silu"),
    "each channel": (lambda: chain(nn.InstanceNorm3d(8)), "instance_norm → silu"),
    "each channel, tracked": (
        lambda: chain(nn.InstanceNorm3d(8, affine=True, track_running_stats=True)),
        "batch_norm(per channel) → silu",
    ),
    "synchronised, one process": (lambda: chain(nn.SyncBatchNorm(8)), "batch_norm(per channel) → silu"),
    "a standardised weight": (lambda: chain(nn.GroupNorm(2, 8), Standardised), "group_norm(2) → silu"),
}


@pytest.mark.parametrize("name", FUSED)
def test_is_fused_and_right(name: str) -> None:
    build, expected = FUSED[name]
    model, x = build().eval(), torch.randn(2, 3, 10, 11, 9) + 0.4
    plain = copy.deepcopy(model)
    with torch.no_grad():
        result = postlude.optimize(model, x)
        (site,) = result.sites
        assert str(site.chain).endswith(expected)
        assert site.is_fused
        assert result.verdict is not None
        assert result.verdict.right, result.verdict
        truth = copy.deepcopy(plain).double()(x.double())
        assert (model(x) - truth).abs().max() <= 4 * (plain(x) - truth).abs().max() + 1e-6


def test_a_tracked_norm_moves_its_statistics_in_training() -> None:
    norm = nn.InstanceNorm3d(8, track_running_stats=True)
    model, x = chain(norm).train(), torch.randn(2, 3, 6, 7, 5) + 0.4
    plain = copy.deepcopy(model)
    result = postlude.optimize(model, x)
    assert result.sites == ()
    reasons = {item.reason for item in result.declined}
    assert reasons == {"instance_norm that updates running statistics, which are means over the batch"}
    torch.testing.assert_close(model(x), plain(x))
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


DECLINED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "length, on a CPU": (lambda: chain(Rms(8)), "PyTorch runs normalize on a CPU"),
    "over a last axis": (lambda: chain(OverLastAxis(8)), "aten.movedim.int is not in the vocabulary"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_is_declined_and_runs(name: str) -> None:
    build, reason = DECLINED[name]
    model, x = build().eval(), torch.randn(2, 3, 6, 7, 5)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        result = postlude.optimize(model, x)
        assert reason in [item.reason for item in result.declined], result.declined
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_over_channels_are_one_chain(dtype: torch.dtype) -> None:
    """With a convolution and, behind a residual, without one."""
    norm, conv = Rms(8).to(dtype), nn.Conv3d(8, 8, 3, padding=1).to(dtype)

    def block(x: Tensor) -> Tensor:
        return conv(F.silu(norm(conv(F.silu(norm(x)))))) + x

    x = torch.randn(1, 8, 3, 4, 5, dtype=dtype)
    found, declined = match(capture_function(block, [x]))
    before, after = ("", "") if dtype == torch.float32 else ("to float32 → ", "to bfloat16 → ")
    rest = f"normalize over channels → {after}mul(2.82843) → mul(per channel) → silu"
    lines = {str(item.chain) for item in found}
    assert rest in lines, (lines, declined)
    assert f"conv3d(8→8, k3, p1) → {before}{rest}" in lines, (lines, declined)


def test_lengths_in_16_bits_are_declined() -> None:
    _, declined = match(capture_function(lambda x: F.normalize(x), [torch.randn(2, 8, 4, 5, dtype=torch.float16)]))
    assert [item.reason for item in declined] == ["normalize in 16 bits, in which PyTorch rounds its eps to zero"]
