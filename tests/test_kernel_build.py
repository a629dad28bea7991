"""The build of the kernels: what it refuses, what it depends on, and that it gives the same bytes everywhere."""

from __future__ import annotations

import dataclasses
import lzma
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_build import MODULES, ROOT, SCRIPT, build_kernels, sass

import jax_fa4._native as extension

BuildError = build_kernels.BuildError
TARGETS = ("sm_80", "sm_90a", "sm_100f", "sm_120")
INSTALLED = Path(extension.__file__).parent / "kernels"
PAIRS = [(kernel, target) for kernel in build_kernels.KERNELS for target in kernel.targets]


def kernel_of(root: Path, source: str, instructions: tuple[str, ...] = ()) -> Any:
    """A kernel whose source is in a tree of its own."""
    folder = root / "csrc"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.cu").write_text(source)
    return build_kernels.Kernel("kernel", "csrc/kernel.cu", TARGETS, instructions)


# 1024 threads leave 64 registers to each.
SPILLS = """extern "C" __global__ void __launch_bounds__(1024, 1) spills(float* x, int n) {
  float v[128];
  for (int i = 0; i < 128; ++i) v[i] = x[i * n + threadIdx.x];
  __syncthreads();
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < 128; ++i) v[i] = v[i] * v[(i + 1) % 128] + 1;
  for (int i = 0; i < 128; ++i) x[i * n + threadIdx.x] = v[i];
}
"""
INDEXES = """extern "C" __global__ void indexes(float* x, const int* order) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[order[i]] = x[i];
  for (int i = 0; i < 64; ++i) x[i] = v[i] * v[63 - order[i]];
}
"""
SCALES = """extern "C" __global__ void scales(float* x) {
  __shared__ float sum[32];
  sum[threadIdx.x] = 2 * x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = sum[31 - threadIdx.x];
}
"""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("source", "name"), [(SPILLS, "spills"), (INDEXES, "indexes")])
def test_local_memory_is_refused(tmp_path: Path, source: str, name: str, target: str) -> None:
    with pytest.raises(BuildError) as error:
        build_kernels.build(kernel_of(tmp_path, source), target, tmp_path)
    found = re.fullmatch(
        rf"kernel for {target}: {name} uses (\d+) bytes of local memory \((\d+) STL, (\d+) LDL; (\d+) registers\): .*",
        str(error.value),
    )
    assert found, error.value
    assert all(int(number) > 0 for number in found.groups())


def test_local_memory_behind_a_generic_pointer_is_refused(tmp_path: Path) -> None:
    source = """extern "C" __global__ void chooses(float* x, int n, bool own) {
      float v[8];
      float* p = own ? v : x;
      p[n] = 3;
      x[1] = p[n + 1];
    }
    """
    with pytest.raises(BuildError, match=r"chooses uses 32 bytes of local memory \(0 STL, 0 LDL; "):
        build_kernels.build(kernel_of(tmp_path, source), "sm_90a", tmp_path)


def test_one_bad_entry_among_good_ones_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as error:
        build_kernels.build(kernel_of(tmp_path, SCALES + INDEXES), "sm_90a", tmp_path)
    assert str(error.value).startswith("kernel for sm_90a: indexes uses 256 bytes")
    assert "scales" not in str(error.value)


@pytest.mark.parametrize("target", TARGETS)
def test_missing_instructions_are_refused(tmp_path: Path, target: str) -> None:
    build_kernels.build(kernel_of(tmp_path, SCALES, ("LDS", "STS", "BAR")), target, tmp_path)
    with pytest.raises(BuildError) as error:
        build_kernels.build(kernel_of(tmp_path, SCALES, ("LDS", "UTMALDG", "HMMA")), target, tmp_path)
    assert str(error.value) == (
        f"kernel for {target}: scales has no UTMALDG and no HMMA (0 STL, 0 LDL, 1 LDS, 0 UTMALDG, 0 HMMA)."
    )


def test_a_source_without_an_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"there is no entry"):
        build_kernels.build(kernel_of(tmp_path, "__device__ int x;\n"), "sm_80", tmp_path)


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, '#include "csrc/part.h"\n\nint f() { return missing; }\n')
    (tmp_path / "csrc" / "part.h").write_text("\n\n\nint g() { return 0 }\n")
    with pytest.raises(BuildError) as error:
        build_kernels.build(kernel, "sm_90a", tmp_path)
    assert str(error.value).startswith("csrc/kernel.cu for sm_90a:\n")
    assert 'csrc/part.h(4): error: expected a ";"' in str(error.value)
    assert 'csrc/kernel.cu(3): error: identifier "missing" is undefined' in str(error.value)


@pytest.mark.parametrize("include", ['"csrc/missing.h"', '"kernel.cu"', "<cuda.h>"])
def test_only_headers_of_the_tree_can_be_included(tmp_path: Path, include: str) -> None:
    with pytest.raises(
        BuildError, match=r"csrc/kernel\.cu\(2\): catastrophic error: (cannot|could not) open source file"
    ):
        build_kernels.build(kernel_of(tmp_path, f"\n#include {include}\n{SCALES}"), "sm_80", tmp_path)


def test_warnings_are_refused(tmp_path: Path) -> None:
    source = SCALES.replace("sum[31 -", "int unused;\n  x[threadIdx.x] = sum[31 -").replace("= int", "= 0;\n  int")
    with pytest.raises(BuildError, match=r'csrc/kernel\.cu\(6\): warning #177-D: variable "unused" was declared'):
        build_kernels.build(kernel_of(tmp_path, source), "sm_80", tmp_path)


def test_warnings_of_the_back_end_are_refused(tmp_path: Path) -> None:
    # Without launch bounds the assembler does not know how many registers there are to give back.
    source = """extern "C" __global__ void limits(int* x) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      x[0] = 0;
    }
    """
    with pytest.raises(BuildError, match=r"Potential Performance Loss: 'setmaxnreg' ignored"):
        build_kernels.build(kernel_of(tmp_path, source), "sm_90a", tmp_path)


def test_errors_of_the_back_end_name_lines_of_the_source(tmp_path: Path) -> None:
    kernel = kernel_of(
        tmp_path, '#include "csrc/wrap.h"\n\nextern "C" __global__ void k(int* x) {\n  x[0] = wrap(7);\n}\n'
    )
    (tmp_path / "csrc" / "wrap.h").write_text(
        """__device__ __forceinline__ int wrap(int x) {
          int y;
          asm volatile("not.known %0, %1;" : "=r"(y) : "r"(x));
          return y;
        }
        """
    )
    with pytest.raises(BuildError) as error:
        build_kernels.build(kernel, "sm_90a", tmp_path)
    assert "Unknown modifier '.known'" in str(error.value)
    assert "\n  csrc/wrap.h(3), inlined at csrc/kernel.cu(4): not.known %r1, %r2;\n" in str(error.value)


def test_names_that_differ_from_build_to_build_are_refused(tmp_path: Path) -> None:
    source = "namespace { __device__ int kept; }\n" + SCALES.replace("2 *", "kept++ *")
    with pytest.raises(BuildError, match=r"_GLOBAL__N_\w*kept\w* is in an unnamed namespace"):
        build_kernels.build(kernel_of(tmp_path, source), "sm_80", tmp_path)


# Warps of three roles, each with a loop; one waits in each turn, and does more if what it reads is positive.
ROLES = """
template <int kCount>
__device__ __forceinline__ void Work(float* x, int n) {
  float v[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = x[i * 32];
#pragma unroll 1
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = v[i] * v[(i + 1) % kCount] + x[j];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i * 32] = v[i];
}

extern "C" __global__ void __launch_bounds__(384, 1) roles(float* x, int n) {
  __shared__ unsigned long long barrier;
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      asm volatile(
          "{\\n"
          ".reg .pred p;\\n"
          "TRY: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n"
          "@!p bra TRY;\\n"
          "}" ::"r"(address), "r"(i & 1) : "memory");
      const float y = x[i];
      asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(sum) : "f"(sum + y));
      if (y > 0) {
#pragma unroll
        for (int j = 0; j < 20; ++j) asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(sum) : "f"(sum));
      }
    }
    x[n] = sum;
  } else if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    Work<100>(x + threadIdx.x, n);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    Work<60>(x + threadIdx.x, n);
  }
}
"""


@pytest.fixture(scope="module", params=["sm_90a", "sm_100f"])
def roles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ROLES as an entry."""
    root = tmp_path_factory.mktemp("roles")
    return build_kernels.build(kernel_of(root, ROLES), request.param, root)[2]["roles"]


def test_roles_and_their_registers(roles: Any) -> None:
    found = sass.roles_of(roles.code, roles.registers)
    assert found[0].address == 0
    assert found[0].granted == roles.registers
    used = {role.granted: role.used for role in found[1:]}
    assert used.keys() == {40, 160, 208}
    assert 0 < used[40] <= 40
    assert 60 < used[160] <= 160
    assert 100 < used[208] <= 208


@pytest.mark.parametrize("granted", [40, 160, 208])
def test_a_role_that_uses_more_registers_than_it_has_is_refused(roles: Any, granted: int) -> None:
    used, address = next(
        (x.used, x.address) for x in sass.roles_of(roles.code, roles.registers) if x.granted == granted
    )
    kernel = build_kernels.Kernel("kernel", "csrc/kernel.cu", TARGETS)

    def check(registers: int) -> None:
        """With another operand of the instruction that grants them."""
        code = tuple(
            dataclasses.replace(x, operands=re.sub(r"0x\w+$", hex(registers), x.operands))
            if x.address == address
            else x
            for x in roles.code
        )
        build_kernels.check_entries({"roles": dataclasses.replace(roles, code=code)}, kernel, "sm_100f")

    check(used)
    with pytest.raises(BuildError) as error:
        check(used - 1)
    assert str(error.value) == (
        f"kernel for sm_100f: roles uses {used} registers after setmaxnreg has left {used - 1} (at {address:#x})."
    )


def test_loops_and_the_ways_around_them(roles: Any) -> None:
    loops = sass.loops_of(roles.code)
    waiting = [loop for loop in loops if loop.longest.count("SYNCS")]
    assert [(x.shortest.count("MUFU.EX2"), x.longest.count("MUFU.EX2")) for x in waiting] == [(1, 21)]
    assert [(x.shortest.count("SYNCS"), x.longest.count("SYNCS")) for x in waiting] == [(1, 1)]
    working = [loop for loop in loops if loop not in waiting]
    assert all(loop.shortest == loop.longest for loop in working)
    assert sorted((x.longest.count("FMUL"), x.longest.count("FADD")) for x in working) == [(60, 60), (100, 100)]


def listing(text: str) -> tuple[Any, ...]:
    """The instructions of an entry, as if nvdisasm had printed them; `4 FADD2` is four of them."""
    lines = ['\t.section\t.text.entry,"ax",@progbits', "entry:"]
    address = 0
    for line in text.splitlines():
        if label := re.fullmatch(r"\s*(\.L_\w+):", line):
            lines.append(f"{label[1]}:")
        elif instruction := re.fullmatch(r"\s*(?:(\d+) )?(\S.*)", line):
            for _ in range(int(instruction[1] or 1)):
                lines.append(f"        /*{address:04x}*/                   {instruction[2]} ;")
                address += 16
    return sass.parse("\n".join(lines))["entry"]


def test_waits_count_once_wherever_they_lie() -> None:
    (loop,) = sass.loops_of(
        listing(
            """
            .L_loop:
              SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R174+URZ], R99
              @!P0 BRA `(.L_aside)
            .L_back:
              2 FADD R0, R1, R2
            .L_within:
              SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R174+URZ+0x8], R99
              @!P0 BRA `(.L_within)
              BRA.DIV UR4, `(.L_not_in_step)
              SHFL.BFLY PT, R1, R2, 0x1, 0x1f
            .L_in_step:
              BRA.U !UP0, `(.L_loop)
              EXIT
            .L_aside:
              MOV R4, UR65
            .L_again:
              SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ], R99
              @!P0 NANOSLEEP.SYNCS 0x989680
              @!P0 BRA `(.L_again)
              BRA `(.L_back)
            .L_not_in_step:
              WARPSYNC.COLLECTIVE R4, `(.L_shuffle)
            .L_shuffle:
              8 SHFL.BFLY PT, R1, R2, 0x1, 0x1f
              BRA `(.L_in_step)
            """
        )
    )
    assert loop.longest == loop.shortest
    counts = {kind: loop.longest.count(kind) for kind in ("SYNCS", "BRA", "FADD", "SHFL")}
    assert counts == {"SYNCS": 2, "BRA": 4, "FADD": 2, "SHFL": 1}
    assert loop.longest.instructions == 9


def test_ways_around_loops_inside_loops() -> None:
    outer, inner = sass.loops_of(
        listing(
            """
              LDC R4, c[0x2][R3]
            .L_loop:
              BRX R4 -0x7c0 (*"BRANCH_TARGETS .L_one,.L_two,.L_three"*)
            .L_one:
              FADD R0, R1, R2
            .L_two:
              2 FMUL R0, R1, R2
              @P1 EXIT
              BRA `(.L_end)
            .L_three:
              R2UR UR4, R3
            .L_inner:
              4 MUFU.EX2 R0, R0
              @!P0 BRA P1, `(.L_inner)
            .L_end:
              @P0 BRA `(.L_loop)
              CALL.REL.NOINC `(.L_function)
              EXIT
            .L_function:
              RET.REL.NODEC R4 `(entry)
            """
        )
    )
    assert (outer.address, inner.address) == (0x10, 0x80)
    assert (outer.inner, inner.inner) == ({0x80}, frozenset())
    assert inner.shortest == inner.longest
    assert inner.longest.opcodes == {"MUFU.EX2": 4, "BRA": 1}
    assert outer.shortest.opcodes == {"BRX": 1, "FMUL": 2, "EXIT": 1, "BRA": 2}
    assert outer.longest.opcodes == {"BRX": 1, "R2UR": 1, "MUFU.EX2": 4, "BRA": 2}
    assert outer.path(lambda x: (x.count("FADD"),)).opcodes == {"BRX": 1, "FADD": 1, "FMUL": 2, "EXIT": 1, "BRA": 2}


def test_a_branch_to_an_unknown_place_is_refused() -> None:
    entry = build_kernels.Entry(128, 0, 0, listing("USETMAXREG.DEALLOC.CTAPOOL 0x28\nBRX R4 -0x7c0"))
    kernel = build_kernels.Kernel("kernel", "csrc/kernel.cu", TARGETS)
    with pytest.raises(BuildError, match=r"entry .* cannot be told: nvdisasm does not say where BRX at 0x10 leads"):
        build_kernels.check_entries({"entry": entry}, kernel, "sm_90a")


def test_the_parts_of_attention_are_known_by_their_work() -> None:
    code = listing(
        """
        .L_tasks:
          8 UTCHMMA gdesc[UR8]
        .L_mma:
          @P0 BRA `(.L_whole)
          40 STS.128 [R2], RZ
        .L_whole:
          48 UTCHMMA gdesc[UR8]
          @P1 BRA `(.L_mma)
          BRA.U UP0, `(.L_tasks)
        .L_softmax:
          2 LDTM.x32 R4, tmem[UR4]
          @P0 BRA `(.L_unmasked)
          64 FSEL R4, R4, -INF , P0
        .L_unmasked:
          57 MUFU.EX2 R4, R4
          @P1 BRA `(.L_softmax)
        .L_correction:
          @P0 BRA `(.L_skipped)
          4 LDTM.x16 R4, tmem[UR4]
          32 FMUL2 R4, R4, R6
          4 STTM.x16 tmem[UR4], R4
        .L_skipped:
          @P1 BRA `(.L_correction)
          EXIT
        """
    )
    parts = sass.key_blocks(sass.loops_of(code), 64, 64)
    assert {part: (x.instructions, x.blocks) for part, x in parts.items()} == {
        "softmax": (2 * (2 + 1 + 57 + 1), 1 / 2),
        "softmax, masked": (2 * (2 + 1 + 64 + 57 + 1), 1 / 2),
        "correction": (2 * (1 + 4 + 32 + 4 + 1), 1 / 2),
        "MMA": ((1 + 48 + 1) / 2, 2),
    }
    assert parts["softmax"].each("MUFU.EX2") == 114
    lines = sass.table("forward_float16_64_bounds", code, 128).splitlines()
    assert lines[:2] == ["forward_float16_64_bounds", "  registers: 36 of 128 at 0x0"]
    shown = [re.split(r"\s{2,}", line.strip()) for line in lines[2:]]
    assert shown[0][:5] == ["loop", "part", "blocks of keys", "instructions", "official"]
    assert ["MMA", "2", "50", "190", "48"] in [row[1:] for row in shown]
    assert ["softmax, masked", "1/2", "125", "689", "57", "64", "2"] in [row[1:] for row in shown]


def test_registers_of_wide_operands() -> None:
    for text, registers in {
        "LDTM.x32 R100, tmem[UR4]": 132,
        "STTM.x16 tmem[UR4], R8": 24,
        "FFMA2 R32, R64.F32x2.HI_LO, UR4.F32, R76.reuse.F32": 77,
        "FADD2 R38, R22.F32x2.HI_LO, R36.F32x2.HI_LO": 40,
        "LDG.E.128 R4, desc[UR6][R40.64]": 42,
        "STS.128 [R20+0x10], R16": 21,
        "IMAD.WIDE.U32 R14, R9, 0x4, R2": 16,
        "UMOV UR65, 0x400": 0,
    }.items():
        (role,) = sass.roles_of(listing(f"{text}\nEXIT"), 255)
        assert role.used == registers, text


def sections(cubin: bytes) -> dict[str, bytes]:
    """The contents of an ELF file by the names of its sections."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<II16xQQ", cubin, start + i * size) for i in range(number)]
    # Of type 8 are those that have no contents in the file.
    return {
        cubin[headers[names][2] + name :].split(b"\0", 1)[0].decode(): b"" if kind == 8 else cubin[offset:][:length]
        for name, kind, offset, length in headers
    }


@pytest.mark.parametrize("target", TARGETS)
def test_cubins_have_lines_of_the_source(tmp_path: Path, target: str) -> None:
    kernel_of(tmp_path, SCALES)
    cubin, _, _ = build_kernels.compile_kernel("csrc/kernel.cu", target, tmp_path)
    of_name = sections(cubin)
    assert b"kernel.cu\0" in of_name[".debug_line"]
    assert any(of_name[".nv_debug_line_sass"])


def test_headers_are_found_through_others(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, '#include "csrc/x.h"\n  #  include "csrc/y.h"\n' + SCALES)
    (tmp_path / "csrc" / "x.h").write_text('#pragma once\n#include "csrc/deep/z.h"\n#include "csrc/y.h"\n')
    (tmp_path / "csrc" / "y.h").write_text('#pragma once\n// #include "csrc/kernel.cu"\n')
    (tmp_path / "csrc" / "deep").mkdir()
    (tmp_path / "csrc" / "deep" / "z.h").write_text('#pragma once\n#include "csrc/x.h"\n')
    (tmp_path / "csrc" / "other.h").write_text("")
    build_kernels.build(kernel, "sm_80", tmp_path)
    assert sorted(build_kernels.headers_of(kernel.source, tmp_path)) == ["csrc/deep/z.h", "csrc/x.h", "csrc/y.h"]


def test_command_line(tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    listed = run("--list")
    lines = listed.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[kernel.name, target] for kernel, target in PAIRS]
    source = " : csrc/sm80/forward.cu csrc/"
    assert any(
        x.startswith(f"sm80_forward sm_80 sm80_forward.sm_80.cubin.xz sm80_forward.sm_80.ptx.xz{source}") for x in lines
    )
    assert any(x.startswith(f"sm80_forward sm_90 sm80_forward.sm_90.cubin.xz{source}") for x in lines)
    built = run("sm90_copy", "--target", "sm_90a", "--output", tmp_path / "out")
    assert re.fullmatch(
        r"sm90_copy\.sm_90a\n  entry  registers  shared bytes  instructions  STL  LDL  UTMALDG  UTMASTG\n"
        r"  copy +\d+ +\d+ +\d+ +0 +0 +1 +1\n",
        built.stdout,
    )
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == [
        f"sm90_copy.sm_90a.{kind}" for kind in ("cubin.xz", "ptx.xz")
    ]
    assert "there is no kernel sm90_cop, only " in run("sm90_cop").stderr
    assert "are not built for sm_80, only for sm_100f, sm_120, sm_90a" in run("sm90_copy", "--target", "sm_80").stderr


def test_output_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(SystemExit, match=f"^{re.escape(str(output))} cannot be a folder for the kernels: "):
            build_kernels.main(["sm90_copy", "--target", "sm_90a", "--output", str(output)])


def test_ptx_that_an_older_target_gives_too_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = build_kernels.Kernel("kernel", "csrc/kernel.cu", ("sm_90a", "sm_80", "sm_100", "sm_100f", "sm_120"))
    assert kernel.ptx_targets == ("sm_90a", "sm_80", "sm_100f")
    copy = build_kernels.Kernel("copy", "csrc/sm90/copy.cu", ("sm_90", "sm_100"))
    monkeypatch.setattr(build_kernels, "KERNELS", (copy,))
    (tmp_path / "copy.sm_100.ptx.xz").write_text("of an earlier build")
    build_kernels.main(["copy", "--target", "sm_100", "--output", str(tmp_path)])
    assert [file.name for file in tmp_path.iterdir()] == ["copy.sm_100.cubin.xz"]


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build_kernels.WHEELS, "nvidia-cuda-nvdisasm", "13.2.85")
    with pytest.raises(
        BuildError, match=r"in .*python.* it is 13\.2\.86\. Install it with: pip install .*==13\.2\.85$"
    ):
        build_kernels.disassemble(b"")
    monkeypatch.setitem(build_kernels.WHEELS, "nvidia-cuda-nothing", "1.0")
    with pytest.raises(BuildError, match=r"with nvidia-cuda-nothing 1\.0, .* it is not installed\. Install it with"):
        build_kernels._wheel_file("nvidia-cuda-nothing", "nothing")


@pytest.mark.parametrize(
    ("kernel", "target"),
    [
        # Most take long to compile.
        pytest.param(
            kernel,
            target,
            marks=[] if target == "sm_80" or kernel.name == "sm90_copy" else [pytest.mark.slow],
            id=f"{kernel.name}.{target}",
        )
        for kernel, target in PAIRS
    ],
)
def test_installed_kernels_are_those_of_the_source(tmp_path: Path, kernel: Any, target: str) -> None:
    """`pip install .`, or csrc/build_kernels.py, brings them up to date: every folder and process gives the same."""
    root = tmp_path / "another/deeper"
    modules = [module.relative_to(ROOT) for module in MODULES]
    for path in (*modules, kernel.source, *build_kernels.headers_of(kernel.source, ROOT)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, root / path)
    command = [sys.executable, root / "csrc" / SCRIPT.name, kernel.name, "--target", target]
    subprocess.run([*command, "--output", root / "out"], cwd=root, check=True)
    for folder in (root / "out", INSTALLED):
        assert {file.name for file in folder.glob(f"{kernel.name}.{target}.*")} == set(kernel.files(target)), folder
    for file in (root / "out").iterdir():
        installed = INSTALLED / file.name
        contents = lzma.decompress(file.read_bytes())
        assert lzma.decompress(installed.read_bytes()) == contents, f"{installed} is of another source"
        assert str(tmp_path).encode() not in contents
        if ".ptx" in file.suffixes:
            names = re.findall(rb'\.file\s+\d+ "(.*)"', contents)
            assert kernel.source.encode() in names
            assert all(name.startswith(b"csrc/") for name in names)


def installed_code(kernel: str) -> Any:
    """The machine code of each entry; that it is of the source is tested above."""
    return build_kernels.disassemble(lzma.decompress((INSTALLED / f"{kernel}.sm_100f.cubin.xz").read_bytes()))


@pytest.fixture(scope="module")
def blackwell_forward() -> Any:
    return installed_code("sm100_forward")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("width", "value_width", "kind"), sass.OFFICIAL)
def test_a_block_of_keys_takes_as_few_instructions_as_in_the_official_kernels(
    blackwell_forward: Any, width: int, value_width: int, kind: str, dtype: str
) -> None:
    official = sass.OFFICIAL[width, value_width, kind]
    parts = sass.key_blocks(sass.loops_of(blackwell_forward[f"forward_{dtype}_{width}_{kind}"]), width, value_width)
    taken = {part: float(parts[part].instructions) for part in official}
    # Up to 3 % more, for what ours do besides: they keep NaNs, and fence between tensor memory's users.
    assert {part: number for part, number in taken.items() if number > 1.03 * official[part]} == {}
    exponentials = {part: float(x.each("MUFU.EX2")) for part, x in parts.items() if part.startswith("softmax")}
    assert {part: number for part, number in exponentials.items() if number > sass.OFFICIAL_EX2} == {}


def test_a_block_of_rows_takes_no_more_instructions_than_in_the_official_backward() -> None:
    code = installed_code("sm100_backward")
    for dtype in ("float16", "bfloat16"):
        loops = sass.loops_of(code[f"backward_{dtype}_128_full"])
        (compute,) = [loop.shortest for loop in loops if loop.longest.count("MUFU.EX2")]
        (products,) = [loop.longest for loop in loops if loop.longest.count("UTCHMMA")]
        (reduce,) = [loop.longest for loop in loops if loop.longest.count("LDTM") and loop.longest.count("STS") == 32]
        assert (compute.count("MUFU.EX2"), products.count("UTCHMMA"), reduce.count("LDTM")) == (64, 40, 4)
        # Nothing is masked in the compute warps' block.
        taken = [float(path.instructions) for path in (compute, products, reduce)]
        assert all(ours <= official for ours, official in zip(taken, (439, 298, 100), strict=True)), taken


def test_the_installed_package_is_found() -> None:
    assert build_kernels.installed_folder() == INSTALLED
