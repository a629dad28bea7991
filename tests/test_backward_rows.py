"""The kernels before and after the backward on tensor cores, in the emulator: launched as its plan says."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import planned
import pytest

from jax_fa4 import native
from jax_fa4.emulated import Kernel

TARGETS = {"sm_90a": (9, 0), "sm_100f": (10, 0)}
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
OPERANDS = ("query", "key", "value", "scale", "lower", "upper", "out", "lse", "lse_rounding", "dout", "dlse")
RESULTS = ("dquery", "dkey", "dvalue", "dscale", "workspace")
# Fields of `BackwardParameters` behind its six tensor maps.
ADDRESSES = (
    *("query_rows", "out_rows", "dout_rows", "dquery_rows", "dscale", "lse", "lse_rounding", "dlse"),
    *("scale", "lower", "upper", "lse_log2", "delta", "hulls", "dquery_sum", "turns"),
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int = 2
    rows: int = 70
    keys: int = 90
    heads: int = 3
    kv_heads: int = 1
    width: int = 64
    value_width: int = 64
    query_batch: int | None = None
    lower_batch: int | None = None  # no arrays
    upper_batch: int | None = None


class Call:
    """A call of the backward, its plan for a GPU, and its arrays: all NaN in rows that see nothing."""

    def __init__(
        self, sizes: Sizes, dtype: str, target: str, band: tuple[int, int] = (-(1 << 20), 1 << 20), dlse: bool = True
    ) -> None:
        self.sizes, self.dtype, self.target = sizes, dtype, target
        rng = np.random.default_rng(0)
        batch, rows, keys, heads = sizes.batch, sizes.rows, sizes.keys, sizes.heads
        float32, of_rows = np.float32, (batch, rows, heads)

        def normal(*shape: int, of: Any = DTYPES[dtype]) -> np.ndarray:
            return rng.standard_normal(shape).astype(of)

        self.bounds = [np.clip(np.arange(rows) + side, 0, keys)[None].astype(np.int32) for side in band]
        has_arrays = sizes.lower_batch is not None
        if has_arrays:
            self.bounds = [
                rng.integers(0, keys + 1, (x, rows), np.int32) for x in (sizes.lower_batch, sizes.upper_batch)
            ]
        lower, upper = (x[np.arange(batch) % len(x)] for x in self.bounds)
        self.sees = np.broadcast_to((lower < upper)[..., None], of_rows).copy()
        self.sees[0, rows // 2, 0] = False  # as all its logits are -inf
        arrays: dict[str, np.ndarray] = {
            "query": normal(sizes.query_batch or batch, rows, heads, sizes.width),
            "key": normal(batch, keys, sizes.kv_heads, sizes.width),
            "value": normal(batch, keys, sizes.kv_heads, sizes.value_width),
            "scale": normal(batch, of=float32),
            "lower": self.bounds[0] if has_arrays else np.zeros(0, np.int32),
            "upper": self.bounds[1] if has_arrays else np.zeros(0, np.int32),
            "out": normal(*of_rows, sizes.value_width),
            "lse": 300 * normal(*of_rows, of=float32),
            "lse_rounding": 1e-5 * normal(*of_rows, of=float32),
            "dout": normal(*of_rows, sizes.value_width),
            "dlse": normal(*of_rows, of=float32) if dlse else np.zeros(0, float32),
        }
        for name in ("out", "dout", *(["dlse"] if dlse else []), *([] if sizes.query_batch else ["query"])):
            arrays[name][~self.sees] = np.nan
        arrays["lse"][~self.sees], arrays["lse_rounding"][~self.sees] = -np.inf, 0
        results = {
            name: np.full((batch, *arrays[name[1:]].shape[1:]), np.nan, DTYPES[dtype])
            for name in ("dquery", "dkey", "dvalue")
        }
        workspace = native.extension().backward_workspace_bytes(
            batch, rows, keys, heads, sizes.kv_heads, sizes.width, sizes.value_width, 2
        )
        results |= {"dscale": np.full(of_rows, np.nan, float32), "workspace": np.full(workspace, 255, np.uint8)}
        for x in arrays.values():
            x.flags.writeable = False
        self.arrays = arrays | results
        sides = (-rows, keys) if has_arrays else band
        given = [(self.arrays[name].dtype.name, list(self.arrays[name].shape)) for name in (*OPERANDS, *RESULTS)]
        self.before, backward, self.after = native.extension().backward_plan(
            TARGETS[target], 1, 0, given, *sides, 0.0, False
        )
        self.row_block = dict(zip(("query", "key"), backward["tensor_maps"].values(), strict=False))["query"]["box"][2]
        self.row_blocks = math.ceil(rows / self.row_block)
        self.width = self.number(7)  # that the kernel is compiled for

    def number(self, index: int) -> int:
        return struct.unpack_from("i", self.before["parameters"], 6 * 128 + 8 * len(ADDRESSES) + 4 * index)[0]

    def workspace(self, name: str, dtype: Any, *shape: int) -> np.ndarray:
        """An array in the workspace."""
        buffer, offset = self.before["addresses"][6 * 128 + 8 * ADDRESSES.index(name)]
        assert buffer == "workspace"
        end = offset + math.prod(shape) * np.dtype(dtype).itemsize
        return self.arrays["workspace"][offset:end].view(dtype).reshape(shape)

    def of_rows(self, name: str) -> np.ndarray:
        """A number of each row, (B, N, R)."""
        return self.workspace(name, np.float32, self.sizes.batch, self.sizes.heads, self.row_blocks * self.row_block)

    def sums(self) -> np.ndarray:
        """The sums of dquery, in the kernel's order."""
        return self.workspace(
            "dquery_sum",
            np.float32,
            *(self.sizes.batch, self.sizes.heads, self.row_blocks, self.row_block * self.width),
        )

    def run(self, launch: Mapping[str, Any], seed: int = 0) -> None:
        ran = planned.run(_kernel(self.target, launch["kernel"]), launch, self.arrays, seed=seed)
        assert not ran.reports, ran.reports


@functools.cache
def _kernel(target: str, name: str) -> Kernel:
    return Kernel(native.ptx(f"backward_rows.{target}"), name)


def places(target: str, row_block: int, width: int) -> np.ndarray:
    """Where the element of each row and column of a block is."""
    row, column = np.arange(row_block)[:, None], np.arange(width)
    if target == "sm_100f":  # four columns of every row in turn
        return np.arange(row_block * width).reshape(width // 4, row_block, 4)[column // 4, row, column % 4]
    thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    order = np.arange(row_block * width).reshape(row_block // 64, width // 8, 128, 2, 2)
    return order[row // 64, column // 8, thread, row % 16 // 8, column % 2]


ALL = (-(1 << 20), 1 << 20)
CALLS: Mapping[str, tuple[Sizes, Mapping[str, Any]]] = {
    "full": (Sizes(), {}),
    "without dlse": (Sizes(rows=1, heads=1), {"dlse": False}),
    "causal": (Sizes(rows=130, keys=50, heads=2, width=128, value_width=40), {"band": (-200, 1)}),
    "window beyond the keys": (Sizes(rows=200, keys=40, heads=1, width=96, value_width=96), {"band": (-20, 3)}),
    "window before the keys": (Sizes(rows=129, keys=40, heads=8, width=8, value_width=8), {"band": (-100, -70)}),
    "arrays": (Sizes(batch=6, rows=65, heads=5, query_batch=3, lower_batch=2, upper_batch=3), {}),
    "arrays of one element": (Sizes(rows=64, heads=12, kv_heads=4, lower_batch=1, upper_batch=1, width=192), {}),
    "one of them of all": (Sizes(batch=3, rows=150, heads=4, lower_batch=3, upper_batch=1, width=136), {}),
}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_before(name: str, dtype: str, target: str) -> None:
    sizes, options = CALLS[name]
    call = Call(sizes, dtype, target, **options)
    call.run(call.before)
    arrays, sees = call.arrays, call.sees
    batch, rows, heads, keys = sizes.batch, sizes.rows, sizes.heads, sizes.keys

    got = call.of_rows("lse_log2")
    lse = (arrays["lse"].astype(np.float64) + arrays["lse_rounding"]) * math.log2(math.e)
    want = np.full(got.shape, np.inf)
    want[:, :, :rows] = np.where(sees, lse, np.inf).swapaxes(1, 2)
    np.testing.assert_allclose(got, want, rtol=2**-23)

    got = call.of_rows("delta")
    products = arrays["out"].astype(np.float64) * arrays["dout"].astype(np.float64)
    delta = products.sum(-1) - (arrays["dlse"] if arrays["dlse"].size else 0)
    sizes_of = np.where(sees, abs(products).sum(-1) + 1, 0).max()
    want = np.zeros(got.shape)
    want[:, :, :rows] = np.where(sees, delta, 0).swapaxes(1, 2)
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-22 * sizes_of)

    # What a block of rows sees, of each combination of the bounds' elements.
    count = math.lcm(*map(len, call.bounds))
    lower, upper = (x[np.arange(count) % len(x)] for x in call.bounds)
    hulls = call.workspace("hulls", np.int32, count, call.row_blocks, 4)
    for element in range(count):
        for block in range(call.row_blocks):
            low, high = (x[element, block * call.row_block :][: call.row_block] for x in (lower, upper))
            some = low < high
            hull = (low[some].min(), high[some].max()) if some.any() else (0, 0)
            assert tuple(hulls[element, block]) == (*hull, not some.all(), 0)
            assert 0 <= hull[0] <= hull[1] <= keys

    assert not call.sums().any()
    assert not call.workspace("turns", np.uint32, batch, heads, call.row_blocks).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_after(name: str, dtype: str, target: str) -> None:
    sizes, options = CALLS[name]
    call = Call(sizes, dtype, target, **options)
    call.run(call.before)
    rng = np.random.default_rng(1)
    batch, rows, heads, width = sizes.batch, sizes.rows, sizes.heads, sizes.width
    padded = call.row_blocks * call.row_block
    sums = np.full((batch, heads, padded, call.width), np.nan, np.float32)
    sums[:, :, :rows, :width] = rng.standard_normal((batch, heads, rows, width))
    sums = np.where(np.isfinite(call.of_rows("lse_log2"))[..., None], sums, np.nan)  # of a key that is NaN, say
    where = places(call.target, call.row_block, call.width)
    assert sorted(where.ravel()) == list(range(where.size))
    call.sums()[:, :, :, where] = sums.reshape(batch, heads, call.row_blocks, call.row_block, call.width)
    call.run(call.after)

    exact = np.moveaxis(sums[:, :, :rows, :width], 1, 2)
    query = call.arrays["query"][np.arange(batch) % len(call.arrays["query"])].astype(np.float64)
    sees = call.sees
    scale = call.arrays["scale"][:, None, None, None]
    want = np.where(sees[..., None], exact * scale, 0).astype(DTYPES[dtype])
    np.testing.assert_array_equal(call.arrays["dquery"], want)
    products = np.where(sees[..., None], query * exact, 0)
    np.testing.assert_allclose(
        call.arrays["dscale"], products.sum(-1), rtol=0, atol=2**-22 * abs(products).sum(-1).max()
    )


def test_every_seed_gives_the_same_bits(target: str) -> None:
    found = []
    for seed in range(3):
        call = Call(*CALLS["arrays"][:1], "bfloat16", target)
        call.run(call.before, seed)
        call.run(call.after, seed)
        found.append([call.arrays[name].tobytes() for name in RESULTS])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("lse", "is_nan"), [(np.inf, True), (np.nan, True), (3e38, True), (1e38, False), (-1e38, False)]
)
def test_lse_that_is_huge_or_no_number(lse: float, is_nan: bool, target: str) -> None:
    """Only rows that see nothing have an infinite one: of others it makes NaN, which shows."""
    call = Call(Sizes(), "bfloat16", target)
    call.arrays["lse"].flags.writeable = True
    call.arrays["lse"][1, 7, 2] = lse
    call.run(call.before)
    got = call.of_rows("lse_log2")[1, 2, 7]
    assert np.isnan(got) if is_nan else got == np.float32(lse * math.log2(math.e))


def test_what_rows_that_see_nothing_have_for_lse_does_not_matter(target: str) -> None:
    call = Call(Sizes(), "bfloat16", target, band=(-200, -3))
    for name in ("lse", "lse_rounding"):
        call.arrays[name].flags.writeable = True
        call.arrays[name][:, :3] = np.nan
    call.run(call.before)
    assert (call.of_rows("lse_log2")[:, :, :3] == np.inf).all()
    assert (call.of_rows("delta")[:, :, :3] == 0).all()
