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
#define ONE(x) (x)
#define OUTER_PAIRS(...)
#define NAME(f) f##_f32
#include "rows.inc"
#include "train.inc"
#undef T
#undef GET
#undef PUT
#undef ONE
#undef OUTER_PAIRS
#undef NAME

#define T bf16
#define GET load_bf16
#define PUT store_bf16
#define ONE one_bf16
#if PAIRS
#define OUTER_PAIRS(...) outer_pairs(__VA_ARGS__); continue;
#else
#define OUTER_PAIRS(...)
#endif
#define NAME(f) f##_bf16
#include "rows.inc"
#include "train.inc"
