// The tensor core on plain memory: matrix products, and the descriptors that say where operands
// lie.
//
// Source: PTX ISA 9.0, sections 9.7.14 (mma), 9.7.15 (wgmma) and 9.7.16 (tcgen05); CUDA 13.0.

#ifndef JAX_FA4_CSRC_EMULATOR_TENSOR_CORE_H_
#define JAX_FA4_CSRC_EMULATOR_TENSOR_CORE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "csrc/emulator/numerics.h"

namespace jax_fa4::emulator {

// ---- Products. Every step has k = 16 elements of 16 bits; a longer k is a chain of steps. ----

inline constexpr int kMmaK = 16;

struct MmaOptions {
  HalfType a_type = HalfType::kBf16;
  HalfType b_type = HalfType::kBf16;
  bool negate_a = false;  // wgmma imm-scale-a = -1, or bit 13 of a tcgen05 instruction descriptor
  bool negate_b = false;
  bool accumulate = true;  // false: D = A B, and D is not read
};

// D (m x n) += A (m x 16) B^T, with A as m rows and B as n rows of 16 elements. Strides are between
// rows, in elements.
struct MmaOperands {
  int m = 0;
  int n = 0;
  const uint16_t* a = nullptr;
  ptrdiff_t a_stride = kMmaK;
  const uint16_t* b = nullptr;
  ptrdiff_t b_stride = kMmaK;
  float* d = nullptr;
  ptrdiff_t d_stride = 0;
};

// What an H200 computes for wgmma and mma.sync m16n8k16 with f32 accumulators, in every bit
// (measured). Products are exact. Let e be the largest exponent among C and the nonzero products,
// a product's exponent being the sum of its operands' (its significand in [1, 4) stays as it is,
// and subnormals have the least exponent). Every product and C lose, toward zero, what is below
// 2^(e-25); their sum is exact, and is truncated toward zero to f32, overflow giving infinity. A
// NaN, inf * 0 and inf - inf give the canonical NaN. A sum of zero is +0.
void MmaHopper(const MmaOptions& options, const MmaOperands& operands);
// The same from one element at a time, as the definition says: for tests.
void MmaHopperReference(const MmaOptions& options, const MmaOperands& operands);

// tcgen05, whose order of additions is not known: d = fma(a[15], b[15], ... fma(a[0], b[0], d)),
// each rounded to nearest. So results may differ from hardware's in the last bits, NaN being
// canonical.
void MmaBlackwell(const MmaOptions& options, const MmaOperands& operands);

// f16 accumulators: the f32 result of a step, from the f16 value of D, rounded to nearest f16. A
// model of neither chip (not measured). `d` replaces operands.d and has its own stride, in
// elements.
void MmaHopperF16(const MmaOptions& options, MmaOperands operands, uint16_t* d, ptrdiff_t d_stride);
void MmaBlackwellF16(const MmaOptions& options,
                     MmaOperands operands,
                     uint16_t* d,
                     ptrdiff_t d_stride);

// ---- Matrix descriptors: operands in shared memory ----

enum class Swizzle : uint8_t { kNone, k32Bytes, k64Bytes, k128Bytes };

// The length of a row of a swizzled layout in bytes: 16, 32, 64 or 128.
constexpr uint32_t SwizzleWidth(Swizzle swizzle) { return 16u << static_cast<int>(swizzle); }

// The swizzle that TMA, wgmma and tcgen05 share, on addresses in shared memory: 16-byte chunks
// change places by the exclusive or of the bits from 4 up with those from 7 up (one, two or three
// of them).
constexpr uint32_t SwizzleAddress(uint32_t address, Swizzle swizzle, uint32_t pattern_start = 0) {
  const uint32_t mask = (SwizzleWidth(swizzle) - 1) >> 4;
  return address ^ (((address - pattern_start) >> 7 & mask) << 4);
}

enum class DescriptorForm : uint8_t { kHopper, kBlackwell };  // 9.7.15.5.1.2.2; 9.7.16.4.1

struct MatrixDescriptor {
  uint32_t start_address = 0;        // in bytes, of 18 bits
  uint32_t leading_byte_offset = 0;  // LBO; not used by K-major layouts with a swizzle
  uint32_t stride_byte_offset = 0;   // SBO
  uint32_t base_offset = 0;  // in units of 128 bytes, where the pattern starts off its boundary
  Swizzle swizzle = Swizzle::kNone;
};

// Returns what is wrong with `bits`, or "" with *descriptor set.
std::string DecodeMatrixDescriptor(uint64_t bits,
                                   DescriptorForm form,
                                   MatrixDescriptor* descriptor);
uint64_t EncodeMatrixDescriptor(const MatrixDescriptor& descriptor, DescriptorForm form);

enum class Major : uint8_t { kK, kMn };

// The address in shared memory of the 16-byte chunk that holds element (mn, k): 8 elements along k
// (K-major) or along mn (MN-major). Layouts, of 16-bit elements, with W the swizzle's width, before
// the swizzle (canonical layouts of 9.7.15.5.1.2.1.3, the same in 9.7.16.3):
//   K-major, none:   mn%8 * 16 + mn/8 * SBO + k/8 * LBO
//   K-major:         mn%8 * W + mn/8 * SBO + k/8 * 16
//   MN-major, none:  mn/8 * SBO + k%8 * 16 + k/8 * LBO
//   MN-major:        mn/8 % (W/16) * 16 + mn/(W/2) * LBO + k%8 * W + k/8 * SBO
uint32_t ChunkAddress(const MatrixDescriptor& descriptor, Major major, int mn, int k);
// The address of element (mn, k) itself.
uint32_t ElementAddress(const MatrixDescriptor& descriptor, Major major, int mn, int k);

// Calls visit(address) for each 16-byte chunk of an operand of `rows` (M or N) by 16 elements: what
// one instruction reads. rows is a multiple of 8.
template <typename Visit>
void ForEachChunk(const MatrixDescriptor& descriptor, Major major, int rows, Visit visit) {
  if (major == Major::kK) {
    for (int mn = 0; mn < rows; ++mn) {
      for (int k = 0; k < kMmaK; k += 8) visit(ChunkAddress(descriptor, major, mn, k));
    }
  } else {
    for (int k = 0; k < kMmaK; ++k) {
      for (int mn = 0; mn < rows; mn += 8) visit(ChunkAddress(descriptor, major, mn, k));
    }
  }
}

// Copies the operand into `rows` rows of 16 elements. Returns what is wrong, or "": an operand that
// reaches beyond `shared`, whose first byte has address 0.
std::string GatherOperand(const MatrixDescriptor& descriptor,
                          Major major,
                          int rows,
                          std::span<const uint8_t> shared,
                          uint16_t* operand);

// A remark on a descriptor whose start does not fit its base offset, or "": a kernel that advances
// the start within a swizzle pattern by whole rows has to say so. Not an error by the letter of
// PTX.
std::string PatternRemark(const MatrixDescriptor& descriptor);

// ---- Instruction descriptor of tcgen05.mma (9.7.16.4.2), .kind::f16 ----

struct InstructionDescriptor {
  bool d_is_f32 = true;
  HalfType a_type = HalfType::kBf16;
  HalfType b_type = HalfType::kBf16;
  bool negate_a = false;
  bool negate_b = false;
  Major a_major = Major::kK;
  Major b_major = Major::kK;
  int m = 0;
  int n = 0;
};

// Returns what is wrong with `bits` for tcgen05.mma.cta_group::<cta_group>.kind::f16 (dense, no
// .ws), or "" with *descriptor set. For M = 128 of one CTA, N must be a multiple of 16: so CUTLASS
// has it, where PTX ISA 9.0 (table 39) allows 8.
std::string DecodeInstructionDescriptor(uint32_t bits,
                                        int cta_group,
                                        InstructionDescriptor* descriptor);
uint32_t EncodeInstructionDescriptor(const InstructionDescriptor& descriptor);

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_TENSOR_CORE_H_
