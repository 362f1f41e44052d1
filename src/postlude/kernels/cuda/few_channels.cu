// Direct convolution of 1 to 4 input channels on tensor cores. It never stores the convolution's result, only the
// moments of (convolution + bias) per sample, channel and tile.
// A block loops over tiles of BLOCK_D×BLOCK_H×32 outputs. It stages a tile's input in shared memory, one slot of four
// 16-bit numbers per position: the position's channels and, if there are only 1 or 2, those of its right neighbours
// (TAPS_PER_SLOT positions in all). A slot therefore serves a chunk of TAPS_PER_SLOT neighbouring taps. One m16n8k16
// instruction takes 4 chunks, K = 4 × 4 numbers, ordered so that lane (g, t) = (lane / 4, lane % 4) reads the whole
// slot of chunk t for row g in one load. fp32 input is scaled by powers of two, per tile and per output channel of the
// weight. With two planes (fp16 and the fp16 remainder) a slot is as precise as fp32.
//
// Compile-time: C_IN C_OUT NFRAG KD KH KW PD PH PW IS_FLIPPED, D H W, strides X_N X_C X_D X_H X_W of the input and W_O
// W_C W_D W_H W_W of the weight, INPUT_BITS (32, or 16: the operand's own type), IS_BFLOAT, PLANES, BLOCK_D BLOCK_H
// ROWS_PER_WARP WARPS BLOCKS_PER_SM, TILES_D TILES_H TILES_W of a sample, HAS_BIAS, TILE_SLOTS (for a tile's input, or
// the lanes' moments), SHARED_BYTES. kernels/triton/__init__.py explains them, or a comment where they are used.

#include "operands.cuh"
#include "geometry.cuh"

static_assert((TILE_SLOTS + FRAGMENT_SLOTS) * sizeof(slot_t) == SHARED_BYTES &&
              TILE_SLOTS >= (BLOCK_D + KD - 1) * SLICE_PITCH &&
              TILE_SLOTS * sizeof(slot_t) >= LANES * BLOCK_C * sizeof(float3), "the host counts differently");

#include "tile.cuh"
#include "products.cuh"
#include "stage.cuh"

// The moments of one lane's outputs in 2·NFRAG channels, 8·(c / 2) + 2t + c % 2; m2 sums squared deviations.
struct Moments { float count, mean[2 * NFRAG], m2[2 * NFRAG]; };

// Adds a warp's outputs by Chan's formula. `rows` of its rows are valid, and `columns` from this lane's first one on.
__device__ __forceinline__ void take_in(Moments& have, const Sums& sums, int rows, int columns)
{
    float count = min(rows, ROWS_PER_WARP) * max(0, min(4, (columns + 7) / 8));
    float share = __fdividef(1.0f, fmaxf(count, 1.0f)), weight = __fdividef(count, fmaxf(have.count + count, 1.0f));
#pragma unroll
    for (int c = 0; c < 2 * NFRAG; c++) {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int k = 0; k < 4 * ROWS_PER_WARP; k++)
            if (k / 4 < rows && k % 4 * 8 < columns) sum += sums[k / 2][c / 2][k % 2 * 2 + c % 2];
#pragma unroll
        for (int k = 0; k < 4 * ROWS_PER_WARP; k++) {
            float off = sums[k / 2][c / 2][k % 2 * 2 + c % 2] - sum * share;
            if (k / 4 < rows && k % 4 * 8 < columns) squares += off * off;
        }
        float apart = sum * share - have.mean[c];
        have.mean[c] += apart * weight;
        have.m2[c] += squares + apart * apart * (have.count * weight);
    }
    have.count += count;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) few_channels_moments(
    const input_t* __restrict__ p_x,  // [N, C_IN, D, H, W] through its strides
    const input_t* __restrict__ p_w,  // [C_OUT, C_IN, KD, KH, KW] through its strides
#if HAS_BIAS
    const input_t* __restrict__ p_bias,  // [C_OUT]
#endif
    float* __restrict__ p_mean,  // [N, C_OUT, TILES], out
    float* __restrict__ p_m2, float* __restrict__ p_count,  // squared deviations; [N, TILES]; both out
    int units, u32 zero)  // tiles of all samples; always 0, unknown to the compiler
{
    extern __shared__ uint4 shared[];
    slot_t* tile = (slot_t*)shared;  // [BLOCK_D + KD - 1, IN_H, IN_W] with SLICE_PITCH and ROW_PITCH
    slot_t* fragments = tile + TILE_SLOTS;  // [K_STEPS, NFRAG, lane]
    __shared__ int offsets[THREADS], weight_exponents[BLOCK_C], exponents[WARPS + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int c0 = blockIdx.y * BLOCK_C;
    int chunk = min((int)threadIdx.x, TAP_CHUNKS - 1);  // past the last one any will do: the weights are 0
    offsets[threadIdx.x] = chunk / (KH * TAP_CHUNKS_W) * SLICE_PITCH + chunk / TAP_CHUNKS_W % KH * ROW_PITCH +
                           chunk % TAP_CHUNKS_W * TAPS_PER_SLOT;
    prepare(p_w, c0, fragments, weight_exponents);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        int i_n = unit / TILES, i_tile = unit % TILES;
        int z0 = i_tile / (TILES_H * TILES_W) * BLOCK_D, y0 = i_tile / TILES_W % TILES_H * BLOCK_H;
        int x0 = i_tile % TILES_W * 32;
        int depth = min(BLOCK_D, OD - z0), height = min(BLOCK_H, OH - y0), width = min(32, OW - x0);
        const input_t* p_sample = p_x + (long long)i_n * X_N;
        stage(p_sample, (depth + KD - 1) * IN_H * IN_W, z0 - PD, y0 - PH, x0 - PW, tile, exponents);
        Moments have = {};
        int groups = (height + ROWS_PER_WARP - 1) / ROWS_PER_WARP;
#pragma unroll 1
        for (int i = warp; i < depth * groups; i += WARPS) {
            int z = i / groups, y = i % groups * ROWS_PER_WARP;
            Sums sums = {};
            multiply(tile + z * SLICE_PITCH + y * ROW_PITCH + g, offsets + t, fragments + lane, zero, sums);
            take_in(have, sums, height - y, width - g);
        }
        __syncthreads();
        float3 *parts = (float3*)shared, *mine = parts + (warp * 8 + g) * BLOCK_C + 2 * t;  // [LANES, BLOCK_C]
#pragma unroll
        for (int c = 0; c < 2 * NFRAG; c++) mine[c / 2 * 8 + c % 2] = {have.count, have.mean[c], have.m2[c]};
        __syncthreads();
        int c = threadIdx.x;
        if (c < BLOCK_C && c0 + c < C_OUT) {
            float3 all = parts[c];  // count, mean, m2; lanes in a fixed order, so every run gives the same bits
#pragma unroll 8
            for (int i = 1; i < LANES; i++) {
                float3 more = parts[i * BLOCK_C + c];
                float apart = more.y - all.y, weight = __fdividef(more.x, fmaxf(all.x + more.x, 1.0f));
                all = {all.x + more.x, all.y + apart * weight, all.z + more.z + apart * apart * (all.x * weight)};
            }
            // Scale and bias are applied once to a tile's moments instead of to each output
#if IS_SCALED
            int power = exponents[WARPS] + weight_exponents[c] - 28;
            all.y = ldexpf(all.y, power), all.z = ldexpf(all.z, 2 * power);
#endif
#if HAS_BIAS
            all.y += as_float(p_bias[c0 + c]);
#endif
            long long at = ((long long)i_n * C_OUT + c0 + c) * TILES + i_tile;
            p_mean[at] = all.y, p_m2[at] = all.z;
            if (c0 + c == 0) p_count[unit] = all.x;
        }
        __syncthreads();
    }
}
