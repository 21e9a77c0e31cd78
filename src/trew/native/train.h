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
#define OUTER_ROWS 96
#define OUTER_TOKENS 256

/* C (m x n) = or += A B, with lanes along n; element (i, k) of A is a[i ai + k ak]; n is a multiple of 16. */
static inline __attribute__((always_inline)) void tile(const int m, const int nv, int64_t depth, const float *a,
                                                       int64_t ai, int64_t ak, const float *b, int64_t bk, float *c,
                                                       int64_t ci, int add) {
  vec sums[4][4];
  for (int i = 0; i < m; i++)
    for (int j = 0; j < nv; j++) sums[i][j] = add ? load(c + i * ci + j * W) : (vec){0};
  for (int64_t k = 0; k < depth; k++) {
    vec row[4];
    for (int j = 0; j < nv; j++) row[j] = load(b + k * bk + j * W);
    for (int i = 0; i < m; i++) {
      float factor = a[i * ai + k * ak];
      for (int j = 0; j < nv; j++) sums[i][j] += factor * row[j];
    }
  }
  for (int i = 0; i < m; i++)
    for (int j = 0; j < nv; j++) store(c + i * ci + j * W, sums[i][j]);
}

static inline __attribute__((always_inline)) void strip(const int nv, int64_t m, int64_t depth, const float *a,
                                                        int64_t ai, int64_t ak, const float *b, int64_t bk, float *c,
                                                        int64_t ci, int add) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) tile(4, nv, depth, a + i * ai, ai, ak, b, bk, c + i * ci, ci, add);
  for (; i < m; i++) tile(1, nv, depth, a + i * ai, ai, ak, b, bk, c + i * ci, ci, add);
}

static void multiply(int64_t m, int64_t n, int64_t depth, const float *a, int64_t ai, int64_t ak, const float *b,
                     int64_t bk, float *c, int64_t ci, int add) {
  int64_t j = 0;
  for (; j + 64 <= n; j += 64) strip(4, m, depth, a, ai, ak, b + j, bk, c + j, ci, add);
  if (j + 48 <= n) strip(3, m, depth, a, ai, ak, b + j, bk, c + j, ci, add);
  else if (j + 32 <= n) strip(2, m, depth, a, ai, ak, b + j, bk, c + j, ci, add);
  else if (j + 16 <= n) strip(1, m, depth, a, ai, ak, b + j, bk, c + j, ci, add);
}

#ifdef __AVX512BF16__
/* The same of pairs: 32 bits hold two bfloat16 of neighbouring k, whose products are added in float. */
#include <immintrin.h>
#define PAIRS 1

static inline __attribute__((always_inline)) void tile_pairs(const int m, const int nv, int64_t depth,
                                                             const uint32_t *a, int64_t ak, const uint32_t *b,
                                                             int64_t bk, float *c, int64_t ci, int add) {
  __m512 sums[4][4];
  for (int i = 0; i < m; i++)
    for (int j = 0; j < nv; j++) sums[i][j] = add ? _mm512_loadu_ps(c + i * ci + j * W) : _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k++) {
    __m512bh row[4];
    for (int j = 0; j < nv; j++) row[j] = (__m512bh)_mm512_loadu_si512(b + k * bk + j * W);
    for (int i = 0; i < m; i++) {
      __m512bh factor = (__m512bh)_mm512_set1_epi32((int)a[i + k * ak]);
      for (int j = 0; j < nv; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], factor, row[j]);
    }
  }
  for (int i = 0; i < m; i++)
    for (int j = 0; j < nv; j++) _mm512_storeu_ps(c + i * ci + j * W, sums[i][j]);
}

static inline __attribute__((always_inline)) void strip_pairs(const int nv, int64_t m, int64_t depth,
                                                              const uint32_t *a, int64_t ak, const uint32_t *b,
                                                              int64_t bk, float *c, int64_t ci, int add) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) tile_pairs(4, nv, depth, a + i, ak, b, bk, c + i * ci, ci, add);
  for (; i < m; i++) tile_pairs(1, nv, depth, a + i, ak, b, bk, c + i * ci, ci, add);
}

/* The block of a weight's gradient that ``outer`` is at: rows x k, see train.inc. */
static void outer_pairs(const bf16 *a, int64_t a_row, const bf16 *b, int64_t b_row, float *into, int64_t tokens,
                        int64_t rows, int64_t k, int64_t add) {
  uint32_t left[OUTER_TOKENS * OUTER_ROWS] __attribute__((aligned(64)));
  uint32_t right[OUTER_TOKENS * 64] __attribute__((aligned(64)));
  for (int64_t t = 0; t < tokens; t += 2 * OUTER_TOKENS) {
    int64_t left_over = tokens - t, depth = left_over < 2 * OUTER_TOKENS ? (left_over + 1) / 2 : OUTER_TOKENS;
    for (int64_t i = 0; i < depth; i++) {
      const bf16 *even = a + (t + 2 * i) * a_row, *odd = 2 * i + 1 < left_over ? even + a_row : 0;
      for (int64_t j = 0; j < rows; j++) left[i * OUTER_ROWS + j] = even[j] | (odd ? (uint32_t)odd[j] << 16 : 0);
    }
    for (int64_t column = 0; column < k; column += 64) {
      int64_t wide = k - column < 64 ? k - column : 64;
      for (int64_t i = 0; i < depth; i++) {
        const bf16 *even = b + (t + 2 * i) * b_row + column, *odd = 2 * i + 1 < left_over ? even + b_row : 0;
        for (int64_t j = 0; j < wide; j += W) {
          words low = __builtin_convertvector(*(const halves *)(even + j), words), high = {0};
          if (odd) high = __builtin_convertvector(*(const halves *)(odd + j), words) << 16;
          low |= high;
          memcpy(right + i * 64 + j, &low, sizeof low);
        }
      }
      float *to = into + column;
      int on = add || t > 0;
      int64_t j = 0;
      for (; j + 64 <= wide; j += 64) strip_pairs(4, rows, depth, left, OUTER_ROWS, right + j, 64, to + j, k, on);
      for (; j + 16 <= wide; j += 16) strip_pairs(1, rows, depth, left, OUTER_ROWS, right + j, 64, to + j, k, on);
    }
  }
}
#else
#define PAIRS 0
#endif

static inline float one_bf16(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Up to 16 floats of a row's end; the lanes beyond hold ``fill``. */
static inline vec load_end(const float *p, int64_t n, float fill) {
  vec x = all(fill);
  memcpy(&x, p, (size_t)n * sizeof(float));
  return x;
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
