// The convolution of few channels as tensor-core products on a staged tile: fragments of the weight, rows of 32
// outputs.
//
// Needs geometry.cuh. See few_channels.cu for the order of the columns.

__device__ __forceinline__ int weight_offset(int o, int c, int tap)
{
#if IS_FLIPPED
    tap = TAPS - 1 - tap;
#endif
    return o * W_O + c * W_C + tap / (KH * KW) * W_D + tap / KW % KH * W_H + tap % KW * W_W;
}

// Writes the weight of the channels from c0 on as fragments [K_STEPS, NFRAG, lane], and the exponents of its scales
__device__ __forceinline__ void prepare(const input_t* p_w, int c0, slot_t* fragments, int* exponents)
{
#if IS_SCALED
    for (int c = threadIdx.x / 32; c < BLOCK_C; c += WARPS) {
        float largest = 0.0f;
        for (int i = threadIdx.x % 32; i < C_IN * TAPS && c0 + c < C_OUT; i += 32)
#if KEEPS_INF
            largest = fmaxf(largest, magnitude(p_w[weight_offset(c0 + c, i / TAPS, i % TAPS)]));
#else
            largest = fmaxf(largest, fabsf(p_w[weight_offset(c0 + c, i / TAPS, i % TAPS)]));
#endif
        exponents[c] = warp_exponent(largest);
    }
#else
    if (threadIdx.x < BLOCK_C) exponents[threadIdx.x] = 14;  // a scale of 1
#endif
    __syncthreads();
    for (int i = threadIdx.x; i < FRAGMENT_SLOTS; i += THREADS) {
        int c = i / 32 % NFRAG * 8 + i % 32 / 4, chunk = i / (32 * NFRAG) * 4 + i % 4;
        input_t v[4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            int kw = chunk % TAP_CHUNKS_W * TAPS_PER_SLOT + s / C_IN;
            bool is_there = chunk < TAP_CHUNKS && kw < KW && s < C_IN * TAPS_PER_SLOT && c0 + c < C_OUT;
            v[s] = is_there ? p_w[weight_offset(c0 + c, s % C_IN, chunk / TAP_CHUNKS_W * KW + kw)] : (input_t)0;
        }
        fragments[i] = make_slot(v, power_of_two(14 - exponents[c]));
    }
}

// ROWS_PER_WARP rows of 32 outputs as fragments m: row m / 2, x = 16·(m % 2) + g, and the same x + 8
typedef float Sums[2 * ROWS_PER_WARP][NFRAG][4];

__device__ __forceinline__ void multiply(const slot_t* at, const int* offsets, const slot_t* weights, u32 zero,
                                         Sums& sums)
{
#pragma unroll 1  // unrolled, it needs more registers than there are
    for (int j = 0; j < K_STEPS; j++) {
        const slot_t* from = at + offsets[j * 4];
        slot_t b[NFRAG];
#pragma unroll
        for (int n = 0; n < NFRAG; n++) b[n] = weights[(j * NFRAG + n) * 32];
#pragma unroll
        for (int m = 0; m < 2 * ROWS_PER_WARP; m++) {
            slot_t top = from[m / 2 * ROW_PITCH + m % 2 * 16], bottom = from[m / 2 * ROW_PITCH + m % 2 * 16 + 8];
            // Copied once, here. If the compiler knew that `zero` is 0, it would copy them for every product
            u32 high[4] = {top.x ^ zero, bottom.x ^ zero, top.y ^ zero, bottom.y ^ zero};
#if PLANES == 2
            u32 low[4] = {top.z ^ zero, bottom.z ^ zero, top.w ^ zero, bottom.w ^ zero};
            // Tensor cores truncate while they accumulate: the sum is kept short, with small products first
            float part[NFRAG][4] = {};
#pragma unroll
            for (int n = 0; n < NFRAG; n++) mma(part[n], low, b[n].x, b[n].y);
#pragma unroll
            for (int n = 0; n < NFRAG; n++) mma(part[n], high, b[n].z, b[n].w);
#pragma unroll
            for (int n = 0; n < NFRAG; n++) mma(part[n], high, b[n].x, b[n].y);
#pragma unroll
            for (int i = 0; i < NFRAG * 4; i++) sums[m][i / 4][i % 4] += part[i / 4][i % 4];
#else
#pragma unroll
            for (int n = 0; n < NFRAG; n++) mma(sums[m][n], high, b[n].x, b[n].y);
#endif
        }
    }
}
