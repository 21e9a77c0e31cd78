/* Attention of decoding: rows against the pages of their sequences. */
#pragma once
#define QUERIES 32 /* of rows that share a prompt, at once */

/* A softmax that sees its scores bit by bit: m = the largest so far, l = sum of exp(score - m),
   o = sum of exp(score - m) value. */
typedef struct { float *m, *l, *o; } Softmax;

/* Scores s[begin .. end) of a page become exp(score - m), those outside [from, to) 0; m, l and o go on. */
static inline void soften(float *s, int64_t begin, int64_t end, int64_t from, int64_t to, float cap, float *m, float *l,
                          float *o, int64_t D) {
  if (from >= end || to <= begin || from >= to) {
    for (int64_t block = begin; block < end; block += W) store(s + block, (vec){0});
    return;
  }
  vec most = all(*m);
  for (int64_t block = begin; block < end; block += W) {
    vec x = load(s + block);
    if (cap != 0.0f) x = cap * vtanh(x / cap);
    if (block < from || block + W > to)
      for (int64_t j = 0; j < W; j++)
        if (block + j < from || block + j >= to) x[j] = -INFINITY;
    store(s + block, x);
    most = pick(x > most, x, most);
  }
  float top = largest(most), shrink = *m == top ? 1.0f : expf(*m - top);
  vec total = {0};
  for (int64_t block = begin; block < end; block += W) {
    vec x = load(s + block), e = vexp(x - top);
    e = pick(x == all(-INFINITY), all(0.0f), e);
    store(s + block, e);
    total += e;
  }
  *m = top;
  *l = *l * shrink + sum(total);
  if (shrink != 1.0f)
    for (int64_t d = 0; d < D; d += W) store(o + d, load(o + d) * shrink);
}

/* Rows (n, group queries each) against the page of their prompt that begins at position ``at``: row r sees positions
   from begin[r] to end[r]. */
static void attend_page(const float *page, int64_t at, const float *query, int64_t n, int64_t group, int64_t D,
                        const int32_t *begin, const int32_t *end, float cap, float *m, float *l, float *o) {
  float score[QUERIES * PAGE] __attribute__((aligned(64)));
  int64_t from = PAGE, to = 0, queries = n * group;
  for (int64_t r = 0; r < n; r++) {
    if (begin[r] - at < from) from = begin[r] - at;
    if (end[r] - at > to) to = end[r] - at;
  }
  from = from < 0 ? 0 : from / W * W;
  to = to > PAGE ? PAGE : to;
  if (from >= to) return;
  for (int64_t block = from; block < to; block += W)
    multiply(queries, W, D, query, D, 1, page + block * D, W, score + block, PAGE, 0);
  for (int64_t i = 0; i < queries; i++)
    soften(score + i * PAGE, from, to, begin[i / group] - at, end[i / group] - at, cap, m + i, l + i, o + i * D, D);
  multiply(queries, D, to - from, score + from, PAGE, 1, page + D * PAGE + from * D, D, o, D, 1);
}
