/* Shared by the kernels of this folder: fp32 vectors of 16 lanes, their exp, and what a step's rows look like.

   The compiler turns a 16-lane vector into one AVX-512 register, two AVX ones or four NEON ones. Every sum has one
   fixed order, so a row's result does not depend on the number of threads or on the rows beside it. */
#ifndef PAGE4_CPU_H
#define PAGE4_CPU_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK_TOKENS 4
#define INLINE static inline __attribute__((always_inline))
/* Before a loop whose bounds are known once it is inlined, so that its arrays become registers. */
#define UNROLL _Pragma("GCC unroll 16")
#define EXPORT __attribute__((visibility("default")))

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));

INLINE vec load(const float *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(float *p, vec x) { memcpy(p, &x, sizeof x); }
INLINE vec fill(float x) { return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* Lanes added pairwise: 8 + 8, 4 + 4, 2 + 2, 1 + 1. */
INLINE float sum_lanes(vec x) {
    float y[LANES];
    store(y, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) y[i] += y[i + half];
    return y[0];
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    vec s0 = fill(0), s1 = fill(0);
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        s0 += load(a + i) * load(b + i);
        s1 += load(a + i + LANES) * load(b + i + LANES);
    }
    for (; i < n; i += LANES) s0 += load(a + i) * load(b + i);
    return sum_lanes(s0 + s1);
}

/* exp to about 1 ulp: x = n ln2 + r, a polynomial of degree 6 in r (Cephes' coefficients), 2^n by the exponent bits. */
INLINE vec exp_vec(vec x) {
    const vec magic = fill(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec clamped = choose(x > fill(88.7f), fill(88.7f), choose(x < fill(-87.3f), fill(-87.3f), x));
    vec n = (clamped * 1.44269504088896341f + magic) - magic;
    vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    vec p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = __builtin_convertvector(n, ivec) << 23;
    vec y = (vec)((ivec)p + power);
    y = choose(x < fill(-87.3f), fill(0.0f), y);
    y = choose(x > fill(88.7f), fill(INFINITY), y);
    return choose(x == x, y, x);
}

INLINE vec sigmoid_vec(vec x) { return 1.0f / (1.0f + exp_vec(-x)); }
INLINE vec silu_vec(vec x) { return x / (1.0f + exp_vec(-x)); }
INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* 1 / sqrt(sum(x^2) * scale + eps) over n channels. */
INLINE float inverse_norm(const float *x, int64_t n, float scale, float eps) {
    return 1.0f / sqrtf(dot(x, x, n) * scale + eps);
}

/* E4M3 to fp32: the exponent and mantissa bits of a byte, seen as an fp32, are the value over 2^120. */
INLINE vec decode_e4m3(const uint8_t *p) {
    bytes16 raw;
    memcpy(&raw, p, sizeof raw);
    ivec byte = __builtin_convertvector(raw, ivec), magnitude = byte & 0x7F;
    ivec normal = (magnitude << 20) + (120 << 23);
    vec small = __builtin_convertvector(magnitude, vec) * 0x1p-9f; /* exponent field 0: mantissa in steps of 2^-9 */
    vec x = choose(magnitude < 8, small, (vec)normal);
    x = choose(magnitude == 0x7F, fill(NAN), x);
    return (vec)((ivec)x | ((byte & 0x80) << 24));
}

/* One request's rows in a step: the first of them, how many, the state slot, the position of the first. */
typedef struct {
    int64_t first_row, rows, slot, first_position;
} span_t;

/* A view of the pages of one layer, K or V: [page][token][head][dim], strides in elements, dim contiguous. */
typedef struct {
    void *data;
    int64_t page_stride, token_stride, head_stride;
} side_t;

typedef struct {
    side_t k, v;
    int64_t page_tokens, is_e4m3;
    float k_scale, v_scale; /* 1 unless is_e4m3 */
} cache_t;

/* The pages of each request, a row each; rows are row_stride entries apart. */
typedef struct {
    const int32_t *pages;
    int64_t row_stride;
} table_t;

#endif
