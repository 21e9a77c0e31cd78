/* The learner's attention, as far as it does not depend on the type of its result. A row is one query of one head.
   Scores are stored key by key, (keys, TILE), with rows that share keys as lanes: so keys and values are read as they
   are, and one vector operation works on the softmax of sixteen rows. */
#pragma once
#include "attend.h"
#include "train.h"

#define TILE 32 /* rows worked on at once */
#define FORWARD 192 /* keys worked on at once: their scores stay in the first-level cache */
#define BACKWARD 64
#define ALIGNED __attribute__((aligned(64)))

#if defined __AVX512F__ || defined __aarch64__
#define MULTIPLY 8 /* rows of a product's tile */
#else
#define MULTIPLY 4
#endif

/* C (MULTIPLY rows, of which m count, x nv vectors) = or += A B; element (i, k) of A is a[i ai + k ak]. */
static inline __attribute__((always_inline)) void multiply_tile(const int nv, int64_t depth, const float *a, int64_t ai,
                                                                int64_t ak, const float *b, int64_t bk, float *c,
                                                                int64_t ci, int64_t m, int add) {
  part sums[MULTIPLY][2];
  UNROLLED for (int i = 0; i < MULTIPLY; i++)
    UNROLLED for (int j = 0; j < nv; j++) sums[i][j] = (part){0};
  for (int64_t k = 0; k < depth; k++, a += ak, b += bk) {
    part row[2];
    UNROLLED for (int j = 0; j < nv; j++) row[j] = load_part(b + j * LANES);
    UNROLLED for (int i = 0; i < MULTIPLY; i++)
      UNROLLED for (int j = 0; j < nv; j++) sums[i][j] += a[i * ai] * row[j];
  }
  UNROLLED for (int i = 0; i < MULTIPLY; i++) {
    if (i == m) return;
    UNROLLED for (int j = 0; j < nv; j++) {
      float *to = c + i * ci + j * LANES;
      store_part(to, add ? load_part(to) + sums[i][j] : sums[i][j]);
    }
  }
}

/* The same for n columns, a multiple of 16. */
static inline __attribute__((always_inline)) void multiply(int64_t n, int64_t depth, const float *a, int64_t ai,
                                                           int64_t ak, const float *b, int64_t bk, float *c, int64_t ci,
                                                           int64_t m, int add) {
  int64_t j = 0;
  for (; j + 2 * LANES <= n; j += 2 * LANES) multiply_tile(2, depth, a, ai, ak, b + j, bk, c + j, ci, m, add);
  if (j < n) multiply_tile(1, depth, a, ai, ak, b + j, bk, c + j, ci, m, add);
}

/* scores (n, wide lanes) = keys (n rows, ``apart`` floats apart) times queries (D, TILE). */
static void score_rows(int64_t n, int64_t wide, int64_t D, const float *keys, int64_t apart, const float *queries,
                       float *scores) {
  for (int64_t at = 0; at < n; at += MULTIPLY) {
    if (n < MULTIPLY) {
      for (int64_t k = 0; k < n; k++)
        for (int64_t j = 0; j < wide; j += W) {
          vec total = {0};
          for (int64_t d = 0; d < D; d++) total += keys[k * apart + d] * load(queries + d * TILE + j);
          store(scores + k * TILE + j, total);
        }
      return;
    }
    int64_t k = least(at, n - MULTIPLY); /* the last may be computed twice */
    multiply(wide, D, keys + k * apart, apart, 1, queries, TILE, scores + k * TILE, TILE, MULTIPLY, 0);
  }
}

/* out (D, TILE) = x (TILE, D) transposed, of which some sixteens of rows count. */
static void turn_over(const float *x, int64_t wide, int64_t D, float *out) {
  for (int64_t r = 0; r < wide; r += W)
    for (int64_t d = 0; d < D; d += W) {
      const float *from = x + r * D + d;
      float *to = out + d * TILE + r;
#ifdef __AVX512F__
      __m512 a[W], b[W];
      UNROLLED for (int i = 0; i < W; i++) a[i] = _mm512_loadu_ps(from + i * D);
      UNROLLED for (int i = 0; i < W; i += 4) {
        __m512d low = (__m512d)_mm512_unpacklo_ps(a[i], a[i + 1]), high = (__m512d)_mm512_unpackhi_ps(a[i], a[i + 1]);
        __m512d low2 = (__m512d)_mm512_unpacklo_ps(a[i + 2], a[i + 3]);
        __m512d high2 = (__m512d)_mm512_unpackhi_ps(a[i + 2], a[i + 3]);
        b[i] = (__m512)_mm512_unpacklo_pd(low, low2);
        b[i + 1] = (__m512)_mm512_unpackhi_pd(low, low2);
        b[i + 2] = (__m512)_mm512_unpacklo_pd(high, high2);
        b[i + 3] = (__m512)_mm512_unpackhi_pd(high, high2);
      }
      UNROLLED for (int i = 0; i < 4; i++) { /* b[4 rows + i] holds the columns i, 4 + i, 8 + i and 12 + i */
        __m512 even = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), odd = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        __m512 even2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        __m512 odd2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        _mm512_storeu_ps(to + i * TILE, _mm512_shuffle_f32x4(even, even2, 0x88));
        _mm512_storeu_ps(to + (i + 4) * TILE, _mm512_shuffle_f32x4(odd, odd2, 0x88));
        _mm512_storeu_ps(to + (i + 8) * TILE, _mm512_shuffle_f32x4(even, even2, 0xdd));
        _mm512_storeu_ps(to + (i + 12) * TILE, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
      }
#else
      for (int64_t i = 0; i < W; i++)
        for (int64_t j = 0; j < W; j++) to[j * TILE + i] = from[i * D + j];
#endif
    }
}

/* A run of tokens that attend to the prefix and to their own past. */
typedef struct {
  int64_t start, length, prefix_start, prefix_length;
} Segment;

/* Shared by all tasks of a call. */
typedef struct {
  const float *q, *k, *v;
  int64_t tokens, window, H, K, D;
  float cap, scaling;
} Packed;

/* Rows from ``row`` on of one key-value head in a segment: row r is that head's query r % (H / K) of the token
   r / (H / K). They attend to keys in [from, to), numbered by position: the last row to all from ``low`` on, the first
   row to all before ``high``. So only keys in [low, high) are attended to by every row. */
typedef struct {
  Segment segment;
  int64_t head, row, rows, wide, group, position; /* of row 0 in the segment */
  int64_t from, to, low, high;
  ints at[TILE / W]; /* the position of each lane */
} Rows;

static inline int64_t position_of(const Rows *x, int64_t r) {
  return x->position + (x->row + least(r, x->rows - 1)) / x->group;
}

static Rows rows_of(const Packed *a, const Segment *s, int64_t head, int64_t row) {
  Rows x = {.segment = *s, .head = head, .row = row, .group = a->H / a->K, .position = s->prefix_length};
  x.rows = least(s->length * x.group - row, TILE);
  x.wide = (x.rows + W - 1) / W * W;
  int64_t first = position_of(&x, 0), last = position_of(&x, TILE);
  x.from = a->window > 0 ? greatest(first + 1 - a->window, 0) : 0;
  x.low = a->window > 0 ? last + 1 - a->window : 0;
  x.high = first + 1;
  x.to = last + 1;
  for (int i = 0; i < TILE; i++) x.at[i / W][i % W] = (int32_t)position_of(&x, i);
  return x;
}

/* Returns where row r, that is lane r, of a tile lies in (tokens, H, D). */
static inline int64_t place_of(const Packed *a, const Rows *x, int64_t r) {
  int64_t row = x->row + r;
  return ((x->segment.start + row / x->group) * a->H + x->head * x->group + row % x->group) * a->D;
}

/* Returns all ones in those lanes from j on that do not attend to a key. */
static inline ints hidden(const Packed *a, const Rows *x, int64_t j, int64_t key) {
  ints position = x->at[j / W], at = (int32_t)key - (ints){0};
  return a->window > 0 ? (at > position) | (at <= position - (int32_t)a->window) : at > position;
}

/* Returns the tokens of the keys [from, to), in one or two stretches: of a prefix and of the segment. */
typedef struct {
  int64_t token, from, to;
} Stretch;

static inline int64_t stretches(const Segment *s, int64_t from, int64_t to, Stretch *found) {
  int64_t count = 0, middle = s->prefix_length;
  if (from < middle) found[count++] = (Stretch){s->prefix_start + from, from, least(to, middle)};
  if (to > middle)
    found[count++] = (Stretch){s->start + greatest(from - middle, 0), greatest(from, middle), to};
  return count;
}

/* Writes the scaled queries (TILE, D) of a tile; zeros for lanes without a row. */
static void read_queries(const Packed *a, const Rows *x, float *query) {
  for (int64_t r = 0; r < x->rows; r++)
    for (int64_t d = 0; d < a->D; d += W) store(query + r * a->D + d, load(a->q + place_of(a, x, r) + d) * a->scaling);
  memset(query + x->rows * a->D, 0, (size_t)((x->wide - x->rows) * a->D) * sizeof(float));
}

/* out (rows, D) += weights (keys [from, to), TILE), transposed, times x (tokens, K, D), for keys attended to. */
static void weigh_rows(const Packed *a, const Rows *x, int64_t from, int64_t to, const float *weights, const float *of,
                       float *out) {
  Stretch found[2];
  int64_t count = stretches(&x->segment, from, to, found), apart = a->K * a->D;
  for (int64_t r = 0; r < x->rows; r += MULTIPLY) {
    int64_t low = a->window > 0 ? position_of(x, r) + 1 - a->window : 0;
    int64_t high = position_of(x, r + MULTIPLY - 1) + 1;
    for (int64_t i = 0; i < count; i++) {
      Stretch s = found[i];
      int64_t first = greatest(s.from, low), depth = least(s.to, high) - first;
      if (depth > 0)
        multiply(a->D, depth, weights + (first - from) * TILE + r, 1, TILE,
                 of + (s.token + first - s.from) * apart + x->head * a->D, apart, out + r * a->D, a->D, MULTIPLY, 1);
    }
  }
}

/* Replaces scores of the keys [from, to) by exp(score - m), zero where a lane does not attend to the key; updates m,
   the largest so far, and l, the sum; scales o (TILE, D) down as m grows. */
static void soften_rows(const Packed *a, const Rows *x, int64_t from, int64_t to, float *scores, float *m, float *l,
                        float *o) {
  for (int64_t j = 0; j < x->wide; j += W) {
    vec before = load(m + j), top = before, total = {0};
    for (int64_t key = from; key < to; key++) {
      float *own = scores + (key - from) * TILE + j;
      vec s = load(own);
      int edge = key < x->low || key >= x->high;
      if (a->cap != 0.0f) s = a->cap * vtanh(s / a->cap);
      if (edge) s = pick(hidden(a, x, j, key), all(-INFINITY), s);
      if (edge || a->cap != 0.0f) store(own, s);
      top = above(s, top);
    }
    for (int64_t key = from; key < to; key++) {
      float *own = scores + (key - from) * TILE + j;
      vec e = vexp(load(own) - top);
      if (key < x->low || key >= x->high) e = pick(hidden(a, x, j, key), all(0.0f), e);
      store(own, e);
      total += e;
    }
    vec shrink = pick(before == top, all(1.0f), vexp(before - top));
    store(m + j, top);
    store(l + j, load(l + j) * shrink + total);
    if (from > x->from)
      for (int64_t r = j; r < j + W; r++)
        for (int64_t d = 0; d < a->D; d += W) store(o + r * a->D + d, load(o + r * a->D + d) * shrink[r - j]);
  }
}

/* Replaces scores and the gradients of weights (keys [from, to), TILE) by weights and the gradients of scores. */
static void soften_backward(const Packed *a, const Rows *x, int64_t from, int64_t to, const float *norm,
                            const float *delta, float *p, float *ds) {
  for (int64_t j = 0; j < x->wide; j += W) {
    vec log_sum = load(norm + j), less = load(delta + j);
    for (int64_t key = from; key < to; key++) {
      int64_t at = (key - from) * TILE + j;
      vec s = load(p + at), slope = all(1.0f);
      if (a->cap != 0.0f) {
        vec t = vtanh(s / a->cap);
        s = a->cap * t;
        slope = 1.0f - t * t;
      }
      vec e = vexp(s - log_sum);
      if (key < x->low || key >= x->high) e = pick(hidden(a, x, j, key), all(0.0f), e);
      vec d = e * (load(ds + at) - less);
      if (a->cap != 0.0f) d *= slope;
      store(p + at, e);
      store(ds + at, d);
    }
  }
}

/* Adds weights (keys from ``from`` on, TILE) times x (TILE, D) to the gradients (tokens, K, D) of a stretch of keys. */
static void add_to_keys(const Packed *a, const Rows *x, Stretch s, int64_t from, const float *weights, const float *of,
                        float *to) {
  int64_t apart = a->K * a->D;
  for (int64_t key = s.from; key < s.to; key += MULTIPLY) {
    int64_t first = greatest((key - x->position) * x->group - x->row, 0), at = (s.token + key - s.from) * apart;
    multiply(a->D, x->rows - first, weights + (key - from) * TILE + first, TILE, 1, of + first * a->D, a->D,
             to + at + x->head * a->D, apart, least(s.to - key, MULTIPLY), 1);
  }
}
