// Moments of a product's outputs, kept per lane, merged by Chan's formula in a fixed order: the same bits every run.
//
// R rows of 32 outputs by NFRAG·8 channels. Needs operands.cuh.

// Count, mean and squared distance from it, of one lane's outputs of 2·NFRAG channels: 8n + 2t and 8n + 2t + 1
struct Moments {
    float count;
    float mean[NFRAG][2], m2[NFRAG][2];
};

// Adds a group of rows. Bit 4r + i of `valid`: the output of row r at x = 8i + g is one. The others are multiplied by
// 0, not left out: what they read of the input, outputs of the same tile read as well.
__device__ __forceinline__ void take_in(Moments& have, const Sums& sums, u32 valid)
{
    float is[4 * R], count = (float)__popc(valid);
#pragma unroll
    for (int k = 0; k < 4 * R; k++) is[k] = valid >> k & 1u ? 1.0f : 0.0f;
    float share = count > 0.0f ? __fdividef(1.0f, count) : 0.0f, before = have.count;
    have.count += count;
    float weight = have.count > 0.0f ? __fdividef(count, have.count) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * NFRAG; i++) {
        int n = i / 2, c = i % 2;
        float sum = 0.0f, m2 = 0.0f;
#pragma unroll
        for (int k = 0; k < 4 * R; k++) sum += is[k] * sums[k / 2][n][k % 2 * 2 + c];
        float mean = sum * share;
#pragma unroll
        for (int k = 0; k < 4 * R; k++) {
            float off = is[k] * (sums[k / 2][n][k % 2 * 2 + c] - mean);
            m2 += off * off;
        }
        float apart = mean - have.mean[n][c];
        have.mean[n][c] += apart * weight;
        have.m2[n][c] += m2 + apart * apart * (before * weight);
    }
}

// Lanes of the same t hold the same channels: g = 0 ends with what they have together
__device__ __forceinline__ void merge_lanes(Moments& have)
{
#pragma unroll
    for (int s = 4; s < 32; s *= 2) {
        float count = __shfl_xor_sync(0xffffffffu, have.count, s);
        float before = have.count;
        have.count += count;
        float weight = have.count > 0.0f ? __fdividef(count, have.count) : 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * NFRAG; i++) {
            float& mean = have.mean[i / 2][i % 2];
            float& m2 = have.m2[i / 2][i % 2];
            float apart = __shfl_xor_sync(0xffffffffu, mean, s) - mean;
            m2 += __shfl_xor_sync(0xffffffffu, m2, s) + apart * apart * (before * weight);
            mean += apart * weight;
        }
    }
}

// The same over the warps, for one channel: [WARPS], and [WARPS, NFRAG·8] from that channel on
__device__ __forceinline__ void merge_warps(float& mean, float& m2, const float* counts, const float* means,
                                            const float* squares)
{
    float count = counts[0];
    mean = means[0], m2 = squares[0];
#pragma unroll 1
    for (int i = 1; i < WARPS; i++) {
        float before = count, apart = means[i * NFRAG * 8] - mean;
        count += counts[i];
        float weight = count > 0.0f ? __fdividef(counts[i], count) : 0.0f;
        mean += apart * weight;
        m2 += squares[i * NFRAG * 8] + apart * apart * (before * weight);
    }
}
