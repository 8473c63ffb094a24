// A CUDA source on a CPU: the lanes of a warp are fibres that meet at every warp-wide operation, warps run one by one.
//
// Only what the sources under test use: no block-wide barrier, no atomics. Shared memory starts as bytes of 0x7F. The
// matrix instruction follows the fragment layouts of the PTX manual, written down here a second time, element by element.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct dim3 {
    uint32_t x, y, z;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
using std::max;
using std::min;

constexpr int LANES = 32;
static dim3 threadIdx, blockIdx, blockDim;
static ucontext_t scheduler, fibres[LANES];
static std::vector<char> stacks[LANES];
static dim3 threads[LANES];
static bool done[LANES];
static int lane_now;
static uint64_t exchanged[2][LANES][16];
static int turn[LANES];
static void (*body)();

static void resume(int lane, ucontext_t *from) {
    lane_now = lane;
    threadIdx = threads[lane];
    swapcontext(from, &fibres[lane]);
}

// Gives `values` to the others and returns when all lanes have given theirs; a lane reads before it gives again.
static uint64_t (*meet(const uint64_t *values, int count))[16] {
    const int me = lane_now, buffer = turn[me] ^= 1;
    std::copy(values, values + count, exchanged[buffer][me]);
    swapcontext(&fibres[me], &scheduler);
    return exchanged[buffer];
}

static void fibre_main() {
    body();
    done[lane_now] = true;
}

static void run_warp() {
    for (int i = 0; i < LANES; i++) {
        stacks[i].resize(1 << 18);
        getcontext(&fibres[i]);
        fibres[i].uc_stack.ss_sp = stacks[i].data();
        fibres[i].uc_stack.ss_size = stacks[i].size();
        fibres[i].uc_link = &scheduler;
        makecontext(&fibres[i], fibre_main, 0);
        done[i] = false;
        turn[i] = 0;
    }
    for (bool any = true; any;) {
        any = false;
        for (int i = 0; i < LANES; i++)
            if (!done[i]) {
                resume(i, &scheduler);
                any = true;
            }
    }
}

template <class T>
static uint64_t bits_of(T x) {
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    return bits;
}

template <class T>
static T of_bits(uint64_t bits) {
    T x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline void __syncwarp() { meet(nullptr, 0); }

template <class T>
T __shfl_sync(uint32_t, T x, int lane) {
    const uint64_t mine = bits_of(x);
    return of_bits<T>(meet(&mine, 1)[lane & 31][0]);
}

template <class T>
T __shfl_xor_sync(uint32_t, T x, int lanes) {
    return __shfl_sync(~0u, x, lane_now ^ lanes);
}

inline uint32_t __ballot_sync(uint32_t, bool x) {
    const uint64_t mine = x;
    const auto all = meet(&mine, 1);
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)all[i][0] << i;
    return bits;
}

inline bool __any_sync(uint32_t, bool x) { return __ballot_sync(~0u, x) != 0; }

template <class T>
T __ldg(const T *from) {
    T x;
    memcpy(&x, from, sizeof x);
    return x;
}

inline uint32_t __float_as_uint(float x) { return of_bits<uint32_t>(bits_of(x)); }
inline float __uint_as_float(uint32_t x) { return of_bits<float>(bits_of(x)); }
inline float __int_as_float(int32_t x) { return of_bits<float>(bits_of(x)); }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) out |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return out;
}

// In the place of half.cuh.
inline float half_value(uint16_t bits) { return (float)of_bits<_Float16>(bits); }
inline uint16_t half_bits(float x) { return (uint16_t)bits_of((_Float16)x); }
inline uint32_t to_half2(float low, float high) { return half_bits(low) | (uint32_t)half_bits(high) << 16; }
inline float2 from_half2(uint32_t x) { return {half_value(x & 0xFFFF), half_value(x >> 16)}; }
inline uint32_t half2_times_256(uint32_t x) {
    const float2 pair = from_half2(x);
    return to_half2(pair.x * 256, pair.y * 256);
}

// In the place of sm70_mma.cuh. Quad-pair q is lanes 4q .. 4q + 3 and 16 + 4q .. 16 + 4q + 3.
inline float exp2_of(float x) { return std::exp2(x); }
inline float log2_of(float x) { return std::log2(x); }

inline void mma(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1, bool by_columns) {
    const uint64_t mine[4] = {a0, a1, b0, b1};
    const auto all = meet(mine, 4);
    const auto half_at = [&](int lane, int reg, int i) { return half_value(all[lane][reg + i / 2] >> 16 * (i & 1)); };
    const int first = lane_now & 12;
    float a[8][4], b[4][8];
    for (int member = 0; member < 8; member++) {
        const int lane = first + (member & 3) + (member >= 4 ? 16 : 0);
        for (int i = 0; i < 4; i++) {
            a[member][i] = half_at(lane, 0, i);
            if (by_columns) b[i][member] = half_at(lane, 2, i);
            else b[member & 3][(member >= 4 ? 4 : 0) + i] = half_at(lane, 2, i);
        }
    }
    for (int i = 0; i < 8; i++) {
        const int row = (lane_now & 1) + (i & 2) + (lane_now >= 16 ? 4 : 0), column = (i & 4) + (lane_now & 2) + (i & 1);
        for (int j = 0; j < 4; j++) c[i] += a[row][j] * b[j][column];
    }
}
inline void mma_columns(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) { mma(c, a0, a1, b0, b1, true); }
inline void mma_rows(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) { mma(c, a0, a1, b0, b1, false); }

// A kernel with the arguments that `args` points to, over a grid.
static void **arguments;

template <class... A>
int sizes_of(void (*)(A...), int *sizes) {
    int count = 0;
    ((sizes[count++] = sizeof(A)), ...);
    return count;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), std::index_sequence<I...>) {
    kernel(*(A *)arguments[I]...);
}

template <class... A>
void call(void (*kernel)(A...)) {
    call(kernel, std::index_sequence_for<A...>());
}

static void run_grid(void (*of_lane)(), void **args, const int *grid, const int *block, void *shared, size_t bytes) {
    body = of_lane;
    arguments = args;
    blockDim = {(uint32_t)block[0], (uint32_t)block[1], (uint32_t)block[2]};
    for (int z = 0; z < grid[2]; z++)
        for (int y = 0; y < grid[1]; y++)
            for (int x = 0; x < grid[0]; x++) {
                blockIdx = {(uint32_t)x, (uint32_t)y, (uint32_t)z};
                memset(shared, 0x7F, bytes);
                for (uint32_t first = 0; first < blockDim.x * blockDim.y; first += LANES) {
                    for (uint32_t i = 0; i < LANES; i++)
                        threads[i] = {(first + i) % blockDim.x, (first + i) / blockDim.x, 0};
                    run_warp();
                }
            }
}

#define EMULATED(KERNEL)                                                                              \
    extern "C" int sizes_##KERNEL(int *sizes) { return sizes_of(KERNEL, sizes); }                     \
    extern "C" void run_##KERNEL(void **args, const int *grid, const int *block) {                    \
        run_grid([] { call(KERNEL); }, args, grid, block, shared_memory, sizeof shared_memory);       \
    }
