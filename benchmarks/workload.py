"""What is timed: attention calls of models and of plain grids, what they cost, their data, and what is right.

The calls of models, with their masks, are those of tests/cases.py.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from cases import CASES, Extras, Sizes

Inputs = tuple[Array, Array, Array, Array]
"""Query, key, value, and the cotangent of the output."""

# Lengths of models beside those of tests/cases.py: (B, T), with S = T.
_OTHER_LENGTHS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama3_8b": ((16, 1024), (1, 16384)),
    "llama3_70b": ((4, 2048),),
    "qwen3_30b_a3b": ((8, 1024), (1, 16384)),
    "gemma3_27b_local": ((8, 2048), (1, 32768)),
    "gemma3_27b_global": (),
    "gemma2_9b_global": (),
    "gpt_oss_20b_local": ((8, 1024), (1, 32768)),
    "gpt_oss_20b_global": (),
    "deepseek_v3": ((4, 1024),),
    "vit_large": ((16, 1025),),
    "packed_documents": (),
}
# An error below this share of the result is rounding whatever the data: some units of the last place for a dtype that
# is stored, and for float32 what the order of long sums changes.
_ROUNDING = {"float16": 1e-3, "bfloat16": 4e-3, "float32": 1e-5}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call: its sizes, dtype, and how its other arguments are made."""

    name: str
    sizes: Sizes
    dtype: str
    extras: Extras

    def arguments(self) -> dict[str, Any]:
        """The arguments of `attention` besides query, key and value, the same every time."""
        return self.extras(self.sizes, np.random.default_rng(zlib.crc32(self.name.encode())))

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Query, key, value, and the cotangent of the output."""
        batch, rows, keys, heads, kv_heads, width, value_width = self.sizes
        return tuple(
            jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
            for shape in (
                (batch, rows, heads, width),
                (batch, keys, kv_heads, width),
                (batch, keys, kv_heads, value_width),
                (batch, rows, heads, value_width),
            )
        )

    def input_bytes(self) -> int:
        """Of one set of inputs."""
        return sum(x.size * x.dtype.itemsize for x in self.shapes())

    def inputs(self, seed: int) -> Inputs:
        """Normal operands, made on the device."""
        return _normal(self.shapes(), seed)


@functools.partial(jax.jit, static_argnums=0)
def _normal(shapes: tuple[jax.ShapeDtypeStruct, ...], seed: int) -> Inputs:
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v, dout = (jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True))
    return q, k, v, dout


def _mask(is_causal: bool) -> Extras:
    return lambda sizes, rng: {"is_causal": True} if is_causal else {}


def cpu_grid() -> Iterator[Workload]:
    """One batch element, 8 heads of width 64."""
    for length in (256, 4096):
        for dtype in ("float32", "bfloat16"):
            for mask in ("full", "causal"):
                sizes = Sizes(1, length, length, 8, 8, 64, 64)
                yield Workload(f"S={length} {dtype} {mask}", sizes, dtype, _mask(mask == "causal"))


def gpu_grid() -> Iterator[Workload]:
    """16384 tokens of width 2048 over all heads, in bfloat16: the grid that attention kernels are compared by."""
    for width in (128, 64):
        for mask in ("full", "causal"):
            for length in (1024, 4096, 16384):
                heads = 2048 // width
                sizes = Sizes(16384 // length, length, length, heads, heads, width, width)
                yield Workload(f"D={width} {mask} {sizes.batch}x{length}", sizes, "bfloat16", _mask(mask == "causal"))


def tiny() -> Workload:
    """A call that takes no time beside its launch."""
    return Workload("tiny", Sizes(1, 16, 16, 8, 8, 64, 64), "bfloat16", _mask(is_causal=False))


def models(*, all_of_them: bool = False) -> Iterator[Workload]:
    """Calls of models in bfloat16: those that a GPU's report is made of, or all of tests/cases.py."""
    for case in CASES:
        if case.name not in _OTHER_LENGTHS and not all_of_them:
            continue
        triples = [case.full, *((batch, length, length) for batch, length in _OTHER_LENGTHS.get(case.name, ()))]
        for batch, rows, keys in sorted(triples, key=lambda triple: triple[1]):
            lengths = f"{rows}" if rows == keys else f"{rows}x{keys}"
            sizes = Sizes(batch, rows, keys, *case.heads)
            yield Workload(f"{case.name} {batch}x{lengths}", sizes, "bfloat16", case.extras)


def flops(sizes: Sizes, pairs: int) -> dict[str, int]:
    """Floating-point operations by pass, of so many visible pairs of a row and a key, over all heads.

    Two products forward (logits and output), five backward (logits again, and the gradients of probabilities, values,
    queries and keys); nothing else counts.
    """
    forward = 2 * pairs * (sizes.width + sizes.value_width)
    backward = 2 * pairs * (3 * sizes.width + 2 * sizes.value_width)
    return {"forward": forward, "forward+backward": forward + backward, "backward": backward}


def visible_pairs(arguments: Mapping[str, Any], sizes: Sizes) -> int:
    """How many pairs of a row and a key the masks show, over the batch and all heads, without an array of them.

    A bias counts as hiding nothing: no implementation can leave out what only its values hide.
    """
    lower, upper = row_bounds(arguments, sizes)
    mask, ids = arguments.get("mask"), arguments.get("query_segment_ids")
    if ids is not None:
        if mask is not None:
            raise NotImplementedError("pairs under both a mask and segment ids are not counted")
        # Keys sorted by id, then by position, as one number; a row's keys are those between two such numbers.
        base = sizes.keys + 1
        codes = np.asarray(arguments["key_value_segment_ids"], np.int64) * base + np.arange(sizes.keys)
        ids = np.asarray(ids, np.int64) * base
        seen = [
            np.searchsorted(np.sort(code), row + high) - np.searchsorted(np.sort(code), row + low)
            for code, row, low, high in zip(codes, ids, lower, upper, strict=True)
        ]
        return int(np.sum(seen)) * sizes.heads
    if mask is None:
        return int((upper - lower).sum()) * sizes.heads
    mask = np.asarray(mask).reshape((1,) * (4 - np.ndim(mask)) + np.shape(mask))
    shown = np.zeros((*mask.shape[:3], sizes.keys + 1), np.int64)
    shown[..., 1:] = np.broadcast_to(mask, (*mask.shape[:3], sizes.keys)).cumsum(-1)
    shown = np.broadcast_to(shown, (sizes.batch, mask.shape[1], sizes.rows, sizes.keys + 1))
    upto = [np.take_along_axis(shown, bound[:, None, :, None], -1) for bound in (lower, upper)]
    return int((upto[1] - upto[0]).sum()) * (sizes.heads // mask.shape[1])


def row_bounds(arguments: Mapping[str, Any], sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """The interval [lower, upper) of keys that causality, window, lengths and row bounds show each row, (B, T)."""
    get = arguments.get
    row = np.arange(sizes.rows)
    offset = get("query_offset", 0)
    at = row + np.reshape(sizes.keys - sizes.rows if isinstance(offset, str) else offset, (-1, 1))
    window = get("local_window_size")
    left, right = window if isinstance(window, tuple) else (window, window)
    lower = np.zeros((sizes.batch, sizes.rows), np.int64)
    upper = np.full((sizes.batch, sizes.rows), sizes.keys)
    if get("is_causal"):
        upper = np.minimum(upper, at + 1)
    if left is not None:
        lower = np.maximum(lower, at - left)
    if right is not None:
        upper = np.minimum(upper, at + right + 1)
    if (lengths := get("key_value_seq_lengths")) is not None:
        upper = np.minimum(upper, np.reshape(lengths, (-1, 1)))
    if (bounds := get("row_bounds")) is not None:
        lower, upper = np.maximum(lower, bounds[0]), np.minimum(upper, bounds[1])
    if (lengths := get("query_seq_lengths")) is not None:
        upper = np.where(row < np.reshape(lengths, (-1, 1)), upper, 0)
    return np.minimum(lower, sizes.keys), np.clip(upper, np.minimum(lower, sizes.keys), sizes.keys)


class Expected(NamedTuple):
    """Out and the gradients of query, key and value for one batch element and the heads of one key head."""

    results: tuple[Array, ...]
    limits: tuple[float, ...]


class Reference:
    """Right results for the first and the last group of heads of a workload, and how far others may be off.

    Naive attention in float32 with exact products is the reference. The error that is allowed is twice that of naive
    attention in the operands' dtype, plus rounding; errors are norms over norms of the reference.
    """

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        sizes, arguments = workload.sizes, workload.arguments()
        self._group = sizes.heads // sizes.kv_heads
        self._rounding = _ROUNDING[workload.dtype]
        self._places = sorted({(0, 0), (sizes.batch - 1, sizes.kv_heads - 1)})
        self._operands = (
            inputs,
            tuple(x.astype(np.int32) for x in row_bounds(arguments, sizes)),
            {name: arguments[name] for name in _DENSE if name in arguments},
            arguments.get("scale", sizes.width**-0.5),
        )
        self._softcap = arguments.get("softcap")
        self._programs: dict[bool, Callable[..., tuple[Array, ...]]] = {}
        self._expected: list[Expected] = []

    def compile(self, exact: bool) -> None:
        """Compiles the reference, or the same arithmetic in the operands' dtype; both before `compute`."""
        lowered = _naive_group.lower(*self._operands, 0, 0, softcap=self._softcap, exact=exact)
        self._programs[exact] = lowered.compile()

    def compute(self) -> None:
        """Computes what is right, before `check`."""
        for place in self._places:
            exact, rounded = (self._programs[exact](*self._operands, *place) for exact in (True, False))
            errors = map(_relative_error, rounded, exact)
            self._expected.append(Expected(exact, tuple(2 * float(error) + self._rounding for error in errors)))

    def check(self, results: tuple[Array, ...]) -> float:
        """The largest share of the allowed error that was met; raises ArithmeticError if the results are wrong.

        Args:
          results: of the inputs that this was made for: out, or out and the gradients of query, key and value.
        """
        names = ("out", "dquery", "dkey", "dvalue")
        used = 0.0
        for name, x in zip(names, results, strict=False):
            if not jnp.isfinite(x).all():
                raise ArithmeticError(f"wrong: {name} is not finite everywhere")
        for (batch, kv_head), expected in zip(self._places, self._expected, strict=True):
            for i, (name, x) in enumerate(zip(names, results, strict=False)):
                per_key_head = 1 if name in ("dkey", "dvalue") else self._group
                got = x[batch, :, kv_head * per_key_head : (kv_head + 1) * per_key_head]
                error = float(_relative_error(got, expected.results[i]))
                if not error <= expected.limits[i]:
                    raise ArithmeticError(
                        f"wrong: {name} of batch element {batch}, key head {kv_head} is off by {error:.2g} of itself, "
                        f"more than {expected.limits[i]:.2g}"
                    )
                used = max(used, error / expected.limits[i])
        return used


_DENSE = ("bias", "mask", "sinks", "query_segment_ids", "key_value_segment_ids")


@jax.jit
def _relative_error(x: Array, reference: Array) -> Array:
    difference = x.astype(jnp.float32) - reference.astype(jnp.float32)
    return jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(reference.astype(jnp.float32).ravel())


@functools.partial(jax.jit, static_argnames=("softcap", "exact"))
def _naive_group(
    inputs: Inputs,
    bounds: tuple[Array, Array],
    arrays: Mapping[str, Array],
    scale: float,
    batch: Array,
    kv_head: Array,
    *,
    softcap: float | None,
    exact: bool,
) -> tuple[Array, ...]:
    """Out (T, G, Dv) and the gradients (T, G, D), (S, 1, D) and (S, 1, Dv) of one key head and its G query heads."""
    query, key, value, dout = (x[batch].astype(jnp.float32) if exact else x[batch] for x in inputs)
    rows, heads, _ = query.shape
    keys, kv_heads, _ = key.shape
    group = heads // kv_heads
    position = jnp.arange(keys)
    seen = (bounds[0][batch][:, None] <= position) & (position < bounds[1][batch][:, None])
    if "query_segment_ids" in arrays:
        ids, key_ids = (jnp.asarray(arrays[f"{side}_segment_ids"])[batch] for side in ("query", "key_value"))
        seen &= ids[:, None] == key_ids
    k, v = key[:, kv_head], value[:, kv_head]

    def dense(name: str, head: Array) -> Array:
        """A bias or mask of one head."""
        x = jnp.asarray(arrays[name])
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        return x[batch if len(x) > 1 else 0, head if x.shape[1] > 1 else 0]

    def one_head(head: Array) -> tuple[Array, ...]:
        def attend(q: Array, k: Array, v: Array) -> Array:
            logits = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * scale
            logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
            if "bias" in arrays:
                logits += dense("bias", head)
            visible = seen & dense("mask", head) if "mask" in arrays else seen
            logits = jnp.where(visible, logits, -1e30)
            columns = logits
            if "sinks" in arrays:
                sink = jnp.broadcast_to(jnp.asarray(arrays["sinks"])[head], (rows, 1))
                columns = jnp.concatenate([logits, sink], 1)
            probs = jnp.where(visible, jax.nn.softmax(columns, axis=-1)[:, :keys], 0)
            return jnp.dot(probs.astype(v.dtype), v)

        out, pullback = jax.vjp(attend, query[:, head], k, v)
        return out, *pullback(dout[:, head])

    with jax.default_matmul_precision("highest" if exact else "default"):
        out, dq, dk, dv = lax.map(one_head, kv_head * group + jnp.arange(group))
    return (
        jnp.swapaxes(out, 0, 1),
        jnp.swapaxes(dq, 0, 1),
        *(x.astype(jnp.float32).sum(0)[:, None].astype(x.dtype) for x in (dk, dv)),
    )
