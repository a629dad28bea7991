// Tensor maps (CUtensorMap) as data, and the tiles that the copy engine (TMA) moves with them.
//
// Source: CUDA driver API 13.0, cuTensorMapEncodeTiled; PTX ISA 9.0, sections 5.5 (Tensors) and
// 9.7.9.25 (cp.async.bulk.tensor, cp.reduce.async.bulk.tensor).

#ifndef JAX_FA4_CSRC_EMULATOR_TENSOR_MAP_H_
#define JAX_FA4_CSRC_EMULATOR_TENSOR_MAP_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "csrc/emulator/tensor_core.h"

namespace jax_fa4::emulator {

inline constexpr int kMaxRank = 5;
inline constexpr size_t kTensorMapBytes = 128;
inline constexpr size_t kTensorMapAlignment = 64;

// Numbered as CUtensorMapDataType, CUtensorMapInterleave and CUtensorMapSwizzle are.
enum class TensorMapType : uint8_t {
  kUint8,
  kUint16,
  kUint32,
  kInt32,
  kUint64,
  kInt64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat32Ftz,
  kTf32,
  kTf32Ftz,
  k16U4Align8,  // not modelled, with the two below
  k16U4Align16,
  k16U6Align16,
};
enum class TensorMapInterleave : uint8_t { kNone, k16Bytes, k32Bytes };
enum class TensorMapSwizzle : uint8_t {
  kNone,
  k32Bytes,
  k64Bytes,
  k128Bytes,
  k128BytesAtom32,  // not modelled, with the two below
  k128BytesAtom32Flip8,
  k128BytesAtom64,
};

// Dimension 0 is the innermost. What the driver calls globalStrides[i] is strides[i + 1].
struct TensorMap {
  TensorMapType type = TensorMapType::kBfloat16;
  int rank = 0;
  uint64_t global_address = 0;
  std::array<uint64_t, kMaxRank> dims = {};
  std::array<uint64_t, kMaxRank> strides = {};  // in bytes; [0] is not used
  std::array<uint32_t, kMaxRank> box = {};
  std::array<uint32_t, kMaxRank> element_strides = {1, 1, 1, 1, 1};
  TensorMapInterleave interleave = TensorMapInterleave::kNone;
  TensorMapSwizzle swizzle = TensorMapSwizzle::kNone;
  uint8_t l2_promotion = 0;  // 0 to 3, of no effect here
  bool fill_nan = false;     // CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA

  bool operator==(const TensorMap&) const = default;
};

// 1, 2, 4 or 8; 0 for types that are not modelled.
uint32_t ElementBytes(TensorMapType type);

// What cuTensorMapEncodeTiled would refuse, or what is not modelled, as a sentence; "" if neither.
// The driver's assert(globalStrides[i] >= globalDim[i]) is left out: it compares bytes with
// elements, and the tensors in use, heads within rows, break it.
std::string Validate(const TensorMap& map);

// The 128 bytes that a kernel gets as its parameter. NVIDIA's layout is not public; this one is the
// emulator's own, and little-endian:
//   0 magic "FA4TMAP1"   8 global address   16 dims - 1 (5 x u32)   36 box - 1 (5 x u8)
//   41 element strides (5 x u8)   46 rank   47 type   48 interleave   49 swizzle   50 L2 promotion
//   51 fill   56 strides of dimensions 1 to 4 (4 x u64)   88 zeros   120 FNV-1a hash of bytes 0-119
std::array<uint8_t, kTensorMapBytes> EncodeTensorMap(const TensorMap& map);
// Returns what is wrong with the bytes, or "" with *map set.
std::string DecodeTensorMap(std::span<const uint8_t> bytes, TensorMap* map);

// ---- Tiles ----

// Elements along a dimension that one tile has: its box, thinned by the element stride (which the
// engine ignores in dimension 0 of a tensor that is not interleaved).
constexpr uint32_t TileExtent(const TensorMap& map, int dimension) {
  const uint32_t step = dimension == 0 ? 1 : map.element_strides[dimension];
  return (map.box[dimension] + step - 1) / step;
}

// Bytes of a tile, which it adds to an mbarrier's transaction count, whatever lies out of bounds.
uint32_t TileBytes(const TensorMap& map);

// Bytes from one row of a tile to the next in shared memory. With a swizzle it is the swizzle's
// width, of which narrower rows leave the rest alone. An H200 does so.
uint32_t RowPitch(const TensorMap& map);

// Bytes of shared memory in which a tile lies. It starts at a multiple of 128.
uint32_t TileSpan(const TensorMap& map);

// What the copy engine refuses about a tile's coordinates, one for each dimension, or "". An H200
// ends a kernel with an illegal instruction where the innermost coordinate is no multiple of 16
// bytes, and where that of a store is negative in any dimension. All other tiles may lie partly or
// wholly outside of the tensor: loads are filled there, stores clipped.
std::string CheckCoordinates(const TensorMap& map,
                             std::span<const int32_t> coordinates,
                             bool is_store);

constexpr Swizzle SwizzleOf(const TensorMap& map) { return static_cast<Swizzle>(map.swizzle); }

// 16 bytes of a tile. Bytes [first, last) of them lie within the tensor, where byte i of the chunk
// is byte global_address + i of global memory; a load fills the others, a store leaves them out.
struct TileChunk {
  uint32_t shared_address = 0;  // with the swizzle applied
  uint64_t global_address = 0;
  uint32_t first = 0;
  uint32_t last = 0;
};

// Calls visit(chunk) for a tile's chunks, in the order of shared memory before the swizzle. The
// coordinates, innermost first, are of the tile's first element and may lie outside of the tensor.
// shared_address is absolute: the swizzle depends on it. The map is valid.
template <typename Visit>
void ForEachTileChunk(const TensorMap& map,
                      std::span<const int32_t> coordinates,
                      uint32_t shared_address,
                      Visit visit) {
  const int64_t element = ElementBytes(map.type);
  const int64_t row_bytes = int64_t{map.box[0]} * element;
  const int64_t start = coordinates[0] * element;  // of the row, from the tensor's edge
  const int64_t row_first = std::clamp<int64_t>(-start, 0, row_bytes);
  const int64_t row_last = std::clamp<int64_t>(
      static_cast<int64_t>(map.dims[0]) * element - start, row_first, row_bytes);
  std::array<uint32_t, kMaxRank> index = {};
  for (uint32_t row_address = shared_address;;) {
    bool within = true;
    uint64_t global = map.global_address + static_cast<uint64_t>(start);
    for (int i = 1; i < map.rank; ++i) {
      const int64_t at = coordinates[i] + int64_t{index[i]} * map.element_strides[i];
      within = within && at >= 0 && static_cast<uint64_t>(at) < map.dims[i];
      global += static_cast<uint64_t>(at) * map.strides[i];
    }
    for (int64_t byte = 0; byte < row_bytes; byte += 16) {
      TileChunk chunk{SwizzleAddress(row_address + static_cast<uint32_t>(byte), SwizzleOf(map)),
                      global + static_cast<uint64_t>(byte),
                      0,
                      0};
      if (within) {
        chunk.first = static_cast<uint32_t>(std::clamp<int64_t>(row_first - byte, 0, 16));
        chunk.last = static_cast<uint32_t>(std::clamp<int64_t>(row_last - byte, chunk.first, 16));
      }
      visit(chunk);
    }
    row_address += RowPitch(map);
    int i = 1;
    while (i < map.rank && ++index[i] == TileExtent(map, i)) index[i++] = 0;
    if (i >= map.rank) return;
  }
}

// Sixteen bytes of what a load puts where the tensor ends: zeros, or NaNs. Which NaN hardware puts
// is not documented; here it is the canonical one.
std::array<uint8_t, 16> FillPattern(const TensorMap& map);

// Loads a tile. read(global_address, bytes, destination) reads global memory; write(shared_address,
// source) writes 16 bytes of shared memory.
template <typename Read, typename Write>
void LoadTile(const TensorMap& map,
              std::span<const int32_t> coordinates,
              uint32_t shared_address,
              Read read,
              Write write) {
  const std::array<uint8_t, 16> fill = FillPattern(map);
  ForEachTileChunk(map, coordinates, shared_address, [&](const TileChunk& chunk) {
    std::array<uint8_t, 16> bytes = fill;
    if (chunk.first < chunk.last) {
      read(
          chunk.global_address + chunk.first, chunk.last - chunk.first, bytes.data() + chunk.first);
    }
    write(chunk.shared_address, bytes.data());
  });
}

// Stores a tile. read(shared_address, destination) reads 16 bytes; write(global_address, bytes,
// source) writes.
template <typename Read, typename Write>
void StoreTile(const TensorMap& map,
               std::span<const int32_t> coordinates,
               uint32_t shared_address,
               Read read,
               Write write) {
  ForEachTileChunk(map, coordinates, shared_address, [&](const TileChunk& chunk) {
    std::array<uint8_t, 16> bytes;
    read(chunk.shared_address, bytes.data());
    if (chunk.first < chunk.last) {
      write(
          chunk.global_address + chunk.first, chunk.last - chunk.first, bytes.data() + chunk.first);
    }
  });
}

// ---- Reductions of cp.reduce.async.bulk and its .tensor form ----

enum class Reduction : uint8_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor };

// What is wrong with reducing elements of this type so, or "".
std::string CheckReduction(TensorMapType type, Reduction reduction);

// destination = destination (op) source, for one element. Sums keep subnormal numbers (an H200's
// do, where its f32 atomics in global memory flush them). CheckReduction said "".
void ReduceElement(TensorMapType type,
                   Reduction reduction,
                   const uint8_t* source,
                   uint8_t* destination);

// Reduces a tile into global memory: as StoreTile, with reduce(global_address, source) called for
// each element that lies within the tensor.
template <typename Read, typename Reduce>
void ReduceTile(const TensorMap& map,
                std::span<const int32_t> coordinates,
                uint32_t shared_address,
                Read read,
                Reduce reduce) {
  const uint32_t element = ElementBytes(map.type);
  StoreTile(map,
            coordinates,
            shared_address,
            read,
            [&](uint64_t global_address, uint32_t bytes, const uint8_t* source) {
              for (uint32_t i = 0; i < bytes; i += element) reduce(global_address + i, source + i);
            });
}

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_TENSOR_MAP_H_
