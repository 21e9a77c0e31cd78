/* Matrix products out = x W^T. The columns of W^T are stored, or first packed, in strips: 16, 32 or 48 columns side by
   side, step by step of the depth. A thread reads a strip from its second-level cache while tiles of the result stay
   in registers. */
#pragma once
#include "vectors.h"

#define UNROLLED _Pragma("GCC unroll 16")

#ifdef __AVX512F__
#define TILE_ROWS 8 /* with 3 vectors of columns: 24 of 32 registers are sums */
#define STRIP 3
#else
#define TILE_ROWS 4 /* a vector is two of the 16 registers of AVX2, or four of the 32 of NEON */
#define STRIP 1
#endif
#define PARTS (W / LANES)

/* How a matrix W is stored: PACKED in strips of T; FLAT as (n, depth); TRANSPOSED as (depth, n). The latter two in
   float or bfloat16. */
enum { PACKED = 0, FLAT = 1, TRANSPOSED = 2 };
typedef struct Matrix {
  const void *weight;
  const float *bias; /* (n,) or null */
  int64_t n, depth, form, half; /* half: FLAT and TRANSPOSED are stored in bfloat16 */
  const struct Matrix *then; /* PACKED: the matrix of the next product, where that is known */
} Matrix;

/* Where a product goes: written in T or in float, or added to existing values in float or in T. */
enum { WRITE = 0, WRITE_FLOAT = 1, ADD_FLOAT = 2, ADD = 3 };

/* Strips have an even width, and their number is even, as most machines' numbers of threads are. */
static inline int64_t vectors_of(const Matrix *w) { return (w->n + W - 1) / W; }
static inline int64_t strips_of(const Matrix *w) {
  int64_t strips = (vectors_of(w) + STRIP - 1) / STRIP;
  return strips > 1 && vectors_of(w) > strips ? strips + strips % 2 : strips;
}
static inline int64_t strip_start(const Matrix *w, int64_t strip) { return vectors_of(w) * strip / strips_of(w) * W; }

/* How many of the steps are done at once: 8 rows of them stay in the first-level cache, a strip in the second. */
#define DEEPEST 1024
#define PART 4096 /* in a much greater depth, steps that all strips take before any takes the next ones */
static inline int64_t piece_of(int64_t units) {
  int64_t pieces = (units + DEEPEST - 1) / DEEPEST;
  return pieces > 1 ? ((units + pieces - 1) / pieces + W - 1) / W * W : units;
}

static inline vec as_floats(words x) {
  vec y;
  memcpy(&y, &x, sizeof y);
  return y;
}
static inline words as_words(vec x) {
  words y;
  memcpy(&y, &x, sizeof y);
  return y;
}
static inline words load_words(const uint32_t *p) {
  words x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline void store_words(uint32_t *p, words x) { memcpy(p, &x, sizeof x); }

/* A lane of 32 bits holds two bfloat16 of neighbouring steps of the depth; both products are added in float. */
typedef uint32_t part_words __attribute__((vector_size(4 * LANES)));
static inline part_words load_part_words(const uint32_t *p) {
  part_words x;
  memcpy(&x, p, sizeof x);
  return x;
}
#ifdef __AVX512BF16__
static inline part add_pairs(part sum, uint32_t a, part_words b) {
  return (part)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}
static inline words pairs_of(const float *p) {
  return (words)_mm512_cvtne2ps_pbh((__m512)load(p + W), (__m512)load(p));
}
#else
static inline part add_pairs(part sum, uint32_t a, part_words b) {
  uint32_t halves_of_a[2] = {a << 16, a & 0xffff0000};
  float factor[2];
  memcpy(factor, halves_of_a, sizeof factor);
  sum += factor[0] * (part)(b << 16); /* a cast between vectors of one size keeps the bits */
  return sum + factor[1] * (part)(b & 0xffff0000);
}
static inline words pairs_of(const float *p) {
  bf16 both[2 * W];
  store_bf16(both, load(p));
  store_bf16(both + W, load(p + W));
  words x;
  memcpy(&x, both, sizeof x);
  return x;
}
#endif
static inline words zipped(vec low, vec high) {
  bf16 a[W], b[W];
  store_bf16(a, low);
  store_bf16(b, high);
  return __builtin_convertvector(*(const halves *)a, words) | __builtin_convertvector(*(const halves *)b, words) << 16;
}
static inline void put_one_bf16(bf16 *p, float x) {
  bf16 rounded[W];
  store_bf16(rounded, all(x));
  *p = rounded[0];
}
static inline uint32_t one_zipped(float low, float high) {
  bf16 a, b;
  put_one_bf16(&a, low);
  put_one_bf16(&b, high);
  return a | (uint32_t)b << 16;
}
static inline void put_one(float *p, float x) { *p = x; }

static inline float value_at(const void *w, int64_t half, int64_t i) {
  if (!half) return ((const float *)w)[i];
  uint32_t bits = (uint32_t)((const bf16 *)w)[i] << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static inline vec values_at(const void *w, int64_t half, int64_t i) {
  return half ? load_bf16((const bf16 *)w + i) : load((const float *)w + i);
}

/* Transposes sixteen by sixteen numbers in four rounds, which swap blocks of 1, 2, 4 and 8. */
static inline __attribute__((always_inline)) void transpose16(words *x) {
  UNROLLED for (int s = 1; s < W; s *= 2) {
    ints low, high;
    UNROLLED for (int j = 0; j < W; j++) {
      low[j] = j & s ? W + j - s : j;
      high[j] = j & s ? W + j : j + s;
    }
    UNROLLED for (int i = 0; i < W; i++)
      if (!(i & s)) {
        words a = x[i], b = x[i + s];
        x[i] = __builtin_shuffle(a, b, low);
        x[i + s] = __builtin_shuffle(a, b, high);
      }
  }
}
