"""Faults planted in the backwards for tensor cores, one at a time: in the package's PTX, launched as its plan says.

    python tests/backward_mutation.py [NAME...] [--seeds 3] [--workers N] [--only REGEX]

The cases' names are those of `CASES`, all by default. Exits with 1 unless every fault is noticed with every seed or has
a reason that holds; docs/emulator.md describes the faults and the reasons.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys

import ml_dtypes
import numpy as np
import planned
import test_backward_rows
from cases import Sizes
from forward_mutation import command, place_of

from jax_fa4 import native
from jax_fa4.emulated import Kernel, mutation

BF16 = ml_dtypes.bfloat16
MOST_INSTRUCTIONS = 1 << 21
SCHEDULES = 12  # of a try: an arrival too many shows in most interleavings, not in all
RESULTS = test_backward_rows.RESULTS


@dataclasses.dataclass(frozen=True)
class Backward:
    """The kernels for a GPU: where their source is, their module and target, and the GPU's compute capability."""

    folder: str
    module: str
    target: str
    capability: tuple[int, int]


BLACKWELL = Backward("csrc/sm100", "sm100_backward", "sm_100f", (10, 0))
HOPPER = Backward("csrc/sm90", "sm90_backward", "sm_90a", (9, 0))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel, and what of it is tried.

    Attributes:
      backward: whose kernel.
      widths: that it is for.
      has_bounds: whether rows see intervals.
      in_order: only faults of what puts additions to sums in order, which no sum shows.
    """

    backward: Backward
    widths: tuple[int, int]
    has_bounds: bool
    in_order: bool

    @property
    def kernel(self) -> str:
        widths = "_".join(map(str, dict.fromkeys(self.widths)))
        return f"backward_bfloat16_{widths}_{'bounds' if self.has_bounds else 'full'}"


CASES = {
    subject.kernel.replace("backward_bfloat16", name) + ("_in_order" if in_order else ""): subject
    for name, backward in (("blackwell", BLACKWELL), ("hopper", HOPPER))
    for widths in ((64, 64), (128, 128), (192, 128))
    for has_bounds in (False, True)
    for in_order in (False, True)
    for subject in [Subject(backward, widths, has_bounds, in_order)]
}


@functools.cache
def _before(target: str) -> Kernel:
    return Kernel(native.ptx(f"backward_rows.{target}"), "before_bfloat16")


class Problem:
    """A call, its launch, and what it is to give.

    Attributes:
      arrays: of the call and its workspace, by name, as the kernel is to find them.
      launch: of its plan.
      expected: dquery's sums, dkey and dvalue in float64.
      allowed: errors of these.
      sees: which rows see something, (B, T).
    """

    def __init__(
        self,
        backward: Backward,
        sizes: Sizes,
        sees: tuple[int, int] | np.ndarray | None,
        *,
        deterministic: bool = False,
        signs: tuple[int, ...] = (1,),
    ) -> None:
        """Draws a problem.

        Args:
          backward: that is to solve it.
          sizes: of the call.
          sees: a band: row i sees keys [i + sees[0], i + sees[1]); or the first key that a row sees and the one behind
            the last, (B or 1, T, 2), which the call has in arrays; None: all. Rows that see nothing, and keys that no
            row of a batch element sees nor keys on both sides of them, are NaN.
          deterministic: whether additions to sums are in order.
          signs: of the scales, one or one for each batch element.
        """
        batch, rows, keys, heads, kv_heads, *widths = sizes
        group = heads // kv_heads
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(BF16)

        q, k = normal(batch, rows, heads, widths[0]), normal(batch, keys, kv_heads, widths[0])
        v, dout = normal(batch, keys, kv_heads, widths[1]), normal(batch, rows, heads, widths[1])
        dlse = rng.standard_normal((batch, rows, heads), np.float32)
        low, high = sees if isinstance(sees, tuple) else (-rows, keys)
        bounds = sees if isinstance(sees, np.ndarray) else np.arange(rows)[:, None] + [low, high]
        seen = (np.arange(keys) >= bounds[..., :1]) & (np.arange(keys) < bounds[..., 1:])
        seen = np.broadcast_to(seen, (batch, rows, keys))

        scale = np.float32(signs) * widths[0] ** -0.5
        q64, k64, v64, dout64 = (np.repeat(x.astype(np.float64), heads // x.shape[2], 2) for x in (q, k, v, dout))
        logits = np.einsum("bthd,bshd->bhts", q64, k64) * scale[:, None, None, None]
        logits = np.where(seen[:, None], logits, -np.inf)
        some = seen.any(-1)  # of rows
        # A row that sees nothing has weights of 0, and an lse of -inf.
        top = np.where(some[:, None, :, None], logits.max(-1, keepdims=True), 0)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = np.moveaxis(top + np.log(total), 1, 2)[..., 0]
        weights /= np.where(total == 0, 1, total)
        out = np.einsum("bhts,bshd->bthd", weights, v64).astype(BF16)
        rounding = np.where(some[..., None], lse, 0)
        rounding -= rounding.astype(np.float32)
        delta = np.moveaxis((out * dout64).sum(-1) - dlse, 1, 2)[..., None]
        dlogits = weights * (np.einsum("bthd,bshd->bhts", dout64, v64) - delta)

        def gradients(weights: np.ndarray, dlogits: np.ndarray) -> tuple[np.ndarray, ...]:
            """Sums of dquery, dkey and dvalue."""
            dkey = np.einsum("bhts,bthd->bshd", dlogits, q64) * scale[:, None, None, None]
            dvalue = np.einsum("bhts,bthd->bshd", weights, dout64)
            dkey, dvalue = (x.reshape(batch, keys, kv_heads, group, -1).sum(3) for x in (dkey, dvalue))
            return np.einsum("bhts,bshd->bthd", dlogits, k64), dkey, dvalue

        self.expected = gradients(weights, dlogits)
        # Of bfloat16 factors; of exponentials and of sums in float32; and the results' rounding.
        rounded = gradients(*(x.astype(BF16).astype(np.float64) for x in (weights, dlogits)))
        self.allowed = [
            3 * abs(one - other).max() + (2**-16 + (2**-9 if stored else 0)) * abs(one).max()
            for one, other, stored in zip(self.expected, rounded, (False, True, True), strict=True)
        ]

        # What must reach nothing.
        of_some = seen.any(1)
        hull = np.maximum.accumulate(of_some, 1) & np.maximum.accumulate(of_some[:, ::-1], 1)[:, ::-1]
        for x in (q, out, dout, dlse):
            x[~some] = np.nan
        k[~hull], v[~hull] = np.nan, np.nan
        has_arrays = isinstance(sees, np.ndarray)
        lower, upper = (
            np.ascontiguousarray(bounds[..., side], np.int32) if has_arrays else np.zeros(0, np.int32)
            for side in range(2)
        )
        arrays = {
            "query": q,
            "key": k,
            "value": v,
            "scale": scale,
            "lower": lower,
            "upper": upper,
            "out": out,
            "lse": lse.astype(np.float32),
            "lse_rounding": rounding.astype(np.float32),
            "dout": dout,
            "dlse": dlse,
        }
        for x in arrays.values():
            x.flags.writeable = False
        arrays |= {f"d{name}": np.full_like(arrays[name], np.nan) for name in ("query", "key", "value")}
        workspace = native.extension().backward_workspace_bytes(*sizes, 2)
        arrays |= {
            "dscale": np.full((batch, rows, heads), np.nan, np.float32),
            "workspace": np.full(workspace, 255, np.uint8),
        }
        given = [(arrays[name].dtype.name, [*arrays[name].shape]) for name in (*test_backward_rows.OPERANDS, *RESULTS)]
        before, self.launch, _ = native.extension().backward_plan(
            backward.capability, 1, 126 << 20, given, low, high, 0.0, deterministic
        )
        ran = planned.run(_before(backward.target), before, arrays)
        assert not ran.reports, ran.reports
        self.arrays = arrays
        self.sees = some
        self.row_block = next(iter(self.launch["tensor_maps"].values()))["box"][2]
        self.places = test_backward_rows.places(backward.target, self.row_block, widths[0])

    def run(self, kernel: Kernel, seed: int, no_sums: bool = False) -> str | None:
        """Runs the kernel; says what is wrong. `no_sums`: it does not add to dquery's."""
        arrays = self.arrays | {name: self.arrays[name].copy() for name in RESULTS}
        run = planned.run(kernel, self.launch, arrays, seed=seed, max_instructions=MOST_INSTRUCTIONS)
        if run.reports:
            return run.reports[0].kind
        sums = self.sums(arrays["workspace"])
        sums[~self.sees] = 0  # of what has reached them, nothing reaches dquery
        results = sums, arrays["dkey"], arrays["dvalue"]
        right = [
            abs(result.astype(np.float64) - expected).max() <= allowed
            for result, expected, allowed in zip(results, self.expected, self.allowed, strict=True)
        ]
        return None if all(right[no_sums:]) else "wrong result"

    def sums(self, workspace: np.ndarray) -> np.ndarray:
        """Of dquery, (B, T, N, D)."""
        at = 6 * 128 + 8 * test_backward_rows.ADDRESSES.index("dquery_sum")
        batch, rows, heads, width = self.arrays["query"].shape
        blocks = -(-rows // self.row_block)
        size = batch * heads * blocks * self.row_block * width * 4
        start = self.launch["addresses"][at][1]
        sums = workspace[start : start + size].view(np.float32).reshape(batch, heads, blocks, -1)
        sums = sums[..., self.places].reshape(batch, heads, blocks * self.row_block, width)
        return np.moveaxis(sums[:, :, :rows], 1, 2).copy()


@functools.cache
def ptx(name: str) -> str:
    subject = CASES[name]
    text = mutation.alone(native.ptx(f"{subject.backward.module}.{subject.backward.target}"), subject.kernel)
    if subject.in_order:
        # Copies in place of additions: without order they race.
        text = re.sub(r"\bcp\.reduce(\.async\.bulk\.\S+)\.add\.f32", r"cp\1", text)
    return text


def faults(name: str) -> list[mutation.Mutant]:
    mutants = mutation.mutants(ptx(name), "backward.cu")
    if not CASES[name].in_order:
        return mutants
    places = _places_of_order(CASES[name].backward)
    return [mutant for mutant in mutants if mutant.place in places]


def reasons(name: str) -> dict[str, str]:
    """Why faults are not noticed."""
    subject = CASES[name]
    no_fault = _no_fault_on_blackwell if subject.backward is BLACKWELL else _no_fault_on_hopper
    return {
        mutant.name: f"equivalent: {why}"
        for mutant in faults(name)
        if (why := _no_fault_of_order(subject, mutant) or no_fault(mutant, subject.widths[0], subject.has_bounds))
    }


def _no_fault_of_order(subject: Subject, mutant: mutation.Mutant) -> str | None:
    """Why a mutant of what puts additions to sums in order is no fault, if it is none."""
    if mutant.place not in _places_of_order(subject.backward):
        return None
    fault = f"{mutant.kind}: {mutant.opcode}"
    if fault == "drop: fence.proxy.async":
        return "it is the copy engine's additions that are in order, and the wait for them is enough here"
    # Hopper's next part of dQ goes where the one before is, which that wait is for too.
    waits = mutant.kind in ("drop", "one group more in flight") and subject.backward is BLACKWELL
    if not subject.in_order and ((waits and ".wait_group" in fault) or mutant.kind in ("relax", "wait for reads only")):
        return "it puts additions in order, of which cases of their own tell"
    return None


@functools.cache
def _places_of_order(backward: Backward) -> set[str]:
    at = functools.partial(place_of, f"{backward.folder}/backward.cu")
    return {
        at("ptx::ld_acquire_gpu_global("),
        at("ptx::cp_async_bulk_wait_group_0();"),
        at("ptx::red_release_gpu_global_add("),
        *(at("ptx::fence_proxy_async_all();", which) for which in range(2)),
    }


def _no_fault_on_blackwell(mutant: mutation.Mutant, width: int, has_bounds: bool) -> str | None:
    """Why a mutant is no fault, if it is none."""
    at = functools.partial(place_of, "csrc/sm100/backward.cu")
    calls, place, fault = {*mutant.chain.split(", called at ")}, mutant.place, f"{mutant.kind}: {mutant.opcode}"
    no_wait = fault in ("never wait: mbarrier.try_wait.parity", "relax: mbarrier.try_wait.parity")

    # ---- Products
    scores = {at("products.KeyQuery("), at("products.ValueDout(")}
    of_rest = width == 192 and place == at("products.DlogitsKey(") and (mutant.ordinal - 1) // 8 % 2 == 1
    if mutant.kind in ("leading offset of A", "leading offset of B") and place in scores:
        return "K-major matrices with a swizzle do not use it"
    if mutant.kind == "leading offset of B" and (width == 64 or of_rest):
        return "it leads to further columns than 64, of which there are none"
    if mutant.kind == "leading offset of A" and width == 192:
        return "it leads to further rows than 64, of which there are none"
    if mutant.kind == "N + 16":
        # Beyond the panels of 64 columns that another follows, they would be of another tile.
        if at("key_query();", 0) in calls and mutant.ordinal <= (width // 64 - 1) * 4:
            return "behind S is what will be computed later; the rows behind Q are its next columns"
        if place == at("products.ValueDout(") and width == 128 and at("value_dout();", 0) in calls:
            return "behind dP is dK, and behind dO is dS, and neither has been computed yet"
        if place == at("products.ValueDout(") and width == 192 and (mutant.ordinal - 1) % 8 < 4:
            return "behind dP is the place of dQ, which has been read; the rows behind dO are its next columns"
        if place == at("products.DlogitsKey(") and at("dlogits(add);", 0) in calls and (width == 64 or of_rest):
            return "nothing is behind these columns of dQ; and V is behind K, until dV takes its place"
        later = (mutant.ordinal - 1) % 8 > 0
        if place == at("products.DlogitsQuery(") and width == 64 and at("dlogits(add);", 1) in calls and later:
            return "behind dK are those columns of dS that the first two products have read; no other dP comes"

    # ---- Blocks of rows
    if no_wait and place == at("control.q_full[query.stage].Wait("):
        return "S is a product of what it waits for, and s_ready tells of S"
    waits_for_dq = {at("control.dq_empty.Wait(phase ^ 1);"), at("ptx::tcgen05_fence_after_thread_sync();", 0)}
    no_fence = fault == "drop: tcgen05.fence::after_thread_sync"
    if at("value_dout();", 0) in calls and place in waits_for_dq and (no_wait or no_fence):
        return "there is no dQ before the first dP"
    if no_wait and width != 128 and place == at("control.do_empty[dout.stage].Wait(", 0):
        return "of as many stages as Q has: the block's Q has come, for which Q of that stage was given back, after dO"
    last = {at("control.q_empty[query.stage].Wait(", 1), at("control.do_empty[dout.stage].Wait(", 1)}
    if no_wait and place in last:
        return "the CTA ends when dk_ready has told of all products"
    flips = fault == "flip parity: mbarrier.try_wait.parity" and mutant.ordinal == 2 and not has_bounds
    if flips and place == at("control.q_empty[query.stage].Wait(", 1):
        return "the phase before is complete, which is enough: the CTA ends when dk_ready has told of all products"
    if fault == "drop: bar.sync" and place == at("PieceBarrier::Empty(0).Wait();"):
        return "nobody uses the barrier any more"
    if fault == "relax: mbarrier.arrive.expect_tx":
        return "a consumer reads only what the copies wrote, and it is their completion that releases it"
    if fault == "invert: elect" and place == at("if (Warp() == warp && ptx::elect_sync()) {"):
        return "all other lanes store the same"

    # ---- Turns
    if fault == "invert: elect" and place == at("ptx::elect_sync()) AwaitTurn("):
        return "all other lanes wait, and the one that adds waits for them"

    # ---- Lanes and registers
    if fault == "next barrier: bar.sync" and place in (at("__syncthreads();", 0), at("StoreBarrier::Wait();")):
        return "nobody uses the next one, or not yet"
    if fault == "8 registers less: setmaxnreg.dec":
        return _OF_REGISTERS
    return _no_fault_of_lanes_or_registers(fault)


def _no_fault_on_hopper(mutant: mutation.Mutant, width: int, has_bounds: bool) -> str | None:
    """Why a mutant is no fault, if it is none."""
    at = functools.partial(place_of, "csrc/sm90/backward.cu")
    calls, place, fault = {*mutant.chain.split(", called at ")}, mutant.place, f"{mutant.kind}: {mutant.opcode}"
    no_wait = fault in ("never wait: mbarrier.try_wait.parity", "relax: mbarrier.try_wait.parity")

    # ---- Blocks of rows
    if fault == "invert: elect" and place == at("const bool leads = ptx::elect_sync();", 0):
        return "all other lanes store the same, and of their 31 arrivals the last leaves the parity that one does"
    if fault == "drop: st.shared" and at("write({Note::kEnd});") in calls and mutant.ordinal == 4:
        return "of the last note nothing but its kind is read"
    if no_wait and place == at("barriers.dout_empty.Wait("):
        return "there is word of the block since Q was given back, and dO was given back before"
    if fault == "relax: mbarrier.arrive" and at("Release(barriers.dout_empty);", 0) in calls:
        return "Q is given back after it, and dO is loaded only when that is known"
    if width != 192:
        if no_wait and place == at("control.weights_empty[weight_stage].Wait("):
            return "of two stages: both warpgroups have met since they read dS of the block before the last"
        if fault == "relax: mbarrier.arrive" and at("Release(control.weights_empty[weight_stage]);", 1) in calls:
            return "of two stages: both warpgroups meet before this one is written"
    if fault == "relax: mbarrier.arrive.expect_tx":
        return "the completion of the copies tells of them, and of what the lane that issued them did before"

    if not has_bounds and fault == "drop: st.shared" and place == at("control.task = {batch,") and mutant.ordinal == 3:
        return "where all rows see all keys, nobody asks where bounds are"

    # ---- Keys and rows that see nothing
    arrived = place_of("csrc/sm90/backward_memory.h", "arrived.Init(1);")
    if not has_bounds and arrived in calls and mutant.kind != "count - 1":  # which makes an invalid barrier
        return "where all rows see all keys, nothing is cleared"
    if fault == "relax: mbarrier.arrive" and place == at("if (leads) full.Arrive();", 0):
        return "nobody begins without Q, and its barrier tells of what was done before"
    if fault == "drop: fence.proxy.async" and place == at("ClearUnseen<kKeys, kColumns>(") and mutant.ordinal == 1:
        return "nobody begins without V, and the fence for it is one for K, too"

    # ---- Products
    if mutant.kind in ("leading offset of A", "leading offset of B"):
        scores = {at("roducts.KeyQuery(", which) for which in range(4)} | {at("products.ValueDout(")}
        if place in scores:
            return "K-major matrices with a swizzle do not use it"
        if width == 64 or place in {at(" products.WeightKey(", which) for which in range(3)}:
            return "it leads to further rows or columns than 64, of which there are none"
    if mutant.kind == "invert addition of D" and place == at("all_products.KeyQuery(s, 0, 0);") and mutant.ordinal == 1:
        return "what is added is 0 here: see docs/emulator.md on what it cannot prove"
    if fault == "drop: wgmma.commit_group" and mutant.ordinal == 2:
        if width == 64 and place == at("products.WeightDout(dvalue, p_t, stage, piece);"):
            return "the next group has its products, too, and the first that wait for dO to be given back"
        if width == 192 and place == at("ptx::wgmma_commit_group();", 2):
            return "the next group has its products, too, and both are waited for together"
    waits = fault in ("drop: wgmma.wait_group", "one group more in flight: wgmma.wait_group")
    if waits and place == at("ptx::wgmma_wait_group<1>();", 1):
        return "it is for dO to be given back, which is loaded only when Q is given back, too: behind another wait"
    if waits and place == at("ptx::wgmma_wait_group<0>();", 0):
        return "the wait for dQ comes before anybody needs dK"
    if fault == "drop: wgmma.fence" and place in {at("ptx::wgmma_fence();", which) for which in (2, 6, 7, 14, 15)}:
        return "nobody has used the registers since the fence before"

    # ---- Lanes and registers
    if fault == "next barrier: bar.sync" and place in {
        at("__syncthreads();"),
        *(at("SyncConsumers();", which) for which in (0, 5, 6)),
    }:
        return "nobody uses the next one, or not yet"
    if fault == "drop: bar.warp" and place == at("__syncwarp();", 4) and (width == 64 or not has_bounds):
        return None  # lanes are left behind
    return _no_fault_of_lanes_or_registers(fault)


_OF_REGISTERS = "nobody knows here how many registers a thread uses: the build refuses roles that use too many"


def _no_fault_of_lanes_or_registers(fault: str) -> str | None:
    """Why what is missing of synchronisation within a warp, or of registers, is no fault, if that is what it is."""
    if fault == "drop: bar.warp":
        return "the lanes of a warp execute together here: see docs/emulator.md on what it cannot prove"
    if fault in ("drop: setmaxnreg.inc", "8 registers less: setmaxnreg.inc"):
        return _OF_REGISTERS
    return None


def intervals() -> np.ndarray:
    """Intervals of 400 keys for twice 200 rows."""
    rng = np.random.default_rng(1)
    # The first and the last keys are seen by none; every fifth row or so sees none.
    low = rng.integers(20, 200, 200)
    high = np.where(rng.random(200) < 0.2, low, low + rng.integers(1, 100, 200))
    apart = np.repeat([[0, 0], [128, 400], [0, 390]], [64, 64, 72], axis=0)
    return np.stack([np.stack([low, high], 1), apart])


def case(name: str) -> mutation.Case:
    subject = CASES[name]
    draw = functools.partial(Problem, subject.backward)
    widths, has_bounds = subject.widths, subject.has_bounds
    problems = [
        # One block of rows, and of keys.
        draw(Sizes(1, 16, 24, 1, 1, *widths), (-3, 10) if has_bounds else None, deterministic=True),
        # Few rows of many heads.
        draw(Sizes(2, 40, 100, 5, 1, *widths), (5, 50) if has_bounds else None, signs=(1, -1)),
        # Blocks of rows that see blocks of keys wholly, in part, and not at all.
        draw(Sizes(1, 256, 300, 2, 2, *widths), (-256, 1) if has_bounds else None),
        # Several blocks of keys add to the same blocks of rows. A lane that is left behind shows in few turns of the
        # narrowest heads.
        draw(
            Sizes(2, 200, 400, 4 if widths[0] == 64 else 2, 1, *widths),
            intervals() if has_bounds else None,
            deterministic=True,
        ),
    ]
    if subject.in_order:
        del problems[:-1]

    def try_out(kernel: Kernel, seed: int) -> str | None:
        runs = itertools.product(range(SCHEDULES * seed, SCHEDULES * (seed + 1)), problems)
        return next((fault for one, problem in runs if (fault := problem.run(kernel, one, subject.in_order))), None)

    return mutation.Case(ptx(name), try_out, reasons(name), "backward.cu")


if __name__ == "__main__":
    sys.exit(command(__doc__, CASES, case, faults))
