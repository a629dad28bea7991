#include "csrc/emulator/tensor_core.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace jax_fa4::emulator {
namespace {

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }
float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }

// ---- Hopper ----

constexpr int kFractionBits = 25;       // kept below the largest exponent
constexpr int kZeroExponent = -0x4000;  // of zeros: below every other, sums of two included
constexpr int kPanel = 256;             // columns prepared at a time; the largest n there is

// significand * 2^exponent, with the significand in [1, 2), below 1 where subnormal.
struct Factor {
  float significand;
  int32_t exponent;
  bool finite;
};

Factor Split(HalfType type, uint16_t x) {
  const int fraction_bits = type == HalfType::kF16 ? 10 : 7;
  const int bias = type == HalfType::kF16 ? 15 : 127;
  const uint32_t fraction = x & ((1u << fraction_bits) - 1);
  const int exponent = (x & 0x7fff) >> fraction_bits;
  const uint32_t sign = uint32_t{x & 0x8000u} << 16;
  if (exponent == 0) {
    const float small = static_cast<float>(fraction) / static_cast<float>(1 << fraction_bits);
    return {FromBits(Bits(small) | sign), fraction == 0 ? kZeroExponent : 1 - bias, true};
  }
  const float significand = FromBits(sign | 0x3f800000 | fraction << (23 - fraction_bits));
  return {significand, exponent - bias, exponent != (type == HalfType::kF16 ? 31 : 255)};
}

Factor Split(float x) {
  const uint32_t sign = Bits(x) & 0x80000000;
  const uint32_t fraction = Bits(x) & 0x7fffff;
  const int exponent = static_cast<int>(Bits(x) >> 23 & 0xff);
  if (exponent == 0) {
    const float small = static_cast<float>(fraction) * 0x1p-23f;
    return {FromBits(Bits(small) | sign), fraction == 0 ? kZeroExponent : -126, true};
  }
  return {FromBits(sign | 0x3f800000 | fraction), exponent - 127, exponent != 255};
}

// sum * 2^exponent, toward zero to f32; overflow gives infinity.
float TruncateToFloat(int64_t sum, int exponent) {
  const uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  if (magnitude == 0) return 0;
  const int top = 63 - std::countl_zero(magnitude) + exponent;
  float result = std::numeric_limits<float>::infinity();
  if (top <= 127) {
    const int last = std::max(top - 23, -149);  // exponent of the last bit kept
    const int drop = last - exponent;
    const uint64_t kept = drop >= 64 ? 0 : drop >= 0 ? magnitude >> drop : magnitude << -drop;
    result = std::ldexp(static_cast<float>(kept), last);
  }
  return sum < 0 ? -result : result;
}

// One element of D. `c` is 0 where D is not read.
float HopperElement(const MmaOptions& options, const uint16_t* a, const uint16_t* b, float c) {
  const uint16_t flip_a = options.negate_a ? 0x8000 : 0;
  const uint16_t flip_b = options.negate_b ? 0x8000 : 0;
  Factor products[kMmaK + 1];
  double special = 0;
  bool finite = true;
  for (int k = 0; k < kMmaK; ++k) {
    const uint16_t x_bits = a[k] ^ flip_a;
    const uint16_t y_bits = b[k] ^ flip_b;
    const Factor x = Split(options.a_type, x_bits);
    const Factor y = Split(options.b_type, y_bits);
    products[k] = {x.significand * y.significand, x.exponent + y.exponent, true};
    if (!x.finite || !y.finite) {
      finite = false;
      special += static_cast<double>(HalfToFloat(options.a_type, x_bits)) *
                 static_cast<double>(HalfToFloat(options.b_type, y_bits));
    }
  }
  products[kMmaK] = Split(c);
  if (!finite || !products[kMmaK].finite) {
    // Finite products cannot hide an infinity, nor overflow to one among infinities of other sign:
    // only what is special counts.
    if (!products[kMmaK].finite) special += c;
    return std::isnan(special) ? CanonicalNan() : static_cast<float>(special);
  }
  int largest = products[0].exponent;
  for (const Factor& product : products) largest = std::max(largest, product.exponent);
  if (largest < kZeroExponent / 2) return 0;
  int64_t sum = 0;
  for (const Factor& product : products) {
    // The significand is exact and below 4; the conversion truncates toward zero.
    const int shift = std::max(product.exponent - largest, -100) + kFractionBits;
    sum += static_cast<int64_t>(std::ldexp(static_cast<double>(product.significand), shift));
  }
  return TruncateToFloat(sum, largest - kFractionBits);
}

// The products of moderate operands are floats, exactly, and so is their distance to the largest.
constexpr int kModerateExponent = 50;

// A row of an operand. `value` is the number itself.
struct Row {
  alignas(32) float significand[kMmaK];
  alignas(32) int32_t exponent[kMmaK];
  alignas(32) float value[kMmaK];
  bool finite;
  bool moderate;  // every number is 0 or has an exponent of at most kModerateExponent in magnitude
};

// B of a panel, with k outermost, and which columns hold an infinity or NaN. `source` and what
// follows say of which operand.
struct PreparedB {
  alignas(32) float significand[kMmaK][kPanel];
  alignas(32) int32_t exponent[kMmaK][kPanel];
  alignas(32) int16_t short_exponent[kMmaK][kPanel];
  alignas(32) float value[kMmaK][kPanel];
  std::array<uint8_t, kPanel / 8> special;
  bool moderate;
  alignas(32) uint16_t source[kPanel][kMmaK];
  int count = 0;
  HalfType type;
  bool negate;
};

__m256 PowerOfTwo(__m256i biased) { return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)); }

// Rounds four doubles toward zero to float where they are zero or at least 2^-126; larger ones than
// floats become infinity.
__m128 TruncateNormal(__m256d x) {
  const __m256d mask = _mm256_castsi256_pd(_mm256_set1_epi64x(~int64_t{0x1fffffff}));
  return _mm256_cvtpd_ps(_mm256_and_pd(x, mask));
}

// Significands and exponents of eight floats of an accumulator.
struct SplitVector {
  __m256 significand;
  __m256i exponent;
};
SplitVector SplitAccumulators(__m256 c) {
  const __m256i bits = _mm256_castps_si256(c);
  const __m256i field = _mm256_and_si256(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(0xff));
  const __m256i zero_field = _mm256_cmpeq_epi32(field, _mm256_setzero_si256());
  const __m256i normal =
      _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0x807fffff))),
                      _mm256_set1_epi32(0x3f800000));
  const __m256 subnormal = _mm256_mul_ps(c, _mm256_set1_ps(0x1p126f));
  const __m256 is_zero = _mm256_cmp_ps(c, _mm256_setzero_ps(), _CMP_EQ_OQ);
  const __m256i exponent =
      _mm256_sub_epi32(_mm256_max_epi32(field, _mm256_set1_epi32(1)), _mm256_set1_epi32(127));
  return {
      _mm256_blendv_ps(_mm256_castsi256_ps(normal), subnormal, _mm256_castsi256_ps(zero_field)),
      _mm256_blendv_epi8(exponent, _mm256_set1_epi32(kZeroExponent), _mm256_castps_si256(is_zero))};
}

// The largest exponents of a row's products with 16 columns.
__m256i LargestExponents(const Row& a, const PreparedB& b, int column) {
  __m256i largest = _mm256_set1_epi16(2 * kZeroExponent);
  for (int k = 0; k < kMmaK; ++k) {
    const __m256i b_exponent =
        _mm256_load_si256(reinterpret_cast<const __m256i*>(&b.short_exponent[k][column]));
    const __m256i a_exponent = _mm256_set1_epi16(static_cast<int16_t>(a.exponent[k]));
    largest = _mm256_max_epi16(largest, _mm256_add_epi16(a_exponent, b_exponent));
  }
  return largest;
}

// Eight columns of a row, of whose products the largest exponents are given. As HopperElement, with
// the products scaled to units of 2^(e-25), so that the conversion to integers truncates them. Sums
// of eight stay below 2^31.
template <bool kModerate>
__m256 HopperVector(
    const Row& a, const PreparedB& b, int column, __m256i largest_product, __m256 c) {
  const SplitVector accumulator = SplitAccumulators(c);
  const __m256i largest = _mm256_max_epi32(accumulator.exponent, largest_product);
  const __m256i to_scale = _mm256_sub_epi32(_mm256_set1_epi32(kFractionBits + 127), largest);
  const auto scaled = [&](__m256 significand, __m256i exponent) {
    // A field of 0 is a scale of 0: what is so small is truncated away as well.
    const __m256i field =
        _mm256_max_epi32(_mm256_add_epi32(exponent, to_scale), _mm256_setzero_si256());
    return _mm256_cvttps_epi32(_mm256_mul_ps(significand, PowerOfTwo(field)));
  };
  __m256i sum0 = scaled(accumulator.significand, accumulator.exponent);
  __m256i sum1 = _mm256_setzero_si256();
  if constexpr (kModerate) {
    // The scale is beyond floats only where all products are 0, and then it may be any.
    const __m256 scale = PowerOfTwo(_mm256_min_epi32(
        _mm256_max_epi32(to_scale, _mm256_setzero_si256()), _mm256_set1_epi32(254)));
    const auto product = [&](int k) {
      const __m256 exact =
          _mm256_mul_ps(_mm256_set1_ps(a.value[k]), _mm256_load_ps(&b.value[k][column]));
      return _mm256_cvttps_epi32(_mm256_mul_ps(exact, scale));
    };
    for (int k = 0; k < kMmaK; k += 2) {
      sum0 = _mm256_add_epi32(sum0, product(k));
      sum1 = _mm256_add_epi32(sum1, product(k + 1));
    }
  } else {
    const auto product = [&](int k) {
      const __m256 exact = _mm256_mul_ps(_mm256_set1_ps(a.significand[k]),
                                         _mm256_load_ps(&b.significand[k][column]));
      const __m256i b_exponent =
          _mm256_load_si256(reinterpret_cast<const __m256i*>(&b.exponent[k][column]));
      return scaled(exact, _mm256_add_epi32(b_exponent, _mm256_set1_epi32(a.exponent[k])));
    };
    for (int k = 0; k < kMmaK; k += 2) {
      sum0 = _mm256_add_epi32(sum0, product(k));
      sum1 = _mm256_add_epi32(sum1, product(k + 1));
    }
  }

  // Nonzero sums have an exponent of at least 2 * -126.
  const __m256i unit = _mm256_add_epi32(_mm256_max_epi32(largest, _mm256_set1_epi32(-900)),
                                        _mm256_set1_epi32(1023 - kFractionBits));
  const auto half = [&](__m128i low, __m128i high, __m128i field) {
    const __m256d sum = _mm256_add_pd(_mm256_cvtepi32_pd(low), _mm256_cvtepi32_pd(high));
    const __m256d scale = _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_cvtepi32_epi64(field), 52));
    return _mm256_mul_pd(sum, scale);
  };
  const __m256d left = half(
      _mm256_castsi256_si128(sum0), _mm256_castsi256_si128(sum1), _mm256_castsi256_si128(unit));
  const __m256d right = half(_mm256_extracti128_si256(sum0, 1),
                             _mm256_extracti128_si256(sum1, 1),
                             _mm256_extracti128_si256(unit, 1));
  __m256 result = _mm256_set_m128(TruncateNormal(right), TruncateNormal(left));

  const auto is_subnormal = [](__m256d x) {
    const __m256d magnitude = _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
    return _mm256_and_pd(_mm256_cmp_pd(magnitude, _mm256_set1_pd(0x1p-126), _CMP_LT_OQ),
                         _mm256_cmp_pd(magnitude, _mm256_setzero_pd(), _CMP_GT_OQ));
  };
  const __m256d any = _mm256_or_pd(is_subnormal(left), is_subnormal(right));
  if (_mm256_movemask_pd(any) != 0) [[unlikely]] {
    alignas(32) double values[8];
    alignas(32) float results[8];
    _mm256_store_pd(values, left);
    _mm256_store_pd(values + 4, right);
    _mm256_store_ps(results, result);
    for (int i = 0; i < 8; ++i) {
      if (std::fabs(values[i]) >= 0x1p-126 || values[i] == 0) continue;
      results[i] = static_cast<float>(std::trunc(values[i] * 0x1p149) * 0x1p-149);
    }
    result = _mm256_load_ps(results);
  }
  return result;
}

// Splits a row of 16 numbers of 16 bits, as Split does one.
void PrepareRow(HalfType type, bool negate, const uint16_t* source, Row* row) {
  const int fraction_bits = type == HalfType::kF16 ? 10 : 7;
  const int bias = type == HalfType::kF16 ? 15 : 127;
  const __m256i zero = _mm256_setzero_si256();
  const __m256i last_field = _mm256_set1_epi32(type == HalfType::kF16 ? 31 : 255);
  __m256i special = zero, beyond = zero;
  for (int k = 0; k < kMmaK; k += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + k));
    const __m256i bits =
        _mm256_xor_si256(_mm256_cvtepu16_epi32(half), _mm256_set1_epi32(negate ? 0x8000 : 0));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fff));
    const __m256i fraction = _mm256_and_si256(bits, _mm256_set1_epi32((1 << fraction_bits) - 1));
    const __m256i field = _mm256_srli_epi32(magnitude, fraction_bits);
    const __m256i is_zero = _mm256_cmpeq_epi32(magnitude, zero);
    const __m256i is_small = _mm256_cmpeq_epi32(field, zero);
    const __m256i normal = _mm256_or_si256(_mm256_slli_epi32(fraction, 23 - fraction_bits),
                                           _mm256_set1_epi32(0x3f800000));
    const __m256 subnormal = _mm256_mul_ps(
        _mm256_cvtepi32_ps(fraction), _mm256_set1_ps(type == HalfType::kF16 ? 0x1p-10f : 0x1p-7f));
    const __m256 unsigned_significand =
        _mm256_blendv_ps(_mm256_castsi256_ps(normal), subnormal, _mm256_castsi256_ps(is_small));
    const __m256i exponent =
        _mm256_sub_epi32(_mm256_max_epi32(field, _mm256_set1_epi32(1)), _mm256_set1_epi32(bias));
    const __m256 significand = _mm256_or_ps(unsigned_significand, _mm256_castsi256_ps(sign));
    _mm256_store_ps(row->significand + k, significand);
    _mm256_store_si256(reinterpret_cast<__m256i*>(row->exponent + k),
                       _mm256_blendv_epi8(exponent, _mm256_set1_epi32(kZeroExponent), is_zero));
    const __m256i far = _mm256_andnot_si256(
        is_zero,
        _mm256_cmpgt_epi32(_mm256_abs_epi32(exponent), _mm256_set1_epi32(kModerateExponent)));
    const __m256 power =
        PowerOfTwo(_mm256_andnot_si256(far, _mm256_add_epi32(exponent, _mm256_set1_epi32(127))));
    _mm256_store_ps(row->value + k, _mm256_mul_ps(significand, power));
    special = _mm256_or_si256(special, _mm256_cmpeq_epi32(field, last_field));
    beyond = _mm256_or_si256(beyond, far);
  }
  row->finite = _mm256_testz_si256(special, special);
  row->moderate = row->finite && _mm256_testz_si256(beyond, beyond);
}

// Turns eight vectors of eight elements into columns.
void Transpose(const float* rows, ptrdiff_t stride, float* columns, ptrdiff_t columns_stride) {
  __m256 pairs[8], quads[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    const __m256 x = _mm256_loadu_ps(rows + i * stride);
    const __m256 y = _mm256_loadu_ps(rows + (i + 1) * stride);
    pairs[i] = _mm256_unpacklo_ps(x, y);
    pairs[i + 1] = _mm256_unpackhi_ps(x, y);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 8
    for (int j = 0; j < 2; ++j) {
      quads[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
      quads[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(columns + i * columns_stride,
                     _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
    _mm256_storeu_ps(columns + (i + 4) * columns_stride,
                     _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
  }
}

void PrepareB(PreparedB* b) {
  b->special.fill(0);
  b->moderate = true;
  for (int first = 0; first < b->count; first += 8) {
    Row rows[8];
    for (int n = 0; n < 8; ++n) {
      static constexpr uint16_t kZeros[kMmaK] = {};
      Row& row = rows[n];
      const uint16_t* source = first + n < b->count ? b->source[first + n] : kZeros;
      PrepareRow(b->type, b->negate, source, &row);
      if (!row.finite) b->special[first / 8] |= static_cast<uint8_t>(1 << n);
      b->moderate &= row.moderate;
    }
    constexpr ptrdiff_t kStride = sizeof(Row) / sizeof(float);
    for (int k = 0; k < kMmaK; k += 8) {
      Transpose(rows[0].significand + k, kStride, &b->significand[k][first], kPanel);
      Transpose(rows[0].value + k, kStride, &b->value[k][first], kPanel);
      Transpose(reinterpret_cast<const float*>(rows[0].exponent + k),
                kStride,
                reinterpret_cast<float*>(&b->exponent[k][first]),
                kPanel);
    }
    for (int k = 0; k < kMmaK; ++k) {
      for (int n = first; n < first + 8; ++n) {
        b->short_exponent[k][n] = static_cast<int16_t>(b->exponent[k][n]);
      }
    }
  }
}

// Up to eight of them.
void CopyFloats(float* to, const float* from, int count) {
  if (count == 8) {
    std::memcpy(to, from, 8 * sizeof(float));  // of a constant size, which needs no call
  } else {
    std::memcpy(to, from, sizeof(float) * count);
  }
}

// Columns [first, first + count) of B. The four warps of a warpgroup multiply by the same B one
// after the other, and other warpgroups in between, so the last few are kept.
const PreparedB& Prepared(const MmaOptions& options,
                          const MmaOperands& operands,
                          int first,
                          int count) {
  static constexpr size_t kKept = 4;
  thread_local std::vector<PreparedB> kept(kKept);
  thread_local size_t next = 0;
  for (const PreparedB& one : kept) {
    bool same = one.count == count && one.type == options.b_type && one.negate == options.negate_b;
    for (int n = 0; same && n < count; ++n) {
      const uint16_t* row = operands.b + (first + n) * operands.b_stride;
      same = std::memcmp(one.source[n], row, sizeof(one.source[n])) == 0;
    }
    if (same) return one;
  }
  PreparedB& b = kept[next++ % kKept];
  b.count = count;
  b.type = options.b_type;
  b.negate = options.negate_b;
  for (int n = 0; n < count; ++n) {
    std::memcpy(b.source[n], operands.b + (first + n) * operands.b_stride, sizeof(b.source[n]));
  }
  PrepareB(&b);
  return b;
}

// ---- Blackwell ----

__m256 CanonicalNans(__m256 x) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kCanonicalNanBits)));
  return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

// kRows rows and 8 * kVectors columns, held in registers over the 16 steps of k: only arrays whose
// loops are unrolled are.
template <int kRows, int kVectors>
void ChainBlock(const float* a,
                const float* b,
                ptrdiff_t b_stride,
                float* d,
                ptrdiff_t d_stride,
                bool accumulate) {
  __m256 sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      sums[i][j] = accumulate ? _mm256_loadu_ps(d + i * d_stride + 8 * j) : _mm256_setzero_ps();
    }
  }
  for (int k = 0; k < kMmaK; ++k) {
    __m256 columns[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) columns[j] = _mm256_load_ps(b + k * b_stride + 8 * j);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m256 x = _mm256_set1_ps(a[i * kMmaK + k]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sums[i][j] = _mm256_fmadd_ps(x, columns[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      _mm256_storeu_ps(d + i * d_stride + 8 * j, CanonicalNans(sums[i][j]));
    }
  }
}

template <int kVectors>
void ChainRows(int rows,
               const float* a,
               const float* b,
               ptrdiff_t b_stride,
               float* d,
               ptrdiff_t d_stride,
               bool accumulate) {
  int i = 0;
  for (; i + 6 <= rows; i += 6) {
    ChainBlock<6, kVectors>(a + i * kMmaK, b, b_stride, d + i * d_stride, d_stride, accumulate);
  }
  for (; i + 2 <= rows; i += 2) {
    ChainBlock<2, kVectors>(a + i * kMmaK, b, b_stride, d + i * d_stride, d_stride, accumulate);
  }
  if (i < rows) {
    ChainBlock<1, kVectors>(a + i * kMmaK, b, b_stride, d + i * d_stride, d_stride, accumulate);
  }
}

// 16 elements of 16 bits to f32.
void Widen(HalfType type, bool negate, const uint16_t* row, float* out) {
  const __m256 flip = negate ? _mm256_set1_ps(-0.0f) : _mm256_setzero_ps();
  for (int k = 0; k < kMmaK; k += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k));
    const __m256 wide =
        type == HalfType::kF16
            ? _mm256_cvtph_ps(half)
            : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    _mm256_storeu_ps(out + k, _mm256_xor_ps(wide, flip));
  }
}

template <typename Product>
void WithF16Accumulators(const MmaOptions& options,
                         MmaOperands operands,
                         uint16_t* d,
                         ptrdiff_t d_stride,
                         Product product) {
  std::vector<float> wide(static_cast<size_t>(operands.m) * operands.n);
  for (int i = 0; i < operands.m && options.accumulate; ++i) {
    for (int j = 0; j < operands.n; ++j) {
      wide[i * operands.n + j] = HalfToFloat(HalfType::kF16, d[i * d_stride + j]);
    }
  }
  operands.d = wide.data();
  operands.d_stride = operands.n;
  product(options, operands);
  for (int i = 0; i < operands.m; ++i) {
    for (int j = 0; j < operands.n; ++j) {
      d[i * d_stride + j] = FloatToHalf(HalfType::kF16, wide[i * operands.n + j]);
    }
  }
}

// ---- Descriptors ----

constexpr uint32_t Field(uint64_t bits, int first, int count) {
  return static_cast<uint32_t>(bits >> first & ((uint64_t{1} << count) - 1));
}

}  // namespace

void MmaHopperReference(const MmaOptions& options, const MmaOperands& operands) {
  for (int i = 0; i < operands.m; ++i) {
    for (int j = 0; j < operands.n; ++j) {
      float& d = operands.d[i * operands.d_stride + j];
      d = HopperElement(options,
                        operands.a + i * operands.a_stride,
                        operands.b + j * operands.b_stride,
                        options.accumulate ? d : 0);
    }
  }
}

void MmaHopper(const MmaOptions& options, const MmaOperands& operands) {
  Row row;
  const __m256 exponent_field = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
  for (int first = 0; first < operands.n; first += kPanel) {
    const int count = std::min(operands.n - first, kPanel);
    const PreparedB& b = Prepared(options, operands, first, count);
    for (int i = 0; i < operands.m; ++i) {
      const uint16_t* a = operands.a + i * operands.a_stride;
      PrepareRow(options.a_type, options.negate_a, a, &row);
      const bool moderate = row.moderate && b.moderate;
      float* d = operands.d + i * operands.d_stride + first;
      __m256i largest = _mm256_setzero_si256();
      for (int column = 0; column < count; column += 8) {
        const int width = std::min(count - column, 8);
        largest = column % 16 == 0 ? LargestExponents(row, b, column)
                                   : _mm256_permute2x128_si256(largest, largest, 0x11);
        const __m256i of_vector = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(largest));
        alignas(32) float old[8] = {};
        if (options.accumulate) CopyFloats(old, d + column, width);
        const __m256 c = _mm256_load_ps(old);
        const __m256 result = moderate ? HopperVector<true>(row, b, column, of_vector, c)
                                       : HopperVector<false>(row, b, column, of_vector, c);
        const __m256i special_c =
            _mm256_cmpeq_epi32(_mm256_castps_si256(_mm256_and_ps(c, exponent_field)),
                               _mm256_castps_si256(exponent_field));
        const int special = (row.finite ? 0 : 0xff) | b.special[column / 8] |
                            _mm256_movemask_ps(_mm256_castsi256_ps(special_c));
        alignas(32) float results[8];
        _mm256_store_ps(results, result);
        if (special != 0) [[unlikely]] {
          for (int j = 0; j < width; ++j) {
            if (!(special >> j & 1)) continue;
            const uint16_t* other = operands.b + (first + column + j) * operands.b_stride;
            results[j] = HopperElement(options, a, other, old[j]);
          }
        }
        CopyFloats(d + column, results, width);
      }
    }
  }
}

void MmaBlackwell(const MmaOptions& options, const MmaOperands& operands) {
  constexpr int kRowBlock = 128;
  alignas(32) float b[kMmaK][kPanel];
  alignas(32) float a[kRowBlock][kMmaK];
  for (int first = 0; first < operands.n; first += kPanel) {
    const int count = std::min(operands.n - first, kPanel);
    for (int n = 0; n < count; n += 8) {
      float rows[8][kMmaK] = {};
      for (int i = 0; i < std::min(8, count - n); ++i) {
        const uint16_t* source = operands.b + (first + n + i) * operands.b_stride;
        Widen(options.b_type, options.negate_b, source, rows[i]);
      }
      for (int k = 0; k < kMmaK; k += 8) Transpose(rows[0] + k, kMmaK, &b[k][n], kPanel);
    }
    for (int top = 0; top < operands.m; top += kRowBlock) {
      const int rows = std::min(operands.m - top, kRowBlock);
      for (int i = 0; i < rows; ++i) {
        Widen(options.a_type, options.negate_a, operands.a + (top + i) * operands.a_stride, a[i]);
      }
      float* d = operands.d + top * operands.d_stride + first;
      int column = 0;
      for (; column + 16 <= count; column += 16) {
        ChainRows<2>(
            rows, a[0], b[0] + column, kPanel, d + column, operands.d_stride, options.accumulate);
      }
      for (; column + 8 <= count; column += 8) {
        ChainRows<1>(
            rows, a[0], b[0] + column, kPanel, d + column, operands.d_stride, options.accumulate);
      }
      for (; column < count; ++column) {
        for (int i = 0; i < rows; ++i) {
          float& element = d[i * operands.d_stride + column];
          float sum = options.accumulate ? element : 0;
          for (int k = 0; k < kMmaK; ++k) sum = std::fma(a[i][k], b[k][column], sum);
          element = std::isnan(sum) ? CanonicalNan() : sum;
        }
      }
    }
  }
}

void MmaHopperF16(const MmaOptions& options,
                  MmaOperands operands,
                  uint16_t* d,
                  ptrdiff_t d_stride) {
  WithF16Accumulators(options, operands, d, d_stride, MmaHopper);
}

void MmaBlackwellF16(const MmaOptions& options,
                     MmaOperands operands,
                     uint16_t* d,
                     ptrdiff_t d_stride) {
  WithF16Accumulators(options, operands, d, d_stride, MmaBlackwell);
}

std::string DecodeMatrixDescriptor(uint64_t bits,
                                   DescriptorForm form,
                                   MatrixDescriptor* descriptor) {
  MatrixDescriptor decoded;
  decoded.start_address = Field(bits, 0, 14) << 4;
  decoded.leading_byte_offset = Field(bits, 16, 14) << 4;
  decoded.stride_byte_offset = Field(bits, 32, 14) << 4;
  decoded.base_offset = Field(bits, 49, 3);
  if (Field(bits, 14, 2) != 0 || Field(bits, 30, 2) != 0) {
    return "bits 14-15 and 30-31 of a matrix descriptor are reserved and must be 0";
  }
  if (form == DescriptorForm::kHopper) {
    if (Field(bits, 46, 3) != 0 || Field(bits, 52, 10) != 0) {
      return "bits 46-48 and 52-61 of a wgmma matrix descriptor are reserved and must be 0 (is it "
             "a "
             "tcgen05 descriptor?)";
    }
    constexpr Swizzle kModes[] = {
        Swizzle::kNone, Swizzle::k128Bytes, Swizzle::k64Bytes, Swizzle::k32Bytes};
    decoded.swizzle = kModes[Field(bits, 62, 2)];
  } else {
    if (Field(bits, 46, 3) != 1) {
      return "bits 46-48 of a tcgen05 matrix descriptor must be 0b001 (is it a wgmma descriptor?)";
    }
    if (Field(bits, 52, 1) != 0) {
      return "bit 52 of a matrix descriptor, an absolute leading address, is for sm_103a only";
    }
    if (Field(bits, 53, 8) != 0) return "bits 53-60 of a tcgen05 matrix descriptor must be 0";
    switch (Field(bits, 61, 3)) {
      case 0:
        decoded.swizzle = Swizzle::kNone;
        break;
      case 1:
        return "the 128-byte swizzle with 32-byte atoms is not modelled";
      case 2:
        decoded.swizzle = Swizzle::k128Bytes;
        break;
      case 4:
        decoded.swizzle = Swizzle::k64Bytes;
        break;
      case 6:
        decoded.swizzle = Swizzle::k32Bytes;
        break;
      default:
        return "the swizzle mode, bits 61-63 of a tcgen05 matrix descriptor, is not 0, 1, 2, 4 or "
               "6";
    }
  }
  if (decoded.swizzle == Swizzle::kNone && decoded.base_offset != 0) {
    return "a matrix descriptor without a swizzle has a base offset, bits 49-51";
  }
  *descriptor = decoded;
  return "";
}

uint64_t EncodeMatrixDescriptor(const MatrixDescriptor& descriptor, DescriptorForm form) {
  const auto field = [](uint32_t bytes) { return uint64_t{(bytes & 0x3ffff) >> 4}; };
  uint64_t bits = field(descriptor.start_address) | field(descriptor.leading_byte_offset) << 16 |
                  field(descriptor.stride_byte_offset) << 32 |
                  uint64_t{descriptor.base_offset} << 49;
  constexpr uint64_t kHopperModes[] = {0, 3, 2, 1};
  constexpr uint64_t kBlackwellModes[] = {0, 6, 4, 2};
  const int mode = static_cast<int>(descriptor.swizzle);
  if (form == DescriptorForm::kHopper) return bits | kHopperModes[mode] << 62;
  return bits | uint64_t{1} << 46 | kBlackwellModes[mode] << 61;
}

uint32_t ChunkAddress(const MatrixDescriptor& descriptor, Major major, int mn, int k) {
  const uint32_t leading = descriptor.leading_byte_offset;
  const uint32_t stride = descriptor.stride_byte_offset;
  const uint32_t row = static_cast<uint32_t>(mn), step = static_cast<uint32_t>(k);
  const uint32_t width = SwizzleWidth(descriptor.swizzle);
  uint32_t offset;
  if (descriptor.swizzle == Swizzle::kNone) {
    offset = major == Major::kK ? row % 8 * 16 + row / 8 * stride + step / 8 * leading
                                : row / 8 * stride + step % 8 * 16 + step / 8 * leading;
  } else if (major == Major::kK) {
    offset = row % 8 * width + row / 8 * stride + step / 8 * 16;
  } else {
    offset = row / 8 % (width / 16) * 16 + row / (width / 2) * leading + step % 8 * width +
             step / 8 * stride;
  }
  return SwizzleAddress(
      descriptor.start_address + offset, descriptor.swizzle, descriptor.base_offset << 7);
}

uint32_t ElementAddress(const MatrixDescriptor& descriptor, Major major, int mn, int k) {
  const int within = major == Major::kK ? k % 8 : mn % 8;
  return ChunkAddress(descriptor, major, mn, k) + static_cast<uint32_t>(within) * 2;
}

std::string GatherOperand(const MatrixDescriptor& descriptor,
                          Major major,
                          int rows,
                          std::span<const uint8_t> shared,
                          uint16_t* operand) {
  std::string problem;
  const auto chunk = [&](int mn, int k) -> const uint8_t* {
    const size_t address = ChunkAddress(descriptor, major, mn, k);
    if (address + 16 <= shared.size()) return shared.data() + address;
    if (problem.empty()) {
      problem = "a matrix descriptor reaches address " + std::to_string(address) +
                " of shared memory, which has " + std::to_string(shared.size()) + " bytes";
    }
    return nullptr;
  };
  if (major == Major::kK) {
    for (int mn = 0; mn < rows; ++mn) {
      for (int k = 0; k < kMmaK; k += 8) {
        const uint8_t* source = chunk(mn, k);
        if (source == nullptr) return problem;
        std::memcpy(operand + mn * kMmaK + k, source, 16);
      }
    }
    return "";
  }
  for (int k = 0; k < kMmaK; ++k) {
    for (int mn = 0; mn < rows; mn += 8) {
      const uint8_t* source = chunk(mn, k);
      if (source == nullptr) return problem;
      uint16_t elements[8];
      std::memcpy(elements, source, sizeof elements);
      for (int i = 0; i < std::min(8, rows - mn); ++i) operand[(mn + i) * kMmaK + k] = elements[i];
    }
  }
  return "";
}

std::string PatternRemark(const MatrixDescriptor& descriptor) {
  if (descriptor.swizzle == Swizzle::kNone) return "";
  const uint32_t width = SwizzleWidth(descriptor.swizzle);
  const uint32_t within = (descriptor.start_address - (descriptor.base_offset << 7)) % (8 * width);
  if (within < width) return "";  // an advance along k within the first row
  return "the start address of a matrix descriptor lies " + std::to_string(within / width) +
         " rows within a swizzle pattern that its base offset puts elsewhere";
}

std::string DecodeInstructionDescriptor(uint32_t bits,
                                        int cta_group,
                                        InstructionDescriptor* descriptor) {
  if (Field(bits, 0, 3) != 0)
    return "sparse matrices (bits 0-2 of the descriptor) are not modelled";
  if (Field(bits, 3, 1) != 0) return "bit 3, saturate, is for integer types only";
  if (Field(bits, 6, 1) != 0 || Field(bits, 23, 1) != 0 || Field(bits, 29, 1) != 0) {
    return "bits 6, 23 and 29 of an instruction descriptor are reserved and must be 0";
  }
  if (Field(bits, 30, 2) != 0) return "bits 30-31, the maximal shift, are for .ws only";
  InstructionDescriptor decoded;
  const uint32_t d_type = Field(bits, 4, 2), a_type = Field(bits, 7, 3),
                 b_type = Field(bits, 10, 3);
  if (d_type > 1) return "the type of D, bits 4-5, must be 0 (f16) or 1 (f32) for .kind::f16";
  if (a_type > 1) return "the type of A, bits 7-9, must be 0 (f16) or 1 (bf16) for .kind::f16";
  if (b_type > 1) return "the type of B, bits 10-12, must be 0 (f16) or 1 (bf16) for .kind::f16";
  if (d_type == 0 && (a_type != 0 || b_type != 0)) return "an f16 D needs f16 A and B";
  decoded.d_is_f32 = d_type == 1;
  decoded.a_type = a_type == 0 ? HalfType::kF16 : HalfType::kBf16;
  decoded.b_type = b_type == 0 ? HalfType::kF16 : HalfType::kBf16;
  decoded.negate_a = Field(bits, 13, 1) != 0;
  decoded.negate_b = Field(bits, 14, 1) != 0;
  decoded.a_major = Field(bits, 15, 1) != 0 ? Major::kMn : Major::kK;
  decoded.b_major = Field(bits, 16, 1) != 0 ? Major::kMn : Major::kK;
  decoded.n = static_cast<int>(Field(bits, 17, 6)) << 3;
  decoded.m = static_cast<int>(Field(bits, 24, 5)) << 4;
  const int half = cta_group == 2 ? 128 : 64;
  if (decoded.m != half && decoded.m != 2 * half) {
    return "M is " + std::to_string(decoded.m) + ", not " + std::to_string(half) + " or " +
           std::to_string(2 * half) + ", for cta_group::" + std::to_string(cta_group);
  }
  const int step = cta_group == 1 && decoded.m == 64 ? 8 : 16;
  if (decoded.n == 0 || decoded.n > 256 || decoded.n % step != 0) {
    return "N is " + std::to_string(decoded.n) + ", not a multiple of " + std::to_string(step) +
           " from " + std::to_string(step) + " to 256";
  }
  *descriptor = decoded;
  return "";
}

uint32_t EncodeInstructionDescriptor(const InstructionDescriptor& descriptor) {
  const auto type = [](HalfType t) { return t == HalfType::kBf16 ? 1u : 0u; };
  return (descriptor.d_is_f32 ? 1u : 0u) << 4 | type(descriptor.a_type) << 7 |
         type(descriptor.b_type) << 10 | (descriptor.negate_a ? 1u : 0u) << 13 |
         (descriptor.negate_b ? 1u : 0u) << 14 |
         (descriptor.a_major == Major::kMn ? 1u : 0u) << 15 |
         (descriptor.b_major == Major::kMn ? 1u : 0u) << 16 |
         static_cast<uint32_t>(descriptor.n >> 3) << 17 |
         static_cast<uint32_t>(descriptor.m >> 4) << 24;
}

}  // namespace jax_fa4::emulator
