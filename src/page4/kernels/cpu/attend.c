/* Attention of each row over its own blocks and tail, read straight from the pages.

       q [G, D] --+-- K row of a token --> logits [G, W] --softmax--> p [G, W] --+-- V row --> out [G, D]
   for the G = H / J query heads of one KV head. Only attended tokens are touched, so no other byte can matter. Bound by
   the reads of K and V (2 D elements a token for all G heads) with few heads, by the products with many. */
#include <stdlib.h>

#include "page4_cpu.h"

#define HEADS_AT_ONCE 6

INLINE vec element(const void *data, int64_t at, const int is_e4m3) {
    return is_e4m3 ? decode_e4m3((const uint8_t *)data + at) : load((const float *)data + at);
}

/* logits[h][token] = scale * q[h] . K for up to 6 heads. */
INLINE void logits_of(const int heads, const int is_e4m3, const float *q, int64_t dim, const void *k, const int64_t *at,
                      int64_t tokens, float scale, float *logits, int64_t stride) {
    for (int64_t t = 0; t < tokens; t++) {
        vec acc[HEADS_AT_ONCE];
    UNROLL for (int h = 0; h < heads; h++) acc[h] = fill(0);
        for (int64_t i = 0; i < dim; i += LANES) {
            vec x = element(k, at[t] + i, is_e4m3);
            UNROLL for (int h = 0; h < heads; h++) acc[h] += load(q + h * dim + i) * x;
        }
        UNROLL for (int h = 0; h < heads; h++) logits[h * stride + t] = sum_lanes(acc[h]) * scale;
    }
}

/* out[h] = sum over tokens of weights[h][token] * V, 4 vectors of channels at a time. */
INLINE void values_of(const int heads, const int tiles, const int is_e4m3, const float *weights, int64_t stride,
                      const void *v, const int64_t *at, int64_t tokens, float *out, int64_t dim) {
    vec acc[HEADS_AT_ONCE][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < tiles; c++) acc[h][c] = fill(0);
    for (int64_t t = 0; t < tokens; t++)
        UNROLL for (int c = 0; c < tiles; c++) {
            vec x = element(v, at[t] + c * LANES, is_e4m3);
            UNROLL for (int h = 0; h < heads; h++) acc[h][c] += weights[h * stride + t] * x;
        }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < tiles; c++) store(out + h * dim + c * LANES, acc[h][c]);
}

/* Softmax in place over `tokens` logits, zeros up to the stride; returns the log of the sum of exponentials. */
static float softmax(float *x, int64_t tokens, int64_t stride) {
    float top = -INFINITY, total = 0;
    for (int64_t t = 0; t < tokens; t++) top = x[t] > top || x[t] != x[t] ? x[t] : top;
    for (int64_t t = tokens; t < stride; t++) x[t] = -INFINITY;
    vec sum = fill(0);
    for (int64_t t = 0; t < stride; t += LANES) {
        vec y = exp_vec(load(x + t) - top);
        store(x + t, y);
        sum += y;
    }
    total = sum_lanes(sum);
    for (int64_t t = 0; t < stride; t += LANES) store(x + t, load(x + t) / total);
    return top + logf(total);
}

typedef struct { const float *data; int64_t row_stride, head_stride; } gate_t;

typedef struct {
    int64_t heads, kv_heads, dim, width; /* width: columns of ids */
    float logit_scale, v_scale;
} attend_t;

INLINE void attend_heads(const int heads, const int is_e4m3, const attend_t *w, const cache_t *cache, const float *q,
                         const int64_t *k_at, const int64_t *v_at, int64_t tokens, float *logits, int64_t stride,
                         float *out, float *lse) {
    logits_of(heads, is_e4m3, q, w->dim, cache->k.data, k_at, tokens, w->logit_scale, logits, stride);
    for (int h = 0; h < heads; h++) {
        float sum = softmax(logits + h * stride, tokens, stride);
        if (lse) lse[h] = sum;
    }
    const uint8_t *v = cache->v.data;
    for (int64_t c = 0; c < w->dim; c += 4 * LANES) {
        const void *from = v + c * (is_e4m3 ? 1 : sizeof(float));
        switch ((w->dim - c) / LANES) {
        case 1: values_of(heads, 1, is_e4m3, logits, stride, from, v_at, tokens, out + c, w->dim); break;
        case 2: values_of(heads, 2, is_e4m3, logits, stride, from, v_at, tokens, out + c, w->dim); break;
        case 3: values_of(heads, 3, is_e4m3, logits, stride, from, v_at, tokens, out + c, w->dim); break;
        default: values_of(heads, 4, is_e4m3, logits, stride, from, v_at, tokens, out + c, w->dim);
        }
    }
}

#define HEADS_CASE(n) case n: attend_heads(n, is_e4m3, w, cache, q, k_at, v_at, tokens, logits, stride, out, lse); break
INLINE void attend_some(const int is_e4m3, int64_t heads, const attend_t *w, const cache_t *cache, const float *q,
                        const int64_t *k_at, const int64_t *v_at, int64_t tokens, float *logits, int64_t stride,
                        float *out, float *lse) {
    switch (heads) {
        HEADS_CASE(1);
        HEADS_CASE(2);
        HEADS_CASE(3);
        HEADS_CASE(4);
        HEADS_CASE(5);
        HEADS_CASE(6);
    }
}

/* Where the attended tokens of a row begin in K and V, in elements: its blocks, then its tail. Returns how many. */
static int64_t gather(const cache_t *cache, const int32_t *ids, int64_t width, int64_t position, const int32_t *pages,
                      int64_t kv_head, int64_t *k_at, int64_t *v_at) {
    int64_t tokens = 0, seen = position + 1;
    for (int64_t column = 0; column <= width; column++) {
        int64_t first, count = BLOCK_TOKENS;
        if (column < width) {
            if (ids[column] < 0) continue;
            first = (int64_t)ids[column] * BLOCK_TOKENS;
        } else {
            count = seen % BLOCK_TOKENS;
            first = seen - count;
        }
        if (!count) continue;
        int64_t page = pages[first / cache->page_tokens], offset = first % cache->page_tokens;
        for (int64_t t = offset; t < offset + count; t++, tokens++) {
            k_at[tokens] = page * cache->k.page_stride + t * cache->k.token_stride + kv_head * cache->k.head_stride;
            v_at[tokens] = page * cache->v.page_stride + t * cache->v.token_stride + kv_head * cache->v.head_stride;
        }
    }
    return tokens;
}

static void finish(const attend_t *w, const gate_t *gate, int64_t row, int64_t head, float *out) {
    const float *g = gate ? gate->data + row * gate->row_stride + head * gate->head_stride : NULL;
    for (int64_t i = 0; i < w->dim; i += LANES) {
        vec x = load(out + i) * w->v_scale;
        store(out + i, g ? x * sigmoid_vec(load(g + i)) : x);
    }
}

/* q: [rows, H, D]; ids: [rows, width] canonical, -1 after the last; positions, requests: [rows], position -1 for
   padding; gate: NULL or a strided [rows, H, D]; out: [rows, H, D]; lse: [rows, H] or NULL. Rows without tokens give
   zeros and -inf. Returns 0, or 1 when there was no memory. */
EXPORT int64_t page4_attend(const attend_t *w, const cache_t *cache, const float *q, int64_t rows, const int32_t *ids,
                            const int64_t *positions, const int64_t *requests, const table_t *table, const gate_t *gate,
                            float *out, float *lse) {
    int64_t group = w->heads / w->kv_heads, failed = 0, most = BLOCK_TOKENS * w->width + BLOCK_TOKENS;
    int64_t stride = (most + LANES - 1) / LANES * LANES;
#pragma omp parallel if (rows * w->kv_heads > 1) reduction(max : failed)
    {
        float *logits = malloc(stride * (HEADS_AT_ONCE * sizeof(float) + 2 * sizeof(int64_t)));
        if (!logits) failed = 1;
        int64_t *k_at = (int64_t *)(logits + HEADS_AT_ONCE * stride), *v_at = k_at + stride;
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < rows * w->kv_heads; unit++) {
            int64_t r = unit / w->kv_heads, kv_head = unit % w->kv_heads;
            if (!logits) continue;
            const int32_t *pages = table->pages + requests[r] * table->row_stride;
            int64_t tokens = positions[r] < 0 ? 0 : gather(cache, ids + r * w->width, w->width, positions[r], pages, kv_head, k_at, v_at);
            for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h += HEADS_AT_ONCE) {
                int64_t left = (kv_head + 1) * group - h, heads = left < HEADS_AT_ONCE ? left : HEADS_AT_ONCE;
                float *to = out + (r * w->heads + h) * w->dim, *sums = lse ? lse + r * w->heads + h : NULL;
                const float *from = q + (r * w->heads + h) * w->dim;
                if (!tokens) {
                    memset(to, 0, heads * w->dim * sizeof *to);
                    for (int64_t i = 0; sums && i < heads; i++) sums[i] = -INFINITY;
                    continue;
                }
                int64_t padded = (tokens + LANES - 1) / LANES * LANES;
                if (cache->is_e4m3) attend_some(1, heads, w, cache, from, k_at, v_at, tokens, logits, padded, to, sums);
                else attend_some(0, heads, w, cache, from, k_at, v_at, tokens, logits, padded, to, sums);
                for (int64_t i = 0; i < heads; i++) finish(w, gate, r, h + i, to + i * w->dim);
            }
        }
        free(logits);
    }
    return failed;
}
