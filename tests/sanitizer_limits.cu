// Kernels without a fault, of which some are reported by compute-sanitizer: what its tools do not
// know. `python tests/sanitize.py --limits` compiles and runs them, and compares with LIMITS
// there.

#include <cstdint>

namespace {

__device__ uint32_t Address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

struct Barrier {
  uint64_t barrier;

  __device__ void Init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(Address(&barrier)), "r"(arrivals)
                 : "memory");
  }
  __device__ void Arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(Address(&barrier)) : "memory");
  }
  __device__ void Expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Address(&barrier)),
                 "r"(bytes)
                 : "memory");
  }
  // For the end of the first phase.
  __device__ void Wait() {
    uint32_t ended = 0;
    while (!ended) {
      asm volatile(
          "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, "
          "p;}"
          : "=r"(ended)
          : "r"(Address(&barrier))
          : "memory");
    }
  }
};

__device__ void Sync() { asm volatile("bar.sync 1, 64;" ::: "memory"); }
__device__ void Announce() { asm volatile("bar.arrive 1, 64;" ::: "memory"); }
__device__ __noinline__ void Meet() { asm volatile("bar.sync 1, 64;" ::: "memory"); }

__device__ uint32_t Warp() { return threadIdx.x / 32; }
__device__ uint32_t Lane() { return threadIdx.x % 32; }

}  // namespace

// ---- What racecheck takes for an order

// A bulk copy; reads behind a wait for its completion.
extern "C" __global__ void copy_then_read(const float* in, float* out) {
  __shared__ alignas(128) float x[32];
  __shared__ Barrier full;
  if (threadIdx.x == 0) {
    full.Init(1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    full.Expect(sizeof(x));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(Address(x)),
        "l"(in),
        "n"(sizeof(x)),
        "r"(Address(&full.barrier))
        : "memory");
  }
  if (Warp() == 1) {
    full.Wait();
    out[Lane()] = x[Lane()];
  }
}

// A write, an mbarrier, a read.
extern "C" __global__ void write_then_read(const float*, float* out) {
  __shared__ float x[32];
  __shared__ Barrier written;
  if (threadIdx.x == 0) written.Init(1);
  __syncthreads();
  if (threadIdx.x == 0) {
    x[5] = 1;
    written.Arrive();
  }
  if (Warp() == 2) {
    written.Wait();
    out[Lane()] = x[5];
  }
}

// The same, with a warp between both.
extern "C" __global__ void through_a_warp(const float*, float* out) {
  __shared__ float x[32];
  __shared__ Barrier written, known;
  if (threadIdx.x == 0) {
    written.Init(1);
    known.Init(1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    x[5] = 1;
    written.Arrive();
  }
  if (Warp() == 1) {
    written.Wait();
    __syncwarp();
    if (Lane() == 0) known.Arrive();
  }
  if (Warp() == 2) {
    known.Wait();
    out[Lane()] = x[5];
  }
}

// The same, with a named barrier behind the warp.
extern "C" __global__ void through_a_named_barrier(const float*, float* out) {
  __shared__ float x[32];
  __shared__ Barrier written;
  if (threadIdx.x == 0) written.Init(1);
  __syncthreads();
  if (threadIdx.x == 0) {
    x[5] = 1;
    written.Arrive();
  }
  if (Warp() == 1) {
    written.Wait();
    Announce();
  }
  if (Warp() == 2) {
    Sync();
    out[Lane()] = x[5];
  }
}

// A warp reads; one lane arrives for all, behind __syncwarp; a write.
extern "C" __global__ void lane_arrives(const float*, float* out) {
  __shared__ float x[32];
  __shared__ Barrier read;
  if (threadIdx.x == 0) read.Init(1);
  if (Warp() == 0) x[Lane()] = Lane();
  __syncthreads();
  if (Warp() == 1) {
    out[Lane()] = x[Lane()];
    __syncwarp();
    if (Lane() == 0) read.Arrive();
  }
  if (threadIdx.x == 64) {
    read.Wait();
    for (int32_t i = 0; i < 32; ++i) x[i] = 2;
  }
}

// A warp reads, and arrives at a named barrier; another waits there, and arrives at an mbarrier; a
// write.
extern "C" __global__ void named_barrier_then_mbarrier(const float*, float* out) {
  __shared__ float x[32];
  __shared__ Barrier read;
  if (threadIdx.x == 0) read.Init(32);
  if (Warp() == 0) x[Lane()] = Lane();
  __syncthreads();
  if (Warp() == 1) {
    out[Lane()] = x[Lane()];
    Announce();
  }
  if (Warp() == 2) {
    Sync();
    read.Arrive();
  }
  if (Warp() == 0) {
    read.Wait();
    x[Lane()] = 2;
  }
}

// ---- What synccheck takes for divergence

// A named barrier for two of three warps.
extern "C" __global__ void one_place(const float*, float* out) {
  if (Warp() < 2) {
    Sync();
    out[threadIdx.x] = 1;
  }
}

// One that they reach at two places of the code.
extern "C" __global__ void two_places(const float*, float* out) {
  if (Warp() == 0) {
    Sync();
    out[threadIdx.x] = 1;
  } else if (Warp() == 1) {
    out[threadIdx.x] = 2;
    Sync();
  }
}

// One in a function that they call at two places.
extern "C" __global__ void two_calls(const float*, float* out) {
  if (Warp() == 0) {
    Meet();
    out[threadIdx.x] = 1;
  } else if (Warp() == 1) {
    out[threadIdx.x] = 2;
    Meet();
    out[threadIdx.x] = 3;
  }
}

int main() {
  float *in, *out;
  cudaMalloc(&in, 1024);
  cudaMalloc(&out, 1024);
  cudaMemset(in, 0, 1024);
  copy_then_read<<<1, 96>>>(in, out);
  write_then_read<<<1, 96>>>(in, out);
  through_a_warp<<<1, 96>>>(in, out);
  through_a_named_barrier<<<1, 96>>>(in, out);
  lane_arrives<<<1, 96>>>(in, out);
  named_barrier_then_mbarrier<<<1, 96>>>(in, out);
  one_place<<<1, 96>>>(in, out);
  two_places<<<1, 96>>>(in, out);
  two_calls<<<1, 96>>>(in, out);
  return cudaDeviceSynchronize();
}
