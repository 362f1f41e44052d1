// Direct convolution of 1 to 4 input channels on tensor cores.
// A block loops over tiles of BLOCK_D×BLOCK_H×32 outputs. It stages a tile's input in shared memory, one slot of four
// 16-bit numbers per position, or eight in two planes (fp16 and the fp16 remainder), scaled by a power of two. Each
// warp computes ROWS_PER_WARP rows of 32 outputs at a time and writes them. One m16n8k16 instruction takes 4 chunks of
// taps; lane (g, t) = (lane / 4, lane % 4) reads the slot of chunk t for row g, and has columns g + 8·k of the outputs,
// in channels 2t and 2t + 1 of every 8.
//
// Compile-time: as few_channels.cu, and KEEPS_INF: infinities give what PyTorch's convolution gives. That takes two
// planes, and slots of one tap each.

#include "operands.cuh"
#include "geometry.cuh"

static_assert((TILE_SLOTS + FRAGMENT_SLOTS) * sizeof(slot_t) == SHARED_BYTES &&
              TILE_SLOTS >= (BLOCK_D + KD - 1) * SLICE_PITCH, "the host counts differently");
static_assert(!KEEPS_INF || (PLANES == 2 && TAPS_PER_SLOT == 1), "unsupported settings");

#include "tile.cuh"
#include "products.cuh"
#include "stage.cuh"

#if KEEPS_INF
// Computes outputs that are not finite again, from the high planes alone: times a low plane an infinity is NaN or has
// an arbitrary sign. Lane t has chunk j·4 + t; past the last chunk `offsets` repeats it, and inf·0 would be NaN.
__device__ __forceinline__ void mend(const slot_t* at, const int* offsets, const slot_t* weights, int t, Sums& sums)
{
    float probe = 0.0f;  // NaN if one of the sums is not finite
#pragma unroll
    for (int i = 0; i < 8 * ROWS_PER_WARP * NFRAG; i++) probe += 0.0f * sums[i / 4 / NFRAG][i / 4 % NFRAG][i % 4];
    if (__reduce_max_sync(~0u, (u32)(probe != probe)) == 0u) return;
#pragma unroll
    for (int m = 0; m < 2 * ROWS_PER_WARP; m++) {
        float alone[NFRAG][4] = {};
#pragma unroll 1
        for (int j = 0; j < K_STEPS; j++) {
            const slot_t* from = at + offsets[j * 4] + m / 2 * ROW_PITCH + m % 2 * 16;
            u32 kept = j * 4 + t < TAP_CHUNKS ? ~0u : 0u;
            u32 high[4] = {from[0].x & kept, from[8].x & kept, from[0].y & kept, from[8].y & kept};
#pragma unroll
            for (int n = 0; n < NFRAG; n++) {
                slot_t b = weights[(j * NFRAG + n) * 32];
                mma(alone[n], high, b.x, b.y);
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * NFRAG; i++)
            if (!is_finite(sums[m][i / 4][i % 4])) sums[m][i / 4][i % 4] = alone[i / 4][i % 4];
    }
}

#endif
#if INPUT_BITS == 16
__device__ __forceinline__ u16 as_output(float v) { return (u16)pack_pair(v, 0.0f); }
#else
__device__ __forceinline__ float as_output(float v) { return v; }
#endif

// Writes a warp's outputs in this lane's channels, of which `left` remain. Pointers are to the first of them; `rows`
// rows are valid, and `columns` from the lane's first one on. `power` undoes the scale of the input.
__device__ __forceinline__ void write(const Sums& sums, input_t* p_y, const input_t* p_bias, const int* exponents,
                                      int power, int left, int rows, int columns)
{
#pragma unroll
    for (int i = 0; i < 2 * NFRAG; i++) {
        int o = i / 2 * 8 + i % 2;
        if (o >= left) continue;
        float bias = p_bias ? as_float(p_bias[o]) : 0.0f;
        int whole = power + exponents[o];  // in two factors: 2^whole may be beyond fp32
        float low = power_of_two(whole >> 1), high = power_of_two(whole - (whole >> 1));
#pragma unroll
        for (int k = 0; k < 4 * ROWS_PER_WARP; k++) {
            float v = sums[k / 2][i / 2][k % 2 * 2 + i % 2] * low * high + bias;
            if (k / 4 < rows && k % 4 * 8 < columns)
                p_y[(long long)o * (OD * OH * OW) + k / 4 * OW + k % 4 * 8] = as_output(v);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) few_channels_store(
    const input_t* __restrict__ p_x,  // [N, C_IN, D, H, W] through its strides
    const input_t* __restrict__ p_w,  // [C_OUT, C_IN, KD, KH, KW] through its strides
#if HAS_BIAS
    const input_t* __restrict__ p_bias,  // [C_OUT]
#endif
    input_t* __restrict__ p_y,  // [N, C_OUT, OD, OH, OW], out
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
#if HAS_BIAS
    const input_t* bias = p_bias + c0 + 2 * t;
#else
    const input_t* bias = nullptr;
#endif
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        int i_n = unit / TILES, i_tile = unit % TILES;
        int z0 = i_tile / (TILES_H * TILES_W) * BLOCK_D, y0 = i_tile / TILES_W % TILES_H * BLOCK_H;
        int x0 = i_tile % TILES_W * 32;
        int depth = min(BLOCK_D, OD - z0), height = min(BLOCK_H, OH - y0), width = min(32, OW - x0);
        const input_t* p_sample = p_x + (long long)i_n * X_N;
        stage(p_sample, (depth + KD - 1) * IN_H * IN_W, z0 - PD, y0 - PH, x0 - PW, tile, exponents);
        int groups = (height + ROWS_PER_WARP - 1) / ROWS_PER_WARP;
        input_t* p_out = p_y + ((long long)i_n * C_OUT + c0 + 2 * t) * (OD * OH * OW) + x0 + g;
#pragma unroll 1
        for (int i = warp; i < depth * groups; i += WARPS) {
            int z = i / groups, y = i % groups * ROWS_PER_WARP;
            const slot_t* at = tile + z * SLICE_PITCH + y * ROW_PITCH + g;
            Sums sums = {};
            multiply(at, offsets + t, fragments + lane, zero, sums);
#if KEEPS_INF
            mend(at, offsets + t, fragments + lane, t, sums);
#endif
#if IS_SCALED
            int power = exponents[WARPS] - 28;
#else
            int power = -14;
#endif
            write(sums, p_out + ((z0 + z) * OH + y0 + y) * OW, bias, weight_exponents + 2 * t, power,
                  C_OUT - c0 - 2 * t, height - y, width - g);
        }
        __syncthreads();
    }
}
