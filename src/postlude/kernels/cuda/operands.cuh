// Operands of a tensor-core product of 16-bit numbers: conversion, scaling by powers of two, one plane or two.
//
// INPUT_BITS is 32, or 16 for input of the operand's own type; IS_BFLOAT chooses bf16 operands; PLANES is 1 or 2.
// HAS_WIDE_SLOTS makes slots of one plane as wide as those of two, so that a row of an 8×8 matrix can begin at any
// slot. KEEPS_INF makes slots of infinities as kernels/triton/planes.py does. Device intrinsics are between guards: tests replace them and run the rest on the host.

#define IS_SCALED (INPUT_BITS == 32 && !IS_BFLOAT)
#ifndef HAS_WIDE_SLOTS
#define HAS_WIDE_SLOTS (PLANES == 2)
#endif
#ifndef KEEPS_INF
#define KEEPS_INF 0
#endif

typedef unsigned int u32;
typedef unsigned short u16;
#if INPUT_BITS == 32
typedef float input_t;
#else
typedef u16 input_t;
#endif
#if HAS_WIDE_SLOTS
typedef uint4 slot_t;
#else
typedef uint2 slot_t;
#endif

static_assert(PLANES == 1 || IS_SCALED, "input that is not scaled is one plane");

#ifndef POSTLUDE_HOST
// d += a·b, with a [16, 16] and b [16, 8] as fragments
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
#if IS_BFLOAT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack_pair(float first, float second)
{
    u32 pair;
#if IS_BFLOAT
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

__device__ __forceinline__ float unpack(u16 bits)
{
#if IS_BFLOAT
    return __uint_as_float((u32)bits << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}
#endif

#if INPUT_BITS == 16
__device__ __forceinline__ float as_float(u16 bits) { return unpack(bits); }
#endif
__device__ __forceinline__ float as_float(float value) { return value; }

// The exponent of the warp's largest magnitude, at least −112 so that 2^(14 − exponent) is finite
__device__ __forceinline__ int warp_exponent(float magnitude)
{
    return max((int)(__reduce_max_sync(~0u, __float_as_uint(magnitude)) >> 23) - 127, -112);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); }

#if KEEPS_INF
__device__ __forceinline__ bool is_finite(float v) { return v - v == 0.0f; }

// The magnitude that a scale must allow for
__device__ __forceinline__ float magnitude(float v) { return is_finite(v) ? fabsf(v) : 0.0f; }

// v·scale, but where fp16 would round it to zero, the smallest number of v's sign: an infinity times 0 would be NaN
__device__ __forceinline__ float not_zero(float v, float scale)
{
    float scaled = v * scale;
    return v != 0.0f && fabsf(scaled) < 0x1p-24f ? copysignf(0x1p-24f, v) : scaled;
}

// v minus its high plane; 0 for an infinity, which would give NaN
__device__ __forceinline__ float rest_of(float v, u16 high)
{
    float rest = v - unpack(high);
    return is_finite(rest) ? rest : 0.0f;
}
#endif

// x, y: four numbers times `scale` in 16 bits (high plane); z, w: the remainders (low plane), or 0
__device__ __forceinline__ slot_t make_slot(const float (&v)[4], float scale)
{
#if KEEPS_INF
    float a = not_zero(v[0], scale), b = not_zero(v[1], scale), c = not_zero(v[2], scale), d = not_zero(v[3], scale);
#else
    float a = v[0] * scale, b = v[1] * scale, c = v[2] * scale, d = v[3] * scale;
#endif
    slot_t slot;
    slot.x = pack_pair(a, b), slot.y = pack_pair(c, d);
#if KEEPS_INF
    slot.z = pack_pair(rest_of(a, slot.x), rest_of(b, slot.x >> 16));
    slot.w = pack_pair(rest_of(c, slot.y), rest_of(d, slot.y >> 16));
#elif PLANES == 2
    slot.z = pack_pair(a - unpack(slot.x), b - unpack(slot.x >> 16));
    slot.w = pack_pair(c - unpack(slot.y), d - unpack(slot.y >> 16));
#elif HAS_WIDE_SLOTS
    slot.z = slot.w = 0u;
#endif
    return slot;
}
#if INPUT_BITS == 16

__device__ __forceinline__ slot_t make_slot(const u16 (&v)[4], float)
{
    slot_t slot;
    slot.x = v[0] | (u32)v[1] << 16, slot.y = v[2] | (u32)v[3] << 16;
#if HAS_WIDE_SLOTS
    slot.z = slot.w = 0u;
#endif
    return slot;
}
#endif
