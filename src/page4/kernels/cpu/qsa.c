/* What a QSA layer does between its input projection and its selection: norms, RoPE, the writes to the cache.

   Bound by nothing but the number of passes: about 10 KB a row. */
#include "page4_cpu.h"

#define RING_TOKENS 16

typedef struct {
    const float *q_norm, *k_norm, *index_q_norm, *index_k_norm; /* 1 + w */
    int64_t heads, kv_heads, dim, index_heads, index_dim, rotary;
    /* A projected row: per head q | gate [H * 2D], k [J * D], v [J * D], index q and key [(I + 1) * E]. */
    int64_t row_stride;
    float eps;
} qsa_t;

/* RMSNorm, then RoPE of the first `rotary` channels; the first half of `sin` is negated. */
static void norm_and_turn(const float *x, const float *norm, int64_t dim, int64_t rotary, float eps, const float *cos,
                          const float *sin, float *out) {
    vec inverse = fill(inverse_norm(x, dim, 1.0f / dim, eps));
    for (int64_t i = 0; i < dim; i += LANES) store(out + i, load(x + i) * inverse * load(norm + i));
    float turned[rotary];
    for (int64_t i = 0; i < rotary; i++) turned[i] = out[i] * cos[i] + out[(i + rotary / 2) % rotary] * sin[i];
    memcpy(out, turned, sizeof turned);
}

/* cos, sin: [rows, rotary]; q: [rows, H, D], k: [rows, J, D], index_q: [rows, I, E] or NULL where nothing is scored. */
EXPORT void page4_qsa_queries(const qsa_t *w, const float *projected, int64_t rows, const float *cos, const float *sin,
                              float *q, float *k, float *index_q) {
#pragma omp parallel for if (rows > 4) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = projected + r * w->row_stride, *c = cos + r * w->rotary, *s = sin + r * w->rotary;
        for (int64_t h = 0; h < w->heads; h++, x += 2 * w->dim)
            norm_and_turn(x, w->q_norm, w->dim, w->rotary, w->eps, c, s, q + (r * w->heads + h) * w->dim);
        for (int64_t j = 0; j < w->kv_heads; j++, x += w->dim)
            norm_and_turn(x, w->k_norm, w->dim, w->rotary, w->eps, c, s, k + (r * w->kv_heads + j) * w->dim);
        x += w->kv_heads * w->dim;
        for (int64_t i = 0; index_q && i < w->index_heads; i++, x += w->index_dim)
            norm_and_turn(x, w->index_q_norm, w->index_dim, w->rotary, w->eps, c, s,
                          index_q + (r * w->index_heads + i) * w->index_dim);
    }
}

/* Round to nearest even, saturating at 448; the sign of a NaN stays. Exact integer arithmetic on the bits of x. */
INLINE uint8_t encode_e4m3(float x) {
    uint32_t bits, magnitude;
    memcpy(&bits, &x, sizeof bits);
    uint8_t sign = bits >> 24 & 0x80;
    magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return sign | 0x7F;
    if (magnitude >= 0x43E00000) return sign | 0x7E;
    if (magnitude >= 0x3C800000) { /* 2^-6, the smallest normal value */
        magnitude += 0x7FFFF + (magnitude >> 20 & 1);
        return sign | (uint8_t)((magnitude >> 20) - (120 << 3));
    }
    return sign | (uint8_t)lrintf(fabsf(x) * 512.0f);
}

typedef struct {
    int64_t clipped, nonfinite;
} counts_t;

static counts_t put(const cache_t *cache, const side_t *side, float scale, int64_t page, int64_t offset, int64_t head,
                    const float *x, int64_t dim) {
    int64_t at = page * side->page_stride + offset * side->token_stride + head * side->head_stride;
    counts_t counts = {0, 0};
    if (!cache->is_e4m3) {
        memcpy((float *)side->data + at, x, dim * sizeof *x);
        return counts;
    }
    for (int64_t i = 0; i < dim; i++) {
        float y = x[i] / scale;
        counts.nonfinite += !isfinite(x[i]);
        counts.clipped += isfinite(x[i]) && fabsf(y) > 448.0f;
        ((uint8_t *)side->data)[at + i] = encode_e4m3(y);
    }
    return counts;
}

/* K and V of each row to its place. pages, offsets: [rows]; k: [rows, J, D]; counters: [2, 2] as LayerKV.counters;
   nonfinite_rows: [rows] bytes, set to 1 where K or V is not finite (both only for E4M3). Page 0 is never written. */
EXPORT void page4_append_kv(const qsa_t *w, const cache_t *cache, const float *projected, const float *k, int64_t rows,
                            const int64_t *pages, const int64_t *offsets, int64_t *counters, uint8_t *nonfinite_rows) {
    int64_t v_offset = (2 * w->heads + w->kv_heads) * w->dim;
    for (int64_t r = 0; r < rows; r++) {
        if (nonfinite_rows) nonfinite_rows[r] = 0;
        if (pages[r] <= 0) continue;
        for (int64_t j = 0; j < w->kv_heads; j++) {
            const float *v = projected + r * w->row_stride + v_offset + j * w->dim;
            counts_t of_k = put(cache, &cache->k, cache->k_scale, pages[r], offsets[r], j,
                                k + (r * w->kv_heads + j) * w->dim, w->dim);
            counts_t of_v = put(cache, &cache->v, cache->v_scale, pages[r], offsets[r], j, v, w->dim);
            if (!cache->is_e4m3) continue;
            counters[0] += of_k.clipped, counters[1] += of_k.nonfinite;
            counters[2] += of_v.clipped, counters[3] += of_v.nonfinite;
            if (of_k.nonfinite || of_v.nonfinite) nonfinite_rows[r] = 1;
        }
    }
}

/* The key of the block whose last token is row `last` of a span: mean of 4 raw keys, norm, RoPE at its first token. */
static void pool(const qsa_t *w, const float *keys, const float *ring, span_t span, int64_t last, const float *cos,
                 const float *sin, float *out) {
    float mean[w->index_dim];
    for (int64_t i = 0; i < w->index_dim; i += LANES) {
        vec total = fill(0);
        for (int64_t t = last - 3; t <= last; t++) {
            int64_t place = (span.first_position + t) % RING_TOKENS;
            total += load(t >= 0 ? keys + t * w->row_stride + i : ring + place * w->index_dim + i);
        }
        store(mean + i, total * 0.25f);
    }
    norm_and_turn(mean, w->index_k_norm, w->index_dim, w->rotary, w->eps, cos, sin, out);
}

/* Raw index keys to the rings, and the key of every block that these rows complete to its page.

   spans: [n] requests and table: their pages; pooled: [P][S / 4][E] with pooled_stride floats between pages; ring:
   [slots][16][E] with ring_stride; cos, sin: [B, rotary] of the completed blocks' first tokens, in the order of
   requests and positions. Page 0 and slot 0 are never written. */
EXPORT void page4_append_index(const qsa_t *w, const float *projected, const span_t *spans, int64_t n,
                               const table_t *table, int64_t page_tokens, const float *cos, const float *sin,
                               float *pooled, int64_t pooled_stride, float *ring, int64_t ring_stride) {
    int64_t offset = (2 * w->heads + 2 * w->kv_heads) * w->dim + w->index_heads * w->index_dim, block = 0;
    for (int64_t s = 0; s < n; s++) {
        span_t span = spans[s];
        const float *keys = projected + span.first_row * w->row_stride + offset;
        float *mine = ring + span.slot * ring_stride;
        for (int64_t t = 0; t < span.rows; t++) {
            int64_t position = span.first_position + t;
            if (position % BLOCK_TOKENS != BLOCK_TOKENS - 1) continue;
            int64_t page = table->pages[s * table->row_stride + position / page_tokens];
            int64_t place = position % page_tokens / BLOCK_TOKENS;
            if (page > 0)
                pool(w, keys, mine, span, t, cos + block * w->rotary, sin + block * w->rotary,
                     pooled + page * pooled_stride + place * w->index_dim);
            block++;
        }
        for (int64_t t = span.rows > RING_TOKENS ? span.rows - RING_TOKENS : 0; span.slot > 0 && t < span.rows; t++)
            memcpy(mine + (span.first_position + t) % RING_TOKENS * w->index_dim, keys + t * w->row_stride,
                   w->index_dim * sizeof *keys);
    }
}
