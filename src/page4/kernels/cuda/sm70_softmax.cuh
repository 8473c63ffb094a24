// What the attention and the merge of its parts share.
#pragma once
#include "half.cuh"
#include "sm70_mma.cuh"

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define NOTHING __int_as_float(0xFF800000)  // -inf

__device__ __forceinline__ float2 gated(float2 x, u32 gate) {
    const float2 g = from_half2(gate);
    return make_float2(x.x / (1.0f + exp2_of(-g.x * LOG2_E)), x.y / (1.0f + exp2_of(-g.y * LOG2_E)));
}
