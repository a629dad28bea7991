#include "csrc/host/handlers.h"

#include <array>
#include <bit>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/host/array_text.h"
#include "csrc/host/driver.h"
#include "csrc/host/emulated.h"
#include "csrc/host/plan.h"

namespace jax_fa4 {
namespace {

namespace ffi = xla::ffi;

constexpr int32_t kMostMultiprocessors = 1 << 16;  // that the emulator takes

// The attributes of a call, each of which has to be taken once.
class Attributes {
 public:
  explicit Attributes(const ffi::Dictionary& dictionary) : dictionary_(dictionary) {}

  template <typename T>
  T Take(const char* name, const char* type) {
    const ffi::ErrorOr<T> value = dictionary_.get<T>(name);
    if (!value.has_value()) {
      throw std::invalid_argument("the attribute `" + std::string(name) + "` must be " + type +
                                  ": " + value.error().message() + ".");
    }
    names_.at(taken_++) = name;
    return *value;
  }

  // An attribute that may be left out.
  template <typename T>
  T Take(const char* name, const char* type, T otherwise) {
    return dictionary_.contains(name) ? Take<T>(name, type) : otherwise;
  }

  void Finish() const {
    if (dictionary_.size() != taken_) {
      std::string names;
      for (size_t i = 0; i < taken_; ++i) names += (i == 0 ? "" : ", ") + std::string(names_[i]);
      throw std::invalid_argument("the attributes must be " + (taken_ == 0 ? "none" : names) +
                                  ", but there are " + std::to_string(dictionary_.size()) + ".");
    }
  }

 private:
  const ffi::Dictionary& dictionary_;
  size_t taken_ = 0;
  std::array<const char*, 16> names_;  // more than a call has
};

void TakeForward(Attributes& attributes, ForwardAttributes* forward) {
  forward->band_low = attributes.Take<int32_t>("band_low", "an int32");
  forward->band_high = attributes.Take<int32_t>("band_high", "an int32");
  forward->softcap = attributes.Take<float>("softcap", "a float32");
}

void AddForward(const ForwardAttributes& forward, PlanKey* key) {
  key->insert(key->end(),
              {forward.band_low, forward.band_high, std::bit_cast<int32_t>(forward.softcap)});
}

// A decoded call: what differs between the three operations is how attributes become a plan, and
// its key.
struct Forward {
  static constexpr const char* kName = "jax_fa4_forward_v1";
  static constexpr const char* kEmulatedName = "jax_fa4_emulated_forward_v1";
  static constexpr size_t kResults = kForwardResults.size();
  ForwardAttributes attributes;
  explicit Forward(Attributes& all) { TakeForward(all, &attributes); }
  Plan MakePlan(std::span<const Array> arrays, const Device& device) const {
    return ForwardPlan(arrays, attributes, device);
  }
  void AddAttributes(PlanKey* key) const { AddForward(attributes, key); }
};

struct Backward {
  static constexpr const char* kName = "jax_fa4_backward_v1";
  static constexpr const char* kEmulatedName = "jax_fa4_emulated_backward_v1";
  static constexpr size_t kResults = kBackwardResults.size();
  BackwardAttributes attributes;
  explicit Backward(Attributes& all) {
    TakeForward(all, &attributes);
    attributes.deterministic = all.Take<bool>("deterministic", "a bool");
  }
  Plan MakePlan(std::span<const Array> arrays, const Device& device) const {
    return BackwardPlan(arrays, attributes, device);
  }
  void AddAttributes(PlanKey* key) const {
    AddForward(attributes, key);
    key->push_back(attributes.deterministic);
  }
};

struct TensorCopy {
  static constexpr const char* kName = "jax_fa4_tensor_copy_v1";
  static constexpr const char* kEmulatedName = "jax_fa4_emulated_tensor_copy_v1";
  static constexpr size_t kResults = kTensorCopyResults.size();
  explicit TensorCopy(Attributes&) {}
  Plan MakePlan(std::span<const Array> arrays, const Device& device) const {
    return TensorCopyPlan(arrays, device);
  }
  void AddAttributes(PlanKey*) const {}
};

// Operands, then results.
struct Buffers {
  std::vector<Array> arrays;
  std::vector<void*> addresses;

  // Throws unless there are so many results: a plan knows them by their place among all arrays, and
  // an operand in the place of a result would be written.
  Buffers(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results, size_t expected) {
    if (results.size() != expected) {
      throw std::invalid_argument("a call has " + std::to_string(expected) + " results, not " +
                                  std::to_string(results.size()) + ".");
    }
    arrays.reserve(operands.size() + results.size());
    addresses.reserve(operands.size() + results.size());
    for (size_t i = 0; i < operands.size(); ++i) Add(*operands.get<ffi::AnyBuffer>(i));
    for (size_t i = 0; i < results.size(); ++i) Add(**results.get<ffi::AnyBuffer>(i));
  }

 private:
  void Add(const ffi::AnyBuffer& buffer) {
    const ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
    arrays.push_back({DtypeName(buffer.element_type()), {dims.begin(), dims.size()}});
    addresses.push_back(buffer.untyped_data());
  }
};

template <typename Operation>
PlanKey KeyOf(const Operation& operation, std::span<const Array> arrays) {
  PlanKey key;
  key.reserve(128);  // more than any call has
  key.push_back(reinterpret_cast<intptr_t>(Operation::kName));
  operation.AddAttributes(&key);
  for (const Array& array : arrays) {
    // The names of dtypes are literals, which their addresses tell apart.
    key.push_back(reinterpret_cast<intptr_t>(array.dtype.data()));
    key.push_back(static_cast<int64_t>(array.dims.size()));
    key.insert(key.end(), array.dims.begin(), array.dims.end());
  }
  return key;
}

// Nothing may be thrown through XLA: runs `body`, and what it throws becomes the call's error.
template <typename Body>
ffi::Error Guard(const char* name, Body body) {
  const auto text = [&](const std::exception& error) {
    return std::string(name) + ": " + error.what();
  };
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(text(error));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(text(error));
  }
  return ffi::Error::Success();
}

template <typename Operation, bool kExecutes>
ffi::Error OnDriver(CUstream stream,
                    ffi::RemainingArgs operands,
                    ffi::RemainingRets results,
                    ffi::Dictionary dictionary) {
  return Guard(Operation::kName, [&] {
    Attributes attributes(dictionary);
    const Operation operation(attributes);
    attributes.Finish();
    const Buffers buffers(operands, results, Operation::kResults);
    StreamContext context(stream);
    const PlanKey key = KeyOf(operation, buffers.arrays);
    std::shared_ptr<PreparedPlan> plan = context.Find(key);
    if (plan == nullptr) {
      plan = context.Prepare(key, operation.MakePlan(buffers.arrays, context.device()));
    }
    if constexpr (kExecutes) context.Execute(*plan, buffers.addresses);
  });
}

template <typename Operation>
ffi::Error OnEmulator(ffi::RemainingArgs operands,
                      ffi::RemainingRets results,
                      ffi::Dictionary dictionary) {
  return Guard(Operation::kEmulatedName, [&] {
    Attributes attributes(dictionary);
    const Operation operation(attributes);
    Device device = EmulatedDevice(attributes.Take<std::string_view>("target", "a string"));
    EmulationOptions options;
    options.strict = attributes.Take<bool>("strict", "a bool");
    options.seed = static_cast<uint64_t>(attributes.Take<int64_t>("seed", "an int64"));
    options.trace = attributes.Take<bool>("trace", "a bool", false);
    device.sm_count = attributes.Take<int32_t>("sm_count", "an int32", device.sm_count);
    attributes.Finish();
    if (device.sm_count < 1 || device.sm_count > kMostMultiprocessors) {
      throw std::invalid_argument("the attribute `sm_count` must be from 1 to " +
                                  std::to_string(kMostMultiprocessors) + ", not " +
                                  std::to_string(device.sm_count) + ".");
    }
    const Buffers buffers(operands, results, Operation::kResults);
    const Plan plan = operation.MakePlan(buffers.arrays, device);
    ExecuteEmulated(plan, device, buffers.addresses, options);
  });
}

template <typename Operation, ffi::ExecutionStage kStage>
XLA_FFI_Error* DriverHandler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = ffi::Ffi::Bind<kStage>()
                                   .template Ctx<ffi::PlatformStream<CUstream>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs()
                                   .To(OnDriver<Operation, kStage == ffi::ExecutionStage::kExecute>,
                                       {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

template <typename Operation>
XLA_FFI_Error* EmulatorHandler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler =
      ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().To(OnEmulator<Operation>).release();
  return handler->Call(call_frame);
}

}  // namespace

std::vector<CallTarget> CallTargets() {
  std::vector<CallTarget> targets;
  const auto add = [&]<typename Operation>(Operation*) {
    targets.push_back({"CUDA",
                       Operation::kName,
                       &DriverHandler<Operation, ffi::ExecutionStage::kInitialize>,
                       &DriverHandler<Operation, ffi::ExecutionStage::kExecute>});
    targets.push_back({"cpu", Operation::kEmulatedName, nullptr, &EmulatorHandler<Operation>});
  };
  add(static_cast<Forward*>(nullptr));
  add(static_cast<Backward*>(nullptr));
  add(static_cast<TensorCopy*>(nullptr));
  return targets;
}

}  // namespace jax_fa4
