// The vocabulary on the CPU: one function per word, on a vector of fp32.
#pragma once
#include <ATen/cpu/vec/vec.h>

using V = at::vec::Vectorized<float>;
constexpr int64_t LANES = V::size();

inline V where(V condition, V yes, V no) { return V::blendv(no, yes, condition); }

// 2 to the power of x; a large x gives a finite number, not infinity. at::vec's version is a call, several times
// slower.
inline V exp2(V x) {
  const V held = at::vec::clamp(x, V(-150.0f), V(127.4f));
  const V n = held.round(), f = held - n;
  constexpr float factors[] = {1.33998482e-3f, 9.61837359e-3f, 5.55032901e-2f, 2.40226477e-1f, 6.93147182e-1f, 1.0f};
  V p(1.53707049e-4f);
  for (float factor : factors) p = at::vec::fmadd(p, f, V(factor));
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_scalef_ps(p, n);
#else
  using Whole = at::vec::Vectorized<int32_t>;
  const Whole power = (at::vec::convert_to_int_of_same_size(n) + Whole(127)) << Whole(23);
  return where(x < V(-126.0f), V(0.0f), p * at::vec::cast<float>(power));
#endif
}
inline V exp(V x) { return exp2(x * V(1.44269504f)); }

// 1 / x within 2 ulp for finite x ≥ 1, and 0 for the largest x. A division takes as long as eight multiplications.
inline V inverse(V x) {
#if defined(CPU_CAPABILITY_AVX512)
  const V close = _mm512_maskz_rcp14_ps(_mm512_cmp_ps_mask(x, V(1e38f), _CMP_NGE_UQ), x);
#else
  const V close = _mm256_andnot_ps(x >= V(1e38f), _mm256_rcp_ps(x));
#endif
  return close * at::vec::fnmadd(x, close, V(2.0f));
}

// NaN as in PyTorch: at::vec's clamps keep a NaN of x, its maximum and minimum a NaN of either operand.
inline V clamp_min(V x, float bound) { return at::vec::clamp_min(x, V(bound)); }
inline V clamp_max(V x, float bound) { return at::vec::clamp_max(x, V(bound)); }
inline V relu(V x) { return clamp_min(x, 0.0f); }
inline V clamp(V x, float low, float high) { return clamp_max(clamp_min(x, low), high); }
inline V hardtanh(V x, float low, float high) { return clamp(x, low, high); }
inline V leaky_relu(V x, float slope) { return where(x > V(0.0f), x, x * V(slope)); }
inline V elu(V x, float alpha, float scale, float input_scale) {
  return where(x < V(0.0f), (x * V(input_scale)).expm1() * V(alpha * scale), x * V(scale));
}
inline V sigmoid(V x) { return inverse(V(1.0f) + exp(x.neg())); }
inline V silu(V x) { return x * inverse(V(1.0f) + exp(x.neg())); }
// The upper tail of the normal distribution for x ≥ 0: 2 to the power of a polynomial, within 5e-8.
inline V normal_tail(V x) {
  constexpr float factors[] = {3.06613493e-05f, -1.45488262e-04f, -2.33145130e-04f, 7.18583920e-03f,
                               -5.25782349e-02f, -4.59182039e-01f, -1.15110829f, -1.0f};
  V power(-2.09646724e-06f);
  for (float factor : factors) power = at::vec::fmadd(power, x, V(factor));
  return exp2(power);
}
inline V gelu(V x) {
  const V tail = normal_tail(x.abs());
  return x * where(x > V(0.0f), V(1.0f) - tail, tail);
}
inline V gelu_tanh(V x) {
  const V inner = V(0.79788456f) * (x + V(0.044715f) * x * x * x);
  return x * inverse(V(1.0f) + exp(V(-2.0f) * inner));
}
// tanh(log(1 + e)) = n / (n + 2) with n = e² + 2e; the quotient rounds to 1 long before e² overflows.
inline V mish(V x) {
  const V e = exp(at::vec::minimum(x, V(20.0f)));
  const V n = e * (e + V(2.0f));
  return x * (n * inverse(n + V(2.0f)));
}
inline V hardswish(V x) { return x * clamp(x + V(3.0f), 0.0f, 6.0f) * V(1.0f / 6.0f); }
inline V hardsigmoid(V x) { return clamp(x + V(3.0f), 0.0f, 6.0f) * V(1.0f / 6.0f); }
inline V softplus(V x, float beta, float threshold) {
  const V scaled = x * V(beta);
  const V smooth = at::vec::maximum(scaled, V(0.0f)) + exp(scaled.abs().neg()).log1p();
  return where(scaled > V(threshold), x, smooth / V(beta));
}
inline V tanh(V x) { return x.tanh(); }
inline V abs(V x) { return x.abs(); }
inline V sqrt(V x) { return x.sqrt(); }
inline V reciprocal(V x) { return V(1.0f) / x; }
inline V pow(V x, int exponent) {
  V result = x;
  for (int i = 1; i < exponent; ++i) result = result * x;
  return result;
}
inline V detach(V x) { return x; }
inline V add(V x, V y) { return x + y; }
inline V sub(V x, V y) { return x - y; }
inline V rsub(V x, V y) { return y - x; }
inline V mul(V x, V y) { return x * y; }
inline V div(V x, V y) { return x / y; }
inline V rdiv(V x, V y) { return y / x; }
inline V maximum(V x, V y) { return at::vec::maximum(x, y); }
inline V minimum(V x, V y) { return at::vec::minimum(x, y); }
inline V prelu(V x, V weight) { return where(x > V(0.0f), x, x * weight); }
inline V batch_norm(V x, V mean, V var, V weight, V bias, float eps) {
  return (x - mean) * (weight / (var + V(eps)).sqrt()) + bias;
}
