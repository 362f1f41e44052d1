"""What a chain's operators take besides tensors, and the program that it stands for."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude import encoded
from postlude.chain import CLASSES, Chain
from postlude.plan import Plan, Problem, Settings
from postlude.plan.problem import Spec, spec_of
from postlude.plan.program import Buffer, Program
from postlude.run.apart import apart
from postlude.run.chain_run import Training
from postlude.run.execute import Runner, prepared
from postlude.run.ledger import Ledger, SiteProblem
from postlude.stages.program import Given, inference_program


@dataclass(frozen=True)
class OperatorCall:
    """What `chain_forward` and `chain_backward` take besides tensors."""

    chain: Chain
    problem: Problem  # without shapes if sizes are not known before the call
    given: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]  # shape, strides and dtype of each slot
    needs: tuple[bool, ...]  # the slots that need a gradient
    made: tuple[Buffer, ...] = ()  # the result, and what else is returned for the backward pass
    found: tuple[Buffer, ...] = ()  # the gradients' memory

    @functools.cached_property
    def tensors(self) -> Given:
        return tuple((shape, strides, getattr(torch, dtype)) for shape, strides, dtype in self.given)


# For chains whose sizes are symbols: the site's name and the model's ledger.
_JUDGES: dict[tuple[Chain, Settings], tuple[str, Callable[[], Ledger | None]]] = {}
_CLASSES = {**CLASSES, **{cls.__name__: cls for cls in (OperatorCall, Problem, Spec, Buffer)}}


@functools.lru_cache(maxsize=4096)
def read(text: str) -> OperatorCall:
    call = encoded.loads(text, _CLASSES)
    assert isinstance(call, OperatorCall)
    return call


@functools.lru_cache(maxsize=4096)
def program_of(text: str) -> Program | None:
    """The program of a call, from its text."""
    call = read(text)
    return apart(program_for, call) if call.made else None


def program_for(call: OperatorCall) -> Program | None:
    """The program of a call; None if sizes are not known or no kernel of ours runs."""
    if not call.problem.tensors:
        return None
    outcome, runner = prepared(call.chain, call.problem)
    if isinstance(runner, Training):
        return runner.program_for(call.tensors, call.needs)
    if not isinstance(outcome, Plan) or not outcome.has_program:
        return None
    return inference_program(outcome, call.chain, call.tensors)


def judged_by(chain: Chain, settings: Settings, name: str, ledger: Ledger) -> None:
    """Registers the ledger that checks plans of a chain whose sizes are symbols, before their first use.

    Other plans are checked before compilation. If two models have the same chain, the later model's ledger is used.
    """
    _JUDGES[chain, settings] = name, weakref.ref(ledger)


def runner_for(call: OperatorCall, tensors: Sequence[Tensor]) -> Runner:
    """The function that runs a call whose sizes are known only now."""
    problem = call.problem
    if not problem.tensors:
        problem = dataclasses.replace(problem, tensors=tuple(map(spec_of, tensors)))
        name, ledger = _JUDGES.get((call.chain, problem.settings), ("", lambda: None))
        if (known := ledger()) is not None:
            asked = SiteProblem(name, call.chain, problem, call.needs)
            return (known.foreseen(asked) or apart(known.foresee, asked)).runner
    return prepared(call.chain, problem)[1]


def is_made(buffer: Buffer, program: Program) -> bool:
    return buffer.number != program.result.number and all(buffer.number != given.number for given in program.given)
