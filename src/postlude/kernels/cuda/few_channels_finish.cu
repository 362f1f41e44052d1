// A sample's result from the moments of its tiles: a norm over groups of channels, then the mean of everything. One
// lane per channel. In double, because the mean of a norm's result is a small difference of large numbers.
//
// Compile-time: C_OUT (at most 32), C_PER_GROUP, TILES, EPS.

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
#pragma unroll
    for (int i = 0; i < C_PER_GROUP; i++) center += __shfl_sync(~0u, mean, first + i) / C_PER_GROUP;
    variance += (mean - center) * (mean - center);
#pragma unroll
    for (int i = 0; i < C_PER_GROUP; i++) spread += __shfl_sync(~0u, variance, first + i) / C_PER_GROUP;
    double result = (mean - center) * p_gamma[c] / sqrt(spread + EPS) + p_beta[c];
    if (threadIdx.x >= C_OUT) result = 0.0;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) result += __shfl_xor_sync(~0u, result, apart);
    if (threadIdx.x == 0) p_out[blockIdx.x] = result / C_OUT;
}
