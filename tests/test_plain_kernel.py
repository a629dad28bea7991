"""The plain kernels (csrc/sm80) by themselves: in the emulator, in strict mode, against the oracle.

Everything around them, and many more shapes, is tested by the suite of the implementations that run them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import draw
from nvrtc import compile_ptx
from suite import planted

from jax_fa4.emulated import Kernel

ROOT = Path(__file__).parent.parent
# `Parameters` of csrc/sm80/config.h: pointers, then numbers of four bytes.
POINTERS = (
    "query",
    "key",
    "value",
    "scale",
    "lower",
    "upper",
    "out",
    "lse",
    "lse_rounding",
    "dout",
    "dlse",
    "delta",
    "dquery",
    "dkey",
    "dvalue",
    "dscale",
)
NUMBERS = (
    "batch",
    "rows",
    "keys",
    "heads",
    "kv_heads",
    "width",
    "value_width",
    "query_batch",
    "key_batch",
    "value_batch",
    "scale_batch",
    "lower_batch",
    "upper_batch",
    "band_low",
    "band_high",
    "softcap",
    "out_is_float",
)
OFFSETS = {name: 8 * i for i, name in enumerate(POINTERS)} | {
    name: 8 * len(POINTERS) + 4 * i for i, name in enumerate(NUMBERS)
}
STRUCT_BYTES = 200
# As csrc/sm80/config.h has them: rows of a forward tile, of a backward tile, and of a step of the backward.
TILES = {64: (64, 64, 32), 128: (64, 64, 32), 256: (32, 32, 16)}


@functools.cache
def kernel(file: str, name: str, target: str) -> Kernel:
    """One kernel of a file, compiled without the file's others."""
    text = (ROOT / "csrc" / "sm80" / f"{file}.cu").read_text()
    instances = re.compile(r"^[A-Z_]+\((\w+), .*?(?:, (\d+))?\)$", re.MULTILINE)
    text = instances.sub(lambda found: found[0] if _is_of(name, found[1], found[2]) else "", text)
    return Kernel(compile_ptx(text, target, ("--fmad=false", f"--include-path={ROOT}")), name)


def _is_of(kernel_name: str, dtype: str, width: str | None) -> bool:
    return f"_{dtype}" in kernel_name and (width is None or kernel_name.endswith(f"_{width}"))


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call of the kernels.

    Attributes:
      band: low and high; None is unbounded.
      arrays: whether row bounds are given as arrays, random ones, instead.
      short: leading axes of query, key, value, scale and bounds, where they are shorter than the batch.
    """

    batch: int = 2
    rows: int = 70
    keys: int = 90
    heads: int = 2
    kv_heads: int = 1
    width: int = 8
    value_width: int = 8
    dtype: str = "float32"
    band: tuple[int | None, int | None] = (None, None)
    arrays: bool = False
    scale: float = 0.3
    softcap: float = 0.0
    short: tuple[int, int, int, int, int] | None = None
    out_is_float: bool = False
    poison: bool = False


def run(problem: Problem, target: str = "sm_90", seed: int = 0) -> None:
    """Launches all kernels of both passes, and checks reports and results."""
    p, rng = problem, np.random.default_rng(seed)
    short = p.short or (p.batch,) * 5
    float_dtype = np.dtype(jnp.dtype(p.dtype))
    out_dtype = np.dtype(np.float32) if p.out_is_float else float_dtype
    query = draw("gaussian", (short[0], p.rows, p.heads, p.width), p.dtype, rng)
    key = draw("gaussian", (short[1], p.keys, p.kv_heads, p.width), p.dtype, rng)
    value = draw("gaussian", (short[2], p.keys, p.kv_heads, p.value_width), p.dtype, rng)
    scale = np.full(short[3], p.scale, np.float32)
    dout = draw("gaussian", (p.batch, p.rows, p.heads, p.value_width), p.dtype, rng)
    dlse = rng.standard_normal((p.batch, p.rows, p.heads), np.float32)

    low, high = (-p.rows if p.band[0] is None else p.band[0]), (p.keys if p.band[1] is None else p.band[1])
    if p.arrays:
        lower = rng.integers(0, p.keys + 1, (short[4], p.rows), np.int32)
        upper = np.minimum(lower + rng.integers(-5, p.keys // 2, lower.shape, np.int32), p.keys).clip(0)
    else:
        rows = np.tile(np.arange(p.rows, dtype=np.int32), (short[4], 1))
        lower, upper = (rows + low).clip(0, p.keys), (rows + high).clip(0, p.keys)

    whole = lambda x: np.tile(x, (p.batch // len(x), *[1] * (x.ndim - 1)))  # noqa: E731
    arguments: dict[str, Any] = {
        "query": whole(query),
        "key": whole(key),
        "value": whole(value),
        "row_bounds": (whole(lower), whole(upper)),
        "scale": np.float32(p.scale),
        "softcap": p.softcap or None,
    }
    expected = oracle.expect(arguments, dout, dlse)
    if p.poison:
        arguments, dout, dlse = planted(np.nan, arguments, dout, dlse)
        query, key, value = (arguments[name] for name in ("query", "key", "value"))

    nan = lambda *shape, dtype=np.float32: np.full(shape, np.nan, dtype)  # noqa: E731
    by_row = (p.batch, p.rows, p.heads)
    fields: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "scale": scale,
        "lower": lower if p.arrays else 0,
        "upper": upper if p.arrays else 0,
        "out": nan(*dout.shape, dtype=out_dtype),
        "lse": nan(*by_row),
        "lse_rounding": nan(*by_row),
        "dout": dout.astype(out_dtype),
        "dlse": dlse,
        "delta": nan(*by_row),
        "dquery": nan(p.batch, *query.shape[1:], dtype=float_dtype),
        "dkey": nan(p.batch, *key.shape[1:], dtype=float_dtype),
        "dvalue": nan(p.batch, *value.shape[1:], dtype=float_dtype),
        "dscale": nan(*by_row),
        "batch": p.batch,
        "rows": p.rows,
        "keys": p.keys,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "width": p.width,
        "value_width": p.value_width,
        "query_batch": len(query),
        "key_batch": len(key),
        "value_batch": len(value),
        "scale_batch": len(scale),
        "lower_batch": len(lower),
        "upper_batch": len(upper),
        "band_low": low,
        "band_high": high,
        "softcap": p.softcap,
        "out_is_float": int(p.out_is_float),
    }
    for name in ("query", "key", "value", "scale", "dout", "dlse", "lower", "upper"):
        if isinstance(fields[name], np.ndarray):
            fields[name].flags.writeable = False
    struct = {OFFSETS[name]: (x, 8 if name in POINTERS else 4) for name, x in fields.items()}

    width = next(width for width in TILES if width >= max(p.width, p.value_width))
    forward_tile, backward_tile, step = TILES[width]
    tiles = lambda length, tile: -(-length // tile)  # noqa: E731

    def launch(file: str, name: str, ctas: int, shared_bytes: int) -> None:
        program = kernel(file, name, target)
        assert program.parameters[0][2] == STRUCT_BYTES
        program.launch(
            [struct], grid=(ctas, 1, 1), block=(256, 1, 1), dynamic_shared_bytes=shared_bytes, seed=seed
        ).check()

    pitch = width + 4
    launch(
        "forward",
        f"forward_{p.dtype}_{width}",
        tiles(p.rows, forward_tile) * p.heads * p.batch,
        4 * (2 * forward_tile * pitch + forward_tile * (forward_tile + 4)),
    )
    backward_bytes = 4 * ((2 * backward_tile + step) * pitch + backward_tile * (step + 4))
    launch("backward", f"backward_delta_{p.dtype}", tiles(p.batch * p.rows * p.heads, 8), 0)
    ctas = tiles(p.rows, backward_tile) * p.heads * p.batch
    launch("backward", f"backward_query_{p.dtype}_{width}", ctas, backward_bytes)
    ctas = tiles(p.keys, backward_tile) * p.kv_heads * p.batch
    launch("backward", f"backward_key_{p.dtype}_{width}", ctas, backward_bytes)

    oracle.check(
        {
            "out": fields["out"].astype(float_dtype),
            "lse": fields["lse"],
            "query": fields["dquery"],
            "key": fields["dkey"],
            "value": fields["dvalue"],
            "scale": fields["dscale"].sum(dtype=np.float32),
        },
        expected,
    )
    exact = np.asarray(expected["lse"].value)
    some = np.isfinite(exact)
    assert (fields["lse_rounding"][~some] == 0).all()
    assert (np.abs(fields["lse_rounding"][some]) <= np.spacing(np.abs(fields["lse"][some]))).all()


PROBLEMS = {
    "plain": Problem(),
    "causal, GQA": Problem(rows=100, keys=100, heads=4, kv_heads=2, width=64, value_width=64, batch=1, band=(None, 1)),
    "sliding, poisoned": Problem(keys=150, band=(-20, 30), poison=True, dtype="bfloat16", width=40, value_width=40),
    "rows beyond all keys": Problem(rows=200, keys=40, band=(-10, 1), poison=True),
    "arrays, poisoned": Problem(arrays=True, poison=True, rows=130, keys=140, dtype="float16"),
    "width 80": Problem(width=80, value_width=80, dtype="float16", band=(None, 1)),
    "width 128": Problem(width=128, value_width=128, dtype="bfloat16", rows=70, keys=70, batch=1),
    "widths 192 and 128": Problem(width=192, value_width=128, rows=40, keys=40, batch=1, band=(None, 1)),
    "width 256": Problem(width=256, value_width=256, rows=33, keys=50, batch=1, arrays=True),
    "width 1": Problem(width=1, value_width=1, dtype="bfloat16"),
    "odd widths": Problem(width=7, value_width=67, dtype="float16", band=(-30, 10)),
    "one row, one key": Problem(rows=1, keys=1, width=3, value_width=5),
    "softcap": Problem(softcap=1.5, band=(None, 1)),
    "no scale": Problem(scale=0.0),
    "negative scale": Problem(scale=-0.7, arrays=True),
    "short leading axes": Problem(batch=4, rows=10, keys=20, short=(2, 1, 4, 2, 2), arrays=True),
    "out is float32": Problem(out_is_float=True, dtype="bfloat16", band=(None, 1)),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_problem(problem: Problem) -> None:
    run(problem)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "sm_120"])
def test_targets(target: str) -> None:
    run(Problem(band=(-20, 30)), target)


@pytest.mark.parametrize("seed", range(1, 4))
def test_seeds(seed: int) -> None:
    run(Problem(arrays=True, poison=True), seed=seed)
