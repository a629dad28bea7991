from typing import Any

from typing_extensions import CapsuleType

def registrations() -> dict[str, dict[str, CapsuleType | dict[str, CapsuleType]]]: ...
def ffi_api_version() -> tuple[int, int]: ...

class PtxError(ValueError): ...

class Program:
    name: str
    target: str
    parameter_bytes: int
    parameters: list[tuple[str, int, int]]
    required_block: list[int]
    required_cluster: list[int]

class Trace:
    events: list[Any]
    missing: int
    def chrome_json(self) -> str: ...

class Result:
    reports: list[Any]
    instructions: int
    trace: Trace | None

def set_kernel_directory(path: str) -> None: ...
def set_unpacked(path: str, contents: bytes) -> None: ...
def kernel_builds() -> list[tuple[str, str]]: ...
def kernel_file(module: str, major: int, minor: int) -> str: ...
def cuda_driver_info() -> dict[str, Any]: ...
def backward_workspace_bytes(
    batch: int, rows: int, keys: int, heads: int, kv_heads: int, width: int, value_width: int, itemsize: int
) -> int: ...
def forward_plan(
    compute_capability: tuple[int, int],
    sm_count: int,
    l2_bytes: int,
    arrays: list[tuple[str, list[int]]],
    band_low: int,
    band_high: int,
    softcap: float,
) -> list[dict[str, Any]]: ...
def backward_plan(
    compute_capability: tuple[int, int],
    sm_count: int,
    l2_bytes: int,
    arrays: list[tuple[str, list[int]]],
    band_low: int,
    band_high: int,
    softcap: float,
    deterministic: bool,
) -> list[dict[str, Any]]: ...
def tensor_copy_plan(
    compute_capability: tuple[int, int], arrays: list[tuple[str, list[int]]]
) -> list[dict[str, Any]]: ...

class EmulatedLaunch:
    id: int
    module: str
    target: str
    kernel: str
    grid: list[int]
    cluster: list[int]
    block: list[int]
    dynamic_shared_bytes: int
    instructions: int
    reports: list[Any]
    trace: Trace | None

def plans_executed() -> int: ...
def next_emulated_launch() -> int: ...
def emulated_launches(first: int = 0) -> list[EmulatedLaunch]: ...
def emulator_runs_here() -> bool: ...
def emulator_load_tables(ex2: bytes, rcp: bytes) -> None: ...
def emulator_load(text: str, kernel: str = "") -> Program: ...
def emulator_encode_tensor_map(
    address: int, dtype: str, dims: list[int], strides: list[int], box: list[int], swizzle: int
) -> bytes: ...
def emulator_run(program: Program, **launch: Any) -> Result: ...
