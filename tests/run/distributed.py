"""One process of two: a network under DDP and FSDP2, with chains as operators; prints how far its gradients are off.

python tests/run/distributed.py RANK PORT
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch._inductor.compile_fx as inductor
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import interpreter
import postlude
from gpu_plans import planned_for_a_gpu
from run.test_operator_pair import Net

# How the model is wrapped, whether it is optimized before or after that, and who runs the rest.
CASES = (
    ("ddp", "after", "inductor"),
    ("fsdp", "before", "inductor"),
)


def main(rank: int, port: int) -> None:
    interpreter.make_fast()
    inductor.compile_fx = lambda graph, inputs, **_: lookup_backend("aot_eager")(graph, inputs)  # type: ignore[assignment]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 512  # type: ignore[attr-defined]  # several buckets: Dynamo splits there
    for case in CASES:
        torch.compiler.reset()
        print(*case, worst_gradient(rank, *case), flush=True)
    dist.barrier()  # the other process may still need this one
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process that unloads it ("terminate called without …")


def worst_gradient(rank: int, wrap: str, order: str, rest: str) -> float:
    torch.manual_seed(0)
    plain, halves = Net().double(), torch.randn(2, 2, 3, 4, 4, dtype=torch.float64)
    model = copy.deepcopy(plain)

    def optimized(module: nn.Module) -> None:
        result = postlude.optimize(module, halves[rank], rest=rest, verify=False)
        assert sum(site.is_fused for site in result.sites) == 3, result
        assert (len(result.backend.captured) > 1) == (module is not model), result.backend.captured

    with planned_for_a_gpu():
        if order == "before":
            optimized(model)
        if wrap == "ddp":
            whole: nn.Module = DistributedDataParallel(model, bucket_cap_mb=0.001)
        else:
            whole = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))  # type: ignore[assignment]
        if order == "after":
            optimized(whole)
        for _ in range(2):  # buckets are laid out anew after the first step
            whole.zero_grad()
            whole(halves[rank]).square().sum().backward()
    expected = averaged(plain, halves)
    return max(relative(full(p.grad), truth) for p, truth in zip(model.parameters(), expected, strict=True))


def averaged(model: nn.Module, halves: Tensor) -> list[Tensor]:
    """What the processes' gradients come to together, by the plain model."""
    found = []
    for half in halves:
        twin = copy.deepcopy(model)
        twin(half).square().sum().backward()
        found.append([p.grad for p in twin.parameters()])
    return [(one + other) / 2 for one, other in zip(*found)]  # type: ignore[operator]


def full(grad: Tensor | None) -> Tensor:
    assert grad is not None
    whole: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole


def relative(found: Tensor, truth: Tensor) -> float:
    """A bias that a norm cancels has no gradient but rounding."""
    return float((found - truth).abs().max() / (truth.abs().max() + 1e-6))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
