"""What a call costs besides time: peak memory, memory saved for the backward pass, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]


def peak_bytes(call: Call, device: str) -> int:
    """The peak memory of one call, beyond what was allocated before it."""
    return _peak_on_gpu(call) if device == "cuda" else _peak_on_cpu(call)


def _peak_on_gpu(call: Call) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def profiled(activity: torch.profiler.ProfilerActivity, has_memory: bool = False) -> torch.profiler.profile:
    """A profile of one activity. Without `acc_events` PyTorch 2.11 warns about cycles, of which there is one."""
    return torch.profiler.profile(activities=[activity], profile_memory=has_memory, acc_events=True)


def _peak_on_cpu(call: Call) -> int:
    """The same from the profiler's record of PyTorch's allocator, which does not include a library's own scratch."""
    with profiled(torch.profiler.ProfilerActivity.CPU, has_memory=True) as found:
        call()
    events = found.profiler.kineto_results.events()
    return highest(event.nbytes() for event in events if event.name() == "[memory]")


def highest(changes: Iterable[int]) -> int:
    """The highest running sum of allocations (positive) and releases (negative)."""
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most


def saved_bytes(call: Call, known: Iterable[Tensor]) -> int:
    """Memory that autograd keeps after `call`, beyond the tensors in `known` (inputs and parameters)."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in known}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in theirs:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = call()
        del kept
    return sum(sizes.values())


def launches(call: Call) -> int:
    """Kernels that one call launches on a GPU; copies and fills count as launches."""
    with profiled(torch.profiler.ProfilerActivity.CUDA) as found:
        call()
        torch.cuda.synchronize()
    return count_kernels(found.events() or ())


def count_kernels(events: Iterable[Any]) -> int:
    """The launches among the profiler's events. Named ranges, such as torch.compile's, do not count."""
    on_device = (event for event in events if event.device_type == torch.profiler.DeviceType.CUDA)
    return sum(not getattr(event, "is_user_annotation", False) for event in on_device)
