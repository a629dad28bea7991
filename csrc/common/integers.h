// Fixed-width integers for headers that kernels and host code share: NVRTC has no <cstdint>.

#ifndef JAX_FA4_CSRC_COMMON_INTEGERS_H_
#define JAX_FA4_CSRC_COMMON_INTEGERS_H_

#ifdef __CUDACC_RTC__
using int32_t = int;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#endif  // JAX_FA4_CSRC_COMMON_INTEGERS_H_
