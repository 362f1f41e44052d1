"""One call of a chain: by its plan, or by PyTorch's own operators if it was refused."""

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
    """A function that runs the chain, with everything prepared that stays the same from call to call."""
    if isinstance(outcome, Refusal):
        return functools.partial(_through_pytorch, chain, outcome.library_tf32)
    if not outcome.has_program:
        return functools.partial(cpu.execute, outcome)
    return (Training if outcome.trains else Inference)(outcome, chain)


def call(runner: Runner, tensors: Sequence[Tensor]) -> Tensor:
    """The chain's result. Autocast is off inside, because the chain has its casts as steps."""
    device = tensors[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # PyTorch raises for "meta", which has none
        with torch.autocast(device, enabled=False):
            return runner(tensors)
    return runner(tensors)


def is_transformed() -> bool:
    """Whether forward-mode AD or torch.func is active: kernels would read plain values and lose tangents or batches."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def call_plain(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    """The chain operator by operator, which works with all of PyTorch's transformations."""
    return call(functools.partial(_through_pytorch, chain, None), tensors)


def execute(chain: Chain, outcome: Plan | Refusal, tensors: Sequence[Tensor]) -> Tensor:
    """Prepares an outcome and runs it once."""
    return call(prepare(chain, outcome), tensors)


@functools.lru_cache(maxsize=4096)
def prepared(chain: Chain, problem: Problem) -> tuple[Plan | Refusal, Runner]:
    """The outcome for a problem and the function that runs it; cached per problem."""
    outcome = lower(chain, problem, hardware.machine_for(problem.place))
    return outcome, prepare(chain, outcome)


def check_precision(precision: str, device: str) -> None:
    """Raises, with one sentence, if a precision does not exist or a device does not support it."""
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
