// Checks csrc/emulator/numerics.h: numerics_test [directory of tables/ [quick]]. Conversions and
// ex2 are checked on all 2^32 inputs, which takes two minutes; `quick` takes one in 1021. Prints
// what failed and returns 1, or a line of counts.

#include "csrc/emulator/numerics.h"

#include <cfenv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace jax_fa4::emulator {
namespace {

int failures = 0;
long checks = 0;
uint64_t stride = 1;  // between the inputs of exhaustive checks

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }
float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
bool IsNan(float x) { return (Bits(x) & 0x7fffffff) > 0x7f800000; }

void Check(bool ok, const char* what, double a = 0, double b = 0) {
  ++checks;
  if (ok) return;
  if (++failures <= 40) std::printf("FAILED: %s (%.9g, %.9g)\n", what, a, b);
}

void CheckBits(
    uint32_t got, uint32_t want, const char* what, uint32_t a = 0, uint32_t b = 0, uint32_t c = 0) {
  ++checks;
  if (got == want) return;
  if (++failures <= 40) {
    std::printf("FAILED: %s of %08x %08x %08x: %08x, expected %08x\n", what, a, b, c, got, want);
  }
}

std::vector<uint8_t> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Operands that meet: equal and neighbouring exponents, zeros, subnormals, infinities, NaNs.
class Operands {
 public:
  float Next() {
    const uint32_t bits = static_cast<uint32_t>(random_());
    switch (random_() % 16) {
      case 0:
        return FromBits(bits & 0x80000000);
      case 1:
        return FromBits(bits & 0x807fffff);
      case 2:
        return FromBits((bits & 0x80000000) | 0x7f800000 | (bits % 8 == 0));
      case 3:
        return FromBits((bits & 0x80000000) | 0x7f000000 | (bits & 0x7fffff));
      case 4:
        return FromBits((bits & 0x80000000) | 0x3f800000 | (bits & 3));
      case 5:
        return FromBits((bits & 0x80000000) | 0x00800000 | (bits & 0x00ffffff));
      case 6:
      case 7:
      case 8:
        return FromBits((bits & 0x807fffff) | (0x70 + (bits >> 24 & 0x1f)) << 23);
      case 9:
        return FromBits((bits & 0x80ff0000));
      default:
        return FromBits(bits);
    }
  }
  std::mt19937_64& random() { return random_; }

 private:
  std::mt19937_64 random_{20};
};

// ---- Directed rounding, against the host's rounding modes ----

float Host(Rounding rounding, const std::function<float()>& compute) {
  const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  std::fesetround(modes[static_cast<int>(rounding)]);
  const float result = compute();
  std::fesetround(FE_TONEAREST);
  return IsNan(result) ? CanonicalNan() : result;
}

void TestArithmetic() {
  Operands operands;
  for (int i = 0; i < 4'000'000; ++i) {
    volatile float a = operands.Next(), b = operands.Next(), c = operands.Next();
    if (i % 5 == 0) c = -static_cast<float>(a * b);
    if (i % 7 == 0) b = FromBits((Bits(a) ^ 0x80000000) + (i % 3) - 1);
    for (int r = 0; r < 4; ++r) {
      const ArithmeticMode mode{.rounding = static_cast<Rounding>(r)};
      const auto check = [&](float got, float want, const char* what) {
        CheckBits(Bits(got), Bits(want), what, Bits(a), Bits(b), Bits(c));
      };
      const auto sum = Host(mode.rounding, [&] { return a + b; });
      check(Add(a, b, mode), sum, "add");
      check(Sub(a, b, mode), Host(mode.rounding, [&] { return a - b; }), "sub");
      check(Mul(a, b, mode), Host(mode.rounding, [&] { return a * b; }), "mul");
      const float fma = Host(mode.rounding, [&] { return std::fma(a, b, c); });
      check(Fma(a, b, c, mode), fma, "fma");
      ArithmeticMode ftz = mode;
      ftz.ftz = true;
      const volatile float fa = FlushSubnormal(a), fb = FlushSubnormal(b);
      check(
          Add(a, b, ftz), FlushSubnormal(Host(mode.rounding, [&] { return fa + fb; })), "add.ftz");
      check(
          Mul(a, b, ftz), FlushSubnormal(Host(mode.rounding, [&] { return fa * fb; })), "mul.ftz");
      ArithmeticMode sat = mode;
      sat.sat = true;
      const float clamped = sum > 1 ? 1.0f : sum > 0 ? sum : 0.0f;
      check(Add(a, b, sat), clamped, "add.sat");
    }
  }
  CheckBits(Bits(Add(FromBits(0x7fc12345), 1)), 0x7fffffff, "add of a NaN");
  CheckBits(Bits(Mul(0, INFINITY)), 0x7fffffff, "0 * inf");
  CheckBits(Bits(Add(1, -1, {.rounding = Rounding::kDown})), 0x80000000, "1 - 1, rounded down");
  CheckBits(Bits(DivRn(0, 0, false)), 0x7fffffff, "0 / 0");
  CheckBits(Bits(SqrtRn(-1, false)), 0x7fffffff, "sqrt(-1)");
}

void TestMinMax() {
  const float nan = FromBits(0x7fc00001);
  const float tiny = FromBits(1);
  CheckBits(Bits(Max(nan, 1)), Bits(1.0f), "max(NaN, 1)");
  CheckBits(Bits(Max(1, nan)), Bits(1.0f), "max(1, NaN)");
  CheckBits(Bits(Max(nan, nan)), 0x7fffffff, "max(NaN, NaN)");
  CheckBits(Bits(Max(nan, 1, {.nan = true})), 0x7fffffff, "max.NaN");
  CheckBits(Bits(Max(-0.0f, 0.0f)), 0, "max(-0, +0)");
  CheckBits(Bits(Max(0.0f, -0.0f)), 0, "max(+0, -0)");
  CheckBits(Bits(Min(0.0f, -0.0f)), 0x80000000, "min(+0, -0)");
  CheckBits(Bits(Max(-1, tiny, {.ftz = true})), 0, "max.ftz");
  CheckBits(Bits(Max(-3, 2, {.xorsign_abs = true})), Bits(-3.0f), "max.xorsign.abs");
  CheckBits(Bits(Min(-3, -2, {.xorsign_abs = true})), Bits(2.0f), "min.xorsign.abs");
  CheckBits(Bits(Max(nan, -2, {.xorsign_abs = true})), Bits(-2.0f), "max.xorsign.abs of a NaN");
  CheckBits(Bits(Max3(1, nan, 3)), Bits(3.0f), "max3");
  CheckBits(Bits(Max3(1, nan, 3, {.nan = true})), 0x7fffffff, "max3.NaN");
  CheckBits(Bits(Max3(-4, 1, 3, {.abs = true})), Bits(4.0f), "max3.abs");
  CheckBits(Bits(Min3(4, 1, 3)), Bits(1.0f), "min3");
  Operands operands;
  for (int i = 0; i < 4'000'000; ++i) {
    const float a = operands.Next(), b = operands.Next();
    if (IsNan(a) || IsNan(b)) continue;
    if (a != b) {
      CheckBits(Bits(Max(a, b)), Bits(a > b ? a : b), "max", Bits(a), Bits(b));
      CheckBits(Bits(Min(a, b)), Bits(a > b ? b : a), "min", Bits(a), Bits(b));
    }
  }
}

// ---- Conversions: all 2^32 floats, against the definition by distances ----

// The value of a finite half, as a double; infinity as the value that rounding compares with.
double HalfValue(HalfType type, uint16_t x) {
  const int precision = type == HalfType::kF16 ? 11 : 8;
  const int least = type == HalfType::kF16 ? -14 : -126;
  const int exponent = (x & 0x7fff) >> (precision - 1);
  const int fraction = x & ((1 << (precision - 1)) - 1);
  const double value = exponent == 0 ? std::ldexp(fraction, least - precision + 1)
                                     : std::ldexp(fraction + (1 << (precision - 1)),
                                                  least + exponent - 1 - precision + 1);
  return x & 0x8000 ? -value : value;
}

void TestConversions() {
  for (HalfType type : {HalfType::kF16, HalfType::kBf16}) {
    const uint16_t infinity = type == HalfType::kF16 ? 0x7c00 : 0x7f80;
    std::vector<double> value(infinity + 1);
    for (int i = 0; i <= infinity; ++i) value[i] = HalfValue(type, static_cast<uint16_t>(i));
    // Walk the positive floats: `below` is the largest half that is not above x.
    uint32_t below = 0;
    for (uint64_t bits = 0; bits <= 0x7f800000; bits += stride) {
      const float x = FromBits(static_cast<uint32_t>(bits));
      while (below < infinity && value[below + 1] <= x) ++below;
      uint16_t nearest = static_cast<uint16_t>(below);
      if (below < infinity) {
        const double down = x - value[below], up = value[below + 1] - x;
        if (up < down || (up == down && below % 2 != 0)) ++nearest;
      }
      uint16_t zero = static_cast<uint16_t>(below);
      if (below == infinity && !std::isinf(x)) --zero;  // never to infinity toward zero
      const uint32_t b = static_cast<uint32_t>(bits);
      CheckBits(FloatToHalf(type, x), nearest, "cvt.rn", b);
      CheckBits(FloatToHalf(type, -x), nearest | 0x8000, "cvt.rn", b);
      CheckBits(FloatToHalf(type, x, {.rounding = Rounding::kTowardZero}), zero, "cvt.rz", b);
      if (bits % 64 == 0 || bits > 0x7f000000) {
        CheckBits(FloatToHalf(type, -x, {.relu = true}), 0, "cvt.rn.relu", b);
        CheckBits(FloatToHalf(type, x, {.satfinite = true}),
                  std::min<uint16_t>(nearest, infinity - 1),
                  "cvt.rn.satfinite",
                  b);
      }
    }
    for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u}) {
      CheckBits(FloatToHalf(type, FromBits(bits)), 0x7fff, "cvt.rn of a NaN", bits);
      CheckBits(
          FloatToHalf(type, FromBits(bits), {.relu = true}), 0x7fff, "cvt.relu of a NaN", bits);
    }
    for (uint32_t h = 0; h < 65536; ++h) {
      if ((h & 0x7fff) >= infinity) continue;
      Check(
          HalfToFloat(type, static_cast<uint16_t>(h)) == HalfValue(type, static_cast<uint16_t>(h)),
          "cvt.f32",
          h);
    }
  }
  CheckBits(FloatToTf32(1 + 0x1p-11f, Tf32Rounding::kNearestAway), Bits(1 + 0x1p-10f), "rna.tf32");
  CheckBits(FloatToTf32(1 + 0x1p-11f, Tf32Rounding::kNearestEven), Bits(1.0f), "rn.tf32");
  CheckBits(FloatToTf32(-1.9999f, Tf32Rounding::kTowardZero), 0xbfffe000, "rz.tf32");
  CheckBits(FloatToTf32(INFINITY, Tf32Rounding::kNearestAway, false, true),
            0x7f7fe000,
            "rna.satfinite.tf32");
  CheckBits(FloatToHalf2(HalfType::kBf16, 1, 2), 0x3f804000, "cvt.rn.bf16x2");
}

// ---- Half arithmetic against __float128, which holds every product exactly ----

// Rounds a + b. A bf16 may lie too far below the product for even 113 bits: then it decides ties.
uint16_t RoundQuad(HalfType type, __float128 a, __float128 b, bool negative_zero) {
  __float128 x = a + b;
  const __float128 b_part = x - a;
  __float128 beyond = (a - (x - b_part)) + (b - b_part);
  if (x < 0) beyond = -beyond;
  const uint16_t sign = x < 0 || (x == 0 && negative_zero) ? 0x8000 : 0;
  if (x < 0) x = -x;
  const uint16_t infinity = type == HalfType::kF16 ? 0x7c00 : 0x7f80;
  uint16_t low = 0, high = infinity;  // value(low) <= x < value(high)
  if (x >= HalfValue(type, infinity)) return sign | infinity;
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (HalfValue(type, middle) <= x ? low : high) = middle;
  }
  const __float128 down = x - HalfValue(type, low), up = HalfValue(type, high) - x;
  const bool tie_up = beyond != 0 ? beyond > 0 : low % 2 != 0;
  return sign | (up < down || (up == down && tie_up) ? high : low);
}

void TestHalfArithmetic() {
  std::mt19937 random(4);
  for (HalfType type : {HalfType::kF16, HalfType::kBf16}) {
    const uint16_t infinity = type == HalfType::kF16 ? 0x7c00 : 0x7f80;
    for (int i = 0; i < 400'000; ++i) {
      uint16_t a = static_cast<uint16_t>(random()), b = static_cast<uint16_t>(random());
      uint16_t c = static_cast<uint16_t>(random());
      if (i % 4 == 0) b = static_cast<uint16_t>((a ^ 0x8000) + random() % 512);
      if (i % 3 == 0) c = HalfMul(type, a, b) ^ (i % 2 ? 0x8000 : 1);
      if ((a & 0x7fff) >= infinity || (b & 0x7fff) >= infinity || (c & 0x7fff) >= infinity)
        continue;
      const __float128 x = HalfValue(type, a), y = HalfValue(type, b), z = HalfValue(type, c);
      const bool minus = (a & b & 0x8000) != 0;
      CheckBits(
          HalfAdd(type, a, b), RoundQuad(type, x, y, minus && x == 0 && y == 0), "add half", a, b);
      const bool negative = ((a ^ b) & 0x8000) != 0;
      CheckBits(HalfMul(type, a, b), RoundQuad(type, x * y, 0, negative), "mul half", a, b);
      const bool zero = negative && x * y == 0 && z == 0 && (c & 0x8000);
      CheckBits(HalfFma(type, a, b, c), RoundQuad(type, x * y, z, zero), "fma half", a, b, c);
    }
    const uint16_t nan = 0x7fc1, one = type == HalfType::kF16 ? 0x3c00 : 0x3f80;
    CheckBits(HalfAdd(type, nan, one), 0x7fff, "add half NaN");
    CheckBits(HalfMax(type, 0x7fff, one), one, "max half NaN");
    CheckBits(HalfMax(type, 0x8000, 0), 0, "max half zeros");
    CheckBits(HalfMin(type, 0x8000, 0), 0x8000, "min half zeros");
    CheckBits(HalfMax(type, 0x7fff, one, {.nan = true}), 0x7fff, "max.NaN half");
    CheckBits(HalfFma(type, one, one | 0x8000, 0, {.relu = true}), 0, "fma.relu half");
    CheckBits(HalfAdd(type, infinity, infinity | 0x8000), 0x7fff, "inf - inf half");
  }
  CheckBits(HalfMul(HalfType::kF16, 1, 0x3c00, {.ftz = true}), 0, "mul.ftz.f16");
  CheckBits(HalfAdd(HalfType::kF16, 0x4000, 0x4000, {.sat = true}), 0x3c00, "add.sat.f16");
  const auto add = [](uint16_t a, uint16_t b) { return HalfAdd(HalfType::kBf16, a, b); };
  CheckBits(PerHalf(add, 0x3f804000u, 0x3f803f80u), 0x40004040, "add.bf16x2");
}

// ---- Approximations ----

double UlpsFrom(float got, double want) {
  const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
  return (got - want) / ulp;
}

void TestWithoutTables() {
  Check(!TablesAreLoaded(), "no tables yet");
  for (uint32_t i = 0; i < 1u << 22; ++i) {
    const float x = FromBits(i * 1021u);
    if (!(std::fabs(x) < 126)) continue;
    CheckBits(
        Bits(Ex2Approx(x, true)), Bits(static_cast<float>(std::exp2(double{x}))), "ex2 rounded");
  }
  CheckBits(Bits(RcpApprox(3, true)), Bits(1.0f / 3), "rcp rounded");
}

void TestTables(const std::string& directory) {
  const std::vector<uint8_t> ex2 = ReadFile(directory + "/ex2.gz");
  const std::vector<uint8_t> rcp = ReadFile(directory + "/rcp.gz");
  for (const std::vector<uint8_t>& bad :
       {std::vector<uint8_t>{},
        std::vector<uint8_t>(100, 7),
        std::vector<uint8_t>(ex2.begin(), ex2.begin() + ex2.size() / 2)}) {
    bool thrown = false;
    try {
      LoadTables(bad, rcp);
    } catch (const std::exception&) {
      thrown = true;
    }
    Check(thrown, "a broken table is refused");
  }
  const auto start = std::chrono::steady_clock::now();
  LoadTables(ex2, rcp);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("tables loaded in %.2f s\n", took.count());
  Check(TablesAreLoaded(), "tables are loaded");

  // The correctly rounded base: double and extended precision must agree everywhere.
  for (uint32_t i = 0; i < 1u << 23; ++i) {
    const double x = 1 + i * 0x1p-23;
    const float from_double = static_cast<float>(std::exp2(x));
    const float from_extended = static_cast<float>(std::exp2(static_cast<long double>(x)));
    CheckBits(Bits(from_double), Bits(from_extended), "base of ex2", i);
    const float reciprocal = static_cast<float>(1 / static_cast<long double>(x));
    CheckBits(Bits(static_cast<float>(1 / x)), Bits(reciprocal), "base of rcp", i);
  }

  double least = 0, most = 0;
  for (uint64_t i = 0; i < uint64_t{1} << 32; i += kLanes * stride) {
    float x[kLanes], y[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) x[lane] = FromBits(static_cast<uint32_t>(i) + lane);
    Ex2Approx32(y, x);
    for (int lane = 0; lane < kLanes; ++lane) {
      CheckBits(Bits(y[lane]), Bits(Ex2Approx(x[lane], true)), "ex2 of 32 lanes", Bits(x[lane]));
    }
    if (i % (4096 * stride) == 0 && std::fabs(x[7]) < 126 && std::fabs(x[7]) > 0x1p-126) {
      const double ulps = UlpsFrom(y[7], std::exp2(double{x[7]}));
      least = std::min(least, ulps);
      most = std::max(most, ulps);
    }
  }
  std::printf("ex2: %.2f to %.2f ulp\n", least, most);
  Check(least > -2.2 && least < -1.2 && most < 1.5 && most > 1, "errors of ex2", least, most);
  CheckBits(Bits(Ex2Approx(0, true)), Bits(1.0f), "ex2(0)");
  CheckBits(Bits(Ex2Approx(-126, true)), 0x00800000, "ex2(-126)");
  CheckBits(Bits(Ex2Approx(FromBits(0xc2fc0001), true)), 0, "ex2 below -126");
  CheckBits(Bits(Ex2Approx(128, true)), 0x7f800000, "ex2(128)");
  CheckBits(Bits(Ex2Approx(-INFINITY, true)), 0, "ex2(-inf)");
  CheckBits(Bits(Ex2Approx(FromBits(0xffc00000), true)), 0x7fffffff, "ex2(NaN)");
  CheckBits(Bits(Ex2Approx(-140, false)), Bits(0x1p-140f), "ex2(-140) with subnormals");
  CheckBits(Bits(Ex2Approx(-INFINITY, false)), 0, "ex2(-inf) with subnormals");

  least = most = 0;
  for (uint64_t i = 0; i < uint64_t{1} << 32; i += 37) {
    const float x = FromBits(static_cast<uint32_t>(i));
    const float y = RcpApprox(x, true);
    const double exact = 1 / double{x};
    if (IsNan(x)) {
      CheckBits(Bits(y), 0x7fffffff, "rcp of a NaN", Bits(x));
    } else if (std::fabs(x) < 0x1p-126f) {
      CheckBits(Bits(y), (Bits(x) & 0x80000000) | 0x7f800000, "rcp of a subnormal", Bits(x));
    } else if (std::fabs(exact) < 0x1p-126) {
      CheckBits(Bits(y), Bits(x) & 0x80000000, "rcp that is subnormal", Bits(x));
    } else {
      const double ulps = UlpsFrom(y, exact);
      least = std::min(least, ulps);
      most = std::max(most, ulps);
      CheckBits(Bits(RcpApprox(x, false)), Bits(y), "rcp with and without ftz", Bits(x));
    }
  }
  std::printf("rcp: %.2f to %.2f ulp\n", least, most);
  Check(least > -1.6 && most < 1.6, "errors of rcp", least, most);
  CheckBits(Bits(RcpApprox(1, true)), Bits(1.0f), "rcp(1)");
  CheckBits(Bits(RcpApprox(-4, true)), Bits(-0.25f), "rcp(-4)");
  CheckBits(Bits(RcpApprox(0x1p126f, true)), 0x00800000, "rcp(2^126)");
  CheckBits(Bits(RcpApprox(0x1p127f, false)), Bits(0x1p-127f), "rcp(2^127) with subnormals");
  CheckBits(Bits(RcpApprox(0x1p-127f, false)), Bits(0x1p127f), "rcp(2^-127) with subnormals");
  CheckBits(Bits(RcpApprox(INFINITY, false)), 0, "rcp(inf)");
  CheckBits(Bits(RcpApprox(-0.0f, false)), 0xff800000, "rcp(-0)");
  CheckBits(Bits(DivFull(6, 3, true)), Bits(2.0f), "div.full");
  CheckBits(Bits(DivFull(0x1p127f, 0x1p127f, true)), Bits(1.0f), "div.full of large numbers");
  CheckBits(Bits(DivApprox(1, 0x1p-128f, false)), Bits(INFINITY), "div.approx by a subnormal");
}

void TestOtherApproximations() {
  CheckBits(Bits(Lg2Approx(8, true)), Bits(3.0f), "lg2(8)");
  CheckBits(Bits(Lg2Approx(FromBits(1), true)), 0xff800000, "lg2.ftz of a subnormal");
  CheckBits(Bits(Lg2Approx(FromBits(1), false)), Bits(-149.0f), "lg2 of a subnormal");
  CheckBits(Bits(Lg2Approx(-1, true)), 0x7fffffff, "lg2(-1)");
  CheckBits(Bits(Lg2Approx(-0.0f, false)), 0xff800000, "lg2(-0)");
  CheckBits(Bits(Lg2Approx(INFINITY, true)), 0x7f800000, "lg2(inf)");
  CheckBits(Bits(TanhApprox(INFINITY)), Bits(1.0f), "tanh(inf)");
  CheckBits(Bits(TanhApprox(-0.0f)), 0x80000000, "tanh(-0)");
  CheckBits(Bits(RsqrtApprox(4, true)), Bits(0.5f), "rsqrt(4)");
  CheckBits(Bits(RsqrtApprox(0, true)), 0x7f800000, "rsqrt(0)");
  CheckBits(Bits(RsqrtApprox(-0.0f, true)), 0xff800000, "rsqrt(-0)");
  CheckBits(Bits(RsqrtApprox(-1, true)), 0x7fffffff, "rsqrt(-1)");
  CheckBits(Bits(SqrtApprox(2, true)), Bits(std::sqrt(2.0f)), "sqrt(2)");
  CheckBits(HalfEx2Approx(HalfType::kF16, 0x3c00, true), 0x4000, "ex2.f16");
  CheckBits(HalfTanhApprox(HalfType::kBf16, 0x7f80), 0x3f80, "tanh.bf16");
}

// ---- 32 lanes against the scalar functions, and their speed ----

void TestLanes() {
  Operands operands;
  alignas(32) float a[kLanes], b[kLanes], c[kLanes], d[kLanes];
  uint32_t packed[kLanes];
  for (int round = 0; round < 400'000; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      a[i] = operands.Next();
      b[i] = operands.Next();
      c[i] = operands.Next();
      if (round % 2) {  // no special numbers, so that vector paths with a fallback are taken
        a[i] = FromBits((Bits(a[i]) & 0x807fffff) | (0x78 + i % 16) << 23);
        b[i] = FromBits((Bits(b[i]) & 0x807fffff) | 0x40000000);
      }
    }
    const bool ftz = round % 4 < 2;
    const ArithmeticMode mode{.ftz = ftz};
    const auto check = [&](const char* what, auto scalar) {
      for (int i = 0; i < kLanes; ++i) {
        CheckBits(
            Bits(d[i]), Bits(scalar(a[i], b[i], c[i])), what, Bits(a[i]), Bits(b[i]), Bits(c[i]));
      }
    };
    Add32(d, a, b, ftz);
    check("add32", [&](float x, float y, float) { return Add(x, y, mode); });
    Sub32(d, a, b, ftz);
    check("sub32", [&](float x, float y, float) { return Sub(x, y, mode); });
    Mul32(d, a, b, ftz);
    check("mul32", [&](float x, float y, float) { return Mul(x, y, mode); });
    Fma32(d, a, b, c, ftz);
    check("fma32", [&](float x, float y, float z) { return Fma(x, y, z, mode); });
    AddDown32(d, a, b, ftz);
    check("add.rm32", [&](float x, float y, float) {
      return Add(x, y, {.rounding = Rounding::kDown, .ftz = ftz});
    });
    Max32(d, a, b, ftz);
    check("max32", [&](float x, float y, float) { return Max(x, y, {.ftz = ftz}); });
    Min32(d, a, b, ftz);
    check("min32", [&](float x, float y, float) { return Min(x, y, {.ftz = ftz}); });
    Max3x32(d, a, b, c, ftz);
    check("max3x32", [&](float x, float y, float z) { return Max3(x, y, z, {.ftz = ftz}); });
    for (HalfType type : {HalfType::kBf16, HalfType::kF16}) {
      type == HalfType::kBf16 ? FloatToBf16x2_32(packed, a, b) : FloatToF16x2_32(packed, a, b);
      for (int i = 0; i < kLanes; ++i) {
        CheckBits(packed[i], FloatToHalf2(type, a[i], b[i]), "cvt32", Bits(a[i]), Bits(b[i]));
      }
    }
  }
}

template <typename Function>
void Time(const char* what, Function function) {
  constexpr int kRounds = 1'000'000;
  const std::clock_t start = std::clock();  // of this process, whatever else runs
  for (int i = 0; i < kRounds; ++i) {
    function();
    asm volatile("" ::: "memory");
  }
  const double took = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  std::printf("%-12s %6.1f ns for 32 lanes\n", what, took / kRounds * 1e9);
}

void TimeLanes() {
  alignas(32) float a[kLanes], b[kLanes], c[kLanes], d[kLanes];
  uint32_t packed[kLanes];
  std::mt19937 random(3);
  for (int i = 0; i < kLanes; ++i) {
    a[i] = -static_cast<float>(random() % 100000) / 5000;
    b[i] = static_cast<float>(random() % 1000) + 1;
    c[i] = static_cast<float>(random() % 1000);
  }
  Time("add", [&] { Add32(d, a, b, true); });
  Time("fma", [&] { Fma32(d, a, b, c, true); });
  Time("add.rm", [&] { AddDown32(d, a, b, true); });
  Time("max", [&] { Max32(d, a, b, false); });
  Time("max3", [&] { Max3x32(d, a, b, c, false); });
  Time("ex2, cached", [&] { Ex2Approx32(d, a); });
  std::vector<float> many(1 << 20);
  for (float& x : many) x = -static_cast<float>(random() >> 8) * 0x1p-20f;
  size_t at = 0;
  Time("ex2, random", [&] {
    Ex2Approx32(d, many.data() + at);
    at = (at + kLanes) % many.size();
  });
  Time("cvt bf16x2", [&] { FloatToBf16x2_32(packed, a, b); });
  Time("cvt f16x2", [&] { FloatToF16x2_32(packed, a, b); });
}

}  // namespace
}  // namespace jax_fa4::emulator

int main(int argc, char** argv) {
  using namespace jax_fa4::emulator;
  const std::string directory = argc > 1 ? argv[1] : "csrc/emulator/tables";
  if (argc > 2) stride = 1021;
  TestWithoutTables();
  TestArithmetic();
  TestMinMax();
  TestHalfArithmetic();
  TestConversions();
  TestTables(directory);
  TestOtherApproximations();
  TestLanes();
  TimeLanes();
  std::printf("%ld checks, %d failed\n", checks, failures);
  return failures != 0;
}
