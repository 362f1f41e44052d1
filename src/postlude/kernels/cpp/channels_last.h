// Passes over a channels-last value, [N, P, C]. Each sample is cut into rows of `period` columns and a shorter last
// row. `period` is a multiple of both the vector width and the number of channels: columns are whole vectors for any C.
#pragma once
#include "sums.h"

template <class Kernel> struct ChannelsLast {
  using Value = typename Kernel::Value;
  using Result = typename Kernel::Result;
  using List = typename Kernel::List;
  const Value* x;
  Result* y;
  const void* const* a;
  Sizes s;
  Saved saved;
  int64_t period, rows, tile, strip, per_task, pieces;  // rows are whole ones; the others are so many of them

  ChannelsLast(const Value* x, Result* y, const void* const* a, Sizes s, float* saved = nullptr)
      : x(x), y(y), a(a), s(s), saved{saved, s.samples * s.groups}, period(period_of(s.channels)), rows(size() / period),
        tile(std::clamp<int64_t>(PIECE / period, 8, SPAN / LANES)),
        strip(period > UNROLL * LANES ? std::clamp<int64_t>(STRIP / period, 4, tile) : tile),
        per_task(tile * std::max<int64_t>(1, PIECE / (tile * period))),
        pieces(std::max<int64_t>(1, (rows + per_task - 1) / per_task)) {}

  static constexpr int64_t TURNED = 1024;  // positions that are written contiguous at a time
  static constexpr int64_t STRIP = 2048;   // elements that stay in the first cache from one block of columns to the next
  static constexpr int64_t WIDEST = LANES == 16 ? 8 : 4;  // vectors whose sums, squares and centres fit the registers

  static int64_t period_of(int64_t channels) {
    const int64_t wide = std::lcm(channels, UNROLL * LANES);  // several vectors, for independent accumulators
    return wide <= SPAN ? wide : std::lcm(channels, LANES);
  }

  int64_t size() const { return s.channels * s.positions; }
  int64_t first_row(int64_t task) const { return task % pieces * per_task; }
  int64_t last_row(int64_t task) const { return std::min(rows, first_row(task) + per_task); }
  bool is_last(int64_t task) const { return task % pieces == pieces - 1; }

  // What a thread keeps from task to task.
  struct Scratch {
    Columns<List> columns;
    std::vector<double> mean, m2;                            // of every column of a task
    std::vector<float> centre, sums, squares, means, rstds;  // of columns
    Scratch(const void* const* a, int64_t period)
        : columns(a, period), mean(period), m2(period), centre(period), sums(period), squares(period),
          means(period), rstds(period) {}
  };

  // Calls fn(J, column): first for blocks of UNROLL vectors of columns, then for single ones.
  template <class F> void each_block(F fn) const {
    int64_t column = 0;
    for (; column + UNROLL * LANES <= period; column += UNROLL * LANES)
      fn(std::integral_constant<int, UNROLL>{}, column);
    for (; column < period; column += LANES) fn(std::integral_constant<int, 1>{}, column);
  }

  // Calls fn(at, j) for J vectors of each of the rows [begin, end).
  template <int J, class F>
  void each_vector(const Scratch& own, int64_t base, int64_t column, int64_t begin, int64_t end, F fn) const {
    Column<List> at[J];
    for (int j = 0; j < J; ++j) at[j].begin(own.columns, column + j * LANES);
    const int64_t step = period, last = base + end * step + column;
    for (int64_t offset = base + begin * step + column; offset < last; offset += step)
      for (int j = 0; j < J; ++j) {
        at[j].offset = offset + j * LANES;
        fn(at[j], j);
      }
  }

  V value(const Column<List>& at, int64_t count = LANES) const {
    return Kernel::Before::run(at, count, read_vector(x + at.offset, count));
  }

  // Adds rows [begin, end) of J vectors of columns, around their centres, to what was added up before.
  template <bool SQUARES, int J>
  void add_rows(Scratch& own, int64_t base, int64_t column, int64_t begin, int64_t end) const {
    V k[J], sums[J], squares[J];
    for (int j = 0; j < J; ++j) {
      const int64_t at = column + j * LANES;
      k[j] = V::loadu(&own.centre[at]), sums[j] = V::loadu(&own.sums[at]), squares[j] = V::loadu(&own.squares[at]);
    }
    this->template each_vector<J>(own, base, column, begin, end, [&](const Column<List>& at, int j) {
      const V d = value(at) - k[j];
      sums[j] = sums[j] + d;
      if constexpr (SQUARES) squares[j] = at::vec::fmadd(d, d, squares[j]);
    });
    for (int j = 0; j < J; ++j)
      sums[j].store(&own.sums[column + j * LANES]), squares[j].store(&own.squares[column + j * LANES]);
  }

  // The same for all columns, one row after the other: memory is read from one end to the other, as prefetchers expect.
  // In blocks of columns, rows of 128 channels took twice as long (AVX512, from memory: 0.9 instead of 0.45 ms).
  template <bool SQUARES> void add_whole_rows(Scratch& own, int64_t base, int64_t begin, int64_t end) const {
    float *centre = own.centre.data(), *sums = own.sums.data(), *squares = own.squares.data();
    for (int64_t row = begin; row < end; ++row)
      for (int64_t column = 0; column < period; column += LANES) {
        Column<List> at;
        at.begin(own.columns, column);
        at.offset = base + row * period + column;
        const V d = value(at) - V::loadu(centre + column);
        (V::loadu(sums + column) + d).store(sums + column);
        if constexpr (SQUARES) at::vec::fmadd(d, d, V::loadu(squares + column)).store(squares + column);
      }
  }

  // Whether the centres of J vectors of columns were near the means of `count` rows; else they are moved there.
  template <int J> bool is_near(Scratch& own, int64_t column, float count) const {
    bool found = true;
    for (int j = 0; j < J; ++j) {
      const V sums = V::loadu(&own.sums[column + j * LANES]), moved = sums * sums / V(count);
      const V squares = V::loadu(&own.squares[column + j * LANES]);
      found &= (moved <= V(float(FAR)) * (squares - moved)).zero_mask() == 0;
    }
    for (int j = 0; !found && j < J; ++j) {
      float* centre = &own.centre[column + j * LANES];
      (V::loadu(centre) + V::loadu(&own.sums[column + j * LANES]) / V(count)).store(centre);
    }
    return found;
  }

  // Adds rows [begin, end) to those that were added before, `count` rows.
  template <bool SQUARES> void add_tile(Scratch& own, int64_t base, int64_t begin, int64_t end, double count) const {
    std::fill(own.sums.begin(), own.sums.end(), 0.0f), std::fill(own.squares.begin(), own.squares.end(), 0.0f);
    if (period == UNROLL * LANES) add_rows<SQUARES, UNROLL>(own, base, 0, begin, end);
    else if (period == WIDEST * LANES) add_rows<SQUARES, WIDEST>(own, base, 0, begin, end);
    else add_whole_rows<SQUARES>(own, base, begin, end);
    const float here = end - begin;
    if constexpr (SQUARES)
      each_block([&](auto block, int64_t column) {
        constexpr int J = decltype(block)::value;
        if (this->template is_near<J>(own, column, here)) return;
        std::fill_n(&own.sums[column], J * LANES, 0.0f), std::fill_n(&own.squares[column], J * LANES, 0.0f);
        this->template add_rows<true, J>(own, base, column, begin, end);
      });
    const double share = here / (count + here), both = count * share, one = 1.0 / here;
    for (int64_t i = 0; i < period; ++i) {
      if constexpr (SQUARES) {
        const double rest = own.sums[i] * one, mean = own.centre[i] + rest, delta = mean - own.mean[i];
        own.mean[i] += delta * share;
        own.m2[i] += own.squares[i] - rest * own.sums[i] + delta * delta * both;
        own.centre[i] = mean;
      } else {
        own.mean[i] += own.sums[i];
      }
    }
  }

  // Centres near the means of columns: the means of a few rows.
  void look(Scratch& own, int64_t base, int64_t begin, int64_t end) const {
    end = std::min(end, begin + 8);
    each_block([&](auto block, int64_t column) {
      constexpr int J = decltype(block)::value;
      V sums[J];
      for (int j = 0; j < J; ++j) sums[j] = V(0.0f);
      auto add = [&](const Column<List>& at, int j) { sums[j] = sums[j] + value(at); };
      this->template each_vector<J>(own, base, column, begin, end, add);
      for (int j = 0; j < J; ++j) (sums[j] / V(float(end - begin))).store(&own.centre[column + j * LANES]);
    });
  }

  // The moments of each channel, [C], over the rows of one task.
  template <bool SQUARES> void task_moments(Scratch& own, int64_t task, Sums* channels) const {
    const int64_t sample = task / pieces, base = sample * size(), first = first_row(task), last = last_row(task);
    own.columns.begin(sample, s.channels);
    std::fill(own.mean.begin(), own.mean.end(), 0), std::fill(own.m2.begin(), own.m2.end(), 0);
    std::fill(own.centre.begin(), own.centre.end(), 0.0f);
    if (SQUARES && first < last) look(own, base, first, last);
    for (int64_t begin = first; begin < last; begin += tile)
      add_tile<SQUARES>(own, base, begin, std::min(last, begin + tile), begin - first);
    fold<SQUARES>(own, last - first, channels);
    if (is_last(task)) add_short_row(own, base, channels);
  }

  // Combines the columns of each channel, which all have the same number of rows.
  template <bool SQUARES> void fold(const Scratch& own, int64_t count, Sums* channels) const {
    const int64_t each = period / s.channels;
    for (int64_t c = 0; c < s.channels; ++c) {
      double mean = 0, m2 = 0;
      for (int64_t i = c; i < period; i += s.channels) mean += own.mean[i];
      mean /= each * (SQUARES ? 1 : std::max<int64_t>(1, count));
      for (int64_t i = c; SQUARES && i < period; i += s.channels)
        m2 += own.m2[i] + (own.mean[i] - mean) * (own.mean[i] - mean) * count;
      channels[c] = {mean, m2, double(each * count)};
    }
  }

  void add_short_row(Scratch& own, int64_t base, Sums* channels) const {
    float each[LANES];
    for (int64_t column = 0; column < size() - rows * period; column += LANES) {
      Column<List> at;
      at.begin(own.columns, column);
      at.offset = base + rows * period + column;
      const int64_t count = std::min(LANES, size() - rows * period - column);
      value(at, count).store(each);
      for (int64_t i = 0; i < count; ++i) channels[(column + i) % s.channels].add({each[i], 0, 1});
    }
  }

  // [G] of one sample from [TASKS, C]: the means first, then the deviations. Sums::add would divide for every part.
  void combine(int64_t sample, const Sums* tasks, Statistic* statistics) const {
    for (int64_t group = 0; group < s.groups; ++group) {
      double count = 0, total = 0, m2 = 0;
      const auto each = [&](auto fn) {
        for (int64_t task = 0; task < pieces; ++task)
          for (int64_t c = group * s.per_group(); c < (group + 1) * s.per_group(); ++c) fn(tasks[task * s.channels + c]);
      };
      each([&](const Sums& one) { count += one.count, total += one.count * one.mean; });
      const double mean = total / count;
      each([&](const Sums& one) { m2 += one.m2 + one.count * (one.mean - mean) * (one.mean - mean); });
      statistics[group] = Statistic({mean, m2, count}, s.eps);
      saved.keep(sample * s.groups + group, statistics[group]);
    }
  }

  // For every column, what is the same for all positions of a sample.
  void spread(Scratch& own, int64_t sample, const Statistic* statistics) const {
    own.columns.begin(sample, s.channels);
    for (int64_t column = 0; column < period; ++column) {
      const Statistic one = statistics ? statistics[column % s.channels / s.per_group()] : Statistic();
      own.means[column] = one.mean, own.rstds[column] = one.rstd;
    }
  }

  void finish_task(Scratch& own, int64_t task, const Statistic* statistics) const {
    const int64_t sample = task / pieces, base = sample * size(), first = first_row(task), last = last_row(task);
    const bool streams = s.streams && past_alignment(y + base) == 0;
    spread(own, sample, statistics);
    for (int64_t begin = first; begin < last; begin += strip)
      each_block([&](auto block, int64_t column) {
        constexpr int J = decltype(block)::value;
        V mean[J], rstd[J];
        for (int j = 0; j < J; ++j)
          mean[j] = V::loadu(&own.means[column + j * LANES]), rstd[j] = V::loadu(&own.rstds[column + j * LANES]);
        auto finish = [=, from = x, to = y](const Column<List>& at, int j) {
          const V v = Kernel::Whole::run(at, LANES, read_vector(from + at.offset), mean[j], rstd[j]);
          if (streams) stream_vector(to + at.offset, v);
          else write_vector(to + at.offset, v);
        };
        this->template each_vector<J>(own, base, column, begin, std::min(last, begin + strip), finish);
      });
    if (is_last(task)) finish_short_row(own, base);
    if (streams) _mm_sfence();
  }

  void finish_short_row(Scratch& own, int64_t base) const {
    for (int64_t column = 0; column < size() - rows * period; column += LANES) {
      Column<List> at;
      at.begin(own.columns, column);
      at.offset = base + rows * period + column;
      const int64_t count = std::min(LANES, size() - rows * period - column);
      const V mean = V::loadu(&own.means[column]), rstd = V::loadu(&own.rstds[column]);
      write_vector(y + at.offset, Kernel::Whole::run(at, count, read_vector(x + at.offset, count), mean, rstd), count);
    }
  }

  void normalize() const {
    if (s.is_uneven(s.samples)) normalize_split();
    else normalize_units();
  }

  // A sample per task: reads it, then normalises it from its last part on, which is still in cache.
  void normalize_units() const {
#pragma omp parallel num_threads(s.threads)
    {
      Scratch own(a, period);
      std::vector<Sums> found(pieces * s.channels);
      std::vector<Statistic> statistics(s.groups);
#pragma omp for schedule(dynamic, 1)
      for (int64_t sample = 0; sample < s.samples; ++sample) {
        for (int64_t i = 0; i < pieces; ++i) task_moments<true>(own, sample * pieces + i, &found[i * s.channels]);
        combine(sample, found.data(), statistics.data());
        for (int64_t i = pieces - 1; i >= 0; --i) finish_task(own, sample * pieces + i, statistics.data());
      }
    }
  }

  // The first half of a pass over the whole value; the threads of the calling parallel region share it.
  void share_moments(Scratch& own, std::vector<Sums>& found, std::vector<Statistic>& statistics) const {
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < s.samples * pieces; ++task) task_moments<true>(own, task, &found[task * s.channels]);
#pragma omp single
    for (int64_t n = 0; n < s.samples; ++n) combine(n, &found[n * pieces * s.channels], &statistics[n * s.groups]);
  }

  // Reads the whole value twice in one parallel region, the second time from its end, which is still in cache.
  void normalize_split() const {
    const int64_t tasks = s.samples * pieces;
    std::vector<Sums> found(tasks * s.channels);
    std::vector<Statistic> statistics(s.samples * s.groups);
#pragma omp parallel num_threads(s.threads)
    {
      Scratch own(a, period);
      share_moments(own, found, statistics);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < tasks; ++i)
        finish_task(own, tasks - 1 - i, &statistics[(tasks - 1 - i) / pieces * s.groups]);
    }
  }

  // As normalize_split, with a contiguous result: PyTorch's own copy between the layouts would take longer than this.
  void normalize_turned() const {
    const int64_t tasks = s.samples * pieces, blocks = (s.positions + TURNED - 1) / TURNED;
    std::vector<Sums> found(tasks * s.channels);
    std::vector<Statistic> statistics(s.samples * s.groups);
#pragma omp parallel num_threads(s.threads)
    {
      Scratch own(a, period);
      share_moments(own, found, statistics);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < s.samples * blocks; ++i) {
        const int64_t block = s.samples * blocks - 1 - i, sample = block / blocks;
        spread(own, sample, &statistics[sample * s.groups]);
        turn_block(own, sample, block % blocks * TURNED);
      }
    }
  }

  // Positions from `begin` on: computes square blocks of positions × channels and writes them transposed.
  void turn_block(const Scratch& own, int64_t sample, int64_t begin) const {
    const int64_t end = std::min(s.positions, begin + TURNED), base = sample * size();
    alignas(64) float square[LANES * LANES];  // [positions, channels]
    for (int64_t c = 0; c < s.channels; c += LANES) {
      const int64_t channels = std::min(LANES, s.channels - c);
      const V mean = V::loadu(&own.means[c]), rstd = V::loadu(&own.rstds[c]);
      Column<List> at;
      at.begin(own.columns, c);
      for (int64_t p = begin; p < end; p += LANES) {
        const int64_t positions = std::min(LANES, end - p);
        for (int64_t i = 0; i < positions; ++i) {
          const V v = read_vector(x + base + (p + i) * s.channels + c, channels);
          Kernel::Whole::run(at, channels, v, mean, rstd).store(square + i * LANES);
        }
        Result* to = y + base + c * s.positions + p;
        if (channels == LANES && positions == LANES) {
          at::vec::transpose_mxn<float, LANES, LANES>(square, LANES, to, s.positions);
        } else {
          for (int64_t j = 0; j < channels; ++j)
            for (int64_t i = 0; i < positions; ++i) to[j * s.positions + i] = square[i * LANES + j];
        }
      }
    }
  }

  // The moments of each channel of each sample, [N, C].
  template <bool SQUARES> std::vector<Sums> moments() const {
    const int64_t tasks = s.samples * pieces;
    std::vector<Sums> found(tasks * s.channels), whole(s.samples * s.channels);
#pragma omp parallel num_threads(s.threads)
    {
      Scratch own(a, period);
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < tasks; ++task) task_moments<SQUARES>(own, task, &found[task * s.channels]);
    }
    for (int64_t i = 0; i < tasks * s.channels; ++i)
      whole[i / s.channels / pieces * s.channels + i % s.channels].add(found[i]);
    return whole;
  }

  void map() const {
#pragma omp parallel num_threads(s.threads)
    {
      Scratch own(a, period);
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < s.samples * pieces; ++task) finish_task(own, task, nullptr);
    }
  }
};
