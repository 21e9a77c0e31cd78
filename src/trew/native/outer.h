/* For the learner: tiles of a weight's gradient. See outer.inc and add_outer in training.py. */
#pragma once
#include "train.h"

/* A weight's gradient, see ``outer`` in outer.inc: tiles of 12 x 32 keep 24 of 32 registers as sums, a panel of 32 columns
   stays in the first cache and a block of rows in the second. */
#define OUTER_TILE 12
#define OUTER_COLUMNS 32
#define OUTER_DEPTH 192
#define OUTER_ROWS 204

/* c (m x 16 nv) = or += the product of a (depth, OUTER_TILE), of which m columns are read, and b (depth, OUTER_COLUMNS). */
#define OUTER_TILES(NAME, LANE, LOAD, ALL, ADD)                                                                      \
  static inline __attribute__((always_inline)) void NAME(const int m, const int nv, int64_t depth, const LANE *a,    \
                                                         const LANE *b, float *c, int64_t ci, int add) {             \
    vec sums[OUTER_TILE][OUTER_COLUMNS / W];                                                                         \
    UNROLLED for (int i = 0; i < m; i++)                                                                             \
      UNROLLED for (int j = 0; j < nv; j++) sums[i][j] = (vec){0};                                                   \
    for (int64_t k = 0; k < depth; k++, a += OUTER_TILE, b += OUTER_COLUMNS)                                         \
      UNROLLED for (int i = 0; i < m; i++)                                                                           \
        UNROLLED for (int j = 0; j < nv; j++) sums[i][j] = ADD(sums[i][j], ALL(a[i]), LOAD(b + j * W));              \
    UNROLLED for (int i = 0; i < m; i++)                                                                             \
      UNROLLED for (int j = 0; j < nv; j++) {                                                                        \
        float *to = c + i * ci + j * W;                                                                              \
        store(to, add ? load(to) + sums[i][j] : sums[i][j]);                                                         \
      }                                                                                                              \
  }
#define MULTIPLY_ADD(sum, a, b) ((sum) + (a) * (b))
OUTER_TILES(outer_tile_floats, float, load, , MULTIPLY_ADD)

#ifdef __AVX512BF16__
/* 32 bits hold two bfloat16 of neighbouring tokens, whose products are added in float. */
#include <immintrin.h>
#define PAIRS 1
#define LOAD_PAIRS(p) ((__m512bh)_mm512_loadu_si512(p))
#define ALL_PAIRS(x) ((__m512bh)_mm512_set1_epi32((int)(x)))
#define ADD_PAIRS(sum, a, b) ((vec)_mm512_dpbf16_ps((__m512)(sum), a, b))
OUTER_TILES(outer_tile_pairs, uint32_t, LOAD_PAIRS, ALL_PAIRS, ADD_PAIRS)

static inline uint32_t one_pair(const bf16 *p, int64_t next) { return p[0] | (next ? (uint32_t)p[next] << 16 : 0); }

static inline void store_pairs(uint32_t *to, const bf16 *p, int64_t next) {
  words pairs = __builtin_convertvector(*(const halves *)p, words);
  if (next) pairs |= __builtin_convertvector(*(const halves *)(p + next), words) << 16;
  memcpy(to, &pairs, sizeof pairs);
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
