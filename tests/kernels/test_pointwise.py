"""The words in fp32 on a dense grid, against float64.

The interpreter proves the formulas and their coefficients: its exp2 and rsqrt are exact to the last bit. On a card
both are approximations within 2 ulp, and a product may be fused with a sum: the tests marked `gpu` see that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import Builder
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.plan import Plan, lower, problem_of
from postlude.run.compose import HEADER, compose
from postlude.words import Setting
from tracing import run_plan

pytestmark = pytest.mark.filterwarnings("ignore")
CHAINS: dict[str, Chain] = {
    word: Builder(2).op(word, **settings).chain()
    for word, settings in (
        *((word, dict[str, Setting]()) for word in ("mish", "tanh", "sigmoid", "silu", "hardswish", "hardsigmoid")),
        ("gelu", {"approximate": "none"}),
        ("softplus", {"beta": 1.0, "threshold": 20.0}),
    )
}
SETTINGS = {"softplus": ", 1.0, 20.0"}
BY_EXP = ("mish", "sigmoid", "silu", "softplus")
KERNEL = """
@triton.jit
def word_kernel(p_x, p_y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_y + o, {word}(tl.load(p_x + o){settings}))
"""


def grid() -> Tensor:
    tiny = torch.logspace(-30, -3, 109, dtype=torch.float64)
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 88.0, -88.0, 1e30, -1e30])
    dense = torch.linspace(-30, 30, 8192 - 2 * len(tiny) - len(ends), dtype=torch.float64)
    return torch.cat([dense, tiny, -tiny, ends]).float()


def by_interpreter(word: str, right: str = "", wrong: str = "") -> Tensor:
    from postlude.kernels.triton import pointwise

    source = Path(str(pointwise.__file__)).read_text()
    assert right in source
    text = (source.replace(right, wrong) if right else source) + KERNEL.format(
        word=word, settings=SETTINGS.get(word, "")
    )
    x = grid()
    y = torch.full_like(x, torch.nan)
    compose(HEADER + text)["word_kernel"][(1,)](x, y, len(x))
    return y


def truth_of(word: str, x: Tensor) -> Tensor:
    if word != "gelu":
        return reference.evaluate(CHAINS[word], [x.double().view(1, 1, 64, -1)]).flatten()
    exact = 0.5 * x.double() * torch.erfc(-x.double() / 2.0**0.5)  # 1 + erf(x) cancels, in float64 too
    return torch.where(x == -torch.inf, torch.nan, exact)


def off(word: str, y: Tensor, more: float = 0.0) -> str:
    """What is wrong with it, in words; `more` ulp than the formula's own are allowed.

    x·log2(e) is rounded before it is an exponent, which makes |x| ulp of exp(x), as tl.exp does: where the result is
    small. gelu is exact to 1e-7, or 4 ulp where it is large.
    """
    x = grid()
    # Every other element of memory: PyTorch's vectorised code on the CPU has other infinities than its scalar code.
    theirs = reference.evaluate(CHAINS[word], [torch.stack((x, x), -1)[:, 0].view(1, 1, 64, -1)]).flatten()
    truth, y = truth_of(word, x), y.cpu()
    for name in ("isnan", "isposinf", "isneginf"):
        if not torch.equal(getattr(torch, name)(y), getattr(torch, name)(theirs)):
            return name
    ulp = 2.0 ** (torch.frexp(truth).exponent.clamp_min(-125) - 24).double()
    ulps = 4 + more + (x.double().clamp(-88, 0).abs() if word in BY_EXP else 0.0)
    most = torch.clamp_min(ulps * ulp, (1 + more) * 1e-7 if word == "gelu" else 0.0)
    error = (y.double() - truth).abs()
    is_far = truth.isfinite() & (error > most)
    return f"{float((error / ulp)[is_far].max()):.3g} ulp at {x[is_far].tolist()[:3]}" if is_far.any() else ""


@pytest.mark.parametrize("word", CHAINS)
@pytest.mark.interpret
def test_is_float64s_to_a_few_ulp(word: str) -> None:
    assert off(word, by_interpreter(word)) == ""


MUTANTS = [
    # a word, the right text, the wrong one: a coefficient's fourth digit, mostly
    ("gelu", "0.4591820386092508", "0.4592820386092508"),
    ("gelu", "0.05257823487811219", "0.05267823487811219"),
    ("gelu", "x > 0, 1.0 - tail", "x > 1e-3, 1.0 - tail"),
    ("tanh", "0.3333331614173581", "0.3334331614173581"),
    ("tanh", "0.0017441400599688974", "0.0017541400599688974"),
    ("tanh", "tl.where(x < 0, -large, large)", "large"),
    ("tanh", "tl.abs(x) < 0.75", "tl.abs(x) < 1.2"),
    ("tanh", "tl.abs(x) < 0.75", "tl.abs(x) < 0.1"),
    ("tanh", "exp(2.0 * tl.abs", "exp(2.001 * tl.abs"),
    ("sigmoid", "1.4426950408889634", "1.4427950408889634"),
    ("softplus", "1.4426950408889634", "1.4427950408889634"),
    ("silu", "    return root * root", "    return root * root * 1.000001"),
    ("mish", "tl.minimum(x, 20.0)", "x"),
    ("mish", "tl.minimum(x, 20.0)", "tl.minimum(x, 5.0)"),
    ("hardswish", "1.0 / 6.0", "0.1667"),
    ("hardsigmoid", "1.0 / 6.0", "0.1667"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2]}")
@pytest.mark.interpret
def test_a_wrong_word_is_seen_to_fail(mutant: tuple[str, str, str]) -> None:
    assert off(mutant[0], by_interpreter(*mutant)) != ""


@pytest.mark.parametrize("word", CHAINS)
@pytest.mark.gpu
def test_a_real_card_is_as_near(word: str) -> None:
    """Through a chain, with what the card's exp2 and rsqrt, squared, may add."""
    tensors = [grid().view(1, 1, 64, -1).cuda()]
    plan = lower(CHAINS[word], problem_of(tensors), hardware.machine_for("cuda"), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    with torch.no_grad():
        assert off(word, run_plan(plan, tensors).flatten(), more=6.0) == ""
