"""Faults reported by users of other attention libraries, each with the test that keeps it away.

A docstring names the public report as project and number. Reports about custom calls, compilers and installation
(sharding, JIT stalls, missing FFI handlers) concern kernels and are tested with them; jax 32430 is cuDNN's alone.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jax_fa4 import attention

Arguments = dict[str, Any]

# In the reference, which is plain JAX, few of these faults can be.
pytestmark = pytest.mark.parametrize("implementation", ["tiled", pytest.param("reference", marks=pytest.mark.slow)])


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32).astype(dtype)


def naive(query: Any, key: Any, value: Any, visible: Any = True, bias: Any = 0.0) -> np.ndarray:
    """Attention of (B, T, N, D) in float64 NumPy; rows must see something."""
    q, k, v = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, key, value))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    logits = np.where(visible, q @ k.mT / np.sqrt(q.shape[-1]) + np.asarray(bias, np.float64), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


def gradients(implementation: str, query: Any, key: Any, value: Any, **arguments: Any) -> tuple[Array, ...]:
    def total(query: Array, key: Array, value: Array) -> Array:
        out = attention(query, key, value, implementation=implementation, **arguments)
        return (out.astype(jnp.float32) * normal(*out.shape, seed=99)).sum()

    return jax.jit(jax.grad(total, (0, 1, 2)))(query, key, value)


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


class TestSilentWrongAnswers:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("window", [(3, 0), (0, 3), (0, 0), (3, None), (None, 0), None])
    @pytest.mark.parametrize("lengths", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_every_mask_hides_what_it_says(
        self, implementation: str, causal: bool, window: tuple[int | None, int | None] | None, lengths: bool
    ) -> None:
        """Jax 39576: a window (L, 0) without causal saw the future. jax 32300: a window without a mask was ignored."""
        q, k, v = normal(2, 9, 2, 4), normal(2, 9, 2, 4, seed=1), normal(2, 9, 2, 4, seed=2)
        i, j = np.arange(9)[:, None], np.arange(9)
        left, right = window or (None, None)
        visible = np.full((2, 1, 9, 9), True)
        visible &= j >= i - (9 if left is None else left)
        visible &= j <= i + (9 if right is None else right)
        visible &= j <= i if causal else True
        arguments: Arguments = {"is_causal": causal, "local_window_size": window}
        if lengths:
            arguments["key_value_seq_lengths"] = np.array([7, 9], np.int32)
            visible &= (j < np.array([7, 9])[:, None])[:, None, None]
        some = visible.any(-1)[:, 0, :, None, None]
        out = attention(q, k, v, implementation=implementation, **arguments)
        assert_close(out, np.where(some, naive(q, k, v, np.where(visible.any(-1, keepdims=True), visible, True)), 0))

    def test_packed_sequences_with_grouped_heads(self, implementation: str) -> None:
        """Jax 39521: offsets of packed sequences were counted with the query's number of heads."""
        q, k, v = normal(1, 12, 6, 4), normal(1, 12, 2, 4, seed=1), normal(1, 12, 2, 4, seed=2)
        ids = np.repeat(np.array([[0, 1, 2]], np.int32), [5, 4, 3], 1)
        out = attention(
            q, k, v, query_segment_ids=ids, key_value_segment_ids=ids, is_causal=True, implementation=implementation
        )
        for at in (slice(0, 5), slice(5, 9), slice(9, 12)):
            alone = attention(q[:, at], k[:, at], v[:, at], is_causal=True, implementation=implementation)
            assert_close(out[:, at], alone)

    def test_segment_ids_matter(self, implementation: str) -> None:
        """Maxtext 4476: segment ids were accepted and ignored."""
        q, k, v = normal(2, 6, 2, 4), normal(2, 8, 2, 4, seed=1), normal(2, 8, 2, 4, seed=2)
        rows = np.array([[0, 0, 1, 7, 7, 7], [-1, 2, 2, 2, 2, 2]], np.int32)
        keys = np.array([[7, 7, 0, 0, 1, 1, 7, 7], [2, 2, 2, 2, -1, -1, -1, -1]], np.int32)
        out = attention(q, k, v, query_segment_ids=rows, key_value_segment_ids=keys, implementation=implementation)
        assert_close(out, naive(q, k, v, (rows[:, :, None] == keys[:, None])[:, None]))

    @pytest.mark.parametrize("kind", ["outliers", "huge_logits", "near_constant", "runs"])
    def test_gradients_of_data_unlike_noise(self, implementation: str, kind: str) -> None:
        """TransformerEngine 3216: head width 256 and batch >= 2 gave a wrong dQ, on real activations only."""
        shape = (2, 40, 1, 256)
        q, k, v = (normal(*shape, seed=i) for i in range(3))
        if kind == "outliers":
            q, k, v = (np.where(normal(*x.shape, seed=9) > 2, 30 * x, x) for x in (q, k, v))
        elif kind == "huge_logits":
            k[:, ::10] *= 30
        elif kind == "near_constant":
            k, v = 1 + 0.1 * k, 1 + 0.1 * v
        else:
            k, v = (np.repeat(x[:, ::8], 8, 1) for x in (k, v))
        got = gradients(implementation, q, k, v)
        with jax.enable_x64(True):
            want = gradients("reference", *(x.astype(np.float64) for x in (q, k, v)))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=5e-4 * float(np.abs(y).max()))

    def test_an_open_window_is_not_minus_one(self, implementation: str) -> None:
        """TransformerEngine 3528: -1 and None meant different things, one of them all-zero output."""
        q = normal(1, 5, 2, 4)
        open_ = attention(q, q, q, local_window_size=(None, None), implementation=implementation)
        assert_close(open_, naive(q, q, q))
        with pytest.raises(ValueError, match="local_window_size must not be negative"):
            attention(q, q, q, local_window_size=(-1, -1), implementation=implementation)

    @pytest.mark.parametrize("widths", [(128, 96), (96, 128), (192, 128), (5, 7), (1, 1), (256, 8)])
    def test_any_pair_of_head_widths(self, implementation: str, widths: tuple[int, int]) -> None:
        """flash-attention 2552: dV corrupt at widths (128, 96). 2591, 2492: small or odd widths failed at launch."""
        width, value_width = widths
        q, k, v = normal(1, 6, 2, width), normal(1, 7, 1, width, seed=1), normal(1, 7, 1, value_width, seed=2)
        assert_close(attention(q, k, v, implementation=implementation), naive(q, k, v))
        for x, y in zip(gradients(implementation, q, k, v), jax_nn_gradients(q, k, v), strict=True):
            assert_close(x, y, 1e-4)

    @pytest.mark.slow
    def test_more_than_2_to_the_31_elements(self, implementation: str) -> None:
        """flash-attention 2611, 2260: 32-bit offsets overflowed. Here only the last 32 keys of 9 GB are seen."""
        if implementation == "reference":
            pytest.skip("the reference copies every operand")
        if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 16 << 30:
            pytest.skip("less than 16 GiB of memory are free")
        width, window = 1 << 16, 32
        length = (1 << 31) // width + 2048
        keys = jax.jit(
            lambda: (jax.lax.broadcasted_iota(np.int32, (1, length, 1, width), 1) % 1000).astype(np.float32)
        )()
        last = jax.jit(
            lambda query, keys: attention(
                query, keys, keys, local_window_size=(window - 1, 0), query_offset="end", implementation=implementation
            )
        )
        out = last(jnp.zeros((1, 1, 1, width)), keys)
        assert_close(out, np.full((1, 1, 1, width), (np.arange(length - window, length) % 1000).mean()))

    @pytest.mark.parametrize("mapped", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
    def test_vmap_of_grad_with_a_batch_inside(self, implementation: str, mapped: tuple[int, ...]) -> None:
        """flash_attn_jax, flash-attn3-jax: gradients under vmap were permuted, or summed over the mapped axis."""
        arrays = [normal(3, 2, 4, 2, 4, seed=i)[() if i in mapped else 0] for i in range(3)]
        axes = [0 if i in mapped else None for i in range(3)]
        grad = lambda q, k, v: gradients(implementation, q, k, v, is_causal=True)  # noqa: E731
        got = jax.vmap(grad, axes)(*arrays)
        for i in range(3):
            alone = grad(*(x if axis is None else x[i] for x, axis in zip(arrays, axes, strict=True)))
            for x, y in zip(got, alone, strict=True):
                assert_close(x[i], y)

    @pytest.mark.parametrize("extra", ["mask", "bias", "lengths", "segments", "softcap", "offset"])
    def test_causal_survives_every_other_argument(self, implementation: str, extra: str) -> None:
        """TransformerEngine 1524: a fallback path dropped the causal mask."""
        arguments: dict[str, Arguments] = {
            "mask": {"mask": np.ones((6, 6), bool)},
            "bias": {"bias": np.zeros((6, 6), np.float32)},
            "lengths": {"key_value_seq_lengths": np.array([6], np.int32)},
            "segments": {x: np.zeros((1, 6), np.int32) for x in ("query_segment_ids", "key_value_segment_ids")},
            "softcap": {"softcap": 1e6},
            "offset": {"query_offset": np.int32(0)},
        }
        q, k, v = (normal(1, 6, 2, 4, seed=i) for i in range(3))
        out = attention(q, k, v, is_causal=True, implementation=implementation, **arguments[extra])
        assert_close(out, naive(q, k, v, np.tri(6, dtype=bool)), 1e-4)


def jax_nn_gradients(query: Any, key: Any, value: Any) -> list[np.ndarray]:
    """Those of jax.nn, whose values must be as wide as keys: both are padded with zeros."""
    width = max(query.shape[-1], value.shape[-1])
    pad = lambda x: np.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])  # noqa: E731

    def total(q: Any, k: Any, v: Any) -> Array:
        out = jax.nn.dot_product_attention(q, k, v, scale=query.shape[-1] ** -0.5)[..., : value.shape[-1]]
        return (out * normal(*out.shape, seed=99)).sum()

    found = jax.jit(jax.grad(total, (0, 1, 2)))(pad(query), pad(key), pad(value))
    return [np.asarray(x)[..., : y.shape[-1]] for x, y in zip(found, (query, key, value), strict=True)]


class TestNaNsAndCrashes:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: np.dtype(dtype).name)
    def test_a_float32_bias_with_narrow_operands(self, implementation: str, dtype: Any) -> None:
        """Jax 32242: a float32 bias gave NaN gradients."""
        q = normal(2, 8, 2, 4, dtype=dtype)
        bias = normal(1, 2, 8, 8)
        total = lambda bias: attention(q, q, q, bias, implementation=implementation).astype(jnp.float32).sum()  # noqa: E731
        dbias = jax.grad(total)(bias)
        assert dbias.dtype == np.float32
        assert np.isfinite(dbias).all()
        assert dbias.any()

    @pytest.mark.parametrize("keys", [64, 192])
    def test_very_small_log_sum_exps(self, implementation: str, keys: int) -> None:
        """Pytorch 196678: dQ was NaN where S % 128 == 64 and lse < -88.7, the logarithm of the least float32."""
        q, k, v = 10 + normal(1, 8, 1, 64), -10 + normal(1, keys, 1, 64, seed=1), normal(1, keys, 1, 64, seed=2)
        lse = attention(q, k, v, return_residual=True, implementation=implementation)[1]
        assert lse.max() < -88.7
        got = gradients(implementation, q, k, v)
        with jax.enable_x64(True):
            want = gradients("reference", *(x.astype(np.float64) for x in (q, k, v)))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4 * float(np.abs(y).max()))

    def test_a_key_padding_mask(self, implementation: str) -> None:
        """Jax 28974: a mask of shape (B, 1, 1, S) was refused."""
        q, k = normal(2, 4, 2, 4), normal(2, 6, 2, 4, seed=1)
        mask = (np.arange(6) < np.array([[3], [6]]))[:, None, None]
        out = attention(q, k, k, mask=mask, implementation=implementation)
        assert_close(out, naive(q, k, k, mask))
        assert_close(
            out, attention(q, k, k, key_value_seq_lengths=np.array([3, 6], np.int32), implementation=implementation)
        )

    @pytest.mark.parametrize("lengths", [(0, 1), (6, 0), (5, 6), (7, 2**31 - 1), (-1, -(2**31))])
    def test_any_lengths(self, implementation: str, lengths: tuple[int, int]) -> None:
        """flash-attention 2860, 2391: variable lengths read illegal addresses. Lengths are cut to what exists."""
        q, k = normal(2, 6, 2, 4), normal(2, 6, 2, 4, seed=1)
        numbers = np.array(lengths, np.int32)
        got = gradients(implementation, q, k, k, query_seq_lengths=numbers, key_value_seq_lengths=numbers)
        exists = np.arange(6) < numbers[:, None]
        mask = (exists[:, :, None] & exists[:, None])[:, None]
        for x, y in zip(got, gradients("reference", q, k, k, mask=mask), strict=True):
            assert_close(x, y)
            assert not x[~exists].any()

    def test_packed_padding_holds_nan(self, implementation: str) -> None:
        """flash-attention 2860: what lies beyond the lengths must not matter, NaN and infinities included."""
        q, k, v = normal(2, 6, 2, 4), normal(2, 8, 2, 4, seed=1), normal(2, 8, 2, 4, seed=2)
        lengths = {"query_seq_lengths": np.array([4, 6], np.int32), "key_value_seq_lengths": np.array([5, 3], np.int32)}
        clean = (
            attention(q, k, v, implementation=implementation, **lengths),
            gradients(implementation, q, k, v, **lengths),
        )
        for b in range(2):
            q[b, lengths["query_seq_lengths"][b] :] = np.nan
            k[b, lengths["key_value_seq_lengths"][b] :] = np.inf
            v[b, lengths["key_value_seq_lengths"][b] :] = np.nan
        dirty = (
            attention(q, k, v, implementation=implementation, **lengths),
            gradients(implementation, q, k, v, **lengths),
        )
        for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
            np.testing.assert_array_equal(x, y)


class TestTransforms:
    def test_vmap_over_any_single_operand(self, implementation: str) -> None:
        """Jax 39451, TransformerEngine 2545: vmap was unsupported, or only of all operands at once."""
        q, k, v, bias = normal(2, 4, 2, 4), normal(2, 5, 2, 4), normal(2, 5, 2, 4, seed=2), normal(2, 4, 5)
        arrays = [q, k, v, bias]
        function = lambda q, k, v, bias: attention(q, k, v, bias, implementation=implementation)  # noqa: E731
        for i, x in enumerate(arrays):
            stack = np.stack([x, 2 * x, 3 * x])
            got = jax.vmap(function, [0 if j == i else None for j in range(4)])(*arrays[:i], stack, *arrays[i + 1 :])
            assert_close(got, np.stack([function(*arrays[:i], y, *arrays[i + 1 :]) for y in stack]))

    def test_remat_names_are_in_the_jaxpr(self, implementation: str) -> None:
        """Jax 26374, axlearn 942, jax 40309: remat repeated the kernel, as its residuals had no names to save."""
        if implementation == "reference":
            pytest.skip("JAX differentiates the reference: it has no residuals of its own")
        q = normal(1, 4, 2, 4)
        jaxpr = str(jax.make_jaxpr(jax.grad(lambda q: attention(q, q, q, implementation=implementation).sum()))(q))
        assert "name=jax_fa4_out" in jaxpr
        assert "name=jax_fa4_lse" in jaxpr

    def test_lse_has_a_gradient(self, implementation: str) -> None:
        """flash-attention 889, 1137: lse was returned without one. The z-loss of a logsumexp needs it."""
        q, k = normal(1, 5, 2, 4), normal(1, 6, 2, 4, seed=1)
        ours = lambda q: (attention(q, k, k, return_residual=True, implementation=implementation)[1] ** 2).sum()  # noqa: E731
        theirs = lambda q: (  # noqa: E731
            jax.nn.logsumexp(jnp.einsum("btnd,bsnd->bnts", q, k) * 0.5, axis=-1) ** 2
        ).sum()
        assert_close(jax.grad(ours)(q), jax.grad(theirs)(q), 1e-4)


class TestEdges:
    """What several peers refuse or get wrong at the edges."""

    @pytest.mark.parametrize("integer", [np.int8, np.int32, np.int64, np.uint16])
    def test_numpy_integers_are_integers(self, implementation: str, integer: Any) -> None:
        q = normal(1, 6, 2, 4)
        arguments = {"local_window_size": (2, 1), "query_offset": 1, "scale": 1, "softcap": 4}
        wrapped = {"local_window_size": (integer(2), integer(1))} | {
            name: integer(x) for name, x in arguments.items() if name != "local_window_size"
        }
        got = attention(q, q, q, is_causal=np.bool_(True), implementation=implementation, **wrapped)
        assert_close(got, attention(q, q, q, is_causal=True, implementation=implementation, **arguments))

    def test_a_key_length_of_0(self, implementation: str) -> None:
        q = normal(2, 4, 2, 4)
        lengths = np.array([0, 4], np.int32)
        out, lse = attention(
            q, q, q, key_value_seq_lengths=lengths, return_residual=True, implementation=implementation
        )
        assert not out[0].any()
        assert (np.asarray(lse[0]) == -np.inf).all()
        assert_close(out[1:], naive(q[1:], q[1:], q[1:]))
        for x in gradients(implementation, q, q, q, key_value_seq_lengths=lengths):
            assert not x[0].any()
            assert x[1].any()
            assert np.isfinite(x).all()

    def test_a_bias_of_minus_infinity_hides(self, implementation: str) -> None:
        q = normal(1, 6, 2, 4)
        bias = np.where(np.tri(6, dtype=bool), 0, -np.inf).astype(np.float32)
        bias[2] = -np.inf
        out = attention(q, q, q, bias, implementation=implementation)
        assert not out[:, 2].any()
        rows = [0, 1, 3, 4, 5]
        assert_close(out[:, rows], naive(q[:, rows], q, q, np.tri(6, dtype=bool)[rows]))
        dbias = jax.grad(lambda bias: (attention(q, q, q, bias, implementation=implementation) * q).sum())(bias)
        assert np.isfinite(dbias).all()
        assert not dbias[~np.isfinite(bias)].any()
        assert dbias.any()

    @pytest.mark.parametrize("size", ["B", "T", "S", "N"])
    def test_sizes_of_0(self, implementation: str, size: str) -> None:
        """Empty or zero results and gradients, with every mask."""
        b, t, s, n = (0 if name == size else length for name, length in zip("BTSN", (2, 4, 5, 2), strict=True))
        q, k, v = normal(b, t, n, 4), normal(b, s, n, 4), normal(b, s, n, 3)
        masks = {
            "bias": normal(b, n, t, s),
            "query_segment_ids": np.zeros((b, t), np.int32),
            "key_value_segment_ids": np.zeros((b, s), np.int32),
            "query_seq_lengths": np.zeros(b, np.int32),
            "sinks": normal(n),
        }
        for extra in ({}, masks):
            out, lse = attention(q, k, v, return_residual=True, implementation=implementation, **extra)
            assert out.shape == (b, t, n, 3)
            assert lse.shape == (b, t, n)
            assert not out.any()
            assert (np.asarray(lse) == -np.inf).all()
            got = gradients(implementation, q, k, v, **extra)
            assert [x.shape for x in got] == [q.shape, k.shape, v.shape]
            assert not any(x.any() for x in got)

    @pytest.mark.parametrize("widths", [(0, 4), (4, 0)], ids=["D", "Dv"])
    def test_head_widths_of_0(self, implementation: str, widths: tuple[int, int]) -> None:
        """With D = 0 every logit is 0; with Dv = 0 the output is empty."""
        width, value_width = widths
        q, k, v = normal(1, 6, 2, width), normal(1, 7, 1, width), normal(1, 7, 1, value_width)
        out, lse = attention(q, k, v, return_residual=True, implementation=implementation)
        assert_close(out, np.broadcast_to(v.mean(1)[:, None], (1, 6, 2, value_width)))
        if width == 0:
            assert_close(lse, np.full((1, 6, 2), np.log(7)))
        assert [x.shape for x in gradients(implementation, q, k, v)] == [q.shape, k.shape, v.shape]

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: np.dtype(dtype).name)
    def test_gradients_keep_the_dtype_of_their_input(self, implementation: str, dtype: Any) -> None:
        """One peer writes float16 gradients for bfloat16 inputs."""
        q = normal(1, 4, 2, 4, dtype=dtype)
        floats = {"bias": normal(4, 4, dtype=jnp.float16), "scale": np.float32(0.3), "sinks": normal(2, dtype=dtype)}
        total = lambda q, floats: attention(q, q, q, **floats, implementation=implementation).astype(jnp.float32).sum()  # noqa: E731
        found = jax.jit(jax.grad(total, (0, 1)))(q, floats)
        assert found[0].dtype == q.dtype
        assert {name: x.dtype for name, x in found[1].items()} == {name: x.dtype for name, x in floats.items()}

    def test_x64_mode_changes_no_dtype(self, implementation: str) -> None:
        q = normal(1, 4, 2, 4)
        with jax.enable_x64(True):
            out, lse = attention(
                q, q, q, query_offset=1, scale=0.5, return_residual=True, implementation=implementation
            )
            assert out.dtype == np.float32
            assert lse.dtype == np.float32
