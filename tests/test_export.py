"""Programs that one process makes and another runs: exported, and compiled into JAX's persistent cache."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import oracle
import pytest

import jax_fa4
from jax_fa4 import CUSTOM_CALLS, attention

B, T, S, N, K, D = 2, 5, 7, 4, 2, 8


def operands() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The floats of a call and the cotangent of its output."""
    rng = np.random.default_rng(0)
    shapes = {"query": (B, T, N, D), "key": (B, S, K, D), "value": (B, S, K, D)}
    floats = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return floats, rng.standard_normal((B, T, N, D), np.float32)


def results(implementation: str | None, floats: Any, lengths: Any, dout: Any) -> dict[str, Any]:
    call = functools.partial(attention, is_causal=True, key_value_seq_lengths=lengths, implementation=implementation)
    out, pull = jax.vjp(lambda floats: call(**floats), floats)
    return {"out": out, **pull(dout)[0]}


def in_a_fresh_process(script: str, *arguments: Any, **environment: str) -> str:
    command = [sys.executable, "-P", "-c", script, *map(str, arguments)]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


LOAD = """
import sys, jax, numpy as np
from pathlib import Path
folder = Path(sys.argv[1])
arrays = dict(np.load(folder / "arrays.npz"))
dout, lengths = arrays.pop("dout"), arrays.pop("lengths")
for name in sys.argv[2:]:
    if name == "emulated":
        import jax_fa4
        jax_fa4.register_custom_calls()
        assert jax_fa4.why_not("emulated", *([np.ones((1, 1, 1, 1), np.float32)] * 3)) is None  # readies the emulator
    exported = jax.export.deserialize(bytearray((folder / name).read_bytes()))
    got = exported.call(arrays, lengths, dout)
    np.savez(folder / f"{name}.npz", **got)
    assert name == "emulated" or "jax_fa4" not in sys.modules
"""


def test_a_fresh_process_runs_an_exported_program(tmp_path: Path) -> None:
    """One without kernels needs nothing of this package; kernels have to be registered."""
    floats, dout = operands()
    lengths = np.array([S, S - 2], np.int32)
    np.savez(tmp_path / "arrays.npz", dout=dout, lengths=lengths, **floats)
    checks = [
        *jax_fa4.export_checks(),
        *map(
            jax.export.DisabledSafetyCheck.custom_call, ("jax_fa4_emulated_forward_v1", "jax_fa4_emulated_backward_v1")
        ),
    ]
    for name in ("automatic", "tiled", "emulated"):
        function = jax.jit(functools.partial(results, None if name == "automatic" else name))
        platforms = ["cpu", "cuda"] if name != "emulated" else ["cpu"]
        exported = jax.export.export(function, platforms=platforms, disabled_checks=checks)(floats, lengths, dout)
        (tmp_path / name).write_bytes(exported.serialize())
    in_a_fresh_process(LOAD, tmp_path, "automatic", "tiled", "emulated", JAX_PLATFORMS="cpu")
    arguments = floats | {"is_causal": True, "key_value_seq_lengths": lengths}
    want = oracle.expect(arguments, dout, np.zeros((B, T, N), np.float32))
    del want["lse"]
    for name in ("automatic", "tiled", "emulated"):
        oracle.check(np.load(tmp_path / f"{name}.npz"), want)


def test_export_checks_are_what_a_program_for_gpus_needs() -> None:
    """Each custom call has to be allowed, and no other is in the program."""
    floats, dout = operands()
    arguments = floats, np.array([S, S - 2], np.int32), dout
    function = jax.jit(functools.partial(results, "cuda"))
    export = functools.partial(jax.export.export, function, platforms=["cuda"])
    assert {check.is_custom_call() for check in jax_fa4.export_checks()} == set(CUSTOM_CALLS)
    module = export(disabled_checks=jax_fa4.export_checks())(*arguments).mlir_module()
    assert all(f"@{name}(" in module for name in CUSTOM_CALLS)
    for check in jax_fa4.export_checks():
        others = [other for other in jax_fa4.export_checks() if other != check]
        with pytest.raises(ValueError, match=str(check.is_custom_call())):
            export(disabled_checks=others)(*arguments)


def test_ahead_of_time() -> None:
    floats, dout = operands()
    arguments = floats, np.array([S, S - 2], np.int32), dout
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    function = jax.jit(functools.partial(results, "tiled"))
    jax.tree.map(np.testing.assert_array_equal, function.lower(*structs).compile()(*arguments), function(*arguments))


CACHE = """
import json, sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_fa4 import attention
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
x = np.random.default_rng(0).standard_normal((8, 5, 2, 8)).astype(np.float32)
found = {}
for cap in map(float, sys.argv[2:]):
    call = jax.jit(lambda x: jax.value_and_grad(lambda x: (attention(x, x, x, softcap=cap) ** 2).sum())(x)[1])
    for kind in (None, AxisType.Auto, AxisType.Explicit):
        mesh = None if kind is None else jax.make_mesh((8,), ("b",), (kind,))
        placed = x if mesh is None else jax.device_put(x, NamedSharding(mesh, P("b")))
        compiled = call.lower(placed)
        events.clear()
        out = np.asarray(compiled.compile()(placed))
        found[f"{cap} {kind and kind.name}"] = [events.count("cache_hits"), events.count("cache_misses"), out.tolist()]
print(json.dumps(found))
"""


def test_the_persistent_cache_hits_across_processes(tmp_path: Path) -> None:
    """On one device, and on several of either kind of axes; and never for a call that computes something else."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

    def run(*caps: float) -> dict[str, Any]:
        return json.loads(in_a_fresh_process(CACHE, tmp_path, *caps, JAX_PLATFORMS="cpu", XLA_FLAGS=flags))

    first, second = run(2.0), run(2.0, 0.5)
    assert all(hits == 0 and misses >= 1 for hits, misses, _ in first.values()), first
    for name, (hits, misses, out) in second.items():
        if name in first:
            assert (hits >= 1, misses) == (True, 0), name
            assert out == first[name][2]
        else:
            assert (hits, misses >= 1) == (0, True), name
            whole = np.array(second["0.5 None"][2])
            # Rounded alike, but for the order of sums over blocks, which depends on the batch of a device.
            np.testing.assert_allclose(out, whole, rtol=0, atol=16 * np.finfo(np.float32).eps * np.abs(whole).max())
    assert np.abs(np.subtract(second["0.5 None"][2], second["2.0 None"][2])).max() > 1e-2
