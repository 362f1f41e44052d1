// Moments of a pass: a mean and the sum of squared deviations (M2). Short spans are summed in fp32 after a centre near
// their mean is subtracted: the mean of the previous span. If that is too far from the span's own mean, the span is
// read again. Spans are combined in double by Chan's formula, in an order that does not depend on the number of
// threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "operands.h"

constexpr int64_t SPAN = 4096;        // elements that are summed in fp32
constexpr int64_t PIECE = 16 * SPAN;  // elements that a thread takes at a time
constexpr int64_t UNROLL = 4;         // independent accumulators
constexpr double FAR = 4;             // (mean − centre)² in variances, above which the squares lose digits

struct Sums {
  double mean = 0, m2 = 0, count = 0;

  void add(const Sums& other) {
    if (other.count == 0) return;
    const double total = count + other.count, delta = other.mean - mean, share = other.count / total;
    // The difference of infinite means is NaN.
    mean = count == 0 || !std::isfinite(delta) ? mean + other.mean : mean + delta * share;
    m2 += other.m2 + delta * delta * count * share;
    count = total;
  }
};

inline double lanes(V v) {
  float each[LANES];
  v.store(each);
  double total = 0;
  for (float one : each) total += one;
  return total;
}

// Moments of elements [begin, end) of a row. `value(i, count)` returns them; `centre` is subtracted first.
template <bool SQUARES, class F>
inline Sums span_moments(F value, int64_t begin, int64_t end, double centre, bool is_again = false) {
  const V k(SQUARES ? static_cast<float>(centre) : 0.0f);
  V sums[UNROLL], squares[UNROLL];
  for (int64_t j = 0; j < UNROLL; ++j) sums[j] = squares[j] = V(0.0f);
  auto add = [&](int64_t j, V d) {
    sums[j] = sums[j] + d;
    if constexpr (SQUARES) squares[j] = at::vec::fmadd(d, d, squares[j]);
  };
  int64_t i = begin;
  for (; i + UNROLL * LANES <= end; i += UNROLL * LANES)
    for (int64_t j = 0; j < UNROLL; ++j) add(j, value(i + j * LANES, LANES) - k);
  for (; i < end; i += LANES) {
    const int64_t count = std::min(LANES, end - i);
    add(0, V::set(V(0.0f), value(i, count) - k, count));
  }
  const double total = lanes((sums[0] + sums[1]) + (sums[2] + sums[3])), count = end - begin, rest = total / count;
  if (!SQUARES) return {rest, 0, count};
  const double m2 = lanes((squares[0] + squares[1]) + (squares[2] + squares[3])) - total * rest;
  const double mean = double(static_cast<float>(centre)) + rest;
  const bool is_near = total * rest <= FAR * m2;  // false for NaN
  return is_near || is_again ? Sums{mean, m2, count} : span_moments<SQUARES>(value, begin, end, mean, true);
}

struct Sizes {
  int64_t samples, channels, positions, groups;
  double eps;
  bool streams;  // the result goes past the caches
  int threads;

  int64_t per_group() const { return channels / groups; }
  // True if so many units would leave threads idle for a fifth of the time.
  bool is_uneven(int64_t units) const {
    const int64_t rounds = (units + threads - 1) / threads;
    return 5 * units < 4 * rounds * threads;
  }
};

struct Statistic {
  float mean = 0, rstd = 0;
  Statistic() = default;
  Statistic(const Sums& sums, double eps) : mean(sums.mean), rstd(1 / std::sqrt(sums.m2 / sums.count + eps)) {}
};

// Where means and reciprocal deviations are kept for a backward pass, [2, N · G]; nowhere where that is null.
struct Saved {
  float* to;
  int64_t count;
  void keep(int64_t unit, const Statistic& found) const {
    if (to) to[unit] = found.mean, to[count + unit] = found.rstd;
  }
};

// How many iterations of `bytes` each a thread takes at a time: enough to be worth asking for.
inline int grain(int64_t count, int64_t bytes, int threads) {
  return std::max<int64_t>(1, std::min(count / (4 * threads), (64 << 10) / std::max<int64_t>(1, bytes)));
}
