// What headers need that kernels and host code share: fixed-width integers, since NVRTC has no
// <cstdint>; and a word before functions, which NVRTC takes for host code otherwise, and refuses.

#ifndef JAX_FA4_CSRC_COMMON_INTEGERS_H_
#define JAX_FA4_CSRC_COMMON_INTEGERS_H_

#ifdef __CUDACC_RTC__
using int32_t = int;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#define JAX_FA4_HOST_DEVICE __device__
#else
#include <cstdint>
#define JAX_FA4_HOST_DEVICE
#endif

#endif  // JAX_FA4_CSRC_COMMON_INTEGERS_H_
