/* The decoder's operations between matrix products, row by row: see layers.py and training.py.
   Every width (hidden size, head size, intermediate size) is a multiple of 16; rows are independent of each other. */
#include "vectors.h"

static inline float inverse_rms(const float *x, int64_t n, float eps) {
  vec squares = {0};
  for (int64_t i = 0; i < n; i += W) { vec v = load(x + i); squares += v * v; }
  return 1.0f / sqrtf(sum(squares) / (float)n + eps);
}

#include "layers.h"
#include "draw.h"
#include "train.h"
#include "outer.h"
#include "attend.h"
#include "train_attention.h"
#include "stack.h"

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
#include "layers.inc"
#include "outer.inc"
#include "stack.inc"
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
#include "layers.inc"
#include "outer.inc"
#include "stack.inc"
