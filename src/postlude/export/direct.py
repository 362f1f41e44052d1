"""The launcher's text for the convolution of few channels in CUDA C++, of which only moments are kept."""

from __future__ import annotations

from postlude.export.cuda import cuda_text
from postlude.export.parts import Draft, launcher_sizes, plus
from postlude.plan.few_channels import WIDTH, FewChannels, Geometry, shared_bytes
from postlude.plan.gemm import volume_for

_COMPILE = '''\
@functools.cache
def moments_kernel(device: int) -> Any:
    """CUDA C++, compiled once for each card by the NVRTC that torch brings along."""
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(SOURCE, "few_channels_moments")
        kernel.set_shared_memory_config(SHARED_BYTES)
    return kernel
'''


def direct(draft: Draft, settings: FewChannels) -> None:
    """Leaves `means`, `squares` and `counts`, and `tiles`, their number for each sample."""
    plan = draft.plan
    conv = plan.chain.producer
    assert conv is not None
    volume = volume_for(conv, plan.input.shape[2:], 1)
    shape = Geometry(conv.in_channels, conv.out_channels, volume.kernel, volume.padding, False, plan.input.dtype)
    shared = shared_bytes(settings, shape)
    draft.cuda = f'SOURCE = r"""\n{cuda_text(settings, shape, conv.has_bias, shared)}"""\n\n'
    draft.helpers["moments_kernel"] = _COMPILE
    draft.imports |= {"CUDA_HOME"}
    draft.constants["TILE"] = f"TILE = ({settings.depth}, {settings.height}, {WIDTH})  # outputs that a block computes"
    draft.constant("SHARED_BYTES", shared, "shared memory of a block")
    draft.shared_bytes = shared
    _launch(draft, settings, shape, volume.padding)


def _launch(draft: Draft, settings: FewChannels, shape: Geometry, padding: tuple[int, int, int]) -> None:
    plan = draft.plan
    conv = plan.chain.producer
    assert conv is not None
    dims = plan.chain.dims
    sizes = launcher_sizes(draft)
    outs = [plus(size, 2 * p - k + 1) if size != "1" else "1" for size, p, k in zip(sizes, padding, shape.kernel)]
    draft.add(f"out = ({', '.join(outs)})")
    draft.add("deep, high, wide = (triton.cdiv(size, part) for size, part in zip(out, TILE))")
    draft.add("tiles = deep * high * wide")
    if conv.transposed:
        axes_of = tuple(range(2, 2 + dims))
        draft.add(f"weight = weight.transpose(0, 1).flip{axes_of}.contiguous()  # gathers now")
    channels = conv.out_channels
    draft.add(f"means = torch.empty(batch, {channels}, tiles, dtype=torch.float32, device=x.device)")
    draft.add("squares = torch.empty_like(means)")
    draft.add("counts = torch.empty(batch, tiles, dtype=torch.float32, device=x.device)")
    bias = "bias, " if conv.has_bias else ""
    draft.add(f"tensors = (x, weight, {bias}means, squares, counts)")
    draft.add(f"sizes = (batch * tiles, tiles, high * wide, wide, *out, {', '.join(sizes)})")
    draft.add("card = torch.cuda.get_device_properties(x.device)")
    draft.add(f"blocks = min(batch * tiles, {settings.blocks} * card.multi_processor_count)")
    draft.add("kernel = moments_kernel(x.device.index)")
    draft.add(
        f"grid, block = (blocks, {shape.channel_blocks}, 1), ({settings.warps * 32}, 1, 1)",
        "kernel(grid, block, (*tensors, *sizes, 0), SHARED_BYTES)",
    )
    draft.launches += 1
