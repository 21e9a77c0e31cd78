/* The rows of the output head, for the learner: see training.py. */
#pragma once
#include "vectors.h"

#define WIDEST 256 /* largest head size */

/* Replaces rows x = h W^T by z = cap tanh(x / cap) / tau; normaliser = log sum exp z; entropy, if wanted, that of
   softmax(z). */
void head_normalise(float *z, float *normaliser, float *entropy, int64_t rows, int64_t n, float cap, float tau) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float *own = z + row * n;
    int64_t whole = n / W * W;
    vec most = all(-INFINITY);
    for (int64_t i = 0; i < n; i += W) {
      vec x = i < whole ? load(own + i) : load_end(own + i, n - i, -INFINITY);
      if (cap != 0.0f) x = cap * vtanh(x / cap);
      if (tau != 1.0f) x = x / tau;
      if (cap != 0.0f || tau != 1.0f) {
        if (i < whole) store(own + i, x);
        else memcpy(own + i, &x, (size_t)(n - i) * sizeof(float));
        if (i >= whole)
          for (int64_t j = n - i; j < W; j++) x[j] = -INFINITY;
      }
      most = pick(x > most, x, pick(x == x, most, x)); /* keeps NaN */
    }
    float top = largest(most);
    for (int j = 0; j < W; j++) top = most[j] == most[j] ? top : most[j];
    vec total = {0}, moment = {0};
    for (int64_t i = 0; i < n; i += W) {
      vec x = (i < whole ? load(own + i) : load_end(own + i, n - i, -INFINITY)) - top;
      vec e = vexp(x);
      e = pick(x < all(-87.0f), all(0.0f), e);
      total += e;
      if (entropy) moment += pick(x < all(-87.0f), all(0.0f), e * x);
    }
    float s = sum(total);
    normaliser[row] = top + logf(s);
    if (entropy) entropy[row] = logf(s) - sum(moment) / s;
  }
}

/* Converts rows of n floats to bfloat16 in place: each row begins where it did, 2 n bfloat16 after the one before. */
void head_round(float *z, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float *own = z + row * n;
    bf16 *to = (bf16 *)own;
    for (int64_t i = 0; i < n; i += W) {
      int64_t count = n - i < W ? n - i : W;
      if (count == W) {
        store_bf16(to + i, load(own + i));
        continue;
      }
      bf16 rounded[W];
      store_bf16(rounded, load_end(own + i, count, 0.0f));
      memcpy(to + i, rounded, (size_t)count * sizeof(bf16));
    }
  }
}

/* Replaces z by - p (weight + slope (log p + entropy)), p = exp(z - normaliser), times the derivative of the cap. */
void head_differentiate(float *z, const float *normaliser, const float *weight, const float *slope,
                        const float *entropy, int64_t rows, int64_t n, float cap, float tau) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float *own = z + row * n;
    for (int64_t i = 0; i < n; i += W) {
      int64_t count = n - i < W ? n - i : W;
      vec x = count == W ? load(own + i) : load_end(own + i, count, 0.0f);
      vec log_p = x - normaliser[row];
      vec p = pick(log_p < all(-87.0f), all(0.0f), vexp(log_p)), d;
      if (slope) d = -p * (weight[row] + slope[row] * (pick(log_p < all(-200.0f), all(-200.0f), log_p) + entropy[row]));
      else d = -p * weight[row];
      if (cap != 0.0f) { vec t = x * (tau / cap); d *= 1.0f - t * t; }
      if (count == W) store(own + i, d);
      else memcpy(own + i, &d, (size_t)count * sizeof(float));
    }
  }
}
