"""Specialised kernels, shared bodies put in place, against the library's own, bit for bit, by Triton's interpreter."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BY_NAME
from export.exporting import as_text, specialised
from machines import SMALL_H200
from postlude.check import tensors_for
from postlude.export.device.library import library
from postlude.export.syntax import rules
from postlude.export.syntax.source import text_of
from postlude.export.syntax.specialise import Inline
from postlude.plan import Plan, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.passes import Tile
from postlude.plan.program import Word
from postlude.run.compose import HEADER, compose
from postlude.run.launch import Launch
from tracing import run_plan, storing_raw

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("packed_product")]
CARD = SMALL_H200
SMALL = {"contiguous": Tile(128, 0, 64, 2), "channels_last": Tile(64, 8, 32, 2)}
TILES = frozenset({"BLOCK_M", "BLOCK_C", "BLOCK_K", "BLOCK_S", "BLOCK_W", "BLOCK_PARTS", "STAGES"})
PASSES = {"61 small": {"before": "relu({0})"}}  # what a composed function does, where that is one call


@dataclasses.dataclass(frozen=True)
class Compared:
    kernel: str
    parameters: tuple[str, ...]
    equal: bool
    error: str = ""  # of a wrong kernel that cannot be run at all


def compared_launches(
    monkeypatch: pytest.MonkeyPatch, name: str, layout: str, dtype: torch.dtype, numbers: bool, width: int | None = None
) -> list[Compared]:
    """Runs a chain on the GPU path, each launch once as it is and once specialised."""
    from triton.runtime.errors import InterpreterError

    case = BY_NAME[name]
    shape = (2, *case.shape[1:2], *[size - 2 for size in case.shape[2:]])
    tensors = tensors_for(case.chain, shape, dtype, "cpu", 0, "normal", layout)
    found: list[Compared] = []
    once = Launch.__call__

    def both(self: Launch, *pointers: Any) -> None:
        copies = _copies(pointers)
        once(self, *pointers)
        kernel = self.kernel.fn.__name__
        try:
            parameters = _run_specialised(self, copies, PASSES.get(name, {}), numbers)
        except InterpreterError as error:
            found.append(Compared(kernel, (), False, str(error)))
            return
        found.append(Compared(kernel, parameters, all(_bits(a) == _bits(b) for a, b in zip(pointers, copies))))

    with torch.no_grad():
        plan = lower_for_gpu(case.chain, problem_of(tensors), CARD, even_if_slower=True)
        assert isinstance(plan, Plan), plan
        tile = SMALL["channels_last" if plan.tile is not None and plan.tile.block_c else "contiguous"]
        plan = dataclasses.replace(storing_raw(plan), by=tile)
        if plan.own is not None:
            own = dataclasses.replace(plan.own, rows=32)
            if width is not None:
                own = dataclasses.replace(own, volume=dataclasses.replace(own.volume, width=width))
            plan = dataclasses.replace(plan, own=own)
        monkeypatch.setattr(Launch, "__call__", both)
        run_plan(plan, tensors)
    return found


def _run_specialised(launch: Launch, pointers: Sequence[Any], calls: dict[str, str], numbers: bool) -> tuple[str, ...]:
    names = launch.kernel.arg_names
    values = dict(zip(names, (*pointers, *launch.numbers, *launch.constants.values())))
    constants = {name: _constant(value, calls) for name, value in launch.constants.items()}
    if numbers:  # run-time sizes as well, and no tile sizes left over
        sizes = values.items()
        constants |= {name: value for name, value in sizes if name not in constants and type(value) is int}
    function = library()[launch.kernel.fn.__name__]
    made = as_text(specialised(function, constants, keep=frozenset() if numbers else TILES & constants.keys()))
    programs = [value.fn for value in launch.constants.values() if hasattr(value, "fn")]
    texts = {name: text_of(helper) for name, helper in library().items()}
    helpers = _helpers(made.text, {**texts, **{fn.__name__: inspect.getsource(fn) for fn in programs}})
    space = compose(HEADER + "\n\n".join([*helpers.values(), made.text]))
    space[launch.kernel.fn.__name__][launch.grid](*[values[p] for p in made.parameters], num_warps=launch.warps)
    return made.parameters


def _constant(value: Any, calls: dict[str, str]) -> object:
    if hasattr(value, "fn"):
        name = value.fn.__name__
        return Inline(calls[name]) if name in calls else Word(name)
    return (
        value if isinstance(value, int | float | str) else Word(f"tl.{'float64' if '64' in str(value) else 'float32'}")
    )


def _helpers(text: str, sources: dict[str, str]) -> dict[str, str]:
    """The device functions that a text calls, those that they call first."""
    found: dict[str, str] = {}
    for name in re.findall(r"(?<![\w.])(\w+)\(", text):
        if name in sources and not re.search(rf"def {name}\b", text):
            found = {**_helpers(sources[name], sources), name: sources[name], **found}
    return found


def _copies(pointers: Sequence[Any]) -> list[Any]:
    """Tensors that are the same stay the same."""
    bases = {id(p): getattr(p, "base", p) for p in pointers}
    clones = {base.data_ptr(): base.clone(memory_format=torch.preserve_format) for base in bases.values()}
    return [
        clones[p.data_ptr()] if isinstance(p, Tensor) else dataclasses.replace(p, base=clones[p.base.data_ptr()])
        for p in pointers
    ]


def _bits(pointer: Any) -> bytes:
    tensor = getattr(pointer, "base", pointer)
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(
    ("layout", "numbers"), [("contiguous", True), ("channels_last", False)], ids=["all decided", "tiles kept"]
)
@pytest.mark.parametrize("name", ["61 small", "conv norm residual relu"])
def test_gives_the_same_bits(name: str, layout: str, numbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = compared_launches(monkeypatch, name, layout, torch.float32, numbers)
    assert [launch for launch in launches if not launch.equal] == []
    kernels = {launch.kernel for launch in launches}
    assert {"largest_kernel", "pack_input_kernel", "pack_weight_kernel", "convolve_kernel"} <= kernels
    assert "finish_kernel" in kernels


@pytest.mark.parametrize("name", ["23 small", "conv relu mean over space", "norm relu without conv"])
def test_gives_the_same_bits_where_moments_are_all_or_in_a_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = compared_launches(monkeypatch, name, "contiguous", torch.float32, numbers=False)
    assert [launch for launch in launches if not launch.equal] == []
    assert {launch.kernel for launch in launches} & {"finish_moments_kernel", "moments_kernel"}


@pytest.mark.parametrize("width", [1, 4])
def test_gives_the_same_bits_in_half_precision(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = compared_launches(monkeypatch, "61 small", "channels_last", torch.float16, False, width)
    assert [launch for launch in launches if not launch.equal] == []
    (convolve,) = [launch for launch in launches if launch.kernel == "convolve_kernel"]
    assert {"a0", "p_unscale", "d_x_low", "NEIGHBOURS"}.isdisjoint(convolve.parameters)


def test_a_wrong_branch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: of a decided `if` with an `else`, the branch that is not taken is kept."""
    honest: Callable[..., Any] = rules.taken
    monkeypatch.setattr(rules, "taken", lambda node, truth: honest(node, truth ^ bool(node.orelse)))
    launches = compared_launches(monkeypatch, "61 small", "contiguous", torch.float32, numbers=False)
    equal = {launch.kernel: launch.equal for launch in launches}
    assert not equal["pack_input_kernel"]
    assert not equal["convolve_kernel"]
    assert not equal["finish_kernel"]
    assert equal["combine_moments_kernel"]  # which has no `else`
