"""The launches behind the Hopper vectors: kernels, inputs made from fixed seeds, outputs, and how outputs are stored.

Everything here follows from integers of a frozen generator, so that it is the same on every machine. The recorder
(record.py) runs the cases on a GPU, and test_hopper_vectors.py in the emulator.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hopper import kernels

VECTORS = Path(__file__).with_name("vectors.npz")
BARRIERS = 1024  # bytes of shared memory before the data of a kernel
BF16 = ml_dtypes.bfloat16
F16, F32, U32, U64 = np.float16, np.float32, np.uint32, np.uint64


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """Global memory that a kernel writes: all of it, or, where it has initial values, some."""

    shape: tuple[int, ...]
    dtype: Any
    initial: np.ndarray | None = None

    def buffer(self, poison: int) -> np.ndarray:
        if self.initial is not None:
            return self.initial.copy()
        return (
            np.full(int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize, poison, np.uint8)
            .view(self.dtype)
            .reshape(self.shape)
        )


def changed(initial: np.ndarray) -> Output:
    return Output(initial.shape, initial.dtype, initial)


@dataclasses.dataclass(frozen=True, eq=False)
class Map:
    """A tensor map, as jax_fa4.emulated.TensorMap has it: box and coordinates innermost first."""

    of: np.ndarray | Output
    box: tuple[int, ...]
    swizzle: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One launch.

    Attributes:
      kernel: a name for the text; the same for the same text only.
      source: the text, for kernels.PRELUDE to stand before.
      arguments: read-only arrays, `Output`s, `Map`s, and integers of 32 bits.
      shared: bytes of shared memory behind the barriers.
      expected: of each output, or None where numpy cannot say.
      error: of an approximation whose bits are not modelled: the largest that is documented, from arguments and
        values; the hardware and the emulator are to keep it both.
    """

    kernel: str
    source: str
    arguments: list[Any]
    grid: int = 1
    block: int = 128
    cluster: int = 1
    shared: int = 0
    expected: list[np.ndarray | None] | None = None
    error: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None

    def outputs(self) -> list[Output]:
        """In the order in which the arguments name them."""
        return [y for x in self.arguments if isinstance(y := x.of if isinstance(x, Map) else x, Output)]

    def inputs_digest(self) -> np.ndarray:
        """Of everything that the kernel is given, which tells whether a recorded result is of the same inputs."""
        state = hashlib.sha256()
        for x in self.arguments:
            x = x.of if isinstance(x, Map) else x
            x = x.initial if isinstance(x, Output) else x
            state.update(b"" if x is None else np.ascontiguousarray(x).tobytes())
        return np.frombuffer(state.digest()[:12], np.uint8)


CASES: dict[str, Callable[[], Case]] = {}


def _case(name: str, make: Callable[..., Case], *args: Any, **options: Any) -> None:
    assert name not in CASES
    CASES[name] = lambda: make(_Random(name), *args, **options)


# ---- Numbers from integers


class _Random:
    """Numbers whose bits are drawn, so that no library's arithmetic has a part in them."""

    def __init__(self, name: str) -> None:
        self._state = np.random.RandomState(zlib.crc32(name.encode()))

    def integers(self, low: int, high: int, shape: Any, dtype: Any = U32) -> np.ndarray:
        return self._state.randint(low, high, shape, np.int64).astype(dtype)

    def bits(self, shape: Any, dtype: Any = U32) -> np.ndarray:
        bits = np.dtype(dtype).itemsize * 8
        if bits == 8:
            return self.integers(0, 256, shape, dtype)
        words = [self._state.randint(0, 1 << 16, shape, np.int64).astype(U64) << U64(16 * i) for i in range(bits // 16)]
        return np.bitwise_or.reduce(words).astype(dtype)

    def floats(self, shape: Any, dtype: Any, exponents: tuple[int, int]) -> np.ndarray:
        """Both signs, exponents uniform in a closed range, any significand. Below the least exponent: subnormal."""
        info = ml_dtypes.finfo(dtype)
        significand, bias = info.nmant, 1 - int(info.minexp)
        word = {2: np.uint16, 4: np.uint32}[np.dtype(dtype).itemsize]
        field = np.clip(self.integers(exponents[0], exponents[1] + 1, shape, np.int64) + bias, 0, 2 * bias)
        sign = self.integers(0, 2, shape, np.int64) << (info.bits - 1)
        return (
            (sign | field << significand | self.integers(0, 1 << significand, shape, np.int64)).astype(word).view(dtype)
        )

    def some(self, array: np.ndarray, values: list[float], of: int) -> np.ndarray:
        """The array with one in `of` elements replaced by one of the values."""
        chosen = self.integers(0, of, array.shape) == 0
        return np.where(chosen, np.array(values, array.dtype)[self.integers(0, len(values), array.shape)], array)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


# ---- Tensor maps


def _swizzled(byte: np.ndarray, width: int) -> np.ndarray:
    return byte ^ (byte >> 7 & max(width // 16 - 1, 0)) << 4


def _tile(tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """The box at coordinates (innermost first), with zeros out of bounds."""
    tile = np.zeros(box[::-1], tensor.dtype)
    inside = []
    for size, start, length in zip(box[::-1], at[::-1], tensor.shape, strict=True):
        low, high = max(start, 0), min(start + size, length)
        if low >= high:
            return tile
        inside.append((slice(low - start, high - start), slice(low, high)))
    tile[tuple(x for x, _ in inside)] = tensor[tuple(x for _, x in inside)]
    return tile


_PLACES: list[tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]] = [
    # shape, box without its innermost size, coordinates without their innermost
    ((), (), [(), (), (), ()]),
    ((13,), (5,), [(0,), (10,), (-3,), (13,)]),
    ((5, 4), (3, 2), [(0, 0), (2, 3), (-2, -1), (0, 5)]),
    ((3, 4, 3), (2, 3, 2), [(0, 0, 0), (2, 2, 2), (-1, -2, -1), (1, 1, -2)]),
    ((3, 2, 4, 3), (2, 2, 2, 2), [(0, 0, 0, 0), (2, 3, 1, 2), (-1, -1, -1, -1), (1, 0, 2, 0)]),
]


def _tensor_data(random: _Random, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        return random.bits(
            shape, np.dtype(dtype).name.replace("int", "uint") if np.dtype(dtype).kind == "i" else dtype
        ).view(dtype)
    return random.floats(shape, dtype, (-6, 6))


_REDUCE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, x: np.where(old >= x, 0, old + 1).astype(old.dtype),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - 1).astype(old.dtype),
}


def _narrow_rows(random: _Random, swizzle: int, inner: int) -> Case:
    """A box whose rows of `inner` bytes are narrower than the swizzle: each takes the swizzle's width."""
    rows, columns = 11, inner // 2
    tensor, old = (random.floats((40, 72), BF16, (-6, 6)) for _ in range(2))
    from_ = [(0, 0), (8, 5), (72 - 8, 33), (-8, -3)]
    to = [(0, 0), (8, 15), (72 - 8, 35), (72, 0)]
    back = old.copy()
    for source, target in zip(from_, to, strict=True):
        window = back[tuple(slice(c, c + n) for c, n in zip(target[::-1], (rows, columns), strict=True))]
        window[...] = _tile(tensor, (columns, rows), source)[tuple(map(slice, window.shape))]
    # With the patterns of all swizzles once more behind it.
    span = rows * swizzle // 1024 * 1024 + 2048
    box = (columns, rows)
    return Case(
        "narrow_rows",
        kernels.NARROW_ROWS,
        [
            Output((len(to), span // 4), U32),
            np.array(from_, np.int32),
            np.array(to, np.int32),
            rows * inner,
            span,
            Map(tensor, box, swizzle),
            Map(changed(old), box, swizzle),
        ],
        grid=len(to),
        shared=span,
        expected=[None, back],
    )


for _width, _inner in [(32, 16), (64, 16), (64, 48), (128, 32), (128, 64), (128, 96), (128, 112)]:
    _case(f"tensor/narrow/{_width}/{_inner}", _narrow_rows, _width, _inner)


def _tensor_copy(
    random: _Random,
    rank: int,
    dtype: Any,
    swizzle: int,
    reduce: str = "",
    data: str = "plain",
    beyond: bool = False,
) -> Case:
    size = np.dtype(dtype).itemsize
    inner, unit = (swizzle or 48) // size, 16 // size
    outer, box, places = _PLACES[rank - 1]
    length = 5 * inner - unit
    # Loads partly and wholly out of bounds; stores beside each other, as they have no order, at no negative coordinate.
    starts = [(unit, inner), (4 * inner, 4 * inner), (-unit, 2 * inner), (length + unit, length + unit)]
    if reduce:
        places, starts = places[:3], starts[:3]
    from_ = [(start, *place) for (start, _), place in zip(starts, places, strict=True)]
    to = [(start, *(max(x, 0) for x in place)) for (_, start), place in zip(starts, places, strict=True)]
    if beyond:  # one whole tile, and reductions that reach over the end, or lie behind it, in one dimension or all
        ends = [(size, part) for size, part in zip(outer, box, strict=True)]
        starts = [(0, 0), (inner, 4 * inner), (0, length), (0, length + unit), (inner, inner), (0, 1 << 20)]
        places = [tuple(0 for _ in box)] * len(starts)
        places[1] = places[4] = tuple(size - part + 1 for size, part in ends)
        places[5] = tuple(size + 7 for size, _ in ends)
    box, shape = (inner, *box), (*outer[::-1], length)
    tensor, old = _tensor_data(random, shape, dtype), _tensor_data(random, shape, dtype)
    if data == "tiny":  # sums of which some, or some of whose terms, are subnormal
        least = int(ml_dtypes.finfo(dtype).minexp)
        tensor, old = (random.floats(shape, dtype, (least - 2, least + 1)) for _ in range(2))
    elif data == "special":
        tensor, old = (random.some(x, [0.0, -0.0, np.inf, -np.inf, np.nan], 3) for x in (tensor, old))
    bytes_ = int(np.prod(box)) * size
    integers = np.dtype(dtype).kind in "iu"
    raw = np.zeros((len(to), bytes_), np.uint8)
    back = old.copy()
    for image, source, target in zip(raw, from_, to, strict=True):
        tile = _tile(tensor, box, source)
        image[_swizzled(np.arange(bytes_), swizzle)] = _bits(tile).reshape(-1)
        window = back[tuple(slice(c, c + n) for c, n in zip(target[::-1], box[::-1], strict=True))]
        tile = tile[tuple(slice(n) for n in window.shape)]
        with np.errstate(all="ignore"):
            window[...] = _REDUCE[reduce](window, tile) if reduce else tile
    return Case(
        f"tensor_{rank}d{'_' * bool(reduce)}{reduce}",
        kernels.tensor_copy(rank, reduce),
        [
            Output((len(to), bytes_ // 4), U32),
            np.array(from_, np.int32),
            np.array(to, np.int32),
            bytes_,
            Map(tensor, box, swizzle),
            Map(changed(old), box, swizzle),
        ],
        grid=len(to),
        shared=bytes_,
        expected=[raw.view(U32), back if integers or not reduce else None],
    )


for _rank, _swizzle in itertools.product(range(1, 6), (0, 32, 64, 128)):
    _dtypes = (BF16, F16, F32) if _rank == 2 else ((BF16, F32, F16)[(_rank + _swizzle // 32) % 3],)
    for _dtype in _dtypes:
        _case(f"tensor/{_rank}d/{_swizzle}/{np.dtype(_dtype).name}", _tensor_copy, _rank, _dtype, _swizzle)
for _dtype in (np.uint8, np.uint16, np.uint32, np.int32, np.uint64, np.int64, np.float64):
    if _dtype is not np.float64:
        _case(f"tensor/2d/64/{np.dtype(_dtype).name}", _tensor_copy, 2, _dtype, 64)
for _dtype, _operation in [
    *itertools.product((np.uint32, np.int32), ("add", "min", "max")),
    *((np.uint32, op) for op in ("and", "or", "xor", "inc", "dec")),
    *((np.uint64, op) for op in ("add", "min", "xor")),
    *((dtype, op) for dtype in (BF16, F16) for op in ("add", "min", "max")),
    (F32, "add"),
]:
    _case(f"tensor_reduce/{_operation}/{np.dtype(_dtype).name}", _tensor_copy, 2, _dtype, 64, _operation)
for _dtype, _data in itertools.product((F32, BF16, F16), ("tiny", "special")):
    _case(f"tensor_reduce/add/{np.dtype(_dtype).name}/{_data}", _tensor_copy, 2, _dtype, 128, "add", _data)
for _rank in (1, 3, 4, 5):
    _case(f"tensor_reduce/add/{_rank}d", _tensor_copy, _rank, F32, 0, "add")


for _rank, _dtype, _operation in [(1, F32, "add"), (2, F32, "add"), (3, BF16, "max"), (5, np.int32, "min")]:
    _case(f"tensor_reduce/beyond/{_rank}d/{_operation}", _tensor_copy, _rank, _dtype, 32, _operation, beyond=True)


# ---- Bulk copies


def _bulk_copy(random: _Random) -> Case:
    places = np.array(
        [(0, 0, 4096, 16), (4096, 16, 0, 48), (32, 1024, 8192, 2048), (48, 64, 64, 528), (6000, 3088, 48, 16)], U32
    )
    data = random.bits(2048, U32)
    out = np.full(12288, 0xA5, np.uint8)
    after = out.copy()
    for start, _, to, length in places:
        after[to : to + length] = data.view(np.uint8)[start : start + length]
    return Case(
        "bulk_copy",
        kernels.BULK_COPY,
        [changed(out), data, places, len(places)],
        block=32,
        shared=4096,
        expected=[after],
    )


_case("bulk/copies", _bulk_copy)

BULK_REDUCTIONS: dict[str, Any] = {
    "add.f32": F32,
    "add.f64": np.float64,
    "add.u32": np.uint32,
    "add.s32": np.int32,
    "add.u64": np.uint64,
    "min.s32": np.int32,
    "max.s32": np.int32,
    "min.u32": np.uint32,
    "max.u32": np.uint32,
    "inc.u32": np.uint32,
    "dec.u32": np.uint32,
    "min.u64": np.uint64,
    "max.s64": np.int64,
    "and.b32": np.uint32,
    "or.b32": np.uint32,
    "xor.b32": np.uint32,
    "and.b64": np.uint64,
    "or.b64": np.uint64,
    "xor.b64": np.uint64,
    "add.noftz.f16": F16,
    "add.noftz.bf16": BF16,
    "min.f16": F16,
    "max.f16": F16,
    "min.bf16": BF16,
    "max.bf16": BF16,
}


def _bulk_reduction(random: _Random, name: str, data: str = "plain") -> Case:
    dtype = BULK_REDUCTIONS[name]
    if np.dtype(dtype) == np.float64:
        x, old = (random.floats(256, F32, (-6, 6)).astype(dtype) for _ in range(2))
    elif data == "tiny":
        least = int(ml_dtypes.finfo(dtype).minexp)
        x, old = (random.floats(256, dtype, (least - 2, least + 1)) for _ in range(2))
    elif data == "special":
        x, old = (
            random.some(random.floats(256, dtype, (-3, 3)), [0.0, -0.0, np.inf, -np.inf, np.nan], 2) for _ in range(2)
        )
    else:
        x, old = (_tensor_data(random, (256,), dtype) for _ in range(2))
    return Case(
        f"bulk_{name.replace('.', '_')}",
        kernels.bulk_reduction(name),
        [changed(old), x, x.nbytes],
        block=32,
        shared=x.nbytes,
        expected=[_REDUCE[name.split(".")[0]](old, x) if np.dtype(dtype).kind in "iu" else None],
    )


for _name, _dtype in BULK_REDUCTIONS.items():
    _case(f"bulk/{_name}", _bulk_reduction, _name)
    if np.dtype(_dtype).name in ("float32", "float16", "bfloat16"):
        for _data in ("tiny", "special"):
            _case(f"bulk/{_name}/{_data}", _bulk_reduction, _name, _data)


# ---- Barriers


def _phases(random: _Random) -> Case:
    even, odd = 2, 1  # parity 1 has passed in even phases, 0 in odd ones
    log = [even, even, even, odd, even, 0, 1, odd, 1, odd, odd, even, even, even, odd]
    log += [odd, odd, even, even, even, odd, odd, odd, even, even, odd, odd, odd, even]
    log += [odd, even, odd, even, odd, even, even, odd]
    return Case(
        "barrier_phases",
        kernels.BARRIER_PHASES,
        [changed(np.full(48, 99, U32))],
        block=32,
        expected=[np.array(log + [99] * (48 - len(log)), U32)],
    )


def _tries(random: _Random) -> Case:
    even, odd = 2, 1  # parity 1 has passed in even phases, 0 in odd ones
    log = [1, 0, 1, 0, 1, 0, even, even, 0, even, odd, 1, odd, odd, odd, even, 1]
    log += [even, even, 0, even, even, odd, odd, odd, 0, even, 1]
    return Case(
        "barrier_tries",
        kernels.BARRIER_TRIES,
        [changed(np.full(32, 99, U32))],
        block=32,
        expected=[np.array(log + [99] * (32 - len(log)), U32)],
    )


def _ring(random: _Random) -> Case:
    rounds = 41
    data = random.bits((rounds, 128))
    total = np.zeros(128, U32)
    for i, row in enumerate(data):
        total = 5 * total + row[np.arange(128) ^ i & 127]
    return Case("ring", kernels.RING, [Output((128,), U32), data, rounds], block=160, shared=1536, expected=[total])


def _named_barriers(random: _Random) -> Case:
    rounds = 9
    data = random.bits((rounds, 64))
    writer, reader = np.zeros(64, U32), np.zeros(128, U32)
    for row in data:
        writer = 3 * writer + row
        reader = 7 * reader + np.tile(writer[::-1], 2)
    return Case(
        "named_barriers",
        kernels.NAMED_BARRIERS,
        [Output((192,), U32), data, rounds],
        block=192,
        shared=256,
        expected=[np.concatenate([writer, reader])],
    )


def _registers(random: _Random) -> Case:
    rounds = 7
    return Case(
        "registers",
        kernels.REGISTERS,
        [Output((256,), F32), random.floats((rounds, 256), F32, (-3, 2)), rounds],
        block=384,
        shared=2048,
    )


_case("barriers/phases", _phases)
_case("barriers/tries", _tries)
_case("barriers/ring", _ring)
_case("barriers/named", _named_barriers)
_case("barriers/setmaxnreg", _registers)


# ---- Clusters


def _cluster_memory(random: _Random, size: int) -> Case:
    data = random.bits((8 // size, size, 64))
    out = np.zeros((8 // size, size, 5, 64), U32)
    out[:, :, 0] = np.roll(data, 1, axis=1)[..., ::-1]
    out[:, :, 1] = np.roll(data + np.arange(64, dtype=U32), 1, axis=1)
    out[:, :, 2] = np.roll(np.arange(size), 1)[:, None]
    out[:, :, 3] = size
    out[:, 0, 4] = np.add.reduce(data, (1, 2), dtype=U32)[:, None]
    return Case(
        "cluster_memory",
        kernels.CLUSTER_MEMORY,
        [Output(out.shape, U32), data, size],
        grid=8,
        block=64,
        cluster=size,
        shared=1024,
        expected=[out],
    )


def _cluster_barriers(random: _Random, size: int) -> Case:
    data = random.bits((size, 8))
    rank = np.arange(size, dtype=U32)
    sent = np.stack([data[:, 1], rank, data[:, 1], data[:, 2]], 1)
    return Case(
        "cluster_barriers",
        kernels.CLUSTER_BARRIERS,
        [Output((13 * size,), U32), data, size],
        grid=size,
        block=32,
        cluster=size,
        shared=2048,
        expected=[np.concatenate([data[:, 0] + 1, sent.reshape(-1), data.reshape(-1)])],
    )


def _cluster_copies(random: _Random, size: int, words: tuple[int, int]) -> Case:
    data = random.bits((size, 1024))
    out = np.full((size, 2, 1024), 0x5A5A5A5A, U32)
    out[:, 0, : words[0]] = np.roll(data, 1, axis=0)[:, : words[0]]
    out[:, 1, : words[1]] = data[:, : words[1]]
    return Case(
        "cluster_copies",
        kernels.CLUSTER_COPIES,
        [Output(out.shape, U32), data, np.array(words, U32), size],
        grid=size,
        block=32,
        cluster=size,
        shared=3 * 4096,
        expected=[out],
    )


def _multicast(random: _Random, tensor: bool, masks: tuple[int, ...], swizzle: int = 128) -> Case:
    size = len(masks)
    wanted = np.array([sum(mask >> r & 1 for mask in masks) * 1024 for r in range(size)], U32)
    ctas = 2 * size
    data: np.ndarray
    if tensor:
        data = random.floats((8 * ctas - 3, 64), BF16, (-4, 4))
        width = swizzle or 128
        parts = []
        for cta in range(ctas):
            part = np.zeros(1024, np.uint8)
            place = (-8 * (cta % size % 2), 8 * cta)
            part[_swizzled(np.arange(1024), swizzle)] = _bits(_tile(data, (width // 2, 1024 // width), place)).reshape(
                -1
            )
            parts.append(part.view(U32))
        source: Any = Map(data, (width // 2, 1024 // width), swizzle)
    else:
        source = data = random.bits((ctas, 256))
        parts = list(data)
    rank = np.arange(size)[:, None]
    out = np.tile(
        (0xABCD0000 + 4096 * rank + np.arange(256 * size)).astype(U32).reshape(1, size, size, 256), (2, 1, 1, 1)
    )
    for pair, receiver, sender in np.ndindex(2, size, size):
        if masks[sender] >> receiver & 1:
            out[pair, receiver, sender] = parts[pair * size + sender]
    return Case(
        f"multicast_{'tensor' if tensor else 'bulk'}",
        kernels.multicast(tensor),
        [Output(out.shape, U32), np.array(masks, U32), wanted, size, source],
        grid=ctas,
        cluster=size,
        shared=1024 * size,
        expected=[out],
    )


for _size in (2, 4, 8):
    _case(f"cluster/memory/{_size}", _cluster_memory, _size)
    _case(f"cluster/barriers/{_size}", _cluster_barriers, _size)
    for _words in ((4, 1024), (1024, 252)):
        _case(f"cluster/copies/{_size}/{_words[0]}-{_words[1]}", _cluster_copies, _size, _words)
for _masks in [(3, 3), (2, 1), (3, 0), (1, 2), (15, 15, 15, 15), (13, 6, 8, 15), (12, 12, 3, 3), (0, 0, 14, 0)]:
    for _tensor in (False, True):
        _kind = "tensor" if _tensor else "bulk"
        _case(f"cluster/multicast/{_kind}/{'-'.join(map(str, _masks))}", _multicast, _tensor, _masks)
for _swizzle in (0, 32, 64):
    _case(f"cluster/multicast/tensor/swizzle{_swizzle}", _multicast, True, (15, 5, 10, 2), _swizzle)


# ---- Matrix products


@dataclasses.dataclass(frozen=True)
class LaidOut:
    """An operand of wgmma in shared memory, by its bytes, and its matrix descriptors relative to address 0."""

    image: np.ndarray
    descriptors: np.ndarray


def lay_out(matrix: np.ndarray, major: str, width: int) -> LaidOut:
    """A matrix of 16-bit elements (M or N by K), K-major ("k") or MN-major ("m"), in rows of a swizzle's width.

    A width of 16 is no swizzle. A descriptor for each 16 of K (PTX ISA 9.7.15.5.1).
    """
    rows, depth = matrix.shape
    mn, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    per = width // 2
    first = np.arange(0, depth, 16)
    if width == 16:  # core matrices of 8 rows of 16 bytes; of two neighbours along K, 128 bytes apart
        leading, stride = 128, 128 * (depth // 8)
        across, along = (mn, k) if major == "k" else (k, mn)
        byte = across % 8 * 16 + along % 8 * 2 + mn // 8 * stride + k // 8 * leading
        start = first // 8 * leading
    elif major == "k":  # panels of `width` bytes along K, each with all rows
        panel = -(-rows * width // 1024) * 1024
        leading, stride = 16, 8 * width
        byte = k // per * panel + mn * width + k % per * 2
        start = first // per * panel + first % per * 2
    else:  # panels of `width` bytes along M or N, each with all of K
        leading, stride = depth * width, 8 * width
        byte = mn // per * leading + k * width + mn % per * 2
        start = first * width
    byte = _swizzled(byte, width if width > 16 else 0)
    image = np.zeros(-(-(int(byte.max()) + 2) // 1024) * 1024, np.uint8)
    for i in range(2):
        image[byte + i] = _bits(matrix).reshape(rows, depth, 2)[..., i]
    mode = {16: 0, 128: 1, 64: 2, 32: 3}[width]
    fixed = (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62
    return LaidOut(image, np.array([(int(x) >> 4) | fixed for x in start], U64))


def displaced(operand: LaidOut, shift: int, by_descriptor: bool) -> LaidOut:
    """The same operand `shift` bytes further on, where no pattern of its swizzle starts.

    Either its pattern is displaced with it, as base offsets in its descriptors say, or it stays that of the addresses.
    """
    mode = int(operand.descriptors[0]) >> 62
    byte = _swizzled(np.arange(len(operand.image)), {1: 128, 2: 64, 3: 32}[mode])
    to = byte if by_descriptor else _swizzled(np.arange(len(operand.image)) + shift, {1: 128, 2: 64, 3: 32}[mode])
    image = np.zeros(len(operand.image) + 1024, np.uint8)
    image[to + shift if by_descriptor else to] = operand.image[byte]
    offset = shift // 128 % 8 << 49 if by_descriptor else 0
    return LaidOut(image, operand.descriptors + U64((shift >> 4) + offset))


def accumulators(matrix: np.ndarray) -> np.ndarray:
    """The 64 rows of D as wgmma has them in registers (9.7.15.5.1.1.2): [thread][register]."""
    thread, i = np.meshgrid(np.arange(128), np.arange(matrix.shape[1] // 2), indexing="ij")
    return np.ascontiguousarray(
        matrix[thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2]
    )


def a_fragments(a: np.ndarray) -> np.ndarray:
    """A in registers: [step][thread][register], each two elements of K."""
    packed = np.ascontiguousarray(a).view(U32)
    step, thread, r = np.meshgrid(np.arange(a.shape[1] // 16), np.arange(len(a) * 2), np.arange(4), indexing="ij")
    return np.ascontiguousarray(
        packed[thread // 32 * 16 + thread % 32 // 4 + r % 2 * 8, step * 8 + thread % 4 + r // 2 * 4]
    )


OPERANDS = ("plain", "wide", "subnormal", "tiny", "cancel", "overflow", "special", "integers")


def _operands(random: _Random, m: int, n: int, depth: int, dtype: Any, data: str) -> tuple[np.ndarray, ...]:
    """A, B and C, of a kind."""
    shapes = (m, depth), (n, depth)
    least = int(ml_dtypes.finfo(dtype).minexp)

    def both(*exponents: tuple[int, int]) -> list[np.ndarray]:
        return [random.floats(shape, dtype, e) for shape, e in zip(shapes, exponents, strict=True)]

    match data:
        case "plain":
            (a, b), c = both((-3, 1), (-3, 1)), random.floats((m, n), F32, (-4, 4))
        case "wide":
            ends = (-30, 30) if dtype == BF16 else (-14, 12)
            (a, b), c = both(ends, ends), random.floats((m, n), F32, (-40, 44))
            a, b = (random.some(x, [0.0, -0.0], 8) for x in (a, b))
        case "subnormal":  # of the operands' type, beside what they may matter beside
            (a, b), c = both((least - 1, least + 1), (-6, 14)), random.floats((m, n), F32, (least - 20, least + 16))
            b = random.some(b, [0.0, float(ml_dtypes.finfo(dtype).smallest_subnormal)], 8)
        case "tiny":  # products and sums about the least of f32
            low = -76 if dtype == BF16 else least
            (a, b), c = both((low, low + 16), (low, low + 16)), random.floats((m, n), F32, (-128, -120))
        case "cancel":
            (a, b), c = both((-4, 4), (-4, 4)), random.floats((m, n), F32, (-30, 3))
            a[:, 1::2], b[:, 1::2] = a[:, ::2], -b[:, ::2]
            b[:, 5] = random.floats(n, dtype, (-14, -8))
            b[::3, 5] = -b[::3, 4]
            c = random.some(c, [0.0, -0.0], 2)
        case "overflow":
            ends = (55, 63) if dtype == BF16 else (12, 15)
            (a, b), c = both(ends, ends), random.floats((m, n), F32, (100, 127))
        case "special":
            (a, b), c = both((-4, 4), (-4, 4)), random.floats((m, n), F32, (-4, 4))
            values = [np.inf, -np.inf, np.nan, 0.0, -0.0]
            a, b = (random.some(x, values, 150) for x in (a, b))
            c = random.some(c, values, 10)
        case _:
            a, b, c = (
                random.integers(-4, 5, s, np.int64).astype(t)
                for s, t in ((shapes[0], dtype), (shapes[1], dtype), ((m, n), F32))
            )
    return a, b, c


def _product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) @ b.astype(np.float64).T + c).astype(F32)


def _wgmma(
    random: _Random,
    n: int,
    dtype: Any,
    data: str = "plain",
    *,
    majors: str = "kk",
    widths: tuple[int, int] = (128, 128),
    a_in_registers: bool = False,
    signs: tuple[int, int] = (1, 1),
    steps: int = 4,
    scale_d: int = -1,
    shifts: tuple[int, int] = (0, 0),
    by_descriptor: bool = False,
) -> Case:
    a, b, c = _operands(random, 64, n, 16 * steps, dtype, data)
    laid_a, laid_b = lay_out(a, majors[0], widths[0]), lay_out(b, majors[1], widths[1])
    if any(shifts):
        laid_a, laid_b = (displaced(x, y, by_descriptor) for x, y in zip((laid_a, laid_b), shifts, strict=True))
    kind = "bf16" if dtype == BF16 else "f16"
    form = (kind, "rs" if a_in_registers else "ss", f"n{n}", majors, *(f"{s:+d}" for s in signs), f"k{16 * steps}")
    expected = _product(signs[0] * signs[1] * a.astype(F32), b, c) if data == "integers" and scale_d == -1 else None
    return Case(
        "wgmma_" + "_".join(form),
        kernels.wgmma(n, kind, majors=majors, a_in_registers=a_in_registers, signs=signs, steps=steps),
        [
            Output((128, n // 2), F32),
            laid_a.image,
            laid_a.image.nbytes,
            laid_b.image,
            laid_b.image.nbytes,
            laid_a.descriptors,
            laid_b.descriptors,
            accumulators(c),
            scale_d % (1 << 32),
            a_fragments(a),
        ],
        shared=laid_a.image.nbytes + laid_b.image.nbytes,
        expected=[None if expected is None else accumulators(expected)],
    )


def _add_wgmma() -> None:
    sources = {"ss": False, "rs": True}
    for n, (source, registers) in itertools.product((8, 16, 24, 64, 80, 96, 128, 176, 192, 256), sources.items()):
        for dtype in (BF16, F16) if n in (8, 64, 256) else (BF16,):
            name = f"wgmma/{np.dtype(dtype).name}/{source}/n{n}"
            _case(f"{name}/plain", _wgmma, n, dtype, a_in_registers=registers)
            _case(f"{name}/integers", _wgmma, n, dtype, "integers", a_in_registers=registers)
    for dtype, (source, registers), data in itertools.product((BF16, F16), sources.items(), OPERANDS):
        if data not in ("plain", "integers"):
            _case(
                f"wgmma/{np.dtype(dtype).name}/{source}/n64/{data}", _wgmma, 64, dtype, data, a_in_registers=registers
            )
    widths = [(128, 128), (64, 64), (32, 32), (16, 16), (128, 16), (32, 64), (64, 128)]
    for majors, pair in itertools.product(("kk", "km", "mk", "mm"), widths):
        _case(f"wgmma/layout/ss/{majors}/{pair[0]}-{pair[1]}", _wgmma, 64, BF16, "integers", majors=majors, widths=pair)
        if majors[0] == "k" and pair[0] == pair[1]:
            _case(
                f"wgmma/layout/rs/{majors}/{pair[1]}",
                _wgmma,
                64,
                F16,
                "integers",
                majors=majors,
                widths=pair,
                a_in_registers=True,
            )
    for width in (128, 64, 32, 16):  # more panels than one along N
        for n in (128, 192):
            _case(f"wgmma/layout/ss/km/n{n}/{width}", _wgmma, n, BF16, "integers", majors="km", widths=(128, width))
        _case(f"wgmma/layout/ss/mm/n128/{width}", _wgmma, 128, BF16, "integers", majors="mm", widths=(width, width))
    # Operands that start within a pattern of their swizzle, of 1024, 512 or 256 bytes.
    for by_descriptor, (width, shifts) in itertools.product(
        (False, True),
        [(128, (128, 0)), (128, (0, 384)), (128, (512, 896)), (64, (128, 256)), (64, (0, 384)), (32, (128, 128))],
    ):
        for majors in ("kk", "mm"):
            name = f"wgmma/{'base_offset' if by_descriptor else 'start'}/{majors}/{width}/{shifts[0]}-{shifts[1]}"
            _case(
                name,
                _wgmma,
                64,
                BF16,
                "integers",
                majors=majors,
                widths=(width, width),
                shifts=shifts,
                by_descriptor=by_descriptor,
            )
    for (source, registers), signs in itertools.product(sources.items(), [(-1, 1), (1, -1), (-1, -1)]):
        for data in ("plain", "special", "cancel"):
            _case(
                f"wgmma/signs/{source}/{signs[0]:+d}{signs[1]:+d}/{data}",
                _wgmma,
                64,
                BF16,
                data,
                signs=signs,
                a_in_registers=registers,
            )
    for (source, registers), scale_d in itertools.product(sources.items(), (0b1110, 0b1011, 0b0111, 0)):
        _case(
            f"wgmma/scale_d/{source}/{scale_d:04b}",
            _wgmma,
            64,
            BF16,
            "special",
            scale_d=scale_d,
            a_in_registers=registers,
        )
    for source, registers in sources.items():
        for steps in (1, 8):
            _case(
                f"wgmma/chain/{source}/k{16 * steps}", _wgmma, 64, BF16, "wide", steps=steps, a_in_registers=registers
            )


_add_wgmma()


def _wgmma_in_flight(random: _Random) -> Case:
    a, b, _ = _operands(random, 64, 128, 64, BF16, "integers")
    parts = np.split(b, 4)
    image = np.concatenate([lay_out(part, "k", 128).image for part in parts])
    expected = [
        accumulators(_product(a[:, : 16 * steps], part[:, : 16 * steps], np.zeros((64, 32), F32)))
        for part, steps in zip(parts, (4, 3, 2, 1), strict=True)
    ]
    return Case(
        "wgmma_in_flight",
        kernels.WGMMA_IN_FLIGHT,
        [Output((4, 128, 16), F32), lay_out(a, "k", 128).image, image],
        shared=8192 + 4 * 4096,
        expected=[np.stack(expected)],
    )


_case("wgmma/in_flight", _wgmma_in_flight)


def _mma_sync(random: _Random, dtype: Any, data: str) -> Case:
    tiles = 64
    lane, i = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    a, b, c = [], [], []
    for _ in range(tiles):
        x, y, z = _operands(random, 16, 8, 16, dtype, data)
        a.append(a_fragments(x)[0])
        b.append(np.ascontiguousarray(y).view(U32)[lane[:, :2] // 4, lane[:, :2] % 4 + 4 * i[:, :2]])
        c.append(z[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2])
    kind = "bf16" if dtype == BF16 else "f16"
    return Case(
        f"mma_sync_{kind}",
        kernels.mma_sync(kind),
        [Output((tiles, 32, 4), F32), *map(np.stack, (a, b, c))],
        grid=tiles // 4,
    )


for _dtype, _data in itertools.product((BF16, F16), OPERANDS):
    _case(f"mma_sync/{np.dtype(_dtype).name}/{_data}", _mma_sync, _dtype, _data)


def _matrix_moves(random: _Random, count: int, trans: bool) -> Case:
    data = random.bits((32, 8), np.uint16)
    order, to = (np.argsort(random.bits(32)).astype(U32) for _ in range(2))
    lane, matrix, j = np.meshgrid(np.arange(32), np.arange(count), np.arange(2), indexing="ij")
    rows = data[order[: 8 * count]].reshape(count, 8, 8)
    fragments = (rows.transpose(0, 2, 1) if trans else rows)[matrix, lane // 4, lane % 4 * 2 + j]
    stored = data[::-1].copy()
    stored[to[: 8 * count]] = data[order[: 8 * count]]
    return Case(
        f"matrix_moves_x{count}{'_trans' * trans}",
        kernels.matrix_moves(count, trans),
        [Output((32, count, 2), np.uint16), Output((32, 8), np.uint16), data, order, to],
        block=32,
        shared=1024,
        expected=[fragments, stored],
    )


for _count, _trans in itertools.product((1, 2, 4), (False, True)):
    _case(f"matrix_moves/x{_count}{'_trans' * _trans}", _matrix_moves, _count, _trans)


# ---- Memory


def _copy_async(random: _Random) -> Case:
    data, valid = random.bits(512), random.integers(0, 17, 32)
    valid[:4] = (0, 4, 8, 16)
    words = np.full((4, 32, 16), 0x5A, np.uint8)
    for part, size in enumerate((4, 8, 16, 16)):
        for t in range(32):
            words[part, t, :size] = 0
            length = min(size, int(valid[t]))
            words[part, t, :length] = data.view(np.uint8).reshape(4, 32, 16)[part, t, :length]
    return Case(
        "copy_async",
        kernels.COPY_ASYNC,
        [Output((512,), U32), data, valid],
        block=32,
        shared=2048,
        expected=[words.reshape(-1).view(U32)[np.arange(512) ^ 5]],
    )


def _handover(random: _Random) -> Case:
    ctas = 6
    data = random.bits((ctas, 128))
    after = data[0].copy()
    for cta in range(1, ctas):
        after = after[np.arange(128) ^ cta] * U32(3) + data[cta]
    return Case(
        "handover",
        kernels.HANDOVER,
        [Output((128,), U32), changed(np.zeros(1, U32)), data],
        grid=ctas,
        expected=[after, np.array([ctas], U32)],
    )


def _atomics(random: _Random, space: str, data: str) -> Case:
    memory, values = random.bits(912), random.bits((8, 128))
    memory[:10] = (7, 1 << 31, 1 << 31, 5, 5, 0xFFFFFFFF, 0, 3, 40, 700)
    exponents = {"plain": (-5, 5), "tiny": (-128, -124)}.get(data, (-3, 3))
    for at, dtype in ((1, F32), (2, F16), (3, BF16)):
        least = int(ml_dtypes.finfo(dtype).minexp)
        ends = (least - 2, least + 1) if data == "tiny" else exponents
        halves = 128 * 4 // np.dtype(dtype).itemsize
        for row in (memory[16 + 128 * at : 144 + 128 * at], values[at + 1]):
            x = random.floats(halves, dtype, ends)
            if data == "special":
                x = random.some(x, [0.0, -0.0, np.inf, -np.inf, np.nan], 2)
            row[:] = x.view(U32)
    values[7, ::2] = memory[784:][::2]
    return Case(
        f"atomics_{space}", kernels.atomics(space), [changed(memory), Output((7, 128), U32), values], shared=3648
    )


def _half_reductions(random: _Random, space: str, data: str) -> Case:
    each = 128 * (1 if space == "shared" else 7)
    sums, values = [], []
    for dtype in (F16, BF16):
        least = int(ml_dtypes.finfo(dtype).minexp)
        for rows in (sums, values):
            x = random.floats(2 * each, dtype, (least - 2, least + 1) if data == "tiny" else (-4, 4))
            if data == "special":
                x = random.some(x, [0.0, -0.0, np.inf, -np.inf, np.nan], 2)
            rows.append(x.view(U32))
    memory = np.concatenate(sums)
    return Case(
        f"half_reductions_{space}",
        kernels.half_reductions(space),
        [changed(memory), np.concatenate(values)],
        shared=1024,
    )


def _vector_reductions(random: _Random, data: str) -> Case:
    ends = (-128, -124) if data == "tiny" else (-5, 5)
    sums, values = (random.floats(768, F32, ends) for _ in range(2))
    return Case("vector_reductions", kernels.VECTOR_REDUCTIONS, [changed(sums), values])


_case("memory/copy_async", _copy_async)
_case("memory/handover", _handover)
for _space, _data in itertools.product(("shared", "global"), ("plain", "tiny", "special")):
    _case(f"atomics/{_space}/{_data}", _atomics, _space, _data)
    _case(f"atomics/halves/{_space}/{_data}", _half_reductions, _space, _data)
for _data in ("plain", "tiny"):
    _case(f"atomics/vectors/{_data}", _vector_reductions, _data)


# ---- Warps and arithmetic


def _warp(random: _Random) -> Case:
    data = random.bits((2, 128))
    data[1, ::3] &= 31
    return Case("warp", kernels.warp_operations(), [Output((kernels.WARP_OPERATIONS, 128), U32), data])


_case("warp", _warp)

# Zero, subnormals, the least normal numbers; what rounds to integers and to 16 bits; the largest; infinity and NaNs.
_SPECIAL = """
    00000000 00000001 00000002 007fffff 00800000 00800001 33800000 3effffff 3f000000 3f7fffff 3f800000 3f800001
    40000000 477fe000 477ff000 4b000000 4effffff 4f000000 7e800000 7f7fffff 7f800000 7f800001 7fbfffff 7fc00000
    7fffffff"""
SPECIAL_WORDS = np.array([int(word, 16) for word in _SPECIAL.split()], U32)
SPECIAL_WORDS = np.concatenate([SPECIAL_WORDS, SPECIAL_WORDS | U32(1 << 31)])


def _table(random: _Random, name: str, operations: list[tuple[str, str]]) -> Case:
    columns = random.bits((3, 2048))
    if name in ("float", "conversions"):
        third = random.floats((3, 2048), F32, (-2, 2)).view(U32)  # near each other, so that sums round
        columns = np.where(random.integers(0, 3, (3, 2048)) == 0, columns, third)
        scattered = random.floats((3, 2048), F32, (-30, 34)).view(U32)
        columns = np.where(random.integers(0, 3, (3, 2048)) == 0, scattered, columns)
    elif name == "narrow":  # about the ranges of 8-bit floats, as f32 and as pairs of f16
        scattered = random.floats((3, 2048), F32, (-20, 17)).view(U32)
        pairs = random.floats((3, 4096), F16, (-15, 10)).view(U32)
        kinds = random.integers(0, 3, (3, 2048))
        columns = np.where(kinds == 0, columns, np.where(kinds == 1, scattered, pairs))
    elif name == "half":
        for dtype, part in ((BF16, slice(0, 1024)), (F16, slice(1024, 2048))):
            columns[:, part] = random.some(
                random.floats((3, 2048), dtype, (-6, 6)), [0.0, -0.0, np.inf, -np.inf, np.nan], 16
            ).view(U32)
    else:
        small = random.integers(0, 70, (3, 2048))
        columns = np.where(random.integers(0, 3, (3, 2048)) == 0, small, columns)
    pairs = list(itertools.product(SPECIAL_WORDS[::3], repeat=2))
    columns[:2, 256 : 256 + len(pairs)] = np.array(pairs, U32).T
    columns[:, : len(SPECIAL_WORDS)] = SPECIAL_WORDS
    columns[1, 64 : 64 + len(SPECIAL_WORDS)] = np.roll(SPECIAL_WORDS, 7)
    columns[2, 128 : 128 + len(SPECIAL_WORDS)] = np.roll(SPECIAL_WORDS, 11)
    return Case(
        f"table_{name}",
        kernels.table(operations),
        [Output((len(operations), 2048), U32), columns, 2048],
        grid=8,
        block=256,
    )


TABLES: dict[str, list[tuple[str, str]]] = {
    "float": kernels.FLOAT_OPERATIONS,
    "conversions": kernels.CONVERSIONS,
    "narrow": kernels.NARROW_CONVERSIONS,
    "half": kernels.HALF_OPERATIONS,
    "integer": kernels.INTEGER_OPERATIONS,
}
for _name, _operations in TABLES.items():
    _case(f"arithmetic/{_name}", _table, _name, _operations)


def _wide_integers(random: _Random) -> Case:
    data = random.bits((2, 2048), U64)
    data[:, ::5] = random.integers(0, 70, data[:, ::5].shape, U64)
    data[0, 1::5], data[1, 2::5] = U64((1 << 64) - 1), U64(1 << 63)
    return Case("wide_integers", kernels.WIDE_INTEGERS, [Output((16, 2048), U64), data, 2048], grid=8, block=256)


_case("arithmetic/wide_integers", _wide_integers)


def _spread(random: _Random, count: int) -> np.ndarray:
    """Words over the whole range, and special ones."""
    step = (1 << 32) // count
    words = (np.arange(count, dtype=np.int64) * step + random.integers(0, step, count, np.int64)).astype(U32)
    words[: len(SPECIAL_WORDS)] = SPECIAL_WORDS
    return words


def _function(random: _Random, instruction: str) -> Case:
    """A function whose every bit is modelled, at a million places, half of them where it matters."""
    words = _spread(random, 1 << 20)
    words[1::2] = random.floats(1 << 19, F32, (-24, 7)).view(U32)
    return Case(
        instruction.replace(".", "_"),
        kernels.unary(instruction),
        [Output((1 << 20,), U32), words, 1 << 20],
        grid=64,
        block=256,
    )


for _name in ("ex2.approx.ftz.f32", "rcp.approx.ftz.f32"):
    _case(f"functions/{_name}", _function, _name)


def _approximation(random: _Random, instruction: str, exponents: tuple[int, int], error: Any) -> Case:
    words = _spread(random, 1 << 13)
    words = np.concatenate([words, random.floats(1 << 13, F32, exponents).view(U32)])
    return Case(
        instruction.replace(".", "_"),
        kernels.unary(instruction),
        [Output((1 << 14,), U32), words, 1 << 14],
        grid=8,
        block=256,
        error=error,
    )


def _relative(bits: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda _, y: np.abs(y) * 2.0**-bits


# What PTX ISA 9.7.3 states, of arguments x and exact values y.
APPROXIMATIONS: dict[str, tuple[tuple[int, int], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "lg2.approx.ftz.f32": ((-2, 1), lambda x, y: np.where((x > 0.5) & (x < 2), 2.0**-22, np.abs(y) * 2.0**-22)),
    "tanh.approx.f32": ((-8, 3), _relative(11)),
    "sqrt.approx.ftz.f32": ((-4, 4), _relative(23)),
    "rsqrt.approx.ftz.f32": ((-4, 4), _relative(22.9)),
    "sin.approx.ftz.f32": (
        (-8, 2),
        lambda x, _: np.where(
            np.abs(x) <= 2 * np.pi, 2.0**-20.5, np.where(np.abs(x) <= 100 * np.pi, 2.0**-14.7, np.inf)
        ),
    ),
    "cos.approx.ftz.f32": (
        (-8, 2),
        lambda x, _: np.where(
            np.abs(x) <= 2 * np.pi, 2.0**-20.5, np.where(np.abs(x) <= 100 * np.pi, 2.0**-14.7, np.inf)
        ),
    ),
}
for _name, (_exponents, _error) in APPROXIMATIONS.items():
    _case(f"functions/{_name}", _approximation, _name, _exponents, _error)


# ---- All together


def _attention(random: _Random, blocks: int, exponents: tuple[int, int]) -> Case:
    q, k, v = (random.floats((rows, 64), BF16, exponents) for rows in (64, 64 * blocks, 64 * blocks))
    scale = int(np.array(0.125 * 1.4426950408889634, F32).view(U32))
    box = (64, 64)
    return Case(
        "attention",
        kernels.ATTENTION,
        [
            Output((128, 32), F32),
            Output((128, 2), F32),
            scale,
            blocks,
            Map(q, box, 128),
            Map(k, box, 128),
            Map(v, box, 128),
            Map(Output((64, 64), BF16), box, 128),
        ],
        shared=8192 * 5,
    )


for _blocks, _exponents in ((1, (-4, 0)), (3, (-4, 0)), (5, (-2, 1))):
    _case(f"attention/{_blocks}", _attention, _blocks, _exponents)


# ---- How outputs are stored

_WHOLE, _BLOCK, _SAMPLE = 1 << 13, 1 << 12, 1 << 10


def condense(outputs: list[np.ndarray], whole: bool = False) -> dict[str, np.ndarray]:
    """Small outputs as they are; of each 4 KiB of large ones a digest, which says where, and every so many words.

    whole: for values that are compared, not their bits.
    """
    entries: dict[str, np.ndarray] = {}
    for i, output in enumerate(outputs):
        raw = _bits(output).reshape(-1)
        if raw.nbytes <= _WHOLE or whole:
            entries[f"{i}"] = raw
            continue
        digests = [hashlib.sha256(raw[at : at + _BLOCK].tobytes()).digest()[:12] for at in range(0, raw.nbytes, _BLOCK)]
        entries[f"{i}.digests"] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 12)
        words = raw[: raw.nbytes // 4 * 4].view(U32)
        entries[f"{i}.sample"] = words[:: -(-len(words) // _SAMPLE)]
    return entries


def everything() -> Iterator[tuple[str, Case]]:
    for name, make in CASES.items():
        yield name, make()
