"""Scalar instructions of the emulator against exact arithmetic, as PTX ISA 9.7.1 to 9.7.9 states them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import HEADER, check_launch

from jax_fa4.emulated import Kernel

BF16, F16, F32, F64 = ml_dtypes.bfloat16, np.float16, np.float32, np.float64
# Precision with the hidden bit, and the exponents of the smallest and the largest normal number.
FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f16": F16,
    "bf16": BF16,
    "f32": F32,
    "f64": F64,
    "f16x2": (F16, 2),
    "bf16x2": (BF16, 2),
    "f32x2": (F32, 2),
    "u16x2": (np.uint16, 2),
    "s16x2": (np.int16, 2),
}
LANES = "abce"


def bits_of(kind: str) -> int:
    dtype = DTYPES[kind]
    return 8 * np.dtype(dtype).itemsize if not isinstance(dtype, tuple) else 8 * dtype[1] * np.dtype(dtype[0]).itemsize


def execute(text: str, result: str, inputs: list[tuple[str, np.ndarray]]) -> np.ndarray:
    """Runs one instruction (operands a, b, c, e, result d; predicates have those names too) for each element."""
    count = len(inputs[0][1])
    declarations, loads, parameters = [], [], [".param .u64 p_d"]
    arguments: list[Any] = []

    def register(kind: str) -> str:
        return ".pred" if kind == "pred" else f".b{max(bits_of(kind), 16)}"

    for name, (kind, values) in zip(LANES, inputs, strict=False):
        bits = 8 if kind == "pred" else bits_of(kind)
        declarations.append(f".reg {register(kind)} {name}; .reg .b64 at_{name}; .reg .b16 is_{name};")
        parameters.append(f".param .u64 p_{name}")
        target = f"is_{name}" if kind == "pred" else name
        loads.append(f"ld.param.u64 at_{name}, [p_{name}]; mad.wide.u32 at_{name}, i, {bits // 8}, at_{name};")
        loads.append(
            f"ld.global.{'u8' if bits == 8 and kind != 's8' else 's8' if bits == 8 else f'b{bits}'} "
            f"{target}, [at_{name}];"
        )
        if kind == "pred":
            loads.append(f"setp.ne.u16 {name}, is_{name}, 0;")
        arguments.append(np.ascontiguousarray(values))
    bits = 8 if result == "pred" else bits_of(result)
    store = "d"
    if result == "pred":
        store, text = "is_d", text + " selp.u16 is_d, 1, 0, d;"
    dtype = DTYPES[result]
    output = np.zeros((count, dtype[1]), dtype[0]) if isinstance(dtype, tuple) else np.zeros(count, dtype)
    kernel = Kernel(
        f"""{HEADER.format(target="sm_100a")} .visible .entry k({", ".join(parameters)}) {{
        .reg {register(result)} d; .reg .b16 is_d; .reg .b64 at_d; .reg .b32 i, block; .reg .pred q, ignored;
        {" ".join(declarations)}
        mov.u32 i, %tid.x; mov.u32 block, %ctaid.x; mad.lo.u32 i, block, 256, i; setp.ge.u32 q, i, {count}; @q ret;
        {" ".join(loads)}
        {text}
        ld.param.u64 at_d, [p_d]; mad.wide.u32 at_d, i, {bits // 8}, at_d; st.global.b{bits} [at_d], {store};
        ret; }}"""
    )
    check_launch(kernel, output, *arguments, threads=256, ctas=-(-count // 256))
    return output


# ---- Inputs


def edges(kind: str) -> list[Any]:
    rng = np.random.default_rng(len(kind))
    if kind == "pred":
        return [False, True]
    if kind in FORMATS:
        precision, least, most = FORMATS[kind]
        one = [
            0.0,
            1.0,
            1.5,
            2.0**-1,
            2.5,
            3.0,
            1 + 2.0 ** (1 - precision),
            2 - 2.0 ** (1 - precision),
            2.0**least,
            2.0 ** (least - precision + 1),
            2.0**least * 0.75,
            (2 - 2.0 ** (1 - precision)) * 2.0**most,
            math.inf,
        ]
        one += [float(x) for x in rng.standard_normal(6) * 2.0 ** rng.integers(-8, 9, 6)]
        return [*one, *(-x for x in one), math.nan]
    bits = bits_of(kind)
    signed = kind.startswith("s")
    values = {
        0,
        1,
        2,
        3,
        7,
        31,
        33,
        100,
        (1 << bits) - 1,
        (1 << bits) - 2,
        1 << (bits - 1),
        (1 << (bits - 1)) - 1,
        (1 << (bits - 1)) + 1,
        *(int(x) % (1 << bits) for x in rng.integers(0, 1 << 63, 6)),
    }
    return [x - (1 << bits) if signed and x >> (bits - 1) else x for x in sorted(x % (1 << bits) for x in values)]


def inputs_of(kinds: tuple[str, ...], count: int = 700) -> list[np.ndarray]:
    """All combinations of edge values, or a random choice of them, for each operand an array."""
    base = [k.removesuffix("x2") for k in kinds]
    sets = [edges(k) for k in base]
    rng = np.random.default_rng(7)
    if math.prod(map(len, sets)) <= count:
        rows = list(itertools.product(*sets))
    else:
        rows = [tuple(s[rng.integers(len(s))] for s in sets) for _ in range(count)]
    arrays = []
    for i, kind in enumerate(kinds):
        dtype = DTYPES[kind][0] if isinstance(DTYPES[kind], tuple) else DTYPES[kind]
        with np.errstate(over="ignore", invalid="ignore"):
            array = np.array([row[i] for row in rows], np.float64 if base[i] in FORMATS else None).astype(dtype)
        if kind.endswith("x2"):
            array = np.stack([array, array[rng.permutation(len(array))]], 1)
        arrays.append(array)
    return arrays


def assert_same(
    actual: np.ndarray, expected: np.ndarray, text: str, inputs: list[np.ndarray], tolerance: Any = None
) -> None:
    """Equal in every bit, but for which NaN; or within a tolerance."""
    if actual.dtype.kind in "fV" or actual.dtype == BF16:
        wide, other = actual.astype(np.float64), expected.astype(np.float64)
        same = (np.isnan(wide) & np.isnan(other)) | ((wide == other) & (np.signbit(wide) == np.signbit(other)))
        if tolerance is not None:
            absolute, relative = tolerance
            with np.errstate(invalid="ignore"):
                same |= np.abs(wide - other) <= absolute + relative * np.abs(other)
    else:
        same = actual == expected
    if not same.all():
        i = tuple(np.argwhere(~same)[0])
        raise AssertionError(
            f"{text}: of {[x[i[0]] for x in inputs]} it is {actual[i]!r}, but should be {expected[i]!r} "
            f"({np.count_nonzero(~same)} of {same.size} wrong)"
        )


# ---- Integers: exact, by Python's, of one element each


def wrap(value: int, kind: str) -> int:
    bits = bits_of(kind)
    value %= 1 << bits
    return value - (1 << bits) if kind.startswith("s") and value >> (bits - 1) else value


def limits(kind: str) -> tuple[int, int]:
    bits = bits_of(kind)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind.startswith("s") else (0, (1 << bits) - 1)


def saturate(value: int, kind: str) -> int:
    least, most = limits(kind)
    return min(max(value, least), most)


def unsigned(value: int, bits: int = 32) -> int:
    return value % (1 << bits)


def divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shifted_right(a: int, by: int, bits: int) -> int:
    return a >> min(by, bits)


def leading(x: int, signed: bool, bits: int) -> int:
    """Position of the highest bit that is not the sign's, or -1."""
    x = unsigned(~x if signed and x < 0 else x, bits)
    return x.bit_length() - 1


def extract(a: int, position: int, length: int, kind: str) -> int:
    bits, position, length = bits_of(kind), position & 255, length & 255
    a = unsigned(a, bits)
    most = bits - 1
    sign = 0 if kind.startswith("u") or length == 0 else a >> min(position + length - 1, most) & 1
    value = 0
    for i in range(bits):
        value |= (a >> (position + i) & 1 if i < length and position + i <= most else sign) << i
    return wrap(value, kind)


def insert(a: int, b: int, position: int, length: int, bits: int) -> int:
    position, length, result = position & 255, length & 255, b
    for i in range(length):
        if position + i < bits:
            result = result & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return result


def permute(a: int, b: int, selectors: list[int]) -> int:
    """Bytes of {b, a}, least significant first; a selector's bit 3 repeats the byte's sign."""
    everything, result = b << 32 | a, 0
    for i, selector in enumerate(selectors):
        byte = everything >> (8 * (selector & 7)) & 255
        result |= (0xFF * (byte >> 7) if selector & 8 else byte) << (8 * i)
    return result


def halves(x: int, signed: bool) -> list[int]:
    return [wrap(x >> s, "s16" if signed else "u16") for s in (0, 16)]


def dot(a: int, b: int, c: int, width: int, signs: tuple[bool, bool]) -> int:
    """dp4a: four products of bytes; dp2a is given by its caller."""
    part = [
        [wrap(x >> (width * i), ("s" if s else "u") + str(width)) for i in range(4)]
        for x, s in zip((a, b), signs, strict=True)
    ]
    return c + sum(map(operator.mul, *part))


Case = tuple[str, str, tuple[str, ...], Callable[..., Any]]
INTEGER_CASES: list[Case] = []


def case(text: str, result: str, operands: tuple[str, ...], function: Callable[..., Any]) -> None:
    """Text without a semicolon is an opcode whose operands are d, a, b, c, e."""
    if ";" not in text:
        text = f"{text} {', '.join(('d', *LANES[: len(operands)]))};"
    INTEGER_CASES.append((text, result, operands, function))


for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
    n, two, three = bits_of(t), (t, t), (t, t, t)
    case(f"add.{t}", t, two, operator.add)
    case(f"sub.{t}", t, two, operator.sub)
    case(f"mul.lo.{t}", t, two, operator.mul)
    case(f"mul.hi.{t}", t, two, lambda a, b, n=n: a * b >> n)
    case(f"mad.lo.{t}", t, three, lambda a, b, c: a * b + c)
    case(f"mad.hi.{t}", t, three, lambda a, b, c, n=n: (a * b >> n) + c)
    case(f"sad.{t}", t, three, lambda a, b, c: c + abs(a - b))
    case(f"min.{t}", t, two, min)
    case(f"max.{t}", t, two, max)
    case(f"setp.ne.{t} q, b, 0; @q div.{t} d, a, b; @!q mov.b{n} d, 0;", t, two, lambda a, b: divide(a, b) if b else 0)
    case(
        f"setp.ne.{t} q, b, 0; @q rem.{t} d, a, b; @!q mov.b{n} d, 0;",
        t,
        two,
        lambda a, b: a - divide(a, b) * b if b else 0,
    )
    case(f"shr.{t}", t, (t, "u32"), lambda a, b, n=n: shifted_right(a, b, n))
    if n < 64:
        wide = f"{t[0]}{2 * n}"
        case(f"mul.wide.{t}", wide, two, operator.mul)
        case(f"mad.wide.{t}", wide, (t, t, wide), lambda a, b, c: a * b + c)
    if t[0] == "s":
        case(f"abs.{t}", t, (t,), abs)
        case(f"neg.{t}", t, (t,), operator.neg)
    for name, holds in {
        "eq": operator.eq,
        "ne": operator.ne,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
    }.items():
        case(f"setp.{name}.{t}", "pred", two, holds)
        case(f"set.{name}.u32.{t}", "u32", two, lambda a, b, holds=holds: -holds(a, b))
        case(
            f"setp.{name}.and.{t} d|ignored, a, b, c;",
            "pred",
            (t, t, "pred"),
            lambda a, b, c, holds=holds: holds(a, b) & c,
        )
        case(
            f"setp.{name}.or.{t} ignored|d, a, b, !c;",
            "pred",
            (t, t, "pred"),
            lambda a, b, c, holds=holds: (not holds(a, b)) | (not c),
        )
    if t[0] == "u":
        for name, holds in {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}.items():
            case(f"setp.{name}.{t}", "pred", two, holds)
for n in (16, 32, 64):
    t = f"b{n}"
    case(f"and.{t}", t, (t, t), operator.and_)
    case(f"or.{t}", t, (t, t), operator.or_)
    case(f"xor.{t}", t, (t, t), operator.xor)
    case(f"not.{t}", t, (t,), operator.invert)
    case(f"cnot.{t}", t, (t,), lambda a: a == 0)
    case(f"shl.{t}", t, (t, "u32"), lambda a, b, n=n: a << min(b, n))
    case(f"shr.{t}", t, (t, "u32"), lambda a, b, n=n: a >> min(b, n))
    case(f"selp.{t}", t, (t, t, "pred"), lambda a, b, c: a if c else b)
    case(f"selp.{t} d, a, b, !c;", t, (t, t, "pred"), lambda a, b, c: b if c else a)
    case(f"slct.{t}.s32", t, (t, t, "s32"), lambda a, b, c: a if c >= 0 else b)
    case(f"slct.{t}.f32", t, (t, t, "f32"), lambda a, b, c: a if c >= 0 else b)
    case(f"mov.{t}", t, (t,), lambda a: a)
for name, function in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
    case(f"{name}.pred d, a, !b;", "pred", ("pred", "pred"), lambda a, b, f=function: f(bool(a), not b))
case("not.pred", "pred", ("pred",), operator.not_)
case("mov.pred", "pred", ("pred",), bool)
for sign in "us":
    case(f"add.{sign}16x2", f"{sign}16x2", (f"{sign}16x2",) * 2, operator.add)
    case(f"min.{sign}16x2", f"{sign}16x2", (f"{sign}16x2",) * 2, min)
    case(f"max.{sign}16x2", f"{sign}16x2", (f"{sign}16x2",) * 2, max)
    case(f"mul24.lo.{sign}32", f"{sign}32", (f"{sign}32",) * 2, lambda a, b, s=sign: mul24(a, s) * mul24(b, s))
    case(f"mul24.hi.{sign}32", f"{sign}32", (f"{sign}32",) * 2, lambda a, b, s=sign: mul24(a, s) * mul24(b, s) >> 16)
    case(f"mad24.lo.{sign}32", f"{sign}32", (f"{sign}32",) * 3, lambda a, b, c, s=sign: mul24(a, s) * mul24(b, s) + c)
    case(
        f"mad24.hi.{sign}32",
        f"{sign}32",
        (f"{sign}32",) * 3,
        lambda a, b, c, s=sign: (mul24(a, s) * mul24(b, s) >> 16) + c,
    )
    for n in (32, 64):
        t = f"{sign}{n}"
        case(f"bfind.{t}", "u32", (t,), lambda a, s=sign, n=n: leading(a, s == "s", n))
        case(
            f"bfind.shiftamt.{t}",
            "u32",
            (t,),
            lambda a, s=sign, n=n: n - 1 - x if (x := leading(a, s == "s", n)) >= 0 else -1,
        )
        case(f"bfe.{t}", t, (t, "u32", "u32"), lambda a, b, c, t=t: extract(a, b, c, t))
    for other in "us":
        case(
            f"dp4a.{sign}32.{other}32",
            "s32" if "s" in sign + other else "u32",
            ("b32", "b32", "s32" if "s" in sign + other else "u32"),
            lambda a, b, c, s=(sign == "s", other == "s"): dot(a, b, c, 8, s),
        )
        for half in (0, 1):
            case(
                f"dp2a.{('lo', 'hi')[half]}.{sign}32.{other}32",
                "s32" if "s" in sign + other else "u32",
                ("b32", "b32", "s32" if "s" in sign + other else "u32"),
                lambda a, b, c, h=half, s=(sign == "s", other == "s"): (
                    c
                    + sum(
                        x * wrap(b >> (16 * h + 8 * i), "s8" if s[1] else "u8") for i, x in enumerate(halves(a, s[0]))
                    )
                ),
            )
case("sub.u16x2", "u16x2", ("u16x2",) * 2, operator.sub)
case("add.sat.s32", "s32", ("s32",) * 2, lambda a, b: saturate(a + b, "s32"))
case("sub.sat.s32", "s32", ("s32",) * 2, lambda a, b: saturate(a - b, "s32"))
case("mad.hi.sat.s32", "s32", ("s32",) * 3, lambda a, b, c: saturate((a * b >> 32) + c, "s32"))
case("max.relu.s32", "s32", ("s32",) * 2, lambda a, b: max(a, b, 0))
case("min.relu.s16x2", "s16x2", ("s16x2",) * 2, lambda a, b: max(min(a, b), 0))
for n in (32, 64):
    case(f"popc.b{n}", "u32", (f"b{n}",), lambda a: a.bit_count())
    case(f"clz.b{n}", "u32", (f"b{n}",), lambda a, n=n: n - a.bit_length())
    case(f"brev.b{n}", f"b{n}", (f"b{n}",), lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))
    case(f"bfi.b{n}", f"b{n}", (f"b{n}", f"b{n}", "u32", "u32"), lambda a, b, c, e, n=n: insert(a, b, c, e, n))
for how in ("wrap", "clamp"):
    by = (lambda c: c & 31) if how == "wrap" else (lambda c: min(c, 32))
    case(f"shf.l.{how}.b32", "b32", ("b32", "b32", "u32"), lambda a, b, c, by=by: (b << 32 | a) << by(c) >> 32)
    case(f"shf.r.{how}.b32", "b32", ("b32", "b32", "u32"), lambda a, b, c, by=by: (b << 32 | a) >> by(c))
    case(f"bmsk.{how}.b32", "b32", ("b32", "b32"), lambda a, b, by=by: ((1 << by(b)) - 1) << by(a))
    for sign in "us":
        case(
            f"szext.{how}.{sign}32",
            f"{sign}32",
            (f"{sign}32", "u32"),
            lambda a, b, by=by, s=sign: extract(a, 0, by(b), s + "32"),
        )
for table in (0x80, 0xFE, 0x96, 0xE8, 0x1B):
    case(
        f"lop3.b32 d, a, b, c, {table};",
        "b32",
        ("b32",) * 3,
        lambda a, b, c, table=table: sum(
            (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
        ),
    )
case(
    "lop3.or.b32 ignored_register|d, a, b, c, 0x80, e;".replace("ignored_register", "_"),
    "pred",
    ("b32", "b32", "b32", "pred"),
    lambda a, b, c, e: bool(a & b & c) | bool(e),
)
case("prmt.b32", "b32", ("b32",) * 3, lambda a, b, c: permute(a, b, [c >> 4 * i & 15 for i in range(4)]))
case("prmt.b32 d, a, b, 0x5C1A;", "b32", ("b32",) * 2, lambda a, b: permute(a, b, [10, 1, 12, 5]))
PERMUTATIONS = {  # PTX ISA 9.7.9.7: for each selector the bytes from the most significant down
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}
for name, table in PERMUTATIONS.items():
    case(
        f"prmt.b32.{name}",
        "b32",
        ("b32",) * 3,
        lambda a, b, c, table=table: permute(a, b, [int(x) for x in table[c & 3]][::-1]),
    )
case("add.cc.u32 d, a, b; addc.u32 d, c, e;", "u32", ("u32",) * 4, lambda a, b, c, e: c + e + (a + b >> 32))
case("sub.cc.u32 d, a, b; subc.u32 d, c, e;", "u32", ("u32",) * 4, lambda a, b, c, e: c - e - (a < b))
case("add.cc.u64 d, a, b; addc.u64 d, c, e;", "u64", ("u64",) * 4, lambda a, b, c, e: c + e + (a + b >> 64))
case(
    "mad.lo.cc.u32 d, a, b, c; madc.hi.u32 d, a, b, e;",
    "u32",
    ("u32",) * 4,
    lambda a, b, c, e: (a * b >> 32) + e + ((a * b & 0xFFFFFFFF) + c >> 32),
)
case(
    "fns.b32 d, a, 0, 3;", "b32", ("b32",), lambda a: next(iter([i for i in range(32) if a >> i & 1][2:3]), 0xFFFFFFFF)
)
# Packing and unpacking of vectors, and moves of 128 bits.
case("mov.b64 d, {a, b};", "b64", ("b32", "b32"), lambda a, b: b << 32 | a)
case("mov.b32 d, {a, b};", "b32", ("b16", "b16"), lambda a, b: b << 16 | a)
case("mov.b64 d, {a, b, c, e};", "b64", ("b16",) * 4, lambda a, b, c, e: e << 48 | c << 32 | b << 16 | a)
case("mov.b64 {_, d}, a;", "b32", ("b64",), lambda a: a >> 32)
case("mov.b32 {d, _}, a;", "b16", ("b32",), lambda a: a & 0xFFFF)
case(
    ".reg .b128 w; .reg .b64 other; mov.b128 w, {a, b}; mov.b128 w, w; mov.b128 {other, d}, w;",
    "b64",
    ("b64",) * 2,
    lambda a, b: b,
)
case("cvt.pack.sat.u16.s32", "b32", ("s32", "s32"), lambda a, b: saturate(a, "u16") << 16 | saturate(b, "u16"))
case(
    "cvt.pack.sat.s8.s32.b32",
    "b32",
    ("s32", "s32", "b32"),
    lambda a, b, c: c << 16 | unsigned(saturate(a, "s8"), 8) << 8 | unsigned(saturate(b, "s8"), 8),
)
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
for target, origin in itertools.product(INTEGERS, INTEGERS):
    if target != origin:
        case(f"cvt.{target}.{origin}", target, (origin,), lambda a: a)
        case(f"cvt.sat.{target}.{origin}", target, (origin,), lambda a, t=target: saturate(a, t))


def mul24(x: int, sign: str) -> int:
    return x % (1 << 24) - (1 << 24 if sign == "s" and x >> 23 & 1 else 0)


@pytest.mark.parametrize(("text", "result", "operands", "function"), INTEGER_CASES, ids=[x[0] for x in INTEGER_CASES])
def test_integer(text: str, result: str, operands: tuple[str, ...], function: Callable[..., Any]) -> None:
    arrays = inputs_of(operands)
    if text.startswith(("shl", "shr", "shf", "bmsk", "szext", "bfe", "bfi")):  # amounts within reach
        for kind, array in list(zip(operands, arrays, strict=True))[1:]:
            if kind in ("u32", "b32"):
                array[::3] %= 40
    actual = execute(text, result, list(zip(operands, arrays, strict=True)))
    element = result.removesuffix("x2")
    flat = [x.reshape(-1).tolist() for x in arrays]
    values = [function(*row) for row in zip(*flat, strict=True)]
    if element != "pred":
        values = [wrap(int(x), element) for x in values]
    expected = np.array(values, actual.dtype).reshape(actual.shape)
    assert_same(actual, expected, text, arrays)


# ---- Floating point: exact fractions, rounded as the instruction says


def rounded(value: Fraction, format_: str, mode: str) -> float:
    """A number other than 0, rounded to a format."""
    precision, least, most = FORMATS[format_]
    magnitude, negative = abs(value), value < 0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    quotient, rest = divmod(magnitude, unit)
    away = {
        "rn": rest * 2 > unit or (rest * 2 == unit and quotient % 2 == 1),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
        "rna": rest * 2 >= unit,
    }[mode]
    result = (quotient + away) * unit
    if result >= Fraction(2) ** (most + 1):
        to_infinity = mode in ("rn", "rna") or (mode == "rm" and negative) or (mode == "rp" and not negative)
        result_float = math.inf if to_infinity else float((2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** most)
    else:
        result_float = float(result)
    return -result_float if negative else result_float


def flushed(x: float, format_: str) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0 ** FORMATS[format_][1] else x


def arithmetic(
    kind: str, format_: str, mode: str = "rn", ftz: bool = False, sat: bool = False, relu: bool = False
) -> Callable[..., float]:
    def function(*operands: float) -> float:
        x = [flushed(v, format_) for v in operands] if ftz else list(operands)
        if kind == "sub":
            x[1] = -x[1]
        a, b, c = (*x, 0.0)[:3]
        result = special(a, b, c) if not all(map(math.isfinite, x)) else finite(a, b, c)
        if ftz:
            result = flushed(result, format_)
        if sat:
            result = 0.0 if math.isnan(result) else min(max(result, 0.0), 1.0) if result != 0 else 0.0
        if relu and not math.isnan(result):
            result = result if result > 0 else 0.0
        return result

    def special(a: float, b: float, c: float) -> float:
        if kind in ("add", "sub"):
            return a + b
        if kind == "div":
            return (
                a / b if b else math.copysign(a, math.copysign(1, a) * math.copysign(1, b)) if not math.isnan(a) else a
            )
        return a * b if kind == "mul" else a * b + c

    def finite(a: float, b: float, c: float) -> float:
        sign = math.copysign(1, a) * math.copysign(1, b)
        if kind == "div":
            if b == 0:
                return math.copysign(math.inf, sign) if a else math.nan
            exact, zero = Fraction(a) / Fraction(b), math.copysign(0.0, sign)
        elif kind == "mul":
            exact, zero = Fraction(a) * Fraction(b), math.copysign(0.0, sign)
        else:
            first, first_sign, second = (
                (Fraction(a), math.copysign(1, a), b)
                if kind in ("add", "sub")
                else (Fraction(a) * Fraction(b), sign, c)
            )
            exact = first + Fraction(second)
            same = first_sign == math.copysign(1, second)
            zero = math.copysign(0.0, first_sign) if first == 0 and same else -0.0 if mode == "rm" else 0.0
        return rounded(exact, format_, mode) if exact else zero

    return function


FLOAT_CASES: list[tuple[str, str, tuple[str, ...], Callable[..., float]]] = []


def float_case(text: str, result: str, operands: tuple[str, ...], function: Callable[..., float]) -> None:
    if ";" not in text:
        text = f"{text} {', '.join(('d', *LANES[: len(operands)]))};"
    FLOAT_CASES.append((text, result, operands, function))


for mode in ("rn", "rz", "rm", "rp"):
    for t in ("f32", "f64"):
        for name, count in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3), ("div", 2)):
            float_case(f"{name}.{mode}.{t}", t, (t,) * count, arithmetic(name, t, mode))
        float_case(f"rcp.{mode}.{t}", t, (t,), lambda a, t=t, m=mode: arithmetic("div", t, m)(1.0, a))
        float_case(f"sqrt.{mode}.{t}", t, (t,), lambda a, t=t, m=mode: root(a, t, m))
    for name, count in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
        float_case(f"{name}.{mode}.ftz.f32", "f32", ("f32",) * count, arithmetic(name, "f32", mode, ftz=True))
        float_case(f"{name}.{mode}.sat.f32", "f32", ("f32",) * count, arithmetic(name, "f32", mode, sat=True))
        if name != "sub":
            float_case(f"{name}.{mode}.f32x2", "f32x2", ("f32x2",) * count, arithmetic(name, "f32", mode))
            float_case(f"{name}.{mode}.ftz.f32x2", "f32x2", ("f32x2",) * count, arithmetic(name, "f32", mode, ftz=True))
float_case("mad.rn.f32", "f32", ("f32",) * 3, arithmetic("fma", "f32"))
for t, name, count in itertools.product(("f16", "bf16", "f16x2", "bf16x2"), ("add", "sub", "mul"), (2,)):
    float_case(f"{name}.rn.{t}", t, (t,) * count, arithmetic(name, t.removesuffix("x2")))
for t in ("f16", "bf16", "f16x2", "bf16x2"):
    f = t.removesuffix("x2")
    float_case(f"fma.rn.{t}", t, (t,) * 3, arithmetic("fma", f))
    float_case(f"fma.rn.relu.{t}", t, (t,) * 3, arithmetic("fma", f, relu=True))
    float_case(f"abs.{t}", t, (t,), lambda a: math.copysign(a, 1.0))
    float_case(f"neg.{t}", t, (t,), operator.neg)
for t in ("f16", "f16x2"):
    float_case(f"add.sat.{t}", t, (t,) * 2, arithmetic("add", "f16", sat=True))
    float_case(f"mul.ftz.{t}", t, (t,) * 2, arithmetic("mul", "f16", ftz=True))
    float_case(f"fma.rn.ftz.sat.{t}", t, (t,) * 3, arithmetic("fma", "f16", ftz=True, sat=True))
for t in ("f32", "f64"):
    float_case(f"abs.{t}", t, (t,), lambda a: math.copysign(a, 1.0))
    float_case(f"neg.{t}", t, (t,), operator.neg)
    float_case(f"copysign.{t}", t, (t,) * 2, lambda a, b: math.copysign(b, a))
    for name, holds in {
        "finite": math.isfinite,
        "infinite": math.isinf,
        "number": lambda a: not math.isnan(a),
        "notanumber": math.isnan,
        "normal": lambda a, t=t: math.isfinite(a) and abs(a) >= 2.0 ** FORMATS[t][1],
        "subnormal": lambda a, t=t: 0 < abs(a) < 2.0 ** FORMATS[t][1],
    }.items():
        float_case(f"testp.{name}.{t}", "pred", (t,), holds)
for t in ("f16", "bf16"):  # mixed precision: 16 bits and a wide last operand, with one rounding
    for mode in ("rn", "rz", "rm", "rp"):
        float_case(f"fma.{mode}.f32.{t}", "f32", (t, t, "f32"), arithmetic("fma", "f32", mode))
        float_case(f"add.{mode}.f32.{t}", "f32", (t, "f32"), arithmetic("add", "f32", mode))
        float_case(f"sub.{mode}.f32.{t}", "f32", (t, "f32"), arithmetic("sub", "f32", mode))
for t in ("f32", "f64"):
    float_case(f"mov.{t}", t, (t,), lambda a: a)
    float_case(f"selp.{t}", t, (t, t, "pred"), lambda a, b, c: a if c else b)
for t in ("f16", "f16x2"):
    float_case(f"abs.ftz.{t}", t, (t,), lambda a: math.copysign(flushed(a, "f16"), 1.0))
    float_case(f"neg.ftz.{t}", t, (t,), lambda a: -flushed(a, "f16"))
for t in ("f16x2", "bf16x2"):
    float_case(f"set.lt.{t}.{t}", t, (t, t), lambda a, b: float(a < b))
for n in (32, 64):
    float_case(
        f"slct.ftz.b{n}.f32", f"u{n}", (f"b{n}", f"b{n}", "f32"), lambda a, b, c: a if flushed(c, "f32") >= 0 else b
    )
float_case("setp.gt.ftz.f16", "pred", ("f16", "f16"), lambda a, b: flushed(a, "f16") > flushed(b, "f16"))
float_case("abs.ftz.f32", "f32", ("f32",), lambda a: math.copysign(flushed(a, "f32"), 1.0))


def root(a: float, format_: str, mode: str) -> float:
    """The square root, from an integer's that is exact to within one part in 2^140."""
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    value = Fraction(a) * Fraction(4) ** 1300
    low = math.isqrt(value.numerator // value.denominator)
    exact = Fraction(low) if low * low == value else Fraction(2 * low + 1, 2)
    return rounded(exact / Fraction(2) ** 1300, format_, mode)


def extreme(
    pick: Callable[..., float], nan: bool = False, absolute: bool = False, xorsign: bool = False
) -> Callable[..., float]:
    def function(*operands: float) -> float:
        x = [abs(v) for v in operands] if absolute or xorsign else operands
        numbers = [v for v in x if not math.isnan(v)]
        if not numbers or (nan and len(numbers) < len(x)):
            return math.nan
        result = pick(numbers, key=lambda v: (v, math.copysign(1, v)))
        if xorsign:
            result = math.copysign(result, math.prod(math.copysign(1, v) for v in operands))
        return result

    return function


for pick in (min, max):
    name = pick.__name__
    for t in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
        float_case(f"{name}.{t}", t, (t, t), extreme(pick))
        if t != "f64":
            float_case(f"{name}.NaN.{t}", t, (t, t), extreme(pick, nan=True))
    float_case(f"{name}.f32 d, a, b, c;", "f32", ("f32",) * 3, extreme(pick))
    float_case(f"{name}.NaN.f32 d, a, b, c;", "f32", ("f32",) * 3, extreme(pick, nan=True))
    float_case(f"{name}.abs.f32 d, a, b, c;", "f32", ("f32",) * 3, extreme(pick, absolute=True))
    float_case(f"{name}.xorsign.abs.f32", "f32", ("f32",) * 2, extreme(pick, xorsign=True))
    float_case(
        f"{name}.ftz.f32", "f32", ("f32",) * 2, lambda a, b, p=pick: extreme(p)(flushed(a, "f32"), flushed(b, "f32"))
    )
ORDERED = {
    "eq": operator.eq,
    "ne": lambda a, b: a < b or a > b,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
for name, holds in ORDERED.items():
    for t in ("f32", "f64", "f16", "bf16"):
        float_case(f"setp.{name}.{t}", "pred", (t, t), holds)
        float_case(
            f"setp.{name}u.{t}", "pred", (t, t), lambda a, b, holds=holds: holds(a, b) or math.isnan(a) or math.isnan(b)
        )
    float_case(
        f"setp.{name}.xor.f32 d, a, b, c;",
        "pred",
        ("f32", "f32", "pred"),
        lambda a, b, c, holds=holds: holds(a, b) != bool(c),
    )
    float_case(
        f"setp.{name}.ftz.f32",
        "pred",
        ("f32", "f32"),
        lambda a, b, holds=holds: holds(flushed(a, "f32"), flushed(b, "f32")),
    )
    float_case(f"set.{name}.f32.f32", "f32", ("f32", "f32"), lambda a, b, holds=holds: float(holds(a, b)))
    float_case(f"set.{name}.f16x2.f16x2", "f16x2", ("f16x2", "f16x2"), lambda a, b, holds=holds: float(holds(a, b)))
for t in ("f32", "f64"):
    float_case(f"setp.num.{t}", "pred", (t, t), lambda a, b: not (math.isnan(a) or math.isnan(b)))
    float_case(f"setp.nan.{t}", "pred", (t, t), lambda a, b: math.isnan(a) or math.isnan(b))

# Conversions.
REALS = ("f16", "bf16", "f32", "f64")


def to_format(
    target: str, mode: str = "rn", relu: bool = False, satfinite: bool = False, ftz: bool = False, sat: bool = False
) -> Callable[[float], float]:
    def function(a: float) -> float:
        a = float(a)
        if ftz:
            a = flushed(a, "f32")
        result = a if a == 0 or not math.isfinite(a) else rounded(Fraction(a), target, mode)
        precision, _, most = FORMATS[target]
        if satfinite and math.isinf(result):
            result = math.copysign((2 - 2.0 ** (1 - precision)) * 2.0**most, result)
        if relu and not math.isnan(result):
            result = result if result > 0 else 0.0
        if sat:
            result = 0.0 if math.isnan(result) else min(max(result, 0.0), 1.0) if result != 0 else 0.0
        return flushed(result, target) if ftz and target == "f32" else result

    return function


for target, origin in itertools.product(REALS, REALS):
    if FORMATS[target][0] < FORMATS[origin][0] or FORMATS[target][2] < FORMATS[origin][2]:
        for mode in ("rn", "rz", "rm", "rp"):
            if "bf16" in (target, origin) and (mode not in ("rn", "rz") or origin != "f32"):
                continue
            float_case(f"cvt.{mode}.{target}.{origin}", target, (origin,), to_format(target, mode))
    elif target != origin:
        float_case(f"cvt.{target}.{origin}", target, (origin,), float)
for target in ("f16", "bf16"):
    for mode in ("rn", "rz"):
        float_case(f"cvt.{mode}.relu.{target}.f32", target, ("f32",), to_format(target, mode, relu=True))
        float_case(f"cvt.{mode}.satfinite.{target}.f32", target, ("f32",), to_format(target, mode, satfinite=True))
float_case("cvt.ftz.f64.f32", "f64", ("f32",), lambda a: flushed(a, "f32"))
float_case("cvt.rn.ftz.f32.f64", "f32", ("f64",), lambda a: flushed(to_format("f32")(a), "f32"))
float_case("cvt.sat.f32.f32", "f32", ("f32",), to_format("f32", sat=True))
INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
for mode, function in INTEGRAL.items():
    for t in ("f16", "f32", "f64"):
        float_case(
            f"cvt.{mode}.{t}.{t}",
            t,
            (t,),
            lambda a, f=function: math.copysign(float(f(a)), a) if math.isfinite(a) else a,
        )
        for target in INTEGERS:

            def to_integer(a: float, f: Any = function, target: str = target, origin: str = t) -> int:
                if math.isnan(a):  # PTX ISA 9.7.9.21: by the widths of both
                    wide = origin == "f64" or bits_of(target) == 64
                    return wrap(1 << (bits_of(target) - 1), target) if wide else 0
                return limits(target)[a > 0] if math.isinf(a) else saturate(f(a), target)

            float_case(f"cvt.{mode}.{target}.{t}", target, (t,), to_integer)
for origin, mode in itertools.product(INTEGERS, ("rn", "rz", "rm", "rp")):
    for target in ("f16", "f32", "f64"):
        float_case(
            f"cvt.{mode}.{target}.{origin}",
            target,
            (origin,),
            lambda a, t=target, m=mode: rounded(Fraction(a), t, m) if a else 0.0,
        )


@pytest.mark.parametrize(("text", "result", "operands", "function"), FLOAT_CASES, ids=[x[0] for x in FLOAT_CASES])
def test_float(text: str, result: str, operands: tuple[str, ...], function: Callable[..., float]) -> None:
    arrays = inputs_of(operands, 400)
    actual = execute(text, result, list(zip(operands, arrays, strict=True)))
    flat = [(x if x.dtype.kind in "iub" else x.astype(np.float64)).reshape(-1).tolist() for x in arrays]
    values = [function(*row) for row in zip(*flat, strict=True)]
    if result in INTEGERS or result == "pred":
        expected = np.array(values, actual.dtype)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            expected = np.array(values, np.float64).astype(actual.dtype)
    assert_same(actual, expected.reshape(actual.shape), text, arrays)


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("extra", ["", ".relu", ".satfinite"])
@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_convert_pairs(mode: str, extra: str, target: str) -> None:
    """cvt.rn.bf16x2.f32 d, a, b: a above b."""
    a, b = inputs_of(("f32", "f32"))
    actual = execute(f"cvt.{mode}{extra}.{target}x2.f32 d, a, b;", f"{target}x2", [("f32", a), ("f32", b)])
    function = to_format(target, mode, relu=extra == ".relu", satfinite=extra == ".satfinite")
    expected = np.array([[function(y), function(x)] for x, y in zip(a, b, strict=True)])
    assert_same(actual, expected, f"cvt.{mode}{extra}.{target}x2.f32", [a, b])


@pytest.mark.parametrize(("mode", "function"), [("rna", "rna"), ("rn", "rn"), ("rz", "rz")])
def test_convert_tf32(mode: str, function: str) -> None:
    FORMATS["tf32"] = (11, -126, 127)
    (a,) = inputs_of(("f32",))
    a = np.concatenate([a, random_floats(600)])
    actual = execute(f"cvt.{mode}.tf32.f32 d, a;", "b32", [("f32", a)]).view(np.float32)
    expected = np.array(
        [float(x) if x == 0 or not np.isfinite(x) else rounded(Fraction(float(x)), "tf32", function) for x in a]
    )
    assert_same(actual, expected, f"cvt.{mode}.tf32.f32", [a])


def decode_narrow(kind: str, code: int) -> float:
    """Numbers of 8, 6 and 4 bits, by the formulas of the OCP microscaling specification."""
    exponent_bits, mantissa_bits = {"e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}[
        kind
    ]
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent, mantissa = code >> mantissa_bits & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1)
    if kind == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if kind == "e4m3" and exponent == 15 and mantissa == 7:
        return math.nan
    bias = (1 << (exponent_bits - 1)) - 1
    scaled = mantissa / (1 << mantissa_bits)
    return sign * (2.0 ** (1 - bias) * scaled if exponent == 0 else 2.0 ** (exponent - bias) * (1 + scaled))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_convert_narrow(kind: str) -> None:
    width = {"e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}[kind]
    codes = np.arange(1 << width)
    values = np.array([decode_narrow(kind, c) for c in codes])
    step = width if width == 4 else 8
    packed = (codes | np.roll(codes, 1) << step).astype(np.uint16)
    open_, close = ("{ .reg .b8 n; .reg .b16 w; cvt.u8.u16 n, a; ", " }") if width == 4 else ("", "")
    source = "n" if width == 4 else "a"
    actual = execute(f"{open_}cvt.rn.f16x2.{kind}x2 d, {source};{close}", "f16x2", [("b16", packed)])
    assert_same(actual, np.stack([values, np.roll(values, 1)], 1), kind, [packed])
    # To the nearest, ties to the even code; too large ones to the largest finite one.
    code_of = {v: code for code, v in enumerate(values) if math.isfinite(v)}
    numbers = list(code_of)
    a = np.concatenate(
        [random_floats(500), np.array(numbers) * 1.03, (np.array(numbers) + np.roll(numbers, 1)) / 2]
    ).astype(F32)

    def nearest(x: float) -> float:
        top = max(numbers)
        x = min(max(x, -top), top)
        best = min(numbers, key=lambda v: (abs(Fraction(v) - Fraction(x)), code_of[v] % 2))
        return math.copysign(best, x)

    b = np.roll(a, 1)
    text = f"cvt.rn.satfinite.{kind}x2.f32"
    if width == 4:
        actual = execute(f"{{ .reg .b8 n; {text} n, a, b; cvt.u16.u8 d, n; }}", "b16", [("f32", a), ("f32", b)])
    else:
        actual = execute(f"{text} d, a, b;", "b16", [("f32", a), ("f32", b)])
    high, low = (np.array([decode_narrow(kind, int(c) >> s & ((1 << width) - 1)) for c in actual]) for s in (step, 0))
    assert_same(high, np.array([nearest(float(x)) for x in a]), text, [a])
    assert_same(low, np.array([nearest(float(x)) for x in b]), text, [b])


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_convert_powers(mode: str) -> None:
    """ue8m0: powers of two from 2^-127 on, and 255 for NaN."""
    a = np.abs(np.concatenate([random_floats(500), 2.0 ** np.arange(-126, 128), [math.nan, 3e38]])).astype(F32)
    b = np.roll(a, 7)
    text = f"cvt.{mode}.satfinite.ue8m0x2.f32 d, a, b;"
    actual = execute(text, "b16", [("f32", a), ("f32", b)])

    def code(x: float) -> int:
        if math.isnan(x):
            return 255
        exponent = math.frexp(x)[1] - 1
        return min(exponent + 127 + (mode == "rp" and x > 2.0**exponent), 254)

    np.testing.assert_array_equal(actual, [code(float(x)) << 8 | code(float(y)) for x, y in zip(a, b, strict=True)])
    codes = np.arange(256, dtype=np.uint16) | np.roll(np.arange(256, dtype=np.uint16), 1) << 8
    pairs = np.stack([b, a], 1).astype(BF16)
    actual = execute(f"cvt.{mode}.satfinite.ue8m0x2.bf16x2 d, a;", "b16", [("bf16x2", pairs)])
    halves_ = pairs.astype(F64)
    np.testing.assert_array_equal(actual, [code(y) << 8 | code(x) for x, y in halves_.tolist()])
    wide = execute("cvt.rn.bf16x2.ue8m0x2 d, a;", "bf16x2", [("b16", codes)])
    powers = np.array([2.0 ** (c - 127) for c in range(255)] + [math.nan])
    assert_same(wide, np.stack([powers, np.roll(powers, 1)], 1), "cvt.rn.bf16x2.ue8m0x2", [codes])


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_convert_halves_to_narrow(kind: str, relu: str) -> None:
    """From f16x2 the same as from f32, of which every f16 is one; relu makes what is negative +0."""
    half = np.clip(random_floats(512), -60000, 60000).astype(F16).reshape(-1, 2)
    actual = execute(f"cvt.rn.satfinite{relu}.{kind}x2.f16x2 d, a;", "b16", [("f16x2", half)])
    wide = half.astype(F32)
    if relu:
        wide = np.maximum(wide, 0)
    columns = [("f32", np.ascontiguousarray(wide[:, i])) for i in (1, 0)]
    np.testing.assert_array_equal(actual, execute(f"cvt.rn.satfinite.{kind}x2.f32 d, a, b;", "b16", columns))


def random_floats(count: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20, count)).astype(F32)


# Functions whose results PTX gives within errors (tables 9.7.3), relative beside absolute.
APPROXIMATIONS: list[tuple[str, str, Callable[[np.ndarray], np.ndarray], tuple[float, float], tuple[float, float]]] = [
    ("ex2.approx.f32", "f32", np.exp2, (0, 2**-22), (-126, 127)),
    ("ex2.approx.ftz.f32", "f32", np.exp2, (0, 2**-22), (-126, 127)),
    ("lg2.approx.f32", "f32", np.log2, (2**-22, 2**-22), (1e-30, 1e30)),
    ("lg2.approx.ftz.f32", "f32", np.log2, (2**-22, 2**-22), (0.5, 2)),
    ("rcp.approx.f32", "f32", np.reciprocal, (0, 2**-23), (1e-30, 1e30)),
    ("rcp.approx.ftz.f32", "f32", np.reciprocal, (0, 2**-23), (-8, -0.01)),
    ("rsqrt.approx.f32", "f32", lambda x: 1 / np.sqrt(x), (0, 2**-22.4), (1e-30, 1e30)),
    ("rsqrt.approx.ftz.f32", "f32", lambda x: 1 / np.sqrt(x), (0, 2**-22.4), (1e-3, 10)),
    ("sqrt.approx.f32", "f32", np.sqrt, (0, 2**-22.5), (1e-30, 1e30)),
    ("sqrt.approx.ftz.f32", "f32", np.sqrt, (0, 2**-22.5), (1e-3, 10)),
    ("sin.approx.f32", "f32", np.sin, (2**-20.5, 0), (-3.14, 3.14)),
    ("cos.approx.f32", "f32", np.cos, (2**-20.5, 0), (-3.14, 3.14)),
    ("tanh.approx.f32", "f32", np.tanh, (0, 2**-10.9), (-10, 10)),
    ("tanh.approx.f16", "f16", np.tanh, (0, 2**-10), (-4, 4)),
    ("tanh.approx.bf16x2", "bf16x2", np.tanh, (0, 2**-7), (-4, 4)),
    ("tanh.approx.bf16", "bf16", np.tanh, (0, 2**-7), (-4, 4)),
    ("tanh.approx.f16x2", "f16x2", np.tanh, (0, 2**-10), (-4, 4)),
    ("ex2.approx.ftz.bf16", "bf16", np.exp2, (0, 2**-7), (-100, 100)),
    ("rsqrt.approx.ftz.f64", "f64", lambda x: 1 / np.sqrt(x), (0, 2**-19), (1e-30, 1e30)),
    ("ex2.approx.f16", "f16", np.exp2, (0, 2**-9.9), (-13, 15)),
    ("ex2.approx.ftz.bf16x2", "bf16x2", np.exp2, (0, 2**-7), (-100, 100)),
    ("ex2.approx.f16x2", "f16x2", np.exp2, (0, 2**-9.9), (-13, 15)),
    ("rcp.approx.ftz.f64", "f64", np.reciprocal, (0, 2**-19), (1e-30, 1e30)),
    ("rsqrt.approx.f64", "f64", lambda x: 1 / np.sqrt(x), (0, 2**-31), (1e-30, 1e30)),
]


@pytest.mark.parametrize(
    ("text", "kind", "function", "tolerance", "interval"), APPROXIMATIONS, ids=[x[0] for x in APPROXIMATIONS]
)
def test_approximation(
    text: str, kind: str, function: Any, tolerance: tuple[float, float], interval: tuple[float, float]
) -> None:
    low, high = interval
    rng = np.random.default_rng(1)
    x = rng.uniform(low, high, 2000) if high / low < 1e10 else np.exp(rng.uniform(np.log(low), np.log(high), 2000))
    dtype = DTYPES[kind][0] if kind.endswith("x2") else DTYPES[kind]
    x = x.astype(dtype)
    x = x.reshape(-1, 2) if kind.endswith("x2") else x
    actual = execute(f"{text} d, a;", kind, [(kind, x)])
    assert_same(actual, function(x.astype(np.float64)), text, [x], tolerance)


@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_approximations_at_the_edges(ftz: str) -> None:
    """Of zeros, infinities, NaN and subnormal numbers (tables 9.7.3)."""
    tiny = 2.0**-130
    x = np.array([math.inf, -math.inf, math.nan, 0.0, -0.0, tiny, -tiny, 200.0, -200.0], F32)
    flush = bool(ftz)
    expected = {
        "ex2.approx": [math.inf, 0, math.nan, 1, 1, 1, 1, math.inf, 0],
        "lg2.approx": [
            math.inf,
            math.nan,
            math.nan,
            -math.inf,
            -math.inf,
            -math.inf if flush else -130,
            -math.inf if flush else math.nan,
        ],
        "rcp.approx": [0, -0.0, math.nan, math.inf, -math.inf, math.inf, -math.inf],
        "sqrt.approx": [math.inf, math.nan, math.nan, 0, -0.0, 0 if flush else 2.0**-65, -0.0 if flush else math.nan],
        "rsqrt.approx": [
            0,
            math.nan,
            math.nan,
            math.inf,
            -math.inf,
            math.inf if flush else 2.0**65,
            -math.inf if flush else math.nan,
        ],
    }
    for name, values in expected.items():
        actual = execute(f"{name}{ftz}.f32 d, a;", "f32", [("f32", x)])
        assert_same(actual[: len(values)], np.array(values), name + ftz, [x], (0, 2**-22))


@pytest.mark.parametrize("text", ["div.approx.f32", "div.full.f32", "div.approx.ftz.f32"])
def test_approximate_division(text: str) -> None:
    a, b = random_floats(1000), np.roll(random_floats(1000), 1)
    actual = execute(f"{text} d, a, b;", "f32", [("f32", a), ("f32", b)])
    assert_same(actual, a.astype(F64) / b.astype(F64), text, [a, b], (0, 2**-22))


def test_nan_is_canonical() -> None:
    """Results of f32 arithmetic that are NaN are 0x7fffffff, of f16 and bf16 0x7fff."""
    nan = np.array([0xFFC12345, 0x7F800001], np.uint32).view(F32)
    for text in ("add.f32 d, a, a;", "mul.f32 d, a, a;", "fma.rn.f32 d, a, a, a;", "max.f32 d, a, a;"):
        assert (execute(text, "b32", [("f32", nan)]) == 0x7FFFFFFF).all(), text
    for text in ("cvt.rn.f16.f32 d, a;", "cvt.rn.bf16.f32 d, a;"):
        assert (execute(text, "b16", [("f32", nan)]) == 0x7FFF).all(), text


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("name", ORDERED)
def test_comparison_of_pairs(kind: str, ftz: str, name: str) -> None:
    """A setp of packed numbers gives two predicates, of the lower and of the upper halves."""
    if ftz and kind == "bf16":
        with pytest.raises(ValueError, match="ftz"):
            execute(
                "setp.lt.ftz.bf16x2 q|ignored, a, b; mov.b32 d, 0;", "u32", [("bf16x2", np.zeros((1, 2), BF16))] * 2
            )
        return
    a, b = inputs_of((f"{kind}x2",) * 2)
    text = f"setp.{name}{ftz}.{kind}x2 q|ignored, a, b; selp.u32 d, 1, 0, q; @ignored or.b32 d, d, 2;"
    actual = execute(text, "u32", [(f"{kind}x2", a), (f"{kind}x2", b)])
    x, y = (v.astype(F64).tolist() for v in (a, b))
    flush = (lambda v: flushed(v, kind)) if ftz else float
    expected = [
        sum(int(ORDERED[name](flush(p[i]), flush(r[i]))) << i for i in (0, 1)) for p, r in zip(x, y, strict=True)
    ]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("name", "kind"), [("%clock", "u32"), ("%clock64", "u64"), ("%globaltimer", "u64")])
def test_time_goes_on(name: str, kind: str) -> None:
    bits = bits_of(kind)
    text = f".reg .b{bits} x, y; mov.{kind} x, {name}; mov.{kind} y, {name}; setp.gt.{kind} d, y, x;"
    assert execute(text, "pred", [("u32", np.zeros(32, np.uint32))]).all()


def test_special_registers_of_16_bits() -> None:
    actual = execute("mov.u16 d, %ntid.x;", "u16", [("u32", np.zeros(32, np.uint32))])
    np.testing.assert_array_equal(actual, 256)


def test_isspacep_and_cvta() -> None:
    """A generic address says which window it lies in, and conversions there and back change nothing."""
    text = """.shared .align 8 .b8 mine[64]; .local .align 8 .b8 own[64]; .reg .b64 x, y; .reg .pred s, l, g;
    mov.u64 x, mine; cvta.shared.u64 x, x; isspacep.shared s, x; isspacep.local l, x; isspacep.global g, x;
    selp.u32 d, 1, 0, s; @l or.b32 d, d, 2; @g or.b32 d, d, 4;
    cvta.local.u64 y, own; isspacep.shared s, y; isspacep.local l, y; isspacep.global g, y;
    @s or.b32 d, d, 8; @l or.b32 d, d, 16; @g or.b32 d, d, 32;
    isspacep.global g, a; @g or.b32 d, d, 64; isspacep.shared::cluster s, x; @s or.b32 d, d, 128;
    cvta.to.shared.u64 x, x; cvta.shared.u64 y, x; cvta.to.shared.u64 y, y; setp.eq.u64 g, x, y; @g or.b32 d, d, 256;"""
    actual = execute(text, "u32", [("u64", np.full(32, 0x7F0000000000, np.uint64))])
    assert (actual == 1 | 16 | 64 | 128 | 256).all()


@pytest.mark.parametrize(
    "text",
    [
        "add.s32.rn d, a, b;",
        "add.f8 d, a, b;",
        "frobnicate.u32 d, a, b;",
        "setp.lt.b32 q, a, b;",
        "lg2.f32 d, a;",
        "mul.u32 d, a, b;",
        "cvt.s32.f32 d, a;",
        "add.u32 d, a;",
    ],
)
def test_what_is_unknown_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PTX line"):
        execute(text, "u32", [("u32", np.zeros(1, np.uint32)), ("u32", np.zeros(1, np.uint32))])
