"""Every word, norm and reduction under autocast, after a convolution: the dtypes and numbers that eager gives.

Which operators autocast casts, and to what, is PyTorch's to say: eager is asked, on the CPU with numbers and for CUDA
on fake tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import postlude
from autocasting import autocast, autocasted, model_of, with_parameters
from cases import WORDS, Builder, conv
from postlude import reference
from postlude.chain import Chain, Pointwise, Scalar, Slot
from postlude.check import tensors_for
from postlude.graph import tidy

SHAPE = (2, 3, 5, 6)


def _after_convolution(word: Chain) -> Chain:
    """The word as the step after a convolution, whose weight and bias are slots 1 and 2."""
    (step,) = word.steps
    assert isinstance(step, Pointwise)
    operands = tuple(Slot(o.index + 2) if isinstance(o, Slot) else o for o in step.operands)
    step = dataclasses.replace(step, operands=operands)
    return Chain(2, conv(2, (3, 4), padding=1), (step,), ("input", "weight", "bias", *word.roles[1:]))


def _start() -> Builder:
    return Builder(2, conv(2, (3, 4), padding=1))


# With a number these are written with a tensor made of it, which is no slot of the model's.
TENSORS_ALONE = ("rdiv", "maximum", "minimum")
CHAINS = [
    *(
        _after_convolution(case.chain)
        for case in WORDS
        if not (isinstance(case.chain.steps[0].operands[-1], Scalar) and case.chain.steps[0].op in TENSORS_ALONE)  # type: ignore[union-attr]
    ),
    *(_start().norm(groups, affine=affine).op("relu").chain() for groups in (None, 2) for affine in (True, False)),
    *(_start().layer_norm(axes).op("relu").chain() for axes in (1, 3)),
    _start().batch_norm(running=False).op("relu").chain(),
    # MONAI's usual block, and what follows a group_norm that CUDA computes in float32
    _start().norm(None).op("prelu", "channel").chain(),
    _start().norm(2).op("prelu", "channel").op("add", "full").chain(),
    _start().norm(2).op("mul", "channel").norm(None).op("softplus", beta=1.0, threshold=20.0).chain(),
    *(_start().norm(2).reduce(op, over).chain() for op in ("mean", "sum") for over in ("space", "sample")),
    _start().reduce("adaptive_avg_pool", "space", True).op("sigmoid").chain(),
    *(_start().op("silu").reduce(op, "channels").chain() for op in ("logsumexp", "amax", "amin", "max", "min")),
]


def _tensors(chain: Chain, dtype: torch.dtype, parameters: torch.dtype) -> list[Tensor]:
    return with_parameters(chain, tensors_for(chain, SHAPE, dtype), parameters)


def _with_gradients(run: object, tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = run(*leaves)  # type: ignore[operator]
    if not y.requires_grad:  # detached
        return [y]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return [y, *(torch.zeros(()) if g is None else g for g in found)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parameters", ["float32", "its own"])
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_values_and_gradients_are_eagers_on_the_cpu(chain: Chain, parameters: str, dtype: torch.dtype) -> None:
    tensors = _tensors(chain, torch.float32, torch.float32 if parameters == "float32" else dtype)
    ours = autocasted(chain, tensors, "cpu", dtype)
    assert isinstance(ours, Chain), ours
    with autocast("cpu", dtype):
        expected = _with_gradients(model_of(chain), tensors)
    found = _with_gradients(lambda *given: reference.evaluate(ours, given), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("parameters", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_dtypes_are_eagers_on_cuda(chain: Chain, parameters: torch.dtype) -> None:
    tensors = _tensors(chain, torch.float16, parameters)
    ours = autocasted(chain, tensors, "cuda", torch.float16)
    assert isinstance(ours, Chain), ours
    with FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in tensors]
        with autocast("cuda", torch.float16):
            expected = model_of(chain)(*fakes)
        found = reference.evaluate(ours, fakes)
    assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device)


def test_cudas_own_rules_are_in_the_chain() -> None:
    """What is known of torch 2.11 to 2.13, so that asking is seen to work."""
    chain = _start().norm(2).op("prelu", "channel").op("softplus", beta=1.0, threshold=20.0).chain()
    tensors = _tensors(chain, torch.float16, torch.float32)
    assert [str(autocasted(chain, tensors, device, torch.float16)) for device in ("cuda", "cpu")] == [
        "conv2d(3→4, k3, p1, float16) → to float32 → group_norm(2) → to float16 → prelu(per channel)"
        " → to float32 → softplus",
        "conv2d(3→4, k3, p1, float16) → group_norm(2) → prelu(per channel) → softplus",
    ]


@pytest.mark.parametrize("chain", [_start().norm(2).chain(), _start().layer_norm(2).chain()], ids=str)
def test_norms_of_a_half_precision_model_are_widened_with_their_value(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's autocast computes both in float32, parameters included; without it PyTorch refuses narrower ones."""
    tensors = _tensors(chain, torch.float16, torch.float16)
    ours = autocasted(chain, tensors, "cuda", torch.float16)
    assert isinstance(ours, Chain), ours
    x, weight, bias, *parameters = tensors
    value = torch.nn.functional.conv2d(x, weight, bias, padding=1).float()
    wide = [x, weight, bias, *(p.float() for p in parameters)]
    expected = reference.apply(chain, chain.steps[0], [value], wide)
    torch.testing.assert_close(reference.evaluate(ours, tensors), expected, rtol=0, atol=0)
    monkeypatch.setattr(reference, "parameter", lambda vector, _: vector)  # mutant
    with pytest.raises(RuntimeError, match="mixed dtype"):
        reference.evaluate(ours, tensors)


@pytest.mark.parametrize(
    ("table", "name", "fault"),
    [
        ("POINTWISE", "prelu", lambda x, weight: torch.prelu(x, weight.reshape(-1))),
        ("NORMS", "group_norm", lambda x, step, weight, bias, *_: torch.group_norm(x, step.groups, weight, None)),
    ],
    ids=["prelu without its cast", "a bias left out"],
)
def test_a_fault_is_seen(table: str, name: str, fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = _start().norm(2).op("prelu", "channel").chain()
    test_values_and_gradients_are_eagers_on_the_cpu(chain, "float32", torch.bfloat16)
    tensors = _tensors(chain, torch.float32, torch.float32)
    ours = autocasted(chain, tensors, "cpu", torch.bfloat16)
    right = reference.evaluate(ours, tensors)  # type: ignore[arg-type]
    monkeypatch.setitem(getattr(reference, table), name, fault)
    with pytest.raises((RuntimeError, AssertionError)):
        torch.testing.assert_close(reference.evaluate(ours, tensors), right)  # type: ignore[arg-type]


class _InPlace(nn.Module):
    """`change` works in place on a norm's result of 16 bits, beside a float32 tensor."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.change = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.norm(self.conv(x)), x[:, :1, 1:-1, 1:-1].expand(-1, 4, -1, -1))


IN_PLACE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "inside a chain": (lambda h, other: h.add_(other.contiguous()).relu_(), "add(tensor) → to bfloat16 → relu"),
    "a product inside": (lambda h, other: h.mul_(other.contiguous()).sigmoid(), "mul(tensor) → to bfloat16 → sigmoid"),
    "on its result": (lambda h, other: h.add_(other.cumsum(1)[:, :, :1]).abs(), "group_norm(2)"),
    "a power": (lambda h, other: h.pow_(2).mul_(other[:, :1, :1, :1].contiguous()), "pow(2)"),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.usefixtures("fresh_dynamo", "refused_chains_too")
def test_what_is_changed_in_place_keeps_its_dtype(name: str) -> None:
    """`h += residual` gives 16 bits where h has them and the residual is float32, as after CUDA's group_norm."""
    change, expected = IN_PLACE[name]
    model, x = _InPlace(change), torch.randn(2, 3, 6, 7) + 0.3

    def step() -> list[Tensor]:
        model.zero_grad()
        with autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    eager = step()
    with autocast("cpu", torch.bfloat16):
        result = postlude.optimize(model, x, verify=False)
    assert expected in str(result.sites[0].chain)
    for ours, theirs in zip(step(), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.usefixtures("fresh_dynamo", "refused_chains_too")
def test_a_dtype_that_promotion_changed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the functional operator on a chain's result, without the cast back."""
    monkeypatch.setattr(tidy, "_keep_dtype", lambda *_: None)
    with pytest.raises(AssertionError):
        test_what_is_changed_in_place_keeps_its_dtype("on its result")
