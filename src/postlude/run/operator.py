"""`torch.ops.postlude.chain`: a chain as one registered operator, for compilers that trace through the graph.

Inference only. Eager calls do not come through here: the registered boundary costs them tens of microseconds.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from postlude import reference
from postlude.chain import Chain
from postlude.run.execute import run_chain


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> Chain:
    return Chain.loads(text)


@torch.library.custom_op("postlude::chain", mutates_args=())
def chain(tensors: list[Tensor], text: str, precision: str) -> Tensor:
    result = run_chain(_parse(text), tensors, precision)
    # An operator must not return one of its arguments; a chain of no-ops could.
    return result.clone() if any(result is tensor for tensor in tensors) else result


@chain.register_fake
def _(tensors: list[Tensor], text: str, precision: str) -> Tensor:  # noqa: ARG001
    return reference.evaluate(_parse(text), tensors)
