"""Bad input is an error before compilation: a sentence with the argument's name, what was given and what is allowed."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4 import attention, why_not

B, T, S, N, K, D = 2, 5, 7, 4, 2, 8
Arguments = dict[str, Any]

GOOD: Arguments = {
    "query": np.zeros((B, T, N, D), np.float32),
    "key": np.zeros((B, S, K, D), np.float32),
    "value": np.zeros((B, S, K, D), np.float32),
}
UNBATCHED: Arguments = {name: x[0] for name, x in GOOD.items()}

STATIC = (
    "is_causal",
    "local_window_size",
    "row_bounds",
    "softcap",
    "deterministic",
    "implementation",
    "return_residual",
)
"""Arguments that are not arrays (`row_bounds` is a pair of them)."""


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def i32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def sentence(arguments: Arguments) -> str:
    """The error that tracing a call raises."""
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        jax.eval_shape(functools.partial(attention, **arguments))
    return str(caught.value)


class Bad(NamedTuple):
    """A bad call, and words that its error must hold: what was given and what is allowed."""

    error: type[Exception] | tuple[type[Exception], ...]
    arguments: Arguments
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The argument that the error must name: the first."""
        return next(iter(self.arguments))


RANKS = {
    f"{name}_of_{len(shape)}_axes": Bad(ValueError, {name: f32(*shape)}, (str(shape), "(B, ", "D"))
    for name in GOOD
    for shape in [(), (D,), (T, D), (1, B, T, K, D)]
}
DTYPES = {
    f"{name}_{dtype}_of_{base}": Bad(
        ValueError, {name: GOOD[name].astype(jnp.dtype(dtype))} | _cast(base, name), (base, f"got {dtype}")
    )
    for _cast in [lambda base, name: {other: x.astype(jnp.dtype(base)) for other, x in GOOD.items() if other != name}]
    for name in ("key", "value")
    for base in ("float32", "bfloat16", "float16")
    for dtype in ("float32", "bfloat16", "float16", "int32")
    if base != dtype
}
UNSUPPORTED_DTYPES = {
    f"all_{dtype}": Bad(
        ValueError,
        {name: x.astype(jnp.dtype(dtype)) for name, x in GOOD.items()},
        ("float16, bfloat16, float32", dtype),
    )
    for dtype in ("int32", "int8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2")
}
NOT_ARRAYS = {
    f"{name}_{label}": Bad(TypeError, {name: x}, ("must be ", "an array", word))
    for name in (*GOOD, "bias", "mask", "scale", "sinks", "query_seq_lengths", "key_value_seq_lengths", "query_offset")
    for label, x, word in [
        ("ragged", [[1.0], [1.0, 2.0]], "list"),
        ("bytes", b"abc", "b'abc'"),
        ("dict", {"a": 1}, "dict"),
        ("object", object(), "object"),
        ("function", len, "builtin_function_or_method"),
        ("set", {1}, "set"),
        ("str", "abc", "'abc'"),
        ("list_of_str", [", "], "list"),
        ("None", None, "None"),
    ]
    if not (label == "str" and name == "query_offset") and not (label == "None" and name not in (*GOOD, "query_offset"))
}
SIZES = {
    "heads_do_not_divide": Bad(
        ValueError, {"query": f32(B, T, 3, D)}, ("multiple", "2", "(2, 5, 3, 8) for (B, T, N, D)")
    ),
    "more_kv_heads": Bad(ValueError, {"query": f32(B, T, 1, D)}, ("multiple", "2", "(2, 5, 1, 8)")),
    "no_kv_heads": Bad(
        ValueError,
        {"query": f32(B, T, N, D), "key": f32(B, S, 0, D), "value": f32(B, S, 0, D)},
        ("multiple", "0", "(2, 5, 4, 8)"),
    ),
    "key_batch": Bad(ValueError, {"key": f32(3, S, K, D)}, ("batch size", "2", "(3, 7, 2, 8)")),
    "key_batch_of_1": Bad(ValueError, {"key": f32(1, S, K, D)}, ("batch size", "2", "(1, 7, 2, 8)")),
    "key_unbatched": Bad(ValueError, {"key": f32(S, K, D)}, ("batch size", "2", "(1, 7, 2, 8)")),
    "value_batch": Bad(ValueError, {"value": f32(3, S, K, D)}, ("batch size", "2", "(3, 7, 2, 8)")),
    "value_length": Bad(ValueError, {"value": f32(B, S + 1, K, D)}, ("length", "(7, 2)", "(2, 8, 2, 8)")),
    "value_heads": Bad(ValueError, {"value": f32(B, S, 1, D)}, ("heads", "(7, 2)", "(2, 7, 1, 8)")),
    "key_width": Bad(ValueError, {"key": f32(B, S, K, D + 1)}, ("width", "8", "(2, 7, 2, 9)")),
}
WINDOWS = {
    f"window_{label}": Bad(error, {"local_window_size": window}, (word, given))
    for label, error, window, word, given in [
        ("negative", ValueError, -1, "negative", "-1"),
        ("negative_left", ValueError, (-1, 2), "negative", "(-1, 2)"),
        ("negative_right", ValueError, (None, -5), "negative", "(None, -5)"),
        ("of_3", TypeError, (1, 2, 3), "pair", "(1, 2, 3)"),
        ("of_1", TypeError, (1,), "pair", "(1,)"),
        ("of_0", TypeError, (), "pair", "()"),
        ("str", TypeError, "12", "pair", "'12'"),
        ("float", TypeError, 2.0, "pair", "2.0"),
        ("of_floats", TypeError, (1.0, 2.0), "pair", "(1.0, 2.0)"),
        ("bool", TypeError, True, "pair", "True"),
        ("numpy_bool", TypeError, np.True_, "pair", "True"),
        ("of_bools", TypeError, (True, False), "pair", "(True, False)"),
        ("bytes", TypeError, b"12", "pair", "b'12'"),
        ("dict", TypeError, {1: 2, 3: 4}, "pair", "{1: 2, 3: 4}"),
        ("set", TypeError, {1, 2}, "pair", "{1, 2}"),
        ("array_of_floats", TypeError, f32(2), "pair", "array"),
    ]
}
DENSE = {
    "mask_float": Bad(ValueError, {"mask": f32(T, S)}, ("bool", "float32", "bias")),
    "mask_int": Bad(ValueError, {"mask": i32(T, S)}, ("bool", "int32", "compare numbers with 0", "bias")),
    **{
        f"{name}_of_wrong_{axis}": Bad(ValueError, {name: np.zeros(shape, dtype)}, ("(2, 4, 5, 7)", str(shape)))
        for name, dtype in (("mask", bool), ("bias", np.float32))
        for axis, shape in {
            "B": (3, 1, 1, 1),
            "N": (1, K, T, S),
            "T": (1, 1, S, S),
            "S": (1, 1, T, T),
            "S_0": (1, 1, T, 0),
            "order_B_T": (B, S),
            "rank": (1, B, N, T, S),
            "rank_of_ones": (1, 1, 1, 1, 1),
        }.items()
    },
    "bias_complex": Bad(ValueError, {"bias": np.zeros((T, S), np.complex64)}, ("real", "complex64")),
    "bias_random_key": Bad(ValueError, {"bias": jax.random.key(0)}, ("real", "key<fry>")),
}
_lengths = ("query_seq_lengths", "key_value_seq_lengths")
LENGTHS = {
    **{
        f"{name}_of_{label}": Bad(ValueError, {name: x}, words)
        for name in _lengths
        for label, x, words in [
            ("0_axes", i32(), ("(B,) = (2,)", "()")),
            ("3", i32(3), ("(B,) = (2,)", "(3,)")),
            ("1", i32(1), ("(B,) = (2,)", "(1,)")),
            ("2_axes", i32(B, 1), ("(B,) = (2,)", "(2, 1)")),
            ("float", f32(B), ("int32", "float32")),
            ("uint32", np.zeros(B, np.uint32), ("int32", "uint32")),
            ("int16", np.zeros(B, np.int16), ("int32", "int16")),
            ("bool", np.zeros(B, bool), ("int32", "bool")),
            ("float_list", [1.0, 2.0], ("int32", "float32")),
        ]
    },
    **{
        f"unbatched_{name}": Bad(ValueError, {name: i32(2)} | UNBATCHED, ("(B,) = (1,) or ()", "(2,)"))
        for name in _lengths
    },
}
SEGMENTS = {
    "query_ids_alone": Bad(
        ValueError, {"query_segment_ids": i32(B, T)}, ("without key_value_segment_ids", "both or neither")
    ),
    "key_ids_alone": Bad(
        ValueError, {"key_value_segment_ids": i32(B, S)}, ("without query_segment_ids", "both or neither")
    ),
    **{
        f"{name}_{label}": Bad(ValueError, {name: x, other: i32(B, length)}, words)
        for name, other, length in [("query_segment_ids", "key_value_segment_ids", S)]
        for label, x, words in [
            ("of_wrong_T", i32(B, S), ("(B, T) = (2, 5)", "(2, 7)")),
            ("of_wrong_B", i32(1, T), ("(2, 5)", "(1, 5)")),
            ("without_B", i32(T), ("(2, 5)", "(5,)")),
            ("float", f32(B, T), ("int32", "float32")),
            ("int8", np.zeros((B, T), np.int8), ("int32", "int8")),
        ]
    },
    "key_ids_of_wrong_S": Bad(
        ValueError, {"key_value_segment_ids": i32(B, T), "query_segment_ids": i32(B, T)}, ("(B, S) = (2, 7)", "(2, 5)")
    ),
}
ROW_BOUNDS = {
    f"row_bounds_{label}": Bad(error, {"row_bounds": bounds}, words)
    for label, error, bounds, words in [
        ("array", TypeError, i32(2, B, T), ("pair (lower, upper)", "ndarray")),
        ("jax_array", TypeError, jnp.zeros((2, B, T), jnp.int32), ("pair (lower, upper)", "int32 of shape (2, 2, 5)")),
        ("of_3", TypeError, (i32(B, T),) * 3, ("pair (lower, upper)", "a tuple of length 3")),
        ("of_1", TypeError, (i32(B, T),), ("pair (lower, upper)", "a tuple of length 1")),
        ("str", TypeError, "ab", ("pair (lower, upper)", "'ab'")),
        ("dict", TypeError, {"lower": i32(B, T), "upper": i32(B, T)}, ("pair (lower, upper)", "dict")),
        ("without_lower", TypeError, (None, i32(B, T)), ("int32", "None")),
        ("without_upper", TypeError, (i32(B, T), None), ("int32", "None")),
        ("of_wrong_T", ValueError, (i32(B, S), i32(B, T)), ("lower", "(B, T) = (2, 5)", "(2, 7)")),
        ("of_wrong_B", ValueError, (i32(B, T), i32(1, T)), ("upper", "(2, 5)", "(1, 5)")),
        ("of_ints", ValueError, (0, 3), ("lower", "(2, 5)", "()")),
        ("float", ValueError, (i32(B, T), f32(B, T)), ("upper", "int32", "float32")),
    ]
}
OFFSETS = {
    f"query_offset_{label}": Bad(ValueError, {"query_offset": offset}, ("int", "'end'", given))
    for label, offset, given in [
        ("start", "start", "'start'"),
        ("empty_str", "", "''"),
        ("float", 1.0, "float32"),
        ("bool", True, "bool"),
        ("float_array", f32(B), "float32"),
        ("of_3", i32(3), "(3,)"),
        ("of_2_axes", i32(B, 1), "(2, 1)"),
        ("uint32", np.zeros(B, np.uint32), "uint32"),
    ]
} | {"query_offset_None": Bad(TypeError, {"query_offset": None}, ("int", "'end'", "NoneType"))}
FLAGS = {
    f"{name}_{label}": Bad(TypeError, {name: flag}, ("True or False", given))
    for name in ("is_causal", "deterministic", "return_residual")
    for label, flag, given in [
        ("no", "no", "'no'"),
        ("2", 2, "2"),
        ("-1", -1, "-1"),
        ("None", None, "None"),
        ("float", 1.0, "1.0"),
        ("array", np.ones(2, bool), "ndarray"),
        ("jax_array", jnp.array(True), "a jax.Array of bool of shape ()"),
        ("list", [True], "list"),
    ]
}
SOFTCAPS = {
    f"softcap_{label}": Bad(error, {"softcap": softcap}, ("positive", given))
    for label, error, softcap, given in [
        ("0", ValueError, 0, "0"),
        ("negative", ValueError, -1.5, "-1.5"),
        ("inf", ValueError, float("inf"), "inf"),
        ("nan", ValueError, float("nan"), "nan"),
        ("bool", TypeError, True, "True"),
        ("str", TypeError, "2", "'2'"),
        ("array", TypeError, f32(1), "ndarray"),
        ("complex", TypeError, 1j, "complex"),
        ("overflows_float32", ValueError, 1e39, "1e+39"),
        ("underflows_float32", ValueError, 1e-50, "1e-50"),
        ("overflows_float", ValueError, 10**400, "1000"),
    ]
}
SCALARS = {
    "scale_of_2": Bad(ValueError, {"scale": f32(2)}, ("of shape () or (1,)", "(2,)")),
    "scale_of_0": Bad(ValueError, {"scale": f32(0)}, ("of shape () or (1,)", "(0,)")),
    "scale_of_2_axes": Bad(ValueError, {"scale": f32(1, 1)}, ("of shape () or (1,)", "(1, 1)")),
    "scale_complex": Bad(ValueError, {"scale": 1j}, ("real number", "complex64")),
    "scale_bool": Bad(ValueError, {"scale": True}, ("real number", "bool")),
    "scale_too_large": Bad((ValueError, TypeError), {"scale": 10**400}, ("1000",)),
    "lengths_too_large": Bad((ValueError, TypeError), {"key_value_seq_lengths": [1 << 40, 3]}, ("1099511627776",)),
    "sinks_of_K": Bad(ValueError, {"sinks": f32(K)}, ("(N,) = (4,)", "(2,)")),
    "sinks_of_0_axes": Bad(ValueError, {"sinks": f32()}, ("(N,) = (4,)", "()")),
    "sinks_of_2_axes": Bad(ValueError, {"sinks": f32(1, N)}, ("(N,) = (4,)", "(1, 4)")),
    "sinks_int": Bad(ValueError, {"sinks": i32(N)}, ("floating point", "int32")),
    "sinks_complex": Bad(ValueError, {"sinks": np.zeros(N, np.complex64)}, ("floating point", "complex64")),
}
IMPLEMENTATIONS = {
    f"implementation_{label}": Bad(ValueError, {"implementation": name}, ("'tiled'", given))
    for label, name, given in [
        ("unknown", "flash", "'flash'"),
        ("cudnn", "cudnn", "cudnn"),
        ("empty", "", "''"),
        ("int", 3, "3"),
        ("unhashable", ["tiled"], "['tiled']"),
        ("dict", {}, "{}"),
        ("module", np, "numpy"),
        ("array", np.array(["tiled", "xla"]), "array"),
    ]
}
TABLE: dict[str, Bad] = (
    RANKS | DTYPES | UNSUPPORTED_DTYPES | NOT_ARRAYS | SIZES | WINDOWS | DENSE | LENGTHS | SEGMENTS | ROW_BOUNDS
    | OFFSETS | FLAGS | SOFTCAPS | SCALARS | IMPLEMENTATIONS
)  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_error(name: str) -> None:
    bad = TABLE[name]
    with pytest.raises(bad.error) as caught:
        jax.eval_shape(functools.partial(attention, **GOOD | bad.arguments))
    message = str(caught.value)
    argument = "query" if name == "no_kv_heads" or name.startswith("all_") else bad.name
    assert argument in message
    assert all(word in message for word in bad.words), message
    assert message.endswith("."), message
    assert not re.search(r"\n|\. ", message), f"not one sentence: {message}"


@pytest.mark.parametrize("name", TABLE)
def test_why_not_says_the_same(name: str) -> None:
    arguments = GOOD | TABLE[name].arguments
    want = sentence(arguments)
    assert why_not(**{"implementation": None} | arguments) == want
    is_struct = lambda name, x: name not in STATIC and _is_array(x)  # noqa: E731
    structs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_struct(n, x) else x for n, x in arguments.items()}
    assert why_not(**{"implementation": None} | structs) == want


def test_why_not_of_no_device() -> None:
    with pytest.raises(TypeError, match=r"device must be a jax\.Device.* got 'gpu'"):
        why_not(None, **GOOD, device="gpu")


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | jax.Array)


@pytest.mark.parametrize(
    "name", ["is_causal", "deterministic", "return_residual", "softcap", "local_window_size", "implementation"]
)
def test_what_is_static_cannot_be_traced(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be ") as caught:
        jax.eval_shape(lambda x: attention(**GOOD, **{name: x}), jax.ShapeDtypeStruct((), np.int32))
    if name != "implementation":  # of JAX's types it could only be a number
        said = f"known when tracing, but got a tracer of int32[]: under jax.jit, bind {name} with functools.partial"
        assert said in str(caught.value)


def test_a_window_of_a_traced_side_names_the_argument() -> None:
    with pytest.raises(TypeError, match=r"^local_window_size must be .* known when tracing.* a tracer of int32"):
        jax.eval_shape(lambda x: attention(**GOOD, local_window_size=(x, 2)), jax.ShapeDtypeStruct((), np.int32))


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths", "query_offset"])
def test_int64_is_refused_under_x64(name: str) -> None:
    with jax.enable_x64(True):
        message = sentence(GOOD | {name: np.zeros(B, np.int64)})
        assert name in message
        assert "int32" in message
        assert "int64" in message
        assert sentence(GOOD | {"key_value_segment_ids": i32(B, S), "query_segment_ids": np.zeros((B, T), np.int64)})


def test_python_lists_of_lengths_do_not_wrap_around_under_x64() -> None:
    with jax.enable_x64(True):
        assert "key_value_seq_lengths" in sentence(GOOD | {"key_value_seq_lengths": [1 << 40, 3]})


def test_errors_come_before_compilation_and_from_inside_jit() -> None:
    traced = jax.jit(attention).trace
    with pytest.raises(ValueError, match="key's head width"):
        traced(*({**GOOD, "key": f32(B, S, K, 3)}).values())


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="dropout_rate"):
        attention(**GOOD, dropout_rate=0.1)
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'dropout_rate'") as caught:
        why_not(None, **GOOD, dropout_rate=0.1)
    assert caught.type is TypeError


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("axis", range(4))
def test_symbolic_shapes_are_for_the_reference(name: str, axis: int) -> None:
    (size,) = jax.export.symbolic_shape("size")
    shape = list(GOOD[name].shape)
    shape[axis] = size
    structs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in GOOD.items()}
    structs[name] = jax.ShapeDtypeStruct(shape, np.float32)
    given = re.escape(f"({', '.join(map(str, shape))})")
    want = f"{name}'s shape must be of constants unless implementation='reference', but got {given}"
    with pytest.raises(NotImplementedError, match=want):
        jax.export.export(jax.jit(attention))(**structs)
    assert re.match(want, why_not(None, **structs) or "")


def test_the_reference_takes_a_symbolic_batch() -> None:
    batch = jax.export.symbolic_shape("batch")
    structs = [jax.ShapeDtypeStruct(batch + x.shape[1:], x.dtype) for x in GOOD.values()]
    call = jax.jit(functools.partial(attention, is_causal=True, implementation="reference"))
    arrays = [np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape) for x in GOOD.values()]
    out = jax.export.export(call)(*structs).call(*arrays)
    np.testing.assert_array_equal(out, call(*arrays))


@pytest.mark.parametrize("implementation", [None, "tiled", "xla", "reference"])
def test_why_not_is_none_for_good_input(implementation: str | None) -> None:
    """With arrays and with shapes alone, of every argument."""
    arguments = GOOD | {
        "bias": f32(N, T, S),
        "mask": np.ones((T, S), bool),
        "scale": f32(),
        "query_seq_lengths": i32(B),
        "key_value_seq_lengths": i32(B),
        "query_offset": i32(B),
        "query_segment_ids": i32(B, T),
        "key_value_segment_ids": i32(B, S),
        "row_bounds": (i32(B, T), i32(B, T)),
        "sinks": f32(N),
    }
    static = {"is_causal": True, "local_window_size": (3, None), "softcap": 2.0, "return_residual": True}
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    for example in (GOOD, arguments, structs):
        assert why_not(implementation, **example, **static) is None
    assert why_not(implementation, **structs, device=jax.devices()[0]) is None


def test_shapes_alone_are_not_enough_for_a_call() -> None:
    assert "query must be an array" in sentence(GOOD | {"query": jax.ShapeDtypeStruct((B, T, N, D), np.float32)})


# Fuzzing: whatever one argument is, the call is valid or its error names the argument.

_dtypes = st.sampled_from(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint32",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "float8_e4m3fn",
        "int4",
    ]
)
_shapes = st.lists(st.sampled_from([0, 1, B, N, T, S, D, 3]), max_size=5).map(tuple)
_arrays = st.builds(lambda dtype, shape: np.zeros(shape, jnp.dtype(dtype)), _dtypes, _shapes)
_odd = st.sampled_from(
    [
        np.array(["a", "b"]),
        np.array([None]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(1, "O"),
        object(),
        len,
        int,
        ...,
        jax.random.key(0),
        np.float64("nan"),
        np.int64(-1),
        np.True_,
        range(2),
        np,
        slice(1, 2),
        1 << 40,
    ]
)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
GARBAGE = st.recursive(
    _scalars | _arrays | _odd,
    lambda x: st.lists(x, max_size=3) | st.tuples(x, x) | st.dictionaries(st.text(max_size=2), x, max_size=2),
    max_leaves=4,
)


def _broadcasts(x: np.ndarray, shape: tuple[int, ...]) -> bool:
    return x.ndim <= len(shape) and all(a in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False))


def _may_be_accepted(name: str, x: Any) -> bool:
    """Whether a valid call may hold x; written from the specification, on the permissive side."""
    if isinstance(x, bytes | dict | jax.ShapeDtypeStruct) or (isinstance(x, str) and name != "query_offset"):
        return False
    if x is None:
        return name not in ("query", "key", "value", "query_offset", "is_causal", "deterministic", "return_residual")
    match name:
        case "is_causal" | "deterministic" | "return_residual":
            return isinstance(x, bool | int | np.integer | np.bool_) and x in (0, 1)
        case "softcap":
            return isinstance(x, int | float | np.number) and not isinstance(x, bool) and 1e-30 < x < 1e30
        case "local_window_size":
            sides = x if isinstance(x, tuple | list | range) else (x, x)
            integers = [side for side in sides if side is not None]
            is_integer = lambda i: isinstance(i, int | np.integer) or (_is_array(i) and i.shape == ())  # noqa: E731
            return len(sides) == 2 and all(
                is_integer(i) and not isinstance(i, bool) and np.asarray(i).dtype != bool and int(i) >= 0
                for i in integers
            )
        case "row_bounds":
            return (
                isinstance(x, tuple | list) and len(x) == 2 and all(_may_be_accepted("query_segment_ids", y) for y in x)
            )
        case "query_offset" if isinstance(x, str):
            return x == "end"
        case "query_offset" if isinstance(x, int) and not isinstance(x, bool):
            return True
        case "implementation":
            return False
    try:
        array = np.asarray(x)
    except ValueError:
        return False
    if array.dtype.kind in "OUSMm":
        return False
    is_integer = array.dtype in (np.int32, np.int64)
    match name:
        case "query" | "key" | "value":
            return array.dtype in (np.float32, np.float64) and array.ndim in (3, 4)
        case "bias":
            return array.dtype.kind != "c" and _broadcasts(array, (B, N, T, S))
        case "mask":
            return array.dtype == bool and _broadcasts(array, (B, N, T, S))
        case "scale":
            return array.size == 1 and array.dtype.kind not in "cb"
        case "sinks":
            return array.shape == (N,) and array.dtype.kind not in "cbiu"
        case "query_seq_lengths" | "key_value_seq_lengths":
            return is_integer and array.shape == (B,)
        case "query_offset":
            return is_integer and array.shape in ((), (B,))
        case "query_segment_ids":
            return is_integer and array.shape == (B, T)
        case "key_value_segment_ids":
            return is_integer and array.shape == (B, S)
    raise AssertionError(name)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(list(inspect.signature(attention).parameters)), garbage=GARBAGE)
def test_garbage(name: str, garbage: Any) -> None:
    arguments = GOOD | {name: garbage}
    for one, other, length in (("query", "key_value", S), ("key_value", "query", T)):
        if name == f"{one}_segment_ids" and garbage is not None:
            arguments[f"{other}_segment_ids"] = i32(B, length)
    try:
        jax.eval_shape(functools.partial(attention, **arguments))
    except (ValueError, TypeError, NotImplementedError) as error:
        message = str(error)
        assert name in message, f"{message!r} does not name {name}"
        assert why_not(**{"implementation": None} | arguments) is not None
    else:
        assert _may_be_accepted(name, garbage), f"{name}={garbage!r} was accepted"
