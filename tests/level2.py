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

# Those with a softmax over channels, or with steps after a reduction over them.
SOFTMAXED: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "25": (
        Builder(2, conv(2, (16, 64))).reduce("min", "channels", True).op("tanh").op("tanh").chain(),
        (128, 16, 256, 256),
    ),
    "49": (Builder(3, up(3, (32, 64))).softmax().op("sigmoid").chain(), (16, 32, 16, 32, 32)),
    "58": (
        Builder(3, up(3, (3, 16), 3, 1, 0))
        .reduce("logsumexp", "channels", True)
        .op("add", 3.0)
        .op("sigmoid")
        .op("mul", Value(1))
        .op("div", 6.0)
        .op("sub", "one")
        .op("clamp", low=-1.0, high=1.0)
        .chain(),
        (128, 3, 16, 32, 32),
    ),
    "91": (
        Builder(2, up(2, (64, 128), 4)).softmax().op("add", "channel").op("mul", 2.0).op("sigmoid").chain(),
        (128, 64, 64, 64),
    ),
}

# Those with pools, as far as their last passes go.
POOLED: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "8": (
        Builder(3, conv(3, (8, 16))).op("div", 2.0).pool("max", 2).reduce("mean", "space", True).chain(),
        (128, 8, 16, 64, 64),
    ),
    "10": (
        Builder(2, conv(2, (64, 64), transposed=True, padding=1))
        .pool("max", 2)
        .op("hardtanh", low=-1.0, high=1.0)
        .reduce("mean", "space", True)
        .op("tanh")
        .chain(),
        (128, 64, 256, 256),
    ),
    "11": (
        Builder(2, conv(2, (64, 128), 5, transposed=True, padding=1))
        .batch_norm()
        .op("tanh")
        .pool("max", 2)
        .norm(8)
        .chain(),
        (512, 64, 32, 32),
    ),
    "35": (
        Builder(2, conv(2, (64, 128))).op("sub", 0.5).op("hardswish").pool("max", 2).op("mish").chain(),
        (128, 64, 128, 128),
    ),
    "46": (
        Builder(2, conv(2, (64, 128))).op("sub", 0.5).op("tanh").op("sub", 0.2).pool("avg", 2).chain(),
        (128, 64, 128, 128),
    ),
    "50": (
        Builder(3, up(3, (3, 16), 3, 1, 0))
        .op("mul", "one")
        .pool("avg", 2)
        .op("add", "channel")
        .op("mul", "one")
        .chain(),
        (128, 3, 16, 32, 32),
    ),
    "65": (
        Builder(2, conv(2, (8, 64))).pool("avg", 4).op("sigmoid").reduce("sum", "sample").chain(),
        (128, 8, 384, 384),
    ),
    "72": (
        Builder(3, up(3, (3, 16), 3, 1, 0)).batch_norm().pool("avg", 2).pool("avg", 2).chain(),
        (64, 3, 32, 32, 32),
    ),
    "74": (
        Builder(3, up(3, (16, 32)))
        .op("leaky_relu", slope=0.2)
        .op("mul", "channel")
        .op("leaky_relu", slope=0.2)
        .pool("max", 2)
        .chain(),
        (16, 16, 16, 32, 32),
    ),
    "82": (
        Builder(2, conv(2, (8, 64))).op("tanh").op("mul", 2.0).op("add", "channel").pool("max", 4).chain(),
        (128, 8, 256, 256),
    ),
    "85": (
        Builder(2, conv(2, (8, 64)))
        .norm(16)
        .op("mul", "channel")
        .pool("max", 4)
        .op("clamp", low=0.0, high=1.0)
        .chain(),
        (128, 8, 128, 128),
    ),
    "96": (
        Builder(3, up(3, (3, 16), 3, 1, 0))
        .op("mul", 0.5)
        .pool("max", 2)
        .reduce("adaptive_avg_pool", "space", True)
        .op("clamp", low=0.0, high=1.0)
        .chain(),
        (128, 3, 16, 32, 32),
    ),
}
