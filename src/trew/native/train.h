/* For the learner: small matrix products inside attention, and the rows of the output head. See training.py. */
#pragma once
#include "vectors.h"
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_max_threads() 1
#endif

#define TILE 32 /* query rows at once */
#define KEYS 64 /* keys at once */
#define WIDEST 256 /* of a head */


/* C (m x n) = or += A B, with lanes along n; element (i, k) of A is a[i ai + k ak]; n is a multiple of 16. */
static inline __attribute__((always_inline)) void tile(const int m, const int nv, int64_t depth, const float *a,
                                                       int64_t ai, int64_t ak, const float *b, int64_t bk, float *c,
                                                       int64_t ci, int add) {
  vec sums[8][2];
  UNROLLED for (int i = 0; i < m; i++)
    UNROLLED for (int j = 0; j < nv; j++) sums[i][j] = add ? load(c + i * ci + j * W) : (vec){0};
  for (int64_t k = 0; k < depth; k++, a += ak, b += bk)
    UNROLLED for (int i = 0; i < m; i++)
      UNROLLED for (int j = 0; j < nv; j++) sums[i][j] += a[i * ai] * load(b + j * W);
  UNROLLED for (int i = 0; i < m; i++)
    UNROLLED for (int j = 0; j < nv; j++) store(c + i * ci + j * W, sums[i][j]);
}

static inline __attribute__((always_inline)) void strip(const int nv, int64_t m, int64_t depth, const float *a,
                                                        int64_t ai, int64_t ak, const float *b, int64_t bk, float *c,
                                                        int64_t ci, int add) {
  int64_t i = 0;
  for (; i + 8 <= m; i += 8) tile(8, nv, depth, a + i * ai, ai, ak, b, bk, c + i * ci, ci, add);
  if (i + 4 <= m) { tile(4, nv, depth, a + i * ai, ai, ak, b, bk, c + i * ci, ci, add); i += 4; }
  if (i + 2 <= m) { tile(2, nv, depth, a + i * ai, ai, ak, b, bk, c + i * ci, ci, add); i += 2; }
  if (i < m) tile(1, nv, depth, a + i * ai, ai, ak, b, bk, c + i * ci, ci, add);
}

static void multiply(int64_t m, int64_t n, int64_t depth, const float *a, int64_t ai, int64_t ak, const float *b,
                     int64_t bk, float *c, int64_t ci, int add) {
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) strip(2, m, depth, a, ai, ak, b + j, bk, c + j, ci, add);
  if (j < n) strip(1, m, depth, a, ai, ak, b + j, bk, c + j, ci, add);
}

/* Rows x = h W^T become z = cap tanh(x / cap) / tau; normaliser = log sum exp z; entropy (if wanted) of softmax(z). */
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
      most = pick(x > most, x, pick(x == x, most, x)); /* NaN comes through */
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

/* z becomes - p (weight + slope (log p + entropy)), p = exp(z - normaliser), times the derivative of the cap. */
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

/* (T, K, D) -> (K, D, stride): keys or values with positions along lanes. */
void transposed(const float *x, float *out, int64_t tokens, int64_t K, int64_t D, int64_t stride) {
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < tokens; block += KEYS) {
    int64_t end = block + KEYS < tokens ? block + KEYS : tokens;
    for (int64_t column = 0; column < K * D; column += W)
      for (int64_t t = block; t < end; t++)
        for (int64_t d = 0; d < W; d++) out[(column + d) * stride + t] = x[t * K * D + column + d];
  }
}

/* A run of tokens that see the prefix and their own past. */
typedef struct { int64_t start, length, prefix_start, prefix_length; } Segment;

/* Scores of a tile of rows against the keys from ``at`` on, of which ``count`` are real, ``wide`` computed, and the first has the position
   ``position``: capped, and -inf where a row must not see a key. Row r is query r / group from position ``query`` on. */
static inline void mask_scores(float *s, int64_t rows, int64_t group, int64_t count, int64_t wide, int64_t position,
                               int64_t query, int64_t window, float cap) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t q = query + r / group;
    int64_t to = q + 1 - position, from = window > 0 ? q + 1 - window - position : 0;
    to = to < count ? to : count;
    for (int64_t j = 0; j < wide; j += W) {
      vec x = load(s + r * KEYS + j);
      if (cap != 0.0f) x = cap * vtanh(x / cap);
      if (j < from || j + W > to)
        for (int64_t i = 0; i < W; i++)
          if (j + i < from || j + i >= to) x[i] = -INFINITY;
      store(s + r * KEYS + j, x);
    }
  }
}
