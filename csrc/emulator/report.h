// What the emulator finds wrong, told as a good compiler tells it.

#ifndef JAX_FA4_CSRC_EMULATOR_REPORT_H_
#define JAX_FA4_CSRC_EMULATOR_REPORT_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace jax_fa4::emulator {

struct Report {
  enum class Kind : uint8_t {
    kRace,      // two accesses that nothing orders
    kDeadlock,  // everything that is left waits
    kMisuse,    // an instruction was used against its rules
    kMemory,    // an address outside of what the launch may touch
    kLimit,     // the run was ended by a limit
  };
  // One place in the program that takes part.
  struct Place {
    int32_t instruction = -1;
    int ptx_line = 0;
    std::string opcode;
    std::string source;  // "kernel.cu:12:3, inlined at kernel.cu:80:1"
    std::array<uint32_t, 3> cta = {0, 0, 0};
    int warp = -1;
    int lane = -1;
    std::string role;  // "reads shared memory [1024, 1040)"
  };
  Kind kind = Kind::kMisuse;
  std::string message;  // one sentence
  std::vector<Place> places;
  bool fatal = false;

  std::string Text() const;
};

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_REPORT_H_
