/* Attention of decoding: rows against the pages of their sequences. Rows beside each other that share a prompt read its
   pages together, and each its own. */
#pragma once
#include "train.h"

#define QUERIES 32 /* at once, of rows that share a prompt */
#define SLOTS 8 /* pages at once: their scores stay in the first cache */
#define SCORES (SLOTS * PAGE + W) /* from one query's scores to the next: not a power of two */

/* What all tasks of a call have in common. */
typedef struct {
  const Pages *pages;
  const int32_t *table, *sequence, *prompt_length, *prompt_pages, *position;
  int64_t layer, table_width, window, rows, H, K, D;
  float cap;
} Attention;

/* Queries of one key-value head, row by row, and the softmax that sees their scores bit by bit: m = the largest so far,
   l = sum of exp(score - m), o = sum of exp(score - m) value. */
typedef struct {
  const float *query;
  float *score, *m, *l, *o;
} Queries;

/* Positions [from, to) of a page, whose scores begin at a column. */
typedef struct {
  const float *page;
  int64_t from, to, column;
} Part;

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

/* So many sums in turn that an addition need not wait for the one before it. */
#define TURNS(sums) ((sums) >= 8 ? 1 : (sums) >= 4 ? 2 : 4)

/* m queries times nv x 16 keys. Meanwhile what is read next, sixteen or (``apart``) thirty-two keys and as many values,
   begins to come from far memory, a line of each at a time: all at once, they would hold up what is computed. */
static inline __attribute__((always_inline)) void score_tile(const int m, const int nv, int64_t D, const float *query,
                                                             const float *keys, float *score, const float *ahead,
                                                             int64_t apart) {
  const int turns = TURNS(m * nv);
  vec sums[4][8][2];
  UNROLLED for (int x = 0; x < turns; x++)
    UNROLLED for (int i = 0; i < m; i++)
      UNROLLED for (int j = 0; j < nv; j++) sums[x][i][j] = (vec){0};
  for (int64_t d = 0; d < D; d += turns)
    UNROLLED for (int x = 0; x < turns; x++) {
      const float *line = ahead + (d + x) * W;
      __builtin_prefetch(line, 0, 3);
      __builtin_prefetch(line + apart, 0, 3);
      __builtin_prefetch(line + PAGE * D, 0, 3);
      __builtin_prefetch(line + PAGE * D + apart, 0, 3);
      vec k[2];
      UNROLLED for (int j = 0; j < nv; j++) k[j] = load(keys + (j * D + d + x) * W);
      UNROLLED for (int i = 0; i < m; i++)
        UNROLLED for (int j = 0; j < nv; j++) sums[x][i][j] += query[i * D + d + x] * k[j];
    }
  UNROLLED for (int x = 1; x < turns; x++)
    UNROLLED for (int i = 0; i < m; i++)
      UNROLLED for (int j = 0; j < nv; j++) sums[0][i][j] += sums[x][i][j];
  UNROLLED for (int i = 0; i < m; i++)
    UNROLLED for (int j = 0; j < nv; j++) store(score + i * SCORES + j * W, sums[0][i][j]);
}

/* m queries times the keys of a part, rounded to sixteens; ``next``: the part that will be read after it. */
static void score_part(int64_t m, int64_t D, const float *query, const Part *part, const Part *next, float *score) {
  const float *ahead = next->page + (next->from >= W ? D * W : 0);
  int64_t apart = next->from < W && next->to > W ? D * W : 0;
  int64_t second = part->from >= W ? W : 0;
  const float *keys = part->page + second * D;
  score += part->column + second;
#define TILE_OF(m, i) score_tile(m, 2, D, query + (i) * D, keys, score + (i) * SCORES, ahead, apart)
  if (!second && part->to > W) BY_QUERIES(m, TILE_OF)
#undef TILE_OF
#define TILE_OF(m, i) score_tile(m, 1, D, query + (i) * D, keys, score + (i) * SCORES, ahead, apart)
  else BY_QUERIES(m, TILE_OF)
#undef TILE_OF
}

/* What the products of the first part will read begins to come from far memory. Always inlined: gcc takes a function
   that does no more than this to do nothing. */
static inline __attribute__((always_inline)) void fetch(const Part *part, int64_t D) {
  int64_t from = part->from / W * W, to = (part->to + W - 1) / W * W;
  const float *keys = part->page + from * D, *values = part->page + (PAGE + part->from) * D;
  for (int64_t at = 0; at < (to - from) * D; at += W) __builtin_prefetch(keys + at, 0, 3);
  for (int64_t at = 0; at < (part->to - part->from) * D; at += W) __builtin_prefetch(values + at, 0, 3);
}

/* o (m, 16 nv) += what m rows of scores say of the values of some parts. */
static inline __attribute__((always_inline)) void value_tile(const int m, const int nv, int64_t D, const float *score,
                                                             const Part *parts, int64_t count, int64_t d, float *o) {
  const int turns = TURNS(m * nv);
  vec sums[4][8][4];
  UNROLLED for (int i = 0; i < m; i++)
    UNROLLED for (int j = 0; j < nv; j++) {
      sums[0][i][j] = load(o + i * D + j * W);
      UNROLLED for (int x = 1; x < turns; x++) sums[x][i][j] = (vec){0};
    }
  for (int64_t p = 0; p < count; p++) {
    int64_t n = parts[p].to - parts[p].from, t = 0;
    const float *values = parts[p].page + (PAGE + parts[p].from) * D + d;
    const float *weight = score + parts[p].column + parts[p].from;
    for (; t + turns <= n; t += turns, values += turns * D)
      UNROLLED for (int x = 0; x < turns; x++) {
        vec v[4];
        UNROLLED for (int j = 0; j < nv; j++) v[j] = load(values + x * D + j * W);
        UNROLLED for (int i = 0; i < m; i++)
          UNROLLED for (int j = 0; j < nv; j++) sums[x][i][j] += weight[i * SCORES + t + x] * v[j];
      }
    for (; t < n; t++, values += D)
      UNROLLED for (int i = 0; i < m; i++)
        UNROLLED for (int j = 0; j < nv; j++) sums[0][i][j] += weight[i * SCORES + t] * load(values + j * W);
  }
  UNROLLED for (int i = 0; i < m; i++)
    UNROLLED for (int j = 0; j < nv; j++) {
      UNROLLED for (int x = 1; x < turns; x++) sums[0][i][j] += sums[x][i][j];
      store(o + i * D + j * W, sums[0][i][j]);
    }
}

static void weigh_parts(int64_t m, int64_t D, const float *score, const Part *parts, int64_t count, float *o) {
  if (!count) return;
  int64_t d = 0;
#define TILE_OF(m, i) value_tile(m, m > 4 ? 2 : 4, D, score + (i) * SCORES, parts, count, d, o + (i) * D + d)
  if (m < 8)
    for (; d + 4 * W <= D; d += 4 * W) BY_QUERIES(m, TILE_OF)
#undef TILE_OF
#define TILE_OF(m, i) value_tile(m, 2, D, score + (i) * SCORES, parts, count, d, o + (i) * D + d)
  for (; d + 2 * W <= D; d += 2 * W) BY_QUERIES(m, TILE_OF)
#undef TILE_OF
#define TILE_OF(m, i) value_tile(m, 1, D, score + (i) * SCORES, parts, count, d, o + (i) * D + d)
  if (d < D) BY_QUERIES(m, TILE_OF)
#undef TILE_OF
}

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

/* The parts of pages, the first of which begins at ``column``, that lie in a span. */
static inline int64_t cut(const Attention *a, int64_t head, const int32_t *numbers, int64_t column, Span span,
                          Part *parts) {
  int64_t count = 0;
  for (int64_t at = span.from / PAGE * PAGE; at < span.to; at += PAGE) {
    const float *page = page_of(a->pages, numbers[(at - column) / PAGE], a->layer) + head * a->D * PAGE * 2;
    parts[count++] = (Part){page, greatest(span.from - at, 0), least(span.to - at, PAGE), at};
  }
  return count;
}

/* n rows from ``first`` on, which share a prompt, and the queries of one of their key-value heads: o, not yet divided
   by l. A slot is a page's place among those that any row sees: first the prompt's, and then each row's own. */
static void attend_rows(const Attention *a, int64_t head, int64_t first, int64_t n, Queries x) {
  int64_t group = a->H / a->K, D = a->D, s = a->sequence[first], prompt = a->prompt_length[s];
  int64_t begin[n], total[n]; /* the positions that a row sees */
  Span shared = {prompt, 0}, own = {INT64_MAX, 0};
  for (int64_t r = 0; r < n; r++) {
    total[r] = a->position[first + r] + 1;
    begin[r] = a->window > 0 ? greatest(total[r] - a->window, 0) : 0;
    shared = (Span){least(shared.from, begin[r]), greatest(shared.to, least(total[r], prompt))};
    own = (Span){least(own.from, greatest(begin[r] - prompt, 0)), greatest(own.to, total[r] - prompt)};
  }
  int64_t skipped = least(shared.from / PAGE, (shared.to + PAGE - 1) / PAGE), own_skipped = own.from / PAGE;
  int64_t own_slot = (shared.to + PAGE - 1) / PAGE - skipped;
  int64_t slots = own_slot + greatest((own.to + PAGE - 1) / PAGE - own_skipped, 0);
  for (int64_t slot = 0; slot < slots; slot += SLOTS) {
    /* Positions become columns. */
    int64_t split = least(greatest(own_slot - slot, 0), SLOTS) * PAGE, end = least(slots - slot, SLOTS) * PAGE;
    int64_t back = (skipped + slot) * PAGE, own_back = (own_skipped + slot - own_slot) * PAGE + prompt;
    Part parts[SLOTS + n * SLOTS], *own_parts[n];
    Span seen[n][2], wide = {split, 0};
    int64_t count, own_count[n];
    for (int64_t r = 0; r < n; r++) {
      seen[r][0] = (Span){greatest(begin[r] - back, 0), least(least(total[r], prompt) - back, split)};
      seen[r][1] = (Span){greatest(greatest(begin[r], prompt) - own_back, split), least(total[r] - own_back, end)};
      wide = (Span){least(wide.from, seen[r][0].from), greatest(wide.to, seen[r][0].to)};
    }
    wide.from = wide.from / W * W;
    count = cut(a, head, a->table + s * a->table_width + skipped + slot, 0, wide, parts);
    Part *last = parts + count, *next = parts;
    for (int64_t r = 0; r < n; r++) {
      int64_t sequence = a->sequence[first + r];
      const int32_t *numbers = a->table + sequence * a->table_width + a->prompt_pages[sequence];
      numbers += own_skipped + slot + split / PAGE - own_slot;
      own_parts[r] = last;
      last += own_count[r] = cut(a, head, numbers, split, seen[r][1], last);
    }
    if (last > parts) fetch(parts, D);
    for (int64_t p = 0; p < count; p++) {
      next += next + 1 < last;
      score_part(n * group, D, x.query, parts + p, next, x.score);
    }
    for (int64_t r = 0; r < n; r++)
      for (int64_t p = 0; p < own_count[r]; p++) {
        next += next + 1 < last;
        score_part(group, D, x.query + r * group * D, own_parts[r] + p, next, x.score + r * group * SCORES);
      }
    for (int64_t i = 0; i < n * group; i++)
      soften(x.score + i * SCORES, wide, seen[i / group], a->cap, x.m + i, x.l + i, x.o + i * D, D);
    weigh_parts(n * group, D, x.score, parts, count, x.o);
    for (int64_t r = 0; r < n; r++)
      weigh_parts(group, D, x.score + r * group * SCORES, own_parts[r], own_count[r], x.o + r * group * D);
  }
}

/* Where runs of rows that share a prompt begin; their number. No run is so long that a thread would have none. */
static int64_t runs(const Attention *a, int32_t *bounds) {
  int64_t most = a->rows * a->K / (2 * omp_get_max_threads()), count = 0;
  most = least(most, QUERIES / (a->H / a->K));
  for (int64_t row = 0; row < a->rows; row++) {
    int64_t s = a->sequence[row], before = row ? a->sequence[row - 1] : s;
    if (!row || a->table[s * a->table_width] != a->table[before * a->table_width] || row - bounds[count - 1] >= most)
      bounds[count++] = (int32_t)row;
  }
  bounds[count] = (int32_t)a->rows;
  return count;
}
