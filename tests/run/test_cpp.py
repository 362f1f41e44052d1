"""The CPU's kernels in C++: right by the rule, the same bits whatever the threads, and compiled whole or not at all."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import BY_NAME, WORDS, Builder, conv
from cpp_kernels import MACHINE, Library, built, calls_of, compiled_plan, needs_compiler, quick_command, serve
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.emit_cpp import emit_cpp
from postlude.plan import Plan, lower, problem_of
from postlude.plan.passes import CppPasses
from postlude.run import cpp
from postlude.run.execute import Runner, call, prepare, prepared
from postlude.run.site import Site
from postlude.steps import forward, pass_slots

LAYOUTS = ("contiguous", "channels_last")
GROUP_NORM = Builder(2).norm(2).chain()
CASES = {
    **{name: (BY_NAME[name].chain, BY_NAME[name].shape) for name in (
        "norm relu without conv",
        "conv norm residual relu",
        "conv row norm row",
        "value used twice",
        "conv per-channel and scalar",
    )},
    "turned": (Builder(2).op("mul", "row").norm(None).op("leaky_relu", slope=0.01).chain(), (2, 21, 9, 11)),
    "moments": (Builder(2).op("silu").norm(2).op("mul", "channel").reduce("sum", "space").chain(), (3, 6, 9, 11)),
    "means": (Builder(3).op("relu").reduce("mean", "space").chain(), (2, 5, 4, 3, 7)),
    "few channels": (BY_NAME["23 small"].chain, BY_NAME["23 small"].shape),
    "few channels, means": (BY_NAME["conv relu mean over space"].chain, BY_NAME["conv relu mean over space"].shape),
    "few channels, affine words": (
        BY_NAME["conv tanh norm affine words pool"].chain,
        BY_NAME["conv tanh norm affine words pool"].shape,
    ),
    "few channels, wide taps": (
        Builder(2, conv(2, (2, 13), 5, dilation=2, padding=3)).op("mul", "row").norm(1).reduce("sum", "sample").chain(),
        (2, 2, 20, 31),
    ),
}  # fmt: skip
# Of more channels than our own convolution takes. PyTorch leaves oneDNN for a batch of one.
BY_ONEDNN = {
    "stored": (Builder(3, conv(3, (5, 6))).norm(3).op("add", "full").chain(), (5, 5, 6, 7, 5)),
    "reduced": (Builder(3, conv(3, (5, 6))).op("relu").norm(3).reduce("mean", "sample").chain(), (5, 5, 6, 7, 5)),
    "one sample": (Builder(3, conv(3, (5, 6), transposed=True)).norm(3).op("add", "full").chain(), (1, 5, 6, 7, 5)),
    # Sums that began with the bias had too large an error here.
    "one sample, long sums": (Builder(3, conv(3, (32, 8), padding=1)).norm(None).op("relu").chain(), (1, 32, 9, 9, 9)),
    "one sample, reduced": (Builder(3, conv(3, (5, 6))).norm(3).reduce("mean", "sample").chain(), (1, 5, 6, 7, 5)),
}
NARROW = ("norm relu without conv", "few channels")


@pytest.fixture(scope="module")
def library() -> Library:
    calls = [one for case in CASES.values() for layout in LAYOUTS for one in calls_of(*case, layout)]
    calls += [one for name in NARROW for one in calls_of(*CASES[name], "contiguous", torch.bfloat16)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("postlude.plan.cpu.WORTH_A_CALL", 0)
        calls += [one for case in BY_ONEDNN.values() for layout in LAYOUTS for one in calls_of(*case, layout)]
    return built(calls + [one for layout in LAYOUTS for one in calls_of(GROUP_NORM, (2, 4, 8, 8), layout)])


_RUNNERS: dict[object, Runner] = {}  # for the length of a test: planning takes longer than running


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(f"{__name__}._RUNNERS", {})
    serve(monkeypatch, library)


def fused(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        problem = problem_of(tensors)
        if (chain, problem) not in _RUNNERS:
            _RUNNERS[chain, problem] = prepare(chain, compiled_plan(chain, tensors))
        return call(_RUNNERS[chain, problem], tensors)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("served", "poisoned_memory")
def test_is_right_by_the_rule(name: str, layout: str) -> None:
    chain, shape = CASES[name]
    verdict = verify_chain(fused, chain, chain_points(chain, shape, torch.float32, "cpu", layout=layout))
    assert verdict.right, verdict


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["norm relu without conv", "turned"])
@pytest.mark.usefixtures("served", "poisoned_memory")
def test_results_that_go_past_the_caches_are_right(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and samples of odd lengths begin between the places that such a store can go to."""
    monkeypatch.setattr("postlude.plan.cpu.STREAMED", 0)
    chain, shape = CASES[name]
    tensors = tensors_for(chain, shape, torch.float32, "cpu", 0, "normal", layout)
    with torch.no_grad():
        assert compiled_plan(chain, tensors).by == CppPasses(streams=True)
    verdict = verify_chain(fused, chain, chain_points(chain, shape, torch.float32, "cpu", layout=layout))
    assert verdict.right, verdict


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BY_ONEDNN)
@pytest.mark.usefixtures("served", "poisoned_memory")
def test_what_follows_onednn_is_right(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.cpu.WORTH_A_CALL", 0)
    chain, shape = BY_ONEDNN[name]
    tensors = tensors_for(chain, shape, torch.float32, "cpu", 0, "normal", layout)
    with torch.no_grad():
        planned = compiled_plan(chain, tensors)
        assert (planned.library, planned.own) == ("direct" if shape[0] == 1 else "eager", None)
        assert fused(chain, tensors).stride() == reference.evaluate(chain, tensors).stride()
    verdict = verify_chain(fused, chain, chain_points(chain, shape, torch.float32, "cpu", layout=layout))
    assert verdict.right, verdict


@needs_compiler
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.usefixtures("served")
def test_is_right_in_bfloat16(name: str) -> None:
    chain, shape = CASES[name]
    verdict = verify_chain(fused, chain, chain_points(chain, shape, torch.bfloat16, "cpu"))
    assert verdict.right, verdict


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("served")
def test_dtype_shape_and_strides_are_pytorchs(name: str, layout: str) -> None:
    chain, shape = CASES[name]
    tensors = tensors_for(chain, shape, torch.float32, "cpu", 0, "normal", layout)
    before = [tensor.clone() for tensor in tensors]
    ours, theirs = fused(chain, tensors), reference.evaluate(chain, tensors)
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    for now, then in zip(tensors, before):
        torch.testing.assert_close(now, then, rtol=0, atol=0)  # the caller's tensors are left alone


def _far_from_zero(channels: int, layout: str) -> list[Tensor]:
    """An offset of a thousand deviations, and a border of another value where each sample begins."""
    x = torch.randn(2, channels, 96, 96) + 1000.0
    x[:, :, :1] = 996.0
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    return [x.contiguous(memory_format=form), torch.randn(channels), torch.randn(channels)]


def _worst(tensors: list[Tensor]) -> float:
    x, weight, bias = (tensor.double() for tensor in tensors)
    return float((fused(GROUP_NORM, tensors) - F.group_norm(x, 2, weight, bias)).abs().max())


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [4, 12, 34])
@pytest.mark.usefixtures("served")
def test_means_far_from_zero_and_from_each_other_cost_no_digits(channels: int, layout: str) -> None:
    tensors = _far_from_zero(channels, layout)
    x, weight, bias = tensors
    plain = F.group_norm(x.contiguous(), 2, weight, bias) - F.group_norm(
        x.double(), 2, *map(Tensor.double, tensors[1:])
    )
    assert _worst(tensors) < max(1e-4, float(plain.abs().max()))


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("served")
def test_bits_do_not_depend_on_the_threads(layout: str) -> None:
    tensors = _far_from_zero(12, layout)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(fused(GROUP_NORM, tensors))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.usefixtures("served")
def test_what_is_not_finite_stays_in_its_group(layout: str, value: float) -> None:
    tensors = _far_from_zero(4, layout)
    tensors[0][1, 2, 50, 7] = value
    ours = fused(GROUP_NORM, tensors)
    assert torch.equal(ours.isnan(), F.group_norm(tensors[0], 2, *tensors[1:]).isnan())


def _with_headers(folder: Path, edits: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cpp._folder(), folder)
    for path in folder.glob("*.h"):
        text = path.read_text()
        for right, wrong in edits.items():
            text = text.replace(right, wrong)
        path.write_text(text)
    monkeypatch.setattr(cpp, "_folder", lambda: folder)
    monkeypatch.setattr(cpp, "_headers", lambda: (str(folder),))


# Squares around zero; the other sign in an output of a pair; lanes behind a row's end that are added up.
WRONG = {
    "static_cast<float>(centre)": "0.0f",
    "k[j] = V::loadu(&own.centre[at])": "k[j] = V(0.0f)",
    "constexpr double FAR = 4;": "constexpr double FAR = 1e30;",
    "- m[c][3][j]": "+ m[c][3][j]",
    "const V d = y[c][j] & masks[j];": "const V d = y[c][j];",
}


@needs_compiler
def test_wrong_kernels_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = "".join(text for _, text in cpp._headers())
    assert all(right in texts for right in WRONG)
    _with_headers(tmp_path / "cpp", WRONG, monkeypatch)
    seen = ("few channels", "few channels, means")
    calls = [one for layout in LAYOUTS for one in calls_of(GROUP_NORM, (2, 4, 8, 8), layout)]
    calls += [one for name in seen for one in calls_of(*CASES[name], "contiguous")]
    cpp._loaded.cache_clear()
    monkeypatch.setattr(f"{__name__}._RUNNERS", {})
    serve(monkeypatch, built(calls))
    cpp._loaded.cache_clear()
    assert all(_worst(_far_from_zero(4, layout)) > 1e-3 for layout in LAYOUTS)
    for name in seen:
        chain, shape = CASES[name]
        assert verify_chain(fused, chain, chain_points(chain, shape, torch.float32, "cpu")).outcome == "wrong"


_WORDS = """
extern "C" void words(void* const* p, const double* n, int) {{
  const auto at = Row<Operands<{types}>>(p + 2, 0, 0, 1);
  const float* x = static_cast<const float*>(p[0]);
  for (int64_t i = 0; i < int64_t(n[1]); i += LANES)
    switch (int(n[0])) {{ {cases} }}
}}
"""


@needs_compiler
def test_every_word_is_pytorchs() -> None:
    """On a dense grid, with what is not finite; operands are numbers for a row."""
    numbers = [torch.tensor([value]) for value in (0.3, 0.7, -1.2, 0.4)]
    x = torch.cat([torch.linspace(-25, 25, 4091), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
    structs, cases = [], []
    for number, case in enumerate(WORDS):
        slots = pass_slots(case.chain, 1, 1)
        structs.append(emit_cpp(forward(case.chain, "before", 1, 1), f"Word{number}", slots))
        run = f"Word{number}::run(at, LANES, read_vector(x + i))"
        cases.append(f"case {number}: write_vector(static_cast<float*>(p[1]) + i, {run}); break;")
    types = ", ".join(["Operand<float, ONE>"] * 4)
    text = '#include "operands.h"\n' + "\n".join(structs) + _WORDS.format(types=types, cases="\n".join(cases))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp, "cpp_command", quick_command)
        words = cpp._loaded(text, "words")
    for number, case in enumerate(WORDS):
        y, given = torch.empty_like(x), numbers[: len(case.chain.roles) - 1]
        pointers = (cpp.ctypes.c_void_p * 6)(*[tensor.data_ptr() for tensor in (x, y, *numbers)])
        words(pointers, (cpp.ctypes.c_double * 2)(number, len(x)), 1)
        value, others = x.view(1, 1, 1, -1), [one.view(1, 1, 1, 1) for one in given]
        eager = reference.evaluate(case.chain, [value, *others]).flatten()
        truth = reference.evaluate(case.chain, [value, *others], dtype=torch.float64).flatten()
        assert torch.equal(y.isnan(), truth.isnan()), case.name
        finite = truth.isfinite() & (truth.abs() < 3e38)
        error, allowed = (y - truth).abs()[finite], 4 * (eager - truth).abs()[finite]
        # Tails of the normal distribution are within 5e-8, and powers of e within an ulp for each e, as on a GPU.
        allowed += (1e-6 + 3e-7 * x[finite].abs().clamp_max(100.0)) * truth[finite].abs() + 1e-7 * (
            case.chain.steps[0].op == "gelu"
        )  # type: ignore[union-attr]
        assert bool((error <= allowed).all()), (case.name, x[finite][(error - allowed).argmax()])


def _compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that is this script; the cache is the folder's."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(folder / "cache"))
    return folder / "cache"


_OUT = 'while [ "$1" != -o ]; do shift; done; out=$2'


@pytest.mark.skipif(hardware.cpu_capability() not in hardware.VECTORS, reason="needs AVX2")
@pytest.mark.parametrize("script", [f"{_OUT}; printf half > $out; exit 1", f"{_OUT}; printf half > $out; kill -9 $$"])
def test_a_failing_or_killed_compiler_leaves_nothing(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _compiler(tmp_path, script, monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cpp.tempfile, "tempdir", None)
    with pytest.raises(cpp.CompilerError, match="exit status"):
        cpp.library_for("no program")
    assert not cache.exists() or not list(cache.iterdir())
    assert not list(tmp_path.glob("postlude-*"))


@pytest.mark.skipif(hardware.cpu_capability() not in hardware.VECTORS, reason="needs AVX2")
def test_a_library_is_compiled_once_and_again_where_its_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _compiler(tmp_path, f"{_OUT}; echo x >> {tmp_path}/count; printf whole > $out", monkeypatch)
    for _ in range(2):
        assert cpp.library_for("a") == b"whole"
    assert (tmp_path / "count").read_text() == "x\n"
    (kept,) = cache.glob("cpu-*.so")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert cpp.library_for("a") == b"whole"
    assert (tmp_path / "count").read_text() == "x\nx\n"


@pytest.mark.skipif(hardware.cpu_capability() not in hardware.VECTORS, reason="needs AVX2")
def test_several_that_compile_the_same_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _compiler(tmp_path, f"{_OUT}; sleep 0.1; printf whole > $out", monkeypatch)
    found: list[bytes] = []
    workers = [threading.Thread(target=lambda: found.append(cpp.library_for("a"))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [b"whole"] * 4
    assert len(list(cache.iterdir())) == 1


@pytest.mark.skipif(hardware.cpu_capability() not in hardware.VECTORS, reason="needs AVX2")
@pytest.mark.usefixtures("small_values_fuse")
def test_a_chain_whose_compiler_fails_is_pytorchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _compiler(tmp_path, "echo broken >&2; exit 3", monkeypatch)
    monkeypatch.setenv("POSTLUDE_STRICT", "0")
    monkeypatch.setattr(hardware, "machine_for", lambda _: MACHINE)
    prepared.cache_clear()
    tensors = tensors_for(GROUP_NORM, (2, 4, 64, 64), torch.float32, "cpu", 0, "normal", "contiguous")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "postlude"):
        result = Site("norm", GROUP_NORM)(*tensors)
    assert torch.equal(result, reference.evaluate(GROUP_NORM, tensors))
    assert "exit status 3" in caplog.text


def test_without_a_compiler_plans_are_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_for(GROUP_NORM, (2, 4, 64, 64), torch.float32, "cpu", 0, "normal", "contiguous")
    with torch.no_grad():
        plan = lower(GROUP_NORM, problem_of(tensors), hardware.Machine("cpu", 2, 16 << 20, False), even_if_slower=True)
    assert isinstance(plan, Plan)
    assert not plan.is_compiled
    monkeypatch.setitem(os.environ, "POSTLUDE_CPP", "0")
    assert hardware.why_no_cpp() == "POSTLUDE_CPP=0 is set"
    monkeypatch.delenv("POSTLUDE_CPP")
    monkeypatch.setattr(hardware, "cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(hardware, "cpp_compiler", lambda: None)
    assert hardware.why_no_cpp() == "there is no C++ compiler"
