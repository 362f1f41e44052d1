"""The input of a strided convolution, divided by residue.

Along an axis, output p reads input p · stride + tap − padding. With tap = q · stride + residue, that is cell p + q of
the inputs whose place, padding included, has this residue modulo the stride. The inputs of one residue are packed
together, so every tap is a shifted read of one residue's inputs, as at stride 1, and nothing is multiplied by zeros.

The weight's gradient of such a convolution reads the same cells. The input's gradient of a strided transposed
convolution is such a convolution of the result's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from postlude.chain import Convolution


@dataclass(frozen=True)
class Axis:
    size: int  # of the input
    kernel: int
    stride: int
    padding: int

    @property
    def out(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def residues(self) -> int:
        """Residues that are packed. If the kernel is shorter than the stride, no tap reads the others."""
        return min(self.kernel, self.stride)

    def last_read(self, residue: int = 0) -> int:
        """The last cell that the last output reads. Residue 0 has the most taps."""
        return self.out - 1 + (self.kernel - 1 - residue) // self.stride

    def inputs(self, residue: int) -> range:
        """The cells that hold inputs, of those that are read."""
        first = -(-max(0, self.padding - residue) // self.stride)
        last = (self.padding + self.size - 1 - residue) // self.stride
        return range(first, min(last, self.last_read(residue)) + 1)

    @property
    def cells(self) -> int:
        """Cells of a packed row, the same for every residue.

        Enough for all outputs and for all inputs that are read. A read past the end of a row must meet the cells in
        front of the next row's first input.
        """
        least = self.out
        for residue in range(self.residues):
            inputs = self.inputs(residue)
            least = max(least, inputs.stop, self.last_read(residue) + 1 - inputs.start)
        return least


def has_residues(conv: Convolution) -> bool:
    """Whether our GEMM over an input packed by residue can run this convolution."""
    return (
        not conv.transposed
        and any(size != 1 for size in conv.stride)
        and conv.groups == 1
        and all(size == 1 for size in conv.dilation)
        and all(0 <= p < k for p, k in zip(conv.padding, conv.kernel))
    )
