// The convolution of few channels as products of a staged tile: the weight's fragments, and R rows of 32 outputs.
//
// Needs geometry.cuh. See few_channels.cu for the order of the columns.

// R rows of 32 outputs, as fragments: row i / 2, x = 16·(i % 2) + g and the same + 8
typedef float Sums[2 * R][NFRAG][4];

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
