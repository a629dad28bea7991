"""The tests of a forward on tensor cores, as a class; its subclasses say of which, and where it runs.

What the plain kernels pass too is here because another kernel serves it: each emulated call asserts which one ran.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import KINDS, Sizes, operands
from hypothesis import given
from hypothesis import strategies as st
from suite import MASKS, label, masked, pairwise, planted, quick_first
from test_emulated_attention import MAPPED

from jax_fa4 import attention, emulated
from jax_fa4.emulated.implementation import Arch

DTYPES = ("bfloat16", "float16")
NARROWER = ((8, 8), (72, 72), (40, 24), (16, 104), (136, 8), (80, 80), (192, 64))  # padded to a compiled width
LENGTHS = (1, 7, 127, 128, 129, 255, 256, 257, 300)
RATIOS = (1, 2, 3, 4, 6, 8, 12, 32, 128, 256)
BLOCK = 128  # keys of a block, in the kernels of width 64

# Several tasks for each batch element, of several key blocks, the last of each partial.
SIZES = Sizes(batch=2, rows=150, keys=300, heads=2, kv_heads=1, width=64, value_width=64)
SPARSE = {name: options for name, options in MASKS.items() if name not in ("mask", "bias")}
NONE = {"left": None, "right": None}
WINDOW = {"left": 100, "right": 3, "query_offset": "end"}
POISONED = (
    {"is_causal": True, "query_offset": -30},
    {"left": 20, "right": 0, "query_offset": 150},
    {"query_seq_lengths": "some", "key_value_seq_lengths": "some", "row_bounds": "some"},
    {"segments": "shuffled", "key_value_seq_lengths": "some", "left": 20, "right": 20, "sinks": "some"},
    {"key_value_seq_lengths": "some", "softcap": 2.0},
)

Widths = tuple[int, int]
Build = tuple[Widths, str, Arch]
"""Compiled widths, a dtype, and a GPU."""


def parametrize_builds(metafunc: pytest.Metafunc, suite: Any) -> None:
    """Gives tests of a forward or a backward their arguments `compiled`, of its widths, and `build`."""
    if "compiled" in metafunc.fixturenames:
        metafunc.parametrize("compiled", suite.compiled_widths, ids=str)
    if "build" in metafunc.fixturenames:
        builds = itertools.product(suite.compiled_widths, DTYPES, suite.targets)
        slow = {build: [] if build in suite.quick_builds else [pytest.mark.slow] for build in builds}
        metafunc.parametrize(
            "build", [pytest.param(x, marks=marks, id="-".join(map(str, x))) for x, marks in slow.items()]
        )


class Launched(NamedTuple):
    """A call's out and lse, and the launch that made them; None where it was not emulated."""

    out: np.ndarray
    lse: np.ndarray
    launch: Any


def drawn(
    data: st.DataObject, compiled_widths: Sequence[Widths], targets: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random call's arguments, and the options of a suite's `check`: what is planted, and how it is scheduled."""
    pick = lambda options: data.draw(st.sampled_from(options))  # noqa: E731
    kv_heads = pick((1, 2, 3))
    widths = pick((*compiled_widths, *NARROWER))
    sizes = Sizes(
        pick((1, 2)), pick((1, 5, 64, 300)), pick((1, 3, 100, 520)), kv_heads * pick((1, 2, 5)), kv_heads, *widths
    )
    features = data.draw(st.sets(st.sampled_from(list(SPARSE)), max_size=5))
    choice = NONE | {name: pick(SPARSE[name][1:]) for name in SPARSE if name in features}
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    arguments = operands(sizes, pick(DTYPES), rng, pick(list(KINDS))) | masked(sizes, choice, rng)
    options = {"seed": pick((0, 1, 2)), "sm_count": pick((148, 2)), "arch": pick(targets)}
    return arguments, options | {"poison": pick((None, np.nan))}


class ForwardSuite:
    """All tests of one forward.

    Attributes:
      implementation: the name of the one that runs it.
      module: the file of its kernels.
      compiled_widths: that there are kernels for.
      targets: of the GPUs that it is for, the build that each one runs. The first is that of most tests.
      quick_builds: that the quick suite has.
      load_warp: the warp of a CTA that loads, in the kernels of width 64.
      truncates: see `oracle.expect`.
    """

    implementation = "emulated"
    module: str
    compiled_widths: Sequence[Widths]
    targets: Mapping[Arch, str]
    quick_builds: Sequence[Build]
    load_warp: int
    truncates = False

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        parametrize_builds(metafunc, self)

    def entry(self, arguments: Mapping[str, Any]) -> str | None:
        """The kernel's name; None where another one serves."""
        dtype, width, value_width = (
            arguments["query"].dtype.name,
            arguments["query"].shape[-1],
            arguments["value"].shape[-1],
        )
        fitting = [x for x in self.compiled_widths if width <= x[0] and value_width <= x[1]]
        if dtype not in DTYPES or width % 8 or value_width % 8 or not fitting:
            return None
        name = f"forward_{dtype}_{'_'.join(map(str, dict.fromkeys(fitting[0])))}"
        if arguments.get("softcap") is not None:
            return f"{name}_softcap"
        return f"{name}_{'full' if oracle.visible(arguments).all() else 'bounds'}"

    @contextmanager
    def launches(self, **options: Any) -> Iterator[list[Any]]:
        """A list that holds the block's launches at its end, if it was emulated: under these options."""
        launches: list[Any] = []
        if self.implementation != "emulated":
            yield launches
            return
        with emulated.options(**{"arch": next(iter(self.targets))} | options) as run:
            yield launches
            launches += run.launches
        assert not any(launch.reports for launch in launches)

    def forward(self, arguments: Mapping[str, Any], **options: Any) -> Launched:
        """Runs the forward alone; emulated, under these options."""
        arrays = {name: x for name, x in arguments.items() if hasattr(x, "dtype") or name == "row_bounds"}
        static = {name: x for name, x in arguments.items() if name not in arrays}
        with self.launches(**options) as launches:
            out, lse = jax.block_until_ready(
                _forward((*static.items(), ("implementation", self.implementation)), arrays)
            )
        launch = None
        if self.implementation == "emulated":
            (launch,) = launches
            # Arrays may let every row see every key, which only the kernel finds out.
            name, _, kind = str(self.entry(arguments)).rpartition("_")
            assert launch.module == self.module
            assert launch.kernel in (f"{name}_{kind}", f"{name}_bounds")
        return Launched(np.asarray(out), np.asarray(lse), launch)

    def check(self, arguments: Mapping[str, Any], *, poison: float | None = None, **options: Any) -> Launched:
        """Compares out and lse with the oracle's; `poison` is planted as the suite does."""
        query, value = arguments["query"], arguments["value"]
        dout = np.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
        dlse = np.zeros(query.shape[:-1], np.float32)
        if poison is not None:
            arguments, dout, dlse = planted(poison, arguments, dout, dlse)
        ran = self.forward(arguments, **options)
        expected = oracle.expect(arguments, np.zeros_like(dout), np.zeros_like(dlse), truncates=self.truncates)
        oracle.check({"out": ran.out, "lse": ran.lse}, {name: expected[name] for name in ("out", "lse")})
        return ran

    def check_masks(
        self, choice: Mapping[str, Any], sizes: Sizes = SIZES, dtype: str = "bfloat16", **options: Any
    ) -> Launched:
        rng = np.random.default_rng(1)
        return self.check(operands(sizes, dtype, rng) | masked(sizes, NONE | choice, rng), **options)

    # ---- Every configuration

    def test_every_kernel(self, build: Build) -> None:
        widths, dtype, arch = build
        sizes = Sizes(1, 150, 150, 2, 1, *widths)
        for choice in ({}, {"is_causal": True}, {"is_causal": True, "softcap": 3.0}):
            rng = np.random.default_rng(3)
            arguments = operands(sizes, dtype, rng) | masked(sizes, NONE | choice, rng)
            ran = self.check(arguments, arch=arch)
            if ran.launch is not None:
                assert ran.launch.kernel == self.entry(arguments)
                assert ran.launch.target == self.targets[arch]

    @pytest.mark.parametrize("widths", NARROWER, ids=str)
    def test_narrower_widths(self, widths: Widths) -> None:
        for choice in ({}, {"is_causal": True, "query_offset": "end"}):
            self.check_masks(choice, Sizes(1, 130, 200, 1, 1, *widths))

    @pytest.mark.parametrize("choice", quick_first(pairwise(SPARSE), pytest.mark.slow), ids=label)
    def test_masks(self, choice: Mapping[str, Any]) -> None:
        self.check_masks(choice)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", list(pairwise(SPARSE)), ids=label)
    def test_masks_at_every_width(self, choice: Mapping[str, Any], compiled: Widths) -> None:
        self.check_masks(choice, SIZES._replace(width=compiled[0], value_width=compiled[1]), seed=1, sm_count=3)

    @pytest.mark.parametrize("poison", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("choice", POISONED, ids=label)
    def test_unseen_values_do_not_matter(self, choice: Mapping[str, Any], poison: float) -> None:
        """What lies in a block and outside of the hull is multiplied by probabilities of 0."""
        self.check_masks(choice, poison=poison)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", POISONED, ids=label)
    def test_unseen_values_do_not_matter_at_any_width(self, choice: Mapping[str, Any], compiled: Widths) -> None:
        sizes = SIZES._replace(rows=140, width=compiled[0], value_width=compiled[1])
        for seed, poison in enumerate((np.nan, np.inf, -np.inf)):
            self.check_masks(choice, sizes, "float16", poison=poison, seed=seed)

    def test_hull_that_ends_anywhere_in_a_block(self) -> None:
        """One row sees [first, end) of three blocks: all other values, and keys, are NaN."""
        for first, end in ((0, 1), (1, 2), (127, 129), (128, 256), (129, 255), (5, 300), (250, 383), (383, 384)):
            arguments = operands(Sizes(1, 1, 384, 1, 1, 64, 64), "bfloat16", np.random.default_rng(first))
            bounds = tuple(np.full((1, 1), x, np.int32) for x in (first, end))
            self.check(arguments | {"row_bounds": bounds}, poison=np.nan)

    @pytest.mark.parametrize("choice", [{}, WINDOW], ids=label)
    @pytest.mark.parametrize(("rows", "keys"), list(zip(LENGTHS, LENGTHS[4:] + LENGTHS[:4], strict=True)))
    def test_lengths(self, rows: int, keys: int, choice: Mapping[str, Any]) -> None:
        self.check_masks(choice, Sizes(1, rows, keys, 1, 1, 64, 64))

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", [{}, WINDOW, {"is_causal": True, "softcap": 5.0}], ids=label)
    @pytest.mark.parametrize("rows", LENGTHS)
    def test_lengths_exhaustively(self, rows: int, choice: Mapping[str, Any]) -> None:
        for i, keys in enumerate(LENGTHS):
            self.check_masks(
                choice,
                Sizes(1, rows, keys, 2, 1, *self.compiled_widths[i % len(self.compiled_widths)]),
                DTYPES[i % 2],
                seed=i,
            )

    @pytest.mark.parametrize("ratio", RATIOS)
    def test_heads_that_share_a_key_head(self, ratio: int) -> None:
        kv_heads = 1 if ratio > 12 else 2
        sizes = Sizes(1, max(3, 150 // ratio), 140, ratio * kv_heads, kv_heads, 64, 64)
        self.check_masks({"is_causal": True, "query_offset": "end"}, sizes)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", [{}, WINDOW, {"row_bounds": "some", "softcap": 2.0}], ids=label)
    @pytest.mark.parametrize("ratio", RATIOS)
    def test_heads_that_share_a_key_head_at_any_width(
        self, ratio: int, compiled: Widths, choice: Mapping[str, Any]
    ) -> None:
        for seed, kv_heads in enumerate((1, 2) if ratio > 12 else (1, 3)):
            sizes = Sizes(2, 1 + 400 // ratio, 140, ratio * kv_heads, kv_heads, *compiled)
            self.check_masks(choice, sizes, DTYPES[seed], seed=seed, sm_count=2)

    @pytest.mark.parametrize("kind", KINDS)
    def test_data(self, kind: str) -> None:
        """As trained models make it."""
        sizes = Sizes(1, 320, 320, 2, 1, 128, 128)
        for choice in ({}, {"is_causal": True}):
            self.check(operands(sizes, "bfloat16", np.random.default_rng(7), kind) | choice)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", [{}, {"is_causal": True}, {"softcap": 20.0}], ids=label)
    @pytest.mark.parametrize("kind", KINDS)
    def test_data_in_every_kernel(self, kind: str, choice: Mapping[str, Any]) -> None:
        for seed, (dtype, widths) in enumerate(itertools.product(DTYPES, self.compiled_widths)):
            arguments = operands(Sizes(2, 320, 320, 2, 1, *widths), dtype, np.random.default_rng(seed), kind)
            self.check(arguments | choice, seed=seed, arch=[*self.targets][seed % len(self.targets)])

    @pytest.mark.parametrize("names", MAPPED, ids="-".join)
    def test_vmap_of_operands_that_are_not_all_mapped(self, names: tuple[str, ...]) -> None:
        """The kernel indexes operands whose leading axis is shorter than the batch."""
        rng = np.random.default_rng(0)
        arrays = operands(SIZES._replace(rows=70, keys=90), "bfloat16", rng) | {"scale": np.float32(0.3)}
        arrays |= {"lower": rng.integers(0, 40, (2, 70), np.int32), "upper": rng.integers(30, 91, (2, 70), np.int32)}
        stacks = {name: np.stack([arrays[name], np.flip(arrays[name]), arrays[name] // 2]) for name in names}

        def call(arrays: Mapping[str, Any]) -> Any:
            bounds = arrays["lower"], arrays["upper"]
            others = {name: x for name, x in arrays.items() if name not in ("lower", "upper")}
            return attention(**others, row_bounds=bounds, implementation=self.implementation, return_residual=True)

        with self.launches() as launches:
            got = jax.block_until_ready(
                jax.jit(jax.vmap(call, ({name: 0 if name in names else None for name in arrays},)))(arrays | stacks)
            )
            for i in range(3):
                want = jax.block_until_ready(jax.jit(call)(arrays | {name: x[i] for name, x in stacks.items()}))
                for one, other in zip(got, want, strict=True):
                    np.testing.assert_array_equal(np.asarray(one[i], np.float32), np.asarray(other, np.float32))
        assert {launch.module for launch in launches} <= {self.module}

    # ---- The schedule

    @pytest.mark.parametrize("sm_count", [1, 3])
    @pytest.mark.parametrize("choice", [{}, {"is_causal": True}, {"row_bounds": "some", "softcap": 4.0}], ids=label)
    def test_several_tasks_a_multiprocessor(self, choice: Mapping[str, Any], sm_count: int) -> None:
        """Every scheduler seed gives the same bits, which do not depend on the number of multiprocessors either."""
        first = self.check_masks(choice, sm_count=sm_count)
        for seed in (1, 2):
            other = self.forward_of_masks(choice, seed=seed, sm_count=sm_count)
            np.testing.assert_array_equal(other.out, first.out)
            np.testing.assert_array_equal(other.lse, first.lse)
        np.testing.assert_array_equal(self.forward_of_masks(choice).out, first.out)

    def forward_of_masks(self, choice: Mapping[str, Any], sizes: Sizes = SIZES, **options: Any) -> Launched:
        rng = np.random.default_rng(1)
        return self.forward(operands(sizes, "bfloat16", rng) | masked(sizes, NONE | choice, rng), **options)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", [{}, {"is_causal": True}, {"left": 30, "right": 5, "softcap": 4.0}], ids=label)
    def test_many_seeds(self, choice: Mapping[str, Any], compiled: Widths) -> None:
        sizes = SIZES._replace(width=compiled[0], value_width=compiled[1])
        first = self.check_masks(choice, sizes)
        for seed in range(1, 25):
            other = self.forward_of_masks(choice, sizes, seed=seed, sm_count=1 + seed % 4)
            np.testing.assert_array_equal(other.out, first.out)
            np.testing.assert_array_equal(other.lse, first.lse)

    @given(st.data())
    def test_random(self, data: st.DataObject) -> None:
        """Random sizes, masks, dtypes, data and schedules; few of each size, so that compilations are shared."""
        arguments, options = drawn(data, self.compiled_widths, tuple(self.targets))
        self.check(arguments, **options)

    # ---- The scale

    @pytest.mark.parametrize("scale", [0.0, -0.0, -0.3, 1e-40, -1e-40, 1e-30], ids=str)
    @pytest.mark.parametrize("choice", [{}, WINDOW, {"is_causal": True, "softcap": 1.0}], ids=label)
    def test_scale(self, choice: Mapping[str, Any], scale: float) -> None:
        """Where it is 0 or next to it, every visible key weighs the same."""
        rng = np.random.default_rng(10)
        sizes = Sizes(1, 150, 270, 2, 1, 64, 64)
        self.check(operands(sizes, "bfloat16", rng) | masked(sizes, NONE | choice, rng) | {"scale": np.float32(scale)})

    @pytest.mark.parametrize("softcap", [1e30, 3.4e38])
    def test_huge_soft_cap(self, softcap: float) -> None:
        self.check(
            operands(Sizes(1, 150, 270, 2, 1, 64, 64), "bfloat16", np.random.default_rng(18)) | {"softcap": softcap}
        )

    def test_tiny_soft_cap(self) -> None:
        """Every key weighs the same, also one of zeros, although what the cap divides overflows."""
        arguments = operands(Sizes(1, 150, 270, 2, 1, 64, 64), "bfloat16", np.random.default_rng(18))
        arguments["key"][:, ::2] = 0
        ran = self.forward(arguments | {"softcap": 2e-38, "scale": np.float32(300)})
        want = self.forward(arguments | {"softcap": 1.0, "scale": np.float32(0)})
        np.testing.assert_array_equal(ran.out, want.out)
        np.testing.assert_array_equal(ran.lse, want.lse)

    @pytest.mark.parametrize("choice", [{}, {"is_causal": True, "query_offset": "end"}], ids=label)
    @pytest.mark.parametrize("scale", [1e20, -1e30, 1e34], ids=str)
    def test_huge_scale(self, choice: Mapping[str, Any], scale: float) -> None:
        """The largest logit takes all, those that equal it an equal share. Of integers, logits are exact."""
        rng = np.random.default_rng(11)
        sizes = Sizes(1, 150, 270, 2, 1, 64, 64)
        arguments = {
            name: rng.integers(-3, 4, x.shape).astype(x.dtype) for name, x in operands(sizes, "bfloat16", rng).items()
        } | choice
        ran = self.forward(arguments | {"scale": np.float32(scale)})
        q, k, v = (np.asarray(arguments[name], np.float64) for name in ("query", "key", "value"))
        logits = np.einsum("bthd,bsd->bths", q, k[:, :, 0]) * np.sign(scale)
        logits = np.where(oracle.visible(arguments).swapaxes(1, 2), logits, -np.inf)
        largest = logits == logits.max(-1, keepdims=True)
        out = largest / largest.sum(-1, keepdims=True) @ v[:, None, :, 0]
        lse = logits.max(-1) * abs(np.float64(np.float32(scale)))
        np.testing.assert_allclose(np.asarray(ran.out, np.float64), out, rtol=2**-8, atol=1e-3 * 2**-8)
        np.testing.assert_allclose(ran.lse, lse, rtol=4 * 2**-24, atol=0)

    @pytest.mark.parametrize("scale", [np.nan, np.inf])
    @pytest.mark.parametrize("choice", [{}, {"is_causal": True, "query_offset": -20}], ids=label)
    def test_scale_that_is_no_number(self, choice: Mapping[str, Any], scale: float) -> None:
        """Rows that see nothing do not depend on it."""
        rng = np.random.default_rng(12)
        sizes = Sizes(1, 150, 270, 2, 1, 64, 64)
        arguments = {name: abs(x) for name, x in operands(sizes, "bfloat16", rng).items()} | choice
        ran = self.forward(arguments | {"scale": np.float32(scale)})
        seen = oracle.visible(arguments).any(3).swapaxes(1, 2)
        assert np.isnan(ran.out[seen].astype(np.float32)).all()
        assert (ran.out[~seen] == 0).all()
        assert not np.isfinite(ran.lse[seen]).any()
        assert (ran.lse[~seen] == -np.inf).all()

    # ---- NaN and infinity where they are visible

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *itertools.product(("query", "key", "value"), (np.nan, np.inf)),
            *(pytest.param(x, -np.inf, marks=pytest.mark.slow) for x in ("key", "value")),
        ],
    )
    @pytest.mark.parametrize("choice", [{}, {"is_causal": True, "query_offset": "end"}, {"softcap": 3.0}], ids=label)
    def test_what_is_visible_shows(self, choice: Mapping[str, Any], name: str, value: float) -> None:
        """In each fragment of a row, with and without an emulated exponential; what does not see it keeps its bits."""
        rng = np.random.default_rng(13)
        sizes = Sizes(1, 150, 270, 4, 2, 64, 64)
        arguments = {name: abs(x) for name, x in operands(sizes, "bfloat16", rng).items()} | choice
        clean = self.forward(arguments)
        visible = oracle.visible(arguments).swapaxes(1, 2)
        for place in (0, 13, 32 + 5, 64 + 28, 127, 128 + 47, 269):
            changed = {**arguments, name: arguments[name].copy()}
            rows = np.zeros((1, 150, 4), bool)
            if name == "query":
                changed[name][0, place % 150, 3, 7] = value
                rows[0, place % 150, 3] = True
            else:
                changed[name][0, place, 1, 7] = value
                rows[:, :, 2:] = visible[:, :, 2:, place]
            ran = self.forward(changed)
            want = [np.asarray(x, np.float32) for x in _reference(choice, changed)]
            got = [np.asarray(x, np.float32) for x in (ran.out, ran.lse)]
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(np.isfinite(one[rows]), np.isfinite(other[rows]))
                np.testing.assert_array_equal(np.isnan(one[rows]), np.isnan(other[rows]))
            # A row of the same task that does not see it may be NaN, one of another key head not.
            np.testing.assert_array_equal(ran.out[:, :, :2], clean.out[:, :, :2])
            np.testing.assert_array_equal(ran.lse[:, :, :2], clean.lse[:, :, :2])
            if name != "value":
                np.testing.assert_array_equal(ran.out[~rows], clean.out[~rows])
                np.testing.assert_array_equal(ran.lse[~rows], clean.lse[~rows])

    # ---- Examples by hand

    @pytest.mark.parametrize("is_masked", [False, True])
    def test_rows_of_a_tile_are_positions_and_heads(self, is_masked: bool) -> None:
        """32 heads on 8: row r of a tile of key head 3 is of position r // 4 and of head 12 + r % 4.

        Every row finds the one value that tells its row and its key head.
        """
        tile, group, kv_heads = 128, 4, 8
        row = np.arange(tile)
        code = np.where(row[:, None] >> np.arange(7) & 1, 1, -1)  # of a row, and of the key that it finds
        key = np.zeros((1, tile, kv_heads, 64))
        key[0, :, :, :7] = code[:, None]
        value = np.zeros((1, tile, kv_heads, 64))
        value[0, :, :, 0], value[0, :, :, 1] = row[:, None], np.arange(kv_heads)
        # Logits of 700 and at most 500: all others are 0, and lse is the logit. It tells heads apart, too.
        size = 100 + 4 * np.arange(group * kv_heads)
        query = np.zeros((1, tile // group, group * kv_heads, 64))
        head = np.arange(group * kv_heads)
        query[0, :, :, :7] = code[np.arange(tile // group)[:, None] * group + head % group] * size[:, None]
        arguments = {name: x.astype(jnp.bfloat16) for name, x in {"query": query, "key": key, "value": value}.items()}
        if is_masked:  # each position sees the four keys of its heads and no others
            position = np.arange(tile // group, dtype=np.int32)[None]
            arguments |= {"row_bounds": (position * group, position * group + group)}
        ran = self.forward(arguments | {"scale": 1.0})
        found = ran.out[0].astype(np.int32)
        for packed, (position, of) in {0: (0, 12), 5: (1, 13), 127: (31, 15)}.items():
            assert tuple(found[position, of, :2]) == (packed, 3)
        np.testing.assert_array_equal(found[:, :, 0], np.arange(32)[:, None] * group + head % group)
        np.testing.assert_array_equal(found[:, :, 1], np.broadcast_to(head // group, (32, 32)))
        np.testing.assert_allclose(ran.lse[0], np.broadcast_to(7.0 * size, (32, 32)), rtol=2**-22)

    def test_causal_with_more_keys_than_rows(self) -> None:
        """Of 6 rows and 8 keys, right-aligned, row 0 sees keys up to 2 and row 5 up to 7."""
        query, key = np.zeros((1, 6, 1, 8)), np.zeros((1, 8, 1, 8))
        arrays = (x.astype(jnp.bfloat16) for x in (query, key, np.eye(8).reshape(1, 8, 1, 8)))
        arguments = dict(zip(("query", "key", "value"), arrays, strict=True))
        ran = self.forward(arguments | {"is_causal": True, "query_offset": "end"})
        seen = ran.out[0, :, 0] > 0
        np.testing.assert_array_equal(seen, np.arange(8) <= np.arange(6)[:, None] + 2)
        weights = seen / np.arange(3, 9)[:, None]
        np.testing.assert_array_equal(ran.out[0, :, 0], weights.astype(jnp.bfloat16))
        np.testing.assert_allclose(ran.lse[0, :, 0], np.log(np.arange(3, 9)), rtol=2**-22)

    def test_blocks_that_no_row_sees_are_not_loaded(self) -> None:
        sizes = Sizes(1, 128, 128, 1, 1, 64, 64)
        near = self.check_masks({"is_causal": True}, sizes, trace=True)
        far = self.check_masks({"is_causal": True}, sizes._replace(keys=1000), trace=True)
        full = self.check_masks({}, sizes._replace(keys=1000), trace=True)
        if self.implementation != "emulated":
            pytest.skip("the results are right; what was loaded, only the emulator tells")
        near_loads, far_loads, full_loads = (
            sum(event.kind == "operation" and event.warp == self.load_warp for event in ran.launch.trace.events)
            for ran in (near, far, full)
        )
        assert near_loads == far_loads
        assert full_loads - near_loads == 2 * 7

    @pytest.mark.parametrize("kind", ["full", "bounds"])
    @pytest.mark.parametrize(
        ("then", "row_max", "row_sum", "out"),
        [
            ((5, 4), 2, 3 + 8 + 4, (4 + 8, 6 + 4)),  # 3 more than before: the old reference stays, P = (8, 4)
            ((11, 10), 11, 3 / 512 + 1 + 1 / 2, (4 / 512 + 1, 6 / 512 + 1 / 2)),  # 9 more: O and its sum times 2^-9
        ],
    )
    def test_rescaling(
        self, kind: str, then: tuple[int, int], row_max: int, row_sum: float, out: tuple[float, float]
    ) -> None:
        ran = Row(then=then, then_values=[(1, 0), (0, 1)], **STATE).run(self, kind)
        got, want = ran.out[0, 0, 0, :2].astype(np.float64), np.array(out) / row_sum
        assert (abs(got - want) <= np.spacing(ran.out[0, 0, 0, :2]) * 0.501).all()
        np.testing.assert_allclose(ran.lse, (row_max + math.log2(row_sum)) * math.log(2), rtol=2**-22)

    @pytest.mark.parametrize("kind", ["full", "bounds"])
    @pytest.mark.parametrize(("top", "is_rescaled"), [(10, False), (10.0078125, True)])
    def test_threshold_of_rescaling(self, kind: str, top: float, is_rescaled: bool) -> None:
        """A logit 20 below the old reference has a probability of 2^-20, one 28 below the new one none in float16.

        Its value makes it tell: 2^15.
        """
        ran = Row(then=(-18, top), then_values=[(0, 0, 2**15), ()], **STATE).run(self, kind)
        reference = top if is_rescaled else 2
        row_sum = 3 * 2 ** (2.0 - reference) + 2.0 ** (-18 - reference) + 2.0 ** (top - reference)
        want = np.array([4, 6, 0 if is_rescaled else 2.0**-5]) * [*[2 ** (2.0 - reference)] * 2, 1] / row_sum
        got = ran.out[0, 0, 0, :3].astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2**-10, atol=0)


class Row(NamedTuple):
    """One row's logits in base 2, in the block that comes first and the next; and its values."""

    first: tuple[float, ...]
    then: tuple[float, ...]
    first_values: Sequence[tuple[float, ...]]
    then_values: Sequence[tuple[float, ...]]

    def run(self, suite: ForwardSuite, kind: str, dtype: str = "float16") -> Launched:
        """Blocks are walked from the last to the first; these keys stand where the two meet."""
        scale = np.float32(math.log(2))
        assert scale * np.float32(math.log2(math.e)) == 1
        # Only keys with a hardware exponential, exact for integers, in a kernel of width 64: the end of a block and
        # the start of the next. All others of a `full` row weigh nothing.
        begin, end = BLOCK - len(self.then), BLOCK + len(self.first)
        arguments = {name: np.zeros((1, x, 1, 8), dtype) for name, x in {"query": 1, "key": 256, "value": 256}.items()}
        arguments["query"][..., 0] = 1
        arguments["key"][..., 0] = -10_000
        arguments["key"][0, begin:end, 0, 0] = (*self.then, *self.first)
        for key, value in enumerate((*self.then_values, *self.first_values), begin):
            arguments["value"][0, key, 0, : len(value)] = value
        if kind == "bounds":
            arguments["row_bounds"] = tuple(np.full((1, 1), x, np.int32) for x in (begin, end))
        ran = suite.forward(arguments | {"scale": scale})
        assert str(suite.entry(arguments)).endswith(kind)
        return ran


# row_max = 2, row_sum = 3 and O = (4, 6) after the first block.
STATE = {"first": (2, 2, 2), "first_values": [(1, 2), (1, 2), (2, 2)]}


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: tuple[tuple[str, Any], ...], arrays: dict[str, Any]) -> Any:
    return attention(**arrays, **dict(static), return_residual=True)


def _reference(choice: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    arrays = {name: x for name, x in arguments.items() if name not in choice}
    return attention(**arrays, **choice, implementation="reference", return_residual=True)
