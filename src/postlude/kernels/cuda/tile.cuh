// A position of a tile: its place in shared memory, and its input. Needs geometry.cuh.

__device__ __forceinline__ int place_of(u32 i)
{
    return i / IN_W / IN_H * SLICE_PITCH + i / IN_W % IN_H * ROW_PITCH + i % IN_W;
}

// The channels of position i of a tile that begins at z0, y0, x0, and of its right neighbours; 0 outside the input
__device__ __forceinline__ void fetch(const input_t* p_x, u32 i, int z0, int y0, int x0, input_t (&v)[4])
{
    int z = z0 + (int)(i / IN_W / IN_H), y = y0 + (int)(i / IN_W % IN_H), x = x0 + (int)(i % IN_W);
    bool inside = (u32)z < (u32)D && (u32)y < (u32)H;
    const input_t* from = p_x + (z * X_D + y * X_H + x * X_W);
#pragma unroll
    for (int s = 0; s < 4; s++) {
        bool is_there = s < C_IN * TAPS_PER_SLOT && inside && (u32)(x + s / C_IN) < (u32)W;
        v[s] = is_there ? from[s % C_IN * X_C + s / C_IN * X_W] : (input_t)0;
    }
}
