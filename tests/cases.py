"""The one table of chains that the tests run: every word of the vocabulary, every producer, odd sizes."""

from __future__ import annotations

from dataclasses import dataclass

from postlude.chain import (
    Chain,
    Convolution,
    Normalize,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    Role,
    Scalar,
    Slot,
    Softmax,
    Step,
    Value,
)
from postlude.windows import Windows
from postlude.words import Setting


@dataclass(frozen=True)
class Case:
    name: str
    chain: Chain
    shape: tuple[int, ...]  # of the input


def conv(
    dims: int,
    channels: tuple[int, int],
    kernel: int = 3,
    *,
    transposed: bool = False,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    output_padding: int = 0,
    groups: int = 1,
    bias: bool = True,
) -> Convolution:
    each = (1,) * dims
    return Convolution(
        transposed,
        *channels,
        tuple(kernel * one for one in each),
        tuple(stride * one for one in each),
        tuple(padding * one for one in each),
        tuple(dilation * one for one in each),
        tuple(output_padding * one for one in each),
        groups,
        bias,
    )


class Builder:
    """Writes a chain step by step: `Builder(3, conv(...)).op("relu").norm(8).reduce("mean", "sample").chain()`."""

    def __init__(self, dims: int, producer: Convolution | None = None) -> None:
        self.dims, self.producer = dims, producer
        self.steps: list[Step] = []
        self.roles: list[Role] = ["input"]
        if producer is not None:
            self.roles += ["weight", "bias"] if producer.has_bias else ["weight"]

    @property
    def value(self) -> Value:
        return Value(len(self.steps))

    def slot(self, role: Role) -> Slot:
        self.roles.append(role)
        return Slot(len(self.roles) - 1)

    def op(self, name: str, *others: Operand | str | float, **settings: Setting) -> Builder:
        operands = [self.slot(o) if o in ("channel", "full", "row", "one") else o for o in others]  # type: ignore[arg-type]
        operands = [Scalar(o) if isinstance(o, float) else o for o in operands]
        self.steps.append(Pointwise(name, (self.value, *operands), tuple(settings.items())))  # type: ignore[arg-type]
        return self

    def norm(self, groups: int | None, *, affine: bool = True, eps: float = 1e-5) -> Builder:
        value = self.value
        weight, bias = (self.slot("channel"), self.slot("channel")) if affine else (None, None)
        op = "instance_norm" if groups is None else "group_norm"
        self.steps.append(Normalize(op, value, groups, eps, weight, bias))
        return self

    def batch_norm(
        self, *, affine: bool = True, running: bool = True, eps: float = 1e-5, momentum: float = 0.1
    ) -> Builder:
        """In training."""
        value = self.value
        weight, bias = (self.slot("channel"), self.slot("channel")) if affine else (None, None)
        moved = (self.slot("running"), self.slot("running")) if running else None
        momentum = momentum if running else 0.0
        self.steps.append(Normalize("batch_norm", value, None, eps, weight, bias, 0, moved, momentum))
        return self

    def layer_norm(self, axes: int = 1, *, affine: bool = True, eps: float = 1e-5) -> Builder:
        value = self.value
        weight, bias = (self.slot("last"), self.slot("last")) if affine else (None, None)
        self.steps.append(Normalize("layer_norm", value, None, eps, weight, bias, axes))
        return self

    def reduce(self, op: str, over: str, keepdim: bool = False) -> Builder:
        self.steps.append(Reduce(op, self.value, over, keepdim))  # type: ignore[arg-type]
        return self

    def pool(
        self,
        op: str,
        kernel: int | tuple[int, ...],
        stride: int | tuple[int, ...] | None = None,
        padding: int | tuple[int, ...] = 0,
        *,
        ceil: bool = False,
        counts_padding: bool = True,
        divisor: int | None = None,
    ) -> Builder:
        given = (kernel, kernel if stride is None else stride, padding)
        sizes = [(size,) * max(1, self.dims) if isinstance(size, int) else size for size in given]
        self.steps.append(Pool(f"{op}_pool", self.value, Windows(*sizes, ceil), counts_padding, divisor))
        return self

    def softmax(self, op: str = "softmax", eps: float = 0.0) -> Builder:
        self.steps.append(Softmax(op, self.value, eps))
        return self

    def chain(self) -> Chain:
        return Chain(self.dims, self.producer, tuple(self.steps), tuple(self.roles))


def largest_of_clamped(start: Builder) -> Chain:
    """The steps of KernelBench's problem 79."""
    clamped = start.op("mul", "channel").norm(None, affine=False).op("clamp", low=-1.0, high=1.0)
    return clamped.op("mul", "channel").reduce("max", "channels").chain()


def _start(dims: int, producer: Convolution | None = None) -> Builder:
    return Builder(dims, producer)


CHAIN_61 = _start(3, conv(3, (64, 128), transposed=True, bias=False)).op("relu").norm(8).chain()
CHAIN_23 = _start(3, conv(3, (3, 24))).norm(8).reduce("mean", "sample").chain()

# No plan of a CPU's: tests/run/test_linear.py runs more of them.
LINEAR = [
    Case("linear gelu softmax", _start(0, conv(0, (6, 10))).op("gelu", approximate="none").softmax().chain(), (5, 6)),
]
CASES = [
    Case(
        "61 small",
        _start(3, conv(3, (4, 8), transposed=True, bias=False)).op("relu").norm(2).chain(),
        (3, 4, 5, 6, 7),
    ),
    Case("23 small", _start(3, conv(3, (3, 6))).norm(2).reduce("mean", "sample").chain(), (5, 3, 6, 7, 8)),
    Case(
        "conv instance_norm leaky_relu",
        _start(3, conv(3, (4, 6), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain(),
        (2, 4, 5, 6, 7),
    ),
    Case(
        "2-D conv group_norm silu",
        _start(2, conv(2, (4, 8), padding=1)).norm(4).op("silu").chain(),
        (3, 4, 9, 11),
    ),
    Case(
        "2-D transposed conv relu instance_norm",
        _start(2, conv(2, (4, 6), transposed=True, stride=2, padding=1, output_padding=1))
        .op("relu")
        .norm(None, affine=False)
        .chain(),
        (2, 4, 7, 5),
    ),
    Case(
        "conv gelu residual",
        _start(3, conv(3, (4, 4), padding=1)).op("gelu", approximate="none").op("add", "full").chain(),
        (2, 4, 5, 5, 6),
    ),
    Case("conv gelu tanh", _start(2, conv(2, (3, 5), 1)).op("gelu", approximate="tanh").chain(), (2, 3, 8, 9)),
    Case(
        "conv per-channel and scalar",
        _start(3, conv(3, (4, 6), stride=2))
        .op("mul", "channel")
        .op("add", "channel")
        .op("mul", 0.5)
        .op("add", -1.5)
        .chain(),
        (2, 4, 7, 8, 9),
    ),
    Case(
        "conv norm residual relu",
        _start(3, conv(3, (4, 4), padding=1, bias=False)).norm(2).op("add", "full").op("relu").chain(),
        (2, 4, 6, 5, 4),
    ),
    Case("norm relu without conv", _start(3).norm(3).op("relu").chain(), (2, 6, 5, 4, 7)),
    Case("silu norm without conv", _start(2).op("silu").norm(None).chain(), (3, 5, 9, 8)),
    Case(
        "conv smallest of channels tanh",
        _start(2, conv(2, (3, 5))).op("silu").reduce("min", "channels", True).op("tanh").op("mul", "one").chain(),
        (3, 3, 6, 7),
    ),
    Case(
        "norm mean over channels relu",
        _start(3).norm(2).op("silu").reduce("mean", "channels").op("relu").chain(),
        (2, 6, 5, 4, 3),
    ),
    Case(
        "conv relu mean over space",
        _start(3, conv(3, (4, 6))).op("relu").reduce("mean", "space").chain(),
        (3, 4, 6, 7, 5),
    ),
    Case(
        "conv norm affine sum over space",
        _start(3, conv(3, (4, 6))).norm(3).op("mul", "channel").op("add", 0.25).reduce("sum", "space", True).chain(),
        (3, 4, 6, 7, 5),
    ),
    Case(
        "conv relu norm mean relu",
        _start(3, conv(3, (4, 6), bias=False))
        .op("relu")
        .norm(2)
        .reduce("mean", "sample")
        .op("relu")
        .op("mul", 3.0)
        .chain(),
        (4, 4, 6, 6, 5),
    ),
    Case(
        "value used twice",
        _start(3, conv(3, (4, 6))).op("silu").op("mul", Value(0)).norm(2).op("add", Value(0)).chain(),
        (2, 4, 5, 6, 5),
    ),
    Case(
        "grouped dilated conv",
        _start(3, conv(3, (4, 8), dilation=2, groups=2)).op("relu").norm(4).chain(),
        (2, 4, 7, 8, 7),
    ),
    Case("conv clamp_min norm", _start(2, conv(2, (3, 4))).op("clamp_min", bound=0.1).norm(2).chain(), (2, 3, 9, 7)),
    Case("two norms", _start(2, conv(2, (4, 8))).norm(2).op("relu").norm(4, affine=False).chain(), (2, 4, 8, 9)),
    Case(
        "batch of one",
        _start(3, conv(3, (2, 4), transposed=True)).op("relu").norm(4).chain(),
        (1, 2, 4, 5, 3),
    ),
    Case(
        "conv batch_norm hardswish pool",
        _start(2, conv(2, (3, 5), 2, stride=2))
        .op("batch_norm", *["channel"] * 4, eps=1e-5)
        .op("hardswish")
        .reduce("adaptive_avg_pool", "space", True)
        .chain(),
        (3, 3, 9, 8),
    ),
    Case(
        "conv tanh norm affine words pool",
        _start(3, conv(3, (3, 4), 2))
        .op("tanh")
        .norm(2, affine=False)
        .op("batch_norm", *["channel"] * 4, eps=1e-3)
        .op("rsub", 0.5)
        .op("div", "one")
        .op("sub", 0.25)
        .reduce("adaptive_avg_pool", "space", True)
        .op("sigmoid")
        .chain(),
        (2, 3, 5, 4, 6),
    ),
    Case(
        "conv mish norm prelu rsub softplus",
        _start(2, conv(2, (3, 6), 2))
        .op("mish")
        .norm(3)
        .op("prelu", "channel")
        .op("rsub", "full")
        .op("softplus", beta=1.0, threshold=20.0)
        .chain(),
        (2, 3, 6, 7),
    ),
    Case("conv batch_norm mul", _start(2, conv(2, (3, 5))).batch_norm().op("mul", 2.0).chain(), (3, 3, 8, 7)),
    Case(
        "transposed conv mul batch_norm mean",
        _start(3, conv(3, (3, 4), transposed=True)).op("mul", 2.0).batch_norm().reduce("mean", "space", True).chain(),
        (3, 3, 3, 4, 3),
    ),
    Case(
        "transposed conv add layer_norm gelu mul",
        _start(3, conv(3, (2, 3), 2, transposed=True, stride=2))
        .op("add", "one")
        .layer_norm()
        .op("gelu", approximate="none")
        .op("mul", 0.5)
        .chain(),
        (2, 2, 3, 4, 3),
    ),
    Case(
        "conv row norm row",
        _start(3, conv(3, (3, 4), 2)).op("mul", "row").norm(2).op("add", "row").op("relu").chain(),
        (5, 3, 4, 5, 6),
    ),
    Case(
        "conv norm row mean",
        _start(2, conv(2, (3, 4))).norm(2).op("mul", "row").op("add", "row").reduce("mean", "sample").chain(),
        (5, 3, 8, 7),
    ),
    Case(
        "conv norm residual logsumexp",
        _start(2, conv(2, (3, 6))).norm(3).op("tanh").op("add", Value(0)).reduce("logsumexp", "channels", True).chain(),
        (3, 3, 7, 6),
    ),
    Case(
        "conv mul norm clamp mul max",
        largest_of_clamped(_start(3, conv(3, (2, 5), 2))),
        (2, 2, 4, 3, 5),
    ),
    Case("conv relu amax", _start(2, conv(2, (3, 1), 2)).op("relu").reduce("amax", "channels").chain(), (2, 3, 5, 6)),
    Case("row norm amin", _start(3).op("mul", "row").norm(1).reduce("amin", "channels", True).chain(), (3, 9, 3, 2, 5)),
    Case("layer_norm min", _start(2).layer_norm().reduce("min", "channels").chain(), (2, 3, 5, 4)),
]
# A CPU leaves them to PyTorch.
POOLED = [
    Case(
        "conv norm relu max_pool",
        _start(2, conv(2, (4, 8), padding=1)).norm(4).op("relu").pool("max", 2).chain(),
        (3, 4, 9, 12),
    ),
    Case(
        "conv mul max_pool clamp",
        _start(3, conv(3, (3, 6)))
        .op("mul", "channel")
        .op("silu")
        .pool("max", 2)
        .op("clamp", low=-0.1, high=0.4)
        .op("add", "channel")
        .chain(),
        (2, 3, 7, 8, 9),
    ),
    Case(
        "norm overlapping windows in padding",
        _start(2).norm(None).op("leaky_relu", slope=0.1).pool("max", 3, 2, 1).chain(),
        (2, 5, 10, 9),
    ),
    Case(
        "norm avg_pool gelu mean",
        _start(3).norm(3).pool("avg", 2).op("gelu", approximate="none").reduce("mean", "space").chain(),
        (3, 6, 6, 5, 7),
    ),
    Case(
        "conv pool of pool norm",
        _start(2, conv(2, (4, 6))).op("silu").pool("avg", 2).pool("avg", (2, 3)).op("mul", 2.0).norm(2).chain(),
        (2, 4, 14, 20),
    ),
]
BY_NAME = {case.name: case for case in [*CASES, *POOLED]}


def _word(op: str, *others: Operand | str | float, **settings: Setting) -> Case:
    chain = _start(2).op(op, *others, **settings).chain()
    return Case(str(chain), chain, (2, 3, 2, 3))


# One row for every word, and for each of its settings and operands that is computed otherwise.
WORDS = [
    _word("relu"),
    _word("clamp_min", bound=0.1),
    _word("clamp_max", bound=0.1),
    _word("clamp", low=-1.0, high=0.1),
    _word("hardtanh", low=-1.0, high=1.0),
    _word("hardtanh", low=0.0, high=6.0),
    _word("leaky_relu", slope=0.3),
    _word("elu", alpha=1.0, scale=1.0, input_scale=1.0),
    _word("elu", alpha=0.7, scale=1.0, input_scale=1.0 / 0.7),
    _word("elu", alpha=1.6732632423543772, scale=1.0507009873554805, input_scale=1.0),
    _word("silu"),
    _word("gelu", approximate="none"),
    _word("gelu", approximate="tanh"),
    _word("mish"),
    _word("hardswish"),
    _word("hardsigmoid"),
    _word("softplus", beta=1.0, threshold=20.0),
    _word("softplus", beta=2.5, threshold=5.0),
    _word("tanh"),
    _word("sigmoid"),
    _word("abs"),
    _word("sqrt"),
    _word("reciprocal"),
    _word("pow", exponent=1),
    _word("pow", exponent=2),
    _word("pow", exponent=3),
    _word("detach"),
    _word("add", 0.1),
    _word("add", "row"),
    _word("sub", 0.1),
    _word("sub", "channel"),
    _word("rsub", 0.1),
    _word("rsub", "full"),
    _word("mul", -1.0),
    _word("mul", "row"),
    _word("mul", "one"),
    _word("div", 0.3),
    _word("div", "channel"),
    _word("rdiv", 0.3),
    _word("rdiv", "full"),
    _word("maximum", "one"),
    _word("maximum", "full"),
    _word("maximum", 0.1),
    _word("minimum", "one"),
    _word("minimum", "channel"),
    _word("prelu", "channel"),
    _word("prelu", "one"),
    _word("batch_norm", "channel", "channel", "channel", "channel", eps=1e-5),
    _word("batch_norm", "channel", "channel", 1.0, 0.0, eps=0.1),
]
