"""Attention by several hands behind one signature, each as its authors mean it to be called.

A contender that is not installed, does not run on this device or lacks an argument of a call says so: its `bind` raises
NotImplementedError with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from workload import Workload

import jax_fa4

Attention = Callable[[Array, Array, Array, Mapping[str, Any]], Array]
"""(query, key, value, the arrays among the other arguments) -> out."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A workload's arguments: the static ones, and the arrays, which are traced."""

    workload: Workload
    options: Mapping[str, Any]
    arrays: Mapping[str, Any]

    @classmethod
    def of(cls, workload: Workload) -> Call:
        """The call that a workload makes, with its arrays on the device."""
        arguments = workload.arguments()
        is_array = {name: hasattr(jax.tree.leaves(x)[0], "dtype") for name, x in arguments.items()}
        options = {name: x for name, x in arguments.items() if not is_array[name]}
        arrays = {name: jax.tree.map(jnp.asarray, x) for name, x in arguments.items() if is_array[name]}
        return cls(workload, options, arrays)

    def require(self, *names: str) -> None:
        """Raises NotImplementedError if the call has arguments other than these."""
        if missing := sorted({*self.options, *self.arrays} - set(names)):
            raise NotImplementedError(f"has no {' or '.join(missing)}")

    def require_square(self) -> None:
        """Raises NotImplementedError if the first row of a causal call is not at the first key when the last are."""
        if self.workload.sizes.rows != self.workload.sizes.keys and self.options.get("is_causal"):
            raise NotImplementedError("puts the last row at the last key, not the first row at the first key")


@dataclasses.dataclass(frozen=True)
class Contender:
    """An implementation by name, and how it runs a call."""

    name: str
    bind: Callable[[Call], Attention]


def ours() -> list[Contender]:
    """Every implementation of this version of jax_fa4 that is made to be fast."""
    tiny = jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)
    found = []
    for name in ("cuda", "pallas", "tiled"):
        reason = jax_fa4.why_not(name, tiny, tiny, tiny)
        # A name that this version does not have is an error of the argument, not a reason of an implementation.
        if reason is None or not reason.startswith("implementation must be"):
            found.append(Contender(f"fa4 {name}", functools.partial(_jax_fa4, name)))
    return found


def peers() -> list[Contender]:
    return [
        Contender("cudnn", _cudnn),
        Contender("xla", _xla),
        Contender("pallas triton", _pallas_triton),
        Contender("pallas mosaic", _pallas_mosaic),
        Contender("FA3", _flash_attention_3),
        Contender("tokamax", _tokamax),
    ]


def _jax_fa4(name: str, call: Call) -> Attention:
    if name == "pallas":
        _require_gpu()  # a CPU would interpret it
    query, key, value, _ = call.workload.shapes()
    reason = jax_fa4.why_not(name, query, key, value, **call.options, **call.arrays)
    if reason is not None:
        raise NotImplementedError(reason)
    options: dict[str, Any] = {"implementation": name, **call.options}
    return lambda q, k, v, arrays: jax_fa4.attention(q, k, v, **options, **arrays)


_JAX_NN = ("is_causal", "local_window_size", "scale", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths")


def _cudnn(call: Call) -> Attention:
    """jax.nn's call of cuDNN."""
    _require_gpu()
    return _jax_nn(call, "cudnn")


def _xla(call: Call) -> Attention:
    """jax.nn's own, whose logits are an array."""
    batch, rows, keys, heads, *_ = call.workload.sizes
    logits = 4 * batch * heads * rows * keys / 2**30
    if logits > 20:
        raise NotImplementedError("is not tried where its logits would take more than 20 GiB")
    return _jax_nn(call, "xla")


def _jax_nn(call: Call, implementation: str) -> Attention:
    call.require(*_JAX_NN)
    options: dict[str, Any] = {"implementation": implementation, **call.options}
    return lambda q, k, v, arrays: jax.nn.dot_product_attention(q, k, v, **options, **arrays)


def _pallas_triton(call: Call) -> Attention:
    """jax.experimental.pallas.ops.gpu.attention with its default block sizes."""
    _require_gpu()
    call.require("is_causal", "scale")
    if call.workload.sizes.heads != call.workload.sizes.kv_heads:
        raise NotImplementedError("has no grouped query heads")
    module = _module("jax.experimental.pallas.ops.gpu.attention")
    scale, causal = _scale(call), bool(call.options.get("is_causal"))
    return lambda q, k, v, arrays: module.mha(q, k, v, None, sm_scale=scale, causal=causal)


def _pallas_mosaic(call: Call) -> Attention:
    """jax.experimental.pallas.ops.gpu.attention_mgpu.

    It does not scale, so queries are scaled before. Its backward writes float16 whatever its operands are, so a call
    that is differentiated runs in float16.
    """
    _require_gpu()
    call.require("is_causal", "scale")
    if call.workload.sizes.width != call.workload.sizes.value_width:
        raise NotImplementedError("has no value width of its own")
    module = _module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    scale = _scale(call)
    config = module.TuningConfig(
        block_q=64,
        block_kv=128,
        max_concurrent_steps=2,
        causal=bool(call.options.get("is_causal")),
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
        compute_wgs_bwd=2,
    )

    def half(q: Array, k: Array, v: Array) -> Array:
        scaled = (q.astype(jnp.float32) * scale).astype(jnp.float16)
        return module.attention(scaled, k.astype(jnp.float16), v.astype(jnp.float16), config).astype(q.dtype)

    @jax.custom_vjp
    def attend(q: Array, k: Array, v: Array) -> Array:
        return module.attention((q.astype(jnp.float32) * scale).astype(q.dtype), k, v, config)

    attend.defvjp(lambda *operands: jax.vjp(half, *operands), lambda pullback, dout: pullback(dout))
    return lambda q, k, v, arrays: attend(q, k, v)


def _flash_attention_3(call: Call) -> Attention:
    """Dao-AILab's FlashAttention-3, for Hopper, as the package dew-flash-attn-cu13 brings it to JAX."""
    _require_gpu()
    if (capability := _capability()) != "9.0":
        raise NotImplementedError(f"is for compute capability 9.0, not {capability}")
    call.require("is_causal", "local_window_size", "scale", "sinks")
    call.require_square()
    module = _module("dew_flash_attn")
    window = call.options.get("local_window_size") or (None, None)
    options = {
        "softmax_scale": _scale(call),
        "is_causal": bool(call.options.get("is_causal")),
        "window_size": tuple(-1 if side is None else side for side in window),
    }
    return lambda q, k, v, arrays: module.flash_mha(q, k, v, **options, **arrays)


def _tokamax(call: Call) -> Attention:
    """OpenXLA's tokamax: its kernels in Mosaic GPU."""
    _require_gpu()
    call.require(*_JAX_NN, "softcap")
    logging.getLogger("absl").setLevel(logging.ERROR)  # a warning a call: tokamax has no tuning results for it
    module = _module("tokamax")
    options = {("logits_soft_cap" if name == "softcap" else name): x for name, x in call.options.items()}
    return lambda q, k, v, arrays: module.dot_product_attention(
        q, k, v, implementation="mosaic_gpu", **options, **arrays
    )


def _scale(call: Call) -> float:
    return float(call.options.get("scale", 1 / math.sqrt(call.workload.sizes.width)))


def _require_gpu() -> None:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(
            f"needs an NVIDIA GPU, but JAX's default device is of platform {jax.default_backend()}"
        )


def _capability() -> str:
    """The compute capability of the default GPU."""
    return str(getattr(jax.devices()[0], "compute_capability", "unknown"))


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # A peer that is there may fail in any way: for want of a library, for a JAX too new.
        raise NotImplementedError(f"cannot be imported: {type(error).__name__}: {error}") from error
