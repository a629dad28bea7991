"""Compiles the CUDA kernels with NVRTC and checks the machine code that comes out.

    python csrc/build_kernels.py                                # all of them, into the installed package
    python csrc/build_kernels.py sm90_copy --target sm_90a      # one, in a second or a few
    python csrc/build_kernels.py sm90_copy --output build/x    # somewhere else
    python csrc/build_kernels.py sm100_forward --loops         # also what sass.py finds in the machine code

Each (kernel, target) gives `<kernel>.<target>.cubin.xz` for the GPUs of that target. `<kernel>.<target>.ptx.xz`, which
the driver compiles for later GPUs and which the emulator runs, comes from the same compilation (see
`Kernel.ptx_targets`). A wheel alone would pack them far worse: the kernels of a file repeat each other from afar.
CMakeLists.txt calls this script for the wheel. It needs Linux and the pinned wheels below in the Python that runs it,
but no CUDA toolkit and no GPU. What is in the files is the same wherever and whenever they are built.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import lzma
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

# Where PYTHONSAFEPATH is set, a script does not find the modules beside it.
sys.path.insert(0, str(Path(__file__).resolve().parent))
import sass


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A source file and what is built from it.

    Attributes:
      name: of the files that are built.
      source: path from the root of the source tree.
      targets: GPUs to compile for: sm_80 also runs on later GPUs of the same major version, sm_100f on the GPUs of its
        family, sm_90a only on compute capability 9.0.
      instructions: opcodes that the machine code of every entry must hold. What they are for (tensor cores, the copy
        engine) is lost without an error when a source changes.
    """

    name: str
    source: str
    targets: tuple[str, ...]
    instructions: tuple[str, ...] = ()

    @property
    def ptx_targets(self) -> tuple[str, ...]:
        """The targets whose PTX is a file too.

        Of those that later GPUs can run (sm_80, not sm_100f or sm_90a) that is the first alone: it serves all GPUs that
        the others' would, and these would say the same.
        """
        first = next((target for target in self.targets if target[-1].isdigit()), None)
        return tuple(target for target in self.targets if target == first or not target[-1].isdigit())

    def files(self, target: str) -> tuple[str, ...]:
        """The names of the files that are built for a target."""
        kinds = ("cubin", "ptx") if target in self.ptx_targets else ("cubin",)
        return tuple(f"{self.name}.{target}.{kind}.xz" for kind in kinds)


_SINCE_AMPERE = ("sm_80", "sm_90", "sm_100", "sm_120")
KERNELS = (
    Kernel("sm80_forward", "csrc/sm80/forward.cu", _SINCE_AMPERE),
    Kernel("sm80_backward", "csrc/sm80/backward.cu", _SINCE_AMPERE),
    Kernel("sm100_forward", "csrc/sm100/forward.cu", ("sm_100f", "sm_103a"), ("UTCHMMA", "UTMALDG", "UTMASTG")),
    Kernel("sm100_backward", "csrc/sm100/backward.cu", ("sm_100f",), ("UTCHMMA", "UTMALDG", "UTMASTG", "UBLKRED")),
    Kernel("sm90_forward", "csrc/sm90/forward.cu", ("sm_90a",), ("HGMMA", "UTMALDG", "UTMASTG")),
    Kernel("sm90_backward", "csrc/sm90/backward.cu", ("sm_90a",), ("HGMMA", "UTMALDG", "UTMASTG")),
    Kernel("backward_rows", "csrc/common/backward_rows.cu", ("sm_90a", "sm_100f")),
    Kernel("sm90_copy", "csrc/sm90/copy.cu", ("sm_90a", "sm_100f", "sm_120"), ("UTMALDG", "UTMASTG")),
)

ROOT = Path(__file__).resolve().parent.parent

# A product is fused with a sum where the source says so and nowhere else: results are then the same on all targets and
# in the emulator.
OPTIONS = ("--std=c++17", "--generate-line-info", "--fmad=false", "--ptxas-options=-v")

# Pinned, because another release of the compiler makes other code. A cubin of CUDA 12.9 loads under the drivers of CUDA
# 12 and 13; the disassembler may be newer.
WHEELS = {"nvidia-cuda-nvrtc-cu12": "12.9.86", "nvidia-cuda-nvdisasm": "13.2.86"}


class BuildError(Exception):
    """What is wrong, in text for the person who builds."""


def _wheel_file(wheel: str, name: str) -> str:
    wanted = WHEELS[wheel]
    try:
        version = importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    file = None
    if version == wanted:
        file = next((x for x in importlib.metadata.files(wheel) or () if x.name == name), None)
    if file is None:
        install = " ".join(f"{package}=={pinned}" for package, pinned in WHEELS.items())
        raise BuildError(
            f"The kernels are compiled with {wheel} {wanted}, which on Linux holds {name}; in {sys.executable} it is "
            f"{'without that file' if version == wanted else version}. Install it with: pip install {install}"
        )
    return str(file.locate())


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    # NVRTC looks for its builtins by name only, where the loader would not find them: so they are loaded first.
    ctypes.CDLL(_wheel_file("nvidia-cuda-nvrtc-cu12", "libnvrtc-builtins.so.12.9"), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(_wheel_file("nvidia-cuda-nvrtc-cu12", "libnvrtc.so.12"))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def headers_of(source: str, root: Path = ROOT) -> dict[str, str]:
    """The headers that a source includes, directly or not: text by path from the root.

    A header is included by its path from the root (`#include "csrc/ptx/copy.h"`), and one that does not exist is left
    for the compiler to complain of.
    """
    headers: dict[str, str] = {}
    texts = [(root / source).read_text()]
    while texts:
        for name in re.findall(r'^\s*#\s*include\s+"(csrc/[^"]+)"', texts.pop(), re.MULTILINE):
            if name not in headers and (root / name).is_file():
                headers[name] = (root / name).read_text()
                texts.append(headers[name])
    return headers


@contextlib.contextmanager
def _no_working_directory() -> Iterator[None]:
    """Makes the line information say `csrc/sm90/copy.cu`, wherever the source tree lies.

    NVRTC puts the working directory before the names of files. Where there is none, because it was removed, the names
    stay as they are.
    """
    before = os.getcwd()
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def compile_kernel(source: str, target: str, root: Path = ROOT) -> tuple[bytes, bytes, str]:
    """The cubin, the PTX and the compilers' log.

    NVRTC is given the headers that `headers_of` finds and no folder to look for others, so a build cannot depend on a
    file of which the build system does not know.

    Raises:
      BuildError: with everything that the compilers say, if that is an error or a warning.
    """
    library = _nvrtc()

    def check(status: int) -> None:
        if status:
            raise BuildError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}.")

    def output(what: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        check(getattr(library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def strings(values: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
        return (ctypes.c_char_p * len(values))(*(x.encode() for x in values))

    text, headers = (root / source).read_text(), headers_of(source, root)
    options = (*OPTIONS, f"--gpu-architecture={target}")
    program = ctypes.c_void_p()
    check(
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            source.encode(),
            len(headers),
            strings(list(headers.values())),
            strings(list(headers)),
        )
    )
    try:
        with _no_working_directory():
            status = library.nvrtcCompileProgram(program, len(options), strings(options))
        log = output("ProgramLog").rstrip(b"\0").decode()
        # What is left are errors and warnings, among them the back end's: that it has serialised tensor-core
        # instructions, say, or that a register limit has no effect.
        remarks = "\n".join(x for x in log.splitlines() if x.strip() and not re.match(_STATISTICS, x))
        if status or remarks:
            remarks = _with_source_lines(remarks, output("PTX").rstrip(b"\0").decode())
            raise BuildError(f"{source} for {target}:\n{remarks or library.nvrtcGetErrorString(status).decode()}")
        return output("CUBIN"), output("PTX").rstrip(b"\0"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _with_source_lines(remarks: str, ptx: str) -> str:
    """Adds the lines of the source to remarks of the assembler, which names lines of the PTX only."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "(.*)"', ptx, re.MULTILINE))
    lines = ptx.splitlines()
    result = []
    for remark in remarks.splitlines():
        result.append(remark)
        if place := re.match(r"ptxas .* ptx input, line (\d+);", remark):
            before = lines[: int(place[1])]
            text = before[-1].strip()
            for line in reversed(before):
                if loc := re.match(r"\s*\.loc\s+(\d+) (\d+) \d+(?:,.* inlined_at (\d+) (\d+))?", line):
                    caller = f", inlined at {files[loc[3]]}({loc[4]})" if loc[3] else ""
                    result.append(f"  {files[loc[1]]}({loc[2]}){caller}: {text}")
                    break
    return "\n".join(result)


# Lines that --ptxas-options=-v adds to the log.
_STATISTICS = (
    r"ptxas info\s+: (\d+ bytes gmem|Compiling entry function|Function properties|Used \d+ registers|Compile time)"
    r"|ptxas\s+\.\s+\d+ bytes stack frame"
)


@dataclasses.dataclass
class Entry:
    """An entry as it was compiled.

    Attributes:
      registers: of a thread.
      stack_bytes: of a thread: spilled registers, and arrays that have an address.
      shared_bytes: of a CTA, without what a launch adds.
      code: the machine code.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    code: tuple[sass.Instruction, ...]

    @functools.cached_property
    def opcodes(self) -> collections.Counter[str]:
        """How often each opcode stands in the code; suffixes such as `.128` are left out."""
        return collections.Counter(instruction.kind for instruction in self.code)

    @property
    def local_accesses(self) -> int:
        """The number of instructions that load or store local memory, where spilled registers go."""
        return self.opcodes["LDL"] + self.opcodes["STL"]


def disassemble(cubin: bytes) -> dict[str, tuple[sass.Instruction, ...]]:
    """The machine code of each entry."""
    nvdisasm = _wheel_file("nvidia-cuda-nvdisasm", "nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([nvdisasm, "--print-code", file.name], capture_output=True, text=True, check=False)
    if run.returncode:
        raise BuildError(f"nvdisasm: {run.stderr.strip()}")
    return sass.parse(run.stdout)


def entries_of(cubin: bytes, log: str) -> dict[str, Entry]:
    """What is known of every entry of a compiled source."""
    code = disassemble(cubin)
    entries = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        # Stacks of the functions that an entry calls are told too.
        stacks = re.findall(r"(\d+) bytes stack frame", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if not registers or not stacks or not code.get(name):
            raise BuildError(f"The tools' output says nothing of {name}; the compiler's log:\n{log}")
        entries[name] = Entry(int(registers[1]), max(map(int, stacks)), int(shared[1]) if shared else 0, code[name])
    return entries


def check_entries(entries: dict[str, Entry], kernel: Kernel, target: str) -> None:
    """Raises BuildError if an entry is not as it should be.

    It must not use local memory, must have the instructions of the table of kernels, and no role of its warps may use
    more registers than it is granted.
    """
    faults = []
    for name, entry in entries.items():
        counts = ", ".join(f"{entry.opcodes[x]} {x}" for x in ("STL", "LDL", *kernel.instructions))
        if entry.local_accesses or entry.stack_bytes:
            faults.append(
                f"{name} uses {entry.stack_bytes} bytes of local memory ({counts}; {entry.registers} registers): "
                f"registers are spilled, or an array has an index that the compiler does not know."
            )
        if missing := [x for x in kernel.instructions if not entry.opcodes[x]]:
            faults.append(f"{name} has no {' and no '.join(missing)} ({counts}).")
        try:
            roles = sass.roles_of(entry.code, entry.registers) if entry.opcodes["USETMAXREG"] else []
        except ValueError as error:
            faults.append(f"whether {name} has the registers that it uses cannot be told: {error}.")
            continue
        faults += [
            f"{name} uses {role.used} registers after setmaxnreg has left {role.granted} (at {role.address:#x})."
            for role in roles
            if role.used > role.granted
        ]
    if not entries:
        faults.append('there is no entry (an extern "C" __global__ function).')
    if faults:
        raise BuildError("\n".join(f"{kernel.name} for {target}: {fault}" for fault in faults))


def build(kernel: Kernel, target: str, root: Path = ROOT) -> tuple[bytes, bytes, dict[str, Entry]]:
    """The cubin, the PTX and the entries of a kernel, checked.

    Raises:
      BuildError: the source does not compile without warnings, or the machine code is not as it should be.
    """
    cubin, ptx, log = compile_kernel(kernel.source, target, root)
    if name := re.search(rb"\w*_GLOBAL__N_\w*", ptx):
        raise BuildError(
            f"{kernel.name} for {target}: {name[0].decode()} is in an unnamed namespace, whose name has the number of "
            "the compiling process in it: no two builds are the same. Use a named one."
        )
    entries = entries_of(cubin, log)
    check_entries(entries, kernel, target)
    return cubin, ptx, entries


def table(kernel: Kernel, target: str, entries: dict[str, Entry]) -> str:
    """What was built, a line an entry, for people."""
    shown = ("STL", "LDL", *kernel.instructions)
    rows = [("entry", "registers", "shared bytes", "instructions", *shown)]
    for name, entry in entries.items():
        numbers = (entry.registers, entry.shared_bytes, entry.opcodes.total(), *(entry.opcodes[x] for x in shown))
        rows.append((name, *map(str, numbers)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{kernel.name}.{target}"]
    for first, *others in rows:
        cells = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((f"  {first.ljust(widths[0])}", *cells)))
    return "\n".join(lines)


def installed_folder() -> Path:
    """The folder of kernels in the installed package, which is found without importing it.

    Raises:
      BuildError: the package is not installed.
    """
    try:
        distribution = importlib.metadata.distribution("jax_fa4")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(
            f"jax_fa4 is not installed in {sys.executable}: give --output, or install it with `pip install -e .`"
        ) from None
    return Path(str(distribution.locate_file("jax_fa4/kernels")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds what the command line asks for."""
    names = [kernel.name for kernel in KERNELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"all if none is given: {', '.join(names)}")
    parser.add_argument("--target", action="append", metavar="TARGET", help="sm_90a, say; all if none is given")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: the installed package's jax_fa4/kernels")
    parser.add_argument(
        "--loops", action="store_true", help="also print the registers of each entry's roles, and its loops"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="only print of each, if the compiler is there: KERNEL TARGET FILE... : SOURCE...",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.kernels) - set(names):
        parser.error(f"there is no kernel {', '.join(sorted(unknown))}, only {', '.join(names)}")
    chosen = [kernel for kernel in KERNELS if not options.kernels or kernel.name in options.kernels]
    known = {target for kernel in chosen for target in kernel.targets}
    if unknown := set(options.target or ()) - known:
        parser.error(
            f"these kernels are not built for {', '.join(sorted(unknown))}, only for {', '.join(sorted(known))}"
        )
    pairs = [(k, target) for k in chosen for target in k.targets if not options.target or target in options.target]
    try:
        if options.list:
            _nvrtc()
            _wheel_file("nvidia-cuda-nvdisasm", "nvdisasm")
            for kernel, target in pairs:
                print(kernel.name, target, *kernel.files(target), ":", kernel.source, *headers_of(kernel.source))
            return
        folder = options.output or installed_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"{folder} cannot be a folder for the kernels: {error}") from error
        for kernel, target in pairs:
            cubin, ptx, entries = build(kernel, target)
            stem = f"{kernel.name}.{target}"
            # One of an earlier build must not stay.
            (folder / f"{stem}.ptx.xz").unlink(missing_ok=True)
            for name, contents in zip(kernel.files(target), (cubin, ptx), strict=False):
                (folder / name).write_bytes(lzma.compress(contents))
            print(table(kernel, target, entries))
            if options.loops:
                for name, entry in entries.items():
                    print(sass.table(name, entry.code, entry.registers))
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
