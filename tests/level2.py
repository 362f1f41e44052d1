"""Chains of KernelBench's level 2, by its own numbers: those whose convolutions keep infinities, having no norm or a
layer_norm, and those that end in a reduction over channels."""

from __future__ import annotations

from cases import Builder, conv, largest_of_clamped
from postlude.chain import Chain, Convolution, Value


def up(dims: int, channels: tuple[int, int], kernel: int = 3, padding: int = 1, more: int = 1) -> Convolution:
    return conv(dims, channels, kernel, transposed=True, stride=2, padding=padding, output_padding=more)


LEVEL2: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "1": (Builder(2, conv(2, (64, 128))).op("relu").op("add", "channel").chain(), (128, 64, 128, 128)),
    "2": (
        Builder(2, up(2, (64, 64)))
        .op("add", "channel")
        .op("clamp", low=0.0, high=1.0)
        .op("mul", 2.0)
        .op("clamp", low=0.0, high=1.0)
        .op("div", 2.0)
        .chain(),
        (128, 64, 128, 128),
    ),
    "3": (Builder(3, up(3, (32, 64))).op("add", "one").layer_norm().chain(), (32, 32, 16, 32, 32)),
    "4": (Builder(2, conv(2, (64, 128))).op("mish").op("mish").chain(), (64, 64, 256, 256)),
    "5": (Builder(2, up(2, (64, 64), 4)).op("sub", "channel").op("tanh").chain(), (32, 64, 256, 256)),
    "7": (
        Builder(3, conv(3, (8, 32)))
        .op("relu")
        .op("leaky_relu", slope=0.01)
        .op("gelu", approximate="none")
        .op("sigmoid")
        .op("add", "channel")
        .chain(),
        (64, 8, 32, 64, 64),
    ),
    "16": (
        Builder(2, up(2, (64, 64))).op("mish").op("add", 0.5).op("hardtanh", low=-1.0, high=1.0).op("mul", 2.0).chain(),
        (128, 64, 128, 128),
    ),
    "20": (
        Builder(3, up(3, (32, 64)))
        .op("detach")
        .op("add", "channel")
        .op("add", Value(1))
        .op("mul", Value(1))
        .op("add", Value(1))
        .chain(),
        (16, 32, 16, 32, 32),
    ),
    "26": (
        Builder(3, up(3, (32, 64))).op("add", "full").op("hardswish").op("mul", Value(1)).chain(),
        (128, 32, *[16] * 3),
    ),
    "31": (
        Builder(2, conv(2, (64, 128))).op("minimum", 0.5).op("add", "channel").op("mul", 2.0).chain(),
        (128, 64, 128, 128),
    ),
    "34": (
        Builder(3, up(3, (32, 64), 4, 1, 0)).layer_norm().op("gelu", approximate="none").op("mul", 1.0).chain(),
        (32, 32, 16, 32, 32),
    ),
    "47": (Builder(3, conv(3, (32, 64))).op("mish").op("tanh").chain(), (16, 32, 32, 64, 64)),
    "54": (
        Builder(2, conv(2, (64, 64)))
        .op("mul", "channel")
        .op("leaky_relu", slope=0.01)
        .op("gelu", approximate="none")
        .chain(),
        (64, 64, 256, 256),
    ),
    "93": (
        Builder(2, up(2, (64, 128), 4, 0, 0))
        .op("add", 0.5)
        .op("minimum", 0.0)
        .op("gelu", approximate="none")
        .op("mul", 2.0)
        .chain(),
        (128, 64, 64, 64),
    ),
    "100": (
        Builder(3, up(3, (64, 128), 3, 1, 0)).op("clamp_min", bound=-1.0).op("div", 2.0).chain(),
        (16, 64, 24, 48, 48),
    ),
}

OVER_CHANNELS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "79": (
        largest_of_clamped(Builder(3, conv(3, (3, 16)))),
        (128, 3, 16, 32, 32),
    ),
    "92": (
        Builder(2, conv(2, (8, 64)))
        .norm(16)
        .op("tanh")
        .op("hardswish")
        .op("add", Value(0))
        .reduce("logsumexp", "channels", True)
        .chain(),
        (128, 8, 128, 128),
    ),
}
