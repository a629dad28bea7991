"""The emulator's Python face: run PTX for Hopper (sm_90a) and Blackwell (sm_100a) on a CPU.

    kernel = Kernel(ptx_text)
    run = kernel.launch([x, y, 4096], grid=(2, 1, 1), block=(128, 1, 1))
    run.check()  # raises EmulationError with the reports, if there are any

Races, deadlocks and misuse are reported with PTX and source lines. docs/emulator.md says what is modelled, what that
proves and what it cannot prove.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jax_fa4 import native
from jax_fa4.emulated.implementation import options

__all__ = ["EmulationError", "Kernel", "Pointer", "Run", "TensorMap", "options"]

Size3 = tuple[int, int, int]


class EmulationError(RuntimeError):
    """A run had reports; the message holds all of them."""


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The address of a byte of an array, as an argument or inside a struct.

    Attributes:
      array: C-contiguous global memory.
      offset: of the byte, from the array's first.
    """

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
        """Does nothing if there are no reports.

        Raises:
          EmulationError: there are; its message holds all of them.
        """
        if self.reports:
            raise EmulationError("\n\n".join(map(str, self.reports)))

    def save_trace(self, path: str | Path) -> None:
        """Writes the trace as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Args:
          path: of the file.

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
        for what, text in (("ptx", ptx), ("name", name)):
            if not isinstance(text, str):
                raise ValueError(f"{what} must be a str, but got {_type_name(text)}.")
        self._program = native.emulator().emulator_load(ptx, name)
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
          arguments: one for each parameter. The kernel may write to arrays that are writeable, and only read others;
            arrays that share memory are one, which is writeable if one of them is.
          grid: CTAs along x, y, z.
          block: threads of a CTA along x, y, z.
          cluster: CTAs of a cluster along x, y, z; they divide the grid.
          dynamic_shared_bytes: as in a launch.
          seed: of the scheduler. The same seed gives the same run.
          mode: "strict" also reports what hardware is known to forgive; "relaxed" does not.
          check_races: whether accesses are checked for races.
          sm_count: how many CTAs are resident at a time, and what %nsmid says.
          max_instructions: of all warps together, after which the run ends with a report. It is looked at when the
            scheduler turns to another warp, at most 64 instructions later.
          trace: whether to record what asynchronous operations and waits do; the run then takes longer.
          max_trace_events: how many events the trace keeps, of up to 200 bytes each; later ones are counted only.
          progress: called with the number of CTAs that have ended, and of all CTAs.

        Raises:
          ValueError: an argument does not fit its parameter, or the launch is impossible.
        """
        if mode not in ("strict", "relaxed"):
            raise ValueError(f"mode must be 'strict' or 'relaxed', but got {mode!r}.")
        for what, flag in (("check_races", check_races), ("trace", trace)):
            if not isinstance(flag, bool):
                raise ValueError(f"{what} must be True or False, but got {flag!r}.")
        if progress is not None and not callable(progress):
            raise ValueError(f"progress must be a function of two numbers, or None, but got {progress!r}.")
        if isinstance(arguments, str | bytes) or not isinstance(arguments, Sequence):
            raise ValueError(f"arguments must be a list with one for each parameter, but got {_type_name(arguments)}.")
        if len(arguments) != len(self.parameters):
            names = ", ".join(f"{name} ({size} bytes)" for name, _, size in self.parameters)
            raise ValueError(
                f"{self.name} has {len(self.parameters)} parameters, but got {len(arguments)} arguments."
                + (f" The parameters: {names}." if names else "")
            )
        grid, block, cluster = _sizes("grid", grid), _sizes("block", block), _sizes("cluster", cluster)
        if any(x % y for x, y in zip(grid, cluster, strict=True)):
            raise ValueError(f"cluster {cluster} does not divide grid {grid}.")
        if math.prod(block) > 1024:
            raise ValueError(f"a CTA has 1 to 1024 threads, but block is {block}.")
        if math.prod(cluster) > 16:
            raise ValueError(f"a cluster has at most 16 CTAs, but cluster is {cluster}.")
        required = tuple(self._program.required_block)
        if required != (0, 0, 0) and required != block:
            raise ValueError(f"{self.name} requires block {required}, but got {block}.")
        named = [
            (f"argument {name}", argument) for (name, _, _), argument in zip(self.parameters, arguments, strict=True)
        ]
        memory = _Memory(named)
        parameters = bytearray(self._program.parameter_bytes)
        for (_, offset, size), (what, argument) in zip(self.parameters, named, strict=True):
            parameters[offset : offset + size] = memory.pack(what, argument, size)
        result = native.emulator().emulator_run(
            self._program,
            grid=grid,
            block=block,
            cluster=cluster,
            dynamic_shared_bytes=_integer("dynamic_shared_bytes", dynamic_shared_bytes, 0, (1 << 32) - 1),
            parameters=bytes(parameters),
            outputs=memory.buffers(writeable=True),
            inputs=memory.buffers(writeable=False),
            seed=_integer("seed", seed, 0, (1 << 64) - 1),
            strict=mode == "strict",
            check_races=check_races,
            sm_count=_integer("sm_count", sm_count, 1, 1 << 16),
            max_instructions=_integer("max_instructions", max_instructions, 1, (1 << 64) - 1),
            trace=trace,
            max_trace_events=_integer("max_trace_events", max_trace_events, 0, (1 << 64) - 1),
            progress=progress,
        )
        return Run(result.reports, result.instructions, result.trace)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _integer(what: str, value: Any, low: int, high: int) -> int:
    """The integer, of Python or NumPy, if it is from low to high."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or not low <= number <= high:
        raise ValueError(f"{what} must be an integer from {low} to {high}, but got {value!r}.")
    return number


def _sizes(what: str, sizes: Any) -> Size3:
    try:
        x, y, z = (_integer(what, size, 1, (1 << 31) - 1) for size in sizes)
    except (TypeError, ValueError):
        raise ValueError(f"{what} must be three positive integers below 2^31, but got {sizes!r}.") from None
    return x, y, z


def _checked(what: str, array: Any) -> np.ndarray:
    """The array, if it can be global memory."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{what} must have a NumPy array, but got {_type_name(array)}.")
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} must be a C-contiguous array, but its strides are {array.strides}.")
    if array.dtype.hasobject or not array.dtype.isnative:
        raise ValueError(f"{what} must hold plain numbers in the machine's byte order, but its type is {array.dtype}.")
    return array


@dataclasses.dataclass
class _Region:
    """Memory of the host that one or several arrays of a launch lie in, from `start` to `end`."""

    name: str
    start: int
    end: int
    writeable: bool
    address: int = 0


class _Memory:
    """Global memory of a launch: gives arrays addresses, and packs arguments that name them.

    Arrays that share memory (views of one array) share it in the launch, too; others are far apart.
    """

    # Far from null, and with a gap behind each region, so that an index that is a little off hits nothing.
    _START, _GAP = 0x7F00_0000_0000, 1 << 20

    def __init__(self, arguments: Iterable[tuple[str, Argument]]) -> None:
        self._regions: list[_Region] = []
        for what, array in (found for name, argument in arguments for found in self._arrays(name, argument)):
            start = self._host_address(array)
            region = _Region(what.removeprefix("argument "), start, start + array.nbytes, array.flags.writeable)
            shared = [x for x in self._regions if (x.start < region.end and region.start < x.end) or x.start == start]
            if shared:
                first = shared[0]
                first.start = min(region.start, *(x.start for x in shared))
                first.end = max(region.end, *(x.end for x in shared))
                first.writeable = region.writeable or any(x.writeable for x in shared)
                self._regions = [x for x in self._regions if x is first or x not in shared]
            else:
                self._regions.append(region)
        address = self._START
        for region in self._regions:
            region.address = address
            address += -(-(region.end - region.start) // 4096) * 4096 + self._GAP

    def buffers(self, writeable: bool) -> list[tuple[str, int, np.ndarray]]:
        """Name, address and bytes of each region that the kernel may write, or may not."""
        return [
            (x.name, x.address, np.ctypeslib.as_array((ctypes.c_uint8 * (x.end - x.start)).from_address(x.start)))
            for x in self._regions
            if x.writeable == writeable and x.end > x.start
        ]

    def pack(self, what: str, argument: Argument, size: int) -> bytes:
        """The argument as `size` bytes."""
        match argument:
            case TensorMap():
                kind, data = "a tensor map", self._tensor_map(what, argument)
            case Pointer():
                kind, data = "an address", self._pointer(what, argument)
            case np.ndarray() if argument.ndim > 0:
                kind, data = "an address", self._address(argument).to_bytes(8, "little")
            case bytes():
                kind, data = "a bytes object", argument
            case Mapping():
                kind, data = "a struct", self._struct(what, argument, size)
            case np.generic() | np.ndarray():
                kind, data = f"a number of type {argument.dtype}", argument.tobytes()
            case int():
                if not -(1 << (8 * size - 1)) <= argument < 1 << (8 * size):
                    raise ValueError(f"{what} is {argument}, which does not fit in {size} bytes.")
                kind, data = "a number", (argument % (1 << (8 * size))).to_bytes(size, "little")
            case float():
                kind, data = "a float", self._float(what, argument, size)
            case _:
                raise ValueError(
                    f"{what} must be an array of NumPy, a Pointer, a TensorMap, a number, bytes or a struct, "
                    f"but got {_type_name(argument)}."
                )
        if len(data) != size:
            raise ValueError(f"{what} is {kind} of {len(data)} bytes, but the parameter has {size}.")
        return data

    @classmethod
    def _arrays(cls, what: str, argument: Argument) -> Iterator[tuple[str, np.ndarray]]:
        match argument:
            case TensorMap() | Pointer():
                yield what, _checked(what, argument.array)
            case np.ndarray() if argument.ndim > 0:
                yield what, _checked(what, argument)
            case Mapping():
                for offset, field in argument.items():
                    if not isinstance(field, tuple) or len(field) != 2:
                        raise ValueError(
                            f"{what} at byte {offset!r} must be an argument and its size, but got {field!r}."
                        )
                    yield from cls._arrays(f"{what} at byte {offset!r}", field[0])

    @staticmethod
    def _host_address(array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]

    def _address(self, array: np.ndarray) -> int:
        start = self._host_address(array)
        region = next(x for x in self._regions if x.start <= start and start + array.nbytes <= x.end)
        return region.address + start - region.start

    def _pointer(self, what: str, pointer: Pointer) -> bytes:
        address = self._address(pointer.array)
        offset = _integer(f"the offset of {what}", pointer.offset, -address, (1 << 64) - 1 - address)
        return (address + offset).to_bytes(8, "little")

    @staticmethod
    def _float(what: str, value: float, size: int) -> bytes:
        if size not in (2, 4, 8):
            raise ValueError(f"{what} is a float, but the parameter has {size} bytes, not 2, 4 or 8.")
        with np.errstate(over="ignore"):
            data = np.array(value, f"f{size}")
        if np.isinf(data) and not np.isinf(value):
            raise ValueError(f"{what} is {value}, which does not fit in {size} bytes.")
        return data.tobytes()

    def _struct(self, what: str, fields: Mapping[Any, tuple[Argument, Any]], size: int) -> bytes:
        struct, taken = bytearray(size), bytearray(size)
        for offset, (field, width) in fields.items():
            where = f"{what} at byte {offset!r}"
            offset = _integer(f"an offset of the struct {what}", offset, 0, size - 1)
            width = _integer(f"the size of {where}", width, 1, size - offset)
            if any(taken[offset : offset + width]):
                raise ValueError(f"{where} overlaps another field.")
            taken[offset : offset + width] = bytes([1]) * width
            struct[offset : offset + width] = self.pack(where, field, width)
        return bytes(struct)

    def _tensor_map(self, what: str, tensor: TensorMap) -> bytes:
        array = tensor.array
        dims = tuple(reversed(array.shape)) if tensor.dims is None else tensor.dims
        strides = tuple(reversed(array.strides))[1:] if tensor.strides is None else tensor.strides
        sizes: dict[str, list[int]] = {}
        for name, given, bits in (("dims", dims, 64), ("strides", strides, 64), ("box", tensor.box, 32)):
            if not isinstance(given, Sequence) or isinstance(given, str | bytes):
                raise ValueError(f"{what}: {name} must be a tuple of integers, but got {given!r}.")
            sizes[name] = [_integer(f"{what}: {name}[{i}]", x, 0, (1 << bits) - 1) for i, x in enumerate(given)]
        if tensor.swizzle not in (0, 32, 64, 128):
            raise ValueError(f"{what}: swizzle must be 0, 32, 64 or 128 bytes, but got {tensor.swizzle!r}.")
        try:
            return native.emulator().emulator_encode_tensor_map(
                self._address(array), array.dtype.name, swizzle=int(tensor.swizzle), **sizes
            )
        except ValueError as error:
            all_given = ", ".join(f"{name} {tuple(values)}" for name, values in sizes.items())
            raise ValueError(f"{what}: {error} (given: {all_given}, swizzle {tensor.swizzle})") from None
