// Volta's matrix instruction, and base-2 exponentials.
//
// mma.m8n8k4: a warp is four quad-pairs of 8 lanes, {4q..4q+3, 16+4q..16+4q+3}, and each computes an own 8 x 8 x 4
// product. With r = lane % 4 + 4 * (lane >= 16), a lane holds
//     A, row-major   row r, k 0..3                            B, column-major   column r, k 0..3
//     B, row-major   k = lane % 4, columns 4 * (lane >= 16) + 0..3
//     C, element i   row (lane & 1) + (i & 2) + 4 * (lane >= 16), column (i & 4) + (lane & 2) + (i & 1)
#pragma once
#include "common.cuh"

#define MMA(LAYOUT) \
    asm volatile("mma.sync.aligned.m8n8k4.row." LAYOUT \
                 ".f32.f16.f16.f32 " \
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]) \
                 : "r"(a0), "r"(a1), "r"(b0), "r"(b1))

// C += A B with B held by columns (K: a lane owns a token) and by rows (V: a lane owns a token).
__device__ __forceinline__ void mma_columns(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) { MMA("col"); }
__device__ __forceinline__ void mma_rows(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) { MMA("row"); }

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
