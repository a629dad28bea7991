#include "csrc/emulator/report.h"

namespace jax_fa4::emulator {

std::string Report::Text() const {
  static const char* const kNames[] = {"race", "deadlock", "misuse", "memory", "limit"};
  std::string text = std::string(kNames[static_cast<int>(kind)]) + ": " + message;
  for (const Place& place : places) {
    text += "\n  ";
    if (place.ptx_line > 0) text += "PTX line " + std::to_string(place.ptx_line) + ": ";
    text += place.opcode;
    if (!place.source.empty()) text += "  (" + place.source + ")";
    text += "\n    CTA (" + std::to_string(place.cta[0]) + ", " + std::to_string(place.cta[1]) +
            ", " + std::to_string(place.cta[2]) + ")";
    if (place.warp >= 0) text += ", warp " + std::to_string(place.warp);
    if (place.lane >= 0) text += ", lane " + std::to_string(place.lane);
    if (!place.role.empty()) text += ": " + place.role;
  }
  return text;
}

}  // namespace jax_fa4::emulator
