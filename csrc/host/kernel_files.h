// The kernels that were built: in one directory files NAME.TARGET.cubin.xz and, of some targets
// only, NAME.TARGET.ptx.xz from the same compilation, where TARGET is what NVRTC compiled for
// ("sm_80", "sm_90a", "sm_100f").

#ifndef JAX_FA4_CSRC_HOST_KERNEL_FILES_H_
#define JAX_FA4_CSRC_HOST_KERNEL_FILES_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jax_fa4 {

// Where the files are. It is set once, before any call runs; until then nothing is built.
void SetKernelDirectory(std::string path);

// Name and target of every build, in the order of names.
std::vector<std::pair<std::string, std::string>> KernelBuilds();

// A file of a build.
struct KernelFile {
  std::string path;
  std::string module;
  std::string target;
  bool is_ptx = false;
};

// The file of `module` that a GPU of compute capability major.minor runs: of the cubins
//   1. that for exactly this GPU (sm_XYa),
//   2. that for its family with the largest minor version (sm_XZf, Z <= Y), or
//   3. that of its major version with the largest minor one (sm_XZ, Z <= Y);
//   4. or else the PTX of the largest target that is not newer than the GPU and of no single GPU or
//      family (not sm_XYa or sm_XYf), which the driver compiles.
// Throws std::runtime_error where there is none, with a sentence that names the builds.
KernelFile FileForGpu(const std::string& module, int major, int minor);

// The same choice among PTX files only, which the emulator runs.
KernelFile FileForEmulator(const std::string& module, int major, int minor);

// Brings what is in a file. Python unpacks, but not while a call runs: a call that still runs when
// the interpreter ends could not enter it any more.
void SetUnpacked(std::string path, std::string contents);

// What is in a file. Throws std::runtime_error, with a sentence, if it was not brought.
std::string Read(const KernelFile& file);

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_HOST_KERNEL_FILES_H_
