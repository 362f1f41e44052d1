"""The gradient of upsampling, nearest or linear, as a gather: every input position sums its shares of dy.

A scatter, which Inductor generates, needs atomics: 10 ms instead of 0.5 for 32×160×160×128 on an H200.
"""

import triton
import triton.language as tl


@triton.jit
def _share(i, NTH: tl.constexpr, scale, SIZE: tl.constexpr, IS_LINEAR: tl.constexpr, HAS_CENTRES: tl.constexpr):
    """The NTH result that reads position i, and the weight with which it does: PyTorch's formula, inverted."""
    centre = 0.5 if HAS_CENTRES else 0.0
    if IS_LINEAR:
        o = tl.ceil((i - 1 + centre) / scale - centre).to(tl.int32) + NTH
        source = tl.maximum((o + centre) * scale - centre, 0.0)
        low = source.to(tl.int32)
        fraction = source - low
        # At the end of the axis both neighbours are the last position.
        share = tl.where(low == i, 1.0 - fraction, 0.0) + tl.where(tl.minimum(low + 1, SIZE - 1) == i, fraction, 0.0)
    else:
        o = tl.ceil(i / scale - centre - 1e-3).to(tl.int32) + NTH
        share = tl.where(tl.minimum(((o + centre) * scale).to(tl.int32), SIZE - 1) == i, 1.0, 0.0)
    return o, share


@triton.jit
def upsample_gradient_kernel(
    p_dy,  # [N, C, D, H, W], or [N, D, H, W, C] where IS_CHANNELS_LAST
    p_dx,  # [N, C, OD, OH, OW] in the same layout, out
    scale_d, scale_h, scale_w,  # positions of dx for one of dy
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    REACH_D: tl.constexpr, REACH_H: tl.constexpr, REACH_W: tl.constexpr,
    IS_LINEAR: tl.constexpr, HAS_CENTRES: tl.constexpr,
    IS_CHANNELS_LAST: tl.constexpr, USES_INT64: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = OD * OH * OW
    blocks_c: tl.constexpr = tl.cdiv(C, BLOCK_C)
    i_block = tl.program_id(0)
    i_s, i_n = i_block // blocks_c % tl.cdiv(S, BLOCK_S), i_block // (blocks_c * tl.cdiv(S, BLOCK_S))
    o_s = i_s * BLOCK_S + tl.arange(0, BLOCK_S)
    o_c = i_block % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    if USES_INT64:
        o_c = o_c.to(tl.int64)
    x, y, z = o_s % OW, o_s // OW % OH, o_s // (OW * OH)  # [BLOCK_S]
    b_dx = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    m_s, m_c = o_s < S, o_c < C
    p_dy += i_n.to(tl.int64) * (C * D * H * W)
    p_dx += i_n.to(tl.int64) * (C * S)
    for k_d in tl.static_range(REACH_D):
        at_z, share_z = _share(z, k_d, scale_d, OD, IS_LINEAR, HAS_CENTRES)
        for k_h in tl.static_range(REACH_H):
            at_y, share_y = _share(y, k_h, scale_h, OH, IS_LINEAR, HAS_CENTRES)
            for k_w in tl.static_range(REACH_W):
                at_x, share_x = _share(x, k_w, scale_w, OW, IS_LINEAR, HAS_CENTRES)
                share = share_z * share_y * share_x
                m = m_s & (share != 0.0) & (at_z >= 0) & (at_z < D) & (at_y >= 0) & (at_y < H)
                m = m & (at_x >= 0) & (at_x < W)
                place = ((at_z * H + at_y) * W + at_x)[:, None]  # [BLOCK_S, 1]
                if IS_CHANNELS_LAST:
                    place = place.to(o_c.dtype) * C + o_c[None, :]
                else:
                    place = o_c[None, :] * (D * H * W) + place
                b_dy = tl.load(p_dy + place, mask=m[:, None] & m_c[None, :], other=0.0)  # [BLOCK_S, BLOCK_C]
                b_dx += b_dy.to(tl.float32) * share[:, None]
    o_dx = o_s[:, None].to(o_c.dtype) * C + o_c[None, :] if IS_CHANNELS_LAST else o_c[None, :] * S + o_s[:, None]
    tl.store(p_dx + o_dx, b_dx.to(p_dx.dtype.element_ty), mask=m_s[:, None] & m_c[None, :])
