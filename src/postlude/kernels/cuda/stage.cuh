// A tile of the input in shared memory, as slots of 16-bit numbers. Needs tile.cuh.

// Stages a tile. `exponents` is [WARPS + 1]; the last one is the tile's scale. Ends with a barrier.
__device__ __forceinline__ void stage(const input_t* p_x, int positions, int z0, int y0, int x0, slot_t* tile,
                                      int* exponents)
{
    int first = threadIdx.x;
    asm volatile("" : "+r"(first));  // or the compiler hoists all addresses of a tile into registers
#if IS_SCALED
    float largest = 0.0f;
#endif
#pragma unroll 4  // loads in flight together
    for (int i = first; i < positions; i += THREADS) {
        input_t v[4];
        fetch(p_x, i, z0, y0, x0, v);
#if KEEPS_INF
        largest = fmaxf(fmaxf(largest, fmaxf(magnitude(v[0]), magnitude(v[1]))), fmaxf(magnitude(v[2]), magnitude(v[3])));
#elif IS_SCALED
        largest = fmaxf(fmaxf(largest, fmaxf(fabsf(v[0]), fabsf(v[1]))), fmaxf(fabsf(v[2]), fabsf(v[3])));
#else
        tile[place_of(i)] = make_slot(v, 1.0f);
#endif
#if PLANES == 2
        *(float4*)&tile[place_of(i)] = {v[0], v[1], v[2], v[3]};
#endif
    }
#if IS_SCALED
    exponents[threadIdx.x / 32] = warp_exponent(largest);
    __syncthreads();
    int exponent = __reduce_max_sync(~0u, exponents[threadIdx.x % WARPS]);
    exponents[WARPS] = exponent;
#pragma unroll 4
    for (int i = first; i < positions; i += THREADS) {
#if PLANES == 2
        float4 raw = *(float4*)&tile[place_of(i)];  // stored by this same thread
        float v[4] = {raw.x, raw.y, raw.z, raw.w};
#else
        float v[4];
        fetch(p_x, i, z0, y0, x0, v);
#endif
        tile[place_of(i)] = make_slot(v, power_of_two(14 - exponent));
    }
#endif
    __syncthreads();
}
