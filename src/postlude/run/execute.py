"""One call of a chain: by its plan, or through PyTorch's own operators where the plan is a refusal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from postlude import hardware, reference
from postlude.chain import Chain
from postlude.errors import PostludeError, PrecisionError
from postlude.plan import CONVOLUTIONS, PRECISIONS, Plan, Problem, Refusal, lower
from postlude.run import cpu
from postlude.run.chain_run import Inference, Training
from postlude.stages.library import convolve_by_pytorch

Runner = Callable[[Sequence[Tensor]], Tensor]


def prepare(chain: Chain, outcome: Plan | Refusal) -> Runner:
    """What runs the chain, with all that stays the same from call to call made ready."""
    if isinstance(outcome, Refusal):
        return functools.partial(_through_pytorch, chain, outcome.library_tf32)
    if not outcome.has_program:
        return functools.partial(cpu.execute, outcome)
    runner = (Training if outcome.trains else Inference)(outcome, chain)
    return functools.partial(_with_numbers_brought, runner) if "one" in chain.roles else runner


def _with_numbers_brought(runner: Runner, tensors: Sequence[Tensor]) -> Tensor:
    """A tensor of one number may lie on the CPU beside others on a GPU, whose kernels cannot read it there."""
    device = tensors[0].device
    return runner([t if t.device == device else t.to(device, non_blocking=True) for t in tensors])


def bare(runner: Runner) -> Runner:
    """Without what brings numbers to the device, for tensors that are all there."""
    is_wrapped = isinstance(runner, functools.partial) and runner.func is _with_numbers_brought
    return runner.args[0] if is_wrapped else runner  # type: ignore[attr-defined]


def call(runner: Runner, tensors: Sequence[Tensor]) -> Tensor:
    """The chain's result; its dtypes are already part of the chain, so autocast is off inside."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return runner(tensors)
    return runner(tensors)


def is_transformed() -> bool:
    """True inside of forward-mode derivatives and torch.func: kernels would read values alone, and lose the rest."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def call_plain(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    """The chain operator by operator, which every transformation of PyTorch's goes through."""
    return call(functools.partial(_through_pytorch, chain, None), tensors)


def execute(chain: Chain, outcome: Plan | Refusal, tensors: Sequence[Tensor]) -> Tensor:
    """One call of an outcome that nobody keeps."""
    return call(prepare(chain, outcome), tensors)


@functools.lru_cache(maxsize=4096)
def prepared(chain: Chain, problem: Problem) -> tuple[Plan | Refusal, Runner]:
    """Planned and made ready once per problem."""
    outcome = lower(chain, problem, hardware.machine_for(problem.place))
    return outcome, prepare(chain, outcome)


def check_precision(precision: str, device: str) -> None:
    """Raises in one sentence where a precision does not exist or cannot be had on a device."""
    if precision not in PRECISIONS:
        raise PrecisionError(f"precision {precision!r} is unknown; use one of {', '.join(PRECISIONS)}.")
    if precision == "tf32" and device != "cuda":
        raise PrecisionError("precision 'tf32' exists only on NVIDIA GPUs; use 'auto' or 'fp32' on the CPU.")


def check_convolution(convolution: str) -> None:
    if convolution not in CONVOLUTIONS:
        words = " or ".join(map(repr, CONVOLUTIONS))
        raise PostludeError(f"convolution={convolution!r} is unknown; use {words}.")


def _through_pytorch(chain: Chain, tf32: bool | None, tensors: Sequence[Tensor]) -> Tensor:
    conv = chain.producer
    if tf32 is None or conv is None:
        return reference.evaluate(chain, tensors, moves=True)
    bias = tensors[2] if conv.has_bias else None
    value = convolve_by_pytorch(conv, tensors[0], tensors[1], bias, tf32)
    return reference.continue_from(chain, 0, value, tensors, moves=True)
