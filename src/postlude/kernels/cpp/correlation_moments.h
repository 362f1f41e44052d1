// Moments of a convolution's result without the convolution. A result is y = b + w·x over the taps a = (kd, kh, kw, c),
// so its sum is w·s + P b, and its sum of squared deviations wᵀ(R − s sᵀ / P)w, where P is the number of positions, s_a
// the sum of the input at tap a, and R_ab the sum of products at taps a and b (correlations.h).
//
// Where wᵀRw is far smaller than its terms, as for a smooth input and a filter of differences, the terms' rounding
// errors are left over. Such a sample is computed by the convolution instead, and so is one that is not finite. A few
// results per sample tell most of these before their correlations are computed.
#pragma once
#include "correlations.h"
#include "few_channels.h"

#ifndef LEAST_SHARE
// The terms of wᵀRw add up to at most B = (Σ_c |w_c|₁ √Q_c)², where Q_c is the sum of the squares of channel c. A
// lane's sum of n products in fp32 has an error of at most n u, u = 2⁻²⁴, of the sum of their magnitudes, and of about
// u √n / 3 if its roundings are independent. n is 64 for rows of up to 512 elements; then about 64 such sums are added
// up, with as large an error again. So that of an R_ab is at most 128 u √(Q_c Q_c') and usually below 6 u / √LANES of
// it. Errors of different lags have different signs: that of wᵀRw was below 0.8 u B for all inputs tried (noise, steps,
// ramps, bytes). Above this share the variance then has a relative error below 128 · 0.8 u = 6e-6, and 1 / √ of it half
// as much. For white noise the share is 1 / (0.7 taps) or so: 1/61 for chain 23.
#define LEAST_SHARE (1.0 / 128)
#endif
// Products below fp32's normal numbers have an absolute error of up to 2⁻¹²⁶, here 3e-6 of B · LEAST_SHARE.
constexpr double LEAST_SQUARE = 1e-30;

template <class Kernel, template <class> class Way> struct CorrelationMoments : FewChannels<Kernel, Way> {
  using Base = FewChannels<Kernel, Way>;
  using Pass = Correlations<Kernel>;
  using Base::Base, Base::COUT;
  static constexpr int64_t CIN = Kernel::CIN, KD = Kernel::KD, KH = Kernel::KH, KW = Kernel::KW;
  static constexpr int64_t TAPS = KD * KH * KW * CIN, PAIRS = CIN * CIN;
  static constexpr int64_t BLOCKS = (COUT + 31) / 32, OB = ((COUT + BLOCKS - 1) / BLOCKS + 3) / 4 * 4;  // of outputs
  static constexpr int64_t PROBES = 16;  // results per sample
  static_assert(Kernel::IS_PLAIN && Kernel::DD == 1 && Kernel::DH == 1 && Kernel::DW == 1);

  static int64_t tap(int64_t kd, int64_t kh, int64_t kw) { return ((kd * KH + kh) * KW + kw) * CIN; }

  struct Weights {
    std::vector<double> w;                // [block, a, OB], with zeros past the last output
    std::vector<double> sums, magnitudes;  // over the taps of a channel, [COUT, CIN]

    explicit Weights(const float* weight) : w(BLOCKS * TAPS * OB), sums(COUT * CIN), magnitudes(COUT * CIN) {
      for (int64_t i = 0; i < COUT * TAPS; ++i) {
        const int64_t o = i / TAPS, channel = i / (TAPS / CIN), a = i % (TAPS / CIN) * CIN + channel % CIN;
        w[(o / OB * TAPS + a) * OB + o % OB] = weight[i];
        sums[channel] += weight[i], magnitudes[channel] += std::abs(weight[i]);
      }
    }
    double total(int64_t o, const double* each, const std::vector<double>& of) const {
      return std::inner_product(each, each + CIN, &of[o * CIN], 0.0);
    }
    // B for channels with these sums of squares.
    double bound(int64_t o, const double (&squares)[CIN]) const {
      double roots[CIN];
      for (int64_t c = 0; c < CIN; ++c) roots[c] = std::sqrt(squares[c]);
      return std::pow(total(o, roots, magnitudes), 2);
    }
  };

  // A box of positions along z and y: the classes that it is made of, `count` numbers of each.
  static void box(const double* from, int64_t i, int64_t j, int64_t rows, int64_t columns, int64_t classes,
                  int64_t count, double* to) {
    std::fill(to, to + count, 0.0);
    for (int64_t zc = i; zc < i + rows; ++zc)
      for (int64_t yc = j; yc < j + columns; ++yc) {
        const double* one = from + (zc * classes + yc) * count;
        for (int64_t n = 0; n < count; ++n) to[n] += one[n];
      }
  }

  // A box along x, N numbers of it: whole rows without the columns before tap k and behind the last output of tap k.
  template <int64_t N>
  static void between(const double* rows, const double* columns, int64_t k, int64_t dx, double (&to)[N]) {
    const auto less = [&](int64_t lane) {
      for (int64_t n = 0; n < N; ++n) to[n] -= columns[lane * N + n];
    };
    std::copy(rows, rows + N, to);
    for (int64_t i = std::max<int64_t>(0, -dx); i < k; ++i) less(i * Pass::SIDE + i + dx);
    for (int64_t i = k; i < KW - 1 - std::max<int64_t>(0, dx); ++i) less(Pass::ENDS + i * Pass::SIDE + i + dx);
  }

  // R for b >= a, from the sums of one lag. (Where the lag is 0, also for a few b < a, which nobody reads.)
  static void matrix(const Pass& pass, int64_t dz, int64_t dy, const double* found, double* r) {
    double sums[Pass::FOUND], one[PAIRS];
    const int64_t deep = pass.z.boxes(dz), high = pass.y.boxes(dy);
    for (int64_t i = 0; i < deep * high; ++i) {
      const int64_t kd = i / high, kh = i % high + pass.y.low(dy);
      box(found, kd, i % high, deep, high, pass.y.classes(dy), Pass::FOUND, sums);
      for (int64_t dx = Pass::first_dx(dz, dy); dx < KW; ++dx)
        for (int64_t kw = std::max<int64_t>(0, -dx); kw < KW - std::max<int64_t>(0, dx); ++kw) {
          between(sums + (dx + KW - 1) * PAIRS, sums + Pass::LAGS * PAIRS, kw, dx, one);
          double* to = r + tap(kd, kh, kw) * TAPS + tap(kd + dz, kh + dy, kw + dx);
          for (int64_t c = 0; c < CIN; ++c)
            for (int64_t e = 0; e < CIN; ++e) to[c * TAPS + e] = one[c * CIN + e];
        }
    }
  }

  // The sums of the input at all taps.
  static void input_sums(const Pass& pass, const double* found, double* s) {
    double sums[Pass::FOUND_SUMS], one[CIN];
    for (int64_t i = 0; i < KD * KH; ++i) {
      box(found, i / KH, i % KH, KD, KH, pass.y.classes(0), Pass::FOUND_SUMS, sums);
      for (int64_t kw = 0; kw < KW; ++kw) {
        between(sums, sums + CIN, kw, 0, one);
        std::copy(one, one + CIN, s + tap(0, i, kw));
      }
    }
  }

  // w·s and wᵀRw for a block of outputs.
  static void forms(const double* w, const double* s, const double* r, double* linear, double* quadratic) {
    std::fill(linear, linear + OB, 0.0), std::fill(quadratic, quadratic + OB, 0.0);
    for (int64_t a = 0; a < TAPS; ++a) {
      double total[OB];
      for (int64_t o = 0; o < OB; ++o) total[o] = r[a * TAPS + a] / 2 * w[a * OB + o];
      for (int64_t b = a + 1; b < TAPS; ++b)
#pragma GCC unroll 32
        for (int64_t o = 0; o < OB; ++o) total[o] += r[a * TAPS + b] * w[b * OB + o];
      for (int64_t o = 0; o < OB; ++o) {
        linear[o] += s[a] * w[a * OB + o];
        quadratic[o] += 2 * total[o] * w[a * OB + o];
      }
    }
  }

  // The moments of a sample from its sums; false if they would not be exact.
  bool finish(const Pass& pass, const Weights& weights, const double* pivot, const double* found, Sums* to) const {
    std::vector<double> r(TAPS * TAPS), s(TAPS);
    const double count = this->od * this->oh * this->ow, *from = found;
    double squares[CIN] = {}, ones[CIN], linear[OB], quadratic[OB];
    std::fill(ones, ones + CIN, 1.0);
    for (int64_t i = 0; i < pass.z.classes(0) * pass.y.classes(0); ++i)
      for (int64_t c = 0; c < CIN; ++c) squares[c] += found[i * Pass::FOUND + (KW - 1) * PAIRS + c * (CIN + 1)];
    Pass::each_lag([&](int64_t dz, int64_t dy) {
      matrix(pass, dz, dy, from, r.data());
      from += pass.z.classes(dz) * pass.y.classes(dy) * Pass::FOUND;
    });
    input_sums(pass, from, s.data());
    bool is_exact = true;
    for (int64_t o = 0; o < COUT; ++o) {
      if (o % OB == 0) forms(&weights.w[o * TAPS], s.data(), r.data(), linear, quadratic);
      const double all = linear[o % OB], m2 = quadratic[o % OB] - all * all / count, bound = weights.bound(o, squares);
      const bool is_normal = bound >= LEAST_SQUARE * count * weights.bound(o, ones);
      is_exact &= std::isfinite(bound) && m2 >= LEAST_SHARE * bound && is_normal;
      to[o] = {this->bias[o] + all / count + weights.total(o, pivot, weights.sums), std::max(0.0, m2), count};
    }
    return is_exact;
  }

  // The input at the taps of an output, minus the pivots.
  void patch(int64_t sample, const int64_t (&at)[3], const double* pivot, double* to) const {
    const Volume& v = this->v;
    for (int64_t kd = 0; kd < KD; ++kd)
      for (int64_t kh = 0; kh < KH; ++kh)
        for (int64_t kw = 0; kw < KW; ++kw) {
          const int64_t d = at[0] + kd - v.pd, h = at[1] + kh - v.ph, w = at[2] + kw - v.pw;
          const bool is_there = d >= 0 && d < v.d && h >= 0 && h < v.h && w >= 0 && w < v.w;
          const auto* from = this->x + sample * v.sn + d * v.sd + h * v.sh + w * v.sw;
          for (int64_t c = 0; c < CIN; ++c) *to++ = is_there ? double(float(from[c * v.sc])) - pivot[c] : 0.0;
        }
  }

  // Whether correlations will probably do for a sample: the share of its variances, estimated from a few results. Of
  // many channels, one estimate may be a quarter of the true share.
  bool probe(const Weights& weights, int64_t sample, const double* pivot) const {
    double squares[CIN] = {}, given[TAPS], sums[BLOCKS * OB] = {}, more[BLOCKS * OB] = {};
    for (int64_t i = 0; i < PROBES; ++i) {
      const auto spread = [&](double step, int64_t size) { return int64_t(std::fmod(i * step, 1.0) * size); };
      patch(sample, {spread(0.8191725, this->od), spread(0.6710436, this->oh), spread(0.5497005, this->ow)}, pivot,
            given);
      for (int64_t a = 0; a < TAPS; ++a) squares[a % CIN] += given[a] * given[a] * (double(CIN) / TAPS);
      for (int64_t block = 0; block < BLOCKS; ++block) {
        double y[OB] = {};
        const double* w = &weights.w[block * TAPS * OB];
        for (int64_t a = 0; a < TAPS; ++a)
#pragma GCC unroll 32
          for (int64_t o = 0; o < OB; ++o) y[o] += given[a] * w[a * OB + o];
        for (int64_t o = 0; o < OB; ++o) sums[block * OB + o] += y[o], more[block * OB + o] += y[o] * y[o];
      }
    }
    bool is_likely = true;
    for (int64_t o = 0; o < COUT; ++o)
      is_likely &= more[o] - sums[o] * sums[o] / PROBES >= LEAST_SHARE / 4 * weights.bound(o, squares);
    return is_likely;
  }

  // The sums of one part of a sample, if correlations will probably do for it, and its moments if it is the only part.
  bool part(const Pass& pass, const Weights& weights, int64_t number, typename Pass::Scratch& own, double* found,
            Sums* whole) const {
    const int64_t sample = number / pass.parts;
    double pivot[CIN];
    pass.pivots(this->x, sample, pivot);
    if (!probe(weights, sample, pivot)) return false;
    double* to = pass.parts > 1 ? found + number * pass.found() : own.found.data();
    pass.part(this->x, sample, number % pass.parts, pivot, own, to);
    return pass.parts > 1 || finish(pass, weights, pivot, to, whole + sample * COUT);
  }

  // The moments of a sample of several parts.
  bool combine(const Pass& pass, const Weights& weights, int64_t sample, double* found, Sums* whole) const {
    const int64_t size = pass.found();
    double pivot[CIN], *first = found + sample * pass.parts * size;
    pass.pivots(this->x, sample, pivot);
    for (int64_t i = size; i < pass.parts * size; ++i) first[i % size] += first[i];
    return finish(pass, weights, pivot, first, whole + sample * COUT);
  }

  template <bool SQUARES> std::vector<Sums> moments() const {
    const Pass pass(this->v);
    const Weights weights(this->weight);
    const int64_t parts = pass.parts, samples = this->v.samples;
    std::vector<double> found(parts > 1 ? samples * parts * pass.found() : 0);
    std::vector<Sums> whole(samples * COUT);
    std::vector<char> is_exact(samples * parts);
#pragma omp parallel num_threads(this->threads)
    {
      typename Pass::Scratch own(pass);
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t i = 0; i < samples * parts; ++i)
        is_exact[i] = part(pass, weights, i, own, found.data(), whole.data());
      if (parts > 1) {  // else nobody need wait: on a busy machine that takes long
#pragma omp barrier
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t n = 0; n < samples; ++n)
          if (is_exact[n * parts]) is_exact[n * parts] = combine(pass, weights, n, found.data(), whole.data());
      }
    }
    std::vector<int64_t> others;
    for (int64_t n = 0; n < samples; ++n)
      if (!is_exact[n * parts]) others.push_back(n);
    if (!others.empty()) Base::template moments<SQUARES>(others, whole);
    return whole;
  }
};
