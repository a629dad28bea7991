"""Records the results of the cases on a GPU of compute capability 9.0.

    python tests/hopper/record.py --build FOLDER              # anywhere with NVRTC: compiles all kernels
    python tests/hopper/record.py --cubins FOLDER --out OUT   # on the GPU's machine: needs numpy and ml_dtypes only

Every case runs several times from machine code and from PTX, which the driver compiles; results that differ from run to
run, or between the two, are told and not recorded. OUT gets vectors.npz (to be committed beside this file), full*.npz
(all outputs whole) and record.json. A case that faults or hangs takes only its own process with it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hopper import cases, kernels

RUNS = 5
SECONDS_OF_CASE = 20
FULL_BYTES = 12 << 20  # of a full*.npz


def build(folder: Path) -> None:
    from nvrtc import compile_cubin, compile_ptx

    folder.mkdir(parents=True, exist_ok=True)
    sources = {case.kernel: case.source for _, case in cases.everything()}
    remarks = 0
    for name, source in sources.items():
        text = kernels.PRELUDE + source
        image, log = compile_cubin(text, "sm_90a")
        if log.strip("\0\n "):
            remarks += 1
            print(f"{name}: {log}")
        (folder / f"{name}.cubin").write_bytes(image)
        (folder / f"{name}.ptx").write_text(compile_ptx(text, "compute_90a").rstrip("\0"))
    print(f"{len(sources)} kernels, {remarks} with remarks")


# ---- The driver's interface (cuda.h), as far as it is needed. Of its functions these are what libcuda exports.


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("x", ctypes.c_uint),
        ("y", ctypes.c_uint),
        ("z", ctypes.c_uint),
        ("rest", ctypes.c_char * 52),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
MAP_TYPES = ("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16")
MAP_SWIZZLES = (0, 32, 64, 128)

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (ctypes.c_void_p,),
    "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
    "cuDeviceGetName": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (ctypes.c_void_p, ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p),
    "cuFuncSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemcpyHtoD_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t),
    "cuTensorMapEncodeTiled": (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_uint64,
        *(ctypes.c_void_p,) * 4,
        *(ctypes.c_int,) * 4,
    ),
    "cuLaunchKernelEx": (ctypes.c_void_p,) * 4,
}


class DriverError(RuntimeError):
    pass


class Driver:
    """Calls of libcuda by name, each of which is checked."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
        self("cuCtxSetCurrent", context)
        self._device = device.value
        self._functions: dict[str, ctypes.c_void_p] = {}

    def __call__(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.argtypes, function.restype = ARGUMENTS[name], ctypes.c_int
        status = function(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.c_void_p)
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'error').decode()} ({status})")

    def description(self) -> dict[str, Any]:
        name, version, numbers = ctypes.create_string_buffer(256), ctypes.c_int(), []
        self("cuDeviceGetName", name, 256, self._device)
        self("cuDriverGetVersion", ctypes.byref(version))
        for attribute in COMPUTE_CAPABILITY:
            number = ctypes.c_int()
            self("cuDeviceGetAttribute", ctypes.byref(number), attribute, self._device)
            numbers.append(number.value)
        kernel_module = Path("/proc/driver/nvidia/version")
        return {
            "device": name.value.decode(),
            "compute_capability": numbers,
            "cuda_of_driver": version.value,
            "driver": kernel_module.read_text().splitlines()[0] if kernel_module.exists() else "unknown",
        }

    def function(self, path: Path) -> ctypes.c_void_p:
        if str(path) not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self("cuModuleLoadData", ctypes.byref(module), path.read_bytes() + b"\0")
            self("cuModuleGetFunction", ctypes.byref(function), module, b"k")
            self._functions[str(path)] = function
        return self._functions[str(path)]


class Launch:
    """A case with its memory on the device."""

    def __init__(self, driver: Driver, case: cases.Case) -> None:
        self._driver, self._case = driver, case
        self._addresses: dict[int, int] = {}
        self._keep: list[Any] = []  # what the launch points to

    def run(self, function: ctypes.c_void_p, poison: int) -> list[np.ndarray]:
        outputs = [(output, output.buffer(poison)) for output in self._case.outputs()]
        for output, buffer in outputs:
            self._write(output, buffer)
        self._keep = []
        parameters = [self._parameter(x) for x in self._case.arguments]
        pointers = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(x) for x in parameters))
        shared = cases.BARRIERS + self._case.shared
        self._driver("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
        config = Config((self._case.grid, 1, 1), (self._case.block, 1, 1), shared)
        cluster = Attribute(CLUSTER_DIMENSION, b"", self._case.cluster, 1, 1)
        if self._case.cluster > 1:
            config.attributes, config.attribute_count = ctypes.pointer(cluster), 1
        self._driver("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self._driver("cuCtxSynchronize")
        for output, buffer in outputs:
            self._driver("cuMemcpyDtoH_v2", buffer.ctypes.data, self._addresses[id(output)], buffer.nbytes)
        return [buffer for _, buffer in outputs]

    def free(self) -> None:
        for address in self._addresses.values():
            self._driver("cuMemFree_v2", address)

    def _write(self, key: Any, array: np.ndarray) -> None:
        if id(key) not in self._addresses:
            address = ctypes.c_uint64()
            self._driver("cuMemAlloc_v2", ctypes.byref(address), array.nbytes)
            self._addresses[id(key)] = address.value
        self._driver("cuMemcpyHtoD_v2", self._addresses[id(key)], array.ctypes.data, array.nbytes)

    def _parameter(self, x: Any) -> Any:
        if isinstance(x, cases.Map):
            return self._tensor_map(x)
        if isinstance(x, cases.Output):
            return ctypes.c_uint64(self._addresses[id(x)])
        if isinstance(x, np.ndarray):
            array = np.ascontiguousarray(x)
            if id(x) not in self._addresses:
                self._write(x, array)
            return ctypes.c_uint64(self._addresses[id(x)])
        return ctypes.c_uint32(x)

    def _tensor_map(self, x: cases.Map) -> Any:
        address = self._parameter(x.of).value
        array = x.of.buffer(0) if isinstance(x.of, cases.Output) else np.ascontiguousarray(x.of)
        rank = array.ndim
        storage = (ctypes.c_char * 192)()
        self._keep.append(storage)
        encoded = (ctypes.c_char * 128).from_buffer(storage, -ctypes.addressof(storage) % 64)
        strides = tuple(reversed(array.strides))[1:]
        self._driver(
            "cuTensorMapEncodeTiled",
            ctypes.addressof(encoded),
            MAP_TYPES.index(array.dtype.name),
            rank,
            address,
            (ctypes.c_uint64 * rank)(*reversed(array.shape)),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*x.box),
            (ctypes.c_uint32 * rank)(*(1,) * rank),  # element strides
            0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
            MAP_SWIZZLES.index(x.swizzle),
            0,  # CU_TENSOR_MAP_L2_PROMOTION_NONE
            0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        )
        return encoded


def _same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True))


def record_case(driver: Driver, case: cases.Case, folder: Path) -> tuple[list[np.ndarray], list[str]]:
    """The outputs, and what speaks against them."""
    launch = Launch(driver, case)
    faults, first = [], None
    for form in ("cubin", "ptx"):
        function = driver.function(folder / f"{case.kernel}.{form}")
        for run in range(RUNS):
            outputs = launch.run(function, 0xCB if run % 2 == 0 else 0x34)
            if first is None:
                first = outputs
            elif not _same(first, outputs):
                faults.append(f"run {run} from {form} differs from the first")
    launch.free()
    assert first is not None
    return first, faults


def work(folder: Path, out: Path) -> None:
    """Records the cases whose names come in, one a line; a fault that the driver tells ends the process."""
    driver = Driver()
    print(json.dumps(driver.description()), flush=True)
    for line in sys.stdin:
        name = line.strip()
        try:
            outputs, faults = record_case(driver, cases.CASES[name](), folder)
        except DriverError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            sys.exit(1)
        np.savez(out / f"{list(cases.CASES).index(name)}.npz", *outputs)
        print(json.dumps({"faults": faults}), flush=True)


class Worker:
    """A process that records cases until one of them ends it."""

    def __init__(self, folder: Path, out: Path) -> None:
        command = [sys.executable, __file__, "--cubins", str(folder), "--out", str(out), "--worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.description = self._answer(60)

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return {"error": f"no end within {seconds} s"}
        return json.loads(line) if line else {"error": f"the process ended: {self._process.wait()}"}

    def record(self, name: str) -> dict[str, Any]:
        try:
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
        except OSError:
            return {"error": "the process has ended"}
        return self._answer(SECONDS_OF_CASE)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def record(folder: Path, out: Path) -> None:
    parts = out / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    start, worker, results = time.time(), None, {}
    for name in cases.CASES:
        if worker is None:
            worker = Worker(folder, parts)
            if "error" in worker.description:
                sys.exit(f"no GPU to record on: {worker.description['error']}")
            description = worker.description
        began = time.time()
        results[name] = worker.record(name) | {"seconds": round(time.time() - began, 2)}
        if "error" in results[name]:
            worker.end()
            worker = None
    if worker:
        worker.end()
    vectors: dict[str, np.ndarray] = {}
    full: list[dict[str, np.ndarray]] = [{}]
    for i, (name, case) in enumerate(cases.everything()):
        path = parts / f"{i}.npz"
        if not path.exists():
            continue
        with np.load(path) as stored:
            outputs = [stored[key] for key in stored.files]
        path.unlink()
        if sum(x.nbytes for x in (*full[-1].values(), *outputs)) > FULL_BYTES:
            full.append({})
        full[-1] |= {f"{name}|{j}": x.view(np.uint8) for j, x in enumerate(outputs)}
        if not results[name].get("faults"):
            vectors[f"{name}|inputs"] = case.inputs_digest()
            vectors |= {f"{name}|{key}": x for key, x in cases.condense(outputs, case.error is not None).items()}
    parts.rmdir()
    np.savez_compressed(out / "vectors.npz", **vectors)
    for i, arrays in enumerate(full):
        np.savez_compressed(out / f"full{i}.npz", **arrays)
    (out / "record.json").write_text(json.dumps(description | {"cases": results}, indent=1))
    print(json.dumps(description))
    families: dict[str, Counter[str]] = {}
    for name, result in results.items():
        state = "failed" if "error" in result else "doubtful" if result["faults"] else "recorded"
        families.setdefault(name.split("/")[0], Counter())[state] += 1
        if state != "recorded":
            print(f"{name}: {result}"[:300])
    for family, states in families.items():
        print(f"{family:16} " + ", ".join(f"{count} {state}" for state, count in states.items()))
    print(f"{sum(len(x) for x in families.values()) and len(results)} cases in {time.time() - start:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path)
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help="for the recorder's own processes")
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.build)
    elif arguments.worker:
        work(arguments.cubins, arguments.out)
    elif arguments.cubins and arguments.out:
        record(arguments.cubins, arguments.out)
    else:
        parser.error("--build FOLDER, or --cubins FOLDER and --out OUT")


if __name__ == "__main__":
    main()
