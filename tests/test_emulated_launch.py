"""What a launch is given: bad arguments are refused by name, and arrays that share memory are one memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import HEADER, launch, ptx_kernel

from jax_fa4.emulated import Kernel, Pointer, TensorMap

MODULE = HEADER.format(target="sm_100a")
KERNEL = Kernel(f"{MODULE} .visible .entry k(.param .u64 p, .param .u32 n, .param .align 8 .b8 s[16]) {{ ret; }}")
MAP_KERNEL = Kernel(f"{MODULE} .visible .entry k(.param .align 64 .b8 map[128]) {{ ret; }}")
WORDS = np.zeros(8, np.uint32)
STRUCT = {0: (WORDS, 8), 8: (1.5, 4), 12: (2, 2)}
HALVES = np.zeros((16, 64), np.float16)


def launch_with(p: Any = WORDS, n: Any = 1, s: Any = STRUCT, **options: Any) -> None:
    sizes: dict[str, Any] = {"grid": (1, 1, 1), "block": (1, 1, 1)}
    KERNEL.launch([p, n, s], **{**sizes, **options}).check()


@pytest.mark.parametrize(
    "options",
    [
        {"grid": [np.int64(2), 1, 1], "block": np.array([4, 1, 1])},
        {"seed": (1 << 64) - 1},
        {"seed": np.uint32(3), "sm_count": np.int8(1), "dynamic_shared_bytes": np.int64(64)},
        {"n": np.int32(-1)},
        {"n": -(1 << 31)},
        {"n": 0.1},
        {"n": float("inf")},
        {"p": Pointer(WORDS, np.int64(4))},  # type: ignore[arg-type]
        {"p": np.zeros(0)},
        {"p": 0},
        {"s": bytes(16)},
        {"s": {}},
        {"s": {0: ({4: (1, 4)}, 8)}},
    ],
)
def test_what_is_accepted(options: dict[str, Any]) -> None:
    launch_with(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": 1}, "grid must be three positive integers below 2.31, but got 1"),
        ({"grid": (1, 1)}, "grid must be three"),
        ({"grid": (True, 1, 1)}, "grid must be three"),
        ({"grid": (1.0, 1, 1)}, "grid must be three"),
        ({"grid": (1 << 32, 1, 1)}, "grid must be three"),
        ({"grid": (1, 65536, 1)}, "grid is .*65535"),
        ({"block": None}, "block must be three"),
        ({"block": (-1, 1, 1)}, "block must be three"),
        ({"block": (1, 1, 65)}, "block is .*64"),
        ({"cluster": "abc"}, "cluster must be three"),
        ({"seed": -1}, "seed must be an integer from 0 to 18446744073709551615, but got -1"),
        ({"seed": 1 << 64}, "seed must be"),
        ({"seed": 1.0}, "seed must be"),
        ({"seed": None}, "seed must be"),
        ({"dynamic_shared_bytes": -1}, "dynamic_shared_bytes must be"),
        ({"dynamic_shared_bytes": 232449}, "dynamic_shared_bytes is 232449.*232448"),
        ({"sm_count": 0}, "sm_count must be"),
        ({"max_instructions": 0}, "max_instructions must be"),
        ({"max_instructions": 1e9}, "max_instructions must be"),
        ({"max_trace_events": -1}, "max_trace_events must be"),
        ({"trace": "trace.json"}, "trace must be True or False, but got 'trace.json'"),
        ({"check_races": None}, "check_races must be True or False"),
        ({"progress": 5}, "progress must be a function"),
        ({"mode": "Strict"}, "mode must be 'strict' or 'relaxed', but got 'Strict'"),
        ({"p": [1, 2]}, "argument p must be an array of NumPy.*but got list"),
        ({"p": None}, "argument p must be .*but got NoneType"),
        ({"p": HALVES[:, ::2]}, "argument p must be a C-contiguous array, but its strides"),
        ({"p": np.zeros(2, ">u4")}, "argument p must hold .*byte order"),
        ({"p": np.array([None])}, "argument p must hold plain numbers"),
        ({"p": Pointer([1], 0)}, "argument p must have a NumPy array, but got list"),  # type: ignore[arg-type]
        ({"p": Pointer(WORDS, 1 << 64)}, "the offset of argument p must be an integer"),
        ({"p": Pointer(WORDS, 0.5)}, "the offset of argument p must be an integer"),  # type: ignore[arg-type]
        ({"p": Pointer(WORDS, -(1 << 60))}, "the offset of argument p must be an integer"),
        ({"n": WORDS}, "argument n is an address of 8 bytes, but the parameter has 4"),
        ({"n": np.int64(3)}, "argument n is a number of type int64 of 8 bytes, but the parameter has 4"),
        ({"n": 1 << 32}, "argument n is 4294967296, which does not fit in 4 bytes"),
        ({"n": 1e300}, "argument n is 1e.300, which does not fit in 4 bytes"),
        ({"n": 1j}, "argument n must be .*but got complex"),
        ({"s": b"x"}, "argument s is a bytes object of 1 bytes, but the parameter has 16"),
        ({"s": 1.0}, "argument s is a float, but the parameter has 16 bytes"),
        ({"s": {12: (WORDS, 8)}}, "the size of argument s at byte 12 must be an integer from 1 to 4, but got 8"),
        ({"s": {16: (1, 4)}}, "an offset of the struct argument s must be an integer from 0 to 15, but got 16"),
        ({"s": {-4: (1, 4)}}, "an offset of the struct argument s must be"),
        ({"s": {"x": (1, 4)}}, "an offset of the struct argument s must be"),
        ({"s": {0: (1, 0)}}, "the size of argument s at byte 0 must be"),
        ({"s": {0: 1}}, "argument s at byte 0 must be an argument and its size, but got 1"),
        ({"s": {0: (WORDS, 8), 4: (1, 4)}}, "argument s at byte 4 overlaps"),
        ({"s": {0: (HALVES.T, 8)}}, "argument s at byte 0 must be a C-contiguous array"),
        ({"s": {0: ({0: ("x", 4)}, 8)}}, "argument s at byte 0 at byte 0 must be .*but got str"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch_with(**options)


@pytest.mark.parametrize("arguments", [None, 5, "abc", np.zeros(3), iter([1])])
def test_arguments_are_a_list(arguments: Any) -> None:
    with pytest.raises(ValueError, match="arguments must be a list"):
        KERNEL.launch(arguments, grid=(1, 1, 1), block=(1, 1, 1))


def test_a_wrong_number_of_arguments_names_the_parameters() -> None:
    with pytest.raises(ValueError, match=r"3 parameters, but got 1 .*p \(8 bytes\), n \(4 bytes\), s \(16 bytes\)"):
        KERNEL.launch([WORDS], grid=(1, 1, 1), block=(1, 1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"box": 8}, "argument map: box must be a tuple of integers, but got 8"),
        ({"box": (8,)}, r"argument map: .*box \(8,\)"),
        ({"box": (-8, 1)}, r"argument map: box\[0\] must be an integer from 0"),
        ({"box": (8.0, 1)}, r"argument map: box\[0\] must be"),
        ({"box": (257, 1)}, "argument map: .*257"),
        ({"box": (3, 1)}, r"argument map: .*16 \(given: .*box \(3, 1\)"),
        ({"box": (8, 1), "dims": (-64, 16)}, r"argument map: dims\[0\] must be"),
        ({"box": (8, 1), "strides": (0.5,)}, r"argument map: strides\[0\] must be"),
        ({"box": (8, 1), "strides": (126,)}, r"argument map: .*strides \(126,\)"),
        ({"box": (8, 1), "swizzle": 7}, "argument map: swizzle must be 0, 32, 64 or 128 bytes, but got 7"),
        ({"box": (8, 1), "swizzle": "128B"}, "argument map: swizzle must be"),
        ({"box": (64, 1), "swizzle": 64}, "argument map: .*64"),
        ({"box": (8, 1), "array": [1]}, "argument map must have a NumPy array"),
        ({"box": (16, 1), "array": np.zeros((8, 16), np.int8)}, "argument map: .*int8"),
        ({"box": (8, 1), "array": HALVES.reshape(-1)[4:], "dims": (8,), "strides": ()}, "argument map"),
    ],
)
def test_tensor_maps_that_are_refused(options: dict[str, Any], message: str) -> None:
    tensor = TensorMap(**{"array": HALVES, **options})
    with pytest.raises(ValueError, match=message):
        MAP_KERNEL.launch([tensor], grid=(1, 1, 1), block=(1, 1, 1))


@pytest.mark.parametrize(("arguments", "message"), [((b"x",), "ptx must be a str"), ((MODULE, None), "name must be")])
def test_a_kernel_is_made_from_text(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Kernel(*arguments)


COPY = "ld.global.u32 %r1, [%rd1]; add.u32 %r1, %r1, 1; st.global.u32 [%rd0+4], %r1;"


@pytest.mark.parametrize("order", ["whole first", "part first"])
def test_views_of_one_array_are_one_memory(order: str) -> None:
    words = np.arange(10, 18, dtype=np.uint32)
    whole, part = words[:6], words[2:]
    if order == "whole first":  # word 1 becomes word 2, and one
        launch(ptx_kernel(COPY, 2), whole, part).check()
        assert words.tolist() == [10, 13, 12, 13, 14, 15, 16, 17]
    else:  # word 3 becomes word 0, and one
        launch(ptx_kernel(COPY, 2), part, whole).check()
        assert words.tolist() == [10, 11, 12, 11, 14, 15, 16, 17]


def test_views_that_two_others_join() -> None:
    words = np.zeros(8, np.uint32)
    kernel = ptx_kernel("mov.u32 %r1, 7; st.global.u32 [%rd0+12], %r1; ld.global.u32 %r2, [%rd1-4];", 3)
    launch(kernel, words[:3], words[4:], words[2:6]).check()
    assert words.tolist() == [0, 0, 0, 7, 0, 0, 0, 0]


def test_a_race_by_way_of_two_views() -> None:
    words = np.zeros(8, np.uint32)
    kernel = ptx_kernel(
        "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p0, %r1, 0;"
        "@%p0 st.global.u32 [%rd0+8], %r1; @!%p0 st.global.u32 [%rd1], %r1;",
        2,
    )
    (report,) = launch(kernel, words[:4], words[2:], ctas=2).reports
    assert report.kind == "race"
    assert '"p0" bytes [8, 12)' in report.message
    launch(kernel, words[:4], words[2:], ctas=1).check()


def test_parts_that_do_not_overlap_are_apart() -> None:
    words = np.zeros(8, np.uint32)
    kernel = ptx_kernel("mov.u32 %r1, 7; st.global.u32 [%rd0+16], %r1;", 2)
    (report,) = launch(kernel, words[:4], words[4:]).reports
    assert report.kind == "memory"


def test_a_view_that_may_be_written_makes_the_array_writeable() -> None:
    words = np.zeros(4, np.uint32)
    fixed = words.view()
    fixed.flags.writeable = False
    kernel = ptx_kernel("mov.u32 %r1, 7; st.global.u32 [%rd0], %r1;", 2)
    launch(kernel, fixed, words).check()
    assert words[0] == 7
    (report,) = launch(kernel, fixed, np.zeros(4, np.uint32)).reports
    assert 'changes "p0", which is read-only' in report.message
