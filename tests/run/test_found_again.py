"""Kernels of an earlier process are found without Triton's hash over itself; nothing else is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels import offline
from postlude.run import found_again
from postlude.run.cache import clear_cache
from postlude.run.triton_versions import version

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(version() is None, reason="this Triton looks up by itself"),
]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path / "postlude"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    offline.use_card(monkeypatch, 90)
    yield tmp_path / "postlude"
    monkeypatch.undo()
    found_again._triton.cache_clear()


def compile_now(block: int = 1024) -> Any:
    """Starts like a new process: only what is on disk is remembered."""
    from triton.compiler import ASTSource

    from postlude.kernels.triton.pack import largest_kernel

    constants = {"IS_CHANNELS_LAST": False, "HAS_SHORT_ROWS": False, "ALIGN": 1, "FLAGS_INF": False}
    constants |= {"BLOCK_S": block, "BLOCK_C": 1}
    numbers = dict.fromkeys(("C", "S", "CHUNKS", "TILES_PER_PROGRAM"), "i32")
    signature = {"p_x": "*fp32", "p_largest": "*i32", **numbers, **dict.fromkeys(constants, "constexpr")}
    src = ASTSource(largest_kernel, signature, constants)
    target = triton.runtime.driver.active.get_current_target()
    return found_again.compiled(src, target=target, options={"num_warps": 4})


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr("triton.compiler.compile", compile)


def test_a_later_process_neither_compiles_nor_hashes(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_now()
    forbid(monkeypatch)
    again = compile_now()
    assert again.hash == first.hash
    assert again.asm["ptx"] == first.asm["ptx"]
    assert again.metadata.shared == first.metadata.shared
    with pytest.raises(AssertionError, match="compiled again"):
        compile_now(block=2048)


@pytest.mark.parametrize("change", ["triton", "variable", "switch", "note", "cache", "file", "cleared"])
def test_anything_that_changed_is_compiled_again(change: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_now()
    notes = list(kept.glob("*.note"))
    assert len(notes) == 1
    if change == "triton":
        monkeypatch.setattr(found_again, "_triton", lambda: "another Triton")
    elif change == "variable":
        monkeypatch.setenv("TRITON_PTXAS_PATH", "/elsewhere")
        found_again._triton.cache_clear()
    elif change == "switch":
        monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
        found_again._triton.cache_clear()
    elif change == "note":
        notes[0].write_bytes(b"x" * 96)
    elif change == "file":
        (described,) = (kept.parent / "triton").glob("*/largest_kernel.json")
        described.unlink()
    elif change == "cache":
        monkeypatch.setenv("TRITON_CACHE_DIR", str(kept / "empty"))
        found_again._triton.cache_clear()
    else:
        assert clear_cache()[0] == 1
    forbid(monkeypatch)
    with pytest.raises(AssertionError, match="compiled again"):
        compile_now()


def test_a_kernel_is_asked_to_look_here_first(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from postlude.kernels.triton.pack import largest_kernel

    found_again.find_again(largest_kernel, 90)
    assert largest_kernel.compile is found_again.compiled
    monkeypatch.delattr(largest_kernel, "compile")
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "9.0.0")
        found_again.find_again(largest_kernel, 90)
    with monkeypatch.context() as patch:  # it may change what is compiled
        patch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", ""))
        found_again.find_again(largest_kernel, 90)
    assert not hasattr(largest_kernel, "compile")
    largest_kernel.device_caches.clear()
