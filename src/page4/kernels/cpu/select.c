/* The best blocks of each row, in the total order: score descending, then block id ascending.

   Scores are bound by the reads of the pooled keys. The k-th best score is found digit by digit (11 bits at a time), so
   no sort depends on the order in which equal scores are met; ids come out ascending in one last pass. */
#include <stdlib.h>

#include "page4_cpu.h"

#define DIGIT_BITS 11
#define DIGITS (1 << DIGIT_BITS)

/* Scores of blocks 0 .. count - 1; returns 0 when one of them is NaN. */
static int score(const float *q, int64_t heads, int64_t dim, const float *pooled, int64_t page_stride, int64_t per_page,
                 const int32_t *pages, int64_t count, float *out) {
    float root = sqrtf((float)dim);
    int good = 1;
    for (int64_t b = 0; b < count; b++) {
        const float *key = pooled + pages[b / per_page] * page_stride + b % per_page * dim;
        float total = 0;
        for (int64_t h = 0; h < heads; h++) {
            float product = dot(q + h * dim, key, dim);
            total += product < 0 ? 0 : product; /* a NaN passes */
        }
        out[b] = total / root;
        good &= out[b] == out[b];
    }
    return good;
}

/* An order of unsigned numbers that is that of the scores; -0.0 as +0.0. */
INLINE uint32_t sortable(float x) {
    uint32_t bits;
    if (x == 0) x = 0;
    memcpy(&bits, &x, sizeof bits);
    if (bits == 0x80000000u) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The k-th largest of n keys, and how many are above it. */
static uint32_t kth_largest(const float *scores, int64_t n, int64_t k, int64_t *above) {
    uint32_t prefix = 0, mask = 0;
    *above = 0;
    for (int shift = 32 - DIGIT_BITS; mask != 0xFFFFFFFFu; shift = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0) {
        int32_t counts[DIGITS] = {0};
        int bits = shift ? DIGIT_BITS : 32 - 2 * DIGIT_BITS;
        uint32_t digit_mask = (1u << bits) - 1;
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = sortable(scores[i]);
            if ((key & mask) == prefix) counts[key >> shift & digit_mask]++;
        }
        uint32_t digit = digit_mask;
        while (*above + counts[digit] < k) *above += counts[digit--];
        prefix |= digit << shift;
        mask |= digit_mask << shift;
    }
    return prefix;
}

static void best(const float *scores, int64_t n, int64_t k, int32_t *ids) {
    int64_t above, found = 0;
    uint32_t kth = kth_largest(scores, n, k, &above);
    int64_t equal = k - above;
    for (int64_t b = 0; b < n && found < k; b++) {
        uint32_t key = sortable(scores[b]);
        if (key > kth || (key == kth && equal-- > 0)) ids[found++] = (int32_t)b;
    }
}

/* index_q: [rows, I, E]; visible: [rows], complete blocks of each row; requests: [rows]; ids: [rows, top_k], -1 after
   the last. Returns the first row with a NaN score, or -1. */
EXPORT int64_t page4_select(const float *index_q, int64_t rows, int64_t heads, int64_t dim, const float *pooled,
                            int64_t page_stride, int64_t per_page, const table_t *table, const int64_t *requests,
                            const int64_t *visible, int64_t top_k, int32_t *ids) {
    int64_t bad = rows, most = 1;
    for (int64_t r = 0; r < rows; r++) most = visible[r] > most ? visible[r] : most;
#pragma omp parallel if (rows > 1) reduction(min : bad)
    {
        float *scores = malloc(most * sizeof *scores);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            int32_t *mine = ids + r * top_k;
            int64_t count = visible[r] < top_k ? visible[r] : top_k;
            for (int64_t i = 0; i < top_k; i++) mine[i] = i < count ? (int32_t)i : -1;
            if (visible[r] <= top_k) continue;
            const int32_t *pages = table->pages + requests[r] * table->row_stride;
            if (!scores ||
                !score(index_q + r * heads * dim, heads, dim, pooled, page_stride, per_page, pages, visible[r], scores))
                bad = r < bad ? r : bad;
            else best(scores, visible[r], top_k, mine);
        }
        free(scores);
    }
    return bad == rows ? -1 : bad;
}

/* The selections of earlier positions with the blocks completed since: ids [rows, width + 2]. */
EXPORT void page4_extend(const int32_t *old_ids, const int32_t *old_counts, const int64_t *selected_at,
                         const int64_t *positions, int64_t rows, int64_t width, int32_t *ids, int32_t *counts) {
    for (int64_t r = 0; r < rows; r++) {
        int32_t *mine = ids + r * (width + 2);
        memcpy(mine, old_ids + r * width, width * sizeof *mine);
        mine[width] = mine[width + 1] = -1;
        counts[r] = old_counts[r];
        int64_t block = (selected_at[r] + 1) / BLOCK_TOKENS, end = (positions[r] + 1) / BLOCK_TOKENS;
        for (; block < end && counts[r] < width + 2; block++) mine[counts[r]++] = (int32_t)block;
    }
}
