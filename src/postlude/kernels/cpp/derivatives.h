// The derivative of each word on the CPU: from the gradient g of the result to the gradient of the operand, by the
// operand x or by the result v. Ties and NaN follow kernels/triton/derivatives.py, word by word.
#pragma once
#include "pointwise.h"

inline V operator-(V x) { return x.neg(); }
inline V nothing(V) { return V(0.0f); }
inline V relu_gradient(V g, V v) { return where(v <= V(0.0f), V(0.0f), g); }
inline V clamp_min_gradient(V g, V x, float bound) { return where(x >= V(bound), g, V(0.0f)); }
inline V clamp_max_gradient(V g, V x, float bound) { return where(x <= V(bound), g, V(0.0f)); }
inline V clamp_gradient(V g, V x, float low, float high) {
  return clamp_min_gradient(clamp_max_gradient(g, x, high), x, low);
}
inline V hardtanh_gradient(V g, V x, float low, float high) {
  return where((x <= V(low)) | (x >= V(high)), V(0.0f), g);
}
inline V leaky_relu_gradient(V g, V x, float slope) { return where(x > V(0.0f), g, g * V(slope)); }
inline V elu_gradient(V g, V x, float alpha, float scale, float input_scale) {
  return g * where(x <= V(0.0f), exp(x * V(input_scale)) * V(alpha * scale * input_scale), V(scale));
}
inline V silu_gradient(V g, V x) {
  const V share = sigmoid(x);
  return g * (share * (V(1.0f) + x * (V(1.0f) - share)));
}
inline V gelu_gradient(V g, V x) {
  const V tail = normal_tail(x.abs()), density = exp2(x * x * V(-0.72134752f)) * V(0.39894228f);
  return g * (where(x > V(0.0f), V(1.0f) - tail, tail) + x * density);
}
// gelu is x · share, and share' = 2 · share · (1 − share) · inner'.
inline V gelu_tanh_gradient(V g, V x) {
  const V inner = V(0.79788456f) * (x + V(0.044715f) * x * x * x), share = V(1.0f) / one_plus_exp(inner, -2.0f);
  const V slope = V(0.79788456f) * (V(1.0f) + V(0.134145f) * x * x);
  return g * (share + V(2.0f) * x * share * (V(1.0f) - share) * slope);
}
// share is tanh(softplus(x)); 1 − share² = rest · (2n + rest) / (n + rest)².
inline V mish_gradient(V g, V x) {
  const V w = exp(x.abs().neg()), is_above = x > V(0.0f);
  const V n = where(is_above, V(1.0f) + V(2.0f) * w, w * (w + V(2.0f)));
  const V rest = where(is_above, V(2.0f) * w * w, V(2.0f)), whole = n + rest;
  const V share = where(is_above, V(1.0f), w) / (V(1.0f) + w);
  return g * (n / whole + x * share * (rest * (n + whole) / (whole * whole)));
}
inline V hardswish_gradient(V g, V x) {
  return where(x <= V(-3.0f), V(0.0f), where(x < V(3.0f), g * (x / V(3.0f) + V(0.5f)), g));
}
inline V hardsigmoid_gradient(V g, V x) {
  return where((x > V(-3.0f)) & (x < V(3.0f)), g / V(6.0f), V(0.0f));
}
inline V softplus_gradient(V g, V x, float beta, float threshold) {
  return where(x * V(beta) > V(threshold), g, g / one_plus_exp(x, -beta));
}
inline V tanh_gradient(V g, V v) { return g * (V(1.0f) - v * v); }
inline V sigmoid_gradient(V g, V v) { return g * ((V(1.0f) - v) * v); }
inline V abs_gradient(V g, V x) { return where(x > V(0.0f), g, where(x < V(0.0f), g.neg(), V(0.0f))); }
inline V sqrt_gradient(V g, V v) { return g / (V(2.0f) * v); }
inline V reciprocal_gradient(V g, V v) { return g.neg() * (v * v); }
inline V pow_gradient(V g, V x, int exponent) {
  V power(static_cast<float>(exponent));
  for (int i = 1; i < exponent; ++i) power = power * x;
  return g * power;
}
inline V maximum_gradient(V g, V x, V y) {
  return where(x == y, g * V(0.5f), where(x < y, V(0.0f), g));
}
inline V minimum_gradient(V g, V x, V y) {
  return where(x == y, g * V(0.5f), where(x > y, V(0.0f), g));
}
inline V prelu_gradient(V g, V x, V weight) { return where(x > V(0.0f), g, g * weight); }
inline V prelu_weight_gradient(V g, V x) { return where(x > V(0.0f), V(0.0f), g * x); }
inline V batch_norm_slope(V var, V weight, float eps) { return weight / (var + V(eps)).sqrt(); }
