"""What a file's kernels take, as text: exactly the shapes, dtypes and layouts that they were cut for."""

from __future__ import annotations

from collections.abc import Sequence

from postlude.cards import capability_of
from postlude.export.chain_text import ChainText
from postlude.export.layout import call
from postlude.plan.calls import Buffer


def is_plain(chains: Sequence[ChainText]) -> bool:
    """Whether all tensors are contiguous and of one dtype: then shapes are all there is to say of them."""
    given = [buffer for chain in chains for buffer in chain.given]
    return len({buffer.dtype for buffer in given}) == 1 and all(buffer.is_contiguous for buffer in given)


def shapes_text(chain: ChainText) -> str:
    """What the kernels of a chain take, one entry for each tensor."""
    parts = [str(buffer.shape) if is_plain([chain]) else _entry(buffer) for buffer in chain.given]
    return "\n".join(call("", parts if len(parts) > 1 else [f"{parts[0]},"], f"{chain.shapes_name} = ", indent=0))


def _entry(buffer: Buffer) -> str:
    return f"({buffer.shape}, {buffer.strides}, torch.{buffer.dtype})"


def fits_text(chains: Sequence[ChainText], architecture: str) -> str:
    """Everything else goes through PyTorch's operators."""
    if all(chain.plan.own is None for chain in chains):
        card = "capability >= (8, 0)"
    else:
        major, minor = capability_of(architecture)
        card = f"capability == ({major}, {minor})  # what the tiles were chosen for"
    lines = [
        "def fits(tensors: tuple[Tensor, ...], expected: tuple[Any, ...]) -> bool:",
        '    """Whether the kernels take these tensors; PyTorch\'s operators take all others."""',
        "    x = tensors[0]",
        '    if not x.is_cuda or torch.is_autocast_enabled("cuda"):',
        "        return False",
        "    capability = torch.cuda.get_device_capability(x.device)",
    ]
    checks = [card, "all(t.device == x.device for t in tensors)"]
    if all(is_plain([chain]) for chain in chains):
        dtypes = {chain.given[0].dtype for chain in chains}
        assert len(dtypes) == 1, "chains of several dtypes say so in their entries"
        checks[1:] = [
            f"all(t.dtype == torch.{dtypes.pop()} and t.device == x.device for t in tensors)",
            "all(t.shape == e and t.is_contiguous() for t, e in zip(tensors, expected))",
        ]
    else:
        checks.append("all((t.shape, t.stride(), t.dtype) == e for t, e in zip(tensors, expected))")
    if any(chain.is_aligned for chain in chains):
        checks.append("x.data_ptr() % 16 == 0  # as tensor descriptors ask")
    if any(chain.sources for chain in chains):
        checks.append("CUDA_HOME is not None  # torch's way to NVRTC asks for it")
    anded = [f"        {'and ' if number else ''}{check}" for number, check in enumerate(checks)]
    return "\n".join([*lines, "    return (", *anded, "    )", ""])
