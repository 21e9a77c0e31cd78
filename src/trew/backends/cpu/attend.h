/* Attention while decoding: each row's query against the pages of its sequence. Neighbouring rows that share a prompt
   read the prompt's pages together, then each its own. */
#pragma once
#include "layers.h"
#include "train.h"

#define QUERIES 32 /* worked on at once, of rows that share a prompt */
#define SLOTS 8 /* pages worked on at once: their scores stay in the first-level cache */
#define SCORES (SLOTS * PAGE + W) /* distance of two queries' scores: no power of two */

/* Shared by all tasks of a call. */
typedef struct {
  const Pages *pages;
  const Tokens *t;
  int64_t layer, window, H, K, D;
  float cap;
} Attention;

/* Queries of one key-value head, row by row, and their online softmax over blocks of keys: m = the largest score so
   far, l = sum of exp(score - m), o = sum of exp(score - m) value. */
typedef struct {
  const float *query;
  float *score, *m, *l, *o;
} Queries;

/* The columns [from, to) of the scores. */
typedef struct {
  int64_t from, to;
} Span;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

/* Cuts m queries into tiles: CALL(size, first). */
#define BY_QUERIES(m, CALL)                       \
  for (int64_t i = 0; i < (m);) {                 \
    int64_t left = (m) - i;                       \
    if (left >= 8) { CALL(8, i); i += 8; }        \
    else if (left >= 4) { CALL(4, i); i += 4; }   \
    else if (left == 3) { CALL(3, i); i += 3; }   \
    else if (left == 2) { CALL(2, i); i += 2; }   \
    else { CALL(1, i); i += 1; }                  \
  }

/* How many partial sums take turns, so that no addition waits for the one before it. */
#define TURNS(sums) ((sums) >= 8 ? 1 : (sums) >= 4 ? 2 : 4)

/* Replaces one query's scores in the columns of two spans by exp(score - m). The first span is padded with 0 up to
   ``wide``, the columns that other rows of the tile attend to. */
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

/* Writes where runs of rows that share a prompt begin; returns their number. Long runs are split, so that every thread
   has work. */
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
