// Which keys a row sees: an interval for each row, from arrays or from the formula of a band; and
// what follows for a tile of rows.

#ifndef JAX_FA4_CSRC_COMMON_ROW_BOUNDS_H_
#define JAX_FA4_CSRC_COMMON_ROW_BOUNDS_H_

#include "csrc/common/integers.h"
#include "csrc/common/lanes.h"

namespace jax_fa4 {

// Keys [begin, end); none if begin >= end. Unsigned, so that the end of a tile at the last of
// 2^31 - 1 keys does not overflow.
struct KeySpan {
  uint32_t begin, end;

  __device__ __forceinline__ bool Empty() const { return begin >= end; }
  __device__ __forceinline__ bool Holds(uint32_t key) const { return begin <= key && key < end; }
  __device__ __forceinline__ bool Holds(KeySpan other) const {
    return begin <= other.begin && other.end <= end;
  }
  __device__ __forceinline__ bool Meets(KeySpan other) const {
    return begin < other.end && other.begin < end;
  }
  // Of two that are not empty: from the first to the last key that is in either; and the keys that
  // are in both. {~0, 0} adds nothing to the former, {0, ~0} takes nothing from the latter.
  __device__ __forceinline__ KeySpan HullWith(const KeySpan& other) const {
    return {min(begin, other.begin), max(end, other.end)};
  }
  __device__ __forceinline__ KeySpan CommonWith(const KeySpan& other) const {
    return {max(begin, other.begin), min(end, other.end)};
  }
};

// Both of the spans that the lanes of a warp have. All lanes call it together.
__device__ __forceinline__ KeySpan HullOfLanes(KeySpan span) {
  return {__reduce_min_sync(kAllLanes, span.begin), __reduce_max_sync(kAllLanes, span.end)};
}
__device__ __forceinline__ KeySpan CommonToLanes(KeySpan span) {
  return {__reduce_max_sync(kAllLanes, span.begin), __reduce_min_sync(kAllLanes, span.end)};
}

// The bounds of a tile's rows, which a warp holds together: each lane those of rows lane + 32 i.
template <int32_t kRows>
struct TileBounds {
  static constexpr int32_t kSpans = (kRows + 31) / 32;
  KeySpan spans[kSpans];
  // Rows that see nothing count for neither: their results are 0 whatever is computed.
  KeySpan some;  // from the first to the last key that some row sees; {~0, 0} if there is none
  KeySpan all;   // the keys that all rows see: there no mask is needed

  // Of row offset + 16 i of the tile, where offset is less than 16. All lanes call it together.
  __device__ __forceinline__ KeySpan Of(uint32_t offset, int32_t i) const {
    const uint32_t lane = offset + i % 2 * 16;
    return {__shfl_sync(kAllLanes, spans[i / 2].begin, lane),
            __shfl_sync(kAllLanes, spans[i / 2].end, lane)};
  }
};

// The bounds of the rows of one batch element.
struct RowBounds {
  const int32_t* lower;  // (T,), from 0 to S; both null where the band tells the bounds
  const int32_t* upper;
  int32_t rows, keys;           // T, S
  int32_t band_low, band_high;  // row i sees keys [i + band_low, i + band_high) cut to [0, S)

  // Rows from T on see nothing.
  __device__ __forceinline__ KeySpan Of(uint32_t row) const {
    if (row >= static_cast<uint32_t>(rows)) return {0, 0};
    if (lower != nullptr) {
      return {static_cast<uint32_t>(lower[row]), static_cast<uint32_t>(upper[row])};
    }
    return {Cut(int64_t{row} + band_low), Cut(int64_t{row} + band_high)};
  }

  // Of rows [first, first + kRows). Each warp of a CTA reads all of them, which takes less time
  // than to wait for others. All lanes call it together.
  template <int32_t kRows>
  __device__ __forceinline__ TileBounds<kRows> OfTile(uint32_t first) const {
    TileBounds<kRows> tile = {{}, {~0u, 0}, {0, ~0u}};
    KeySpan &some = tile.some, &all = tile.all;
#pragma unroll
    for (int32_t i = 0; i < tile.kSpans; ++i) {
      const KeySpan span = Of(first + (threadIdx.x % 32 + 32 * i) % kRows);
      tile.spans[i] = span;
      if (!span.Empty()) {
        some = some.HullWith(span);
        all = all.CommonWith(span);
      }
    }
    some = HullOfLanes(some);
    all = CommonToLanes(all);
    return tile;
  }

  // The keys from the first to the last that some row of [first, end) sees; {0, 0} if there is
  // none. All lanes of a warp call it together.
  __device__ __forceinline__ KeySpan Hull(uint32_t first, uint32_t end) const {
    end = min(end, static_cast<uint32_t>(rows));
    if (lower == nullptr) {
      // Bounds rise with the row. Where the first row sees nothing since its interval ends before
      // key 0, the first that sees something sees key 0, and likewise at the other end.
      const KeySpan hull = {Of(first).begin, Of(end - 1).end};
      return band_low < band_high && !hull.Empty() ? hull : KeySpan{0, 0};
    }
    KeySpan some = {~0u, 0};
#pragma unroll 1
    for (uint32_t row = first + threadIdx.x % 32; row < end; row += 32) {
      const KeySpan span = Of(row);
      if (!span.Empty()) some = {min(some.begin, span.begin), max(some.end, span.end)};
    }
    some = HullOfLanes(some);
    return some.Empty() ? KeySpan{0, 0} : some;
  }

 private:
  __device__ __forceinline__ uint32_t Cut(int64_t key) const {
    return static_cast<uint32_t>(min(max(key, int64_t{0}), int64_t{keys}));
  }
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_ROW_BOUNDS_H_
