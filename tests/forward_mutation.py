"""Faults planted in the forwards for tensor cores, one at a time: in the package's PTX, launched as its plan says.

    python tests/forward_mutation.py [NAME...] [--seeds 3] [--workers N] [--only REGEX]

The cases' names are those of `CASES`, all by default. Exits with 1 unless every fault is noticed with every seed or has
a reason that holds; docs/emulator.md describes the faults and the reasons.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import planned
from cases import Sizes

from jax_fa4 import native
from jax_fa4.emulated import Kernel, Run, mutation

BF16 = ml_dtypes.bfloat16
ROOT = Path(__file__).parent.parent
OPERANDS = ("query", "key", "value", "scale", "lower", "upper", "out", "lse", "lse_rounding")


@dataclasses.dataclass(frozen=True)
class Forward:
    """The kernels for a GPU: where their source is, the name of their PTX, and the GPU's compute capability."""

    source: str
    ptx: str
    capability: tuple[int, int]


BLACKWELL = Forward("csrc/sm100/forward.cu", "sm100_forward.sm_100f", (10, 0))
HOPPER = Forward("csrc/sm90/forward.cu", "sm90_forward.sm_90a", (9, 0))


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call, its launch, and what it is to give.

    Attributes:
      arrays: of the call, by name.
      launch: of its plan.
      ctas: that go through its tasks.
      out, lse: in float64.
      out_error, lse_error: allowed.
    """

    arrays: Mapping[str, np.ndarray]
    launch: Mapping[str, Any]
    ctas: int
    out: np.ndarray
    lse: np.ndarray
    out_error: float
    lse_error: float

    @classmethod
    def draw(
        cls,
        forward: Forward,
        sizes: Sizes,
        sees: tuple[int, int] | np.ndarray | None,
        out_dtype: Any,
        *,
        signs: tuple[int, ...] = (1,),
        ctas: int = 1,
    ) -> Problem:
        """Draws a problem.

        Args:
          forward: that is to solve it.
          sizes: of the call.
          sees: a band: row i sees keys [i + sees[0], i + sees[1]); or the first key that a row sees and the one behind
            the last, (B, T, 2), which the call has in arrays; None: all. What no row of a batch element sees is NaN.
          out_dtype: of out.
          signs: of the scales, one or one for each batch element.
          ctas: that are launched.
        """
        batch, rows, keys, heads, kv_heads, *widths = sizes
        rng = np.random.default_rng(0)
        q = rng.standard_normal((batch, rows, heads, widths[0]))
        k = rng.standard_normal((batch, keys, kv_heads, widths[0]))
        v = rng.standard_normal((batch, keys, kv_heads, widths[1]))
        # Row maxima grow from block to block, of which the last comes first: otherwise out would not be rescaled.
        k *= 2 + 2 * (keys // 128 - np.arange(keys) // 128)[:, None, None]
        # Those of every other row hardly do, so that all blocks tell.
        q[:, ::2] /= 32
        q, k, v = (x.astype(BF16) for x in (q, k, v))
        low, high = sees if isinstance(sees, tuple) else (-rows, keys)
        bounds = sees if isinstance(sees, np.ndarray) else np.arange(rows)[:, None] + [low, high]
        seen = (np.arange(keys) >= bounds[..., :1]) & (np.arange(keys) < bounds[..., 1:])
        seen = np.broadcast_to(seen, (batch, rows, keys))
        q64, k64, v64 = (np.repeat(x.astype(np.float64), heads // x.shape[2], 2) for x in (q, k, v))
        scale = np.float32(signs) * widths[0] ** -0.5
        products = np.einsum("bthd,bshd->bhts", q64, k64)
        logits = np.where(seen[:, None], products * scale[:, None, None, None], -np.inf)
        # A row that sees nothing has weights of 0, and an lse of -inf.
        top = np.where(seen.any(-1)[:, None, :, None], logits.max(-1, keepdims=True), 0)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = top + np.log(total)
        total[total == 0] = 1
        out = np.einsum("bhts,bshd->bthd", weights / total, v64)
        # Of bfloat16 probabilities, relative to maxima that are not the latest; and the output's rounding.
        rounded = np.einsum("bhts,bshd->bthd", weights.astype(BF16).astype(np.float64) / total, v64)
        unseen = ~seen.any(1)
        k[unseen], v[unseen] = np.nan, np.nan
        arrays = {
            "query": q,
            "key": k,
            "value": v,
            "scale": scale,
            **dict.fromkeys(("lower", "upper"), np.zeros(0, np.int32)),
            "out": np.zeros((batch, rows, heads, widths[1]), out_dtype),
            **dict.fromkeys(("lse", "lse_rounding"), np.zeros((batch, rows, heads), np.float32)),
        }
        if isinstance(sees, np.ndarray):
            arrays |= {"lower": sees[..., 0].astype(np.int32), "upper": sees[..., 1].astype(np.int32)}
        (launch,) = native.extension().forward_plan(
            forward.capability, 1, 126 << 20, [(x.dtype.name, list(x.shape)) for x in arrays.values()], low, high, 0
        )
        return cls(
            arrays,
            launch,
            ctas,
            out,
            np.moveaxis(lse, 1, 2)[..., 0],
            out_error=3 * abs(rounded - out).max() + 2**-9 * abs(out).max(),
            # Of exponentials by a polynomial, besides what sums in float32 cost.
            lse_error=1e-5 + 2**-20 * abs(top).max(),
        )

    def run(self, kernel: Kernel, seed: int) -> tuple[Run, str | None]:
        """Runs the kernel; says what is wrong with the result."""
        arrays = dict(self.arrays)
        for name in ("out", "lse", "lse_rounding"):
            arrays[name] = np.full_like(arrays[name], np.nan)
        for name in ("query", "key", "value", "scale", "lower", "upper"):
            arrays[name].flags.writeable = False
        run = planned.run(
            kernel, self.launch, arrays, grid=(self.ctas, 1, 1), seed=seed, max_instructions=MOST_INSTRUCTIONS
        )
        if run.reports:
            return run, run.reports[0].kind
        sees = np.isfinite(self.lse)
        lse, rounding = arrays["lse"], arrays["lse_rounding"]
        right = (
            abs(arrays["out"].astype(np.float64) - self.out).max() <= self.out_error
            and abs(lse[sees] - self.lse[sees]).max() <= self.lse_error
            and (abs(rounding[sees]) <= 2 * np.spacing(abs(lse[sees]))).all()
            and (lse[~sees] == -np.inf).all()
            and (rounding[~sees] == 0).all()
        )
        return run, None if right else "wrong result"


MOST_INSTRUCTIONS = 1 << 20

# Whose kernel, of which widths, and whether rows see bands.
CASES = {
    f"{name}_{'_'.join(map(str, dict.fromkeys(widths)))}_{'bounds' if has_bounds else 'full'}": (
        forward,
        widths,
        has_bounds,
    )
    for name, forward, compiled in (
        ("blackwell", BLACKWELL, ((128, 128), (192, 128))),
        ("hopper", HOPPER, ((64, 64), (128, 128), (192, 128))),
    )
    for widths in compiled
    for has_bounds in (False, True)
}


@functools.cache
def place_of(path: str, text: str, which: int = 0) -> str:
    """The place of the line of a source file that holds the text: of several, which of them."""
    source = ROOT / path
    lines = source.read_text().split("\n")
    return f"{source.name}:{[number for number, line in enumerate(lines, 1) if text in line][which]}"


def faults(name: str) -> list[mutation.Mutant]:
    return mutation.mutants(ptx(name), Path(CASES[name][0].source).name)


def reasons(name: str) -> dict[str, str]:
    """Why faults are not noticed."""
    forward, (width, _), has_bounds = CASES[name]
    no_fault = _no_fault_on_blackwell if forward is BLACKWELL else _no_fault_on_hopper
    return {
        mutant.name: f"equivalent: {why}" for mutant in faults(name) if (why := no_fault(mutant, width, has_bounds))
    }


def _no_fault_on_hopper(mutant: mutation.Mutant, width: int, has_bounds: bool) -> str | None:
    """Why a mutant is no fault, if it is none."""
    at = functools.partial(place_of, HOPPER.source)
    calls, place, fault = {*mutant.chain.split(", called at ")}, mutant.place, f"{mutant.kind}: {mutant.opcode}"
    no_wait = fault in ("never wait: mbarrier.try_wait.parity", "relax: mbarrier.try_wait.parity")

    if not has_bounds:
        initialised = place_of("csrc/sm90/barriers.h", "value_arrived.Init(1);")
        clears = initialised in calls or place == at("note.hull = hull;")
        if clears and mutant.kind != "count - 1":  # which makes an invalid barrier
            return "where all rows see all keys, no values are cleared"

    # ---- Products
    leading = mutant.kind in ("leading offset of A", "leading offset of B")
    if leading and place in (at("products.QueryKey(", 0), at("products.QueryKey(", 1)):
        return "K-major matrices with a swizzle do not use it"
    if leading and width == 64:
        return "it leads to further columns than 64, and V has none"
    if fault == "drop: wgmma.fence" and at("begin_values();", 0) in calls:
        return "nobody has used the registers since the fence before the product of query and key"

    # ---- Blocks that a warpgroup passes
    passes_first, passes_last = at("pass(note.blocks.end - blocks.end);"), at("pass(blocks.first - note.blocks.first);")
    if passes_first in calls and not has_bounds:
        return "where all rows see all keys, a warpgroup has no blocks before its own"
    if calls & {passes_first, passes_last}:
        if fault == "relax: mbarrier.try_wait.parity":
            return "it does not read the tile: who does, or passes it on the other side of its own blocks, tells of it"
        if fault == "relax: mbarrier.arrive":
            return "it has not read the tile, and that it has read the task's note is told where it gives back Q"
        # With one stage of Q it is loaded after a task's first keys.
        if no_wait and place == at("control.key[place.stage].full.Wait(") and (passes_last in calls or width == 192):
            return "what it waited for before was loaded after these keys, which others wait for too"
        if no_wait and width == 128 and not has_bounds:
            return "it is the second warpgroup: the turn that the first gave it tells that the stage is free"
        if no_wait and width == 64:
            return "of four stages its one is free: others are not that far behind, as their turns and their Q tell"

    # ---- Q, and word that there is no further task
    if no_wait and at("if (Variant::kQueryStages > 1) load_query(0);") in calls:
        return "there is room for the first Q"
    if at("if (Variant::kQueryStages == 1) load_query(count);") in calls:
        if at("LoadTile<kGroupRows, kShape.width>(") in calls:
            return "there is no task"
        if fault == "relax: mbarrier.try_wait.parity":
            return "nothing is loaded after it"
    if {at("barriers.full.Arrive();"), at("if (Variant::kQueryStages == 1) load_query(count);", 1)} <= calls:
        return "there is a task"
    of_later_block = {at("Release(query);"), at("weigh(kKind != Kind::kFull);")} <= calls
    if fault == "relax: mbarrier.arrive" and of_later_block and width == 128:
        return "V of the block before is given back after it, and Q is loaded only when that is known"
    if fault == "drop: st.shared" and place == at("if (leads) note = {};") and mutant.ordinal not in (3, 8):
        return "of a note without blocks nothing else is read"
    if fault == "relax: mbarrier.arrive.expect_tx":
        return "the completion of the copies tells of them, and of what the lane that issued them did before"

    # ---- Lanes, registers and named barriers
    if fault == "drop: bar.warp":
        return "the lanes of a warp execute together here: see docs/emulator.md on what it cannot prove"
    if fault == "next barrier: bar.sync" and place == at("__syncthreads();"):
        return "nobody uses the next one yet"
    if fault == "drop: bar.sync" and place == at("if (Variant::kTakesTurns && consumer == 0) Turn::Wait(0);"):
        return "nobody uses the barrier any more"
    if fault in ("drop: setmaxnreg.inc", "8 registers less: setmaxnreg.inc", "8 registers less: setmaxnreg.dec"):
        return "nobody knows here how many registers a thread uses: the build refuses roles that use too many"
    return None


def _no_fault_on_blackwell(mutant: mutation.Mutant, width: int, has_bounds: bool) -> str | None:
    """Why a mutant is no fault, if it is none."""
    at = functools.partial(place_of, BLACKWELL.source)
    calls, place, fault = mutant.chain.split(", called at "), mutant.place, f"{mutant.kind}: {mutant.opcode}"

    # ---- Products
    if place == at("products.QueryKey("):
        if mutant.kind in ("leading offset of A", "leading offset of B"):
            return "K-major matrices with a swizzle do not use it"
        # Beyond the panels of 64 columns that another follows, they would be of another tile.
        followed = mutant.ordinal <= (width // 64 - 1) * 4
        if mutant.kind == "N + 16" and at("query_key(0, place.stage, blocks.end - 1)") in calls and followed:
            return (
                "the columns behind S0 are those of S1, which is computed next; the rows behind K are its next columns"
            )

    # ---- Copies
    if fault == "relax: mbarrier.arrive.expect_tx":
        return "a consumer reads only what the copies wrote, and it is their completion that releases it"
    if fault == "invert: elect" and place == at("const bool leads = ptx::elect_sync();", 2):
        return "all other lanes store the same"
    no_wait = fault in ("never wait: mbarrier.try_wait.parity", "relax: mbarrier.try_wait.parity")
    if no_wait and place == at("q_load_empty.Wait(") and mutant.ordinal == 2 and width > 128:
        return "in the ring of two, keys have just taken the place of those that were the last to meet this Q"
    clears = place_of("csrc/common/shared_memory.h", "(values, 0, hull.begin")
    before_hull = {at("clear_unseen(memory.KeyValue(of_value.stage)"), clears}
    if fault == "drop: st.shared" and before_hull <= {*calls}:
        return "the hull begins in the last block that is gone through, which comes later"

    # ---- Between the correction warps and others
    known = "S, whose product comes behind the arrival at p_o_rescale, tells that row_scale was read"
    if no_wait and has_bounds and place == at("tile.softmax_corr_empty.Wait(", 0):
        return f"it makes the tiles take turns; {known}"
    if fault == "relax: mbarrier.arrive":
        first, turn, last = (
            at("control.tiles[0].softmax_corr_empty.Arrive()"),
            at("control.tiles[1 - stage].softmax_corr_empty.Arrive()"),
            at("control.tiles[1].softmax_corr_empty.Arrive()"),
        )
        # Where they write out, the sum of a row is handed on without another S. The second arrival on the line that is
        # unrolled is at p_o_rescale, to whose line the compiler does not return.
        unneeded = {(first, 1), (turn, 1)} | ({(turn, 3), (last, 1)} if has_bounds else set())
        if (place, mutant.ordinal) in unneeded:
            return known
        if place == at("control.tiles[0].p_o_rescale.Arrive()") and has_bounds:
            return "these warps have not touched O, which others read"
        if place == at("control.tiles[1].p_o_rescale.Arrive()"):
            return "the arrival for the first tile has told all that went before"

    # ---- Lanes and registers
    if fault == "drop: bar.warp":
        if place == at("__syncwarp();", 4):
            return "the lane that waits for the copies arrives too, behind its wait"
        return "the lanes of a warp execute together here: see docs/emulator.md on what it cannot prove"
    if fault == "next barrier: bar.sync" and place == at("__syncthreads();"):
        return "nobody uses the next one yet"
    if fault in ("drop: setmaxnreg.inc", "8 registers less: setmaxnreg.inc", "8 registers less: setmaxnreg.dec"):
        return "nobody knows here how many registers a thread uses: the build refuses roles that use too many"
    return None


def warpgroups_apart() -> np.ndarray:
    """Intervals of 440 keys for four times 400 rows, such that the warpgroups of a task, of 64 rows each, see others.

    For tasks of two warpgroups and for tasks of three there are some with blocks that only the first or another one
    sees, or none; that a warpgroup sees nothing of, or all of them; and that begin behind key 0 and end before the last
    key. In others the first warpgroup has less to do than the others, until it is the first to pass a block. What lies
    between keys that a task's rows see is seen by others, and so is not NaN.
    """
    high, low, both = (130, 220), (5, 100), (20, 220)
    groups = [
        [(330, 420), (20, 100), (100, 200), (90, 340), (390, 420), (210, 420), (100, 200)],
        [high, both, low, both, high, both, (5, 220)],
        [(0, 0), high, high, low, high, high, (90, 220)],
    ]
    first, *others = np.repeat(groups, 64, axis=1)[:, :400]
    row = np.arange(400)[:, None]
    band = np.where((row >= 3 * 64) & (row < 6 * 64), 0, np.clip(row + np.array([-30, 50]), 0, 440))
    return np.stack([first, band, *others])


@functools.cache
def ptx(name: str) -> str:
    return mutation.alone(native.ptx(CASES[name][0].ptx), f"forward_bfloat16_{name.partition('_')[2]}")


def case(name: str) -> mutation.Case:
    forward, widths, has_bounds = CASES[name]
    problems = [
        # Two packs of two heads: two tasks of each or more for the CTA, of which the rows end in one. Each goes through
        # three key blocks or more.
        Problem.draw(forward, Sizes(1, 200, 460, 4, 2, *widths), (10, 250) if has_bounds else None, BF16),
        # Two packs of 32 heads: tasks of one key block, or two, in which bands begin and end. Out is float32, which
        # takes another way out.
        Problem.draw(forward, Sizes(1, 8, 127, 64, 2, *widths), (5, 118) if has_bounds else None, np.float32),
    ]
    if forward is HOPPER:
        # Four batch elements, one with a negative scale; of the last tile only the first warpgroup has rows.
        keys, sees = (440, warpgroups_apart()) if has_bounds else (200, None)
        problems += [
            Problem.draw(forward, Sizes(4, 400, keys, 1, 1, *widths), sees, BF16, signs=(1, -1, 1, 1)),
            # Tasks of one key block.
            Problem.draw(
                forward, Sizes(4, 400, 40, 1, 1, *widths), (-370, 40) if has_bounds else None, BF16, signs=(-1,)
            ),
            # Only the first warpgroup has rows: if it does not wait for its turn, it is soon two turns ahead.
            Problem.draw(forward, Sizes(4, 16, 384, 1, 1, *widths), (0, 384) if has_bounds else None, BF16),
            # A CTA without a task.
            Problem.draw(forward, Sizes(1, 8, 40, 1, 1, *widths), (0, 8) if has_bounds else None, BF16, ctas=2),
        ]

    def try_out(kernel: Kernel, seed: int) -> str | None:
        # An arrival too many shows in most interleavings, not in all.
        runs = itertools.product(range(12 * seed, 12 * seed + 12), problems)
        return next((fault for one, problem in runs if (fault := problem.run(kernel, one)[1])), None)

    return mutation.Case(ptx(name), try_out, reasons(name), Path(forward.source).name)


def one_of_each_kind(one: mutation.Case, faults: Iterable[mutation.Mutant]) -> list[mutation.Mutant]:
    """Mutants without a reason: the first of each kind of fault and of instruction."""
    first: dict[tuple[str, str], mutation.Mutant] = {}
    for mutant in faults:
        if mutant.name not in one.reasons:
            first.setdefault((mutant.kind, mutant.opcode), mutant)
    return list(first.values())


def command(
    description: str | None,
    cases: Mapping[str, Any],
    case: Callable[[str], mutation.Case],
    faults: Callable[[str], Iterable[mutation.Mutant]],
) -> int:
    """The command; returns its exit status. `case` and `faults`: by a case's name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=list(cases), default=list(cases), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="of mutants' names")
    options = parser.parse_args()
    status = 0
    for name in options.names:
        print(f"{name}:", flush=True)
        one = case(name)
        chosen = {mutant.name for mutant in faults(name) if options.only.search(mutant.name)}
        known = {mutant: why for mutant, why in one.reasons.items() if mutant in chosen}
        one = dataclasses.replace(one, reasons=known)
        status |= mutation.study(one, options.seeds, options.workers, chosen.__contains__)
    return status


if __name__ == "__main__":
    sys.exit(command(__doc__, CASES, case, faults))
