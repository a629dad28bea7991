"""The host path of the kernels: plans, the choice of a kernel file, the driver's absence, and emulated calls."""

import ast
import ctypes
import ctypes.util
import lzma
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvrtc import compile_ptx

import jax_fa4._native as extension
from jax_fa4 import native

ROOT = Path(__file__).parent.parent

# Fields of `Parameters` in csrc/sm80/config.h: addresses, then numbers.
ADDRESSES = (
    "query",
    "key",
    "value",
    "scale",
    "lower",
    "upper",
    "out",
    "lse",
    "lse_rounding",
    "dout",
    "dlse",
    "delta",
    "dquery",
    "dkey",
    "dvalue",
    "dscale",
)
NUMBERS = (
    "batch",
    "rows",
    "keys",
    "heads",
    "kv_heads",
    "width",
    "value_width",
    "query_batch",
    "key_batch",
    "value_batch",
    "scale_batch",
    "lower_batch",
    "upper_batch",
    "band_low",
    "band_high",
    "softcap",
    "out_is_float",
)
FORWARD = ("query", "key", "value", "scale", "lower", "upper", "out", "lse", "lse_rounding")


def forward_arrays(
    B=2, T=128, S=96, N=4, K=2, D=64, Dv=None, dtype="bfloat16", out_dtype=None, bounds=None, lead=None, **changes
):
    """Dtype and shape of a forward's operands and results by name; `lead` has the length of leading axes."""
    Dv, lead = Dv or D, lead or {}
    bound = (0,) if bounds is None else (bounds, T)
    arrays = {
        "query": (dtype, (lead.get("query", B), T, N, D)),
        "key": (dtype, (lead.get("key", B), S, K, D)),
        "value": (dtype, (lead.get("value", B), S, K, Dv)),
        "scale": ("float32", (lead.get("scale", 1),)),
        "lower": ("int32", bound),
        "upper": ("int32", bound),
        "out": (out_dtype or dtype, (B, T, N, Dv)),
        "lse": ("float32", (B, T, N)),
        "lse_rounding": ("float32", (B, T, N)),
    }
    return arrays | changes


def backward_arrays(with_dlse=True, B=2, T=128, S=96, N=4, K=2, D=64, Dv=None, dtype="bfloat16", **rest):
    arrays = forward_arrays(B, T, S, N, K, D, Dv, dtype)
    more = {
        "dout": arrays["out"],
        "dlse": ("float32", (B, T, N) if with_dlse else (0,)),
        "dquery": (dtype, (B, T, N, D)),
        "dkey": (dtype, (B, S, K, D)),
        "dvalue": (dtype, (B, S, K, Dv or D)),
        "dscale": ("float32", (B, T, N)),
        "workspace": (
            "uint8",
            (extension.backward_workspace_bytes(B, T, S, N, K, D, Dv or D, 4 if dtype == "float32" else 2),),
        ),
    }
    return arrays | more | rest


def forward_plan(arrays, capability=(8, 0), band=(-128, 96), softcap=0.0, sm_count=148, l2_bytes=126 << 20):
    given = [(d, list(s)) for d, s in arrays.values()]
    return extension.forward_plan(capability, sm_count, l2_bytes, given, *band, softcap)


def backward_plan(
    arrays, capability=(8, 0), band=(-128, 96), softcap=0.0, deterministic=True, sm_count=148, l2_bytes=126 << 20
):
    given = [(d, list(s)) for d, s in arrays.values()]
    return extension.backward_plan(capability, sm_count, l2_bytes, given, *band, softcap, deterministic)


def fields(launch):
    """Numbers of a launch's parameters by name; and which buffer each address is of."""
    data = launch["parameters"]
    assert len(data) == 8 * len(ADDRESSES) + 4 * len(NUMBERS) + 4  # padded to 8 bytes
    assert not any(data[: 8 * len(ADDRESSES)])
    numbers = dict(zip(NUMBERS, struct.unpack_from("15if1i", data, 8 * len(ADDRESSES)), strict=True))
    addresses = {}
    for at, (buffer, offset) in launch["addresses"].items():
        assert offset == 0
        addresses[ADDRESSES[at // 8]] = buffer
    return numbers, addresses


def ceil(a, b):
    return -(-a // b)


# ---- Plans


def tile(launch_of):
    """How much of a size one CTA takes; `launch_of` makes the launch for a size."""
    return next(size for size in range(1, 129) if launch_of(size)["grid"] != launch_of(size + 1)["grid"])


MAX_SHARED_BYTES = 99 << 10  # of a CTA on sm_86, sm_89 and sm_120


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("D", "Dv", "width"), [(64, 64, 64), (8, 72, 128), (128, 16, 128), (256, 256, 256)])
def test_forward_plan(dtype, D, Dv, width):
    def launch_of(T):
        arrays = forward_arrays(B=3, T=T, S=77, N=6, K=3, D=D, Dv=Dv, dtype=dtype)
        (launch,) = forward_plan(arrays, softcap=30.0)
        return launch

    launch = launch_of(130)
    assert launch["module"] == "sm80_forward"
    assert launch["kernel"] == f"forward_{dtype}_{width}"
    assert launch["grid"] == (ceil(130, tile(launch_of)) * 6 * 3, 1, 1)
    assert launch["block"] == (256, 1, 1)
    assert launch["cluster"] == (1, 1, 1)
    assert 0 < launch["dynamic_shared_bytes"] <= MAX_SHARED_BYTES
    numbers, addresses = fields(launch)
    assert numbers == {
        "batch": 3,
        "rows": 130,
        "keys": 77,
        "heads": 6,
        "kv_heads": 3,
        "width": D,
        "value_width": Dv,
        "query_batch": 3,
        "key_batch": 3,
        "value_batch": 3,
        "scale_batch": 1,
        "lower_batch": 0,
        "upper_batch": 0,
        "band_low": -128,
        "band_high": 96,
        "softcap": 30.0,
        "out_is_float": int(dtype == "float32"),
    }
    assert addresses == {name: name for name in FORWARD if name not in ("lower", "upper")}


def test_leading_axes_may_be_shorter_and_row_bounds_are_passed():
    lead = {"query": 2, "key": 1, "value": 3, "scale": 6}
    (launch,) = forward_plan(forward_arrays(B=6, bounds=3, lead=lead))
    numbers, addresses = fields(launch)
    assert [numbers[f"{name}_batch"] for name in ("query", "key", "value", "scale", "lower", "upper")] == [
        *(2, 1, 3, 6, 3, 3)
    ]
    assert addresses == {name: name for name in FORWARD}


def test_out_may_be_float32():
    for out_dtype, flag in (("float32", 1), ("bfloat16", 0)):
        numbers, _ = fields(forward_plan(forward_arrays(out_dtype=out_dtype))[0])
        assert numbers["out_is_float"] == flag


@pytest.mark.parametrize("dlse", [True, False])
@pytest.mark.parametrize(("D", "width"), [(40, 64), (128, 128), (192, 256)])
def test_backward_plan(dlse, D, width):
    def launches_of(T=130, S=77):
        return backward_plan(backward_arrays(dlse, B=3, T=T, S=S, N=6, K=3, D=D, dtype="float16"))

    delta, query, key = launches_of()
    assert delta["kernel"] == "backward_delta_float16"
    assert query["kernel"] == f"backward_query_float16_{width}"
    assert key["kernel"] == f"backward_key_float16_{width}"
    assert delta["grid"] == (ceil(3 * 130 * 6, 8), 1, 1)
    assert query["grid"] == (ceil(130, tile(lambda T: launches_of(T=T)[1])) * 6 * 3, 1, 1)
    assert key["grid"] == (ceil(77, tile(lambda S: launches_of(S=S)[2])) * 3 * 3, 1, 1)
    assert delta["dynamic_shared_bytes"] == 0
    for launch in (query, key):
        assert 0 < launch["dynamic_shared_bytes"] <= MAX_SHARED_BYTES
    expected = {name: name for name in ADDRESSES if name not in ("lower", "upper", "dlse")} | {"delta": "workspace"}
    if dlse:
        expected["dlse"] = "dlse"
    for launch in (delta, query, key):
        assert launch["module"] == "sm80_backward"
        assert launch["block"] == (256, 1, 1)
        assert fields(launch)[1] == expected
        assert fields(launch)[0] == fields(delta)[0]


def test_plans_count_in_64_bits():
    # 2^33 elements of query and out, 2^32 bytes of lse.
    (launch,) = forward_plan(forward_arrays(B=16, T=1 << 20, S=1 << 20, N=64, K=8, D=8), band=(-(1 << 20), 1 << 20))
    assert launch["grid"][0] >= (1 << 13) * 64 * 16
    assert extension.backward_workspace_bytes(16, 1 << 20, 1 << 20, 64, 8, 8, 8, 4) == 1 << 32
    # And for tensor cores 2^36 elements of sums, lse and delta, and numbers of blocks of 128 rows.
    more = (4 << 36) + 2 * (4 << 30) + 16 * (16 << 13) + (4 << 23)
    assert extension.backward_workspace_bytes(16, 1 << 20, 1 << 20, 64, 8, 8, 8, 2) == more
    delta, query, _ = backward_plan(backward_arrays(B=16, T=1 << 20, S=1 << 20, N=64, K=8, D=8), band=(0, 1))
    assert delta["grid"] == (1 << 27, 1, 1)
    assert query["grid"][0] >= (1 << 13) * 64 * 16


def test_a_grid_that_is_too_large_is_refused():
    arrays = forward_arrays(B=1 << 15, T=1, S=1, N=1 << 16, K=1, D=1)
    with pytest.raises(ValueError, match=re.escape("a grid of 2147483648 CTAs, and a grid has at most 2^31 - 1")):
        forward_plan(arrays)


@pytest.mark.parametrize(("D", "Dv"), [(256, 8), (8, 256)])
def test_strides_beyond_32_bits_are_refused(D, Dv):
    assert forward_plan(forward_arrays(B=1, T=2, N=(1 << 24) - 1, K=1, D=D, Dv=Dv))
    message = r"up to 4294967295 elements in all heads of a row, and these have 16777216 heads of width 256\."
    with pytest.raises(ValueError, match=message):
        forward_plan(forward_arrays(B=1, T=2, N=1 << 24, K=1, D=D, Dv=Dv))
    with pytest.raises(ValueError, match=message):
        backward_plan(backward_arrays(B=1, T=2, N=1 << 24, K=1, D=D, Dv=Dv))


def test_bands_that_overflow_are_refused():
    rows = (1 << 31) - 1
    arrays = forward_arrays(B=1, T=rows, N=1, K=1)
    assert forward_plan(arrays, band=(-rows, 1))
    with pytest.raises(ValueError, match=r"`band_high` must be at most 1 for 2147483647 rows, not 2\."):
        forward_plan(arrays, band=(-rows, 2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"query": ("float64", (2, 128, 4, 64))}, "the operand `query` must be of float16, bfloat16 or float32, not"),
        ({"query": ("bfloat16", (2, 128, 64))}, "the operand `query` must be of 4 dimensions (b, T, N, D), not"),
        ({"query": ("bfloat16", (2, 0, 4, 64))}, "every size from 1 to 2^31 - 1, not bfloat16[2,0,4,64]"),
        ({"query": ("bfloat16", (3, 128, 4, 64))}, "`query` must be bfloat16[b,128,4,64] with a b that divides 2"),
        (
            {"key": ("float16", (2, 96, 2, 64))},
            "`key` must be bfloat16[b,96,2,64] with a b that divides 2, not float16",
        ),
        ({"key": ("bfloat16", (2, 96, 2, 32))}, "`key` must be bfloat16[b,96,2,64] with a b that divides 2, not"),
        ({"key": ("bfloat16", (2, 96, 3, 64))}, "`value` must be bfloat16[b,96,3,64]"),
        ({"value": ("bfloat16", (2, 95, 2, 64))}, "the operand `value` must be bfloat16[b,96,2,64]"),
        ({"scale": ("float32", ())}, "the operand `scale` must be float32[b] with a b that divides 2, not float32[]"),
        ({"scale": ("bfloat16", (1,))}, "the operand `scale` must be float32[b]"),
        ({"lower": ("int32", (2, 128))}, "the operand `upper` must be int32[b,128] with a b that divides 2, not"),
        ({"lower": ("int64", (0,))}, "the operand `lower` must be int32[0], not int64[0]"),
        ({"out": ("float16", (2, 128, 4, 64))}, "the result `out` must be bfloat16[2,128,4,64], not float16"),
        ({"out": ("bfloat16", (2, 128, 4, 63))}, "the result `out` must be bfloat16[2,128,4,64], not"),
        ({"lse": ("float32", (2, 4, 128))}, "the result `lse` must be float32[2,128,4], not float32[2,4,128]"),
        ({"lse_rounding": ("float16", (2, 128, 4))}, "the result `lse_rounding` must be float32[2,128,4], not"),
    ],
)
def test_forward_refuses(changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        forward_plan(forward_arrays(**changes))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="`key` must be of a number of heads that divides query's 4, not"):
        forward_plan(forward_arrays(K=3))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("dout", ("float32", (2, 128, 4, 64))),
        ("dlse", ("float32", (2, 128))),
        ("dquery", ("bfloat16", (1, 128, 4, 64))),
        ("dkey", ("bfloat16", (2, 96, 4, 64))),
        ("dvalue", ("bfloat16", (2, 96, 2, 65))),
        ("dscale", ("float32", (2, 4, 128))),
        ("workspace", ("uint8", (4095,))),
    ],
)
def test_backward_refuses(name, array):
    right = backward_arrays()[name]
    given = f"{array[0]}[{','.join(map(str, array[1]))}]"
    must = f"{right[0]}[{','.join(map(str, right[1]))}]"
    with pytest.raises(
        ValueError, match=rf"the (operand|result) `{name}` must be {re.escape(f'{must}, not {given}.')}"
    ):
        backward_plan(backward_arrays(**{name: array}))


@pytest.mark.parametrize("softcap", [-1.0, float("inf"), float("nan")])
def test_softcap_must_be_positive(softcap):
    with pytest.raises(ValueError, match="the attribute `softcap` must be positive, or 0 for none"):
        forward_plan(forward_arrays(), softcap=softcap)


def test_no_kernel_says_why():
    fast = (
        "the Blackwell forward needs compute capability 10.0 or 10.3, and the GPU has 7.5; "
        "the Hopper forward needs compute capability 9.0, and the GPU has 7.5"
    )
    plain = "the plain kernels need compute capability 8.0 or newer, and the GPU has 7.5."
    with pytest.raises(ValueError, match=f"^{re.escape(f'no kernel can do this: {fast}; {plain}')}$"):
        forward_plan(forward_arrays(), capability=(7, 5))
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'no kernel can do this: {fast}; {plain}').replace('forward', 'backward')}$"
    ):
        backward_plan(backward_arrays(), capability=(7, 5))
    with pytest.raises(ValueError, match=r"8\.0; the plain .* of width up to 256, and these have D 8 and Dv 257\.$"):
        forward_plan(forward_arrays(D=8, Dv=257))


# ---- Plans of the forwards for tensor cores

# Fields of `ForwardParameters` in csrc/common/forward_parameters.h: tensor maps, addresses, numbers.
MAPS = ("query", "key", "value", "out")
FORWARD_ADDRESSES = ("scale", "lower", "upper", "out_float", "lse", "lse_rounding")
FORWARD_NUMBERS = (*NUMBERS[:-1], "packed_heads", "row_tasks", "head_tasks", "section", "last_first")


class Forward(NamedTuple):
    """A forward for tensor cores.

    Attributes:
      name: as its sentences have it.
      module: the file of its kernels.
      capability: of a GPU that it is for.
      widths: D and Dv, in the order in which they are tried, by the part of the kernels' names that tells them.
      box_rows: packed rows of a box.
      tiles: packed rows of a task, keys of a block and threads, for each of the widths.
      deals_tasks: whether there is a CTA for each multiprocessor even where tasks take unequal time.
    """

    name: str
    module: str
    capability: tuple[int, int]
    widths: dict[str, tuple[int, int]]
    box_rows: int
    tiles: dict[str, tuple[int, int, int]]
    deals_tasks: bool


BLACKWELL_WIDTHS = {"64": (64, 64), "96": (96, 96), "128": (128, 128), "192_128": (192, 128)}
BLACKWELL = Forward(
    name="Blackwell",
    module="sm100_forward",
    capability=(10, 0),
    widths=BLACKWELL_WIDTHS,
    box_rows=128,
    tiles=dict.fromkeys(BLACKWELL_WIDTHS, (256, 128, 512)),
    deals_tasks=False,
)
HOPPER = Forward(
    name="Hopper",
    module="sm90_forward",
    capability=(9, 0),
    widths=BLACKWELL_WIDTHS | {"256": (256, 256)},
    box_rows=64,
    tiles={
        "64": (192, 128, 512),
        "96": (128, 128, 384),
        "128": (128, 128, 384),
        "192_128": (128, 112, 384),
        "256": (128, 80, 384),
    },
    deals_tasks=True,
)
each_forward = pytest.mark.parametrize("forward", [BLACKWELL, HOPPER], ids=lambda forward: forward.name)

FULL = (-(1 << 30), 1 << 30)
CAUSAL = (-(1 << 30), 1)


def plan_of(forward, arrays, **rest):
    """The launch of a forward for tensor cores; and its parameters: maps, addresses and numbers by name."""
    (launch,) = forward_plan(arrays, forward.capability, **rest)
    assert launch["module"] == forward.module
    assert launch["cluster"] == (1, 1, 1)
    widths = launch["kernel"].split("_", 2)[2].rpartition("_")[0]
    assert launch["block"] == (forward.tiles[widths][2], 1, 1)
    data = launch["parameters"]
    numbers_at = 128 * len(MAPS) + 8 * len(FORWARD_ADDRESSES)
    assert len(data) == ceil(numbers_at + 4 * len(FORWARD_NUMBERS), 64) * 64
    assert not any(data[:numbers_at])
    maps = {MAPS[at // 128]: one for at, one in launch["tensor_maps"].items()}
    for name, one in maps.items():
        assert one["buffer"] == (name, 0)
    addresses = {}
    for at, (buffer, offset) in launch["addresses"].items():
        assert offset == 0
        addresses[FORWARD_ADDRESSES[(at - 128 * len(MAPS)) // 8]] = buffer
    numbers = dict(zip(FORWARD_NUMBERS, struct.unpack_from("15if5i", data, numbers_at), strict=True))
    return launch, maps, addresses, numbers


def contiguous(shape):
    """Dimensions and strides of a tensor map of an array of 16-bit elements."""
    strides = [2 * math.prod(shape[i:]) for i in range(1, len(shape))]
    return {"dims": tuple(reversed(shape)), "strides": tuple(reversed(strides))}


@each_forward
def test_plan_for_tensor_cores(forward):
    lead = {"query": 2, "key": 1, "value": 3, "scale": 6}
    arrays = forward_arrays(B=6, T=300, S=77, N=24, K=4, D=40, Dv=56, dtype="float16", bounds=3, lead=lead)
    launch, maps, addresses, numbers = plan_of(forward, arrays, band=(-7, 9), softcap=30.0)
    row_tasks = ceil(600, forward.tiles["64"][0])
    assert launch["kernel"] == "forward_float16_64_softcap"
    assert numbers == {
        "batch": 6,
        "rows": 300,
        "keys": 77,
        "heads": 24,
        "kv_heads": 4,
        "width": 40,
        "value_width": 56,
        "query_batch": 2,
        "key_batch": 1,
        "value_batch": 3,
        "scale_batch": 6,
        "lower_batch": 3,
        "upper_batch": 3,
        "band_low": -7,
        "band_high": 9,
        "softcap": 30.0,
        "packed_heads": 2,  # of a group of 6
        "row_tasks": row_tasks,  # of 600 packed rows
        "head_tasks": 72,
        "section": 1 if forward.deals_tasks else 128,  # as all 72 packs fit in the cache
        "last_first": not forward.deals_tasks,
    }
    assert launch["grid"] == (148 if forward.deals_tasks else row_tasks * 72, 1, 1)
    assert addresses == {name: name for name in ("scale", "lower", "upper", "lse", "lse_rounding")}
    queries, keys = {"box": (64, 2, forward.box_rows // 2, 1)}, {"box": (64, 1, forward.tiles["64"][1], 1)}
    for name, box in (("query", queries), ("key", keys), ("value", keys), ("out", queries)):
        assert maps[name] == {"buffer": (name, 0)} | contiguous(arrays[name][1]) | box


@each_forward
def test_out_for_tensor_cores_may_be_float32(forward):
    launch, maps, addresses, _ = plan_of(forward, forward_arrays(out_dtype="float32"))
    assert launch["kernel"] == "forward_bfloat16_64_full"
    assert set(maps) == {"query", "key", "value"}
    assert addresses == {"scale": "scale", "out_float": "out", "lse": "lse", "lse_rounding": "lse_rounding"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("D", "Dv", "widths"),
    [
        (8, 8, "64"),
        (64, 64, "64"),
        (72, 64, "96"),
        (64, 72, "96"),
        (80, 80, "96"),
        (96, 96, "96"),
        (104, 8, "128"),
        (8, 104, "128"),
        (128, 128, "128"),
        (136, 128, "192_128"),
        (192, 8, "192_128"),
        (192, 128, "192_128"),
        (200, 8, "256"),
        (64, 136, "256"),
        (256, 256, "256"),
    ],
)
@each_forward
def test_widths_for_tensor_cores(dtype, D, Dv, widths, forward):
    if widths not in forward.widths:
        (plain,) = forward_plan(forward_arrays(D=D, Dv=Dv, dtype=dtype), forward.capability)
        assert plain["module"] == "sm80_forward"
        return
    launch, maps, _, numbers = plan_of(forward, forward_arrays(D=D, Dv=Dv, dtype=dtype))
    assert launch["kernel"] == f"forward_{dtype}_{widths}_full"
    assert (numbers["width"], numbers["value_width"]) == (D, Dv)
    assert [maps[name]["dims"][0] for name in ("query", "key", "value", "out")] == [D, D, Dv, Dv]
    # The tiles of Q, and two of K and of V, of panels of 128 bytes a row, fit in what a CTA may have.
    panels = [ceil(width, 64) for width in forward.widths[widths]]
    rows, keys, _ = forward.tiles[widths]
    least = 128 * (rows * panels[0] + 2 * keys * (sum(panels) if forward is HOPPER else max(panels)))
    assert least < launch["dynamic_shared_bytes"] <= 227 << 10


@pytest.mark.parametrize(
    ("group", "packed"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (12, 4), (128, 128), (256, 128), (384, 128)]
)
@each_forward
def test_heads_of_a_group_are_packed(group, packed, forward):
    packed = min(packed, forward.box_rows)
    for K in (1, 2, 3):
        _, maps, _, numbers = plan_of(forward, forward_arrays(B=5, T=200, N=group * K, K=K))
        assert numbers["packed_heads"] == packed
        assert numbers["row_tasks"] == ceil(200 * packed, forward.tiles["64"][0])
        assert numbers["head_tasks"] == 5 * group * K // packed
        assert maps["query"]["box"] == maps["out"]["box"] == (64, packed, forward.box_rows // packed, 1)
        assert maps["key"]["box"] == maps["value"]["box"] == (64, 1, 128, 1)


@pytest.mark.parametrize(
    ("band", "bounds", "softcap", "kind"),
    [
        ((-128, 96), None, 0.0, "full"),
        ((-127, 96), None, 0.0, "full"),  # row 127 sees key 0, row 0 sees key 95
        (FULL, None, 0.0, "full"),
        ((-126, 96), None, 0.0, "bounds"),
        ((-127, 95), None, 0.0, "bounds"),
        (CAUSAL, None, 0.0, "bounds"),
        ((-128, 96), 1, 0.0, "bounds"),
        (FULL, None, 15.0, "softcap"),
        (CAUSAL, None, 15.0, "softcap"),
        ((-128, 96), 2, 15.0, "softcap"),
    ],
)
@each_forward
def test_kinds_for_tensor_cores(band, bounds, softcap, kind, forward):
    launch, _, addresses, numbers = plan_of(forward, forward_arrays(bounds=bounds), band=band, softcap=softcap)
    assert launch["kernel"] == f"forward_bfloat16_64_{kind}"
    assert ("lower" in addresses) == ("upper" in addresses) == (bounds is not None)
    assert numbers["last_first"] == (kind != "full" and not forward.deals_tasks)


LLAMA_8B = {"B": 1, "T": 8192, "S": 8192, "N": 32, "K": 8, "D": 128}
LLAMA_70B = LLAMA_8B | {"T": 32768, "S": 32768, "N": 64}
VIT = {"T": 197, "S": 197, "N": 16, "K": 16, "D": 64}
MLA = {"B": 2, "T": 4096, "S": 4096, "N": 128, "K": 128, "D": 192, "Dv": 128}


@pytest.mark.parametrize(
    ("sizes", "band", "kernel", "packed", "row_tasks", "head_tasks", "section", "grid"),
    [
        # Keys and values of a head have 4 MiB, of which 31 fit in the cache; but there are 8.
        (LLAMA_8B, CAUSAL, "128_bounds", 4, 128, 8, 8, 1024),
        (LLAMA_8B, FULL, "128_full", 4, 128, 8, 1, 148),
        # 16 MiB: 7 fit.
        (LLAMA_70B, CAUSAL, "128_bounds", 8, 1024, 8, 4, 8192),
        (VIT | {"B": 8}, FULL, "64_full", 1, 1, 128, 1, 128),
        (VIT | {"B": 64}, FULL, "64_full", 1, 1, 1024, 1, 148),
        # 2.5 MiB: 50 fit.
        (MLA, CAUSAL, "192_128_bounds", 1, 16, 256, 32, 4096),
    ],
)
def test_schedules_of_models(sizes, band, kernel, packed, row_tasks, head_tasks, section, grid):
    launch, _, _, numbers = plan_of(BLACKWELL, forward_arrays(**sizes), band=band)
    assert launch["kernel"] == f"forward_bfloat16_{kernel}"
    assert [numbers[name] for name in ("packed_heads", "row_tasks", "head_tasks", "section")] == [
        *(packed, row_tasks, head_tasks, section)
    ]
    assert launch["grid"] == (grid, 1, 1)


@pytest.mark.parametrize("sm_count", [1, 132, 148, 160])
def test_grids_follow_the_multiprocessors(sm_count):
    for B in (1, 19, 20, 41):  # of 4 packs of heads and 2 tasks of rows
        arrays = forward_arrays(B=B, T=512, N=4, K=4)
        launch, _, _, numbers = plan_of(BLACKWELL, arrays, band=FULL, sm_count=sm_count)
        assert (launch["grid"], numbers["section"]) == ((min(8 * B, sm_count), 1, 1), 1)
        assert plan_of(BLACKWELL, arrays, band=CAUSAL, sm_count=sm_count)[0]["grid"] == (8 * B, 1, 1)
        # On Hopper they are 3 tasks of rows.
        for band in (FULL, CAUSAL):
            assert plan_of(HOPPER, arrays, band=band, sm_count=sm_count)[0]["grid"] == (min(12 * B, sm_count), 1, 1)


@pytest.mark.parametrize(
    ("l2_bytes", "section"),
    [(0, 1), (1 << 20, 1), ((3 << 20) - 1, 1), (3 << 20, 2), (6 << 20, 4), (50 << 20, 32), (126 << 20, 64)],
)
def test_sections_follow_the_cache(l2_bytes, section):
    # Keys and values of a head have 1.5 MiB. There are 40 packs of heads.
    arrays = forward_arrays(B=5, T=256, S=4096, N=16, K=8, D=128, Dv=64)
    assert plan_of(BLACKWELL, arrays, band=CAUSAL, l2_bytes=l2_bytes)[3]["section"] == section


MOST_ROWS = (1 << 31) - 256
# So many heads that the plain kernels refuse too, and the reasons are seen.
MANY = 1 << 26


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": "float32", "D": 257}, "float16 and bfloat16, and these are float32"),
        ({"D": 264}, "heads of D up to 192 and Dv up to 128, and these have D 264 and Dv 264"),
        (
            {"D": 192, "Dv": 136, "N": MANY},
            "heads of D up to 192 and Dv up to 128, and these have D 192 and Dv 136",
        ),
        ({"D": 60, "Dv": 64, "N": MANY}, "heads whose widths are multiples of 8, and these have D 60 and Dv 64"),
        ({"D": 64, "Dv": 1, "N": MANY}, "heads whose widths are multiples of 8, and these have D 64 and Dv 1"),
        (
            {"T": (1 << 24) - 1, "N": MANY, "K": MANY // 128},
            "up to 2147483392 rows times packed heads, and these are 16777215 times 128",
        ),
        ({"S": MOST_ROWS + 1, "N": MANY}, "up to 2147483392 keys, and these are 2147483393"),
        (
            {"B": 16, "T": 513, "S": 1, "N": MANY, "K": MANY},
            "up to 2147483647 tasks of 256 packed rows, and these are 3 for each of 1073741824 packs of heads",
        ),
        (
            {"T": 128, "N": MANY},
            "less than 2^40 bytes in a batch element, and those of `query` have 1099511627776",
        ),
        (
            {"T": 1, "S": 128, "N": MANY, "K": MANY},
            "less than 2^40 bytes in a batch element, and those of `key` have 1099511627776",
        ),
        (
            {"T": 1, "S": 128, "N": MANY, "K": MANY, "D": 8, "Dv": 64},
            "less than 2^40 bytes in a batch element, and those of `value` have 1099511627776",
        ),
        (
            {"T": 128, "N": MANY, "D": 8, "Dv": 64},
            "less than 2^40 bytes in a batch element, and those of `out` have 1099511627776",
        ),
    ],
)
def test_the_blackwell_forward_says_why_not(sizes, reason):
    arrays = forward_arrays(**{"B": 1, "T": 2, "S": 3, "K": 1} | sizes)
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'no kernel can do this: the Blackwell forward takes {reason}; ')}"
    ):
        forward_plan(arrays, (10, 0), band=(-4, 4))


@pytest.mark.parametrize(
    ("does", "does_not"),
    [
        ({"dtype": "float16"}, {"dtype": "float32"}),
        ({"dtype": "float16", "out_dtype": "float32"}, {"dtype": "float32"}),
        ({"D": 192, "Dv": 128}, {"D": 200, "Dv": 128}),
        ({"D": 192, "Dv": 128}, {"D": 192, "Dv": 136}),
        ({"D": 64}, {"D": 65}),
        ({"D": 64, "Dv": 72}, {"D": 64, "Dv": 68}),
        ({"T": MOST_ROWS, "D": 8}, {"T": MOST_ROWS + 1, "D": 8}),
        ({"T": MOST_ROWS // 128, "N": 128, "D": 8}, {"T": MOST_ROWS // 128 + 1, "N": 128, "D": 8}),
        ({"S": MOST_ROWS}, {"S": MOST_ROWS + 1}),
        ({"T": (1 << 20) - 1, "N": 1 << 13}, {"T": 1 << 20, "N": 1 << 13}),
        ({"S": (1 << 20) - 1, "N": 1 << 13, "K": 1 << 13}, {"S": 1 << 20, "N": 1 << 13, "K": 1 << 13}),
        # The copy engine does not write it.
        (
            {"T": 1 << 20, "N": 1 << 13, "D": 8, "Dv": 64, "out_dtype": "float32"},
            {"T": 1 << 20, "N": 1 << 13, "D": 8, "Dv": 64},
        ),
    ],
)
def test_what_the_blackwell_forward_cannot_do_the_plain_one_does(does, does_not):
    modules = []
    for sizes in (does, does_not):
        (launch,) = forward_plan(forward_arrays(**{"B": 1, "N": 1, "K": 1} | sizes), (10, 0), band=(-4, 4))
        modules.append(launch["module"])
    assert modules == ["sm100_forward", "sm80_forward"]


@pytest.mark.parametrize("full", [True, False])
def test_tasks_of_the_blackwell_forward_are_counted_in_31_bits(full):
    sizes = {"T": 1, "S": 2, "D": 8}
    band = FULL if full else CAUSAL
    most = forward_arrays(B=1, N=(1 << 31) - 1, K=(1 << 31) - 1, **sizes)
    launch, _, _, numbers = plan_of(BLACKWELL, most, band=band)
    assert numbers["row_tasks"] * numbers["head_tasks"] == (1 << 31) - 1
    assert launch["grid"] == (148 if full else (1 << 31) - 1, 1, 1)
    with pytest.raises(ValueError, match=r"a grid of 2147483648 CTAs, and a grid has at most 2\^31 - 1"):
        forward_plan(forward_arrays(B=8, N=1 << 28, K=1 << 28, **sizes), (10, 0), band=band)


# ---- Plans of the backwards for tensor cores

# Fields of `BackwardParameters` in csrc/common/backward_parameters.h: tensor maps, addresses, numbers.
BACKWARD_MAPS = ("query", "dout", "key", "value", "dkey", "dvalue")
BACKWARD_ADDRESSES = (
    *("query_rows", "out_rows", "dout_rows", "dquery_rows", "dscale", "lse", "lse_rounding", "dlse"),
    *("scale", "lower", "upper", "lse_log2", "delta", "hulls", "dquery_sum", "turns"),
)
IN_WORKSPACE = ("lse_log2", "delta", "hulls", "turns", "dquery_sum")
BACKWARD_NUMBERS = (
    *("batch", "rows", "keys", "heads", "kv_heads", "width", "value_width", "compiled_width"),
    *("query_batch", "key_batch", "value_batch", "scale_batch", "lower_batch", "upper_batch", "hull_batch"),
    *("band_low", "band_high", "softcap", "row_block", "row_blocks"),
    *("key_blocks", "head_tasks", "section", "deterministic"),
)


class Backward(NamedTuple):
    """A backward for tensor cores.

    Attributes:
      name: as its sentences have it.
      module: the file of its kernels.
      capability: of a GPU that it is for.
      tiles: rows and keys of a block, by the part of the kernels' names that tells their widths.
      threads: of a CTA.
    """

    name: str
    module: str
    capability: tuple[int, int]
    tiles: dict[str, tuple[int, int]]
    threads: int


BLACKWELL_BACKWARD = Backward(
    name="Blackwell",
    module="sm100_backward",
    capability=(10, 0),
    tiles={"64": (128, 128), "96": (128, 128), "128": (128, 128), "192_128": (64, 128)},
    threads=512,
)
HOPPER_BACKWARD = Backward(
    name="Hopper",
    module="sm90_backward",
    capability=(9, 0),
    tiles={"64": (128, 128), "96": (64, 128), "128": (64, 128), "192_128": (64, 128), "256": (64, 64)},
    threads=384,
)
each_backward = pytest.mark.parametrize(
    "backward", [BLACKWELL_BACKWARD, HOPPER_BACKWARD], ids=lambda backward: backward.name
)


def plans_of(backward, arrays, **rest):
    """The launches of a backward for tensor cores; and what their parameters have in common: addresses and numbers."""
    launches = backward_plan(arrays, backward.capability, **rest)
    assert [launch["module"] for launch in launches] == ["backward_rows", backward.module, "backward_rows"]
    addresses_at = 128 * len(BACKWARD_MAPS)
    numbers_at = addresses_at + 8 * len(BACKWARD_ADDRESSES)
    for launch in launches:
        data = launch["parameters"]
        assert len(data) == ceil(numbers_at + 4 * len(BACKWARD_NUMBERS), 64) * 64
        assert not any(data[:numbers_at])
        assert data == launches[0]["parameters"]
        assert launch["addresses"] == launches[0]["addresses"]
        assert launch["cluster"] == (1, 1, 1)
    before, main, after = launches
    assert before["tensor_maps"] == after["tensor_maps"] == {}
    assert before["dynamic_shared_bytes"] == after["dynamic_shared_bytes"] == 0
    assert main["block"] == (backward.threads, 1, 1)
    assert 0 < main["dynamic_shared_bytes"] <= 227 << 10
    addresses = {}
    for at, address in main["addresses"].items():
        addresses[BACKWARD_ADDRESSES[(at - addresses_at) // 8]] = address
    numbers = dict(zip(BACKWARD_NUMBERS, struct.unpack_from("17if6i", data, numbers_at), strict=True))
    return launches, addresses, numbers


@each_backward
def test_backward_plan_for_tensor_cores(backward):
    arrays = backward_arrays(
        *(True, 6, 300, 277, 24, 4, 40, 56, "float16"),
        lower=("int32", (2, 300)),
        upper=("int32", (3, 300)),
        query=("float16", (2, 300, 24, 40)),
        key=("float16", (1, 277, 4, 40)),
        value=("float16", (3, 277, 4, 56)),
        scale=("float32", (6,)),
    )
    launches, addresses, numbers = plans_of(backward, arrays, band=(-7, 9), softcap=30.0, deterministic=False)
    assert [launch["kernel"] for launch in launches] == [
        *("before_float16", "backward_float16_64_softcap", "after_float16")
    ]
    assert numbers == {
        "batch": 6,
        "rows": 300,
        "keys": 277,
        "heads": 24,
        "kv_heads": 4,
        "width": 40,
        "value_width": 56,
        "compiled_width": 64,
        "query_batch": 2,
        "key_batch": 1,
        "value_batch": 3,
        "scale_batch": 6,
        "lower_batch": 2,
        "upper_batch": 3,
        "hull_batch": 6,
        "band_low": -7,
        "band_high": 9,
        "softcap": 30.0,
        "row_block": 128,
        "row_blocks": 3,
        "key_blocks": 3,
        "head_tasks": 24,
        "section": 32,  # all 24 fit in the cache
        "deterministic": 0,
    }
    before, main, after = launches
    # Tiles of 64 rows: of eight heads and eight positions, and of a head.
    assert (before["grid"], before["block"]) == ((6 * 3 * 48, 1, 1), (256, 1, 1))
    assert main["grid"] == (3 * 24, 1, 1)
    assert (after["grid"], after["block"]) == ((6 * 24 * 6, 1, 1), (128, 1, 1))
    own = {
        "query_rows": "query",
        "out_rows": "out",
        "dout_rows": "dout",
        "dquery_rows": "dquery",
    }
    same = ("dscale", "lse", "lse_rounding", "dlse", "scale", "lower", "upper")
    given = {name: own.get(name, name) for name in (*own, *same)}
    assert {name: x for name, x in addresses.items() if name not in IN_WORKSPACE} == {
        name: (buffer, 0) for name, buffer in given.items()
    }
    # One after the other, each at a multiple of 256 bytes.
    rows = 6 * 24 * 384
    sizes = {"lse_log2": 4 * rows, "delta": 4 * rows, "hulls": 6 * 3 * 16, "turns": 6 * 24 * 3 * 4}
    sizes["dquery_sum"] = rows * 64 * 4
    at = 0
    for name in IN_WORKSPACE:
        assert addresses[name] == ("workspace", at)
        at = ceil(at + sizes[name], 256) * 256
    assert at <= arrays["workspace"][1][0]
    maps = {BACKWARD_MAPS[at // 128]: one for at, one in main["tensor_maps"].items()}
    of_rows, of_keys = (64, 1, 128, 1), (64, 1, 128, 1)
    for name, box in zip(BACKWARD_MAPS, [of_rows] * 2 + [of_keys] * 4, strict=True):
        assert maps[name] == {"buffer": (name, 0), "box": box} | contiguous(arrays[name][1])


@each_backward
def test_backward_without_bounds_and_dlse(backward):
    launches, addresses, numbers = plans_of(backward, backward_arrays(False))
    assert launches[1]["kernel"] == "backward_bfloat16_64_full"
    assert not {"lower", "upper", "dlse"} & set(addresses)
    assert (numbers["lower_batch"], numbers["upper_batch"], numbers["hull_batch"]) == (0, 0, 1)
    assert numbers["deterministic"] == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("D", "Dv", "widths"),
    [
        (8, 8, "64"),
        (64, 64, "64"),
        (64, 72, "96"),
        (96, 96, "96"),
        (104, 8, "128"),
        (128, 128, "128"),
        (136, 128, "192_128"),
        (192, 8, "192_128"),
        (192, 128, "192_128"),
        (200, 8, "256"),
        (64, 136, "256"),
        (256, 256, "256"),
    ],
)
@each_backward
def test_widths_of_backwards_for_tensor_cores(dtype, D, Dv, widths, backward):
    arrays = backward_arrays(D=D, Dv=Dv, dtype=dtype, T=150, S=190)
    if widths not in backward.tiles:
        launches = backward_plan(arrays, backward.capability)
        assert [launch["module"] for launch in launches] == ["sm80_backward"] * 3
        return
    (_, main, _), _, numbers = plans_of(backward, arrays, band=FULL)
    assert main["kernel"] == f"backward_{dtype}_{widths}_full"
    compiled = int(widths.partition("_")[0])
    assert (numbers["width"], numbers["value_width"], numbers["compiled_width"]) == (D, Dv, compiled)
    rows, keys = backward.tiles[widths]
    assert (numbers["row_block"], numbers["row_blocks"]) == (rows, ceil(150, rows))
    assert numbers["key_blocks"] == ceil(190, keys)
    boxes = [one["box"][2] for one in main["tensor_maps"].values()]
    assert boxes == [rows] * 2 + [keys] * 4
    assert [one["dims"][0] for one in main["tensor_maps"].values()] == [D, Dv, D, Dv, D, Dv]


@pytest.mark.parametrize(
    ("band", "bounds", "softcap", "kind"),
    [
        ((-128, 96), False, 0.0, "full"),
        ((-126, 96), False, 0.0, "bounds"),
        (CAUSAL, False, 0.0, "bounds"),
        ((-128, 96), True, 0.0, "bounds"),
        (FULL, False, 15.0, "softcap"),
        ((-128, 96), True, 15.0, "softcap"),
    ],
)
@each_backward
def test_kinds_of_backwards_for_tensor_cores(band, bounds, softcap, kind, backward):
    arrays = backward_arrays(**(dict.fromkeys(("lower", "upper"), ("int32", (1, 128))) if bounds else {}))
    launches, addresses, numbers = plans_of(backward, arrays, band=band, softcap=softcap)
    assert launches[1]["kernel"] == f"backward_bfloat16_64_{kind}"
    assert ("lower" in addresses) == bounds
    assert numbers["hull_batch"] == 1


@pytest.mark.parametrize(("heads", "tile"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 8), (40, 8)])
@each_backward
def test_tiles_before_the_backward(heads, tile, backward):
    """Of 64 rows of some heads each, which hold as many heads as there are, up to eight."""
    (before, _, after), _, numbers = plans_of(backward, backward_arrays(B=3, T=200, N=heads, K=1))
    rows = numbers["row_blocks"] * numbers["row_block"]
    assert before["grid"] == (3 * rows // (64 // tile) * ceil(heads, tile), 1, 1)
    assert after["grid"] == (3 * heads * rows // 64, 1, 1)


@pytest.mark.parametrize(
    ("heads", "section"), [(0, 1), (1, 1), (1.999, 1), (2, 2), (3, 2), (7.999, 4), (8, 8), (39, 32), (1000, 64)]
)
@each_backward
def test_sections_of_backwards_follow_the_cache(heads, section, backward):
    """So many key heads' rows of query, dout, sums, lse and delta fit in it, of 40."""
    arrays = backward_arrays(B=5, T=4096, S=256, N=16, K=8, D=128, Dv=64)
    bytes_of_head = 2 * 4096 * (2 * (128 + 64) + 4 * (128 + 2))
    numbers = plans_of(backward, arrays, band=CAUSAL, l2_bytes=int(heads * bytes_of_head))[2]
    assert numbers["section"] == section


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": "float32", "D": 257}, "float16 and bfloat16, and these are float32"),
        ({"D": 264}, "heads of D up to 192 and Dv up to 128, and these have D 264 and Dv 264"),
        ({"D": 192, "Dv": 136, "N": MANY}, "heads of D up to 192 and Dv up to 128, and these have D 192 and Dv 136"),
        ({"D": 60, "Dv": 64, "N": MANY}, "heads whose widths are multiples of 8, and these have D 60 and Dv 64"),
        ({"S": MOST_ROWS + 1, "N": MANY}, "up to 2147483392 keys, and these are 2147483393"),
        (
            {"B": 16, "S": 257, "N": MANY, "K": MANY, "D": 8, "Dv": 64},
            "up to 2147483647 tasks of 128 keys, and these are 3 for each of 1073741824 key heads",
        ),
        (
            {"B": 16, "N": MANY, "D": 8, "Dv": 64},
            "up to 2147483647 tiles of 64 rows, and these are 2 for each of 1073741824 heads",
        ),
        ({"T": 128, "N": MANY}, "less than 2^40 bytes in a batch element, and those of `query` have 1099511627776"),
        (
            {"T": 128, "N": MANY, "D": 8, "Dv": 64},
            "less than 2^40 bytes in a batch element, and those of `dout` have 1099511627776",
        ),
        (
            {"S": 128, "N": MANY, "K": MANY, "D": 8, "Dv": 64},
            "less than 2^40 bytes in a batch element, and those of `value` have 1099511627776",
        ),
    ],
)
def test_the_blackwell_backward_says_why_not(sizes, reason):
    arrays = backward_arrays(**{"B": 1, "T": 2, "S": 3, "K": 1} | sizes)
    sentence = f"no kernel can do this: the Blackwell backward takes {reason}; the Hopper backward needs compute"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        backward_plan(arrays, (10, 0), band=(-4, 4))


@pytest.mark.parametrize(
    ("does", "does_not"),
    [
        ({"dtype": "float16"}, {"dtype": "float32"}),
        ({"dtype": "float16"}, {"dtype": "float16", "out": ("float32", (1, 128, 1, 64))}),
        ({"D": 64, "Dv": 72}, {"D": 64, "Dv": 68}),
        ({"T": MOST_ROWS, "D": 8}, {"T": MOST_ROWS + 1, "D": 8}),
        ({"S": MOST_ROWS, "D": 8}, {"S": MOST_ROWS + 1, "D": 8}),
        ({"T": (1 << 20) - 1, "N": 1 << 13}, {"T": 1 << 20, "N": 1 << 13}),
        ({"S": (1 << 20) - 1, "N": 1 << 13, "K": 1 << 13}, {"S": 1 << 20, "N": 1 << 13, "K": 1 << 13}),
    ],
)
@each_backward
def test_what_a_backward_for_tensor_cores_cannot_do_the_plain_one_does(does, does_not, backward):
    modules = []
    for sizes in (does, does_not):
        arrays = backward_arrays(**{"B": 1, "N": 1, "K": 1} | sizes)
        arrays["dout"] = arrays["out"]
        launches = backward_plan(arrays, backward.capability, band=(-4, 4))
        modules.append([launch["module"] for launch in launches])
    assert modules == [["backward_rows", backward.module, "backward_rows"], ["sm80_backward"] * 3]


@each_backward
def test_tasks_of_a_backward_for_tensor_cores_are_counted_in_31_bits(backward):
    heads = (1 << 30) - 8
    arrays = backward_arrays(B=1, D=192, Dv=8, T=1, S=1, N=heads, K=heads)  # of a block of 64 rows
    launches, _, numbers = plans_of(backward, arrays, band=FULL)
    assert [launch["grid"][0] for launch in launches] == [heads] * 3
    assert numbers["head_tasks"] == heads
    arrays = backward_arrays(B=1, D=8, T=1, S=1, N=heads, K=heads)  # of one of 128
    launches, _, numbers = plans_of(backward, arrays, band=FULL)
    assert [launch["grid"][0] for launch in launches] == [2 * heads, heads, 2 * heads]


@each_backward
def test_workspaces_of_backwards_serve_every_gpu(backward):
    """Their size is known before the GPU is: it is that of the kernel that needs most."""
    many = ({}, {"D": 96, "T": 70}, {"D": 192, "Dv": 128, "T": 65}, {"D": 8, "Dv": 128, "B": 3, "N": 8})
    for sizes in (*many, *([{"D": 200, "T": 1}] if "256" in backward.tiles else [])):
        sizes = {"B": 2, "T": 128, "S": 96, "N": 4, "K": 2, "D": 64, "Dv": sizes.get("D", 64)} | sizes
        _, addresses, numbers = plans_of(backward, backward_arrays(**sizes), band=FULL)
        rows = sizes["B"] * sizes["N"] * numbers["row_blocks"] * numbers["row_block"]
        end = addresses["dquery_sum"][1] + 4 * rows * numbers["compiled_width"]
        names = ("B", "T", "S", "N", "K", "D", "Dv")
        assert end <= extension.backward_workspace_bytes(*(sizes[name] for name in names), 2)
    assert extension.backward_workspace_bytes(2, 128, 96, 4, 2, 64, 64, 4) == 4 * 2 * 128 * 4
    assert extension.backward_workspace_bytes(2, 128, 96, 4, 2, 60, 60, 2) == 4 * 2 * 128 * 4


@pytest.mark.parametrize(
    ("capability", "serves"),
    [
        *(((8, 0), None), ((8, 9), None), ((9, 0), HOPPER), ((10, 0), BLACKWELL), ((10, 1), None)),
        *(((10, 3), BLACKWELL), ((11, 0), None), ((12, 0), None), ((12, 1), None)),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_each_pass_has_its_own_kernels(capability, serves, dtype):
    (forward,) = forward_plan(forward_arrays(dtype=dtype), capability)
    assert forward["module"] == (serves.module if serves and dtype != "float32" else "sm80_forward")
    backward = [launch["module"] for launch in backward_plan(backward_arrays(dtype=dtype), capability)]
    if serves and dtype != "float32":
        name = serves.module.replace("forward", "backward")
        assert backward == ["backward_rows", name, "backward_rows"]
    else:
        assert backward == ["sm80_backward"] * 3


@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "box", "boxes"),
    [("float32", 33, 36, 32, 2 * 2), ("bfloat16", 1, 8, 64, 1), ("int32", 70, 100, 32, 3 * 4)],
)
def test_tensor_copy_plan(dtype, rows, columns, box, boxes):
    arrays = [(dtype, [rows, columns])] * 2
    (launch,) = extension.tensor_copy_plan((9, 0), arrays)
    assert (launch["module"], launch["kernel"]) == ("sm90_copy", "copy")
    assert launch["grid"] == (boxes, 1, 1)
    maps = launch["tensor_maps"]
    assert [maps[at]["buffer"] for at in (0, 128)] == [("x", 0), ("copy", 0)]
    for one in maps.values():
        assert one["dims"] == (columns, rows)
        assert one["strides"] == (columns * (2 if dtype == "bfloat16" else 4),)
        assert one["box"] == (box, 32)
    assert struct.unpack_from("2i", launch["parameters"], 256) == (box, ceil(columns, box))
    with pytest.raises(ValueError, match=r"capability 9\.0 or newer, and the GPU has 8\.9"):
        extension.tensor_copy_plan((8, 9), arrays)
    with pytest.raises(ValueError, match="rows have a multiple of 16 bytes"):
        extension.tensor_copy_plan((9, 0), [(dtype, [rows, columns + 1])] * 2)
    with pytest.raises(ValueError, match="the result `copy` must be"):
        extension.tensor_copy_plan((9, 0), [(dtype, [rows, columns]), (dtype, [columns, rows])])


# ---- Kernel files


@pytest.fixture
def kernels(tmp_path):
    """An empty directory in place of the package's kernels, and a function that has it read again."""

    def reread():
        extension.set_kernel_directory(str(tmp_path))
        native.unpack(x for x in tmp_path.glob("*.xz") if x.stat().st_size)

    native.register()
    reread()
    yield tmp_path, reread
    extension.set_kernel_directory(str(native.kernel_directory()))


@pytest.mark.parametrize(
    ("capability", "file"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80.cubin.xz"),
        ((8, 6), "sm_80.cubin.xz"),  # the same major version
        ((8, 9), "sm_89.cubin.xz"),  # and the largest minor one
        ((9, 0), "sm_90a.cubin.xz"),  # this GPU alone, before sm_90
        ((10, 0), "sm_100f.cubin.xz"),  # its family, before sm_100
        ((10, 3), "sm_103a.cubin.xz"),
        ((11, 0), "sm_100.ptx.xz"),  # no machine code of major version 11: compiled by the driver, not from sm_100f
        ((12, 0), "sm_120.cubin.xz"),
        ((12, 1), "sm_120.cubin.xz"),
        ((13, 0), "sm_120.ptx.xz"),
    ],
)
def test_choice_of_a_kernel_file(kernels, capability, file):
    directory, reread = kernels
    for target in ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100f", "sm_103a", "sm_120"):
        for extension_of_file in ("cubin", "ptx"):
            (directory / f"some_kernel.{target}.{extension_of_file}.xz").touch()
    for other in (
        "other_kernel.sm_75.cubin.xz",
        "some_kernel.sm_75.xz",
        "some_kernel.sm_75.cubin",
        "some_kernel.ptx.xz",
    ):
        (directory / other).touch()
    reread()
    if file is None:
        with pytest.raises(RuntimeError, match=r"sm_100, sm_100f, .* none of which a GPU of compute capability 7\.5"):
            extension.kernel_file("some_kernel", *capability)
        return
    assert extension.kernel_file("some_kernel", *capability) == str(directory / f"some_kernel.{file}")


def test_a_family_build_does_not_run_on_an_older_member(kernels):
    directory, reread = kernels
    (directory / "some_kernel.sm_103f.cubin.xz").touch()
    reread()
    assert extension.kernel_file("some_kernel", 10, 3)
    with pytest.raises(RuntimeError, match=r"are built for sm_103f, none of which .* 10\.0 can run"):
        extension.kernel_file("some_kernel", 10, 0)


def test_builds_are_listed_and_a_missing_kernel_is_named(kernels):
    directory, reread = kernels
    for name in ("b.sm_80.ptx.xz", "b.sm_80.cubin.xz", "a.sm_90a.cubin.xz"):
        (directory / name).touch()
    reread()
    assert extension.kernel_builds() == [("a", "sm_90a"), ("b", "sm_80")]
    with pytest.raises(RuntimeError, match=f"the kernels c were not built: there are none in {directory}"):
        extension.kernel_file("c", 8, 0)


def test_damaged_files_are_named(tmp_path, monkeypatch):
    whole = lzma.compress(b"a module" * 100)
    broken = bytes([*whole[:40], whole[40] ^ 1, *whole[41:]])
    for i, packed in enumerate((whole, whole[:-1], whole[: len(whole) // 2], whole[1:], broken, b"")):
        (tmp_path / f"a.sm_8{i}.cubin.xz").write_bytes(packed)
    (tmp_path / "b.sm_80.ptx.xz").mkdir()
    monkeypatch.setattr(native, "kernel_directory", lambda: tmp_path)
    cut = "Compressed data ended before the end-of-stream marker was reached"
    wrong = [("a.sm_81.cubin", cut), ("a.sm_82.cubin", cut), ("a.sm_83.cubin", "Input format not supported by decoder")]
    wrong += [("a.sm_84.cubin", "Corrupt input data"), ("a.sm_85.cubin", cut), ("b.sm_80.ptx", r"\[Errno 21\] .*")]
    for fault, (name, why) in zip(native.kernel_faults(), wrong, strict=True):
        assert re.fullmatch(rf"The kernel file {tmp_path}/{name}\.xz cannot be used: {why}", fault)
    with pytest.raises(RuntimeError, match=r"a\.sm_81\.cubin\.xz cannot be used"):
        native.unpack(sorted(tmp_path.glob("*.xz")))


def test_package_has_whole_files():
    assert native.kernel_faults() == []


def test_what_gpus_load_is_unpacked(monkeypatch):
    gpus = [SimpleNamespace(compute_capability=x) for x in ("9.0", "9.0", "10.0", "gfx942")]
    monkeypatch.setattr(jax, "local_devices", lambda backend: gpus)
    native.register()
    names = {file.name for file in native._files_for_gpus()}
    assert {"sm90_forward.sm_90a.cubin.xz", "sm100_forward.sm_100f.cubin.xz"} <= names
    assert {"sm80_forward.sm_90.cubin.xz", "sm80_forward.sm_100.cubin.xz"} <= names
    assert not any(".sm_80." in name or ".sm_120." in name for name in names)


# ---- The driver


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="this machine has an NVIDIA driver")
def test_missing_driver_is_said():
    info = extension.cuda_driver_info()
    assert info["why_not"].startswith("the NVIDIA driver is not installed: libcuda.so.1: ")
    assert info["cuda_version"] is None
    assert info["gpus"] == []


_DRIVER = """
#include <cstring>
extern "C" {
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int Init(unsigned) { return INIT; }
int Name(int, const char** text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int Text(int, const char** text) { *text = "no CUDA-capable device is detected"; return 0; }
int Other() { return 999; }
int Count(int* count) { *count = 1; return 0; }
int Get(int* gpu, int) { *gpu = 7; return 0; }
int GpuName(char* name, int, int) { std::strcpy(name, "some GPU"); return 0; }
int Memory(unsigned long long* bytes, int) { *bytes = 1ull << 38; return 0; }
int Attribute(int* value, int attribute, int gpu) {
  *value = gpu != 7          ? 0
           : attribute == 16 ? 160       // multiprocessors
           : attribute == 38 ? 50 << 20  // L2 cache
           : attribute == 75 ? 10        // compute capability
           : attribute == 76 ? 3
                             : 0;
  return 0;
}
int cuGetProcAddress_v2(const char* name, void** address, int, unsigned long long, int*) {
  *address = !std::strcmp(name, "cuInit") ? (void*)&Init : !std::strcmp(name, "cuGetErrorName") ? (void*)&Name
           : !std::strcmp(name, "cuGetErrorString") ? (void*)&Text
           : !std::strcmp(name, "cuDeviceGetCount") ? (void*)&Count : !std::strcmp(name, "cuDeviceGet") ? (void*)&Get
           : !std::strcmp(name, "cuDeviceGetName") ? (void*)&GpuName
           : !std::strcmp(name, "cuDeviceTotalMem") ? (void*)&Memory
           : !std::strcmp(name, "cuDeviceGetAttribute") ? (void*)&Attribute
           : !std::strcmp(name, MISSING) ? nullptr : (void*)&Other;
  return 0;
}
}
"""


def with_driver(folder, script, version=13000, init=0, missing=""):
    """What a Python script prints where this driver is found."""
    (folder / "driver.cc").write_text(_DRIVER)
    defines = (f"-DVERSION={version}", f"-DINIT={init}", f'-DMISSING="{missing}"')
    compile_it = ["c++", "-shared", "-fPIC", *defines, "driver.cc", "-o", "libcuda.so.1"]
    subprocess.run(compile_it, cwd=folder, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler for a driver to test with")
@pytest.mark.parametrize(
    ("version", "init", "missing", "why_not"),
    [
        (11080, 0, "", "supports CUDA 11.8, but these kernels need CUDA 12.0: install driver 525.60.13 or newer."),
        (12090, 0, "cuLaunchKernelEx", "the NVIDIA driver, of CUDA 12.9, has no cuLaunchKernelEx."),
        (13000, 100, "", "cannot start: CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)."),
    ],
)
def test_unusable_driver_is_said(tmp_path, version, init, missing, why_not):
    script = "import jax_fa4._native as n; i = n.cuda_driver_info(); print(i['why_not'], i['cuda_version'], i['gpus'])"
    printed = with_driver(tmp_path, script, version, init, missing)
    assert printed.endswith(f"{why_not} ({version // 1000}, {version % 1000 // 10}) []")


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler for a driver to test with")
def test_gpus_are_described(tmp_path):
    info = with_driver(tmp_path, "import jax_fa4._native as n; print(n.cuda_driver_info())")
    gpu = {"compute_capability": (10, 3), "sm_count": 160, "l2_bytes": 50 << 20}
    gpu |= {"name": "some GPU", "memory_bytes": 1 << 38}
    assert ast.literal_eval(info) == {"why_not": None, "cuda_version": (13, 0), "gpus": [gpu]}


# A driver that notes what it is asked for, and what XLA gives a handler.
_CALLS = """
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

extern "C" {

struct Launch {
  uint64_t stream, context;  // the context that was current
  char kernel[64];           // the number of its module, and its name
  unsigned grid[3];
  unsigned char parameters[2048];
};
int parameter_bytes = 0;     // of the kernels that are launched
uint64_t context_id = 0;     // of context 0: others have higher ones
std::atomic<int> modules = 0, encodings = 0;
std::mutex mutex;  // of what follows
std::deque<Launch> launches;
std::map<std::pair<uint64_t, std::string>, std::string> functions;

// A stream's context is its number without the last two digits, and the GPU is that of the same number.
thread_local uint64_t current = 0;
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int Init(unsigned) { return 0; }
int Name(int, const char** text) { *text = "CUDA_ERROR_INVALID_VALUE"; return 0; }
int Text(int, const char** text) { *text = "invalid argument"; return 0; }
int StreamContext(uint64_t stream, uint64_t* context) { *context = stream / 100; return 0; }
int Current(uint64_t* context) { *context = current; return 0; }
int Push(uint64_t context) { current = context; return 0; }
int Pop(uint64_t* context) { *context = current; current = 0; return 0; }
int ContextId(uint64_t context, uint64_t* id) { *id = context_id + context; return 0; }
int ContextGpu(int* gpu) { *gpu = static_cast<int>(current); return 0; }
int Attribute(int* value, int attribute, int gpu) {
  *value = attribute == 75 ? (gpu < 3 ? 10 : 9) : attribute == 76 ? 0 : attribute == 16 ? 30 + gpu : 50 << 20;
  return 0;
}
int LoadModule(uint64_t* module, const void*, unsigned, int*, void**) { *module = ++modules; return 0; }
int FindFunction(const char** function, uint64_t module, const char* name) {
  const std::lock_guard lock(mutex);
  std::string& text = functions[{module, name}];
  text = std::to_string(module) + " " + name;
  *function = text.c_str();
  return 0;
}
int SetAttribute(const char*, int, int) { return 0; }
int Encode(unsigned char* map, int, unsigned rank, uint64_t address, const uint64_t* dims, const uint64_t*,
           const unsigned*, const unsigned*, int, int, int, int) {
  if (address % 16 != 0) return 1;
  ++encodings;
  std::memset(map, 0, 128);
  std::memcpy(map, &address, 8);
  std::memcpy(map + 8, dims, 8 * rank);
  return 0;
}
struct Config {
  unsigned grid[3], block[3], shared_bytes;
  uint64_t stream;
};
int LaunchKernel(const Config* config, const char* function, void** parameters, void**) {
  Launch launch = {config->stream, current, "", {config->grid[0], config->grid[1], config->grid[2]}, {}};
  std::strcpy(launch.kernel, function);
  std::memcpy(launch.parameters, parameters[0], parameter_bytes);
  const std::lock_guard lock(mutex);
  launches.push_back(launch);
  return 0;
}
int Unused() { return 999; }
int cuGetProcAddress_v2(const char* name, void** address, int, unsigned long long, int*) {
  static const std::map<std::string, void*> all = {
      {"cuInit", (void*)&Init}, {"cuGetErrorName", (void*)&Name}, {"cuGetErrorString", (void*)&Text},
      {"cuStreamGetCtx", (void*)&StreamContext}, {"cuCtxGetCurrent", (void*)&Current},
      {"cuCtxPushCurrent", (void*)&Push}, {"cuCtxPopCurrent", (void*)&Pop}, {"cuCtxGetId", (void*)&ContextId},
      {"cuCtxGetDevice", (void*)&ContextGpu}, {"cuDeviceGetAttribute", (void*)&Attribute},
      {"cuModuleLoadDataEx", (void*)&LoadModule}, {"cuModuleGetFunction", (void*)&FindFunction},
      {"cuFuncSetAttribute", (void*)&SetAttribute}, {"cuTensorMapEncodeTiled", (void*)&Encode},
      {"cuLaunchKernelEx", (void*)&LaunchKernel}};
  const auto found = all.find(name);
  *address = found == all.end() ? (void*)&Unused : found->second;
  return 0;
}

Launch* LaunchAt(int index) {
  const std::lock_guard lock(mutex);
  return index < static_cast<int>(launches.size()) ? &launches[index] : nullptr;
}

struct XLA_FFI_Error {
  std::string message;
};
XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) { args->stream = args->ctx; return nullptr; }

// Calls a handler; attributes are scalars. The error's message is put in `message`.
void Call(XLA_FFI_Handler* handler, int stage, void* stream, int operands, int results, const int* dtypes,
          const int64_t* ranks, int64_t* dims, void** addresses, int attributes, const char** names,
          const int* attribute_dtypes, uint64_t* values, char* message) {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = &CreateError;
  api.XLA_FFI_Stream_Get = &GetStream;
  std::vector<XLA_FFI_Buffer> buffers(operands + results);
  std::vector<XLA_FFI_ByteSpan> spans(attributes);
  std::vector<XLA_FFI_Scalar> scalars(attributes);
  std::vector<void*> arrays, scalar_addresses;
  std::vector<XLA_FFI_ByteSpan*> span_addresses;
  for (int i = 0; i < operands + results; dims += ranks[i++]) {
    buffers[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffers[i].dtype = static_cast<XLA_FFI_DataType>(dtypes[i]);
    buffers[i].data = addresses[i];
    buffers[i].rank = ranks[i];
    buffers[i].dims = dims;
    arrays.push_back(&buffers[i]);
  }
  for (int i = 0; i < attributes; ++i) {
    spans[i] = {names[i], std::strlen(names[i])};
    scalars[i] = {static_cast<XLA_FFI_DataType>(attribute_dtypes[i]), &values[i]};
    span_addresses.push_back(&spans[i]);
    scalar_addresses.push_back(&scalars[i]);
  }
  std::vector<XLA_FFI_ArgType> argument_types(operands, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results, XLA_FFI_RetType_BUFFER);
  std::vector<XLA_FFI_AttrType> attribute_types(attributes, XLA_FFI_AttrType_SCALAR);
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = static_cast<XLA_FFI_ExecutionContext*>(stream);
  frame.stage = static_cast<XLA_FFI_ExecutionStage>(stage);
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operands, argument_types.data(), arrays.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, results, result_types.data(), arrays.data() + operands};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, attributes, attribute_types.data(), span_addresses.data(),
                 scalar_addresses.data()};
  XLA_FFI_Error* error = handler(&frame);
  std::strncpy(message, error == nullptr ? "" : error->message.c_str(), 1023);
  delete error;
}
}
"""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("kernel", ctypes.c_char * 64),
        ("grid", ctypes.c_uint * 3),
        ("parameters", ctypes.c_ubyte * 2048),
    )


_FFI_DTYPES = {"bool": 1, "int32": 4, "uint8": 6, "float16": 10, "float32": 11, "bfloat16": 16}


class Calls:
    """Calls of the CUDA targets in this process, whose driver is that of `_CALLS`."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.LaunchAt.restype = ctypes.POINTER(_Launch)
        self.launches_seen = 0

    def variable(self, name, kind=ctypes.c_int):
        return kind.in_dll(self.library, name)

    def call(self, arrays, band=(-128, 96), softcap=0.0, deterministic=True, stream=100, base=1 << 20, stage="execute"):
        """Calls the target that takes such arrays, the first of them at address `base`; returns the error."""
        target, results = {2: ("tensor_copy", 1), 9: ("forward", 3), 16: ("backward", 5)}[len(arrays)]
        attributes = {"band_high": np.int32(band[1]), "band_low": np.int32(band[0])}
        attributes |= {"deterministic": np.bool_(deterministic)} if target == "backward" else {}
        attributes |= {"softcap": np.float32(softcap)}
        if target == "tensor_copy":
            attributes = {}
        capsule = extension.registrations()["CUDA"][f"jax_fa4_{target}_v1"][stage]
        python = ctypes.pythonapi
        python.PyCapsule_GetName.restype, python.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
        python.PyCapsule_GetPointer.restype = ctypes.c_void_p
        python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        handler = python.PyCapsule_GetPointer(capsule, python.PyCapsule_GetName(capsule))

        def array(kind, values):
            values = list(values)
            return (kind * len(values))(*values)

        message = ctypes.create_string_buffer(1024)
        self.library.Call(
            ctypes.c_void_p(handler),
            {"initialize": 2, "execute": 3}[stage],
            ctypes.c_void_p(stream),
            len(arrays) - results,
            results,
            array(ctypes.c_int, (_FFI_DTYPES[dtype] for dtype, _ in arrays.values())),
            array(ctypes.c_int64, (len(shape) for _, shape in arrays.values())),
            array(ctypes.c_int64, (size for _, shape in arrays.values() for size in shape)),
            array(ctypes.c_void_p, (base + 4096 * i for i in range(len(arrays)))),
            len(attributes),
            array(ctypes.c_char_p, (name.encode() for name in attributes)),
            array(ctypes.c_int, (_FFI_DTYPES[str(value.dtype)] for value in attributes.values())),
            array(ctypes.c_uint64, (int.from_bytes(value.tobytes(), "little") for value in attributes.values())),
            message,
        )
        return message.value.decode()

    def plan(self, arrays, band=(-128, 96), softcap=0.0, deterministic=True, stream=100, base=1 << 20):
        """What such a call is to launch: stream, context, kernel, grid and parameters of each."""
        gpu = stream // 100
        capability = (10 if gpu < 3 else 9, 0)
        if len(arrays) == 2:
            launches = extension.tensor_copy_plan(capability, [(d, list(s)) for d, s in arrays.values()])
        elif len(arrays) == 9:
            launches = forward_plan(arrays, capability, band, softcap, 30 + gpu, 50 << 20)
        else:
            launches = backward_plan(arrays, capability, band, softcap, deterministic, 30 + gpu, 50 << 20)
        place = {name: base + 4096 * i for i, name in enumerate(arrays)}
        expected = []
        for launch in launches:
            parameters = bytearray(launch["parameters"])
            for at, (name, offset) in launch["addresses"].items():
                struct.pack_into("Q", parameters, at, place[name] + offset)
            for at, one in launch["tensor_maps"].items():
                name, offset = one["buffer"]
                struct.pack_into(f"{1 + len(one['dims'])}Q", parameters, at, place[name] + offset, *one["dims"])
            expected.append((stream, gpu, launch["kernel"], launch["grid"], bytes(parameters)))
        self.variable("parameter_bytes").value = len(expected[0][-1])
        return expected

    def launches(self):
        """The launches since the last time, in the same form; and the numbers of their kernels' modules."""
        launches, modules = [], []
        while pointer := self.library.LaunchAt(self.launches_seen):
            self.launches_seen += 1
            one = pointer.contents
            module, kernel = one.kernel.decode().split()
            modules.append(int(module))
            parameters = bytes(one.parameters)[: self.variable("parameter_bytes").value]
            launches.append((one.stream, one.context, kernel, tuple(one.grid), parameters))
        return launches, modules

    def check(self, arrays, **how):
        """Executes a call, which is to launch its plan; returns the numbers of the kernels' modules."""
        expected = self.plan(arrays, **how)
        assert self.call(arrays, **how) == ""
        launches, modules = self.launches()
        assert launches == expected
        return modules


COPY = {"x": ("float32", (33, 36)), "copy": ("float32", (33, 36))}


def check_addresses(calls):
    """Each call has its own addresses, tensor maps are encoded once for each, and modules are loaded by initialize."""
    count, modules = calls.variable("encodings"), calls.variable("modules")
    for arrays, maps, files in (
        (forward_arrays(), 4, 1),
        (COPY, 2, 1),
        (forward_arrays(dtype="float32"), 0, 1),
        (backward_arrays(dtype="float32"), 0, 1),
        (backward_arrays(), 6, 2),
    ):
        loaded, executed = modules.value, extension.plans_executed()
        assert calls.call(arrays, stage="initialize") == ""
        assert (modules.value, extension.plans_executed()) == (loaded + files, executed)
        for base, encodes in ((1 << 20, maps), (1 << 30, maps), (1 << 20, 0), (1 << 30, 0), ((1 << 20) + 4096, None)):
            before = count.value
            calls.check(arrays, base=base)
            assert encodes is None or count.value == before + encodes
        assert (modules.value, extension.plans_executed()) == (loaded + files, executed + 5)


def check_kinds(calls):
    """Calls that differ in anything have the plans of their own."""
    how = {"band": (-100, 50), "softcap": 7.0}
    kinds = [({"arrays": forward_arrays()} | more) for more in ({}, how, how | {"softcap": 8.0}, {"band": (-128, 95)})]
    kinds += [{"arrays": forward_arrays(dtype=dtype)} for dtype in ("float16", "float32")]
    kinds += [{"arrays": forward_arrays(out_dtype="float32")}, {"arrays": forward_arrays(bounds=2)}]
    kinds += [{"arrays": forward_arrays(lead={name: 1})} for name in ("query", "key", "value")]
    kinds += [{"arrays": forward_arrays(lead={"scale": 2})}]
    kinds += [{"arrays": forward_arrays(**{size: 8})} for size in ("B", "T", "S", "N", "D", "Dv")]
    kinds += [
        {"arrays": backward_arrays(dlse, dtype=dtype)} | more
        for dlse in (True, False)
        for dtype in ("bfloat16", "float32")
        for more in ({}, how, {"deterministic": False})
    ]
    kinds += [{"arrays": COPY}, {"arrays": dict.fromkeys(COPY, ("int32", (33, 36)))}]
    kinds += [{"arrays": dict.fromkeys(COPY, (dtype, (36, 40)))} for dtype in ("float16", "bfloat16")]
    for some in (kinds, kinds[::-1], kinds):
        for kind in some:
            calls.check(**kind)


def check_contexts(calls):
    """A context has modules and plans of its own, also one at the address of another that is gone."""
    streams, modules = (100, 200, 101, 300), {}
    for stream in streams * 2:
        calls.check(forward_arrays(), band=CAUSAL, stream=stream)
        (module,) = calls.check(forward_arrays(B=8), band=FULL, stream=stream)
        assert modules.setdefault(stream // 100, module) == module
    assert sorted(modules.values()) == [1, 2, 3]
    calls.variable("context_id", ctypes.c_uint64).value = 1000
    assert calls.check(forward_arrays(), band=CAUSAL) == [4]


def check_bounds(calls):
    """What is kept has an end, and calls go on being right behind it."""
    count = calls.variable("encodings")
    for _ in range(2):
        before = count.value
        for i in range(600):
            calls.check(COPY, base=(1 << 20) + 8192 * i)
        assert count.value > before + 600
    before = count.value
    for _ in range(2):
        for i in range(1, 1201):
            calls.check(dict.fromkeys(COPY, ("float32", (i, 4))))
    assert count.value > before + 2 * 1200


def check_threads(calls):
    """Threads of one context and of several have the launches of their calls."""
    kinds = [{"arrays": dict.fromkeys(COPY, ("float32", (i, 4 * i))), "base": i << 20} for i in range(1, 700)]
    plans = [plan for stream in range(100, 400, 50) for kind in kinds for plan in calls.plan(**kind, stream=stream)]
    together, messages = threading.Barrier(6), []

    def work(stream):
        together.wait(timeout=60)
        messages.extend([calls.call(**kind, stream=stream) for kind in kinds])

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(100, 400, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert messages == [""] * len(plans)
    assert sorted(calls.launches()[0]) == sorted(plans)


def check_errors(calls):
    """A call that fails says why each time, and leaves others as they are."""
    wrong = forward_arrays(key=("bfloat16", (2, 96, 3, 64)))
    for _ in range(2):
        for stage in ("initialize", "execute"):
            message = calls.call(wrong, stage=stage)
            assert message.startswith("jax_fa4_forward_v1: the operand `value` must be bfloat16[b,96,3,64]"), message
            message = calls.call(forward_arrays(), softcap=-1.0, stage=stage)
            assert message.startswith("jax_fa4_forward_v1: the attribute `softcap` must be positive"), message
        message = calls.call(COPY, base=(1 << 20) + 8)
        text = "encoding a tensor map failed: CUDA_ERROR_INVALID_VALUE (invalid argument)."
        assert message == f"jax_fa4_tensor_copy_v1: {text}"
        message = calls.call(COPY | {"copy": ("float32", (33, 35))})
        assert message.startswith("jax_fa4_tensor_copy_v1: the result `copy` must be float32[33,36], not"), message
        calls.check(forward_arrays())
        calls.check(COPY)


@pytest.fixture(scope="module")
def calls_library(tmp_path_factory):
    """The folder of the driver of `_CALLS`."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler for a driver to test with")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cc").write_text(_CALLS)
    compile_it = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", "driver.cc"]
    subprocess.run([*compile_it, "-o", "libcuda.so.1"], cwd=folder, check=True)
    for module in (
        "sm80_forward.sm_80",
        "sm80_backward.sm_80",
        "sm90_copy.sm_90",
        "sm90_forward.sm_90",
        "sm90_backward.sm_90",
        "sm100_forward.sm_100",
        "sm100_backward.sm_100",
        "backward_rows.sm_90",
    ):
        (folder / f"{module}.ptx.xz").write_bytes(lzma.compress(b"a module for this driver"))
    return folder


@pytest.mark.parametrize(
    "check", [check_addresses, check_kinds, check_contexts, check_bounds, check_threads, check_errors]
)
def test_calls_launch_their_plans(calls_library, check):
    script = f"""
import test_host
test_host.native.register()
test_host.extension.set_kernel_directory({str(calls_library)!r})
test_host.native.unpack(test_host.Path({str(calls_library)!r}).glob("*.xz"))
test_host.{check.__name__}(test_host.Calls())
"""
    environment = os.environ | {"LD_LIBRARY_PATH": str(calls_library), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_cuda_targets_have_their_stages_and_emulated_ones_the_same_names():
    targets = extension.registrations()
    names = {name.removeprefix("jax_fa4_") for name in targets["CUDA"]}
    assert names == {"forward_v1", "backward_v1", "tensor_copy_v1"}
    assert {name for name in targets["cpu"] if "emulated" in name} == {f"jax_fa4_emulated_{name}" for name in names}
    for stages in targets["CUDA"].values():
        assert set(stages) == {"initialize", "execute"}


# ---- Emulated calls

ATTRIBUTES = {
    "band_low": np.int32(-4),
    "band_high": np.int32(6),
    "softcap": np.float32(0),
    "target": "sm_80",
    "strict": True,
    "seed": np.int64(0),
}
B, T, S, N, D = 2, 4, 6, 2, 8


def operands(seed=0):
    random = np.random.default_rng(seed)
    query, key, value = (random.standard_normal(x, np.float32) for x in ((B, T, N, D), (B, S, N, D), (B, S, N, D)))
    none = np.zeros(0, np.int32)
    return query, key, value, np.full(1, D**-0.5, np.float32), none, none


def emulated_forward(*arrays, **attributes):
    native.emulator()
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, T, N, D), (B, T, N), (B, T, N))]
    call = jax.ffi.ffi_call("jax_fa4_emulated_forward_v1", results)
    given = {k: v for k, v in (ATTRIBUTES | attributes).items() if v is not None}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.block_until_ready(jax.jit(lambda *x: call(*x, **given))(*arrays))


def write_kernel(kernels, body, target="sm_80", name="forward_float32_64"):
    """Has forwards run this code in place of the package's kernels."""
    directory, reread = kernels
    source = f"""
      #include "csrc/sm80/config.h"
      extern "C" __global__ void {name}(const __grid_constant__ jax_fa4::sm80::Parameters p) {{
        float* out = static_cast<float*>(p.out);
        float* query = static_cast<float*>(const_cast<void*>(p.query));
        {body}
      }}
    """
    ptx = compile_ptx(source, target, (f"-I{ROOT}", "--device-as-default-execution-space"))
    (directory / f"sm80_forward.{target}.ptx.xz").write_bytes(lzma.compress(ptx.encode()))
    reread()


WRITE_ALL = """
  for (int i = threadIdx.x; i < p.batch * p.rows * p.heads; i += blockDim.x) p.lse[i] = p.lse_rounding[i] = 0;
  for (int i = threadIdx.x; i < p.batch * p.rows * p.heads * p.value_width; i += blockDim.x) out[i] = query[i] * 2;
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_103", "sm_120"])
def test_emulated_call_is_attention(target):
    arrays = operands()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = jax.nn.dot_product_attention(*arrays[:3])
    out, lse, _ = emulated_forward(*arrays, target=target)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
    logits = np.einsum("btnd,bsnd->btns", *arrays[:2], dtype=np.float64) * D**-0.5
    np.testing.assert_allclose(lse, np.log(np.exp(logits).sum(-1)), rtol=1e-6, atol=1e-6)


def test_launches_are_listed(kernels):
    write_kernel(kernels, f"if (blockIdx.x == 0) {{ {WRITE_ALL} }}")
    first = extension.next_emulated_launch()
    query = operands()[0]
    out, _, _ = emulated_forward(*operands())
    assert np.array_equal(out, 2 * query)
    (launch,) = extension.emulated_launches(first)
    assert (launch.id, launch.module, launch.target) == (first, "sm80_forward", "sm_80")
    assert (launch.kernel, launch.grid, launch.block) == ("forward_float32_64", [N * B, 1, 1], [256, 1, 1])
    assert launch.instructions > 8
    assert launch.reports == []


def test_emulator_runs_the_build_of_the_gpu(kernels):
    write_kernel(kernels, f"if (blockIdx.x == 0) {{ {WRITE_ALL} }}", "sm_80")
    write_kernel(kernels, f"if (blockIdx.x == 0) {{ {WRITE_ALL} if (threadIdx.x == 0) out[0] = 7; }}", "sm_90")
    first = extension.next_emulated_launch()
    assert emulated_forward(*operands(), target="sm_80")[0][0, 0, 0, 0] == 2 * operands()[0][0, 0, 0, 0]
    assert emulated_forward(*operands(), target="sm_90")[0][0, 0, 0, 0] == 7
    emulated_forward(*operands(), target="sm_100")
    assert [x.target for x in extension.emulated_launches(first)] == ["sm_80", "sm_90", "sm_90"]


# A stand-in for the Blackwell forward: out becomes query, through the copy engine; lse is scale times the sum of a
# row of query, lse_rounding that of the key and the value of that position that the head uses. Sums are weighted, so
# that the order within a row matters.
_BLACKWELL_STAND_IN = """
#include "csrc/ptx/copy.h"
#include "csrc/ptx/mbarrier.h"
#include "csrc/sm100/config.h"
using namespace jax_fa4;

void Load(void* box, const TensorMap* map, int column, int head, int position, int batch, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];"
      :: "l"(__cvta_generic_to_shared(box)), "l"(map), "r"(column), "r"(head), "r"(position), "r"(batch),
         "l"(__cvta_generic_to_shared(barrier)) : "memory");
}

void Store(const TensorMap* map, int column, int head, int position, int batch, const void* box) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
      :: "l"(map), "r"(column), "r"(head), "r"(position), "r"(batch), "l"(__cvta_generic_to_shared(box)) : "memory");
}

// Of all columns of a row, padding too.
float Sum(const unsigned char* tile, int row) {
  float sum = 0;
  for (int column = 0; column < 128; ++column) {
    const int byte = row * 128 + ((column % 64 * 2) ^ (row % 8 * 16));
    const unsigned short bits = *reinterpret_cast<const unsigned short*>(tile + column / 64 * 16384 + byte);
    sum += (column + 1) * __uint_as_float(static_cast<unsigned>(bits) << 16);
  }
  return sum;
}

extern "C" __global__ void forward_bfloat16_96_full(const __grid_constant__ sm100::Parameters p) {
  extern __shared__ __align__(1024) unsigned char tiles[];  // of query, key and value; then a barrier
  constexpr int kTile = sm100::TileBytes(96);
  uint64_t* barrier = reinterpret_cast<uint64_t*>(tiles + 3 * kTile);
  const int packs = p.heads / p.packed_heads, batch = blockIdx.x / packs;
  const int head = blockIdx.x % packs * p.packed_heads, kv_head = head / (p.heads / p.kv_heads);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, 3 * kTile);
    for (int panel = 0; panel < Panels(96); ++panel) {
      unsigned char* box = tiles + panel * 16384;
      Load(box, &p.query, 64 * panel, head, 0, batch % p.query_batch, barrier);
      Load(box + kTile, &p.key, 64 * panel, kv_head, 0, batch % p.key_batch, barrier);
      Load(box + 2 * kTile, &p.value, 64 * panel, kv_head, 0, batch % p.value_batch, barrier);
    }
  }
  __syncthreads();
  while (!ptx::mbarrier_try_wait_parity(barrier, 0)) {
  }
  const int row = threadIdx.x, position = row / p.packed_heads;
  if (position < p.rows) {
    const int index = (batch * p.rows + position) * p.heads + head + row % p.packed_heads;
    p.lse[index] = p.scale[batch % p.scale_batch] * Sum(tiles, row);
    p.lse_rounding[index] = Sum(tiles + kTile, position) + Sum(tiles + 2 * kTile, position);
  }
  if (threadIdx.x == 0) {
    for (int panel = 0; panel < Panels(96); ++panel) {
      Store(&p.out, 64 * panel, head, 0, batch, tiles + panel * 16384);
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
  }
}
"""


@pytest.mark.parametrize(("target", "build"), [("sm_100", "sm_100f"), ("sm_103", "sm_103a")])
def test_parameters_of_the_blackwell_forward_reach_the_kernel(kernels, target, build):
    directory, reread = kernels
    for arch in ("sm_100f", "sm_103a"):
        ptx = compile_ptx(_BLACKWELL_STAND_IN, arch, (f"-I{ROOT}", "--device-as-default-execution-space"))
        (directory / f"sm100_forward.{arch}.ptx.xz").write_bytes(lzma.compress(ptx.encode()))
    reread()
    B, T, S, N, K, D = 4, 9, 11, 12, 2, 72
    random = np.random.default_rng(0)
    shapes = ((2, T, N, D), (1, S, K, D), (4, S, K, D))
    query, key, value = (random.integers(-8, 9, shape).astype(np.float32) for shape in shapes)
    scale, none = np.float32([1, 2, 4, 8]), np.zeros(0, np.int32)
    results = [jax.ShapeDtypeStruct((B, T, N, D), jnp.bfloat16)] + [jax.ShapeDtypeStruct((B, T, N), jnp.float32)] * 2
    attributes = ATTRIBUTES | {"band_low": np.int32(-T), "band_high": np.int32(S), "target": target}
    native.emulator()
    call = jax.ffi.ffi_call("jax_fa4_emulated_forward_v1", results)
    first = extension.next_emulated_launch()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        operands = (*(jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)), scale, none, none)
        out, lse, rounding = jax.block_until_ready(jax.jit(lambda *x: call(*x, **attributes))(*operands))
    (launch,) = extension.emulated_launches(first)
    assert (launch.target, launch.grid) == (build, [B * N // 2, 1, 1])
    query, key = np.tile(query, (2, 1, 1, 1)), np.tile(key, (4, 1, 1, 1))
    np.testing.assert_array_equal(out.astype(np.float32), query)
    weights = np.arange(1, D + 1)
    np.testing.assert_array_equal(lse, scale[:, None, None] * (query @ weights))
    sums = ((key + value) @ weights)[:, :T]
    np.testing.assert_array_equal(rounding, np.repeat(sums, N // K, axis=2))


def test_what_a_kernel_leaves_unwritten_is_nan(kernels):
    write_kernel(kernels, "if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = 1;")
    out, lse, rounding = emulated_forward(*operands())
    assert out[0, 0, 0, 0] == 1
    for array in (out.ravel()[1:], lse, rounding):
        assert np.isnan(array).all()


def test_races_end_a_strict_call(kernels):
    write_kernel(kernels, f"if (blockIdx.x == 0) {{ {WRITE_ALL} }} else if (threadIdx.x == 0) out[1] = blockIdx.x;")
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        emulated_forward(*operands())
    message = str(caught.value)
    assert "jax_fa4_emulated_forward_v1: the emulator reports about the kernel forward_float32_64" in message
    assert "race" in message
    first = extension.next_emulated_launch()
    out, _, _ = emulated_forward(*operands(), strict=False)
    assert out[0, 0, 0, 0] == 2 * operands()[0][0, 0, 0, 0]
    (launch,) = extension.emulated_launches(first)
    assert {x.kind for x in launch.reports} == {"race"}


@pytest.mark.parametrize("strict", [True, False])
def test_operands_may_not_be_written(kernels, strict):
    write_kernel(kernels, "if (threadIdx.x == 0) query[0] = 1;")
    with pytest.raises(jax.errors.JaxRuntimeError, match="query"):
        emulated_forward(*operands(), strict=strict)


def test_access_beyond_a_result_ends_the_call(kernels):
    write_kernel(kernels, "if (threadIdx.x == 0) out[p.batch * p.rows * p.heads * p.value_width] = 1;")
    with pytest.raises(jax.errors.JaxRuntimeError, match="the emulator reports"):
        emulated_forward(*operands(), strict=False)


def test_a_kernel_that_is_missing_is_named(kernels):
    with pytest.raises(jax.errors.JaxRuntimeError, match="the kernels sm80_forward were not built: there are none in"):
        emulated_forward(*operands())
    write_kernel(kernels, "", name="forward_float32_128")
    with pytest.raises(jax.errors.JaxRuntimeError, match="has no kernel forward_float32_64"):
        emulated_forward(*operands())


def test_a_build_without_forwards_for_tensor_cores_serves_other_gpus(kernels):
    write_kernel(kernels, "if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = 1;", name="forward_bfloat16_64")
    halves = [jnp.asarray(x, jnp.bfloat16) for x in operands()[:3]]
    for target in ("sm_80", "sm_120"):
        assert emulated_forward(*halves, *operands()[3:], target=target)[0][0, 0, 0, 0] == 1
    for target, missing in (("sm_90", "sm90_forward"), ("sm_100", "sm100_forward"), ("sm_103", "sm100_forward")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"the kernels {missing} were not built"):
            emulated_forward(*halves, *operands()[3:], target=target)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", r"has no kernel forward_float32_64\."),
        (b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f(", "cannot be run: PTX line 4: "),
        (b".version 8.0\n\xff\xfe\x99", r"cannot be run: PTX line 2: .*\?"),
    ],
)
def test_a_damaged_kernel_file_is_named(kernels, text, sentence):
    directory, reread = kernels
    file = directory / "sm80_forward.sm_80.ptx.xz"
    file.write_bytes(lzma.compress(text))
    reread()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"the kernel file {re.escape(str(file))} {sentence}"):
        emulated_forward(*operands())


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"target": "sm_75"}, "the attribute `target` must be one of sm_80, sm_90, sm_100, sm_103, sm_120, not sm_75."),
        ({"band_low": None}, "the attribute `band_low` must be an int32"),
        ({"band_high": np.int64(6)}, "the attribute `band_high` must be an int32"),
        ({"softcap": np.float64(0)}, "the attribute `softcap` must be a float32"),
        ({"strict": np.int32(1)}, "the attribute `strict` must be a bool"),
        ({"seed": np.int32(1)}, "the attribute `seed` must be an int64"),
        ({"dropout": np.float32(1)}, "must be band_low, band_high, softcap, target, strict, seed, but there are 7."),
    ],
)
def test_wrong_attributes_are_refused(attributes, sentence):
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(sentence)):
        emulated_forward(*operands(), **attributes)


def test_handlers_refuse_wrong_operands():
    query, *rest = operands()
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=re.escape(
            "jax_fa4_emulated_forward_v1: the operand `query` must be float32[b,4,2,8] with a b that divides 2, "
            "not float32[3,4,2,8]."
        ),
    ):
        emulated_forward(np.concatenate([query, query[:1]]), *rest)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"6 operands and 3 results \(query, .*together not 8\."):
        emulated_forward(*operands()[:-1])
    native.emulator()
    for target, attributes, sentence in (
        ("backward", ATTRIBUTES | {"deterministic": True}, r"a call has 5 results, not 1\."),
        ("tensor_copy", {k: ATTRIBUTES[k] for k in ("target", "strict", "seed")}, "`x` must be a matrix of"),
    ):
        call = jax.ffi.ffi_call(f"jax_fa4_emulated_{target}_v1", jax.ShapeDtypeStruct((3,), jnp.float32))
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_fa4_emulated_{target}_v1: .*{sentence}"):
            jax.block_until_ready(call(np.zeros(3, np.float32), **attributes))


def test_an_operand_is_never_taken_for_a_result():
    arrays = operands()
    native.emulator()
    call = jax.ffi.ffi_call("jax_fa4_emulated_forward_v1", [jax.ShapeDtypeStruct((B, T, N), jnp.float32)] * 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"a call has 3 results, not 2\."):
        jax.block_until_ready(call(*arrays, np.zeros((B, T, N, D), np.float32), **ATTRIBUTES))


def test_emulated_tensor_copy():
    native.emulator()
    x = np.arange(70 * 100, dtype=np.float32).reshape(70, 100)
    call = jax.ffi.ffi_call("jax_fa4_emulated_tensor_copy_v1", jax.ShapeDtypeStruct(x.shape, x.dtype))
    for target in ("sm_90", "sm_100", "sm_120"):
        assert np.array_equal(jax.jit(lambda x, t=target: call(x, target=t, strict=True, seed=np.int64(0)))(x), x)


def test_threads_may_call_at_the_same_time(kernels):
    write_kernel(kernels, f"if (blockIdx.x == 0) {{ {WRITE_ALL} }}")
    count = 6
    together = threading.Barrier(count)
    wrong = []

    def work(seed):
        arrays = operands(seed)
        together.wait(timeout=60)
        outs = [emulated_forward(*arrays, seed=np.int64(seed))[0] for _ in range(3)]
        wrong.extend(seed for out in outs if not np.array_equal(out, 2 * arrays[0]))

    first = extension.next_emulated_launch()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert wrong == []
    launches = extension.emulated_launches(first)
    assert [x.id - first for x in launches] == list(range(3 * count))
    assert not any(x.reports for x in launches)
