// Pairs of fp16 in a register, without the toolkit's header: only what the sources need.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 to_half2(float low, float high) {
    u32 packed;
    asm("{ .reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
        : "=r"(packed)
        : "f"(low), "f"(high));
    return packed;
}

__device__ __forceinline__ float2 from_half2(u32 packed) {
    float2 x;
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(x.x), "=f"(x.y)
        : "r"(packed));
    return x;
}

__device__ __forceinline__ u32 half2_times_256(u32 x) {
    u32 y;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0x5C005C00u));
    return y;
}
