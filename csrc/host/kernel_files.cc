#include "csrc/host/kernel_files.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>

namespace jax_fa4 {
namespace {

// A target's compute capability, and whom its code serves: "sm_103a" is 10, 3, 'a'.
struct Target {
  int major = 0, minor = 0;
  char kind = 0;  // 'a': this GPU alone, 'f': its family, 0: also newer GPUs

  bool operator<(const Target& other) const {
    return std::pair(major, minor) < std::pair(other.major, other.minor);
  }
};

std::optional<Target> ParseTarget(std::string_view text) {
  if (!text.starts_with("sm_")) return std::nullopt;
  text.remove_prefix(3);
  Target target;
  if (text.ends_with('a') || text.ends_with('f')) {
    target.kind = text.back();
    text.remove_suffix(1);
  }
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 10) return std::nullopt;
  target.major = number / 10;
  target.minor = number % 10;
  return target;
}

// All files of the directory that are builds, in the order of their paths.
struct Directory {
  std::string path;
  std::vector<KernelFile> files;
};

// Never destroyed: calls may still run on other threads when the process ends.
std::mutex directory_mutex;
Directory& directory = *new Directory;
std::map<std::string, std::string>& unpacked = *new std::map<std::string, std::string>;

std::vector<KernelFile> Files(std::string* path = nullptr) {
  const std::lock_guard lock(directory_mutex);
  if (path != nullptr) *path = directory.path;
  return directory.files;
}

// By the rules in the header: 1 to 3 among cubins, or with `only_ptx` among PTX files, then 4.
KernelFile Choose(const std::string& module, int major, int minor, bool only_ptx) {
  std::string path;
  const std::vector<KernelFile> files = Files(&path);
  const KernelFile* best = nullptr;
  std::tuple<int, Target> best_rank;
  std::string builds;
  for (const KernelFile& file : files) {
    if (file.module != module) continue;
    const Target target = *ParseTarget(file.target);
    if (builds.find(file.target + ",") == std::string::npos) builds += file.target + ", ";
    const bool is_older = target.major < major || (target.major == major && target.minor <= minor);
    int rank = 0;
    if (file.is_ptx == only_ptx && target.major == major && target.minor <= minor) {
      if (target.kind == 'a') {
        rank = target.minor == minor ? 4 : 0;
      } else {
        rank = target.kind == 'f' ? 3 : 2;
      }
    } else if (file.is_ptx && is_older && target.kind == 0) {
      rank = 1;
    }
    if (rank > 0 && (best == nullptr || best_rank < std::tuple(rank, target))) {
      best = &file;
      best_rank = {rank, target};
    }
  }
  if (best != nullptr) return *best;
  const std::string gpu =
      "compute capability " + std::to_string(major) + "." + std::to_string(minor);
  if (builds.empty()) {
    throw std::runtime_error(
        "the kernels " + module + " were not built: " +
        (path.empty() ? "no directory of kernels was named." : "there are none in " + path + "."));
  }
  builds.resize(builds.size() - 2);
  throw std::runtime_error("the kernels " + module + " are built for " + builds +
                           ", none of which a GPU of " + gpu + " can run.");
}

}  // namespace

void SetKernelDirectory(std::string path) {
  Directory found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    if (entry.path().extension() != ".xz") continue;
    const std::filesystem::path name = entry.path().stem();
    const std::string extension = name.extension().string();
    if (extension != ".cubin" && extension != ".ptx") continue;
    const std::string target = name.stem().extension().string();  // with the dot before it
    if (target.empty() || !ParseTarget(std::string_view(target).substr(1))) continue;
    found.files.push_back({entry.path().string(),
                           name.stem().stem().string(),
                           target.substr(1),
                           extension == ".ptx"});
  }
  std::sort(found.files.begin(), found.files.end(), [](const KernelFile& a, const KernelFile& b) {
    return a.path < b.path;
  });
  found.path = std::move(path);
  const std::lock_guard lock(directory_mutex);
  directory = std::move(found);
}

std::vector<std::pair<std::string, std::string>> KernelBuilds() {
  std::set<std::pair<std::string, std::string>> builds;
  for (const KernelFile& file : Files()) builds.insert({file.module, file.target});
  return {builds.begin(), builds.end()};
}

KernelFile FileForGpu(const std::string& module, int major, int minor) {
  return Choose(module, major, minor, false);
}

KernelFile FileForEmulator(const std::string& module, int major, int minor) {
  return Choose(module, major, minor, true);
}

void SetUnpacked(std::string path, std::string contents) {
  const std::lock_guard lock(directory_mutex);
  unpacked[std::move(path)] = std::move(contents);
}

std::string Read(const KernelFile& file) {
  const std::lock_guard lock(directory_mutex);
  const auto found = unpacked.find(file.path);
  if (found == unpacked.end()) {
    throw std::runtime_error("the kernel file " + file.path + " has not been unpacked.");
  }
  return found->second;
}

}  // namespace jax_fa4
