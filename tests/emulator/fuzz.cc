// Throws random programs and launches at the emulator. Whatever the text or the launch, it must end
// in an error that says why, in a report, or cleanly: never in a crash, an access outside of what
// it owns, a run without end, or all memory taken. Built with -fsanitize=address,undefined, which
// turn faults into aborts.
//
//   fuzz [--seed N] [--seconds S] [--only INDEX] [--print] [kernel.ptx ...]
//
// Input INDEX depends on the seed and the files alone, so that --only runs a failing one again.

#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/emulator/machine.h"
#include "csrc/emulator/tensor_map.h"

namespace jax_fa4::emulator {
namespace {

constexpr int kSecondsOfInput = 30;  // of processor time: an input that takes longer hangs
// Of an input, beyond what the process holds already: 1 GiB is what resident CTAs may take, and the
// sanitizer's own comes on top.
constexpr long kMaxTakenKb = 5 << 19;

// A line of /proc/self/status: "VmRSS:" is the memory that the process holds, "VmHWM:" the most
// that it held since ForgetPeak.
long ResidentKb(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name)) return std::stol(line.substr(name.size()));
  }
  std::fprintf(stderr, "/proc/self/status has no %s\n", name.c_str());
  std::abort();
}
void ForgetPeak() { std::ofstream("/proc/self/clear_refs") << 5; }

// No GPU's target, so that the kernels may have the instructions of all of them.
constexpr char kHeader[] = ".version 8.8\n.target every_sm\n.address_size 64\n";

// Small kernels that between them use every family of instructions.
const char* const kKernels[] = {
    // Scalar instructions and a loop.
    R"(.global .align 16 .b8 table[64] = {1, 2, 3, 4};
.const .align 4 .u32 limits[4] = {7, 8, 9, 10};
.visible .entry scalar(.param .u64 p0, .param .u32 p1, .param .align 8 .b8 p2[24])
.maxntid 256, 1, 1
{
.reg .pred %p<4>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .f32 %f<16>; .reg .b64 %g<4>;
.local .align 16 .b8 stack[64];
ld.param.u64 %d1, [p0];
ld.param.u32 %r1, [p1];
ld.param.v2.u32 {%r20, %r21}, [p2+8];
mov.u32 %r2, %tid.x;
mov.u32 %r3, %ctaid.x;
mad.lo.s32 %r4, %r3, 32, %r2;
mul.wide.u32 %d2, %r4, 4;
add.s64 %d3, %d1, %d2;
mov.u32 %r5, 0;
LOOP:
add.s32 %r5, %r5, 1;
shl.b32 %r6, %r5, %r2;
shr.s32 %r7, %r6, 3;
xor.b32 %r8, %r7, %r5;
and.b32 %r9, %r8, 255;
div.s32 %r10, %r6, %r5;
rem.u32 %r11, %r6, %r5;
div.u32 %r12, %r9, %r8;
sub.s32 %r13, %r12, %r11;
min.s32 %r14, %r13, %r12;
lop3.b32 %r15, %r12, %r13, %r14, 0xe8;
prmt.b32 %r16, %r15, %r14, 0x5410;
bfe.u32 %r17, %r16, 3, 7;
bfe.s32 %r18, %r16, %r15, %r14;
shf.l.wrap.b32 %r19, %r16, %r15, %r14;
clz.b32 %r22, %r19;
popc.b32 %r23, %r19;
abs.s32 %r24, %r13;
neg.s32 %r25, %r13;
cvt.rn.f32.s32 %f1, %r13;
fma.rn.f32 %f2, %f1, %f1, 0f3F800000;
ex2.approx.ftz.f32 %f3, %f2;
rcp.approx.ftz.f32 %f4, %f3;
lg2.approx.ftz.f32 %f5, %f4;
tanh.approx.f32 %f6, %f5;
add.rn.f32 %f7, %f6, %f1;
max.f32 %f8, %f7, %f6;
cvt.rni.s32.f32 %r26, %f8;
cvt.rzi.u32.f32 %r27, %f5;
cvt.rn.bf16x2.f32 %r28, %f7, %f8;
cvt.rn.f16x2.f32 %r29, %f7, %f8;
mov.b64 %d4, {%r28, %r29};
mov.b64 {%r30, %r31}, %d4;
fma.rn.f32x2 %d5, %d4, %d4, %d4;
mul.lo.s64 %d6, %d5, %d4;
mul.hi.s64 %d7, %d5, %d4;
shr.s64 %d8, %d7, %r2;
cvt.u16.u32 %h1, %r26;
add.s16 %h2, %h1, %h1;
mul.wide.s16 %r26, %h1, %h2;
cvt.s64.s32 %d9, %r13;
setp.lt.s32 %p1, %r5, 20;
setp.gt.f32 %p2, %f5, %f4;
selp.b32 %r17, %r18, %r19, %p2;
setp.eq.u32 %p3, %r2, 3;
@%p3 bra SKIP;
st.local.v2.b32 [stack+8], {%r17, %r18};
ld.local.b32 %r18, [stack+12];
mov.u64 %d10, table;
ld.global.u8 %r19, [table+2];
ld.const.u32 %r20, [limits+4];
SKIP:
@%p1 bra LOOP;
st.global.b32 [%d3], %r17;
atom.global.add.u32 %r18, [%d1], 1;
red.global.add.f32 [%d1+4], %f2;
atom.global.cas.b32 %r19, [%d1+8], %r18, %r17;
ret;
})",
    // Warps: votes, shuffles, branches by index.
    R"(.visible .entry warps(.param .u64 p0)
{
.reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %d<4>;
ld.param.u64 %d1, [p0];
mov.u32 %r1, %laneid;
elect.sync %r2|%p1, -1;
shfl.sync.bfly.b32 %r3, %r1, 16, 31, -1;
shfl.sync.idx.b32 %r4|%p2, %r1, %r3, 31, 0xffffffff;
shfl.sync.up.b32 %r4, %r3, 1, 0, -1;
vote.sync.ballot.b32 %r5, %p1, -1;
vote.sync.any.pred %p3, %p1, -1;
redux.sync.add.s32 %r6, %r4, -1;
match.any.sync.b32 %r7, %r1, -1;
activemask.b32 %r8;
bar.warp.sync -1;
and.b32 %r9, %r1, 3;
targets: .branchtargets A, B, C, D;
brx.idx %r9, targets;
A: add.u32 %r10, %r9, 1; bra E;
B: { .reg .b32 %r10; mov.u32 %r10, 3; } bra E;
C: mov.u32 %r10, 5;
D: @!%p1 bra E;
mov.u32 %r10, 7;
E:
st.global.u32 [%d1], %r10;
bar.sync 0;
barrier.sync 1, 32;
bar.arrive 2, 64;
setmaxnreg.dec.sync.aligned.u32 64;
setmaxnreg.inc.sync.aligned.u32 128;
nanosleep.u32 20;
ret;
})",
    // mbarriers, copies, cp.async and shared memory.
    R"(.extern .shared .align 1024 .b8 dynamic[];
.visible .entry copies(.param .u64 p0, .param .align 64 .b8 map[128], .param .u64 p1)
{
.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<16>;
.shared .align 8 .b8 barrier[16];
ld.param.u64 %d1, [p0];
ld.param.u64 %d5, [p1];
mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 0;
mov.u32 %r2, barrier;
mov.u32 %r3, dynamic;
mov.b64 %d2, map;
cvta.param.u64 %d2, %d2;
@%p1 mbarrier.init.shared.b64 [%r2], 1;
@%p1 mbarrier.init.shared.b64 [%r2+8], 32;
fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 4224;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+4096], [%d1], 128, [%r2];
mov.u32 %r4, 0;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d2, {%r4, %r4}], [%r2];
WAIT:
mov.u32 %r5, 0;
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p2, [%r2], %r5;
@!%p2 bra AGAIN;
ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r3+4096];
st.shared.b32 [%r3+4096], %r6;
mbarrier.arrive.shared.b64 %d6, [%r2+8];
mbarrier.test_wait.shared.b64 %p3, [%r2+8], %d6;
cp.async.ca.shared.global [%r3+8192], [%d1], 16;
cp.async.commit_group;
cp.async.wait_group 0;
cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+8];
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra DONE;
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {%r4, %r4}], [%r3];
cp.async.bulk.global.shared::cta.bulk_group [%d5], [%r3+4096], 128;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d5], [%r3+4096], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
cp.async.bulk.wait_group 0;
mbarrier.inval.shared.b64 [%r2];
DONE:
ret;
})",
    // The tensor core and its memory.
    R"(.extern .shared .align 1024 .b8 dynamic[];
.visible .entry tensor(.param .u64 p0)
{
.reg .pred %p<8>; .reg .b32 %r<64>; .reg .b64 %d<16>;
.shared .align 16 .b8 barrier[32];
ld.param.u64 %d1, [p0];
mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 0;
setp.lt.u32 %p2, %r1, 32;
mov.u32 %r2, barrier;
mov.u32 %r3, dynamic;
shl.b32 %r4, %r1, 4;
and.b32 %r4, %r4, 0xff0;
add.u32 %r4, %r4, %r3;
st.shared.v4.b32 [%r4], {%r1, %r2, %r3, %r4};
@%p1 mbarrier.init.shared.b64 [%r2+8], 1;
@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;
fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 %r5, [%r2];
mov.b64 %d2, 0x4000404000010000;
shr.u32 %r6, %r3, 4;
cvt.u64.u32 %d3, %r6;
or.b64 %d2, %d2, %d3;
setp.ne.u32 %p3, %r1, %r1;
mov.u32 %r7, 0x8040490;
elect.sync _|%p4, -1;
@!%p1 bra LOAD;
tcgen05.mma.cta_group::1.kind::f16 [%r5], %d2, %d2, %r7, %p3;
tcgen05.mma.cta_group::1.kind::f16 [%r5+32], [%r5], %d2, %r7, {%r10, %r10, %r10, %r10}, 1;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+8];
LOAD:
mov.u32 %r8, 0;
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p5, [%r2+8], %r8;
@!%p5 bra AGAIN;
tcgen05.fence::after_thread_sync;
shr.u32 %r9, %r1, 5;
shl.b32 %r9, %r9, 21;
add.u32 %r9, %r9, %r5;
tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r20, %r21, %r22, %r23}, [%r9];
tcgen05.wait::ld.sync.aligned;
add.u32 %r20, %r21, %r22;
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r9+8], {%r20, %r21};
tcgen05.wait::st.sync.aligned;
st.global.b32 [%d1], %r20;
tcgen05.fence::before_thread_sync;
bar.sync 0;
@%p2 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;
ret;
})",
    // Matrix products in registers.
    R"(.visible .entry matrices(.param .u64 p0)
{
.reg .pred %p<4>; .reg .b32 %r<64>; .reg .b64 %d<8>; .reg .f32 %f<32>;
.shared .align 1024 .b8 tile[8192];
mov.u32 %r1, %tid.x;
and.b32 %r2, %r1, 31;
shl.b32 %r2, %r2, 4;
mov.u32 %r3, tile;
add.u32 %r2, %r2, %r3;
st.shared.v2.b64 [%r2], {%d1, %d2};
bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r2];
ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r2];
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f1, %f2, %f3, %f4};
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r10, %r11, %r12, %r13};
fence.proxy.async.shared::cta;
bar.sync 0;
mov.b64 %d3, 0x4000004000010000;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %d3, %d3, 1, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%f5, %f6, %f7, %f8, %f9, %f10, %f11, %f12}, {%r10, %r11, %r12, %r13}, %d3, %p1, -1, 1, 1;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
add.f32 %f1, %f1, %f5;
ret;
})",
    // Clusters of two.
    R"(.extern .shared .align 128 .b8 dynamic[];
.visible .entry pair(.param .u64 p0, .param .align 64 .b8 map[128])
.reqnctapercluster 2, 1, 1
{
.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .b16 %h<4>;
.shared .align 8 .b8 barrier[32];
ld.param.u64 %d1, [p0];
mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 0;
mov.u32 %r2, barrier;
mov.u32 %r3, dynamic;
mov.u32 %r4, %cluster_ctarank;
xor.b32 %r5, %r4, 1;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 2;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r6, %r2, %r5;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
mov.b64 %d2, map;
cvta.param.u64 %d2, %d2;
mov.u16 %h1, 3;
mov.u32 %r8, 0;
@!%p1 bra NEXT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4096;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3], [%d2, {%r8, %r8}], [%r2], %h1;
tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2], %h1;
NEXT:
AGAIN:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0;
@!%p2 bra AGAIN;
mapa.shared::cluster.u32 %r9, %r3, %r5;
ld.shared::cluster.b32 %r10, [%r9];
st.shared::cluster.b32 [%r9+64], %r10;
@%p1 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r9+128], {%r10, %r10, %r10, %r10}, [%r6];
fence.acq_rel.cluster;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ret;
})",
    // Waits that never end, commits without number, a spin on global memory.
    R"(.visible .entry endless(.param .u64 p0)
{
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<4>;
.shared .align 8 .b8 barrier[8];
ld.param.u64 %d1, [p0];
mov.u32 %r1, barrier;
mov.u32 %r3, %tid.x;
setp.eq.u32 %p1, %r3, 0;
@%p1 mbarrier.init.shared.b64 [%r1], 1;
bar.sync 0;
SPIN:
cp.async.bulk.commit_group;
cp.async.commit_group;
wgmma.commit_group.sync.aligned;
ld.acquire.gpu.global.u32 %r2, [%d1];
setp.ne.u32 %p2, %r2, 77;
@%p2 bra SPIN;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0;
@!%p3 bra WAIT;
ret;
})"};

struct Counts {
  uint64_t inputs = 0, parse_errors = 0, decode_errors = 0, refused = 0, runs = 0, reports = 0,
           limits = 0, clean = 0;
};

Counts counts;
uint64_t current_seed = 0, current_input = 0;
bool is_printed = false;  // the text of the input

// Whatever goes wrong ends in SIGABRT.
void OnAbort(int) {
  char text[128];
  const int size = std::snprintf(text,
                                 sizeof(text),
                                 "\nFAILED: --seed %llu --only %llu\n",
                                 static_cast<unsigned long long>(current_seed),
                                 static_cast<unsigned long long>(current_input));
  if (write(2, text, static_cast<size_t>(size)) < 0) _exit(3);
}

void OnTimeout(int) {
  constexpr std::string_view kText = "\nthe input takes too long\n";
  if (write(2, kText.data(), kText.size()) < 0) _exit(3);
  std::abort();
}

template <typename T>
const T& Pick(Random& random, const std::vector<T>& from) {
  return from[random.Below(static_cast<uint32_t>(from.size()))];
}

const std::vector<std::string> kNumbers = {"0",
                                           "1",
                                           "-1",
                                           "2",
                                           "3",
                                           "4",
                                           "7",
                                           "8",
                                           "16",
                                           "31",
                                           "32",
                                           "33",
                                           "63",
                                           "64",
                                           "127",
                                           "128",
                                           "255",
                                           "256",
                                           "512",
                                           "1024",
                                           "65535",
                                           "65536",
                                           "1048576",
                                           "16777215",
                                           "16777216",
                                           "2147483647",
                                           "-2147483648",
                                           "2147483648",
                                           "4294967295",
                                           "4294967296",
                                           "9223372036854775807",
                                           "-9223372036854775808",
                                           "18446744073709551615",
                                           "0xffffffffffffffff",
                                           "99999999999999999999999",
                                           "0x8000000000000000",
                                           "0f7F800000",
                                           "0fFFC00000",
                                           "0d7FF0000000000000",
                                           "1e400",
                                           "1.5",
                                           "0b",
                                           "0x",
                                           "09",
                                           "WARP_SZ"};

const std::vector<int64_t> kValues = {0,
                                      1,
                                      -1,
                                      2,
                                      3,
                                      4,
                                      7,
                                      8,
                                      15,
                                      16,
                                      17,
                                      31,
                                      32,
                                      33,
                                      63,
                                      64,
                                      127,
                                      128,
                                      255,
                                      256,
                                      511,
                                      1023,
                                      1024,
                                      65535,
                                      65536,
                                      1 << 20,
                                      1 << 24,
                                      INT32_MAX,
                                      INT32_MIN,
                                      UINT32_MAX,
                                      INT64_MAX,
                                      INT64_MIN,
                                      INT64_C(1) << 32,
                                      INT64_C(1) << 56,
                                      INT64_C(0x7F0000000000)};

// ---- Texts

size_t Place(Random& random, const std::string& text) {
  return text.empty() ? 0 : random.Below(static_cast<uint32_t>(text.size()));
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size() - 1);
    lines.push_back(text.substr(at, end + 1 - at));
    at = end + 1;
  }
  return lines;
}

std::string Join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line;
  return text;
}

// The span of a token around a place: letters, digits, dots and what belongs to names.
std::pair<size_t, size_t> TokenAt(const std::string& text, size_t at) {
  const auto inside = [&](size_t i) {
    const char c = text[i];
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           c == '%' || c == '$';
  };
  size_t first = at, last = at;
  while (first > 0 && inside(first - 1)) --first;
  while (last < text.size() && inside(last)) ++last;
  return {first, last - first};
}

std::string MutateText(Random& random, std::string text) {
  const uint32_t times = 1 + random.Below(random.Below(3) == 0 ? 20 : 3);
  for (uint32_t i = 0; i < times && !text.empty(); ++i) {
    const size_t at = Place(random, text);
    switch (random.Below(14)) {
      case 0:
        text.resize(at);
        break;
      case 1:
        text[at] = static_cast<char>(text[at] ^ 1 << random.Below(8));
        break;
      case 2:
        text[at] = static_cast<char>(random.Below(256));
        break;
      case 3:
        text.erase(at, 1 + random.Below(20));
        break;
      case 4: {
        std::vector<std::string> lines = Lines(text);
        lines.erase(lines.begin() + random.Below(static_cast<uint32_t>(lines.size())));
        text = Join(lines);
        break;
      }
      case 5: {
        std::vector<std::string> lines = Lines(text);
        const std::string line = Pick(random, lines);
        lines.insert(lines.begin() + random.Below(static_cast<uint32_t>(lines.size())),
                     1 + random.Below(3),
                     line);
        text = Join(lines);
        break;
      }
      case 6: {
        std::vector<std::string> lines = Lines(text);
        std::swap(lines[random.Below(static_cast<uint32_t>(lines.size()))],
                  lines[random.Below(static_cast<uint32_t>(lines.size()))]);
        text = Join(lines);
        break;
      }
      case 7:
      case 8: {  // a token in the place of another
        const auto [first, size] = TokenAt(text, at);
        const auto [from, count] = TokenAt(text, Place(random, text));
        const std::string token = text.substr(from, count);
        text.replace(first, size, token);
        break;
      }
      case 9:
      case 10: {  // the next number
        const size_t digit = text.find_first_of("0123456789", at);
        if (digit == text.npos) break;
        const auto [first, size] = TokenAt(text, digit);
        if (text[first] >= '0' && text[first] <= '9') {
          text.replace(first, size, Pick(random, kNumbers));
        } else {
          text.replace(digit, 1, std::to_string(random.Below(100)));
        }
        break;
      }
      case 11: {
        static const char* const kNested[] = {
            "{", "[", "(", "!", "}", "{.reg .b32 %q;", "/*", "\"", "-", "@", "|", "{ A:"};
        std::string nest;
        const uint32_t count = 1u << random.Below(16);
        const char* const one = kNested[random.Below(std::size(kNested))];
        for (uint32_t n = 0; n < count; ++n) nest += one;
        text.insert(at, nest);
        break;
      }
      case 12: {
        static const std::vector<std::string> kDeclarations = {
            ".reg .b32 %huge<1048576>;\n",
            ".reg .b64 %wide<200000>;\n",
            ".shared .align 1048576 .b8 big[2147483647];\n",
            ".shared .align 4 .b8 half[116224];\n",
            ".local .align 16 .b8 deep[524288];\n",
            ".local .b8 deeper[2147483000];\n",
            ".global .align 8 .b8 field[2147483647];\n",
            ".global .b8 filled[2147483647] = {1};\n",
            ".reg .b128 %q<9>;\n",
            ".const .b8 constant[268435456] = 1;\n",
            ".shared .align 3 .b8 odd[3];\n",
            ".loc 1 2 3, inlined_at 1 2 3\n",
            ".shared .b64 matrix[65536][65536];\n",
            ".extern .shared .align 1048576 .b8 far[];\n",
            ".maxnreg 512\n",
            ".reqntid 1024, 1024, 1024\n",
            ".maxntid 2147483647\n",
            "t: .branchtargets t, t, t;\n",
            ".pragma \"x\";\n"};
        const size_t line = text.find('\n', at);
        text.insert(line == text.npos ? text.size() : line + 1, Pick(random, kDeclarations));
        break;
      }
      default:
        text.insert(at, Pick(random, kNumbers));
    }
    if (text.size() > 1 << 20) text.resize(1 << 20);
  }
  return text;
}

// ---- Kernels

struct Source {
  std::shared_ptr<const ptx::Module> module;
  const ptx::Kernel* kernel = nullptr;
  bool is_large = false;
};

std::vector<std::string> opcodes;  // of all sources
std::vector<std::string> suffixes;

bool IsSynchronisation(std::string_view opcode) {
  for (const std::string_view start : {"bar",
                                       "mbarrier",
                                       "fence",
                                       "tcgen05.wait",
                                       "tcgen05.fence",
                                       "tcgen05.commit",
                                       "wgmma.wait",
                                       "cp.async.bulk.wait",
                                       "elect",
                                       "griddep"}) {
    if (opcode.starts_with(start)) return true;
  }
  return false;
}

ptx::Operand* AnyOperand(Random& random, std::vector<ptx::Operand>& operands) {
  if (operands.empty()) return nullptr;
  ptx::Operand* operand = &operands[random.Below(static_cast<uint32_t>(operands.size()))];
  while (!operand->elements.empty() && random.Below(3) != 0) {
    operand = &operand->elements[random.Below(static_cast<uint32_t>(operand->elements.size()))];
  }
  return operand;
}

// Changes a copy of a kernel. `names` keeps new opcodes alive.
void MutateKernel(Random& random, ptx::Kernel& kernel, std::deque<std::string>& names) {
  const uint32_t times = 1 + random.Below(random.Below(3) == 0 ? 12 : 3);
  for (uint32_t i = 0; i < times && !kernel.statements.empty(); ++i) {
    const auto count = static_cast<uint32_t>(kernel.statements.size());
    const uint32_t at = random.Below(count);
    ptx::Statement& statement = kernel.statements[at];
    ptx::Operand* operand = AnyOperand(random, statement.operands);
    switch (random.Below(13)) {
      case 0:
        kernel.statements.erase(kernel.statements.begin() + at);
        break;
      case 1: {  // takes away a synchronisation
        for (uint32_t n = 0; n < count; ++n) {
          if (!IsSynchronisation(kernel.statements[(at + n) % count].opcode)) continue;
          kernel.statements.erase(kernel.statements.begin() + (at + n) % count);
          break;
        }
        break;
      }
      case 2: {
        const ptx::Statement copy = kernel.statements[random.Below(count)];
        kernel.statements.insert(kernel.statements.begin() + at, copy);
        break;
      }
      case 3:
        std::swap(kernel.statements[at], kernel.statements[random.Below(count)]);
        break;
      case 4:
      case 5: {  // another register, of the same width more often than not
        if (operand == nullptr || kernel.registers.empty()) break;
        const uint32_t bits = operand->kind == ptx::Operand::Kind::kRegister && operand->reg >= 0
                                  ? kernel.registers[static_cast<size_t>(operand->reg)].bits
                                  : 32;
        for (int n = 0; n < 50; ++n) {
          const auto reg =
              static_cast<int32_t>(random.Below(static_cast<uint32_t>(kernel.registers.size())));
          if (kernel.registers[static_cast<size_t>(reg)].bits != bits && n != 49) continue;
          *operand = ptx::Operand();
          operand->kind = ptx::Operand::Kind::kRegister;
          operand->reg =
              random.Below(12) == 0
                  ? -1 - static_cast<int32_t>(random.Below(std::size(ptx::kSpecialRegisters)))
                  : reg;
          break;
        }
        break;
      }
      case 6:
      case 7: {
        if (operand == nullptr) break;
        if (operand->kind == ptx::Operand::Kind::kAddress) {
          operand->value += Pick(random, kValues) % (INT64_C(1) << 32);
          break;
        }
        const int64_t value =
            random.Below(2) ? Pick(random, kValues) : static_cast<int64_t>(random.Next());
        *operand = ptx::Operand();
        operand->kind = ptx::Operand::Kind::kImmediate;
        operand->value = value;
        operand->is_float = random.Below(10) == 0;
        operand->is_double = operand->is_float && random.Below(2) != 0;
        break;
      }
      case 8: {  // an operand of another statement
        ptx::Operand* other = AnyOperand(random, kernel.statements[random.Below(count)].operands);
        if (operand == nullptr || other == nullptr) break;
        const ptx::Operand copy = *other;
        *operand = copy;
        break;
      }
      case 9: {  // another suffix, or one less
        std::string opcode(statement.opcode);
        std::vector<size_t> dots;
        for (size_t n = 0; n < opcode.size(); ++n) {
          if (opcode[n] == '.') dots.push_back(n);
        }
        if (dots.empty()) break;
        const size_t dot = Pick(random, dots);
        const size_t end = std::min(opcode.find('.', dot + 1), opcode.size());
        opcode.replace(dot, end - dot, random.Below(3) == 0 ? "" : "." + Pick(random, suffixes));
        names.push_back(opcode);
        statement.opcode = names.back();
        break;
      }
      case 10: {  // another opcode of the same family, or any
        for (int n = 0; n < 50; ++n) {
          const std::string& opcode = Pick(random, opcodes);
          if (n < 40 && opcode.substr(0, 3) != statement.opcode.substr(0, 3)) continue;
          statement.opcode = opcode;
          break;
        }
        break;
      }
      case 11: {
        if (statement.guard >= 0 && random.Below(2)) {
          statement.guard_negated = !statement.guard_negated;
        } else if (statement.guard >= 0) {
          statement.guard = -1;
        } else {
          for (size_t n = 0; n < kernel.registers.size(); ++n) {
            if (kernel.registers[n].bits != 1) continue;
            statement.guard = static_cast<int32_t>(n);
            if (random.Below(3) == 0) break;
          }
        }
        break;
      }
      default: {
        if (statement.operands.empty()) break;
        if (random.Below(2)) {
          statement.operands.erase(statement.operands.begin() +
                                   random.Below(static_cast<uint32_t>(statement.operands.size())));
        } else if (operand != nullptr && operand->elements.empty()) {
          *operand = ptx::Operand();  // a sink
        } else if (operand != nullptr) {
          operand->elements.push_back(operand->elements.front());
        }
      }
    }
  }
}

// ---- Launches

// Memory of its exact size, so that the sanitizer sees an access behind it.
struct Memory {
  std::vector<std::unique_ptr<uint8_t[]>> bytes;
  std::vector<Buffer> buffers;
};

Memory NewMemory(Random& random) {
  Memory memory;
  static constexpr uint64_t kSizes[] = {0, 16, 128, 4096, 4100, 65536};
  for (int i = 0; i < 3; ++i) {
    const uint64_t size = i == 0 ? 65536 : kSizes[random.Below(std::size(kSizes))];
    memory.bytes.push_back(std::make_unique<uint8_t[]>(size));
    for (uint64_t n = 0; n < size; n += 1 + random.Below(64))
      memory.bytes.back()[n] = static_cast<uint8_t>(random.Next());
    memory.buffers.push_back({"buffer " + std::to_string(i),
                              size == 0 ? nullptr : memory.bytes.back().get(),
                              size,
                              i != 2,
                              UINT64_C(0x7F0000000000) + static_cast<uint64_t>(i) * 0x200000});
  }
  return memory;
}

TensorMap NewMap(Random& random, const Memory& memory) {
  TensorMap map;
  static constexpr TensorMapType kTypes[] = {TensorMapType::kBfloat16,
                                             TensorMapType::kFloat16,
                                             TensorMapType::kFloat32,
                                             TensorMapType::kUint8};
  map.type = kTypes[random.Below(10) < 7 ? 0 : random.Below(4)];
  map.rank = random.Below(3) == 0 ? 1 + static_cast<int>(random.Below(5)) : random.Below(2) ? 2 : 4;
  map.global_address = memory.buffers[random.Below(3)].address;
  map.swizzle = static_cast<TensorMapSwizzle>(random.Below(4));
  for (int i = 0; i < map.rank; ++i) {
    map.dims[i] = random.Below(20) == 0 ? uint64_t{1} << random.Below(33) : 1 + random.Below(64);
    map.box[i] = i == 0 ? 64 : 1 + random.Below(i == 1 ? 64 : 2);
    if (random.Below(20) == 0) map.box[i] = 256;
    map.strides[i] =
        random.Below(20) == 0 ? uint64_t{16} << random.Below(36) : 128 * (1 + random.Below(4));
    if (random.Below(20) == 0) map.element_strides[i] = 1 + random.Below(8);
  }
  map.fill_nan = random.Below(4) == 0;
  return map;
}

std::vector<uint8_t> NewParameters(Random& random,
                                   const ptx::Kernel& kernel,
                                   const Memory& memory) {
  std::vector<uint8_t> bytes(kernel.parameter_bytes);
  for (const ptx::Variable& one : kernel.parameters) {
    if (one.size == 128 && random.Below(20) != 0) {
      const auto image = EncodeTensorMap(NewMap(random, memory));
      std::memcpy(bytes.data() + one.offset, image.data(), image.size());
      continue;
    }
    for (uint32_t at = 0; at < one.size;) {
      uint64_t value = random.Below(4);
      switch (random.Below(8)) {
        case 0:
          value = static_cast<uint64_t>(Pick(random, kValues));
          break;
        case 1:
          value = random.Next();
          break;
        case 2:
        case 3:
          value = random.Below(1024);
          break;
        default:
          break;
      }
      const uint32_t size =
          std::min<uint32_t>(one.size - at, one.alignment >= 8 || one.size == 8 ? 8 : 4);
      if (size == 8 && random.Below(4) != 0) value = memory.buffers[random.Below(3)].address;
      std::memcpy(bytes.data() + one.offset + at, &value, size);
      at += size;
    }
  }
  return bytes;
}

Launch NewLaunch(Random& random,
                 std::shared_ptr<const Program> program,
                 const Memory& memory,
                 bool is_large) {
  Launch launch;
  const ptx::Kernel& kernel = *program->kernel;
  launch.program = std::move(program);
  static constexpr uint32_t kBlocks[] = {1, 7, 32, 33, 64, 128, 128, 128, 160, 256};
  launch.block = {kBlocks[random.Below(std::size(kBlocks))], 1, 1};
  if (kernel.required_block[0] != 0)
    launch.block = kernel.required_block;
  else if (kernel.maximal_block[0] != 0 && is_large)
    launch.block = kernel.maximal_block;
  if (kernel.required_cluster[0] != 0)
    launch.cluster = kernel.required_cluster;
  else if (random.Below(4) == 0)
    launch.cluster = {1 + random.Below(2), 1, 1};
  launch.grid = {launch.cluster[0] * (1 + random.Below(3)), launch.cluster[1], launch.cluster[2]};
  static constexpr uint32_t kShared[] = {0, 16, 4096, 12288, 32768, 65536};
  launch.dynamic_shared_bytes = is_large ? 231424 : kShared[random.Below(std::size(kShared))];
  launch.parameters = NewParameters(random, kernel, memory);
  launch.buffers = memory.buffers;
  return launch;
}

// Fields as nobody would set them.
void MakeAbsurd(Random& random, Launch& launch, Options& options) {
  static const std::vector<uint32_t> kSizes = {
      0, 1, 2, 3, 7, 16, 17, 32, 1023, 1024, 1025, 2000, 65535, 65536, 1u << 31, UINT32_MAX};
  const uint32_t times = 1 + random.Below(3);
  for (uint32_t i = 0; i < times; ++i) {
    switch (random.Below(14)) {
      case 0:
        launch.grid[random.Below(3)] = Pick(random, kSizes);
        break;
      case 1:
        launch.block[random.Below(3)] = Pick(random, kSizes);
        break;
      case 2:
        launch.cluster[random.Below(3)] = Pick(random, kSizes);
        break;
      case 3:
        launch.dynamic_shared_bytes =
            random.Below(2) ? Pick(random, kSizes) : UINT32_MAX - random.Below(2048);
        break;
      case 4:
        launch.parameters.resize(random.Below(300));
        break;
      case 5:
        launch.buffers[random.Below(3)].size = 0;
        break;
      case 6:
        launch.buffers[random.Below(3)].data = nullptr;
        break;
      case 7:
        launch.buffers[random.Below(3)].address = static_cast<uint64_t>(Pick(random, kValues));
        break;
      case 8:
        launch.buffers.clear();
        launch.buffers.resize(3);
        break;
      case 9:
        options.sm_count = Pick(random, kSizes);
        break;
      case 10:
        options.max_reports = random.Below(2);
        break;
      case 11:
        options.max_instructions = random.Below(2);
        break;
      case 12:
        launch.program = nullptr;
        break;
      default:
        launch.grid = {Pick(random, kSizes), Pick(random, kSizes), Pick(random, kSizes)};
    }
  }
}

void RunProgram(Random& random,
                const std::shared_ptr<const Program>& program,
                bool is_large,
                bool is_absurd) {
  const Memory memory = NewMemory(random);
  Options options;
  options.seed = random.Next();
  options.strict = random.Below(2) != 0;
  options.check_races = random.Below(8) != 0;
  options.sm_count = 1 + random.Below(4);
  options.max_instructions = is_large ? 20000 : 4000;
  Launch launch = NewLaunch(random, program, memory, is_large);
  if (is_absurd) MakeAbsurd(random, launch, options);
  std::unique_ptr<Machine> machine;
  try {
    machine = std::make_unique<Machine>(std::move(launch), std::move(options));
  } catch (const std::invalid_argument& error) {
    ++counts.refused;
    if (std::string_view(error.what()).size() < 10) std::abort();
    return;
  }
  ++counts.runs;
  const std::vector<Report>& reports = machine->Run();
  bool limit = false;
  size_t size = 0;
  for (const Report& report : reports) {
    limit |= report.kind == Report::Kind::kLimit;
    size += report.Text().size();
  }
  if (reports.empty())
    ++counts.clean;
  else if (limit)
    ++counts.limits;
  else
    ++counts.reports;
  if (size > 1 << 20) {
    std::fprintf(stderr, "reports of %zu characters\n", size);
    std::abort();
  }
}

void Text(Random& random, const std::vector<std::string>& texts, size_t small) {
  // Large texts are slow to parse, and cut to pieces for that reason.
  std::string text = texts[random.Below(8) == 0 ? random.Below(static_cast<uint32_t>(texts.size()))
                                                : random.Below(static_cast<uint32_t>(small))];
  if (text.size() > 50000 && random.Below(20) != 0) {
    const std::vector<std::string> lines = Lines(text);
    size_t body = 0;
    while (body < lines.size() && lines[body].find(".reg") == std::string::npos) ++body;
    std::vector<std::string> part(
        lines.begin(), lines.begin() + static_cast<ptrdiff_t>(std::min(body + 60, lines.size())));
    const uint32_t first = random.Below(static_cast<uint32_t>(lines.size()));
    for (size_t i = first; i < std::min<size_t>(lines.size(), first + 200); ++i)
      part.push_back(lines[i]);
    part.push_back("ret;\n}\n");
    text = Join(part);
  }
  text = MutateText(random, std::move(text));
  if (is_printed) std::fprintf(stderr, "%s\n", text.c_str());
  std::shared_ptr<const ptx::Module> module;
  try {
    module = ptx::Parse(std::move(text));
  } catch (const ptx::Error&) {
    ++counts.parse_errors;
    return;
  }
  for (const auto& kernel : module->kernels) {
    std::shared_ptr<const Program> program;
    try {
      program = Decode(module, *kernel);
    } catch (const ptx::Error&) {
      ++counts.decode_errors;
      continue;
    }
    RunProgram(random, program, false, false);
  }
}

void Instructions(Random& random, const Source& source, bool is_absurd) {
  ptx::Kernel kernel = *source.kernel;
  std::deque<std::string> names;
  if (!is_absurd) MutateKernel(random, kernel, names);
  std::shared_ptr<const Program> program;
  try {
    program = Decode(source.module, kernel);
  } catch (const ptx::Error&) {
    ++counts.decode_errors;
    return;
  }
  RunProgram(random, program, source.is_large, is_absurd);
}

int Main(int argc, char** argv) {
  uint64_t only = UINT64_MAX;
  double seconds = 10;
  std::vector<std::string> texts;
  for (const char* kernel : kKernels) texts.push_back(std::string(kHeader) + kernel + "\n");
  const size_t small = texts.size();
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
      current_seed = std::strtoull(argv[++i], nullptr, 10);
    else if (std::strcmp(argv[i], "--seconds") == 0 && i + 1 < argc)
      seconds = std::atof(argv[++i]);
    else if (std::strcmp(argv[i], "--print") == 0)
      is_printed = true;
    else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc)
      only = std::strtoull(argv[++i], nullptr, 10);
    else {
      std::ifstream file(argv[i], std::ios::binary);
      if (!file) {
        std::fprintf(stderr, "cannot read %s\n", argv[i]);
        return 2;
      }
      texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
  }
  std::vector<Source> small_sources, large_sources;
  std::set<std::string> all_opcodes, all_suffixes;
  for (size_t i = 0; i < texts.size(); ++i) {
    try {
      std::shared_ptr<const ptx::Module> module = ptx::Parse(texts[i]);
      for (const auto& kernel : module->kernels) {
        Decode(module, *kernel);
        Source source{module, kernel.get(), kernel->statements.size() > 500};
        (source.is_large ? large_sources : small_sources).push_back(source);
        for (const ptx::Statement& statement : kernel->statements) {
          all_opcodes.emplace(statement.opcode);
          Parts parts(statement.opcode);
          for (parts.Next(); !parts.done();) all_suffixes.emplace(parts.Next());
        }
      }
    } catch (const ptx::Error& error) {
      std::fprintf(stderr, "text %zu, unchanged: %s\n", i, error.what());
      if (i < small) return 2;
    }
  }
  opcodes.assign(all_opcodes.begin(), all_opcodes.end());
  suffixes.assign(all_suffixes.begin(), all_suffixes.end());
  std::signal(SIGVTALRM, OnTimeout);
  std::signal(SIGABRT, OnAbort);
  const std::clock_t start = std::clock();
  long most_taken = 0;
  for (current_input = only == UINT64_MAX ? 0 : only;; ++current_input) {
    if (std::clock() - start > seconds * CLOCKS_PER_SEC) break;
    itimerval limit = {};
    limit.it_value.tv_sec = kSecondsOfInput;
    setitimer(ITIMER_VIRTUAL, &limit, nullptr);
    Random random(current_seed * 1000003 + current_input);
    ++counts.inputs;
    ForgetPeak();
    const long before = ResidentKb("VmRSS:");
    const uint32_t kind = random.Below(100);
    if (kind < 35)
      Text(random, texts, small);
    else if (kind < 42)
      Instructions(random, Pick(random, small_sources), true);
    else if (kind < 52 && !large_sources.empty())
      Instructions(random, Pick(random, large_sources), random.Below(10) == 0);
    else
      Instructions(random, Pick(random, small_sources), false);
    const long taken = ResidentKb("VmHWM:") - before;
    most_taken = std::max(most_taken, taken);
    if (taken > kMaxTakenKb) {
      std::fprintf(stderr, "%ld MiB of memory\n", taken >> 10);
      std::abort();
    }
    if (only != UINT64_MAX) break;
  }
  std::printf(
      "seed %llu: %llu inputs; %llu parse errors, %llu decode errors, %llu launches refused, %llu "
      "runs: "
      "%llu with reports, %llu at the limit, %llu clean; an input took at most %ld MiB\n",
      static_cast<unsigned long long>(current_seed),
      static_cast<unsigned long long>(counts.inputs),
      static_cast<unsigned long long>(counts.parse_errors),
      static_cast<unsigned long long>(counts.decode_errors),
      static_cast<unsigned long long>(counts.refused),
      static_cast<unsigned long long>(counts.runs),
      static_cast<unsigned long long>(counts.reports),
      static_cast<unsigned long long>(counts.limits),
      static_cast<unsigned long long>(counts.clean),
      most_taken >> 10);
  return 0;
}

}  // namespace
}  // namespace jax_fa4::emulator

// Read by the sanitizers.
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

int main(int argc, char** argv) { return jax_fa4::emulator::Main(argc, argv); }
