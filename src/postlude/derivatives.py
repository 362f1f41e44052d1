"""The table of derivatives: from the gradient of what a step gave to those of what it read, as expressions."""

from __future__ import annotations

import torch

from postlude.chain import Pointwise, Scalar
from postlude.expressions import Expression, Name, call
from postlude.steps import EPS, M_X, O_C, C, U, X, Y, Z, device_function

G, V = Name("g"), Name("v")
TAP = Name("tap")  # the channel that a largest or smallest was chosen from
_NOTHING = call("nothing", G)
# The gradient of each operand, from g of the step's value v; the functions are in kernels/triton/derivatives.py.
# A word of one operand without a row has word_gradient(g, x, settings).
DERIVATIVES: dict[str, tuple[Expression, ...]] = {
    **{word: (call(f"{word}_gradient", G, V),) for word in ("relu", "tanh", "sigmoid", "sqrt", "reciprocal")},
    "detach": (_NOTHING,),
    "add": (G, G),
    "sub": (G, -G),
    "rsub": (-G, G),
    "mul": (G * Y, G * X),
    "div": (G / Y, -G * (V / Y)),
    "rdiv": (-G * (V / X), G / X),
    "maximum": (call("maximum_gradient", G, X, Y), call("maximum_gradient", G, Y, X)),
    "minimum": (call("minimum_gradient", G, X, Y), call("minimum_gradient", G, Y, X)),
    "prelu": (call("prelu_gradient", G, X, Y), call("prelu_weight_gradient", G, X)),
    # PyTorch has no gradient of running statistics.
    "batch_norm": (
        G * call("batch_norm_slope", Z, U, EPS),
        _NOTHING,
        _NOTHING,
        G * call("batch_norm", X, Y, Z, Scalar(1.0), Scalar(0.0), EPS),
        G,
    ),
}
if torch.__version__ >= "2.14":
    # From 2.14 on, PyTorch's clamp passes nothing at its bounds. It is composed of functions that kernels have: at a
    # bound the inner one passes g, so that g minus it is 0; the outer one gives 0 at NaN.
    _BOUND, _LOW, _HIGH = Name("bound"), Name("low"), Name("high")
    _at_most, _at_least = (call(f"clamp_{word}_gradient", G, X, _BOUND) for word in ("max", "min"))
    DERIVATIVES |= {
        "clamp_min": (call("clamp_min_gradient", G - _at_most, X, _BOUND),),
        "clamp_max": (call("clamp_max_gradient", G - _at_least, X, _BOUND),),
        "clamp": (call("clamp_gradient", call("hardtanh_gradient", G, X, _LOW, _HIGH), X, _LOW, _HIGH),),
    }
# The same of what goes over the rows of a block; the functions are in kernels/triton/row_derivatives.py.
ROW_DERIVATIVES: dict[str, Expression] = {
    "softmax": call("softmax_share", G, V, M_X),
    "log_softmax": call("log_softmax_share", G, V, M_X),
    "normalize": call("normalize_share", G, X, V, M_X, EPS),
    "sum": call("spread", G, M_X),
    "mean": call("spread", G / C, M_X),
    "logsumexp": call("logsumexp_share", G, X, V, M_X),
    "amax": call("largest_share", G, X, M_X),
    "amin": call("smallest_share", G, X, M_X),
    **dict.fromkeys(("max", "min"), call("chosen_share", G, TAP, O_C)),
}
CHOICES = ("max", "min")


def derivatives(step: Pointwise) -> tuple[Expression, ...]:
    """The table's row, or the function that is named after the word's."""
    settings = [Name(name) for name, value in step.settings if not isinstance(value, str)]
    return DERIVATIVES.get(step.op) or (call(f"{device_function(step)}_gradient", G, X, *settings),)
