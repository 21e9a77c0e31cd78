/* Attention of decoding: rows against the pages of their sequences. Rows beside each other that share a prompt read its
   pages together, and each its own. */
#pragma once
#include "layers.h"
#include "train.h"

#define QUERIES 32 /* at once, of rows that share a prompt */
#define SLOTS 8 /* pages at once: their scores stay in the first cache */
#define SCORES (SLOTS * PAGE + W) /* from one query's scores to the next: not a power of two */

/* Shared by all tasks of a call. */
typedef struct {
  const Pages *pages;
  const Tokens *t;
  int64_t layer, window, H, K, D;
  float cap;
} Attention;

/* Queries of one key-value head, row by row, and the softmax that sees their scores bit by bit: m = the largest so far,
   l = sum of exp(score - m), o = sum of exp(score - m) value. */
typedef struct {
  const float *query;
  float *score, *m, *l, *o;
} Queries;

/* Columns [from, to) of the scores. */
typedef struct {
  int64_t from, to;
} Span;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

/* m queries in tiles: CALL(how many, the first). */
#define BY_QUERIES(m, CALL)                       \
  for (int64_t i = 0; i < (m);) {                 \
    int64_t left = (m) - i;                       \
    if (left >= 8) { CALL(8, i); i += 8; }        \
    else if (left >= 4) { CALL(4, i); i += 4; }   \
    else if (left == 3) { CALL(3, i); i += 3; }   \
    else if (left == 2) { CALL(2, i); i += 2; }   \
    else { CALL(1, i); i += 1; }                  \
  }

/* Number of sums to take in turn, so that an addition need not wait for the one before it. */
#define TURNS(sums) ((sums) >= 8 ? 1 : (sums) >= 4 ? 2 : 4)

/* One query's scores in the columns of two spans become exp(score - m); 0 beside the first, where other rows see keys:
   up to ``wide``. */
static inline void soften(float *s, Span wide, const Span *seen, float cap, float *m, float *l, float *o, int64_t D) {
  const Span spans[2] = {wide, seen[1]};
  vec most = all(*m), total = {0};
  for (int z = 0; z < 2; z++)
    for (int64_t block = spans[z].from / W * W; block < spans[z].to; block += W) {
      vec x = load(s + block);
      if (cap != 0.0f) x = cap * vtanh(x / cap);
      if (block < seen[z].from || block + W > seen[z].to) {
        ints column = (ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)block;
        x = pick((column >= (int32_t)seen[z].from) & (column < (int32_t)seen[z].to), x, all(-INFINITY));
      }
      store(s + block, x);
      most = pick(x > most, x, most);
    }
  float top = largest(most);
  for (int z = 0; z < 2; z++)
    for (int64_t block = spans[z].from / W * W; block < spans[z].to; block += W) {
      vec x = load(s + block), e = pick(x == all(-INFINITY), all(0.0f), vexp(x - top));
      store(s + block, e);
      total += e;
    }
  float shrink = *m == top || *m == -INFINITY ? 1.0f : expf(*m - top);
  *l = *l * shrink + sum(total);
  *m = top;
  if (shrink != 1.0f)
    for (int64_t d = 0; d < D; d += W) store(o + d, load(o + d) * shrink);
}

/* Where runs of rows that share a prompt begin; their number. No run is so long that a thread would have none. */
static int64_t runs(const Attention *a, int32_t *bounds) {
  const Tokens *t = a->t;
  int64_t most = t->count * a->K / (2 * omp_get_max_threads()), count = 0;
  most = least(most, QUERIES / (a->H / a->K));
  for (int64_t row = 0; row < t->count; row++) {
    int64_t s = t->sequence[row], before = row ? t->sequence[row - 1] : s;
    if (!row || t->table[s * t->table_width] != t->table[before * t->table_width] || row - bounds[count - 1] >= most)
      bounds[count++] = (int32_t)row;
  }
  bounds[count] = (int32_t)t->count;
  return count;
}
