/* What a decoder's layers are made of, as layers.py hands it over: see layers.inc. */
#pragma once
#include "product.h"

#define HEAD 1024 /* largest head size */
#define PAGE 32 /* positions in a page of keys and values */

/* x (offset + weight) / sqrt(mean(x^2) + eps), or nothing where there is no weight. */
typedef struct {
  const float *weight;
  float offset, eps;
} Norm;

typedef struct {
  const Matrix *qkv, *o, *gate, *up, *down; /* PACKED */
  Norm attention, q, k, attention_after, mlp, mlp_after;
  const float *table; /* (2, positions, D): cosines and sines; none: no rotary embedding */
  int64_t positions, window; /* window: positions that a query sees, its own included; 0 = all before it */
} Layer;

typedef struct {
  const Layer *layers;
  Norm last;
  int64_t count, hidden, heads, kv_heads, head_dim, gelu;
  float scaling, cap;
} Decoder;

/* Keys and values. A page holds all layers, in T: per layer and head, keys as [PAGE / 16][D][16], so that sixteen scores
   are made at once, and values as [PAGE][D]. */
typedef struct {
  void **chunks;
  int64_t pages_per_chunk, page_numbers, layer_numbers;
} Pages;

/* Rows of a pass: see Rows and Sequences in pages.py. */
typedef struct {
  const int32_t *table, *prompt_length, *prompt_pages; /* of each sequence */
  const int32_t *sequence, *position, *page, *place; /* of each row */
  int64_t table_width, count;
} Tokens;

/* Room for what stands between products: T or float, rows of hidden, of q, k and v, of q, of what attention and gate
   give, and of what a norm is taken of before it is added (where there is such a norm). */
typedef struct {
  void *normed;
  float *qkv, *q;
  void *mixed, *gated;
  float *delta, *scratch;
} Room;
