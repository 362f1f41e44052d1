// The end of a chain that needs only moments, on the channels of one sample: norms, affine steps and a reduction.
#pragma once
#include <cmath>
#include <utility>
#include <vector>

#include "sums.h"

// A number for each channel, or one for all.
struct Many {
  std::vector<double> v;
  Many(double one) : v{one} {}
  explicit Many(std::vector<double> v) : v(std::move(v)) {}
  double operator[](size_t i) const { return v.size() == 1 ? v[0] : v[i]; }
};

template <class F> inline Many combined(const Many& a, const Many& b, F f) {
  std::vector<double> v(std::max(a.v.size(), b.v.size()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = f(a[i], b[i]);
  return Many(std::move(v));
}
inline Many operator+(const Many& a, const Many& b) { return combined(a, b, [](double x, double y) { return x + y; }); }
inline Many operator-(const Many& a, const Many& b) { return combined(a, b, [](double x, double y) { return x - y; }); }
inline Many operator*(const Many& a, const Many& b) { return combined(a, b, [](double x, double y) { return x * y; }); }
inline Many operator/(const Many& a, const Many& b) { return combined(a, b, [](double x, double y) { return x / y; }); }

inline Many add(Many x, Many y) { return x + y; }
inline Many sub(Many x, Many y) { return x - y; }
inline Many rsub(Many x, Many y) { return y - x; }
inline Many mul(Many x, Many y) { return x * y; }
inline Many div(Many x, Many y) { return x / y; }
inline Many batch_norm(Many x, Many mean, Many var, Many weight, Many bias, double eps) {
  const Many spread = combined(var, eps, [](double v, double e) { return std::sqrt(v + e); });
  return (x - mean) * (weight / spread) + bias;
}
inline Many batch_norm_variance(Many x, Many var, Many weight, double eps) {
  return x * (weight * weight) / (var + eps);
}

inline Many sum(const Many& x) {
  double total = 0;
  for (double one : x.v) total += one;
  return total;
}

// Means and variances of channels after a norm over groups of `per_group` channels, all with the same number of
// positions.
inline std::pair<Many, Many> normalize_moments(Many mean, Many var, int64_t per_group, double eps) {
  for (size_t first = 0; first < mean.v.size(); first += per_group) {
    double middle = 0, spread = 0;
    for (int64_t i = 0; i < per_group; ++i) middle += mean.v[first + i] / per_group;
    for (int64_t i = 0; i < per_group; ++i)
      spread += (var.v[first + i] + (mean.v[first + i] - middle) * (mean.v[first + i] - middle)) / per_group;
    const double rstd = 1 / std::sqrt(spread + eps);
    for (int64_t i = 0; i < per_group; ++i)
      mean.v[first + i] = (mean.v[first + i] - middle) * rstd, var.v[first + i] *= rstd * rstd;
  }
  return {mean, var};
}

// The operands of all channels of one sample.
template <class List> struct Sample {
  const void* const* pointers;
  int64_t sample, channels;

  template <int I> Many get() const {
    using One = typename List::template Nth<I>;
    if constexpr (One::role == ONE) return double(One::at(pointers[I], 0));
    std::vector<double> v(channels);
    for (int64_t c = 0; c < channels; ++c) v[c] = One::at(pointers[I], One::role == ROW ? sample * channels + c : c);
    return Many(std::move(v));
  }
};

// What a pass does with the moments [N, C] of its samples.
template <class Kernel>
inline void end(const std::vector<Sums>& found, int64_t samples, int64_t channels, const void* const* a, void* out) {
  auto* result = static_cast<typename Kernel::End::Result*>(out);
  for (int64_t n = 0; n < samples; ++n) {
    std::vector<double> mean(channels), var(channels);
    for (int64_t c = 0; c < channels; ++c) {
      const Sums& one = found[n * channels + c];
      mean[c] = one.mean, var[c] = one.m2 / one.count;
    }
    const Sample<typename Kernel::List> at{a, n, channels};
    const Many given = Kernel::End::run(at, Many(mean), Many(var), found[0].count, channels);
    for (double one : given.v) *result++ = static_cast<float>(one);
  }
}
