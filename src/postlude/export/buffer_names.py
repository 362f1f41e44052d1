"""Names for the buffers of a program and for its kernels, and the purpose of each launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from postlude.plan.program import Buffer, Call, CudaCall, Descriptor, KernelCall, Program, TorchCall, buffers_in

# A kernel parameter's name in a launcher, if its own name without p_ or d_ is not clear enough.
_BY_KERNEL = {
    ("pack_weight_kernel", "p_out"): "packed_weight",
    ("pack_phases_kernel", "p_out"): "packed_weight",
    ("finish_kernel", "p_y"): "result",
    ("channels_kernel", "p_y"): "result",
    ("rows_kernel", "p_y"): "result",
    ("finish_moments_kernel", "p_out"): "result",
    ("add_channels_kernel", "p_out"): "totals",
    ("weight_gradient_kernel", "p_parts"): "parts",
}
_BY_PARAMETER = {
    "p_high": "high",
    "p_low": "low",
    "p_y": "value",
    "p_mean": "means",
    "p_m2": "squares",
    "p_count": "counts",
    "p_group_mean": "mean",
    "p_group_rstd": "rstd",
    "p_dx": "grad_value",
    "p_a": "mean_a",
    "p_b": "mean_b",
}
KERNELS = {
    "unfold_input_kernel": "unfold_kernel",
    "pack_phases_kernel": "pack_weight_kernel",
    "convolve_phases_kernel": "convolve_kernel",
    "convolve_boxes_kernel": "convolve_kernel",
    "combine_moments_kernel": "combine_kernel",
    "combine_batch_kernel": "combine_kernel",
    "rows_kernel": "layer_norm_kernel",
    "combine_batch_sums_kernel": "combine_sums_kernel",
    "packed_gradient_kernel": "gradient_kernel",
    "rows_gradient_kernel": "gradient_kernel",
}
# Names in a backward pass of kernels that the forward pass has as well.
BACKWARD = {
    "largest_kernel": "largest_kernel_2",
    "pack_input_kernel": "pack_gradient_kernel",
    "pack_residues_kernel": "pack_gradient_by_residue_kernel",
    "pack_weight_kernel": "pack_flipped_kernel",
    "convolve_kernel": "input_gradient_kernel",
    "convolve_boxes_kernel": "input_gradient_kernel",
    "pack_rows_kernel": "pack_turned_kernel",
    "linear_kernel": "gradient_product_kernel",
}
_REMARKS = {
    "largest_kernel": "The largest magnitude of each channel, which decides its scale.",
    "unfold_input_kernel": "im2col of the innermost taps: a row holds the channels of several of them.",
    "pack_weight_kernel": "The weight as a matrix of output channels by taps and input channels.",
    "pack_phases_kernel": "The weight as a matrix for each phase of the strides.",
    "pack_residues_kernel": "Rows of channels, those of one residue modulo the strides together.",
    "convolve_kernel": "Implicit GEMM: every tap is a shifted read of the packed input.",
    "convolve_boxes_kernel": "Implicit GEMM: every tap is a box of the input where it lies.",
    "convolve_phases_kernel": "Implicit GEMM, one for each phase of the strides.",
    "pack_rows_kernel": "A matrix in two planes, each row scaled by a power of two of its own.",
    "linear_kernel": "Matrix product of rows by rows, with the steps that follow it.",
    "moments_kernel": "Mean and squared deviations of each chunk of a channel.",
    "combine_moments_kernel": "The moments of tiles to those of groups, by Chan's formula.",
    "combine_batch_kernel": "The moments of tiles to those of channels, by Chan's formula.",
    "finish_kernel": "The norm and all that is left, in one reading and one writing.",
    "channels_kernel": "All steps that are left, of all channels of a position.",
    "pools_kernel": "All steps that are left, on each window of the pool.",
    "rows_kernel": "All steps that are left, with the norm of each row, in one pass.",
    "finish_moments_kernel": "From the moments of tiles to the result.",
    "sums_kernel": "Sums over each channel for the gradient of the norm.",
    "combine_sums_kernel": "Their means over groups.",
    "combine_batch_sums_kernel": "Their means over the batch.",
    "gradient_kernel": "All steps backwards, down to the convolution's result.",
    "packed_gradient_kernel": "All steps backwards, packed for both products below.",
    "rows_gradient_kernel": "All steps backwards.",
    "add_channels_kernel": "Partial sums added up: the gradients of vectors.",
    "weight_gradient_kernel": "Split-K product over all positions: the weight's gradient in parts.",
    "add_splits_kernel": "The parts added up, in the weight's own order.",
    "combined_moments_kernel": "The moments of tiles to those of channels.",
    "moments_gradient_kernel": "Gradients of the norm's tensors, and the table of the convolution's.",
    "few_channels_moments": "The convolution, of which only the moments of tiles are kept.",
    "few_channels_store": "The convolution, by tensor cores on tiles that are staged in shared memory.",
    "few_channels_finish": "The norm and the mean of everything, from the moments.",
    "few_channels_gradient": "The convolution again, and the gradients of weight and input.",
}


def remark(call: KernelCall | CudaCall) -> str | None:
    if isinstance(call, KernelCall) and call.kernel == "pack_input_kernel":
        constants = dict(call.constants)
        planes = " in two fp16 planes" if constants["PLANES"] == 2 else ""
        return f"Rows of channels with a halo of zeros{planes}."
    return _REMARKS.get(call.kernel)


def words_for(program: Program, slots: Mapping[int, str], taken: Iterable[str] = ()) -> dict[int, str]:
    """A name for each buffer, by its number: the slot's, or one for what the first kernel writes to it."""
    words = {buffer.number: slots[slot] for slot, buffer in enumerate(program.given)}
    used = {*words.values(), *taken}

    def name(buffer: Buffer, word: str) -> None:
        if buffer.number not in words:
            words[buffer.number] = next(w for w in (word, *(f"{word}_{n}" for n in range(2, 999))) if w not in used)
            used.add(words[buffer.number])

    if program.gradient is not None:
        name(program.gradient, "grad")
    for slot, found in enumerate(program.gradients):
        if found is not None:
            name(found, f"grad_{slots[slot]}")
    first: dict[int, tuple[Buffer, str]] = {}
    for call in (*program.forward, *program.backward):
        for buffer, word in _named(call):
            first.setdefault(buffer.number, (buffer, word))
    if program.result.number not in first:
        name(program.result, "result")
    for buffer, word in first.values():
        name(buffer, word)
    for call in (*program.forward, *program.backward):
        results = call.results if isinstance(call, TorchCall) else ()
        for buffer in (*buffers_in(call), *(result for result in results if result is not None)):
            name(buffer, "value" if len(buffer.shape) > 2 else "vector")
    return words


def _named(call: Call) -> Iterable[tuple[Buffer, str]]:
    if isinstance(call, CudaCall):
        return zip(call.arguments, call.parameters)
    if not isinstance(call, KernelCall):
        return []
    found = []
    for word, value in zip(call.parameters, call.arguments):
        buffer = value.buffer if isinstance(value, Descriptor) else value
        if isinstance(buffer, Buffer) and word[:2] in ("p_", "d_"):
            plain = _BY_KERNEL.get((call.kernel, word)) or _BY_PARAMETER.get(word) or word[2:]
            found.append((buffer, plain))
    return found
