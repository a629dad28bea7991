#include "csrc/emulator/machine.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "csrc/emulator/numerics.h"
#include "csrc/emulator/tensor_map.h"

namespace jax_fa4::emulator {
namespace {

constexpr uint32_t kWarpsOfCta(uint32_t threads) { return (threads + kLanes - 1) / kLanes; }

// How often all waiters may time out in a row, nothing else having happened, before that is a
// deadlock.
constexpr int kTimeoutRounds = 4;

constexpr uint64_t kInstructionsBetweenPolls = 200000;

// After how many instructions without any change of memory or barriers it is looked for warps that
// spin for good, and how many instructions a turn of such a loop may have.
constexpr uint64_t kPatience = 1 << 20;
constexpr int kMaxTurn = 1 << 14;
// How many backward branches a group of lanes takes before others of its warp have a turn.
constexpr int kFairTurn = 1 << 10;

// What the clusters that are resident at once may take, and one alone. More of them are resident
// only if they are small, which differs from a GPU only for kernels that need all their CTAs to be.
constexpr uint64_t kResidentBytes = UINT64_C(1) << 30;

constexpr uint64_t kMaxSharedBytes = 232448;       // 227 KB, of sm_90 and sm_100
constexpr uint64_t kMaxVariableBytes = 256 << 20;  // of a module, in global or constant memory
constexpr uint64_t kGlobalEnd = Machine::kSharedWindow;

const char* RoleOf(bool write) { return write ? "this access writes it" : "this access reads it"; }
const char* EarlierRoleOf(bool write) {
  return write ? "the earlier one writes it" : "the earlier one reads it";
}

std::string Sizes(const std::array<uint32_t, 3>& sizes) {
  return "(" + std::to_string(sizes[0]) + ", " + std::to_string(sizes[1]) + ", " +
         std::to_string(sizes[2]) + ")";
}

uint64_t Product(const std::array<uint32_t, 3>& sizes) {
  return uint64_t{sizes[0]} * sizes[1] * sizes[2];
}

uint64_t DynamicStart(const Program& program) {
  const uint64_t alignment = program.dynamic_shared_alignment;
  return (program.static_shared_bytes + alignment - 1) / alignment * alignment;
}

void CheckSizes(const char* field,
                const std::array<uint32_t, 3>& sizes,
                const std::array<uint32_t, 3>& most,
                uint64_t product) {
  for (int axis = 0; axis < 3; ++axis) {
    if (sizes[axis] >= 1 && sizes[axis] <= most[axis]) continue;
    throw std::invalid_argument(std::string(field) + " is " + Sizes(sizes) +
                                ", but its sizes may be from 1 to " + Sizes(most) + ".");
  }
  if (Product(sizes) <= product) return;
  throw std::invalid_argument(std::string(field) + " is " + Sizes(sizes) + ", that is " +
                              std::to_string(Product(sizes)) + " in all, but at most " +
                              std::to_string(product) + " are allowed.");
}

// What the driver would refuse, and what the machine has no memory for.
void CheckLaunch(const Launch& launch, const Options& options) {
  if (launch.program == nullptr) throw std::invalid_argument("program is missing.");
  const Program& program = *launch.program;
  const ptx::Kernel& kernel = *program.kernel;
  CheckSizes("grid", launch.grid, {INT32_MAX, 65535, 65535}, UINT64_MAX);
  CheckSizes("block", launch.block, {1024, 1024, 64}, 1024);
  CheckSizes("cluster", launch.cluster, {16, 16, 16}, 16);
  for (int axis = 0; axis < 3; ++axis) {
    if (launch.grid[axis] % launch.cluster[axis] == 0) continue;
    throw std::invalid_argument("grid is " + Sizes(launch.grid) +
                                ", which is not a multiple of cluster " + Sizes(launch.cluster) +
                                ".");
  }
  if (kernel.required_block[0] != 0 && launch.block != kernel.required_block) {
    throw std::invalid_argument("block is " + Sizes(launch.block) +
                                ", but the kernel has .reqntid " + Sizes(kernel.required_block) +
                                ".");
  }
  if (kernel.maximal_block[0] != 0 && Product(launch.block) > Product(kernel.maximal_block)) {
    throw std::invalid_argument("block is " + Sizes(launch.block) +
                                ", but the kernel has .maxntid " + Sizes(kernel.maximal_block) +
                                ".");
  }
  if (kernel.required_cluster[0] != 0 && launch.cluster != kernel.required_cluster) {
    throw std::invalid_argument("cluster is " + Sizes(launch.cluster) +
                                ", but the kernel has .reqnctapercluster " +
                                Sizes(kernel.required_cluster) + ".");
  }
  if (DynamicStart(program) + launch.dynamic_shared_bytes > kMaxSharedBytes) {
    throw std::invalid_argument("dynamic_shared_bytes is " +
                                std::to_string(launch.dynamic_shared_bytes) + ", with " +
                                std::to_string(DynamicStart(program)) +
                                " bytes before it for static variables, but a CTA has " +
                                std::to_string(kMaxSharedBytes) + " bytes of shared memory.");
  }
  if (launch.parameters.size() != kernel.parameter_bytes) {
    throw std::invalid_argument("parameters has " + std::to_string(launch.parameters.size()) +
                                " bytes, but the kernel takes " +
                                std::to_string(kernel.parameter_bytes) + ".");
  }
  if (options.sm_count < 1 || options.sm_count > 65536) {
    throw std::invalid_argument("sm_count is " + std::to_string(options.sm_count) +
                                ", but may be from 1 to 65536.");
  }
  std::vector<const Buffer*> buffers;
  for (const Buffer& buffer : launch.buffers) {
    if (buffer.size == 0) continue;
    if (buffer.data == nullptr) {
      throw std::invalid_argument("buffer \"" + buffer.name + "\" of " +
                                  std::to_string(buffer.size) + " bytes has no data.");
    }
    if (buffer.address == 0 || buffer.address >= kGlobalEnd ||
        buffer.size > kGlobalEnd - buffer.address) {
      throw std::invalid_argument("buffer \"" + buffer.name + "\" of " +
                                  std::to_string(buffer.size) + " bytes is at address " +
                                  std::to_string(buffer.address) +
                                  ", but must lie between 1 and 2^56.");
    }
    buffers.push_back(&buffer);
  }
  std::sort(buffers.begin(), buffers.end(), [](const Buffer* a, const Buffer* b) {
    return a->address < b->address;
  });
  for (size_t i = 1; i < buffers.size(); ++i) {
    if (buffers[i]->address - buffers[i - 1]->address >= buffers[i - 1]->size) continue;
    throw std::invalid_argument("buffers \"" + buffers[i - 1]->name + "\" and \"" +
                                buffers[i]->name + "\" overlap in the kernel's address space.");
  }
}

}  // namespace

Machine::Machine(Launch launch, Options options)
    : launch_(std::move(launch)), options_(std::move(options)), random_(options_.seed) {
  CheckLaunch(launch_, options_);
  PlaceVariables();
  const uint64_t bytes = BytesOfCluster();
  if (bytes > kResidentBytes) {
    throw std::invalid_argument("block " + Sizes(launch_.block) + " and cluster " +
                                Sizes(launch_.cluster) + " need " + std::to_string(bytes >> 20) +
                                " MiB for registers, local and shared "
                                "memory, more than the " +
                                std::to_string(kResidentBytes >> 20) + " that the emulator takes.");
  }
  capacity_ = std::max<uint64_t>(
      1, std::min<uint64_t>(options_.sm_count / Product(launch_.cluster), kResidentBytes / bytes));
  if (options_.trace) trace_ = std::make_shared<Trace>(launch_.program, options_.max_trace_events);
  cluster_count_ = 1;
  for (int axis = 0; axis < 3; ++axis) cluster_count_ *= launch_.grid[axis] / launch_.cluster[axis];
  for (const Buffer& buffer : launch_.buffers) {
    const bool checked = options_.check_races && buffer.writable;
    global_.push_back(checked ? std::make_unique<GlobalMemory>(
                                    GlobalShadow(buffer.size, SlotsOfCta()), Locations())
                              : nullptr);
  }
}

Machine::~Machine() = default;

// ---- Launching

// Gives the module's variables memory, with the values that they have when the module is loaded.
void Machine::PlaceVariables() {
  const auto place = [&](ptx::Space space,
                         const char* name,
                         bool writable,
                         uint64_t address,
                         std::vector<uint8_t>& bytes) {
    uint64_t size = 0;
    for (const ptx::Variable& one : launch_.program->module->variables) {
      if (one.space == space && !one.is_extern)
        size = std::max(size, uint64_t{one.offset} + one.size);
    }
    if (size == 0) return;
    if (size > kMaxVariableBytes) {
      throw std::invalid_argument("the " + std::string(name) + " have " + std::to_string(size) +
                                  " bytes, more than 256 MiB.");
    }
    bytes.assign(size, 0);
    for (const ptx::Variable& one : launch_.program->module->variables) {
      if (one.space != space || one.is_extern || one.initial.empty()) continue;
      std::copy(one.initial.begin(), one.initial.end(), bytes.begin() + one.offset);
    }
    launch_.buffers.push_back({name, bytes.data(), size, writable, address});
  };
  place(ptx::Space::kGlobal,
        "module's global variables",
        true,
        kGlobalVariableBase,
        global_variables_);
  place(ptx::Space::kConst, "module's constants", false, kConstWindow, const_variables_);
}

// About what one cluster takes.
uint64_t Machine::BytesOfCluster() const {
  const Program& program = *launch_.program;
  const uint64_t warps = kWarpsOfCta(static_cast<uint32_t>(Product(launch_.block)));
  const uint64_t ranks = Product(launch_.cluster);
  const uint64_t slots = uint64_t{SlotsOfCta()} * ranks;
  const uint64_t shared = DynamicStart(program) + launch_.dynamic_shared_bytes + 16;
  const uint64_t shadow = options_.check_races ? shared / 4 * Shadow::kCellBytes : 0;
  const uint64_t groups = kLanes * (sizeof(BulkGroup) + 96);
  const uint64_t registers = uint64_t{program.register_rows} * kRowWords * 4 +
                             program.predicates * 4 +
                             program.tracked.size() * sizeof(WarpgroupRegister);
  const uint64_t local = uint64_t{program.local_bytes} * kLanes;
  const uint64_t warp = sizeof(Warp) + groups + registers + local + 4 * slots * sizeof(uint32_t);
  return ranks * (sizeof(Cta) + shared + shadow + warps * warp);
}

std::unique_ptr<Cluster> Machine::NewCluster(uint64_t number) {
  const Program& program = *launch_.program;
  const uint32_t threads = launch_.block[0] * launch_.block[1] * launch_.block[2];
  const uint32_t warps = kWarpsOfCta(threads);
  const uint32_t ranks = launch_.cluster[0] * launch_.cluster[1] * launch_.cluster[2];
  const uint32_t slots_of_cta = SlotsOfCta();
  auto cluster = std::make_unique<Cluster>();
  cluster->number = static_cast<uint32_t>(number);
  cluster->times.assign(slots_of_cta * ranks, 1);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    cta->rank = rank;
    cta->index = IndexOf(cluster->number, rank);
    cta->smid = static_cast<uint32_t>((number * ranks + rank) % options_.sm_count);
    const auto start = static_cast<uint32_t>(DynamicStart(program));
    const uint32_t bytes = (start + launch_.dynamic_shared_bytes + 15) / 16 * 16;
    cta->shared.assign(bytes, 0xCD);  // what a kernel must not rely on
    cta->shared_shadow = Shadow(options_.check_races ? bytes / 4 : 0, slots_of_cta);
    cta->first_slot = static_cast<Slot>(rank * slots_of_cta);
    for (int i = 0; i < kCopySlots; ++i) {
      cta->free_copy_slots.push_back(
          static_cast<Slot>(cta->first_slot + warps * kWarpSlots + 1 + i));
    }
    // Of the 64 K registers of an SM a CTA has what its threads begin with, in units of 8 a thread.
    const uint32_t limit =
        program.kernel->maximal_registers != 0 ? program.kernel->maximal_registers : 255;
    const uint32_t share = 65536 / (warps * kLanes) / 8 * 8;
    const uint32_t at_launch = std::min(limit, share);
    cta->live_warps = warps;
    // In half of the CTAs some warps lag far behind others.
    const bool some_lag = random_.Below(2) == 1;
    for (uint32_t w = 0; w < warps; ++w) {
      auto warp = std::make_unique<Warp>();
      warp->cta = cta.get();
      warp->index = static_cast<int>(w);
      const uint32_t lanes = std::min<uint32_t>(threads - w * kLanes, kLanes);
      warp->live = lanes == kLanes ? ~0u : (1u << lanes) - 1;
      warp->groups.push_back(Group{.mask = warp->live, .pc = 0});
      warp->registers.assign(size_t{program.register_rows} * kRowWords, 0);
      warp->predicates.assign(program.predicates, 0);
      warp->local = Zeros<uint8_t>(size_t{program.local_bytes} * kLanes);
      warp->warpgroup_registers.resize(program.tracked.size());
      warp->register_count = at_launch;
      if (some_lag) warp->pace = kFullPace >> 2 * random_.Below(3);
      Knowledge all{.mask = warp->live,
                    .slot = static_cast<Slot>(cta->first_slot + w * kWarpSlots),
                    .clock = VectorClock(cluster->times.size())};
      all.clock.SetSeen(all.slot, 1);
      warp->knowledge.push_back(std::move(all));
      for (auto& groups : warp->bulk_groups) groups.push_back(std::make_shared<BulkGroup>());
      FillSpecial(*warp);
      cta->warps.push_back(std::move(warp));
    }
    cluster->ctas.push_back(std::move(cta));
  }
  return cluster;
}

uint32_t Machine::SlotsOfCta() const {
  return kWarpsOfCta(static_cast<uint32_t>(Product(launch_.block))) * kWarpSlots + 1 + kCopySlots;
}

// Where a CTA of a cluster stands in the grid.
std::array<uint32_t, 3> Machine::IndexOf(uint32_t cluster, uint32_t rank) const {
  std::array<uint32_t, 3> index;
  for (int axis = 0; axis < 3; ++axis) {
    const uint32_t clusters = launch_.grid[axis] / launch_.cluster[axis];
    index[axis] = cluster % clusters * launch_.cluster[axis] + rank % launch_.cluster[axis];
    cluster /= clusters;
    rank /= launch_.cluster[axis];
  }
  return index;
}

void Machine::FillSpecial(Warp& warp) {
  const Program& program = *launch_.program;
  const Cta& cta = *warp.cta;
  const uint32_t threads = launch_.block[0] * launch_.block[1] * launch_.block[2];
  const std::array<uint32_t, 3> clusters = {launch_.grid[0] / launch_.cluster[0],
                                            launch_.grid[1] / launch_.cluster[1],
                                            launch_.grid[2] / launch_.cluster[2]};
  const auto value = [&](std::string_view name, uint32_t lane) -> uint64_t {
    const uint32_t thread = warp.index * kLanes + lane;
    const int axis = name.ends_with(".y") ? 1 : name.ends_with(".z") ? 2 : 0;
    const std::string_view base =
        name.size() > 2 && name[name.size() - 2] == '.' ? name.substr(0, name.size() - 2) : name;
    if (base == "%tid") {
      const uint32_t all[3] = {thread % launch_.block[0],
                               thread / launch_.block[0] % launch_.block[1],
                               thread / launch_.block[0] / launch_.block[1]};
      return all[axis];
    }
    if (base == "%ntid") return launch_.block[axis];
    if (base == "%ctaid") return cta.index[axis];
    if (base == "%nctaid") return launch_.grid[axis];
    if (base == "%laneid") return lane;
    if (base == "%warpid") return static_cast<uint64_t>(warp.index);
    if (base == "%nwarpid") return kWarpsOfCta(threads);
    if (base == "%smid") return cta.smid;
    if (base == "%nsmid") return options_.sm_count;
    if (base == "%lanemask_eq") return 1u << lane;
    if (base == "%lanemask_lt") return (1u << lane) - 1;
    if (base == "%lanemask_le") return (2ull << lane) - 1;
    if (base == "%lanemask_gt") return static_cast<uint32_t>(~((2ull << lane) - 1));
    if (base == "%lanemask_ge") return static_cast<uint32_t>(~((1ull << lane) - 1));
    if (base == "%clusterid") return cta.index[axis] / launch_.cluster[axis];
    if (base == "%nclusterid") return clusters[axis];
    if (base == "%cluster_ctaid") return cta.index[axis] % launch_.cluster[axis];
    if (base == "%cluster_nctaid") return launch_.cluster[axis];
    if (base == "%cluster_ctarank") return cta.rank;
    if (base == "%cluster_nctarank")
      return uint64_t{launch_.cluster[0]} * launch_.cluster[1] * launch_.cluster[2];
    if (base == "%is_explicit_cluster") return launch_.cluster != std::array<uint32_t, 3>{1, 1, 1};
    if (base == "%dynamic_smem_size") return launch_.dynamic_shared_bytes;
    if (base == "%total_smem_size") return cta.shared.size();
    return 0;  // clocks are set when they are read, %gridid is 0
  };
  for (size_t i = 0; i < std::size(ptx::kSpecialRegisters); ++i) {
    if (program.special[i] == Program::kUnused) continue;
    const std::string_view name = ptx::kSpecialRegisters[i];
    const bool wide = name == "%clock64" || name == "%globaltimer" || name == "%gridid";
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t number = value(name, lane);
      if (wide) {
        std::memcpy(&warp.registers[program.special[i] + 2 * lane], &number, 8);
      } else {
        warp.registers[program.special[i] + lane] = static_cast<uint32_t>(number);
      }
    }
  }
}

void Machine::LaunchClusters() {
  while (clusters_.size() < capacity_ && next_cluster_ < cluster_count_) {
    clusters_.push_back(NewCluster(next_cluster_++));
    if (trace_ != nullptr) trace_->Launch(*clusters_.back());
  }
}

// ---- Scheduling

const std::vector<Report>& Machine::Run() {
  const DefaultFloatEnvironment environment;
  int timeouts = 0;
  while (!stopped_) {
    LaunchClusters();
    if (clusters_.empty()) break;
    if (Step()) {
      timeouts = 0;
      continue;
    }
    // Nobody can go on. Waits with a time limit end without success; whoever then only waits again,
    // waits for good.
    const uint64_t before = wakes_;
    if (timeouts >= kTimeoutRounds || !TimeOut()) {
      ReportStanding(
          Report::Kind::kDeadlock,
          "every warp that has not ended waits, and nothing is under way that could end a wait.");
      break;
    }
    ++timeouts;
    while (!stopped_ && Step()) {
    }
    if (wakes_ != before) timeouts = 0;
  }
  if (trace_ != nullptr) trace_->EndRun();
  return reports_;
}

// Lets one agent go on for a while. False if none can.
bool Machine::Step() {
  if (executed_ > options_.max_instructions) {
    ReportStanding(
        Report::Kind::kLimit,
        "the run was ended after " + std::to_string(executed_) + " instructions of warps.");
    return true;
  }
  if (executed_ - last_change_ > kPatience && SpinsForGood()) {
    ReportStanding(
        Report::Kind::kDeadlock,
        "every warp that has not ended waits, or polls what nothing can change any more.");
    return true;
  }
  // Lets a signal end a run whose CTAs do not end.
  if (executed_ >= next_poll_ && options_.progress) {
    next_poll_ = executed_ + kInstructionsBetweenPolls;
    if (!options_.progress(UINT64_MAX, 0)) {
      stopped_ = true;
      return true;
    }
  }
  const auto clusters = static_cast<uint32_t>(clusters_.size());
  const uint32_t first = random_.Below(clusters);
  for (uint32_t i = 0; i < clusters; ++i) {
    const uint32_t at = (first + i) % clusters;
    Cluster& cluster = *clusters_[at];
    const auto ranks = static_cast<uint32_t>(cluster.ctas.size());
    const uint32_t first_rank = random_.Below(ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      Cta& cta = *cluster.ctas[(first_rank + r) % ranks];
      if (!StepCta(cta)) continue;
      if (cta.live_warps == 0 && Retired(cluster)) {
        for (const auto& one : cluster.ctas) CheckExit(*one);
        done_ += ranks;
        if (options_.progress && !options_.progress(done_, cluster_count_ * ranks)) stopped_ = true;
        clusters_.erase(clusters_.begin() + at);
      }
      return true;
    }
  }
  return false;
}

bool Machine::StepCta(Cta& cta) {
  const auto warps = static_cast<uint32_t>(cta.warps.size());
  // The two asynchronous units count as agents beside the warps.
  const uint32_t agents = warps + 2;
  // Agents that cannot go on leave their turns to all others alike: mostly so many draws find one
  // that can. Else each has its turn.
  const uint32_t draws = 4 * agents;
  for (uint32_t i = 0; i < draws + agents; ++i) {
    const bool drawn = i < draws;
    const uint32_t agent = drawn ? random_.Below(agents) : i - draws;
    if (agent < warps) {
      Warp& warp = *cta.warps[agent];
      if (!warp.ready || (drawn && random_.Below(kFullPace) >= warp.pace)) continue;
      if (RunWarp(warp, 1 + static_cast<int>(random_.Below(64)))) return true;
    } else if (agent == warps) {
      if (!cta.tensor_pipe.empty()) {
        RunStep(cta, *cta.tensor_pipe.front());
        if (cta.tensor_pipe.front()->steps <= 0) cta.tensor_pipe.pop_front();
        return true;
      }
    } else if (!cta.copies.empty()) {
      const uint32_t which = random_.Below(static_cast<uint32_t>(cta.copies.size()));
      RunStep(cta, *cta.copies[which]);
      if (cta.copies[which]->steps <= 0) {
        ReturnCopySlot(cta, cta.copies[which]->slot);
        std::swap(cta.copies[which], cta.copies.back());
        cta.copies.pop_back();
      }
      return true;
    }
  }
  return false;
}

void Machine::RunStep(Cta& cta, Operation& operation) {
  --operation.steps;
  last_change_ = executed_;
  if (trace_ != nullptr) {
    trace_->Execute(operation);
  } else {
    operation.run(operation);
  }
  Wake(cta);
}

// The unblocked group of lanes to go on, or the number of groups if there is none: the one with the
// lowest program counter, so that lanes come together again. But it may poll for what another group
// of the warp is to do, as at a spin lock, and that is promised to come: so if it loops for long,
// another one has a turn, which is as long.
size_t Machine::ChooseGroup(Warp& warp) {
  const auto& groups = warp.groups;
  size_t lowest = groups.size();
  size_t turn = groups.size();
  uint32_t others = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].blocked) continue;
    if (warp.turn_lane >= 0 && groups[i].mask >> warp.turn_lane & 1) turn = i;
    if (lowest == groups.size()) {
      lowest = i;
      continue;
    }
    ++others;
    if (groups[i].pc < groups[lowest].pc) lowest = i;
  }
  if (turn == groups.size()) warp.turn_lane = -1;
  if (others == 0) {
    warp.turn = 0;
    warp.turn_lane = -1;
    return lowest;
  }
  if (warp.turn < kFairTurn) return warp.turn_lane >= 0 ? turn : lowest;
  warp.turn = 0;
  if (warp.turn_lane >= 0) {
    warp.turn_lane = -1;
    return lowest;
  }
  uint32_t skip = random_.Below(others);
  for (size_t i = 0;; ++i) {
    if (groups[i].blocked || i == lowest || skip-- != 0) continue;
    warp.turn_lane = std::countr_zero(groups[i].mask);
    return i;
  }
}

// Runs up to `budget` instructions. False if every group of the warp is blocked.
bool Machine::RunWarp(Warp& warp, int budget) {
  const Program& program = *launch_.program;
  bool ran = false;
  while (budget > 0 && !stopped_) {
    // A group goes on until it reaches another one's place.
    const size_t chosen = ChooseGroup(warp);
    int32_t limit = INT32_MAX;
    if (chosen == warp.groups.size()) {
      warp.ready = false;
      return ran;
    }
    for (size_t i = 0; i < warp.groups.size(); ++i) {
      if (i != chosen && warp.groups[i].pc > warp.groups[chosen].pc)
        limit = std::min(limit, warp.groups[i].pc);
    }
    Group* group = &warp.groups[chosen];
    Context context{*this,
                    *warp.cta,
                    warp,
                    *group,
                    0,
                    warp.registers.data(),
                    program.constants.data(),
                    warp.predicates.data()};
    bool regroup = false;
    while (budget-- > 0 && !regroup) {
      const Inst& inst = program.instructions[group->pc];
      uint32_t mask = group->mask;
      if (inst.guard) mask &= context.Predicate(inst.guard);
      if (mask == 0) {
        ran = true;
        ++group->pc;
        regroup = group->pc >= limit;
        continue;
      }
      ++executed_;
      context.mask = mask;
      if (!warp.pending_rows.empty()) CheckPending(context, inst);
      if (inst.access_count != 0) CheckWarpgroupRegisters(context, inst);
      const Outcome outcome =
          trace_ != nullptr ? trace_->Execute(context, inst) : inst.execute(context, inst);
      // What blocks has had no effect, but that it may have arrived.
      if (!inst.is_pure && (outcome != Outcome::kBlocked || group->arrived))
        last_change_ = executed_;
      switch (outcome) {
        case Outcome::kNext:
          ran = true;
          ++group->pc;
          regroup = group->pc >= limit;
          break;
        case Outcome::kMoved:
          ran = true;
          regroup = true;
          if (warp.groups.size() > 1 && inst.target <= &inst - program.instructions.data())
            ++warp.turn;
          break;
        case Outcome::kBlocked:
          if (mask != group->mask) {
            // The lanes whose guard is false go on.
            Group others = *group;
            others.mask &= ~mask;
            ++others.pc;
            others.arrived = false;
            others.wait = -1;
            group->mask = mask;
            group->blocked = true;
            warp.groups.push_back(others);
            ran = true;
          } else {
            group->blocked = true;
          }
          regroup = true;
          break;
      }
      if (stopped_) return true;
    }
    MergeGroups(warp);
    if (warp.live == 0) {
      FinishWarp(warp);
      return true;
    }
  }
  return ran;
}

void Machine::MergeGroups(Warp& warp) {
  auto& groups = warp.groups;
  std::erase_if(groups, [](const Group& group) { return group.mask == 0; });
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = groups.size() - 1; j > i; --j) {
      if (groups[i].pc != groups[j].pc || groups[i].arrived || groups[j].arrived) continue;
      // Where lanes wait for each other to converge, they have a reason to try again.
      if (trace_ != nullptr) trace_->Merge(groups[i], groups[j]);
      groups[i].mask |= groups[j].mask;
      groups[i].blocked = false;
      groups.erase(groups.begin() + static_cast<ptrdiff_t>(j));
    }
  }
}

void Machine::FinishWarp(Warp& warp) {
  Cta& cta = *warp.cta;
  warp.ready = false;
  --cta.live_warps;
  if (trace_ != nullptr) trace_->EndWarp(warp);
  if (options_.strict) {
    CheckFinished(warp);
    cta.at_exit.Join(KnowledgeOf(warp, ~0u));
  }
  Wake(cta);
}

bool Machine::Retired(const Cluster& cluster) const {
  for (const auto& cta : cluster.ctas) {
    if (cta->live_warps > 0 || !cta->tensor_pipe.empty() || !cta->copies.empty()) return false;
  }
  return true;
}

void Machine::Wake(Cta& cta) {
  ++wakes_;
  for (const auto& one : cta.cluster->ctas) {
    for (const auto& warp : one->warps) {
      if (warp->live == 0) continue;
      warp->ready = true;
      for (Group& group : warp->groups) group.blocked = false;
    }
  }
}

bool Machine::TimeOut() {
  bool any = false;
  for (const auto& cluster : clusters_) {
    for (const auto& cta : cluster->ctas) {
      for (const auto& warp : cta->warps) {
        for (Group& group : warp->groups) {
          const Inst& inst = launch_.program->instructions[group.pc];
          if (!inst.may_time_out) continue;
          group.blocked = false;
          group.timed_out = true;
          if (trace_ != nullptr) trace_->TimeOut(group);
          warp->ready = true;
          any = true;
        }
      }
    }
  }
  return any;
}

// Whether nothing can change any more. Where only pure instructions have been executed for long,
// every group of lanes is run for itself, which the scheduler might do too: if each waits, or comes
// to a state of its registers in which it was before, and nothing but pure instructions was
// executed meanwhile, then each will do the same for ever, in whatever order they run: what a pure
// instruction does depends on the lanes that execute it and on memory, which stays as it is.
bool Machine::SpinsForGood() {
  if (quiet_since_ != last_change_) {
    quiet_since_ = last_change_;
    patience_ = kPatience;
  }
  if (executed_ - last_change_ <= patience_) return false;
  patience_ *= 2;
  for (const auto& cluster : clusters_) {
    for (const auto& cta : cluster->ctas) {
      if (!cta->copies.empty() || !cta->tensor_pipe.empty()) return false;
    }
  }
  for (const auto& cluster : clusters_) {
    for (const auto& cta : cluster->ctas) {
      for (const auto& warp : cta->warps) {
        if (warp->live != 0 && !IsStuck(*warp)) return false;
      }
    }
  }
  return true;
}

bool Machine::IsStuck(Warp& warp) {
  const auto waits = [&](const Group& group) {
    return group.blocked && !launch_.program->instructions[group.pc].may_time_out;
  };
  uint32_t waiting = 0;
  for (const Group& group : warp.groups) waiting |= waits(group) ? group.mask : 0;
  bool stuck = true;
  for (uint32_t rest = warp.live & ~waiting; stuck && rest != 0;) {
    const int lane = std::countr_zero(rest);
    stuck = IsStuck(warp, lane);
    for (const Group& group : warp.groups) {
      if (group.mask >> lane & 1) rest &= ~group.mask;
    }
  }
  for (Group& group : warp.groups) group.blocked = (group.mask & ~waiting) == 0;
  warp.ready = true;
  return stuck;
}

// Runs the group of a lane, and leaves it at what it polls.
bool Machine::IsStuck(Warp& warp, int lane) {
  const auto group = [&]() -> Group& {
    size_t i = 0;
    while (!(warp.groups[i].mask >> lane & 1)) ++i;
    return warp.groups[i];
  };
  const auto is_poll = [&] {
    return launch_.program->instructions[group().pc].describe_wait != nullptr;
  };
  for (Group& one : warp.groups) one.blocked = true;
  int32_t pc = -1;
  uint32_t mask = 0;
  std::vector<uint32_t> registers, predicates;
  bool recurs = false;
  // Brent's way to find a cycle: the state to come back to is taken anew after 1, 2, 4, ... steps.
  for (int step = 0, power = 1, since = 0; step < kMaxTurn; ++step) {
    if (recurs && is_poll()) return true;
    const Inst& inst = launch_.program->instructions[group().pc];
    if (group().blocked && step > 0 && !inst.may_time_out) return true;
    group().blocked = false;
    group().timed_out = inst.may_time_out;
    if (since == 0) {
      pc = group().pc;
      mask = group().mask;
      registers = warp.registers;
      predicates = warp.predicates;
    }
    RunWarp(warp, 1);
    if (stopped_ || last_change_ != quiet_since_) return false;
    // Lanes that go apart may meet again in more ways than one.
    int running = 0;
    for (const Group& one : warp.groups) running += !one.blocked;
    if (running > 1) return false;
    recurs = recurs || (group().pc == pc && group().mask == mask && warp.predicates == predicates &&
                        warp.registers == registers);
    if (++since == power) {
      since = 0;
      power *= 2;
    }
  }
  return recurs;
}

// ---- Knowledge

uint32_t& Machine::Time(Cta& cta, Slot slot) { return cta.cluster->times[slot]; }

Knowledge& Machine::KnowledgeOfLane(Warp& warp, int lane) {
  for (Knowledge& one : warp.knowledge) {
    if (one.mask >> lane & 1) return one;
  }
  return warp.knowledge.front();
}

VectorClock Machine::KnowledgeOf(Warp& warp, uint32_t mask) {
  VectorClock clock;
  for (const Knowledge& one : warp.knowledge) {
    if (one.mask & mask) clock.Merge(one.clock);
  }
  return clock;
}

void Machine::Learn(Warp& warp, uint32_t mask, const VectorClock& clock) {
  if (clock.empty()) return;
  Split(warp, mask);
  for (Knowledge& one : warp.knowledge) {
    if (one.mask & mask) one.clock.Join(clock);
  }
}

// Makes every Knowledge lie inside or outside of `mask`.
void Machine::Split(Warp& warp, uint32_t mask) {
  for (size_t i = 0; i < warp.knowledge.size(); ++i) {
    const uint32_t inside = warp.knowledge[i].mask & mask;
    if (inside == 0 || inside == warp.knowledge[i].mask) continue;
    if (warp.knowledge.size() == kKnowledgeSlots) {
      // No slot is left: the two smallest know the same from here on, which may hide a race between
      // them.
      Knowledge& a = warp.knowledge[0];
      Knowledge& b = warp.knowledge[1];
      a.clock.Merge(b.clock);
      a.mask |= b.mask;
      warp.knowledge.erase(warp.knowledge.begin() + 1);
      i = static_cast<size_t>(-1);
      continue;
    }
    Slot slot = 0;
    const auto first = static_cast<Slot>(warp.cta->first_slot + warp.index * kWarpSlots);
    for (int candidate = 0; candidate < kKnowledgeSlots; ++candidate) {
      slot = static_cast<Slot>(first + candidate);
      bool used = false;
      for (const Knowledge& one : warp.knowledge) used |= one.slot == slot;
      if (!used) break;
    }
    Knowledge apart = warp.knowledge[i];
    apart.mask = inside;
    apart.slot = slot;
    warp.knowledge[i].mask &= ~inside;
    // What both did so far stays known to both; what either does from now on is its own.
    Knowledge& rest = warp.knowledge[i];
    rest.clock.SetSeen(rest.slot, ++Time(*warp.cta, rest.slot));
    apart.clock.SetSeen(apart.slot, ++Time(*warp.cta, apart.slot));
    warp.knowledge.push_back(std::move(apart));
  }
}

void Machine::Advance(Warp& warp, uint32_t mask) {
  for (Knowledge& one : warp.knowledge) {
    if (one.mask & mask) one.clock.SetSeen(one.slot, ++Time(*warp.cta, one.slot));
  }
}

void Machine::LearnSlot(Warp& warp, uint32_t mask, Slot slot) {
  Retire(*warp.cta, slot, Time(*warp.cta, slot));
  Split(warp, mask);
  for (Knowledge& one : warp.knowledge) {
    if (one.mask & mask) one.clock.SetSeen(slot, Time(*warp.cta, slot));
  }
}

void Machine::Unify(Warp& warp, uint32_t mask) {
  Split(warp, mask);
  Knowledge* first = nullptr;
  for (Knowledge& one : warp.knowledge) {
    if (!(one.mask & mask)) continue;
    if (first == nullptr) {
      first = &one;
    } else {
      first->clock.Merge(one.clock);
      first->mask |= one.mask;
      one.mask = 0;
    }
  }
  std::erase_if(warp.knowledge, [](const Knowledge& one) { return one.mask == 0; });
}

// ---- Loads from tensor memory that nobody waited for

// In strict mode a register that a tcgen05.ld writes may be used only behind tcgen05.wait::ld.
// Compilers move copies of such registers above the wait, so a mov is no use: it hands the state
// on.
void Machine::CheckPending(Context& context, const Inst& inst) {
  const Program& program = *launch_.program;
  std::vector<uint64_t>& pending = context.warp.pending_rows;
  const auto rows = [](const Ref& ref) {
    return std::pair(ref.index / kRowWords, ref.bits > 64 ? 4 : ref.bits > 32 ? 2 : 1);
  };
  const auto test = [&](const Ref& ref) {
    if (ref.kind != Ref::Kind::kRegister) return false;
    const auto [first, count] = rows(ref);
    for (int i = 0; i < count; ++i) {
      if (pending[(first + i) / 64] >> ((first + i) % 64) & 1) return true;
    }
    return false;
  };
  const auto set = [&](const Ref& ref, bool value) {
    if (ref.kind != Ref::Kind::kRegister) return;
    const auto [first, count] = rows(ref);
    for (int i = 0; i < count; ++i) {
      uint64_t& word = pending[(first + i) / 64];
      const uint64_t bit = uint64_t{1} << ((first + i) % 64);
      word = value ? word | bit : word & ~bit;
    }
  };
  bool used = false;
  for (const Ref& ref : inst.source) used |= test(ref);
  for (uint32_t i = 0; i < inst.source_count; ++i)
    used |= test(program.refs[inst.first_source + i]);
  const bool is_move = program.kernel->statements[inst.statement].opcode.starts_with("mov.");
  if (used && !is_move) {
    if (options_.strict) {
      Misuse(context,
             std::countr_zero(context.mask),
             "a register that tcgen05.ld writes is used before tcgen05.wait::ld.",
             false);
    }
    const auto slot = static_cast<Slot>(context.cta.first_slot + context.warp.index * kWarpSlots +
                                        kTensorLoadSlot);
    LearnSlot(context.warp, context.mask, slot);
    for (const Ref& ref : inst.source) set(ref, false);
    for (uint32_t i = 0; i < inst.source_count; ++i)
      set(program.refs[inst.first_source + i], false);
  }
  for (const Ref& ref : inst.destination) set(ref, used && is_move);
  for (uint32_t i = 0; i < inst.destination_count; ++i) {
    set(program.refs[inst.first_destination + i], used && is_move);
  }
  for (const uint64_t word : pending) {
    if (word != 0) return;
  }
  pending.clear();
}

// ---- Memory

std::optional<Machine::SharedPlace> Machine::FindShared(Cta& cta, uint32_t address, uint32_t size) {
  const uint32_t rank = address >> 24;
  const uint32_t offset = address & 0xFFFFFF;
  if (rank >= cta.cluster->ctas.size()) return std::nullopt;
  Cta& owner = *cta.cluster->ctas[rank];
  if (offset > owner.shared.size() || size > owner.shared.size() - offset) return std::nullopt;
  return SharedPlace{&owner, offset};
}

uint8_t* Machine::FindGlobal(uint64_t address, uint64_t size, bool write, const Buffer** found) {
  for (const Buffer& buffer : launch_.buffers) {
    if (address < buffer.address || address - buffer.address > buffer.size ||
        size > buffer.size - (address - buffer.address)) {
      continue;
    }
    if (write && !buffer.writable) continue;
    if (found != nullptr) *found = &buffer;
    return buffer.data + (address - buffer.address);
  }
  return nullptr;
}

Access Machine::AccessOf(Context& context, int lane, Scope scope, bool write) {
  const Knowledge& known = KnowledgeOfLane(context.warp, lane);
  return {known.clock.seen(known.slot),
          known.slot,
          static_cast<uint8_t>(lane),
          false,
          context.group.pc,
          scope,
          write};
}

void Machine::AccessShared(
    Context& context, int lane, const SharedPlace& place, uint32_t size, bool write, Scope scope) {
  if (!options_.check_races) return;
  CheckShared(AccessOf(context, lane, scope, write),
              KnowledgeOfLane(context.warp, lane).clock,
              place,
              size,
              write);
}

// The address of an mbarrier among these bytes, or null.
const uint32_t* Machine::OverwrittenBarrier(const SharedPlace& place, uint32_t size) const {
  const Cta& cta = *place.cta;
  if (cta.first_barrier > cta.last_barrier || place.offset >= cta.last_barrier + 8 ||
      place.offset + size <= cta.first_barrier) {
    return nullptr;
  }
  if (size <= 32) {
    for (uint32_t at = place.offset / 8 * 8; at < place.offset + size; at += 8) {
      const auto found = cta.mbarriers.find(at);
      if (found != cta.mbarriers.end()) return &found->first;
    }
    return nullptr;
  }
  for (const auto& [at, barrier] : cta.mbarriers) {
    if (at + 8 > place.offset && at < place.offset + size) return &at;
  }
  return nullptr;
}

void Machine::CheckBarriers(Context& context, int lane, const SharedPlace& place, uint32_t size) {
  if (!options_.strict) return;
  const uint32_t* barrier = OverwrittenBarrier(place, size);
  if (barrier == nullptr) return;
  Misuse(context,
         lane,
         "a store overwrites the mbarrier at shared address " + std::to_string(*barrier) +
             ", which no mbarrier.inval has ended.",
         false);
}

void Machine::AccessShared(const Operation& operation,
                           const SharedPlace& place,
                           uint32_t size,
                           bool write) {
  if (write && options_.strict) {
    if (const uint32_t* barrier = OverwrittenBarrier(place, size)) {
      OperationFault(operation,
                     "an asynchronous copy overwrites the mbarrier at shared address " +
                         std::to_string(*barrier) + ", which no mbarrier.inval has ended.");
    }
  }
  if (!options_.check_races) return;
  CheckShared(operation.access(), operation.clock, place, size, write);
}

void Machine::CheckShared(const Access& access,
                          const VectorClock& clock,
                          const SharedPlace& place,
                          uint32_t size,
                          bool write) {
  const size_t first = place.offset / 4;
  const size_t count = (place.offset + size + 3) / 4 - first;
  if (write && access.scope == Scope::kNone) place.cta->locations.Forget(first, first + count);
  Shadow::Conflict conflict;
  const bool found =
      write ? place.cta->shared_shadow.Write(first, count, access, clock, {}, &conflict)
            : place.cta->shared_shadow.Read(first, count, access, clock, {}, &conflict);
  if (!found || !IsNewRace(access.instruction, conflict.earlier.instruction)) return;
  ReportClusterRace(*place.cta,
                    access,
                    RoleOf(write),
                    conflict.earlier,
                    EarlierRoleOf(conflict.earlier_is_write),
                    conflict.fault,
                    "shared memory [" + std::to_string(conflict.cell * 4) + ", " +
                        std::to_string(conflict.cell * 4 + 4) + ")");
}

// ---- Global memory

// What is noted of the buffer that holds an address.
GlobalMemory* Machine::FindChecked(uint64_t address, const Buffer** found) {
  for (size_t i = 0; i < global_.size(); ++i) {
    const Buffer& buffer = launch_.buffers[i];
    if (address < buffer.address || address - buffer.address >= buffer.size) continue;
    *found = &buffer;
    return global_[i].get();
  }
  return nullptr;
}

Locations* Machine::LocationsOf(uint64_t address, uint64_t* offset) {
  const Buffer* buffer = nullptr;
  GlobalMemory* memory = FindChecked(address, &buffer);
  if (memory == nullptr) return nullptr;
  *offset = address - buffer->address;
  return &memory->locations;
}

void Machine::AccessGlobal(
    Context& context, int lane, uint64_t address, uint64_t size, Use use, Scope scope) {
  if (!options_.check_races) return;
  CheckGlobal(AccessOf(context, lane, scope),
              KnowledgeOfLane(context.warp, lane).clock,
              context.cta,
              context.warp.index,
              address,
              size,
              use);
}

void Machine::AccessGlobal(
    const Operation& operation, uint64_t address, uint64_t size, Use use, Scope scope) {
  if (!options_.check_races) return;
  Access access = operation.access();
  access.scope = scope;
  CheckGlobal(access, operation.clock, *operation.cta, operation.warp, address, size, use);
}

void Machine::CheckGlobal(const Access& access,
                          const VectorClock& clock,
                          const Cta& cta,
                          int warp,
                          uint64_t address,
                          uint64_t size,
                          Use use) {
  const Buffer* buffer = nullptr;
  GlobalMemory* memory = FindChecked(address, &buffer);
  if (memory == nullptr) return;
  const uint64_t first = address - buffer->address;
  const uint64_t last = std::min(first + size, buffer->size);
  if (use != Use::kRead && access.scope == Scope::kNone) {
    memory->locations.Forget(first / 4, (last + 3) / 4);
  }
  const GlobalAccess global{.time = access.time,
                            .cluster = cta.cluster->number,
                            .slot = access.slot,
                            .lane = access.lane,
                            .warp = static_cast<uint16_t>(warp),
                            .async = access.async,
                            .read = use != Use::kWrite,
                            .write = use != Use::kRead,
                            .scope = static_cast<uint16_t>(access.scope),
                            .instruction = static_cast<uint32_t>(access.instruction)};
  GlobalShadow::Conflict conflict;
  if (!memory->shadow.Note(first, last, global, clock, &conflict)) return;
  if (!IsNewRace(access.instruction, static_cast<int32_t>(conflict.earlier.instruction))) return;
  const auto place = [&](const GlobalAccess& one, const char* which) {
    Report::Place at = PlaceOf(static_cast<int32_t>(one.instruction));
    at.cta = IndexOf(one.cluster, one.slot / SlotsOfCta());
    at.warp = one.warp;
    at.lane = one.lane;
    at.role = std::string(which) + (one.write ? " writes it" : " reads it");
    return at;
  };
  ReportRace(conflict.fault,
             "global memory, \"" + buffer->name + "\" bytes [" + std::to_string(conflict.first) +
                 ", " + std::to_string(conflict.last) + ")",
             {place(global, "this access"), place(conflict.earlier, "the earlier one")});
}

void Machine::Observe(Warp& warp, uint32_t mask, const Messages& messages, bool acquires) {
  Split(warp, mask);
  for (Knowledge& one : warp.knowledge) {
    if (!(one.mask & mask)) continue;
    if (!acquires) {
      one.clock.Observe(messages);
      continue;
    }
    for (const Message& message : messages) {
      one.clock.Acquire(warp.cta->cluster->number, message);
    }
  }
}

void Machine::WriteStrongly(Context& context,
                            int lane,
                            Locations& locations,
                            uint64_t first,
                            uint32_t size,
                            Scope scope,
                            bool releases,
                            bool is_atomic) {
  const Knowledge& known = KnowledgeOfLane(context.warp, lane);
  Messages messages = known.clock.released();
  const Cluster& cluster = *context.cta.cluster;
  if (releases) messages.fill(known.clock.Release(cluster.number));
  locations.Write(first / 4,
                  (first + size + 3) / 4,
                  cluster.number,
                  context.cta.rank,
                  scope,
                  messages,
                  is_atomic,
                  clusters_.front()->number);
}

void Machine::Fence(Warp& warp, uint32_t mask, Scope scope) {
  if (!options_.check_races) return;
  for (Knowledge& one : warp.knowledge) {
    if (one.mask & mask) one.clock.Fence(warp.cta->cluster->number, scope);
  }
  Advance(warp, mask);
}

void Machine::AccessTensor(const Access& access,
                           const VectorClock& clock,
                           Cta& issuer,
                           int warp,
                           Cta& cta,
                           uint32_t lane,
                           uint32_t column,
                           uint32_t columns,
                           bool write) {
  if (!options_.check_races) return;
  const size_t first = lane * 64 + column / 8;
  const size_t count = (column + columns + 7) / 8 - column / 8;
  Shadow::Conflict conflict;
  Shadow::Own own;
  if (options_.strict) {
    own.first = static_cast<Slot>(issuer.first_slot + warp * kWarpSlots);
    own.last = static_cast<Slot>(own.first + kWarpSlots);
  }
  const bool found = write ? cta.tensor_shadow.Write(first, count, access, clock, own, &conflict)
                           : cta.tensor_shadow.Read(first, count, access, clock, own, &conflict);
  if (!found || !IsNewRace(access.instruction, conflict.earlier.instruction)) return;
  const size_t at = conflict.cell % 64 * 8;
  ReportClusterRace(cta,
                    access,
                    RoleOf(write),
                    conflict.earlier,
                    EarlierRoleOf(conflict.earlier_is_write),
                    conflict.fault,
                    "tensor memory lane " + std::to_string(conflict.cell / 64) + ", columns [" +
                        std::to_string(at) + ", " + std::to_string(at + 8) + ")");
}

void Machine::CheckOwner(
    const Access& access, const VectorClock& clock, Cta& cta, uint32_t column, uint32_t columns) {
  if (!options_.check_races) return;
  for (uint32_t i = column / 32; i <= (column + columns - 1) / 32; ++i) {
    const Access& owner = cta.tensor_owners[i];
    if (clock.seen(owner.slot) >= owner.time) continue;
    if (!IsNewRace(access.instruction, owner.instruction)) return;
    ReportClusterRace(cta,
                      access,
                      "this access uses it",
                      owner,
                      "the earlier one allocates it",
                      Fault::kUnordered,
                      "tensor memory, columns [" + std::to_string(32 * i) + ", " +
                          std::to_string(32 * i + 32) + ")");
    return;
  }
}

void Machine::ReleaseTensor(Context& context, int lane, uint32_t column, uint32_t columns) {
  if (!options_.check_races) return;
  const VectorClock clock = KnowledgeOf(context.warp, context.mask);
  // At time 0, which is that of no access: it leaves none behind.
  Access access = AccessOf(context, lane);
  access.time = 0;
  for (uint32_t at = 0; at < 128; ++at) {
    Shadow::Conflict conflict;
    const bool found = context.cta.tensor_shadow.Write(
        at * 64 + column / 8, columns / 8, access, clock, {}, &conflict);
    if (!found || !IsNewRace(access.instruction, conflict.earlier.instruction)) continue;
    const size_t cell = conflict.cell % 64 * 8;
    ReportClusterRace(context.cta,
                      access,
                      "this access deallocates it",
                      conflict.earlier,
                      EarlierRoleOf(conflict.earlier_is_write),
                      conflict.fault,
                      "tensor memory lane " + std::to_string(at) + ", columns [" +
                          std::to_string(cell) + ", " + std::to_string(cell + 8) + ")");
  }
}

const TensorMap* Machine::DecodeMap(const uint8_t* bytes) {
  const auto known = maps_.find(bytes);
  if (known != maps_.end()) return known->second.get();
  auto map = std::make_shared<TensorMap>();
  if (!DecodeTensorMap({bytes, kTensorMapBytes}, map.get()).empty()) return nullptr;
  return maps_.emplace(bytes, std::move(map)).first->second.get();
}

// ---- mbarriers

std::string MissingBytes(const MBarrier& barrier) {
  if (barrier.transactions >= 0) return std::to_string(barrier.transactions) + " bytes";
  return "has got " + std::to_string(-barrier.transactions) + " bytes more than it expects";
}

void Machine::UseBarrier(Context& context, int lane, const SharedPlace& place) {
  if (!options_.check_races) return;
  NoteUse(AccessOf(context, lane, Scope::kGpu), KnowledgeOfLane(context.warp, lane).clock, place);
}

void Machine::UseBarrier(const Operation& operation, const SharedPlace& place) {
  if (!options_.check_races) return;
  // An mbarrier needs no fence of proxies but that of its initialisation, which is checked apart.
  Access access = operation.access();
  access.async = false;
  access.scope = Scope::kGpu;
  NoteUse(access, operation.clock, place);
}

// A strong read: uses of an mbarrier race with no other use, but with what writes to its memory.
void Machine::NoteUse(const Access& access, const VectorClock& clock, const SharedPlace& place) {
  Shadow::Conflict conflict;
  if (!place.cta->shared_shadow.Read(place.offset / 4, 1, access, clock, {}, &conflict)) return;
  if (!IsNewRace(access.instruction, conflict.earlier.instruction)) return;
  ReportClusterRace(*place.cta,
                    access,
                    "this access uses it",
                    conflict.earlier,
                    EarlierRoleOf(true),
                    conflict.fault,
                    "the mbarrier at shared address " + std::to_string(place.offset));
}

MBarrier* Machine::FindBarrier(Cta& cta, uint32_t address) {
  const std::optional<SharedPlace> place = FindShared(cta, address, 8);
  if (!place || place->offset % 8 != 0) return nullptr;
  const auto it = place->cta->mbarriers.find(place->offset);
  if (it == place->cta->mbarriers.end()) return nullptr;
  if (trace_ != nullptr) trace_->LookUp(*place->cta, place->offset, it->second);
  return &it->second;
}

void Machine::Arrive(Cta& cta, MBarrier& barrier, uint32_t count, const VectorClock& clock) {
  if (trace_ != nullptr) trace_->Arrive(cta, barrier);
  barrier.arriving.Join(clock);
  barrier.pending -= count;
  CompletePhase(cta, barrier);
}

void Machine::Transact(Cta& cta, MBarrier& barrier, int64_t bytes, const VectorClock* clock) {
  if (trace_ != nullptr) trace_->Arrive(cta, barrier);
  if (clock != nullptr) barrier.arriving.Join(*clock);
  barrier.transactions += bytes;
  CompletePhase(cta, barrier);
}

void Machine::CompletePhase(Cta& cta, MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.transactions != 0) return;
  std::swap(barrier.completed, barrier.arriving);
  barrier.arriving.Clear();
  barrier.pending = barrier.expected;
  ++barrier.phase;
  if (trace_ != nullptr) trace_->CompletePhase(cta, barrier);
  Wake(cta);
}

// ---- Asynchronous operations

void Machine::Watch(Cta& cta, const Operation& operation) {
  if (!options_.strict) return;
  cta.watched[operation.slot] = {
      operation.time, operation.instruction, operation.cta->index, operation.warp};
}

Slot Machine::TakeCopySlot(Cta& cta) {
  const Slot slot = cta.free_copy_slots.front();
  cta.free_copy_slots.erase(cta.free_copy_slots.begin());
  return slot;
}

void Machine::ReturnCopySlot(Cta& cta, Slot slot) { cta.free_copy_slots.push_back(slot); }

std::unique_ptr<Operation> Machine::NewOperation(Context& context,
                                                 int lane,
                                                 const char* name,
                                                 Slot slot) {
  auto operation = std::make_unique<Operation>();
  operation->name = name;
  operation->slot = slot;
  operation->instruction = context.group.pc;
  operation->lane = static_cast<uint8_t>(lane);
  operation->warp = context.warp.index;
  operation->cta = &context.cta;
  operation->clock = KnowledgeOfLane(context.warp, lane).clock;
  operation->time = ++Time(context.cta, slot);
  operation->clock.SetSeen(slot, operation->time);
  if (trace_ != nullptr) trace_->Issue(*operation);
  return operation;
}

// ---- Reports

Report::Place Machine::PlaceOf(int32_t instruction) const {
  Report::Place place;
  if (instruction < 0 ||
      instruction >= static_cast<int32_t>(launch_.program->kernel->statements.size()))
    return place;
  const ptx::Statement& statement = launch_.program->kernel->statements[instruction];
  place.instruction = instruction;
  place.ptx_line = statement.line;
  place.opcode = statement.opcode;
  place.source = launch_.program->module->Describe(statement.location);
  return place;
}

Report::Place Machine::PlaceIn(const Cta& cta,
                               int32_t instruction,
                               int warp,
                               const char* role) const {
  Report::Place place = PlaceOf(instruction);
  place.cta = cta.index;
  place.warp = warp;
  place.role = role;
  return place;
}

void Machine::AddReport(Report report) {
  if (report.fatal) stopped_ = true;
  // One fault in a loop makes the same report over and over. A fatal one is the last and the reason
  // of the end.
  for (const Report& earlier : reports_) {
    if (report.fatal) break;
    if (earlier.kind != report.kind || earlier.places.size() != report.places.size()) continue;
    bool same = !report.places.empty();
    for (size_t i = 0; i < report.places.size(); ++i) {
      same &= earlier.places[i].instruction == report.places[i].instruction;
    }
    if (same) return;
  }
  if (report.fatal || reports_.size() < options_.max_reports) reports_.push_back(std::move(report));
}

void Machine::Misuse(
    Context& context, int lane, const std::string& message, bool fatal, Report::Kind kind) {
  Report report{
      .kind = kind, .message = message, .places = {PlaceOf(context.group.pc)}, .fatal = fatal};
  report.places[0].cta = context.cta.index;
  report.places[0].warp = context.warp.index;
  report.places[0].lane = lane;
  AddReport(std::move(report));
}

void Machine::OperationFault(const Operation& operation, const std::string& message) {
  Report report{.kind = Report::Kind::kMisuse,
                .message = message,
                .places = {PlaceOf(operation.instruction)},
                .fatal = true};
  report.places[0].cta = operation.cta->index;
  report.places[0].warp = operation.warp;
  report.places[0].lane = operation.lane;
  report.places[0].role = std::string(operation.name) + " was issued here";
  AddReport(std::move(report));
}

// A race in a loop shows at every turn: whether this pair of instructions was not reported yet.
bool Machine::IsNewRace(int32_t instruction, int32_t earlier) {
  if (reports_.size() >= options_.max_reports) return false;
  const uint64_t pair = static_cast<uint64_t>(static_cast<uint32_t>(instruction)) << 32 |
                        static_cast<uint32_t>(earlier);
  return races_.insert(pair).second;
}

void Machine::ReportRace(Fault fault,
                         const std::string& where,
                         std::array<Report::Place, 2> places) {
  Report report{.kind = Report::Kind::kRace,
                .message = "",
                .places = {places.begin(), places.end()},
                .fatal = false};
  switch (fault) {
    case Fault::kUnordered:
      report.message = "nothing orders two accesses of " + where + ".";
      break;
    case Fault::kNarrow:
      report.message = "nothing orders two accesses of " + where +
                       ", and the scope of one does not contain the other's thread.";
      break;
    case Fault::kUnfenced:
      report.message = "what the generic proxy wrote to " + where +
                       " is read through the asynchronous proxy without a fence.proxy.async" +
                       (where.starts_with("global") ? " between." : " by the writer.");
      break;
    case Fault::kUnpublished:
      report.message = "two accesses of " + where +
                       " are ordered, but no tcgen05.fence::before_thread_sync follows "
                       "the earlier one before its thread signals.";
      break;
    case Fault::kUnrelied:
      report.message = "two accesses of " + where +
                       " are ordered, but no tcgen05.fence::after_thread_sync stands "
                       "between the wait of the later one's thread and the access.";
      break;
  }
  AddReport(std::move(report));
}

void Machine::ReportClusterRace(const Cta& cta,
                                const Access& access,
                                const char* role,
                                const Access& earlier,
                                const char* earlier_role,
                                Fault fault,
                                const std::string& where) {
  const auto place = [&](const Access& one, const char* what) {
    Report::Place at = PlaceOf(one.instruction);
    at.cta = IndexOf(cta.cluster->number, one.slot / SlotsOfCta());
    at.warp = WarpOfSlot(one.slot);
    at.lane = one.lane;
    at.role = what;
    return at;
  };
  ReportRace(fault, where, {place(access, role), place(earlier, earlier_role)});
}

// In strict mode a warp has to have waited for what it has issued when it ends, even if that
// happens to be complete.
void Machine::CheckFinished(Warp& warp) {
  const auto report = [&](const std::string& message, int32_t instruction) {
    AddReport({.kind = Report::Kind::kMisuse,
               .message = message,
               .places = {PlaceIn(*warp.cta, instruction, warp.index, "was issued here")},
               .fatal = false});
  };
  // Of a store, only the reading of shared memory has to have ended.
  for (const auto& groups : warp.bulk_groups) {
    for (size_t i = 0; i < groups.size(); ++i) {
      if (groups[i]->unwaited < 0) continue;
      report(
          "a thread ended and has not waited until a bulk copy of its own has read shared memory.",
          groups[i]->unwaited);
      return;
    }
  }
  for (const WarpgroupRegister& one : warp.warpgroup_registers) {
    if (one.time <= warp.warpgroup_completed) continue;
    report("a warp ended with a wgmma.mma_async under way, for which no wgmma.wait_group waits.",
           one.instruction);
    return;
  }
}

// In strict mode the threads of a CTA have to have waited for all that uses its memory, have to
// leave no mbarrier within a phase, and have to give tensor memory back.
void Machine::CheckExit(Cta& cta) {
  if (!options_.strict) return;
  const auto report = [&](const std::string& message, Report::Place place) {
    AddReport({.kind = Report::Kind::kMisuse,
               .message = message,
               .places = {std::move(place)},
               .fatal = false});
  };
  for (const auto& [slot, one] : cta.watched) {
    if (cta.at_exit.seen(slot) >= one.time) continue;
    Report::Place place = PlaceIn(cta, one.instruction, one.warp, "was issued here");
    place.cta = one.cta;
    report(
        "the CTA ended, and none of its threads has waited until an asynchronous operation "
        "that uses its memory is complete.",
        std::move(place));
  }
  // In the order of addresses.
  std::map<uint32_t, const MBarrier*> barriers;
  for (const auto& [address, barrier] : cta.mbarriers) barriers.emplace(address, &barrier);
  for (const auto& [address, barrier] : barriers) {
    if (barrier->pending == barrier->expected && barrier->transactions == 0) continue;
    report("the CTA ended within a phase of the mbarrier at " + Hex(address) + ": " +
               std::to_string(barrier->phase) + " phases are complete; this one still needs " +
               std::to_string(barrier->pending) + " of " + std::to_string(barrier->expected) +
               " arrivals and " + MissingBytes(*barrier) + ".",
           PlaceIn(cta,
                   barrier->init.instruction,
                   WarpOfSlot(barrier->init.slot),
                   "it was initialised here"));
  }
  for (const bool allocated : cta.tensor_columns) {
    if (!allocated) continue;
    report("the CTA ended with tensor memory that was not deallocated.", PlaceIn(cta, -1, -1, ""));
    break;
  }
}

std::string Machine::DescribeWait(Warp& warp, const Group& group, bool polls) {
  char lanes[32];
  std::snprintf(lanes, sizeof(lanes), "lanes %08x", group.mask);
  std::string text = lanes;
  const Inst& inst = launch_.program->instructions[group.pc];
  if (!group.blocked && !(polls && inst.is_pure && inst.describe_wait != nullptr))
    return text + " are here";
  if (inst.describe_wait == nullptr) return text + " wait";
  Group copy = group;
  Context context{*this,
                  *warp.cta,
                  warp,
                  copy,
                  group.mask,
                  warp.registers.data(),
                  launch_.program->constants.data(),
                  warp.predicates.data()};
  return text + " " + inst.describe_wait(context, inst);
}

int Machine::WarpOfSlot(Slot slot) const {
  const uint32_t within = slot % SlotsOfCta();
  return within + 1 + kCopySlots < SlotsOfCta() ? static_cast<int>(within / kWarpSlots) : -1;
}

// Where every warp that has not ended stands.
void Machine::ReportStanding(Report::Kind kind, const std::string& message) {
  Report report{.kind = kind, .message = message, .places = {}, .fatal = true};
  for (const auto& cluster : clusters_) {
    for (const auto& cta : cluster->ctas) {
      for (const auto& warp : cta->warps) {
        for (const Group& group : warp->groups) {
          if (report.places.size() >= 64) break;
          Report::Place place = PlaceOf(group.pc);
          place.cta = cta->index;
          place.warp = warp->index;
          place.lane = std::countr_zero(group.mask);
          place.role = DescribeWait(*warp, group, kind == Report::Kind::kDeadlock);
          report.places.push_back(std::move(place));
        }
      }
    }
  }
  AddReport(std::move(report));
}

}  // namespace jax_fa4::emulator
