// dW, the weight's gradient: a warp's pairs of chunks times all channels, summed over the positions of a slice. Sums
// are promoted to ordinary fp32 every PROMOTE_ROWS rows. Needs few_channels_gradient.cu's constants.

typedef float WeightSums[PAIRS][NFRAG][4];

// Adds the contribution of rows [first, rows) of one slice. `counted` has a bit for each of the positions 2t and 2t + 1
// of a row that count.
__device__ __forceinline__ void add_weight(const slot_t* ring, const int* offsets, const u16* dv, int first, int rows,
                                           u32 counted, const float* undo, WeightSums& sums)
{
    int lane = threadIdx.x % 32, matrix = lane / 8, t = lane % 4;
    int owned = threadIdx.x / 32 * PAIRS;
    if (owned >= PAIRS_IN_ALL) return;
    const slot_t* slots[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        int chunk = 2 * (owned + p) + matrix % 2;
        slots[p] = ring + offsets[chunk < TAP_CHUNKS ? chunk : 0] + matrix / 2 * 8 + lane % 8;
    }
#if PLANES == 2
    const u16* from = dv + matrix / 2 * DV_SIZE + (DV_LEFT + matrix % 2 * 8 + lane % 8) * DV_STRIDE;
#else
    const u16* from = dv + (DV_LEFT + lane) * DV_STRIDE;
#endif
#pragma unroll 1
    for (int base = first; base < rows; base += PROMOTE_ROWS) {
        WeightSums part = {};
        int stop = min(base + PROMOTE_ROWS, rows);
#pragma unroll 1
        for (int y = base; y < stop; y++) {
            u32 b[NFRAG][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int n = 0; n < NFRAG; n++) {
                    if (PLANES == 2 || half == 0)
                        load_transposed(b[n], from + (y * DV_ROW + half * 16) * DV_STRIDE + n * 8);
                    if (half == 0) b[n][0] &= counted;
                    if (half == 0 && PLANES == 2) b[n][2] &= counted;
                }
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    if (owned + p >= PAIRS_IN_ALL) continue;
                    u32 a[4];
                    load_transposed(a, slots[p] + y * ROW_PITCH + half * 16);
#pragma unroll
                    for (int n = 0; n < NFRAG; n++) {
#if PLANES == 2
                        mma(part[p][n], a, b[n][2], b[n][3]);
                        mma(part[p][n], a, b[n][0], b[n][1]);
#else
                        mma(part[p][n], a, b[n][2 * half], b[n][2 * half + 1]);
#endif
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < NFRAG * 4; i++) {
            int c = i / 4 * 8 + 2 * t + i % 2;
            float undo0 = undo[c], undo1 = undo[BLOCK_C + c];
#pragma unroll
            for (int p = 0; p < PAIRS; p++) sums[p][i / 4][i % 4] += part[p][i / 4][i % 4] * undo0 * undo1;
        }
    }
}

// A chunk's rows are its numbers, high plane first, then low: adds the two and stores them at the weight's position
__device__ __forceinline__ void store_weight(const WeightSums& sums, float* p_dw)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int owned = threadIdx.x / 32 * PAIRS;
#pragma unroll
    for (int i = 0; i < PAIRS * NFRAG * 4; i++) {
        int p = i / (NFRAG * 4), n = i / 4 % NFRAG;
        int chunk = 2 * (owned + p) + i / 2 % 2, channel = n * 8 + 2 * t + i % 2;
        float sum = sums[p][n][i % 4];
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        int kw = chunk % TAP_CHUNKS_W * TAPS_PER_SLOT + g / C_IN, tap = chunk / TAP_CHUNKS_W * KW + kw;
        if (chunk < TAP_CHUNKS && g < C_IN * TAPS_PER_SLOT && kw < KW && channel < C_OUT)
#if IS_FLIPPED
            p_dw[(g % C_IN * C_OUT + channel) * TAPS + TAPS - 1 - tap] = sum;
#else
            p_dw[(channel * C_IN + g % C_IN) * TAPS + tap] = sum;
#endif
    }
}
