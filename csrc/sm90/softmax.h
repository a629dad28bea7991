// The softmax of the two rows that a thread shares with three others, a block of keys at a time:
// see csrc/common/softmax_row.h.

#ifndef JAX_FA4_CSRC_SM90_SOFTMAX_H_
#define JAX_FA4_CSRC_SM90_SOFTMAX_H_

#include "csrc/common/lanes.h"
#include "csrc/common/row_bounds.h"
#include "csrc/common/softmax_row.h"
#include "csrc/ptx/ex2.h"
#include "csrc/ptx/scalar.h"

namespace jax_fa4::sm90 {

// Of products in registers: which of a thread's rows element i is of. See ptx/wgmma.h.
__device__ __forceinline__ constexpr int32_t RowOf(int32_t i) { return i / 2 % 2; }
inline constexpr int32_t kThreadRows = 2, kRowsApart = 8, kQuad = 4;

// Hides keys that are not in `seen`, of the block of keys that starts at `first`, in one of a
// thread's rows.
template <int32_t kRow, int32_t kCount>
__device__ __forceinline__ void Mask(float (&s)[kCount], KeySpan seen, uint32_t first) {
  // Of each 8 keys a thread has two neighbours. How many of its keys come before one of the block:
  const int32_t own = threadIdx.x % kQuad * 2;
  const auto before = [&](uint32_t key) {
    const int32_t x = static_cast<int32_t>(key - first) - own;
    return x < 0 ? 0 : x / 8 * 2 + min(x % 8, 2);
  };
  const uint32_t keep =
      ptx::bits_from(before(seen.begin), 0) & ~ptx::bits_from(before(seen.end), 0);
#pragma unroll
  for (int32_t i = 0; i < kCount; i += 4) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      float& x = s[i + kRow * 2 + j];
      x = ptx::selp_f32_bit(x, -Infinity(), keep, i / 2 + j);
    }
  }
}

// The bits of the largest element of a row, if one has no sign; else bits with a sign. As integers,
// the bits of floats without a sign are in the order of the floats, NaN last, and those of the
// others are negative. There is a maximum of three integers, which takes no longer than one of two
// floats.
template <int32_t kRow, int32_t kCount>
__device__ __forceinline__ uint32_t LargestBits(const float (&s)[kCount]) {
  const auto at = [&](int32_t i) { return __float_as_int(s[i / 2 * 4 + kRow * 2 + i % 2]); };
  int32_t largest[] = {max(at(0), at(1)), max(at(2), at(3))};
#pragma unroll
  for (int32_t i = 4; i < kCount / 2; i += 4) {
    largest[0] = max(max(largest[0], at(i)), at(i + 1));
    largest[1] = max(max(largest[1], at(i + 2)), at(i + 3));
  }
  return max(largest[0], largest[1]);
}

// The state of a thread's rows between blocks. The sums are of its own keys only.
struct SoftmaxRows {
  SoftmaxRow row[kThreadRows];
  float decay[kThreadRows];  // what is summed of values is to be multiplied by it
  // The bits of the first product, of those that are not negative, with which a block is not
  // weighed in the fewest instructions; 0 while a reference is huge.
  uint32_t unusual;

  __device__ __forceinline__ explicit SoftmaxRows(float scale_log2)
      : unusual(UnusualBits(scale_log2)) {}

  // Less than what makes a reference huge.
  static __device__ __forceinline__ uint32_t UnusualBits(float scale_log2) {
    return __float_as_uint(0x1p19f * ptx::rcp_approx_ftz_f32(scale_log2));
  }

  // Turns products into weights.
  template <int32_t kCount>
  __device__ __forceinline__ void Weigh(float (&s)[kCount], float scale_log2) {
    float highest[kThreadRows] = {row[0].maximum, row[1].maximum};
    // As unsigned integers, bits with a sign are larger than any without.
    if (const uint32_t bits[] = {LargestBits<0>(s), LargestBits<1>(s)};
        __any_sync(kAllLanes, max(bits[0], bits[1]) >= unusual)) {
      unusual = UnusualBits(scale_log2);
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) highest[RowOf(i)] = fmaxf(highest[RowOf(i)], s[i]);
      float subtracted[kThreadRows];
#pragma unroll
      for (int32_t r = 0; r < kThreadRows; ++r) {
        highest[r] = LaneMax<kQuad>(highest[r]);
        SoftmaxRow raised = row[r];
        SoftmaxRow::Step step = raised.Raise(highest[r], scale_log2);
        if (SoftmaxRow::IsHuge(step.reference)) unusual = 0;
        subtracted[r] = raised.SubtractFirst(step);
      }
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) s[i] -= subtracted[RowOf(i)];
    } else {
#pragma unroll
      for (int32_t r = 0; r < kThreadRows; ++r) {
        highest[r] = fmaxf(highest[r], __uint_as_float(bits[r]));
      }
    }
    SoftmaxRow::Step step[kThreadRows];
#pragma unroll
    for (int32_t r = 0; r < kThreadRows; ++r) {
      // NaN need not come through: its weight is NaN in any case.
      step[r] = row[r].Raise(LaneMax<kQuad>(highest[r]), scale_log2);
      decay[r] = step[r].decay;
      row[r].SubtractFirst(step[r]);
    }
    float sums[kThreadRows];
#pragma unroll
    for (int32_t i = 0; i < kCount; ++i) {
      s[i] = ptx::ex2_approx_ftz_f32(fmaf(s[i], scale_log2, -step[RowOf(i)].reference));
      sums[RowOf(i)] = i == 0 || i == 2 ? s[i] : sums[RowOf(i)] + s[i];
    }
#pragma unroll
    for (int32_t r = 0; r < kThreadRows; ++r) row[r].sum = fmaf(row[r].sum, decay[r], sums[r]);
  }

  // Whether a row of the warp has a new reference.
  __device__ __forceinline__ bool AnyDecays() const {
    return __any_sync(kAllLanes, decay[0] < 1 || decay[1] < 1);
  }

  // When all blocks are through: the sums of whole rows.
  __device__ __forceinline__ void Close(float scale_log2) {
#pragma unroll
    for (SoftmaxRow& one : row) {
      one.sum = LaneSum<kQuad>(one.sum);
      one.Close(scale_log2);
    }
  }
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_SOFTMAX_H_
