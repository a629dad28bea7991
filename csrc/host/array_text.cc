#include "csrc/host/array_text.h"

#include <cstdint>

namespace jax_fa4 {

namespace ffi = xla::ffi;

std::string_view DtypeName(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::INVALID:
      return "invalid";
    case ffi::TOKEN:
      return "token";
    case ffi::PRED:
      return "bool";
    case ffi::S1:
      return "int1";
    case ffi::S2:
      return "int2";
    case ffi::S4:
      return "int4";
    case ffi::S8:
      return "int8";
    case ffi::S16:
      return "int16";
    case ffi::S32:
      return "int32";
    case ffi::S64:
      return "int64";
    case ffi::U1:
      return "uint1";
    case ffi::U2:
      return "uint2";
    case ffi::U4:
      return "uint4";
    case ffi::U8:
      return "uint8";
    case ffi::U16:
      return "uint16";
    case ffi::U32:
      return "uint32";
    case ffi::U64:
      return "uint64";
    case ffi::BF16:
      return "bfloat16";
    case ffi::F16:
      return "float16";
    case ffi::F32:
      return "float32";
    case ffi::F64:
      return "float64";
    case ffi::C64:
      return "complex64";
    case ffi::C128:
      return "complex128";
    case ffi::F4E2M1FN:
      return "float4_e2m1fn";
    case ffi::F8E3M4:
      return "float8_e3m4";
    case ffi::F8E4M3:
      return "float8_e4m3";
    case ffi::F8E4M3B11FNUZ:
      return "float8_e4m3b11fnuz";
    case ffi::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::F8E4M3FNUZ:
      return "float8_e4m3fnuz";
    case ffi::F8E5M2:
      return "float8_e5m2";
    case ffi::F8E5M2FNUZ:
      return "float8_e5m2fnuz";
    case ffi::F8E8M0FNU:
      return "float8_e8m0fnu";
  }
  return "unknown";  // of a runtime newer than the headers
}

std::string ArrayText(const Array& array) {
  std::string text(array.dtype);
  text += '[';
  const char* separator = "";
  for (const int64_t size : array.dims) {
    text += separator + std::to_string(size);
    separator = ",";
  }
  return text + ']';
}

std::string ArrayText(const ffi::AnyBuffer& buffer) {
  const ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
  return ArrayText({DtypeName(buffer.element_type()), {dims.begin(), dims.size()}});
}

}  // namespace jax_fa4
