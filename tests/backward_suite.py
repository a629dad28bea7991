"""The tests of a backward on tensor cores, as a class; its subclasses say of which, and where it runs.

Each compares gradients, pulled back through out and lse, with the oracle's; and where the call is emulated, it asserts
that its launches are the forward, the kernel before the backward, the backward and the kernel after it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import KINDS, Sizes, draw, operands
from forward_suite import (
    DTYPES,
    LENGTHS,
    NARROWER,
    NONE,
    POISONED,
    RATIOS,
    SIZES,
    SPARSE,
    WINDOW,
    Build,
    ForwardSuite,
    Widths,
    drawn,
    parametrize_builds,
)
from hypothesis import given
from hypothesis import strategies as st
from suite import AttentionSuite, label, marked, masked, pairwise, planted, quick_first, run
from test_emulated_attention import ALSO_MAPPED, MAPPED

from jax_fa4 import CHECKPOINT_NAMES, attention

PLAIN = ["delta", "query", "key"]
SEVERAL_BLOCKS = Sizes(batch=1, rows=260, keys=400, heads=2, kv_heads=1, width=64, value_width=64)


class Pulled(NamedTuple):
    """A call's out, lse and gradients, by name; and its launches, if it was emulated."""

    results: Mapping[str, np.ndarray]
    launches: Sequence[Any]


class BackwardSuite:
    """All tests of one backward.

    Attributes:
      forward: the suite of the forward that it goes with: where it runs, and on which GPUs.
      module: the file of its kernels.
      compiled_widths: that there are kernels for.
      quick_builds: that the quick suite has.
    """

    forward: ForwardSuite
    module: str
    compiled_widths: Sequence[Widths]
    quick_builds: Sequence[Build]

    @property
    def implementation(self) -> str:
        return self.forward.implementation

    @property
    def targets(self) -> Sequence[str]:
        return tuple(self.forward.targets)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        parametrize_builds(metafunc, self)

    def entry(self, arguments: Mapping[str, Any]) -> str | None:
        """The kernel's name; None where the plain ones serve."""
        widths = [arguments[name].shape[-1] for name in ("query", "value")]
        fitting = [x for x in self.compiled_widths if widths[0] <= x[0] and widths[1] <= x[1]]
        name = self.forward.entry(arguments)
        if name is None or not fitting:
            return None
        return (
            f"backward_{arguments['query'].dtype.name}_{'_'.join(map(str, dict.fromkeys(fitting[0])))}_"
            + (name.rpartition("_")[2])
        )

    def assert_launched(self, arguments: Mapping[str, Any], launches: Sequence[Any]) -> None:
        """The launches are those of the call and its gradients."""
        name, forward = self.entry(arguments), self.forward.entry(arguments)
        dtype = arguments["query"].dtype.name
        first, *others = launches
        assert first.module == (self.forward.module if forward else "sm80_forward")
        assert first.kernel.startswith("forward_" if forward is None else forward.rpartition("_")[0])
        modules = [launch.module for launch in others]
        if name is None:
            assert modules == ["sm80_backward"] * 3
            assert [launch.kernel.split("_")[1] for launch in others] == PLAIN
            return
        assert modules == ["backward_rows", self.module, "backward_rows"]
        before, backward, after = (launch.kernel for launch in others)
        assert (before, after) == (f"before_{dtype}", f"after_{dtype}")
        # Arrays may let every row see every key, which only the kernel finds out.
        widths, _, kind = name.rpartition("_")
        assert backward in (f"{widths}_{kind}", f"{widths}_bounds")
        assert others[0].target == others[2].target == next(iter(self.forward.targets.values()))

    def pull(self, arguments: Mapping[str, Any], dout: np.ndarray, dlse: np.ndarray, **options: Any) -> Pulled:
        """Runs forward and backward; emulated, under these options."""
        with self.forward.launches(**options) as launches:
            results = jax.block_until_ready(run(self.implementation, arguments, dout, dlse))
        if self.implementation == "emulated":
            self.assert_launched(arguments, launches)
        return Pulled({name: np.asarray(x) for name, x in results.items()}, launches)

    def cotangents(self, arguments: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        query, value = arguments["query"], arguments["value"]
        dout = draw("gaussian", (*query.shape[:-1], value.shape[-1]), query.dtype.name, rng)
        return dout, rng.standard_normal(query.shape[:-1], np.float32)

    def check(self, arguments: Mapping[str, Any], *, poison: float | None = None, **options: Any) -> Pulled:
        """Compares out, lse and gradients with the oracle's; `poison` is planted as the suite does."""
        dout, dlse = self.cotangents(arguments)
        if poison is not None:
            arguments, dout, dlse = planted(poison, arguments, dout, dlse)
        pulled = self.pull(arguments, dout, dlse, **options)
        oracle.check(pulled.results, oracle.expect(arguments, dout, dlse, truncates=self.forward.truncates))
        return pulled

    def masked(
        self, choice: Mapping[str, Any], sizes: Sizes = SIZES, dtype: str = "bfloat16", kind: str = "gaussian"
    ) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        return operands(sizes, dtype, rng, kind) | masked(sizes, NONE | choice, rng)

    def check_masks(
        self, choice: Mapping[str, Any], sizes: Sizes = SIZES, dtype: str = "bfloat16", **options: Any
    ) -> Pulled:
        return self.check(self.masked(choice, sizes, dtype), **options)

    # ---- Every configuration

    @pytest.mark.parametrize(
        ("dtype", "widths", "choice"),
        [
            ("bfloat16", (128, 128), {}),
            ("float16", (64, 64), {"is_causal": True, "query_offset": "end"}),
            ("bfloat16", (192, 128), {"key_value_seq_lengths": "some", "softcap": 2.0}),
        ],
        ids=str,
    )
    def test_huge_logits(self, dtype: str, widths: Widths, choice: Mapping[str, Any]) -> None:
        """In the hundreds, of which lse keeps few digits."""
        self.check(self.masked(choice, Sizes(1, 150, 140, 2, 1, *widths), dtype, "huge_logits"))

    def test_every_kernel(self, build: Build) -> None:
        widths, dtype, arch = build
        sizes = Sizes(1, 150, 150, 2, 1, *widths)
        for choice in ({}, {"is_causal": True}, {"is_causal": True, "softcap": 3.0}):
            arguments = self.masked(choice, sizes, dtype)
            pulled = self.check(arguments, arch=arch)
            if pulled.launches:
                assert pulled.launches[2].kernel == self.entry(arguments)

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_sinks(self, deterministic: bool) -> None:
        """Of heads that no sink concerns, and of such as a sink leaves little or nothing; with gradients of lse."""
        arguments = self.masked({"is_causal": True, "query_offset": -9}, SIZES._replace(heads=5, kv_heads=1))
        sinks = np.array([-np.inf, -2, 2, 30, 100], np.float32)
        self.check(arguments | {"sinks": sinks, "deterministic": deterministic})

    @pytest.mark.parametrize(
        "widths",
        [x if x in ((8, 8), (40, 24), (136, 8)) else pytest.param(x, marks=pytest.mark.slow) for x in NARROWER],
    )
    def test_narrower_widths(self, widths: Widths) -> None:
        for choice in ({}, {"is_causal": True, "query_offset": "end"}):
            self.check_masks(choice, Sizes(1, 130, 200, 1, 1, *widths))

    @pytest.mark.parametrize("choice", quick_first(pairwise(SPARSE), pytest.mark.slow), ids=label)
    def test_masks(self, choice: Mapping[str, Any]) -> None:
        self.check_masks(choice)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", list(pairwise(SPARSE)), ids=label)
    def test_masks_at_every_width(self, choice: Mapping[str, Any], compiled: Widths) -> None:
        sizes = SIZES._replace(width=compiled[0], value_width=compiled[1])
        self.check_masks(choice, sizes, "float16", seed=1, sm_count=3)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", list(pairwise(SPARSE)), ids=label)
    def test_masks_deterministically(self, choice: Mapping[str, Any]) -> None:
        arguments = self.masked(choice, SEVERAL_BLOCKS)
        self.check(arguments | {"deterministic": True}, seed=1, sm_count=2)

    @pytest.mark.parametrize("poison", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("choice", POISONED, ids=label)
    def test_unseen_values_do_not_matter(self, choice: Mapping[str, Any], poison: float) -> None:
        self.check_masks(choice, poison=poison)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", POISONED, ids=label)
    def test_unseen_values_do_not_matter_at_any_width(self, choice: Mapping[str, Any], compiled: Widths) -> None:
        sizes = SIZES._replace(rows=140, width=compiled[0], value_width=compiled[1])
        for seed, poison in enumerate((np.nan, np.inf, -np.inf)):
            self.check_masks(choice, sizes, "float16", poison=poison, seed=seed)

    @pytest.mark.parametrize(
        "span",
        [
            (0, 1),
            (127, 129),
            (129, 255),
            (383, 384),
            *marked(pytest.mark.slow, (1, 2), (128, 256), (5, 300), (250, 383)),
        ],
        ids=str,
    )
    def test_hull_that_ends_anywhere_in_a_block(self, span: tuple[int, int]) -> None:
        """Two rows see [first, end) of three blocks: all other keys, values and rows are NaN."""
        first, end = span
        arguments = operands(Sizes(1, 200, 384, 1, 1, 64, 64), "bfloat16", np.random.default_rng(first))
        lower, upper = np.zeros((2, 1, 200), np.int32)
        lower[0, [60, 150]], upper[0, [60, 150]] = first, end
        self.check(arguments | {"row_bounds": (lower, upper)}, poison=np.nan)

    def test_row_bounds_in_any_order(self) -> None:
        """The blocks of rows that see a block of keys are not neighbours; and some rows see nothing."""
        sizes = SIZES._replace(rows=400)
        row = np.arange(sizes.rows, dtype=np.int32)
        lower = np.stack([np.where(row // 64 % 2, 200, 0), row * 37 % 310 - 5])
        upper = np.stack([np.where(row // 64 % 2, 300, 100), row * 53 % 400 - 50])
        arguments = operands(sizes, "bfloat16", np.random.default_rng(5))
        self.check(arguments | {"row_bounds": (lower, upper)}, poison=np.nan)

    def test_rows_that_see_nothing(self) -> None:
        """Whole batch elements, whole blocks of rows and single rows."""
        arguments = operands(SIZES._replace(rows=300), "bfloat16", np.random.default_rng(6))
        arguments |= {"query_seq_lengths": np.array([140, 300], np.int32), "softcap": 5.0}
        arguments |= {"key_value_seq_lengths": np.array([300, 0], np.int32)}
        self.check(arguments, poison=np.nan)

    @pytest.mark.parametrize("choice", [{}, WINDOW], ids=label)
    @pytest.mark.parametrize(
        ("rows", "keys"),
        [
            x if i % 3 == 0 else pytest.param(*x, marks=pytest.mark.slow)
            for i, x in enumerate(zip(LENGTHS, LENGTHS[4:] + LENGTHS[:4], strict=True))
        ],
    )
    def test_lengths(self, rows: int, keys: int, choice: Mapping[str, Any]) -> None:
        self.check_masks(choice, Sizes(1, rows, keys, 1, 1, 64, 64))

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", [{}, WINDOW, {"is_causal": True, "softcap": 5.0}], ids=label)
    @pytest.mark.parametrize("rows", LENGTHS)
    def test_lengths_exhaustively(self, rows: int, choice: Mapping[str, Any]) -> None:
        for i, keys in enumerate(LENGTHS):
            widths = self.compiled_widths[i % len(self.compiled_widths)]
            self.check_masks(choice, Sizes(1, rows, keys, 2, 1, *widths), DTYPES[i % 2], seed=i)

    @pytest.mark.parametrize(
        "ratio", [x if x in (1, 3, 8) else pytest.param(x, marks=pytest.mark.slow) for x in RATIOS]
    )
    def test_heads_that_share_a_key_head(self, ratio: int) -> None:
        kv_heads = 1 if ratio > 12 else 2
        sizes = Sizes(1, max(3, 150 // ratio), 140, ratio * kv_heads, kv_heads, 64, 64)
        self.check_masks({"is_causal": True, "query_offset": "end"}, sizes)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", [{}, WINDOW, {"row_bounds": "some", "softcap": 2.0}], ids=label)
    @pytest.mark.parametrize("ratio", [1, 2, 5, 12])
    def test_heads_that_share_a_key_head_at_any_width(
        self, ratio: int, compiled: Widths, choice: Mapping[str, Any]
    ) -> None:
        for seed, kv_heads in enumerate((1, 3)):
            sizes = Sizes(2, 150, 140, ratio * kv_heads, kv_heads, *compiled)
            self.check_masks(choice, sizes, DTYPES[seed], seed=seed, sm_count=2)

    @pytest.mark.parametrize("kind", KINDS)
    def test_data(self, kind: str) -> None:
        """As trained models make it."""
        sizes = Sizes(1, 192, 192, 2, 1, 128, 128)
        self.check(operands(sizes, "bfloat16", np.random.default_rng(7), kind) | {"is_causal": True})

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", [{}, {"is_causal": True}, {"softcap": 20.0}], ids=label)
    @pytest.mark.parametrize("kind", KINDS)
    def test_data_in_every_kernel(self, kind: str, choice: Mapping[str, Any]) -> None:
        for seed, (dtype, widths) in enumerate(itertools.product(DTYPES, self.compiled_widths)):
            arguments = operands(Sizes(2, 320, 320, 2, 1, *widths), dtype, np.random.default_rng(seed), kind)
            self.check(arguments | choice, seed=seed, arch=self.targets[seed % len(self.targets)])

    @pytest.mark.parametrize("scale", [0.0, -0.3, *marked(pytest.mark.slow, -0.0, 1e-40, -1e-40, 1e-30)])
    @pytest.mark.parametrize("choice", [{}, WINDOW, {"is_causal": True, "softcap": 1.0}], ids=label)
    def test_scale(self, choice: Mapping[str, Any], scale: float) -> None:
        """Where it is 0 or next to it, every visible key weighs the same."""
        arguments = self.masked(choice, Sizes(1, 150, 270, 2, 1, 64, 64))
        self.check(arguments | {"scale": np.float32(scale)})

    @given(st.data())
    def test_random(self, data: st.DataObject) -> None:
        """Random sizes, masks, dtypes, data and schedules; few of each size, so that compilations are shared."""
        arguments, options = drawn(data, self.compiled_widths, self.targets)
        self.check(arguments | {"deterministic": data.draw(st.booleans())}, **options)

    # ---- Transformations

    @pytest.mark.parametrize(
        "names", [*MAPPED, *(pytest.param(names, marks=pytest.mark.slow) for names in ALSO_MAPPED)], ids="-".join
    )
    def test_vmap_of_operands_that_are_not_all_mapped(self, names: tuple[str, ...]) -> None:
        """The kernels index operands whose leading axis is shorter than the batch."""
        rng = np.random.default_rng(0)
        arrays = operands(SIZES._replace(rows=70, keys=90), "bfloat16", rng) | {"scale": np.float32(0.3)}
        arrays |= {"lower": rng.integers(0, 40, (2, 70), np.int32), "upper": rng.integers(30, 91, (2, 70), np.int32)}
        stacks = {name: np.stack([arrays[name], np.flip(arrays[name]), arrays[name] // 2]) for name in names}

        def gradients(arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
            bounds = arrays["lower"], arrays["upper"]
            floats = {name: x for name, x in arrays.items() if name not in ("lower", "upper")}
            call = lambda floats: attention(  # noqa: E731
                **floats, row_bounds=bounds, implementation=self.implementation, return_residual=True
            )
            (out, lse), pull = jax.vjp(call, floats)
            return {"out": out} | pull((jnp.ones_like(out), jnp.where(jnp.isfinite(lse), 1.0, 0.0)))[0]

        with self.forward.launches() as launches:
            axes = ({name: 0 if name in names else None for name in arrays},)
            got = jax.block_until_ready(jax.jit(jax.vmap(gradients, axes))(arrays | stacks))
        if launches:
            assert [launch.module for launch in launches[1:]] == ["backward_rows", self.module, "backward_rows"]
        for i in range(3):
            with self.forward.launches():
                want = jax.block_until_ready(jax.jit(gradients)(arrays | {name: x[i] for name, x in stacks.items()}))
            for name, x in want.items():
                # The scale's gradient is a sum that XLA makes, in an order that depends on its length.
                compare = (
                    functools.partial(np.testing.assert_allclose, rtol=1e-5)
                    if name == "scale"
                    else np.testing.assert_array_equal
                )
                compare(np.asarray(got[name][i], np.float32), np.asarray(x, np.float32), err_msg=name)

    @pytest.mark.parametrize("keeps", [True, False])
    def test_remat(self, keeps: bool) -> None:
        """The forward runs once if what it left is kept, else twice, unless XLA finds both to be the same."""
        names = CHECKPOINT_NAMES if keeps else ()
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        arrays = self.masked({}, SIZES._replace(rows=70, keys=90))

        @functools.partial(jax.checkpoint, policy=policy)
        def layer(arrays: dict[str, Any]) -> jax.Array:
            out = attention(**arrays, is_causal=True, implementation=self.implementation)
            return out.astype(np.float32)

        with self.forward.launches() as launches:
            gradient = jax.grad(lambda arrays: (layer(arrays) ** 2).sum())
            floats = {name: arrays[name] for name in ("query", "key", "value")}
            jax.block_until_ready(jax.jit(gradient)(floats))
        if launches:
            *forwards, before, backward, after = [launch.module for launch in launches]
            assert [before, backward, after] == ["backward_rows", self.module, "backward_rows"]
            assert forwards == [self.forward.module] * len(forwards)
            assert len(forwards) in ((1,) if keeps else (1, 2))

    @pytest.mark.parametrize("used", ["out", "lse"])
    def test_only_one_result_is_used(self, used: str) -> None:
        """The other's cotangents are zero, or there are none."""
        arguments = self.masked({"is_causal": True, "query_offset": -20})
        dout, dlse = self.cotangents(arguments)
        if used == "out":
            dlse = np.zeros_like(dlse)
        else:
            dout = np.zeros_like(dout)
        floats = {name: arguments[name] for name in ("query", "key", "value")}
        others = {name: x for name, x in arguments.items() if name not in floats}

        @jax.jit
        def gradients(floats: dict[str, Any]) -> Any:
            def call(floats: dict[str, Any]) -> jax.Array:
                results = attention(**floats, **others, implementation=self.implementation, return_residual=True)
                return results[0] if used == "out" else results[1]

            return jax.vjp(call, floats)[1](dout if used == "out" else dlse)[0]

        with self.forward.launches() as launches:
            got = jax.block_until_ready(gradients(floats))
        if launches:
            self.assert_launched(arguments, launches)
        expected = oracle.expect(arguments, dout, dlse, truncates=self.forward.truncates)
        oracle.check({name: np.asarray(x) for name, x in got.items()}, {name: expected[name] for name in floats})

    # ---- The order of sums

    def distinct(self, arguments: Mapping[str, Any], seeds: Sequence[int], **options: Any) -> dict[str, int]:
        """How many results of each name the scheduler's seeds give, that differ in a bit."""
        dout, dlse = self.cotangents(arguments)
        found: dict[str, set[bytes]] = {}
        for seed in seeds:
            pulled = self.pull(arguments, dout, dlse, seed=seed, sm_count=2 + seed % 4, **options)
            for name, x in pulled.results.items():
                found.setdefault(name, set()).add(x.tobytes())
        return {name: len(bits) for name, bits in found.items()}

    def check_order(
        self, choice: Mapping[str, Any], seeds: Sequence[int], sizes: Sizes = SEVERAL_BLOCKS, dtype: str = "bfloat16"
    ) -> None:
        arguments = self.masked(choice, sizes, dtype) | {"scale": np.float32(0.1)}
        fast = self.distinct(arguments, seeds)
        assert set(self.distinct(arguments | {"deterministic": True}, seeds).values()) == {1}
        # What a block of keys keeps is the same in any mode. Of queries' gradients rounding may hide the order.
        assert fast.pop("scale") > 1
        assert fast.pop("query") >= 1
        assert set(fast.values()) == {1}

    @pytest.mark.parametrize("choice", [{}, {"is_causal": True, "query_offset": "end"}], ids=label)
    def test_deterministic(self, choice: Mapping[str, Any]) -> None:
        if self.implementation != "emulated":
            pytest.skip("only the emulator's scheduler has seeds")
        self.check_order(choice, range(5))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "choice",
        [{}, {"left": 300, "right": 3, "query_offset": "end"}, {"row_bounds": "some", "softcap": 4.0}],
        ids=label,
    )
    def test_deterministic_over_many_seeds(self, choice: Mapping[str, Any], compiled: Widths) -> None:
        if self.implementation != "emulated":
            pytest.skip("only the emulator's scheduler has seeds")
        sizes = SEVERAL_BLOCKS._replace(width=compiled[0], value_width=compiled[1])
        self.check_order(choice, range(20), sizes, "float16")

    @pytest.mark.parametrize("choice", [{}, {"is_causal": True}, {"left": 20, "right": 20}], ids=label)
    def test_deterministic_gradients_are_right(self, choice: Mapping[str, Any]) -> None:
        """Also where a multiprocessor has its CTAs one after the other, and where all are there at a time."""
        arguments = self.masked(choice, SEVERAL_BLOCKS) | {"deterministic": True}
        for sm_count in (1, 148):
            self.check(arguments, sm_count=sm_count)

    # ---- What is visited

    def test_blocks_that_see_nothing_of_each_other_are_not_visited(self) -> None:
        sizes = Sizes(1, 128, 128, 4, 1, 64, 64)
        choices = (({"is_causal": True}, 128), ({"is_causal": True}, 1000), ({}, 1000))
        near, far, full = (self.check_masks(choice, sizes._replace(keys=keys)) for choice, keys in choices)
        sizes = Sizes(1, 1000, 1000, 1, 1, 64, 64)
        narrow, wide = (self.check_masks(choice, sizes) for choice in ({"left": 20, "right": 20}, {}))
        if self.implementation != "emulated":
            pytest.skip("the results are right; what was computed, only the emulator tells")
        counts = [pulled.launches[2].instructions for pulled in (near, far, full, narrow, wide)]
        # Blocks of keys that no row sees only store zeros.
        assert counts[1] - counts[0] < (counts[2] - counts[0]) / 3
        assert counts[3] < 0.6 * counts[4]  # where there are no masks, which cost more

    def test_whole_blocks_have_no_masks(self) -> None:
        """Of a long causal call most blocks are seen whole, and cost no more than without a mask."""
        if self.implementation != "emulated":
            pytest.skip("only the emulator counts instructions")
        sizes = Sizes(1, 1024, 1024, 1, 1, 64, 64)
        full = self.check_masks({}, sizes).launches[2].instructions
        causal = self.check_masks({"is_causal": True}, sizes).launches[2].instructions
        assert causal < 0.75 * full  # of 64 pairs of blocks it visits 36

    # ---- NaN and infinity where they are visible

    @pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
    @pytest.mark.parametrize("choice", [{}, {"is_causal": True, "query_offset": "end"}, {"softcap": 3.0}], ids=label)
    def test_what_is_visible_shows(self, choice: Mapping[str, Any], name: str) -> None:
        """A NaN makes NaN of the gradients that depend on it; those of another key head keep their bits."""
        arguments = self.masked(choice, Sizes(1, 150, 270, 4, 2, 64, 64)) | {"deterministic": True}
        dout, dlse = self.cotangents(arguments)
        clean = self.pull(arguments, dout, dlse).results
        visible = oracle.visible(arguments)[0, 0]
        row, key = 100, 50
        assert visible[row, key]
        changed, dout = {x: y.copy() if hasattr(y, "copy") else y for x, y in arguments.items()}, dout.copy()
        if name == "dout":
            dout[0, row, 3, 7] = np.nan
        else:
            changed[name][0, row if name == "query" else key, 3 if name == "query" else 1, 7] = np.nan
        got = self.pull(changed, dout, dlse).results
        rows = np.zeros(150, bool)
        rows[row] = True
        rows = rows if name in ("query", "dout") else visible[:, key]
        keys = visible[rows].any(0)
        assert np.isnan(got["query"][0, rows, 3].astype(np.float32)).any(-1).all()
        assert np.isnan(got["key"][0, keys, 1].astype(np.float32)).any(-1).all()
        if name != "value":  # whose gradient does not depend on it
            assert np.isnan(got["value"][0, keys, 1].astype(np.float32)).any(-1).all()
        for x, head in (("query", slice(2)), ("key", 0), ("value", 0)):
            np.testing.assert_array_equal(got[x][:, :, head], clean[x][:, :, head])


class GradientSuite(AttentionSuite):
    """The suite of all implementations, by a forward and a backward on tensor cores.

    Attributes:
      backward: the suite of the backward.
      arch: of the GPU, where it is emulated.
    """

    dtypes = ("float16", "bfloat16", "float32")
    dense = False
    backward: BackwardSuite
    arch: str

    @property
    def implementation(self) -> str:  # type: ignore[override]
        return self.backward.implementation

    @property
    def truncates(self) -> bool:  # type: ignore[override]
        return self.backward.forward.truncates

    def check(self, arguments: Mapping[str, Any], *, poison: float | None = None) -> None:
        with self.backward.forward.launches(arch=self.arch) as launches:
            super().check(arguments, poison=poison)
        sizes = [arguments[name].size for name in ("query", "key", "value")]
        if self.implementation == "emulated" and self.supports(arguments) and all(sizes):
            self.backward.assert_launched(arguments, launches)
