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
#include "moments.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int CHANNELS = NFRAG * 8;  // of this block, padded
constexpr int XS = 4 / CIN;
constexpr int CW = (KW + XS - 1) / XS;  // chunks of one (kd, kh)
constexpr int CHUNKS = KD * KH * CW;
constexpr int STEPS = (CHUNKS + 3) / 4;
constexpr int IN_H = TH + KH - 1;
constexpr int COLUMNS = 32 + (CW - 1) * XS;  // slots of a row that are read
// The 4 chunks of a product may lie in two neighbouring rows. Reads are free of bank conflicts where those are half
// of the banks apart, also from the last row of one kd to the first of the next: HALF slots are 64 bytes.
constexpr int HALF = 8 / PLANES;
constexpr int PITCH = (COLUMNS + HALF - 1) / (2 * HALF) * (2 * HALF) + HALF;
constexpr int PLANE = IN_H * PITCH + (TH % 2 == 0 ? HALF : 0);
constexpr int TILE = (TD + KD - 1) * PLANE;
constexpr int FRAGMENTS = STEPS * NFRAG * 32;
constexpr int BATCH = 4;  // positions whose loads are in flight together

static_assert(1 <= CIN && CIN <= 4 && KW <= 4 && TH % R == 0, "unsupported settings");
static_assert(CHANNELS <= THREADS && STEPS * 4 <= THREADS, "too few warps");
constexpr int WORDS = 5 * CHANNELS + WARPS * (2 * CHANNELS + 2) + STEPS * 4 + 1;  // behind the slots
static_assert((TILE + FRAGMENTS) * sizeof(slot_t) + WORDS * 4 == SHARED_BYTES, "the host counts differently");

#include "tile.cuh"

struct Weight {
    int stride_o, stride_c, stride_d, stride_h, stride_w;
};

__device__ __forceinline__ int tap_offset(const Weight& w, int kd, int kh, int kw)
{
    if (FLIP) kd = KD - 1 - kd, kh = KH - 1 - kh, kw = KW - 1 - kw;
    return kd * w.stride_d + kh * w.stride_h + kw * w.stride_w;
}

// The weight as fragments [STEPS, NFRAG, lane]; per channel its scale, the power to undo, and the bias
__device__ __forceinline__ void prepare(const input_t* p_w, const input_t* p_bias, const Weight& w, int c0,
                                        slot_t* fragments, float* scales, int* undo, float* biases)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int c = warp; c < CHANNELS; c += WARPS) {
        bool real = c0 + c < COUT;
        u32 largest = 0u;
#pragma unroll 1
        for (int i = lane; SCALED && real && i < CIN * KD * KH * KW; i += 32) {
            int tap = i / CIN;
            int at = tap_offset(w, tap / (KH * KW), tap / KW % KH, tap % KW);
            float value = as_float(p_w[(c0 + c) * w.stride_o + i % CIN * w.stride_c + at]);
            largest = larger(largest, finite_magnitude(value));
        }
        int exponent = SCALED ? exponent_of(warp_max(largest)) : 14;
        if (lane == 0) {
            scales[c] = power_of_two(14 - exponent);
            undo[c] = exponent - 14;
            biases[c] = real && p_bias != nullptr ? as_float(p_bias[c0 + c]) : 0.0f;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < FRAGMENTS; i += THREADS) {
        int c = i / 32 % NFRAG * 8 + i % 32 / 4;
        int chunk = i / (32 * NFRAG) * 4 + i % 4;
        input_t v[4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            int kw = chunk % CW * XS + s / CIN;
            v[s] = 0;
            if (chunk < CHUNKS && kw < KW && s < CIN * XS && c0 + c < COUT) {
                int at = tap_offset(w, chunk / (KH * CW), chunk / CW % KH, kw);
                v[s] = p_w[(c0 + c) * w.stride_o + s % CIN * w.stride_c + at];
#if SCALED
                v[s] *= scales[c];
#endif
            }
        }
        fragments[i] = make_slot(v);
    }
}

// A fragment's registers lie next to one another, but each read of a slot gives every other one of them. The compiler
// would copy them anew for every product; a change that it cannot see through, by `zero`, makes it do so once.
struct Fragment {
    u32 a0, a1, a2, a3;
};

__device__ __forceinline__ Fragment fragment_of(u32 top0, u32 bottom0, u32 top1, u32 bottom1, u32 zero)
{
    return {top0 ^ zero, bottom0 ^ zero, top1 ^ zero, bottom1 ^ zero};
}

__device__ __forceinline__ void multiply(const slot_t* at, const int* offsets, const slot_t* weights, u32 zero,
                                         Sums& sums)
{
#pragma unroll 1  // all at once needs more registers than there are
    for (int j = 0; j < STEPS; j++) {
        const slot_t* from = at + offsets[j * 4];
        slot_t b[NFRAG];
#pragma unroll
        for (int n = 0; n < NFRAG; n++) b[n] = weights[(j * NFRAG + n) * 32];
#pragma unroll
        for (int m = 0; m < 2 * R; m++) {
            slot_t top = from[m / 2 * PITCH + m % 2 * 16], bottom = from[m / 2 * PITCH + m % 2 * 16 + 8];
            Fragment high = fragment_of(top.x, bottom.x, top.y, bottom.y, zero);
#if PLANES == 2
            // Tensor cores cut off what does not fit while they accumulate: the sum over one step stays short, small
            // products first, and is added up in ordinary fp32.
            Fragment low = fragment_of(top.z, bottom.z, top.w, bottom.w, zero);
            float part[NFRAG][4] = {};
#pragma unroll
            for (int n = 0; n < NFRAG; n++) mma(part[n], low.a0, low.a1, low.a2, low.a3, b[n].x, b[n].y);
#pragma unroll
            for (int n = 0; n < NFRAG; n++) mma(part[n], high.a0, high.a1, high.a2, high.a3, b[n].z, b[n].w);
#pragma unroll
            for (int n = 0; n < NFRAG; n++) mma(part[n], high.a0, high.a1, high.a2, high.a3, b[n].x, b[n].y);
#pragma unroll
            for (int i = 0; i < NFRAG * 4; i++) sums[m][i / 4][i % 4] += part[i / 4][i % 4];
#else
#pragma unroll
            for (int n = 0; n < NFRAG; n++) mma(sums[m][n], high.a0, high.a1, high.a2, high.a3, b[n].x, b[n].y);
#endif
        }
    }
}

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
            take_in(have, sums, valid, unscales + 2 * t, biases + 2 * t);
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
            p_mean[at] = mean;
            p_m2[at] = m2;
        }
    }
}
