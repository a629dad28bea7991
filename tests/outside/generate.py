"""Generate attention kernels by others, as PTX, and describe how each is launched.

    python generate.py FOLDER [NAME ...] [--workers N]

writes NAME.STAGE.ptx and NAME.STAGE.json for every kernel of the named variants (default: all): FlashAttention-4
(flash-attn-4, CuTe-DSL) for Blackwell and Hopper, and a plain flash attention in Triton. No GPU is needed: only the
compilers run. Needs a C compiler, and the packages of requirements.txt. A variant is compiled in a process of its own,
since the environment selects the target.

The descriptions of the official kernels are checked, not only stated. The official host code is run on invented
device addresses, with a small runtime library in place of CUDA's (CUTE_DSL_LIBS) that notes each launch: grid,
cluster, shared memory and the bytes of every parameter. The rule given for each field is evaluated for every recorded
launch, and must give the bytes that the host code passed; bytes that the kernel reads must have a rule; otherwise
generation fails. The launches are kept in the JSON as cases.

A value in the JSON is a Python expression over the variables listed there; `evaluate` defines its functions.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import triton
import triton.language as tl
from expressions import evaluate

# ------------------------------------------------------------------------------------------------------------- variants


@dataclass(frozen=True)
class Variant:
    """One call of the attention interface for one target."""

    name: str
    arch: str = "sm_100"
    head_dim: int = 128
    causal: bool = False
    two_cta: bool = False
    lse: bool = False
    backward: bool = False
    deterministic: bool = False
    triton: bool = False
    specialised: bool = False

    @property
    def sm_count(self) -> int:
        """Multiprocessors of the GPU that is compiled for."""
        return 148 if self.arch == "sm_100" else 132


VARIANTS = {
    v.name: v
    for v in (
        Variant("fwd_sm100_d128_1cta"),
        Variant("fwd_sm100_d128_1cta_lse", lse=True),
        Variant("fwd_sm100_d128_2cta", two_cta=True),
        Variant("fwd_sm100_d128_2cta_lse", two_cta=True, lse=True),
        Variant("fwd_sm100_d128_causal", causal=True),
        Variant("fwd_sm100_d128_causal_lse", causal=True, lse=True),
        Variant("fwd_sm100_d64", head_dim=64),
        Variant("bwd_sm100_d128_1cta", backward=True),
        Variant("bwd_sm100_d128_2cta", backward=True, two_cta=True),
        Variant("bwd_sm100_d128_1cta_causal", backward=True, causal=True),
        Variant("bwd_sm100_d128_1cta_deterministic", backward=True, deterministic=True),
        Variant("fwd_sm90_d128", arch="sm_90"),
        Variant("fwd_sm90_d128_causal_lse", arch="sm_90", causal=True, lse=True),
        Variant("triton_sm100_d128", triton=True, lse=True),
        Variant("triton_sm100_d128_specialised", triton=True, lse=True, specialised=True),
        Variant("triton_sm90_d128", arch="sm_90", triton=True, lse=True),
    )
}

# (B, Sq, Sk, H) of the launches to record: equal lengths; tails; more tiles than multiprocessors; long keys, so that
# few heads share a section of L2. Sq > 256: shorter ones select other kernels.
CASES = ((2, 1024, 1024, 4), (3, 300, 500, 5), (40, 512, 640, 5), (1, 1000, 70000, 3))

VARIABLES = {
    "B": "batch size",
    "H": "heads (as many for keys and values)",
    "Sq": "query length",
    "Sk": "key length",
    "D": "head dimension",
    "SMS": "multiprocessors",
    "scale": "softmax scale, 1/sqrt(D) by default",
    "address[X]": "device address of tensor X",
}

# ---------------------------------------------------------------------------------------------------------- description


@dataclass
class Field:
    """A scalar of `type` at `offset` in a parameter, equal to the expression `value`; `read`: the kernel loads it."""

    offset: int
    type: str
    value: str
    meaning: str = ""
    read: bool = True


@dataclass
class Map:
    """A tensor map: extents and strides innermost first; the innermost stride is one element."""

    tensor: str
    dims: list[str]
    strides_bytes: list[str]
    box: list[int]
    element: str = "bf16"
    swizzle: str = "128B"
    interleave: str = "none"
    out_of_bounds: str = "zeros on load, dropped on store"


@dataclass
class Parameter:
    """One kernel parameter: a tensor map, or fields; bytes that no field covers are never read, and may be anything."""

    meaning: str
    fields: list[Field] = field(default_factory=list)
    map: Map | None = None
    index: int = 0
    offset: int = 0
    size: int = 0
    align: int = 0


@dataclass
class Stage:
    """What is known of one kernel: launch rule, parameters and remarks."""

    grid: list[str]
    parameters: list[Parameter]
    notes: list[str]
    cluster: list[int] = field(default_factory=lambda: [1, 1, 1])


FORMATS = {"u8": "<B", "u32": "<I", "i64": "<q", "u64": "<Q", "f32": "<f"}
# Axes of a tensor: name -> (extents, row-major order of storage).
TENSORS = {
    **dict.fromkeys(("q", "o", "do", "dq"), "B Sq H D"),
    **dict.fromkeys(("k", "v", "dk", "dv"), "B Sk H D"),
    "lse": "B H Sq",
    **dict.fromkeys(("dpsum", "lse_log2"), "B H round_up(Sq,128)"),
    "dq_accum": "B H round_up(Sq,128)*D",
    "semaphore": "B H ceil_div(Sq,128)",
}


def axes(tensor: str) -> list[str]:
    """Extents of a tensor, outermost first."""
    return TENSORS[tensor].split()


def stride(tensor: str, axis: str) -> str:
    """Stride of an axis in elements, as an expression."""
    names = axes(tensor)
    inner = names[names.index(axis) + 1 :]
    return "*".join(f"({a})" if "*" in a else a for a in inner) or "1"


def shape(tensor: str, order: str) -> Parameter:
    """Coordinate tensor of a tensor map: only its extents are passed, as u32."""
    return Parameter(f"extents of {tensor}", [Field(4 * i, "u32", a) for i, a in enumerate(order.split())])


def memory(tensor: str, order: str) -> Parameter:
    """A tensor by address: u64 address, u32 extents, then i64 strides (elements) of all but the contiguous axis."""
    names = order.split()
    fields = [Field(0, "u64", f"address['{tensor}']", "address")]
    fields += [Field(8 + 4 * i, "u32", a, f"extent {a}") for i, a in enumerate(names)]
    offset = 8 + 4 * len(names) + (4 if len(names) % 2 else 0)
    for axis in names:
        if axis != axes(tensor)[-1]:
            fields.append(Field(offset, "i64", stride(tensor, axis), f"stride of {axis}, elements"))
            offset += 8
    return Parameter(f"{tensor}, by address", fields)


def tensor_map(tensor: str, rows: int) -> Parameter:
    """A map {D, S, H, B} of a (B, S, H, D) tensor whose box is 64 elements of D by `rows` of S."""
    order = [axes(tensor)[i] for i in (3, 1, 2, 0)]
    strides = [f"{stride(tensor, a)}*2" for a in order[1:]]
    return Parameter(f"tensor map of {tensor}", map=Map(tensor, order, strides, [64, rows, 1, 1]))


def scalar(value: str, meaning: str, type_: str = "u32") -> Parameter:
    """A parameter of one value."""
    return Parameter(meaning, [Field(0, type_, value)])


def divisor(value: str, meaning: str) -> list[Parameter]:
    """A fast divisor: the precomputed struct, then the divisor again."""
    fields = [
        Field(0, "u32", value, "divisor"),
        Field(4, "u32", f"divmod_multiplier({value})", "multiplier"),
        Field(8, "u8", f"divmod_shift1({value})", "shift1"),
        Field(9, "u8", f"divmod_shift2({value})", "shift2"),
    ]
    return [Parameter(f"fast divisor: {meaning}", fields), scalar(value, meaning)]


def nothing(meaning: str) -> Parameter:
    """A parameter that the kernel never reads."""
    return Parameter(meaning)


def grid_scheduler(blocks: str) -> list[Parameter]:
    """SingleTileScheduler: one tile a CTA, its coordinates from the grid."""
    return [scalar(blocks, "blocks"), scalar("H", "heads"), scalar("B", "batch"), *divisor("1", "splits")]


def section(bytes_per_head: str) -> str:
    """Heads*batch of one section of the scheduler: the power of two whose data fits in 50 MiB of L2."""
    return f"(1 if 52428800 < {bytes_per_head} else floor_pow2(52428800//({bytes_per_head})))"


def section_divisors(heads: str, blocks: str) -> list[Parameter]:
    """The last parameters of both sectioned schedulers."""
    return [
        scalar(heads, "heads*batch of a section"),
        *divisor("H", "heads"),
        *divisor(heads, "heads*batch of a section"),
        *divisor(f"{heads}*{blocks}", "tiles of a section"),
        *divisor(f"max(H*B%{heads},1)", "heads*batch of the last section, if partial"),
        scalar(f"H*B//{heads}", "whole sections"),
    ]


def longest_first_scheduler(blocks: str) -> list[Parameter]:
    """SingleTileLPTScheduler: one tile a CTA, by blockIdx.x."""
    parameters = [
        scalar(f"{blocks}*H*B", "tiles"),
        scalar(blocks, "query blocks"),
        scalar("H", "heads"),
        scalar("B", "batch"),
    ]
    return [*parameters, *section_divisors(section("Sk*2*D*2"), blocks), *divisor("1", "splits")]


CAUSAL = (
    "Causal, aligned bottom right: key j is seen by query i if j <= i + Sk - Sq. "
    "One tile a CTA, longest first (query blocks descending)."
)
TAIL_Q = (
    "Query tail: rows past Sq load as zeros through the tensor map, and their output is dropped by the store's map; "
    "the kernel has no mask for them."
)
TAIL_K = "Key tail: keys past Sk load as zeros and are masked with -inf, so K and V need no padding."


def forward_sm100(variant: Variant) -> Stage:
    """FlashAttentionForwardSm100: 256 query rows a CTA, 512 with a pair of CTAs."""
    rows = 512 if variant.two_cta else 256
    parameters = [shape("q", "Sq D H B"), shape("k", "Sk D H B"), shape("v", "D Sk H B"), shape("o", "Sq D H B")]
    if variant.lse:
        parameters.append(memory("lse", "Sq H B"))
    parameters += [
        tensor_map("q", 128),
        tensor_map("k", 64 if variant.two_cta else 128),
        tensor_map("v", 128),
        tensor_map("o", 128),
    ]
    parameters += [
        scalar("scale*log2e", "softmax scale in base 2", "f32"),
        nothing("tiled MMA of QK (host only)"),
        nothing("tiled MMA of PV (host only)"),
    ]
    notes = [TAIL_Q, TAIL_K]
    notes.append(
        "lse: an address, extents (Sq, H, B) and strides of H and B; natural logarithm, rows past Sq not written."
        if variant.lse
        else "Compiled without lse: it has no parameter at all (with lse, one more follows the four extents)."
    )
    if variant.causal:
        blocks = "ceil_div(Sq,256)"
        scheduler = longest_first_scheduler(blocks)
        scheduler.insert(1, scalar("1", "splits"))
        parameters += [*scheduler, scalar("1", "splits")]
        notes.append(CAUSAL)
        return Stage([f"{blocks}*H*B", "1", "1"], parameters, notes)
    blocks = f"ceil_div(Sq,{rows})"
    parameters += [
        *divisor(blocks, "query blocks of a cluster"),
        *divisor("H", "heads"),
        scalar(f"{blocks}*H*B", "tiles"),
        scalar("1", "splits"),
    ]
    notes.append(
        "Persistent: a cluster takes every (grid/cluster)-th tile, so any multiple of the cluster will do as the grid."
    )
    cluster = 2 if variant.two_cta else 1
    if variant.two_cta:
        notes.append(
            "2-CTA: CTA r of the pair loads rows 64*r of each 128 keys (so K's box has 64 rows), columns 64*r of V "
            "(one box), and rows 512*tile + 256*stage + 128*r of Q for stages 0 and 1."
        )
    return Stage(
        [f"min(SMS//{cluster}*{cluster},{blocks}*H*B*{cluster})", "1", "1"], parameters, notes, [cluster, 1, 1]
    )


def forward_sm90(variant: Variant) -> Stage:
    """FlashAttentionForwardSm90: 128 query rows a CTA, two warpgroups compute and one loads."""
    parameters = [shape(t, f"{axes(t)[1]} D H B") for t in "qkvo"]
    if variant.lse:
        parameters.append(memory("lse", "Sq H B"))
    parameters += [tensor_map(t, 128) for t in "qkvo"]
    parameters += [
        scalar("scale*log2e", "softmax scale in base 2", "f32"),
        nothing("tiled MMA of QK (empty)"),
        nothing("tiled MMA of PV (empty)"),
    ]
    if variant.causal:
        return Stage(
            ["ceil_div(Sq,128)*H*B", "1", "1"],
            [*parameters, *longest_first_scheduler("ceil_div(Sq,128)")],
            [TAIL_Q, TAIL_K, CAUSAL],
        )
    return Stage(["ceil_div(Sq,128)", "H", "B"], [*parameters, *grid_scheduler("ceil_div(Sq,128)")], [TAIL_Q, TAIL_K])


def backward_preprocess(variant: Variant) -> Stage:
    """Computes dpsum = sum(dO * O) and lse in base 2, and zeroes dq_accum."""
    parameters = [
        memory("o", "Sq D H B"),
        memory("do", "Sq D H B"),
        memory("dpsum", "round_up(Sq,128) H B"),
        memory("lse", "Sq H B"),
    ]
    parameters += [
        memory("lse_log2", "round_up(Sq,128) H B"),
        memory("dq_accum", "round_up(Sq,128)*D H B"),
        scalar("log2e", "unused", "f32"),
    ]
    blocks = "ceil_div(Sq,128)"
    notes = [
        "dpsum and lse_log2 have rows up to a multiple of 128: those past Sq get dpsum 0 and lse_log2 +inf.",
        "lse -inf (a row without keys) gives lse_log2 0. dq_accum is zeroed whole.",
        "Registers of rows past Sq are summed uninitialised, and the sum is then dropped.",
        "Launched with programmatic stream serialization allowed; without overlap griddepcontrol does nothing.",
    ]
    return Stage([blocks, "H", "B"], [*parameters, *grid_scheduler(blocks)], notes)


def backward_sm100(variant: Variant) -> Stage:
    """FlashAttentionBackwardSm100: 128 keys a CTA (256 a pair), looping over blocks of 128 queries."""
    pair = variant.two_cta
    parameters = [shape("q", "Sq D H B")]
    parameters += [shape("q", "D Sq H B")] if pair else []
    parameters += [shape("k", "Sk D H B")]
    parameters += [shape("k", "D Sk H B")] if pair else []
    parameters += [
        shape("v", "Sk D H B"),
        memory("lse_log2", "round_up(Sq,128) H B"),
        memory("dpsum", "round_up(Sq,128) H B"),
        shape("do", "D Sq H B"),
    ]
    parameters += [shape("do", "Sq D H B")] if pair else []
    parameters += [
        memory("dv", "Sk D H B"),
        memory("dk", "Sk D H B"),
        memory("dq_accum", "round_up(Sq,128)*D H B"),
        shape("dv", "Sk D H B"),
        shape("dk", "Sk D H B"),
    ]
    parameters += [memory("semaphore", "ceil_div(Sq,128) H B")] if variant.deterministic else []
    parameters += [tensor_map("q", 64), tensor_map("q", 128)] if pair else [tensor_map("q", 128)]
    parameters += [tensor_map("k", 128), tensor_map("k", 256)] if pair else [tensor_map("k", 128)]
    parameters += [tensor_map("v", 128), tensor_map("do", 128)]
    parameters += [tensor_map("do", 64)] if pair else []
    parameters += [tensor_map("dv", 128), tensor_map("dk", 128)]
    parameters += [nothing("tiled MMA (host only)") for _ in range(5)]
    parameters += [
        scalar("scale", "softmax scale (of dk)", "f32"),
        scalar("scale*log2e", "softmax scale in base 2", "f32"),
    ]
    blocks = "round_up(ceil_div(Sk,128),2)" if pair else "ceil_div(Sk,128)"
    notes = [
        "dq_accum: f32 partial sums by cp.reduce.async.bulk, in an order of its own, undone by postprocess.",
        "Query tail: lse_log2 is +inf past Sq, which makes P zero.",
        "Key tail: zeros from the maps; the stores of dk and dv are clipped by theirs.",
    ]
    if variant.deterministic and not pair:
        parameters += [
            scalar(f"{blocks}*H*B", "tiles"),
            scalar(blocks, "key blocks"),
            *section_divisors(section("Sq*D*8"), blocks),
        ]
        notes.append(
            "semaphore: i32, zero before the launch. CTAs wait for those of other key blocks of the same head, in the "
            "order of blockIdx, so CTAs must become resident in that order."
        )
        return Stage([f"{blocks}*H*B", "1", "1"], parameters, notes)
    return Stage(
        [blocks, "H", "B"], [*parameters, *grid_scheduler("ceil_div(Sk,128)")], notes, [2 if pair else 1, 1, 1]
    )


def backward_postprocess(variant: Variant) -> Stage:
    """Computes dq = scale * dq_accum in bf16."""
    parameters = [
        memory("dq_accum", "B H round_up(Sq,128)*D"),
        memory("dq", "B Sq H D"),
        scalar("scale", "softmax scale", "f32"),
        nothing("tiled MMA (host only)"),
    ]
    return Stage(
        ["ceil_div(Sq,128)", "H", "B"],
        [*parameters, *grid_scheduler("ceil_div(Sq,128)")],
        ["Rows past Sq are not written."],
    )


# Part of the name of the compiled function -> stage, rule, and the names of the tensors that the host passes, in order.
STAGES: tuple[tuple[str, str, Callable[[Variant], Stage], tuple[str, ...]], ...] = (
    ("flash_fwd_sm100", "forward", forward_sm100, ("q", "k", "v", "o", "lse")),
    ("flash_fwd_sm90", "forward", forward_sm90, ("q", "k", "v", "o", "lse")),
    ("flash_bwd_preprocess", "preprocess", backward_preprocess, ("o", "do", "dpsum", "lse", "lse_log2", "dq_accum")),
    ("flash_bwd_sm100", "backward", backward_sm100, ("q", "k", "v", "do", "lse_log2", "dpsum", "dq_accum", "dk", "dv")),
    ("flash_bwd_postprocess", "postprocess", backward_postprocess, ("dq_accum", "dq")),
)

# ---------------------------------------------------------------------------------------------------------- reading PTX


@dataclass
class Declaration:
    """A .param of a kernel, as declared, and the byte ranges that the kernel reads (None: its address is taken)."""

    name: str
    size: int
    align: int
    offset: int
    reads: list[tuple[int, int]]
    address_taken: bool


def declarations(ptx: str) -> tuple[str, list[Declaration]]:
    """The entry's name and its parameters."""
    entry = re.search(r"\.entry\s+(\S+?)\s*\((.*?)\n\)", ptx, re.S)
    if entry is None:
        raise ValueError("no .entry in the PTX")
    result: list[Declaration] = []
    end = 0
    for text in entry[2].strip().split(",\n"):
        found = re.fullmatch(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s*(?:\.ptr[^\n]*?\s)?\s*([\w$]+?)(?:\[(\d+)\])?",
            text.strip(),
        )
        if found is None:
            raise ValueError(f"unknown form of parameter: {text}")
        width = int(found[3]) // 8
        size = width * int(found[5] or 1)
        align = int(found[1] or width)
        offset = -(-end // align) * align
        end = offset + size
        uses = re.findall(rf"(.*)\b{re.escape(found[4])}(?:\+(\d+))?(\]|;)", ptx[entry.end() :])
        reads: list[tuple[int, int]] = []
        for before, shift, closing in uses:
            load = re.search(r"ld\.param(?:\.v(\d))?\.[a-z](\d+)", before)
            if load is not None and closing == "]":
                reads.append((int(shift or 0), int(load[1] or 1) * int(load[2]) // 8))
        taken = any("ld.param" not in before for before, _, _ in uses)
        result.append(Declaration(found[4], size, align, offset, sorted(set(reads)), taken))
    return entry[1], result


def dimensions(ptx: str, directive: str) -> list[int]:
    """Numbers of a directive such as .reqntid; empty if there is none."""
    found = re.search(rf"\.{directive}\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", ptx)
    return [int(x or 1) for x in found.groups()] if found else []


# --------------------------------------------------------------------------------------------------- recording launches

# The functions of the CuTe-DSL runtime that compiled host code calls; signatures are those of the CUDA runtime
# functions of the same names.
RECORDER = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {  /* cudaLaunchConfig_t */
    uint32_t grid[3], block[3];
    size_t shared;
    void *stream;
    const uint8_t *attributes;
    uint32_t count;
} Launch;

static FILE *out;
static int sizes[256], count;

void recorder_open(const char *path, const int *parameter_sizes, int n) {
    if (out) fclose(out);
    out = fopen(path, "w");
    memcpy(sizes, parameter_sizes, n * sizeof *sizes);
    count = n;
}

static void hex(const uint8_t *bytes, int n) {
    fputc('"', out);
    for (int i = 0; i < n; i++) fprintf(out, "%02x", bytes[i]);
    fputc('"', out);
}

int _cudaLaunchKernelEx(const Launch *launch, const void *kernel, void **arguments) {
    const uint32_t *grid = launch->grid, *block = launch->block;
    fprintf(out, "{\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],", grid[0], grid[1], grid[2], block[0], block[1], block[2]);
    fprintf(out, "\"shared\":%zu,\"attributes\":[", launch->shared);
    for (uint32_t i = 0; i < launch->count; i++) {  /* cudaLaunchAttribute: id, padding to 8, 64 bytes of value */
        const uint32_t *attribute = (const uint32_t *)(launch->attributes + 72 * i);
        fprintf(out, "%s[%u,%u,%u,%u]", i ? "," : "", attribute[0], attribute[2], attribute[3], attribute[4]);
    }
    fprintf(out, "],\"parameters\":[");
    for (int i = 0; i < count; i++) {
        if (i) fputc(',', out);
        hex(arguments[i], sizes[i]);
    }
    fprintf(out, "]}\n");
    fflush(out);
    return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return 0; }
int _cudaFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaGetDeviceCount(int *devices) { *devices = 1; return 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cudaLibraryLoadData(void **library) { *library = 0; return 0; }
int _cudaLibraryGetKernel(void **kernel) { *kernel = 0; return 0; }
int _cudaLibraryUnload(void *library) { return 0; }
int cuda_dialect_init_library_once(void) { return 0; }
int cuda_dialect_unload_library_once(void) { return 0; }
void cuda_dialect_assert_success(int error) {}
void cuda_dialect_print_on_error(int error) {}
const char *cuda_dialect_get_error_name(int error) { return "error"; }
int CuteDSLRT_TVMFFISetRaisedCudaError(void) { return 0; }
int CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void) { return 0; }
"""


class DlpackTensor(ctypes.Structure):
    """DLManagedTensor of DLPack, flattened."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class DeviceTensor:
    """A tensor at an invented device address, for DLPack."""

    CODES: ClassVar = {
        "torch.bfloat16": (4, 16),
        "torch.float16": (2, 16),
        "torch.float32": (2, 32),
        "torch.int32": (0, 32),
    }
    alive: ClassVar[list[Any]] = []

    def __init__(self, tensor: Any, address: int) -> None:
        n = tensor.dim()
        extents, strides = (ctypes.c_int64 * n)(*tensor.shape), (ctypes.c_int64 * n)(*tensor.stride())
        code, bits = self.CODES[str(tensor.dtype)]
        self.struct = DlpackTensor(
            address, 2, 0, n, code, bits, 1, ctypes.addressof(extents), ctypes.addressof(strides), 0, None, None
        )
        DeviceTensor.alive += [extents, strides, self.struct]

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.struct), b"dltensor", None)


def address_of(name: str) -> int:
    """Invented address of a tensor: a function of its name."""
    return (sorted(TENSORS).index(name) + 1) << 40


FLAGS = "32652400"  # bytes 8 to 11 of a tensor map: bf16, rank 4, 128-byte swizzle, zeros outside


def decode_map(data: bytes) -> dict[str, Any]:
    """The fields of a tensor map of rank 4 as the CuTe-DSL itself encodes it; bytes 64 to 127 are not initialised."""
    return {
        "address": struct.unpack_from("<Q", data)[0],
        "flags": data[8:12].hex(),
        "strides_bytes": [16 * x for x in struct.unpack_from("<3I", data, 12)],
        "dims": [x + 1 for x in struct.unpack_from("<4I", data, 32)],
        "box": [x + 1 for x in data[55:59]],
    }


def check_case(stage: Stage, launch: dict[str, Any], variables: dict[str, Any]) -> list[str]:
    """Differences between a recorded launch and the rules."""
    faults: list[str] = []
    grid = [evaluate(g, variables) for g in stage.grid]
    if grid != launch["grid"]:
        faults.append(f"grid {grid}, not {launch['grid']}")
    for parameter, text in zip(stage.parameters, launch["parameters"], strict=True):
        data = bytes.fromhex(text)
        if parameter.map is not None:
            want: dict[str, Any] = {
                key: [evaluate(x, variables) for x in getattr(parameter.map, key)] for key in ("dims", "strides_bytes")
            }
            want |= {"address": variables["address"][parameter.map.tensor], "box": parameter.map.box, "flags": FLAGS}
            got = decode_map(data)
            faults += [
                f"{parameter.index} {parameter.meaning} {key}: {want[key]}, not {got[key]}"
                for key in want
                if want[key] != got[key]
            ]
        for f in parameter.fields:
            value = evaluate(f.value, variables)
            want_bytes = struct.pack(FORMATS[f.type], value)
            got_bytes = data[f.offset : f.offset + len(want_bytes)]
            if want_bytes != got_bytes:
                faults.append(
                    f"{parameter.index} {parameter.meaning}+{f.offset}: {value}, not "
                    f"{struct.unpack(FORMATS[f.type], got_bytes)[0]}"
                )
    return faults


def complete(stage: Stage, ptx: str) -> tuple[str, list[str]]:
    """Fill in from the PTX where parameters are and what is read; returns the entry's name and disagreements."""
    entry, declared = declarations(ptx)
    faults: list[str] = []
    if len(declared) != len(stage.parameters):
        return entry, [
            f"{len(declared)} parameters declared, {len(stage.parameters)} described; "
            f"sizes {[d.size for d in declared]}"
        ]
    for i, (p, d) in enumerate(zip(stage.parameters, declared, strict=True)):
        p.index, p.offset, p.size, p.align = i, d.offset, d.size, d.align
        if any(f.offset + struct.calcsize(FORMATS[f.type]) > d.size for f in p.fields):
            faults.append(f"{i} {p.meaning}: larger than the {d.size} bytes declared")
        covered = {b for f in p.fields for b in range(f.offset, f.offset + struct.calcsize(FORMATS[f.type]))}
        read = {b for start, width in d.reads for b in range(start, start + width)}
        for f in p.fields:
            f.read = f.offset in read
        if p.map is None and (read - covered or d.address_taken):
            faults.append(f"{i} {p.meaning}: bytes {sorted(read - covered)} read but not described")
        if p.map is not None and (d.reads or d.size != 128):
            faults.append(f"{i} {p.meaning}: not used as a tensor map")
    return entry, faults


def uses(parameter: Parameter, tensor: str) -> bool:
    """Whether a parameter holds the address of a tensor."""
    if parameter.map is not None:
        return parameter.map.tensor == tensor
    return any(f.value == f"address['{tensor}']" for f in parameter.fields)


def write(
    folder: Path,
    variant: Variant,
    name: str,
    ptx: str,
    stage: Stage,
    launches: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    extra: dict[str, Any],
) -> None:
    """Write one kernel and its description; fails if the rules do not give what was recorded."""
    (folder / f"{variant.name}.{name}.ptx").write_text(ptx)
    entry, faults = complete(stage, ptx)
    for variables, launch in launches:
        faults += check_case(stage, launch, variables) if not faults else []
    target = re.search(r"\.target\s+(\S+)", ptx)
    block = dimensions(ptx, "reqntid") or dimensions(ptx, "maxntid")
    maxnreg = dimensions(ptx, "maxnreg")
    description = {
        "entry": entry,
        "target": target[1].rstrip(",") if target else "",
        "variant": asdict(variant),
        "stage": name,
        "variables": VARIABLES,
        "tensors": {
            t: {"axes": TENSORS[t].split(), "order": "row-major"}
            for t in TENSORS
            if any(uses(p, t) for p in stage.parameters)
        },
        "launch": {
            "grid": stage.grid,
            "cluster": stage.cluster,
            "block": block,
            "dynamic_shared": launches[0][1]["shared"] if launches else extra.pop("shared"),
            "registers": maxnreg[0]
            if maxnreg
            else 65536 // (block[0] * block[1] * block[2]) // 8 * 8
            if "setmaxnreg" in ptx
            else None,
        },
        "parameters": [{k: v for k, v in asdict(p).items() if v is not None} for p in stage.parameters],
        "notes": stage.notes,
        **extra,
        "cases": [{"variables": v, **launch} for v, launch in launches],
        "checked": bool(launches) and not faults,
    }
    (folder / f"{variant.name}.{name}.json").write_text(json.dumps(description, indent=1) + "\n")
    print(
        f"{variant.name}.{name}: {ptx.count(chr(10))} lines, {len(launches)} launches recorded, {len(faults)} faults",
        flush=True,
    )
    if faults:
        raise SystemExit("\n".join(f"{variant.name}.{name}: {f}" for f in faults))


# ----------------------------------------------------------------------------------------------------- official kernels


def generate_official(folder: Path, variant: Variant) -> None:
    """Compile with flash-attn-4; environment variables are set by `main`."""
    scratch = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    recorder = ctypes.CDLL(os.environ["CUTE_DSL_LIBS"])

    import cutlass.cute as cute
    import cutlass.utils.hardware_info as hardware
    import torch
    import tvm_ffi
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    class Hardware:
        """Stands in for the query of the device."""

        def __init__(self, device_id: int = 0) -> None:
            self.device_id = device_id

        def get_device_multiprocessor_count(self) -> int:
            return variant.sm_count

        def get_max_active_clusters(self, cluster_size: int, stream: Any = None) -> int:
            return variant.sm_count // cluster_size

    import cutlass.utils

    for module in (hardware, cutlass.utils):
        setattr(module, "HardwareInfo", Hardware)  # noqa: B010 (an assignment is a type error)

    from flash_attn.cute import interface

    compiled: dict[str, str] = {}
    launches: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    current: dict[str, Any] = {}
    compile_ = cute.compile

    def compile_and_record(*arguments: Any, **options: Any) -> Callable[..., None]:
        before = set(scratch.glob("*.ptx"))
        function = compile_(*arguments, **options)
        (path,) = set(scratch.glob("*.ptx")) - before
        stage, names = next((s, n) for key, s, _, n in STAGES if key in path.name)
        if stage in compiled:
            raise RuntimeError(f"the case {current} compiles a second kernel for {stage}")
        compiled[stage] = path.read_text()
        sizes = [d.size for d in declarations(compiled[stage])[1]]

        def call(*values: Any) -> None:
            record = scratch / "record"
            recorder.recorder_open(str(record).encode(), (ctypes.c_int * len(sizes))(*sizes), len(sizes))
            roles = iter(names)
            converted, addresses = [], {}
            for value in values:
                role = next(roles, "semaphore") if value is None or isinstance(value, FakeTensor) else ""
                if isinstance(value, FakeTensor):
                    addresses[role] = address_of(role)
                    value = tvm_ffi.from_dlpack(DeviceTensor(value, addresses[role]))
                converted.append(value)
            function(*converted)
            launches.setdefault(stage, []).append(({**current, "address": addresses}, json.loads(record.read_text())))

        return call

    torch.cuda.current_device = lambda: 0
    setattr(cute, "compile", compile_and_record)  # noqa: B010
    interface.is_fake_mode = lambda: False

    with FakeTensorMode():
        for batch, length_q, length_k, heads in CASES:
            current = {"B": batch, "H": heads, "Sq": length_q, "Sk": length_k}
            current |= {"D": variant.head_dim, "SMS": variant.sm_count, "scale": variant.head_dim**-0.5}

            def tensor(length: int, batch: int = batch, heads: int = heads) -> Any:
                return torch.empty(batch, length, heads, variant.head_dim, dtype=torch.bfloat16, device="cuda")

            q, k, v = tensor(length_q), tensor(length_k), tensor(length_k)
            if variant.backward:
                lse = torch.empty(batch, heads, length_q, dtype=torch.float32, device="cuda")
                interface._flash_attn_bwd(
                    q,
                    k,
                    v,
                    tensor(length_q),
                    tensor(length_q),
                    lse,
                    causal=variant.causal,
                    deterministic=variant.deterministic,
                )
            else:
                interface.flash_attn_func(q, k, v, causal=variant.causal, return_lse=variant.lse)

    versions = {p: version(p) for p in ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "torch")}
    for _, name, rule, _ in STAGES:
        if name in compiled and (
            name != "forward" or rule is (forward_sm90 if variant.arch == "sm_90" else forward_sm100)
        ):
            write(folder, variant, name, compiled[name], rule(variant), launches[name], {"packages": versions})


# ------------------------------------------------------------------------------------------------------- Triton kernels


@triton.jit
def attention(
    q,
    k,
    v,
    o,
    lse,
    scale_log2,
    length_q,
    length_k,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    SPECIALISED: tl.constexpr,
):
    """Flash attention, M queries of one head a program; q, k, v, o are tensor descriptors of (B, H, S, D)."""
    start, head, batch = tl.program_id(0) * M, tl.program_id(1), tl.program_id(2)
    query = q.load([batch, head, start, 0]).reshape(M, D)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, D], tl.float32)
    for position in tl.range(0, length_k, N, warp_specialize=SPECIALISED):
        key = k.load([batch, head, position, 0]).reshape(N, D)
        score = tl.dot(query, key.T)
        inside = position + tl.arange(0, N) < length_k
        score = tl.where(inside[None, :], score * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        correction = tl.exp2(top - new_top)
        total = total * correction + tl.sum(weight, 1)
        result = result * correction[:, None]
        value = v.load([batch, head, position, 0]).reshape(N, D)
        result = tl.dot(weight.to(tl.bfloat16), value, result)
        top = new_top
    o.store([batch, head, start, 0], (result / total[:, None]).to(tl.bfloat16).reshape(1, 1, M, D))
    row = start + tl.arange(0, M)
    target = lse + (batch * tl.num_programs(1) + head) * length_q + row
    tl.store(target, (top + tl.log2(total)) * 0.6931471805599453, mask=row < length_q)


def descriptor(tensor: str, box: list[int], swizzle: str) -> list[Parameter]:
    """A host-side descriptor of (B, H, S, D): the map, then extents (i32) and strides (i64, elements)."""
    order = [axes(tensor)[i] for i in (0, 2, 1, 3)]
    strides = [stride(tensor, a) for a in order]
    tiled = Map(tensor, order[::-1], [f"{s}*2" for s in strides[-2::-1]], box[::-1], swizzle=swizzle)
    parameters = [Parameter(f"tensor map of {tensor}", map=tiled)]
    parameters += [scalar(a, f"extent {a} of {tensor}") for a in order]
    return parameters + [
        scalar(s, f"stride of {a} of {tensor}, elements", "i64") for a, s in zip(order, strides, strict=True)
    ]


def generate_triton(folder: Path, variant: Variant) -> None:
    """Compile `attention` for the variant's target."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    blocks = (128, 64 if variant.arch == "sm_90" else 128)
    boxes = {"q": blocks[0], "k": blocks[1], "v": blocks[1], "o": blocks[0]}
    signature = {t: f"tensordesc<bf16[1,1,{rows},{variant.head_dim}]>" for t, rows in boxes.items()}
    signature |= {"lse": "*fp32", "scale_log2": "fp32", "length_q": "i32", "length_k": "i32"}
    constants = {"M": blocks[0], "N": blocks[1], "D": variant.head_dim, "SPECIALISED": variant.specialised}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        attention,
        signature,
        constexprs={(list(signature).index(name),): value for name, value in constants.items()},
        attrs={},
    )
    target = GPUTarget("cuda", int(variant.arch[3:]), 32)
    kernel = triton.compile(
        source, target=target, options={"num_warps": 8 if variant.arch == "sm_90" else 4, "num_stages": 2}
    )
    meta = kernel.metadata
    swizzles = {0: "none", 1: "32B", 2: "64B", 3: "128B"}
    parameters: list[Parameter] = []
    for tensor, tiled in zip(boxes, meta.tensordesc_meta, strict=True):
        parameters += descriptor(tensor, list(tiled["block_size"]), swizzles[tiled["swizzle"]])
    parameters += [
        Parameter("lse, f32 (B, H, Sq)", [Field(0, "u64", "address['lse']")]),
        scalar("scale*log2e", "softmax scale in base 2", "f32"),
        scalar("Sq", "query length"),
        scalar("Sk", "key length"),
        Parameter("scratch in global memory: null, unless global_scratch_size > 0", [Field(0, "u64", "0")]),
        Parameter("scratch of the profiler: null", [Field(0, "u64", "0")]),
    ]
    stage = Stage(
        ["ceil_div(Sq,128)", "H", "B"],
        parameters,
        [TAIL_Q, TAIL_K, "lse: natural logarithm; rows past Sq are not written."],
    )
    details = {
        key: getattr(meta, key)
        for key in ("num_warps", "num_stages", "shared", "tmem_size", "global_scratch_size", "tensordesc_meta")
        if hasattr(meta, key)
    }
    extra = {"shared": meta.shared, "triton": details, "packages": {"triton": version("triton")}}
    write(folder, variant, "forward", kernel.asm["ptx"], stage, [], json.loads(json.dumps(extra, default=str)))


# --------------------------------------------------------------------------------------------------------------- driver


def environment(variant: Variant, scratch: Path) -> dict[str, str]:
    """The environment that selects the target of the official package, or of Triton."""
    result = {k: v for k, v in os.environ.items() if not k.startswith(("CUTE_DSL", "FLASH_ATTENTION", "FA_", "TRITON"))}
    result |= {
        "FLASH_ATTENTION_ARCH": variant.arch,
        "FLASH_ATTENTION_NUM_SMS": str(variant.sm_count),
        "FLASH_ATTENTION_FAKE_TENSOR": "1",
        "FA_DISABLE_2CTA": "0" if variant.two_cta else "1",
        "CUTE_DSL_ARCH": variant.arch + "a",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_DUMP_DIR": str(scratch),
        "CUTE_DSL_LIBS": str(scratch / "librecorder.so"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it would warn that the tensors are fake
    }
    return result


def run(folder: Path, variant: Variant) -> bool:
    """Generate one variant in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if not variant.triton:
            (scratch / "recorder.c").write_text(RECORDER)
            compiler = shlex.split(os.environ.get("CC") or "cc")
            arguments = ["-shared", "-fPIC", "-o", scratch / "librecorder.so", scratch / "recorder.c"]
            subprocess.run([*compiler, *arguments], check=True)
        command = [sys.executable, "-W", "ignore", __file__, str(folder), variant.name, "--here"]
        return subprocess.run(command, env=environment(variant, scratch), check=False).returncode == 0


def main() -> int:
    """Generate the variants named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"variants: {', '.join(VARIANTS)}")
    parser.add_argument("--workers", type=int, default=1, help="variants to compile at a time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    variants = [VARIANTS[name] for name in arguments.names or VARIANTS]
    if arguments.here:
        for variant in variants:
            (generate_triton if variant.triton else generate_official)(folder, variant)
        return 0
    with ThreadPoolExecutor(arguments.workers) as pool:
        done = pool.map(lambda variant: run(folder, variant), variants)
        failed = [variant.name for variant, good in zip(variants, done, strict=True) if not good]
    if failed:
        print("failed:", *failed, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
