/* The structures of a decoder's layers with their gradients, for the learner; stack.py fills them in. See stack.inc. */
#pragma once
#include "layers.h"
#include "outer.h"
#include "train_attention.h"

/* y = x W^T + bias, plus scale (x A^T) B^T if there is an adapter (rank above 0). A gradient is wanted where its
   pointer is not null. All are added to the existing values, except a ``fresh`` one of W, which is written. */
typedef struct {
  const void *weight; /* (n, depth) */
  const float *bias;
  float *grad, *bias_grad;
  const float *a, *b; /* (even, depth), (n, even) */
  float *a_grad, *b_grad; /* (rank, depth), (n, rank) */
  int64_t n, depth, half, fresh, rank, even; /* half: W is in bfloat16; even: the rank, rounded up */
  float scale;
} Linear;

typedef struct {
  Norm norm;
  float *grad;
} TrainedNorm;

typedef struct {
  Linear q, k, v, o, gate, up, down;
  TrainedNorm attention, q_norm, k_norm, attention_after, mlp, mlp_after;
  const float *table; /* (2, positions, D), or null */
  int64_t positions, window;
} TrainedLayer;

typedef struct {
  const TrainedLayer *layers;
  TrainedNorm last;
  const float *embedding;
  float *embedding_grad;
  int64_t count, hidden, wide, heads, kv_heads, head_dim, gelu;
  float embed_scale, scaling, cap;
} Stack;

/* A packed row: see RowLayout in stack.py. */
typedef struct {
  const int64_t *ids, *positions; /* of each token */
  const Segment *segments;
  const int64_t *units, *read_at; /* read_at: the tokens that the head reads */
  int64_t tokens, segment_count, unit_count, read, shares;
} PackedRow;

/* What is saved for the backward pass: nothing; each layer's input, from which the rest is recomputed; or all. */
enum { KEEP_NOTHING = 0, KEEP_INPUTS = 1, KEEP_ALL = 2 };

/* Takes the next ``bytes``, in whole cache lines. The same steps lay memory out and, without any, count its bytes. */
static inline void *take(uintptr_t *at, int64_t bytes) {
  uintptr_t found = *at;
  *at += (uintptr_t)(bytes + 63) / 64 * 64;
  return (void *)found;
}

static inline const Linear *linear_of(const TrainedLayer *l, int64_t i) {
  const Linear *each[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
  return each[i];
}
static inline Matrix as_it_is(const Linear *l) {
  return (Matrix){l->weight, l->bias, l->n, l->depth, FLAT, l->half, 0};
}
static inline Matrix turned_round(const Linear *l) {
  return (Matrix){l->weight, 0, l->depth, l->n, TRANSPOSED, l->half, 0};
}

/* Adds each thread's sums (threads, n) to grad. */
static inline void sum_threads(const float *partial, int64_t n, float *grad) {
  for (int64_t thread = 0; thread < omp_get_max_threads(); thread++)
    for (int64_t i = 0; i < n; i += W) store(grad + i, load(grad + i) + load(partial + thread * n + i));
}
