// The parts of sm70_attend as one result, from the first split to the last: the same order, the same bits, every time.
//
// A block has one query head of one row, a lane two channels. Bound by the bytes of the parts; not measured on a V100.
// Specialised by HEAD_DIM and HALF_PARTS (parts in fp16, else in fp32).
#include "sm70_softmax.cuh"

// part_out: [splits, R, H, D]; part_lse: [splits, R, H], base 2; rows: [blocks] the row of each block, or null.
extern "C" __global__ void __launch_bounds__(HEAD_DIM / 2)
    page4_sm70_merge(const void *part_out, const float *part_lse, i32 splits, const i32 *rows, i32 num_rows, i32 heads,
                     const u16 *gate, i64 gate_row, i64 gate_head, u16 *out, float *lse) {
    const i32 row = rows ? rows[blockIdx.x] : (i32)blockIdx.x, head = blockIdx.y, channel = 2 * threadIdx.x;
    if (row < 0) return;
    const i64 place = (i64)row * heads + head, of_split = (i64)num_rows * heads;
    float top = NOTHING;
    for (i32 s = 0; s < splits; s++) top = fmaxf(top, part_lse[s * of_split + place]);
    float total = 0.0f;
    float2 sum = make_float2(0.0f, 0.0f);
    for (i32 s = 0; s < splits; s++) {
        const float log_sum = part_lse[s * of_split + place];
        if (log_sum == NOTHING) continue;  // nothing was attended to, and nothing was written
        const float weight = exp2_of(log_sum - top);
        const i64 at = (s * of_split + place) * HEAD_DIM + channel;
        const float2 x = HALF_PARTS ? from_half2(*(const u32 *)((const u16 *)part_out + at))
                                    : *(const float2 *)((const float *)part_out + at);
        total += weight;
        sum.x += weight * x.x;
        sum.y += weight * x.y;
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    float2 x = make_float2(sum.x * inverse, sum.y * inverse);
    if (gate) x = gated(x, *(const u32 *)(gate + row * gate_row + head * gate_head + channel));
    *(u32 *)(out + place * HEAD_DIM + channel) = to_half2(x.x, x.y);
    if (lse && threadIdx.x == 0) lse[place] = total == 0.0f ? NOTHING : (top + log2_of(total)) * LN_2;
}
