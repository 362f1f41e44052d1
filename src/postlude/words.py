"""The vocabulary: every elementwise word of a chain, its operands and settings; the norms, reductions and pools.

What PyTorch computes for a word is in reference.py, how it is written in graph/spellings.py, how a card computes it in
kernels/triton/pointwise.py and its gradient in derivatives.py beside it. tests/test_tables.py names what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

Setting = float | str


@dataclass(frozen=True)
class PointwiseRow:
    """One row of the vocabulary."""

    arity: int
    settings: tuple[str, ...] = ()
    usual: tuple[Setting, ...] = ()  # default settings, which a chain's text does not mention
    affine: bool = False  # in its first operand, if the others are numbers or constant per channel
    swapped: str | None = None  # the word for two operands in the other order
    vectors: bool = False  # the other operands have one number per channel or in all: no broadcasting, no promotion
    finite_at: int = 0  # how many of the two infinities give a finite result
    long: bool = False  # ten instructions or more on a card: a large tile with moments leaves no registers for it


POINTWISE: dict[str, PointwiseRow] = {
    "relu": PointwiseRow(1, finite_at=1),
    # Not the same as relu and hardtanh: at NaN clamp passes no gradient, and up to PyTorch 2.13 at a bound it does.
    "clamp_min": PointwiseRow(1, ("bound",), finite_at=1),
    "clamp_max": PointwiseRow(1, ("bound",), finite_at=1),
    "clamp": PointwiseRow(1, ("low", "high"), finite_at=2),
    "hardtanh": PointwiseRow(1, ("low", "high"), (-1.0, 1.0), finite_at=2),  # relu6 has low 0 and high 6
    "leaky_relu": PointwiseRow(1, ("slope",)),
    "elu": PointwiseRow(
        1, ("alpha", "scale", "input_scale"), (1.0, 1.0, 1.0), finite_at=1, long=True
    ),  # includes celu and selu
    "silu": PointwiseRow(1, long=True),
    "gelu": PointwiseRow(1, ("approximate",), ("none",), long=True),
    "mish": PointwiseRow(1, long=True),
    "hardswish": PointwiseRow(1, long=True),
    "hardsigmoid": PointwiseRow(1, finite_at=2, long=True),
    "softplus": PointwiseRow(1, ("beta", "threshold"), (1.0, 20.0), finite_at=1, long=True),
    "tanh": PointwiseRow(1, finite_at=2, long=True),
    "sigmoid": PointwiseRow(1, finite_at=2, long=True),
    "abs": PointwiseRow(1),
    "sqrt": PointwiseRow(1),
    "reciprocal": PointwiseRow(1, finite_at=2),
    "pow": PointwiseRow(1, ("exponent",)),  # an int, at least 1
    "detach": PointwiseRow(1),
    "add": PointwiseRow(2, affine=True, swapped="add"),
    "sub": PointwiseRow(2, affine=True, swapped="rsub"),
    "rsub": PointwiseRow(2, affine=True, swapped="sub"),
    "mul": PointwiseRow(2, affine=True, swapped="mul"),
    "div": PointwiseRow(2, affine=True, swapped="rdiv"),
    "rdiv": PointwiseRow(2, swapped="div", finite_at=2),
    "maximum": PointwiseRow(2, swapped="maximum", finite_at=1),
    "minimum": PointwiseRow(2, swapped="minimum", finite_at=1),
    "prelu": PointwiseRow(2, vectors=True),
    # In evaluation: mean, variance, weight (or 1), bias (or 0). In training it is a norm.
    "batch_norm": PointwiseRow(5, ("eps",), (1e-5,), affine=True, vectors=True),
}
# What each norm's statistics go over; see `Normalize.over`. batch_norm is a norm only if it uses the batch's
# statistics.
NORMS = {
    "group_norm": "sample",
    "instance_norm": "sample",
    "batch_norm": "batch",
    "layer_norm": "row",
}
# What each reduction may go over. adaptive_avg_pool is to size 1, the mean over space. max and min return only values.
# Among equal elements they give the gradient to one; amax and amin divide it among them.
REDUCTIONS = {
    "mean": ("space", "sample", "channels"),
    "sum": ("space", "sample", "channels"),
    "adaptive_avg_pool": ("space",),
    **dict.fromkeys(("logsumexp", "amax", "amin", "max", "min"), ("channels",)),
}
# The mean or the largest of each window; the gradient of a largest goes to the first of equal ones; NaN is kept.
POOLS = ("max_pool", "avg_pool")
SOFTMAXES = ("softmax", "log_softmax")  # over channels, or the features of a linear layer
LENGTHS = ("normalize",)  # over channels: each vector divided by its length, or by eps if that is larger
SPANS = {"space": "space", "sample": "all but batch", "channels": "channels"}  # their names in a chain's text
