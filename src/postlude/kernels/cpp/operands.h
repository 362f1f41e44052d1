// What a pass reads besides its value: tensors of several dtypes and shapes, as vectors of fp32.
#pragma once
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>

#include "pointwise.h"

inline void widen(const c10::BFloat16* p, V& v) { at::vec::load_fp32_from_bf16(p, v); }
inline void widen(const c10::Half* p, V& v) { at::vec::load_fp32_from_fp16(p, v); }
inline at::vec::Vectorized<c10::BFloat16> narrowed(V v, c10::BFloat16) { return at::vec::convert_float_bfloat16(v, v); }
inline at::vec::Vectorized<c10::Half> narrowed(V v, c10::Half) { return at::vec::convert_float_half(v, v); }

template <class T> inline V read_vector(const T* p, int64_t count = LANES) {
  if constexpr (std::is_same_v<T, float>) {
    return V::loadu(p, count);
  } else {
    V v;
    if (count == LANES) {
      widen(p, v);
    } else {
      T padded[LANES] = {};
      std::memcpy(padded, p, count * sizeof(T));
      widen(padded, v);
    }
    return v;
  }
}

template <class T> inline void write_vector(T* p, V v, int64_t count = LANES) {
  if constexpr (std::is_same_v<T, float>) {
    v.store(p, count);
  } else if (count < LANES) {
    narrowed(v, T()).store(p, count);
  } else {  // half of a vector: at::vec would take it through memory
#if defined(CPU_CAPABILITY_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(narrowed(v, T())));
#else
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(narrowed(v, T())));
#endif
  }
}

// Past the caches, to an aligned address: a line that nobody reads soon need not be fetched before it is written,
// nor take the place of one that somebody does.
inline void stream_vector(float* p, V v) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm512_stream_ps(p, v);
#else
  _mm256_stream_ps(p, v);
#endif
}
template <class T> inline void stream_vector(T* p, V v) { write_vector(p, v); }
inline int64_t past_alignment(const void* p) { return reinterpret_cast<uintptr_t>(p) / sizeof(float) % LANES; }

enum Role { FULL, CHANNEL, ROW, ONE };  // a number for each element, channel, sample and channel, or one for all

template <class T, Role R> struct Operand {
  using Type = T;
  static constexpr Role role = R;
  static float at(const void* p, int64_t i) { return static_cast<float>(static_cast<const T*>(p)[i]); }
};

template <class... Os> struct Operands {
  static constexpr int count = sizeof...(Os);
  template <int I> using Nth = std::tuple_element_t<I, std::tuple<Os...>>;
  static constexpr bool has(Role role) { return ((Os::role == role) || ...); }
};

template <class F, int... I> inline void each(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int COUNT, class F> inline void each(F f) { each(f, std::make_integer_sequence<int, COUNT>{}); }

// The operands of elements in one row of a contiguous value. All but those of role FULL are constant along the row.
template <class List> struct Row {
  V kept[List::count + 1];
  const void* const* pointers;
  int64_t offset = 0;

  Row(const void* const* pointers, int64_t sample, int64_t channel, int64_t channels) : pointers(pointers) {
    each<List::count>([&](auto i) {
      using One = typename List::template Nth<i>;
      const int64_t place = One::role == CHANNEL ? channel : One::role == ROW ? sample * channels + channel : 0;
      if constexpr (One::role != FULL) kept[i] = V(One::at(pointers[i], place));
    });
  }

  template <int I> V get(int64_t count) const {
    using One = typename List::template Nth<I>;
    if constexpr (One::role != FULL) return kept[I];
    else return read_vector(static_cast<const typename One::Type*>(pointers[I]) + offset, count);
  }
};

// The operands of a channels-last value, which is cut into rows of `period` elements: whole vectors and whole
// positions. Operands per channel are repeated over a row of columns, once for each sample.
template <class List> struct Columns {
  int64_t period;
  std::unique_ptr<float[]> spread;
  const void* const* pointers;

  Columns(const void* const* pointers, int64_t period)
      : period(period), spread(new float[(List::count + 1) * period]), pointers(pointers) {}

  void begin(int64_t sample, int64_t channels) {
    each<List::count>([&](auto i) {
      using One = typename List::template Nth<i>;
      if constexpr (One::role != FULL) {
        for (int64_t column = 0; column < period; ++column) {
          const int64_t c = column % channels;
          const int64_t place = One::role == CHANNEL ? c : One::role == ROW ? sample * channels + c : 0;
          spread[i * period + column] = One::at(pointers[i], place);
        }
      }
    });
  }
};

template <class List> struct Column {
  V kept[List::count + 1];
  const void* const* pointers;
  int64_t offset = 0;

  void begin(const Columns<List>& columns, int64_t column) {
    pointers = columns.pointers;
    each<List::count>([&](auto i) {
      if constexpr (List::template Nth<i>::role != FULL)
        kept[i] = V::loadu(&columns.spread[i * columns.period + column]);
    });
  }

  template <int I> V get(int64_t count) const {
    using One = typename List::template Nth<I>;
    if constexpr (One::role != FULL) return kept[I];
    else return read_vector(static_cast<const typename One::Type*>(pointers[I]) + offset, count);
  }
};
