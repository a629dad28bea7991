// Checks csrc/emulator/tensor_map.h. Prints what failed and returns 1, or a line of counts.

#include "csrc/emulator/tensor_map.h"

#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace jax_fa4::emulator {
namespace {

int failures = 0;
long checks = 0;

void Check(bool ok, const std::string& what) {
  ++checks;
  if (!ok && ++failures <= 40) std::printf("FAILED: %s\n", what.c_str());
}

// FlashAttention's Q: {D, S, H, B} of a [B, S, H, D] array.
TensorMap Attention() {
  TensorMap map;
  map.rank = 4;
  map.global_address = 4096;
  map.dims = {128, 1000, 8, 2};
  map.strides = {0, 8 * 256, 256, 1000 * 8 * 256};
  map.box = {64, 128, 1, 1};
  map.swizzle = TensorMapSwizzle::k128Bytes;
  return map;
}

void TestValidate() {
  Check(Validate(Attention()).empty(), "FlashAttention's map: " + Validate(Attention()));
  const auto refuse = [](const char* what, const std::function<void(TensorMap&)>& change) {
    TensorMap map = Attention();
    change(map);
    Check(!Validate(map).empty(), std::string("refused: ") + what);
  };
  refuse("rank 0", [](TensorMap& map) { map.rank = 0; });
  refuse("rank 6", [](TensorMap& map) { map.rank = 6; });
  refuse("address", [](TensorMap& map) { map.global_address += 8; });
  refuse("dim 0", [](TensorMap& map) { map.dims[2] = 0; });
  refuse("dim 2^32 + 1", [](TensorMap& map) { map.dims[1] = (uint64_t{1} << 32) + 1; });
  refuse("stride of 8", [](TensorMap& map) { map.strides[2] = 8; });
  refuse("stride of 2^40", [](TensorMap& map) { map.strides[3] = uint64_t{1} << 40; });
  refuse("box 0", [](TensorMap& map) { map.box[1] = 0; });
  refuse("box 257", [](TensorMap& map) { map.box[1] = 257; });
  refuse("box of 12 bytes", [](TensorMap& map) { map.box[0] = 6; });
  refuse("box wider than the swizzle", [](TensorMap& map) { map.box[0] = 72; });
  refuse("box wider than 64 bytes",
         [](TensorMap& map) { map.swizzle = TensorMapSwizzle::k64Bytes; });
  refuse("element stride 0", [](TensorMap& map) { map.element_strides[1] = 0; });
  refuse("element stride 9", [](TensorMap& map) { map.element_strides[1] = 9; });
  refuse("interleave", [](TensorMap& map) { map.interleave = TensorMapInterleave::k16Bytes; });
  refuse("atom", [](TensorMap& map) { map.swizzle = TensorMapSwizzle::k128BytesAtom32; });
  refuse("no swizzle", [](TensorMap& map) { map.swizzle = static_cast<TensorMapSwizzle>(7); });
  refuse("packed type", [](TensorMap& map) { map.type = TensorMapType::k16U4Align8; });
  refuse("no type", [](TensorMap& map) { map.type = static_cast<TensorMapType>(16); });
  refuse("NaN of integers", [](TensorMap& map) {
    map.fill_nan = true;
    map.type = TensorMapType::kUint16;
  });
  TensorMap map = Attention();
  map.dims[1] = uint64_t{1} << 32;
  Check(Validate(map).empty(), "dim 2^32");
  map.rank = 1;
  map.box[1] = 0;
  Check(Validate(map).empty(), "what lies beyond the rank is not looked at");
}

void TestImage() {
  TensorMap map = Attention();
  map.element_strides = {1, 2, 3, 1, 1};
  map.dims[2] = uint64_t{1} << 32;
  map.box[1] = 256;
  map.fill_nan = true;
  map.l2_promotion = 2;
  auto image = EncodeTensorMap(map);
  TensorMap decoded;
  Check(DecodeTensorMap(image, &decoded).empty(), "image");
  Check(decoded == map, "an image holds all of a map");
  for (size_t i = 0; i < image.size(); ++i) {
    auto broken = image;
    broken[i] ^= 1;
    Check(!DecodeTensorMap(broken, &decoded).empty(), "a broken image, byte " + std::to_string(i));
  }
  Check(!DecodeTensorMap({image.data(), 64}, &decoded).empty(), "a short image");
}

// ---- Tiles, against the definition one element at a time ----

class Memory {
 public:
  explicit Memory(size_t size) : bytes(size) {}
  std::vector<uint8_t> bytes;
  long bad = 0;

  bool Has(uint64_t address, size_t count) {
    if (address <= bytes.size() && count <= bytes.size() - address) return true;
    ++bad;
    return false;
  }
};

uint32_t ByDefinition(uint32_t address, TensorMapSwizzle swizzle) {
  const uint32_t bit4 = address >> 4 & 1, bit5 = address >> 5 & 1, bit6 = address >> 6 & 1;
  const uint32_t bit7 = address >> 7 & 1, bit8 = address >> 8 & 1, bit9 = address >> 9 & 1;
  uint32_t result = address & ~0x70u;
  switch (swizzle) {
    case TensorMapSwizzle::k32Bytes:
      return result | (bit4 ^ bit7) << 4 | bit5 << 5 | bit6 << 6;
    case TensorMapSwizzle::k64Bytes:
      return result | (bit4 ^ bit7) << 4 | (bit5 ^ bit8) << 5 | bit6 << 6;
    case TensorMapSwizzle::k128Bytes:
      return result | (bit4 ^ bit7) << 4 | (bit5 ^ bit8) << 5 | (bit6 ^ bit9) << 6;
    default:
      return address;
  }
}

struct RandomTile {
  TensorMap map;
  std::array<int32_t, kMaxRank> at = {};
  uint32_t shared = 0;
  uint64_t global_bytes = 0;
};

RandomTile Draw(std::mt19937& random) {
  RandomTile tile;
  TensorMap& map = tile.map;
  constexpr TensorMapType kTypes[] = {TensorMapType::kUint8,
                                      TensorMapType::kBfloat16,
                                      TensorMapType::kFloat32,
                                      TensorMapType::kInt64};
  map.type = kTypes[random() % 4];
  const uint32_t element = ElementBytes(map.type);
  map.rank = 1 + static_cast<int>(random() % 5);
  map.swizzle = static_cast<TensorMapSwizzle>(random() % 4);
  const uint32_t row = map.swizzle == TensorMapSwizzle::kNone
                           ? 16 * (1 + random() % 5)
                           : 16 * (1 + random() % (SwizzleWidth(SwizzleOf(map)) / 16));
  map.box[0] = row / element;
  map.dims[0] = 1 + random() % 40;
  uint64_t bytes = (map.dims[0] * element + 15) / 16 * 16;
  for (int i = 1; i < map.rank; ++i) {
    map.box[i] = 1 + random() % 5;
    map.element_strides[i] = random() % 4 == 0 ? 1 + random() % 3 : 1;
    map.dims[i] = 1 + random() % 5;
    map.strides[i] = bytes + 16 * (random() % 3);
    bytes = map.strides[i] * map.dims[i];
  }
  map.global_address = 16 * (random() % 8);
  tile.global_bytes = map.global_address + bytes;
  for (int i = 0; i < map.rank; ++i) {
    tile.at[i] = static_cast<int32_t>(random() % (map.dims[i] + 6)) - 3;
  }
  tile.shared = 128 * (random() % 16);
  map.fill_nan = element == 2 && random() % 2;
  return tile;
}

// Calls visit(shared address, global address, in bounds) for every element of a tile.
template <typename Visit>
void EachElement(const RandomTile& tile, Visit visit) {
  const TensorMap& map = tile.map;
  const uint32_t element = ElementBytes(map.type);
  // 32, 64 or 128 bytes with a swizzle, which the modes are numbered by.
  const uint32_t pitch = map.swizzle == TensorMapSwizzle::kNone
                             ? map.box[0] * element
                             : 16u << static_cast<int>(map.swizzle);
  uint32_t count = 1;
  for (int i = 0; i < map.rank; ++i) count *= TileExtent(map, i);
  for (uint32_t n = 0; n < count; ++n) {
    uint32_t rest = n;
    bool within = true;
    uint64_t global = map.global_address;
    for (int i = 0; i < map.rank; ++i) {
      const uint32_t index = rest % TileExtent(map, i);
      rest /= TileExtent(map, i);
      const int64_t at = tile.at[i] + int64_t{index} * (i == 0 ? 1 : map.element_strides[i]);
      within = within && at >= 0 && at < static_cast<int64_t>(map.dims[i]);
      global += static_cast<uint64_t>(at) * (i == 0 ? element : map.strides[i]);
    }
    const uint32_t row = n / map.box[0], column = n % map.box[0];
    visit(ByDefinition(tile.shared + row * pitch + column * element, map.swizzle), global, within);
  }
}

void TestTiles() {
  std::mt19937 random(5);
  long within_count = 0, outside_count = 0;
  for (int round = 0; round < 4000; ++round) {
    const RandomTile tile = Draw(random);
    const TensorMap& map = tile.map;
    const uint32_t element = ElementBytes(map.type);
    Check(Validate(map).empty(), "a random map: " + Validate(map));
    Memory global(tile.global_bytes), shared(2048 + TileSpan(map) + 1024);
    for (uint8_t& byte : global.bytes) byte = static_cast<uint8_t>(random());
    for (uint8_t& byte : shared.bytes) byte = static_cast<uint8_t>(random());

    const auto read_global = [&](uint64_t address, uint32_t bytes, uint8_t* to) {
      if (global.Has(address, bytes)) std::memcpy(to, &global.bytes[address], bytes);
    };
    const auto write_shared = [&](uint32_t address, const uint8_t* from) {
      if (shared.Has(address, 16)) std::memcpy(&shared.bytes[address], from, 16);
    };
    Memory expected = shared;
    EachElement(tile, [&](uint32_t to, uint64_t from, bool within) {
      within ? ++within_count : ++outside_count;
      for (uint32_t i = 0; i < element; ++i) {
        const uint8_t fill = !map.fill_nan ? 0 : i == element - 1 ? 0x7f : 0xff;
        expected.bytes[to + i] = within ? global.bytes[from + i] : fill;
      }
    });
    LoadTile(map, {tile.at.data(), 5}, tile.shared, read_global, write_shared);
    Check(shared.bytes == expected.bytes, "a load, round " + std::to_string(round));

    for (uint8_t& byte : shared.bytes) byte = static_cast<uint8_t>(random());
    const auto read_shared = [&](uint32_t address, uint8_t* to) {
      if (shared.Has(address, 16)) std::memcpy(to, &shared.bytes[address], 16);
    };
    Memory stored = global, reduced = global;
    EachElement(tile, [&](uint32_t from, uint64_t to, bool within) {
      if (!within) return;
      std::memcpy(&stored.bytes[to], &shared.bytes[from], element);
      if (map.type == TensorMapType::kInt64) {
        int64_t a, b;
        std::memcpy(&a, &reduced.bytes[to], 8);
        std::memcpy(&b, &shared.bytes[from], 8);
        a = std::max(a, b);
        std::memcpy(&reduced.bytes[to], &a, 8);
      }
    });
    if (map.type == TensorMapType::kInt64) {
      Memory result = global;
      ReduceTile(map,
                 {tile.at.data(), 5},
                 tile.shared,
                 read_shared,
                 [&](uint64_t address, const uint8_t* source) {
                   ReduceElement(map.type, Reduction::kMax, source, &result.bytes[address]);
                 });
      Check(result.bytes == reduced.bytes, "a reduction, round " + std::to_string(round));
    }
    StoreTile(map,
              {tile.at.data(), 5},
              tile.shared,
              read_shared,
              [&](uint64_t address, uint32_t bytes, const uint8_t* from) {
                if (global.Has(address, bytes)) std::memcpy(&global.bytes[address], from, bytes);
              });
    Check(global.bytes == stored.bytes, "a store, round " + std::to_string(round));
    Check(global.bad == 0 && shared.bad == 0, "accesses in range");
  }
  Check(within_count > 10000 && outside_count > 10000, "both kinds of elements occur");

  TensorMap map = Attention();
  Check(TileBytes(map) == 16384, "bytes of a tile");
  Check(TileSpan(map) == 16384, "shared memory of a tile");
  map.box[0] = 32;
  Check(TileBytes(map) == 8192, "bytes of a tile whose rows are narrower than the swizzle");
  Check(TileSpan(map) == 16384, "shared memory of such a tile");
  map = Attention();
  map.element_strides[1] = 3;
  Check(TileBytes(map) == 43 * 128, "bytes with an element stride");

  // A TMA tile is what the tensor core's descriptor of the same swizzle reads.
  map = Attention();
  const MatrixDescriptor descriptor{2048, 16, 1024, 0, Swizzle::k128Bytes};
  ForEachTileChunk(map, std::array<int32_t, 4>{0, 0, 0, 0}, 2048, [&](const TileChunk& chunk) {
    const int row = static_cast<int>((chunk.global_address - map.global_address) / map.strides[1]);
    const int byte = static_cast<int>((chunk.global_address - map.global_address) % map.strides[1]);
    MatrixDescriptor step = descriptor;
    step.start_address += static_cast<uint32_t>(byte / 32 * 32);
    Check(ChunkAddress(step, Major::kK, row, byte % 32 / 2) == chunk.shared_address,
          "TMA and descriptor agree");
  });
}

void TestReductions() {
  const auto reduce = [](TensorMapType type, Reduction reduction, auto a, auto b) {
    uint8_t x[8], y[8];
    std::memcpy(x, &a, sizeof a);
    std::memcpy(y, &b, sizeof b);
    Check(CheckReduction(type, reduction).empty(), "a reduction that exists");
    ReduceElement(type, reduction, y, x);
    std::memcpy(&a, x, sizeof a);
    return a;
  };
  using T = TensorMapType;
  using R = Reduction;
  Check(reduce(T::kFloat32, R::kAdd, 1.5f, 2.0f) == 3.5f, "f32 add");
  Check(reduce(T::kFloat32, R::kAdd, 0x1p-130f, 0x1p-130f) == 0x1p-129f,
        "f32 add keeps subnormals");
  Check(reduce(T::kFloat64, R::kAdd, 1.5, 2.0) == 3.5, "f64 add");
  Check(reduce(T::kUint32, R::kInc, 5u, 5u) == 0, "inc");
  Check(reduce(T::kUint32, R::kInc, 4u, 5u) == 5, "inc");
  Check(reduce(T::kUint32, R::kDec, 0u, 5u) == 5, "dec");
  Check(reduce(T::kUint32, R::kDec, 3u, 5u) == 2, "dec");
  Check(reduce(T::kInt32, R::kMin, 3, -5) == -5, "s32 min");
  Check(reduce(T::kUint32, R::kMin, 3u, 0xfffffffbu) == 3, "u32 min");
  Check(reduce(T::kInt32, R::kAdd, 0x7fffffff, 1) == static_cast<int>(0x80000000), "s32 add wraps");
  Check(reduce(T::kInt64, R::kXor, int64_t{3}, int64_t{5}) == 6, "b64 xor");
  Check(reduce(T::kBfloat16, R::kAdd, uint16_t{0x3f80}, uint16_t{0x3f80}) == 0x4000, "bf16 add");
  Check(reduce(T::kFloat16, R::kMax, uint16_t{0x7fff}, uint16_t{0xbc00}) == 0xbc00, "f16 max");
  Check(!CheckReduction(T::kFloat32, R::kMax).empty(), "f32 max");
  Check(!CheckReduction(T::kUint8, R::kAdd).empty(), "u8 add");
  Check(!CheckReduction(T::kInt32, R::kInc).empty(), "s32 inc");
}

}  // namespace
}  // namespace jax_fa4::emulator

int main() {
  using namespace jax_fa4::emulator;
  TestValidate();
  TestImage();
  TestTiles();
  TestReductions();
  std::printf("%ld checks, %d failed\n", checks, failures);
  return failures != 0;
}
