"""Run a `Chain` on given tensors."""

from __future__ import annotations

from torch import Tensor

from postlude.chain import Chain
from postlude.errors import PostludeError
from postlude.run.execute import check_precision
from postlude.run.site import run_chain

__all__ = ["run"]


def run(chain: Chain, *tensors: Tensor, precision: str = "auto") -> Tensor:
    """Runs a chain on the given tensors. The result is not checked against float64.

    Args:
        chain: What to compute, for example `result.sites[0].chain`.
        *tensors: One tensor per slot, in the order of `chain.roles`, all on one device.
        precision: "fp32" or "tf32"; "auto" follows PyTorch's own switches.

    Returns:
        The chain's result, which is differentiable.
    """
    if not isinstance(chain, Chain):
        raise PostludeError(f"run needs a Chain, for example result.sites[0].chain, not {type(chain).__name__}.")
    if len(tensors) != len(chain.roles):
        raise PostludeError(
            f"this chain takes {len(chain.roles)} tensors ({', '.join(chain.roles)}), but {len(tensors)} were given."
        )
    for role, tensor in zip(chain.roles, tensors):
        if not isinstance(tensor, Tensor):
            raise PostludeError(f"this chain's {role} must be a tensor, not {type(tensor).__name__}.")
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise PostludeError(
            f"all tensors of a chain must be on one device, but they are on {', '.join(sorted(devices))}."
        )
    check_precision(precision, tensors[0].device.type)
    return run_chain(chain, tensors, precision)
