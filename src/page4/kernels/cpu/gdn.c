/* Gated DeltaNet over the windows of many requests, and the commit of their accepted rows.

   A window of W rows reads the state once for its 2 W queries and keys; what rows add to each other is a triangular
   system of W x W. Bound by the reads of the state (64 KB a head at 128 x 128), in commit by its read and write. */
#include "page4_cpu.h"

#define MAX_ROWS 16

typedef struct {
    const float *conv;     /* [kernel, conv_dim] */
    const float *rate;     /* [Hv], -exp(A_log) */
    const float *dt_bias;  /* [Hv] */
    const float *norm;     /* [Dv] */
    int64_t key_heads, value_heads, key_dim, value_dim, kernel, conv_dim;
    int64_t row_stride;    /* a projected row: qkv [conv_dim] | z [Hv * Dv] | b [Hv] | a [Hv] */
    int64_t silu_gate;     /* else sigmoid */
    int64_t state_stride, conv_stride; /* floats between two slots */
    float eps;
} gdn_t;

/* Input `row` of the convolution's channels c.. : a row of the window, or one of the kernel - 1 before it. */
INLINE vec conv_input(const gdn_t *w, const float *projected, const float *before, int64_t row, int64_t c) {
    if (row >= 0) return load(projected + row * w->row_stride + c);
    float x[LANES];
    for (int64_t i = 0; i < LANES; i++) x[i] = before[(c + i) * (w->kernel - 1) + row + w->kernel - 1];
    return load(x);
}

/* Convolution and silu of one row, then unit queries (over sqrt(Dk)) and keys: mixed [conv_dim]. */
static void mix_row(const gdn_t *w, const float *projected, const float *before, int64_t row, float *mixed) {
    for (int64_t c = 0; c < w->conv_dim; c += LANES) {
        vec total = fill(0);
        for (int64_t tap = 0; tap < w->kernel; tap++)
            total += conv_input(w, projected, before, row + tap - (w->kernel - 1), c) *
                     load(w->conv + tap * w->conv_dim + c);
        store(mixed + c, silu_vec(total));
    }
    float query_scale = 1.0f / sqrtf((float)w->key_dim);
    for (int64_t h = 0; h < 2 * w->key_heads; h++) {
        float *x = mixed + h * w->key_dim;
        vec inverse = fill(inverse_norm(x, w->key_dim, 1.0f, 1e-6f) * (h < w->key_heads ? query_scale : 1.0f));
        for (int64_t i = 0; i < w->key_dim; i += LANES) store(x + i, load(x + i) * inverse);
    }
}

/* out[m] += x[m] . state for up to 8 vectors and LANES * tiles columns. */
INLINE void read_tile(const int count, const int tiles, const float **x, const float *state, int64_t key_dim,
                      int64_t value_dim, float **out) {
    vec acc[8][2];
    UNROLL for (int m = 0; m < count; m++)
        UNROLL for (int t = 0; t < tiles; t++) acc[m][t] = fill(0);
    for (int64_t d = 0; d < key_dim; d++) {
        vec s[2];
        UNROLL for (int t = 0; t < tiles; t++) s[t] = load(state + d * value_dim + t * LANES);
        UNROLL for (int m = 0; m < count; m++)
            UNROLL for (int t = 0; t < tiles; t++) acc[m][t] += x[m][d] * s[t];
    }
    UNROLL for (int m = 0; m < count; m++)
        UNROLL for (int t = 0; t < tiles; t++) store(out[m] + t * LANES, acc[m][t]);
}

static void read_state(const float **x, int64_t count, const float *state, int64_t key_dim, int64_t value_dim, float *out) {
    for (int64_t column = 0; column < value_dim; column += 2 * LANES) {
        int narrow = value_dim - column < 2 * LANES;
        for (int64_t m = 0; m < count; m += 8) {
            const float *from[8];
            float *to[8], spare[2 * LANES];
            int64_t here = count - m < 8 ? count - m : 8;
            for (int64_t i = 0; i < 8; i++) {
                from[i] = x[i < here ? m + i : m];
                to[i] = i < here ? out + (m + i) * value_dim + column : spare;
            }
            if (narrow) read_tile(8, 1, from, state + column, key_dim, value_dim, to);
            else if (here <= 2) read_tile(2, 2, from, state + column, key_dim, value_dim, to);
            else read_tile(8, 2, from, state + column, key_dim, value_dim, to);
        }
    }
}

/* One head of one window; mixed: its rows, [W, conv_dim]. */
static void head_window(const gdn_t *w, const float *projected, const float *mixed, int64_t rows, int64_t head,
                        const float *state, float *heads, float *updates, float *log_decay) {
    int64_t hk = head / (w->value_heads / w->key_heads), dk = w->key_dim, dv = w->value_dim;
    int64_t value_width = w->value_heads * dv;
    const float *x[2 * MAX_ROWS];
    float old[2 * MAX_ROWS * dv], total[MAX_ROWS], beta[MAX_ROWS], out[dv];
    for (int64_t i = 0; i < rows; i++) {
        const float *gates = projected + i * w->row_stride + w->conv_dim + value_width;
        float a = gates[w->value_heads + head] + w->dt_bias[head];
        float softplus = a > 20.0f ? a : log1pf(expf(a));
        total[i] = softplus * w->rate[head] + (i ? total[i - 1] : 0.0f);
        beta[i] = sigmoid(gates[head]);
        log_decay[i * w->value_heads + head] = total[i];
        x[i] = mixed + i * w->conv_dim + hk * dk;
        x[rows + i] = mixed + i * w->conv_dim + (w->key_heads + hk) * dk;
    }
    read_state(x, 2 * rows, state, dk, dv, old);
    for (int64_t i = 0; i < rows; i++) {
        const float *v = mixed + i * w->conv_dim + 2 * w->key_heads * dk + head * dv;
        float *u = updates + i * value_width + head * dv, decay = expf(total[i]);
        float reads[MAX_ROWS], system[MAX_ROWS];
        for (int64_t j = 0; j <= i; j++) {
            float pair = expf(total[i] - total[j]);
            reads[j] = dot(x[i], x[rows + j], dk) * pair;
            system[j] = j < i ? dot(x[rows + i], x[rows + j], dk) * pair * beta[i] : 0.0f;
        }
        for (int64_t c = 0; c < dv; c += LANES) {
            vec fresh = beta[i] * (load(v + c) - decay * load(old + (rows + i) * dv + c));
            for (int64_t j = 0; j < i; j++) fresh -= system[j] * load(updates + j * value_width + head * dv + c);
            store(u + c, fresh);
            vec y = decay * load(old + i * dv + c);
            for (int64_t j = 0; j <= i; j++) y += reads[j] * load(updates + j * value_width + head * dv + c);
            store(out + c, y);
        }
        const float *z = projected + i * w->row_stride + w->conv_dim + head * dv;
        vec inverse = fill(inverse_norm(out, dv, 1.0f / dv, w->eps));
        for (int64_t c = 0; c < dv; c += LANES) {
            vec gate = load(z + c);
            gate = w->silu_gate ? silu_vec(gate) : sigmoid_vec(gate);
            store(heads + i * value_width + head * dv + c, load(out + c) * inverse * load(w->norm + c) * gate);
        }
    }
}

/* projected: [R, row_stride]; spans: [n] (rows of these windows, at most MAX_ROWS each); mixed: [R, conv_dim];
   heads: [R, Hv * Dv] before the output projection; updates: [R, Hv, Dv] and log_decay: [R, Hv] for the commit. */
EXPORT void page4_gdn_window(const gdn_t *w, const float *projected, const span_t *spans, int64_t n, int64_t rows,
                             const float *recurrent, const float *conv, float *mixed, float *heads, float *updates,
                             float *log_decay) {
#pragma omp parallel if (rows > 1)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            int64_t s = 0;
            while (r >= spans[s].first_row + spans[s].rows) s++;
            int64_t first = spans[s].first_row;
            mix_row(w, projected + first * w->row_stride, conv + spans[s].slot * w->conv_stride, r - first, mixed + r * w->conv_dim);
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < n * w->value_heads; unit++) {
            span_t span = spans[unit / w->value_heads];
            int64_t head = unit % w->value_heads, value_width = w->value_heads * w->value_dim;
            const float *state = recurrent + span.slot * w->state_stride + head * w->key_dim * w->value_dim;
            head_window(w, projected + span.first_row * w->row_stride, mixed + span.first_row * w->conv_dim, span.rows, head, state,
                        heads + span.first_row * value_width, updates + span.first_row * value_width,
                        log_decay + span.first_row * w->value_heads);
        }
    }
}

/* S <- exp(G_a) S + sum over the a accepted rows of exp(G_a - G_i) k_i u_i^T; later rows are not looked at. */
static void commit_head(const gdn_t *w, const float *mixed, int64_t accepted, int64_t head, float *state,
                        const float *updates, const float *log_decay) {
    int64_t hk = head / (w->value_heads / w->key_heads), value_width = w->value_heads * w->value_dim;
    float last = log_decay[(accepted - 1) * w->value_heads + head], weight[MAX_ROWS];
    for (int64_t i = 0; i < accepted; i++) weight[i] = expf(last - log_decay[i * w->value_heads + head]);
    float decay = expf(last);
    for (int64_t d = 0; d < w->key_dim; d++) {
        float coefficient[MAX_ROWS];
        for (int64_t i = 0; i < accepted; i++) coefficient[i] = weight[i] * mixed[i * w->conv_dim + (w->key_heads + hk) * w->key_dim + d];
        for (int64_t c = 0; c < w->value_dim; c += LANES) {
            vec s = decay * load(state + d * w->value_dim + c);
            for (int64_t i = 0; i < accepted; i++) s += coefficient[i] * load(updates + i * value_width + head * w->value_dim + c);
            store(state + d * w->value_dim + c, s);
        }
    }
}

/* The kernel - 1 inputs before the first row that was not accepted. */
static void commit_conv(const gdn_t *w, const float *projected, int64_t accepted, float *before) {
    int64_t keep = w->kernel - 1;
    for (int64_t c = 0; c < w->conv_dim; c++)
        for (int64_t i = 0; i < keep; i++) {
            int64_t row = accepted + i - keep;
            before[c * keep + i] = row >= 0 ? projected[row * w->row_stride + c] : before[c * keep + i + accepted];
        }
}

/* accepted: [n], rows of each window that stay. Slot 0 would be the null page: it is never written. */
EXPORT void page4_gdn_commit(const gdn_t *w, const float *projected, const float *mixed, const span_t *spans,
                             const int64_t *accepted, int64_t n, float *recurrent, float *conv, const float *updates,
                             const float *log_decay) {
    int64_t heads = w->value_heads;
#pragma omp parallel for schedule(static)
    for (int64_t unit = 0; unit < n * (heads + 1); unit++) {
        span_t span = spans[unit / (heads + 1)];
        int64_t count = accepted[unit / (heads + 1)], head = unit % (heads + 1);
        if (span.slot <= 0 || count <= 0) continue;
        if (head == heads) {
            commit_conv(w, projected + span.first_row * w->row_stride, count, conv + span.slot * w->conv_stride);
            continue;
        }
        commit_head(w, mixed + span.first_row * w->conv_dim, count, head,
                    recurrent + span.slot * w->state_stride + head * w->key_dim * w->value_dim,
                    updates + span.first_row * heads * w->value_dim, log_decay + span.first_row * heads);
    }
}
