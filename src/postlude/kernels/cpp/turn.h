// A contiguous value made channels-last, [N, C, P] to [N, P, C], in squares: PyTorch's own copy takes several times as
// long.
#pragma once
#include "sums.h"

inline void turn_square(const float* from, int64_t positions, float* to, int64_t channels, int64_t high, int64_t wide) {
  if (high == LANES && wide == LANES) {
    at::vec::transpose_mxn<float, LANES, LANES>(from, positions, to, channels);
    return;
  }
  for (int64_t i = 0; i < wide; ++i)
    for (int64_t c = 0; c < high; ++c) to[i * channels + c] = from[c * positions + i];
}

inline void turn_all(const float* x, float* y, Sizes s) {
  constexpr int64_t EACH = 256;  // positions that a thread takes at a time
  const int64_t blocks = (s.positions + EACH - 1) / EACH;
#pragma omp parallel for schedule(dynamic, 4) num_threads(s.threads)
  for (int64_t block = 0; block < s.samples * blocks; ++block) {
    const int64_t base = block / blocks * s.channels * s.positions, begin = block % blocks * EACH;
    const int64_t end = std::min(s.positions, begin + EACH);
    for (int64_t c = 0; c < s.channels; c += LANES)
      for (int64_t p = begin; p < end; p += LANES)
        turn_square(x + base + c * s.positions + p, s.positions, y + base + p * s.channels + c, s.channels,
                    std::min(LANES, s.channels - c), std::min(LANES, end - p));
  }
}
