"""Attention calls of real models, by name, for the tests and the benchmarks; and the kinds of data to run them on.

Head widths and head groups are the models' own. Lengths come twice: `full` as in the model, for benchmarks, and `small`
for tests, where masks shrink along.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Sizes(NamedTuple):
    """The sizes of one call, in the vocabulary of docs/spec.md."""

    batch: int  # B
    rows: int  # T
    keys: int  # S
    heads: int  # N
    kv_heads: int  # K
    width: int  # D
    value_width: int  # Dv


Extras = Callable[[Sizes, np.random.Generator], dict[str, Any]]
"""Makes the arguments of a call besides query, key and value."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One named call.

    Attributes:
      name: model and variant.
      heads: N, K, D and Dv of the model.
      full, small: B, T and S, in benchmarks and in tests.
      extras: the other arguments.
    """

    name: str
    heads: tuple[int, int, int, int]
    full: tuple[int, int, int]
    small: tuple[int, int, int]
    extras: Extras

    def full_sizes(self) -> Sizes:
        return Sizes(*self.full, *self.heads)

    def small_sizes(self) -> Sizes:
        """Test sizes: at most two groups of heads."""
        heads, kv_heads, *widths = self.heads
        return Sizes(*self.small, heads // kv_heads * min(kv_heads, 2), min(kv_heads, 2), *widths)

    def arguments(self, sizes: Sizes, dtype: str) -> dict[str, Any]:
        """The arguments of `attention` at these sizes, the same every time."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return operands(sizes, dtype, rng) | self.extras(sizes, rng)


def operands(sizes: Sizes, dtype: str, rng: np.random.Generator, kind: str = "gaussian") -> dict[str, np.ndarray]:
    """Query, key and value."""
    batch, rows, keys, heads, kv_heads, width, value_width = sizes
    return {
        "query": draw(kind, (batch, rows, heads, width), dtype, rng),
        "key": draw(kind, (batch, keys, kv_heads, width), dtype, rng),
        "value": draw(kind, (batch, keys, kv_heads, value_width), dtype, rng),
    }


def draw(kind: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Data of one of `KINDS`, (..., length, heads, width)."""
    return KINDS[kind](shape, rng).astype(jnp.dtype(dtype))


def _gaussian(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _outliers(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """One element in fifty is 30 times as large, as in trained transformers' residual streams."""
    return _gaussian(shape, rng) * np.where(rng.random(shape) < 0.02, 30, 1)


def _huge_logits(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """One row in ten is 20 times as large: its softmax is one-hot, with log-sum-exps in the hundreds of both signs."""
    return _gaussian(shape, rng) * np.where(rng.random((*shape[:-1], 1)) < 0.1, 20, 1)


def _near_constant(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Every row almost the same: sums do not average out, and gradients are differences of near-equal numbers."""
    return 1 + _gaussian(shape[-1:], rng) + 0.01 * _gaussian(shape, rng)


def _runs(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Runs of 50 equal rows: row maxima that never change from block to block."""
    *batch, length, heads, width = shape
    runs = _gaussian((*batch, -(-length // 50), heads, width), rng)
    return np.repeat(runs, 50, axis=-3)[..., :length, :, :]


def _zeros(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return np.zeros(shape, np.float32)


KINDS: dict[str, Callable[[tuple[int, ...], np.random.Generator], np.ndarray]] = {
    "gaussian": _gaussian,
    "outliers": _outliers,
    "huge_logits": _huge_logits,
    "near_constant": _near_constant,
    "runs": _runs,
    "zeros": _zeros,
}


def _plain(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    return {}


def _causal(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    return {"is_causal": True}


def _sliding(window: int) -> Extras:
    """A causal window of so many keys, its own included; of a third of the keys where there are few."""
    return lambda sizes, rng: {"is_causal": True, "local_window_size": (min(window, sizes.keys // 3) - 1, 0)}


def _gemma2(window: int | None) -> Extras:
    def extras(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
        local = {"is_causal": True} if window is None else _sliding(window)(sizes, rng)
        return local | {"softcap": 50.0, "scale": 256**-0.5}

    return extras


def _gemma3(window: int | None) -> Extras:
    """Gemma 3 27B, which scales by the width of its model over its heads, not by the heads' own width."""

    def extras(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
        local = {"is_causal": True} if window is None else _sliding(window)(sizes, rng)
        return local | {"scale": (5376 / 32) ** -0.5}

    return extras


def _gpt_oss(window: int | None) -> Extras:
    def extras(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
        local = {"is_causal": True} if window is None else _sliding(window)(sizes, rng)
        return local | {"sinks": rng.normal(0, 2, sizes.heads).astype(np.float32)}

    return extras


def _padded(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    lengths = rng.integers(sizes.keys // 4, sizes.keys + 1, sizes.batch, np.int32)
    return {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}


def _t5(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """A relative position bias from buckets of distances, shared by the batch; T5 does not scale."""
    distance = np.arange(sizes.keys) - np.arange(sizes.rows)[:, None]
    buckets = np.sign(distance) * np.log2(1 + np.abs(distance)).astype(int)
    table = rng.standard_normal((sizes.heads, 2 * buckets.max() + 1), np.float32)
    return {"bias": table[:, buckets][None], "scale": 1.0}


def _alibi(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """BLOOM's bias: a slope for each head, linear in the key position, the same for all rows."""
    slopes = 2.0 ** (-8 / sizes.heads * np.arange(1, sizes.heads + 1))
    return {"is_causal": True, "bias": (slopes[:, None, None] * np.arange(sizes.keys)).astype(np.float32)[None]}


def _packed(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """Documents one after the other: each token's id is the number of its document."""
    ids = (rng.random((sizes.batch, sizes.keys)) < 4 / sizes.keys).cumsum(1, dtype=np.int32)
    return {"is_causal": True, "query_segment_ids": ids, "key_value_segment_ids": ids}


def _prefix_lm(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """The prefix sees itself whole, the rest is causal."""
    prefix = rng.integers(1, sizes.keys, (sizes.batch, 1), np.int32)
    upper = np.maximum(prefix, np.arange(1, sizes.rows + 1, dtype=np.int32))
    return {"row_bounds": (np.zeros_like(upper), upper)}


def _chunked(chunk: int) -> Extras:
    """Causal inside chunks of the sequence (of a third of it where it is short)."""

    def extras(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
        length = min(chunk, sizes.keys // 3)
        rows = np.broadcast_to(np.arange(sizes.rows, dtype=np.int32), (sizes.batch, sizes.rows))
        return {"row_bounds": (rows // length * length, rows + 1)}

    return extras


def _decode(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """The last T tokens of caches that are filled to different lengths."""
    lengths = rng.integers(sizes.rows, sizes.keys + 1, sizes.batch, np.int32)
    return {"is_causal": True, "query_offset": lengths - np.int32(sizes.rows), "key_value_seq_lengths": lengths}


def _flax_decode(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """Flax's cache mask, (B, 1, 1, S)."""
    lengths = rng.integers(1, sizes.keys + 1, (sizes.batch, 1, 1, 1))
    return {"mask": np.arange(sizes.keys) < lengths}


CASES: tuple[Case, ...] = (
    Case("llama3_8b", (32, 8, 128, 128), (1, 8192, 8192), (2, 270, 270), _causal),
    Case("llama3_70b", (64, 8, 128, 128), (1, 8192, 8192), (1, 129, 129), _causal),
    Case("qwen3_30b_a3b", (32, 4, 128, 128), (1, 8192, 8192), (1, 140, 140), _causal),
    Case("mistral_7b", (32, 8, 128, 128), (1, 16384, 16384), (1, 300, 300), _sliding(4096)),
    Case("gemma2_9b_local", (16, 8, 256, 256), (1, 8192, 8192), (1, 300, 300), _gemma2(4096)),
    Case("gemma2_9b_global", (16, 8, 256, 256), (1, 8192, 8192), (1, 300, 300), _gemma2(None)),
    Case("gemma3_27b_local", (32, 16, 128, 128), (1, 8192, 8192), (1, 300, 300), _gemma3(1024)),
    Case("gemma3_27b_global", (32, 16, 128, 128), (1, 8192, 8192), (2, 130, 130), _gemma3(None)),
    Case("gpt_oss_20b_local", (64, 8, 64, 64), (1, 8192, 8192), (2, 200, 200), _gpt_oss(128)),
    Case("gpt_oss_20b_global", (64, 8, 64, 64), (1, 8192, 8192), (1, 150, 150), _gpt_oss(None)),
    Case("bert_base", (12, 12, 64, 64), (32, 512, 512), (3, 300, 300), _padded),
    Case("t5_base", (12, 12, 64, 64), (16, 512, 512), (2, 270, 270), _t5),
    Case("bloom_7b", (32, 32, 128, 128), (4, 2048, 2048), (1, 270, 270), _alibi),
    Case("vit_large", (16, 16, 64, 64), (64, 197, 197), (2, 197, 197), _plain),
    Case("whisper_large_cross", (20, 20, 64, 64), (8, 448, 1500), (1, 100, 375), _plain),
    Case("deepseek_v3", (128, 128, 192, 128), (1, 4096, 4096), (1, 270, 270), _causal),
    Case("falcon_7b", (71, 1, 64, 64), (4, 2048, 2048), (1, 70, 70), _causal),
    Case("packed_documents", (32, 8, 128, 128), (1, 8192, 8192), (2, 270, 270), _packed),
    Case("prefix_lm", (8, 1, 256, 256), (8, 1024, 1024), (2, 150, 150), _prefix_lm),
    Case("llama4_chunked", (40, 8, 128, 128), (1, 16384, 16384), (1, 200, 200), _chunked(8192)),
    Case("decode", (64, 8, 128, 128), (16, 1, 8192), (3, 1, 300), _decode),
    Case("speculative_decode", (64, 8, 128, 128), (16, 4, 8192), (3, 4, 300), _decode),
    Case("flax_decode", (16, 16, 64, 64), (16, 1, 2048), (3, 1, 300), _flax_decode),
)
