// Scalar floating-point functions with the results of the hardware, bit for bit where they were
// measured on an H200 and to the documented error elsewhere. Nothing here depends on the rounding
// mode of the host, but subnormal numbers must be on: see DefaultFloatEnvironment.
//
// Source: PTX ISA 9.0, sections 9.7.3 (Floating point instructions), 9.7.4 (Half precision
// floating point instructions) and 9.7.9.21 (cvt).

#ifndef JAX_FA4_CSRC_EMULATOR_NUMERICS_H_
#define JAX_FA4_CSRC_EMULATOR_NUMERICS_H_

#include <bit>
#include <cstdint>
#include <span>

namespace jax_fa4::emulator {

enum class Rounding : uint8_t { kNearestEven, kTowardZero, kDown, kUp };  // .rn .rz .rm .rp

// The NaN that every arithmetic instruction gives, whatever NaN went in.
inline constexpr uint32_t kCanonicalNanBits = 0x7fffffff;
inline constexpr uint16_t kCanonicalHalfNan = 0x7fff;  // of f16 and bf16 alike

inline float CanonicalNan() { return std::bit_cast<float>(kCanonicalNanBits); }

// `.ftz`: a subnormal becomes a zero of its sign.
inline float FlushSubnormal(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// Sets rounding to nearest and subnormal numbers on while it lives: threads of a framework often
// run with subnormals flushed. Of the calling thread only.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment();
  ~DefaultFloatEnvironment();
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  uint32_t saved_;
};

// ---- f32 arithmetic (9.7.3.3 to 9.7.3.8). f32x2 is the same function on both halves. ----

struct ArithmeticMode {
  Rounding rounding = Rounding::kNearestEven;
  bool ftz = false;
  bool sat = false;  // clamp to [0, 1], NaN to +0
};
float Add(float a, float b, ArithmeticMode mode = {});
float Sub(float a, float b, ArithmeticMode mode = {});
float Mul(float a, float b, ArithmeticMode mode = {});
float Fma(float a, float b, float c, ArithmeticMode mode = {});

// div.rn, rcp.rn and sqrt.rn (correctly rounded).
float DivRn(float a, float b, bool ftz);
float RcpRn(float x, bool ftz);
float SqrtRn(float x, bool ftz);

// max and min (9.7.3.11, 9.7.3.12). `nan`: any NaN operand gives NaN, else the other operand wins.
// `xorsign_abs`: of the magnitudes, with the exclusive or of the signs as the sign.
struct MinMaxMode {
  bool ftz = false;
  bool nan = false;
  bool abs = false;          // three operands only
  bool xorsign_abs = false;  // two operands only
};
float Max(float a, float b, MinMaxMode mode = {});
float Min(float a, float b, MinMaxMode mode = {});
float Max3(float a, float b, float c, MinMaxMode mode = {});
float Min3(float a, float b, float c, MinMaxMode mode = {});

// ---- Approximations (9.7.3.13 to 9.7.3.22) ----

// What an H200 does on every input of ex2 and rcp, from tables/ex2.gz and tables/rcp.gz (their
// content: gzip, or the 2^23 bytes themselves). Without them both functions are correctly rounded.
// Not thread safe: call it once, before any thread computes. Throws std::invalid_argument for other
// data.
void LoadTables(std::span<const uint8_t> ex2, std::span<const uint8_t> rcp);
bool TablesAreLoaded();

float Ex2Approx(float x, bool ftz);  // exact with tables (measured: -2.1 to +1.4 ulp of 2^x)
float RcpApprox(float x, bool ftz);  // exact with tables
float DivApprox(float a, float b, bool ftz);  // div.approx: a * rcp(b), as ptxas expands it
float DivFull(float a, float b, bool ftz);    // div.full: the same with b scaled
float Lg2Approx(float x, bool ftz);           // correctly rounded; an H200 differs by up to 1.4 ulp
float TanhApprox(float x);                    // correctly rounded; an H200 differs by up to 2^-16.9
float SqrtApprox(float x, bool ftz);   // correctly rounded; documented error 2^-23 (relative)
float RsqrtApprox(float x, bool ftz);  // correctly rounded; documented error 2^-22.9 (relative)
float SinApprox(float x, bool ftz);    // correctly rounded; documented error 2^-20.5 in [-pi, pi]
float CosApprox(float x, bool ftz);

// ---- Conversions (9.7.9.21) ----

enum class HalfType : uint8_t { kF16, kBf16 };

struct ConvertMode {
  Rounding rounding = Rounding::kNearestEven;  // rn or rz
  bool relu = false;                           // negative results become +0
  bool satfinite = false;  // what overflows, infinity too, becomes the largest finite number
};
uint16_t FloatToHalf(HalfType type, float x, ConvertMode mode = {});
float HalfToFloat(HalfType type, uint16_t x);  // f16: NaN canonical; bf16: a shift, NaN kept
// cvt.rn.bf16x2.f32 d, a, b: `a` goes to the upper half.
inline uint32_t FloatToHalf2(HalfType type, float a, float b, ConvertMode mode = {}) {
  return uint32_t{FloatToHalf(type, a, mode)} << 16 | FloatToHalf(type, b, mode);
}

enum class Tf32Rounding : uint8_t { kNearestAway, kNearestEven, kTowardZero };  // .rna .rn .rz
uint32_t FloatToTf32(float x, Tf32Rounding rounding, bool relu = false, bool satfinite = false);

// ---- f16 and bf16 arithmetic (9.7.4). The packed forms act on both halves. ----

struct HalfMode {
  bool ftz = false;   // f16 only
  bool sat = false;   // f16 only
  bool relu = false;  // fma only
};
uint16_t HalfAdd(HalfType type, uint16_t a, uint16_t b, HalfMode mode = {});
uint16_t HalfSub(HalfType type, uint16_t a, uint16_t b, HalfMode mode = {});
uint16_t HalfMul(HalfType type, uint16_t a, uint16_t b, HalfMode mode = {});
uint16_t HalfFma(HalfType type, uint16_t a, uint16_t b, uint16_t c, HalfMode mode = {});
uint16_t HalfMax(HalfType type, uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t HalfMin(HalfType type, uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t HalfEx2Approx(HalfType type, uint16_t x, bool ftz);  // correctly rounded
uint16_t HalfTanhApprox(HalfType type, uint16_t x);           // correctly rounded

template <typename Function, typename... Operands>
uint32_t PerHalf(Function function, Operands... packed) {
  const uint16_t low = function(static_cast<uint16_t>(packed)...);
  const uint16_t high = function(static_cast<uint16_t>(packed >> 16)...);
  return uint32_t{high} << 16 | low;
}

// ---- 32 lanes at a time: equal to the scalar functions in every bit, at vector speed ----

inline constexpr int kLanes = 32;
// .rn; d may be any of the operands.
void Add32(float* d, const float* a, const float* b, bool ftz);
void Sub32(float* d, const float* a, const float* b, bool ftz);
void Mul32(float* d, const float* a, const float* b, bool ftz);
void Fma32(float* d, const float* a, const float* b, const float* c, bool ftz);
void AddDown32(float* d, const float* a, const float* b, bool ftz);  // add.rm
void Max32(float* d, const float* a, const float* b, bool ftz);
void Min32(float* d, const float* a, const float* b, bool ftz);
void Max3x32(float* d, const float* a, const float* b, const float* c, bool ftz);
void Ex2Approx32(float* d, const float* x);                          // .ftz
void FloatToBf16x2_32(uint32_t* d, const float* a, const float* b);  // .rn; `a` in the upper half
void FloatToF16x2_32(uint32_t* d, const float* a, const float* b);   // .rn

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_NUMERICS_H_
