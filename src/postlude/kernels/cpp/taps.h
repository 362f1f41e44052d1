// Two ways to convolve a staged block of a few channels: tap by tap, or with Winograd's F(2, 3), which computes two
// outputs of three taps along x with four multiplications instead of six; its rounding error is at most twice as large.
//
// Both treat a block's positions as one line of padded rows: every tap is a shifted read, and positions past the end of
// a row are masked when results are summed. Registers hold the sums of CB channels of WV vectors.
#pragma once
#include <algorithm>
#include <vector>

#include "operands.h"

// A vector that several products share. Compilers would load it again for each of them, and loads are the bottleneck.
inline V in_register(V v) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 raw = v;
#else
  __m256 raw = v;
#endif
  asm("" : "+v"(raw));
  return V(raw);
}

struct Volume {
  int64_t samples, d, h, w;     // of the input
  int64_t sn, sc, sd, sh, sw;   // its strides
  int64_t pd, ph, pw;           // padding
};

// What is staged at a time: the input for `depth` slices of `height` rows of outputs.
template <class Kernel> struct Block {
  static constexpr int64_t CIN = Kernel::CIN, COUT = Kernel::COUT, KD = Kernel::KD, KH = Kernel::KH, KW = Kernel::KW;
  static constexpr int64_t DD = Kernel::DD, DH = Kernel::DH, DW = Kernel::DW;
  static constexpr int64_t STAGED = 32 << 10;  // elements, which fit in L2; 128 << 10 is no faster
  using Value = typename Kernel::Value;

  Volume v;
  int64_t od, oh, ow, wide, depth, height, deep, high;  // outputs, a padded row, outputs of a block, blocks

  explicit Block(Volume v) : v(v) {
    od = v.d + 2 * v.pd - DD * (KD - 1), oh = v.h + 2 * v.ph - DH * (KH - 1), ow = v.w + 2 * v.pw - DW * (KW - 1);
    wide = (v.w + 2 * v.pw + 1) / 2 * 2;
    height = std::clamp<int64_t>(STAGED / (CIN * (1 + DD * (KD - 1)) * wide) - DH * (KH - 1), 1, oh);
    depth = height < oh ? 1 : std::clamp<int64_t>(STAGED / (CIN * rows() * wide) - DD * (KD - 1), 1, od);
    deep = (od + depth - 1) / depth, high = (oh + height - 1) / height;
    depth = (od + deep - 1) / deep, height = (oh + high - 1) / high;
  }

  int64_t rows() const { return height + DH * (KH - 1); }
  int64_t planes() const { return depth + DD * (KD - 1); }

  // The pitch of slices in memory: an odd number of cache lines, so that all taps' slices map to different cache sets.
  static int64_t spread(int64_t elements) { return ((elements + 15) / 16 | 1) * 16; }

  // Copies one row of the input in fp32 with its padding; zeros where there is no input.
  void read_row(const Value* x, int64_t sample, int64_t c, int64_t d, int64_t h, float* to) const {
    const bool is_there = d >= 0 && d < v.d && h >= 0 && h < v.h;
    const int64_t begin = is_there ? v.pw : wide, end = is_there ? v.pw + v.w : wide;
    std::fill(to, to + begin, 0.0f), std::fill(to + end, to + wide, 0.0f);
    const Value* from = x + sample * v.sn + c * v.sc + d * v.sd + h * v.sh;
    if (v.sw == 1)
      for (int64_t i = begin; i < end; ++i) to[i] = from[i - begin];
    else
      for (int64_t i = begin; i < end; ++i) to[i] = from[(i - begin) * v.sw];
  }

  // Calls fn(plane, row, c, d, h) for each staged row of the block whose outputs begin at (d0, h0), with its source.
  template <class F> void each_row(int64_t d0, int64_t h0, F fn) const {
    for (int64_t number = 0; number < CIN * planes() * rows(); ++number)
      fn(number / rows(), number % rows(), number / (planes() * rows()), number / rows() % planes() + d0 - v.pd,
         number % rows() + h0 - v.ph);
  }
};

template <class Kernel> struct Direct : Block<Kernel> {
  using Base = Block<Kernel>;
  using Base::CIN, Base::COUT, Base::KD, Base::KH, Base::KW, Base::DD, Base::DH, Base::DW;
  static constexpr int64_t MOST = LANES == 16 ? 12 : 6, WV = 2, RESULTS = WV;
  static constexpr int64_t BLOCKS = (COUT + MOST - 1) / MOST, CB = (COUT + BLOCKS - 1) / BLOCKS;
  static constexpr int64_t TAPS = CIN * KD * KH * KW, PACKED = TAPS * CB;  // numbers of one block of channels
  using Base::Base;

  int64_t row() const { return this->wide; }
  int64_t plane() const { return this->spread(this->rows() * row()); }
  int64_t staged() const { return CIN * this->planes() * plane() + DW * KW; }

  void pack(const float* weight, float* packed) const {
    for (int64_t c = 0; c < COUT; ++c)
      for (int64_t tap = 0; tap < TAPS; ++tap) packed[(c / CB * TAPS + tap) * CB + c % CB] = weight[c * TAPS + tap];
  }

  void stage(const typename Kernel::Value* x, int64_t sample, int64_t d0, int64_t h0, float* staged) const {
    this->each_row(d0, h0, [&](int64_t plane_number, int64_t row_number, int64_t c, int64_t d, int64_t h) {
      this->read_row(x, sample, c, d, h, staged + plane_number * plane() + row_number * row());
    });
  }

  // The x of lane `lane` of result j in its row of outputs, for position p of the line.
  int64_t column(int64_t p, int64_t j, int64_t lane) const { return (p + j * LANES + lane) % row(); }
  int64_t line_row(int64_t p, int64_t j, int64_t lane) const { return (p + j * LANES + lane) / row(); }

  void convolve(const float* at, const float* w, const float* start, V (&sums)[CB][RESULTS]) const {
#pragma GCC unroll 16
    for (int64_t c = 0; c < CB; ++c)
#pragma GCC unroll 8
      for (int64_t j = 0; j < WV; ++j) sums[c][j] = V(start[c]);
    for (int64_t ci = 0; ci < CIN; ++ci)
      for (int64_t kd = 0; kd < KD; ++kd)
        for (int64_t kh = 0; kh < KH; ++kh) {
          const float* from = at + (ci * this->planes() + kd * DD) * plane() + kh * DH * row();
#pragma GCC unroll 8
          for (int64_t kw = 0; kw < KW; ++kw, w += CB) {
            V given[WV];
#pragma GCC unroll 8
            for (int64_t j = 0; j < WV; ++j) given[j] = in_register(V::loadu(from + kw * DW + j * LANES));
#pragma GCC unroll 16
            for (int64_t c = 0; c < CB; ++c)
#pragma GCC unroll 8
              for (int64_t j = 0; j < WV; ++j) sums[c][j] = at::vec::fmadd(given[j], V(w[c]), sums[c][j]);
          }
        }
  }
};

// Two neighbouring outputs of inputs d0 … d3 are m0 + m1 + m2 and m1 − m2 − m3. Here m0 … m3 are sums of products of
// d0 − d2, d1 + d2, d2 − d1, d1 − d3 with g0, (g0 + g1 + g2) / 2, (g0 − g1 + g2) / 2, g2.
template <class Kernel> struct Winograd : Block<Kernel> {
  using Base = Block<Kernel>;
  using Base::CIN, Base::COUT, Base::KD, Base::KH, Base::KW, Base::DD, Base::DH, Base::DW;
  static_assert(KW == 3 && DW == 1);
  static constexpr int64_t MOST = LANES == 16 ? 6 : 2, WV = 1, RESULTS = 2 * WV;
  static constexpr int64_t BLOCKS = (COUT + MOST - 1) / MOST, CB = (COUT + BLOCKS - 1) / BLOCKS;
  static constexpr int64_t TAPS = CIN * KD * KH, PACKED = TAPS * 4 * CB;
  using Base::Base;

  int64_t row() const { return this->wide / 2; }  // pairs of outputs
  int64_t plane() const { return this->spread(this->rows() * row()); }
  int64_t part() const { return CIN * this->planes() * plane(); }  // of each of the four
  int64_t staged() const { return 4 * part(); }

  void pack(const float* weight, float* packed) const {
    for (int64_t c = 0; c < COUT; ++c)
      for (int64_t tap = 0; tap < TAPS; ++tap) {
        const float *g = weight + (c * TAPS + tap) * 3, even = (g[0] + g[2]) / 2, odd = g[1] / 2;
        float* to = packed + (c / CB * TAPS + tap) * 4 * CB + c % CB;
        to[0] = g[0], to[CB] = even + odd, to[2 * CB] = even - odd, to[3 * CB] = g[2];
      }
  }

  void stage(const typename Kernel::Value* x, int64_t sample, int64_t d0, int64_t h0, float* staged) const {
    std::vector<float> plain(this->wide + 2 + 2 * LANES);
    this->each_row(d0, h0, [&](int64_t plane_number, int64_t row_number, int64_t c, int64_t d, int64_t h) {
      this->read_row(x, sample, c, d, h, plain.data());
      float* to = staged + plane_number * plane() + row_number * row();
      for (int64_t i = 0; i < row(); i += LANES) {
        const float* from = &plain[2 * i];
        const auto [d0, d1] = at::vec::deinterleave2(V::loadu(from), V::loadu(from + LANES));
        const auto [d2, d3] = at::vec::deinterleave2(V::loadu(from + 2), V::loadu(from + 2 + LANES));
        const int64_t count = std::min(LANES, row() - i);
        (d0 - d2).store(to + i, count), (d1 + d2).store(to + part() + i, count);
        (d2 - d1).store(to + 2 * part() + i, count), (d1 - d3).store(to + 3 * part() + i, count);
      }
    });
  }

  int64_t column(int64_t p, int64_t j, int64_t lane) const { return 2 * ((p + j / 2 * LANES + lane) % row()) + j % 2; }
  int64_t line_row(int64_t p, int64_t j, int64_t lane) const { return (p + j / 2 * LANES + lane) / row(); }

  void convolve(const float* at, const float* w, const float* start, V (&results)[CB][RESULTS]) const {
    V m[CB][4][WV];
#pragma GCC unroll 16
    for (int64_t c = 0; c < CB; ++c)
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i)
#pragma GCC unroll 8
        for (int64_t j = 0; j < WV; ++j) m[c][i][j] = V(i == 1 ? start[c] : 0.0f);
    for (int64_t ci = 0; ci < CIN; ++ci)
      for (int64_t kd = 0; kd < KD; ++kd)
#pragma GCC unroll 4
        for (int64_t kh = 0; kh < KH; ++kh, w += 4 * CB) {
          const float* from = at + (ci * this->planes() + kd * DD) * plane() + kh * DH * row();
#pragma GCC unroll 4
          for (int64_t i = 0; i < 4; ++i) {
            V given[WV];
#pragma GCC unroll 8
            for (int64_t j = 0; j < WV; ++j) given[j] = in_register(V::loadu(from + i * part() + j * LANES));
#pragma GCC unroll 16
            for (int64_t c = 0; c < CB; ++c)
#pragma GCC unroll 8
              for (int64_t j = 0; j < WV; ++j) m[c][i][j] = at::vec::fmadd(given[j], V(w[i * CB + c]), m[c][i][j]);
          }
        }
#pragma GCC unroll 16
    for (int64_t c = 0; c < CB; ++c)
#pragma GCC unroll 8
      for (int64_t j = 0; j < WV; ++j) {
        results[c][2 * j] = m[c][0][j] + (m[c][1][j] + m[c][2][j]);
        results[c][2 * j + 1] = (m[c][1][j] - m[c][2][j]) - m[c][3][j];
      }
  }
};
