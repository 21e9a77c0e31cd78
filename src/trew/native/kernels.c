/* What stands between the matrix products of a decoder, row by row: see kernels.py for the contract of each function.
   Every width (hidden size, head size, intermediate size) is a multiple of 16; rows are independent of each other. */
#include "vectors.h"

#define PAGE 64 /* positions in a page of keys and values */

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

#include "train.h"

#define T float
#define GET load
#define PUT store
#define LANE float
#define PER_LANE 1
#define ONE_LANE(p, next) ((void)(next), *(p))
#define STORE_LANES(to, p, next) ((void)(next), store(to, load(p)))
#define OUTER_RUN outer_tile_floats
#define NAME(f) f##_f32
#include "rows.inc"
#include "train.inc"
#undef T
#undef GET
#undef PUT
#undef LANE
#undef PER_LANE
#undef ONE_LANE
#undef STORE_LANES
#undef OUTER_RUN
#undef NAME

#define T bf16
#define GET load_bf16
#define PUT store_bf16
#if PAIRS
#define LANE uint32_t
#define PER_LANE 2
#define ONE_LANE one_pair
#define STORE_LANES store_pairs
#define OUTER_RUN outer_tile_pairs
#else
#define LANE float
#define PER_LANE 1
#define ONE_LANE(p, next) ((void)(next), one_bf16(*(p)))
#define STORE_LANES(to, p, next) ((void)(next), store(to, load_bf16(p)))
#define OUTER_RUN outer_tile_floats
#endif
#define NAME(f) f##_bf16
#include "rows.inc"
#include "train.inc"
