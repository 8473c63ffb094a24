/* Between the two products of the dense form of the experts: route, activate, weigh. Bound by nothing: a few KB a row. */
#include "page4_cpu.h"

typedef struct {
    int64_t experts, chosen, expert_width, inner, normalise;
} moe_t;

/* The chosen experts' weights: softmax in fp32, the largest first, the lower id first among equals. */
static void route(const moe_t *w, const float *logits, float *weights) {
    float top = -INFINITY, total = 0, kept = 0, p[w->experts];
    int bad = 0;
    for (int64_t e = 0; e < w->experts; e++) {
        bad |= isnan(logits[e]) || logits[e] == INFINITY;
        if (logits[e] > top) top = logits[e];
        weights[e] = 0;
    }
    bad |= top == -INFINITY; /* not one finite logit */
    for (int64_t e = 0; e < w->experts; e++) total += p[e] = expf(logits[e] - top);
    for (int64_t n = 0; n < w->chosen; n++) {
        int64_t best = -1;
        for (int64_t e = 0; e < w->experts; e++)
            if (weights[e] == 0 && p[e] >= 0 && (best < 0 || p[e] > p[best])) best = e;
        if (best < 0) break;
        weights[best] = p[best] / total;
        kept += weights[best];
        p[best] = -1;
    }
    for (int64_t e = 0; e < w->experts; e++) {
        if (w->normalise) weights[e] /= kept;
        if (bad) weights[e] = NAN; /* a router without numbers has no choice to make */
    }
}

static void weigh(const float *gate, const float *up, float weight, int64_t width, float *out) {
    /* 0 * inf is NaN: an expert that was not chosen is not looked at. */
    if (weight == 0) {
        memset(out, 0, width * sizeof *out);
        return;
    }
    for (int64_t i = 0; i < width; i += LANES) store(out + i, silu_vec(load(gate + i)) * load(up + i) * weight);
}

/* projected: [rows, 2 * inner + experts + 1]: gates, ups (experts, then the shared one), router, shared gate.
   out: [rows, inner]. */
EXPORT void page4_moe_activate(const moe_t *w, const float *projected, int64_t rows, float *out) {
#pragma omp parallel for if (rows > 8) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = projected + r * (2 * w->inner + w->experts + 1), *up = gate + w->inner;
        const float *logits = up + w->inner;
        float weights[w->experts];
        route(w, logits, weights);
        int64_t routed = w->experts * w->expert_width;
        for (int64_t e = 0; e < w->experts; e++)
            weigh(gate + e * w->expert_width, up + e * w->expert_width, weights[e], w->expert_width,
                  out + r * w->inner + e * w->expert_width);
        weigh(gate + routed, up + routed, sigmoid(logits[w->experts]), w->inner - routed, out + r * w->inner + routed);
    }
}
