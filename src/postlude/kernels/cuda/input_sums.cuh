// dx, the input's gradient: adds the contribution of one slice of dv. Needs few_channels_gradient.cu's constants.

typedef float SliceSums[M_TILES_PER_WARP][4];

// Adds the contribution of one slice of dv to the KD slices of dx that read it. For the last tap, row y of the tile's
// outputs lies at row y + above of dv, and its first column at column `before`.
__device__ __forceinline__ void add_input(const u16* dv, const slot_t* back, int above, int before,
                                          SliceSums (&sums)[KD])
{
    int lane = threadIdx.x % 32, matrix = lane / 8, r = lane % 8;
#pragma unroll 1
    for (int kh = 0; kh < KH; kh++) {
        const u16* from[M_TILES_PER_WARP];
#pragma unroll
        for (int m = 0; m < M_TILES_PER_WARP; m++) {
            int eight = 2 * (threadIdx.x / 32 * M_TILES_PER_WARP + m) + matrix % 2;
            int y = eight / ROW_GROUPS * 2 + r / 4 + above - kh;
            int x = before + (eight % ROW_GROUPS * 4 + r % 4) * NEIGHBOURS;
            from[m] = dv + ((u32)y < (u32)BLOCK_H ? (y * DV_ROW + x) * DV_STRIDE : DV_ZEROS);
        }
        SliceSums part[KD] = {};
#pragma unroll
        for (int step = 0; step < DX_K_STEPS; step++) {
            constexpr int LAST_OCTET = SPAN * NFRAG - 1;
            int octet = min(2 * step + matrix / 2, LAST_OCTET);
            int offset = NFRAG % 2 ? octet * 8 : octet / NFRAG * DV_STRIDE + octet % NFRAG * 8;
            u32 high[M_TILES_PER_WARP][4];
#if PLANES == 2
            u32 low[M_TILES_PER_WARP][4];
#endif
#pragma unroll
            for (int m = 0; m < M_TILES_PER_WARP; m++) {
                load_matrices(high[m], from[m] + offset);
#if PLANES == 2
                load_matrices(low[m], from[m] + offset + DV_SIZE);
#endif
            }
#pragma unroll
            for (int kd = 0; kd < KD; kd++) {
                slot_t b = back[((kd * KH + kh) * DX_K_STEPS + step) * 32];
#pragma unroll
                for (int m = 0; m < M_TILES_PER_WARP; m++) {
#if PLANES == 2
                    mma(part[kd][m], low[m], b.x, b.y);
                    mma(part[kd][m], high[m], b.z, b.w);
#endif
                    mma(part[kd][m], high[m], b.x, b.y);
                }
            }
            if (step % PROMOTE_STEPS != PROMOTE_STEPS - 1 && step != DX_K_STEPS - 1) continue;
#pragma unroll
            for (int i = 0; i < KD * M_TILES_PER_WARP * 4; i++) {
                float& sum = part[i / (M_TILES_PER_WARP * 4)][i / 4 % M_TILES_PER_WARP][i % 4];
                sums[i / (M_TILES_PER_WARP * 4)][i / 4 % M_TILES_PER_WARP][i % 4] += sum;
                sum = 0.0f;
            }
        }
    }
}

__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(u16* to, float value) { *to = (u16)pack_pair(value, 0.0f); }

// Stores one slice of dx, beginning at `p_dx`
__device__ __forceinline__ void store_slice(const SliceSums& sums, const Extent& ys, const Extent& xs, float undo0,
                                            float undo1, input_t* p_dx)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < M_TILES_PER_WARP * 4; i++) {
        int eight = 2 * (threadIdx.x / 32 * M_TILES_PER_WARP + i / 4) + i / 2 % 2, column = 2 * t + i % 2;
        int y = ys.low + eight / ROW_GROUPS * 2 + g / 4;
        int x = xs.low + (eight % ROW_GROUPS * 4 + g % 4) * NEIGHBOURS + column / C_IN;
        if (column < NEIGHBOURS * C_IN && y < ys.high && x < xs.high)
            store(p_dx + y * DX_H + x * DX_W + column % C_IN * DX_C,
                  sums[i / 4][i % 4] * undo0 * undo1);
    }
}
