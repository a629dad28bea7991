"""The build of the kernels: what it refuses, what it depends on, and that it gives the same bytes everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_build import ROOT, SCRIPT, build_kernels

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


def test_depfile_names_every_header(tmp_path: Path) -> None:
    root = tmp_path / "a b"
    kernel = kernel_of(root, '#include "csrc/x.h"\n  #  include "csrc/y.h"\n' + SCALES)
    (root / "csrc" / "x.h").write_text('#pragma once\n#include "csrc/deep/z.h"\n#include "csrc/y.h"\n')
    (root / "csrc" / "y.h").write_text('#pragma once\n// #include "csrc/kernel.cu"\n')
    (root / "csrc" / "deep").mkdir()
    (root / "csrc" / "deep" / "z.h").write_text('#pragma once\n#include "csrc/x.h"\n')
    (root / "csrc" / "other.h").write_text("")
    build_kernels.build(kernel, "sm_80", root)
    output, inputs = build_kernels.depfile(Path("out/kernel.cubin"), kernel, root).split(": ")
    assert output == "out/kernel.cubin"
    folder = str(root / "csrc").replace(" ", "\\ ")
    assert sorted(re.split(r"(?<!\\) ", inputs.strip())) == [
        f"{folder}/{name}" for name in ("deep/z.h", "kernel.cu", "x.h", "y.h")
    ]


@pytest.mark.parametrize(("kernel", "target"), [(k, k.targets[0]) for k in build_kernels.KERNELS], ids=str)
def test_builds_are_the_same_in_every_folder_and_process(tmp_path: Path, kernel: Any, target: str) -> None:
    built = []
    for name in ("one", "another/deeper"):
        root = tmp_path / name
        for path in (SCRIPT.relative_to(ROOT), kernel.source, *build_kernels.headers_of(kernel.source, ROOT)):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, root / path)
        command = [sys.executable, root / "csrc" / "build_kernels.py", kernel.name, "--target", target]
        subprocess.run([*command, "--output", root / "out"], cwd=root, check=True)
        files = [root / "out" / f"{kernel.name}.{target}.{kind}" for kind in ("cubin", "ptx")]
        built.append([file.read_bytes() for file in files])
    assert built[0] == built[1]
    cubin, ptx = built[0]
    names = re.findall(rb'\.file\s+\d+ "(.*)"', ptx)
    assert kernel.source.encode() in names
    assert all(name.startswith(b"csrc/") for name in names)
    assert str(tmp_path).encode() not in cubin


def test_command_line(tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    listed = run("--list")
    assert listed.stdout.splitlines() == [f"{kernel.name} {target}" for kernel, target in PAIRS]
    built = run("sm90_copy", "--target", "sm_90a", "--output", tmp_path / "out", "--depfiles")
    assert re.fullmatch(
        r"sm90_copy\.sm_90a\n  entry  registers  shared bytes  instructions  STL  LDL  UTMALDG  UTMASTG\n"
        r"  copy +\d+ +\d+ +\d+ +0 +0 +1 +1\n",
        built.stdout,
    )
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == [
        f"sm90_copy.sm_90a.{kind}" for kind in ("cubin", "d", "ptx")
    ]
    assert "there is no kernel sm90_cop, only " in run("sm90_cop").stderr
    assert "are not built for sm_80, only for sm_100f, sm_120, sm_90a" in run("sm90_copy", "--target", "sm_80").stderr


def test_output_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(SystemExit, match=f"^{re.escape(str(output))} cannot be a folder for the kernels: "):
            build_kernels.main(["sm90_copy", "--target", "sm_90a", "--output", str(output)])


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build_kernels.WHEELS, "nvidia-cuda-nvdisasm", "13.2.85")
    with pytest.raises(
        BuildError, match=r"in .*python.* it is 13\.2\.86\. Install it with: pip install .*==13\.2\.85$"
    ):
        build_kernels.disassemble(b"")
    monkeypatch.setitem(build_kernels.WHEELS, "nvidia-cuda-nothing", "1.0")
    with pytest.raises(BuildError, match=r"with nvidia-cuda-nothing 1\.0, .* it is not installed\. Install it with"):
        build_kernels._wheel_file("nvidia-cuda-nothing", "nothing")


@pytest.mark.parametrize(("kernel", "target"), PAIRS, ids=[f"{kernel.name}.{target}" for kernel, target in PAIRS])
def test_installed_kernels_are_those_of_the_source(kernel: Any, target: str) -> None:
    """`pip install .`, or csrc/build_kernels.py, brings them up to date."""
    cubin, ptx, _ = build_kernels.build(kernel, target)
    for kind, wanted in (("cubin", cubin), ("ptx", ptx)):
        file = INSTALLED / f"{kernel.name}.{target}.{kind}"
        assert file.is_file(), f"{file} is missing"
        assert file.read_bytes() == wanted, f"{file} is of another source"
    assert build_kernels.installed_folder() == INSTALLED
