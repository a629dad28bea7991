"""Times `jax_fa4.attention` beside `jax.nn.dot_product_attention` on this machine, and weighs a long gradient.

    python benchmarks/attention.py

Every row is measured in one process with the two functions taking turns of a few calls, so that a change of the
machine's speed meets both; figures are medians, and "ratio" is jax.nn's time over ours. The last line is the peak
resident memory of a process of its own that computes a gradient at S = 32768 with a window of 1024 keys.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4

HEADS, WIDTH = 8, 64


def inputs(length: int, dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """Normal query, key and value of shape (1, length, HEADS, WIDTH)."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, length, HEADS, WIDTH)), dtype) for _ in range(3)]


def with_gradient(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """The output and the gradients of the three operands for a fixed cotangent, all of which are computed."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(function, query, key, value)
        return out, *pullback(query)

    return run


def medians(functions: list[Callable[..., object]], arguments: list[jax.Array], seconds: float) -> list[float]:
    """Median wall time in seconds of each function, all of them taking turns for about `seconds`, at least 3 times.

    In a turn, one call goes by before three are timed: it pays for the memory that the other function's turn gave back
    to the system.
    """
    compiled = [jax.jit(function).lower(*arguments).compile() for function in functions]
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 9:
        for function, measured in zip(compiled, times, strict=True):
            jax.block_until_ready(function(*arguments))
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(function(*arguments))
                measured.append(time.perf_counter() - start)
    return [statistics.median(measured) for measured in times]


def compare(lengths: list[int], seconds: float) -> None:
    """Prints a row per length, dtype, mask and pass."""
    print(f"{'S':>6} {'dtype':9} {'mask':7} {'pass':17} {'jax_fa4 ms':>11} {'jax.nn ms':>11} {'ratio':>6}")
    for length in lengths:
        for dtype in ("float32", "bfloat16"):
            arguments = inputs(length, dtype)
            for is_causal in (False, True):

                def ours(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = is_causal) -> jax.Array:
                    return jax_fa4.attention(q, k, v, is_causal=causal)

                def theirs(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = is_causal) -> jax.Array:
                    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

                for name, pair in (
                    ("forward", [ours, theirs]),
                    ("forward+backward", [with_gradient(ours), with_gradient(theirs)]),
                ):
                    mine, other = medians(pair, arguments, seconds)
                    mask = "causal" if is_causal else "full"
                    print(
                        f"{length:6} {dtype:9} {mask:7} {name:17} {mine * 1e3:11.2f} {other * 1e3:11.2f} "
                        f"{other / mine:6.2f}",
                        flush=True,
                    )


def long_gradient(length: int, window: int) -> None:
    """Computes one gradient and prints the peak resident memory of this process in MiB."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax_fa4.attention(query, key, value, local_window_size=(window, 0)).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs(length, "float32")))
    # Not getrusage, whose maximum counts the parent's memory from before this program was loaded.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024
    print(f"gradient at S={length}, N={HEADS}, D={WIDTH}, float32, window {window}: peak resident {peak:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 4096], help="S of the timed rows")
    parser.add_argument("--seconds", type=float, default=4, help="about how long each row is measured")
    parser.add_argument("--long-gradient", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.long_gradient:
        long_gradient(32768, 1024)
        return
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind} ({platform.processor() or platform.machine()})")
    print(f"B=1, N={HEADS}, D={WIDTH}; medians; ratio > 1 means that jax_fa4 is faster")
    compare(options.lengths, options.seconds)
    subprocess.run([sys.executable, __file__, "--long-gradient"], check=True)


if __name__ == "__main__":
    main()
