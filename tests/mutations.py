"""Mutation run: plants one fault at a time in a copy of the installed package and demands that its tests notice.

    python tests/mutations.py [NAME...]    # all mutations, or those whose names contain one of the words

Fails if the tests named by a mutation pass in spite of it, or fail without it.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax_fa4


class Mutation(NamedTuple):
    """One fault: in `file` of the package, `old` (which stands there once) becomes `new`; `tests` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # for pytest's -k
    suite: str = "test_tiled.py"


MUTATIONS = [
    Mutation(
        "a key past the upper bound is visible",
        "tiled.py",
        "position < bounds[1][..., None]",
        "position <= bounds[1][..., None]",
        "test_odd_size",
    ),
    Mutation(
        "the key at the lower bound is hidden",
        "tiled.py",
        "position >= bounds[0][..., None]",
        "position > bounds[0][..., None]",
        "test_odd_size",
    ),
    Mutation(
        "the first key block is one too late",
        "tiled.py",
        "first = jnp.where(seen, lower, last_key).min() // size",
        "first = jnp.where(seen, lower, last_key).min() // size + 1",
        "test_block_boundary",
    ),
    Mutation(
        "a partial last key block is skipped",
        "tiled.py",
        "last = _ceil_div(jnp.where(seen, upper, 0).max(), size)",
        "last = jnp.where(seen, upper, 0).max() // size",
        "test_block_boundary",
    ),
    Mutation(
        "a block of which a row sees the end only needs no mask",
        "tiled.py",
        "_ceil_div(jnp.where(seen, lower, 0).max(), size)",
        "jnp.where(seen, lower, 0).max() // size",
        "TestSmallSteps",
    ),
    Mutation(
        "a block of which a row sees the start only needs no mask",
        "tiled.py",
        "jnp.where(seen, upper, last_key).min() // size",
        "_ceil_div(jnp.where(seen, upper, last_key).min(), size)",
        "TestSmallSteps",
    ),
    Mutation(
        "a batch element that sees nothing needs no mask",
        "tiled.py",
        "whole_last = jnp.where(seen.any(3).all(), whole_last, whole_first)",
        "",
        "(test_rows_that_see_nothing or test_unseen_values)",
    ),
    Mutation(
        "the gradient of lse is dropped",
        "tiled.py",
        "    if dlse is not None:\n        delta -=",
        "    if False:\n        delta -=",
        "test_unbatched",
    ),
    Mutation(
        "the rounding of lse is dropped",
        "tiled.py",
        "weights = jnp.exp(logits - e[..., None]) * r[..., None]",
        "weights = jnp.exp(logits - e[..., None])",
        "test_bias_of_one_large_number",
    ),
    Mutation(
        "query heads are split as G x K",
        "tiled.py",
        "x = x.reshape(*x.shape[:2], self.heads, self.group, *x.shape[3:])\n",
        "x = x.reshape(*x.shape[:2], self.group, self.heads, *x.shape[3:]).swapaxes(2, 3)\n",
        "test_odd_size",
    ),
    Mutation(
        "the key gradient is not scaled",
        "tiled.py",
        "jnp.swapaxes(dk * jnp.squeeze(piece.scale, 2), 2, 3)",
        "jnp.swapaxes(dk, 2, 3)",
        "test_unbatched",
    ),
    Mutation(
        "the gradient of scale is that of one row block",
        "tiled.py",
        "dscale.sum(0))",
        "dscale[0])",
        "test_scale",
    ),
    Mutation(
        "the backward ignores the mask",
        "tiled.py",
        "weights = jnp.where(visible, weights, 0)\n                    dlogits = jnp.where(visible, dlogits, 0)\n",
        "pass\n",
        "test_mask_shape",
    ),
    Mutation(
        "the slope of the soft cap is missing",
        "tiled.py",
        "dlogits = dlogits * slope",
        "dlogits = dlogits * 1",
        "test_data_under_a_soft_cap",
    ),
    Mutation(
        "the gradient of the bias has the slope of the soft cap",
        "tiled.py",
        "add_block(dbias, dlogits,",
        "add_block(dbias, dlogits * (1 if slope is None else slope),",
        "test_masks and bias and softcap",
    ),
    Mutation(
        "a bias of -inf does not hide",
        "tiled.py",
        "finite = bias != -jnp.inf",
        "finite = bias == bias",
        "test_rows_that_see_nothing",
    ),
    Mutation(
        "keys that no row sees are multiplied",
        "tiled.py",
        "return jnp.where(visible.any((2, 3))[..., None], x, 0)",
        "return x",
        "test_unseen_values",
    ),
    Mutation(
        "rows that see nothing are multiplied",
        "tiled.py",
        "jnp.where((rows_piece[2] != jnp.inf)[..., None], piece.query, 0)",
        "piece.query",
        "test_rows_that_see_nothing",
    ),
    Mutation(
        "cotangents of rows that see nothing are multiplied",
        "tiled.py",
        "dout = jnp.where(some[..., None], dout, 0)",
        "pass",
        "test_rows_that_see_nothing",
    ),
    Mutation(
        "lse of a row that sees nothing is finite",
        "tiled.py",
        "jnp.where(some, lse, -jnp.inf)",
        "jnp.where(some, lse, jnp.finfo(dtype).min)",
        "test_rows_that_see_nothing",
    ),
    Mutation(
        "out is not rescaled when the maximum grows",
        "tiled.py",
        "acc = acc * decay[..., None] +",
        "acc = acc +",
        "test_block_boundary",
    ),
    Mutation(
        "the row sum is not rescaled when the maximum grows",
        "tiled.py",
        "total = total * decay +",
        "total = total +",
        "test_block_boundary",
    ),
    Mutation(
        "a key length is off by one",
        "problem.py",
        "jnp.clip(key_lengths, 0, keys)",
        "jnp.clip(key_lengths + 1, 0, keys)",
        "test_masks and key_value_seq_lengths",
    ),
    Mutation(
        "a query length is off by one",
        "problem.py",
        "position < query_lengths[:, None]",
        "position <= query_lengths[:, None]",
        "test_masks and query_seq_lengths",
    ),
    Mutation(
        "a segment's keys are counted one too many",
        "problem.py",
        "(place < bound))",
        "(place <= bound))",
        "test_segments_in_any_order",
    ),
    Mutation(
        "a static lower bound that hides one key is dropped",
        "problem.py",
        "low = None if rows - 1 + low <= 0",
        "low = None if rows - 2 + low <= 0",
        "test_window_that_hides_almost_nothing",
    ),
    Mutation(
        "a static upper bound that hides one key is dropped",
        "problem.py",
        "high = None if high >= keys",
        "high = None if high >= keys - 1",
        "test_window_that_hides_almost_nothing",
    ),
    Mutation(
        "the left edge of a window is exclusive",
        "problem.py",
        "if left is None else diagonal(-left)",
        "if left is None else diagonal(-left + 1)",
        "test_masks and left",
    ),
    Mutation(
        "positions wrap around",
        "problem.py",
        "(jnp.minimum(x, most - part) if part > 0 else jnp.maximum(x, least - part))",
        "x",
        "test_positions_beyond_int32",
    ),
    Mutation(
        "the gradient of a bias stays in segment order",
        "autodiff.py",
        "bias = spec.permute(spec.permute(bias, row, 2), key, 3)",
        "pass",
        "test_masks and segments and bias",
    ),
    Mutation(
        "results stay in segment order",
        "autodiff.py",
        "results = jax.tree.map(lambda x: spec.permute(x, row, 1), results)",
        "pass",
        "test_segments_in_any_order",
    ),
    Mutation(
        "a sink takes part in rows that see nothing",
        "autodiff.py",
        "jnp.where(lse == -jnp.inf, 0, share)",
        "share",
        "test_rows_that_see_nothing",
        "test_reference.py",
    ),
    Mutation(
        "the rows' own logits repel a sink",
        "autodiff.py",
        "jnp.where(lse == -jnp.inf, 0, lse) - sinks",
        "jnp.where(lse == -jnp.inf, 0, -lse) - sinks",
        "test_sinks",
    ),
    Mutation(
        "the weights of 16-bit gradients are those without sinks",
        "autodiff.py",
        "return (out, total, rounding, dout, dlse), dsinks",
        "return (out, lse, lse_rounding, dout, dlse), dsinks",
        "test_sinks",
    ),
    Mutation(
        "the gradient of lse shrinks with the share that a sink leaves",
        "autodiff.py",
        "dlse = dlse / jnp.where(faint, 1, share).astype(dlse.dtype)",
        "dlse = dlse + 0 * share",
        "test_sinks",
    ),
    Mutation(
        "lse's gradient overflows where a sink leaves next to nothing",
        "autodiff.py",
        "faint = share < 2.0**-60",
        "faint = share < 0",
        "test_sinks",
    ),
    Mutation(
        "pallas: a key past the upper bound is visible",
        "pallas/tiling.py",
        "key < (self.keys if",
        "key <= (self.keys if",
        "test_odd_size",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: the key at the lower bound is hidden",
        "pallas/tiling.py",
        "seen & (key >= row.lower)",
        "seen & (key > row.lower)",
        "TestSmallBlocks and test_masks",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: the reference follows at the threshold",
        "pallas/forward_kernel.py",
        "keep = delta >= -THRESHOLD",
        "keep = delta > -THRESHOLD",
        "test_the_threshold",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: the output is not rescaled",
        "pallas/forward_kernel.py",
        "self.out * rescale[:, None] + dot",
        "self.out + dot",
        "test_the_worked_exercise",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: the sum of weights is not rescaled",
        "pallas/forward_kernel.py",
        "self.total * rescale + weights",
        "self.total + weights",
        "test_the_worked_exercise",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: the sign of the scale is lost",
        "pallas/forward_kernel.py",
        "query * jnp.sign(scale).astype(query.dtype)",
        "query",
        "test_scale and 0.7",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: rows that see nothing widen the hull",
        "pallas/tiling.py",
        "least = jnp.where(sees_some, rows.lower, self.keys).min()",
        "least = rows.lower.min()",
        "one_key_or_none",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: a block of which a row sees the end only needs no mask",
        "pallas/tiling.py",
        "_ceil_div(hull.greatest_lower, size)",
        "hull.greatest_lower // size",
        "TestSmallBlocks and test_masks",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: a block of which a row sees the start only needs no mask",
        "pallas/tiling.py",
        "hull.least_upper // size",
        "_ceil_div(hull.least_upper, size)",
        "TestSmallBlocks and test_masks",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: a partial last key block is skipped",
        "pallas/tiling.py",
        "partial = self.keys % self.blocks.keys > 0",
        "partial = False",
        "test_whole_rows",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: the first row block that sees a key block is skipped",
        "pallas/tiling.py",
        "jnp.clip(start - high + 1, 0,",
        "jnp.clip(start - high + 17, 0,",
        "TestSmallBlocks and test_masks",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: a row block of which some rows do not see all keys needs no mask",
        "pallas/tiling.py",
        "whole_first = _ceil_div(jnp.clip(end - high, 0, self.tokens) * self.group, size)",
        "whole_first = jnp.clip(end - high, 0, self.tokens) * self.group // size",
        "TestSmallBlocks and test_masks",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: row blocks after the first run of whole ones need no mask",
        "pallas/tiling.py",
        "~whole & (number > whole_first[..., None])",
        "~whole & (number > whole_first[..., None] + 1)",
        "TestSmallBlocks and (test_masks or forth)",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: a row block that sees one key of a block is skipped",
        "pallas/tiling.py",
        "return jnp.max(seen) > 0",
        "return jnp.max(seen) > 1",
        "one_key_or_none",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: keys outside of the hull are loaded",
        "pallas/tiling.py",
        "inside = None if hull is None else (key >= hull[0]) & (key < hull[1])",
        "inside = None",
        "test_unseen_values_do_not_matter",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: rows that see nothing are loaded",
        "pallas/backward_kernels.py",
        "some = lse != jnp.inf if masked else None",
        "some = None",
        "test_unseen_values_do_not_matter",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: lse has no rounding",
        "pallas/backward_kernels.py",
        "lse_rounding * np.float32(LOG2_E)",
        "jnp.zeros_like(lse)",
        "test_weights_of_a_large_lse",
        "test_pallas.py",
    ),
    Mutation(
        "pallas: the cotangent of lse has the wrong sign",
        "pallas/backward_kernels.py",
        "delta -= jnp.where",
        "delta += jnp.where",
        "test_odd_size",
        "test_pallas.py",
    ),
]


def run_tests(package: Path, tests: str, suite: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests up to the first failure with the package in the folder `package`."""
    here = Path(__file__).parent
    # -P: the working directory, whose package is not the mutated one, stays off the path.
    command = [sys.executable, "-P", "-m", "pytest", "-n0", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    command += [str(here / suite), "-k", tests]
    environment = os.environ | {"PYTHONPATH": str(package), "HYPOTHESIS_PROFILE": "quick"}
    return subprocess.run(command, cwd=here.parent, env=environment, capture_output=True, text=True, check=False)


def verdict(mutation: Mutation, scratch: Path) -> tuple[bool, str]:
    """Whether the tests noticed the fault, and what happened."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    path = folder / "jax_fa4" / mutation.file
    shutil.copytree(Path(jax_fa4.__file__).parent, folder / "jax_fa4")
    source = path.read_text()
    if (count := source.count(mutation.old)) != 1:
        return False, f"{mutation.old!r} stands {count} times in {mutation.file}, not once"
    path.write_text(source.replace(mutation.old, mutation.new))
    start = time.monotonic()
    result = run_tests(folder, mutation.tests, mutation.suite)
    lines = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    report = lines[0].split(" - ")[0] if lines else result.stdout[-300:] + result.stderr[-300:]
    # 1: a test failed. Anything else (an interpreter that cannot start, no such test) is no proof.
    return result.returncode == 1 and bool(lines), f"{report} ({time.monotonic() - start:.0f} s)"


def main() -> None:
    """Runs the mutations that the command line names."""
    words = sys.argv[1:]
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]
    bad = 0
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        controls = []
        for suite in sorted({mutation.suite for mutation in chosen}):
            tests = sorted({mutation.tests for mutation in chosen if mutation.suite == suite})
            untouched = " or ".join(f"({one})" for one in tests)
            controls.append(pool.submit(run_tests, Path(jax_fa4.__file__).parents[1], untouched, suite))
        for mutation, (noticed, report) in zip(
            chosen, pool.map(lambda mutation: verdict(mutation, Path(scratch)), chosen), strict=True
        ):
            bad += not noticed
            print(f"{'noticed ' if noticed else 'SURVIVED'} {mutation.name}: {report}", flush=True)
        for control in controls:
            if control.result().returncode:
                bad += 1
                print(f"The tests fail without a mutation:\n{control.result().stdout[-2000:]}")
    print(f"{len(chosen)} mutations, {bad} not noticed")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
