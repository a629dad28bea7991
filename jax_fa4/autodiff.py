"""Differentiation, batching and remat names of attention, written once above every implementation.

An implementation has two functions, `forward` and `backward`, of operands in sorted order. Around them stand, from the
inside out: a vmap rule that folds the mapped axis into the batch; the permutations of segment ids; one custom_vjp with
lse as a differentiable result; and a guard that makes forward-mode differentiation fail with a sentence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fa4 import problem as spec
from jax_fa4 import reference, sharding

_Results = tuple[Array, Array, Array | None]
"""Out (B, T, N, Dv), lse (B, T, N), and the lse's rounding (exact lse minus lse) if the implementation gives it.

Without the last, exp(logits - lse) would miss a row's sum by a factor where |lse| is so large that log(sum) rounds off.
"""
_SinkResults = tuple[Array, Array, Array | None, Array | None]
"""Of these, out scaled by sinks if there are any; and what `apply_sinks` gives beside."""
_BackwardArrays = tuple[Array, Array, Array | None, Array, Array | None]
"""Out, lse and its rounding, and the cotangents of out and of lse if it has one: what a `backward` takes, by row."""

CHECKPOINT_NAMES = ("jax_fa4_out", "jax_fa4_lse")
"""Names of the residuals, for `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`.

Under a remat policy that saves them, the forward runs once; under one that does not, the backward repeats it.
"""


def attend(
    implementation: ModuleType, problem: spec.Problem, operands: spec.Operands, sinks: Array | None = None
) -> tuple[Array, Array]:
    """Runs an implementation under every transformation; returns out (B, T, N, Dv) and lse (B, T, N).

    Sinks (N,) are in the compute dtype. They need nothing of an implementation: see `apply_sinks`.

    Reverse-mode derivatives of any order work: the first by the implementation's `backward`, higher ones through
    `reference`. Forward mode raises TypeError unless the implementation is `reference`.
    """
    operands, sinks = spec.varied((operands, sinks))
    if implementation is reference:
        return forward(implementation, problem, operands, sinks)[:2]
    out, lse, _, _ = _attend(implementation, problem, *reverse_mode_only((operands, sinks)))
    return out, lse


def reverse_mode_only(tree: Any) -> Any:
    """The same arrays, of which forward-mode differentiation raises TypeError."""
    return jax.tree.map(lambda x: _operand_p.bind(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def apply_sinks(sinks: Array | None, results: _Results, dtype: np.dtype) -> _SinkResults:
    """Scales out by the share of a row's softmax that its sink leaves to the keys: exp(lse) / (exp(lse) + exp(sink)).

    Args:
      sinks: (N,), in the compute dtype, as out is then; None if there are none.
      results: without sinks. Rows that see nothing are 0, and stay so.
      dtype: that out is to have.

    Returns:
      The results with sinks; and out as it was, for their gradient, if the scaled one may underflow, as in float16.
    """
    out, lse, lse_rounding = results
    if sinks is None:
        return out.astype(dtype), lse, lse_rounding, None
    share = _sigmoid(_over_sinks(sinks, lse, lse_rounding))
    # Whatever the cotangent is of a row that sees nothing.
    scaled = out * jnp.where(lse == -jnp.inf, 0, share)[..., None]
    return scaled.astype(dtype), lse, lse_rounding, out.astype(dtype) if dtype == np.float16 else None


def under_sinks(
    sinks: Array | None, unscaled: Array | None, arrays: _BackwardArrays
) -> tuple[_BackwardArrays, Array | None]:
    """What a `backward` that knows no sinks is given for the gradients under sinks; and the gradient of the sinks.

    Out is scaled by the share of the softmax that a row's keys have, so dout is too. But it must not be rounded: what
    counts is the difference between dout value^T and delta, which is small where a row has one large weight. So 16-bit
    cotangents stay what they are, and the weights are scaled. They are exp(logits - total) under sinks, where `total`
    is the log-sum-exp of a row's logits and its sink. The weights which lse has as its derivatives are others, and so
    dlse is divided by the share. Where that might overflow, dout is multiplied all the same.

    Args:
      sinks: (N,), in the compute dtype; None if there are none, which changes nothing.
      unscaled: out as it was before, if `apply_sinks` gave it.
      arrays: out, scaled by `apply_sinks`; lse without sinks, and its rounding; and the cotangents.

    Returns:
      The arrays for `backward`; and the gradient of sinks (N,), if there are any.
    """
    if sinks is None:
        return arrays, None
    out, lse, lse_rounding, dout, dlse = arrays
    some, over = lse != -jnp.inf, _over_sinks(sinks, lse, lse_rounding)
    share, wide = _sigmoid(over), jnp.where(some[..., None], spec.as_stored(dout), 0)
    kept, weight = (out, 1) if unscaled is None else (unscaled, share)
    delta = weight * (wide * kept.astype(lse.dtype)).sum(-1)
    dsinks = -(jnp.where(some, _sigmoid(-over), 0) * delta).sum((0, 1))
    scaled = (wide * share[..., None]).astype(dout.dtype)
    if dout.dtype == lse.dtype:
        return (out, lse, lse_rounding, scaled, dlse), dsinks
    top, more = jnp.where(over > 0, lse, sinks[None, None]), jnp.log1p(jnp.exp(-jnp.abs(over)))
    total = jnp.where(some, top + more, -jnp.inf)
    rounding = jnp.where(jnp.isfinite(total), more - (total - top), 0)
    if lse_rounding is not None:
        rounding += jnp.where(over > 0, lse_rounding, 0)
    if dlse is not None:
        faint = share < 2.0**-60
        rounding = jnp.where(faint, 0 if lse_rounding is None else lse_rounding, rounding)
        total = jnp.where(faint, lse, total)
        dout = jnp.where(faint[..., None], scaled, dout)
        dlse = dlse / jnp.where(faint, 1, share).astype(dlse.dtype)
    return (out, total, rounding, dout, dlse), dsinks


@jax.custom_jvp
def _sigmoid(x: Array) -> Array:
    """Of `jax.nn.sigmoid` the derivative, s * (1 - s), has lost most digits where 1 - s is small."""
    return jax.nn.sigmoid(x)


_sigmoid.defjvps(lambda tangent, share, x: tangent * (share * _sigmoid(-x)))


def named(results: _SinkResults) -> _SinkResults:
    """Results with the names of residuals."""
    out, lse, rounding, unscaled = results
    (out, unscaled), (lse, rounding) = map(checkpoint_name, ((out, unscaled), (lse, rounding)), CHECKPOINT_NAMES)
    return out, lse, rounding, unscaled


def _over_sinks(sinks: Array, lse: Array, lse_rounding: Array | None) -> Array:
    """By how much lse exceeds the sinks; 0 for rows that see nothing."""
    over = jnp.where(lse == -jnp.inf, 0, lse) - sinks[None, None]
    return over if lse_rounding is None else over + lse_rounding


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    implementation: ModuleType, problem: spec.Problem, operands: spec.Operands, sinks: Array | None
) -> _SinkResults:
    return forward(implementation, problem, operands, sinks)


def _attend_fwd(implementation: ModuleType, problem: spec.Problem, *primals: Any) -> tuple[Any, Any]:
    operands, sinks = jax.tree.map(lambda primal: primal.value, primals)
    results = out, lse, rounding, unscaled = named(_attend(implementation, problem, operands, sinks))
    # Whether the bias's gradient is wanted is static: it travels in the tree structure of the residuals.
    wants_bias = () if operands.bias is not None and primals[0].bias.perturbed else None
    return results, (operands, sinks, unscaled, out, lse, rounding, wants_bias)


def _attend_bwd(implementation: ModuleType, problem: spec.Problem, residuals: Any, cotangents: Any) -> tuple[Any, Any]:
    *results, wants_bias = residuals
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents[:2])
    dout = jnp.zeros_like(results[3]) if dout is None else dout
    gradients, dsinks = backward(implementation, problem, wants_bias is not None, *results, dout, dlse)
    return spec.Operands(**gradients._asdict()), dsinks


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def backward(
    implementation: ModuleType,
    problem: spec.Problem,
    with_bias: bool,
    operands: spec.Operands,
    sinks: Array | None,
    unscaled: Array | None,
    out: Array,
    lse: Array,
    lse_rounding: Array | None,
    dout: Array,
    dlse: Array | None,
) -> tuple[spec.Gradients, Array | None]:
    """The gradients of the operands, in their shapes and order, and of sinks, from what `forward` returned."""
    arrays, dsinks = under_sinks(sinks, unscaled, (out, lse, lse_rounding, dout, dlse))
    call = functools.partial(_call_backward, implementation, problem, with_bias)
    rows = operands.query_order
    if rows is not None:
        arrays = jax.tree.map(lambda x: spec.permute(x, rows, 1), arrays)
    gradients = _foldable(call, implementation, sharding.GRADIENTS, one_by_one=with_bias)((_sort(operands), *arrays))
    scale = gradients.scale.reshape(-1, operands.scale.shape[0]).sum(0).astype(operands.scale.dtype)
    gradients = gradients._replace(scale=scale)
    if operands.query_order is None or operands.key_order is None:
        return gradients, dsinks
    row, key = jnp.argsort(operands.query_order, axis=1), jnp.argsort(operands.key_order, axis=1)
    bias = gradients.bias
    if bias is not None and operands.bias is not None:
        bias = spec.permute(spec.permute(bias, row, 2), key, 3)
        # Sorting may have given every batch element a bias of its own.
        bias = bias if bias.shape == operands.bias.shape else bias.sum(0, keepdims=True)
    gradients = spec.Gradients(
        spec.permute(gradients.query, row, 1),
        spec.permute(gradients.key, key, 1),
        spec.permute(gradients.value, key, 1),
        scale,
        bias,
    )
    return gradients, dsinks


def _backward_fwd(
    implementation: ModuleType, problem: spec.Problem, with_bias: bool, *arguments: Any
) -> tuple[tuple[spec.Gradients, Array | None], Any]:
    operands, sinks, *_, dout, dlse = arguments
    return backward(implementation, problem, with_bias, *arguments), (operands, sinks, dout, dlse)


def _backward_bwd(
    implementation: ModuleType, problem: spec.Problem, with_bias: bool, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    """Differentiates the gradients through `reference`, whose derivatives of every order are JAX's own.

    Out and lse are functions of the operands and sinks, so the whole derivative is given to these.
    """
    operands, sinks, dout, dlse = residuals
    names = [name for name in spec.Gradients._fields if getattr(operands, name) is not None]

    def gradients(floats: dict[str, Array], sinks: Array | None, dout: Array, dlse: Array | None) -> Any:
        def attend(floats: dict[str, Array], sinks: Array | None) -> tuple[Array, Array]:
            out, lse, *_ = forward(reference, problem, operands._replace(**floats), sinks)
            return out, lse.astype(spec.compute_dtype(out.dtype))

        (_, lse), pullback = jax.vjp(attend, floats, sinks)
        found, dsinks = pullback((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        return spec.Gradients(**{**found, "bias": found["bias"] if with_bias else None}), dsinks

    _, pullback = jax.vjp(gradients, {name: getattr(operands, name) for name in names}, sinks, dout, dlse)
    floats, dsinks, ddout, ddlse = pullback(cotangents)
    given = spec.Operands(**{**dict.fromkeys(spec.Operands._fields), **floats})
    return given, dsinks, None, None, None, None, ddout, ddlse


backward.defvjp(_backward_fwd, _backward_bwd)


def forward(
    implementation: ModuleType, problem: spec.Problem, operands: spec.Operands, sinks: Array | None = None
) -> _SinkResults:
    """Out, lse and its rounding, in the order of the rows; unlike `attend` without a derivative of its own."""
    dtype = spec.out_dtype(problem, operands)
    problem = problem if sinks is None else dataclasses.replace(problem, wide_out=True)
    call = functools.partial(_call_forward, implementation, problem)
    # `reference` is differentiated by JAX itself, which a custom vmap rule would prevent.
    results = (call if implementation is reference else _foldable(call, implementation, sharding.RESULTS))(
        (_sort(operands),)
    )
    if operands.query_order is not None:
        row = jnp.argsort(operands.query_order, axis=1)
        results = jax.tree.map(lambda x: spec.permute(x, row, 1), results)
    return apply_sinks(sinks, results, dtype)


def _call_forward(implementation: ModuleType, problem: spec.Problem, arguments: tuple[spec.Operands]) -> _Results:
    (operands,) = arguments
    if operands.is_empty:
        shape = (operands.batch, *operands.query.shape[1:3])
        lse = jnp.full(shape, -jnp.inf, spec.compute_dtype(operands.query.dtype))
        out = jnp.zeros((*shape, operands.value.shape[-1]), spec.out_dtype(problem, operands))
        return spec.varied_like(operands.query, (out, lse, jnp.zeros_like(lse)))
    return implementation.forward(problem, operands)


def _call_backward(
    implementation: ModuleType, problem: spec.Problem, with_bias: bool, arguments: Any
) -> spec.Gradients:
    operands, out, lse, rounding, dout, dlse = arguments
    if operands.is_empty:
        query, key, value = (jnp.zeros((len(dout), *x.shape[1:]), x.dtype) for x in operands[:3])
        bias = jnp.zeros_like(operands.bias) if with_bias else None
        scale = jnp.zeros(len(dout), operands.scale.dtype)
        return spec.varied_like(operands.query, spec.Gradients(query, key, value, scale, bias))
    return implementation.backward(problem, operands, out, lse, rounding, dout, dlse, with_bias=with_bias)


def _sort(operands: spec.Operands) -> spec.Operands:
    """Applies the operands' permutations to the arrays they concern.

    Keys that no row sees, beyond a length say, come to lie among those of their segment: in the midst of the keys. They
    are zeroed, so that an implementation has to keep out only what lies outside of the hull of its rows' bounds.
    """
    rows, keys, lower, upper = operands.query_order, operands.key_order, operands.lower, operands.upper
    if rows is None or keys is None or lower is None or upper is None:
        return operands
    seen = spec.seen_keys(lower, upper, keys.shape[1])[..., None, None]
    bias, mask = (
        None if x is None else spec.permute(spec.permute(x, rows, 2), keys, 3) for x in (operands.bias, operands.mask)
    )
    return operands._replace(
        query=spec.permute(operands.query, rows, 1),
        key=jnp.where(seen, spec.permute(operands.key, keys, 1), 0),
        value=jnp.where(seen, spec.permute(operands.value, keys, 1), 0),
        bias=bias,
        mask=mask,
        query_order=None,
        key_order=None,
    )


def _foldable(
    function: Callable[[Any], Any], implementation: ModuleType, letters: Sequence[str], *, one_by_one: bool = False
) -> Callable[[Any], Any]:
    """Gives a function of `(operands, *row arrays)` a vmap rule, and lets it be split over devices.

    The mapped axis is folded into the batch. Operands that are not mapped are not copied: their leading axis stays
    shorter than the batch (see `Operands`). What sums over the batch inside, as a bias gradient does, cannot be folded
    and is computed one by one.

    Axes are folded on each device, since an array whose batch is split has no such split of the folded axis.
    """

    def foldable(lead: int) -> Callable[[Any], Any]:
        """For arrays with `lead` mapped axes first, of length 1 where an array is not mapped."""
        call = custom_vmap(
            lambda arguments: sharding.over_auto_axes(
                functools.partial(_folded, lead, function), implementation, arguments, letters, lead
            )
        )

        def rule(size: int, mapped: Any, arguments: Any) -> tuple[Any, Any]:
            del size
            if one_by_one:
                leaves, tree = jax.tree.flatten(arguments)
                flags = jax.tree.leaves(mapped[0])

                def one(slices: list[Array]) -> Any:
                    rest = iter(slices)
                    return call(
                        jax.tree.unflatten(tree, [next(rest) if m else x for x, m in zip(leaves, flags, strict=True)])
                    )

                results = lax.map(one, [x for x, m in zip(leaves, flags, strict=True) if m])
            else:
                results = foldable(lead + 1)(jax.tree.map(lambda x, m: x if m else x[None], arguments, mapped[0]))
            return results, jax.tree.map(lambda _: True, results)

        call.def_vmap(rule)
        return call

    return foldable(0)


def _folded(lead: int, function: Callable[[Any], Any], arguments: Any) -> Any:
    """Calls a function with the `lead` first axes of all arrays folded into the batch, the last one first."""
    if not lead:
        return function(arguments)
    operands, *rows = arguments

    def longest(axis: int) -> int:
        lengths = [x.shape[axis] for x in jax.tree.leaves(arguments)]
        return 0 if 0 in lengths else max(lengths)

    size, batch = longest(lead - 1), longest(lead)

    def fold(x: Array, is_mapped: bool) -> Array:
        outer, length, rest = x.shape[: lead - 1], x.shape[lead], x.shape[lead + 1 :]
        x = x.reshape(*outer, size if is_mapped else 1, 1, length, *rest)
        x = jnp.broadcast_to(x, (*outer, size, batch // max(length, 1), length, *rest))
        return x.reshape(*outer, size * batch, *rest)

    folded = (
        jax.tree.map(lambda x: jnp.squeeze(x, lead - 1) if x.shape[lead - 1] == 1 else fold(x, True), operands),
        *jax.tree.map(lambda x: fold(x, x.shape[lead - 1] != 1), rows),
    )
    results = _folded(lead - 1, function, folded)
    return jax.tree.map(lambda x: x.reshape(*x.shape[: lead - 1], size, batch, *x.shape[lead:]), results)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "jax_fa4 supports forward-mode differentiation (jvp, jacfwd, linearize, hessian) only with "
        "implementation='reference'; reverse mode (grad, vjp, jacrev) works with every implementation."
    )


# The identity on operands. Its tangents pass through a second identity that can be transposed but neither run, batched
# nor differentiated: reverse mode only ever does the former, forward mode always one of the others. The operand goes
# along because a vmap that maps it, and not its tangent, is forward mode too.
_operand_p = Primitive("jax_fa4_reverse_mode_only")
_operand_p.def_impl(lambda x: x)
_operand_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_operand_p, lambda context, x: [x])
batching.defvectorized(_operand_p)

_tangent_p = Primitive("jax_fa4_reverse_mode_only_tangent")
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda tangent, operand: tangent)
mlir.register_lowering(_tangent_p, _refuse)
batching.primitive_batchers[_tangent_p] = _refuse
ad.primitive_jvps[_tangent_p] = _refuse
ad.primitive_transposes[_tangent_p] = lambda cotangent, tangent, operand: (cotangent, None)


def _operand_jvp(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    (operand,), (tangent,) = primals, tangents
    tangent = tangent if isinstance(tangent, ad.Zero) else _tangent_p.bind(tangent, operand)
    return _operand_p.bind(operand), tangent


ad.primitive_jvps[_operand_p] = _operand_jvp
