"""What a call costs: memory, key blocks, forward passes and compilations; by counting, never by the clock."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.extend import core

from jax_fa4 import CHECKPOINT_NAMES, attention

Arguments = dict[str, Any]


# Counting what runs


def executed_products(function: Callable[..., Any], *arguments: Any) -> int:
    """The multiply-adds of matrix products that a call really executes: loops counted as often as they turn."""
    closed = jax.jit(function).trace(*arguments).jaxpr
    total = 0

    def run(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        nonlocal total
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
        read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]  # noqa: E731
        for eqn in jaxpr.eqns:
            given = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name == "dot_general":
                (contracting, _), _ = eqn.params["dimension_numbers"]
                total += math.prod(eqn.outvars[0].aval.shape) * math.prod(given[0].shape[i] for i in contracting)
            values.update(zip(eqn.outvars, step(eqn, given), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def call(closed: Any, inputs: Sequence[Any]) -> list[Any]:
        return run(closed.jaxpr, closed.consts, inputs)

    def step(eqn: Any, given: list[Any]) -> list[Any]:
        params = eqn.params
        match eqn.primitive.name:
            case "while":
                test, body = np.cumsum([params["cond_nconsts"], params["body_nconsts"]])
                state = given[body:]
                while call(params["cond_jaxpr"], [*given[:test], *state])[0]:
                    state = call(params["body_jaxpr"], [*given[test:body], *state])
                return state
            case "scan":
                # Inputs are constants, state and columns; columns have an axis more outside than inside.
                inside = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
                extra = lambda outer, inner: outer.aval.ndim - inner.aval.ndim  # noqa: E731
                columns_in = sum(map(extra, eqn.invars, inside.invars))
                carried = len(eqn.outvars) - sum(map(extra, eqn.outvars, inside.outvars))
                consts, carry = len(given) - columns_in - carried, len(given) - columns_in
                state, columns = given[consts:carry], []
                for i in range(params["length"]):
                    i = params["length"] - 1 - i if params["reverse"] else i
                    results = call(params["jaxpr"], [*given[:consts], *state, *(x[i] for x in given[carry:])])
                    state = results[:carried]
                    columns.append(results[carried:])
                columns = columns[::-1] if params["reverse"] else columns
                return [*state, *map(jnp.stack, zip(*columns, strict=True))]
            case "cond":
                index, *rest = given
                return call(params["branches"][min(max(int(index), 0), len(params["branches"]) - 1)], rest)
        inner = params.get("jaxpr", params.get("call_jaxpr", params.get("call")))
        if inner is None:
            results = eqn.primitive.bind(*given, **params)
            return list(results) if eqn.primitive.multiple_results else [results]
        return call(inner, given) if isinstance(inner, core.ClosedJaxpr) else run(inner, (), given)

    call(closed, jax.tree.leaves(arguments))
    return total


@contextlib.contextmanager
def counted(event: str) -> Iterator[list[str]]:
    """JAX's own events of a kind while the context lasts."""
    found: list[str] = []

    def listen(name: str, *_: Any, **__: Any) -> None:
        if event in name:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_counter_counts() -> None:
    x = jnp.ones((2, 3))

    def twice_in_a_scan(x: Array) -> Array:
        return lax.scan(lambda c, _: (jax.jit(lambda c: (c @ c.T) @ c)(c), None), x, length=2)[0]

    def three_turns(x: Array) -> Array:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ c[1].T @ c[1]), (0, x))[1]

    assert executed_products(twice_in_a_scan, x) == 2 * 2 * 12
    assert executed_products(three_turns, x) == 3 * 2 * 12
    assert executed_products(lambda x, p: lax.cond(p, lambda x: x @ x.T, lambda x: x @ x.T @ x @ x.T, x), x, True) == 12


# Key blocks

LENGTH, BLOCK = 2048, 512
"""Two blocks of BLOCK rows and BLOCK keys are the coarsest steps that the expectations allow."""
BLOCKS = LENGTH // BLOCK


def qkv(length: int = LENGTH, heads: int = 1, width: int = 4) -> Arguments:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        name: jax.random.normal(key, (1, length, heads, width))
        for name, key in zip(("query", "key", "value"), keys, strict=True)
    }


def touched(lower: np.ndarray, upper: np.ndarray) -> float:
    """The share of blocks that the hull of their rows' bounds reaches."""
    blocks = 0
    for low, high in zip(lower.reshape(BLOCKS, BLOCK), upper.reshape(BLOCKS, BLOCK), strict=True):
        seen = low < high
        if seen.any():
            blocks += -(-int(high[seen].max()) // BLOCK) - int(low[seen].min()) // BLOCK
    return blocks / BLOCKS**2


ROW = np.arange(LENGTH, dtype=np.int32)
FULL = np.full(LENGTH, LENGTH, np.int32)
ZERO = np.zeros(LENGTH, np.int32)
_shuffled = np.random.default_rng(0).permutation(ROW // BLOCK).astype(np.int32)[None]
_scattered = np.where(ROW % 7 == 0, 900, 1100).astype(np.int32)  # not monotone along the rows

SKIPS: dict[str, tuple[Arguments, float]] = {
    "causal": ({"is_causal": True}, touched(ZERO, ROW + 1)),
    "causal_end": ({"is_causal": True, "query_offset": -512}, touched(ZERO, np.maximum(ROW - 511, 0))),
    "window": (
        {"local_window_size": (100, 100)},
        touched(np.maximum(ROW - 100, 0), np.minimum(ROW + 101, LENGTH)),
    ),
    "window_and_causal": ({"local_window_size": 100, "is_causal": True}, touched(np.maximum(ROW - 100, 0), ROW + 1)),
    "key_lengths": ({"key_value_seq_lengths": np.array([600], np.int32)}, touched(ZERO, ZERO + 600)),
    "query_lengths": ({"query_seq_lengths": np.array([600], np.int32)}, touched(ZERO, np.where(ROW < 600, FULL, 0))),
    "offset_array": (
        {"query_offset": np.array([-1024], np.int32), "is_causal": True},
        touched(ZERO, np.maximum(ROW - 1023, 0)),
    ),
    "row_bounds": (
        {"row_bounds": (_scattered[None] - 200, _scattered[None])},
        touched(_scattered - 200, _scattered),
    ),
    "row_bounds_of_few_rows": (
        {"row_bounds": (ZERO[None], np.where(ROW % BLOCK == 3, 500, 0).astype(np.int32)[None])},
        touched(ZERO, np.where(ROW % BLOCK == 3, 500, 0)),
    ),
    "segments_sorted": ({f"{x}_segment_ids": (ROW // BLOCK)[None] for x in ("query", "key_value")}, 1 / BLOCKS),
    "segments_shuffled": ({f"{x}_segment_ids": _shuffled for x in ("query", "key_value")}, 1 / BLOCKS),
    "segments_and_causal": (
        {f"{x}_segment_ids": _shuffled for x in ("query", "key_value")} | {"is_causal": True},
        1 / BLOCKS,
    ),
    "no_segment_in_common": (
        {"query_segment_ids": ZERO[None], "key_value_segment_ids": ZERO[None] + 1},
        0,
    ),
}


@functools.cache
def all_products(backward: bool) -> int:
    return executed_products(passes(backward, {}), qkv())


def passes(backward: bool, masks: Arguments) -> Callable[..., Any]:
    forward = lambda arrays: attention(**arrays, **masks, implementation="tiled")  # noqa: E731
    return jax.grad(lambda arrays: forward(arrays).sum()) if backward else forward


def test_nothing_is_skipped_without_a_mask() -> None:
    """Two products forward, and five more with the backward."""
    one = LENGTH**2 * 4
    assert all_products(False) == 2 * one
    assert all_products(True) == 7 * one


@pytest.mark.parametrize("name", SKIPS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_key_blocks_that_no_row_sees_are_skipped(name: str, backward: bool) -> None:
    masks, share = SKIPS[name]
    assert share < 1
    products = executed_products(passes(backward, masks), qkv())
    assert products <= share * all_products(backward), (
        f"{products / all_products(backward):.3f} of all, not {share:.3f}"
    )


# Memory


def compiled(length: int, masks: Arguments, *, backward: bool) -> Any:
    return jax.jit(passes(backward, masks)).lower(qkv(length)).compile()


@pytest.mark.parametrize("masks", [{}, {"is_causal": True}, {"query_offset": "end", "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_is_linear(backward: bool, masks: Arguments) -> None:
    """Twice the length is at most twice the bytes, and no buffer has T * S elements."""
    length = 4096
    short, long = (compiled(n, masks, backward=backward) for n in (length, 2 * length))
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (short, long)]
    assert sizes[1] <= 2 * sizes[0], sizes
    assert sizes[1] < (2 * length) ** 2, "less than a byte for each of T * S logits"
    shapes = re.findall(r"\b(?:f32|f64|pred|s32|bf16|f16)\[([\d,]+)\]", long.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest < (2 * length) ** 2 / 8, f"a buffer of {largest} elements"


def test_memory_of_segments_is_linear() -> None:
    def size(length: int) -> int:
        ids = jnp.arange(length, dtype=jnp.int32)[None] % 5
        return compiled(
            length, {"query_segment_ids": ids, "key_value_segment_ids": ids}, backward=True
        ).memory_analysis().temp_size_in_bytes  # fmt: skip

    assert size(8192) <= 2 * size(4096)


def test_operands_that_vmap_does_not_map_are_not_copied() -> None:
    """16 masks over one key and value: temporaries stay far below 16 copies of them."""
    key = jnp.ones((1, 2048, 8, 64))
    query = jnp.ones((16, 1, 8, 8, 64))
    mapped = jax.jit(jax.vmap(lambda query: attention(query, key, key, implementation="tiled")))
    assert mapped.lower(query).compile().memory_analysis().temp_size_in_bytes < 8 * key.nbytes


# Forward passes

NAMED = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)


def layers(x: Array) -> Array:
    return (2 * attention(x, x, x, implementation="tiled")).sum()


def stacked(policy: Callable[..., Any]) -> Callable[[Array], Array]:
    body = jax.checkpoint(lambda x, _: (x + attention(x, x, x, implementation="tiled"), None), policy=policy)
    return lambda x: lax.scan(body, x, length=3)[0].sum()


@pytest.mark.parametrize("shape", ["plain", "scan"])
def test_the_forward_runs_once_when_its_named_residuals_are_saved(shape: str) -> None:
    """And a second time when they are not, which shows that the counter would notice."""
    x = qkv(64)["query"]
    make = {"plain": lambda policy: jax.checkpoint(layers, policy=policy), "scan": stacked}[shape]
    count = lambda policy: executed_products(jax.value_and_grad(make(policy)), x)  # noqa: E731
    once = executed_products(jax.value_and_grad({"plain": layers, "scan": make(None)}[shape]), x)
    calls, forward, backward = {"plain": 1, "scan": 3}[shape], 2 * 64**2 * 4, 5 * 64**2 * 4
    assert count(NAMED) == calls * (forward + backward)
    assert count(jax.checkpoint_policies.nothing_saveable) == calls * (2 * forward + backward)
    for name in CHECKPOINT_NAMES:
        only_one = jax.checkpoint_policies.save_only_these_names(name)
        assert count(only_one) == calls * (2 * forward + backward), f"{name} alone is not enough"
    if shape == "plain":
        assert once == forward + backward


def test_vmap_loops_over_its_axis_only_for_the_gradient_of_a_bias() -> None:
    """That gradient sums over the batch; all others fold the mapped axis into it, also when there is a bias."""
    x, bias = qkv(8)["query"], jnp.ones((8, 8))
    total = lambda x, bias: attention(x, x, x, bias, implementation="tiled").sum()  # noqa: E731

    def loops(argument: int) -> bool:
        mapped = jax.vmap(jax.grad(total, argument), (0, None))
        return "length=17" in str(jax.make_jaxpr(mapped)(jnp.stack([x] * 17), bias))

    assert not loops(0)
    assert loops(1)


# Compilations


@pytest.mark.parametrize("batched", [True, False])
def test_a_second_eager_call_traces_and_compiles_nothing(batched: bool) -> None:
    arrays = {name: x if batched else x[0] for name, x in qkv(16).items()}
    masks: Arguments = {"is_causal": True, "scale": 0.3, "local_window_size": (5, None), "key_value_seq_lengths": [3]}
    attention(**arrays, **masks)
    with counted("/jax/core/compile") as events:
        attention(**arrays, **masks)
    assert not events
    with counted("/jax/core/compile") as events:
        attention(**arrays, **masks, softcap=2.0)
    assert events, "another static argument compiles, which shows that the counter would notice"


def test_new_values_of_traced_arguments_do_not_recompile() -> None:
    arrays = qkv(16)
    ids = jnp.zeros((1, 16), jnp.int32)

    def call(number: int) -> Array:
        return attention(
            **arrays,
            scale=number / 10,
            query_offset=jnp.int32(number),
            query_seq_lengths=[number],
            key_value_seq_lengths=np.array([number], np.int32),
            query_segment_ids=ids + number,
            key_value_segment_ids=ids + number,
            row_bounds=(ids, ids + number),
            sinks=jnp.full(1, number / 10),
        )

    call(3)
    with counted("/jax/core/compile/backend") as events:
        call(4)
    assert not events
