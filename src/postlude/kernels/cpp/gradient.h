// The backward pass of a norm with steps around it, in one parallel region: sums over the norm's groups, then the
// gradient at the first value, group by group while both are in cache. reverse.py defines the two functions.
//
// A task is a part of one sample with sums of its own: fp32 over short spans, double above them, in an order that does
// not depend on the number of threads.
#pragma once
#include <array>

#include "derivatives.h"
#include "sums.h"

constexpr int64_t ADDED = 128;  // terms per lane that are summed in fp32

template <class Kernel> struct Gradients {
  using Value = typename Kernel::Value;
  using Given = typename Kernel::Given;
  using List = typename Kernel::List;
  static constexpr int SUMS = Kernel::SUMS, TOTALS = Kernel::TOTALS, ALL = SUMS + TOTALS;
  const Value* x;
  const Given* g;
  const float *means, *rstds;  // [N, G]
  Value* dv;
  double* found;               // [ALL, N, C]
  void* const* full;           // gradients of tensors of the value's size
  const void* const* a;
  Sizes s;

  template <class At> auto summed(const At& at, int64_t count, V mean, V rstd) const {
    return Kernel::Sums::run(at, count, read_vector(x + at.offset, count), read_vector(g + at.offset, count), mean,
                             rstd);
  }

  // Writes gradients of the value's size; the caller sums the rest.
  template <class At> auto finished(const At& at, int64_t count, V mean, V rstd, V A, V B) const {
    const V value = read_vector(x + at.offset, count), given = read_vector(g + at.offset, count);
    const auto made = Kernel::Gradient::run(at, count, value, given, mean, rstd, A, B);
    write_vector(dv + at.offset, made[0], count);
    each<Kernel::Written::count>([&](auto i) {
      using One = typename Kernel::Written::template Nth<i>;
      write_vector(static_cast<typename One::Type*>(full[i]) + at.offset, made[1 + TOTALS + i], count);
    });
    return made;
  }

  double gamma(int64_t channel) const {
    if constexpr (Kernel::GAMMA < 0) return 1;
    else return List::template Nth<Kernel::GAMMA>::at(a[Kernel::GAMMA], channel);
  }

  // The means over a group of γ · dn and of γ · dn · x̂; `sum(k, c)` returns the sums of a channel.
  template <class F> std::pair<float, float> group_means(int64_t group, F sum) const {
    double first = 0, second = 0, count = s.per_group() * s.positions;
    for (int64_t c = group * s.per_group(); c < (group + 1) * s.per_group(); ++c)
      first += gamma(c) * sum(0, c), second += gamma(c) * sum(1, c);
    return {first / count, second / count};
  }
};

// Rows are channels of samples; a task is a piece of one.
template <class Kernel> struct ContiguousGradient : Gradients<Kernel> {
  using Base = Gradients<Kernel>;
  using Base::SUMS, Base::TOTALS, Base::ALL, Base::s, Base::a;
  using Sums = std::array<double, ALL>;

  int64_t pieces() const { return (s.positions + PIECE - 1) / PIECE; }

  // fn(at, count) returns vectors; those from `FIRST` on are added to `sums`.
  template <int FIRST, int COUNT, class F> void add_row(int64_t task, double* sums, F fn) const {
    const int64_t row = task / pieces(), first = row * s.positions, begin = first + task % pieces() * PIECE;
    const int64_t end = std::min(begin + PIECE, first + s.positions);
    Row<typename Base::List> at(a, row / s.channels, row % s.channels, s.channels);
    for (int64_t start = begin; start < end; start += ADDED * LANES) {
      V added[COUNT + 1];
      for (V& one : added) one = V(0.0f);
      const int64_t last = std::min(end, start + ADDED * LANES);
      int64_t i = start;
      for (; i + LANES <= last; i += LANES) {
        at.offset = i;
        const auto made = fn(at, LANES);
        for (int k = 0; k < COUNT; ++k) added[k] = added[k] + made[FIRST + k];
      }
      if (i < last) {
        at.offset = i;
        const auto made = fn(at, last - i);
        for (int k = 0; k < COUNT; ++k) added[k] = added[k] + V::set(V(0.0f), made[FIRST + k], last - i);
      }
      for (int k = 0; k < COUNT; ++k) sums[k] += lanes(added[k]);
    }
  }

  void add_sums(int64_t task, Sums& sums) const {
    const int64_t group = task / pieces() / s.per_group();
    const V mean(this->means[group]), rstd(this->rstds[group]);
    sums.fill(0);
    add_row<0, SUMS>(task, sums.data(), [&](const auto& at, int64_t n) { return this->summed(at, n, mean, rstd); });
  }

  void finish(int64_t task, std::pair<float, float> with, Sums& sums) const {
    const int64_t group = task / pieces() / s.per_group();
    const V mean(this->means[group]), rstd(this->rstds[group]), A(with.first), B(with.second);
    add_row<1, TOTALS>(task, sums.data() + SUMS,
                       [&](const auto& at, int64_t n) { return this->finished(at, n, mean, rstd, A, B); });
  }

  // The means of all groups of all samples, from the sums of their tasks.
  std::pair<float, float> means_of(int64_t unit, const std::vector<Sums>& sums) const {
    const int64_t sample = unit / s.groups;
    return this->group_means(unit % s.groups, [&](int k, int64_t c) {
      double total = 0;
      for (int64_t i = 0; i < pieces(); ++i) total += sums[(sample * s.channels + c) * pieces() + i][k];
      return total;
    });
  }

  void run() const {
    const int64_t units = s.samples * s.groups, each = s.per_group() * pieces(), tasks = units * each;
    std::vector<Sums> sums(tasks);
    if (s.is_uneven(units)) {
#pragma omp parallel num_threads(s.threads)
      {
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) add_sums(task, sums[task]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = tasks - 1; i >= 0; --i) finish(i, means_of(i / each, sums), sums[i]);
      }
    } else {
      const int chunk = grain(units, 2 * s.per_group() * s.positions * sizeof(typename Base::Value), s.threads);
#pragma omp parallel for schedule(dynamic, chunk) num_threads(s.threads)
      for (int64_t unit = 0; unit < units; ++unit) {
        for (int64_t task = unit * each; task < (unit + 1) * each; ++task) add_sums(task, sums[task]);
        const auto with = means_of(unit, sums);
        for (int64_t task = (unit + 1) * each - 1; task >= unit * each; --task) finish(task, with, sums[task]);
      }
    }
    const int64_t rows = s.samples * s.channels;
    for (int64_t row = 0; row < rows; ++row)
      for (int k = 0; k < ALL; ++k) {
        double total = 0;
        for (int64_t i = 0; i < pieces(); ++i) total += sums[row * pieces() + i][k];
        this->found[k * rows + row] = total;
      }
  }
};

// Rows of `period` columns, as in channels_last.h; a task is some rows of a sample.
template <class Kernel> struct ChannelsLastGradient : Gradients<Kernel> {
  using Base = Gradients<Kernel>;
  using List = typename Base::List;
  using Base::SUMS, Base::TOTALS, Base::ALL, Base::s, Base::a;
  static constexpr int J = 2;             // vectors of columns at a time
  static constexpr int64_t STRIP = 2048;  // elements that stay in L1 from one block of columns to the next
  int64_t period, rows, strip, per_task, pieces;

  explicit ChannelsLastGradient(const Base& base) : Base(base) {
    const int64_t wide = std::lcm(s.channels, J * LANES);
    period = wide <= SPAN ? wide : std::lcm(s.channels, LANES);
    rows = size() / period;
    strip = std::clamp<int64_t>(STRIP / period, 4, ADDED);
    per_task = std::max(strip, PIECE / period / strip * strip);
    pieces = std::max<int64_t>(1, (rows + per_task - 1) / per_task);
  }

  int64_t size() const { return s.channels * s.positions; }

  struct Scratch {
    Columns<List> columns;
    std::vector<float> means, rstds, A, B, added;  // of columns; [ALL, period]
    Scratch(const void* const* a, int64_t period)
        : columns(a, period), means(period), rstds(period), A(period), B(period), added((ALL + 1) * period) {}
  };

  // fn(at, count, column) returns vectors; those from `FIRST` on are added to sums [COUNT, C].
  template <int FIRST, int COUNT, class F> void add_rows(Scratch& own, int64_t task, double* sums, F fn) const {
    const int64_t base = task / pieces * size(), first = task % pieces * per_task;
    const int64_t last = std::min(rows, first + per_task);
    for (int64_t tile = first; tile < last; tile += ADDED / strip * strip) {
      const int64_t tile_end = std::min(last, tile + ADDED / strip * strip);
      std::fill(own.added.begin(), own.added.end(), 0.0f);
      for (int64_t begin = tile; begin < tile_end; begin += strip) {
        const int64_t end = std::min(tile_end, begin + strip);
        int64_t column = 0;
        for (; column + J * LANES <= period; column += J * LANES)
          add_block<FIRST, COUNT, J>(own, base, column, begin, end, fn);
        for (; column < period; column += LANES) add_block<FIRST, COUNT, 1>(own, base, column, begin, end, fn);
      }
      for (int k = 0; k < COUNT; ++k)
        for (int64_t start = 0; start < period; start += s.channels)
          for (int64_t c = 0; c < s.channels; ++c) sums[k * s.channels + c] += own.added[k * period + start + c];
    }
    if (task % pieces == pieces - 1) add_short_row<FIRST, COUNT>(own, base, sums, fn);
  }

  template <int FIRST, int COUNT, int N, class F>
  void add_block(Scratch& own, int64_t base, int64_t column, int64_t begin, int64_t end, F fn) const {
    Column<List> at[N];
    V added[N][COUNT + 1];
    for (int j = 0; j < N; ++j) {
      at[j].begin(own.columns, column + j * LANES);
      for (int k = 0; k < COUNT; ++k) added[j][k] = V::loadu(&own.added[k * period + column + j * LANES]);
    }
    const int64_t step = period, last = base + end * step + column;
    for (int64_t offset = base + begin * step + column; offset < last; offset += step)
      for (int j = 0; j < N; ++j) {
        at[j].offset = offset + j * LANES;
        const auto made = fn(at[j], LANES, column + j * LANES);
        for (int k = 0; k < COUNT; ++k) added[j][k] = added[j][k] + made[FIRST + k];
      }
    for (int j = 0; j < N; ++j)
      for (int k = 0; k < COUNT; ++k) added[j][k].store(&own.added[k * period + column + j * LANES]);
  }

  template <int FIRST, int COUNT, class F> void add_short_row(Scratch& own, int64_t base, double* sums, F fn) const {
    float each[LANES];
    for (int64_t column = 0; column < size() - rows * period; column += LANES) {
      Column<List> at;
      at.begin(own.columns, column);
      at.offset = base + rows * period + column;
      const int64_t count = std::min(LANES, size() - rows * period - column);
      const auto made = fn(at, count, column);
      for (int k = 0; k < COUNT; ++k) {
        made[FIRST + k].store(each);
        for (int64_t i = 0; i < count; ++i) sums[k * s.channels + (column + i) % s.channels] += each[i];
      }
    }
  }

  void spread(Scratch& own, int64_t sample) const {
    own.columns.begin(sample, s.channels);
    for (int64_t column = 0; column < period; ++column) {
      const int64_t unit = sample * s.groups + column % s.channels / s.per_group();
      own.means[column] = this->means[unit], own.rstds[column] = this->rstds[unit];
    }
  }

  void add_sums(Scratch& own, int64_t task, double* sums) const {
    spread(own, task / pieces);
    add_rows<0, SUMS>(own, task, sums, [&](const auto& at, int64_t n, int64_t column) {
      return this->summed(at, n, V::loadu(&own.means[column]), V::loadu(&own.rstds[column]));
    });
  }

  // `sums` of all tasks, [TASKS, ALL, C]
  void finish(Scratch& own, int64_t task, std::vector<double>& sums) const {
    const int64_t sample = task / pieces, each = ALL * s.channels;
    spread(own, sample);
    for (int64_t group = 0; group < s.groups; ++group) {
      const auto with = this->group_means(group, [&](int k, int64_t c) {
        double total = 0;
        for (int64_t i = sample * pieces; i < (sample + 1) * pieces; ++i) total += sums[i * each + k * s.channels + c];
        return total;
      });
      for (int64_t start = group * s.per_group(); start < period; start += s.channels)
        std::fill_n(&own.A[start], s.per_group(), with.first), std::fill_n(&own.B[start], s.per_group(), with.second);
    }
    add_rows<1, TOTALS>(own, task, &sums[task * each + SUMS * s.channels],
                        [&](const auto& at, int64_t n, int64_t column) {
                          const V mean = V::loadu(&own.means[column]), rstd = V::loadu(&own.rstds[column]);
                          return this->finished(at, n, mean, rstd, V::loadu(&own.A[column]), V::loadu(&own.B[column]));
                        });
  }

  void run() const {
    const int64_t tasks = s.samples * pieces, each = ALL * s.channels;
    std::vector<double> sums(tasks * each);
    const bool is_split = s.is_uneven(s.samples);
#pragma omp parallel num_threads(s.threads)
    {
      Scratch own(a, period);
      if (is_split) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) add_sums(own, task, &sums[task * each]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = tasks - 1; i >= 0; --i) finish(own, i, sums);
      } else {
#pragma omp for schedule(dynamic, 1)
        for (int64_t sample = 0; sample < s.samples; ++sample) {
          for (int64_t i = sample * pieces; i < (sample + 1) * pieces; ++i) add_sums(own, i, &sums[i * each]);
          for (int64_t i = (sample + 1) * pieces - 1; i >= sample * pieces; --i) finish(own, i, sums);
        }
      }
    }
    for (int64_t k = 0; k < ALL; ++k)
      for (int64_t row = 0; row < s.samples * s.channels; ++row) {
        double total = 0;
        for (int64_t i = 0; i < pieces; ++i)
          total += sums[(row / s.channels * pieces + i) * each + k * s.channels + row % s.channels];
        this->found[k * s.samples * s.channels + row] = total;
      }
  }
};
