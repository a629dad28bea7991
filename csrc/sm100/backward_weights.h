// What a thread of the backward makes of the products: it has a key, and half of a block's rows.

#ifndef JAX_FA4_CSRC_SM100_BACKWARD_WEIGHTS_H_
#define JAX_FA4_CSRC_SM100_BACKWARD_WEIGHTS_H_

#include "csrc/common/element.h"
#include "csrc/common/lanes.h"
#include "csrc/common/logits.h"
#include "csrc/common/row_bounds.h"
#include "csrc/ptx/ex2.h"
#include "csrc/ptx/f32x2.h"
#include "csrc/ptx/scalar.h"
#include "csrc/sm100/backward_task.h"
#include "csrc/sm100/backward_variant.h"

namespace jax_fa4::sm100 {

// By what products are multiplied: to logits in base 2, or under a cap into Cap and out of it.
struct BackwardScale {
  float scale_log2, into_cap;

  __device__ __forceinline__ BackwardScale(float scale, float softcap) {
    scale_log2 = (softcap != 0 ? softcap / LogitScale::kCapped : scale) * kLog2E;
    // Infinite, it would make NaN of products of 0.
    const float ratio = scale / softcap * (2 * kLog2E);
    into_cap = fabsf(ratio) > kLargest ? copysignf(kLargest, ratio) : ratio;
  }
};

// Cap, and the cap's slope, 1 - tanh^2: not as a difference of near-equal numbers, of which little
// would be left where the cap is all but reached.
struct CapAndSlope {
  float2 capped, slope;

  __device__ __forceinline__ explicit CapAndSlope(float2 x) {
    constexpr float kCapped = LogitScale::kCapped;
    // tanh is 1 - 2r, and 1 - tanh^2 is 4r (1 - r).
    float2 r =
        make_float2(ptx::ex2_approx_ftz_f32(fabsf(x.x)), ptx::ex2_approx_ftz_f32(fabsf(x.y)));
    r = ptx::add_rn_f32x2(r, Both(1));
    r = make_float2(ptx::rcp_approx_ftz_f32(r.x), ptx::rcp_approx_ftz_f32(r.y));
    slope = ptx::mul_rn_f32x2(ptx::mul_rn_f32x2(r, Both(4)), ptx::sub_rn_f32x2(Both(1), r));
    const float2 large = ptx::fma_rn_f32x2(r, Both(-2 * kCapped), Both(kCapped));
    const float2 small = CapNearZero(x);
    capped = make_float2(fabsf(x.x) < kCapNearZero ? small.x : copysignf(large.x, x.x),
                         fabsf(x.y) < kCapNearZero ? small.y : copysignf(large.y, x.y));
  }
};

// A 32 x 32 matrix of bits, a row in each lane, becomes its transpose.
__device__ __forceinline__ uint32_t TransposeBits(uint32_t x) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t apart = 16; apart > 0; apart /= 2) {
    // Bits of numbers without `apart` in them.
    const uint32_t low = ~0u / ((1u << apart) + 1);
    const uint32_t other = __shfl_xor_sync(kAllLanes, x, apart);
    x = lane & apart ? (x & ~low) | (other >> apart & low) : (x & low) | (other << apart & ~low);
  }
  return x;
}

// Which of a thread's rows see its key: a bit a row, 32 rows in a word.
template <class Variant>
class SeenRows {
 public:
  static constexpr int32_t kWords = Variant::kShare / 32;
  uint32_t words[kWords];

  // A warp has 32 keys from `key` on, a lane each.
  __device__ __forceinline__ SeenRows(const BackwardParameters& p,
                                      const BackwardTask<Variant>& task,
                                      uint32_t key)
      : warp_key_(key), bounds_(BoundsOf(p, task.batch)) {
    const bool is_key = key + threadIdx.x % 32 < task.keys.end;
    if constexpr (Variant::kKind == MaskKind::kFull) {
#pragma unroll
      for (uint32_t& word : words) word = is_key ? ~0u : 0;
    } else if (bounds_.lower == nullptr && is_key) {
      // The interval of keys that a row sees makes one of rows that see a key.
      const int64_t behind = int64_t{key} + threadIdx.x % 32 + 1;
      rows_ = {CutToRows(behind - p.band_high), CutToRows(behind - p.band_low)};
    }
  }

  // Begins to load what Find needs for the rows from `first` on.
  __device__ __forceinline__ void Prefetch(uint32_t first) {
    if constexpr (Variant::kKind != MaskKind::kFull) {
      if (bounds_.lower == nullptr) return;
#pragma unroll
      for (int32_t i = 0; i < kWords; ++i) {
        spans_[i] = bounds_.Of(first + 32 * i + threadIdx.x % 32);
      }
    }
  }

  // Finds them, of the rows from `first` on. Whether some of the warp's rows do not see all of its
  // keys. All lanes call it together.
  __device__ __forceinline__ bool Find(uint32_t first) {
    if constexpr (Variant::kKind == MaskKind::kFull) {
      return warp_key_ + 32 > static_cast<uint32_t>(bounds_.keys);
    } else {
      const bool has_band = bounds_.lower == nullptr;
      uint32_t all = ~0u;
#pragma unroll
      for (int32_t i = 0; i < kWords; ++i) {
        words[i] = has_band ? Interval(rows_, first + 32 * i) : Interval(spans_[i], warp_key_);
        all &= words[i];
      }
      if (__all_sync(kAllLanes, all == ~0u)) return false;
      if (!has_band) {
        // A lane's bits are keys, of a row. They are to be rows, of a key.
#pragma unroll
        for (uint32_t& word : words) word = TransposeBits(word);
      }
      return true;
    }
  }

 private:
  uint32_t warp_key_;
  RowBounds bounds_;
  KeySpan rows_ = {0, 0};  // that see the thread's key, where the band tells
  KeySpan spans_[kWords];  // that the rows lane + 32 i see, where arrays tell

  static __device__ __forceinline__ uint32_t CutToRows(int64_t row) {
    return static_cast<uint32_t>(min(max(row, int64_t{0}), int64_t{0x7fffffff}));
  }
  // The bits of 32 numbers from `first` on that lie in it.
  static __device__ __forceinline__ uint32_t Interval(KeySpan span, uint32_t first) {
    return ptx::bits_from(static_cast<int32_t>(span.begin - first), 0) &
           ~ptx::bits_from(static_cast<int32_t>(span.end - first), 0);
  }
};

// Products become weights, in place: P = 2^(logit - lse); and under a cap also, in `slopes`, those
// times the slope of the cap.
template <class Variant, bool kMasked>
__device__ __forceinline__ void Weigh(float (&s)[32],
                                      uint32_t (&packed)[16],
                                      const float* lse_log2,
                                      const BackwardScale& scale,
                                      uint32_t keep) {
#pragma unroll
  for (int32_t row = 0; row < 32; row += 4) {
    const float4 lse = *reinterpret_cast<const float4*>(lse_log2 + row);
#pragma unroll
    for (int32_t i = row; i < row + 4; i += 2) {
      float2 x = make_float2(s[i], s[i + 1]), slope = Both(1);
      if (Variant::kKind == MaskKind::kSoftcap) {
        const CapAndSlope cap(ptx::mul_rn_f32x2(x, Both(scale.into_cap)));
        x = cap.capped;
        slope = cap.slope;
      }
      // The unit for exponentials negates for nothing.
      x = ptx::fma_rn_f32x2(x,
                            Both(-scale.scale_log2),
                            i == row ? make_float2(lse.x, lse.y) : make_float2(lse.z, lse.w));
      x = make_float2(ptx::ex2_approx_ftz_f32(-x.x), ptx::ex2_approx_ftz_f32(-x.y));
      if (kMasked) {
        x = make_float2(ptx::selp_f32_bit(x.x, 0, keep, i), ptx::selp_f32_bit(x.y, 0, keep, i + 1));
      }
      packed[i / 2] = Pack<typename Variant::Element>(x.x, x.y);
      if (Variant::kKind == MaskKind::kSoftcap) x = ptx::mul_rn_f32x2(x, slope);
      s[i] = x.x;
      s[i + 1] = x.y;
    }
  }
}

// dS = P (dP - delta).
template <class Variant>
__device__ __forceinline__ void Differentiate(const float (&weights)[32],
                                              const float (&dp)[32],
                                              uint32_t (&packed)[16],
                                              const float* deltas) {
#pragma unroll
  for (int32_t row = 0; row < 32; row += 4) {
    const float4 delta = *reinterpret_cast<const float4*>(deltas + row);
#pragma unroll
    for (int32_t i = row; i < row + 4; i += 2) {
      float2 x = ptx::sub_rn_f32x2(
          make_float2(dp[i], dp[i + 1]),
          i == row ? make_float2(delta.x, delta.y) : make_float2(delta.z, delta.w));
      x = ptx::mul_rn_f32x2(make_float2(weights[i], weights[i + 1]), x);
      packed[i / 2] = Pack<typename Variant::Element>(x.x, x.y);
    }
  }
}

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BACKWARD_WEIGHTS_H_
