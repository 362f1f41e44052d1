"""Bound launches: the driver is given what Triton's own path gives it, in fewer steps on the host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from postlude.run import bound, triton_versions
from postlude.run.bound import Bound
from postlude.run.launch import Launch
from postlude.run.triton_versions import VERSIONS, Version, version

triton = pytest.importorskip("triton")
HERE = Path(__file__).parent / "recorded"
KERNELS = ["largest_kernel", "pack_input_kernel", "pack_weight_kernel", "convolve_kernel", "combine_moments_kernel"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What record.py prints: a process of its own, because the stand-in takes the driver's place for all of it."""
    folder = tmp_path_factory.mktemp("driver")
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang"))))
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, f"-I{include}", str(HERE / "libcuda.c"), *library], check=True)
    folders = {name: str(folder) for name in ("TRITON_LIBCUDA_PATH", "POSTLUDE_CACHE_DIR")}
    # What is compiled against the stand-in must not stay in Triton's cache.
    env = {**os.environ, **folders, "TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_INTERPRET": "0"}
    env["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", str(HERE / "record.py")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def differing(rows: list[dict[str, Any]]) -> set[str]:
    return {row["kernel"] for row in rows if row["theirs"] != row["ours"]}


@pytest.mark.compile
@pytest.mark.skipif(version() is None, reason="nothing is bound in this Triton")
def test_the_driver_is_given_the_same_bytes_as_by_triton(recorded: Any) -> None:
    hopper, ampere = recorded["launches"][""]["90"], recorded["launches"][""]["80"]
    assert {row["kernel"] for row in hopper} == {*KERNELS, "finish_kernel"}
    assert not differing(hopper)
    assert not differing(ampere)
    assert {row["maps"] for row in hopper if row["kernel"] == "convolve_kernel"} == {3}
    assert [(row["descriptors"], row["maps"]) for row in ampere] == [(3, 0), (3, 0)]


@pytest.mark.compile
@pytest.mark.skipif(version() is None, reason="nothing is bound in this Triton")
def test_a_launch_that_is_bound_otherwise_is_noticed(recorded: Any) -> None:
    found = recorded["launches"]
    assert differing(found["one map for all addresses"]["90"]) == {"convolve_kernel"}
    assert differing(found["one map for all addresses"]["80"]) == {"convolve_kernel"}
    assert differing(found["another grid"]["90"]) == {*KERNELS, "finish_kernel"}
    assert differing(found["other numbers"]["90"]) == {*KERNELS, "finish_kernel"}


@pytest.mark.compile
@pytest.mark.skipif(version() is None, reason="nothing is bound in this Triton")
def test_a_kernel_stays_loaded_while_its_launch_is_bound(recorded: Any) -> None:
    ours, mutant = recorded["held"]
    assert ours
    assert not mutant


class Compiled:
    """A stand-in for a compiled Triton kernel with what a launch reads."""

    function, packed_metadata, metadata = 7, (4, 1, 0), SimpleNamespace(tensordesc_meta=None)
    launch_cooperative_grid, launch_pdl, arg_annotations, kernel_signature = False, True, ["a"], b"s"

    def __init__(self, launcher: Any, scratch: int = 0, kinds: tuple[str, ...] = ("*fp32", "*fp32")) -> None:
        self.run = self
        self.src = SimpleNamespace(signature=dict(enumerate(kinds)))
        self.launch, self.global_scratch_size, self.profile_scratch_size = launcher, scratch, 0


def use_version(monkeypatch: pytest.MonkeyPatch, number: str) -> list[Any]:
    """Makes this Triton be taken for another one; returns the list of what its launcher is called with."""
    seen: list[Any] = []
    monkeypatch.setattr(triton, "__version__", number)
    utils = SimpleNamespace(launch=lambda *given: seen.append(given))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    return seen


def bind(kernel: Any, after: tuple[Any, ...] = ()) -> Bound:
    found = bound.bound(kernel, (2, 1, 1), after)
    assert found is not None
    return found


def test_a_launch_that_is_bound_takes_a_stream_and_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers' parameters in their order, as Triton's `CudaLauncher` passes them."""
    seen: list[Any] = []
    use_version(monkeypatch, "3.6.0")
    with pytest.raises(TypeError, match="15 given"):  # grid, stream, function, eight of the launch, two pointers
        bind(Compiled(seen.append))(99, 16, 32)
    for number in ("3.7.1", "3.8.0", "3.9.0+git1"):
        seen = use_version(monkeypatch, number)
        kernel = Compiled(None)
        bind(kernel, (5, True))(99, 16, 32)
        nothing = (None, None, None, None)  # hooks and scratch memory
        arguments = (["a"], b"s", (16, 32, 5, True))
        assert seen == [(2, 1, 1, 99, 7, False, True, (4, 1, 0), kernel, *nothing, *arguments)], number


@pytest.mark.parametrize("number", VERSIONS)
def test_what_needs_more_than_pointers_is_left_to_triton(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_version(monkeypatch, number)
    sanitized, late = Compiled([].append), Compiled([].append, kinds=("*fp32", "tensordesc<fp16[8, 8]>"))
    assert bound.bound(sanitized, (2, 1, 1), ()) is not None
    sanitized.gsan_enabled = True  # type: ignore[attr-defined]
    assert bound.bound(sanitized, (2, 1, 1), ()) is None
    assert bound.bound(late, (2, 1, 1), ()) is None  # our kernels take descriptors first
    assert bound.bound(Compiled([].append, scratch=1), (2, 1, 1), ()) is None


@pytest.mark.parametrize("number", ["3.5.1", "3.10.0", "3.60.0", "4.0.0", "3"])
def test_an_unknown_version_launches_by_itself(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_version(monkeypatch, number)
    assert version() is None
    assert bound.bound(Compiled([].append), (2, 1, 1), ()) is None


def made_by(monkeypatch: pytest.MonkeyPatch, make: Any) -> Version:
    monkeypatch.setattr(triton_versions, "_make_tensordesc_arg", lambda: make)
    return VERSIONS["3.6"]


def test_maps_of_descriptors_are_kept_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    maps = bound._Maps(made_by(monkeypatch, lambda descriptor, meta: made.append(meta) or [descriptor.base]), 5)

    class Descriptor:
        base = torch.zeros(4)

    assert maps(Descriptor) is maps(Descriptor)
    other = type("Other", (), {"base": torch.zeros(4)})
    assert maps(other) is not maps(Descriptor)
    assert made == [5, 5]


def test_a_descriptor_without_a_map_does_not_keep_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Hopper Triton passes the tensor instead of a map: every step's operands stayed alive."""

    def made(descriptor: Any, meta: Any) -> list[Any]:
        assert meta is None
        return [descriptor.base, 4, 16, 16, 1, False]

    maps = bound._Maps(made_by(monkeypatch, made), None)
    descriptor = type("Descriptor", (), {"base": torch.zeros(4, 16)})
    alive, address = weakref.ref(descriptor.base), descriptor.base.data_ptr()
    for _ in range(2):
        assert maps(descriptor) == [address, 4, 16, 16, 1, False]
    descriptor.base = None
    assert alive() is None


@pytest.mark.skipif(version() is None, reason="descriptors are bound in known versions only")
def test_tritons_arguments_for_a_descriptor_without_a_map() -> None:
    """What the test above takes for granted."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = torch.zeros(4, 16)
    known = version()
    assert known is not None
    found = known.expanded(TensorDescriptor(base, [4, 16], [16, 1], [4, 16]), None)
    assert found[0] is base
    assert found[1:5] == [4, 16, 16, 1]


def test_triton_is_told_whether_to_fuse_multiplications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or 3.9 warns whoever uses Postlude. The answer is Triton's own, which the user may set."""
    asked: list[Any] = []
    kernel = SimpleNamespace(warmup=lambda **options: asked.append(options), device_caches={0: None})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("postlude.run.launch.find_again", lambda kernel, device: None)
    one = Launch(kernel, (1,), (), {}, warps=8)
    one.compile(())
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    one.compile(())
    assert asked == [{"grid": (1,), "num_warps": 8, "enable_fp_fusion": fuses} for fuses in (True, False)]
