#include "csrc/emulator/numerics.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

// Results may be stored over operands, but only of the same lane: without this the compiler assumes
// worse and emits scalar code.
#define LANES_MAY_ALIAS_EXACTLY _Pragma("GCC ivdep")

namespace jax_fa4::emulator {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLeastNormal = std::numeric_limits<float>::min();

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }
float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
// Tested on the bits, so that loops over lanes become vector code without -fno-trapping-math.
bool IsNanBits(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }
bool IsNan(float x) { return IsNanBits(Bits(x)); }
float Canonical(float x) { return IsNan(x) ? CanonicalNan() : x; }
float Flush(float x, bool ftz) { return ftz ? FlushSubnormal(x) : x; }

float Saturate(float x) {
  if (!(x > 0)) return 0;  // NaN and -0 too
  return x < 1 ? x : 1;
}

float Finish(float x, ArithmeticMode mode) {
  x = Flush(Canonical(x), mode.ftz);
  return mode.sat ? Saturate(x) : x;
}

// ---- Exact sums ----

// a + b = sum + error exactly (Knuth), unless the sum overflows; of floats in double it does not.
struct TwoSum {
  TwoSum(double a, double b) : sum(a + b) {
    const double b_part = sum - a;
    error = (a - (sum - b_part)) + (b - b_part);
  }
  double sum;
  double error;
};

// sum + error, rounded in a direction. The error is below half a unit of sum's last place, which is
// far below float's: it matters only where sum itself is a float.
float RoundDirected(double sum, double error, Rounding rounding) {
  const float nearest = static_cast<float>(sum);
  const double above = std::isinf(nearest) ? nearest : static_cast<double>(nearest) - sum;
  const double excess = above != 0 ? above : -error;  // nearest - exact, by its sign
  if (excess == 0) return nearest;
  const bool negative = sum < 0;
  if (rounding == Rounding::kTowardZero ? (negative ? excess < 0 : excess > 0)
                                        : rounding == Rounding::kDown && excess > 0) {
    return std::nextafter(nearest, rounding == Rounding::kTowardZero ? 0 : -kInfinity);
  }
  if (rounding == Rounding::kUp && excess < 0) return std::nextafter(nearest, kInfinity);
  return nearest;
}

// a + b for doubles that hold floats or products of two floats.
float SumDirected(double a, double b, Rounding rounding) {
  if (!std::isfinite(a) || !std::isfinite(b)) return static_cast<float>(a + b);
  const TwoSum exact(a, b);
  // IEEE 754: an exact zero from operands of unlike sign is -0 if, and only if, rounding is down.
  if (exact.sum == 0 && exact.error == 0) {
    if (std::signbit(a) == std::signbit(b) && a == 0) return static_cast<float>(a);
    return rounding == Rounding::kDown ? -0.0f : 0.0f;
  }
  return RoundDirected(exact.sum, exact.error, rounding);
}

// ---- Maxima ----

// Orders floats like integers: -0 below +0.
int32_t OrderKey(uint32_t bits) {
  const int32_t value = static_cast<int32_t>(bits);
  return value ^ ((value >> 31) & 0x7fffffff);
}

template <bool kMax>
uint32_t SelectBits(uint32_t a, uint32_t b) {
  const bool a_wins = kMax ? OrderKey(a) > OrderKey(b) : OrderKey(a) < OrderKey(b);
  uint32_t result = a_wins ? a : b;
  result = IsNanBits(a) ? b : result;
  result = IsNanBits(b) ? a : result;
  return IsNanBits(result) ? kCanonicalNanBits : result;
}

template <bool kMax>
float Select(float a, float b, MinMaxMode mode) {
  a = Flush(a, mode.ftz);
  b = Flush(b, mode.ftz);
  if (mode.nan && (IsNan(a) || IsNan(b))) return CanonicalNan();
  if (!mode.xorsign_abs) {
    if (mode.abs) {
      a = std::fabs(a);
      b = std::fabs(b);
    }
    return FromBits(SelectBits<kMax>(Bits(a), Bits(b)));
  }
  const uint32_t sign = (Bits(a) ^ Bits(b)) & 0x80000000;
  const uint32_t result = SelectBits<kMax>(Bits(a) & 0x7fffffff, Bits(b) & 0x7fffffff);
  return FromBits(IsNanBits(result) ? result : result | sign);
}

// ---- Sixteen-bit formats ----

struct HalfFormat {
  int precision;  // significant bits
  int least_exponent;
  uint16_t infinity;
};
constexpr HalfFormat FormatOf(HalfType type) {
  return type == HalfType::kF16 ? HalfFormat{11, -14, 0x7c00} : HalfFormat{8, -126, 0x7f80};
}

bool IsHalfNan(HalfType type, uint16_t x) { return (x & 0x7fff) > FormatOf(type).infinity; }

// To nearest even from a double; NaN canonical.
uint16_t DoubleToHalf(HalfType type, double x) {
  if (std::isnan(x)) return kCanonicalHalfNan;
  const HalfFormat format = FormatOf(type);
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isinf(x)) return sign | format.infinity;
  if (x == 0) return sign;
  const int exponent = std::max(std::ilogb(x), format.least_exponent);
  const double scaled = std::ldexp(std::fabs(x), format.precision - 1 - exponent);
  const double whole = std::floor(scaled);
  const double rest = scaled - whole;
  int64_t significand = static_cast<int64_t>(whole);
  significand += rest > 0.5 || (rest == 0.5 && significand % 2 != 0);
  // A carry into the next binade, and from subnormal to normal, comes out right by itself.
  const int64_t bits =
      (int64_t{exponent - format.least_exponent} << (format.precision - 1)) + significand;
  return sign | static_cast<uint16_t>(std::min<int64_t>(bits, format.infinity));
}

// sum + error with the last bit of a double odd wherever it is inexact, so that rounding it once
// more is rounding the exact value.
double RoundToOdd(double sum, double error) {
  if (error == 0 || !std::isfinite(sum)) return sum;
  const uint64_t bits = std::bit_cast<uint64_t>(sum);
  if (bits & 1) return sum;
  return std::bit_cast<double>((error < 0) == (sum < 0) ? bits + 1 : bits - 1);
}

uint16_t FlushHalf(HalfType type, uint16_t x, bool ftz) {
  return ftz && type == HalfType::kF16 && (x & 0x7c00) == 0 ? x & 0x8000 : x;
}

uint16_t FinishHalf(HalfType type, double x, HalfMode mode) {
  uint16_t result = FlushHalf(type, DoubleToHalf(type, x), mode.ftz);
  if (mode.relu && !IsHalfNan(type, result) && (result & 0x8000)) result = 0;
  if (mode.sat) {
    const uint16_t one = type == HalfType::kF16 ? 0x3c00 : 0x3f80;
    if (IsHalfNan(type, result) || (result & 0x8000)) return 0;
    return std::min(result, one);
  }
  return result;
}

template <bool kMax>
uint16_t SelectHalf(HalfType type, uint16_t a, uint16_t b, MinMaxMode mode) {
  // Both formats order as their floats do, and every result is an operand: go through f32.
  a = FlushHalf(type, a, mode.ftz);
  b = FlushHalf(type, b, mode.ftz);
  mode.ftz = false;
  const float result = Select<kMax>(HalfToFloat(type, a), HalfToFloat(type, b), mode);
  return IsNan(result) ? kCanonicalHalfNan : FloatToHalf(type, result);
}

// ---- Tables ----

constexpr size_t kArguments = size_t{1} << 23;

// Significands of a function, one for each of 2^23 arguments. The hardware interpolates, and is so
// near to a quadratic in each of 128 segments that this, truncated, is the significand or one less:
// a bit of each argument says which. 1 MB, which a cache can hold; floats could not.
class SignificandTable {
 public:
  SignificandTable() = default;
  // From the steps to the significands that `base` gives.
  template <typename Base>
  SignificandTable(std::span<const uint8_t> steps, Base base)
      : segments_(kArguments / kSegment), one_more_(kArguments / 32) {
    std::vector<int32_t> values(kSegment);
    for (size_t first = 0; first < kArguments; first += kSegment) {
      for (size_t i = 0; i < kSegment; ++i) {
        const int8_t step = static_cast<int8_t>(steps[first + i]);
        if (step < -1 || step > 1) throw std::invalid_argument("a table holds a step beyond 1");
        const double argument = static_cast<double>(kArguments + first + i) / kArguments;
        values[i] = static_cast<int32_t>(base(argument)) + step;
      }
      const Segment segment = Fit(values);
      segments_[first / kSegment] = segment;
      for (size_t i = 0; i < kSegment; ++i) {
        const int32_t above = values[i] - segment.Value(static_cast<float>(i));
        if (above < 0 || above > 1) throw std::invalid_argument("a table is not smooth");
        one_more_[(first + i) / 32] |= static_cast<uint32_t>(above) << i % 32;
      }
    }
  }

  uint32_t operator[](uint32_t i) const {
    const int32_t value = segments_[i / kSegment].Value(static_cast<float>(i % kSegment));
    return static_cast<uint32_t>(value) + (one_more_[i / 32] >> i % 32 & 1);
  }

  // The same for 32 arguments.
  void Look32(uint32_t* values, const uint32_t* arguments) const {
    const auto* const bits = reinterpret_cast<const int*>(one_more_.data());
    for (int lane = 0; lane < kLanes; lane += 8) {
      const auto load = [&](int i) {
        const auto at = [&](int j) {
          return _mm_load_ps(&segments_[arguments[lane + j] / kSegment].constant);
        };
        return _mm256_set_m128(at(i + 4), at(i));
      };
      const __m256 row0 = load(0), row1 = load(1), row2 = load(2), row3 = load(3);
      const __m256 low01 = _mm256_unpacklo_ps(row0, row1), low23 = _mm256_unpacklo_ps(row2, row3);
      const __m256 high01 = _mm256_unpackhi_ps(row0, row1), high23 = _mm256_unpackhi_ps(row2, row3);
      const __m256 constant = _mm256_shuffle_ps(low01, low23, 0x44);
      const __m256 linear = _mm256_shuffle_ps(low01, low23, 0xee);
      const __m256 square = _mm256_shuffle_ps(high01, high23, 0x44);
      const __m256i least = _mm256_castps_si256(_mm256_shuffle_ps(high01, high23, 0xee));
      const __m256i i = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(arguments + lane));
      const __m256 x = _mm256_cvtepi32_ps(_mm256_and_si256(i, _mm256_set1_epi32(kSegment - 1)));
      const __m256i above =
          _mm256_cvttps_epi32(_mm256_fmadd_ps(_mm256_fmadd_ps(square, x, linear), x, constant));
      const __m256i word = _mm256_i32gather_epi32(bits, _mm256_srli_epi32(i, 5), 4);
      const __m256i bit =
          _mm256_and_si256(_mm256_srlv_epi32(word, _mm256_and_si256(i, _mm256_set1_epi32(31))),
                           _mm256_set1_epi32(1));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + lane),
                          _mm256_add_epi32(_mm256_add_epi32(least, above), bit));
    }
  }

 private:
  static constexpr int32_t kSegment = 1 << 16;

  struct alignas(16) Segment {
    float constant, linear, square;
    int32_t least;  // below all values, so that the quadratic is positive and what is cut off small

    int32_t Value(float x) const {
      return least + static_cast<int32_t>(std::fma(std::fma(square, x, linear), x, constant));
    }
  };

  // The quadratic of least squares. A sample of the values is enough.
  static Segment Fit(const std::vector<int32_t>& values) {
    constexpr int32_t kApart = 16, kCount = kSegment / kApart;
    const int32_t least = *std::min_element(values.begin(), values.end()) - 2;
    const double middle = (kSegment - kApart) / 2.0;
    double squares = 0, fourths = 0, sum = 0, moment = 0, second_moment = 0;
    for (int32_t i = 0; i < kSegment; i += kApart) {
      const double x = i - middle, value = values[i] - least;
      squares += x * x;
      fourths += x * x * x * x;
      sum += value;
      moment += value * x;
      second_moment += value * x * x;
    }
    const double square =
        (second_moment - sum * squares / kCount) / (fourths - squares * squares / kCount);
    const double slope = moment / squares;
    const double mean = (sum - square * squares) / kCount;
    return {static_cast<float>(mean - slope * middle + square * middle * middle),
            static_cast<float>(slope - 2 * square * middle),
            static_cast<float>(square),
            least};
  }

  std::vector<Segment> segments_;
  std::vector<uint32_t> one_more_;  // a bit for each argument
};

SignificandTable ex2_table;
SignificandTable rcp_table;
bool tables_are_loaded = false;

// ---- gzip (RFC 1951 and 1952), so that the emulator needs no library for two files ----

class Inflater {
 public:
  explicit Inflater(std::span<const uint8_t> input) : input_(input) {}

  std::vector<uint8_t> Run(size_t expected) {
    SkipHeader();
    std::vector<uint8_t> output;
    output.reserve(expected);
    for (bool last = false; !last;) {
      last = Take(1);
      const uint32_t kind = Take(2);
      if (kind == 0) {
        CopyStored(output);
      } else if (kind == 1 || kind == 2) {
        Code literals, distances;
        kind == 1 ? FixedCodes(literals, distances) : ReadCodes(literals, distances);
        Decode(literals, distances, expected, output);
      } else {
        Fail();
      }
      if (output.size() > expected) Fail();
    }
    return output;
  }

 private:
  // A canonical prefix code: how many symbols have each length, and the symbols in order.
  struct Code {
    std::array<uint16_t, 16> count = {};
    std::array<uint16_t, 288> symbol = {};

    void Build(std::span<const uint8_t> lengths) {
      count = {};
      for (uint8_t length : lengths) ++count[length];
      count[0] = 0;
      std::array<uint16_t, 17> start = {};
      for (int i = 1; i < 16; ++i) start[i + 1] = start[i] + count[i];
      for (size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] != 0) symbol[start[lengths[i]]++] = static_cast<uint16_t>(i);
      }
    }
  };

  [[noreturn]] static void Fail() { throw std::invalid_argument("a table is not a gzip file"); }

  uint8_t Byte() {
    if (position_ >= input_.size()) Fail();
    return input_[position_++];
  }

  void SkipHeader() {
    if (Byte() != 0x1f || Byte() != 0x8b || Byte() != 8) Fail();
    const uint8_t flags = Byte();
    for (int i = 0; i < 6; ++i) Byte();
    if (flags & 4) {
      int length = Byte();
      length |= Byte() << 8;
      while (length-- > 0) Byte();
    }
    for (int text = 0; text < ((flags & 8) != 0) + ((flags & 16) != 0); ++text) {
      while (Byte() != 0) {
      }
    }
    if (flags & 2) Byte(), Byte();
  }

  uint32_t Take(int count) {
    while (held_ < count) {
      buffer_ |= uint32_t{Byte()} << held_;
      held_ += 8;
    }
    const uint32_t value = buffer_ & ((1u << count) - 1);
    buffer_ >>= count;
    held_ -= count;
    return value;
  }

  int Symbol(const Code& code) {
    int value = 0, first = 0, index = 0;
    for (int length = 1; length < 16; ++length) {
      value |= static_cast<int>(Take(1));
      const int count = code.count[length];
      if (value - count < first) return code.symbol[index + (value - first)];
      index += count;
      first = (first + count) << 1;
      value <<= 1;
    }
    Fail();
  }

  void CopyStored(std::vector<uint8_t>& output) {
    buffer_ = 0;
    held_ = 0;
    int length = Byte();
    length |= Byte() << 8;
    Byte(), Byte();  // its complement
    while (length-- > 0) output.push_back(Byte());
  }

  static void FixedCodes(Code& literals, Code& distances) {
    std::array<uint8_t, 288> lengths;
    for (int i = 0; i < 288; ++i) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    literals.Build(lengths);
    std::array<uint8_t, 30> five;
    five.fill(5);
    distances.Build(five);
  }

  void ReadCodes(Code& literals, Code& distances) {
    constexpr uint8_t kOrder[] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    const size_t literal_count = Take(5) + 257;
    const size_t distance_count = Take(5) + 1;
    const size_t length_count = Take(4) + 4;
    if (literal_count > 286 || distance_count > 30) Fail();
    std::array<uint8_t, 320> lengths = {};
    for (size_t i = 0; i < length_count; ++i) lengths[kOrder[i]] = static_cast<uint8_t>(Take(3));
    Code code;
    code.Build({lengths.data(), 19});
    lengths.fill(0);
    for (size_t i = 0; i < literal_count + distance_count;) {
      const int symbol = Symbol(code);
      if (symbol < 16) {
        lengths[i++] = static_cast<uint8_t>(symbol);
        continue;
      }
      if (symbol == 16 && i == 0) Fail();
      const uint8_t value = symbol == 16 ? lengths[i - 1] : 0;
      size_t repeat = symbol == 16 ? 3 + Take(2) : symbol == 17 ? 3 + Take(3) : 11 + Take(7);
      if (i + repeat > literal_count + distance_count) Fail();
      while (repeat-- > 0) lengths[i++] = value;
    }
    literals.Build({lengths.data(), literal_count});
    distances.Build({lengths.data() + literal_count, distance_count});
  }

  void Decode(const Code& literals,
              const Code& distances,
              size_t limit,
              std::vector<uint8_t>& output) {
    constexpr uint16_t kLength[] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                    31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
    constexpr uint8_t kLengthBits[] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                       2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
    constexpr uint16_t kDistance[] = {
        1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
        193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
    for (;;) {
      const int symbol = Symbol(literals);
      if (symbol == 256) return;
      if (output.size() >= limit) Fail();
      if (symbol < 256) {
        output.push_back(static_cast<uint8_t>(symbol));
        continue;
      }
      if (symbol > 285) Fail();
      const size_t length = kLength[symbol - 257] + Take(kLengthBits[symbol - 257]);
      const int code = Symbol(distances);
      if (code > 29) Fail();
      const size_t distance = kDistance[code] + Take(code < 4 ? 0 : code / 2 - 1);
      if (distance > output.size() || length > limit - output.size()) Fail();
      for (size_t i = 0; i < length; ++i) output.push_back(output[output.size() - distance]);
    }
  }

  std::span<const uint8_t> input_;
  size_t position_ = 0;
  uint32_t buffer_ = 0;
  int held_ = 0;
};

std::vector<uint8_t> Steps(std::span<const uint8_t> data) {
  if (data.size() == kArguments) return {data.begin(), data.end()};
  std::vector<uint8_t> steps = Inflater(data).Run(kArguments);
  if (steps.size() != kArguments) throw std::invalid_argument("a table has not 2^23 entries");
  return steps;
}

// ---- The multi-function unit (MUFU), which knows .ftz only ----

// ex2 reduces its argument by one's complement: the fraction of a negative argument is that of
// -|x| - 2^-23, measured on an H200.
struct Ex2Argument {
  uint32_t fraction;  // in units of 2^-23
  int32_t exponent;
};
Ex2Argument ReduceEx2(float x) {
  const float magnitude = FromBits(Bits(x) & 0x7fffffff);
  const uint32_t fixed = static_cast<uint32_t>(static_cast<int32_t>(magnitude * 0x1p23f));
  const int32_t whole = static_cast<int32_t>(fixed >> 23);
  const uint32_t fraction = fixed & 0x7fffff;
  if (!(Bits(x) >> 31)) return {fraction, whole};
  return fraction != 0 ? Ex2Argument{~fraction & 0x7fffff, -whole - 1} : Ex2Argument{0, -whole};
}

float MufuEx2(float x) {
  if (IsNan(x)) return CanonicalNan();
  if (x >= 128) return kInfinity;
  if (x < -126) return 0;
  if (!tables_are_loaded) {
    return FlushSubnormal(static_cast<float>(std::exp2(static_cast<double>(FlushSubnormal(x)))));
  }
  const Ex2Argument argument = ReduceEx2(FlushSubnormal(x));
  return FromBits((static_cast<uint32_t>(argument.exponent + 126) << 23) +
                  ex2_table[argument.fraction]);
}

float MufuRcp(float x) {
  if (IsNan(x)) return CanonicalNan();
  const uint32_t bits = Bits(x);
  const uint32_t sign = bits & 0x80000000;
  const uint32_t exponent = bits >> 23 & 0xff;
  if (exponent == 0) return FromBits(sign | 0x7f800000);
  if (exponent == 0xff) return FromBits(sign);
  if (!tables_are_loaded) return FlushSubnormal(static_cast<float>(1.0 / static_cast<double>(x)));
  // 1 / (1 + f) is table * 2^-24, in (1/2, 1]: the exponent is 127 - exponent for one, less 1 else.
  const int32_t base = 252 - static_cast<int32_t>(exponent);
  const uint32_t significand = rcp_table[bits & 0x7fffff];
  const int32_t result = base * (1 << 23) + static_cast<int32_t>(significand);
  return FromBits(sign | (result < 0x800000 ? 0 : static_cast<uint32_t>(result)));
}

// What ptxas scales by 2^24 first, because the unit takes no subnormal numbers.
bool IsSubnormalOrZero(float x) { return (Bits(x) & 0x7f800000) == 0; }

template <bool kFtz, typename Operation>
void ForLanes(float* d, const float* a, const float* b, Operation operation) {
  LANES_MAY_ALIAS_EXACTLY
  for (int i = 0; i < kLanes; ++i) {
    const float x = kFtz ? FlushSubnormal(a[i]) : a[i];
    const float y = kFtz ? FlushSubnormal(b[i]) : b[i];
    const float result = operation(x, y);
    d[i] = Canonical(kFtz ? FlushSubnormal(result) : result);
  }
}

template <bool kFtz>
void FmaLanes(float* d, const float* a, const float* b, const float* c) {
  LANES_MAY_ALIAS_EXACTLY
  for (int i = 0; i < kLanes; ++i) {
    const float x = kFtz ? FlushSubnormal(a[i]) : a[i];
    const float y = kFtz ? FlushSubnormal(b[i]) : b[i];
    const float z = kFtz ? FlushSubnormal(c[i]) : c[i];
    const float result = __builtin_fmaf(x, y, z);
    d[i] = Canonical(kFtz ? FlushSubnormal(result) : result);
  }
}

template <bool kMax, bool kFtz>
void SelectLanes(float* d, const float* a, const float* b) {
  LANES_MAY_ALIAS_EXACTLY
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t x = Bits(kFtz ? FlushSubnormal(a[i]) : a[i]);
    const uint32_t y = Bits(kFtz ? FlushSubnormal(b[i]) : b[i]);
    d[i] = FromBits(SelectBits<kMax>(x, y));
  }
}

// Rounds down from the nearest sum and its exact error, all in floats (TwoSum holds in float as
// well, subnormals included). What overflows or is not finite is left to the scalar function.
template <bool kFtz>
bool AddDownLanes(float* d, const float* a, const float* b) {
  uint32_t odd_lanes = 0;
  alignas(32) float result[kLanes];
  LANES_MAY_ALIAS_EXACTLY
  for (int i = 0; i < kLanes; ++i) {
    const float x = kFtz ? FlushSubnormal(a[i]) : a[i];
    const float y = kFtz ? FlushSubnormal(b[i]) : b[i];
    const float sum = x + y;
    const float y_part = sum - x;
    const float error = (x - (sum - y_part)) + (y - y_part);
    // One step down: the bits grow for negative numbers and shrink for positive ones.
    const int32_t bits = static_cast<int32_t>(Bits(sum));
    const int32_t step = static_cast<int32_t>(Bits(error)) >> 31 & (error != 0 ? 1 : 0);
    const int32_t down = bits + (bits >> 31 | 1) * -step;
    const float stepped = FromBits(static_cast<uint32_t>(down));
    result[i] = kFtz ? FlushSubnormal(stepped) : stepped;
    // Zero sums need signs; large and special ones have no exact error.
    const uint32_t magnitude = Bits(sum) & 0x7fffffff;
    odd_lanes |= (magnitude == 0) | (magnitude >= 0x7f000000);
  }
  if (odd_lanes) return false;
  std::memcpy(d, result, sizeof result);
  return true;
}

}  // namespace

DefaultFloatEnvironment::DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
DefaultFloatEnvironment::~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

// ---- f32 arithmetic ----

float Add(float a, float b, ArithmeticMode mode) {
  a = Flush(a, mode.ftz);
  b = Flush(b, mode.ftz);
  if (mode.rounding == Rounding::kNearestEven) return Finish(a + b, mode);
  return Finish(SumDirected(a, b, mode.rounding), mode);
}

float Sub(float a, float b, ArithmeticMode mode) {
  return Add(a, FromBits(Bits(b) ^ 0x80000000), mode);
}

float Mul(float a, float b, ArithmeticMode mode) {
  a = Flush(a, mode.ftz);
  b = Flush(b, mode.ftz);
  if (mode.rounding == Rounding::kNearestEven) return Finish(a * b, mode);
  const double product = static_cast<double>(a) * static_cast<double>(b);  // exact
  if (!std::isfinite(product) || product == 0) return Finish(static_cast<float>(product), mode);
  return Finish(RoundDirected(product, 0, mode.rounding), mode);
}

float Fma(float a, float b, float c, ArithmeticMode mode) {
  a = Flush(a, mode.ftz);
  b = Flush(b, mode.ftz);
  c = Flush(c, mode.ftz);
  if (mode.rounding == Rounding::kNearestEven) return Finish(std::fma(a, b, c), mode);
  const double product = static_cast<double>(a) * static_cast<double>(b);  // exact
  return Finish(SumDirected(product, c, mode.rounding), mode);
}

float DivRn(float a, float b, bool ftz) {
  return Flush(Canonical(Flush(a, ftz) / Flush(b, ftz)), ftz);
}
float RcpRn(float x, bool ftz) { return DivRn(1, x, ftz); }
float SqrtRn(float x, bool ftz) { return Canonical(std::sqrt(Flush(x, ftz))); }

float Max(float a, float b, MinMaxMode mode) { return Select<true>(a, b, mode); }
float Min(float a, float b, MinMaxMode mode) { return Select<false>(a, b, mode); }
float Max3(float a, float b, float c, MinMaxMode mode) {
  return Select<true>(Select<true>(a, b, mode), c, mode);
}
float Min3(float a, float b, float c, MinMaxMode mode) {
  return Select<false>(Select<false>(a, b, mode), c, mode);
}

// ---- Approximations ----

void LoadTables(std::span<const uint8_t> ex2, std::span<const uint8_t> rcp) {
  const DefaultFloatEnvironment environment;
  // No result lies so near to the middle of two floats that double precision could err: the test
  // compares all of them with extended precision.
  SignificandTable exponentials(Steps(ex2), [](double x) {
    return static_cast<uint32_t>(static_cast<float>(std::exp2(x)) * 0x1p22f);
  });
  SignificandTable reciprocals(Steps(rcp), [](double x) {
    return static_cast<uint32_t>(static_cast<float>(1 / x) * 0x1p24f);
  });
  ex2_table = std::move(exponentials);
  rcp_table = std::move(reciprocals);
  tables_are_loaded = true;
}

bool TablesAreLoaded() { return tables_are_loaded; }

// Without .ftz ptxas scales what the unit cannot take (read from the SASS of ptxas 13.0).

float Ex2Approx(float x, bool ftz) {
  if (ftz || !(x < -126)) return MufuEx2(x);
  const float root = MufuEx2(x * 0.5f);
  return root * root;
}

float RcpApprox(float x, bool ftz) {
  if (ftz) return MufuRcp(x);
  const float magnitude = std::fabs(x);
  const float scale = magnitude > 0x1p126f ? 0.25f : magnitude < kLeastNormal ? 0x1p24f : 1.0f;
  return Canonical(scale * MufuRcp(scale * x));
}

float DivApprox(float a, float b, bool ftz) {
  if (ftz) return Mul(MufuRcp(b), a, {.ftz = true});
  const float scale = IsSubnormalOrZero(b) ? 0x1p24f : 1.0f;
  return Canonical(MufuRcp(b * scale) * (a * scale));
}

float DivFull(float a, float b, bool ftz) {
  if (std::fabs(b) > 0x1p126f) {
    a = Mul(a, 0.25f, {.ftz = ftz});
    b = Mul(b, 0.25f, {.ftz = ftz});
  }
  return DivApprox(a, b, ftz);
}

float Lg2Approx(float x, bool ftz) {
  if (!ftz && IsSubnormalOrZero(x)) return Lg2Approx(x * 0x1p24f, true) - 24.0f;
  x = FlushSubnormal(x);
  if (x == 0) return -kInfinity;
  return Canonical(static_cast<float>(std::log2(static_cast<double>(x))));
}

float TanhApprox(float x) {
  return Canonical(static_cast<float>(std::tanh(static_cast<double>(x))));
}

float SqrtApprox(float x, bool ftz) { return SqrtRn(x, ftz); }

float RsqrtApprox(float x, bool ftz) {
  return Canonical(static_cast<float>(1 / std::sqrt(static_cast<double>(Flush(x, ftz)))));
}

float SinApprox(float x, bool ftz) {
  return Flush(Canonical(static_cast<float>(std::sin(static_cast<double>(Flush(x, ftz))))), ftz);
}

float CosApprox(float x, bool ftz) {
  return Flush(Canonical(static_cast<float>(std::cos(static_cast<double>(Flush(x, ftz))))), ftz);
}

// ---- Conversions ----

uint16_t FloatToHalf(HalfType type, float x, ConvertMode mode) {
  const uint32_t bits = Bits(x);
  if (IsNanBits(bits)) return kCanonicalHalfNan;
  const bool toward_zero = mode.rounding == Rounding::kTowardZero;
  uint16_t result;
  if (type == HalfType::kBf16) {
    const uint32_t round = toward_zero ? 0 : 0x7fff + (bits >> 16 & 1);
    result = static_cast<uint16_t>((bits + round) >> 16);
  } else {
    result = toward_zero ? _cvtss_sh(x, _MM_FROUND_TO_ZERO) : _cvtss_sh(x, 0);
  }
  if (mode.relu && (result & 0x8000)) return 0;
  const uint16_t infinity = FormatOf(type).infinity;
  if (mode.satfinite && (result & 0x7fff) == infinity) --result;
  return result;
}

float HalfToFloat(HalfType type, uint16_t x) {
  if (type == HalfType::kBf16) return FromBits(uint32_t{x} << 16);
  return Canonical(_cvtsh_ss(x));
}

uint32_t FloatToTf32(float x, Tf32Rounding rounding, bool relu, bool satfinite) {
  uint32_t bits = Bits(x);
  if (rounding == Tf32Rounding::kNearestAway) {
    // What ptxas emits for sm_90: a sum and a mask, with infinities and NaNs let through.
    if ((bits & 0x7fffffff) < 0x7f800000) bits += 0x1000;
    bits &= 0xffffe000;
    if (satfinite && (bits & 0x7fffffff) >= 0x7f800000) bits -= 0x2000;
    return bits;
  }
  if (IsNanBits(bits)) return kCanonicalNanBits & 0xffffe000;
  if (rounding == Tf32Rounding::kNearestEven) bits += 0xfff + (bits >> 13 & 1);
  bits &= 0xffffe000;
  if (relu && bits >> 31) return 0;
  if (satfinite && (bits & 0x7fffffff) == 0x7f800000) bits -= 0x2000;
  return bits;
}

// ---- f16 and bf16 arithmetic ----

uint16_t HalfFma(HalfType type, uint16_t a, uint16_t b, uint16_t c, HalfMode mode) {
  const double x = HalfToFloat(type, FlushHalf(type, a, mode.ftz));
  const double y = HalfToFloat(type, FlushHalf(type, b, mode.ftz));
  const double z = HalfToFloat(type, FlushHalf(type, c, mode.ftz));
  const double product = x * y;  // exact
  if (!std::isfinite(product) || !std::isfinite(z)) return FinishHalf(type, product + z, mode);
  const TwoSum exact(product, z);
  return FinishHalf(type, RoundToOdd(exact.sum, exact.error), mode);
}

uint16_t HalfAdd(HalfType type, uint16_t a, uint16_t b, HalfMode mode) {
  const double x = HalfToFloat(type, FlushHalf(type, a, mode.ftz));
  const double y = HalfToFloat(type, FlushHalf(type, b, mode.ftz));
  if (!std::isfinite(x) || !std::isfinite(y)) return FinishHalf(type, x + y, mode);
  const TwoSum exact(x, y);
  return FinishHalf(type, RoundToOdd(exact.sum, exact.error), mode);
}

uint16_t HalfSub(HalfType type, uint16_t a, uint16_t b, HalfMode mode) {
  return HalfAdd(type, a, b ^ 0x8000, mode);
}

uint16_t HalfMul(HalfType type, uint16_t a, uint16_t b, HalfMode mode) {
  const double x = HalfToFloat(type, FlushHalf(type, a, mode.ftz));
  const double y = HalfToFloat(type, FlushHalf(type, b, mode.ftz));
  return FinishHalf(type, x * y, mode);
}

uint16_t HalfMax(HalfType type, uint16_t a, uint16_t b, MinMaxMode mode) {
  return SelectHalf<true>(type, a, b, mode);
}
uint16_t HalfMin(HalfType type, uint16_t a, uint16_t b, MinMaxMode mode) {
  return SelectHalf<false>(type, a, b, mode);
}

uint16_t HalfEx2Approx(HalfType type, uint16_t x, bool ftz) {
  const double argument = HalfToFloat(type, x);
  const uint16_t result = DoubleToHalf(type, std::exp2(argument));
  const bool flush = ftz && (result & FormatOf(type).infinity) == 0;
  return flush ? 0 : result;
}

uint16_t HalfTanhApprox(HalfType type, uint16_t x) {
  return DoubleToHalf(type, std::tanh(static_cast<double>(HalfToFloat(type, x))));
}

// ---- 32 lanes ----

void Add32(float* d, const float* a, const float* b, bool ftz) {
  const auto add = [](float x, float y) { return x + y; };
  ftz ? ForLanes<true>(d, a, b, add) : ForLanes<false>(d, a, b, add);
}

void Sub32(float* d, const float* a, const float* b, bool ftz) {
  const auto subtract = [](float x, float y) { return x - y; };
  ftz ? ForLanes<true>(d, a, b, subtract) : ForLanes<false>(d, a, b, subtract);
}

void Mul32(float* d, const float* a, const float* b, bool ftz) {
  const auto multiply = [](float x, float y) { return x * y; };
  ftz ? ForLanes<true>(d, a, b, multiply) : ForLanes<false>(d, a, b, multiply);
}

void Fma32(float* d, const float* a, const float* b, const float* c, bool ftz) {
  ftz ? FmaLanes<true>(d, a, b, c) : FmaLanes<false>(d, a, b, c);
}

void AddDown32(float* d, const float* a, const float* b, bool ftz) {
  if (ftz ? AddDownLanes<true>(d, a, b) : AddDownLanes<false>(d, a, b)) return;
  LANES_MAY_ALIAS_EXACTLY
  for (int i = 0; i < kLanes; ++i) {
    d[i] = Add(a[i], b[i], {.rounding = Rounding::kDown, .ftz = ftz});
  }
}

void Max32(float* d, const float* a, const float* b, bool ftz) {
  ftz ? SelectLanes<true, true>(d, a, b) : SelectLanes<true, false>(d, a, b);
}

void Min32(float* d, const float* a, const float* b, bool ftz) {
  ftz ? SelectLanes<false, true>(d, a, b) : SelectLanes<false, false>(d, a, b);
}

void Max3x32(float* d, const float* a, const float* b, const float* c, bool ftz) {
  alignas(32) float two[kLanes];
  Max32(two, a, b, ftz);
  Max32(d, two, c, ftz);
}

void Ex2Approx32(float* d, const float* x) {
  if (!tables_are_loaded) {
    for (int i = 0; i < kLanes; ++i) d[i] = MufuEx2(x[i]);
    return;
  }
  alignas(32) uint32_t fraction[kLanes];
  alignas(32) uint32_t significand[kLanes];
  alignas(32) uint32_t exponent[kLanes];
  LANES_MAY_ALIAS_EXACTLY
  for (int i = 0; i < kLanes; ++i) {
    // Outside [-126, 128) the result is decided below; clamping keeps the index in the table.
    const uint32_t bits = Bits(x[i]);
    const uint32_t magnitude = bits & 0x7fffffff;
    const int32_t in_range = static_cast<int32_t>(magnitude - 0x43000000) >> 31;  // all ones or 0
    const float clamped = FromBits(magnitude & static_cast<uint32_t>(in_range));
    const uint32_t fixed = static_cast<uint32_t>(static_cast<int32_t>(clamped * 0x1p23f));
    const uint32_t part = fixed & 0x7fffff;
    const uint32_t negative = 0u - (bits >> 31);
    const uint32_t inexact = 0u - ((part + 0x7fffff) >> 23);  // all ones unless part is 0
    fraction[i] = (part ^ (negative & inexact)) & 0x7fffff;
    // -whole, less 1 where a fraction is left: ~whole or -whole.
    const uint32_t whole = fixed >> 23;
    exponent[i] = (((whole ^ negative) - (negative & ~inexact)) + 126) << 23;
  }
  ex2_table.Look32(significand, fraction);
  LANES_MAY_ALIAS_EXACTLY
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = Bits(x[i]);
    const uint32_t positive_limit = 0x43000000;  // 128
    const uint32_t negative_limit = 0xc2fc0000;  // -126
    uint32_t result = exponent[i] + significand[i];
    const bool is_negative = static_cast<int32_t>(bits) < 0;
    result = !is_negative && bits >= positive_limit ? 0x7f800000 : result;
    result = is_negative && bits > negative_limit ? 0 : result;
    d[i] = FromBits(IsNanBits(bits) ? kCanonicalNanBits : result);
  }
}

void FloatToBf16x2_32(uint32_t* d, const float* a, const float* b) {
  const auto convert = [](float x) {
    const uint32_t bits = Bits(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return IsNanBits(bits) ? uint32_t{kCanonicalHalfNan} : rounded;
  };
  for (int i = 0; i < kLanes; ++i) d[i] = convert(a[i]) << 16 | convert(b[i]);
}

void FloatToF16x2_32(uint32_t* d, const float* a, const float* b) {
  alignas(32) uint16_t high[kLanes];
  alignas(32) uint16_t low[kLanes];
  for (int i = 0; i < kLanes; i += 8) {
    _mm_store_si128(reinterpret_cast<__m128i*>(high + i),
                    _mm256_cvtps_ph(_mm256_loadu_ps(a + i), 0));
    _mm_store_si128(reinterpret_cast<__m128i*>(low + i),
                    _mm256_cvtps_ph(_mm256_loadu_ps(b + i), 0));
  }
  LANES_MAY_ALIAS_EXACTLY
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t upper = IsNanBits(Bits(a[i])) ? uint32_t{kCanonicalHalfNan} : high[i];
    const uint32_t lower = IsNanBits(Bits(b[i])) ? uint32_t{kCanonicalHalfNan} : low[i];
    d[i] = upper << 16 | lower;
  }
}

}  // namespace jax_fa4::emulator
