# SPDX-License-Identifier: Apache-2.0
"""conv3d(3→24, k3) → group_norm(8) → mean over all but batch, fused.

Input      128×3×24×32×32, float32, contiguous
Launches   2 of our kernels
Arithmetic fp32, as two fp16 planes on the tensor cores: as exact as PyTorch's fp32
Measured   0.158 ms inside Postlude (eager 1.2, torch.compile 0.9: 7.6×), NVIDIA H200

Tensors of other shapes (see `fits`) go through PyTorch's own operators.
"""

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.cpp_extension import CUDA_HOME

SHAPES = ((128, 3, 24, 32, 32), (24, 3, 3, 3, 3), (24,), (24,), (24,))

SOURCE = r"""
// Direct convolution of 1 to 4 input channels on tensor cores. It never stores the convolution's result, only the
// moments of (convolution + bias) per sample, channel and tile. A block loops over tiles of BLOCK_D×BLOCK_H×32
// outputs. It stages a tile's input in shared memory, one slot of four 16-bit numbers per position: the position's
// channels and, if there are only 1 or 2, those of its right neighbours (TAPS_PER_SLOT positions in all). A slot
// therefore serves a chunk of TAPS_PER_SLOT neighbouring taps. One m16n8k16 instruction takes 4 chunks, K = 4 × 4
// numbers, ordered so that lane (g, t) = (lane / 4, lane % 4) reads the whole slot of chunk t for row g in one
// load. fp32 input is scaled by powers of two, per tile and per output channel of the weight. With two planes (fp16
// and the fp16 remainder) a slot is as precise as fp32.

#define UNROLL _Pragma("unroll")
constexpr int C_IN = 3, C_OUT = 24, NFRAG = 3, KD = 3, KH = 3, KW = 3;
constexpr int BLOCK_D = 11, BLOCK_H = 10, ROWS_PER_WARP = 2, WARPS = 8, BLOCKS_PER_SM = 2;
constexpr int D = 24, H = 32, W = 32, X_N = 73728, X_C = 24576, X_D = 1024, X_H = 32, X_W = 1;
constexpr int W_O = 81, W_C = 27, W_D = 9, W_H = 3, W_W = 1;
constexpr int TILES_D = 2, TILES_H = 3, TILES_W = 1, TILE_SLOTS = 5668;

typedef unsigned int u32;
typedef unsigned short u16;

// d += a·b, with a [16, 16] and b [16, 8] as fragments
__device__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ u32 pack_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ float unpack(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The exponent of the warp's largest magnitude, at least −112 so that 2^(14 − exponent) is finite
__device__ int warp_exponent(float magnitude) {
    return max((int)(__reduce_max_sync(~0u, __float_as_uint(magnitude)) >> 23) - 127, -112);
}

__device__ float power_of_two(int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); }

// x, y: four numbers times `scale` in 16 bits (high plane); z, w: the remainders (low plane), or 0
__device__ uint4 make_slot(const float (&v)[4], float scale) {
    float a = v[0] * scale, b = v[1] * scale, c = v[2] * scale, d = v[3] * scale;
    uint4 slot;
    slot.x = pack_pair(a, b), slot.y = pack_pair(c, d);
    slot.z = pack_pair(a - unpack(slot.x), b - unpack(slot.x >> 16));
    slot.w = pack_pair(c - unpack(slot.y), d - unpack(slot.y >> 16));
    return slot;
}

constexpr int THREADS = WARPS * 32, LANES = WARPS * 8;  // lanes that hold moments of the same channels
constexpr int BLOCK_C = NFRAG * 8;  // output channels of this block, padded
constexpr int TAPS = KD * KH * KW, TILES = TILES_D * TILES_H * TILES_W;
constexpr int OD = D - KD + 1, OH = H - KH + 1, OW = W - KW + 1;
constexpr int TAPS_PER_SLOT = 4 / C_IN;
constexpr int TAP_CHUNKS_W = (KW + TAPS_PER_SLOT - 1) / TAPS_PER_SLOT;  // chunks of one (kd, kh)
constexpr int TAP_CHUNKS = KD * KH * TAP_CHUNKS_W, K_STEPS = (TAP_CHUNKS + 3) / 4;
constexpr int FRAGMENT_SLOTS = K_STEPS * NFRAG * 32;
constexpr int IN_H = BLOCK_H + KH - 1, IN_W = 32 + (TAP_CHUNKS_W - 1) * TAPS_PER_SLOT;  // rows, slots of a row
// The 4 chunks of a product may lie in two neighbouring rows. Reads have no bank conflicts if these rows are half of
// the banks apart, also from the last row of one kd to the first of the next. HALF_BANKS slots are 64 bytes.
constexpr int HALF_BANKS = 64 / sizeof(uint4);
constexpr int ROW_PITCH = (IN_W + HALF_BANKS - 1) / (2 * HALF_BANKS) * (2 * HALF_BANKS) + HALF_BANKS;
constexpr int SLICE_PITCH = IN_H * ROW_PITCH + (BLOCK_H % 2 == 0 ? HALF_BANKS : 0);

__device__ int place_of(u32 i) { return i / IN_W / IN_H * SLICE_PITCH + i / IN_W % IN_H * ROW_PITCH + i % IN_W; }

// The channels of position i of a tile that begins at z0, y0, x0, and of its right neighbours; 0 outside the input
__device__ void fetch(const float* p_x, u32 i, int z0, int y0, int x0, float (&v)[4]) {
    int z = z0 + (int)(i / IN_W / IN_H), y = y0 + (int)(i / IN_W % IN_H), x = x0 + (int)(i % IN_W);
    bool inside = (u32)z < (u32)D && (u32)y < (u32)H;
    const float* from = p_x + (z * X_D + y * X_H + x * X_W);
    UNROLL for (int s = 0; s < 4; s++) {
        bool is_there = s < C_IN * TAPS_PER_SLOT && inside && (u32)(x + s / C_IN) < (u32)W;
        v[s] = is_there ? from[s % C_IN * X_C + s / C_IN * X_W] : 0.0f;
    }
}

__device__ int weight_offset(int o, int c, int tap) {
    return o * W_O + c * W_C + tap / (KH * KW) * W_D + tap / KW % KH * W_H + tap % KW * W_W;
}

// Writes the weight of the channels from c0 on as fragments [K_STEPS, NFRAG, lane], and the exponents of its scales
__device__ void prepare(const float* p_w, int c0, uint4* fragments, int* exponents) {
    for (int c = threadIdx.x / 32; c < BLOCK_C; c += WARPS) {
        float largest = 0.0f;
        for (int i = threadIdx.x % 32; i < C_IN * TAPS && c0 + c < C_OUT; i += 32)
            largest = fmaxf(largest, fabsf(p_w[weight_offset(c0 + c, i / TAPS, i % TAPS)]));
        exponents[c] = warp_exponent(largest);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < FRAGMENT_SLOTS; i += THREADS) {
        int c = i / 32 % NFRAG * 8 + i % 32 / 4, chunk = i / (32 * NFRAG) * 4 + i % 4;
        float v[4];
        UNROLL for (int s = 0; s < 4; s++) {
            int kw = chunk % TAP_CHUNKS_W * TAPS_PER_SLOT + s / C_IN;
            bool is_there = chunk < TAP_CHUNKS && kw < KW && s < C_IN * TAPS_PER_SLOT && c0 + c < C_OUT;
            v[s] = is_there ? p_w[weight_offset(c0 + c, s % C_IN, chunk / TAP_CHUNKS_W * KW + kw)] : 0.0f;
        }
        fragments[i] = make_slot(v, power_of_two(14 - exponents[c]));
    }
}

// ROWS_PER_WARP rows of 32 outputs as fragments m: row m / 2, x = 16·(m % 2) + g, and the same x + 8
typedef float Sums[2 * ROWS_PER_WARP][NFRAG][4];

__device__ void multiply(const uint4* at, const int* offsets, const uint4* weights, u32 zero, Sums& sums) {
    _Pragma("unroll 1") for (int j = 0; j < K_STEPS; j++) {  // unrolled, it needs more registers than there are
        const uint4* from = at + offsets[j * 4];
        uint4 b[NFRAG];
        UNROLL for (int n = 0; n < NFRAG; n++) b[n] = weights[(j * NFRAG + n) * 32];
        UNROLL for (int m = 0; m < 2 * ROWS_PER_WARP; m++) {
            uint4 top = from[m / 2 * ROW_PITCH + m % 2 * 16], bottom = from[m / 2 * ROW_PITCH + m % 2 * 16 + 8];
            // Copied once, here. If the compiler knew that `zero` is 0, it would copy them for every product
            u32 high[4] = {top.x ^ zero, bottom.x ^ zero, top.y ^ zero, bottom.y ^ zero};
            u32 low[4] = {top.z ^ zero, bottom.z ^ zero, top.w ^ zero, bottom.w ^ zero};
            // Tensor cores truncate while they accumulate: the sum is kept short, with small products first
            float part[NFRAG][4] = {};
            UNROLL for (int n = 0; n < NFRAG; n++) mma(part[n], low, b[n].x, b[n].y);
            UNROLL for (int n = 0; n < NFRAG; n++) mma(part[n], high, b[n].z, b[n].w);
            UNROLL for (int n = 0; n < NFRAG; n++) mma(part[n], high, b[n].x, b[n].y);
            UNROLL for (int i = 0; i < NFRAG * 4; i++) sums[m][i / 4][i % 4] += part[i / 4][i % 4];
        }
    }
}

// Stages a tile. `exponents` is [WARPS + 1]; the last one is the tile's scale. Ends with a barrier.
__device__ void stage(const float* p_x, int positions, int z0, int y0, int x0, uint4* tile, int* exponents) {
    int first = threadIdx.x;
    asm volatile("" : "+r"(first));  // or the compiler hoists all addresses of a tile into registers
    float largest = 0.0f;
    _Pragma("unroll 4") for (int i = first; i < positions; i += THREADS) {  // loads in flight together
        float v[4];
        fetch(p_x, i, z0, y0, x0, v);
        largest = fmaxf(fmaxf(largest, fmaxf(fabsf(v[0]), fabsf(v[1]))), fmaxf(fabsf(v[2]), fabsf(v[3])));
        *(float4*)&tile[place_of(i)] = {v[0], v[1], v[2], v[3]};
    }
    exponents[threadIdx.x / 32] = warp_exponent(largest);
    __syncthreads();
    int exponent = __reduce_max_sync(~0u, exponents[threadIdx.x % WARPS]);
    exponents[WARPS] = exponent;
    _Pragma("unroll 4") for (int i = first; i < positions; i += THREADS) {
        float4 raw = *(float4*)&tile[place_of(i)];  // stored by this same thread
        float v[4] = {raw.x, raw.y, raw.z, raw.w};
        tile[place_of(i)] = make_slot(v, power_of_two(14 - exponent));
    }
    __syncthreads();
}

// The moments of one lane's outputs in 2·NFRAG channels, 8·(c / 2) + 2t + c % 2; m2 sums squared deviations.
struct Moments { float count, mean[2 * NFRAG], m2[2 * NFRAG]; };

// Adds a warp's outputs by Chan's formula. `rows` of its rows are valid, and `columns` from this lane's first one on.
__device__ void take_in(Moments& have, const Sums& sums, int rows, int columns) {
    float count = min(rows, ROWS_PER_WARP) * max(0, min(4, (columns + 7) / 8));
    float share = __fdividef(1.0f, fmaxf(count, 1.0f)), weight = __fdividef(count, fmaxf(have.count + count, 1.0f));
    UNROLL for (int c = 0; c < 2 * NFRAG; c++) {
        float sum = 0.0f, squares = 0.0f;
        UNROLL for (int k = 0; k < 4 * ROWS_PER_WARP; k++)
            if (k / 4 < rows && k % 4 * 8 < columns) sum += sums[k / 2][c / 2][k % 2 * 2 + c % 2];
        UNROLL for (int k = 0; k < 4 * ROWS_PER_WARP; k++) {
            float off = sums[k / 2][c / 2][k % 2 * 2 + c % 2] - sum * share;
            if (k / 4 < rows && k % 4 * 8 < columns) squares += off * off;
        }
        float apart = sum * share - have.mean[c];
        have.mean[c] += apart * weight;
        have.m2[c] += squares + apart * apart * (have.count * weight);
    }
    have.count += count;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) few_channels_moments(
    const float* __restrict__ p_x,  // [N, C_IN, D, H, W] through its strides
    const float* __restrict__ p_w,  // [C_OUT, C_IN, KD, KH, KW] through its strides
    const float* __restrict__ p_bias,  // [C_OUT]
    float* __restrict__ p_mean,  // [N, C_OUT, TILES], out
    float* __restrict__ p_m2, float* __restrict__ p_count,  // squared deviations; [N, TILES]; both out
    int units, u32 zero)  // tiles of all samples; always 0, unknown to the compiler
{
    extern __shared__ uint4 shared[];
    uint4* tile = (uint4*)shared;  // [BLOCK_D + KD - 1, IN_H, IN_W] with SLICE_PITCH and ROW_PITCH
    uint4* fragments = tile + TILE_SLOTS;  // [K_STEPS, NFRAG, lane]
    __shared__ int offsets[THREADS], weight_exponents[BLOCK_C], exponents[WARPS + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int c0 = blockIdx.y * BLOCK_C;
    int chunk = min((int)threadIdx.x, TAP_CHUNKS - 1);  // past the last one any will do: the weights are 0
    offsets[threadIdx.x] = chunk / (KH * TAP_CHUNKS_W) * SLICE_PITCH + chunk / TAP_CHUNKS_W % KH * ROW_PITCH +
                           chunk % TAP_CHUNKS_W * TAPS_PER_SLOT;
    prepare(p_w, c0, fragments, weight_exponents);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        int i_n = unit / TILES, i_tile = unit % TILES;
        int z0 = i_tile / (TILES_H * TILES_W) * BLOCK_D, y0 = i_tile / TILES_W % TILES_H * BLOCK_H;
        int x0 = i_tile % TILES_W * 32;
        int depth = min(BLOCK_D, OD - z0), height = min(BLOCK_H, OH - y0), width = min(32, OW - x0);
        const float* p_sample = p_x + (long long)i_n * X_N;
        stage(p_sample, (depth + KD - 1) * IN_H * IN_W, z0, y0, x0, tile, exponents);
        Moments have = {};
        int groups = (height + ROWS_PER_WARP - 1) / ROWS_PER_WARP;
        _Pragma("unroll 1") for (int i = warp; i < depth * groups; i += WARPS) {
            int z = i / groups, y = i % groups * ROWS_PER_WARP;
            Sums sums = {};
            multiply(tile + z * SLICE_PITCH + y * ROW_PITCH + g, offsets + t, fragments + lane, zero, sums);
            take_in(have, sums, height - y, width - g);
        }
        __syncthreads();
        float3 *parts = (float3*)shared, *mine = parts + (warp * 8 + g) * BLOCK_C + 2 * t;  // [LANES, BLOCK_C]
        UNROLL for (int c = 0; c < 2 * NFRAG; c++) mine[c / 2 * 8 + c % 2] = {have.count, have.mean[c], have.m2[c]};
        __syncthreads();
        int c = threadIdx.x;
        if (c < BLOCK_C && c0 + c < C_OUT) {
            float3 all = parts[c];  // count, mean, m2; lanes in a fixed order, so every run gives the same bits
            _Pragma("unroll 8") for (int i = 1; i < LANES; i++) {
                float3 more = parts[i * BLOCK_C + c];
                float apart = more.y - all.y, weight = __fdividef(more.x, fmaxf(all.x + more.x, 1.0f));
                all = {all.x + more.x, all.y + apart * weight, all.z + more.z + apart * apart * (all.x * weight)};
            }
            // Scale and bias are applied once to a tile's moments instead of to each output
            int power = exponents[WARPS] + weight_exponents[c] - 28;
            all.y = ldexpf(all.y, power), all.z = ldexpf(all.z, 2 * power);
            all.y += p_bias[c0 + c];
            long long at = ((long long)i_n * C_OUT + c0 + c) * TILES + i_tile;
            p_mean[at] = all.y, p_m2[at] = all.z;
            if (c0 + c == 0) p_count[unit] = all.x;
        }
        __syncthreads();
    }
}

// A sample's result from the moments of its tiles: a norm over groups of channels, then the mean of everything. One
// lane per channel. In double, because the mean of a norm's result is a small difference of large numbers.

constexpr int C_PER_GROUP = 3;
constexpr double EPS = 1e-05;
extern "C" __global__ void few_channels_finish(
    const float* p_mean, const float* p_m2, const float* p_count,  // as few_channels_moments gives them
    const float* p_gamma, const float* p_beta, float* p_out)  // [C_OUT], [C_OUT]; [N], out
{
    int c = min((int)threadIdx.x, C_OUT - 1), first = c / C_PER_GROUP * C_PER_GROUP;
    p_mean += (blockIdx.x * C_OUT + c) * TILES, p_m2 += (blockIdx.x * C_OUT + c) * TILES;
    p_count += blockIdx.x * TILES;
    double count = 0.0, mean = 0.0, variance = 0.0, center = 0.0, spread = 0.0;  // the last two of the group
    for (int i = 0; i < TILES; i++) count += p_count[i], mean += p_count[i] * (double)p_mean[i];
    mean /= count;
    for (int i = 0; i < TILES; i++) variance += p_m2[i] + p_count[i] * (p_mean[i] - mean) * (p_mean[i] - mean);
    variance /= count;
    UNROLL for (int i = 0; i < C_PER_GROUP; i++) center += __shfl_sync(~0u, mean, first + i) / C_PER_GROUP;
    variance += (mean - center) * (mean - center);
    UNROLL for (int i = 0; i < C_PER_GROUP; i++) spread += __shfl_sync(~0u, variance, first + i) / C_PER_GROUP;
    double result = (mean - center) * p_gamma[c] / sqrt(spread + EPS) + p_beta[c];
    if (threadIdx.x >= C_OUT) result = 0.0;
    UNROLL for (int apart = 16; apart > 0; apart /= 2) result += __shfl_xor_sync(~0u, result, apart);
    if (threadIdx.x == 0) p_out[blockIdx.x] = result / C_OUT;
}
"""


@functools.cache
def compiled(source: str, name: str, shared_bytes: int, device: int) -> Any:
    """What launches CUDA C++, which the NVRTC that torch brings along compiles once for each card. torch's own way of
    launching takes some 40 µs."""
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, name)
        kernel.set_shared_memory_config(max(shared_bytes, 48 << 10))  # beside its own
    start = ctypes.CDLL("libcuda.so.1").cuLaunchKernel

    def launch(grid: Any, block: Any, arguments: Any, shared: int = 0) -> None:
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        count, values = len(numbers), (ctypes.c_int64 * len(numbers))(*numbers)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = start(kernel.func, *grid, *block, shared, stream, places, None)
        if code == 201:  # no context yet in this thread; an event binds torch's
            torch.cuda.Event().record()
            code = start(kernel.func, *grid, *block, shared, stream, places, None)
        if code != 0:
            raise RuntimeError(f"CUDA refused to launch {name}: error {code}")

    return launch


def conv_norm_mean(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """conv3d(3→24, k3) → group_norm(8) → mean over all but batch, by kernels."""
    means = x.new_empty((128, 24, 6))
    squares = x.new_empty((128, 24, 6))
    counts = x.new_empty((128, 6))
    # The convolution, of which only the moments of tiles are kept.
    kernel = compiled(SOURCE, "few_channels_moments", 101440, x.device.index)
    kernel((264, 1, 1), (256, 1, 1), (x, weight, bias, means, squares, counts, 768, 0), 101440)
    result = x.new_empty((128,))
    # The norm and the mean of everything, from the moments.
    kernel = compiled(SOURCE, "few_channels_finish", 0, x.device.index)
    kernel((128, 1, 1), (32, 1, 1), (means, squares, counts, gamma, beta, result))
    return result


def conv_norm_mean_by_pytorch(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """conv3d(3→24, k3) → group_norm(8) → mean over all but batch, by PyTorch."""
    value = F.group_norm(F.conv3d(x, weight, bias), 8, weight=gamma, bias=beta, eps=1e-05)
    return torch.mean(value, dim=[1, 2, 3, 4], keepdim=False)


class ConvNormMean(torch.autograd.Function):
    """The kernels forward; backward, PyTorch's derivative of the calls they replace."""

    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return conv_norm_mean(*tensors)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return torch.func.vjp(conv_norm_mean_by_pytorch, *ctx.saved_tensors)[1](grad)


def fits(tensors: tuple[Tensor, ...], expected: tuple[tuple, ...]) -> bool:
    """Whether the kernels take these tensors; PyTorch's operators take all others."""
    x = tensors[0]
    is_card = x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)  # what the tiles were chosen for
    is_card = is_card and CUDA_HOME is not None  # torch's way to NVRTC asks for it
    is_plain = all(t.dtype == torch.float32 and t.is_contiguous() and t.device == x.device for t in tensors)
    is_like = tuple(t.shape for t in tensors) == expected
    return is_card and is_plain and is_like and not torch.is_autocast_enabled("cuda")


class ModelNew(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)
        self.has_kernels = (in_channels, out_channels, kernel_size, groups) == (3, 24, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, D, H, W) → (N,)."""
        tensors = (x, self.conv.weight, self.conv.bias, self.group_norm.weight, self.group_norm.bias)
        if self.has_kernels and fits(tensors, SHAPES):
            with torch.cuda.device_of(x):
                return ConvNormMean.apply(*tensors)
        return self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])
