"""Run a Blackwell kernel of FlashAttention-4 on this CPU, and draw what its roles do at the same time.

    python examples/blackwell_on_cpu.py
    python examples/blackwell_on_cpu.py --backward

It needs no GPU: the emulator executes the kernel that a B200 would run, in strict mode, which would report races,
deadlocks and misuse of the hardware. The result, out or the gradients, is compared with that of
`jax.nn.dot_product_attention`, and two files are written: timeline.png, and trace.json for ui.perfetto.dev.

The timeline is of one CTA. It shows an order of events that the kernel's barriers allow, which another --seed changes,
and how far the roles overlap in it. It does not show time: the emulator counts instructions and steps of units, and
knows nothing of how many cycles they take.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import jax_fa4

BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 1, 512, 4, 2, 128

# The warps of a CTA have fixed roles (csrc/sm100/forward.cu): three groups of four warps, and single ones.
SOFTMAX_WARPS = (range(4), range(4, 8))  # of query tile 0, of query tile 1
CORRECTION_WARPS = range(8, 12)
# Tensor memory (csrc/sm100/config.h): QK^T of both query tiles, 128 columns each, then what PV adds up.
QK_COLUMNS = 128
FIRST_PV_COLUMN = 2 * QK_COLUMNS

ROLES = ("load", "QK MMA", "softmax 0", "softmax 1", "PV MMA", "correction", "store")
COLORS = {0: "tab:blue", 1: "tab:orange", None: "tab:gray"}  # by Span.tile

# The same of the backward (csrc/sm100/backward.cu, csrc/sm100/backward_config.h). Each of its products is as many
# instructions; those that have columns in common take turns.
COMPUTE_WARPS = (range(4, 8), range(8, 12))  # of the first half of a block's rows, of the second
REDUCE_WARPS, ADD_WARP = range(4), 14
BACKWARD_PRODUCTS = {0: ("S MMA",), 128: ("dV MMA",), 256: ("dP MMA", "dQ MMA"), 384: ("dK MMA",)}
PRODUCT_STEPS = 128 // 16
PIECES = 4  # in which dQ of a block of rows is added

BACKWARD_ROLES = ("load", "S MMA", "dP MMA", "compute 0", "compute 1", "dV MMA", "dK MMA", "dQ MMA")
BACKWARD_ROLES += ("reduce", "add", "store")


class Span(NamedTuple):
    """A role is busy, from one event of the emulator to another."""

    start: int
    end: int
    tile: int | None  # the query tile that it is for, or every other block of rows; None for what serves both


def inputs(seed: int) -> tuple[Array, Array, Array]:
    """Query (B, T, N, D), and key and value (B, T, K, D)."""
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    shapes = [(BATCH, LENGTH, n, WIDTH) for n in heads]
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def causal(attention: Callable[..., Array], backward: bool, **options: Any) -> Callable[..., Any]:
    """Attention with a causal mask; or the gradients of half the sum of its squares."""

    def half_of_squares(*operands: Array) -> Array:
        return (attention(*operands, is_causal=True, **options).astype(jnp.float32) ** 2).sum() / 2

    if backward:
        return jax.grad(half_of_squares, (0, 1, 2))
    return lambda *operands: attention(*operands, is_causal=True, **options)


def run(query: Array, key: Array, value: Array, seed: int, backward: bool = False) -> tuple[Any, Any]:
    """Causal attention, or its gradients, on an emulated B200, and the launch that computed it."""
    # With one multiprocessor, CTAs run one after the other, and events of one are not among those of others.
    with jax_fa4.emulated.options(arch="sm_100", seed=seed, trace=True, sm_count=1) as emulation:
        result = causal(jax_fa4.attention, backward, implementation="emulated")(query, key, value)
        jax.block_until_ready(result)
        # Before the backward run the forward and what is done once for each row; after it the latter again.
        launch = emulation.launches[2 if backward else 0]
    module = "sm100_backward" if backward else "sm100_forward"
    assert launch.module == module, f"this was {launch.module}, not the Blackwell kernel"
    return result, launch


def busy(events: list[Any], warp: int) -> Iterator[tuple[int, int]]:
    """When a warp does not wait, between its set-up and the end of its role."""
    # The CTA's barrier 0 stands behind the set-up and before the end.
    own = [event for event in events if event.warp == warp]
    together = [e for e in own if e.kind == "signal" and e.name == "barrier" and e.arguments["barrier"] == 0]
    start, end = together[0].end, together[-1].start
    again = None  # where a wait gave up that the kernel goes on with
    for wait in own:
        if wait.kind != "wait" or not start <= wait.start < end:
            continue
        if wait.start > start and wait.ptx_line != again:
            yield start, wait.start
        start = max(start, wait.end)
        again = wait.ptx_line if wait.ended_by in ("no reason", "time limit") else None
    if start < end:
        yield start, end


def timeline(trace: Any) -> dict[str, list[Span]]:
    """What each role does in the first CTA of a trace."""
    events = [event for event in trace.events if event.cta == trace.events[0].cta]
    spans: dict[str, list[Span]] = {role: [] for role in ROLES}
    for event in events:
        if event.kind != "operation":
            continue
        if event.name == "tensor load":
            spans["load"].append(Span(event.start, event.end, None))
        elif event.name == "tensor store":
            spans["store"].append(Span(event.start, event.end, None))
        elif event.name == "tcgen05.mma":
            column = event.arguments["d column"]
            if column < FIRST_PV_COLUMN:
                spans["QK MMA"].append(Span(event.start, event.end, column // QK_COLUMNS))
            else:
                spans["PV MMA"].append(Span(event.start, event.end, (column - FIRST_PV_COLUMN) // WIDTH))
    for tile, warps in enumerate(SOFTMAX_WARPS):
        spans[f"softmax {tile}"] = [Span(*one, tile) for warp in warps for one in busy(events, warp)]
    spans["correction"] = [Span(*one, None) for warp in CORRECTION_WARPS for one in busy(events, warp)]
    return spans


def backward_timeline(trace: Any) -> dict[str, list[Span]]:
    """The same of the backward; tiles of products and of what is added tell every other block of rows."""
    events = [event for event in trace.events if event.cta == trace.events[0].cta]
    spans: dict[str, list[Span]] = {role: [] for role in BACKWARD_ROLES}
    done: collections.Counter[int] = collections.Counter()  # instructions of products, by their columns
    for event in events:
        if event.kind != "operation":
            continue
        if event.name == "tensor load":
            spans["load"].append(Span(event.start, event.end, None))
        elif event.name == "tensor store":
            spans["store"].append(Span(event.start, event.end, None))
        elif event.name == "tcgen05.mma":
            column = event.arguments["d column"]
            names = BACKWARD_PRODUCTS[column]
            block, product = divmod(done[column] // PRODUCT_STEPS, len(names))
            done[column] += 1
            spans[names[product]].append(Span(event.start, event.end, block % 2))
        elif event.name == "cp.async.bulk" and event.warp == ADD_WARP:
            spans["add"].append(Span(event.start, event.end, len(spans["add"]) // PIECES % 2))
    for role, warps in zip(("compute 0", "compute 1", "reduce"), (*COMPUTE_WARPS, REDUCE_WARPS), strict=True):
        spans[role] = [Span(*one, None) for warp in warps for one in busy(events, warp)]
    return spans


def draw(spans: dict[str, list[Span]], path: Path, backward: bool = False) -> None:
    figure = Figure(figsize=(14, 5), layout="constrained")
    axes = figure.subplots()
    for row, role in enumerate(spans):
        for tile, color in COLORS.items():
            bars = [(span.start, span.end - span.start) for span in spans[role] if span.tile == tile]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
    axes.set_yticks(range(len(spans)), spans)
    axes.invert_yaxis()
    axes.set_xlabel("events of the emulator (instructions of warps, steps of units): an order, not cycles of hardware")
    if backward:
        axes.set_title("The Blackwell backward in the emulator: one CTA, a block of keys, blocks of rows in turn")
        names = {0: "even block of rows", 1: "odd block of rows", None: "all"}
    else:
        axes.set_title("The Blackwell forward in the emulator: one CTA, two query tiles")
        names = {0: "query tile 0", 1: "query tile 1", None: "both"}
    axes.legend(handles=[Patch(color=color, label=names[tile]) for tile, color in COLORS.items()], loc="upper right")
    figure.savefig(path, dpi=150)


def show(seed: int, folder: Path, backward: bool) -> None:
    operands = inputs(seed)
    result, launch = run(*operands, seed, backward)
    print(f"{launch.module}.{launch.target}, {launch.kernel}: {launch.grid[0]} CTAs of {launch.block[0]} threads,")
    print(f"{launch.instructions:,} instructions of warps, {len(launch.trace.events):,} events, no report")

    dense = causal(jax.nn.dot_product_attention, backward)
    exact = dense(*(x.astype(jnp.float32) for x in operands))
    for name, x in (("the kernel", result), ("jax.nn.dot_product_attention", dense(*operands))):
        errors = jax.tree.map(lambda x, y: jnp.abs(x.astype(jnp.float32) - y).max(), x, exact)
        print(f"largest error of {name} in bfloat16, against float32: {max(jax.tree.leaves(errors)):.4f}")

    draw((backward_timeline if backward else timeline)(launch.trace), folder / "timeline.png", backward)
    (folder / "trace.json").write_text(launch.trace.chrome_json(), encoding="utf-8")
    print(f"wrote {folder / 'timeline.png'} and {folder / 'trace.json'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # With this one no warp lags: the scheduler has some lag in half of the runs.
    parser.add_argument("--seed", type=int, default=3, help="of the inputs, and of the emulator's scheduler")
    parser.add_argument("--backward", action="store_true", help="run and draw the backward, not the forward")
    parser.add_argument("--out", type=Path, default=Path("runs/blackwell_on_cpu"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with jax.default_device(jax.devices("cpu")[0]):  # also where JAX has another
        show(options.seed, options.out, options.backward)


if __name__ == "__main__":
    main()
