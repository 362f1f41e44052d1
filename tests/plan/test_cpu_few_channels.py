"""Who convolves few channels on the CPU, and how."""

from __future__ import annotations

from cases import Builder, conv
from postlude.chain import Chain
from postlude.plan.barriers import MomentsOnly, moments_only
from postlude.plan.cpu_few_channels import CpuFewChannels, few_channels_for


def chain_of(dims: int, channels: tuple[int, int], taps: int = 3, dilation: int = 1) -> Chain:
    return Builder(dims, conv(dims, channels, taps, dilation=dilation)).norm(2).reduce("mean", "sample").chain()


def chosen(chain: Chain, space: tuple[int, ...]) -> CpuFewChannels:
    moments = moments_only(chain)
    assert isinstance(moments, MomentsOnly)
    found = few_channels_for(chain, moments, space)
    assert found is not None
    return found


def test_correlations_are_chosen_by_counts() -> None:
    wide, narrow = chain_of(3, (3, 24)), chain_of(3, (3, 8))
    assert chosen(wide, (24, 32, 32)).is_correlated
    assert "correlations of the input" in str(chosen(wide, (24, 32, 32)))
    assert not chosen(narrow, (24, 32, 32)).is_correlated  # as many products as the convolution has
    assert not chosen(wide, (4, 32, 32)).is_correlated  # the ends of an axis overlap
    assert not chosen(wide, (6, 6, 6)).is_correlated  # the forms take longer than the convolution
    assert not chosen(chain_of(2, (3, 64), 5), (64, 64)).is_correlated
    assert not chosen(chain_of(2, (3, 64), dilation=2), (64, 64)).is_correlated
    between = Builder(3, conv(3, (3, 24))).op("relu").norm(8).reduce("mean", "sample").chain()
    assert not chosen(between, (24, 32, 32)).is_correlated
