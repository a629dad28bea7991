#include "csrc/host/array_text.h"

#include <cstdint>
#include <sstream>

namespace jax_fa4 {
namespace {

namespace ffi = xla::ffi;

void PrintDtype(std::ostream& out, ffi::DataType dtype) {
  switch (dtype) {
    case ffi::PRED:
      out << "bool";
      break;
    case ffi::S32:
      out << "int32";
      break;
    case ffi::S64:
      out << "int64";
      break;
    case ffi::BF16:
      out << "bfloat16";
      break;
    case ffi::F16:
      out << "float16";
      break;
    case ffi::F32:
      out << "float32";
      break;
    case ffi::F64:
      out << "float64";
      break;
    default:  // A dtype that no operand can have is still named, in XLA's spelling.
      out << dtype;
  }
}

}  // namespace

std::string ArrayText(const ffi::AnyBuffer& buffer) {
  std::ostringstream text;
  PrintDtype(text, buffer.element_type());
  text << '[';
  const char* separator = "";
  for (const int64_t size : buffer.dimensions()) {
    text << separator << size;
    separator = ",";
  }
  text << ']';
  return text.str();
}

}  // namespace jax_fa4
