// The best top_k blocks of each row in the total order (score descending, id ascending; -0.0 equals +0.0), ids ascending.
//
// One thread block a row, the row's scores in registers. A score becomes a 32-bit key of the same order. Bins of equal
// width over the row's range of scores (2048; integer counters, so order-free) say in which bin the k-th best lies; what
// lies above is taken. The few keys of that bin are ranked against each other by (key, id). Too many for that: the bin
// alone is binned again, by key, until it is few or one value, of which the lowest ids are taken. So the result is exact
// for every distribution. Taken blocks are bits; a scan over words of 32 blocks writes them ascending.
//
//     scores [R, columns] fp32 --registers--> keys --bins--> bits of 32 blocks --scan--> ids [R, K]
//
// Bound: the scores are read once (4 bytes each); with the writing of them by the scoring kernel, 8 bytes a score.
//
// Defines: THREADS (a multiple of 32), VALUES (scores a thread in registers; 0 reads them again from memory in each
// pass, for rows longer than 32 * THREADS).
#include "common.cuh"

#define BINS 2048
#define CANDIDATES 512
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

// Ascending keys: floats with the sign bit flipped, or all bits of a negative one.
__device__ __forceinline__ u32 key_of(float score) {
    u32 bits = __float_as_uint(score + 0.0f);  // -0.0 + 0.0 is +0.0
    return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ void block_extremes(u32 &low, u32 &high, Shared &shared) {
    for (int step = 16; step; step >>= 1) {
        low = min(low, __shfl_xor_sync(ALL, low, step));
        high = max(high, __shfl_xor_sync(ALL, high, step));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared.warps[0][threadIdx.x / 32] = low;
        shared.warps[1][threadIdx.x / 32] = high;
    }
    __syncthreads();
    int lane = threadIdx.x % 32;
    low = lane < WARPS ? shared.warps[0][lane] : ALL;
    high = lane < WARPS ? shared.warps[1][lane] : 0;
    for (int step = 16; step; step >>= 1) {
        low = min(low, __shfl_xor_sync(ALL, low, step));
        high = max(high, __shfl_xor_sync(ALL, high, step));
    }
}

// The sum of the counts of all threads before this one.
__device__ __forceinline__ u32 block_before(u32 count, Shared &shared) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = count;
    for (int step = 1; step < 32; step <<= 1) {
        u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) shared.warps[0][warp] = sum;
    __syncthreads();
    u32 total = lane < WARPS ? shared.warps[0][lane] : 0;
    for (int step = 1; step < 32; step <<= 1) {
        u32 other = __shfl_up_sync(ALL, total, step);
        if (lane >= step) total += other;
    }
    u32 before = __shfl_sync(ALL, total, warp ? warp - 1 : 0);
    return (warp ? before : 0) + sum - count;
}

// Bins of the keys low..high: by equal steps of the score, or of the key where scores give no usable step.
struct Bins {
    u32 low, high;
    float first, per_score;
    int shift;  // -1: by score

    __device__ void by_score(u32 from, u32 to) {
        low = from, high = to, shift = -1;
        first = score_of(from);
        float range = score_of(to) - first;
        per_score = (BINS - 1) / range;
        if (!(range < 3e38f && per_score < 3e38f)) by_key(from, to);
    }
    __device__ void by_key(u32 from, u32 to) {
        low = from, high = to;
        shift = max(0, 32 - __clz(to - from) - 11);
    }
    // Never falls when the key rises. Below `low` -1, above `high` BINS.
    __device__ __forceinline__ int of(u32 key) const {
        if (key < low) return -1;
        if (key > high) return BINS;
        if (shift >= 0) return (key - low) >> shift;
        return min((int)((score_of(key) - first) * per_score), BINS - 1);
    }
};

// Every index of the row that this thread holds; the trip count is the same for all threads of the block.
#if VALUES > 0
#define EACH_INDEX(i, index) \
    _Pragma("unroll") for (int i = 0, index = threadIdx.x; i < VALUES; ++i, index += THREADS) if (i * THREADS < visible)
#define KEY(i, index) values[i]
#else
#define EACH_INDEX(i, index) for (int i = 0, index = threadIdx.x; i * THREADS < visible; ++i, index += THREADS)
#define KEY(i, index) (index < visible ? key_of(row_scores[index]) : 0u)
#endif

// scores: [R, columns] fp32; positions: [R] i64; ids: [R, top_k] i32; counts: [R] i32; bad: [R] bytes, 1 for a row with a
// NaN among its visible scores, which selects nothing. Rows that see at most top_k blocks need no scores.
// Dynamic shared memory: 8 bytes for every 32 columns, rounded up to THREADS words.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_top(const float *__restrict__ scores, i64 columns, const i64 *__restrict__ positions, i32 top_k,
               i32 *__restrict__ ids, i32 *__restrict__ counts, u8 *__restrict__ bad) {
    __shared__ Shared shared;
    extern __shared__ u32 words[];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int tid = threadIdx.x, lane = tid % 32;
    i64 row = blockIdx.x;
    i64 seen = (positions[row] + 1) / 4;
    int visible = (int)(seen < 0 ? 0 : seen > columns ? columns : seen);
    i32 *row_ids = ids + row * top_k;
    if (visible <= top_k) {
        for (int place = tid; place < top_k; place += THREADS) row_ids[place] = place < visible ? place : -1;
        if (tid == 0) counts[row] = visible, bad[row] = 0;
        return;
    }
    const float *row_scores = scores + row * columns;
    u32 low = ALL, high = 0;
    bool nan = false;
#if VALUES > 0
    u32 values[VALUES];
    {
        float loaded[VALUES];
        EACH_INDEX(i, index) loaded[i] = index < visible ? row_scores[index] : 0.0f;
        EACH_INDEX(i, index) {
            nan |= loaded[i] != loaded[i];
            values[i] = index < visible ? key_of(loaded[i]) : 0u;
            if (index < visible) low = min(low, values[i]), high = max(high, values[i]);
        }
    }
#else
    EACH_INDEX(i, index) if (index < visible) {
        float score = row_scores[index];
        nan |= score != score;
        low = min(low, key_of(score)), high = max(high, key_of(score));
    }
#endif
    if (__syncthreads_or(nan)) {
        for (int place = tid; place < top_k; place += THREADS) row_ids[place] = -1;
        if (tid == 0) counts[row] = 0, bad[row] = 1;
        return;
    }
    block_extremes(low, high, shared);

    u32 need = top_k, members = visible;  // of `members` keys in low..high, the best `need` are still to be taken
    Bins bins;
    bins.by_score(low, high);
    int chosen = 0;
    while (low < high) {
        for (int bin = tid; bin < BINS; bin += THREADS) shared.bins[bin] = 0;
        __syncthreads();
        // The lowest bin, where ties at zero crowd, is what the others leave over.
        EACH_INDEX(i, index) {
            int bin = bins.of(KEY(i, index));
            if (bin > 0 && bin < BINS) atomicAdd(&shared.bins[bin], 1u);
        }
        __syncthreads();
        // Thread t adds up the bins from BINS - 1 - t * per on, downwards.
        const int per = BINS / THREADS;
        int top = BINS - 1 - tid * per;
        u32 sum = 0;
        for (int j = 0; j < per; ++j) sum += shared.bins[top - j];
        u32 above = block_before(sum, shared);
        if (above < need && above + sum >= need) {
            int bin = top;
            while (above + shared.bins[bin] < need) above += shared.bins[bin--];
            shared.found[0] = bin, shared.found[1] = shared.bins[bin], shared.found[2] = above;
        } else if (tid == THREADS - 1 && above + sum < need) {
            shared.found[0] = 0, shared.found[1] = members - above - sum, shared.found[2] = above + sum;
        }
        __syncthreads();
        chosen = shared.found[0], members = shared.found[1], need -= shared.found[2];
        if (members <= CANDIDATES) break;
        low = ALL, high = 0;
        EACH_INDEX(i, index) {
            u32 key = KEY(i, index);
            if (bins.of(key) == chosen && key) low = min(low, key), high = max(high, key);
        }
        block_extremes(low, high, shared);
        bins.by_key(low, high);
        chosen = 0;
    }
    if (low == high) bins.by_key(low, high), chosen = 0;
    bool ranked = members <= CANDIDATES && low < high;

    // Bits of what is above the chosen bin; its own members to a list, or where they are one value to bits as well.
    int num_words = (visible + 31) / 32, padded = (num_words + THREADS - 1) / THREADS * THREADS;
    u32 *ties = words + padded;
    if (tid == 0) shared.found[3] = 0;
    for (int word = num_words + tid; word < padded; word += THREADS) words[word] = ties[word] = 0;
    __syncthreads();
    EACH_INDEX(i, index) {
        u32 key = KEY(i, index);
        int bin = bins.of(key);
        bool member = bin == chosen && index < visible;
        u32 taken = __ballot_sync(ALL, bin > chosen);
        u32 tied = __ballot_sync(ALL, member && !ranked);
        if (lane == 0 && index < visible) words[index / 32] = taken, ties[index / 32] = tied;
        if (member && ranked) {
            u32 place = atomicAdd(&shared.found[3], 1u);
            shared.keys[place] = key, shared.ids[place] = index;
        }
    }
    __syncthreads();
    if (ranked) {
        if (tid < members) {
            u32 key = shared.keys[tid], id = shared.ids[tid], better = 0;
            for (u32 other = 0; other < members; ++other)
                better += shared.keys[other] > key || (shared.keys[other] == key && shared.ids[other] < id);
            if (better < need) atomicOr(&words[id / 32], 1u << id % 32);
        }
        __syncthreads();
    }

    int per_thread = padded / THREADS;
    if (!ranked) {
        u32 count = 0;
        for (int j = 0; j < per_thread; ++j) count += __popc(ties[tid * per_thread + j]);
        u32 before = block_before(count, shared);
        for (int j = 0; j < per_thread; ++j) {
            u32 word = ties[tid * per_thread + j], kept = 0;
            for (; word && before < need; ++before, word &= word - 1) kept |= word & -word;
            words[tid * per_thread + j] |= kept;
            before += __popc(word);
        }
    }
    u32 count = 0;
    for (int j = 0; j < per_thread; ++j) count += __popc(words[tid * per_thread + j]);
    u32 place = block_before(count, shared);
    for (int j = 0; j < per_thread; ++j) {
        int word = tid * per_thread + j;
        for (u32 bits = words[word]; bits; bits &= bits - 1) row_ids[place++] = word * 32 + __ffs(bits) - 1;
    }
    if (tid == 0) counts[row] = top_k, bad[row] = 0;
}
