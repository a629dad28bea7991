"""The forward: FlashAttention-4's online softmax, for one block of query rows at a time.

A kernel instance owns a block of packed query rows (see `tiling`) and walks over the key blocks that they see. It never
holds more of the logits than one block. Three numbers a row are carried along: a reference that is subtracted from
scores before they are exponentiated, the sum of the weights so far, and the sum of the weighted values.

What FlashAttention-4 changes in this loop is the reference. It need not be the greatest score so far, only near it: any
reference cancels between the two sums. So it stays as it is until the greatest score exceeds it by more than a factor
2^8 of weight, and only then are both sums rescaled. Weights stay below 2^8, which is far from the end of every dtype's
range. Exponentials are to base 2, which is what the hardware has. (Where the sums are in tensor memory, on Blackwell,
a block that changes no reference spares them a round trip. Here they are in registers: the multiplication by 1 stays.)

Source: "FlashAttention-4" (2026), the conditional rescaling of the online softmax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_fa4 import problem as spec
from jax_fa4.pallas.blocks import Blocks
from jax_fa4.pallas.tiling import Tiling, call

LOG2_E = math.log2(math.e)
THRESHOLD = 8.0
"""How far the greatest score of a row may exceed its reference, in powers of two."""


class Softmax(NamedTuple):
    """What is known of a block's rows after some of their keys."""

    reference: Array  # (R,) float32: what scores are measured from
    total: Array  # (R,) float32: the sum of weights
    out: Array  # (R, Dv) float32: the sum of weighted values

    @classmethod
    def empty(cls, rows: int, width: int) -> Softmax:
        """Of rows that have seen nothing. The reference is finite, so that no difference to it is NaN."""
        lowest = jnp.full(rows, np.finfo(np.float32).min, np.float32)
        return cls(lowest, jnp.zeros(rows, np.float32), jnp.zeros((rows, width), np.float32))

    def add(
        self,
        scores: Array,
        value: Array,
        scale_log2: Array | float,
        exp2: Callable[[Array], Array] = jnp.exp2,
    ) -> Softmax:
        """Takes in one key block.

        Args:
          scores: (R, C) float32, -inf where a key is hidden.
          value: (C, Dv).
          scale_log2: positive; the weight of a score is `2 ** (scale_log2 * score)`.
          exp2: the function.
        """
        candidate = jnp.maximum(self.reference, scores.max(1))
        delta = (self.reference - candidate) * scale_log2  # <= 0
        keep = delta >= -THRESHOLD
        reference = jnp.where(keep, self.reference, candidate)
        rescale = jnp.where(keep, 1.0, exp2(delta))
        weights = exp2((scores - reference[:, None]) * scale_log2)
        total = self.total * rescale + weights.sum(1)
        out = self.out * rescale[:, None] + dot(weights.astype(value.dtype), value)
        return Softmax(reference, total, out)


def dot(x: Array, y: Array) -> Array:
    """A matrix product with float32 sums; of float32 operands as precise as `jax.default_matmul_precision` asks for."""
    return lax.dot(x, y, preferred_element_type=np.float32)


def cap(logits: Array, softcap: float) -> tuple[Array, Array]:
    """Capped logits, and their ratio to the cap."""
    ratio = jnp.tanh(logits / softcap)
    return softcap * ratio, ratio


def _kernel(tiling: Tiling, softcap: float | None, *refs: Any) -> None:
    """Attention of one block of rows, all of whose references are described by `tiling`."""
    scale_ref, query_ref, key_ref, value_ref, *bounds, out_ref, lse_ref, rounding_ref = refs
    # Under causality the last rows see most keys: they start first, so that the short ones fill the gaps at the end.
    block = tiling.row_blocks - 1 - pl.program_id(0)
    rows = tiling.block_of_rows(block, tuple(bounds))
    hull = tiling.hull(block, rows)

    # The sign of the scale goes into the query, exactly; what is left is positive, or 1 where all logits are 0.
    scale = scale_ref[...]
    query = tiling.load_rows(query_ref, rows, tiling.width)
    query = query * jnp.sign(scale).astype(query.dtype)
    scale = jnp.where(scale == 0, 1.0, jnp.abs(scale))
    natural = scale if softcap is None else 1.0

    def step(masked: bool, key_block: Any, softmax: Softmax) -> Softmax:
        # What keys hold outside of what the block's rows see, even NaN, must not matter.
        seen = (hull.least_lower, hull.greatest_upper) if masked else None
        key = tiling.load_keys(key_ref, key_block, tiling.width, seen)
        scores = dot(query, key.T)
        if softcap is not None:
            scores, _ = cap(scores * scale, softcap)
        if masked:
            visible = tiling.sees(rows.down(), tiling.key_positions(key_block)[None])
            scores = jnp.where(visible, scores, -jnp.inf)
        value = tiling.load_keys(value_ref, key_block, tiling.value_width, seen)
        return softmax.add(scores, value, natural * LOG2_E, tiling.exp2)

    softmax = Softmax.empty(tiling.blocks.rows, value_ref.shape[1])
    softmax = tiling.walk_keys(tiling.visited_keys(hull), step, softmax)

    some = softmax.total != 0
    total = jnp.where(some, softmax.total, 1.0)
    top, log_total = softmax.reference * natural, jnp.log(total)
    lse = top + log_total
    tiling.store_rows(out_ref, block, jnp.where(some[:, None], softmax.out / total[:, None], 0.0), tiling.value_width)
    tiling.store_rows(lse_ref, block, jnp.where(some, lse, -jnp.inf))
    tiling.store_rows(rounding_ref, block, jnp.where(some, log_total - (lse - top), 0.0))


def forward(
    problem: spec.Problem, blocks: Blocks, interpret: bool, operands: spec.Operands
) -> tuple[Array, Array, Array]:
    """Out (B, T, N, Dv), lse and its rounding (B, T, N)."""
    tiling = Tiling.of(problem, operands, operands.batch, blocks, interpret=interpret)
    query, key, value, scale, *bounds = (x for x in operands if x is not None)
    lse = jax.ShapeDtypeStruct((tiling.batch, *query.shape[1:3]), np.float32)
    out = jax.ShapeDtypeStruct((*lse.shape, tiling.value_width), spec.out_dtype(problem, operands))
    results = (out, lse, lse)
    return call(
        functools.partial(_kernel, tiling, problem.softcap),
        tiling,
        grid_blocks=tiling.row_blocks,
        operands=(scale, query, key, value, *bounds),
        in_specs=[
            tiling.part(scale),
            tiling.part_of_rows(query),
            *map(tiling.part_of_keys, (key, value)),
            *(tiling.part(x, tiling.tokens) for x in bounds),
        ],
        results=results,
        out_specs=[tiling.part_of_rows(x) for x in results],
        name="fa4_forward",
    )
