"""The CPU's backward passes in C++: right by the rule in both layouts, the same bits whatever the threads, mutants."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, WORDS, Builder, conv
from cpp_kernels import MACHINE, Library, built, needs_compiler, quick_command, serve
from plan.test_lower import problem
from postlude import reference, reverse
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.emit_cpp import emit_cpp
from postlude.plan import Plan, Refusal, lower, problem_of
from postlude.plan.program import CppCall
from postlude.run import cpp
from postlude.run.execute import Runner, call, prepare
from postlude.steps import pass_slots

LAYOUTS = ("contiguous", "channels_last")
CASES = {
    "norm relu without conv": (BY_NAME["norm relu without conv"].chain, BY_NAME["norm relu without conv"].shape),
    "one group, steps on both sides": (
        Builder(2).op("mul", "channel").op("silu").norm(1).op("add", "row").op("gelu", approximate="none").chain(),
        (1, 6, 9, 11),
    ),
    "instance_norm, turned": (
        Builder(2).op("mul", "row").norm(None).op("leaky_relu", slope=0.01).chain(),
        (3, 21, 9, 11),
    ),
    "conv with a bias, residual, number": (
        Builder(3, conv(3, (4, 6))).norm(3).op("mul", "one").op("add", "full").op("relu").chain(),
        (2, 4, 6, 7, 5),
    ),
    "more than a piece": (Builder(2).norm(2).op("tanh").chain(), (2, 4, 270, 271)),
    "reduced by PyTorch": (Builder(2).norm(2).op("silu").reduce("mean", "space").chain(), (2, 6, 9, 11)),
}


def trained(chain: Chain, tensors: Sequence[Tensor]) -> Plan:
    plan = lower(chain, problem_of(tensors), MACHINE, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.trains
    assert plan.is_compiled
    return plan


def leaves_for(chain: Chain, shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in tensors_for(chain, shape, dtype, "cpu", 0, "normal", layout)]


def calls_of(chain: Chain, shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32) -> list[CppCall]:
    program = trained(chain, leaves_for(chain, shape, layout, dtype)).program
    return [one for one in (*program.forward, *program.backward) if isinstance(one, CppCall)]


@pytest.fixture(scope="module")
def library() -> Library:
    calls = [one for case in CASES.values() for layout in LAYOUTS for one in calls_of(*case, layout)]
    return built(calls + calls_of(*CASES["norm relu without conv"], "contiguous", torch.bfloat16))


_RUNNERS: dict[object, Runner] = {}  # for the length of a test: planning takes longer than running


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(f"{__name__}._RUNNERS", {})
    serve(monkeypatch, library)


def fused(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]  # checks may ask for the result alone
    with torch.enable_grad():
        problem = problem_of(leaves)
        if (chain, problem) not in _RUNNERS:
            _RUNNERS[chain, problem] = prepare(chain, trained(chain, leaves))
    return call(_RUNNERS[chain, problem], tensors)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("served", "poisoned_memory")
def test_gradients_are_right_by_the_rule(name: str, layout: str) -> None:
    chain, shape = CASES[name]
    points = chain_points(chain, shape, torch.float32, "cpu", layout=layout)
    verdict = verify_chain(fused, chain, points, backward=True)
    assert verdict.right, verdict


@needs_compiler
@pytest.mark.usefixtures("served")
def test_gradients_are_right_in_bfloat16() -> None:
    chain, shape = CASES["norm relu without conv"]
    verdict = verify_chain(fused, chain, chain_points(chain, shape, torch.bfloat16, "cpu"), backward=True)
    assert verdict.right, verdict


def _gradients(chain: Chain, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    result = fused(chain, tensors)
    dy = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(result, tensors, dy)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["more than a piece", "one group, steps on both sides"])
@pytest.mark.usefixtures("served")
def test_bits_do_not_depend_on_the_threads(name: str, layout: str) -> None:
    chain, shape = CASES[name]
    tensors = leaves_for(chain, shape, layout)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(_gradients(chain, tensors))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other))


@needs_compiler
@pytest.mark.usefixtures("served")
def test_fewer_gradients_and_second_derivatives() -> None:
    chain, shape = CASES["norm relu without conv"]
    tensors = leaves_for(chain, shape, "contiguous")
    whole = _gradients(chain, tensors)
    (only,) = torch.autograd.grad(
        fused(chain, tensors), tensors[:1], torch.randn(shape, generator=torch.Generator().manual_seed(1))
    )
    assert torch.equal(only, whole[0])
    for run in (fused, reference.evaluate):
        (first,) = torch.autograd.grad(run(chain, tensors).square().sum(), tensors[:1], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), tensors[:1])
        if run is fused:
            ours = second
    torch.testing.assert_close(ours, second, rtol=1e-4, atol=1e-4 * float(second.abs().max()))


# x̂'s share left out of the sums of a group; the other side of a tie in a word's derivative.
MUTANTS = {
    "return {first / count, second / count};": "return {first / count, 0};",
    "return where(v <= V(0.0f), V(0.0f), g);": "return g;",
}


@needs_compiler
@pytest.mark.parametrize("right", MUTANTS)
def test_wrong_gradients_are_seen(right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cpp"
    shutil.copytree(cpp._folder(), folder)
    assert any(right in path.read_text() for path in folder.glob("*.h"))
    for path in folder.glob("*.h"):
        path.write_text(path.read_text().replace(right, MUTANTS[right]))
    monkeypatch.setattr(cpp, "_folder", lambda: folder)
    monkeypatch.setattr(cpp, "_headers", lambda: (str(folder),))
    chain, shape = CASES["norm relu without conv"]
    cpp._loaded.cache_clear()
    monkeypatch.setattr(f"{__name__}._RUNNERS", {})
    serve(monkeypatch, built(calls_of(chain, shape, "contiguous")))
    cpp._loaded.cache_clear()
    points = chain_points(chain, shape, torch.float32, "cpu")
    verdict = verify_chain(fused, chain, points, backward=True)
    assert verdict.outcome == "wrong"
    assert verdict.quantities, verdict  # judged by numbers, not for an error that it raised


_WORDS = """
extern "C" void words(void* const* p, const double* n, int) {{
  const auto at = Row<Operands<{types}>>(p + 3, 0, 0, 1);
  const auto *x = static_cast<const float*>(p[0]), *g = static_cast<const float*>(p[1]);
  const V none(0.0f);
  for (int64_t i = 0; i < int64_t(n[1]); i += LANES)
    switch (int(n[0])) {{ {cases} }}
}}
"""


@needs_compiler
def test_every_derivative_is_pytorchs() -> None:
    """On a dense grid with the kinks of all words; operands are numbers for a row."""
    numbers = [torch.tensor([value]) for value in (0.3, 0.7, -1.2, 0.4)]
    x = torch.cat([torch.linspace(-25, 25, 4089), torch.tensor([0.0, -0.0, 3.0, -3.0, 0.3, 1.0, -1.0])])
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    structs, cases = [], []
    for number, case in enumerate(WORDS):
        slots = pass_slots(case.chain, 1)
        structs.append(emit_cpp(reverse.gradient(case.chain, 1, frozenset()), f"Word{number}", slots))
        run = f"Word{number}::run(at, LANES, read_vector(x + i), read_vector(g + i), none, none, none, none)[0]"
        cases.append(f"case {number}: write_vector(static_cast<float*>(p[2]) + i, {run}); break;")
    types = ", ".join(["Operand<float, ONE>"] * 4)
    text = '#include "operands.h"\n#include "gradient.h"\n' + "\n".join(structs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp, "cpp_command", quick_command)
        words = cpp._loaded(text + _WORDS.format(types=types, cases="\n".join(cases)), "words")
    for number, case in enumerate(WORDS):
        y, given = torch.empty_like(x), numbers[: len(case.chain.roles) - 1]
        pointers = (cpp.ctypes.c_void_p * 7)(*[tensor.data_ptr() for tensor in (x, g, y, *numbers)])
        words(pointers, (cpp.ctypes.c_double * 2)(number, len(x)), 1)
        eager, truth = (_by_autograd(case.chain, x, given, g, dtype) for dtype in (torch.float32, torch.float64))
        assert torch.equal(y.isnan(), truth.isnan()), case.name
        finite = truth.isfinite() & (truth.abs() < 1e30)
        error, allowed = (y - truth).abs()[finite], 4 * (eager - truth).abs()[finite]
        allowed += (1e-6 + 3e-7 * x[finite].abs()) * truth[finite].abs() + 2e-6 * g[finite].abs()
        assert bool((error <= allowed).all()), (case.name, x[finite][(error - allowed).argmax()])


def _by_autograd(chain: Chain, x: Tensor, given: Sequence[Tensor], g: Tensor, dtype: torch.dtype) -> Tensor:
    value = x.to(dtype).view(1, 1, 1, -1).requires_grad_()
    others = [one.to(dtype).view(1, 1, 1, 1) for one in given]
    result = reference.evaluate(chain, [value, *others], dtype=dtype)
    if not result.requires_grad:  # of a word that passes nothing back
        return torch.zeros_like(x, dtype=dtype)
    (found,) = torch.autograd.grad(result, value, g.to(dtype).view(1, 1, 1, -1))
    return found.flatten()


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (Builder(2).op("relu").chain(), "there is no norm"),
        (Builder(2, conv(2, (4, 4))).norm(2).reduce("mean", "space").chain(), "reduction of moments"),
        (Builder(2).norm(2).op("relu").chain(), "too small to gain"),
    ],
)
def test_what_is_pytorchs_says_why(chain: Chain, reason: str) -> None:
    outcome = lower(chain, problem_of(leaves_for(chain, (2, 4, 6, 6), "contiguous")), MACHINE)
    assert isinstance(outcome, Refusal)
    assert reason in outcome.reasons[0]


@pytest.mark.parametrize(
    ("norm", "layout", "side", "is_fused"),
    [
        (4, "contiguous", 180, False),  # a value and its gradient fit in 16 MiB of caches
        (4, "contiguous", 260, True),
        (4, "channels_last", 180, True),
        (None, "contiguous", 180, True),
        (None, "contiguous", 60, False),  # below a MiB
    ],
)
def test_pytorch_trains_contiguous_group_norm_in_caches(
    norm: int | None, layout: str, side: int, is_fused: bool
) -> None:
    chain = Builder(2).norm(norm).op("relu").chain()
    found = lower(chain, problem(chain, (2, 16, side, side), layout, needs_grad=True), MACHINE)
    assert isinstance(found, Plan) == is_fused, str(found)
    if not is_fused:
        assert ("group_norm is as fast" in str(found)) == (norm == 4)
