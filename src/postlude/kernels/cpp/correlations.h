// Sums of products of a convolution's input with itself, shifted: for each lag (dz, dy, dx) between two taps and each
// pair of channels, the sum over q of x_c[q] · x_c'[q + lag].
//
// Taps k and k + lag are multiplied over the box [k, k + outputs), so that the first and the last positions of an axis
// belong to some of the boxes only. Along z and y, products are kept apart by classes of positions. Along x, sums are
// over whole rows, and the products of the first and last columns are summed beside them, one pair of columns per lane.
//
// Of a lag and its opposite only one is computed: the one whose first nonzero component is positive.
#pragma once
#include <algorithm>
#include <vector>

#include "sums.h"
#include "taps.h"

// Classes of positions along an axis that belong to the same boxes. For lag l, the taps k and k + l exist for k = low …
// high. There is one class for each position below `high`, one for all in the middle, one for each of the last ones.
struct Axis {
  int64_t taps, outputs;

  int64_t low(int64_t l) const { return std::max<int64_t>(0, -l); }
  int64_t boxes(int64_t l) const { return taps - std::abs(l); }
  int64_t classes(int64_t l) const { return 2 * boxes(l) - 1; }
  // Where class i begins, and the last one ends. Box number j is made of the classes j … j + boxes − 1.
  int64_t begin(int64_t l, int64_t i) const { return low(l) + (i < boxes(l) ? i : i - boxes(l) + outputs); }
};

template <class Kernel> struct Correlations {
  static constexpr int64_t CIN = Kernel::CIN, KD = Kernel::KD, KH = Kernel::KH, KW = Kernel::KW;
  static constexpr int64_t PAIRS = CIN * CIN, LAGS = 2 * KW - 1;
  static constexpr int64_t SIDE = std::max<int64_t>(1, KW - 1), ENDS = SIDE * SIDE;  // columns of an end, their pairs
  static constexpr int64_t EDGES = KW > 1 ? 2 * ENDS : 0;                            // pairs of both ends
  static constexpr int64_t CB = CIN == 4 ? 2 : CIN;  // channels whose products are in registers at a time
  static constexpr int64_t AT_ONCE = CIN == 1 ? 5 : CIN == 2 ? 2 : 1;  // lags along x, so that products do not wait
  static constexpr int64_t STAGED = 64 << 10;  // elements; 160 << 10 is no faster
  static constexpr int64_t CHAIN = 64;         // products that a lane sums before they go to memory
  static constexpr int64_t PARTS = 16;         // of all samples; each costs as much as some slices
  static_assert(EDGES <= LANES && CIN <= 4);
  using Value = typename Kernel::Value;

  Block<Kernel> block;  // reads rows
  Axis z, y;
  int64_t d, h, w, row, pitch;        // the padded input, vectors of a row, and its elements with slack
  int64_t depth, height, deep, high;  // positions that are staged at a time, and how often
  int64_t portion, parts;             // rows that are summed at a time; parts of a sample for threads

  explicit Correlations(const Volume& v)
      : block(v), z{KD, block.od}, y{KH, block.oh}, d(v.d + 2 * v.pd), h(v.h + 2 * v.ph), w(v.w + 2 * v.pw) {
    row = (w + LANES - 1) / LANES, pitch = (row + 1) * LANES;
    const int64_t each = CIN * (pitch + 2 * LANES);
    height = std::clamp<int64_t>(STAGED / (each * KD) - 2 * (KH - 1), 1, h);
    depth = height < h ? 1 : std::clamp<int64_t>(STAGED / (each * (h + 2 * KH - 2)) - (KD - 1), 1, d);
    deep = (d + depth - 1) / depth, high = (h + height - 1) / height;
    depth = (d + deep - 1) / deep, height = (h + high - 1) / high;
    portion = std::max<int64_t>(1, CHAIN / row);
    parts = std::min(deep * high, (PARTS + v.samples - 1) / v.samples);
  }

  bool is_padded() const { return block.v.pd + block.v.ph + block.v.pw > 0; }

  // Calls fn(dz, dy) for one of each two opposite lags.
  template <class F> static void each_lag(F fn) {
    for (int64_t dz = 0; dz < KD; ++dz)
      for (int64_t dy = dz == 0 ? 0 : 1 - KH; dy < KH; ++dy) fn(dz, dy);
  }
  static int64_t first_dx(int64_t dz, int64_t dy) { return dz == 0 && dy == 0 ? 0 : 1 - KW; }

  // Results of a lag and a class: PAIRS sums for each dx, then for each pair of columns. Those of the input itself,
  // CIN for rows and for each pair of columns, come after all of them.
  static constexpr int64_t FOUND = (LAGS + EDGES) * PAIRS, FOUND_SUMS = (1 + EDGES) * CIN;
  int64_t found_classes() const {
    int64_t total = 0;
    each_lag([&](int64_t dz, int64_t dy) { total += z.classes(dz) * y.classes(dy); });
    return total;
  }
  int64_t found() const { return found_classes() * FOUND + z.classes(0) * y.classes(0) * FOUND_SUMS; }

  struct Scratch {
    std::vector<float> rows, firsts, seconds;  // rows with zeros around them, and the columns of their ends
    std::vector<V> products, sums;  // [lag and class, LAGS + 1, PAIRS], [class, 2, CIN]; zero between parts
    std::vector<double> found;      // for a caller that needs them only once
    explicit Scratch(const Correlations& c)
        : rows(c.staged_rows() * CIN * c.pitch + LANES), firsts(c.staged_rows() * CIN * LANES),
          seconds(firsts.size()), products(c.found_classes() * (LAGS + 1) * PAIRS, V(0.0f)),
          sums(c.z.classes(0) * c.y.classes(0) * 2 * CIN, V(0.0f)), found(c.parts > 1 ? 0 : c.found()) {}
  };
  int64_t staged_rows() const { return (depth + KD - 1) * (height + 2 * KH - 2); }

  // A number near each channel's mean. Means and squares around it are exact for any number; a near one keeps digits.
  void pivots(const Value* x, int64_t sample, double* pivot) const {
    const Volume& v = block.v;
    const int64_t step = std::max<int64_t>(1, v.d * v.h / 16);
    for (int64_t c = 0; c < CIN; ++c) {
      double total = 0, count = 0;
      for (int64_t i = step / 2; i < v.d * v.h; i += step, count += v.w)
        for (int64_t j = 0; j < v.w; ++j)
          total += x[sample * v.sn + c * v.sc + i / v.h * v.sd + i % v.h * v.sh + j * v.sw];
      pivot[c] = is_padded() ? 0.0f : float(total / count);  // padding would not be zero any more
    }
  }

  // The rows of [z0, z1) × [y0, y1) as [z, y, c], minus the pivots, and their columns: lane (i, j) of an end has
  // column i in `firsts` and j in `seconds`.
  void stage(const Value* x, int64_t sample, const double* pivot, int64_t z0, int64_t z1, int64_t y0, int64_t y1,
             Scratch& own) const {
    const int64_t ends[] = {0, block.ow};
    float* to = own.rows.data() + LANES;
    int64_t column = 0;
    for (int64_t at = z0; at < z1; ++at)
      for (int64_t line = y0; line < y1; ++line)
        for (int64_t c = 0; c < CIN; ++c, to += pitch, column += LANES) {
          block.read_row(x, sample, c, at - block.v.pd, line - block.v.ph, to);
          for (int64_t i = 0; i < w; ++i) to[i] -= float(pivot[c]);
          std::fill(to + w, to + pitch, 0.0f);
          for (int64_t lane = 0; lane < EDGES; ++lane) {
            const float* end = to + ends[lane / ENDS];
            own.firsts[column + lane] = end[lane % ENDS / SIDE];
            own.seconds[column + lane] = end[lane % SIDE];
          }
        }
  }

  // Adds the products of `count` rows with N shifts of others: PAIRS vectors for each shift.
  template <int64_t N>
  static void multiply(const float* a, const float* b, int64_t count, int64_t vectors, int64_t width, V* to) {
    for (int64_t first = 0; first < CIN; first += CB) {
      V total[N][CB][CIN];
#pragma GCC unroll 64
      for (int64_t i = 0; i < N * CB * CIN; ++i) total[i / (CB * CIN)][i / CIN % CB][i % CIN] = V(0.0f);
      for (int64_t line = 0; line < count; ++line)
        for (int64_t p = 0; p < vectors; ++p) {
          const float *from = a + (line * CIN + first) * width + p * LANES, *with = b + line * CIN * width + p * LANES;
          V given[CB];
#pragma GCC unroll 4
          for (int64_t c = 0; c < CB; ++c) given[c] = in_register(V::loadu(from + c * width));
#pragma GCC unroll 8
          for (int64_t n = 0; n < N; ++n)
#pragma GCC unroll 4
            for (int64_t e = 0; e < CIN; ++e) {
              const V other = in_register(V::loadu(with + e * width + n));
#pragma GCC unroll 4
              for (int64_t c = 0; c < CB; ++c) total[n][c][e] = at::vec::fmadd(given[c], other, total[n][c][e]);
            }
        }
#pragma GCC unroll 8
      for (int64_t n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int64_t c = 0; c < CB; ++c)
#pragma GCC unroll 4
          for (int64_t e = 0; e < CIN; ++e) {
            V& one = to[n * PAIRS + (first + c) * CIN + e];
            one = one + total[n][c][e];
          }
    }
  }

  // The products of rows `a` and those `ahead` rows further, all of one class.
  void lag(const Scratch& own, int64_t a, int64_t ahead, int64_t count, int64_t first_dx, V* to) const {
    const float *from = own.rows.data() + LANES + a * CIN * pitch, *with = from + ahead * CIN * pitch;
    int64_t dx = first_dx;
    for (; dx + AT_ONCE <= KW; dx += AT_ONCE)
      multiply<AT_ONCE>(from, with + dx, count, row, pitch, to + (dx + KW - 1) * PAIRS);
    for (; dx < KW; ++dx) multiply<1>(from, with + dx, count, row, pitch, to + (dx + KW - 1) * PAIRS);
    if constexpr (EDGES > 0) {
      const int64_t at = a * CIN * LANES;
      multiply<1>(&own.firsts[at], &own.seconds[at + ahead * CIN * LANES], count, 1, LANES, to + LAGS * PAIRS);
    }
  }

  void sum_rows(const Scratch& own, int64_t a, int64_t count, V* to) const {
    for (int64_t line = a * CIN; line < (a + count) * CIN; ++line) {
      V total(0.0f);
      for (int64_t p = 0; p < row; ++p) total = total + V::loadu(&own.rows[(p + 1) * LANES + line * pitch]);
      to[line % CIN] = to[line % CIN] + total;
      if constexpr (EDGES > 0) to[CIN + line % CIN] = to[CIN + line % CIN] + V::loadu(&own.firsts[line * LANES]);
    }
  }

  // All sums over one part of a sample. Sums in fp32 go to double before they have too many terms.
  void part(const Value* x, int64_t sample, int64_t number, const double* pivot, Scratch& own, double* to) const {
    const int64_t each = depth * ((height + portion - 1) / portion), end = (number + 1) * deep * high / parts;
    std::fill(to, to + found(), 0.0);
    for (int64_t i = number * deep * high / parts, terms = each; i < end; ++i, terms += each) {
      add(x, sample, i / high * depth, i % high * height, pivot, own);
      if (i + 1 == end || terms + each > CHAIN) gather(own, to), terms = 0;
    }
  }

  // Adds the products of the positions that are staged at a time.
  void add(const Value* x, int64_t sample, int64_t z0, int64_t y0, const double* pivot, Scratch& own) const {
    const int64_t z1 = std::min(d, z0 + depth), y1 = std::min(h, y0 + height);
    const int64_t top = std::max<int64_t>(0, y0 - KH + 1), lines = std::min(h, y1 + KH - 1) - top;
    stage(x, sample, pivot, z0, std::min(d, z1 + KD - 1), top, top + lines, own);
    for (int64_t at = z0; at < z1; ++at)
      for (int64_t from = y0; from < y1; from += portion) {
        V* slot = own.products.data();
        each_lag([&](int64_t dz, int64_t dy) {
          classes(dz, dy, at, from, std::min(y1, from + portion), [&](int64_t index, int64_t begin, int64_t end) {
            const int64_t a = (at - z0) * lines + begin - top;
            lag(own, a, dz * lines + dy, end - begin, first_dx(dz, dy), slot + index * (LAGS + 1) * PAIRS);
            if (dz == 0 && dy == 0) sum_rows(own, a, end - begin, &own.sums[index * 2 * CIN]);
          });
          slot += z.classes(dz) * y.classes(dy) * (LAGS + 1) * PAIRS;
        });
      }
  }

  // Calls fn(class, begin, end) for the rows of [begin, end) of slice `at`, class by class.
  template <class F> void classes(int64_t dz, int64_t dy, int64_t at, int64_t begin, int64_t end, F fn) const {
    for (int64_t i = 0; i < z.classes(dz); ++i) {
      if (at < z.begin(dz, i) || at >= z.begin(dz, i + 1)) continue;
      for (int64_t j = 0; j < y.classes(dy); ++j) {
        const int64_t from = std::max(begin, y.begin(dy, j)), to = std::min(end, y.begin(dy, j + 1));
        if (from < to) fn(i * y.classes(dy) + j, from, to);
      }
    }
  }

  // Moves sums to double: the lanes of rows together, those of columns one by one.
  void gather(Scratch& own, double* to) const {
    for (int64_t slot = 0; slot < found_classes(); ++slot, to += FOUND) {
      V* from = &own.products[slot * (LAGS + 1) * PAIRS];
      for (int64_t i = 0; i < LAGS * PAIRS; ++i) to[i] += lanes(from[i]), from[i] = V(0.0f);
      gather_columns(from + LAGS * PAIRS, PAIRS, to + LAGS * PAIRS);
    }
    for (int64_t slot = 0; slot < z.classes(0) * y.classes(0); ++slot, to += FOUND_SUMS) {
      V* from = &own.sums[slot * 2 * CIN];
      for (int64_t c = 0; c < CIN; ++c) to[c] += lanes(from[c]), from[c] = V(0.0f);
      gather_columns(from + CIN, CIN, to + CIN);
    }
  }

  static void gather_columns(V* from, int64_t count, double* to) {
    for (int64_t i = 0; i < count; ++i) {
      float each[LANES];
      from[i].store(each), from[i] = V(0.0f);
      for (int64_t lane = 0; lane < EDGES; ++lane) to[lane * count + i] += each[lane];
    }
  }
};
