// The best top_k blocks of each row in the total order (score descending, id ascending; -0.0 equals +0.0), ids ascending.
//
// One thread block a row, the row's scores in shared memory. Bins of equal width over the row's range of scores (2048;
// integer counters, so order-free) say in which bin the k-th best lies; what lies above is taken. The few scores of that
// bin are ranked against each other by (key, id), where a key is 32 bits of the score's order. Too many for that: the
// bin is binned again, by key, until it is few or one value, of which the lowest ids are taken. So the result is exact
// for every distribution. Taken blocks are bits, which a scan writes ascending.
//
//     scores [R, columns] fp32 --> shared --bins--> a byte for each four blocks --scan--> ids [R, K]
//
// Bound: the scores are read once (4 bytes each); with the writing of them by the scoring kernel, 8 bytes a score.
// Measured on an H200 (2026-12-01, CUDA 13.0, graph replay): 2,048 rows of 8,192 scores 49.7 us, where reading 67 MB takes
// 16 us at 4.25 TB/s (32% of the bound; instructions limit it, about 25 a score); one row of 32,768 scores 10.6 us.
//
// Defines: THREADS (a multiple of 32), KEEP (1: the row in shared memory; 0: read again from memory in each pass, for
// rows that are longer than that holds).
#include "common.cuh"

#define BINS 2048
#define CANDIDATES (THREADS < 512 ? THREADS : 512)
#define WARPS (THREADS / 32)
#define ALL 0xffffffffu

static_assert(THREADS % 32 == 0 && BINS % THREADS == 0 && CANDIDATES <= THREADS, "a thread ranks one candidate");

struct Shared {
    u32 bins[BINS];
    u32 keys[CANDIDATES];
    u32 ids[CANDIDATES];
    u32 warps[2][32];
    u32 found[4];  // bin, members, taken above it, candidates
};

// Ascending keys: floats with the sign bit flipped, or all bits of a negative one. No number has key 0.
__device__ __forceinline__ u32 key_of(float score) {
    u32 bits = __float_as_uint(score);
    return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ u32 warp_min(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(ALL, x);
#else
    for (int step = 16; step; step >>= 1) x = min(x, __shfl_xor_sync(ALL, x, step));
    return x;
#endif
}

__device__ __forceinline__ void block_extremes(u32 &low, u32 &high, Shared &shared) {
    low = warp_min(low), high = ~warp_min(~high);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared.warps[0][threadIdx.x / 32] = low;
        shared.warps[1][threadIdx.x / 32] = high;
    }
    __syncthreads();
    int lane = threadIdx.x % 32;
    low = warp_min(lane < WARPS ? shared.warps[0][lane] : ALL);
    high = ~warp_min(lane < WARPS ? ~shared.warps[1][lane] : ALL);
}

// The sum of the counts of all threads before this one.
__device__ __forceinline__ u32 block_before(u32 count, Shared &shared) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = count;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) shared.warps[0][warp] = sum;
    __syncthreads();
    u32 total = lane < WARPS ? shared.warps[0][lane] : 0;
#pragma unroll
    for (int step = 1; step < WARPS; step <<= 1) {
        u32 other = __shfl_up_sync(ALL, total, step);
        if (lane >= step) total += other;
    }
    u32 before = __shfl_sync(ALL, total, warp ? warp - 1 : 0);
    return (warp ? before : 0) + sum - count;
}

// Finds the bin that holds the `need`-th best of `members`, what lies above it, and how many it holds itself. The
// counts of the lowest bin, where ties at zero crowd, are not kept: it is what the others leave over.
__device__ __forceinline__ void find_bin(u32 need, u32 members, Shared &shared) {
    // Thread t adds up the bins from BINS - 1 - t * per on, downwards.
    const int per = BINS / THREADS;
    int top = BINS - 1 - threadIdx.x * per;
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < per; ++j) sum += shared.bins[top - j];
    u32 above = block_before(sum, shared);
    if (above < need && above + sum >= need) {
        int bin = top;
        while (above + shared.bins[bin] < need) above += shared.bins[bin--];
        shared.found[0] = bin, shared.found[1] = shared.bins[bin], shared.found[2] = above;
    } else if (threadIdx.x == THREADS - 1 && above + sum < need) {
        shared.found[0] = 0, shared.found[1] = members - above - sum, shared.found[2] = above + sum;
    }
    __syncthreads();
}

#define INFINITE __uint_as_float(0x7f800000u)
// Four neighbouring scores at a time; -inf behind the last one, and that a score may be -inf too is seen to by readers.
#define EACH_QUAD(quad) for (int quad = threadIdx.x; quad < quads; quad += THREADS)
#define KEY(quad, i, score) (4 * quad + i < visible ? key_of(score) : 0u)

struct Quad {
    float at[4];
};

__device__ __forceinline__ Quad load_quad(const float *row, int quad, int visible) {
    float4 four = *reinterpret_cast<const float4 *>(row + 4 * quad);
    Quad out = {{four.x, four.y, four.z, four.w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) out.at[i] = 4 * quad + i < visible ? out.at[i] + 0.0f : -INFINITE;  // -0.0 becomes +0.0
    return out;
}

// scores: [R, columns] fp32, 16-byte aligned rows of whole quads; positions: [R] i64; ids: [R, top_k] i32; counts: [R]
// i32; bad: [R] bytes, 1 for a row with a NaN among its visible scores, which selects nothing. Rows that see at most
// top_k blocks need no scores. Dynamic shared memory: see `shared_bytes` of cuda_select.py.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_top(const float *__restrict__ scores, i64 columns, const i64 *__restrict__ positions, i32 top_k,
               i32 *__restrict__ ids, i32 *__restrict__ counts, u8 *__restrict__ bad) {
    __shared__ Shared shared;
    extern __shared__ float4 dynamic[];
    int tid = threadIdx.x;
    i64 row = blockIdx.x;
    for (int bin = tid; bin < BINS; bin += THREADS) shared.bins[bin] = 0;
    if (tid == 0) shared.found[3] = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    i64 seen = (positions[row] + 1) / 4;
    int visible = (int)(seen < 0 ? 0 : seen > columns ? columns : seen);
    i32 *row_ids = ids + row * top_k;
    if (visible <= top_k) {
        for (int place = tid; place < top_k; place += THREADS) row_ids[place] = place < visible ? place : -1;
        if (tid == 0) counts[row] = visible, bad[row] = 0;
        return;
    }
    int quads = (visible + 3) / 4;
    // A byte for each quad, bit i for its score i; a word of four quads is 16 blocks.
    int per_thread = ((quads + 3) / 4 + THREADS - 1) / THREADS, padded = per_thread * THREADS;
    const float *row_scores = scores + row * columns;
#if KEEP
    float *kept = reinterpret_cast<float *>(dynamic);
    u32 *words = reinterpret_cast<u32 *>(kept + columns);
#define SCORES(quad) (*reinterpret_cast<const Quad *>(kept + 4 * quad))
#else
    u32 *words = reinterpret_cast<u32 *>(dynamic);
#define SCORES(quad) load_quad(row_scores, quad, visible)
#endif
    u32 *ties = words + padded;
    u8 *taken_of = reinterpret_cast<u8 *>(words), *tied_of = reinterpret_cast<u8 *>(ties);

    float least = INFINITE, most = -INFINITE;
    bool nan = false;
#pragma unroll 4
    EACH_QUAD(quad) {
        Quad four = load_quad(row_scores, quad, visible);
#if KEEP
        *reinterpret_cast<float4 *>(kept + 4 * quad) = make_float4(four.at[0], four.at[1], four.at[2], four.at[3]);
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            nan |= four.at[i] != four.at[i];
            if (4 * quad + i < visible) least = fminf(least, four.at[i]);
            most = fmaxf(most, four.at[i]);
        }
    }
    for (int quad = quads + tid; quad < 4 * padded; quad += THREADS) taken_of[quad] = tied_of[quad] = 0;
    if (__syncthreads_or(nan)) {
        for (int place = tid; place < top_k; place += THREADS) row_ids[place] = -1;
        if (tid == 0) counts[row] = 0, bad[row] = 1;
        return;
    }
    u32 low = key_of(least), high = key_of(most);
    block_extremes(low, high, shared);

    // Bins of equal width in the score: adding 2^23 leaves the bin in the low bits, and never falls as the score rises.
    u32 need = top_k, members = visible;  // of `members` scores that are left, the best `need` are still to be taken
    float per_score = (BINS - 1) / (score_of(high) - score_of(low));
    float shift = 8388608.0f - score_of(low) * per_score;
    bool by_score = low < high && per_score > 0 && per_score < 1e38f && shift > -1e38f && shift < 1e38f;
#define BIN(score) min(max((i32)__float_as_uint(fmaf(score, per_score, shift)) - 0x4b000000, 0), BINS - 1)
    if (by_score) {
        EACH_QUAD(quad) {
            Quad four = SCORES(quad);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int bin = BIN(four.at[i]);
                if (bin > 0) atomicAdd(&shared.bins[bin], 1u);
            }
        }
        __syncthreads();
        find_bin(need, members, shared);
        int chosen = shared.found[0];
        members = shared.found[1], need -= shared.found[2];
        if (members <= CANDIDATES) {
            // The usual case: what is above is taken, the members of the bin are ranked.
            EACH_QUAD(quad) {
                Quad four = SCORES(quad);
                u32 taken = 0, member = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int bin = BIN(four.at[i]);
                    taken |= bin > chosen ? 1u << i : 0;
                    member |= bin == chosen ? 1u << i : 0;
                }
                taken_of[quad] = taken;
                for (; member; member &= member - 1) {
                    int id = 4 * quad + __ffs(member) - 1;
                    if (id < visible) {
                        u32 place = atomicAdd(&shared.found[3], 1u);
                        shared.ids[place] = id;
                    }
                }
            }
            __syncthreads();
            // Their scores are read again by place: an index into registers would put these into memory.
            if (tid < members) {
#if KEEP
                shared.keys[tid] = key_of(kept[shared.ids[tid]]);
#else
                shared.keys[tid] = key_of(row_scores[shared.ids[tid]] + 0.0f);
#endif
            }
            goto rank;
        }
        low = ALL, high = 0;
        EACH_QUAD(quad) {
            Quad four = SCORES(quad);
            for (int i = 0; i < 4; ++i) {
                u32 key = KEY(quad, i, four.at[i]);
                if (key && BIN(four.at[i]) == chosen) low = min(low, key), high = max(high, key);
            }
        }
        block_extremes(low, high, shared);
    }
    // Many scores close together, or far apart: by key, 2^11 times finer each time, until they are few or one value.
    while (low < high && members > CANDIDATES) {
        int digit = max(0, 32 - __clz(high - low) - 11);
        __syncthreads();
        for (int bin = tid; bin < BINS; bin += THREADS) shared.bins[bin] = 0;
        __syncthreads();
        EACH_QUAD(quad) {
            Quad four = SCORES(quad);
            for (int i = 0; i < 4; ++i) {
                u32 key = KEY(quad, i, four.at[i]), bin = (key - low) >> digit;
                if (key >= low && key <= high && bin) atomicAdd(&shared.bins[bin], 1u);
            }
        }
        __syncthreads();
        find_bin(need, members, shared);
        u32 first = low + (shared.found[0] << digit), last = min(high, first + ((1u << digit) - 1));
        members = shared.found[1], need -= shared.found[2];
        low = ALL, high = 0;
        EACH_QUAD(quad) {
            Quad four = SCORES(quad);
            for (int i = 0; i < 4; ++i) {
                u32 key = KEY(quad, i, four.at[i]);
                if (key >= first && key <= last) low = min(low, key), high = max(high, key);
            }
        }
        block_extremes(low, high, shared);
    }
    // Keys above `high` are taken; those in low..high are ranked, or are one value, of which the lowest ids are taken.
    EACH_QUAD(quad) {
        Quad four = SCORES(quad);
        u32 taken = 0, tied = 0;
        for (int i = 0; i < 4; ++i) {
            u32 key = KEY(quad, i, four.at[i]);
            bool member = key >= low && key <= high;
            taken |= key > high ? 1u << i : 0;
            tied |= member && low == high ? 1u << i : 0;
            if (member && low < high) {
                u32 place = atomicAdd(&shared.found[3], 1u);
                shared.keys[place] = key, shared.ids[place] = 4 * quad + i;
            }
        }
        taken_of[quad] = taken, tied_of[quad] = tied;
    }
rank:
    __syncthreads();
    if (low < high) {
        if (tid < members) {
            u32 key = shared.keys[tid], id = shared.ids[tid], better = 0;
            for (u32 other = 0; other < members; ++other)
                better += shared.keys[other] > key || (shared.keys[other] == key && shared.ids[other] < id);
            if (better < need) atomicOr(&words[id / 16], 1u << (id % 16 / 4 * 8 + id % 4));
        }
    } else {
        u32 count = 0;
        for (int j = 0; j < per_thread; ++j) count += __popc(ties[tid * per_thread + j]);
        u32 before = block_before(count, shared);
        for (int j = 0; j < per_thread; ++j) {
            u32 word = ties[tid * per_thread + j], some = 0;
            for (; word && before < need; ++before, word &= word - 1) some |= word & -word;
            words[tid * per_thread + j] |= some;
            before += __popc(word);
        }
    }
    __syncthreads();
    u32 count = 0;
    for (int j = 0; j < per_thread; ++j) count += __popc(words[tid * per_thread + j]);
    u32 place = block_before(count, shared);
    for (int j = 0; j < per_thread; ++j) {
        int word = tid * per_thread + j;
        for (u32 bits = words[word]; bits; bits &= bits - 1) {
            int bit = __ffs(bits) - 1;
            row_ids[place++] = 16 * word + bit / 8 * 4 + bit % 8;
        }
    }
    if (tid == 0) counts[row] = top_k, bad[row] = 0;
}
