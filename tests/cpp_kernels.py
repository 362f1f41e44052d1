"""The CPU's kernels for tests: many in one file, so that the compiler reads PyTorch's headers once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from postlude import hardware
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.plan import Plan, lower, problem_of
from postlude.plan.program import CppCall
from postlude.run import cpp

needs_compiler = pytest.mark.skipif(
    hardware.cpp_compiler() is None or hardware.cpu_capability() not in hardware.VECTORS, reason="needs a C++ compiler"
)
MACHINE = hardware.Machine("cpu", 2, 16 << 20, False, hardware.has_onednn(), compiles_cpp=True)
_COMMAND = cpp.cpp_command
Library = dict[tuple[str, str], Callable[..., None]]


def compiled_plan(chain: Chain, tensors: Sequence[Tensor]) -> Plan:
    plan = lower(chain, problem_of(tensors), MACHINE, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.is_compiled, plan
    return plan


def calls_of(chain: Chain, shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32) -> list[CppCall]:
    with torch.no_grad():
        plan = compiled_plan(chain, tensors_for(chain, shape, dtype, "cpu", 0, "normal", layout))
    return [call for call in plan.program.forward if isinstance(call, CppCall)]


def built(calls: Sequence[CppCall], edit: Callable[[str], str] = lambda text: text) -> Library:
    """The kernels of these calls from one file, by text and name."""
    unique = list(dict.fromkeys((call.text, call.kernel) for call in calls))
    parts = []
    for number, (text, kernel) in enumerate(unique):
        renamed = re.sub(r"\bKernel\b", f"Kernel{number}", edit(text))
        parts.append(re.sub(rf"\b{kernel}\(void", f"{kernel}{number}(void", renamed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp, "cpp_command", quick_command)
        # `_loaded` as it is, with its cache: one library, several names.
        return {key: cpp._loaded("\n".join(parts), f"{key[1]}{number}") for number, key in enumerate(unique)}


def quick_command() -> tuple[str, ...]:
    return tuple("-Og" if flag == "-O3" else flag for flag in _COMMAND())


def serve(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    """From now on kernels come from there."""
    monkeypatch.setattr(cpp, "kernel_of", lambda call: library[call.text, call.kernel])
