/* The structures of a decoder's layers, which layers.py fills in: see layers.inc. */
#pragma once
#include "product.h"

#define HEAD 1024 /* largest head size */
#define PAGE 32 /* positions in a page of keys and values */

/* x (offset + weight) / sqrt(mean(x^2) + eps); no norm where weight is null. */
typedef struct {
  const float *weight;
  float offset, eps;
} Norm;

typedef struct {
  const Matrix *qkv, *o, *gate, *up, *down; /* PACKED */
  Norm attention, q, k, attention_after, mlp, mlp_after;
  const float *table; /* (2, positions, D): cosines and sines; null: no rotary embedding */
  int64_t positions, window; /* window: positions that a query attends to, its own included; 0 = all up to its own */
} Layer;

typedef struct {
  const Layer *layers;
  Norm last;
  int64_t count, hidden, heads, kv_heads, head_dim, gelu;
  float scaling, cap;
} Decoder;

/* The cache of keys and values. A page holds all layers, in T: per layer and head, keys as [PAGE / 16][D][16], so that
   one vector operation works on sixteen scores, and values as [PAGE][D]. */
typedef struct {
  void **chunks;
  int64_t pages_per_chunk, page_numbers, layer_numbers;
} Pages;

/* The rows of a pass: see PagedRows and Sequences in pages.py. */
typedef struct {
  const int32_t *table, *prompt_length, *prompt_pages; /* of each sequence */
  const int32_t *sequence, *position, *page, *place; /* of each row */
  int64_t table_width, count;
} Tokens;

/* Buffers for the operands and results of products: normed (hidden), q, k and v together, q, the results of attention
   and of the gated product, and what a norm is taken of before it is added (``delta``, if there is such a norm). */
typedef struct {
  void *normed;
  float *qkv, *q;
  void *attended, *gated;
  float *delta, *scratch;
} Room;
