"""Times the training step of one transformer layer with each attention: `python benchmarks/layer.py [--length 8192]`.

The layer is that of a model of a billion parameters (Llama-3.2-1B: 2048 wide, 32 query heads and 8 key/value heads of
width 64, causal, 8192 wide inside), in bfloat16, rematerialized (`jax.checkpoint`): a step computes its output, and the
gradients of its input and its weights. "ratio" is the time of the step with jax.nn's cuDNN attention, or XLA's on a
CPU, over that of the row: above 1 is faster. "temporaries" is memory that the step holds besides what it is given and
returns.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jax_fa4

MODEL, HEADS, KV_HEADS, WIDTH, INSIDE = 2048, 32, 8, 64, 8192
Attention = Callable[[Array, Array, Array], Array]


def attentions() -> dict[str, Attention]:
    """By name, the base first."""
    base = "cudnn" if jax.default_backend() == "gpu" else "xla"
    fa4 = "cuda" if jax.default_backend() == "gpu" else "tiled"
    return {
        f"jax.nn {base}": functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=base),
        f"jax_fa4 {fa4}": functools.partial(jax_fa4.attention, is_causal=True, implementation=fa4),
    }


def weights() -> dict[str, Array]:
    shapes = {
        "query": (MODEL, HEADS, WIDTH),
        "key": (MODEL, KV_HEADS, WIDTH),
        "value": (MODEL, KV_HEADS, WIDTH),
        "out": (HEADS, WIDTH, MODEL),
        "gate": (MODEL, INSIDE),
        "up": (MODEL, INSIDE),
        "down": (INSIDE, MODEL),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape, jnp.bfloat16) * MODEL**-0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _normalized(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _rotated(x: Array) -> Array:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def layer(attention: Attention, w: dict[str, Array], x: Array) -> Array:
    h = _normalized(x)
    query, key, value = (jnp.einsum("btm,mnd->btnd", h, w[name]) for name in ("query", "key", "value"))
    x = x + jnp.einsum("btnd,ndm->btm", attention(_rotated(query), _rotated(key), value), w["out"])
    h = _normalized(x)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def step(attention: Attention) -> Callable[..., Any]:
    """(weights, input, cotangent of the output) -> output and gradients."""

    def run(w: dict[str, Array], x: Array, dout: Array) -> Any:
        out, pullback = jax.vjp(jax.checkpoint(functools.partial(layer, attention)), w, x)
        return out, pullback(dout)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    x, dout = jax.random.normal(jax.random.key(1), (2, options.batch, options.length, MODEL), jnp.bfloat16)
    arguments = weights(), x, dout
    programs = {name: jax.jit(step(one)).lower(*arguments).compile() for name, one in attentions().items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    results = {name: jax.block_until_ready(program(*arguments)) for name, program in programs.items()}
    base, *others = results
    for name in others:  # the same layer: gradients of the weights differ by rounding alone
        for a, b in zip(jax.tree.leaves(results[base]), jax.tree.leaves(results[name]), strict=True):
            difference = jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(a.astype(jnp.float32))
            assert difference < 2e-2, (name, difference)
    for _ in range(options.rounds):  # they take turns
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times[name].append(time.perf_counter() - start)
    print(f"a layer's step, batch {options.batch}, length {options.length}, on {jax.devices()[0].device_kind}")
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, program in programs.items():
        memory = program.memory_analysis()
        held = "-" if memory is None else f"{memory.temp_size_in_bytes / 2**20:.0f} MiB"
        ratio = medians[base] / medians[name]
        print(f"{name:16} {medians[name] * 1e3:9.2f} ms  ratio {ratio:.3f}  temporaries {held}")


if __name__ == "__main__":
    main()
