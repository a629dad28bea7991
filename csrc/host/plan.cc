#include "csrc/host/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "csrc/host/array_text.h"
#include "csrc/host/problem.h"

namespace jax_fa4 {
namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

[[noreturn]] void Refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

// The arrays of a call by name, and what is asked of them.
class Arrays {
 public:
  Arrays(std::span<const Array> arrays,
         std::span<const char* const> operands,
         std::span<const char* const> results)
      : arrays_(arrays), operands_(operands), results_(results) {
    if (arrays.size() != operands.size() + results.size()) {
      std::string names;
      for (const std::span<const char* const> some : {operands, results}) {
        for (const char* name : some) names += (names.empty() ? "" : ", ") + std::string(name);
      }
      Refuse("a call has " + std::to_string(operands.size()) + " operands and " +
             std::to_string(results.size()) + " results (" + names + "), together not " +
             std::to_string(arrays.size()) + ".");
    }
  }

  const Array& operator[](std::string_view name) const { return arrays_[Find(name)]; }

  [[noreturn]] void RefuseArray(std::string_view name, const std::string& must) const {
    const size_t index = Find(name);
    Refuse("the " + std::string(index < operands_.size() ? "operand `" : "result `") +
           std::string(name) + "` must be " + must + ", not " + ArrayText(arrays_[index]) + ".");
  }

  // The array has as many dimensions as `layout` has names, none of them empty or above 2^31 - 1.
  void ExpectRank(std::string_view name, size_t rank, const char* layout) const {
    const Array& array = (*this)[name];
    if (array.dims.size() != rank) {
      RefuseArray(name, "of " + std::to_string(rank) + " dimensions " + layout);
    }
    for (const int64_t size : array.dims) {
      if (size < 1 || size > kMaxSize) {
        RefuseArray(name, std::string(layout) + " with every size from 1 to 2^31 - 1");
      }
    }
  }

  void ExpectArray(std::string_view name,
                   std::string_view dtype,
                   std::initializer_list<int64_t> dims) const {
    const Array& array = (*this)[name];
    const Array expected = {dtype, {dims.begin(), dims.size()}};
    if (array.dtype != dtype ||
        !std::equal(array.dims.begin(), array.dims.end(), dims.begin(), dims.end())) {
      RefuseArray(name, ArrayText(expected));
    }
  }

  // The array has these dimensions behind a leading one, which divides `batch` and is returned.
  int32_t ExpectRows(std::string_view name,
                     std::string_view dtype,
                     int64_t batch,
                     std::initializer_list<int64_t> dims) const {
    const Array& array = (*this)[name];
    const bool fits = array.dtype == dtype && array.dims.size() == dims.size() + 1 &&
                      array.dims[0] >= 1 && batch % array.dims[0] == 0 &&
                      std::equal(dims.begin(), dims.end(), array.dims.begin() + 1);
    if (!fits) {
      std::string must = std::string(dtype) + "[b";
      for (const int64_t size : dims) must += "," + std::to_string(size);
      RefuseArray(name, must + "] with a b that divides " + std::to_string(batch));
    }
    return static_cast<int32_t>(array.dims[0]);
  }

  bool IsAbsent(std::string_view name) const {
    const Array& array = (*this)[name];
    return array.dims.size() == 1 && array.dims[0] == 0;
  }

  std::vector<Plan::Buffer> Buffers() const {
    std::vector<Plan::Buffer> buffers;
    for (size_t i = 0; i < arrays_.size(); ++i) {
      const bool is_result = i >= operands_.size();
      const char* name = is_result ? results_[i - operands_.size()] : operands_[i];
      const std::string_view dtype = arrays_[i].dtype;
      int64_t bytes = dtype == "uint8" ? 1 : dtype.ends_with("16") ? 2 : 4;
      for (const int64_t size : arrays_[i].dims) {
        if (__builtin_mul_overflow(bytes, size, &bytes)) {
          RefuseArray(name, "an array of less than 2^63 bytes");
        }
      }
      buffers.push_back({name, static_cast<uint64_t>(bytes), is_result});
    }
    return buffers;
  }

 private:
  std::span<const Array> arrays_;
  std::span<const char* const> operands_, results_;

  size_t Find(std::string_view name) const {
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (operands_[i] == name) return i;
    }
    size_t i = 0;
    while (results_[i] != name) ++i;
    return operands_.size() + i;
  }
};

// Checks what the forward and the backward have in common.
Problem Checked(const Arrays& arrays, const ForwardAttributes& attributes, const Device& device) {
  const Array &query = arrays["query"], &key = arrays["key"], &value = arrays["value"],
              &out = arrays["out"];
  if (query.dtype != "float16" && query.dtype != "bfloat16" && query.dtype != "float32") {
    arrays.RefuseArray("query", "of float16, bfloat16 or float32");
  }
  arrays.ExpectRank("query", 4, "(b, T, N, D)");
  arrays.ExpectRank("key", 4, "(b, S, K, D)");
  arrays.ExpectRank("value", 4, "(b, S, K, Dv)");
  arrays.ExpectRank("out", 4, "(B, T, N, Dv)");
  const int64_t batch = out.dims[0], rows = query.dims[1], heads = query.dims[2],
                width = query.dims[3], keys = key.dims[1], kv_heads = key.dims[2],
                value_width = value.dims[3];
  Problem problem;
  problem.device = device;
  problem.dtype = query.dtype;
  problem.query_batch = arrays.ExpectRows("query", query.dtype, batch, {rows, heads, width});
  problem.key_batch = arrays.ExpectRows("key", query.dtype, batch, {keys, kv_heads, width});
  problem.value_batch =
      arrays.ExpectRows("value", query.dtype, batch, {keys, kv_heads, value_width});
  if (heads % kv_heads != 0) {
    arrays.RefuseArray("key", "of a number of heads that divides query's " + std::to_string(heads));
  }
  problem.scale_batch = arrays.ExpectRows("scale", "float32", batch, {});
  if (!arrays.IsAbsent("lower") || !arrays.IsAbsent("upper")) {
    problem.lower_batch = arrays.ExpectRows("lower", "int32", batch, {rows});
    problem.upper_batch = arrays.ExpectRows("upper", "int32", batch, {rows});
  } else {
    arrays.ExpectArray("lower", "int32", {0});
    arrays.ExpectArray("upper", "int32", {0});
  }
  problem.out_dtype = out.dtype == "float32" ? out.dtype : query.dtype;
  arrays.ExpectArray("out", problem.out_dtype, {batch, rows, heads, value_width});
  arrays.ExpectArray("lse", "float32", {batch, rows, heads});
  arrays.ExpectArray("lse_rounding", "float32", {batch, rows, heads});

  problem.batch = static_cast<int32_t>(batch);
  problem.rows = static_cast<int32_t>(rows);
  problem.keys = static_cast<int32_t>(keys);
  problem.heads = static_cast<int32_t>(heads);
  problem.kv_heads = static_cast<int32_t>(kv_heads);
  problem.width = static_cast<int32_t>(width);
  problem.value_width = static_cast<int32_t>(value_width);
  for (const auto& [name, band] :
       {std::pair("band_low", attributes.band_low), std::pair("band_high", attributes.band_high)}) {
    // A kernel adds it to a row's index.
    if (rows - 1 + band > kMaxSize) {
      Refuse("the attribute `" + std::string(name) + "` must be at most " +
             std::to_string(kMaxSize - rows + 1) + " for " + std::to_string(rows) + " rows, not " +
             std::to_string(band) + ".");
    }
  }
  if (!(attributes.softcap >= 0) || std::isinf(attributes.softcap)) {
    Refuse("the attribute `softcap` must be positive, or 0 for none, not " +
           std::to_string(attributes.softcap) + ".");
  }
  static_cast<ForwardAttributes&>(problem.attributes) = attributes;
  return problem;
}

// Kernels for a pass. The first of a table that can do it is used.
struct Kernels {
  std::string (*why_not)(const Problem&);
  std::vector<Launch> (*launches)(const Problem&);
};
constexpr Kernels kForwards[] = {{&sm100::WhyNotForward, &sm100::ForwardLaunches},
                                 {&sm90::WhyNotForward, &sm90::ForwardLaunches},
                                 {&sm80::WhyNot, &sm80::ForwardLaunches}};
constexpr Kernels kBackwards[] = {{&sm100::WhyNotBackward, &sm100::BackwardLaunches},
                                  {&sm90::WhyNotBackward, &sm90::BackwardLaunches},
                                  {&sm80::WhyNot, &sm80::BackwardLaunches}};

std::vector<Launch> Launches(std::span<const Kernels> table, const Problem& problem) {
  std::string reasons;
  for (const Kernels& kernels : table) {
    const std::string reason = kernels.why_not(problem);
    if (reason.empty()) return kernels.launches(problem);
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  Refuse("no kernel can do this: " + reasons + ".");
}

}  // namespace

std::array<uint32_t, 3> Grid(int64_t ctas) {
  if (ctas > kMaxSize) {
    Refuse("the call would need a grid of " + std::to_string(ctas) +
           " CTAs, and a grid has at most 2^31 - 1: split the batch.");
  }
  return {static_cast<uint32_t>(ctas), 1, 1};
}

Plan ForwardPlan(std::span<const Array> all,
                 const ForwardAttributes& attributes,
                 const Device& device) {
  const Arrays arrays(all, kForwardOperands, kForwardResults);
  const Problem problem = Checked(arrays, attributes, device);
  Plan plan{arrays.Buffers(), {}};
  plan.launches = Launches(kForwards, problem);
  return plan;
}

Plan BackwardPlan(std::span<const Array> all,
                  const BackwardAttributes& attributes,
                  const Device& device) {
  const Arrays arrays(all, kBackwardOperands, kBackwardResults);
  Problem problem = Checked(arrays, attributes, device);
  problem.attributes.deterministic = attributes.deterministic;
  const int64_t batch = problem.batch, rows = problem.rows, keys = problem.keys,
                heads = problem.heads, kv_heads = problem.kv_heads, width = problem.width,
                value_width = problem.value_width;
  arrays.ExpectArray("dout", problem.out_dtype, {batch, rows, heads, value_width});
  problem.has_dlse = !arrays.IsAbsent("dlse");
  if (problem.has_dlse) {
    arrays.ExpectArray("dlse", "float32", {batch, rows, heads});
  } else {
    arrays.ExpectArray("dlse", "float32", {0});
  }
  arrays.ExpectArray("dquery", problem.dtype, {batch, rows, heads, width});
  arrays.ExpectArray("dkey", problem.dtype, {batch, keys, kv_heads, width});
  arrays.ExpectArray("dvalue", problem.dtype, {batch, keys, kv_heads, value_width});
  arrays.ExpectArray("dscale", "float32", {batch, rows, heads});
  Plan plan{arrays.Buffers(), {}};
  const uint64_t workspace = BackwardWorkspaceBytes(
      batch, rows, keys, heads, kv_heads, width, value_width, problem.dtype == "float32" ? 4 : 2);
  arrays.ExpectArray("workspace", "uint8", {static_cast<int64_t>(workspace)});
  plan.launches = Launches(kBackwards, problem);
  return plan;
}

uint64_t BackwardWorkspaceBytes(int64_t batch,
                                int64_t rows,
                                int64_t keys,
                                int64_t heads,
                                int64_t kv_heads,
                                int64_t width,
                                int64_t value_width,
                                int64_t itemsize) {
  for (const int64_t size : {batch, rows, keys, heads, kv_heads, width, value_width}) {
    if (size < 1 || size > kMaxSize) return 0;  // a plan refuses such arrays
  }
  Problem problem;
  problem.dtype = problem.out_dtype = itemsize == 4 ? "float32" : "bfloat16";
  problem.batch = static_cast<int32_t>(batch);
  problem.rows = static_cast<int32_t>(rows);
  problem.keys = static_cast<int32_t>(keys);
  problem.heads = static_cast<int32_t>(heads);
  problem.kv_heads = static_cast<int32_t>(kv_heads);
  problem.width = static_cast<int32_t>(width);
  problem.value_width = static_cast<int32_t>(value_width);
  return std::max({sm80::WorkspaceBytes(problem),
                   sm90::WorkspaceBytes(problem),
                   sm100::WorkspaceBytes(problem)});
}

}  // namespace jax_fa4
