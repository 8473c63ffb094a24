// The codec of e4m3.cuh by itself, for tests against the other codecs: one thread for each element.
#include "e4m3.cuh"

extern "C" __global__ void page4_e4m3_decode(const u32 *bytes, u32 *exact, u32 *raw, i32 words) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= words) return;
    e4m3_decode(bytes[i], exact[2 * i], exact[2 * i + 1]);
    e4m3_decode_raw(bytes[i], raw[2 * i], raw[2 * i + 1]);
}

extern "C" __global__ void page4_e4m3_encode(const float *values, u8 *bytes, i32 count) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) bytes[i] = e4m3_encode(values[i]);
}
