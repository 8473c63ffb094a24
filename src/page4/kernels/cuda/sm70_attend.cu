// Attention over planned blocks with Volta's matrix instruction: routes grouped and xqa, fp16 and E4M3 K/V.
//
// A warp owns a tile of up to 16 query rows (place * heads_per_kv + head of one KV head) and walks over its entries,
// eight blocks of four tokens, a step, at a time:
//
//     Q [16, D] fp16 in shared memory      lane <-> token: each lane reads the K row of its own token, 16 bytes at once
//     S [16, 32] = Q K^T                   a quad-pair has 8 tokens, so the four of a warp have the step's 32
//     P [16, 32] through shared memory     softmax with a running maximum, base 2
//     O [16, D] += P V                     a quad-pair has D / 4 channels of all tokens, so that a load takes 8 lanes'
//                                          neighbouring vectors of each token; the O rows lie like the S rows
//
// K and V go from memory to registers and there into the products: no other warp sees them, nothing of them lies in
// shared memory, so no late copy can undo the zeroing of tokens that no row of the tile attends to: their loads are not
// made at all. Warps share nothing but the cache lines that they read.
//
// Bound: matrix operations for grouped (4 * 16 * 32 * D a step), bytes of K and V for xqa. Fraction of it on a V100:
// not measured, no V100 was at hand.
//
// Specialised by HEAD_DIM (64, 128, 256), E4M3, GROUPED, M_TILES (1: tiles of 8 rows, 2: of 16), ZERO_UNATTENDED.
#include "e4m3.cuh"
#include "sm70_softmax.cuh"

#ifndef ZERO_UNATTENDED
#define ZERO_UNATTENDED 1
#endif

constexpr i32 ABI = 1;
constexpr i32 TILE = 8 * M_TILES;
constexpr i32 ENTRIES = 8;
constexpr i32 ELEMENT_BYTES = E4M3 ? 1 : 2;
constexpr i32 Q_STRIDE = HEAD_DIM + 8;  // 16 bytes more: the eight rows that lanes read lie in different banks
constexpr i32 P_STRIDE = 4 * ENTRIES + 8;
constexpr i32 WARP_HALVES = TILE * (Q_STRIDE + P_STRIDE);
constexpr i32 CHANNELS = HEAD_DIM / 4;  // of O that a quad-pair owns
// Channels that a lane loads at once; the eight lanes of a token, two of each quad-pair, load neighbouring ones.
constexpr i32 K_VECTOR = 16 / ELEMENT_BYTES;
constexpr i32 V_VECTOR = K_VECTOR < CHANNELS / 2 ? K_VECTOR : CHANNELS / 2;
constexpr i32 V_LOADS = CHANNELS / 2 / V_VECTOR;

extern "C" __global__ void page4_sm70_abi(i32 *facts) {
    const i32 values[8] = {ABI, HEAD_DIM, E4M3, GROUPED, M_TILES, ZERO_UNATTENDED, WARP_HALVES * 2, ENTRIES};
    if (threadIdx.x < 8) facts[threadIdx.x] = values[threadIdx.x];
}

// Channels as they lie in memory, zeros without a load where `wanted` is false.
template <i32 WORDS>
__device__ __forceinline__ void load_words(const u8 *from, bool wanted, u32 (&words)[WORDS]) {
    if constexpr (WORDS == 4) {
        const uint4 x = wanted ? __ldg((const uint4 *)from) : make_uint4(0, 0, 0, 0);
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else {
        const uint2 x = wanted ? __ldg((const uint2 *)from) : make_uint2(0, 0);
        words[0] = x.x, words[1] = x.y;
    }
}

// The same channels as fp16 pairs.
template <i32 WORDS>
__device__ __forceinline__ void to_pairs(const u32 (&words)[WORDS], u32 (&pairs)[WORDS * 2 / ELEMENT_BYTES]) {
#pragma unroll
    for (i32 i = 0; i < WORDS; i++)
        if constexpr (E4M3) e4m3_decode_raw(words[i], pairs[2 * i], pairs[2 * i + 1]);
        else pairs[i] = words[i];
}

// Over the lanes that hold the same row of C.
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (i32 lanes = 2; lanes <= 8; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (i32 lanes = 2; lanes <= 8; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

struct Entry {
    i32 block;
    u32 mask;  // bit 4 * place + token
};

// grouped: blocks, masks [T], begins, ends [G], rows [G, places], tile_sets [T / 8].
// xqa: blocks [R, width] is the rows' table, begins [R] their lengths, places is 1, the rest null.
// Strides are in elements; split s has the steps s * split_steps .. of its group or row. Without splits `out` and `lse`
// are written, gate included; with them `part_out` [splits, R, H, D] (fp32 for E4M3, else fp16) and `part_lse`.
extern "C" __global__ void __launch_bounds__(256, 1)
    page4_sm70_attend(const u16 *q, i64 q_row, i64 q_head, const u8 *k, i64 k_page, i64 k_token, i64 k_head,
                      const u8 *v, i64 v_page, i64 v_token, i64 v_head, const float *k_scale, const float *v_scale,
                      float softmax_scale, const i32 *rows, const i32 *begins, const i32 *ends, const i32 *blocks,
                      const i32 *masks, const i32 *tile_sets, i32 width, i32 places, i32 heads_per_kv, i32 heads,
                      u32 page_blocks, i32 split_steps, i32 splits, const u16 *gate, i64 gate_row, i64 gate_head,
                      u16 *out, float *lse, void *part_out, float *part_lse, i32 num_rows) {
    extern __shared__ uint4 shared[];
    u16 *const q_tile = (u16 *)shared + threadIdx.y * WARP_HALVES;
    u16 *const p_tile = q_tile + TILE * Q_STRIDE;
    const i32 lane = threadIdx.x, low = lane & 3, high = lane >> 4, quad_pair = lane >> 2 & 3;
    const i32 split = blockIdx.z % splits;
    const i32 tile = blockIdx.z / splits * blockDim.y + threadIdx.y, first = tile * TILE;
    if (first >= places * heads_per_kv) return;
    if (GROUPED && rows[(i64)blockIdx.x * places] < 0) return;  // a group of no rows

    const i32 kv_head = blockIdx.y;
    k += kv_head * k_head * ELEMENT_BYTES;
    v += kv_head * v_head * ELEMENT_BYTES;
    // The row of a place, -1 for none.
    const auto row_of = [&](i32 place) -> i32 {
        if (place >= places) return -1;
        return GROUPED ? rows[(i64)blockIdx.x * places + place] : (i32)blockIdx.x;
    };

#pragma unroll 1
    for (i32 i = lane; i < TILE * (HEAD_DIM / 8); i += 32) {
        const i32 at = i / (HEAD_DIM / 8), channel = i % (HEAD_DIM / 8) * 8, query = first + at;
        const i32 row = row_of(query / heads_per_kv);
        const i64 from = row * q_row + (kv_head * heads_per_kv + query % heads_per_kv) * q_head + channel;
        *(uint4 *)(q_tile + at * Q_STRIDE + channel) = row < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4 *)(q + from);
    }

    // This lane's rows of C: two for each eight of the tile. One beyond the last place does what that does, unseen.
    i32 shift[M_TILES][2];
#pragma unroll
    for (i32 m = 0; m < M_TILES; m++)
#pragma unroll
        for (i32 u = 0; u < 2; u++)
            shift[m][u] = 4 * min((first + 8 * m + (lane & 1) + 2 * u + 4 * high) / heads_per_kv, places - 1);
    const i32 first_place = first / heads_per_kv, last_place = min((first + TILE - 1) / heads_per_kv, places - 1);
    const u32 tile_bits = ~0u >> (28 - 4 * (last_place - first_place)) << (4 * first_place);

    float o[M_TILES][CHANNELS / 8][8], top[M_TILES][2], total[M_TILES][2];
#pragma unroll
    for (i32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (i32 n = 0; n < CHANNELS / 8; n++)
#pragma unroll
            for (i32 i = 0; i < 8; i++) o[m][n][i] = 0.0f;
        top[m][0] = top[m][1] = NOTHING;
        total[m][0] = total[m][1] = 0.0f;
    }
    const float logit_scale = softmax_scale * LOG2_E * (E4M3 ? E4M3_RAW * *k_scale : 1.0f);

    const i32 count = GROUPED ? ends[blockIdx.x] : (begins[blockIdx.x] + 3) / 4;
    const i32 begin = (GROUPED ? begins[blockIdx.x] : 0) + split * split_steps * ENTRIES;
    const i32 end = min(count, begin + split_steps * ENTRIES);
    const auto entry_at = [&](i32 index) -> Entry {
        if (GROUPED) return {blocks[index], (u32)masks[index]};
        const i32 tokens = min(max(begins[blockIdx.x] - 4 * index, 0), 4);
        return {blocks[(i64)blockIdx.x * width + (index < width ? index : 0)], (1u << tokens) - 1};
    };

    __syncwarp();
#pragma unroll 1
    for (i32 step = begin; step < end; step += ENTRIES) {
        if (GROUPED && !(tile_sets[step / ENTRIES] >> tile & 1)) continue;
        const Entry entry = entry_at(step + 2 * quad_pair + high);
        const bool alive = entry.mask & tile_bits & 0x11111111u << low;
        const u32 alive_lanes = __ballot_sync(~0u, alive);
        const i64 page = (u32)entry.block / page_blocks, slot = (u32)entry.block % page_blocks * 4 + low;
        const i64 v_offset = (page * v_page + slot * v_token) * ELEMENT_BYTES;
        const u8 *const k_row = k + (page * k_page + slot * k_token) * ELEMENT_BYTES;

        // V of one entry, loaded while the one before it is multiplied, the first one behind Q K^T.
        u32 ahead[V_LOADS][V_VECTOR * ELEMENT_BYTES / 4];
        const auto owner_of = [](i32 e) { return (e >> 1) * 4 + (e & 1) * 16; };  // first lane of the entry's tokens
        const auto load_values = [&](i32 e) {
            const bool wanted = !ZERO_UNATTENDED || alive_lanes >> (owner_of(e) + low) & 1;
            const i64 offset = __shfl_sync(~0u, v_offset, owner_of(e) + low);
            const u8 *const v_row = v + offset + (2 * quad_pair + high) * V_VECTOR * ELEMENT_BYTES;
#pragma unroll
            for (i32 g = 0; g < V_LOADS; g++) load_words(v_row + 8 * V_VECTOR * g * ELEMENT_BYTES, wanted, ahead[g]);
        };
        load_values(0);

        float s[M_TILES][8];
#pragma unroll
        for (i32 m = 0; m < M_TILES; m++)
#pragma unroll
            for (i32 i = 0; i < 8; i++) s[m][i] = 0.0f;
#pragma unroll 4
        for (i32 c = 0; c < HEAD_DIM; c += K_VECTOR) {
            u32 words[4], keys[K_VECTOR / 2];
            load_words(k_row + c * ELEMENT_BYTES, alive || !ZERO_UNATTENDED, words);
            to_pairs(words, keys);
#pragma unroll
            for (i32 m = 0; m < M_TILES; m++)
#pragma unroll
                for (i32 part = 0; part < K_VECTOR / 8; part++) {
                    const uint4 a = *(const uint4 *)(q_tile + (8 * m + low + 4 * high) * Q_STRIDE + c + 8 * part);
                    mma_columns(s[m], a.x, a.y, keys[4 * part], keys[4 * part + 1]);
                    mma_columns(s[m], a.z, a.w, keys[4 * part + 2], keys[4 * part + 3]);
                }
        }

        const u32 entry_masks[2] = {__shfl_sync(~0u, entry.mask, 4 * quad_pair),
                                    __shfl_sync(~0u, entry.mask, 4 * quad_pair + 16)};
        float factor[M_TILES][2];
        bool raised = false;
#pragma unroll
        for (i32 m = 0; m < M_TILES; m++)
#pragma unroll
            for (i32 u = 0; u < 2; u++) {
                float largest = NOTHING;
#pragma unroll
                for (i32 j = 0; j < 4; j++) {
                    const i32 i = (j >> 1) * 4 + 2 * u + (j & 1);
                    const bool on = entry_masks[j >> 1] >> (shift[m][u] + (lane & 2) + (j & 1)) & 1;
                    s[m][i] = on ? s[m][i] * logit_scale : NOTHING;
                    largest = fmaxf(largest, s[m][i]);
                }
                const float now = fmaxf(top[m][u], row_max(largest)), base = now == NOTHING ? 0.0f : now;
                factor[m][u] = exp2_of(top[m][u] - base);
                raised |= now > top[m][u];
                top[m][u] = now;
                float sum = 0.0f;
#pragma unroll
                for (i32 j = 0; j < 2; j++) {
                    const i32 i = 4 * j + 2 * u;
                    const float p0 = exp2_of(s[m][i] - base), p1 = exp2_of(s[m][i + 1] - base);
                    sum += p0 + p1;
                    const i32 at = 8 * m + (lane & 1) + 2 * u + 4 * high, column = 8 * quad_pair + 4 * j + (lane & 2);
                    *(u32 *)(p_tile + at * P_STRIDE + column) = to_half2(p0, p1);
                }
                total[m][u] = total[m][u] * factor[m][u] + sum;
            }
        if (__any_sync(~0u, raised)) {
#pragma unroll
            for (i32 m = 0; m < M_TILES; m++)
#pragma unroll
                for (i32 n = 0; n < CHANNELS / 8; n++)
#pragma unroll
                    for (i32 i = 0; i < 8; i++) o[m][n][i] *= factor[m][i >> 1 & 1];
        }
        __syncwarp();

#pragma unroll 1
        for (i32 e = 0; e < ENTRIES; e++) {
            u32 values[V_LOADS][V_VECTOR / 2];
#pragma unroll
            for (i32 g = 0; g < V_LOADS; g++) to_pairs(ahead[g], values[g]);
            if (e + 1 < ENTRIES) load_values(e + 1);
            if (ZERO_UNATTENDED && !(alive_lanes >> owner_of(e) & 15)) continue;
#pragma unroll
            for (i32 m = 0; m < M_TILES; m++) {
                const uint2 a = *(const uint2 *)(p_tile + (8 * m + low + 4 * high) * P_STRIDE + 4 * e);
#pragma unroll
                for (i32 g = 0; g < V_LOADS; g++)
#pragma unroll
                    for (i32 n = 0; n < V_VECTOR / 4; n++)
                        mma_rows(o[m][g * (V_VECTOR / 4) + n], a.x, a.y, values[g][2 * n], values[g][2 * n + 1]);
            }
        }
        __syncwarp();
    }

    const float v_factor = E4M3 ? E4M3_RAW * *v_scale : 1.0f;
#pragma unroll
    for (i32 m = 0; m < M_TILES; m++)
#pragma unroll
        for (i32 u = 0; u < 2; u++) {
            const float sum = row_sum(total[m][u]);
            const i32 query = first + 8 * m + (lane & 1) + 2 * u + 4 * high;
            const i32 row = row_of(query / heads_per_kv);
            if (row < 0) continue;
            const i32 head = kv_head * heads_per_kv + query % heads_per_kv;
            const i64 place = (splits > 1 ? (i64)split * num_rows * heads : 0) + (i64)row * heads + head;
            // A sum of NaN stays one: whoever attends to a NaN is told.
            const float inverse = sum == 0.0f ? 0.0f : v_factor / sum;
            const float log_sum = sum == 0.0f ? NOTHING : top[m][u] + log2_of(sum);
            if ((lane & 14) == 0) {
                if (splits > 1) part_lse[place] = log_sum;
                else if (lse) lse[place] = log_sum * LN_2;
            }
#pragma unroll
            for (i32 n = 0; n < CHANNELS / 8; n++)
#pragma unroll
                for (i32 j = 0; j < 2; j++) {
                    // Column 4 * j + (lane & 2) of piece n: the two lanes of a token loaded V_VECTOR channels each.
                    const i32 channel = n / (V_VECTOR / 4) * 8 * V_VECTOR + (2 * quad_pair + j) * V_VECTOR +
                                        n % (V_VECTOR / 4) * 4 + (lane & 2);
                    float2 x = make_float2(o[m][n][4 * j + 2 * u] * inverse, o[m][n][4 * j + 2 * u + 1] * inverse);
                    if (splits > 1 && E4M3) {
                        *(float2 *)((float *)part_out + place * HEAD_DIM + channel) = x;
                    } else if (splits > 1) {
                        *(u32 *)((u16 *)part_out + place * HEAD_DIM + channel) = to_half2(x.x, x.y);
                    } else {
                        if (gate) x = gated(x, *(const u32 *)(gate + row * gate_row + head * gate_head + channel));
                        *(u32 *)(out + place * HEAD_DIM + channel) = to_half2(x.x, x.y);
                    }
                }
        }
}
