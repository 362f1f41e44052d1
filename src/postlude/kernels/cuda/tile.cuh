// Staging: a tile of the input in shared memory, as slots (see operands.cuh), with the halo that its outputs read.
//
// Needs the constants of few_channels.cu. A thread converts in place what it has stored itself, so no barrier is
// needed between the two.

struct Volume {
    int d, h, w;
    int stride_c, stride_d, stride_h, stride_w;
};

// Where position i of a tile lies in shared memory, and its 4 numbers; 0 outside the volume
__device__ __forceinline__ int place_of(int i)
{
    int row = i / COLUMNS;
    return row / IN_H * PLANE + row % IN_H * PITCH + i % COLUMNS;
}

__device__ __forceinline__ void fetch(const input_t* p_x, const Volume& in, int i, int z0, int y0, int x0,
                                      input_t (&v)[4])
{
    int row = i / COLUMNS;
    int z = z0 + row / IN_H, y = y0 + row % IN_H, x = x0 + i % COLUMNS;
    bool inside = (u32)z < (u32)in.d && (u32)y < (u32)in.h;
    int offset = z * in.stride_d + y * in.stride_h + x * in.stride_w;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        v[s] = 0;
        if (s < CIN * XS && inside && (u32)(x + s / CIN) < (u32)in.w)
            v[s] = p_x[offset + s % CIN * in.stride_c + s / CIN * in.stride_w];
    }
}

// The first look at a tile: its largest finite magnitude, or, where nothing is scaled, all that there is to do
__device__ __forceinline__ u32 load_tile(const input_t* p_x, const Volume& in, int positions, int z0, int y0, int x0,
                                         slot_t* tile)
{
    u32 largest = 0u;
#pragma unroll 1
    for (int first = threadIdx.x; first < positions; first += THREADS * BATCH) {
        input_t v[BATCH][4];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (first + b * THREADS < positions) fetch(p_x, in, first + b * THREADS, z0, y0, x0, v[b]);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (first + b * THREADS >= positions) continue;
#if SCALED
#pragma unroll
            for (int s = 0; s < CIN * XS; s++) largest = larger(largest, finite_magnitude(v[b][s]));
#endif
#if SCALED && PLANES == 2
            tile[place_of(first + b * THREADS)] = make_uint4(__float_as_uint(v[b][0]), __float_as_uint(v[b][1]),
                                                             __float_as_uint(v[b][2]), __float_as_uint(v[b][3]));
#elif !SCALED
            tile[place_of(first + b * THREADS)] = make_slot(v[b]);
#endif
        }
    }
    return largest;
}

#if SCALED
// The second look: with two planes at what this very thread has stored, else at global memory again
__device__ __forceinline__ void scale_tile(const input_t* p_x, const Volume& in, int positions, int z0, int y0, int x0,
                                           float scale, slot_t* tile)
{
#pragma unroll 1
    for (int first = threadIdx.x; first < positions; first += THREADS * BATCH) {
        float v[BATCH][4];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (first + b * THREADS >= positions) continue;
#if PLANES == 2
            slot_t raw = tile[place_of(first + b * THREADS)];
            v[b][0] = __uint_as_float(raw.x), v[b][1] = __uint_as_float(raw.y);
            v[b][2] = __uint_as_float(raw.z), v[b][3] = __uint_as_float(raw.w);
#else
            fetch(p_x, in, first + b * THREADS, z0, y0, x0, v[b]);
#endif
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (first + b * THREADS >= positions) continue;
#pragma unroll
            for (int s = 0; s < 4; s++) v[b][s] *= scale;
            tile[place_of(first + b * THREADS)] = make_slot(v[b]);
        }
    }
}
#endif

// Fills the tile, and per channel the power of two that takes the scales back out of its products: in two factors of
// about the same size, for the power may be no fp32 number, nor what one of the scales alone makes of a product. Ends
// in a barrier.
__device__ __forceinline__ void stage(const input_t* p_x, const Volume& in, int positions, int z0, int y0, int x0,
                                      slot_t* tile, u32* largest_of_warp, const int* undo, float* unscales)
{
    u32 largest = load_tile(p_x, in, positions, z0, y0, x0, tile);
#if SCALED
    int exponent = exponent_of(block_max(largest, largest_of_warp));
    if (threadIdx.x < CHANNELS) {
        int both = exponent - 14 + undo[threadIdx.x];
        unscales[threadIdx.x] = power_of_two(both / 2);
        unscales[threadIdx.x + CHANNELS] = power_of_two(both - both / 2);
    }
    scale_tile(p_x, in, positions, z0, y0, x0, power_of_two(14 - exponent), tile);
#endif
    __syncthreads();
}
