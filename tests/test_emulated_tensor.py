"""Tensor cores against numpy: tcgen05 and its memory, wgmma, mma.sync, ldmatrix and stmatrix (PTX ISA 9.7.14 to 16).

Products are of small integers, so that every order of additions gives the same; one test states how Hopper adds.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import HEADER, check_launch, cuda_kernel, launch, random

from jax_fa4.emulated import Kernel

BF16 = ml_dtypes.bfloat16
LANES = np.arange(32)

# ---- Operands in shared memory: canonical layouts (9.7.15.5.1, 9.7.16.5.1), as places of bytes


def exchanged(byte: np.ndarray, width: int) -> np.ndarray:
    """The swizzle: the bits of a byte's address from 4 up, exclusive or those from 7 up (PTX ISA 5.5.6)."""
    bits = {16: 0, 32: 1, 64: 2, 128: 3}[width]
    return byte ^ (byte >> 7 & ((1 << bits) - 1)) << 4


def lay_out(matrix: np.ndarray, major: str, width: int) -> tuple[np.ndarray, int, int, list[int]]:
    """Bytes of a matrix (M or N by K) in shared memory, leading and stride offsets, and where each 16 of K start.

    width is the swizzle's: 16 means none.
    """
    rows, depth = matrix.shape
    mn, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    if major == "k" and width == 16:  # core matrices of 8 rows by 16 bytes, those along K next to each other
        leading, stride = 128, 128 * (depth // 8)
        byte = mn % 8 * 16 + mn // 8 * stride + k // 8 * leading + k % 8 * 2
        starts = [2 * leading * i for i in range(depth // 16)]
    elif major == "k":  # tiles of `width` bytes of K, each with all rows
        leading, stride = 16, 8 * width
        per = width // 2
        tile = rows * width
        tile = -(-tile // 1024) * 1024
        byte = k // per * tile + mn * width + k % per * 2
        starts = [16 * i // per * tile + 16 * i % per * 2 for i in range(depth // 16)]
    elif width == 16:  # core matrices of 8 K by 16 bytes of M or N
        leading, stride = 128, 128 * (depth // 8)
        byte = k % 8 * 16 + mn // 8 * stride + k // 8 * leading + mn % 8 * 2
        starts = [2 * leading * i for i in range(depth // 16)]
    else:  # atoms of 8 K by `width` bytes of M or N; those along K next to each other
        per = width // 2
        stride, leading = 8 * width, 8 * width * (depth // 8)
        byte = mn // per * leading + k // 8 * stride + k % 8 * width + mn % per * 2
        starts = [2 * stride * i for i in range(depth // 16)]
    byte = exchanged(byte, width)
    image = np.zeros(-(-(int(byte.max()) + 2) // 1024) * 1024, np.uint8)
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, depth, 2)
    image[byte] = raw[..., 0]
    image[byte + 1] = raw[..., 1]
    return image, leading, stride, starts


def descriptors(laid_out: tuple[np.ndarray, int, int, list[int]], base: int, width: int, hopper: bool) -> np.ndarray:
    _, leading, stride, starts = laid_out
    mode = {16: 0, 128: 1, 64: 2, 32: 3} if hopper else {16: 0, 128: 2, 64: 4, 32: 6}
    common = (
        (leading >> 4) << 16 | (stride >> 4) << 32 | (0 if hopper else 1 << 46) | mode[width] << (62 if hopper else 61)
    )
    return np.array([(base + start) >> 4 | common for start in starts], np.uint64)


def integers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    return random(seed).integers(-4, 5, shape).astype(dtype)


# ---- tcgen05

COPY = ", ".join(f"%{i}" for i in range(8))
TCGEN05 = f"""
FN void Before() {{ asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }}
FN void After() {{ asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }}
FN void Load8(u32 at, u32* x) {{
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{COPY}}}, [%8];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]), "=r"(x[4]), "=r"(x[5]), "=r"(x[6]),
                   "=r"(x[7]) : "r"(at));
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}}
FN void Store8(u32 at, const u32* x) {{
  asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%8], {{{COPY}}};"
               :: "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7]),
                   "r"(at) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}}
FN u32 Allocate(u32* to, u32 columns, int group) {{
  if (threadIdx.x < 32) {{
    if (group == 1) {{
      asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
          :: "r"(Shared(to)), "r"(columns) : "memory");
      asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    }} else {{
      asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;"
          :: "r"(Shared(to)), "r"(columns) : "memory");
      asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    }}
  }}
  Before(); __syncthreads(); After();
  return *to;
}}
FN void Free(u32 at, u32 columns, int group) {{
  Before(); __syncthreads(); After();
  if (threadIdx.x >= 32) return;
  if (group == 1) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(at), "r"(columns));
  else asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" :: "r"(at), "r"(columns));
}}
"""


def mma_kernel(group: int, negative: str = "") -> Kernel:
    cluster = "__cluster_dims__(2, 1, 1)" if group == 2 else ""
    if group == 1:
        where, which = "shared::cluster.b64 [%0]", '"r"(Shared(&done))'
    else:
        where, which = "shared::cluster.multicast::cluster.b64 [%0], %1", '"r"(Shared(&done)), "h"((short)3)'
    commit = f'asm volatile("tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.{where};" :: {which} : "memory");'
    return cuda_kernel(
        TCGEN05
        + f"""
    #define MMA(a, constraint, value) asm volatile("{{ .reg .pred p; setp.ne.u32 p, %4, 0; \\n" \\
        "tcgen05.mma.cta_group::{group}.kind::f16 [%0], " a ", %2, %3, p; }}" \\
        :: "r"(d + (lane_of_d << 16)), constraint(value), "l"(db[i] + (b_at >> 4)), "r"(idesc), \\
           "r"(u32(accumulate || i)) : "memory")
    // Lane by lane: d0 is what D holds before, a_tensor is A for tensor memory, if any.
    extern "C" __global__ void {cluster} k(u32* out, const char* a, u32 a_bytes, const char* b, u32 b_bytes,
        const u64* da, const u64* db, u32 steps, u32 idesc, u32 columns, const u32* d0, const u32* a_tensor,
        u32 lane_of_d) {{
      extern __shared__ __attribute__((aligned(1024))) char x[];
      __shared__ u64 loaded, done;
      __shared__ u32 slot;
      u32 t = threadIdx.x, cta = blockIdx.x;
      if (t == 0) {{ Init(&loaded, 1); Init(&done, 1); InitFence(); }}
      u32 tensor = Allocate(&slot, 512, {group}), d = tensor + 32, at = tensor + 288, quarter = t / 32 * 32 << 16;
      bool accumulate = d0 != nullptr;
      if (accumulate) for (u32 c = 0; c < columns; c += 8) Store8(d + quarter + c, d0 + (cta * 128 + t) * columns + c);
      if (a_tensor) {{
        for (u32 c = 0; c < steps * 8; c += 8) Store8(at + quarter + c, a_tensor + (cta * 128 + t) * steps * 8 + c);
      }}
      Before(); __syncthreads(); {"ClusterSync();" if group == 2 else ""} After();
      if (t == 0) {{
        Expect(&loaded, a_bytes + b_bytes);
        if (a_bytes) Load(x, a + cta * a_bytes, a_bytes, &loaded);
        Load(x + a_bytes, b + cta * b_bytes, b_bytes, &loaded);
        Wait(&loaded, 0);
      }}
      {"ClusterSync();" if group == 2 else ""}
      if (t == 0 && cta == 0) {{
        u32 a_at = Shared(x) & 0xffffff, b_at = a_at + a_bytes;
        for (u32 i = 0; i < steps; ++i) {{
          if (a_tensor) MMA("[%1]", "r", at + 8 * i); else MMA("%1", "l", da[i] + (a_at >> 4));
        }}
        {commit}
      }}
      Wait(&done, 0);
      After();
      for (u32 c = 0; c < columns; c += 8) {{
        u32 r[8];
        Load8(d + quarter + c, r);
        for (int i = 0; i < 8; ++i) out[(cta * 128 + t) * columns + c + i] = r[i];
      }}
      {"Before(); ClusterSync(); After();" if group == 2 else ""}
      Free(tensor, 512, {group});
    }}"""
    )


def instruction_descriptor(
    m: int, n: int, a_major: str, b_major: str, dtype: Any, negate_a: bool = False, negate_b: bool = False
) -> int:
    kind = 1 if dtype == BF16 else 0
    return (
        1 << 4
        | kind << 7
        | kind << 10
        | negate_a << 13
        | negate_b << 14
        | (a_major == "mn") << 15
        | (b_major == "mn") << 16
        | n >> 3 << 17
        | m >> 4 << 24
    )


KERNELS: dict[int, Kernel] = {}


def run_mma(
    a: np.ndarray,
    b: np.ndarray,
    *,
    majors: tuple[str, str] = ("k", "k"),
    widths: tuple[int, int] = (128, 128),
    group: int = 1,
    c: np.ndarray | None = None,
    a_in_tensor: bool = False,
    negate: tuple[bool, bool] = (False, False),
    rows_of_d: int = 0,
    lane_of_d: int = 0,
    seed: int = 0,
) -> np.ndarray:
    """A B^T + C by tcgen05.mma, of which every CTA of a pair holds half of A's and half of B's rows."""
    m, depth = a.shape
    n = len(b)
    rows = m // group
    laid_a = [lay_out(x, majors[0], widths[0]) for x in np.split(a, group)]
    laid_b = [lay_out(x, majors[1], widths[1]) for x in np.split(b, group)]
    folded = group == 2 and rows == 64  # layout B: the second half of the columns lies in lanes 64 to 127
    columns = n // 2 if folded else n

    def to_lanes(full: np.ndarray) -> np.ndarray:
        if not folded:
            return full.reshape(group, 128, n)
        return np.concatenate(np.split(full.reshape(group, 64, n), 2, axis=2), axis=1)

    if group not in KERNELS:
        KERNELS[group] = mma_kernel(group)
    a_bytes = 0 if a_in_tensor else len(laid_a[0][0])
    out = np.zeros((group, 128, columns), np.float32)
    tensor: Any = 0
    if a_in_tensor:
        tensor = np.zeros((group, 128, depth // 2), np.uint32)
        tensor[:, :rows] = np.ascontiguousarray(a).view(np.uint32).reshape(group, rows, -1)
        if folded:
            tensor[:, 64:] = tensor[:, :64]
    check_launch(
        KERNELS[group],
        out.view(np.uint32),
        np.concatenate([x[0] for x in laid_a]),
        a_bytes,
        np.concatenate([x[0] for x in laid_b]),
        len(laid_b[0][0]),
        descriptors(laid_a[0], 0, widths[0], False),
        descriptors(laid_b[0], 0, widths[1], False),
        depth // 16,
        instruction_descriptor(m, n, *majors, a.dtype, *negate),
        columns,
        0 if c is None else np.ascontiguousarray(to_lanes(c.astype(np.float32))),
        tensor,
        lane_of_d,
        threads=128,
        ctas=group,
        cluster=group,
        dynamic_shared_bytes=a_bytes + len(laid_b[0][0]),
        seed=seed,
    )
    if not folded:
        return out.reshape(rows_of_d or m, n)
    return np.concatenate(np.split(out, 2, axis=1), axis=2).reshape(m, n)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) @ b.astype(np.float32).T


@pytest.mark.parametrize("a_width", [128, 64, 32, 16])
@pytest.mark.parametrize("b_width", [128, 64, 32, 16])
@pytest.mark.parametrize("majors", [("k", "k"), ("k", "mn"), ("mn", "k"), ("mn", "mn")], ids="-".join)
def test_mma_layouts(a_width: int, b_width: int, majors: tuple[str, str]) -> None:
    a, b = integers((128, 64), BF16, 1), integers((64, 64), BF16, 2)
    np.testing.assert_array_equal(run_mma(a, b, majors=majors, widths=(a_width, b_width)), product(a, b))


@pytest.mark.parametrize("n", [16, 48, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=["bf16", "f16"])
def test_mma_shapes_and_accumulation(n: int, dtype: Any) -> None:
    a, b, c = integers((128, 32), dtype, 1), integers((n, 32), dtype, 2), integers((128, n), np.float32, 3)
    np.testing.assert_array_equal(run_mma(a, b), product(a, b))
    np.testing.assert_array_equal(run_mma(a, b, c=c), product(a, b) + c)
    np.testing.assert_array_equal(run_mma(a, b, c=c, negate=(True, False)), c - product(a, b))
    np.testing.assert_array_equal(run_mma(a, b, c=c, negate=(True, True)), c + product(a, b))


@pytest.mark.parametrize("half", [0, 16])
@pytest.mark.parametrize("n", [8, 64, 256])
def test_mma_of_64_rows(half: int, n: int) -> None:
    """Row i lies in the lane i % 16 of the quarter i / 16, or 16 lanes above, and other lanes stay as they are."""
    a, b, c = integers((64, 64), BF16, 1), integers((n, 64), BF16, 2), integers((128, n), np.float32, 3)
    lanes = np.arange(64) // 16 * 32 + np.arange(64) % 16 + half
    expected = c.copy()
    expected[lanes] += product(a, b)
    np.testing.assert_array_equal(run_mma(a, b, c=c, rows_of_d=128, lane_of_d=half), expected)


@pytest.mark.parametrize("b_major", ["k", "mn"])
def test_mma_of_tensor_memory(b_major: str) -> None:
    """A from tensor memory: two elements of K a column."""
    a, b, c = integers((128, 64), BF16, 1), integers((128, 64), BF16, 2), integers((128, 128), np.float32, 3)
    np.testing.assert_array_equal(run_mma(a, b, majors=("k", b_major), a_in_tensor=True, c=c), product(a, b) + c)


@pytest.mark.parametrize(("m", "n"), [(256, 256), (256, 64), (128, 128), (128, 64), (256, 32)])
@pytest.mark.parametrize("b_major", ["k", "mn"])
@pytest.mark.parametrize("a_in_tensor", [False, True])
def test_mma_of_pairs(m: int, n: int, b_major: str, a_in_tensor: bool) -> None:
    a, b, c = integers((m, 32), BF16, 1), integers((n, 32), BF16, 2), integers((m, n), np.float32, 3)
    width = 128 if b_major == "k" or n // 2 >= 64 else n
    for seed in range(3):
        actual = run_mma(
            a, b, majors=("k", b_major), widths=(128, width), group=2, c=c, a_in_tensor=a_in_tensor, seed=seed
        )
        np.testing.assert_array_equal(actual, product(a, b) + c)


@pytest.mark.parametrize("repeat", [1, 2, 4, 8, 16, 32, 64, 128])
def test_tensor_memory_of_each_warp(repeat: int) -> None:
    """32x32b: register r of thread t is column r of the lane t of the warp's quarter."""
    names = [f"%r{i}" for i in range(repeat)]
    values = ", ".join(names)
    kernel = Kernel(f"""{HEADER.format(target="sm_100a")} .visible .entry k(.param .u64 p0, .param .u64 p1) {{
    .reg .b32 %r<{repeat}>; .reg .b32 %s<8>; .reg .b64 %rd<8>; .reg .pred %p<2>; .shared .align 4 .b32 slot;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; mov.u32 %s0, %tid.x; setp.ge.u32 %p0, %s0, 32;
    @%p0 bra AFTER; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 256; AFTER:
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; ld.shared.b32 %s1, [slot];
    and.b32 %s2, %s0, 96; shl.b32 %s2, %s2, 16; add.u32 %s1, %s1, %s2;
    mul.lo.u32 %s3, %s0, {4 * repeat}; cvt.u64.u32 %rd2, %s3; add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2;
    {" ".join(f"ld.global.b32 {x}, [%rd1+{4 * i}];" for i, x in enumerate(names))}
    tcgen05.st.sync.aligned.32x32b.x{repeat}.b32 [%s1+64], {{{values}}}; tcgen05.wait::st.sync.aligned;
    {" ".join(f"mov.b32 {x}, 0;" for x in names)}
    tcgen05.ld.sync.aligned.32x32b.x{repeat}.b32 {{{values}}}, [%s1+64]; tcgen05.wait::ld.sync.aligned;
    {" ".join(f"st.global.b32 [%rd0+{4 * i}], {x};" for i, x in enumerate(names))}
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; ld.shared.b32 %s1, [slot];
    @%p0 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %s1, 256; END: ret; }}""")
    x = random().integers(0, 1 << 32, (128, repeat), np.uint32)
    out = np.zeros_like(x)
    check_launch(kernel, out, x, threads=128)
    np.testing.assert_array_equal(out, x)


# Where register r of thread t lies (lane, column): 9.7.16.2.3.1, figures 183 to 187; the offset is of 16x32bx2.
PLACES: dict[str, tuple[int, Any]] = {
    "16x64b": (1, lambda t, r, offset: (t // 4 + t % 2 * 8, 2 * r + t // 2 % 2)),
    "16x128b": (2, lambda t, r, offset: (t // 4 + r % 2 * 8, r // 2 * 4 + t % 4)),
    "16x256b": (4, lambda t, r, offset: (t // 4 + r // 2 % 2 * 8, r // 4 * 8 + t % 4 * 2 + r % 2)),
    "16x32bx2": (1, lambda t, r, offset: (t % 16, r + t // 16 * offset)),
}


@pytest.mark.parametrize("shape", PLACES)
@pytest.mark.parametrize("repeat", [1, 2, 16])
@pytest.mark.parametrize("half", [0, 16])
def test_shapes_of_tensor_memory(shape: str, repeat: int, half: int) -> None:
    """Stored by a shape of 16 lanes and read back by whole lanes; and the other way."""
    per, place = PLACES[shape]
    count = per * repeat
    names = [f"%r{i}" for i in range(count)]
    values, offset = ", ".join(names), 64
    split = f", {offset}" if shape == "16x32bx2" else ""
    whole = [f"%w{i}" for i in range(128)]
    kernel = Kernel(f"""{HEADER.format(target="sm_100a")} .visible .entry k(
    .param .u64 p0, .param .u64 p1, .param .u64 p2) {{
    .reg .b32 %r<{count}>; .reg .b32 %w<128>; .reg .b32 %s<8>; .reg .b64 %rd<8>; .reg .pred %p<2>;
        .shared .align 4 .b32 slot;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2]; mov.u32 %s0, %tid.x; setp.ge.u32 %p0,
        %s0, 32;
    @%p0 bra AFTER; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 256; AFTER:
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; ld.shared.b32 %s1, [slot];
    and.b32 %s2, %s0, 96; shl.b32 %s2, %s2, 16; add.u32 %s1, %s1, %s2; add.u32 %s3, %s1, {half << 16};
    mad.wide.u32 %rd0, %s0, 512, %rd0; mad.wide.u32 %rd1, %s0, {4 * count}, %rd1; mad.wide.u32 %rd2, %s0,
        {4 * count}, %rd2;
    {" ".join(f"mov.b32 {x}, 7;" for x in whole)}
    tcgen05.st.sync.aligned.32x32b.x128.b32 [%s1], {{{", ".join(whole)}}}; tcgen05.wait::st.sync.aligned;
    {" ".join(f"ld.global.b32 {x}, [%rd1+{4 * i}];" for i, x in enumerate(names))}
    tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%s3]{split}, {{{values}}}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x128.b32 {{{", ".join(whole)}}}, [%s1]; tcgen05.wait::ld.sync.aligned;
    {" ".join(f"st.global.b32 [%rd0+{4 * i}], {x};" for i, x in enumerate(whole))}
    tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{{values}}}, [%s3]{split}; tcgen05.wait::ld.sync.aligned;
    {" ".join(f"st.global.b32 [%rd2+{4 * i}], {x};" for i, x in enumerate(names))}
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; ld.shared.b32 %s1, [slot];
    @%p0 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %s1, 256; END: ret; }}""")
    x = random().integers(0, 1 << 32, (4, 32, count), np.uint32)
    out, back = np.zeros((4, 32, 128), np.uint32), np.zeros_like(x)
    check_launch(kernel, out, x, back, threads=128)
    expected = np.full_like(out, 7)
    warp, t, r = np.meshgrid(np.arange(4), np.arange(32), np.arange(count), indexing="ij")
    lane, column = place(t, r, offset)
    expected[warp, lane + half, column] = x
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("repeat", [1, 4])
def test_packed_halves_of_tensor_memory(repeat: int) -> None:
    """unpack::16b stores a register in the lower halves of two columns, and pack::16b puts them together again."""
    kernel = cuda_kernel(
        TCGEN05
        + f"""
    extern "C" __global__ void k(u32* out, const u32* in) {{
      __shared__ u32 slot;
      u32 tensor = Allocate(&slot, 32, 1), at = tensor + (threadIdx.x / 32 * 32 << 16), x[8], y[{repeat}];
      for (int i = 0; i < {repeat}; ++i) y[i] = in[threadIdx.x * {repeat} + i];
      asm volatile("tcgen05.st.sync.aligned.32x32b.x{repeat}.unpack::16b.b32 [%{repeat}], {{{COPY[: 4 * repeat - 2]}}};"
                   :: {", ".join(f'"r"(y[{i}])' for i in range(repeat))}, "r"(at) : "memory");
      asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
      Load8(at, x);
      for (int i = 0; i < {2 * repeat}; ++i) out[threadIdx.x * {3 * repeat} + i] = x[i];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x{repeat}.pack::16b.b32 {{{COPY[: 4 * repeat - 2]}}}, [%{repeat}];"
                   : {", ".join(f'"=r"(y[{i}])' for i in range(repeat))} : "r"(at));
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      for (int i = 0; i < {repeat}; ++i) out[threadIdx.x * {3 * repeat} + {2 * repeat} + i] = y[i];
      Free(tensor, 32, 1);
    }}"""
    )
    x = random().integers(0, 1 << 32, (128, repeat), np.uint32)
    out = np.zeros((128, 3 * repeat), np.uint32)
    check_launch(kernel, out, x, threads=128)
    np.testing.assert_array_equal(out, np.concatenate([x.view(np.uint16).astype(np.uint32), x], 1))


def test_allocation_waits_for_columns() -> None:
    """Allocations block until there is room; what one warp has stored stays where its address says."""
    kernel = cuda_kernel(
        TCGEN05
        + """
    extern "C" __global__ void k(u32* out) {
      __shared__ u32 slot[4];
      u32 w = threadIdx.x / 32, columns = w == 3 ? 512 : 32 << w;
      for (int round = 0; round < 3; ++round) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
            :: "r"(Shared(&slot[w])), "r"(columns) : "memory");
        __syncwarp();
        u32 at = slot[w] + (w * 32 << 16), x[8];
        for (u32 i = 0; i < 8; ++i) x[i] = threadIdx.x * 100 + i + round;
        Store8(at + columns - 8, x);
        Load8(at + columns - 8, x);
        for (u32 i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] += x[i];
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(slot[w]), "r"(columns));
        __syncwarp();
      }
    }"""
    )
    for seed in range(10):
        out = np.zeros((128, 8), np.uint32)
        check_launch(kernel, out, threads=128, seed=seed)
        np.testing.assert_array_equal(out, 3 * (np.arange(128)[:, None] * 100 + np.arange(8)) + 3)


PAIR = (
    TCGEN05
    + """
FN void AllocatePair(u32* to, u32 columns) {
  asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;"
      :: "r"(Shared(to)), "r"(columns) : "memory");
  __syncwarp();
}
FN void FreePair(u32 at, u32 columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" :: "r"(at), "r"(columns) : "memory");
  __syncwarp();
}
FN void RelinquishPair() { asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory"); }
FN void Linger() { for (int i = 0; i < 100; ++i) asm volatile("nanosleep.u32 1;" ::: "memory"); }
"""
)


def pair_kernel(body: str) -> Kernel:
    """A kernel of one argument, with `cta`, `warp` and a slot for each warp's address of tensor memory."""
    return cuda_kernel(f"""{PAIR}
    extern "C" __global__ void k(u32* out) {{
      __shared__ u32 slots[4];
      u32 t = threadIdx.x, warp = t / 32, cta = blockIdx.x, *slot = &slots[warp];
      {body}
    }}""")


@pytest.mark.parametrize("late", [0, 1])
def test_pairs_allocate_together(late: int) -> None:
    """A product may follow the allocation at once, even if the peer CTA has come to its own late."""
    kernel = pair_kernel(f"""
      alignas(1024) __shared__ u32 operands[1024];
      __shared__ u64 done;
      for (u32 i = t; i < 1024; i += 128) operands[i] = 0;
      ProxyFence();
      if (t == 0) {{ Init(&done, 1); InitFence(); }}
      ClusterSync();
      if (warp == 0) {{
        if (cta == {late}) Linger();
        AllocatePair(slot, 64);
      }}
      if (t == 0 && cta == 0) {{
        u64 descriptor = 1ull << 46 | 8ull << 16 | 16ull << 32 | (Shared(operands) & 0x3ffff) >> 4;
        asm volatile("{{ .reg .pred p; setp.ne.u32 p, 0, 0;\\n"
                     "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %1, %2, p; }}"
                     :: "r"(slots[0]), "l"(descriptor), "r"(1 << 4 | 32 >> 3 << 17 | 256 >> 4 << 24) : "memory");
        asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
                     "[%0], %1;" :: "r"(Shared(&done)), "h"((short)3) : "memory");
      }}
      __syncthreads();
      Wait(&done, 0);
      After();
      for (u32 c = 0; c < 32; c += 8) {{
        u32 x[8];
        Load8(slots[0] + (warp * 32 << 16) + c, x);
        for (int i = 0; i < 8; ++i) out[(cta * 128 + t) * 32 + c + i] = x[i];
      }}
      Before();
      ClusterSync();
      After();
      if (warp == 0) {{ RelinquishPair(); FreePair(*slot, 64); }}""")
    for seed in range(10):
        out = np.ones((256, 32), np.uint32)
        check_launch(kernel, out, threads=128, ctas=2, cluster=2, seed=seed)
        np.testing.assert_array_equal(out, 0)


def test_pairs_have_the_same_columns() -> None:
    """Even where one CTA has others free than the other."""
    kernel = pair_kernel("""
      AllocatePair(slot, 64);
      u32 a = *slot;
      AllocatePair(slot, 64);
      u32 b = *slot;
      FreePair(cta ? a : b, 64);
      AllocatePair(slot, 64);
      out[cta * 32 + t] = *slot;
      FreePair(cta ? b : a, 64);
      FreePair(*slot, 64);""")
    for seed in range(10):
        out = np.zeros((2, 32), np.uint32)
        check_launch(kernel, out, ctas=2, cluster=2, seed=seed)
        np.testing.assert_array_equal(out, 128)


def test_pairs_wait_for_columns() -> None:
    """Four warps of each CTA want half of the columns, and hold them one at a time, so that any of them may meet."""
    kernel = pair_kernel("""
      for (u32 round = 0; round < 3; ++round) {
        AllocatePair(slot, 256);
        u32 at = *slot + (warp * 32 << 16), x[8];
        for (u32 i = 0; i < 8; ++i) x[i] = (cta * 128 + t) * 100 + i + round;
        Store8(at + 248, x);
        if (warp == 2 * cta) Linger();
        Load8(at + 248, x);
        for (u32 i = 0; i < 8; ++i) out[(cta * 128 + t) * 8 + i] += x[i];
        FreePair(*slot, 256);
      }""")
    for seed in range(10):
        out = np.zeros((256, 8), np.uint32)
        check_launch(kernel, out, threads=128, ctas=2, cluster=2, seed=seed)
        np.testing.assert_array_equal(out, 3 * (np.arange(256)[:, None] * 100 + np.arange(8)) + 3)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            "AllocatePair(slot, cta ? 64 : 32); FreePair(*slot, cta ? 64 : 32);",
            "misuse",
            r"tcgen05\.alloc\.cta_group::2 is of (32 columns here, but of 64|64 columns here, but of 32) in the peer",
        ),
        (
            "AllocatePair(slot, 64); FreePair(*slot, cta ? 64 : 32);",
            "misuse",
            r"tcgen05\.dealloc\.cta_group::2 is of (32 columns here, but of 64|64 columns here, but of 32) in the peer",
        ),
        (
            "if (cta == 0) { AllocatePair(slot, 64); FreePair(*slot, 64); }",
            "deadlock",
            r"wait for a warp of the peer CTA to execute tcgen05\.alloc\.cta_group::2, too",
        ),
        (
            "AllocatePair(slot, 64); if (cta == 0) FreePair(*slot, 64);",
            "deadlock",
            r"wait for a warp of the peer CTA to execute tcgen05\.dealloc\.cta_group::2, too",
        ),
        (
            "AllocatePair(slot, 64); FreePair(*slot, 64); if (cta == 0) RelinquishPair();",
            "deadlock",
            r"wait for a warp of the peer CTA to execute tcgen05\.relinquish_alloc_permit\.cta_group::2, too",
        ),
        (
            "if (cta == 0) RelinquishPair(); else AllocatePair(slot, 64);",
            "deadlock",
            r"wait for a warp of the peer CTA to execute tcgen05\.alloc\.cta_group::2, too",
        ),
        (
            "RelinquishPair(); AllocatePair(slot, 64);",
            "misuse",
            r"tcgen05\.alloc after tcgen05\.relinquish_alloc_permit",
        ),
        (
            "AllocatePair(slot, 512); AllocatePair(slot, 32);",
            "deadlock",
            "wait for 32 columns of tensor memory in both CTAs of a pair",
        ),
        (
            """u32 to = Map(Shared(&slots[1]), 1);
            if (cta == 0) asm volatile("st.shared::cluster.u32 [%0], 7;" :: "r"(to) : "memory");
            AllocatePair(slot, 64); FreePair(*slot, 64); RelinquishPair();
            if (cta == 1) out[t] = slots[1];""",
            "race",
            "nothing orders two accesses of shared memory",
        ),
    ],
    ids=[
        "columns of alloc",
        "columns of dealloc",
        "alloc of one",
        "dealloc of one",
        "relinquish of one",
        "relinquish of the peer",
        "alloc after relinquish",
        "room",
        "order",
    ],
)
def test_pairs_that_do_not_allocate_together(body: str, kind: str, message: str) -> None:
    kernel = pair_kernel(body)
    for seed in range(10):
        reports = launch(kernel, np.zeros(64, np.uint32), ctas=2, cluster=2, seed=seed).reports
        assert any(report.kind == kind and re.search(message, str(report)) for report in reports), reports


@pytest.mark.parametrize("ctas", [1, 3])
def test_pairs_need_two_ctas(ctas: int) -> None:
    kernel = pair_kernel("AllocatePair(slot, 64); FreePair(*slot, 64);")
    (report,) = launch(kernel, np.zeros(1, np.uint32), ctas=ctas, cluster=ctas).reports
    assert report.kind == "misuse"
    assert "tcgen05.alloc.cta_group::2 needs a cluster of two CTAs" in report.message


# ---- wgmma


def wgmma_kernel(
    n: int, dtype: Any, majors: tuple[str, str], a_in_registers: bool, signs: tuple[int, int] = (1, 1)
) -> Kernel:
    count = n // 2
    d = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    kind = "bf16" if dtype == BF16 else "f16"
    fence = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
    wait = 'asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");'
    load_a = f"u32 r[4]; for (int j = 0; j < 4; ++j) r[j] = registers[(i * 128 + t) * 4 + j]; {fence}"
    if a_in_registers:
        a_text, a_inputs, at = (
            "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}",
            ", ".join(f'"r"(r[{i}])' for i in range(4)),
            count + 4,
        )
        flags = f"{signs[0]}, {signs[1]}, {int(majors[1] == 'mn')}"
    else:
        a_text, a_inputs, at = f"%{count}", '"l"(da[i])', count + 1
        flags = f"{signs[0]}, {signs[1]}, {int(majors[0] == 'mn')}, {int(majors[1] == 'mn')}"
    return cuda_kernel(
        f"""
    extern "C" __global__ void k(float* out, const char* a, u32 a_bytes, const char* b, u32 b_bytes, const u64* da,
                                 const u64* db, u32 steps, const float* c, const u32* registers) {{
      extern __shared__ __attribute__((aligned(1024))) char x[];
      __shared__ u64 loaded;
      u32 t = threadIdx.x;
      if (t == 0) {{
        Init(&loaded, 1); InitFence(); Expect(&loaded, a_bytes + b_bytes);
        Load(x, a, a_bytes, &loaded); Load(x + a_bytes, b, b_bytes, &loaded);
      }}
      __syncthreads();
      Wait(&loaded, 0);
      float d[{count}];
      for (int i = 0; i < {count}; ++i) d[i] = c ? c[t * {count} + i] : 5.0f;
      {"" if a_in_registers else fence}
      #pragma unroll 1
      for (u32 i = 0; i < steps; ++i) {{
        {load_a if a_in_registers else ""}
        asm volatile("{{ .reg .pred p; setp.ne.u32 p, %{at + 1}, 0;\\n"
                     "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
                     "{{{d}}}, {a_text}, %{at}, p, {flags}; }}"
                     : {outputs} : {a_inputs}, "l"(db[i]), "r"(u32(i || c)));
        {wait if a_in_registers else ""}
      }}
      {"" if a_in_registers else wait}
      for (int i = 0; i < {count}; ++i) out[t * {count} + i] = d[i];
    }}""",
        "compute_90a",
    )


def fragment(matrix: np.ndarray) -> np.ndarray:
    """Accumulators of 64 rows (9.7.15.5.1.1.2): [thread][register]."""
    n = matrix.shape[1]
    thread, i = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    return np.ascontiguousarray(matrix[row, i // 4 * 8 + thread % 4 * 2 + i % 2])


def a_fragments(a: np.ndarray) -> np.ndarray:
    """A in registers: [step][thread][register], two elements of K each."""
    packed = np.ascontiguousarray(a).view(np.uint32)
    step, thread, r = np.meshgrid(np.arange(a.shape[1] // 16), np.arange(len(a) * 2), np.arange(4), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + r % 2 * 8
    return np.ascontiguousarray(packed[row, step * 8 + thread % 4 + r // 2 * 4])


@pytest.mark.parametrize("n", [8, 24, 64, 256])
@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_wgmma(n: int, dtype: Any, a_in_registers: bool, accumulate: bool) -> None:
    run_wgmma(n, dtype, ("k", "k"), (128, 128), a_in_registers, accumulate)


@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (32, 32), (16, 16), (128, 16), (32, 64)])
@pytest.mark.parametrize("majors", [("k", "mn"), ("mn", "k"), ("mn", "mn"), ("k", "k")], ids="-".join)
def test_wgmma_layouts(majors: tuple[str, str], widths: tuple[int, int]) -> None:
    run_wgmma(64, BF16, majors, widths, False, True)
    run_wgmma(64, BF16, ("k", majors[1]), widths, True, True, (-1, 1))


def run_wgmma(
    n: int,
    dtype: Any,
    majors: tuple[str, str],
    widths: tuple[int, int],
    a_in_registers: bool,
    accumulate: bool,
    signs: tuple[int, int] = (1, 1),
) -> None:
    a, b, c = integers((64, 64), dtype, 1), integers((n, 64), dtype, 2), integers((64, n), np.float32, 3)
    laid_a, laid_b = lay_out(a, majors[0], widths[0]), lay_out(b, majors[1], widths[1])
    out = np.zeros((128, n // 2), np.float32)
    check_launch(
        wgmma_kernel(n, dtype, majors, a_in_registers, signs),
        out,
        laid_a[0],
        len(laid_a[0]),
        laid_b[0],
        len(laid_b[0]),
        descriptors(laid_a, SHARED_BASE, widths[0], True),
        descriptors(laid_b, SHARED_BASE + len(laid_a[0]), widths[1], True),
        4,
        fragment(c) if accumulate else 0,
        a_fragments(a),
        threads=128,
        dynamic_shared_bytes=len(laid_a[0]) + len(laid_b[0]),
    )
    expected = signs[0] * signs[1] * product(a, b) + (c if accumulate else 0)
    np.testing.assert_array_equal(out, fragment(expected))


SHARED_BASE = 1024  # where the dynamic part begins: behind the barrier, aligned


# ---- mma.sync, ldmatrix, stmatrix


def mma_sync(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    kind = "bf16" if a.dtype == BF16 else "f16"
    kernel = cuda_kernel(
        f"""
    extern "C" __global__ void k(float* out, const u32* a, const u32* b, const float* c) {{
      u32 t = threadIdx.x;
      float d[4];
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
                   "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%10, %11, %12, %13}};"
                   : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a[4 * t]), "r"(a[4 * t + 1]),
                       "r"(a[4 * t + 2]), "r"(a[4 * t + 3]),
                     "r"(b[2 * t]), "r"(b[2 * t + 1]), "f"(c[4 * t]), "f"(c[4 * t + 1]), "f"(c[4 * t + 2]),
                         "f"(c[4 * t + 3]));
      for (int i = 0; i < 4; ++i) out[4 * t + i] = d[i];
    }}""",
        "compute_90a",
    )
    lane, i = np.meshgrid(LANES, np.arange(4), indexing="ij")
    row, column = lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2
    lane_b, r = np.meshgrid(LANES, np.arange(2), indexing="ij")
    b_registers = np.ascontiguousarray(np.ascontiguousarray(b).view(np.uint32)[lane_b // 4, lane_b % 4 + 4 * r])
    out = np.zeros((32, 4), np.float32)
    check_launch(kernel, out, a_fragments(a)[0], b_registers, np.ascontiguousarray(c[row, column]))
    d = np.zeros((16, 8), np.float32)
    d[row, column] = out
    return d


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=["bf16", "f16"])
def test_mma_sync(dtype: Any) -> None:
    a, b, c = integers((16, 16), dtype, 1), integers((8, 16), dtype, 2), integers((16, 8), np.float32, 3)
    np.testing.assert_array_equal(mma_sync(a, b, c), product(a, b) + c)


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=["bf16", "f16"])
def test_how_hopper_adds(dtype: Any) -> None:
    """Terms lose what lies below 2^(e-25), toward zero, and so does the sum in f32 (measured on an H200)."""
    rng = random(9)
    a, b = ((rng.standard_normal(s) * 2.0 ** rng.integers(-6, 7, s)).astype(dtype) for s in ((16, 16), (8, 16)))
    c = (rng.standard_normal((16, 8)) * 2.0 ** rng.integers(-12, 16, (16, 8))).astype(np.float32)

    def exponent(x: float) -> int:
        return int(np.frexp(abs(x))[1]) - 1

    def truncated(x: Fraction, unit: Fraction) -> Fraction:
        return (abs(x) // unit) * unit * (1 if x >= 0 else -1)

    expected = np.zeros((16, 8), np.float32)
    for i, j in np.ndindex(16, 8):
        pairs = [(float(x), float(y)) for x, y in zip(a[i], b[j], strict=True) if x and y]
        most = max([exponent(x) + exponent(y) for x, y in pairs] + [exponent(float(c[i, j]))])
        unit = Fraction(2) ** (most - 25)
        total = sum(truncated(Fraction(x) * Fraction(y), unit) for x, y in pairs) + truncated(
            Fraction(float(c[i, j])), unit
        )
        if total:
            top = total.numerator.bit_length() - total.denominator.bit_length()
            top -= Fraction(2) ** top > abs(total)
            expected[i, j] = float(truncated(total, Fraction(2) ** (top - 23)))
    np.testing.assert_array_equal(mma_sync(a, b, c).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(count: int, transposed: bool) -> None:
    """8 by 8 matrices: lane l has elements 2(l%4) and the next of row l/4, or of that column.

    Lane i names row i%8 of matrix i/8.
    """
    registers = ", ".join(f"%{i}" for i in range(count))
    trans = ".trans" if transposed else ""
    kernel = cuda_kernel(
        f"""
    extern "C" __global__ void k(u32* out, const uint4* in, uint4* back) {{
      __shared__ uint4 x[8 * {count}], y[8 * {count}];
      u32 t = threadIdx.x, r[{count}], row = (t * 5) % (8 * {count});   // rows in an order of their own
      if (t < 8 * {count}) x[(t * 5) % (8 * {count})] = in[t];
      __syncwarp();
      asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%{count}];"
                   : {", ".join(f'"=r"(r[{i}])' for i in range(count))} : "r"(Shared(&x[row])) : "memory");
      for (int i = 0; i < {count}; ++i) out[t * {count} + i] = r[i];
      asm volatile("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%{count}], {{{registers}}};"
                   :: {", ".join(f'"r"(r[{i}])' for i in range(count))}, "r"(Shared(&y[row])) : "memory");
      __syncwarp();
      if (t < 8 * {count}) back[t] = y[row];
    }}""",
        "compute_90a",
    )
    x = random(count).integers(0, 1 << 16, (count, 8, 8)).astype(np.uint16)
    out, back = np.zeros((32, count, 2), np.uint16), np.zeros_like(x)
    check_launch(kernel, out, x, back)
    y = x.transpose(0, 2, 1) if transposed else x
    lane, matrix, j = np.meshgrid(LANES, np.arange(count), np.arange(2), indexing="ij")
    np.testing.assert_array_equal(out, y[matrix, lane // 4, lane % 4 * 2 + j])
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("bits", [0x3 << 29, 1 << 3, 2 << 7, 1 << 23])
def test_bad_instruction_descriptors_are_reported(bits: int) -> None:
    a, b = integers((128, 16), BF16, 1), integers((16, 16), BF16, 2)
    laid_a, laid_b = lay_out(a, "k", 16), lay_out(b, "k", 16)
    KERNELS.setdefault(1, mma_kernel(1))
    (report, *_) = launch(
        KERNELS[1],
        np.zeros((128, 16), np.uint32),
        laid_a[0],
        len(laid_a[0]),
        laid_b[0],
        len(laid_b[0]),
        descriptors(laid_a, 0, 16, False),
        descriptors(laid_b, 0, 16, False),
        1,
        instruction_descriptor(128, 16, "k", "k", BF16) ^ bits,
        16,
        0,
        0,
        0,
        threads=128,
        dynamic_shared_bytes=1 << 14,
    ).reports
    assert report.kind == "misuse"
    assert "tcgen05.mma" in report.places[0].opcode
