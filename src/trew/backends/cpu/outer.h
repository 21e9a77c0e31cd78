/* For the learner: tiles of a weight's gradient. See outer.inc and add_outer in training.py. */
#pragma once
#include "train.h"

/* A tile's sums, a row of b and one number of a fit into registers: 24 + 3 + 1 of 32, or 12 + 2 + 1 of 16. */
#if defined __AVX512F__ || defined __aarch64__
#define OUTER_TILE 8 /* rows */
#define OUTER_WIDE 3 /* vectors */
#else
#define OUTER_TILE 6
#define OUTER_WIDE 2
#endif

/* Lanes of 4 bytes: with all its depth, a panel of b and a thread's block of a share the second cache. Scratch memory:
   OUTER_RIGHT for what is packed of b, and OUTER_LEFT for each thread, as in training.py. */
#define OUTER_DEPTH 1344
#define OUTER_LEFT (1 << 17)
#define OUTER_RIGHT (1 << 20)
#define OUTER_PART 8 /* of the depth, packed at once */

/* c (m x nv vectors) = or += the product of a (depth, OUTER_TILE), of which m columns count, and b (depth, nv vectors).
   On the way the lines of c are fetched. */
#define OUTER_TILES(NAME, LANE, ROW, LOAD, ALL, ADD)                                                                 \
  static inline __attribute__((always_inline)) void NAME(const int nv, int64_t depth, const LANE *a, const LANE *b,  \
                                                         float *c, int64_t ci, int64_t m, int64_t add) {             \
    part sums[OUTER_TILE][OUTER_WIDE];                                                                               \
    UNROLLED for (int i = 0; i < OUTER_TILE; i++)                                                                    \
      UNROLLED for (int j = 0; j < nv; j++) sums[i][j] = (part){0};                                                  \
    int64_t k = 0;                                                                                                   \
    _Pragma("GCC unroll 1") for (int64_t line = 0; line < OUTER_TILE; line++) {                                      \
      if (line < m)                                                                                                  \
        for (int j = 0; j < nv; j++) __builtin_prefetch(c + line * ci + j * LANES, 0, 2);                            \
      _Pragma("GCC unroll 1") for (int64_t end = depth * (line + 1) / OUTER_TILE; k < end; k++) {                    \
        ROW row[OUTER_WIDE];                                                                                         \
        UNROLLED for (int j = 0; j < nv; j++) row[j] = LOAD(b + j * LANES);                                          \
        UNROLLED for (int i = 0; i < OUTER_TILE; i++)                                                                \
          UNROLLED for (int j = 0; j < nv; j++) sums[i][j] = ADD(sums[i][j], ALL(a[i]), row[j]);                     \
        a += OUTER_TILE;                                                                                             \
        b += nv * LANES;                                                                                             \
      }                                                                                                              \
    }                                                                                                                \
    UNROLLED for (int i = 0; i < OUTER_TILE; i++) {                                                                  \
      if (i == m) return;                                                                                            \
      UNROLLED for (int j = 0; j < nv; j++) {                                                                        \
        float *to = c + i * ci + j * LANES;                                                                          \
        store_part(to, add ? load_part(to) + sums[i][j] : sums[i][j]);                                               \
      }                                                                                                              \
    }                                                                                                                \
  }
#define MULTIPLY_ADD(sum, a, b) ((sum) + (a) * (b))
OUTER_TILES(outer_tile_floats, float, part, load_part, , MULTIPLY_ADD)

#ifdef __AVX512BF16__
/* 32 bits hold two bfloat16 of neighbouring tokens, whose products are added in float. */
#include <immintrin.h>
#define PAIRS 1
#define LOAD_PAIRS(p) ((__m512bh)_mm512_loadu_si512(p))
#define ALL_PAIRS(x) ((__m512bh)_mm512_set1_epi32((int)(x)))
#define ADD_PAIRS(sum, a, b) ((part)_mm512_dpbf16_ps((__m512)(sum), a, b))
OUTER_TILES(outer_tile_pairs, uint32_t, __m512bh, LOAD_PAIRS, ALL_PAIRS, ADD_PAIRS)

/* With no next row its half is zeros. */
static inline uint32_t one_pair(const bf16 *p, int64_t next) {
  return p[0] | ((uint32_t)p[next] << 16 & (uint32_t)-(next != 0));
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

/* Of ``count`` things, where the share of number ``at`` of ``shares`` begins. */
static inline int64_t share(int64_t count, int64_t at, int64_t shares) { return count * at / shares; }
