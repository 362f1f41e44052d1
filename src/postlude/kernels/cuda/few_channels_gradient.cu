// Gradients of a convolution of 1 to 4 input channels whose result v is not stored. The gradient at v is affine in v
// per sample and channel, dv = shift + slope·v, so v is recomputed slice by slice and dv never leaves the block.
//
//   dW[o, c, k] = Σ dv[n, o, p]·x[n, c, p + k − P]        dx[n, c, q] = Σ dv[n, o, q − k + P]·w[o, c, k]
//
// A block loops over tiles of BLOCK_D×BLOCK_H×32 positions of v. With HAS_DX tiles overlap by a halo, so that each tile
// gives complete sums of dx; dW skips the positions that the previous tile has counted. Within a tile the block goes
// from slice to slice: a ring holds the KD input slices that one slice of v reads, and the next one (see
// few_channels.cu for the slots). Each warp computes ROWS_PER_WARP rows of v and stores dv as 16-bit numbers, [BLOCK_H,
// columns, channels], in as many planes as the input has. After a barrier both gradients read it.
//
//   HAS_DW: a transposed matrix of 8 slots is the numbers of one chunk (high and low) by 8 positions. One operand is
//   two chunks by 16 positions, the other is dv, 16 positions by 8 channels. A warp owns PAIRS pairs of chunks. HAS_DX:
//   a row is NEIGHBOURS neighbouring positions of dx, and its columns are their channels. The sum runs over the SPAN
//   positions of dv that they read, and over dv's channels. A slice of dv adds to KD slices of dx, which a warp keeps
//   in registers.
//
// dv is scaled: p_table holds shift and slope times 2^e, and e, where e brings every |dv| under 2¹⁵. dW undoes the
// scale sum by sum. For dx the weight's fragments are made anew for every tile, with 2^-e and a power of two that keeps
// the largest of them in 2¹⁴…2¹⁵.
//
// Compile-time: as few_channels.cu, and DX_N DX_C DX_D DX_H DX_W (strides of dx), HAS_DW, HAS_DX (which gradients).

#define HAS_WIDE_SLOTS 1
#include "operands.cuh"
#include "geometry.cuh"
#include "matrices.cuh"

constexpr int RING_SLICES = KD + 1;
constexpr int PAIRS_IN_ALL = (TAP_CHUNKS + 1) / 2;
constexpr int PAIRS = (PAIRS_IN_ALL + WARPS - 1) / WARPS;
constexpr int NEIGHBOURS = C_IN > 2 ? 2 : 4;
constexpr int SPAN = NEIGHBOURS + KW - 1;
constexpr int ROW_GROUPS = 8 / NEIGHBOURS;  // groups of 4 rows of a product in a row of 32 outputs
constexpr int M_TILES = ((BLOCK_H + 1) / 2 * ROW_GROUPS + 1) / 2;  // tiles of 16 rows of a product
constexpr int M_TILES_PER_WARP = (M_TILES + WARPS - 1) / WARPS;
constexpr int DX_K_STEPS = (SPAN * NFRAG + 1) / 2;
constexpr int DX_FRAGMENT_SLOTS = HAS_DX ? KD * KH * DX_K_STEPS * 32 : 0;
// To avoid bank conflicts, positions of dv are an odd number of 16-byte units apart, and so are rows where a load reads
// 4 positions from each of two rows.
constexpr int DV_STRIDE = (NFRAG | 1) * 8;
constexpr int DV_LEFT = HAS_DX ? KW - 1 : 0;  // zeros before a row, and as many after it
constexpr int DV_ROW = HAS_DX ? 33 + 2 * (KW - 1) : 32;
constexpr int DV_ZEROS = BLOCK_H * DV_ROW * DV_STRIDE;  // offset of the zeros that stand for rows outside
constexpr int DV_SIZE = DV_ZEROS + (HAS_DX ? SPAN * DV_STRIDE : 0);
// Rows of dW and products of dx between promotions to ordinary fp32: tensor cores truncate while they accumulate
constexpr int PROMOTE_ROWS = 4, PROMOTE_STEPS = 3;
constexpr int LOADS_PER_THREAD = (IN_H * IN_W + THREADS - 1) / THREADS;
constexpr int WORDS = 7 * BLOCK_C + WARPS + RING_SLICES * K_STEPS * 4;

static_assert(C_OUT <= BLOCK_C, "unsupported settings");
static_assert(!HAS_DX || (BLOCK_D >= KD && BLOCK_H >= KH), "a tile must be larger than what it shares with the next");
static_assert((RING_SLICES * SLICE_PITCH + FRAGMENT_SLOTS + DX_FRAGMENT_SLOTS) * sizeof(slot_t) +
                      PLANES * DV_SIZE * 2 + WORDS * 4 == SHARED_BYTES,
              "the host counts differently");

#include "tile.cuh"
#include "products.cuh"

// A tile along one axis: positions of v from `first` on, of which the previous tile has counted the first `skip`, and
// the positions [low, high) of dx
struct Extent {
    int first, count, skip, low, high;
};

template <int BLOCK, int KERNEL, int PAD>
__device__ __forceinline__ Extent extent_of(int i, bool is_last, int out, int size)
{
    int first = i * (HAS_DX ? BLOCK - KERNEL + 1 : BLOCK);
    int reach = i == 0 ? 0 : KERNEL - 1;
    return {first, min(BLOCK, out - first), HAS_DX ? reach : 0, i == 0 ? 0 : first + reach - PAD,
            is_last ? size : first + BLOCK - PAD};
}

// The exponent of a tile's input, found by all warps together; ends with a barrier
__device__ __forceinline__ int exponent_of_tile(const input_t* p_x, int positions, int z0, int y0, int x0,
                                                int* exponents)
{
#if IS_SCALED
    float largest = 0.0f;
#pragma unroll 4  // loads in flight together
    for (int i = threadIdx.x; i < positions; i += THREADS) {
        float v[4];
        fetch(p_x, i, z0, y0, x0, v);
        largest = fmaxf(fmaxf(largest, fmaxf(fabsf(v[0]), fabsf(v[1]))), fmaxf(fabsf(v[2]), fabsf(v[3])));
    }
    exponents[threadIdx.x / 32] = warp_exponent(largest);
    __syncthreads();
    return __reduce_max_sync(~0u, exponents[threadIdx.x % WARPS]);
#else
    return 14;
#endif
}

__device__ __forceinline__ void fetch_slice(const input_t* p_x, int z, int y0, int x0,
                                            input_t (&v)[LOADS_PER_THREAD][4])
{
#pragma unroll
    for (int i = 0; i < LOADS_PER_THREAD; i++)
        if (threadIdx.x + i * THREADS < IN_H * IN_W) fetch(p_x, threadIdx.x + i * THREADS, z, y0, x0, v[i]);
}

__device__ __forceinline__ void store_input_slice(input_t (&v)[LOADS_PER_THREAD][4], float scale, slot_t* slice)
{
#pragma unroll
    for (int i = 0; i < LOADS_PER_THREAD; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at < IN_H * IN_W) slice[place_of(at)] = make_slot(v[i], scale);
    }
}

// The weight as fragments [KD, KH, DX_K_STEPS, lane] for the product that gives dx. The sum runs over neighbouring
// positions from the left, 8 channels at a time. Position j contributes to output o of a row by tap o + KW − 1 − j.
__device__ __forceinline__ void prepare_back(const input_t* p_w, const int* exponents, const int* powers, int most,
                                             slot_t* back)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < DX_FRAGMENT_SLOTS; i += THREADS) {
        int g = i % 32 / 4, t = i % 4, step = i / 32 % DX_K_STEPS;
        int kh = i / 32 / DX_K_STEPS % KH, kd = i / 32 / DX_K_STEPS / KH;
        float v[4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            int octet = 2 * step + s / 2, channel = octet % NFRAG * 8 + 2 * t + s % 2;
            int kw = g / C_IN + KW - 1 - octet / NFRAG;
            v[s] = 0.0f;
            if (g < NEIGHBOURS * C_IN && octet < SPAN * NFRAG && channel < C_OUT && 0 <= kw && kw < KW) {
                int less = powers[channel] - most;
                v[s] = as_float(p_w[weight_offset(channel, g % C_IN, (kd * KH + kh) * KW + kw)]) *
                       power_of_two(14 - exponents[channel]) * power_of_two(less < -126 ? -126 : less);
            }
        }
        back[i] = make_slot(v, 1.0f);
    }
}

// Stores dv of [ROWS_PER_WARP, 32] positions at `at`, which points to column g and channel 2t. Bit 4r + i of `valid`
// says whether row r, column 8i + g counts.
__device__ __forceinline__ void store_rows(const Sums& sums, u32 valid, const float* unscales, const float* slopes,
                                           const float* shifts, u16* at)
{
#pragma unroll
    for (int n = 0; n < NFRAG; n++) {
        float slope[2] = {slopes[n * 8], slopes[n * 8 + 1]}, shift[2] = {shifts[n * 8], shifts[n * 8 + 1]};
#if IS_SCALED
        float unscale[2] = {unscales[n * 8], unscales[n * 8 + 1]};
#endif
#pragma unroll
        for (int k = 0; k < 4 * ROWS_PER_WARP; k++) {
            float dv[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float v = sums[k / 2][n][k % 2 * 2 + c];
#if IS_SCALED
                v *= unscale[c];
#endif
                dv[c] = valid >> k & 1u ? v * slope[c] + shift[c] : 0.0f;
            }
            u32* to = (u32*)(at + (k / 4 * DV_ROW + k % 4 * 8) * DV_STRIDE + n * 8);
            u32 high = pack_pair(dv[0], dv[1]);
            *to = high;
#if PLANES == 2
            to[DV_SIZE / 2] = pack_pair(dv[0] - unpack(high), dv[1] - unpack(high >> 16));
#endif
        }
    }
}

#if HAS_DW
#include "weight_sums.cuh"
#endif
#if HAS_DX
#include "input_sums.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) few_channels_gradient(
    const input_t* __restrict__ p_x,  // [N, C_IN, D, H, W] through its strides
    const input_t* __restrict__ p_w,  // [C_OUT, C_IN, KD, KH, KW] through its strides
    const float* __restrict__ p_table,  // [N, C_OUT, 4]: shift and slope times 2^e, e, nothing
#if HAS_DW
    float* __restrict__ p_dw,  // [blocks, size of the weight], out; their sum over blocks is dW
#endif
#if HAS_DX
    input_t* __restrict__ p_dx,  // as x, through its own strides, out
#endif
    int units,  // tiles of all samples
    u32 zero)  // always 0, unknown to the compiler
{
    extern __shared__ uint4 shared[];
    slot_t* ring = (slot_t*)shared;  // [RING_SLICES, IN_H, IN_W] with SLICE_PITCH and ROW_PITCH
    slot_t* fragments = ring + RING_SLICES * SLICE_PITCH;  // [K_STEPS, NFRAG, 32]
    slot_t* back = fragments + FRAGMENT_SLOTS;  // [KD, KH, DX_K_STEPS, 32]
    u16* dv = (u16*)(back + DX_FRAGMENT_SLOTS);  // [PLANES, BLOCK_H, DV_ROW, DV_STRIDE] with DV_SIZE
    int* exponents = (int*)(dv + PLANES * DV_SIZE);  // [BLOCK_C], of the weight
    float* unscales = (float*)(exponents + BLOCK_C);
    float* slopes = unscales + BLOCK_C;
    float* shifts = slopes + BLOCK_C;
    float* undo_weight = shifts + BLOCK_C;  // [2, BLOCK_C]
    int* powers = (int*)(undo_weight + 2 * BLOCK_C);
    int* exponents_of_warps = powers + BLOCK_C;
    int* offsets = exponents_of_warps + WARPS;  // [RING_SLICES, K_STEPS, 4]

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < RING_SLICES * K_STEPS * 4; i += THREADS) {
        int chunk = i % (K_STEPS * 4) < TAP_CHUNKS ? i % (K_STEPS * 4) : 0;  // past the last any will do: weights are 0
        offsets[i] = (i / (K_STEPS * 4) + chunk / (KH * TAP_CHUNKS_W)) % RING_SLICES * SLICE_PITCH +
                     chunk / TAP_CHUNKS_W % KH * ROW_PITCH + chunk % TAP_CHUNKS_W * TAPS_PER_SLOT;
    }
#if HAS_DX
#pragma unroll 1
    for (int i = threadIdx.x; i < PLANES * DV_SIZE / 2; i += THREADS) ((u32*)dv)[i] = 0u;
#endif
    prepare(p_w, 0, fragments, exponents);
#if HAS_DW
    WeightSums weight_sums = {};
#endif
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        int i_n = unit / TILES, i_tile = unit % TILES;
        int i_z = i_tile / (TILES_H * TILES_W), i_y = i_tile / TILES_W % TILES_H, i_x = i_tile % TILES_W;
        Extent zs = extent_of<BLOCK_D, KD, PD>(i_z, i_z == TILES_D - 1, OD, D);
        Extent ys = extent_of<BLOCK_H, KH, PH>(i_y, i_y == TILES_H - 1, OH, H);
        Extent xs = extent_of<32, KW, PW>(i_x, i_x == TILES_W - 1, OW, W);
        const input_t* p_sample = p_x + (long long)i_n * X_N;
        int exponent = exponent_of_tile(p_sample, (zs.count + KD - 1) * IN_H * IN_W, zs.first - PD, ys.first - PH,
                                        xs.first - PW, exponents_of_warps);
        float scale = power_of_two(14 - exponent);
        if (threadIdx.x < BLOCK_C) {
            int c = threadIdx.x;
            const float* row = p_table + ((long long)i_n * C_OUT + c) * 4;
            float shift = c < C_OUT ? row[0] : 0.0f, slope = c < C_OUT ? row[1] : 0.0f;
            int scaled = c < C_OUT ? (int)row[2] : 100;
            int both = exponent + exponents[c] - 28, all = exponent - 14 - scaled;
            shifts[c] = shift;
            slopes[c] = slope * power_of_two(both / 2);
            unscales[c] = power_of_two(both - both / 2);
            undo_weight[c] = power_of_two(all / 2);
            undo_weight[BLOCK_C + c] = power_of_two(all - all / 2);
            powers[c] = HAS_DX && c < C_OUT ? exponents[c] - scaled : -1000;
        }
#pragma unroll 1
        for (int i = 0; i < KD; i++) {
            input_t v[LOADS_PER_THREAD][4];
            fetch_slice(p_sample, zs.first - PD + i, ys.first - PH, xs.first - PW, v);
            store_input_slice(v, scale, ring + i * SLICE_PITCH);
        }
        __syncthreads();
#if HAS_DX
        int most = powers[0];
#pragma unroll
        for (int c = 1; c < BLOCK_C; c++) most = powers[c] > most ? powers[c] : most;
        prepare_back(p_w, exponents, powers, most, back);  // a barrier follows before it is read
        float undo0 = power_of_two((most - 14) / 2), undo1 = power_of_two(most - 14 - (most - 14) / 2);
        SliceSums slice_sums[KD] = {};
#endif
#if HAS_DW
        u32 counted = (2 * t >= xs.skip ? 0xffffu : 0u) | (2 * t + 1 >= xs.skip ? 0xffff0000u : 0u);
#endif
        u32 columns = 0u;
#pragma unroll
        for (int i = 0; i < 4; i++) columns |= (u32)(8 * i + g < xs.count) << i;
#pragma unroll 1
        for (int z = 0; z < zs.count; z++) {
            input_t ahead[LOADS_PER_THREAD][4];
            if (z + 1 < zs.count)
                fetch_slice(p_sample, zs.first - PD + z + KD, ys.first - PH, xs.first - PW, ahead);
            const int* places = offsets + z % RING_SLICES * (K_STEPS * 4);
#pragma unroll 1
            for (int y = warp * ROWS_PER_WARP; y < BLOCK_H; y += WARPS * ROWS_PER_WARP) {
                Sums sums = {};
                if (y < ys.count) multiply(ring + y * ROW_PITCH + g, places + t, fragments + lane, zero, sums);
                u32 valid = 0u;
#pragma unroll
                for (int r = 0; r < ROWS_PER_WARP; r++) valid |= y + r < ys.count ? columns << (4 * r) : 0u;
                store_rows(sums, valid, unscales + 2 * t, slopes + 2 * t, shifts + 2 * t,
                           dv + (y * DV_ROW + DV_LEFT + g) * DV_STRIDE + 2 * t);
            }
            __syncthreads();
            if (z + 1 < zs.count) store_input_slice(ahead, scale, ring + (z + KD) % RING_SLICES * SLICE_PITCH);
#if HAS_DW
            if (z >= zs.skip) add_weight(ring, places, dv, ys.skip, ys.count, counted, undo_weight, weight_sums);
#endif
#if HAS_DX
            add_input(dv, back + lane, ys.low + PH - ys.first, xs.low + PW - xs.first, slice_sums);
            int done = zs.first + z - PD;  // no later slice of dv contributes to it
            if (zs.low <= done && done < zs.high)
                store_slice(slice_sums[0], ys, xs, undo0, undo1, p_dx + i_n * (long long)DX_N + done * DX_D);
#pragma unroll
            for (int i = 0; i < KD * M_TILES_PER_WARP * 4; i++) {
                int kd = i / (M_TILES_PER_WARP * 4), m = i / 4 % M_TILES_PER_WARP;
                slice_sums[kd][m][i % 4] = kd + 1 < KD ? slice_sums[kd + 1 < KD ? kd + 1 : kd][m][i % 4] : 0.0f;
            }
#endif
            __syncthreads();
        }
#if HAS_DX
#pragma unroll
        for (int i = 0; i + 1 < KD; i++) {
            int left = zs.first + zs.count - PD + i;
            if (zs.low <= left && left < zs.high)
                store_slice(slice_sums[i], ys, xs, undo0, undo1, p_dx + i_n * (long long)DX_N + left * DX_D);
        }
#endif
    }
#if HAS_DW
    store_weight(weight_sums, p_dw + (long long)blockIdx.x * (C_OUT * C_IN * TAPS));
#endif
}
