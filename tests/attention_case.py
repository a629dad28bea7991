"""A small attention kernel of our own with faults planted in it.

    python -m jax_fa4.emulated.mutation tests/attention_case.py

The kernel was written for this: every synchronisation in it is needed, and every fault shows with every seed.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import ml_dtypes
import numpy as np
from nvrtc import compile_ptx

from jax_fa4.emulated import Kernel, Run, TensorMap
from jax_fa4.emulated.mutation import Case

BF16 = ml_dtypes.bfloat16
WIDTH, QUERIES, KEYS = 64, 128, 64  # of a head; of a tile; of a block
SHARED_BYTES = 66560
SCALE = WIDTH**-0.5


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs, attention and log-sum-exp in float64, and the errors allowed."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    out_error: float
    lse_error: float

    @classmethod
    def draw(cls, heads: int, tiles: int, blocks: int) -> Problem:
        rng = np.random.default_rng(0)
        draw = lambda rows: rng.standard_normal((heads, rows, WIDTH))  # noqa: E731
        q, k, v = draw(tiles * QUERIES), draw(blocks * KEYS), draw(blocks * KEYS)
        # Large logits, whose row maxima grow from block to block: otherwise the output would not be rescaled by much.
        k *= 2 + 2 * (np.arange(len(k[0])) // KEYS)[:, None]
        q, k, v = (x.astype(BF16) for x in (q, k, v))
        for x in (q, k, v):
            x.flags.writeable = False
        q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
        logits = np.einsum("hqd,hkd->hqk", q64, k64) * SCALE
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,hkd->hqd", weights / total, v64)
        lse = (top + np.log(total))[..., 0]
        # As much again as bfloat16 probabilities cost, and the output's rounding. For lse: sums in float32.
        rounded = np.einsum("hqk,hkd->hqd", weights.astype(BF16).astype(np.float64) / total, v64)
        size = np.einsum("hqd,hkd->hqk", abs(q64), abs(k64)).max() * SCALE
        return cls(
            q,
            k,
            v,
            out,
            lse,
            out_error=2 * abs(rounded - out).max() + 2**-9 * abs(out).max(),
            lse_error=2**-24 * (WIDTH * size + logits.shape[-1] + 8 * abs(lse).max()),
        )

    def run(self, kernel: Kernel, seed: int, ctas: int = 1) -> tuple[Run, str | None]:
        """Runs the kernel; says what is wrong with the result."""
        heads, queries, _ = self.q.shape
        out, lse = np.full(self.q.shape, np.nan, BF16), np.full((heads, queries), np.nan, np.float32)
        tile = lambda x, rows: TensorMap(x, box=(WIDTH, rows, 1), swizzle=128)  # noqa: E731
        tiles = queries // QUERIES
        sizes = {0: tiles, 4: tiles * heads, 8: self.k.shape[1] // KEYS, 12: SCALE / np.log(2)}
        run = kernel.launch(
            [
                *(tile(self.q, QUERIES), tile(self.k, KEYS), tile(self.v, KEYS), tile(out, QUERIES), lse),
                {offset: (np.float32(x) if offset == 12 else x, 4) for offset, x in sizes.items()},
            ],
            grid=(ctas, 1, 1),
            block=(192, 1, 1),
            dynamic_shared_bytes=SHARED_BYTES,
            seed=seed,
            max_instructions=1 << 18,
        )
        if run.reports:
            return run, run.reports[0].kind
        out_error, lse_error = abs(out.astype(np.float64) - self.out).max(), abs(lse - self.lse).max()
        right = out_error <= self.out_error and lse_error <= self.lse_error  # and so neither is NaN
        return run, None if right else "wrong result"


SOURCE = (Path(__file__).parent / "kernels/attention.cu").read_text()


@functools.cache
def ptx() -> str:
    return compile_ptx(SOURCE)


def at(text: str) -> str:
    """The place of the only line of the kernel that holds the text."""
    (line,) = (number for number, line in enumerate(SOURCE.split("\n"), 1) if text in line)
    return f"kernel.cu:{line}"


def reasons() -> dict[str, str]:
    """Why faults are not noticed: none of them is one, here."""
    relaxed = "equivalent: a consumer reads only what the copies wrote, and it is their completion that releases it"
    one_row = "equivalent: K-major matrices with a swizzle do not use it"
    in_turn = "equivalent: the same threads use both barriers, one after the other"
    return {
        f"relax: mbarrier.arrive.expect_tx at {at('ArriveExpecting(s.q_loaded')}": relaxed,
        f"relax: mbarrier.arrive.expect_tx at {at('ArriveExpecting(s.stage_loaded')}": relaxed,
        f"leading offset of A: tcgen05.mma at {at('Multiply(tensor + kS,')}": one_row,
        f"leading offset of B: tcgen05.mma at {at('Multiply(tensor + kS,')}": one_row,
        f"leading offset of B: tcgen05.mma at {at('MultiplyTensor(tensor + kO,')}": (
            "equivalent: the 64 columns of V are one panel, and it is the distance between panels"
        ),
        f"next barrier: bar.sync at {at('Sync(0, kThreads);  // set up')}": in_turn,
        f"next barrier: bar.sync at {at('Sync(1, ')}": in_turn,
        f"next barrier: bar.sync at {at('Sync(2, ')}": "equivalent: nobody uses barrier 3",
    }


def case() -> Case:
    # Two heads of two tiles for one CTA, three blocks each: phases wrap, and tiles begin in either stage.
    problem = Problem.draw(heads=2, tiles=2, blocks=3)
    return Case(ptx(), lambda kernel, seed: problem.run(kernel, seed)[1], reasons())
