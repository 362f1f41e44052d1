"""What each tap of a convolution reads of its input, added up over all outputs; and the gradient of those sums.

A sum over all positions of a convolution's result needs no more than this: it is the product of these sums with the
weight. Tap t reads the input position i for the output i·stride + t·dilation − padding of a transposed convolution, and
for the output i − t·dilation + padding of a plain one (of stride 1), if there is such an output. That holds axis by
axis, so a program adds slices up under the masks of the taps along z, one sum for each, and applies the masks of the
other two axes once, at the end. The slices of a 2-D input are its rows: D is its height, and H is 1.
"""

import triton
import triton.language as tl


@triton.jit
def is_read(
    i, tap, OUT,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr, IS_CONV_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Whether a tap reads position `i` of an axis for one of its OUT outputs."""
    o = i * STRIDE + tap * DILATION - PAD if IS_CONV_TRANSPOSED else i - tap * DILATION + PAD
    return (o >= 0) & (o < OUT)


@triton.jit
def is_read_in_slice(
    o_p, tap, W, OH, OW, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, IS_CONV_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Whether positions `o_p` of a slice are read by number `tap` of the taps (y, x)."""
    m_y = is_read(o_p // W, tap // KW, OH, STRIDE_H, DILATION_H, PH, IS_CONV_TRANSPOSED)
    return m_y & is_read(o_p % W, tap % KW, OW, STRIDE_W, DILATION_W, PW, IS_CONV_TRANSPOSED)


@triton.jit
def tap_sums_kernel(
    p_x,  # [N·C, D, H·W]
    p_y,  # [CHUNKS, BLOCKS, N·C, KD, KH·KW], float64, out
    D, H, W, OD, OH, OW,
    SLICES_PER_PROGRAM,  # one chunk
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, IS_CONV_TRANSPOSED: tl.constexpr,
    BLOCK_KD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)  # in [N·C]
    i_part = (tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)
    first = tl.program_id(1) * SLICES_PER_PROGRAM
    end = tl.minimum(first + SLICES_PER_PROGRAM, D)
    o_p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_k = tl.arange(0, BLOCK_KD)
    b_sum = tl.zeros([BLOCK_KD, BLOCK_P], tl.float64)
    for z in tl.range(first, end, BLOCK_D, num_stages=3):
        o_z = z + tl.arange(0, BLOCK_D)
        m_x = (o_z < end)[None, :, None] & (o_p < H * W)[None, None, :]
        o_x = (i_row * D + o_z[None, :, None]) * (H * W) + o_p[None, None, :]
        b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(ACC)  # [1, BLOCK_D, BLOCK_P]
        m_z = is_read(o_z[None, :], o_k[:, None], OD, STRIDE_D, DILATION_D, PD, IS_CONV_TRANSPOSED)
        b_sum += tl.sum(tl.where(m_z[:, :, None], b_x, 0.0), axis=1)  # [BLOCK_KD, BLOCK_P]
    for k in range(KH * KW):
        m_k = is_read_in_slice(
            o_p, k, W, OH, OW, KW, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, PH, PW, IS_CONV_TRANSPOSED
        )  # fmt: skip
        o_y = ((i_part * tl.num_programs(0) + i_row) * KD + o_k) * (KH * KW) + k
        tl.store(p_y + o_y, tl.sum(tl.where(m_k[None, :], b_sum, 0.0), axis=1), mask=o_k < KD)


@triton.jit
def tap_sums_gradient_kernel(
    p_dy,  # [N·C, KD, KH·KW], float64: the gradient of every sum
    p_dx,  # [N·C, D, H·W], out: each position adds up those of the taps that read it
    D, H, W, OD, OH, OW,
    SLICES_PER_PROGRAM,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, IS_CONV_TRANSPOSED: tl.constexpr,
    BLOCK_KD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SLICES_PER_PROGRAM
    end = tl.minimum(first + SLICES_PER_PROGRAM, D)
    o_p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_k = tl.arange(0, BLOCK_KD)
    b_dy = tl.zeros([BLOCK_KD, BLOCK_P], tl.float64)
    for k in range(KH * KW):
        m_k = is_read_in_slice(
            o_p, k, W, OH, OW, KW, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, PH, PW, IS_CONV_TRANSPOSED
        )  # fmt: skip
        b_k = tl.load(p_dy + (i_row * KD + o_k) * (KH * KW) + k, mask=o_k < KD, other=0.0)  # [BLOCK_KD]
        b_dy += tl.where(m_k[None, :], b_k[:, None], 0.0)
    b_dy = b_dy.to(ACC)
    for z in range(first, end, BLOCK_D):
        o_z = z + tl.arange(0, BLOCK_D)
        m_z = is_read(o_z[None, :], o_k[:, None], OD, STRIDE_D, DILATION_D, PD, IS_CONV_TRANSPOSED)
        b_dx = tl.sum(tl.where(m_z[:, :, None], b_dy[:, None, :], 0.0), axis=0, keep_dims=True)  # [1, BLOCK_D, BLOCK_P]
        m_x = (o_z < end)[None, :, None] & (o_p < H * W)[None, None, :]
        o_x = (i_row * D + o_z[None, :, None]) * (H * W) + o_p[None, None, :]
        tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_x)
