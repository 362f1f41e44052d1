// Operands of a tensor-core product of 16-bit numbers: conversion, scaling by powers of two, one plane or two.
//
// INPUT_BITS is 32, or 16 for input of the operand's own type; BFLOAT chooses bf16 operands; PLANES is 1 or 2.
// WIDE_SLOTS makes slots of one plane as wide as those of two, so that rows of 8×8 matrices can begin at any of them.
// A slot is 4 neighbouring numbers of an operand: with two planes four times fp16(number), then fp16 of what is left.
// What only the device has is between the guards; tests put their own in its place and run the rest on the host.

typedef unsigned int u32;
typedef unsigned short u16;

#define SCALED (INPUT_BITS == 32 && !BFLOAT)

#if INPUT_BITS == 32
typedef float input_t;
#else
typedef u16 input_t;
#endif

#ifndef WIDE_SLOTS
#define WIDE_SLOTS (PLANES == 2)
#endif

#if WIDE_SLOTS
typedef uint4 slot_t;  // x, y: the high plane, z, w: the low one, or 0 where there is none
#else
typedef uint2 slot_t;
#endif

static_assert(PLANES == 1 || INPUT_BITS == 32, "16-bit input is one plane");

#ifndef POSTLUDE_HOST
// d += a·b, with a [16, 16] and b [16, 8] as fragments
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)
{
#if BFLOAT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack_pair(float first, float second)
{
    u32 pair;
#if BFLOAT
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

__device__ __forceinline__ float unpack(u16 bits)
{
#if BFLOAT
    return __uint_as_float((u32)bits << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}
#endif

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(u16 bits) { return unpack(bits); }

// The bits of |x|, which order as the magnitudes do; 0 where x is not finite, which must not set the scale of a tile
__device__ __forceinline__ u32 finite_magnitude(float x)
{
    u32 bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0u;
}

__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

__device__ __forceinline__ u32 warp_max(u32 value)
{
    for (int s = 16; s > 0; s /= 2) value = larger(value, __shfl_xor_sync(0xffffffffu, value, s));
    return value;
}

// The largest of a block's values, from one of each thread; `of_warps` is [WARPS]. Has a barrier.
__device__ __forceinline__ u32 block_max(u32 value, u32* of_warps)
{
    value = warp_max(value);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) value = larger(value, of_warps[i]);
    return value;
}

// The exponent e for which 2^(14 − e) brings `largest` to 2¹⁴…2¹⁵; clamped where it or its inverse would be none
__device__ __forceinline__ int exponent_of(u32 largest)
{
    int exponent = (int)(largest >> 23) - 127;
    return largest == 0u ? 14 : exponent < -112 ? -112 : exponent;
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); }

// What the high plane leaves over; 0 where it is not finite, for infinity − infinity is NaN of no meaning
__device__ __forceinline__ float rest_of(float x, u32 pair, int i)
{
    float rest = x - unpack((u16)(pair >> (16 * i)));
    return finite_magnitude(rest) != 0u ? rest : 0.0f;
}

__device__ __forceinline__ slot_t make_slot(const float (&v)[4])
{
    slot_t slot;
    slot.x = pack_pair(v[0], v[1]);
    slot.y = pack_pair(v[2], v[3]);
#if PLANES == 2
    slot.z = pack_pair(rest_of(v[0], slot.x, 0), rest_of(v[1], slot.x, 1));
    slot.w = pack_pair(rest_of(v[2], slot.y, 0), rest_of(v[3], slot.y, 1));
#elif WIDE_SLOTS
    slot.z = slot.w = 0u;
#endif
    return slot;
}

__device__ __forceinline__ slot_t make_slot(const u16 (&v)[4])
{
    slot_t slot;
    slot.x = v[0] | (u32)v[1] << 16;
    slot.y = v[2] | (u32)v[3] << 16;
#if WIDE_SLOTS
    slot.z = slot.w = 0u;
#endif
    return slot;
}
