/* Hyper-connections of a few rows. Bound by the reads of the low-rank matrices, which stay in a core's L2 cache.

   normed = rmsnorm(stream) * norm;  low = down . normed;  mixed = sum over streams of sigmoid(up . silu(low)) * normed */
#include "page4_cpu.h"

typedef struct {
    const float *norm;         /* [C * hidden], (1 + w) / C */
    const float *down;         /* [rank + injections, C * hidden] */
    const float *up_transposed; /* [rank, C * hidden] */
    int64_t count, hidden, rank, injections;
    float eps;
} hyper_t;

static void add_block(float *streams, const float *out, const float *injection, int64_t count, int64_t hidden) {
    for (int64_t c = 0; c < count; c++) {
        vec twice = fill(2.0f * injection[c]);
        for (int64_t i = 0; i < hidden; i += LANES)
            store(streams + c * hidden + i, load(streams + c * hidden + i) + twice * load(out + i));
    }
}

static void mix(const hyper_t *w, const float *streams, float *mixed, float *injection) {
    int64_t width = w->count * w->hidden;
    float normed[width], low[w->rank + w->injections];
    for (int64_t c = 0; c < w->count; c++) {
        const float *x = streams + c * w->hidden;
        vec inverse = fill(inverse_norm(x, w->hidden, 1.0f / w->hidden, w->eps));
        for (int64_t i = 0; i < w->hidden; i += LANES)
            store(normed + c * w->hidden + i, load(x + i) * inverse * load(w->norm + c * w->hidden + i));
    }
    for (int64_t j = 0; j < w->rank + w->injections; j++) low[j] = dot(normed, w->down + j * width, width);
    for (int64_t j = 0; j < w->rank; j++) low[j] *= sigmoid(low[j]);
    for (int64_t c = 0; c < w->injections; c++) injection[c] = sigmoid(low[w->rank + c]);
    for (int64_t i = 0; i < w->hidden; i += LANES) {
        vec total = fill(0);
        for (int64_t c = 0; c < w->count; c++) {
            int64_t at = c * w->hidden + i;
            vec weight = fill(0);
            for (int64_t j = 0; j < w->rank; j++) weight += low[j] * load(w->up_transposed + j * width + at);
            total += sigmoid_vec(weight) * load(normed + at);
        }
        store(mixed + i, total);
    }
}

/* streams: [rows, C, hidden], first increased by 2 * injection_in * block_out unless block_out is NULL;
   mixed: [rows, hidden]; injection_out: [rows, injections]. */
EXPORT void page4_hyper_enter(const hyper_t *w, float *streams, int64_t rows, const float *block_out,
                              const float *injection_in, float *mixed, float *injection_out) {
    int64_t width = w->count * w->hidden;
#pragma omp parallel for if (rows > 2) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        if (block_out)
            add_block(streams + r * width, block_out + r * w->hidden, injection_in + r * w->count, w->count, w->hidden);
        mix(w, streams + r * width, mixed + r * w->hidden, injection_out + r * w->injections);
    }
}

/* streams: [rows, count, hidden] += 2 * injection [rows, count] * block_out [rows, hidden] */
EXPORT void page4_hyper_leave(float *streams, const float *block_out, const float *injection, int64_t rows,
                              int64_t count, int64_t hidden) {
    for (int64_t r = 0; r < rows; r++)
        add_block(streams + r * count * hidden, block_out + r * hidden, injection + r * count, count, hidden);
}
