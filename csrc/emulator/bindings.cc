#include "csrc/emulator/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "csrc/emulator/machine.h"
#include "csrc/emulator/tensor_map.h"
#include "csrc/emulator/trace.h"

namespace jax_fa4::emulator {
namespace nb = nanobind;
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadOnlyBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A kernel of a PTX module, decoded.
std::shared_ptr<const Program> Load(std::string text, const std::string& name) {
  std::shared_ptr<const ptx::Module> module = ptx::Parse(std::move(text));
  const ptx::Kernel* kernel = nullptr;
  std::string names;
  for (const auto& one : module->kernels) {
    names += (names.empty() ? "" : ", ") + one->name;
    if (one->name == name || (name.empty() && module->kernels.size() == 1)) kernel = one.get();
  }
  if (names.empty()) throw nb::value_error("the module has no kernels (.entry).");
  if (kernel == nullptr && name.empty()) {
    throw nb::value_error(
        ("the module has several kernels, of which `name` has to say one: " + names + ".").c_str());
  }
  if (kernel == nullptr) {
    throw nb::value_error(
        ("the module has no kernel \"" + name + "\"; it has: " + names + ".").c_str());
  }
  return Decode(module, *kernel);
}

TensorMapType TypeNamed(const std::string& dtype) {
  static const std::pair<const char*, TensorMapType> kTypes[] = {
      {"uint8", TensorMapType::kUint8},
      {"uint16", TensorMapType::kUint16},
      {"uint32", TensorMapType::kUint32},
      {"int32", TensorMapType::kInt32},
      {"uint64", TensorMapType::kUint64},
      {"int64", TensorMapType::kInt64},
      {"float16", TensorMapType::kFloat16},
      {"float32", TensorMapType::kFloat32},
      {"float64", TensorMapType::kFloat64},
      {"bfloat16", TensorMapType::kBfloat16}};
  for (const auto& [name, type] : kTypes) {
    if (dtype == name) return type;
  }
  throw nb::value_error(("a tensor map cannot hold elements of type " + dtype + ".").c_str());
}

struct Result {
  std::vector<Report> reports;
  uint64_t instructions = 0;
  std::shared_ptr<const Trace> trace;
};

// One event, with the trace that it belongs to.
struct TraceEvent {
  std::shared_ptr<const Trace> trace;
  int32_t index = 0;

  const Trace::Event& operator*() const { return trace->events()[index]; }
  const Trace::Event* operator->() const { return &trace->events()[index]; }
  bool operator==(const TraceEvent&) const = default;
  const ptx::Statement* statement() const { return trace->StatementOf(**this); }
};

nb::dict ArgumentsOf(const TraceEvent& event) {
  nb::dict arguments;
  for (const auto& [name, value] : event.trace->ArgumentsOf(*event)) arguments[name] = value;
  return arguments;
}

void AddTraceBindings(nb::module_& m) {
  static const char* const kKinds[] = {"warp", "operation", "wait", "signal", "phase", "registers"};
  static const char* const kUnits[] = {"warp",
                                       "tensor load",
                                       "tensor store",
                                       "cp.async",
                                       "wgmma",
                                       "tensor pipe",
                                       "copy engine",
                                       "mbarriers"};
  static const char* const kEndings[] = {"nothing", "signal", "lanes", "time limit", "no reason"};
  nb::class_<TraceEvent>(m, "TraceEvent")
      .def_ro("index", &TraceEvent::index)
      .def_prop_ro("kind",
                   [](const TraceEvent& self) { return kKinds[static_cast<int>(self->kind)]; })
      .def_prop_ro("unit",
                   [](const TraceEvent& self) { return kUnits[static_cast<int>(self->unit)]; })
      .def_prop_ro("name", [](const TraceEvent& self) { return self->name; })
      .def_prop_ro("cta",
                   [](const TraceEvent& self) {
                     const auto& index = self.trace->ctas()[self->cta].index;
                     return std::tuple(index[0], index[1], index[2]);
                   })
      .def_prop_ro("warp", [](const TraceEvent& self) { return self->warp; })
      .def_prop_ro("lane", [](const TraceEvent& self) { return self->lane; })
      .def_prop_ro("lanes", [](const TraceEvent& self) { return self->lanes; })
      .def_prop_ro("issue", [](const TraceEvent& self) { return self->issue; })
      .def_prop_ro("start", [](const TraceEvent& self) { return self->start; })
      .def_prop_ro("end", [](const TraceEvent& self) { return self->end; })
      .def_prop_ro("open", [](const TraceEvent& self) { return self->open; })
      .def_prop_ro("ended_by",
                   [](const TraceEvent& self) { return kEndings[static_cast<int>(self->ending)]; })
      .def_prop_ro("cause",
                   [](const TraceEvent& self) -> nb::object {
                     if (self->cause < 0) return nb::none();
                     return nb::cast(TraceEvent{self.trace, self->cause});
                   })
      .def_prop_ro("arguments", &ArgumentsOf)
      .def_prop_ro("opcode",
                   [](const TraceEvent& self) {
                     const ptx::Statement* statement = self.statement();
                     return std::string(statement == nullptr ? "" : statement->opcode);
                   })
      .def_prop_ro("ptx_line",
                   [](const TraceEvent& self) {
                     const ptx::Statement* statement = self.statement();
                     return statement == nullptr ? 0 : statement->line;
                   })
      .def_prop_ro("source", [](const TraceEvent& self) { return self.trace->SourceOf(*self); })
      .def("__eq__",
           [](const TraceEvent& self, nb::object other) {
             TraceEvent same;
             return nb::try_cast(other, same) && self == same;
           })
      .def("__hash__", [](const TraceEvent& self) { return self.index; })
      .def("__repr__", [](const TraceEvent& self) {
        const auto& cta = self.trace->ctas()[self->cta].index;
        std::string text = "<TraceEvent " + std::to_string(self.index) + ": " +
                           kKinds[static_cast<int>(self->kind)] + " \"" + self->name + "\", CTA (" +
                           std::to_string(cta[0]) + ", " + std::to_string(cta[1]) + ", " +
                           std::to_string(cta[2]) + ")";
        if (self->warp >= 0) text += ", warp " + std::to_string(self->warp);
        return text + ", " + std::to_string(self->start) + " to " + std::to_string(self->end) +
               (self->open ? ", open>" : ">");
      });
  nb::class_<Trace>(m, "Trace")
      .def_prop_ro("events",
                   [](std::shared_ptr<const Trace> self) {
                     nb::list events;
                     for (size_t i = 0; i < self->events().size(); ++i) {
                       events.append(TraceEvent{self, static_cast<int32_t>(i)});
                     }
                     return events;
                   })
      .def_prop_ro("missing", &Trace::missing)
      .def("chrome_json", &Trace::ChromeJson);
}

}  // namespace

void AddBindings(nb::module_& m) {
  nb::exception<ptx::Error>(m, "PtxError", PyExc_ValueError);

  nb::class_<Program>(m, "Program")
      .def_prop_ro("name", [](const Program& self) { return self.kernel->name; })
      .def_prop_ro("target", [](const Program& self) { return self.module->target; })
      .def_prop_ro("instructions",
                   [](const Program& self) { return self.kernel->statements.size(); })
      .def_prop_ro("virtual_registers",
                   [](const Program& self) { return self.kernel->registers.size(); })
      .def_prop_ro("register_rows", [](const Program& self) { return self.register_rows; })
      .def_prop_ro("static_shared_bytes",
                   [](const Program& self) { return self.static_shared_bytes; })
      .def_prop_ro("parameter_bytes",
                   [](const Program& self) { return self.kernel->parameter_bytes; })
      .def_prop_ro("required_block",
                   [](const Program& self) { return self.kernel->required_block; })
      .def_prop_ro("required_cluster",
                   [](const Program& self) { return self.kernel->required_cluster; })
      .def_prop_ro("parameters", [](const Program& self) {
        std::vector<std::tuple<std::string, uint32_t, uint32_t>> parameters;
        for (const ptx::Variable& one : self.kernel->parameters) {
          parameters.emplace_back(one.name, one.offset, one.size);
        }
        return parameters;
      });

  nb::class_<Report::Place>(m, "Place")
      .def_ro("ptx_line", &Report::Place::ptx_line)
      .def_ro("opcode", &Report::Place::opcode)
      .def_ro("source", &Report::Place::source)
      .def_ro("cta", &Report::Place::cta)
      .def_ro("warp", &Report::Place::warp)
      .def_ro("lane", &Report::Place::lane)
      .def_ro("role", &Report::Place::role);
  nb::class_<Report>(m, "Report")
      .def_prop_ro("kind",
                   [](const Report& self) {
                     static const char* const kNames[] = {
                         "race", "deadlock", "misuse", "memory", "limit"};
                     return kNames[static_cast<int>(self.kind)];
                   })
      .def_ro("message", &Report::message)
      .def_ro("places", &Report::places)
      .def_ro("fatal", &Report::fatal)
      .def("__str__", &Report::Text)
      .def("__repr__", [](const Report& self) { return "<Report " + self.Text() + ">"; });
  nb::class_<Result>(m, "Result")
      .def_ro("reports", &Result::reports)
      .def_ro("instructions", &Result::instructions)
      .def_prop_ro("trace", [](const Result& self) { return self.trace; });
  AddTraceBindings(m);

  m.def(
      "emulator_load_tables",
      [](nb::bytes ex2, nb::bytes rcp) {
        const auto span = [](const nb::bytes& x) {
          return std::span(reinterpret_cast<const uint8_t*>(x.c_str()), x.size());
        };
        LoadTables(span(ex2), span(rcp));
      },
      nb::arg("ex2"),
      nb::arg("rcp"),
      "Loads the tables of the hardware's ex2 and rcp, gzip files of 2^23 bytes each.");
  m.def(
      "emulator_encode_tensor_map",
      [](uint64_t address,
         const std::string& dtype,
         const std::vector<uint64_t>& dims,
         const std::vector<uint64_t>& strides,
         const std::vector<uint32_t>& box,
         int swizzle) {
        TensorMap map;
        map.type = TypeNamed(dtype);
        if (dims.empty() || dims.size() > kMaxRank || box.size() != dims.size() ||
            strides.size() + 1 != dims.size()) {
          throw nb::value_error(
              "a tensor map has 1 to 5 dims, as many box sizes, and one stride less.");
        }
        map.rank = static_cast<int>(dims.size());
        map.global_address = address;
        for (size_t i = 0; i < dims.size(); ++i) {
          map.dims[i] = dims[i];
          map.box[i] = box[i];
          if (i > 0) map.strides[i] = strides[i - 1];
        }
        if (swizzle != 0 && swizzle != 32 && swizzle != 64 && swizzle != 128) {
          throw nb::value_error("the swizzle of a tensor map is 0, 32, 64 or 128 bytes.");
        }
        map.swizzle = swizzle == 128  ? TensorMapSwizzle::k128Bytes
                      : swizzle == 64 ? TensorMapSwizzle::k64Bytes
                      : swizzle == 32 ? TensorMapSwizzle::k32Bytes
                                      : TensorMapSwizzle::kNone;
        const std::string fault = Validate(map);
        if (!fault.empty()) throw nb::value_error(fault.c_str());
        const auto bytes = EncodeTensorMap(map);
        return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      },
      nb::arg("address"),
      nb::arg("dtype"),
      nb::arg("dims"),
      nb::arg("strides"),
      nb::arg("box"),
      nb::arg("swizzle"),
      "The 128 bytes of a tensor map, in the emulator's own layout. Raises ValueError for what the "
      "driver refuses.");

  m.def("emulator_load",
        &Load,
        nb::arg("text"),
        nb::arg("kernel") = "",
        "Parses PTX and decodes one kernel of it. Raises PtxError, with the line, for what is not "
        "supported.");
  m.def(
      "emulator_run",
      [](std::shared_ptr<Program> program,
         std::array<uint32_t, 3> grid,
         std::array<uint32_t, 3> block,
         std::array<uint32_t, 3> cluster,
         uint32_t dynamic_shared_bytes,
         nb::bytes parameters,
         const std::vector<std::tuple<std::string, uint64_t, Bytes>>& outputs,
         const std::vector<std::tuple<std::string, uint64_t, ReadOnlyBytes>>& inputs,
         uint64_t seed,
         bool strict,
         bool check_races,
         uint32_t sm_count,
         uint64_t max_instructions,
         bool trace,
         uint64_t max_trace_events,
         nb::object progress) {
        Launch launch;
        launch.program = program;
        launch.grid = grid;
        launch.block = block;
        launch.cluster = cluster;
        launch.dynamic_shared_bytes = dynamic_shared_bytes;
        launch.parameters.assign(parameters.c_str(), parameters.c_str() + parameters.size());
        for (const auto& [name, address, bytes] : outputs) {
          launch.buffers.push_back({name, bytes.data(), bytes.size(), true, address});
        }
        for (const auto& [name, address, bytes] : inputs) {
          launch.buffers.push_back(
              {name, const_cast<uint8_t*>(bytes.data()), bytes.size(), false, address});
        }
        Options options;
        options.seed = seed;
        options.strict = strict;
        options.check_races = check_races;
        options.sm_count = sm_count;
        options.max_instructions = max_instructions;
        options.trace = trace;
        options.max_trace_events = max_trace_events;
        options.progress = [&progress](uint64_t done, uint64_t total) {
          nb::gil_scoped_acquire acquire;
          if (PyErr_CheckSignals() != 0) return false;
          if (progress.is_none() || done == UINT64_MAX) return true;
          PyObject* answer = PyObject_CallFunction(progress.ptr(),
                                                   "KK",
                                                   static_cast<unsigned long long>(done),
                                                   static_cast<unsigned long long>(total));
          Py_XDECREF(answer);
          return answer != nullptr;
        };
        Result result;
        {
          nb::gil_scoped_release release;
          Machine machine(std::move(launch), std::move(options));
          result.reports = machine.Run();
          result.instructions = machine.instructions_executed();
          result.trace = machine.trace();
        }
        if (PyErr_Occurred()) throw nb::python_error();
        return result;
      },
      nb::arg("program"),
      nb::kw_only(),
      nb::arg("grid"),
      nb::arg("block"),
      nb::arg("cluster"),
      nb::arg("dynamic_shared_bytes"),
      nb::arg("parameters"),
      nb::arg("outputs"),
      nb::arg("inputs"),
      nb::arg("seed"),
      nb::arg("strict"),
      nb::arg("check_races"),
      nb::arg("sm_count"),
      nb::arg("max_instructions"),
      nb::arg("trace"),
      nb::arg("max_trace_events"),
      nb::arg("progress").none(),
      "Runs a launch to its end, or to the first fatal report.");
}

}  // namespace jax_fa4::emulator
