/* Vectors of sixteen floats in the compiler's own types: it makes AVX-512, AVX2 or NEON of the same lines. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#define omp_get_num_threads() 1
#define omp_get_thread_num() 0
#endif

#define W 16
typedef float vec __attribute__((vector_size(64)));
typedef float vec_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64)));

static inline vec load(const float *p) { return *(const vec_any *)p; }
static inline void store(float *p, vec x) { *(vec_any *)p = x; }
static inline vec all(float x) { return x - (vec){0}; }

/* Loads the last n <= 16 floats of a row; the lanes beyond them hold ``fill``. */
static inline vec load_end(const float *p, int64_t n, float fill) {
  vec x = all(fill);
  memcpy(&x, p, (size_t)n * sizeof(float));
  return x;
}

/* Vectors of the processor's own width, for the sums of a tile: GCC keeps wider ones in memory. */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif
typedef float part __attribute__((vector_size(4 * LANES)));
typedef float part_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline part load_part(const float *p) { return *(const part_any *)p; }
static inline void store_part(float *p, part x) { *(part_any *)p = x; }

/* Selects, lane by lane, a where the comparison holds, else b. */
static inline vec pick(ints holds, vec a, vec b) {
  ints x, y;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  x = (holds & x) | (~holds & y);
  memcpy(&a, &x, sizeof a);
  return a;
}

/* Returns, lane by lane, a where it is above (below) b; else b, also where one of them is NaN. */
static inline vec above(vec a, vec b) {
#ifdef __AVX512F__
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return pick(a > b, a, b);
#endif
}

static inline vec below(vec a, vec b) {
#ifdef __AVX512F__
  return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return pick(a < b, a, b);
#endif
}

/* Reduce a vector to its sum and its largest number, by halves: the order of additions is fixed. */
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

static inline float sum(vec x) {
  eight a[2];
  memcpy(a, &x, sizeof a);
  a[0] += a[1];
  four b[2];
  memcpy(b, a, sizeof b);
  b[0] += b[1];
  return (b[0][0] + b[0][2]) + (b[0][1] + b[0][3]);
}

static inline float largest(vec x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float top[W];
  memcpy(top, &x, sizeof top);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) top[i] = top[i + half] > top[i] ? top[i + half] : top[i];
  return top[0];
#endif
}

/* exp by 2^n p(r), n = round(x / ln 2), |r| <= ln 2 / 2: 1e-7 relative. NaN stays NaN; below -87 the result is tiny. */
static inline vec vexp(vec x) {
  x = below(all(88.0f), above(all(-87.0f), x));
  vec magic = all(12582912.0f); /* 1.5 * 2^23: adding and subtracting it rounds to a whole number */
  vec n = (x * 1.44269504088896341f + magic) - magic;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  ints bits = (__builtin_convertvector(n, ints) + 127) << 23;
  vec scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
#endif
}

static inline vec vtanh(vec x) { return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f); }

/* bfloat16 is the upper half of a float; rounding is to the nearest, ties to even. */
typedef uint16_t bf16;
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(64)));

static inline vec load_bf16(const bf16 *p) {
  words w = __builtin_convertvector(*(const halves *)p, words) << 16;
  vec x;
  memcpy(&x, &w, sizeof x);
  return x;
}

#ifdef __AVX512BF16__
static inline void store_bf16(bf16 *p, vec x) {
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  memcpy(p, &rounded, sizeof rounded);
}
#else
static inline void store_bf16(bf16 *p, vec x) {
  words w;
  memcpy(&w, &x, sizeof w);
  words rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
  words is_nan = (words)(x != x);
  rounded = (is_nan & 0x7fc0) | (~is_nan & rounded);
  *(halves *)p = __builtin_convertvector(rounded, halves);
}
#endif
