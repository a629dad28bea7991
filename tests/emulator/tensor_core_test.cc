// Checks csrc/emulator/tensor_core.h. Prints what failed and returns 1, or a line of counts.

#include "csrc/emulator/tensor_core.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace jax_fa4::emulator {
namespace {

int failures = 0;
long checks = 0;

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }
float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }

void Check(bool ok, const std::string& what) {
  ++checks;
  if (!ok && ++failures <= 40) std::printf("FAILED: %s\n", what.c_str());
}

void CheckEqual(uint64_t got, uint64_t want, const std::string& what) {
  ++checks;
  if (got != want && ++failures <= 40) {
    std::printf("FAILED: %s: %llx, expected %llx\n",
                what.c_str(),
                (unsigned long long)got,
                (unsigned long long)want);
  }
}

// ---- Products ----

enum class Kind { kAny, kModerate, kSubnormal, kCancelling, kSpecial, kHuge, kTiny, kCount };

struct Case {
  MmaOptions options;
  int m, n;
  std::vector<uint16_t> a, b;
  std::vector<float> d;
  MmaOperands operands() {
    return {.m = m, .n = n, .a = a.data(), .b = b.data(), .d = d.data(), .d_stride = n};
  }
};

uint16_t RandomHalf(std::mt19937& random, HalfType type, Kind kind) {
  const bool f16 = type == HalfType::kF16;
  const int fraction_bits = f16 ? 10 : 7, bias = f16 ? 15 : 127;
  const uint16_t any = static_cast<uint16_t>(random());
  const auto with_exponent = [&](int exponent) {
    const int mask = (1 << fraction_bits) - 1;
    return static_cast<uint16_t>((any & (0x8000 | mask)) | (exponent + bias) << fraction_bits);
  };
  switch (kind) {
    case Kind::kModerate:
    case Kind::kCancelling:
      return random() % 16 == 0 ? any & 0x8000 : with_exponent(static_cast<int>(random() % 9) - 4);
    case Kind::kSubnormal:
      return random() % 2 ? with_exponent(-bias)
                          : with_exponent(static_cast<int>(random() % 6) - 3);
    case Kind::kSpecial:
      if (random() % 24 == 0) return (any & 0x8000) | (f16 ? 0x7c00 : 0x7f80);
      if (random() % 96 == 0) return any | (f16 ? 0x7c00 : 0x7f80);
      return random() % 4 == 0 ? any & 0x8000 : with_exponent(0);
    case Kind::kHuge:
      return with_exponent(bias - static_cast<int>(random() % 3));
    case Kind::kTiny:
      return with_exponent((f16 ? -14 : -63) - static_cast<int>(random() % 16) * (f16 ? 0 : 1));
    default:
      return any;
  }
}

Case RandomCase(std::mt19937& random, Kind kind, int m, int n) {
  Case c{.options = {}, .m = m, .n = n, .a = {}, .b = {}, .d = {}};
  c.options.a_type = random() % 2 ? HalfType::kBf16 : HalfType::kF16;
  c.options.b_type = random() % 8 == 0 ? HalfType::kF16 : c.options.a_type;
  c.options.negate_a = random() % 4 == 0;
  c.options.negate_b = random() % 4 == 0;
  c.options.accumulate = random() % 8 != 0;
  for (int i = 0; i < m * kMmaK; ++i) c.a.push_back(RandomHalf(random, c.options.a_type, kind));
  for (int i = 0; i < n * kMmaK; ++i) c.b.push_back(RandomHalf(random, c.options.b_type, kind));
  if (kind == Kind::kCancelling) {  // pairs of products that cancel, or nearly
    for (int i = 0; i < m; ++i) {
      for (int k = 0; k < kMmaK; k += 2) {
        c.a[i * kMmaK + k + 1] = c.a[i * kMmaK + k] ^ (random() % 8 == 0 ? 0x8001 : 0x8000);
      }
    }
    for (int j = 0; j < n; ++j) {
      for (int k = 0; k < kMmaK; k += 2) c.b[j * kMmaK + k + 1] = c.b[j * kMmaK + k];
    }
  }
  if (random() % 4 == 0) {  // products that are all zero
    for (int k = 0; k < kMmaK; ++k) c.a[k] &= 0x8000;
  }
  for (int i = 0; i < m * n; ++i) {
    uint32_t bits = static_cast<uint32_t>(random());
    if (kind == Kind::kModerate || kind == Kind::kCancelling) {
      if (random() % 4 != 0) bits = (bits & 0x807fffff) | (115 + random() % 24) << 23;
    } else if (kind == Kind::kSubnormal || kind == Kind::kTiny) {
      bits &= 0x81ffffff;
    } else if (kind == Kind::kSpecial && random() % 32 != 0) {
      bits = (bits & 0x807fffff) | 0x3f800000;
    }
    if (random() % 16 == 0) bits &= 0x80000000;
    c.d.push_back(FromBits(bits));
  }
  return c;
}

void TestHopper() {
  std::mt19937 random(7);
  long results[5] = {};  // zero, subnormal, normal, infinite, NaN
  for (int round = 0; round < 6000; ++round) {
    const Kind kind = static_cast<Kind>(round % static_cast<int>(Kind::kCount));
    const int n = round % 5 == 0 ? 1 + static_cast<int>(random() % 300) : 16;
    Case fast = RandomCase(random, kind, 8, n);
    Case slow = fast;
    MmaHopper(fast.options, fast.operands());
    MmaHopperReference(slow.options, slow.operands());
    for (size_t i = 0; i < fast.d.size(); ++i) {
      CheckEqual(
          Bits(fast.d[i]), Bits(slow.d[i]), "wgmma kind " + std::to_string(static_cast<int>(kind)));
      ++results[std::isnan(slow.d[i])              ? 4
                : std::isinf(slow.d[i])            ? 3
                : slow.d[i] == 0                   ? 0
                : std::fabs(slow.d[i]) < 0x1p-126f ? 1
                                                   : 2];
      if (std::isnan(slow.d[i])) CheckEqual(Bits(slow.d[i]), 0x7fffffff, "a NaN of wgmma");
    }
  }
  std::printf("wgmma results: %ld zero, %ld subnormal, %ld normal, %ld infinite, %ld NaN\n",
              results[0],
              results[1],
              results[2],
              results[3],
              results[4]);
  for (long count : results) Check(count > 500, "every kind of result occurs");
}

// The definition once more, with all numbers as integers of 2^-300 in an array of bits would be too
// slow to be of use: instead exact cases, worked out by hand.
void TestHopperByHand() {
  const auto run = [](std::vector<float> a, std::vector<float> b, float c) {
    a.resize(kMmaK);
    b.resize(kMmaK);
    uint16_t x[kMmaK], y[kMmaK];
    for (int k = 0; k < kMmaK; ++k) {
      x[k] = FloatToHalf(HalfType::kBf16, a[k]);
      y[k] = FloatToHalf(HalfType::kBf16, b[k]);
    }
    float d = c;
    MmaHopper({}, {.m = 1, .n = 1, .a = x, .b = y, .d = &d, .d_stride = 1});
    return d;
  };
  CheckEqual(Bits(run({1}, {1}, 0)), Bits(1.0f), "1 * 1");
  CheckEqual(Bits(run({1, 0x1p-25f}, {1, 1}, 0)), Bits(1.0f), "2^-25 is lost in the end");
  // Two of 2^-24 make 2^-23, because 25 bits are kept before the sum.
  CheckEqual(Bits(run({1, 0x1p-24f, 0x1p-24f}, {1, 1, 1}, 0)), Bits(1 + 0x1p-23f), "2 * 2^-24");
  CheckEqual(Bits(run({1, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f}, {1, 1, 1, 1, 1}, 0)),
             Bits(1 + 0x1p-23f),
             "4 * 2^-25");
  // 2^-26 is truncated before the sum.
  std::vector<float> many(16, 0x1p-26f);
  many[0] = 1;
  CheckEqual(Bits(run(many, std::vector<float>(16, 1), 0)), Bits(1.0f), "15 * 2^-26");
  // A product of 1.5 * 1.5 = 2.25 counts with exponent 0, so 2^-25 still counts beside it.
  CheckEqual(
      Bits(run({1.5f, 0x1p-25f, -1.5f}, {1.5f, 1, 1.5f}, 0)), Bits(0x1p-25f), "unnormalised");
  // Toward zero, of negative sums too.
  CheckEqual(Bits(run({-1, -0x1p-24f}, {1, 1}, 0)), Bits(-1.0f), "-1 - 2^-24");
  CheckEqual(Bits(run({1}, {1}, -1)), 0, "1 - 1");
  CheckEqual(Bits(run({0x1p127f, 0x1p127f}, {1, 1}, 0)), Bits(INFINITY), "2^127 + 2^127");
  CheckEqual(Bits(run({0x1p127f}, {0x1p127f}, -INFINITY)), Bits(-INFINITY), "2^254 - inf");
  CheckEqual(Bits(run({INFINITY}, {1}, -INFINITY)), 0x7fffffff, "inf - inf");
  CheckEqual(Bits(run({INFINITY}, {0}, 1)), 0x7fffffff, "inf * 0");
  CheckEqual(Bits(run({0}, {0}, -0.0f)), 0, "a zero sum");
}

void TestBlackwell() {
  std::mt19937 random(9);
  for (int round = 0; round < 1500; ++round) {
    const Kind kind = static_cast<Kind>(round % static_cast<int>(Kind::kCount));
    const int n = round % 3 == 0 ? 1 + static_cast<int>(random() % 300) : 24;
    const int m = 1 + static_cast<int>(random() % 15);
    Case c = RandomCase(random, kind, m, n);
    const std::vector<float> before = c.d;
    MmaBlackwell(c.options, c.operands());
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        float sum = c.options.accumulate ? before[i * n + j] : 0;
        for (int k = 0; k < kMmaK; ++k) {
          const float x = HalfToFloat(c.options.a_type, c.a[i * kMmaK + k]);
          const float y = HalfToFloat(c.options.b_type, c.b[j * kMmaK + k]);
          sum = std::fma(c.options.negate_a ? -x : x, c.options.negate_b ? -y : y, sum);
        }
        CheckEqual(Bits(c.d[i * n + j]), std::isnan(sum) ? 0x7fffffff : Bits(sum), "tcgen05");
      }
    }
  }
  // f16 accumulators.
  uint16_t a[kMmaK], b[kMmaK], d = FloatToHalf(HalfType::kF16, 1);
  for (int k = 0; k < kMmaK; ++k) a[k] = b[k] = FloatToHalf(HalfType::kF16, 1);
  const MmaOptions f16{.a_type = HalfType::kF16, .b_type = HalfType::kF16};
  MmaBlackwellF16(f16, {.m = 1, .n = 1, .a = a, .b = b}, &d, 1);
  CheckEqual(d, FloatToHalf(HalfType::kF16, 17), "tcgen05 with f16 accumulators");
  MmaHopperF16(f16, {.m = 1, .n = 1, .a = a, .b = b}, &d, 1);
  CheckEqual(d, FloatToHalf(HalfType::kF16, 33), "wgmma with f16 accumulators");
}

template <typename Product>
void Time(const char* what, Product product, int m, int n, int rounds) {
  std::mt19937 random(11);
  Case c = RandomCase(random, Kind::kModerate, m, n);
  c.options = {};
  const std::clock_t start = std::clock();  // of this process, whatever else runs
  for (int i = 0; i < rounds; ++i) product(c.options, c.operands());
  const double took = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  std::printf("%s %dx%dx16: %.2f G multiply-adds a second\n",
              what,
              m,
              n,
              double{1} * m * n * kMmaK * rounds / took * 1e-9);
}

// ---- Matrix descriptors ----

// Where TMA with a swizzle, or a plain store, puts a tile: `rows` rows of row_bytes, panels of the
// swizzle's width after each other. This is how kernels fill shared memory, told independently of
// descriptors (hopper-reference.md 5.1, blackwell-reference.md 5.1, measured on an H200).
uint32_t PanelAddress(uint32_t base, Swizzle swizzle, int rows, int row, int byte) {
  const int width = static_cast<int>(SwizzleWidth(swizzle));
  uint32_t offset = static_cast<uint32_t>(byte / width * rows * width + row * width + byte % width);
  const uint32_t chunk = offset >> 4 & (static_cast<uint32_t>(width) / 16 - 1);
  const uint32_t pattern_row = (base + offset) >> 7 & (static_cast<uint32_t>(width) / 16 - 1);
  offset = (offset & ~(static_cast<uint32_t>(width) - 16)) | (chunk ^ pattern_row) << 4;
  return base + offset;
}

void TestLayouts() {
  for (DescriptorForm form : {DescriptorForm::kHopper, DescriptorForm::kBlackwell}) {
    for (Swizzle swizzle : {Swizzle::k32Bytes, Swizzle::k64Bytes, Swizzle::k128Bytes}) {
      const uint32_t width = SwizzleWidth(swizzle);
      const uint32_t base = 3 * 1024;
      const int head = 128;
      for (int rows : {64, 128, 192}) {
        // K-major: rows are mn, and a step of k is 32 bytes within a panel.
        for (int step = 0; step < head / kMmaK; ++step) {
          const uint32_t byte = static_cast<uint32_t>(step) * 32;
          const uint32_t start =
              base + byte / width * static_cast<uint32_t>(rows) * width + byte % width;
          MatrixDescriptor descriptor;
          const uint64_t bits = EncodeMatrixDescriptor({start, 16, 8 * width, 0, swizzle}, form);
          CheckEqual(
              DecodeMatrixDescriptor(bits, form, &descriptor).size(), 0, "a valid descriptor");
          Check(PatternRemark(descriptor).empty(), "an advance along k is no remark");
          for (int mn = 0; mn < rows; ++mn) {
            for (int k = 0; k < kMmaK; ++k) {
              CheckEqual(ElementAddress(descriptor, Major::kK, mn, k),
                         PanelAddress(base, swizzle, rows, mn, (step * kMmaK + k) * 2),
                         "K-major");
            }
          }
        }
        // MN-major: rows are k, panels hold width / 2 of mn.
        for (int step = 0; step < rows / kMmaK; ++step) {
          const uint32_t start = base + static_cast<uint32_t>(step) * kMmaK * width;
          MatrixDescriptor descriptor;
          const uint64_t bits = EncodeMatrixDescriptor(
              {start, static_cast<uint32_t>(rows) * width, 8 * width, 0, swizzle}, form);
          CheckEqual(
              DecodeMatrixDescriptor(bits, form, &descriptor).size(), 0, "a valid descriptor");
          Check(PatternRemark(descriptor).empty(), "an advance along k is no remark");
          for (int mn = 0; mn < head; ++mn) {
            for (int k = 0; k < kMmaK; ++k) {
              CheckEqual(ElementAddress(descriptor, Major::kMn, mn, k),
                         PanelAddress(base, swizzle, rows, step * kMmaK + k, mn * 2),
                         "MN-major");
            }
          }
        }
      }
    }
  }
  // Examples of 9.7.15.5.1.2.1.3, in elements of 16 bits: MN-major without and with swizzles.
  struct Example {
    Swizzle swizzle;
    uint32_t leading, stride;  // in elements
    int mn, k;
    uint32_t element;  // before the swizzle
  };
  const Example examples[] = {
      {Swizzle::kNone, 128, 64, 8, 0, 64},
      {Swizzle::kNone, 128, 64, 0, 8, 128},
      {Swizzle::kNone, 128, 64, 3, 1, 11},
      {Swizzle::k32Bytes, 128, 256, 8, 0, 8},
      {Swizzle::k32Bytes, 128, 256, 16, 0, 128},
      {Swizzle::k32Bytes, 128, 256, 0, 1, 16},
      {Swizzle::k32Bytes, 128, 256, 0, 8, 256},
      {Swizzle::k64Bytes, 256, 512, 32, 0, 256},
      {Swizzle::k64Bytes, 256, 512, 0, 1, 32},
      {Swizzle::k64Bytes, 256, 512, 24, 9, 512 + 32 + 24},
  };
  for (const Example& example : examples) {
    const MatrixDescriptor descriptor{
        0, example.leading * 2, example.stride * 2, 0, example.swizzle};
    CheckEqual(ElementAddress(descriptor, Major::kMn, example.mn, example.k),
               SwizzleAddress(example.element * 2, example.swizzle),
               "example of PTX");
  }
  // K-major without a swizzle: ((8,m),(T,2k)):((1T,SBO),(1,LBO)).
  const MatrixDescriptor plain{64, 256, 128, 0, Swizzle::kNone};
  CheckEqual(
      ElementAddress(plain, Major::kK, 9, 10), 64 + 16 + 128 + 256 + 4, "K-major, no swizzle");

  // Every chunk of an instruction's operand is read once.
  const MatrixDescriptor v{0, 128 * 128, 1024, 0, Swizzle::k128Bytes};
  for (Major major : {Major::kK, Major::kMn}) {
    std::set<uint32_t> chunks;
    ForEachChunk(v, major, 128, [&](uint32_t address) { chunks.insert(address); });
    CheckEqual(chunks.size(), 256, "chunks of an operand");
    for (uint32_t address : chunks) CheckEqual(address % 16, 0, "a chunk's alignment");
  }

  // A base offset shifts the pattern: a tile that starts 3 rows of 128 bytes off its boundary.
  const MatrixDescriptor shifted{3 * 128, 16, 1024, 3, Swizzle::k128Bytes};
  CheckEqual(ChunkAddress(shifted, Major::kK, 0, 8), 3 * 128 + 16, "base offset, row 0");
  CheckEqual(ChunkAddress(shifted, Major::kK, 1, 0), 4 * 128 + 16, "base offset, row 1");
  Check(PatternRemark(shifted).empty(), "a base offset that fits");
  Check(!PatternRemark({3 * 128, 16, 1024, 0, Swizzle::k128Bytes}).empty(), "one that does not");

  // Gathering.
  std::vector<uint8_t> shared(32768);
  for (int row = 0; row < 128; ++row) {
    for (int column = 0; column < 128; ++column) {
      const uint16_t value = static_cast<uint16_t>(row * 256 + column);
      std::memcpy(&shared[PanelAddress(0, Swizzle::k128Bytes, 128, row, column * 2)], &value, 2);
    }
  }
  std::vector<uint16_t> operand(128 * kMmaK);
  CheckEqual(
      GatherOperand(
          {16384 + 32, 16, 1024, 0, Swizzle::k128Bytes}, Major::kK, 128, shared, operand.data())
          .size(),
      0,
      "gather");
  for (int i = 0; i < 128 * kMmaK; ++i) {
    CheckEqual(operand[i], static_cast<uint16_t>(i / 16 * 256 + 80 + i % 16), "K-major gather");
  }
  GatherOperand(
      {2 * 2048, 16384, 1024, 0, Swizzle::k128Bytes}, Major::kMn, 128, shared, operand.data());
  for (int i = 0; i < 128 * kMmaK; ++i) {
    CheckEqual(operand[i], static_cast<uint16_t>((32 + i % 16) * 256 + i / 16), "MN-major gather");
  }
  Check(
      !GatherOperand(
           {32768 - 1024, 16, 1024, 0, Swizzle::k128Bytes}, Major::kK, 128, shared, operand.data())
           .empty(),
      "gather out of range");
}

void TestDescriptorBits() {
  MatrixDescriptor d;
  const auto blackwell = [&](uint64_t bits) {
    return DecodeMatrixDescriptor(bits, DescriptorForm::kBlackwell, &d);
  };
  const auto hopper = [&](uint64_t bits) {
    return DecodeMatrixDescriptor(bits, DescriptorForm::kHopper, &d);
  };
  // From FlashAttention-4's PTX: hi 0x40004040, lo (address >> 4) | 0x00010000 or 0x04000000.
  Check(blackwell(0x4000404004000400ull).empty(), "FA4's V");
  CheckEqual(d.start_address, 0x4000, "start");
  CheckEqual(d.leading_byte_offset, 16384, "LBO");
  CheckEqual(d.stride_byte_offset, 1024, "SBO");
  Check(d.swizzle == Swizzle::k128Bytes, "swizzle");
  CheckEqual(
      EncodeMatrixDescriptor(d, DescriptorForm::kBlackwell), 0x4000404004000400ull, "encode");
  Check(hopper(0x4000004000010040ull).empty() && d.swizzle == Swizzle::k128Bytes, "wgmma, 128B");
  Check(hopper(0x8000002000010040ull).empty() && d.swizzle == Swizzle::k64Bytes, "wgmma, 64B");
  CheckEqual(EncodeMatrixDescriptor(d, DescriptorForm::kHopper), 0x8000002000010040ull, "encode");
  Check(!hopper(0x4000404004000400ull).empty(), "a tcgen05 descriptor is none of wgmma");
  Check(!blackwell(0x4000004000010040ull).empty(), "a wgmma descriptor is none of tcgen05");
  Check(!blackwell(0x4000404004000400ull | 1ull << 52).empty(), "absolute leading address");
  Check(!blackwell(0x4000404004000400ull | 1ull << 55).empty(), "bits 53-60");
  Check(!blackwell(0x4000404004000400ull | 1ull << 14).empty(), "bits 14-15");
  Check(!blackwell(0x6000404004000400ull).empty(), "swizzle mode 3");
  Check(!blackwell(0x2000404004000400ull).empty(), "swizzle mode 1");
  Check(!blackwell(0x0002404004000400ull).empty(), "a base offset without a swizzle");
}

void TestInstructionDescriptor() {
  InstructionDescriptor d;
  const auto decode = [&](uint32_t bits, int group) {
    return DecodeInstructionDescriptor(bits, group, &d);
  };
  Check(decode(0x08200490, 1).empty(), "128x128 bf16");
  Check(d.m == 128 && d.n == 128 && d.d_is_f32 && d.a_major == Major::kK &&
            d.b_major == Major::kK && d.a_type == HalfType::kBf16 && d.b_type == HalfType::kBf16,
        "its fields");
  Check(decode(0x08210490, 1).empty() && d.b_major == Major::kMn && d.a_major == Major::kK, "B MN");
  Check(decode(0x08218490, 1).empty() && d.a_major == Major::kMn, "A and B MN-major");
  Check(decode(0x08110490, 1).empty() && d.n == 64, "N = 64");
  Check(decode(0x08190490, 1).empty() && d.n == 96, "N = 96");
  Check(decode(0x10200490, 2).empty() && d.m == 256, "M = 256");
  Check(decode(0x08200490 - 0x480, 1).empty() && d.a_type == HalfType::kF16, "f16");
  for (uint32_t bits : {0x08200490u, 0x08218490u, 0x08110010u}) {
    Check(decode(bits, 1).empty(), "valid");
    CheckEqual(EncodeInstructionDescriptor(d), bits, "encode");
  }
  Check(!decode(0x10200490, 1).empty(), "M = 256 for one CTA");
  Check(!decode(0x04200490, 2).empty(), "M = 64 for two CTAs");
  Check(!decode(0x08220490 | 1 << 17, 1).empty(), "N = 136 with M = 128");
  Check(decode(0x04220490, 1).empty() && d.n == 136, "N = 136 with M = 64");
  Check(!decode(0x08000490, 1).empty(), "N = 0");
  Check(!decode(0x08200494, 1).empty(), "sparse");
  Check(!decode(0x08200498, 1).empty(), "saturate");
  Check(!decode(0x08200480, 1).empty(), "bf16 with an f16 D");
  Check(decode(0x08200000, 1).empty() && !d.d_is_f32, "f16 D");
  Check(!decode(0x082004d0, 1).empty(), "bit 6");
  Check(!decode(0x48200490, 1).empty(), "max shift");
  Check(!decode(0x08200590, 1).empty(), "type of A");
}

}  // namespace
}  // namespace jax_fa4::emulator

int main() {
  using namespace jax_fa4::emulator;
  TestHopper();
  TestHopperByHand();
  TestBlackwell();
  TestLayouts();
  TestDescriptorBits();
  TestInstructionDescriptor();
  Time("wgmma", MmaHopper, 64, 128, 4000);
  Time("wgmma", MmaHopper, 64, 256, 2000);
  Time("mma.sync", MmaHopper, 16, 8, 40000);
  Time("tcgen05", MmaBlackwell, 128, 128, 10000);
  Time("tcgen05", MmaBlackwell, 128, 256, 5000);
  Time("tcgen05", MmaBlackwell, 128, 64, 10000);
  std::printf("%ld checks, %d failed\n", checks, failures);
  return failures != 0;
}
