"""The emulator's Python face: run PTX for Hopper (sm_90a) and Blackwell (sm_100a) on a CPU.

    kernel = Kernel(ptx_text)
    run = kernel.launch([x, y, 4096], grid=(2, 1, 1), block=(128, 1, 1))
    run.check()  # raises EmulationError with the reports, if there are any

Races, deadlocks and misuse are reported with PTX and source lines. docs/emulator.md says what is modelled, what that
proves and what it cannot prove.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

Size3 = tuple[int, int, int]


class EmulationError(RuntimeError):
    """A run had reports; the message holds all of them."""


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The address of a byte of an array, as an argument or inside a struct."""

    array: np.ndarray
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map (CUtensorMap) over an array, as an argument.

    Attributes:
      array: C-contiguous global memory.
      box: elements of a tile along each dimension, innermost first.
      dims: of the tensor, innermost first; by default the array's shape backwards.
      strides: in bytes, of dimensions 1 and up; by default the array's.
      swizzle: the width of the swizzle in bytes: 0 (none), 32, 64 or 128.
    """

    array: np.ndarray
    box: tuple[int, ...]
    dims: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    swizzle: Literal[0, 32, 64, 128] = 0


Argument = Any
"""An array (passed as a pointer), `Pointer`, `TensorMap`, a number of the parameter's size, bytes, or a struct by
value: a mapping from byte offsets to pairs of an argument and its size."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What happened in a launch.

    Attributes:
      reports: what was found wrong, in the order found; `str(report)` tells it in full.
      instructions: how many instructions warps executed.
      trace: if it was asked for, `trace.events` (docs/emulator.md says what an event tells) and `trace.missing`, the
        number of later events for which there was no room.
    """

    reports: list[Any]
    instructions: int
    trace: Any = None

    def check(self) -> None:
        """Raises EmulationError if there are reports."""
        if self.reports:
            raise EmulationError("\n\n".join(map(str, self.reports)))

    def save_trace(self, path: str | Path) -> None:
        """Writes the trace as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Raises:
          ValueError: the launch recorded no trace.
        """
        if self.trace is None:
            raise ValueError("The run has no trace; launch with trace=True to record one.")
        Path(path).write_text(self.trace.chrome_json(), encoding="utf-8")


class Kernel:
    """One kernel of a PTX module, decoded for execution.

    Args:
      ptx: the module's text.
      name: of the kernel; may be left out where the module has only one.

    Raises:
      ValueError: the text is no PTX, or holds something that is not supported; the message names the line.
    """

    def __init__(self, ptx: str, name: str = "") -> None:
        self._program = _native().emulator_load(ptx, name)
        self.name: str = self._program.name
        self.target: str = self._program.target
        self.parameters: list[tuple[str, int, int]] = self._program.parameters
        """Name, byte offset and size of each parameter."""

    def launch(
        self,
        arguments: Sequence[Argument],
        *,
        grid: Size3,
        block: Size3,
        cluster: Size3 = (1, 1, 1),
        dynamic_shared_bytes: int = 0,
        seed: int = 0,
        mode: Literal["strict", "relaxed"] = "strict",
        check_races: bool = True,
        sm_count: int = 148,
        max_instructions: int = 1 << 40,
        trace: bool = False,
        max_trace_events: int = 1 << 20,
        progress: Callable[[int, int], None] | None = None,
    ) -> Run:
        """Runs the kernel to its end, or to the first fatal report. Ctrl-C ends it.

        Args:
          arguments: one for each parameter. The kernel may write to arrays that are writeable, and only read others.
          grid: CTAs along x, y, z.
          block: threads of a CTA along x, y, z.
          cluster: CTAs of a cluster along x, y, z; they divide the grid.
          dynamic_shared_bytes: as in a launch.
          seed: of the scheduler. The same seed gives the same run.
          mode: "strict" also reports what hardware is known to forgive; "relaxed" does not.
          check_races: whether accesses are checked for races.
          sm_count: how many CTAs are resident at a time, and what %nsmid says.
          max_instructions: of all warps together, after which the run ends with a report.
          trace: whether to record what asynchronous operations and waits do; the run then takes longer.
          max_trace_events: how many events the trace keeps, of up to 200 bytes each; later ones are counted only.
          progress: called with the number of CTAs that have ended, and of all CTAs.

        Raises:
          ValueError: an argument does not fit its parameter, or the launch is impossible.
        """
        if mode not in ("strict", "relaxed"):
            raise ValueError(f"mode must be 'strict' or 'relaxed', but got {mode!r}.")
        if len(arguments) != len(self.parameters):
            raise ValueError(f"{self.name} has {len(self.parameters)} parameters, but got {len(arguments)} arguments.")
        for what, sizes in (("grid", grid), ("block", block), ("cluster", cluster)):
            if len(sizes) != 3 or any(not isinstance(x, int) or x < 1 for x in sizes):
                raise ValueError(f"{what} must be three positive integers, but got {sizes!r}.")
        if any(x % y for x, y in zip(grid, cluster, strict=True)):
            raise ValueError(f"cluster {cluster} does not divide grid {grid}.")
        if not 1 <= np.prod(block) <= 1024:
            raise ValueError(f"a CTA has 1 to 1024 threads, but block is {block}.")
        if np.prod(cluster) > 16:
            raise ValueError(f"a cluster has at most 16 CTAs, but cluster is {cluster}.")
        required = tuple(self._program.required_block)
        if required != (0, 0, 0) and required != tuple(block):
            raise ValueError(f"{self.name} requires block {required}, but got {block}.")
        memory = _Memory()
        parameters = bytearray(self._program.parameter_bytes)
        for (name, offset, size), argument in zip(self.parameters, arguments, strict=True):
            parameters[offset : offset + size] = memory.pack(f"argument {name}", argument, size)
        result = _native().emulator_run(
            self._program,
            grid=grid,
            block=block,
            cluster=cluster,
            dynamic_shared_bytes=dynamic_shared_bytes,
            parameters=bytes(parameters),
            outputs=memory.buffers(writeable=True),
            inputs=memory.buffers(writeable=False),
            seed=seed,
            strict=mode == "strict",
            check_races=check_races,
            sm_count=sm_count,
            max_instructions=max_instructions,
            trace=trace,
            max_trace_events=max_trace_events,
            progress=progress,
        )
        return Run(result.reports, result.instructions, result.trace)


class _Memory:
    """Global memory of a launch: gives arrays addresses, and packs arguments that name them."""

    # Far from null, and with a gap behind each array, so that an index that is a little off hits nothing.
    _START, _GAP = 0x7F00_0000_0000, 1 << 20

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[int, np.ndarray]] = {}
        self._next = self._START

    def address(self, array: np.ndarray) -> int:
        if not array.flags.c_contiguous:
            raise ValueError(f"global memory must be a C-contiguous array, but got strides {array.strides}.")
        key = array.__array_interface__["data"][0] if array.nbytes else id(array)
        if key not in self._arrays:
            self._arrays[key] = self._next, array
            self._next += -(-array.nbytes // 4096) * 4096 + self._GAP
        address, known = self._arrays[key]
        if known.nbytes < array.nbytes:
            raise ValueError("pass an array before views of its first elements.")
        return address

    def buffers(self, writeable: bool) -> list[tuple[str, int, np.ndarray]]:
        return [
            (f"array {i}", address, array.reshape(-1).view(np.uint8))
            for i, (address, array) in enumerate(self._arrays.values())
            if array.flags.writeable == writeable and array.nbytes
        ]

    def pack(self, what: str, argument: Argument, size: int) -> bytes:
        """The argument as `size` bytes."""
        match argument:
            case TensorMap():
                data = self._tensor_map(argument)
            case Pointer():
                data = (self.address(argument.array) + argument.offset).to_bytes(8, "little")
            case np.ndarray() if argument.ndim > 0:
                data = self.address(argument).to_bytes(8, "little")
            case bytes():
                data = argument
            case Mapping():
                struct = bytearray(size)
                for offset, (field, width) in argument.items():
                    struct[offset : offset + width] = self.pack(f"{what} at byte {offset}", field, width)
                data = bytes(struct)
            case np.generic() | np.ndarray():
                data = argument.tobytes()
            case bool() | int():
                if not -(1 << (8 * size - 1)) <= argument < 1 << (8 * size):
                    raise ValueError(f"{what} is {argument}, which does not fit in {size} bytes.")
                data = (argument % (1 << (8 * size))).to_bytes(size, "little")
            case float():
                data = np.array(argument, {4: np.float32, 8: np.float64, 2: np.float16}.get(size)).tobytes()
            case _:
                raise ValueError(f"{what} must be an array, a number, bytes or a struct, but got {type(argument)}.")
        if len(data) != size:
            raise ValueError(f"{what} has {len(data)} bytes, but the parameter has {size}.")
        return data

    def _tensor_map(self, tensor: TensorMap) -> bytes:
        array = tensor.array
        dims = tuple(reversed(array.shape)) if tensor.dims is None else tensor.dims
        strides = tuple(reversed(array.strides))[1:] if tensor.strides is None else tensor.strides
        return _native().emulator_encode_tensor_map(
            self.address(array), array.dtype.name, list(dims), list(strides), list(tensor.box), tensor.swizzle
        )


@functools.cache
def _native() -> ModuleType:
    """The extension, with the tables of the hardware's approximate functions loaded."""
    import jax_fa4._native as extension

    if not extension.emulator_runs_here():
        raise RuntimeError("The emulator needs a CPU with AVX2 and FMA instructions, which this one does not have.")
    tables = importlib.resources.files("jax_fa4") / "emulator_tables"
    extension.emulator_load_tables((tables / "ex2.gz").read_bytes(), (tables / "rcp.gz").read_bytes())
    return extension
