// Passes over a contiguous value, [N, C, P]. A row is one channel of one sample.
#pragma once
#include "sums.h"

template <class Kernel, bool SQUARES, class At>
inline Sums row_moments(At at, const typename Kernel::Value* x, int64_t begin, int64_t end) {
  auto value = [&](int64_t i, int64_t count) {
    at.offset = i;
    return Kernel::Before::run(at, count, read_vector(x + i, count));
  };
  Sums all;
  const int64_t few = std::min(LANES, end - begin);
  double centre = SQUARES ? lanes(V::set(V(0.0f), value(begin, few), few)) / few : 0;
  for (int64_t start = begin; start < end; start += SPAN) {
    const Sums found = span_moments<SQUARES>(value, start, std::min(end, start + SPAN), centre);
    centre = found.mean;
    all.add(found);
  }
  return all;
}

template <class Kernel, class At>
inline void finish_row(At at, const typename Kernel::Value* x, typename Kernel::Result* y, int64_t begin, int64_t end,
                       V mean, V rstd, int64_t ahead, bool streams) {
  auto finish_few = [&](int64_t i, int64_t count) {
    at.offset = i;
    write_vector(y + i, Kernel::Whole::run(at, count, read_vector(x + i, count), mean, rstd), count);
  };
  int64_t i = begin;
  if (streams && past_alignment(y + i)) {
    i = std::min(end, i + LANES - past_alignment(y + i));
    finish_few(begin, i - begin);
  }
  for (; i + LANES <= end; i += LANES) {
    at.offset = i;
    if (ahead) __builtin_prefetch(x + i + ahead, 0, 2);
    const V v = Kernel::Whole::run(at, LANES, read_vector(x + i), mean, rstd);
    if (streams) stream_vector(y + i, v);
    else write_vector(y + i, v);
  }
  if (i < end) finish_few(i, end - i);
  if (streams) _mm_sfence();
}

template <class Kernel> struct Contiguous {
  using Value = typename Kernel::Value;
  using Result = typename Kernel::Result;
  using List = typename Kernel::List;
  const Value* x;
  Result* y;
  const void* const* a;
  Sizes s;
  Saved saved;

  Contiguous(const Value* x, Result* y, const void* const* a, Sizes s, float* saved = nullptr)
      : x(x), y(y), a(a), s(s), saved{saved, s.samples * s.groups} {}

  Row<List> at(int64_t row) const { return Row<List>(a, row / s.channels, row % s.channels, s.channels); }
  int64_t pieces() const { return (s.positions + PIECE - 1) / PIECE; }

  template <bool SQUARES> Sums piece_moments(int64_t task) const {
    const int64_t row = task / pieces(), begin = task % pieces() * PIECE, end = std::min(s.positions, begin + PIECE);
    return row_moments<Kernel, SQUARES>(at(row), x, row * s.positions + begin, row * s.positions + end);
  }

  // `ahead` is the distance to what is read next; it is prefetched.
  void finish_piece(int64_t task, Statistic found, int64_t ahead = 0) const {
    const int64_t row = task / pieces(), begin = task % pieces() * PIECE, end = std::min(s.positions, begin + PIECE);
    const int64_t first = row * s.positions;
    finish_row<Kernel>(at(row), x, y, first + begin, first + end, V(found.mean), V(found.rstd), ahead, s.streams);
  }

  void normalize() const {
    if (s.is_uneven(s.samples * s.groups)) normalize_split();
    else normalize_units();
  }

  // A group of a sample per task: reads it, then normalises it from its last piece on, which is still in cache.
  void normalize_units() const {
    const int64_t units = s.samples * s.groups, tasks = s.per_group() * pieces();
    const int64_t ahead = s.threads * s.per_group() * s.positions;
    const int chunk = grain(units, s.per_group() * s.positions * sizeof(Value), s.threads);
#pragma omp parallel for schedule(dynamic, chunk) num_threads(s.threads)
    for (int64_t unit = 0; unit < units; ++unit) {
      Sums sums;
      for (int64_t task = unit * tasks; task < (unit + 1) * tasks; ++task) sums.add(piece_moments<true>(task));
      const Statistic found(sums, s.eps);
      saved.keep(unit, found);
      for (int64_t task = (unit + 1) * tasks - 1; task >= unit * tasks; --task)
        finish_piece(task, found, unit + s.threads < units ? ahead : 0);
    }
  }

  // The moments of all tasks; the threads of the calling parallel region share them.
  template <bool SQUARES> void all_moments(std::vector<Sums>& found) const {
    const int64_t tasks = found.size();
    const int chunk = grain(tasks, std::min(PIECE, s.positions) * sizeof(Value), s.threads);
#pragma omp for schedule(dynamic, chunk)
    for (int64_t task = 0; task < tasks; ++task) found[task] = piece_moments<SQUARES>(task);
  }

  // Reads the whole value twice in one parallel region, the second time from its end, which is still in cache.
  void normalize_split() const {
    const int64_t units = s.samples * s.groups, each = s.per_group() * pieces(), tasks = units * each;
    std::vector<Sums> found(tasks);
    std::vector<Statistic> statistics(units);
    const int chunk = grain(tasks, std::min(PIECE, s.positions) * sizeof(Value), s.threads);
#pragma omp parallel num_threads(s.threads)
    {
      all_moments<true>(found);
#pragma omp single
      for (int64_t unit = 0; unit < units; ++unit) {
        Sums sums;
        for (int64_t task = unit * each; task < (unit + 1) * each; ++task) sums.add(found[task]);
        statistics[unit] = Statistic(sums, s.eps);
        saved.keep(unit, statistics[unit]);
      }
#pragma omp for schedule(dynamic, chunk)
      for (int64_t i = 0; i < tasks; ++i) finish_piece(tasks - 1 - i, statistics[(tasks - 1 - i) / each]);
    }
  }

  // The moments of each channel of each sample, [N, C].
  template <bool SQUARES> std::vector<Sums> moments() const {
    const int64_t rows = s.samples * s.channels, each = pieces();
    std::vector<Sums> found(rows * each), whole(rows);
#pragma omp parallel num_threads(s.threads)
    all_moments<SQUARES>(found);
    for (int64_t task = 0; task < rows * each; ++task) whole[task / each].add(found[task]);
    return whole;
  }

  void map() const {
    // Without operands per channel, short rows are treated as one long row.
    const bool is_flat = !List::has(CHANNEL) && !List::has(ROW);
    Contiguous all = *this;
    if (is_flat) all.s.positions *= s.samples * s.channels, all.s.samples = all.s.channels = 1;
    const int64_t tasks = all.s.samples * all.s.channels * all.pieces();
    const int chunk = grain(tasks, std::min(PIECE, all.s.positions) * sizeof(Value), s.threads);
#pragma omp parallel for schedule(dynamic, chunk) num_threads(s.threads)
    for (int64_t task = 0; task < tasks; ++task) all.finish_piece(task, Statistic());
  }
};
