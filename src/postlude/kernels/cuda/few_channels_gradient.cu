// Gradients of a convolution of 1 to 4 input channels whose result v is not stored: the gradient at v is affine in v
// per sample and channel, dv = shift + slope·v, so v is computed again, plane by plane, and dv never leaves the block.
//
//   dW[o, c, k] = Σ dv[n, o, p]·x[n, c, p + k − P]        dx[n, c, q] = Σ dv[n, o, q − k + P]·w[o, c, k]
//
// A block walks over tiles of TD×TH×32 positions of v; with INPUT they overlap by the kernel's reach, so that each
// gives whole sums of dx, and dW counts only what the tile before has not. Within a tile it goes from plane to plane:
// a ring holds the KD input planes that one plane of v reads and the one to come (see few_channels.cu for the slots).
// The warps compute R rows of v each, store dv as 16-bit numbers, [TH, columns, channels], in one plane or two as the
// input, and after a barrier use it for both gradients.
//
//   WEIGHT: a matrix of 8 slots, transposed, is the numbers of one chunk (high and low) by 8 positions. Two chunks by
//   16 positions are one operand, dv of 16 positions by 8 channels the other: a warp owns PAIRS pairs of chunks.
//   INPUT: a row is OPR neighbouring outputs, its sum runs over the OPR + KW − 1 positions of dv that they read, by
//   channels; the columns are those outputs' channels. A plane of dv adds to KD planes of dx, which a warp keeps.
//
// dv comes scaled: p_table has shift and slope times 2^e for an e that brings every |dv| under 2¹⁵, and e. dW takes it
// out sum by sum; for dx the weight's fragments are made anew for every tile, with 2^-e and a power of two that keeps
// the largest of them in 2¹⁴…2¹⁵.
//
// Compile-time: as few_channels.cu, and WEIGHT, INPUT (which gradients), SPLITS (warps that share a pair's
// positions), PROMOTE (rows between additions in ordinary fp32, for tensor cores cut off what does not fit).

#define WIDE_SLOTS 1
#include "operands.cuh"
#include "geometry.cuh"
#include "matrices.cuh"

constexpr int RING = KD + 1;
constexpr int PAIRS_IN_ALL = (CHUNKS + 1) / 2;
constexpr int OWNERS = WARPS / SPLITS;
constexpr int PAIRS = (PAIRS_IN_ALL + OWNERS - 1) / OWNERS;
constexpr int OPR = CIN > 2 ? 2 : 4;
constexpr int REACH = OPR + KW - 1;
constexpr int GROUPS = 8 / OPR;  // of 4 rows of a product, in a row of 32 outputs
constexpr int TILES = ((TH + 1) / 2 * GROUPS + 1) / 2;  // of 16 rows
constexpr int MINE = (TILES + WARPS - 1) / WARPS;  // of those, a warp's
constexpr int KSTEPS = (REACH * NFRAG + 1) / 2;
constexpr int BACK = INPUT ? KD * KH * KSTEPS * 32 : 0;
// Positions of dv an odd number of 16 bytes apart, and rows too where 4 positions of each of two are read at once:
// free of bank conflicts.
constexpr int STRIDE = (NFRAG | 1) * 8;
constexpr int LEFT = INPUT ? KW - 1 : 0;  // zeros before a row; as many behind it
constexpr int ROW = INPUT ? 33 + 2 * (KW - 1) : 32;
constexpr int NOTHING = TH * ROW * STRIDE;  // where zeros are, for rows outside
constexpr int DV = NOTHING + (INPUT ? REACH * STRIDE : 0);
constexpr int PROMOTE_STEPS = 3;  // products of dx between additions in ordinary fp32
constexpr int LOADS = (IN_H * COLUMNS + THREADS - 1) / THREADS;
constexpr int WORDS = 10 * CHANNELS + WARPS + RING * STEPS * 4;

static_assert(WARPS % SPLITS == 0 && CHANNELS <= THREADS && COUT <= CHANNELS, "unsupported settings");
static_assert(!INPUT || (TD >= KD && TH >= KH), "a tile must be larger than what it shares with the next");
static_assert((RING * PLANE + FRAGMENTS + BACK) * sizeof(slot_t) + PLANES * DV * 2 + WORDS * 4 == SHARED_BYTES,
              "the host counts differently");

#include "tile.cuh"
#include "products.cuh"

// A tile along one axis: positions of v from `first` on, of which the tile before has counted the first `skip`, and
// the outputs of dx from `low` to before `high`
struct Extent {
    int first, count, skip, low, high;
};

template <int SIZE, int TAPS, int PADDING>
__device__ __forceinline__ Extent extent_of(int i, bool is_last, int out, int size)
{
    int first = i * (INPUT ? SIZE - TAPS + 1 : SIZE);
    int reach = i == 0 ? 0 : TAPS - 1;
    return {first, min(SIZE, out - first), INPUT ? reach : 0, i == 0 ? 0 : first + reach - PADDING,
            is_last ? size : first + SIZE - PADDING};
}

// The largest finite magnitude of a tile's input, by all warps; ends in a barrier
__device__ __forceinline__ int exponent_of_tile(const input_t* p_x, const Volume& in, int positions, int z0, int y0,
                                                int x0, u32* largest_of_warp)
{
    u32 largest = 0u;
#if SCALED
#pragma unroll 1
    for (int first = threadIdx.x; first < positions; first += THREADS * BATCH) {
        input_t v[BATCH][4];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (first + b * THREADS < positions) fetch(p_x, in, first + b * THREADS, z0, y0, x0, v[b]);
#pragma unroll
        for (int i = 0; i < BATCH * 4; i++)
            if (i % 4 < CIN * XS && first + i / 4 * THREADS < positions)
                largest = larger(largest, finite_magnitude(v[i / 4][i % 4]));
    }
    return exponent_of(block_max(largest, largest_of_warp));
#else
    return 14;
#endif
}

__device__ __forceinline__ void fetch_plane(const input_t* p_x, const Volume& in, int z, int y0, int x0,
                                            input_t (&v)[LOADS][4])
{
#pragma unroll
    for (int i = 0; i < LOADS; i++)
        if (threadIdx.x + i * THREADS < IN_H * COLUMNS) fetch(p_x, in, threadIdx.x + i * THREADS, z, y0, x0, v[i]);
}

__device__ __forceinline__ void store_input_plane(input_t (&v)[LOADS][4], float scale, slot_t* plane)
{
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        if (threadIdx.x + i * THREADS >= IN_H * COLUMNS) continue;
#if SCALED
#pragma unroll
        for (int s = 0; s < 4; s++) v[i][s] *= scale;
#endif
        plane[place_of(threadIdx.x + i * THREADS)] = make_slot(v[i]);
    }
}

// The exponent of each channel's largest weight; of none, the least
__device__ __forceinline__ void weight_exponents(const input_t* p_w, const Weight& w, int* exponents)
{
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int c = threadIdx.x / 32; c < CHANNELS; c += WARPS) {
        u32 largest = 0u;
#pragma unroll 1
        for (int i = lane; c < COUT && i < CIN * KD * KH * KW; i += 32) {
            int at = tap_offset(w, i / CIN / (KH * KW), i / CIN / KW % KH, i / CIN % KW);
            largest = larger(largest, finite_magnitude(as_float(p_w[c * w.stride_o + i % CIN * w.stride_c + at])));
        }
        largest = warp_max(largest);
        if (lane == 0) exponents[c] = largest == 0u ? -112 : exponent_of(largest);
    }
}

// The weight as fragments [KD, KH, KSTEPS, lane] of the product that gives dx. Their sum runs over octets of channels
// of neighbouring positions, from the left; position j meets output o of a row through the tap o + KW − 1 − j.
__device__ __forceinline__ void prepare_back(const input_t* p_w, const Weight& w, const int* exponents,
                                             const int* powers, int most, slot_t* back)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < BACK; i += THREADS) {
        int g = i % 32 / 4, t = i % 4, step = i / 32 % KSTEPS, kh = i / 32 / KSTEPS % KH, kd = i / 32 / KSTEPS / KH;
        float v[4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            int octet = 2 * step + s / 2, channel = octet % NFRAG * 8 + 2 * t + s % 2;
            int kw = g / CIN + KW - 1 - octet / NFRAG;
            v[s] = 0.0f;
            if (g < OPR * CIN && octet < REACH * NFRAG && channel < COUT && 0 <= kw && kw < KW) {
                int less = powers[channel] - most;
                v[s] = as_float(p_w[channel * w.stride_o + g % CIN * w.stride_c + tap_offset(w, kd, kh, kw)]) *
                       power_of_two(14 - exponents[channel]) * power_of_two(less < -126 ? -126 : less);
            }
        }
        back[i] = make_slot(v);
    }
}

// dv of R rows: [R, 32] positions from `at` on, which is column g and channel 2t. Bit 4r + i of `valid` as in moments.
__device__ __forceinline__ void store_rows(const Sums& sums, u32 valid, const float* unscales, const float* slopes,
                                           const float* shifts, u16* at)
{
#pragma unroll
    for (int n = 0; n < NFRAG; n++) {
        float slope[2] = {slopes[n * 8], slopes[n * 8 + 1]}, shift[2] = {shifts[n * 8], shifts[n * 8 + 1]};
#if SCALED
        float unscale[2] = {unscales[n * 8], unscales[n * 8 + 1]};
#endif
#pragma unroll
        for (int k = 0; k < 4 * R; k++) {
            float dv[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float v = sums[k / 2][n][k % 2 * 2 + c];
#if SCALED
                v *= unscale[c];
#endif
                dv[c] = valid >> k & 1u ? v * slope[c] + shift[c] : 0.0f;
            }
            u32* to = (u32*)(at + (k / 4 * ROW + k % 4 * 8) * STRIDE + n * 8);
            u32 high = pack_pair(dv[0], dv[1]);
            *to = high;
#if PLANES == 2
            to[DV / 2] = pack_pair(rest_of(dv[0], high, 0), rest_of(dv[1], high, 1));
#endif
        }
    }
}

#if WEIGHT
#include "weight_sums.cuh"
#endif
#if INPUT
#include "input_sums.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) few_channels_gradient(
    const input_t* __restrict__ p_x,  // [N, CIN, D, H, W] through its strides
    const input_t* __restrict__ p_w,  // [COUT, CIN, KD, KH, KW] through its strides
    const float* __restrict__ p_table,  // [N, COUT, 4]: shift and slope times 2^e, e, nothing
    float* __restrict__ p_dw,  // [blocks · SPLITS, size of the weight] through its strides, out; added up they are dW
    input_t* __restrict__ p_dx,  // as x, through its own strides, out
    int units,  // tiles of all samples
    int tiles,  // of a sample, of one depth in it, and of one row of those
    int tiles_hw, int tiles_w,
    int out_d, int out_h, int out_w,
    long long stride_n, int stride_c, int stride_d, int stride_h, int stride_w,
    int d, int h, int w,
    long long dx_stride_n, int dx_stride_c, int dx_stride_d, int dx_stride_h, int dx_stride_w,
    int w_stride_o, int w_stride_c, int w_stride_d, int w_stride_h, int w_stride_w,
    int dw_stride_o, int dw_stride_c, int dw_stride_d, int dw_stride_h, int dw_stride_w,
    u32 zero)  // 0, which the compiler cannot know
{
    extern __shared__ uint4 shared[];
    slot_t* ring = (slot_t*)shared;  // [RING, IN_H, COLUMNS] with PLANE and PITCH
    slot_t* fragments = ring + RING * PLANE;  // [STEPS, NFRAG, 32]
    slot_t* back = fragments + FRAGMENTS;  // [KD, KH, KSTEPS, 32]
    u16* dv = (u16*)(back + BACK);  // [PLANES, TH, ROW, STRIDE] with DV
    float* scales = (float*)(dv + PLANES * DV);  // [CHANNELS]
    int* undo = (int*)(scales + CHANNELS);
    float* biases = (float*)(undo + CHANNELS);
    int* exponents = (int*)(biases + CHANNELS);
    float* unscales = (float*)(exponents + CHANNELS);
    float* slopes = unscales + CHANNELS;
    float* shifts = slopes + CHANNELS;
    float* undo_weight = shifts + CHANNELS;  // [2, CHANNELS]
    int* powers = (int*)(undo_weight + 2 * CHANNELS);
    u32* largest_of_warp = (u32*)(powers + CHANNELS);
    int* offsets = (int*)(largest_of_warp + WARPS);  // [RING, STEPS, 4]

    Volume in = {d, h, w, stride_c, stride_d, stride_h, stride_w};
    Weight weight = {w_stride_o, w_stride_c, w_stride_d, w_stride_h, w_stride_w};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < RING * STEPS * 4; i += THREADS) {
        int chunk = i % (STEPS * 4) < CHUNKS ? i % (STEPS * 4) : 0;  // past the last, any: its weights are 0
        offsets[i] = (i / (STEPS * 4) + chunk / (KH * CW)) % RING * PLANE + chunk / CW % KH * PITCH + chunk % CW * XS;
    }
#if INPUT
#pragma unroll 1
    for (int i = threadIdx.x; i < PLANES * DV / 2; i += THREADS) ((u32*)dv)[i] = 0u;
    weight_exponents(p_w, weight, exponents);
#endif
    prepare(p_w, nullptr, weight, 0, fragments, scales, undo, biases);
#if WEIGHT
    WeightSums weight_sums = {};
#endif
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        int i_n = unit / tiles, i_tile = unit % tiles;
        int i_z = i_tile / tiles_hw, i_y = i_tile % tiles_hw / tiles_w, i_x = i_tile % tiles_w;
        Extent zs = extent_of<TD, KD, PD>(i_z, i_z == tiles / tiles_hw - 1, out_d, d);
        Extent ys = extent_of<TH, KH, PH>(i_y, i_y == tiles_hw / tiles_w - 1, out_h, h);
        Extent xs = extent_of<32, KW, PW>(i_x, i_x == tiles_w - 1, out_w, w);
        const input_t* p_sample = p_x + i_n * stride_n;
        int exponent = exponent_of_tile(p_sample, in, (zs.count + KD - 1) * IN_H * COLUMNS, zs.first - PD,
                                        ys.first - PH, xs.first - PW, largest_of_warp);
        float scale = power_of_two(14 - exponent);
        if (threadIdx.x < CHANNELS) {
            int c = threadIdx.x;
            const float* row = p_table + ((long long)i_n * COUT + c) * 4;
            float shift = c < COUT ? row[0] : 0.0f, slope = c < COUT ? row[1] : 0.0f;
            int scaled = c < COUT ? (int)row[2] : 100;
            int both = exponent - 14 + undo[c], all = exponent - 14 - scaled;
            shifts[c] = shift;
            slopes[c] = slope * power_of_two(both / 2);
            unscales[c] = power_of_two(both - both / 2);
            undo_weight[c] = power_of_two(all / 2);
            undo_weight[CHANNELS + c] = power_of_two(all - all / 2);
            powers[c] = INPUT && c < COUT ? exponents[c] - scaled : -1000;
        }
#pragma unroll 1
        for (int i = 0; i < KD; i++) {
            input_t v[LOADS][4];
            fetch_plane(p_sample, in, zs.first - PD + i, ys.first - PH, xs.first - PW, v);
            store_input_plane(v, scale, ring + i * PLANE);
        }
        __syncthreads();
#if INPUT
        int most = powers[0];
#pragma unroll
        for (int c = 1; c < CHANNELS; c++) most = powers[c] > most ? powers[c] : most;
        prepare_back(p_w, weight, exponents, powers, most, back);  // a barrier follows before it is read
        float undo0 = power_of_two((most - 14) / 2), undo1 = power_of_two(most - 14 - (most - 14) / 2);
        Volume to = {d, h, w, dx_stride_c, dx_stride_d, dx_stride_h, dx_stride_w};
        PlaneSums plane_sums[KD] = {};
#endif
#if WEIGHT
        u32 counted = (2 * t >= xs.skip ? 0xffffu : 0u) | (2 * t + 1 >= xs.skip ? 0xffff0000u : 0u);
#endif
        u32 columns = 0u;
#pragma unroll
        for (int i = 0; i < 4; i++) columns |= (u32)(8 * i + g < xs.count) << i;
#pragma unroll 1
        for (int z = 0; z < zs.count; z++) {
            input_t ahead[LOADS][4];
            if (z + 1 < zs.count)
                fetch_plane(p_sample, in, zs.first - PD + z + KD, ys.first - PH, xs.first - PW, ahead);
            const int* places = offsets + z % RING * (STEPS * 4);
#pragma unroll 1
            for (int y = warp * R; y < TH; y += WARPS * R) {
                Sums sums = {};
                if (y < ys.count) multiply(ring + y * PITCH + g, places + t, fragments + lane, zero, sums);
                u32 valid = 0u;
#pragma unroll
                for (int r = 0; r < R; r++) valid |= y + r < ys.count ? columns << (4 * r) : 0u;
                store_rows(sums, valid, unscales + 2 * t, slopes + 2 * t, shifts + 2 * t,
                           dv + (y * ROW + LEFT + g) * STRIDE + 2 * t);
            }
            __syncthreads();
            if (z + 1 < zs.count) store_input_plane(ahead, scale, ring + (z + KD) % RING * PLANE);
#if WEIGHT
            if (z >= zs.skip) add_weight(ring, places, dv, ys.skip, ys.count, counted, undo_weight, weight_sums);
#endif
#if INPUT
            add_input(dv, back + lane, ys.low + PH - ys.first, xs.low + PW - xs.first, plane_sums);
            int done = zs.first + z - PD;  // no later plane of dv reaches it
            if (zs.low <= done && done < zs.high)
                store_plane(plane_sums[0], ys, xs, to, undo0, undo1, p_dx + i_n * dx_stride_n + done * dx_stride_d);
#pragma unroll
            for (int i = 0; i < KD * MINE * 4; i++) {
                int kd = i / (MINE * 4), m = i / 4 % MINE;
                plane_sums[kd][m][i % 4] = kd + 1 < KD ? plane_sums[kd + 1 < KD ? kd + 1 : kd][m][i % 4] : 0.0f;
            }
#endif
            __syncthreads();
        }
#if INPUT
#pragma unroll
        for (int i = 0; i + 1 < KD; i++) {
            int left = zs.first + zs.count - PD + i;
            if (zs.low <= left && left < zs.high)
                store_plane(plane_sums[i], ys, xs, to, undo0, undo1, p_dx + i_n * dx_stride_n + left * dx_stride_d);
        }
#endif
    }
#if WEIGHT
    Weight dweight = {dw_stride_o, dw_stride_c, dw_stride_d, dw_stride_h, dw_stride_w};
    long long part = (long long)blockIdx.x * SPLITS + warp % SPLITS;
    store_weight(weight_sums, dweight, p_dw + part * (COUT * CIN * KD * KH * KW));
#endif
}
