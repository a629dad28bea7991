from typing import Any

from typing_extensions import CapsuleType

def registrations() -> dict[str, dict[str, CapsuleType]]: ...
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

def emulator_runs_here() -> bool: ...
def emulator_load_tables(ex2: bytes, rcp: bytes) -> None: ...
def emulator_load(text: str, kernel: str = "") -> Program: ...
def emulator_encode_tensor_map(
    address: int, dtype: str, dims: list[int], strides: list[int], box: list[int], swizzle: int
) -> bytes: ...
def emulator_run(program: Program, **launch: Any) -> Result: ...
