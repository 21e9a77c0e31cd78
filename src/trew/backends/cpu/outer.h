/* Tiles of a weight's gradient, for the learner: see outer.inc and add_outer in training.py. */
#pragma once
#include "train.h"

/* The registers hold a tile's sums, a row of b and one number of a: 24 + 3 + 1 of 32, or 12 + 2 + 1 of 16. */
#if defined __AVX512F__ || defined __aarch64__
#define OUTER_TILE 8 /* rows */
#define OUTER_WIDE 3 /* vectors */
#else
#define OUTER_TILE 6
#define OUTER_WIDE 2
#endif

/* Sizes in lanes of 4 bytes: a panel of b in its whole depth and a thread's block of a fit the second-level cache
   together. Scratch memory: OUTER_RIGHT for the packed part of b, OUTER_LEFT for each thread, as in training.py. */
#define OUTER_DEPTH 1344
#define OUTER_LEFT (1 << 17)
#define OUTER_RIGHT (1 << 20)
#define OUTER_PART 8 /* steps of the depth that are packed at once */

/* c (m x nv vectors) = or += the product of a (depth, OUTER_TILE), of which m columns count, and b (depth, nv vectors).
   Prefetches the lines of c meanwhile. */
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
/* A lane of 32 bits holds two bfloat16 of neighbouring tokens; their products are added in float. */
#include <immintrin.h>
#define PAIRS 1
#define LOAD_PAIRS(p) ((__m512bh)_mm512_loadu_si512(p))
#define ALL_PAIRS(x) ((__m512bh)_mm512_set1_epi32((int)(x)))
#define ADD_PAIRS(sum, a, b) ((part)_mm512_dpbf16_ps((__m512)(sum), a, b))
OUTER_TILES(outer_tile_pairs, uint32_t, __m512bh, LOAD_PAIRS, ALL_PAIRS, ADD_PAIRS)

/* Without a next row, its half is zero. */
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

/* Returns where share ``at`` begins when ``count`` things are divided into ``shares``. */
static inline int64_t share(int64_t count, int64_t at, int64_t shares) { return count * at / shares; }
