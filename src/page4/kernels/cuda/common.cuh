// What every CUDA source starts from. NVRTC's wheel brings no headers, so nothing of the toolkit is included.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
