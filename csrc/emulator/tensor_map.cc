#include "csrc/emulator/tensor_map.h"

#include <bit>

namespace jax_fa4::emulator {
namespace {

constexpr char kMagic[] = "FA4TMAP1";
constexpr size_t kHashOffset = 120;
constexpr uint64_t kMaxTileBytes = 1 << 24;

uint64_t Hash(const uint8_t* bytes, size_t count) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < count; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return hash;
}

template <typename T>
void Put(uint8_t* bytes, size_t offset, T value) {
  static_assert(std::endian::native == std::endian::little);
  std::memcpy(bytes + offset, &value, sizeof value);
}

template <typename T>
T Get(const uint8_t* bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes + offset, sizeof value);
  return value;
}

bool IsFloat(TensorMapType type) {
  switch (type) {
    case TensorMapType::kFloat16:
    case TensorMapType::kFloat32:
    case TensorMapType::kFloat64:
    case TensorMapType::kBfloat16:
    case TensorMapType::kFloat32Ftz:
    case TensorMapType::kTf32:
    case TensorMapType::kTf32Ftz:
      return true;
    default:
      return false;
  }
}

std::string Of(const char* name, int i, uint64_t value) {
  return std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value);
}

template <typename T>
T Combine(Reduction reduction, T old, T value) {
  switch (reduction) {
    case Reduction::kAdd:
      return old + value;
    case Reduction::kMin:
      return std::min(old, value);
    case Reduction::kMax:
      return std::max(old, value);
    case Reduction::kInc:
      return old >= value ? 0 : old + 1;
    case Reduction::kDec:
      return old == 0 || old > value ? value : old - 1;
    case Reduction::kAnd:
      return old & value;
    case Reduction::kOr:
      return old | value;
    case Reduction::kXor:
      return old ^ value;
  }
  return old;
}

template <typename T, typename Function>
void Apply(const uint8_t* source, uint8_t* destination, Function function) {
  Put<T>(destination, 0, function(Get<T>(destination, 0), Get<T>(source, 0)));
}

}  // namespace

uint32_t ElementBytes(TensorMapType type) {
  switch (type) {
    case TensorMapType::kUint8:
      return 1;
    case TensorMapType::kUint16:
    case TensorMapType::kFloat16:
    case TensorMapType::kBfloat16:
      return 2;
    case TensorMapType::kUint32:
    case TensorMapType::kInt32:
    case TensorMapType::kFloat32:
    case TensorMapType::kFloat32Ftz:
    case TensorMapType::kTf32:
    case TensorMapType::kTf32Ftz:
      return 4;
    case TensorMapType::kUint64:
    case TensorMapType::kInt64:
    case TensorMapType::kFloat64:
      return 8;
    default:
      return 0;
  }
}

std::string Validate(const TensorMap& map) {
  const uint64_t element = ElementBytes(map.type);
  if (map.type > TensorMapType::k16U6Align16) return "the data type is none of CUtensorMapDataType";
  if (element == 0) return "packed data types of 4 and 6 bits are not modelled";
  if (map.rank < 1 || map.rank > kMaxRank) {
    return "the rank is " + std::to_string(map.rank) + ", not 1 to 5";
  }
  if (map.interleave != TensorMapInterleave::kNone) return "interleaved layouts are not modelled";
  if (map.global_address % 16 != 0) return "the global address is not a multiple of 16";
  for (int i = 0; i < map.rank; ++i) {
    if (map.dims[i] == 0 || map.dims[i] > uint64_t{1} << 32) {
      return Of("globalDim", i, map.dims[i]) + ", not 1 to 2^32";
    }
    if (i > 0 && (map.strides[i] % 16 != 0 || map.strides[i] >= uint64_t{1} << 40)) {
      return Of("globalStrides", i - 1, map.strides[i]) + ", not a multiple of 16 below 2^40";
    }
    if (map.box[i] == 0 || map.box[i] > 256) return Of("boxDim", i, map.box[i]) + ", not 1 to 256";
    if (map.element_strides[i] == 0 || map.element_strides[i] > 8) {
      return Of("elementStrides", i, map.element_strides[i]) + ", not 1 to 8";
    }
  }
  uint64_t tile = element;
  for (int i = 0; i < map.rank; ++i) tile *= TileExtent(map, i);
  if (tile > kMaxTileBytes) {
    return "the box has " + std::to_string(tile) + " bytes, more than shared memory";
  }
  const uint64_t inner = map.box[0] * element;
  if (inner % 16 != 0) {
    return "a row of the box has " + std::to_string(inner) + " bytes, not a multiple of 16";
  }
  if (map.swizzle > TensorMapSwizzle::k128BytesAtom64) {
    return "the swizzle is none of CUtensorMapSwizzle";
  }
  if (map.swizzle > TensorMapSwizzle::k128Bytes) {
    return "128-byte swizzles with atoms of 32 or 64 bytes are not modelled";
  }
  if (map.swizzle != TensorMapSwizzle::kNone && inner > SwizzleWidth(SwizzleOf(map))) {
    return "a row of the box has " + std::to_string(inner) + " bytes, more than its swizzle's " +
           std::to_string(SwizzleWidth(SwizzleOf(map)));
  }
  if (map.l2_promotion > 3) return "the L2 promotion is none of CUtensorMapL2promotion";
  if (map.fill_nan && !IsFloat(map.type)) return "NaNs as the fill need a floating-point type";
  return "";
}

std::array<uint8_t, kTensorMapBytes> EncodeTensorMap(const TensorMap& map) {
  std::array<uint8_t, kTensorMapBytes> image = {};
  uint8_t* bytes = image.data();
  std::memcpy(bytes, kMagic, 8);
  Put(bytes, 8, map.global_address);
  for (int i = 0; i < map.rank; ++i) {
    Put(bytes, 16 + 4 * i, static_cast<uint32_t>(map.dims[i] - 1));
    bytes[36 + i] = static_cast<uint8_t>(map.box[i] - 1);
    bytes[41 + i] = static_cast<uint8_t>(map.element_strides[i]);
    if (i > 0) Put(bytes, 56 + 8 * (i - 1), map.strides[i]);
  }
  bytes[46] = static_cast<uint8_t>(map.rank);
  bytes[47] = static_cast<uint8_t>(map.type);
  bytes[48] = static_cast<uint8_t>(map.interleave);
  bytes[49] = static_cast<uint8_t>(map.swizzle);
  bytes[50] = map.l2_promotion;
  bytes[51] = map.fill_nan;
  Put(bytes, kHashOffset, Hash(bytes, kHashOffset));
  return image;
}

std::string DecodeTensorMap(std::span<const uint8_t> image, TensorMap* map) {
  if (image.size() < kTensorMapBytes) return "a tensor map has 128 bytes";
  const uint8_t* bytes = image.data();
  if (std::memcmp(bytes, kMagic, 8) != 0)
    return "these 128 bytes are no tensor map of the emulator";
  if (Get<uint64_t>(bytes, kHashOffset) != Hash(bytes, kHashOffset)) {
    return "a tensor map was overwritten";
  }
  TensorMap decoded;
  decoded.global_address = Get<uint64_t>(bytes, 8);
  decoded.rank = bytes[46];
  if (decoded.rank < 1 || decoded.rank > kMaxRank) return "the rank of a tensor map is not 1 to 5";
  for (int i = 0; i < decoded.rank; ++i) {
    decoded.dims[i] = uint64_t{Get<uint32_t>(bytes, 16 + 4 * i)} + 1;
    decoded.box[i] = uint32_t{bytes[36 + i]} + 1;
    decoded.element_strides[i] = bytes[41 + i];
    if (i > 0) decoded.strides[i] = Get<uint64_t>(bytes, 56 + 8 * (i - 1));
  }
  decoded.type = static_cast<TensorMapType>(bytes[47]);
  decoded.interleave = static_cast<TensorMapInterleave>(bytes[48]);
  decoded.swizzle = static_cast<TensorMapSwizzle>(bytes[49]);
  decoded.l2_promotion = bytes[50];
  decoded.fill_nan = bytes[51] != 0;
  std::string problem = Validate(decoded);
  if (problem.empty()) *map = decoded;
  return problem;
}

uint32_t TileBytes(const TensorMap& map) {
  uint32_t bytes = ElementBytes(map.type);
  for (int i = 0; i < map.rank; ++i) bytes *= TileExtent(map, i);
  return bytes;
}

uint32_t RowPitch(const TensorMap& map) {
  return map.swizzle == TensorMapSwizzle::kNone ? map.box[0] * ElementBytes(map.type)
                                                : SwizzleWidth(SwizzleOf(map));
}

uint32_t TileSpan(const TensorMap& map) {
  return TileBytes(map) / (map.box[0] * ElementBytes(map.type)) * RowPitch(map);
}

std::string CheckCoordinates(const TensorMap& map,
                             std::span<const int32_t> coordinates,
                             bool is_store) {
  const auto element = static_cast<int32_t>(ElementBytes(map.type));
  if (coordinates[0] % (16 / element) != 0) {
    return "the innermost coordinate of a tile is " + std::to_string(coordinates[0]) +
           ", which is no multiple of 16 bytes (" + std::to_string(16 / element) + " elements)";
  }
  for (const int32_t coordinate : coordinates) {
    if (!is_store || coordinate >= 0) continue;
    return "a tile is stored at coordinate " + std::to_string(coordinate) +
           ", but the copy engine stores at non-negative ones only";
  }
  return "";
}

std::array<uint8_t, 16> FillPattern(const TensorMap& map) {
  std::array<uint8_t, 16> fill = {};
  if (!map.fill_nan) return fill;
  // All ones but the sign: the canonical NaN in every format.
  const uint32_t element = ElementBytes(map.type);
  for (uint32_t i = 0; i < fill.size(); ++i) fill[i] = i % element == element - 1 ? 0x7f : 0xff;
  return fill;
}

std::string CheckReduction(TensorMapType type, Reduction reduction) {
  bool ok = false;
  const bool min_max = reduction == Reduction::kMin || reduction == Reduction::kMax;
  const bool bitwise = reduction >= Reduction::kAnd;
  switch (type) {
    case TensorMapType::kUint32:
      ok = true;
      break;
    case TensorMapType::kInt32:
    case TensorMapType::kUint64:
    case TensorMapType::kInt64:
      ok = reduction == Reduction::kAdd || min_max || bitwise;
      break;
    case TensorMapType::kFloat16:
    case TensorMapType::kBfloat16:
      ok = reduction == Reduction::kAdd || min_max;
      break;
    case TensorMapType::kFloat32:
    case TensorMapType::kFloat32Ftz:
    case TensorMapType::kFloat64:
      ok = reduction == Reduction::kAdd;
      break;
    default:
      break;
  }
  return ok ? "" : "there is no such reduction for the type of the elements";
}

void ReduceElement(TensorMapType type,
                   Reduction reduction,
                   const uint8_t* source,
                   uint8_t* destination) {
  switch (type) {
    case TensorMapType::kUint32:
      return Apply<uint32_t>(
          source, destination, [=](uint32_t a, uint32_t b) { return Combine(reduction, a, b); });
    case TensorMapType::kUint64:
      return Apply<uint64_t>(
          source, destination, [=](uint64_t a, uint64_t b) { return Combine(reduction, a, b); });
    case TensorMapType::kInt32:
    case TensorMapType::kInt64:
      // Signed sums wrap: only the order of numbers differs from unsigned ones.
      if (reduction != Reduction::kMin && reduction != Reduction::kMax) {
        return ReduceElement(
            type == TensorMapType::kInt32 ? TensorMapType::kUint32 : TensorMapType::kUint64,
            reduction,
            source,
            destination);
      }
      if (type == TensorMapType::kInt32) {
        return Apply<int32_t>(
            source, destination, [=](int32_t a, int32_t b) { return Combine(reduction, a, b); });
      }
      return Apply<int64_t>(
          source, destination, [=](int64_t a, int64_t b) { return Combine(reduction, a, b); });
    case TensorMapType::kFloat16:
    case TensorMapType::kBfloat16: {
      const HalfType half = type == TensorMapType::kFloat16 ? HalfType::kF16 : HalfType::kBf16;
      return Apply<uint16_t>(source, destination, [=](uint16_t a, uint16_t b) {
        if (reduction == Reduction::kAdd) return HalfAdd(half, a, b);
        return reduction == Reduction::kMin ? HalfMin(half, a, b) : HalfMax(half, a, b);
      });
    }
    case TensorMapType::kFloat64:
      return Apply<double>(source, destination, [](double a, double b) { return a + b; });
    default:
      return Apply<float>(source, destination, [](float a, float b) { return Add(a, b, {}); });
  }
}

}  // namespace jax_fa4::emulator
