// Scalar instructions against plain C++: every family is decoded from PTX text and executed on
// random and special operands, with all lanes and with some. Given PTX files as arguments, it also
// checks that all of their scalar instructions decode.

#include <bit>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "csrc/emulator/machine.h"
#include "csrc/emulator/numerics.h"
#include "csrc/emulator/program.h"
#include "csrc/emulator/ptx.h"

namespace jax_fa4::emulator {

// The other families, as far as these tests need them: branches and returns; everything else is
// taken, and is only noted.
std::set<std::string>* others = nullptr;
const ptx::Kernel* kernel_in_test = nullptr;

bool DecodeControl(Decoder& decoder, Parts parts) {
  if (parts.Is("ret") || parts.Is("exit")) return true;
  if (parts.Is("bra")) {
    decoder.inst().target = decoder.Label(decoder.Operand(0));
    return true;
  }
  if (others == nullptr) return false;
  others->insert(std::string(parts.Peek()));
  // Their registers live too: the first operand is taken as the destination unless it is an
  // address, the others as sources.
  Inst& inst = decoder.inst();
  const auto touch = [&](const auto& self, const ptx::Operand& operand, bool first) -> void {
    if (operand.kind == ptx::Operand::Kind::kRegister && operand.reg >= 0) {
      if (kernel_in_test->registers[operand.reg].bits == 1) {
        if (first)
          inst.destination[inst.destination[0] ? 1 : 0] = decoder.PredicateDestination(operand);
        else
          inst.source[inst.source[0] ? 1 : 0] = decoder.PredicateSource(operand);
      } else {
        first ? decoder.DestinationList(operand, 32, true) : decoder.SourceList(operand, 32, true);
      }
    }
    for (const ptx::Operand& element : operand.elements) {
      self(self, element, first && operand.kind != ptx::Operand::Kind::kAddress);
    }
  };
  for (size_t i = 0; i < decoder.operand_count(); ++i) touch(touch, decoder.Operand(i), i == 0);
  return true;
}
bool DecodeMemory(Decoder&, Parts) { return false; }
bool DecodeCopy(Decoder&, Parts) { return false; }
bool DecodeTensor(Decoder&, Parts) { return false; }
bool DecodeMatrix(Decoder&, Parts) { return false; }

namespace {

int failures = 0;
int checks = 0;

#define EXPECT(condition, ...)                       \
  do {                                               \
    ++checks;                                        \
    if (!(condition)) {                              \
      if (++failures < 60) std::printf(__VA_ARGS__); \
    }                                                \
  } while (false)

std::shared_ptr<const Program> DecodeText(const std::string& body, const std::string& before = "") {
  std::shared_ptr<const ptx::Module> module =
      ptx::Parse(".version 9.0\n.target sm_100a\n.address_size 64\n" + before +
                 ".visible .entry k(.param .u64 p0, .param .u32 p1) {\n"
                 ".reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b64 %d<8>; .reg .b128 %q<4>; .reg .pred "
                 "%p<8>; .reg .b8 %c<4>;\n" +
                 body + "\nret;\n}\n");
  return Decode(module, *module->kernels[0]);
}

bool Refuses(const std::string& body, std::string* message = nullptr) {
  try {
    DecodeText(body);
  } catch (const ptx::Error& error) {
    if (message != nullptr) *message = error.what();
    return true;
  }
  return false;
}

Random random_numbers(7);

// A random operand: all kinds of bits, small numbers, and numbers that are special as integers or
// floats.
uint64_t RandomBits(int bits) {
  static const uint64_t kWords[] = {
      0,          1,          0xffffffff, 0x80000000, 0x7fffffff, 0x3f800000, 0xbf800000,
      0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0x00000001, 0x80000001, 0x007fffff,
      0x00800000, 0x7f7fffff, 0xff7fffff, 0x3f000000, 0x40490fdb, 0xc2c80000, 0x42fe0000,
      0x4b000000, 0x4b800001, 31,         32,         33,         64,         0x477fe000,
      0x477ff000, 0x33800000, 0x38800000, 0x3f800001, 0x4f000000, 0xcf000000, 0x5f000000};
  static const uint64_t kDoubles[] = {0,
                                      1,
                                      ~uint64_t{0},
                                      uint64_t{1} << 63,
                                      (uint64_t{1} << 63) - 1,
                                      0x3ff0000000000000,
                                      0x7ff0000000000000,
                                      0xfff0000000000000,
                                      0x7ff8000000000000,
                                      0x000fffffffffffff,
                                      0x0010000000000000,
                                      0x7fefffffffffffff,
                                      0x41dfffffffc00000,
                                      0xc1e0000000000000,
                                      0x43e0000000000000,
                                      0x3fe0000000000000,
                                      63,
                                      64,
                                      65,
                                      0xffffffff};
  static const uint64_t kHalves[] = {0,      1,      0x8000, 0x8001, 0x3c00, 0xbc00, 0x7c00, 0xfc00,
                                     0x7e00, 0x7c01, 0x7bff, 0x03ff, 0x0400, 0x3f80, 0x7f80, 0xff80,
                                     0x7fc0, 0x007f, 0xffff, 0x7fff, 15,     16,     17};
  const uint64_t any = random_numbers.Next();
  const uint32_t kind = random_numbers.Below(8);
  if (bits == 1) return any & 1;
  if (bits <= 16) {
    const uint64_t value = kind < 3 ? kHalves[random_numbers.Below(std::size(kHalves))] : any;
    return value & ((uint64_t{1} << bits) - 1);
  }
  if (bits == 32) {
    if (kind < 2) return kWords[random_numbers.Below(std::size(kWords))];
    if (kind == 2) return any & 63;
    if (kind == 3)
      return std::bit_cast<uint32_t>(static_cast<float>(static_cast<int16_t>(any)) / 256);
    if (kind == 4) return (any & 0x807fffff) | (100 + (any >> 32) % 60) << 23;
    return any & 0xffffffff;
  }
  if (kind == 0) return kDoubles[random_numbers.Below(std::size(kDoubles))];
  if (kind == 1) return kWords[random_numbers.Below(std::size(kWords))] << 32 | RandomBits(32);
  if (kind == 2)
    return std::bit_cast<uint64_t>(static_cast<double>(static_cast<int32_t>(any)) / 256);
  if (kind == 3) return any & 127;
  if (kind == 4) return RandomBits(32) << 32 | RandomBits(32);
  return any;
}

struct In {
  uint64_t x[6] = {};  // sources in order; predicates are 0 or 1
  uint32_t u(int i) const { return static_cast<uint32_t>(x[i]); }
  int32_t s(int i) const { return static_cast<int32_t>(x[i]); }
  int64_t l(int i) const { return static_cast<int64_t>(x[i]); }
  uint16_t h(int i) const { return static_cast<uint16_t>(x[i]); }
  int16_t i16(int i) const { return static_cast<int16_t>(x[i]); }
  float f(int i) const { return std::bit_cast<float>(u(i)); }
  double d(int i) const { return std::bit_cast<double>(x[i]); }
};
// The result; two of them as a predicate's bit 0 and 1, or the first with the second 32 bits up.
using Reference = std::function<uint64_t(const In&)>;
// Whether results are equal enough, where they need not be equal.
using Near = std::function<bool(uint64_t, uint64_t)>;

// A machine is only referred to.
alignas(Machine) char machine_storage[sizeof(Machine)];

struct Bench {
  explicit Bench(std::shared_ptr<const Program> decoded) : program(std::move(decoded)) {
    registers.resize(program->register_rows * kRowWords + 8);
    predicates.resize(program->predicates + 1);
  }
  // The same program with the same registers.
  Bench Copy() const {
    Bench copy(program);
    copy.registers = registers;
    copy.predicates = predicates;
    return copy;
  }
  Context MakeContext(uint32_t mask) {
    return Context{*reinterpret_cast<Machine*>(machine_storage),
                   cta,
                   warp,
                   group,
                   mask,
                   registers.data(),
                   program->constants.data(),
                   predicates.data()};
  }
  uint64_t Read(const Ref& ref, int lane) {
    if (ref.kind == Ref::Kind::kPredicate) {
      return (predicates[ref.index] >> lane & 1) ^ (ref.negated ? 1 : 0);
    }
    const uint32_t* row =
        (ref.kind == Ref::Kind::kConstant ? program->constants.data() : registers.data()) +
        ref.index;
    if (ref.bits < 64) return row[lane];
    uint64_t value = 0;
    std::memcpy(&value, row + (ref.bits == 128 ? 4 : 2) * lane, 8);
    return value;
  }
  void Fill(const Ref& ref) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t value = RandomBits(ref.bits);
      if (ref.kind == Ref::Kind::kPredicate) {
        predicates[ref.index] =
            (predicates[ref.index] & ~(1u << lane)) | static_cast<uint32_t>(value) << lane;
      } else if (ref.kind == Ref::Kind::kRegister) {
        if (ref.bits < 64) {
          registers[ref.index + lane] = static_cast<uint32_t>(value);
        } else {
          const uint64_t two[2] = {value, RandomBits(64)};
          const int words = ref.bits / 32;
          std::memcpy(&registers[ref.index + words * lane], two, ref.bits / 8);
        }
      }
    }
  }
  std::shared_ptr<const Program> program;
  std::vector<uint32_t> registers, predicates;
  Cta cta;
  Warp warp;
  Group group;
};

void Check(const std::string& text,
           const Reference& reference,
           const Near& near = nullptr,
           int rounds = 40) {
  std::shared_ptr<const Program> program;
  try {
    program = DecodeText(text);
  } catch (const ptx::Error& error) {
    EXPECT(false, "%s\n  does not decode: %s\n", text.c_str(), error.what());
    return;
  }
  Bench bench(program);
  const Inst& inst = program->instructions[0];
  for (int round = 0; round < rounds; ++round) {
    for (const Ref& ref : inst.destination) bench.Fill(ref);
    for (const Ref& ref : inst.source) bench.Fill(ref);
    const uint32_t mask =
        round % 3 == 0 ? 0xffffffff : static_cast<uint32_t>(random_numbers.Next());
    std::vector<In> in(kLanes);
    std::vector<uint64_t> before(kLanes), wanted(kLanes);
    const auto result = [&](int lane) {
      uint64_t value = inst.destination[0] ? bench.Read(inst.destination[0], lane) : 0;
      if (inst.destination[1]) {
        const bool both = inst.destination[0] && inst.destination[0].kind == Ref::Kind::kPredicate;
        value |= bench.Read(inst.destination[1], lane) << (both ? 1 : 32);
      }
      return value;
    };
    for (int lane = 0; lane < kLanes; ++lane) {
      int i = 0;
      for (const Ref& ref : inst.source) in[lane].x[i++] = ref ? bench.Read(ref, lane) : 0;
      before[lane] = result(lane);
      wanted[lane] = reference(in[lane]);
    }
    Context context = bench.MakeContext(mask);
    if (inst.execute(context, inst) != Outcome::kNext) EXPECT(false, "%s blocks\n", text.c_str());
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t got = result(lane);
      const bool runs = (mask >> lane & 1) != 0;
      const uint64_t want = runs ? wanted[lane] : before[lane];
      const bool same = got == want || (runs && near != nullptr && near(got, want));
      EXPECT(same,
             "%s\n  of %llx %llx %llx %llx: %llx, not %llx%s\n",
             text.c_str(),
             static_cast<unsigned long long>(in[lane].x[0]),
             static_cast<unsigned long long>(in[lane].x[1]),
             static_cast<unsigned long long>(in[lane].x[2]),
             static_cast<unsigned long long>(in[lane].x[3]),
             static_cast<unsigned long long>(got),
             static_cast<unsigned long long>(want),
             runs ? "" : " (a lane that does not execute)");
      if (!same) return;
    }
  }
}

// ---- Integers

uint64_t U16(int64_t x) { return static_cast<uint16_t>(x); }
uint64_t U32(int64_t x) { return static_cast<uint32_t>(x); }
using I128 = __int128;

template <typename T>
void CheckTyped(const std::string& t,
                const std::string& r,
                const std::string& wide,
                bool is_wide_ok) {
  const auto mask = [](uint64_t x) {
    return static_cast<uint64_t>(static_cast<std::make_unsigned_t<T>>(x));
  };
  const auto v = [](const In& in, int i) { return static_cast<I128>(static_cast<T>(in.x[i])); };
  const std::string two = " %" + r + "0, %" + r + "1, %" + r + "2;";
  const std::string three = " %" + r + "0, %" + r + "1, %" + r + "2, %" + r + "3;";
  const int bits = 8 * sizeof(T);
  Check("add." + t + two, [&](const In& i) { return mask(v(i, 0) + v(i, 1)); });
  Check("sub." + t + two, [&](const In& i) { return mask(v(i, 0) - v(i, 1)); });
  using U128 = unsigned __int128;
  const auto product = [&](const In& i) {
    return std::is_signed_v<T> ? static_cast<U128>(v(i, 0) * v(i, 1))
                               : static_cast<U128>(v(i, 0)) * static_cast<U128>(v(i, 1));
  };
  Check("mul.lo." + t + two, [&](const In& i) { return mask(static_cast<uint64_t>(product(i))); });
  Check("mul.hi." + t + two,
        [&](const In& i) { return mask(static_cast<uint64_t>(product(i) >> bits)); });
  Check("mad.lo." + t + three,
        [&](const In& i) { return mask(static_cast<uint64_t>(product(i)) + i.x[2]); });
  Check("mad.hi." + t + three,
        [&](const In& i) { return mask(static_cast<uint64_t>(product(i) >> bits) + i.x[2]); });
  Check("sad." + t + three, [&](const In& i) {
    const I128 d = v(i, 0) - v(i, 1);
    return mask(static_cast<uint64_t>(d < 0 ? -d : d) + i.x[2]);
  });
  Check("min." + t + two, [&](const In& i) { return mask(v(i, 0) < v(i, 1) ? i.x[0] : i.x[1]); });
  Check("max." + t + two, [&](const In& i) { return mask(v(i, 0) > v(i, 1) ? i.x[0] : i.x[1]); });
  Check("div." + t + two, [&](const In& i) {
    return mask(v(i, 1) == 0 ? ~uint64_t{0} : static_cast<uint64_t>(v(i, 0) / v(i, 1)));
  });
  Check("rem." + t + two, [&](const In& i) {
    return mask(v(i, 1) == 0 ? i.x[0] : static_cast<uint64_t>(v(i, 0) % v(i, 1)));
  });
  Check("shr." + t + " %" + r + "0, %" + r + "1, %r2;", [&](const In& i) {
    const I128 a = v(i, 0);
    return mask(static_cast<uint64_t>(i.x[1] >= static_cast<uint64_t>(bits) ? (a < 0 ? -1 : 0)
                                                                            : a >> i.x[1]));
  });
  if (std::is_signed_v<T>) {
    Check("abs." + t + " %" + r + "0, %" + r + "1;", [&](const In& i) {
      return mask(static_cast<uint64_t>(v(i, 0) < 0 ? -v(i, 0) : v(i, 0)));
    });
    Check("neg." + t + " %" + r + "0, %" + r + "1;",
          [&](const In& i) { return mask(static_cast<uint64_t>(-v(i, 0))); });
  }
  if (is_wide_ok) {
    const bool is32 = bits == 32;
    Check("mul.wide." + t + " %" + wide + "0, %" + r + "1, %" + r + "2;", [&](const In& i) {
      const auto p = static_cast<uint64_t>(product(i));
      return is32 ? p : U32(static_cast<int64_t>(p));
    });
    Check("mad.wide." + t + " %" + wide + "0, %" + r + "1, %" + r + "2, %" + wide + "3;",
          [&](const In& i) {
            const uint64_t p = static_cast<uint64_t>(product(i)) + i.x[2];
            return is32 ? p : U32(static_cast<int64_t>(p));
          });
  }
  // Comparisons.
  const auto compare = [&](const std::string& op, auto holds) {
    Check("setp." + op + "." + t + " %p0, %" + r + "1, %" + r + "2;",
          [&, holds](const In& i) { return uint64_t{holds(v(i, 0), v(i, 1))}; });
    Check("setp." + op + ".and." + t + " %p0|%p1, %" + r + "1, %" + r + "2, !%p3;",
          [&, holds](const In& i) {
            const bool h = holds(v(i, 0), v(i, 1)), c = i.x[2] != 0;
            return uint64_t{h && c} | uint64_t{!h && c} << 1;
          });
    Check("set." + op + ".u32." + t + " %r0, %" + r + "1, %" + r + "2;",
          [&, holds](const In& i) { return holds(v(i, 0), v(i, 1)) ? 0xffffffff : uint64_t{0}; });
  };
  compare("eq", [](I128 a, I128 b) { return a == b; });
  compare("ne", [](I128 a, I128 b) { return a != b; });
  compare("lt", [](I128 a, I128 b) { return a < b; });
  compare("le", [](I128 a, I128 b) { return a <= b; });
  compare("gt", [](I128 a, I128 b) { return a > b; });
  compare("ge", [](I128 a, I128 b) { return a >= b; });
  if (!std::is_signed_v<T>) {
    compare("lo", [](I128 a, I128 b) { return a < b; });
    compare("hs", [](I128 a, I128 b) { return a >= b; });
  }
}

void TestIntegers() {
  CheckTyped<uint16_t>("u16", "h", "r", true);
  CheckTyped<int16_t>("s16", "h", "r", true);
  CheckTyped<uint32_t>("u32", "r", "d", true);
  CheckTyped<int32_t>("s32", "r", "d", true);
  CheckTyped<uint64_t>("u64", "d", "", false);
  CheckTyped<int64_t>("s64", "d", "", false);
  Check("add.sat.s32 %r0, %r1, %r2;", [](const In& i) {
    const int64_t x = int64_t{i.s(0)} + i.s(1);
    return U32(std::min<int64_t>(std::max<int64_t>(x, INT32_MIN), INT32_MAX));
  });
  Check("sub.sat.s32 %r0, %r1, %r2;", [](const In& i) {
    const int64_t x = int64_t{i.s(0)} - i.s(1);
    return U32(std::min<int64_t>(std::max<int64_t>(x, INT32_MIN), INT32_MAX));
  });
  Check("add.u32 %r0, %r1, -3;", [](const In& i) { return U32(i.u(0) - 3); });
  Check("add.s64 %d0, %d1, -3;", [](const In& i) { return i.x[0] - 3; });
  Check("add.s16 %h0, %h1, -3;", [](const In& i) { return U16(i.h(0) - 3); });
  Check("add.u16x2 %r0, %r1, %r2;", [](const In& i) {
    return U16(i.u(0) + i.u(1)) | U16((i.u(0) >> 16) + (i.u(1) >> 16)) << 16;
  });
  Check("min.s16x2 %r0, %r1, %r2;", [](const In& i) {
    const auto h = [&](int k, int n) { return static_cast<int16_t>(i.u(k) >> (16 * n)); };
    return U16(std::min(h(0, 0), h(1, 0))) | U16(std::min(h(0, 1), h(1, 1))) << 16;
  });
  Check("max.relu.s32 %r0, %r1, %r2;",
        [](const In& i) { return U32(std::max({i.s(0), i.s(1), 0})); });
  Check("mul24.lo.s32 %r0, %r1, %r2;",
        [](const In& i) { return U32(int64_t{(i.s(0) << 8) >> 8} * int64_t{(i.s(1) << 8) >> 8}); });
  Check("mul24.hi.u32 %r0, %r1, %r2;",
        [](const In& i) { return U32((i.x[0] & 0xffffff) * (i.x[1] & 0xffffff) >> 16); });
  Check("popc.b32 %r0, %r1;", [](const In& i) { return uint64_t(std::popcount(i.u(0))); });
  Check("popc.b64 %r0, %d1;", [](const In& i) { return uint64_t(std::popcount(i.x[0])); });
  Check("clz.b32 %r0, %r1;", [](const In& i) { return uint64_t(std::countl_zero(i.u(0))); });
  Check("clz.b64 %r0, %d1;", [](const In& i) { return uint64_t(std::countl_zero(i.x[0])); });
  const auto find = [](uint64_t bits) { return bits == 0 ? -1 : 63 - std::countl_zero(bits); };
  Check("bfind.u32 %r0, %r1;", [&](const In& i) { return U32(find(i.x[0])); });
  Check("bfind.s32 %r0, %r1;",
        [&](const In& i) { return U32(find(i.s(0) < 0 ? ~i.u(0) : i.u(0))); });
  Check("bfind.s64 %r0, %d1;",
        [&](const In& i) { return U32(find(i.l(0) < 0 ? ~i.x[0] : i.x[0])); });
  Check("bfind.shiftamt.u32 %r0, %r1;",
        [&](const In& i) { return U32(find(i.x[0]) < 0 ? -1 : 31 - find(i.x[0])); });
  Check("brev.b32 %r0, %r1;", [](const In& i) {
    uint64_t r = 0;
    for (int k = 0; k < 32; ++k) r |= (i.x[0] >> k & 1) << (31 - k);
    return r;
  });
  Check("brev.b64 %d0, %d1;", [](const In& i) {
    uint64_t r = 0;
    for (int k = 0; k < 64; ++k) r |= (i.x[0] >> k & 1) << (63 - k);
    return r;
  });
  // The ISA's own loops (9.7.1.19, 9.7.1.20).
  const auto extract = [](uint64_t a, uint32_t b, uint32_t c, int msb, bool is_signed) {
    const int position = b & 0xff, length = c & 0xff;
    const bool sign =
        is_signed && length != 0 && (a >> std::min(position + length - 1, msb) & 1) != 0;
    uint64_t d = 0;
    for (int k = 0; k <= msb; ++k) {
      const bool bit = k < length && position + k <= msb ? (a >> (position + k) & 1) != 0 : sign;
      d |= uint64_t{bit} << k;
    }
    return d;
  };
  Check(
      "bfe.u32 %r0, %r1, %r2, %r3;",
      [&](const In& i) { return extract(i.x[0], i.u(1), i.u(2), 31, false); },
      nullptr,
      400);
  Check(
      "bfe.s32 %r0, %r1, %r2, %r3;",
      [&](const In& i) { return extract(i.x[0], i.u(1), i.u(2), 31, true); },
      nullptr,
      400);
  Check(
      "bfe.u64 %d0, %d1, %r2, %r3;",
      [&](const In& i) { return extract(i.x[0], i.u(1), i.u(2), 63, false); },
      nullptr,
      400);
  Check(
      "bfe.s64 %d0, %d1, %r2, %r3;",
      [&](const In& i) { return extract(i.x[0], i.u(1), i.u(2), 63, true); },
      nullptr,
      400);
  const auto insert = [](uint64_t a, uint64_t b, uint32_t c, uint32_t d, int msb) {
    const int position = c & 0xff, length = d & 0xff;
    for (int k = 0; k < length && position + k <= msb; ++k) {
      b = (b & ~(uint64_t{1} << (position + k))) | (k < 64 ? a >> k & 1 : 0) << (position + k);
    }
    return b;
  };
  Check(
      "bfi.b32 %r0, %r1, %r2, %r3, %r4;",
      [&](const In& i) { return insert(i.x[0], i.x[1], i.u(2), i.u(3), 31); },
      nullptr,
      400);
  Check(
      "bfi.b64 %d0, %d1, %d2, %r3, %r4;",
      [&](const In& i) { return insert(i.x[0], i.x[1], i.u(2), i.u(3), 63); },
      nullptr,
      400);
  Check("bmsk.clamp.b32 %r0, %r1, %r2;", [](const In& i) {
    uint64_t d = 0;
    for (uint64_t k = i.x[0]; k < 32 && k < i.x[0] + i.x[1]; ++k) d |= uint64_t{1} << k;
    return d;
  });
  Check("bmsk.wrap.b32 %r0, %r1, %r2;", [](const In& i) {
    uint64_t d = 0;
    for (uint64_t k = i.x[0] & 31; k < 32 && k < (i.x[0] & 31) + (i.x[1] & 31); ++k)
      d |= uint64_t{1} << k;
    return d;
  });
  Check("szext.wrap.s32 %r0, %r1, %r2;", [](const In& i) {
    const int n = i.u(1) & 31;
    return n == 0 ? 0 : U32(static_cast<int32_t>(i.u(0) << (32 - n)) >> (32 - n));
  });
  Check("szext.clamp.u32 %r0, %r1, %r2;",
        [](const In& i) { return i.x[1] >= 32 ? i.x[0] : i.x[0] & ((uint64_t{1} << i.x[1]) - 1); });
  Check("fns.b32 %r0, %r1, 7, %r3;", [](const In& i) {
    const uint64_t base = 7;
    if (i.s(2) == 0) return (i.x[0] >> base & 1) != 0 ? base : uint64_t{0xffffffff};
    int64_t count = std::abs(int64_t{i.s(2)});
    for (int64_t k = static_cast<int64_t>(base); k >= 0 && k < 32; k += i.s(2) > 0 ? 1 : -1) {
      if ((i.x[0] >> k & 1) != 0 && --count == 0) return static_cast<uint64_t>(k);
    }
    return uint64_t{0xffffffff};
  });
  Check("dp4a.s32.u32 %r0, %r1, %r2, %r3;", [](const In& i) {
    int64_t sum = i.s(2);
    for (int k = 0; k < 4; ++k) {
      sum += static_cast<int8_t>(i.u(0) >> (8 * k)) * static_cast<uint8_t>(i.u(1) >> (8 * k));
    }
    return U32(sum);
  });
  Check("dp2a.hi.u32.s32 %r0, %r1, %r2, %r3;", [](const In& i) {
    int64_t sum = i.s(2);
    for (int k = 0; k < 2; ++k) {
      sum +=
          static_cast<uint16_t>(i.u(0) >> (16 * k)) * static_cast<int8_t>(i.u(1) >> (8 * k + 16));
    }
    return U32(sum);
  });
  // Logic and shifts.
  for (const auto& [r, t] : {std::pair("h", "b16"), std::pair("r", "b32"), std::pair("d", "b64")}) {
    const std::string two = std::string(".") + t + " %" + r + "0, %" + r + "1, %" + r + "2;";
    const std::string one = std::string(".") + t + " %" + r + "0, %" + r + "1;";
    const int bits = std::atoi(t + 1);
    const uint64_t mask = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    Check("and" + two, [](const In& i) { return i.x[0] & i.x[1]; });
    Check("or" + two, [](const In& i) { return i.x[0] | i.x[1]; });
    Check("xor" + two, [](const In& i) { return i.x[0] ^ i.x[1]; });
    Check("not" + one, [&](const In& i) { return ~i.x[0] & mask; });
    Check("cnot" + one, [&](const In& i) { return uint64_t{i.x[0] == 0}; });
    Check(std::string("shl.") + t + " %" + r + "0, %" + r + "1, %r2;", [&](const In& i) {
      return i.x[1] >= static_cast<uint64_t>(bits) ? 0 : i.x[0] << i.x[1] & mask;
    });
    Check(std::string("selp.") + t + " %" + r + "0, %" + r + "1, %" + r + "2, !%p1;",
          [](const In& i) { return i.x[2] != 0 ? i.x[0] : i.x[1]; });
    Check(std::string("mov.") + t + " %" + r + "0, %" + r + "1;",
          [](const In& i) { return i.x[0]; });
    Check(std::string("slct.") + t + ".s32 %" + r + "0, %" + r + "1, %" + r + "2, %r3;",
          [](const In& i) { return i.s(2) >= 0 ? i.x[0] : i.x[1]; });
    Check(std::string("slct.ftz.") + t + ".f32 %" + r + "0, %" + r + "1, %" + r + "2, %r3;",
          [](const In& i) { return FlushSubnormal(i.f(2)) >= 0 ? i.x[0] : i.x[1]; });
  }
  for (int table = 0; table < 256; ++table) {
    Check(
        "lop3.b32 %r0, %r1, %r2, %r3, " + std::to_string(table) + ";",
        [&](const In& i) {
          uint64_t r = 0;
          for (int k = 0; k < 32; ++k) {
            const int at =
                static_cast<int>((i.x[0] >> k & 1) * 4 + (i.x[1] >> k & 1) * 2 + (i.x[2] >> k & 1));
            r |= uint64_t{(table >> at & 1) != 0} << k;
          }
          return r;
        },
        nullptr,
        4);
  }
  Check("lop3.or.b32 %r0|%p0, %r1, %r2, %r3, 0x80, %p1;", [](const In& i) {
    const uint64_t r = i.x[0] & i.x[1] & i.x[2];
    return r | uint64_t{r != 0 || i.x[3] != 0} << 32;
  });
  Check("shf.l.wrap.b32 %r0, %r1, %r2, %r3;",
        [](const In& i) { return U32((i.x[1] << 32 | i.x[0]) << (i.x[2] & 31) >> 32); });
  Check("shf.r.wrap.b32 %r0, %r1, %r2, %r3;",
        [](const In& i) { return U32((i.x[1] << 32 | i.x[0]) >> (i.x[2] & 31)); });
  Check("shf.l.clamp.b32 %r0, %r1, %r2, %r3;", [](const In& i) {
    return i.x[2] >= 32 ? i.x[0] : U32((i.x[1] << 32 | i.x[0]) << i.x[2] >> 32);
  });
  Check("shf.r.clamp.b32 %r0, %r1, %r2, %r3;",
        [](const In& i) { return i.x[2] >= 32 ? i.x[1] : U32((i.x[1] << 32 | i.x[0]) >> i.x[2]); });
  // prmt by the ISA's table (9.7.9.7).
  const auto permute = [](const In& i, std::array<int, 4> from) {
    uint64_t r = 0;
    for (int k = 0; k < 4; ++k) {
      const uint64_t byte = (i.x[1] << 32 | i.x[0]) >> (8 * (from[k] & 7)) & 0xff;
      r |= ((from[k] & 8) == 0 ? byte : (byte >= 128 ? 255 : 0)) << (8 * k);
    }
    return r;
  };
  Check("prmt.b32 %r0, %r1, %r2, %r3;", [&](const In& i) {
    const uint32_t c = i.u(2);
    return permute(i,
                   {static_cast<int>(c & 15),
                    static_cast<int>(c >> 4 & 15),
                    static_cast<int>(c >> 8 & 15),
                    static_cast<int>(c >> 12 & 15)});
  });
  Check("prmt.b32 %r0, %r1, %r2, 0x5C1A;", [&](const In& i) { return permute(i, {10, 1, 12, 5}); });
  Check("prmt.b32.f4e %r0, %r1, %r2, %r3;", [&](const In& i) {
    const int c = i.u(2) & 3;
    return permute(i, {c, c + 1, c + 2, c + 3});
  });
  Check("prmt.b32.b4e %r0, %r1, %r2, %r3;", [&](const In& i) {
    const int c = i.u(2) & 3;
    return permute(i, {c, (c + 7) & 7, (c + 6) & 7, (c + 5) & 7});
  });
  Check("prmt.b32.rc8 %r0, %r1, %r2, %r3;", [&](const In& i) {
    const int c = i.u(2) & 3;
    return permute(i, {c, c, c, c});
  });
  Check("prmt.b32.ecl %r0, %r1, %r2, %r3;", [&](const In& i) {
    const int c = i.u(2) & 3;
    return permute(i, {c, std::max(c, 1), std::max(c, 2), 3});
  });
  Check("prmt.b32.ecr %r0, %r1, %r2, %r3;", [&](const In& i) {
    const int c = i.u(2) & 3;
    return permute(i, {0, std::min(c, 1), std::min(c, 2), c});
  });
  Check("prmt.b32.rc16 %r0, %r1, %r2, %r3;", [&](const In& i) {
    const int c = i.u(2) & 1;
    return permute(i, {2 * c, 2 * c + 1, 2 * c, 2 * c + 1});
  });
}

// ---- Carries

void TestCarries() {
  for (const bool wide : {false, true}) {
    const std::string t = wide ? "u64 %d" : "u32 %r", r = wide ? "%d" : "%r";
    const std::string text = "add.cc." + t + "0, " + r + "1, " + r + "2; addc.cc." + t + "3, " + r +
                             "4, " + r + "5; madc.hi." + t + "6, " + r + "1, " + r + "4, 0;";
    const auto program = DecodeText(text);
    Bench bench(program);
    for (int round = 0; round < 50; ++round) {
      for (int k = 0; k < 3; ++k) {
        for (const Ref& ref : program->instructions[k].source) bench.Fill(ref);
      }
      Bench before = bench.Copy();
      Context context = bench.MakeContext(0xffffffff);
      for (int k = 0; k < 3; ++k)
        program->instructions[k].execute(context, program->instructions[k]);
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto x = [&](int inst, int source) {
          return before.Read(program->instructions[inst].source[source], lane);
        };
        using U128 = unsigned __int128;
        const int bits = wide ? 64 : 32;
        const U128 low = U128{x(0, 0)} + x(0, 1);
        const U128 high = U128{x(1, 0)} + x(1, 1) + static_cast<uint64_t>(low >> bits & 1);
        const U128 product = U128{x(2, 0)} * x(2, 1);
        const U128 last = (product >> bits) + static_cast<uint64_t>(high >> bits & 1);
        const uint64_t mask = wide ? ~uint64_t{0} : 0xffffffff;
        const auto got = [&](int k) {
          return bench.Read(program->instructions[k].destination[0], lane);
        };
        EXPECT(got(0) == (static_cast<uint64_t>(low) & mask), "add.cc is wrong\n");
        EXPECT(got(1) == (static_cast<uint64_t>(high) & mask), "addc.cc is wrong\n");
        EXPECT(got(2) == (static_cast<uint64_t>(last) & mask), "madc.hi is wrong\n");
      }
    }
  }
  const auto program = DecodeText("sub.cc.u32 %r0, %r1, %r2; subc.u32 %r3, %r4, %r5;");
  Bench bench(program);
  for (int round = 0; round < 50; ++round) {
    for (int k = 0; k < 2; ++k) {
      for (const Ref& ref : program->instructions[k].source) bench.Fill(ref);
    }
    Bench before = bench.Copy();
    Context context = bench.MakeContext(0xffffffff);
    for (int k = 0; k < 2; ++k) program->instructions[k].execute(context, program->instructions[k]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto x = [&](int inst, int source) {
        return before.Read(program->instructions[inst].source[source], lane);
      };
      const uint64_t difference = (x(1, 0) << 32 | x(0, 0)) - (x(1, 1) << 32 | x(0, 1));
      const uint64_t got = bench.Read(program->instructions[1].destination[0], lane) << 32 |
                           bench.Read(program->instructions[0].destination[0], lane);
      EXPECT(got == difference, "subc is wrong\n");
    }
  }
}

// ---- Floats

uint64_t B(float x) { return std::isnan(x) ? 0x7fffffff : std::bit_cast<uint32_t>(x); }
uint64_t B(double x) { return std::bit_cast<uint64_t>(x); }
uint64_t F(float x) { return B(FlushSubnormal(x)); }
bool BothNan(uint64_t a, uint64_t b) {
  return std::isnan(std::bit_cast<double>(a)) && std::isnan(std::bit_cast<double>(b));
}

template <typename T, typename G>
T InRounding(int mode, G g) {
  std::fesetround(mode);
  volatile T r = g();
  std::fesetround(FE_TONEAREST);
  return r;
}

Near Relative(double limit) {
  return [limit](uint64_t a, uint64_t b) {
    const double x = std::bit_cast<float>(static_cast<uint32_t>(a));
    const double y = std::bit_cast<float>(static_cast<uint32_t>(b));
    return std::fabs(x - y) <= limit * std::max(std::fabs(y), 0x1p-126) ||
           (std::isnan(x) && std::isnan(y));
  };
}

void TestFloats() {
  const std::pair<const char*, int> modes[] = {
      {"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}};
  for (const auto& [name, mode] : modes) {
    const std::string m = name;
    const int fe = mode;
    Check(
        "add." + m + ".f32 %r0, %r1, %r2;",
        [fe](const In& i) {
          return B(InRounding<float>(fe, [&] {
            volatile float a = i.f(0), b = i.f(1);
            return a + b;
          }));
        },
        nullptr,
        400);
    Check(
        "sub." + m + ".f32 %r0, %r1, %r2;",
        [fe](const In& i) {
          return B(InRounding<float>(fe, [&] {
            volatile float a = i.f(0), b = i.f(1);
            return a - b;
          }));
        },
        nullptr,
        400);
    Check(
        "mul." + m + ".f32 %r0, %r1, %r2;",
        [fe](const In& i) {
          return B(InRounding<float>(fe, [&] {
            volatile float a = i.f(0), b = i.f(1);
            return a * b;
          }));
        },
        nullptr,
        400);
    Check(
        "fma." + m + ".f32 %r0, %r1, %r2, %r3;",
        [fe](const In& i) {
          return B(InRounding<float>(fe, [&] {
            volatile float a = i.f(0), b = i.f(1), c = i.f(2);
            return __builtin_fmaf(a, b, c);
          }));
        },
        nullptr,
        400);
    Check(
        "add." + m + ".f32x2 %d0, %d1, %d2;",
        [fe](const In& i) {
          const auto sum = [&](int shift) {
            return B(InRounding<float>(fe, [&] {
              volatile float a = std::bit_cast<float>(static_cast<uint32_t>(i.x[0] >> shift));
              volatile float b = std::bit_cast<float>(static_cast<uint32_t>(i.x[1] >> shift));
              return a + b;
            }));
          };
          return sum(0) | sum(32) << 32;
        },
        nullptr,
        200);
    Check(
        "fma." + m + ".ftz.f32x2 %d0, %d1, %d2, %d3;",
        [fe](const In& i) {
          const auto one = [&](int shift) {
            return F(InRounding<float>(fe, [&] {
              const auto x = [&](int k) {
                return FlushSubnormal(std::bit_cast<float>(static_cast<uint32_t>(i.x[k] >> shift)));
              };
              volatile float a = x(0), b = x(1), c = x(2);
              return __builtin_fmaf(a, b, c);
            }));
          };
          return one(0) | one(32) << 32;
        },
        nullptr,
        200);
    Check(
        "add." + m + ".f64 %d0, %d1, %d2;",
        [fe](const In& i) {
          return B(InRounding<double>(fe, [&] {
            volatile double a = i.d(0), b = i.d(1);
            return a + b;
          }));
        },
        BothNan);
    Check(
        "fma." + m + ".f64 %d0, %d1, %d2, %d3;",
        [fe](const In& i) {
          return B(InRounding<double>(fe, [&] {
            volatile double a = i.d(0), b = i.d(1), c = i.d(2);
            return __builtin_fma(a, b, c);
          }));
        },
        BothNan);
    Check("div." + m + ".f32 %r0, %r1, %r2;", [fe](const In& i) {
      return B(InRounding<float>(fe, [&] {
        volatile float a = i.f(0), b = i.f(1);
        return a / b;
      }));
    });
    Check("sqrt." + m + ".f32 %r0, %r1;", [fe](const In& i) {
      return B(InRounding<float>(fe, [&] {
        volatile float a = i.f(0);
        return __builtin_sqrtf(a);
      }));
    });
    Check(
        "rcp." + m + ".f64 %d0, %d1;",
        [fe](const In& i) {
          return B(InRounding<double>(fe, [&] {
            volatile double a = i.d(0);
            return 1 / a;
          }));
        },
        BothNan);
    Check("cvt." + m + ".f32.s64 %r0, %d1;", [fe](const In& i) {
      return B(InRounding<float>(fe, [&] {
        volatile int64_t a = i.l(0);
        return static_cast<float>(a);
      }));
    });
    Check("cvt." + m + ".f32.u32 %r0, %r1;", [fe](const In& i) {
      return B(InRounding<float>(fe, [&] {
        volatile int64_t a = i.u(0);
        return static_cast<float>(a);
      }));
    });
    Check("cvt." + m + ".f64.s64 %d0, %d1;", [fe](const In& i) {
      return B(InRounding<double>(fe, [&] {
        volatile int64_t a = i.l(0);
        return static_cast<double>(a);
      }));
    });
    Check(
        "cvt." + m + ".f32.f64 %r0, %d1;",
        [fe](const In& i) {
          return B(InRounding<float>(fe, [&] {
            volatile double a = i.d(0);
            return static_cast<float>(a);
          }));
        },
        nullptr,
        200);
    const auto integral = [fe](double x) {
      return InRounding<double>(fe, [&] { return std::nearbyint(x); });
    };
    const std::string i = m + "i";
    Check("cvt." + i + ".f32.f32 %r0, %r1;",
          [&](const In& in) { return B(static_cast<float>(integral(in.f(0)))); });
    Check("cvt." + i + ".s32.f32 %r0, %r1;", [&](const In& in) {
      const double x = integral(in.f(0));
      return std::isnan(x)
                 ? 0
                 : U32(static_cast<int64_t>(std::min(std::max(x, -2147483648.0), 2147483647.0)));
    });
    Check("cvt." + i + ".ftz.u32.f32 %r0, %r1;", [&](const In& in) {
      const double x = integral(FlushSubnormal(in.f(0)));
      return std::isnan(x) ? 0
                           : U32(static_cast<int64_t>(std::min(std::max(x, 0.0), 4294967295.0)));
    });
    Check("cvt." + i + ".s64.f64 %d0, %d1;", [&](const In& in) {
      const double x = integral(in.d(0));
      if (std::isnan(x)) return uint64_t{1} << 63;
      if (x >= 0x1p63) return (uint64_t{1} << 63) - 1;
      return x < -0x1p63 ? uint64_t{1} << 63 : static_cast<uint64_t>(static_cast<int64_t>(x));
    });
    Check("cvt." + i + ".u8.f32 %h0, %r1;", [&](const In& in) {
      const double x = integral(in.f(0));
      return std::isnan(x) ? 0 : static_cast<uint64_t>(std::min(std::max(x, 0.0), 255.0));
    });
  }
  Check(
      "add.ftz.f32 %r0, %r1, %r2;",
      [](const In& i) { return F(FlushSubnormal(i.f(0)) + FlushSubnormal(i.f(1))); },
      nullptr,
      200);
  Check("mul.rn.ftz.sat.f32 %r0, %r1, %r2;", [](const In& i) {
    const float x = FlushSubnormal(i.f(0)) * FlushSubnormal(i.f(1));
    return x > 0 ? F(std::min(x, 1.0f)) : 0;
  });
  Check("add.f32 %r0, %r1, 0f3F800000;", [](const In& i) { return B(i.f(0) + 1); });
  Check("add.f32 %r0, %r1, 1.5;", [](const In& i) { return B(i.f(0) + 1.5f); });
  Check("mul.f64 %d0, %d1, 0f3F000000;", [](const In& i) { return B(i.d(0) * 0.5); }, BothNan);
  Check("mul.f32x2 %d0, %d1, %d2;", [](const In& i) {
    const auto f = [&](int k, int s) {
      return std::bit_cast<float>(static_cast<uint32_t>(i.x[k] >> s));
    };
    return B(f(0, 0) * f(1, 0)) | B(f(0, 32) * f(1, 32)) << 32;
  });
  const auto extreme = [](float a, float b, bool is_max) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) == is_max ? b : a;
    return (a < b) == is_max ? b : a;
  };
  Check(
      "max.f32 %r0, %r1, %r2;",
      [&](const In& i) { return B(extreme(i.f(0), i.f(1), true)); },
      nullptr,
      200);
  Check(
      "min.ftz.f32 %r0, %r1, %r2;",
      [&](const In& i) {
        return B(extreme(FlushSubnormal(i.f(0)), FlushSubnormal(i.f(1)), false));
      },
      nullptr,
      200);
  Check("max.NaN.f32 %r0, %r1, %r2;", [&](const In& i) {
    return std::isnan(i.f(0)) || std::isnan(i.f(1)) ? 0x7fffffff : B(extreme(i.f(0), i.f(1), true));
  });
  Check(
      "max.f32 %r0, %r1, %r2, %r3;",
      [&](const In& i) { return B(extreme(extreme(i.f(0), i.f(1), true), i.f(2), true)); },
      nullptr,
      200);
  Check("min.f32 %r0, %r1, %r2, %r3;",
        [&](const In& i) { return B(extreme(extreme(i.f(0), i.f(1), false), i.f(2), false)); });
  Check(
      "max.f64 %d0, %d1, %d2;",
      [](const In& i) {
        const double a = i.d(0), b = i.d(1);
        return B(std::isnan(a)   ? b
                 : std::isnan(b) ? a
                 : a == b        ? (std::signbit(a) ? b : a)
                                 : std::max(a, b));
      },
      BothNan);
  Check("abs.f32 %r0, %r1;", [](const In& i) { return i.x[0] & 0x7fffffff; });
  Check("neg.ftz.f32 %r0, %r1;", [](const In& i) {
    return std::bit_cast<uint32_t>(FlushSubnormal(i.f(0))) ^ uint64_t { 0x80000000 };
  });
  Check("neg.f64 %d0, %d1;", [](const In& i) { return i.x[0] ^ uint64_t { 1 } << 63; });
  Check("neg.bf16x2 %r0, %r1;", [](const In& i) { return i.x[0] ^ 0x80008000; });
  Check("abs.f16 %h0, %h1;", [](const In& i) { return i.x[0] & 0x7fff; });
  Check("copysign.f32 %r0, %r1, %r2;",
        [](const In& i) { return (i.x[0] & 0x80000000) | (i.x[1] & 0x7fffffff); });
  Check("testp.subnormal.f32 %p0, %r1;",
        [](const In& i) { return uint64_t{std::fpclassify(i.f(0)) == FP_SUBNORMAL}; });
  Check("testp.finite.f64 %p0, %d1;", [](const In& i) { return uint64_t{std::isfinite(i.d(0))}; });
  // Comparisons of floats, with NaN on either side.
  const std::pair<const char*, std::function<bool(double, double)>> tests[] = {
      {"eq", [](double a, double b) { return a == b; }},
      {"ne", [](double a, double b) { return !std::isnan(a) && !std::isnan(b) && a != b; }},
      {"lt", [](double a, double b) { return a < b; }},
      {"le", [](double a, double b) { return a <= b; }},
      {"gt", [](double a, double b) { return a > b; }},
      {"ge", [](double a, double b) { return a >= b; }},
      {"equ", [](double a, double b) { return std::isnan(a) || std::isnan(b) || a == b; }},
      {"neu", [](double a, double b) { return std::isnan(a) || std::isnan(b) || a != b; }},
      {"ltu", [](double a, double b) { return std::isnan(a) || std::isnan(b) || a < b; }},
      {"leu", [](double a, double b) { return std::isnan(a) || std::isnan(b) || a <= b; }},
      {"gtu", [](double a, double b) { return std::isnan(a) || std::isnan(b) || a > b; }},
      {"geu", [](double a, double b) { return std::isnan(a) || std::isnan(b) || a >= b; }},
      {"num", [](double a, double b) { return !std::isnan(a) && !std::isnan(b); }},
      {"nan", [](double a, double b) { return std::isnan(a) || std::isnan(b); }}};
  for (const auto& [name, holds] : tests) {
    const std::string op = std::string("setp.") + name;
    const auto& test = holds;
    Check(op + ".f32 %p0, %r1, %r2;", [&](const In& i) { return uint64_t{test(i.f(0), i.f(1))}; });
    Check(op + ".xor.ftz.f32 %p0|%p1, %r1, %r2, %p2;", [&](const In& i) {
      const uint64_t h = test(FlushSubnormal(i.f(0)), FlushSubnormal(i.f(1)));
      return (h ^ i.x[2]) | (h ^ 1 ^ i.x[2]) << 1;
    });
    Check(op + ".f64 %p0, %d1, %d2;", [&](const In& i) { return uint64_t{test(i.d(0), i.d(1))}; });
    Check(op + ".bf16 %p0, %h1, %h2;", [&](const In& i) {
      return uint64_t{test(std::bit_cast<float>(i.u(0) << 16), std::bit_cast<float>(i.u(1) << 16))};
    });
    Check(op + ".f16x2 %p0|%p1, %r1, %r2;", [&](const In& i) {
      const auto h = [&](int k, int s) {
        return HalfToFloat(HalfType::kF16, static_cast<uint16_t>(i.u(k) >> s));
      };
      return uint64_t{test(h(0, 0), h(1, 0))} | uint64_t{test(h(0, 16), h(1, 16))} << 1;
    });
    Check(std::string("set.") + name + ".f32.f32 %r0, %r1, %r2;",
          [&](const In& i) { return test(i.f(0), i.f(1)) ? 0x3f800000 : uint64_t{0}; });
  }
  // Approximations: without the tables of an H200 they are correctly rounded, or nearly.
  Check(
      "ex2.approx.ftz.f32 %r0, %r1;",
      [](const In& i) {
        return F(static_cast<float>(std::exp2(static_cast<double>(FlushSubnormal(i.f(0))))));
      },
      Relative(0x1p-22));
  Check(
      "rcp.approx.ftz.f32 %r0, %r1;",
      [](const In& i) { return F(1 / FlushSubnormal(i.f(0))); },
      Relative(0x1p-22));
  Check(
      "lg2.approx.f32 %r0, %r1;",
      [](const In& i) { return B(static_cast<float>(std::log2(double{i.f(0)}))); },
      Relative(0x1p-20));
  Check(
      "rsqrt.approx.f32 %r0, %r1;",
      [](const In& i) { return B(static_cast<float>(1 / std::sqrt(double{i.f(0)}))); },
      Relative(0x1p-22));
  Check(
      "tanh.approx.f32 %r0, %r1;",
      [](const In& i) { return B(static_cast<float>(std::tanh(double{i.f(0)}))); },
      Relative(0x1p-10));
  Check(
      "div.full.f32 %r0, 0f3F800000, %r2;",
      [](const In& i) { return B(1 / i.f(1)); },
      [](uint64_t a, uint64_t b) {
        const float y = std::bit_cast<float>(static_cast<uint32_t>(b));
        return !std::isnormal(y) || std::fabs(y) < 0x1p-125f || std::fabs(y) > 0x1p125f ||
               Relative(0x1p-21)(a, b);
      });
}

void TestHalves() {
  const auto h = [](uint64_t x) {
    return double{HalfToFloat(HalfType::kF16, static_cast<uint16_t>(x))};
  };
  const auto b = [](uint64_t x) {
    return double{std::bit_cast<float>(static_cast<uint32_t>(x) << 16)};
  };
  // Sums and products of two halves are exact in double, and of 11 (8) bits: one rounding.
  const auto to_half = [](double x) {
    return uint64_t{FloatToHalf(HalfType::kF16, static_cast<float>(x))};
  };
  const auto to_brain = [](double x) {
    return uint64_t{FloatToHalf(HalfType::kBf16, static_cast<float>(x))};
  };
  Check(
      "add.f16 %h0, %h1, %h2;",
      [&](const In& i) { return to_half(h(i.x[0]) + h(i.x[1])); },
      nullptr,
      200);
  Check(
      "mul.f16x2 %r0, %r1, %r2;",
      [&](const In& i) {
        return to_half(h(i.x[0]) * h(i.x[1])) | to_half(h(i.x[0] >> 16) * h(i.x[1] >> 16)) << 16;
      },
      nullptr,
      200);
  Check("sub.rn.bf16 %h0, %h1, %h2;", [&](const In& i) {
    return to_brain(static_cast<float>(b(i.x[0])) - static_cast<float>(b(i.x[1])));
  });
  Check("mul.rn.bf16x2 %r0, %r1, %r2;", [&](const In& i) {
    return to_brain(b(i.x[0] & 0xffff) * b(i.x[1] & 0xffff)) |
           to_brain(b(i.x[0] >> 16) * b(i.x[1] >> 16)) << 16;
  });
  Check("fma.rn.bf16x2 %r0, %r1, %r2, %r3;", [&](const In& i) {
    const auto one = [&](int s) {
      const auto x = [&](int k) { return static_cast<uint16_t>(i.x[k] >> s); };
      return uint64_t{HalfFma(HalfType::kBf16, x(0), x(1), x(2))};
    };
    return one(0) | one(16) << 16;
  });
  Check("fma.rz.f32.bf16 %r0, %h1, %h2, %r3;", [&](const In& i) {
    return B(InRounding<float>(FE_TOWARDZERO, [&] {
      volatile float x = static_cast<float>(b(i.x[0])), y = static_cast<float>(b(i.x[1])),
                     z = i.f(2);
      return __builtin_fmaf(x, y, z);
    }));
  });
  Check("fma.rn.f32.bf16 %r0, %h1, %h2, %r3;", [&](const In& i) {
    return B(std::fma(static_cast<float>(b(i.x[0])), static_cast<float>(b(i.x[1])), i.f(2)));
  });
  Check("add.f32.f16 %r0, %h1, %r2;",
        [&](const In& i) { return B(static_cast<float>(h(i.x[0])) + i.f(1)); });
  Check("max.bf16x2 %r0, %r1, %r2;", [&](const In& i) {
    const auto one = [&](int s) {
      return uint64_t{HalfMax(
          HalfType::kBf16, static_cast<uint16_t>(i.x[0] >> s), static_cast<uint16_t>(i.x[1] >> s))};
    };
    return one(0) | one(16) << 16;
  });
  Check("ex2.approx.ftz.bf16x2 %r0, %r1;", [&](const In& i) {
    const auto one = [&](int s) {
      return uint64_t{HalfEx2Approx(HalfType::kBf16, static_cast<uint16_t>(i.x[0] >> s), true)};
    };
    return one(0) | one(16) << 16;
  });
}

void TestConversions() {
  struct T {
    const char* name;
    const char* reg;
    int bits;
    bool is_signed;
  };
  const T types[] = {{"u8", "h", 8, false},
                     {"s8", "h", 8, true},
                     {"u16", "h", 16, false},
                     {"s16", "h", 16, true},
                     {"u32", "r", 32, false},
                     {"s32", "r", 32, true},
                     {"u64", "d", 64, false},
                     {"s64", "d", 64, true}};
  const auto value = [](const T& t, uint64_t x) {
    const int up = 64 - t.bits;
    return t.is_signed ? static_cast<I128>(static_cast<int64_t>(x << up) >> up)
                       : static_cast<I128>(x << up >> up);
  };
  for (const T& to : types) {
    for (const T& from : types) {
      const std::string rest =
          std::string(to.name) + "." + from.name + " %" + to.reg + "0, %" + from.reg + "1;";
      const int reg_bits = to.reg[0] == 'h' ? 16 : to.reg[0] == 'r' ? 32 : 64;
      const uint64_t mask = reg_bits == 64 ? ~uint64_t{0} : (uint64_t{1} << reg_bits) - 1;
      Check("cvt." + rest, [&](const In& i) {
        return static_cast<uint64_t>(value(to, static_cast<uint64_t>(value(from, i.x[0])))) & mask;
      });
      Check("cvt.sat." + rest, [&](const In& i) {
        const I128 least = to.is_signed ? -(I128{1} << (to.bits - 1)) : 0;
        const I128 most = (I128{1} << (to.is_signed ? to.bits - 1 : to.bits)) - 1;
        return static_cast<uint64_t>(std::min(std::max(value(from, i.x[0]), least), most)) & mask;
      });
    }
  }
  Check("cvt.u64.u32 %d0, %d1;", [](const In& i) { return U32(i.l(0)); });
  Check("cvt.s16.s8 %r0, %r1;", [](const In& i) { return U32(static_cast<int8_t>(i.x[0])); });
  Check("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", [](const In& i) {
    return uint64_t{FloatToHalf(HalfType::kBf16, i.f(0))} << 16 |
           FloatToHalf(HalfType::kBf16, i.f(1));
  });
  Check("cvt.rn.relu.f16x2.f32 %r0, %r1, %r2;", [](const In& i) {
    const ConvertMode mode{.relu = true};
    return uint64_t{FloatToHalf(HalfType::kF16, i.f(0), mode)} << 16 |
           FloatToHalf(HalfType::kF16, i.f(1), mode);
  });
  Check("cvt.rn.f16.f32 %h0, %r1;",
        [](const In& i) { return uint64_t{FloatToHalf(HalfType::kF16, i.f(0))}; });
  Check("cvt.f32.f16 %r0, %h1;",
        [](const In& i) { return B(HalfToFloat(HalfType::kF16, i.h(0))); });
  Check("cvt.f32.bf16 %r0, %h1;", [](const In& i) { return i.x[0] << 16; });
  Check("cvt.f64.f32 %d0, %r1;", [](const In& i) { return B(double{i.f(0)}); }, BothNan);
  Check("cvt.sat.f32.f32 %r0, %r1;",
        [](const In& i) { return i.f(0) > 0 ? B(std::min(i.f(0), 1.0f)) : 0; });
  Check("cvt.rna.tf32.f32 %r0, %r1;",
        [](const In& i) { return uint64_t{FloatToTf32(i.f(0), Tf32Rounding::kNearestAway)}; });
  Check("cvt.rn.f16.s32 %h0, %r1;", [](const In& i) {
    return uint64_t{
        FloatToHalf(HalfType::kF16, static_cast<float>(std::min(std::max(i.s(0), -70000), 70000)))};
  });
  Check("cvt.pack.sat.s16.s32 %r0, %r1, %r2;", [](const In& i) {
    const auto c = [](int32_t x) { return U16(std::min(std::max(x, -32768), 32767)); };
    return c(i.s(0)) << 16 | c(i.s(1));
  });
  // Narrow formats: every code survives the way through f16.
  for (const char* name : {"e4m3x2", "e5m2x2"}) {
    const auto there = DecodeText(std::string("cvt.rn.f16x2.") + name + " %r0, %h1;");
    const auto back = DecodeText(std::string("cvt.rn.satfinite.") + name + ".f16x2 %h0, %r1;");
    Bench from(there), to(back);
    for (uint32_t first = 0; first < 256; first += kLanes) {
      const Inst& a = there->instructions[0];
      const Inst& b = back->instructions[0];
      for (int lane = 0; lane < kLanes; ++lane) {
        from.registers[a.source[0].index + lane] = (first + lane) | ((first + lane) ^ 0x80) << 8;
      }
      Context one = from.MakeContext(0xffffffff);
      a.execute(one, a);
      for (int lane = 0; lane < kLanes; ++lane) {
        to.registers[b.source[0].index + lane] = from.registers[a.destination[0].index + lane];
      }
      Context two = to.MakeContext(0xffffffff);
      b.execute(two, b);
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t code = first + lane,
                       got = to.registers[b.destination[0].index + lane] & 0xff;
        const bool is_finite = std::isfinite(HalfToFloat(
            HalfType::kF16, static_cast<uint16_t>(from.registers[a.destination[0].index + lane])));
        EXPECT(!is_finite || got == code, "%s: %x came back as %x\n", name, code, got);
      }
    }
  }
  Check("cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", [](const In& i) {
    // By search over all codes: the nearest, of two the even one.
    const auto code = [](float x) -> uint64_t {
      if (std::isnan(x)) return 0x7f;
      uint64_t best = 0;
      double distance = INFINITY;
      for (uint64_t c = 0; c < 0x7f; ++c) {
        const double v =
            c < 8 ? std::ldexp(c, -9) : std::ldexp(8.0 + (c & 7), static_cast<int>(c >> 3) - 10);
        const double d = std::fabs(std::fabs(std::min(std::fabs(double{x}), 448.0)) - v);
        if (d < distance || (d == distance && c % 2 == 0)) best = c, distance = d;
      }
      return best | (std::signbit(x) ? 0x80 : 0);
    };
    return code(i.f(0)) << 8 | code(i.f(1));
  });
}

void TestMoves() {
  Check("mov.b64 %d0, {%r1, %r2};", [](const In& i) { return i.x[1] << 32 | i.x[0]; });
  Check("mov.b64 {%r0, %r1}, %d2;", [](const In& i) { return i.x[0]; });
  Check("mov.b64 {%r0, _}, %d2;", [](const In& i) { return U32(i.l(0)); });
  Check("mov.b64 %d0, {%r1, 5};", [](const In& i) { return uint64_t{5} << 32 | i.x[0]; });
  Check("mov.b32 %r0, {%h1, %h2};", [](const In& i) { return i.x[1] << 16 | i.x[0]; });
  Check("mov.b32 {%h0, %h1}, %r2;",
        [](const In& i) { return (i.x[0] & 0xffff) | i.x[0] >> 16 << 32; });
  Check("mov.b64 %d0, {%h1, %h2, %h3, %h4};",
        [](const In& i) { return i.x[0] | i.x[1] << 16 | i.x[2] << 32 | i.x[3] << 48; });
  Check("mov.f32 %r0, 0f3F800000;", [](const In&) { return uint64_t{0x3f800000}; });
  Check("mov.f32 %r0, 0d3FF8000000000000;", [](const In&) { return uint64_t{0x3fc00000}; });
  Check("mov.pred %p0, -1;", [](const In&) { return uint64_t{1}; });
  Check("mov.pred %p0, !%p1;", [](const In& i) { return i.x[0]; });
  Check("and.pred %p0, %p1, !%p2;", [](const In& i) { return i.x[0] & i.x[1]; });
  Check("xor.pred %p0, %p1, %p2;", [](const In& i) { return i.x[0] ^ i.x[1]; });
  Check("and.pred %p0, %p1, 0;", [](const In&) { return uint64_t{0}; });
  Check("not.pred %p0, %p1;", [](const In& i) { return i.x[0] ^ 1; });
  Check("cvta.shared.u64 %d0, %d1;", [](const In& i) { return i.x[0] + Machine::kSharedWindow; });
  Check("cvta.to.local.u64 %d0, %d1;", [](const In& i) { return i.x[0] - Machine::kLocalWindow; });
  Check("cvta.to.global.u64 %d0, %d1;", [](const In& i) { return i.x[0]; });
  Check("isspacep.local %p0, %d1;", [](const In& i) { return uint64_t{i.x[0] >> 56 == 2}; });
  Check("mov.b64 %d0, p1;", [](const In&) { return uint64_t{8}; });
  Check("cvta.param.u64 %d0, %d1;", [](const In& i) { return i.x[0] + Machine::kParameterWindow; });
  Check("mov.u32 %r0, %tid.x;", [](const In& i) { return i.x[0]; });
  Check("mov.u16 %h0, %tid.x;", [](const In& i) { return U16(i.l(0)); });
  // 128 bits.
  const auto program =
      DecodeText("mov.b128 %q0, {%d0, %d1}; mov.b128 %q1, %q0; mov.b128 {%d2, %d3}, %q1;");
  Bench bench(program);
  bench.Fill(program->instructions[0].source[0]);
  bench.Fill(program->instructions[0].source[1]);
  Context context = bench.MakeContext(0xffffffff);
  Bench before = bench.Copy();
  for (int k = 0; k < 3; ++k) program->instructions[k].execute(context, program->instructions[k]);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int k = 0; k < 2; ++k) {
      EXPECT(bench.Read(program->instructions[2].destination[k], lane) ==
                 before.Read(program->instructions[0].source[k], lane),
             "mov.b128 is wrong\n");
    }
  }
}

// ---- The program around the instructions

void TestVariables() {
  const std::string before =
      ".global .align 8 .b8 table[64];\n.global .u32 counter;\n.shared .align 16 .b8 "
      "unused[4096];\n"
      ".extern .shared .align 1024 .b8 dynamic[];\n";
  const auto program = DecodeText(
      ".shared .align 4 .b8 first[20]; .shared .align 16 .b8 second[8];\n"
      "mov.u64 %d0, counter; mov.u32 %r0, second; mov.u32 %r1, dynamic; mov.u64 %d1, table+4;\n"
      "cvta.shared.u64 %d2, second;",
      before);
  EXPECT(program->static_shared_bytes == 40,
         "static shared memory is %u\n",
         program->static_shared_bytes);
  EXPECT(program->dynamic_shared_alignment == 1024,
         "alignment is %u\n",
         program->dynamic_shared_alignment);
  Bench bench(program);
  bench.cta.rank = 1;
  const uint64_t rank = uint64_t{1} << 24;
  Context context = bench.MakeContext(0xffffffff);
  const uint64_t wanted[] = {kGlobalVariableBase + 64,
                             rank + 32,
                             rank + 1024,
                             kGlobalVariableBase + 4,
                             Machine::kSharedWindow + rank + 32};
  for (int k = 0; k < 5; ++k) {
    const Inst& inst = program->instructions[k];
    inst.execute(context, inst);
    EXPECT(bench.Read(inst.destination[0], 3) == wanted[k],
           "address %d is %llx\n",
           k,
           static_cast<unsigned long long>(bench.Read(inst.destination[0], 3)));
  }
}

// Executes with one lane after the other through all branches and checks what a loop computes:
// registers that live across it keep their places.
void TestAllocation() {
  const auto program = DecodeText(
      "mov.u32 %r0, 0; mov.u32 %r1, 10; mov.u64 %d0, 5; mov.u32 %r7, 3;\n"
      "loop: add.u32 %r0, %r0, %r1; cvt.u64.u32 %d1, %r0; add.u64 %d0, %d0, %d1;\n"
      "add.u32 %r2, %r0, 1; add.u32 %r3, %r2, 1; setp.eq.u32 %p1, %r1, 5; @%p1 mov.u32 %r7, %r3;\n"
      "sub.u32 %r1, %r1, 1; setp.ne.u32 %p0, %r1, 0; @%p0 bra loop;\n"
      "add.u32 %r4, %r0, %r7; cvt.u64.u32 %d2, %r4; add.u64 %d3, %d2, %d0;");
  Bench bench(program);
  for (uint32_t& word : bench.registers) word = 0xdeadbeef;
  size_t pc = 0;
  const Inst* last = nullptr;
  while (program->instructions[pc].execute != nullptr || program->instructions[pc].target >= 0) {
    const Inst& inst = program->instructions[pc];
    uint32_t mask = 0xffffffff;
    if (inst.guard) mask = bench.predicates[inst.guard.index] ^ (inst.guard.negated ? ~0u : 0);
    if (inst.execute == nullptr) {
      pc = mask != 0 ? inst.target : pc + 1;
      continue;
    }
    Context context = bench.MakeContext(mask);
    inst.execute(context, inst);
    last = &inst;
    ++pc;
  }
  // r0 sums 10 + 9 + ... + 1 = 55; at r1 = 5 it was 45, so r7 = 47; d0 = 5 + the partial sums.
  uint64_t sum = 0, partial = 5;
  for (uint64_t k = 10; k > 0; --k) partial += sum += k;
  const uint64_t wanted = 55 + 47 + partial;
  EXPECT(bench.Read(last->destination[0], 17) == wanted,
         "the loop gave %llu, not %llu\n",
         static_cast<unsigned long long>(bench.Read(last->destination[0], 17)),
         static_cast<unsigned long long>(wanted));
  // %r0, %r1, %r7 and one or two others at a time, %d0 and two more.
  EXPECT(program->register_rows <= 5 + 2 * 3, "%u rows\n", program->register_rows);
  EXPECT(program->predicates <= 2, "%u predicates\n", program->predicates);
  const auto same = DecodeText("mov.u32 %r0, 77; add.u32 %r1, %r0, 77; add.u64 %d0, %d1, 77;");
  EXPECT(same->constants.size() == 3 * kRowWords, "constants are not shared\n");
  const auto special =
      DecodeText("mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.y; mov.u64 %d0, %clock64;");
  int count = 0;
  for (const uint32_t place : special->special) count += place != Program::kUnused;
  EXPECT(count == 2, "%d special registers have rows\n", count);
}

void TestRefusals() {
  for (const char* text : {"add.foo.s32 %r0, %r1, %r2;",
                           "add.s32 %r0, %r1;",
                           "add.s32 %h0, %r1, %r2;",
                           "add.b32 %r0, %r1, %r2;",
                           "add.f32 %r0, %r1, 1;",
                           "add.s32 %r0, %r1, 1.0;",
                           "frobnicate.b32 %r0;",
                           "mul.s32 %r0, %r1, %r2;",
                           "fma.f32 %r0, %r1, %r2, %r3;",
                           "setp.lt.b32 %p0, %r1, %r2;",
                           "setp.ltu.s32 %p0, %r1, %r2;",
                           "setp.lo.s32 %p0, %r1, %r2;",
                           "cvt.f32.s32 %r0, %r1;",
                           "cvt.rn.f32.f32 %r0, %r1;",
                           "cvt.s32.f32 %r0, %r1;",
                           "cvt.rn.bf16x2.f32 %r0, %r1;",
                           "ex2.approx.bf16 %h0, %h1;",
                           "add.rz.f16 %h0, %h1, %h2;",
                           "max.abs.f32 %r0, %r1, %r2;",
                           "mov.b64 {%r0, %r1, %r2}, %d0;",
                           "mov.u32 %r0, nobody;",
                           "lop3.b32 %r0, %r1, %r2, %r3, 256;",
                           "shl.u32 %r0, %r1, 2;",
                           "cvta.shared.u32 %r0, %r1;",
                           "add.u32 %r0, %clock, 1;",
                           "ex2.approx.ftz.f32.foo %r0, %r1;",
                           "cvt.rn.satfinite.e4m3x2.f32 %r0, %r1, %r2;",
                           "selp.f32 %r0, 1, %r1, %p0;",
                           "mov.u32 5, %r0;",
                           "cvt.u64.u32 %r0, %r1;",
                           "sub.ftz.f64 %d0, %d1, %d2;",
                           "add.sat.u32 %r0, %r1, %r2;"}) {
    std::string message;
    EXPECT(Refuses(text, &message), "%s is taken\n", text);
    EXPECT(message.find("PTX line") == 0, "%s: \"%s\"\n", text, message.c_str());
  }
}

// Liveness once more, the plain way (sets for each instruction, to a fixed point): no register may
// be written while another one lives at its place.
void TestPlaces(const Program& program) {
  const ptx::Kernel& kernel = *program.kernel;
  const int count = static_cast<int>(kernel.statements.size());
  std::vector<std::vector<int>> uses(count), defs(count);
  std::map<int, std::pair<int, uint32_t>> places;  // register to layout and index
  const auto layout = [](int bits) { return bits == 1 ? 0 : bits <= 32 ? 1 : bits; };
  int unmatched = 0;
  for (int i = 0; i < count; ++i) {
    const ptx::Statement& statement = kernel.statements[i];
    const Inst& inst = program.instructions[i];
    const auto gather = [&](const auto& self, const ptx::Operand& operand, bool first) -> void {
      if (operand.kind == ptx::Operand::Kind::kRegister && operand.reg >= 0) {
        (first ? defs : uses)[i].push_back(operand.reg);
      }
      for (const ptx::Operand& element : operand.elements) {
        self(self, element, first && operand.kind != ptx::Operand::Kind::kAddress);
      }
    };
    for (size_t k = 0; k < statement.operands.size(); ++k)
      gather(gather, statement.operands[k], k == 0);
    // Which register went where, as far as the order of an Inst's operands is that of the text.
    // Predicates and others keep their orders apart.
    for (const bool writes : {true, false}) {
      for (const bool predicates : {true, false}) {
        std::vector<int> names;
        for (const int reg : writes ? defs[i] : uses[i]) {
          if ((kernel.registers[reg].bits == 1) == predicates) names.push_back(reg);
        }
        std::vector<uint32_t> indices;
        const auto take = [&](const Ref& ref) {
          if (ref.kind != (predicates ? Ref::Kind::kPredicate : Ref::Kind::kRegister)) return;
          for (const uint32_t special : program.special) {
            if (!predicates && special == ref.index) return;
          }
          indices.push_back(ref.index);
        };
        if (writes) {
          for (const Ref& ref : inst.destination) take(ref);
          for (uint32_t k = 0; k < inst.destination_count; ++k)
            take(program.refs[inst.first_destination + k]);
        } else {
          for (const Ref& ref : inst.source) take(ref);
          for (uint32_t k = 0; k < inst.source_count; ++k)
            take(program.refs[inst.first_source + k]);
        }
        if (names.size() != indices.size()) {
          ++unmatched;
          continue;
        }
        for (size_t k = 0; k < names.size(); ++k) {
          const std::pair place(layout(kernel.registers[names[k]].bits), indices[k]);
          const auto [it, is_new] = places.emplace(names[k], place);
          EXPECT(is_new || it->second == place,
                 "%s has two places (line %d)\n",
                 kernel.registers[names[k]].name.c_str(),
                 statement.line);
        }
      }
    }
    if (statement.guard >= 0) {
      uses[i].push_back(statement.guard);
      places.emplace(statement.guard, std::pair(0, inst.guard.index));
    }
  }
  const size_t words = kernel.registers.size() / 64 + 1;
  std::vector<std::vector<uint64_t>> in(count + 1, std::vector<uint64_t>(words)), out = in;
  for (bool changed = true; changed;) {
    changed = false;
    for (int i = count - 1; i >= 0; --i) {
      const Inst& inst = program.instructions[i];
      const std::string_view opcode = kernel.statements[i].opcode;
      const bool ends = !inst.guard && (opcode.starts_with("bra") || opcode.starts_with("brx") ||
                                        opcode == "ret" || opcode == "exit");
      std::vector<uint64_t> live(words);
      for (size_t w = 0; w < words; ++w) {
        live[w] = (ends ? 0 : in[i + 1][w]) | (inst.target >= 0 ? in[inst.target][w] : 0);
      }
      out[i] = live;
      if (!inst.guard) {
        for (const int reg : defs[i]) live[reg / 64] &= ~(uint64_t{1} << reg % 64);
      } else {
        for (const int reg : defs[i]) live[reg / 64] |= uint64_t{1} << reg % 64;
      }
      for (const int reg : uses[i]) live[reg / 64] |= uint64_t{1} << reg % 64;
      if (live != in[i]) in[i] = live, changed = true;
    }
  }
  for (int i = 0; i < count; ++i) {
    std::map<std::pair<int, uint32_t>, int> taken;
    const auto check = [&](int reg) {
      const auto place = places.find(reg);
      if (place == places.end()) return;
      const auto [it, is_new] = taken.emplace(place->second, reg);
      EXPECT(is_new || it->second == reg,
             "line %d: %s and %s share a place\n",
             kernel.statements[i].line,
             kernel.registers[reg].name.c_str(),
             kernel.registers[it->second].name.c_str());
    };
    for (size_t w = 0; w < words; ++w) {
      for (uint64_t live = out[i][w]; live != 0; live &= live - 1) {
        check(static_cast<int>(w * 64) + std::countr_zero(live));
      }
    }
    for (const int reg : defs[i]) check(reg);
    for (const int reg : uses[i]) check(reg);
  }
  EXPECT(unmatched < count / 50, "%d of %d instructions could not be matched\n", unmatched, count);
}

void TestFiles(int count, char** paths) {
  std::set<std::string> skipped;
  others = &skipped;
  static const std::set<std::string> kScalar = {
      "add",  "sub",  "mul",      "mad",   "div",  "rem",   "abs",  "neg",  "min",  "max",  "and",
      "or",   "xor",  "not",      "lop3",  "shf",  "shl",   "shr",  "setp", "set",  "selp", "slct",
      "fma",  "rcp",  "sqrt",     "rsqrt", "ex2",  "lg2",   "sin",  "cos",  "tanh", "cvt",  "mov",
      "prmt", "cvta", "isspacep", "popc",  "clz",  "bfind", "brev", "bfe",  "bfi",  "bmsk", "szext",
      "dp4a", "dp2a", "copysign", "testp", "addc", "subc",  "madc", "sad",  "fns",  "cnot"};
  for (int i = 0; i < count; ++i) {
    std::ifstream file(paths[i]);
    std::stringstream text;
    text << file.rdbuf();
    std::shared_ptr<const ptx::Module> module = ptx::Parse(text.str());
    for (const auto& kernel : module->kernels) {
      kernel_in_test = kernel.get();
      const auto start = std::chrono::steady_clock::now();
      try {
        std::shared_ptr<const Program> program = Decode(module, *kernel);
        const double ms =
            std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
                .count();
        std::printf(
            "%6zu statements, %6zu registers: %4u rows, %3u predicates, %4zu constants, %.1f ms\n",
            kernel->statements.size(),
            kernel->registers.size(),
            program->register_rows,
            program->predicates,
            program->constants.size() / kRowWords,
            ms);
        TestPlaces(*program);
      } catch (const ptx::Error& error) {
        EXPECT(false, "%s: %s\n", paths[i], error.what());
      }
    }
  }
  for (const std::string& opcode : skipped) {
    EXPECT(!kScalar.contains(opcode), "%s went to another family\n", opcode.c_str());
  }
  others = nullptr;
}

// Nanoseconds for one instruction of a warp.
void Measure(const char* text) {
  const auto program = DecodeText(text);
  Bench bench(program);
  const Inst& inst = program->instructions[0];
  for (const Ref& ref : inst.source) bench.Fill(ref);
  for (const uint32_t mask : {0xffffffffu, 0x0000ff01u}) {
    Context context = bench.MakeContext(mask);
    constexpr int kTimes = 200000;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kTimes; ++i) inst.execute(context, inst);
    const double ns =
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s%.1f ns", mask == 0xffffffffu ? "  " : ", some lanes ", ns / kTimes);
  }
  std::printf("  %s\n", text);
}

int Main(int argc, char** argv) {
  const DefaultFloatEnvironment environment;
  TestIntegers();
  TestCarries();
  TestFloats();
  TestHalves();
  TestConversions();
  TestMoves();
  TestVariables();
  TestAllocation();
  TestRefusals();
  TestFiles(argc - 1, argv + 1);
  for (const char* text : {"mov.b64 %d0, {%r1, %r2};",
                           "mov.b64 {%r0, %r1}, %d2;",
                           "mov.b32 %r0, %r1;",
                           "add.s32 %r0, %r1, %r2;",
                           "and.b32 %r0, %r1, 255;",
                           "shl.b32 %r0, %r1, %r2;",
                           "lop3.b32 %r0, %r1, %r2, %r3, 0x96;",
                           "mul.hi.u32 %r0, %r1, %r2;",
                           "mul.lo.s64 %d0, %d1, %d2;",
                           "setp.eq.b32 %p0, %r1, %r2;",
                           "setp.lt.f32 %p0, %r1, %r2;",
                           "setp.lt.s64 %p0, %d1, %d2;",
                           "selp.f32 %r0, %r1, %r2, %p0;",
                           "prmt.b32 %r0, %r1, %r2, 0x5410;",
                           "bfe.u32 %r0, %r1, 8, 8;",
                           "add.f32 %r0, %r1, %r2;",
                           "fma.rn.f32x2 %d0, %d1, %d2, %d3;",
                           "add.rm.f32x2 %d0, %d1, %d2;",
                           "max.f32 %r0, %r1, %r2;",
                           "ex2.approx.ftz.f32 %r0, %r1;",
                           "cvt.rn.bf16x2.f32 %r0, %r1, %r2;",
                           "cvt.u64.u32 %d0, %r1;",
                           "cvt.rzi.s32.f32 %r0, %r1;",
                           "rcp.approx.ftz.f32 %r0, %r1;",
                           "fma.rn.f32.bf16 %r0, %h1, %h2, %r3;",
                           "fma.rn.bf16x2 %r0, %r1, %r2, %r3;"}) {
    Measure(text);
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_fa4::emulator

int main(int argc, char** argv) { return jax_fa4::emulator::Main(argc, argv); }
