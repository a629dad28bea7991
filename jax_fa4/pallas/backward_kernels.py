"""The backward: two kernels, each of which recomputes the weights from lse.

"key gradients" owns a block of keys and walks over the row blocks that see it; "query gradients" owns a block of rows
and walks over key blocks, as the forward does. Every gradient is summed by one kernel instance in a fixed order, so
results are the same bits every time, and no sum goes through memory. The price is that logits and weights are computed
twice: seven matrix products instead of the five that are the least.

    weights = exp(logits - lse)                    softmax of a row, from what the forward kept
    dlogits = weights * (dout value^T - delta)     delta = rowsum(dout * out) - dlse
    dvalue  = weights^T dout
    dkey    = scale * dlogits^T query
    dquery  = scale * dlogits key

"key gradients" computes all of it transposed, keys by rows: then weights^T and dlogits^T are what the tensor cores take
from registers, where they just came to be.

Source: Dao, "FlashAttention-2" (2023), section 3.1.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_fa4 import problem as spec
from jax_fa4.pallas.blocks import Blocks, Kernel
from jax_fa4.pallas.forward_kernel import LOG2_E, cap, dot
from jax_fa4.pallas.tiling import Tiling, call


class Statistics(NamedTuple):
    """What the backward needs to know of packed rows, float32 (B, K, padded rows), or (R,) of a block.

    Rows that see nothing, and those that do not exist, have an lse of infinity, which gives them no weight.
    """

    lse: Array
    rounding_log2: Array  # the logarithm to base 2 of what a weight computed from lse is too large by
    delta: Array

    @classmethod
    def of(cls, out: Array, lse: Array, lse_rounding: Array | None, dout: Array, dlse: Array | None) -> Statistics:
        """Statistics (B, T, N)."""
        some = lse != -jnp.inf
        delta = jnp.where(some[..., None], spec.as_stored(dout) * out.astype(np.float32), 0).sum(-1)
        if dlse is not None:
            delta -= jnp.where(some, dlse, 0).astype(np.float32)
        rounding = jnp.zeros_like(lse) if lse_rounding is None else lse_rounding * np.float32(LOG2_E)
        return cls(jnp.where(some, lse, jnp.inf), rounding, delta)

    def packed(self, tiling: Tiling) -> Statistics:
        """Statistics (B, K, padded rows), which every block reads as one piece."""

        def pack(x: Array, fill: float) -> Array:
            x = x.reshape(tiling.batch, tiling.tokens, tiling.kv_heads, tiling.group)
            x = jnp.moveaxis(x, 1, 2).reshape(tiling.batch, tiling.kv_heads, tiling.rows)
            missing = tiling.row_blocks * tiling.blocks.rows - tiling.rows
            return jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=np.float32(fill))

        return Statistics(pack(self.lse, np.inf), pack(self.rounding_log2, 0), pack(self.delta, 0))


def _key_kernel(tiling: Tiling, softcap: float | None, *refs: Any) -> None:
    """Gradients of one block of keys and values, from logits (C, R)."""
    scale_ref, query_ref, key_ref, value_ref, dout_ref, *refs_left, dkey_ref, dvalue_ref = refs
    statistics, bounds, visits = refs_left[:3], refs_left[3:5], refs_left[5:]
    block = pl.program_id(0)  # under causality most rows see the first keys, which start first
    exist = None if tiling.keys % tiling.blocks.keys == 0 else (0, tiling.keys)
    key = tiling.load_keys(key_ref, block, tiling.width, exist)
    value = tiling.load_keys(value_ref, block, tiling.value_width, exist)
    scale = scale_ref[...]
    position = tiling.key_positions(block)[:, None]

    def step(masked: bool, row_block: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = tiling.block_of_rows(row_block, bounds if masked else ())
        lse, rounding_log2, delta = (tiling.load_numbers(ref, row_block) for ref in statistics)

        def add(sums: tuple[Array, Array]) -> tuple[Array, Array]:
            # What rows hold that see nothing, even NaN, must not matter.
            some = lse != jnp.inf if masked else None
            query = tiling.load_rows(query_ref, rows, tiling.width, some)
            dout = tiling.load_rows(dout_ref, rows, tiling.value_width, some)
            visible = tiling.sees(rows.across(), position) if masked else None
            logits = dot(key, query.T) * scale
            dweights = dot(value, dout.T)
            weights, dlogits = _weights(
                tiling, softcap, logits, dweights, lse[None], rounding_log2[None], delta[None], visible
            )
            dkey, dvalue = sums
            dvalue += dot(weights.astype(dout.dtype), dout)
            dkey += dot(dlogits.astype(query.dtype), query)
            return dkey, dvalue

        if not (masked and tiling.bounded):
            return add(sums)
        # Bounds in any order: between the first and the last row block that sees the keys, some may not.
        return lax.cond(tiling.some_sees(rows, block), add, lambda sums: sums, sums)

    visit = tiling.visited_rows(block, visits)
    zeros = tuple(jnp.zeros((tiling.blocks.keys, ref.shape[1]), np.float32) for ref in (key_ref, value_ref))
    dkey, dvalue = tiling.walk_rows(visit, step, zeros)
    tiling.store_keys(dkey_ref, block, dkey * scale, tiling.width)
    tiling.store_keys(dvalue_ref, block, dvalue, tiling.value_width)


def _query_kernel(tiling: Tiling, softcap: float | None, *refs: Any) -> None:
    """Gradients of one block of query rows, and their share of that of the scale, from logits (R, C)."""
    scale_ref, query_ref, key_ref, value_ref, dout_ref, *refs_left, dquery_ref, dscale_ref = refs
    statistics, bounds = refs_left[:3], refs_left[3:]
    block = tiling.row_blocks - 1 - pl.program_id(0)
    rows = tiling.block_of_rows(block, bounds)
    hull = tiling.hull(block, rows)
    lse, rounding_log2, delta = (tiling.load_numbers(ref, block)[:, None] for ref in statistics)
    some = lse[:, 0] != jnp.inf
    query = tiling.load_rows(query_ref, rows, tiling.width, some)
    dout = tiling.load_rows(dout_ref, rows, tiling.value_width, some)
    scale = scale_ref[...]

    def step(masked: bool, key_block: Any, dquery: Array) -> Array:
        seen = (hull.least_lower, hull.greatest_upper) if masked else None
        key = tiling.load_keys(key_ref, key_block, tiling.width, seen)
        value = tiling.load_keys(value_ref, key_block, tiling.value_width, seen)
        visible = tiling.sees(rows.down(), tiling.key_positions(key_block)[None]) if masked else None
        logits = dot(query, key.T) * scale
        dweights = dot(dout, value.T)
        _, dlogits = _weights(tiling, softcap, logits, dweights, lse, rounding_log2, delta, visible)
        return dquery + dot(dlogits.astype(key.dtype), key)

    zeros = jnp.zeros((tiling.blocks.rows, query_ref.shape[2]), np.float32)
    dquery = tiling.walk_keys(tiling.visited_keys(hull), step, zeros)
    tiling.store_rows(dquery_ref, block, dquery * scale, tiling.width)
    # The sum over keys of dlogits * (query . key): rows past the last one repeat it, and have no weight.
    dscale_ref[...] = (dquery * query.astype(np.float32)).sum()


def _weights(
    tiling: Tiling,
    softcap: float | None,
    logits: Array,
    dweights: Array,
    lse: Array,
    rounding_log2: Array,
    delta: Array,
    visible: Array | None,
) -> tuple[Array, Array]:
    """The weights, and the gradients of the products that the logits are made of; all of one shape, or broadcast."""
    ratio = None
    if softcap is not None:
        logits, ratio = cap(logits, softcap)
    weights = tiling.exp2((logits - lse) * LOG2_E - rounding_log2)
    dlogits = weights * (dweights - delta)
    if ratio is not None:
        dlogits *= 1.0 - ratio * ratio
    if visible is not None:
        weights, dlogits = (jnp.where(visible, x, 0.0) for x in (weights, dlogits))
    return weights, dlogits


def backward(
    problem: spec.Problem,
    blocks: Callable[[Kernel], Blocks],
    interpret: bool,
    operands: spec.Operands,
    out: Array,
    lse: Array,
    lse_rounding: Array | None,
    dout: Array,
    dlse: Array | None,
) -> spec.Gradients:
    """Gradients of `forward.forward`; `blocks` are those of a kernel."""
    statistics = Statistics.of(out, lse, lse_rounding, dout, dlse)
    query, key, value, scale, *bounds = (x for x in operands if x is not None)

    def run(name: Kernel, kernel: Any) -> Any:
        tiling = Tiling.of(problem, operands, len(dout), blocks(name), interpret=interpret)
        over_keys = name == "key gradients"
        arrays = statistics.packed(tiling)
        visits = (tiling.row_visits(*bounds),) if over_keys and bounds else ()
        if over_keys:
            results = tuple(jax.ShapeDtypeStruct((tiling.batch, *x.shape[1:]), x.dtype) for x in (key, value))
            out_specs = [tiling.part_of_keys(x) for x in results]
        else:
            shares = (tiling.batch, tiling.kv_heads, tiling.row_blocks)
            results = (jax.ShapeDtypeStruct((tiling.batch, *query.shape[1:]), query.dtype),)
            results += (jax.ShapeDtypeStruct(shares, np.float32),)
            out_specs = [tiling.part_of_rows(results[0]), tiling.one_of_blocks()]
        return call(
            functools.partial(kernel, tiling, problem.softcap),
            tiling,
            grid_blocks=tiling.key_blocks if over_keys else tiling.row_blocks,
            operands=(scale, query, key, value, dout, *arrays, *bounds, *visits),
            in_specs=[
                tiling.part(scale),
                tiling.part_of_rows(query),
                *map(tiling.part_of_keys, (key, value)),
                tiling.part_of_rows(dout),
                *(tiling.part(x, None, x.shape[2], head_axis=1) for x in arrays),
                *(tiling.part(x, tiling.tokens) for x in bounds),
                *(tiling.part(x, *x.shape[1:]) for x in visits),
            ],
            results=results,
            out_specs=out_specs,
            name=f"fa4_{name.replace(' ', '_')}",
        )

    dkey, dvalue = run("key gradients", _key_kernel)
    dquery, dscale = run("query gradients", _query_kernel)
    return spec.Gradients(dquery, dkey, dvalue, dscale.sum((1, 2)))
