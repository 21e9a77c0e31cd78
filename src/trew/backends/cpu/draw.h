/* Draws a token from each row of logits: see sampling.py. rollout/torch_engine/sampler.py defines a draw. */
#pragma once
#include "vectors.h"

#define BLOCK 256 /* vocabulary entries per block of the two-level search */

/* Loads sixteen entries of a row of n, starting at ``at``; -inf beyond its end. */
static inline vec entries(const float *row, int64_t at, int64_t n) {
  return n - at < W ? load_end(row + at, n - at, -INFINITY) : load(row + at);
}

/* Computes exp(x), as 0 where it would be below the smallest normal number; NaN stays NaN. */
static inline vec weight(vec x) { return pick(x < all(-87.0f), all(0.0f), vexp(x)); }

/* Returns the largest entry of a row; NaN if one is NaN. */
static inline float largest_entry(const float *row, int64_t n) {
  vec most = all(-INFINITY);
  for (int64_t i = 0; i < n; i += W) {
    vec x = entries(row, i, n);
    most = pick(x > most, x, pick(x == x, most, x));
  }
  float top = largest(most);
  for (int j = 0; j < W; j++) top = most[j] == most[j] ? top : most[j];
  return top;
}

/* Sums over a row, with x = logits - largest: z of e = exp(x), moment of e x, and total of exp(x / temperature), whose
   running sum after each block is kept too. Temperature 0 needs no third sum. */
typedef struct { double z, moment, total; } Sums;

static inline Sums add_up(const float *row, int64_t n, float top, float temperature, double *running) {
  Sums all_of = {0};
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t end = at + BLOCK < n ? at + BLOCK : n;
    vec z = {0}, moment = {0}, total = {0};
    for (int64_t i = at; i < end; i += W) {
      vec x = entries(row, i, n) - top, e = weight(x);
      z += e;
      moment += pick(x < all(-87.0f), all(0.0f), e * x); /* 0 times -inf of a masked token would be NaN */
      if (temperature != 0.0f && temperature != 1.0f) total += weight(x / temperature);
    }
    all_of.z += sum(z);
    all_of.moment += sum(moment);
    all_of.total += sum(temperature == 1.0f ? z : total);
    running[at / BLOCK] = all_of.total;
  }
  return all_of;
}

/* Finds the first entry of a running sum above target; stops where the sum is complete, so that rounding never selects
   an entry of weight 0. */
static inline int64_t first_above(const double *running, int64_t n, double target) {
  int64_t i = 0;
  while (running[i] <= target && running[i] < running[n - 1]) i++;
  return i;
}

/* Finds the first entry at which the running sum of the weights exp((x - top) / temperature) exceeds ``uniform`` times
   their total. */
static inline int64_t invert(const float *row, int64_t n, float top, float temperature, const double *running,
                             double uniform) {
  int64_t blocks = (n + BLOCK - 1) / BLOCK;
  double target = uniform * running[blocks - 1];
  int64_t block = first_above(running, blocks, target), at = block * BLOCK;
  int64_t count = n - at < BLOCK ? n - at : BLOCK;
  float e[BLOCK];
  double inside[BLOCK], so_far = 0;
  for (int64_t i = 0; i < count; i += W) store(e + i, weight((entries(row, at + i, n) - top) / temperature));
  for (int64_t i = 0; i < count; i++) inside[i] = so_far += e[i];
  return at + first_above(inside, count, target - (block ? running[block - 1] : 0));
}

/* Computes splitmix64 of key + position x golden ratio as numbers in [0, 1) of 53 random bits: see sampler.py. */
void uniforms(const int64_t *keys, const int64_t *positions, double *out, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    uint64_t z = (uint64_t)keys[i] + ((uint64_t)positions[i] + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    out[i] = (double)((z ^ z >> 31) >> 11) * 0x1p-53;
  }
}

/* Draws one token per row of logits (rows, n). floats (3, rows): its log-prob at temperature 1, its log-prob under the
   distribution drawn from, and the entropy. running (rows, blocks) is scratch memory. */
void draw(const float *logits, const double *uniform, float temperature, int64_t *tokens, float *floats, uint8_t *finite,
          double *running, int64_t rows, int64_t n) {
  int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (rows * n > 8192)
  for (int64_t r = 0; r < rows; r++) {
    const float *row = logits + r * n;
    float top = largest_entry(row, n);
    Sums sums = add_up(row, n, top, temperature, running + r * blocks);
    finite[r] = isfinite(sums.z) != 0;
    int64_t token = 0;
    if (finite[r] && temperature != 0.0f)
      token = invert(row, n, top, temperature, running + r * blocks, uniform[r]);
    else if (finite[r])
      while (row[token] != top) token++;
    double x = (double)row[token] - top, log_z = log(sums.z), entropy = log_z - sums.moment / sums.z;
    tokens[r] = token;
    floats[r] = (float)(x - log_z);
    floats[rows + r] = temperature == 0.0f ? 0.0f : (float)(x / temperature - log(sums.total));
    floats[2 * rows + r] = (float)(entropy < 0 ? 0 : entropy);
  }
}
