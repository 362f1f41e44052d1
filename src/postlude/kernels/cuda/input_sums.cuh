// dx: what a plane of dv adds to the planes of the input's gradient that it reaches. Needs few_channels_gradient.cu's
// constants.

typedef float PlaneSums[MINE][4];

// Adds what one plane of dv gives to the KD planes of dx that it reaches. Row y of the tile's outputs lies at row
// y + above of dv, its first column at column `before`, both for the last tap.
__device__ __forceinline__ void add_input(const u16* dv, const slot_t* back, int above, int before,
                                          PlaneSums (&sums)[KD])
{
    int lane = threadIdx.x % 32, matrix = lane / 8, r = lane % 8;
#pragma unroll 1
    for (int kh = 0; kh < KH; kh++) {
        const u16* from[MINE];
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            int eight = 2 * (threadIdx.x / 32 * MINE + m) + matrix % 2;
            int y = eight / GROUPS * 2 + r / 4 + above - kh, x = before + (eight % GROUPS * 4 + r % 4) * OPR;
            from[m] = dv + ((u32)y < (u32)TH ? (y * ROW + x) * STRIDE : NOTHING);
        }
        PlaneSums part[KD] = {};
#pragma unroll
        for (int step = 0; step < KSTEPS; step++) {
            constexpr int LAST = REACH * NFRAG - 1;
            int octet = min(2 * step + matrix / 2, LAST);
            int offset = NFRAG % 2 ? octet * 8 : octet / NFRAG * STRIDE + octet % NFRAG * 8;
            u32 high[MINE][4];
#if PLANES == 2
            u32 low[MINE][4];
#endif
#pragma unroll
            for (int m = 0; m < MINE; m++) {
                load_matrices(high[m], from[m] + offset);
#if PLANES == 2
                load_matrices(low[m], from[m] + offset + DV);
#endif
            }
#pragma unroll
            for (int kd = 0; kd < KD; kd++) {
                slot_t b = back[((kd * KH + kh) * KSTEPS + step) * 32];
#pragma unroll
                for (int m = 0; m < MINE; m++) {
#if PLANES == 2
                    mma(part[kd][m], low[m][0], low[m][1], low[m][2], low[m][3], b.x, b.y);
                    mma(part[kd][m], high[m][0], high[m][1], high[m][2], high[m][3], b.z, b.w);
#endif
                    mma(part[kd][m], high[m][0], high[m][1], high[m][2], high[m][3], b.x, b.y);
                }
            }
            if (step % PROMOTE_STEPS != PROMOTE_STEPS - 1 && step != KSTEPS - 1) continue;
#pragma unroll
            for (int i = 0; i < KD * MINE * 4; i++) {
                float& sum = part[i / (MINE * 4)][i / 4 % MINE][i % 4];
                sums[i / (MINE * 4)][i / 4 % MINE][i % 4] += sum;
                sum = 0.0f;
            }
        }
    }
}

__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(u16* to, float value) { *to = (u16)pack_pair(value, 0.0f); }

// One plane of dx, from `p_dx` on
__device__ __forceinline__ void store_plane(const PlaneSums& sums, const Extent& ys, const Extent& xs, const Volume& to,
                                            float undo0, float undo1, input_t* p_dx)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < MINE * 4; i++) {
        int eight = 2 * (threadIdx.x / 32 * MINE + i / 4) + i / 2 % 2, column = 2 * t + i % 2;
        int y = ys.low + eight / GROUPS * 2 + g / 4;
        int x = xs.low + (eight % GROUPS * 4 + g % 4) * OPR + column / CIN;
        if (column < OPR * CIN && y < ys.high && x < xs.high)
            store(p_dx + y * to.stride_h + x * to.stride_w + column % CIN * to.stride_c,
                  sums[i / 4][i % 4] * undo0 * undo1);
    }
}
