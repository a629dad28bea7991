"""Attention for layers of Flax, nnx and linen: give `attention_fn` to a `MultiHeadAttention`.

It takes what both hand to their own `dot_product_attention`, refuses what it cannot do, and computes with
`jax_fa4.attention`. Nothing here imports Flax, so every release of it will do, and a layer of one's own as well.

Flax has dense masks, and kernels know row bounds. Most masks of models are row bounds written out: causal, padding,
windows, packed documents that lie side by side, a cache filled so far. A mask whose values are known is looked at while
tracing. One that is traced is computed into row bounds and compared with them where the program runs, which then takes
one of two branches, so that no mask is ever taken for another. What is known when the layer is written is better said
directly: `AttentionFn(is_causal=True)`, and `StructuredMask` for what changes with the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_fa4.arguments import as_array, check_device, flag
from jax_fa4.attention import attention, why_not

_ArrayOrStruct = ArrayLike | jax.ShapeDtypeStruct
_Class = TypeVar("_Class")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StructuredMask:
    """What a layer's `mask` may be instead of an array: masks that need no (T, S) array, and change with the batch.

    They intersect, and mean what they mean in `jax_fa4.attention`. Flax hands a `mask` on as it is, except in decoding,
    where it intersects it with its own and wants an array. An instance is a pytree and may be traced.

    Attributes:
      query_seq_lengths: int32 (batch...); rows from there on see nothing.
      key_value_seq_lengths: int32 (batch...); keys from there on are hidden.
      query_segment_ids: int32 (batch..., T); a row sees the keys of equal id. Both ids are given, or none.
      key_value_segment_ids: int32 (batch..., S).
      row_bounds: (lower, upper), each int32 (batch..., T): row `i` sees key positions in `[lower, upper)`.
    """

    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    query_segment_ids: ArrayLike | None = None
    key_value_segment_ids: ArrayLike | None = None
    row_bounds: tuple[ArrayLike, ArrayLike] | None = None

    @property
    def ndim(self) -> int:
        """What Flax asks for first where it wants an array.

        Raises:
          TypeError: always.
        """
        raise TypeError(
            "mask must be an array while a layer decodes with a cache, which intersects it with a mask of its own, "
            "but got a StructuredMask."
        )

    def _arguments(self, batch: tuple[int, ...]) -> dict[str, Any]:
        """Arguments of `jax_fa4.attention`, with one batch axis in place of `batch`; it refuses what is wrong."""

        def flat(name: str, x: Any, axes: int) -> Any:
            if x is None or len(batch) == 1:
                return x
            array = as_array(name, x)
            if array.ndim != len(batch) + axes or array.shape[: len(batch)] != batch:
                raise ValueError(
                    f"{name}'s shape must be (batch...{', length' * axes}), with the batch axes of query, {batch}, "
                    f"but got {array.shape}."
                )
            return _folded(name, array, batch)

        bounds: Any = self.row_bounds
        if isinstance(bounds, tuple | list):
            bounds = tuple(flat("row_bounds", x, 1) for x in bounds)
        lengths = ("query_seq_lengths", "key_value_seq_lengths")
        ids = ("query_segment_ids", "key_value_segment_ids")
        given = {
            **{name: flat(name, getattr(self, name), 0) for name in lengths},
            **{name: flat(name, getattr(self, name), 1) for name in ids},
            "row_bounds": bounds,
        }
        return {name: x for name, x in given.items() if x is not None}


def _with_options_only(cls: type[_Class]) -> type[_Class]:
    """Makes a dataclass refuse what is no option, such as the operands of a layer that was given the class."""
    init, names = cls.__init__, inspect.signature(cls).parameters

    @functools.wraps(init)
    def checked(self: Any, *options: Any, **named: Any) -> None:
        unknown = [name for name in named if name not in names]
        if unknown or any(isinstance(x, jax.Array) and x.ndim for x in options):
            raise TypeError(
                f"{cls.__name__} has the options {', '.join(names)}, but got "
                f"{unknown[0] if unknown else 'an array by position'}. An attention_fn is an instance: give a layer "
                f"{cls.__name__}(...) with its options, or attention_fn, rather than the class."
            )
        init(self, *options, **named)

    setattr(cls, "__init__", checked)  # noqa: B010
    return cls


@_with_options_only
@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """An `attention_fn` for Flax's layers; `attention_fn` is the one with all defaults.

    Options are static and say what Flax's arguments cannot. Two instances of equal options are equal, and so are
    modules that hold them.

    In decoding with a cache, Flax gives one query row, all S keys, and a mask that shows the tokens so far. The row
    then is that of the last key which its mask shows, dense or structured: windows count from there, and causality
    hides nothing more.

    Attributes:
      is_causal: row `i` sees keys up to position `i`; also where a call does not say so, as linen's never do.
      local_window_size: (left, right), inclusive: row `i` sees keys from `i - left` to `i + right`. None on a side is
        unbounded, one int means both sides.
      scale: the number to multiply the logits by, by default `1 / sqrt(D)`.
      softcap: c of `c * tanh(logits / c)`, or None.
      deterministic_gradients: `deterministic` of `jax_fa4.attention`. (Flax's argument of that name is about dropout.)
      implementation: as in `jax_fa4.attention`. One that takes no dense mask refuses masks that are traced.

    Raises:
      TypeError: an option is no constant, there is no such option, or the class was called where its instance is meant.
    """

    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    deterministic_gradients: bool = False
    implementation: str | None = None

    def __post_init__(self) -> None:
        flag("is_causal", self.is_causal)
        flag("deterministic_gradients", self.deterministic_gradients)
        for field in dataclasses.fields(self):
            option = getattr(self, field.name)
            try:
                hash(option)
            except TypeError:
                raise TypeError(
                    f"{field.name} must be hashable, because layers keep it as a constant, "
                    f"but got {option!r} of type {type(option).__name__}."
                ) from None

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | StructuredMask | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        *,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Any] | None = None,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
    ) -> Array:
        """Attention, with the arguments of both of Flax's `dot_product_attention`; `batch...` is any number of axes.

        It differs from theirs where a row sees no key: the result is 0, not the mean of the values.

        Args:
          query: (batch..., T, N, D).
          key: (batch..., S, K, D), with N a multiple of K.
          value: (batch..., S, K, Dv).
          bias: added to the logits; broadcastable to (batch..., N, T, S), with at most as many axes. Differentiable.
          mask: bool, or numbers of which all but 0 mean True, as in Flax; False hides. Negative ones are of additive
            masks, which are a `bias`, and refused where they are known. Shaped like `bias`. Or a `StructuredMask`.
          broadcast_dropout: says how dropout would be done; of no effect without it.
          dropout_rng: likewise.
          dropout_rate: above 0 only where `deterministic` is True.
          deterministic: whether there is no dropout.
          dtype: that of the computation; by default what the dtypes of query, key and value promote to, and at least
            float32 for integers. The softmax is float32 anyway (float64 for float64).
          precision: None or `lax.Precision.DEFAULT`: products of float32 have the precision that
            `jax.default_matmul_precision` gives, and others have one only.
          module: None: there are no weights to sow.
          promote_dtype: what to promote query, key and value with, as nnx has it.
          is_causal: row `i` sees keys up to position `i`.
          force_fp32_for_softmax: satisfied either way.
          einsum_dot_general: None, like the next two.
          qk_attn_weights_einsum: None.
          attn_weights_value_einsum: None.

        Returns:
          (batch..., T, N, Dv), in the dtype of the computation.

        Raises:
          NotImplementedError: dropout is active, weights are to be sown, or another argument asks for what is not done.
          ValueError, TypeError: an argument has a wrong shape, dtype, value or type.
        """
        arguments = {name: x for name, x in locals().items() if name != "self"}
        return self._pose(**arguments).run()

    def why_not(
        self,
        implementation: str | None,
        query: _ArrayOrStruct,
        key: _ArrayOrStruct,
        value: _ArrayOrStruct,
        bias: _ArrayOrStruct | None = None,
        mask: _ArrayOrStruct | StructuredMask | None = None,
        *,
        device: jax.Device | None = None,
        **arguments: Any,
    ) -> str | None:
        """Why an implementation would not run this call, or not for all values of its mask; None if it would.

        Args:
          implementation: a name, as in `jax_fa4.why_not`; "cuda" for what made a call fall back.
          query: as in a call; here every array may be a `jax.ShapeDtypeStruct`.
          key: likewise.
          value: likewise.
          bias: likewise.
          mask: likewise; the values of a struct are not known, as those of a traced array are not.
          device: the device to run on; by default the one that JAX would choose.
          **arguments: the other arguments of the call.

        Returns:
          The sentence of the error that the call would raise with this implementation.

        Raises:
          TypeError: the call has no argument of that name, or `device` is none.
        """
        check_device(device)
        chosen = dataclasses.replace(self, implementation=implementation)
        bound = inspect.signature(chosen).bind(query, key, value, bias, mask, **arguments)
        bound.apply_defaults()
        leaves, tree = jax.tree.flatten(bound.arguments)
        structs = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}
        reasons: list[str | None] = []

        def pose(structs: dict[int, Any]) -> None:
            call = jax.tree.unflatten(tree, [structs.get(i, x) for i, x in enumerate(leaves)])
            reasons.append(chosen._pose(**call).why_not(device))

        try:
            jax.eval_shape(pose, structs)
        except (ValueError, TypeError, NotImplementedError) as error:
            return str(error)
        return reasons[0]

    def _pose(
        self,
        *,
        query: Any,
        key: Any,
        value: Any,
        bias: Any,
        mask: Any,
        broadcast_dropout: Any,
        dropout_rng: Any,
        dropout_rate: Any,
        deterministic: Any,
        dtype: Any,
        precision: Any,
        module: Any,
        promote_dtype: Any,
        is_causal: Any,
        force_fp32_for_softmax: Any,
        einsum_dot_general: Any,
        qk_attn_weights_einsum: Any,
        attn_weights_value_einsum: Any,
    ) -> _Call:
        """Checks a call's arguments and turns them into those of `jax_fa4.attention`."""
        del broadcast_dropout, dropout_rng, force_fp32_for_softmax  # of no effect, as their descriptions say
        if isinstance(dropout_rate, jax.core.Tracer):
            raise TypeError("dropout_rate must be a number, known when tracing, but got a traced array.")
        is_causal = flag("is_causal", is_causal)
        if dropout_rate and not flag("deterministic", deterministic):
            raise NotImplementedError(
                f"dropout_rate must be 0 where deterministic is False, but got {dropout_rate!r}: "
                "there is no dropout of attention weights."
            )
        if module is not None:
            raise NotImplementedError(
                f"module must be None, but got {type(module).__name__}: attention weights are never in memory, "
                "so that sow_weights=True is for Flax's own attention function."
            )
        if not (precision is None or precision == lax.Precision.DEFAULT or precision == "default"):
            raise NotImplementedError(
                f"precision must be None or lax.Precision.DEFAULT, but got {precision!r}: "
                "jax.default_matmul_precision sets it for the forward and the backward pass."
            )
        for name, function in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if function is not None:
                raise NotImplementedError(f"{name} must be None, but got {function!r}: the products are in one kernel.")

        if dtype is not None:
            _check_dtype(dtype)
        query, key, value = (as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
        if promote_dtype is not None:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        else:
            query, key, value = _promote((query, key, value), dtype)
        batch = query.shape[:-3]
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim < 3 or x.shape[:-3] != batch:
                raise ValueError(
                    f"{name}'s shape must be (batch..., length, heads, width), with the batch axes of query, {batch}, "
                    f"but got {x.shape}."
                )
        rows, keys = query.shape[-3], key.shape[-3]
        arguments: dict[str, Any] = {"query": query, "key": key, "value": value}
        arguments = {name: _folded(name, x, batch) for name, x in arguments.items()}
        sizes = (*batch, query.shape[-2], rows, keys)
        if bias is not None:
            arguments["bias"] = _with_one_batch_axis("bias", bias, sizes)
        arguments |= {
            "is_causal": self.is_causal or is_causal,
            "local_window_size": self.local_window_size,
            "scale": self.scale,
            "softcap": self.softcap,
            "deterministic": self.deterministic_gradients,
            "implementation": self.implementation,
        }
        if mask is None:
            return _Call(batch, arguments, {})
        if not isinstance(mask, StructuredMask):
            mask, known = _as_mask(mask)
            mask = _with_one_batch_axis("mask", mask, sizes)
        step = rows == 1 < keys
        if step and is_causal:
            raise ValueError(
                f"is_causal must be False in a call with a mask, one query row and {keys} keys, but got {is_causal}: "
                "it would hide all keys but the first. A mask of decoding hides itself what is to come."
            )
        if not isinstance(mask, StructuredMask):
            return _pose_mask(batch, arguments, mask, known)
        structured = mask._arguments(batch)
        if step and (self.is_causal or self.local_window_size is not None):
            structured |= _place_of_step(structured, math.prod(batch), keys)
        return _Call(batch, arguments, structured)


attention_fn = AttentionFn()
"""For every `attention_fn=` of Flax; see `AttentionFn`, also for its arguments."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of `jax_fa4.attention`: with a structured mask, with a dense one, or with either, as the values may be."""

    batch: tuple[int, ...]
    arguments: dict[str, Any]
    structured: dict[str, Any] | None = None
    dense: dict[str, Any] | None = None
    exact: Array | None = None  # bool (), where both are given: whether the structured mask is the dense one
    reason: str = ""  # why there is a dense one

    def run(self) -> Array:
        if self.dense is None:
            out = self._structured()
        elif self.exact is None:
            out = self._dense()
        else:
            out = lax.cond(self.exact, self._structured, self._dense)
        return out if len(self.batch) == 1 else out.reshape(*self.batch, *out.shape[1:])

    def why_not(self, device: jax.Device | None) -> str | None:
        options = {"device": device, **self.arguments}
        implementation = options.pop("implementation")
        reason = None
        if self.structured is not None:
            reason = why_not(implementation, **options, **self.structured)
        if reason is None and self.dense is not None:
            reason = why_not(implementation, **options, **self.dense)
            reason = reason and f"{self.reason} {reason}".strip()
        return reason

    def _structured(self) -> Array:
        return attention(**self.arguments, **(self.structured or {}))

    def _dense(self) -> Array:
        try:
            return attention(**self.arguments, **(self.dense or {}))
        except NotImplementedError as error:
            raise NotImplementedError(f"{self.reason} {error}".strip()) from error


def _pose_mask(batch: tuple[int, ...], arguments: dict[str, Any], mask: Any, known: bool) -> _Call:
    """Poses a call with a dense mask: bool, (1 or B, 1 or N, 1 or T, 1 or S), NumPy's if its values are known."""
    size, rows, keys = math.prod(batch), arguments["query"].shape[1], arguments["key"].shape[1]
    xp: Any = np if known else jnp
    lower, upper, count = _hull(xp, xp.broadcast_to(mask, (*mask.shape[:3], keys)))
    if rows == 1 < keys and (arguments["is_causal"] or arguments["local_window_size"] is not None):
        arguments |= {"query_offset": xp.broadcast_to(upper.max((1, 2), initial=0) - np.int32(1), (size,))}
    if known:
        same = (mask == mask[:, :1]).all()
        mask = mask[:, :1] if same else mask
    if mask.shape[1] != 1:
        reason = "mask differs from head to head."
        if not known:
            reason = "mask has an axis for heads, and its values are known only where the program runs."
        return _Call(batch, arguments, dense={"mask": mask}, reason=reason)
    if known and rows > 1 and mask.shape[2:] == (rows, keys) and (mask == np.tri(rows, keys, dtype=bool)).all():
        return _Call(batch, arguments | {"is_causal": True}, {})

    lower, upper, count = (x[:, 0] for x in (lower, upper, count))
    gaps = xp.maximum(upper - lower, 0) != count
    structured = {"row_bounds": tuple(xp.broadcast_to(x, (size, rows)) for x in (lower, upper))}
    if not known and "bias" in arguments:
        return _Call(batch, arguments, dense={"mask": mask})  # row bounds would not spare the bias
    if not known:
        reason = (
            "mask's values are known only where the program runs, which takes the mask as it is unless every row "
            "shows one interval of keys."
        )
        return _Call(batch, arguments, structured, {"mask": mask}, ~jnp.any(gaps), reason)
    if gaps.any():
        element, row = np.argwhere(gaps)[0]
        reason = f"mask shows more than one interval of keys in row {row} of batch element {element}."
        return _Call(batch, arguments, dense={"mask": mask}, reason=reason)
    return _Call(batch, arguments, structured)


def _as_mask(mask: Any) -> tuple[Any, bool]:
    """A mask as bool, and whether its values are known, in which case it is NumPy's."""
    given = mask
    if not isinstance(mask, jax.Array):
        try:
            mask = np.asarray(mask)
        except ValueError:  # a tuple of masks
            mask = np.asarray(None)
    if not (jnp.issubdtype(mask.dtype, np.number) or mask.dtype == np.bool_):
        got = repr(given) if isinstance(given, str | type) else f"an object of type {type(given).__name__}"
        raise TypeError(f"mask must be an array of bool or of numbers, or one StructuredMask, but got {got}.")
    known = not isinstance(mask, jax.core.Tracer) and getattr(mask, "is_fully_addressable", True)
    if not known:
        return mask.astype(bool), known
    mask = np.asarray(mask)
    if mask.dtype != np.bool_ and (mask < 0).any():
        raise ValueError(
            f"mask must hide with 0 and show with 1, but got {mask.min()}: "
            "a mask that is added to the logits is a bias."
        )
    return mask.astype(bool), known


def _place_of_step(structured: dict[str, Any], size: int, keys: int) -> dict[str, Array]:
    """The `query_offset` of one row under a structured mask: the last key that it shows, or -1 where there is none."""
    shapes = {
        "key_value_seq_lengths": (size,),
        "query_segment_ids": (size, 1),
        "key_value_segment_ids": (size, keys),
    }
    given = {name: as_array(name, structured[name]) for name in shapes if name in structured}
    bounds = structured.get("row_bounds", ())
    bounds = [as_array("row_bounds", x) for x in bounds] if isinstance(bounds, tuple) else [jnp.zeros(())]
    if (
        any(x.shape != shapes[name] for name, x in given.items())
        or ("query_segment_ids" in given) != ("key_value_segment_ids" in given)
        or (bounds and [x.shape for x in bounds] != [(size, 1)] * 2)
    ):
        return {}  # attention refuses it by name
    position = jnp.arange(keys, dtype=jnp.int32)[None]
    shown = position < keys
    if "key_value_seq_lengths" in given:
        shown &= position < given["key_value_seq_lengths"][:, None]
    if "query_segment_ids" in given:
        shown &= given["query_segment_ids"] == given["key_value_segment_ids"]
    if bounds:
        shown &= (bounds[0] <= position) & (position < bounds[1])
    last = jnp.max(jnp.where(shown, position, -1), axis=1)
    return {"query_offset": jnp.broadcast_to(last, (size,))}


def _check_dtype(dtype: Any) -> None:
    """Raises TypeError or ValueError unless attention can be computed in `dtype`."""
    try:
        given = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be that of floating point numbers, or None, but got {dtype!r}.") from None
    if not jnp.issubdtype(given, np.floating):
        raise ValueError(f"dtype must be that of floating point numbers, or None, but got {given}.")


def _with_one_batch_axis(name: str, x: Any, sizes: tuple[int, ...]) -> Any:
    """A bias or mask, broadcastable to `sizes`, (batch..., N, T, S), with four axes: those of 1 stay."""
    x = x if hasattr(x, "reshape") else as_array(name, x)
    shape, batch = (1,) * (len(sizes) - x.ndim) + x.shape, sizes[:-3]
    if len(shape) > len(sizes) or any(a not in (1, b) for a, b in zip(shape, sizes, strict=True)):
        raise ValueError(f"{name}'s shape must be broadcastable to (batch..., N, T, S) = {sizes}, but got {x.shape}.")
    x = x.reshape(shape)
    if all(length == 1 for length in shape[:-3]):
        return x.reshape(1, *shape[-3:])
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return _folded(name, xp.broadcast_to(x, (*batch, *shape[-3:])), batch)


def _folded(name: str, x: Any, batch: tuple[int, ...]) -> Any:
    """An array (batch..., ...) with one batch axis; raises ValueError where its sharding is none of such an array."""
    if len(batch) == 1:
        return x
    if isinstance(x, Array):
        sharding = jax.typeof(x).sharding
        here = sharding.shard_shape(x.shape)
        if any(here[i] < length and max(here[:i], default=1) > 1 for i, length in enumerate(batch)):
            raise ValueError(
                f"{name}'s batch axes, {batch}, become one, and one that is sharded must be the first or follow axes "
                f"of which a device has one place, but the sharding is {sharding.spec}: jax.sharding.reshard it, or "
                "jax.vmap the layer over the axes before."
            )
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def _hull(xp: Any, mask: Any) -> tuple[Any, Any, Any]:
    """The int32 bounds of the visible keys along the last axis, (S, 0) where there are none, and their number."""
    keys = mask.shape[-1]
    position = xp.arange(keys, dtype=np.int32)
    lower = xp.min(xp.where(mask, position, np.int32(keys)), axis=-1, initial=np.int32(keys))
    upper = xp.max(xp.where(mask, position + 1, np.int32(0)), axis=-1, initial=np.int32(0))
    return lower, upper, xp.sum(mask, axis=-1, dtype=np.int32)


def _promote(arrays: tuple[Any, ...], dtype: DTypeLike | None) -> list[Array]:
    """The arrays in one inexact dtype: the given one, or the least that holds them all."""
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, np.inexact):
            dtype = jnp.promote_types(dtype, np.float32)
    return [jnp.asarray(x, dtype) for x in arrays]
