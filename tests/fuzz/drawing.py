"""Random chains with their convolution's options, shapes, dtypes and layouts, drawn by hypothesis."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autocasting import PARAMETERS, autocasted, with_parameters
from cases import WORDS, Builder, conv
from postlude.chain import Chain, Convolution, Normalize, Pointwise, Scalar, Slot, Value
from postlude.check import tensors_for
from postlude.words import REDUCTIONS

DTYPES = ("float32", "float64", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
LAYOUTS = (*("contiguous", "channels_last") * 3, "gaps", "turned", "expanded")
FAMILIES = ("normal", "hierarchical", "large offset", "heavy-tailed", "uniform")
# Singular where a value is 0, which no rounding survives: these follow a step away from it.
SINGULAR = ("sqrt", "reciprocal", "rdiv")
_WORDS = [case.chain.steps[0] for case in WORDS]
_PLAIN = [(step, case.chain.roles) for case, step in zip(WORDS, _WORDS) if isinstance(step, Pointwise)]


@dataclass(frozen=True)
class Drawn:
    """One draw: what is computed, on what, and how the CPU is to run it. Its repr is a case to be kept."""

    chain: Chain
    shape: tuple[int, ...]
    dtype: str = "float32"
    parameters: str | None = None  # dtype of vectors, where it is another; under autocast of the weight and bias too
    given: str | None = None  # dtype of the input, where it is another: under autocast it may be float32
    layout: str = "contiguous"
    family: str = "normal"
    nonfinite: float | None = None  # in the middle of the input
    in_slabs: bool = False
    as_large: bool = False  # takes the ways of values that the allocator maps
    inference_mode: bool = False

    @property
    def is_autocast(self) -> bool:
        return self.chain.producer is not None and self.chain.producer.dtype is not None

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name not in ("chain", "shape")}
        usual = Drawn(self.chain, self.shape)
        parts = [f"{name}={value!r}" for name, value in given.items() if value != getattr(usual, name)]
        return f"kept({self.chain.dumps()!r}, {self.shape}{''.join(', ' + part for part in parts)})  # {self.chain}"

    def tensors(self, seed: int) -> list[Tensor]:
        dtype = getattr(torch, self.dtype)
        form: Any = "channels_last" if self.layout == "channels_last" else "contiguous"
        tensors = list(tensors_for(self.chain, self.shape, dtype, "cpu", seed, self.family, form))  # type: ignore[arg-type]
        tensors = [
            _laid_out(t, self.layout) if t.dim() > 1 and role != "last" else t
            for t, role in zip(tensors, self.chain.roles)
        ]
        if self.parameters is not None:
            other = getattr(torch, self.parameters)
            roles = PARAMETERS if self.is_autocast else ("channel", "running", "last")
            tensors = [t.to(other) if role in roles else t for t, role in zip(tensors, self.chain.roles)]
        if self.given is not None:
            tensors[0] = tensors[0].to(getattr(torch, self.given))
        if self.nonfinite is not None and tensors[0].numel():
            tensors[0] = tensors[0].clone() if self.layout == "expanded" else tensors[0]
            tensors[0][tuple(size // 2 for size in self.shape)] = self.nonfinite
        return tensors


def kept(text: str, shape: tuple[int, ...], **settings: Any) -> Drawn:
    return Drawn(Chain.loads(text), shape, **settings)


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers with gaps between them, with their axes turned, or one sample's for all."""
    if layout == "gaps":
        return torch.stack((tensor, tensor), -1)[..., 0]
    if layout == "turned":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded" and tensor.shape[0] > 1:
        return tensor[:1].expand(tensor.shape)
    return tensor


@st.composite
def draws(draw: Any, on_card: bool = False) -> Drawn:
    dims = draw(st.sampled_from((2, 3)))
    conv = draw(st.one_of(st.none(), convolutions(dims), convolutions(dims)))
    space = tuple(draw(st.integers(1, 6)) for _ in range(dims))
    if conv is not None:
        space = tuple(_large_enough(conv, axis, size) for axis, size in enumerate(space))
    batch = draw(st.sampled_from((1, 2, 3, 5) if on_card else (1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 3, 0)))
    channels = conv.in_channels if conv is not None else draw(st.sampled_from((1, 2, 3, 4, 6, 17)))
    shape = (batch, channels, *space)
    positions = math.prod(conv.output_space(space) if conv is not None else space)
    chain = draw(chains(dims, conv, conv.out_channels if conv is not None else channels, positions > 1, on_card))
    dtype = draw(st.sampled_from(("float32",) if on_card else DTYPES))
    mixed = dtype in HALVES and _mixes(chain) and draw(st.booleans())
    layout = draw(st.sampled_from(LAYOUTS[:2] if on_card else LAYOUTS))
    made = Drawn(
        chain,
        shape,
        dtype,
        "float32" if mixed else None,
        None,
        layout,
        draw(st.sampled_from(FAMILIES)),
        draw(st.sampled_from((None, None, None, math.nan, math.inf, -math.inf))),
        *(draw(st.booleans()) for _ in range(3)),
    )
    return draw(under_autocast(made)) if dtype in HALVES and draw(st.booleans()) else made


@st.composite
def under_autocast(draw: Any, drawn: Drawn, rules: tuple[str, ...] = ("cpu", "cuda")) -> Drawn:
    """The same model under autocast to its dtype: float32 parameters, an input that came from a 16-bit or a float32
    operator, and the casts that autocast makes on that device; as it was where it has no convolution or is not one
    chain any more."""
    given = draw(st.sampled_from((None, "float32")))
    device = draw(st.sampled_from(rules))
    if drawn.chain.producer is None or drawn.chain.moved or drawn.shape[0] == 0:
        return drawn
    plain = dataclasses.replace(drawn, parameters=None, nonfinite=None)
    tensors = with_parameters(drawn.chain, plain.tensors(0), torch.float32)
    tensors[0] = tensors[0].to(torch.float32 if given else tensors[0].dtype)
    chain = autocasted(drawn.chain, tensors, device, getattr(torch, drawn.dtype))
    return (
        drawn if isinstance(chain, str) else dataclasses.replace(drawn, chain=chain, parameters="float32", given=given)
    )


def _mixes(chain: Chain) -> bool:
    """True where per-channel vectors are those of norms alone, which PyTorch lets have another dtype."""
    steps = [step for step in chain.steps if isinstance(step, Pointwise)]
    read = {o.index for step in steps if step.op != "batch_norm" for o in step.operands if isinstance(o, Slot)}
    return all(chain.roles[slot] != "channel" for slot in read)


@st.composite
def convolutions(draw: Any, dims: int) -> Convolution:
    transposed = draw(st.booleans())
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    each, more = draw(
        st.sampled_from(((1, 1), (1, 2), (2, 3), (3, 1), (4, 2)))
    )  # channels of a group; (1, …): depthwise
    kernel, stride, dilation, padding, extra = [], [], [], [], []
    for _ in range(dims):
        kernel.append(draw(st.integers(1, 3)))
        stride.append(draw(st.sampled_from((1, 1, 2, 3))))
        dilation.append(draw(st.sampled_from((1, 1, 2))))
        reach = dilation[-1] * (kernel[-1] - 1)
        # Further than the taps reach PyTorch's own convolutions on the CPU read and write outside of their tensors.
        padding.append(draw(st.integers(0, reach)))
        extra.append(draw(st.integers(0, min(reach, max(stride[-1], dilation[-1]) - 1))) if transposed else 0)
    sizes = [tuple(sizes) for sizes in (kernel, stride, padding, dilation, extra)]
    return Convolution(transposed, groups * each, groups * more, *sizes, groups, draw(st.booleans()))


@st.composite
def plain_convolutions(
    draw: Any, inputs: tuple[int, ...], outputs: tuple[int, ...], most_taps: int, most_stride: int = 1
) -> tuple[Convolution, tuple[int, ...]]:
    """Which run on products of ours, and the space of an input; of one plane: what lies between planes is a larger
    pitch."""
    kernel, stride, turned = draw(st.integers(1, most_taps)), draw(st.integers(1, most_stride)), draw(st.booleans())
    channels, padding = (
        (draw(st.sampled_from(inputs)), draw(st.sampled_from(outputs))),
        draw(st.integers(0, kernel - 1)),
    )
    sizes = {"stride": stride, "padding": padding, "output_padding": draw(st.integers(0, stride - 1)) if turned else 0}
    how = conv(2, channels, kernel, transposed=turned, bias=draw(st.booleans()), **sizes)
    return how, tuple(_large_enough(how, axis, 1) + draw(st.integers(0, 4)) for axis in range(2))


def _large_enough(conv: Convolution, axis: int, size: int) -> int:
    while conv.output_size(axis, size) < 1:
        size += 1
    return size


@st.composite
def chains(draw: Any, dims: int, conv: Convolution | None, channels: int, may_norm: bool, on_card: bool) -> Chain:
    builder = Builder(dims, conv)
    kinds = ["word"] * 4 + ["norm"] * (2 if may_norm else 0)
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.sampled_from(kinds)) == "norm":
            _add_norm(builder, channels, draw)
        else:
            _add_word(builder, draw(st.sampled_from(_PLAIN)), draw)
    end = draw(st.sampled_from((None, None, None, None, ("space", "sample"), ("space", "sample"), ("channels",))))
    if end is not None:
        over = draw(st.sampled_from(end))
        kind = draw(st.sampled_from([kind for kind, spans in REDUCTIONS.items() if over in spans]))
        builder.reduce(kind, over, kind == "adaptive_avg_pool" or draw(st.booleans()))
        if over == "channels":
            return builder.chain()
        for word in draw(st.lists(st.sampled_from(("relu", "sigmoid", "tanh")), max_size=2)):
            builder.op(word)
    return builder.chain()


def _add_norm(builder: Builder, channels: int, draw: Any) -> None:
    over, affine = draw(st.sampled_from(("sample", "sample", "batch", "row"))), draw(st.booleans())
    if over == "batch":
        builder.batch_norm(affine=affine, running=draw(st.booleans()), momentum=draw(st.sampled_from((0.1, 1.0))))
    elif over == "row":
        builder.layer_norm(draw(st.integers(1, builder.dims + 1)), affine=affine)
    else:
        groups = [groups for groups in range(1, channels + 1) if channels % groups == 0]
        builder.norm(draw(st.sampled_from((None, *groups))), affine=affine)


def _add_word(builder: Builder, row: tuple[Pointwise, tuple[Any, ...]], draw: Any) -> None:
    step, roles = row
    if step.op in SINGULAR:
        builder.op("abs").op("add", 0.5)
    others: list[Any] = []
    for operand in step.operands[1:]:
        if isinstance(operand, Scalar):
            others.append(operand)
        elif roles[operand.index] == "full" and builder.steps and draw(st.booleans()):  # type: ignore[union-attr]
            others.append(Value(draw(st.integers(0, len(builder.steps)))))  # a value for the second time
        else:
            others.append(roles[operand.index])  # type: ignore[union-attr]
    builder.op(step.op, *others, **dict(step.settings))


def norms_of(chain: Chain) -> int:
    return sum(isinstance(step, Normalize) for step in chain.steps)
