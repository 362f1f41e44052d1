// A convolution of few input channels that never stores its result, only moments per sample and channel. The text of a
// kernel defines
//
//   Value, List, Before                 as for the other passes; operands are per channel, per row, or one number
//   IS_PLAIN                            Before does nothing
//   CIN, COUT, KD, KH, KW, DD, DH, DW   channels, taps and dilations; strides are 1, and in 2-D KD is 1
#pragma once
#include "sums.h"
#include "taps.h"

template <class Kernel, template <class> class Way> struct FewChannels : Way<Kernel> {
  using Base = Way<Kernel>;
  using Base::BLOCKS, Base::CB, Base::COUT, Base::RESULTS, Base::WV;
  static constexpr int64_t STEP = WV * LANES;  // positions of the line at a time

  const typename Kernel::Value* x;
  const float *weight, *bias;  // [COUT, CIN, KD, KH, KW] and [COUT]
  const void* const* a;
  int threads;

  FewChannels(const typename Kernel::Value* x, const float* weight, const float* bias, const void* const* a, Volume v,
              int threads)
      : Base(v), x(x), weight(weight), bias(bias), a(a), threads(threads) {}

  int64_t line(int64_t rows) const { return (rows * this->row() + STEP - 1) / STEP * STEP; }

  struct Scratch {
    std::vector<float> staged, weights, centre;
    std::vector<V> masks, sums, squares;
    explicit Scratch(const FewChannels& pass)
        : staged(pass.staged() + 2 * STEP), weights(BLOCKS * Base::PACKED), centre(BLOCKS * CB),
          masks(pass.line(pass.height) / STEP * RESULTS), sums(BLOCKS * CB), squares(BLOCKS * CB) {
      pass.pack(pass.weight, weights.data());
    }
  };

  void mask(Scratch& own, int64_t rows) const {
    for (int64_t p = 0; p < line(rows); p += STEP)
      for (int64_t j = 0; j < RESULTS; ++j) {
        uint32_t bits[LANES];
        for (int64_t i = 0; i < LANES; ++i)
          bits[i] = this->line_row(p, j, i) < rows && this->column(p, j, i) < this->ow ? ~0u : 0u;
        own.masks[p / STEP * RESULTS + j] = V::loadu(bits);
      }
  }

  // The convolution and the steps after it for CB channels at position p of the line, minus `less`.
  void results(const Scratch& own, int64_t block, int64_t sample, int64_t plane, int64_t p, const float* less,
               V (&y)[CB][RESULTS]) const {
    float start[CB];
    for (int64_t c = 0; c < CB; ++c) {
      const int64_t channel = std::min(COUT - 1, block * CB + c);
      start[c] = bias[channel] - (Kernel::IS_PLAIN ? less[c] : 0.0f);
    }
    this->convolve(&own.staged[plane * this->plane() + p], &own.weights[block * Base::PACKED], start, y);
    if constexpr (!Kernel::IS_PLAIN) {
#pragma GCC unroll 16
      for (int64_t c = 0; c < CB; ++c) {
        const Row<typename Kernel::List> at(a, sample, std::min(COUT - 1, block * CB + c), COUT);
#pragma GCC unroll 8
        for (int64_t j = 0; j < RESULTS; ++j) y[c][j] = Kernel::Before::run(at, LANES, y[c][j]) - V(less[c]);
      }
    }
  }

  // Centres near the means: the means of the first positions.
  void look(Scratch& own, int64_t block, int64_t sample) const {
    const float zeros[CB] = {};
    V y[CB][RESULTS];
    results(own, block, sample, 0, 0, zeros, y);
    int64_t count = 0;
    for (int64_t j = 0; j < RESULTS; ++j) count += LANES - __builtin_popcount(own.masks[j].zero_mask());
    for (int64_t c = 0; c < CB; ++c) {
      double total = 0;
      for (int64_t j = 0; j < RESULTS; ++j) total += lanes(y[c][j] & own.masks[j]);
      own.centre[block * CB + c] = total / std::max<int64_t>(1, count);
    }
  }

  template <bool SQUARES> void walk(Scratch& own, int64_t block, int64_t sample, int64_t planes, int64_t rows) const {
    const float* less = &own.centre[block * CB];
    V *sums = &own.sums[block * CB], *squares = &own.squares[block * CB];
    for (int64_t plane = 0; plane < planes; ++plane)
      for (int64_t p = 0; p < rows * this->row(); p += STEP) {
        V y[CB][RESULTS];
        results(own, block, sample, plane, p, less, y);
        const V* masks = &own.masks[p / STEP * RESULTS];
#pragma GCC unroll 16
        for (int64_t c = 0; c < CB; ++c) {
#pragma GCC unroll 8
          for (int64_t j = 0; j < RESULTS; ++j) {
            const V d = y[c][j] & masks[j];
            sums[c] = sums[c] + d;
            if constexpr (SQUARES) squares[c] = at::vec::fmadd(d, d, squares[c]);
          }
        }
      }
  }

  // Moments of each channel over one block of positions; computed again if the centres were far from the means.
  template <bool SQUARES> void task_moments(Scratch& own, int64_t task, Sums* found) const {
    const int64_t sample = task / (this->deep * this->high), d0 = task / this->high % this->deep * this->depth;
    const int64_t h0 = task % this->high * this->height;
    const int64_t planes = std::min(this->depth, this->od - d0), rows = std::min(this->height, this->oh - h0);
    this->stage(x, sample, d0, h0, own.staged.data());
    mask(own, rows);
    const double count = planes * rows * this->ow;
    std::fill(own.centre.begin(), own.centre.end(), 0.0f);
    for (int64_t block = 0; SQUARES && block < BLOCKS; ++block) look(own, block, sample);
    for (int turn = 0; turn < 2; ++turn) {
      std::fill(own.sums.begin(), own.sums.end(), V(0.0f)), std::fill(own.squares.begin(), own.squares.end(), V(0.0f));
      for (int64_t block = 0; block < BLOCKS; ++block) walk<SQUARES>(own, block, sample, planes, rows);
      bool is_near = true;
      for (int64_t c = 0; c < COUT; ++c) {
        const double total = lanes(own.sums[c]), rest = total / count;
        const double m2 = SQUARES ? lanes(own.squares[c]) - total * rest : 0;
        found[c] = {double(own.centre[c]) + rest, m2, count};
        is_near &= !SQUARES || total * rest <= FAR * m2;
      }
      if (is_near) break;
      for (int64_t c = 0; c < COUT; ++c) own.centre[c] = found[c].mean;
    }
  }

  // The moments of each channel of each sample, [N, COUT].
  template <bool SQUARES> std::vector<Sums> moments() const {
    std::vector<Sums> whole(this->v.samples * COUT);
    std::vector<int64_t> samples(this->v.samples);
    std::iota(samples.begin(), samples.end(), 0);
    moments<SQUARES>(samples, whole);
    return whole;
  }

  // Those of some samples.
  template <bool SQUARES> void moments(const std::vector<int64_t>& samples, std::vector<Sums>& whole) const {
    const int64_t each = this->deep * this->high, tasks = samples.size() * each;
    std::vector<Sums> found(tasks * COUT);
#pragma omp parallel num_threads(threads)
    {
      Scratch own(*this);
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < tasks; ++task)
        task_moments<SQUARES>(own, samples[task / each] * each + task % each, &found[task * COUT]);
    }
    for (int64_t n : samples) std::fill_n(&whole[n * COUT], COUT, Sums());
    for (int64_t i = 0; i < tasks * COUT; ++i) whole[samples[i / COUT / each] * COUT + i % COUT].add(found[i]);
  }
};
