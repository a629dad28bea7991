"""`python -m jax_fa4`: its exit status says whether all is well, whatever is wrong, and its own oracle is right."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import oracle
import pytest

import jax_fa4
from jax_fa4 import cuda, doctor, native, pallas, selftest

Captured = pytest.CaptureFixture[str]

WELL = "All is well: jax_fa4 gives right results on this machine."


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the checks, one of them with what only some rows have."""
    names = ("lengths, one of them 0", "soft cap")
    monkeypatch.setattr(doctor, "_CHECKS", [check for check in doctor._CHECKS if check.name in names])
    to_run, interprets = doctor._to_run, jax.default_backend() != "gpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # nothing is emulated

    def runs_here(check: doctor.Check) -> list[str]:
        return [name for name in to_run(check) if not (name == "pallas" and interprets)]

    monkeypatch.setattr(doctor, "_to_run", runs_here)


def number_of_checks() -> int:
    """With each implementation that this machine can choose from."""
    return sum(len(doctor._to_run(check)) for check in doctor._CHECKS)


@pytest.mark.slow
def test_all_is_well_here(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-P", "-m", "jax_fa4"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == WELL
    for check in doctor._CHECKS:
        assert f"  {check.name} ({check.dtype})" in ran.stdout


@pytest.mark.usefixtures("few_checks")
def test_the_report(capsys: Captured) -> None:
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == WELL
    assert any(line.startswith("Python ") and f"jax {jax.__version__}" in line for line in lines)
    assert any("sm80_forward for " in line for line in lines)
    for file in ("sm80_forward", "pallas.forward_kernel", "pallas.backward_kernels"):
        assert any(line.endswith(f" {file} on GPUs of compute capability 9.0") for line in lines)
    assert [name for name, _, _ in doctor._MODELS if not any(line.startswith(f"  {name} ") for line in lines)] == []
    assert sum("right  0." in line for line in lines) == number_of_checks()


def wrong_out(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return out.at[-1, -1, -1, -1].add(0.1), lse


def wrong_lse(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return out, lse * (1 + 1e-4)


def nan_out(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return out.at[0, 0, 0, 0].set(np.nan), lse


def wrong_gradient(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return out + 0.1 * (out - jax.lax.stop_gradient(out)), lse


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (wrong_out, "out is off by 0.1"),
        (nan_out, "out is off by inf"),
        (wrong_lse, "lse is off by"),
        (wrong_gradient, "the gradient of value is off by"),
    ],
)
def test_wrong_numbers(spoil: Any, says: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", [check for check in doctor._CHECKS if check.name == "soft cap"])
    to_run, interprets = doctor._to_run, jax.default_backend() != "gpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # nothing is emulated

    def runs_here(check: doctor.Check) -> list[str]:
        return [name for name in to_run(check) if not (name == "pallas" and interprets)]

    monkeypatch.setattr(doctor, "_to_run", runs_here)
    monkeypatch.setattr(doctor, "attention", lambda *a, **k: spoil(*jax_fa4.attention(*a, **k)))
    assert doctor.main() == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "WRONG" in printed
    assert f"is wrong in the check 'soft cap (float32)': {says}" in printed
    assert "is NOT well on this machine" in printed


@pytest.mark.usefixtures("few_checks")
def test_an_implementation_that_raises(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(doctor, "attention", broken)
    assert doctor.main() == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("RAISED RuntimeError: no such kernel") == number_of_checks()
    assert printed.endswith(f"jax_fa4 is NOT well on this machine: {number_of_checks()} problems, listed above.")


@pytest.mark.usefixtures("few_checks")
def test_a_missing_extension(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ImportError("The extension jax_fa4._native is not built.")

    monkeypatch.setattr(native, "extension", missing)
    monkeypatch.setattr(native, "why_not", lambda: "The extension jax_fa4._native is not built.")
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "extension: missing" in printed
    assert printed.count("right  0.") == number_of_checks()
    assert "1 problem, listed above." in printed


@pytest.mark.parametrize("can_emulate", [True, False])
def test_an_emulator_that_cannot_run(can_emulate: bool, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU may be too old for it, but nothing that is installed may be missing."""
    monkeypatch.setattr(doctor, "_CHECKS", [])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(doctor, "why_not", lambda *a, **k: "The tables are missing.")
    monkeypatch.setattr(native, "extension", lambda: SimpleNamespace(emulator_runs_here=lambda: can_emulate))
    problems = list(doctor._print_checks())
    assert "not emulated: The tables are missing." in capsys.readouterr().out
    assert problems == (["Something of the package is missing: The tables are missing."] if can_emulate else [])


KERNELS = [(x, "sm_80") for x in cuda.KERNELS]


def extension(**answers: Any) -> SimpleNamespace:
    """An extension on a machine with an H200, unless told otherwise."""
    gpu = {"name": "NVIDIA H200", "compute_capability": (9, 0), "memory_bytes": 2**37}
    driver = {"why_not": None, "cuda_version": (13, 0), "gpus": [gpu]} | answers.pop("driver", {})
    stub = {"ffi_api_version": (0, 3), "cuda_driver_info": driver, "kernel_builds": KERNELS} | answers
    functions = {name: (lambda answer=answer: answer) for name, answer in stub.items()}
    return SimpleNamespace(__file__="_native.so", **functions)


@pytest.mark.parametrize(
    ("answers", "platform", "printed", "problem"),
    [
        ({}, "gpu", "CUDA 13.0, NVIDIA H200 (compute capability 9.0)", None),
        ({}, "cpu", "JAX does not use these GPUs", None),
        ({"kernel_builds": [*KERNELS, ("new_forward", "sm_80")]}, "cpu", "seen:      new_forward on no GPU yet", None),
        ({"kernel_builds": []}, "cpu", "kernels:   none", "sm80_forward and sm80_backward are missing."),
        ({"kernel_builds": [("sm80_forward", "sm_80")]}, "cpu", "sm_80", "the kernels sm80_backward are missing."),
        ({"kernel_faults": ["The kernel file x is damaged."]}, "cpu", "sm_80", "The kernel file x is damaged."),
        ({"driver": {"why_not": "too old."}}, "cpu", "driver:    too old.", None),
        ({"driver": {"why_not": "too old."}}, "gpu", "driver:    too old.", "its driver cannot be used: too old."),
    ],
)
def test_the_installation(
    answers: dict[str, Any],
    platform: str,
    printed: str,
    problem: str | None,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(platform=platform, id=0, device_kind="some")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    faults = answers.get("kernel_faults", [])
    monkeypatch.setattr(native, "kernel_faults", lambda: faults)
    monkeypatch.setattr(native, "extension", lambda: extension(**answers))
    problems = list(doctor._print_installation())
    assert printed in capsys.readouterr().out
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


@pytest.mark.parametrize("check", [*doctor._CHECKS, doctor._EMULATED_CHECK], ids=lambda check: check.name)
def test_the_doctors_oracle(check: doctor.Check) -> None:
    rng = np.random.default_rng(0)
    shape = check.shape
    operands = [rng.standard_normal(x.shape).astype(x.dtype) for x in doctor._shapes(shape, check.dtype)]
    dout = rng.standard_normal((shape.batch, shape.rows, shape.heads, shape.value_width)).astype(operands[0].dtype)
    dlse = rng.standard_normal((shape.batch, shape.rows, shape.heads), np.float32)
    seen = doctor._visible(check)
    arguments = dict(zip(("query", "key", "value"), operands, strict=True)) | check.arguments
    assert (seen == oracle.visible(arguments)[:, 0]).all()
    cap, sinks = check.arguments.get("softcap"), check.arguments.get("sinks")
    got = selftest.exact(*operands, seen, (dout, dlse), cap, sinks)
    values, _ = oracle._values_and_spreads(oracle._Call.of(arguments, dout, dlse))
    got["scale"] = got["scale"].sum()
    for name, x in got.items():
        np.testing.assert_allclose(x, values[name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("fault", [None, "implementation='cuda' failed its self-test."])
@pytest.mark.parametrize("capability", ["9.0", "10.0", "7.5"])
def test_self_tests(capability: str, fault: str | None, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that has not been seen on the GPUs at hand is tested, once for GPUs of a kind."""
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability=capability)
    tested = []

    def test(_: Any, kernels: Any, *rest: Any) -> str | None:
        tested.append(kernels)
        return fault

    native.register()  # for the GPUs that there are
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu, gpu])
    monkeypatch.setattr(selftest, "fault", test)
    problems = list(doctor._print_self_tests())
    printed = capsys.readouterr().out
    modules = (cuda, pallas) if capability == "10.0" else ()
    unseen = [kernels for module in modules for _, kernels, *_ in module.unseen_kernels(gpu)]
    assert tested == unseen
    assert problems == [fault] * (len(unseen) if fault else 0)
    assert printed.count("WRONG" if fault else "right") == len(unseen)
    assert ("All kernels have been seen on GPUs like NVIDIA B200." in printed) == (capability == "9.0")
    for kernels in unseen:
        assert ", ".join(entry for _, entry in kernels) in printed

    monkeypatch.setenv(selftest.SWITCH, "0")
    assert list(doctor._print_self_tests()) == []
    assert tested == unseen
    assert (f"{len(unseen)} kernels are neither seen" in capsys.readouterr().out) == bool(unseen)


def test_self_tests_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extension those of `pallas`, and without the backend of Pallas neither."""
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA L4", compute_capability="8.9")
    tested = []
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(selftest, "fault", lambda one, *_: tested.append(one.implementation))
    monkeypatch.setattr(native, "why_not", lambda: "The extension jax_fa4._native is not built.")
    assert list(doctor._print_self_tests()) == []
    assert set(tested) == {"pallas"}
    tested.clear()
    monkeypatch.setattr("jax_fa4.pallas._missing", "implementation='pallas' needs what is gone.")
    assert list(doctor._print_self_tests()) == []
    assert tested == []


def test_the_exit_status_is_mains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "main", lambda: 7)
    for arguments, status in (([], 7), (["--help"], 0), (["cuda"], 2)):  # 2: what it does not know is not ignored
        monkeypatch.setattr(sys, "argv", ["jax_fa4", *arguments])
        with pytest.raises(SystemExit) as caught:
            runpy.run_module("jax_fa4", run_name="__main__")
        assert caught.value.code == status


def test_a_reader_that_has_read_enough() -> None:
    command = f"{sys.executable} -P -m jax_fa4 | head -c 1"
    ran = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("P", 1), ran.stderr
    assert "Traceback" not in ran.stderr
    assert "BrokenPipe" not in ran.stderr


def test_an_unclear_switch(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selftest.SWITCH, "off")
    assert list(doctor._print_self_tests()) == ["JAX_FA4_SELF_TEST in the environment must be 0 or 1, but got 'off'."]
    assert capsys.readouterr().out == ""


def test_no_device(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such platform")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert doctor.main() == 1
    assert capsys.readouterr().out == "JAX has no device here (JAX_PLATFORMS=cuda): no such platform\n"
