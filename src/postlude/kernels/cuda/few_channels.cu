// Direct convolution of 1 to 4 input channels on tensor cores that stores nothing of the convolution's size: it gives
// the moments of (convolution + bias) per sample, channel and tile.
//
// A block walks over tiles of TD×TH×32 outputs. It stages a tile's input in shared memory, 4 numbers of 16 bits per
// position: its channels, and, where there are fewer than 3, those of its right neighbours (XS positions in all).
// Such a slot serves the XS taps next to one another in x, so the taps of the kernel are CHUNKS slots, each with its
// own offset from the output's position. One m16n8k16 product takes 4 chunks: K = 4 chunks × 4 numbers. Its columns
// are permuted so that lane (g, t) = (lane / 4, lane % 4) reads, for row g, the whole slot of chunk t at once:
// columns 2t, 2t+1 are the slot's numbers 0, 1 and columns 2t+8, 2t+9 its numbers 2, 3.
//
// fp32 input in fp16 operands is scaled by powers of two, per tile for the input and per output channel for the
// weight, so that the largest finite magnitude lands in 2¹⁴…2¹⁵. With two planes a slot holds fp16(number) four times
// and fp16 of what is left four times: 16 bytes, as many as the four fp32 numbers that it is made from in place.
//
// Compile-time: CIN COUT NFRAG KD KH KW PD PH PW FLIP, INPUT_BITS (32, or 16: the operand's own type), BFLOAT,
// PLANES, TD TH R WARPS BLOCKS, SHARED_BYTES.

#include "operands.cuh"
#include "geometry.cuh"

constexpr int TILE = (TD + KD - 1) * PLANE;
static_assert(CHANNELS <= THREADS && STEPS * 4 <= THREADS, "too few warps");
constexpr int WORDS = 5 * CHANNELS + WARPS * (2 * CHANNELS + 2) + STEPS * 4 + 1;  // behind the slots
static_assert((TILE + FRAGMENTS) * sizeof(slot_t) + WORDS * 4 == SHARED_BYTES, "the host counts differently");

#include "tile.cuh"
#include "products.cuh"
#include "moments.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) few_channels_moments(
    const input_t* __restrict__ p_x,  // [N, CIN, D, H, W] through its strides
    const input_t* __restrict__ p_w,  // [COUT, CIN, KD, KH, KW] through its strides
    const input_t* __restrict__ p_bias,  // [COUT] or null
    float* __restrict__ p_mean,  // [N, COUT, tiles], out
    float* __restrict__ p_m2,  // the same
    float* __restrict__ p_count,  // [N, tiles], out
    int units,  // tiles of all samples
    int tiles,  // of a sample, of one depth in it, and of one row of those
    int tiles_hw, int tiles_w,
    int out_d, int out_h, int out_w,
    long long stride_n, int stride_c, int stride_d, int stride_h, int stride_w,
    int d, int h, int w,
    int w_stride_o, int w_stride_c, int w_stride_d, int w_stride_h, int w_stride_w,
    u32 zero)  // 0, which the compiler cannot know
{
    extern __shared__ uint4 shared[];
    slot_t* tile = (slot_t*)shared;  // [TD + KD - 1, IN_H, COLUMNS] with PLANE and PITCH
    slot_t* fragments = tile + TILE;  // [STEPS, NFRAG, 32]
    float* scales = (float*)(fragments + FRAGMENTS);  // [CHANNELS]
    int* undo = (int*)(scales + CHANNELS);
    float* biases = (float*)(undo + CHANNELS);
    float* unscales = biases + CHANNELS;  // [2, CHANNELS], of the tile
    float* means = unscales + 2 * CHANNELS;  // [WARPS, CHANNELS]
    float* squares = means + WARPS * CHANNELS;
    float* counts = squares + WARPS * CHANNELS;  // [WARPS]
    u32* largest_of_warp = (u32*)(counts + WARPS);
    int* offsets = (int*)(largest_of_warp + WARPS);  // [STEPS, 4]
    int* current = offsets + STEPS * 4;  // the unit, kept here while registers are short

    Volume in = {d, h, w, stride_c, stride_d, stride_h, stride_w};
    Weight weight = {w_stride_o, w_stride_c, w_stride_d, w_stride_h, w_stride_w};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int c0 = blockIdx.y * CHANNELS;
    if (threadIdx.x < STEPS * 4) {
        int chunk = threadIdx.x < CHUNKS ? threadIdx.x : 0;  // past the last, any: its weights are 0
        offsets[threadIdx.x] = chunk / (KH * CW) * PLANE + chunk / CW % KH * PITCH + chunk % CW * XS;
    }
    prepare(p_w, p_bias, weight, c0, fragments, scales, undo, biases);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        int i_n = unit / tiles, i_tile = unit % tiles;
        int z0 = i_tile / tiles_hw * TD, y0 = i_tile % tiles_hw / tiles_w * TH, x0 = i_tile % tiles_w * 32;
        int depth = min(TD, out_d - z0), height = min(TH, out_h - y0), width = min(32, out_w - x0);
        stage(p_x + i_n * stride_n, in, (depth + KD - 1) * IN_H * COLUMNS, z0 - PD, y0 - PH, x0 - PW, tile,
              largest_of_warp, undo, unscales);
        if (threadIdx.x == 0) *current = unit;
        if (threadIdx.x == 0 && c0 == 0) p_count[unit] = (float)(depth * height * width);
        Moments have = {};
        u32 columns = 0u;
#pragma unroll
        for (int i = 0; i < 4; i++) columns |= (u32)(8 * i + g < width) << i;
        int groups = (height + R - 1) / R;
#pragma unroll 1
        for (int i = warp; i < depth * groups; i += WARPS) {
            int z = i / groups, y = i % groups * R;
            Sums sums = {};
            multiply(tile + z * PLANE + y * PITCH + g, offsets + t, fragments + lane, zero, sums);
            u32 valid = 0u;
#pragma unroll
            for (int r = 0; r < R; r++) valid |= y + r < height ? columns << (4 * r) : 0u;
            take_in(have, sums, valid);
        }
        merge_lanes(have);
        if (g == 0) {
#pragma unroll
            for (int i = 0; i < 2 * NFRAG; i++) {
                means[warp * CHANNELS + i / 2 * 8 + 2 * t + i % 2] = have.mean[i / 2][i % 2];
                squares[warp * CHANNELS + i / 2 * 8 + 2 * t + i % 2] = have.m2[i / 2][i % 2];
            }
            if (t == 0) counts[warp] = have.count;
        }
        __syncthreads();
        unit = *current;
        int c = threadIdx.x;
        if (c < CHANNELS && c0 + c < COUT) {
            float mean, m2;
            merge_warps(mean, m2, counts, means + c, squares + c);
            long long at = ((long long)(unit / tiles) * COUT + c0 + c) * tiles + unit % tiles;
            // Scales and bias are applied to a tile's moments, once, not to each of its outputs.
#if SCALED
            float once = unscales[c], again = unscales[CHANNELS + c];
            mean = mean * once * again, m2 = m2 * once * again * once * again;
#endif
            p_mean[at] = mean + biases[c];
            p_m2[at] = m2;
        }
    }
}
