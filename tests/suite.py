"""The tests that every implementation passes: subclass `AttentionSuite`, name the implementation, state what it can do.

Every test compares out, lse and the gradients of everything differentiable, pulled back through both, with the oracle.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, KINDS, Case, Sizes, draw, operands
from hypothesis import given
from hypothesis import strategies as st

from jax_fa4 import attention

Levels = Mapping[str, tuple[Any, ...]]
"""The options of each feature, None where a feature is off."""

# Two query blocks and two key blocks of `tiled`, the second of each partial.
SIZES = Sizes(batch=2, rows=270, keys=300, heads=4, kv_heads=2, width=8, value_width=8)

MASKS: Levels = {
    "is_causal": (False, True),
    "left": (None, 0, 40),
    "right": (None, 0, 25),
    "query_seq_lengths": (None, "some"),
    "key_value_seq_lengths": (None, "some"),
    "segments": (None, "sorted", "shuffled"),
    "row_bounds": (None, "some"),
    "query_offset": (0, -20, "end", "array"),
    "mask": (None, "some"),
    "bias": (None, "some"),
    "softcap": (None, 2.0),
    "sinks": (None, "some"),
}
# Of different widths and masks.
QUICK_CASES = ("bert_base", "vit_large", "gpt_oss_20b_global")
# Of others, these repeat most.
REPEATED = ("llama3_70b", "qwen3_30b_a3b", "gemma2_9b_global", "gemma3_27b_local")

# What `slow` tests combine in full: of each feature the option that hides most.
EXHAUSTIVE: Levels = {
    "is_causal": (False, True),
    "left": (None, 40),
    "right": (None, 25),
    "key_value_seq_lengths": (None, "some"),
    "segments": (None, "shuffled"),
    "row_bounds": (None, "some"),
    "query_offset": (0, "end", "array"),
    "mask": (None, "some"),
}


def pairwise(levels: Levels) -> Iterator[dict[str, Any]]:
    """Combinations that hold every pair of options of every two features, greedily few."""
    rng = random.Random(0)
    features = [[(feature, i) for i in range(len(options))] for feature, options in enumerate(levels.values())]
    missing = {pair for one, other in itertools.combinations(features, 2) for pair in itertools.product(one, other)}

    def pairs(trial: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        return set(itertools.combinations(enumerate(trial), 2))

    while missing:
        (a, i), (b, j) = min(missing)
        trials = []
        for _ in range(50):
            trial = [rng.randrange(len(options)) for options in levels.values()]
            trial[a], trial[b] = i, j
            trials.append(tuple(trial))
        best = max(trials, key=lambda trial: len(pairs(trial) & missing))
        missing -= pairs(best)
        yield {name: options[i] for (name, options), i in zip(levels.items(), best, strict=True)}


def marked(mark: pytest.MarkDecorator, *values: Any) -> list[Any]:
    """Values of a test's parameter that have a mark."""
    return [pytest.param(value, marks=mark) for value in values]


def quick_first(choices: Iterable[Mapping[str, Any]], mark: pytest.MarkDecorator) -> list[Any]:
    """Parameters of a test: a choice that brings no option that those before it lack gets the mark."""
    seen: set[tuple[str, Any]] = set()
    parameters = []
    for choice in choices:
        parameters.append(pytest.param(choice, marks=[mark] if choice.items() <= seen else []))
        seen |= choice.items()
    return parameters


def exhaustive(levels: Levels) -> Iterator[dict[str, Any]]:
    return (dict(zip(levels, options, strict=True)) for options in itertools.product(*levels.values()))


def label(choice: Mapping[str, Any]) -> str:
    """A short test id: the features that are on."""
    shown = [f"{name}={option}" for name, option in choice.items() if option is not None and option is not False]
    return "-".join(shown).replace("=some", "").replace("=True", "") or "plain"


def masked(sizes: Sizes, choice: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The arguments of `attention` that a choice among levels like `MASKS` stands for, at random."""
    batch, rows, keys, heads = sizes[:4]
    integers = functools.partial(rng.integers, dtype=np.int32)
    arguments: dict[str, Any] = {}
    for name, option in choice.items():
        match name, option:
            case (("left" | "right"), _):
                arguments["local_window_size"] = choice["left"], choice["right"]
            case "query_offset", "array":
                arguments[name] = integers(-rows // 2, keys, batch)
            case (("is_causal" | "softcap" | "query_offset"), _):
                arguments[name] = option
            case _, None:
                pass
            case "query_seq_lengths", _:
                arguments[name] = integers(0, rows + 1, batch)
            case "key_value_seq_lengths", _:
                arguments[name] = integers(keys // 2, keys + 1, batch)
            case "segments", _:
                ids = [integers(0, 4, (batch, length)) for length in (rows, keys)]
                ids = [np.sort(x, 1) for x in ids] if option == "sorted" else ids
                arguments["query_segment_ids"], arguments["key_value_segment_ids"] = ids
            case "row_bounds", _:
                centre = integers(0, keys + 1, (batch, rows))
                arguments[name] = centre - integers(0, keys, (batch, rows)), centre + integers(0, keys, (batch, rows))
            case "mask", _:
                arguments[name] = rng.random((batch, 1, rows, keys)) < 0.8
            case "bias", _:
                bias = rng.standard_normal((1, heads, rows, keys), np.float32)
                arguments[name] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias).astype(np.float32)
            case "sinks", _:
                arguments[name] = rng.standard_normal(heads, np.float32)
    return arguments


def run(implementation: str, arguments: Mapping[str, Any], dout: np.ndarray, dlse: np.ndarray) -> dict[str, Any]:
    """Out, lse and gradients, as `oracle.expect` names them, in one compilation."""
    _stay_below_the_limit_of_memory_maps()
    arrays = {name: x for name, x in arguments.items() if hasattr(x, "dtype") or name == "row_bounds"}
    static = {name: x for name, x in arguments.items() if name not in arrays} | {"implementation": implementation}
    return _run(tuple(static.items()), arrays, dout, dlse)


def _stay_below_the_limit_of_memory_maps() -> None:
    """Drops compiled programs before they are too many: each holds a dozen of the 65,530 maps that Linux grants."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@functools.partial(jax.jit, static_argnums=0)
def _run(static: tuple[tuple[str, Any], ...], arrays: dict[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
    floats = {name: x for name, x in arrays.items() if name != "row_bounds" and jnp.issubdtype(x.dtype, jnp.floating)}

    def call(floats: dict[str, Any]) -> Any:
        return attention(**{**arrays, **floats}, **dict(static), return_residual=True)

    (out, lse), pull = jax.vjp(call, floats)
    return {"out": out, "lse": lse, **pull((dout, dlse))[0]}


GPU_TRUNCATES = getattr(jax.devices()[0], "compute_capability", "") == "9.0"
"""`truncates` of `oracle.expect`, for the GPU at hand."""


class AttentionSuite:
    """All tests of one implementation.

    Attributes:
      implementation: its name.
      dtypes: those it supports; of others the suite expects a refusal.
      dtype: that of the tests that are about something else.
      sizes: those of most tests: several query blocks and key blocks, the last of each partial.
      dense: whether it supports `mask` and `bias`; if not, the suite expects a refusal.
      truncates: see `oracle.expect`.
      quick_has_more: whether the quick suite has the tests that are marked `more`.
    """

    implementation: str
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    dtype: str = "float32"
    sizes: Sizes = SIZES
    dense: bool = True
    truncates: bool = False
    quick_has_more: bool = True

    def possible(self, choice: Mapping[str, Any]) -> Mapping[str, Any]:
        """A choice among `MASKS` without what is always refused, and would keep the rest of it from being tested."""
        return {name: option for name, option in choice.items() if self.dense or name not in ("bias", "mask")}

    def supports(self, arguments: Mapping[str, Any]) -> bool:
        is_dense = arguments.get("mask") is not None or arguments.get("bias") is not None
        return arguments["query"].dtype.name in self.dtypes and (self.dense or not is_dense)

    def check(self, arguments: Mapping[str, Any], *, poison: float | None = None) -> None:
        """Compares results with the oracle's.

        Args:
          arguments: of `attention`.
          poison: a number to plant wherever nothing may depend on it: in keys and values outside of what the rows of a
            batch element see, and in query rows and cotangents of rows that see nothing.
        """
        rng = np.random.default_rng(0)
        query, value = arguments["query"], arguments["value"]
        dout = draw("gaussian", (*query.shape[:-1], value.shape[-1]), query.dtype.name, rng)
        dlse = rng.standard_normal(query.shape[:-1], np.float32)
        if poison is not None:
            arguments, dout, dlse = planted(poison, arguments, dout, dlse)
        with jax.enable_x64(query.dtype == np.float64):
            if not self.supports(arguments):
                with pytest.raises(NotImplementedError):
                    run(self.implementation, arguments, dout, dlse)
                return
            got = run(self.implementation, arguments, dout, dlse)
            oracle.check(got, oracle.expect(arguments, dout, dlse, truncates=self.truncates))

    def check_masks(self, choice: Mapping[str, Any], sizes: Sizes | None = None, **options: Any) -> None:
        rng = np.random.default_rng(1)
        sizes = sizes or self.sizes
        self.check(operands(sizes, self.dtype, rng) | masked(sizes, choice, rng), **options)

    @pytest.mark.parametrize(
        "case",
        [
            *(x for x in CASES if x.name in QUICK_CASES),
            *marked(pytest.mark.slow, *(x for x in CASES if x.name in REPEATED)),
            *marked(pytest.mark.more, *(x for x in CASES if x.name not in QUICK_CASES + REPEATED)),
        ],
        ids=lambda case: case.name,
    )
    def test_case(self, case: Case) -> None:
        self.check(case.arguments(case.small_sizes(), self.dtype))

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_case_in_dtype(self, case: Case, dtype: str) -> None:
        self.check(case.arguments(case.small_sizes(), dtype))

    @pytest.mark.parametrize("choice", quick_first(pairwise(MASKS), pytest.mark.more), ids=label)
    def test_masks(self, choice: Mapping[str, Any]) -> None:
        self.check_masks(self.possible(choice))

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", list(exhaustive(EXHAUSTIVE)), ids=label)
    def test_masks_exhaustively(self, choice: dict[str, Any]) -> None:
        self.check_masks(choice | {"query_seq_lengths": choice["key_value_seq_lengths"]})

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_dtype(self, dtype: str) -> None:
        some = self.possible(dict.fromkeys(("key_value_seq_lengths", "bias", "sinks"), "some"))
        rng = np.random.default_rng(2)
        sizes = self.sizes._replace(value_width=16)
        arguments = operands(sizes, dtype, rng) | masked(sizes, some | {"left": 60, "right": 60, "softcap": 3.0}, rng)
        self.check(arguments | {"scale": np.float32(0.4)})

    @pytest.mark.parametrize("zero", [*Sizes._fields, "everything"])
    def test_zero_size(self, zero: str) -> None:
        sizes = Sizes(2, 3, 5, 4, 2, 8, 6)
        match zero:
            case "heads" | "kv_heads":
                sizes = sizes._replace(heads=0, kv_heads=0 if zero == "kv_heads" else 2)
            case "everything":
                sizes = Sizes(*[0] * 7)
            case _:
                sizes = sizes._replace(**{zero: 0})
        some = self.possible(dict.fromkeys(("key_value_seq_lengths", "bias", "sinks"), "some"))
        self.check_masks({"is_causal": True, "segments": "sorted"} | some, sizes)

    @pytest.mark.parametrize(
        "sizes",
        [
            Sizes(1, 1, 1, 1, 1, 1, 1),
            Sizes(3, 1, 11, 6, 2, 5, 7),
            Sizes(2, 13, 1, 5, 1, 3, 1),
            Sizes(1, 7, 5, 3, 3, 1, 11),
            Sizes(5, 17, 19, 14, 7, 13, 2),
            Sizes(1, 131, 257, 11, 1, 2, 3),
        ],
        ids=lambda sizes: "x".join(map(str, sizes)),
    )
    def test_odd_size(self, sizes: Sizes) -> None:
        self.check_masks({"is_causal": True, "left": 100, "right": None, "query_offset": "end"}, sizes)

    @pytest.mark.parametrize(
        "lengths",
        [(255, 257), (513, 511), *marked(pytest.mark.more, (256, 256), (511, 512), (1000, 1025), (1, 2049))],
        ids=str,
    )
    def test_block_boundary(self, lengths: tuple[int, int]) -> None:
        sizes = Sizes(1, *lengths, 1, 1, 8, 8)
        self.check_masks({"left": 100, "right": 1, "query_offset": "end"}, sizes)

    def test_unbatched(self) -> None:
        arguments = operands(self.sizes._replace(batch=1), self.dtype, np.random.default_rng(3))
        self.check({name: x[0] for name, x in arguments.items()} | {"local_window_size": 30, "query_offset": "end"})

    def test_segments_in_any_order(self) -> None:
        """Keys in segment order 0, 1, 2, rows in order 2, 0, 1: the rows that see a key block are not contiguous."""
        arguments = operands(self.sizes, self.dtype, np.random.default_rng(4))
        query_ids = np.repeat(np.array([[2, 0, 1], [7, -5, 9]], np.int32), self.sizes.rows // 3, 1)
        key_ids = np.repeat(np.array([[0, 1, 2], [-5, 7, 8]], np.int32), self.sizes.keys // 3, 1)
        self.check(arguments | {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids})

    def test_row_bounds_in_any_order(self) -> None:
        """Bounds that jump back and forth, cross, and leave the keys; among them rows that see nothing."""
        arguments = operands(SIZES, self.dtype, np.random.default_rng(5))
        row = np.arange(SIZES.rows, dtype=np.int32)
        lower = np.stack([280 - row, row * 37 % 310 - 5])
        upper = np.stack([290 - row // 2, row * 53 % 400 - 50])
        self.check(arguments | {"row_bounds": (lower, upper)})

    @pytest.mark.parametrize("spare", [0, 1, 2])
    def test_window_that_hides_almost_nothing(self, spare: int) -> None:
        """One key of the last row and one of the first are hidden, or just not."""
        sizes = Sizes(1, 21, 23, 2, 1, 8, 8)
        self.check_masks({"left": sizes.rows - spare, "right": sizes.keys - spare}, sizes)

    def test_positions_beyond_int32(self) -> None:
        """Offsets, windows, lengths and bounds at the ends of int32: sums of them must not wrap around."""
        low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        arguments = operands(self.sizes, self.dtype, np.random.default_rng(16))
        arguments |= {"query_offset": np.array([high, low], np.int32), "local_window_size": (high - 100, 2**40)}
        arguments |= {"query_seq_lengths": np.array([high, 100], np.int32)}
        arguments |= {"key_value_seq_lengths": np.array([high, low], np.int32)}
        bounds = tuple(np.full((2, self.sizes.rows), x, np.int32) for x in (low, high))
        self.check(arguments | {"row_bounds": bounds})
        self.check(arguments | {"query_offset": np.array([100, low + 50], np.int32)})

    def test_rows_that_see_nothing(self) -> None:
        """Whole batch elements, whole query blocks and single rows, under a soft cap, a bias and sinks."""
        arguments = operands(SIZES, self.dtype, np.random.default_rng(6))
        bias = np.zeros((1, SIZES.heads, SIZES.rows, 1), np.float32)
        bias[0, 1, 7] = bias[0, 2, 200] = -np.inf
        arguments |= {"query_seq_lengths": np.array([140, 270], np.int32), "softcap": 5.0}
        arguments |= {"bias": bias} if self.dense else {}
        arguments |= {"key_value_seq_lengths": np.array([300, 0], np.int32), "sinks": np.ones(SIZES.heads, np.float32)}
        self.check(arguments)
        self.check(arguments, poison=np.nan)
        self.check(arguments | {"sinks": None}, poison=np.nan)

    @pytest.mark.parametrize("poison", [np.nan, *marked(pytest.mark.slow, np.inf)])
    @pytest.mark.parametrize(
        "choice",
        [
            {"is_causal": True, "query_offset": -30},
            {"left": 20, "right": 0, "query_offset": 150},
            {"query_seq_lengths": "some", "key_value_seq_lengths": "some", "row_bounds": "some"},
            {"segments": "shuffled", "key_value_seq_lengths": "some", "left": 20, "right": 20, "sinks": "some"},
            {"key_value_seq_lengths": "some", "mask": "some", "bias": "some", "softcap": 2.0},
        ],
        ids=label,
    )
    def test_unseen_values_do_not_matter(self, choice: Mapping[str, Any], poison: float) -> None:
        self.check_masks(self.possible(choice), poison=poison)

    def sizes_of_data(self) -> Sizes:
        """The length is 64 modulo 128, where a peer's gradients were NaN."""
        length = self.sizes.keys // 128 * 128 + 64
        return Sizes(2, length, length, 2, 1, 64, 64)

    @pytest.mark.parametrize(
        "kind", [pytest.param(x, marks=[pytest.mark.more] if x in ("gaussian", "zeros") else []) for x in KINDS]
    )
    @pytest.mark.parametrize("dtype", ["float32", *marked(pytest.mark.more, "bfloat16")])
    def test_data(self, kind: str, dtype: str) -> None:
        """As trained models make it."""
        sizes = self.sizes_of_data()
        self.check(operands(sizes, dtype, np.random.default_rng(7), kind) | {"is_causal": True})

    @pytest.mark.parametrize("kind", ["outliers", "huge_logits", "near_constant"])
    def test_data_under_a_soft_cap(self, kind: str) -> None:
        sizes = self.sizes_of_data()
        self.check(operands(sizes, self.dtype, np.random.default_rng(8), kind) | {"softcap": 20.0})

    @pytest.mark.parametrize("softcap", [1e-37, 1e30, 1e37])
    def test_soft_cap_next_to_the_ends_of_float32(self, softcap: float) -> None:
        """The least caps everything away, the others nothing."""
        sizes = Sizes(2, 70, 90, 2, 1, 64, 64)
        self.check(operands(sizes, self.dtype, np.random.default_rng(17)) | {"softcap": softcap, "is_causal": True})

    @pytest.mark.more
    def test_head_width_256(self) -> None:
        """On data with outliers, where a peer's query gradients were wrong for every batch element but the first."""
        sizes = Sizes(2, 100, 100, 2, 2, 256, 256)
        self.check(operands(sizes, self.dtype, np.random.default_rng(9), "outliers"))

    @pytest.mark.parametrize("scale", [0, -0.7, np.float32(0), np.float32(-0.7), np.ones(1, np.float16)], ids=repr)
    def test_scale(self, scale: Any) -> None:
        """Python numbers are static, arrays are traced and differentiated."""
        sizes = self.sizes._replace(batch=1)
        self.check(operands(sizes, self.dtype, np.random.default_rng(10)) | {"is_causal": True, "scale": scale})

    @pytest.mark.parametrize(
        "shape",
        [
            *((), (4, 270, 1), (2, 1, 1, 300), (2, 4, 270, 300)),
            *marked(pytest.mark.slow, (300,), (2, 1, 1, 1), (1, 1, 270, 300), (2, 4, 1, 300), (2, 4, 270, 1)),
        ],
        ids=str,
    )
    def test_bias_shape(self, shape: tuple[int, ...]) -> None:
        rng = np.random.default_rng(11)
        bias = np.asarray(rng.standard_normal(shape), np.float32)
        lengths = np.array([300, 200], np.int32)
        self.check(operands(SIZES, self.dtype, rng) | {"bias": bias, "key_value_seq_lengths": lengths})

    @pytest.mark.parametrize(
        "shape", [(2, 1, 1, 300), (1, 4, 270, 300), *marked(pytest.mark.slow, (), (300,), (270, 1))], ids=str
    )
    def test_mask_shape(self, shape: tuple[int, ...]) -> None:
        rng = np.random.default_rng(12)
        self.check(operands(SIZES, self.dtype, rng) | {"mask": rng.random(shape) < 0.5, "is_causal": True})

    @pytest.mark.parametrize(
        "constant", [-1e4, -1e9, np.finfo(np.float32).min, *marked(pytest.mark.slow, 100, 1e4, -65504, 1e6)]
    )
    def test_bias_of_one_large_number(self, constant: float) -> None:
        """Additive padding masks hide whole rows so, and an lse of this size has lost the logarithm of the row's sum.

        The second query block is partial, and the bias has no rows of its own.
        """
        arguments = operands(SIZES._replace(rows=520), self.dtype, np.random.default_rng(15))
        bias = np.full((2, 1, 1, SIZES.keys), constant, np.float32)
        bias[0, 0, 0, 7:] = 0
        self.check(arguments | {"bias": bias})

    def test_bias_in_bfloat16(self) -> None:
        rng = np.random.default_rng(13)
        bias = draw("gaussian", (2, 1, 270, 300), "bfloat16", rng)
        self.check(operands(SIZES, "bfloat16", rng) | {"bias": bias})

    @pytest.mark.parametrize("largest", [40, 100])
    def test_sinks(self, largest: float) -> None:
        """Sinks of -inf take no part, huge ones take nearly everything; rows that see nothing stay zero."""
        sinks = np.array([-np.inf, -3, 0.5, largest], np.float32)
        for dtype in dict.fromkeys((self.dtype, "bfloat16")):
            arguments = operands(self.sizes, dtype, np.random.default_rng(14))
            self.check(arguments | {"sinks": sinks, "is_causal": True, "query_offset": -20})

    @pytest.mark.parametrize("sink", [9, 14])
    def test_cotangents_that_sinks_make_small(self, sink: float) -> None:
        """In float16: sums over rows of what it does not hold one by one."""
        sizes, rng = Sizes(2, 300, 7, 2, 1, 8, 8), np.random.default_rng(11)
        arguments = operands(sizes, "float16", rng) | {"sinks": np.array([sink, 0], np.float32)}
        dout = np.abs(draw("gaussian", (2, 300, 2, 8), "float32", rng)) * np.reshape([1e-3, 0], (1, 1, 2, 1))
        dlse = np.zeros(dout.shape[:3], np.float32)
        for scale in (1, 1e-3):
            scaled = (dout * scale).astype(np.float16)
            got = run(self.implementation, arguments, scaled, dlse)
            oracle.check(got, oracle.expect(arguments, scaled, dlse, truncates=self.truncates))

    @given(st.data())
    def test_random(self, data: st.DataObject) -> None:
        """Random sizes, masks, dtypes and data; few of each size, so that compilations are shared."""
        pick = lambda options: data.draw(st.sampled_from(options))  # noqa: E731
        kv_heads = pick((1, 2, 3))
        sizes = Sizes(
            batch=pick((1, 2)),
            rows=pick((1, 5, 64, 300)),
            keys=pick((1, 3, 100, 520)),
            heads=kv_heads * pick((1, 2, 5)),
            kv_heads=kv_heads,
            width=pick((1, 8, 40)),
            value_width=pick((1, 8, 24)),
        )
        features = data.draw(st.sets(st.sampled_from(list(MASKS)), max_size=5))
        choice = {"left": None, "right": None} | {name: pick(MASKS[name][1:]) for name in MASKS if name in features}
        rng = np.random.default_rng(data.draw(st.integers(0, 9)))
        dtype = pick([dtype for dtype in self.dtypes if dtype != "float64"])
        arguments = operands(sizes, dtype, rng, pick(list(KINDS))) | masked(sizes, choice, rng)
        self.check(arguments, poison=pick((None, np.nan)))


def planted(
    poison: float, arguments: Mapping[str, Any], dout: np.ndarray, dlse: np.ndarray
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """The arguments and cotangents of a batched call with a poison wherever nothing may depend on it."""
    seen = oracle.visible(arguments)
    keys_seen = seen.any((1, 2))
    hull = np.maximum.accumulate(keys_seen, 1) & np.maximum.accumulate(keys_seen[:, ::-1], 1)[:, ::-1]
    rows_seen = seen.any(3).swapaxes(1, 2)

    def plant(keep: np.ndarray, x: np.ndarray) -> np.ndarray:
        return np.where(keep.reshape(*keep.shape, *[1] * (x.ndim - keep.ndim)), x, np.asarray(poison, x.dtype))

    keeps = {"query": rows_seen, "key": hull, "value": hull}
    operands = {name: plant(keep, arguments[name]) for name, keep in keeps.items()}
    return {**arguments, **operands}, plant(rows_seen, dout), plant(rows_seen, dlse)
