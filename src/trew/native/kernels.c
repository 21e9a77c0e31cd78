/* What stands between the matrix products of a decoder, row by row: see kernels.py for the contract of each function.
   Every width (hidden size, head size, intermediate size) is a multiple of 16; rows are independent of each other. */
#include "vectors.h"

#define PAGE 32 /* positions in a page of keys and values */

/* A page of the cache holds all layers: per layer and head, keys as [PAGE / 16][D][16], so that sixteen scores are made
   at once, and values as [PAGE][D]. */
typedef struct {
  float **chunks;
  int64_t pages_per_chunk, page_floats, layer_floats;
} Pages;

static inline float *page_of(const Pages *pages, int64_t page, int64_t layer) {
  return pages->chunks[page / pages->pages_per_chunk] + (page % pages->pages_per_chunk) * pages->page_floats +
         layer * pages->layer_floats;
}

static inline float inverse_rms(const float *x, int64_t n, float eps) {
  vec squares = {0};
  for (int64_t i = 0; i < n; i += W) { vec v = load(x + i); squares += v * v; }
  return 1.0f / sqrtf(sum(squares) / (float)n + eps);
}

#include "product.h"
#include "draw.h"
#include "train.h"
#include "outer.h"
#include "attend.h"
#include "train_attention.h"

#define T float
#define GET load
#define PUT store
#define LANE float
#define PER_LANE 1
#define ONE_LANE(p, next) ((void)(next), *(p))
#define OUTER_RUN outer_tile_floats
#define NAME(f) f##_f32
#define HALF 0
#include "rows.inc"
#include "attend.inc"
#include "train.inc"
#include "train_attention.inc"
#include "product.inc"
#include "outer.inc"
#undef HALF
#undef T
#undef GET
#undef PUT
#undef LANE
#undef PER_LANE
#undef ONE_LANE
#undef OUTER_RUN
#undef NAME

#define T bf16
#define GET load_bf16
#define PUT store_bf16
#if PAIRS
#define LANE uint32_t
#define PER_LANE 2
#define ONE_LANE one_pair
#define OUTER_RUN outer_tile_pairs
#else
#define LANE float
#define PER_LANE 1
#define ONE_LANE(p, next) ((void)(next), one_bf16(*(p)))
#define OUTER_RUN outer_tile_floats
#endif
#define NAME(f) f##_bf16
#define HALF 1
#include "rows.inc"
#include "attend.inc"
#include "train.inc"
#include "train_attention.inc"
#include "product.inc"
#include "outer.inc"

/* Queries and keys of rows [q | k | v] are turned; keys and values go into the cache. */
void rotate(const float *qkv, float *q, const float *table, int64_t table_rows, const int32_t *position,
            const float *q_weight, const float *k_weight, float offset, float eps, float scaling, const Pages *pages,
            int64_t layer, const int32_t *page, const int32_t *place, int64_t rows, int64_t H, int64_t K, int64_t D) {
#pragma omp parallel for schedule(static) if (rows * D * H > 4096)
  for (int64_t row = 0; row < rows; row++) {
    const float *own = qkv + row * (H + 2 * K) * D;
    const float *cosine = table ? table + position[row] * D : 0;
    const float *sine = table ? cosine + table_rows * D : 0;
    for (int64_t h = 0; h < H; h++)
      turn_f32(own + h * D, q + (row * H + h) * D, D, q_weight, offset, eps, cosine, sine, scaling);
    float *to = page_of(pages, page[row], layer);
    float key[1024];
    for (int64_t h = 0; h < K; h++) {
      turn_f32(own + (H + h) * D, key, D, k_weight, offset, eps, cosine, sine, 1.0f);
      float *keys = to + h * D * PAGE * 2, *values = keys + D * PAGE + (int64_t)place[row] * D;
      keys += place[row] / W * D * W + place[row] % W;
      for (int64_t d = 0; d < D; d++) keys[d * W] = key[d];
      const float *value = own + (H + K + h) * D;
      for (int64_t d = 0; d < D; d += W) store(values + d, load(value + d));
    }
  }
}
