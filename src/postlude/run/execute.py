"""One call of a chain: by its plan, or through PyTorch's own operators where the plan is a refusal."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from postlude import hardware, reference
from postlude.chain import Chain
from postlude.errors import PrecisionError
from postlude.plan import PRECISIONS, Plan, Problem, Refusal, lower, problem_of
from postlude.run import cpu, gpu

EXECUTORS: dict[str, Callable[[Plan, Sequence[Tensor]], Tensor]] = {"cpu": cpu.execute, "cuda": gpu.execute}


def execute(chain: Chain, outcome: Plan | Refusal, tensors: Sequence[Tensor]) -> Tensor:
    """The chain's result; its dtypes are already part of the chain, so autocast is off inside."""
    device = tensors[0].device.type
    with _without_autocast(device):
        if isinstance(outcome, Refusal):
            return reference.evaluate(chain, tensors)
        return EXECUTORS[device](outcome, tensors)


@functools.lru_cache(maxsize=4096)
def outcome_for(chain: Chain, problem: Problem) -> Plan | Refusal:
    return lower(chain, problem, hardware.machine_for(problem.device))


def run_chain(chain: Chain, tensors: Sequence[Tensor], precision: str = "auto") -> Tensor:
    """Plans (once per problem) and runs."""
    return execute(chain, outcome_for(chain, problem_of(tensors, precision)), tensors)


def check_precision(precision: str, device: str) -> None:
    """Raises in one sentence where a precision does not exist or cannot be had on a device."""
    if precision not in PRECISIONS:
        raise PrecisionError(f"precision {precision!r} is unknown; use one of {', '.join(PRECISIONS)}.")
    if precision == "tf32" and device != "cuda":
        raise PrecisionError("precision 'tf32' exists only on NVIDIA GPUs; use 'auto' or 'fp32' on the CPU.")
    if device == "cuda" and precision not in ("auto", hardware.default_fp32_precision()):
        raise PrecisionError(
            f"precision {precision!r} is not what PyTorch's convolutions are set to on this GPU; set "
            f"torch.backends.cudnn.conv.fp32_precision accordingly or use 'auto'."
        )


def _without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
