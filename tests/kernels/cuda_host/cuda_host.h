// Enough of CUDA for one kernel on the host: a fiber per thread, blocks one after another, warps in step.
//
// A fiber runs until it needs others: a barrier of the block, or an exchange among the 32 lanes of its warp. The last
// lane to bring its operands to an exchange computes everybody's result. Exchanges that lanes skip, or barriers that
// threads skip, leave fibers that nobody can wake: the launch then fails instead of hanging.
#pragma once

#include <ucontext.h>

// Few headers, and C's own math.h: most of the time of a build is reading them.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { int x, y; };

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned __float_as_uint(float v) { unsigned bits; std::memcpy(&bits, &v, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float v; std::memcpy(&v, &bits, 4); return v; }
inline float __fdividef(float a, float b) { return a / b; }

namespace host {

constexpr int WARP = 32;

struct Exchange {
    std::uint32_t in[WARP][10], out[WARP][4];
    int arrived = 0, round = 0;
};

struct Fiber {
    ucontext_t context;
    char* stack = nullptr;  // kept from block to block
    bool done;
};

static std::vector<Fiber> fibers;
static std::vector<Exchange> warps;
static ucontext_t scheduler;
static void (*body)();
static int current, waiting, round_of_block;
static long progress;
static dim3 grid, block;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

inline void entry()
{
    body();
    fibers[current].done = true;
    progress++;
    yield();
}

inline void barrier()
{
    progress++;
    int mine = round_of_block;
    if (++waiting == (int)fibers.size()) waiting = 0, round_of_block++;
    while (round_of_block == mine) yield();
}

// Brings `count` words of this lane; `combine` is called once, by the last lane, with all of them
template <class Combine>
inline void exchange(const std::uint32_t* words, int count, std::uint32_t* result, int results, Combine combine)
{
    progress++;
    Exchange& warp = warps[current / WARP];
    int lane = current % WARP, mine = warp.round;
    std::memcpy(warp.in[lane], words, count * 4);
    if (++warp.arrived == WARP) {
        combine(warp);
        warp.arrived = 0, warp.round++;
    }
    while (warp.round == mine) yield();
    std::memcpy(result, warp.out[lane], results * 4);
}

// false where fibers wait for one another for ever
inline bool run_block(int threads)
{
    fibers.resize(threads);
    warps.assign(threads / WARP, Exchange());
    waiting = round_of_block = 0;
    constexpr std::size_t STACK = 64 << 10;
    for (Fiber& fiber : fibers) {
        if (fiber.stack == nullptr) fiber.stack = new char[STACK];
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, entry, 0);
    }
    for (int left = threads; left > 0;) {
        long before = progress;
        left = 0;
        for (current = 0; current < threads; current++) {
            if (fibers[current].done) continue;
            swapcontext(&scheduler, &fibers[current].context);
            left += !fibers[current].done;
        }
        if (progress == before && left > 0) return false;
    }
    return true;
}

inline std::uint16_t round_to_half(float v)
{
    _Float16 half = (_Float16)v;
    std::uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

inline float half_to_float(std::uint16_t bits)
{
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return (float)half;
}

inline std::uint16_t round_to_bfloat(float v)
{
    std::uint32_t bits = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Tensor cores cut off what fp32 cannot hold
inline float toward_zero(double v)
{
    float near = (float)v;
    return isfinite(near) && fabs((double)near) > fabs(v) ? nextafterf(near, 0.0f) : near;
}

}  // namespace host

#define threadIdx (dim3{host::current, 0})
#define blockIdx (host::block)
#define gridDim (host::grid)
#define __syncthreads() host::barrier()

// Each lane names one whose value it wants
template <class T>
inline T __shfl_sync(unsigned, T value, int source)
{
    constexpr int WORDS = sizeof(T) / 4;
    std::uint32_t words[WORDS + 1], result[WORDS];
    std::memcpy(words, &value, sizeof(T));
    words[WORDS] = source;
    host::exchange(words, WORDS + 1, result, WORDS, [](host::Exchange& warp) {
        for (int lane = 0; lane < host::WARP; lane++)
            std::memcpy(warp.out[lane], warp.in[warp.in[lane][WORDS]], sizeof(T));
    });
    std::memcpy(&value, result, sizeof(T));
    return value;
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int apart)
{
    return __shfl_sync(mask, value, host::current % host::WARP ^ apart);
}

template <class T>
inline T __reduce_max_sync(unsigned mask, T value)
{
    for (int apart = 16; apart > 0; apart /= 2) {
        T other = __shfl_xor_sync(mask, value, apart);
        value = value > other ? value : other;
    }
    return value;
}

#if IS_BFLOAT
inline float unpack(std::uint16_t bits) { return __uint_as_float((unsigned)bits << 16); }
inline std::uint16_t pack(float v) { return host::round_to_bfloat(v); }
#else
inline float unpack(std::uint16_t bits) { return host::half_to_float(bits); }
inline std::uint16_t pack(float v) { return host::round_to_half(v); }
#endif

inline unsigned pack_pair(float first, float second) { return pack(first) | (unsigned)pack(second) << 16; }

// m16n8k16: lane (g, t) brings rows g and g + 8 of a, column g of b, and has columns 2t and 2t + 1 of rows g and g + 8
inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    std::uint32_t words[10] = {a[0], a[1], a[2], a[3], b0, b1}, result[4];
    std::memcpy(words + 6, d, 16);
    host::exchange(words, 10, result, 4, [](host::Exchange& warp) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < host::WARP; lane++)
            for (int i = 0; i < 12; i++) {
                int g = lane / 4, k = lane % 4 * 2 + i % 2, word = i / 2;
                float v = unpack((std::uint16_t)(warp.in[lane][word] >> (i % 2 * 16)));
                if (word < 4)
                    a[g + word % 2 * 8][k + word / 2 * 8] = v;
                else
                    b[k + (word - 4) * 8][g] = v;
            }
        for (int lane = 0; lane < host::WARP; lane++)
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                double sum = __uint_as_float(warp.in[lane][6 + i]);
                for (int k = 0; k < 16; k++) sum += (double)a[row][k] * b[k][column];
                warp.out[lane][i] = __float_as_uint(host::toward_zero(sum));
            }
    });
    std::memcpy(d, result, 16);
}

// ldmatrix.x4: lane 8m + r brings the address of row r of matrix m, lane (g, t) gets numbers 2t and 2t + 1 of row g of
// each matrix, or of column g
template <bool TRANSPOSED>
inline void load_four(unsigned (&d)[4], const void* row)
{
    std::uint32_t words[2];
    std::memcpy(words, &row, 8);
    if ((std::uintptr_t)row % 16 != 0) std::abort();
    host::exchange(words, 2, d, 4, [](host::Exchange& warp) {
        for (int lane = 0; lane < host::WARP; lane++)
            for (int m = 0; m < 4; m++) {
                std::uint16_t pair[2];
                for (int i = 0; i < 2; i++) {
                    int r = TRANSPOSED ? lane % 4 * 2 + i : lane / 4, c = TRANSPOSED ? lane / 4 : lane % 4 * 2 + i;
                    const std::uint16_t* from;
                    std::memcpy(&from, warp.in[8 * m + r], 8);
                    pair[i] = from[c];
                }
                warp.out[lane][m] = pair[0] | (std::uint32_t)pair[1] << 16;
            }
    });
}

inline void load_matrices(unsigned (&d)[4], const void* row) { load_four<false>(d, row); }
inline void load_transposed(unsigned (&d)[4], const void* row) { load_four<true>(d, row); }
