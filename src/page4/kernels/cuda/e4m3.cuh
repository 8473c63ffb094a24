// E4M3 for GPUs without fp8 instructions: exact decoding by bit arithmetic, and the encoder that page4.codec defines.
//
// A byte s.eeee.mmm moved into an fp16 as s.0eeee.mmm0000000 is its value times 2^-8: both formats have the same shape,
// only the bias differs (7 and 15), for subnormals too. The two NaN bytes would read as 480 / 256; adding one to their
// last mantissa bit carries into bit 14 and nobody else's does, which sets their exponent to all ones.
#pragma once
#include "half.cuh"

#define E4M3_RAW 256.0f  // what a raw value has to be multiplied by

// Two bytes, in the upper bytes of the halves of `spread`, as two fp16 of value / 256.
__device__ __forceinline__ u32 e4m3_raw_of_spread(u32 spread) {
    const u32 x = (spread & 0x80008000u) | (spread >> 1 & 0x3F803F80u);
    return x | ((x + 0x00800080u) & 0x40004000u);
}

// Four bytes as four fp16 of value / 256, in memory order; every value is exact.
__device__ __forceinline__ void e4m3_decode_raw(u32 bytes, u32 &first, u32 &second) {
    first = e4m3_raw_of_spread(__byte_perm(bytes, 0, 0x1404));
    second = e4m3_raw_of_spread(__byte_perm(bytes, 0, 0x3424));
}

// Four bytes as four fp16, in memory order. fp16 holds every E4M3 value.
__device__ __forceinline__ void e4m3_decode(u32 bytes, u32 &first, u32 &second) {
    e4m3_decode_raw(bytes, first, second);
    first = half2_times_256(first);
    second = half2_times_256(second);
}

// Round to nearest even, saturating at +-448; a NaN keeps its sign and becomes 0x7F or 0xFF.
__device__ __forceinline__ u8 e4m3_encode(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    u32 magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7Fu;
    magnitude = min(magnitude, 0x43E00000u);  // 448
    // Below 2^-6 the step is 2^-9; a value that rounds up to 8 of them is the smallest normal one, code 8.
    if (magnitude < 0x3C800000u) return sign | __float2int_rn(__uint_as_float(magnitude) * 512.0f);
    magnitude += 0x7FFFFu + (magnitude >> 20 & 1u);
    return sign | ((magnitude >> 20) - (120u << 3));
}
