"""The compiled extension: loads it on first use and registers its XLA FFI targets with JAX.

Importing this module loads nothing, because the pure-JAX implementations must work where the extension
cannot. Whoever lowers an FFI call to one of its targets calls `register` first.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

_registration_lock = threading.Lock()
_registered = False


def extension() -> ModuleType:
    """The extension module, with its targets registered as by `register`."""
    register()
    import jax_fa4._native as module

    return module


@functools.cache
def emulator() -> ModuleType:
    """The extension module, ready to emulate: with the tables of the hardware's approximate functions loaded.

    Raises:
        ImportError: as `register`.
        RuntimeError: this CPU cannot run the emulator, or its files are missing or damaged.
    """
    module = extension()
    if not module.emulator_runs_here():
        raise RuntimeError("The emulator needs a CPU with AVX2 and FMA instructions, which this one does not have.")
    tables = Path(module.__file__ or "").parent / "emulator_tables"
    try:
        module.emulator_load_tables((tables / "ex2.gz").read_bytes(), (tables / "rcp.gz").read_bytes())
    except (OSError, ValueError) as error:
        raise RuntimeError(f"The emulator's tables in {tables} cannot be used: {error}") from error
    unpack(kernel_directory().glob("*.ptx.xz"))
    return module


def kernel_directory() -> Path:
    """Where the files of the package's kernels are."""
    import jax_fa4._native as module

    return Path(module.__file__).parent / "kernels"


def ptx(name: str) -> str:
    """The PTX of one of the package's kernel files, such as "sm90_forward.sm_90a"."""
    return _contents(kernel_directory() / f"{name}.ptx.xz").decode()


def kernel_faults() -> list[str]:
    """A sentence for each of the package's kernel files that cannot be used."""
    faults = []
    for file in sorted(kernel_directory().glob("*.xz")):
        try:
            _contents(file)
        except RuntimeError as error:
            faults.append(str(error))
    return faults


def unpack(files: Iterable[Path]) -> None:
    """Hands the extension what is in kernel files, before calls that use them run.

    Raises:
        RuntimeError: one cannot be used.
    """
    import jax_fa4._native as module

    for file in files:
        module.set_unpacked(str(file), _contents(file))


def _contents(file: Path) -> bytes:
    try:
        import lzma  # not every Python is built with it, and only kernels need it
    except ImportError as error:
        raise RuntimeError(f"The kernel file {file} cannot be unpacked: {error}.") from error
    try:
        return lzma.decompress(file.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise RuntimeError(f"The kernel file {file} cannot be used: {error}") from error


def _files_for_gpus() -> set[Path]:
    """What the kernels' calls load on the GPUs of this process."""
    try:
        gpus = jax.local_devices(backend="gpu")
    except RuntimeError:  # there is none
        return set()
    import jax_fa4._native as module

    capabilities = {str(getattr(gpu, "compute_capability", "")) for gpu in gpus}
    files = set()
    for capability, (name, _) in itertools.product(capabilities, module.kernel_builds()):
        # Another maker's GPU has none, and some kernels are for some GPUs only.
        with contextlib.suppress(ValueError, RuntimeError):
            files.add(Path(module.kernel_file(name, *map(int, capability.split(".")))))
    return files


@functools.cache
def why_not() -> str | None:
    """Why the extension cannot be loaded, as a sentence, or None."""
    try:
        register()
    except ImportError as error:
        return str(error)
    return None


def register() -> None:
    """Registers every FFI target of the extension with JAX, once per process, from any thread.

    Raises:
        ImportError: the extension is not installed, or cannot be loaded on this machine, or kernel files are damaged.
    """
    global _registered
    # Held while registering, so that no thread returns before the targets can be called.
    with _registration_lock:
        if _registered:
            return
        try:
            # In this form a missing extension is a ModuleNotFoundError that carries its name;
            # `from jax_fa4 import _native` would raise a bare ImportError for every cause alike.
            import jax_fa4._native as extension
        except ModuleNotFoundError as error:
            if error.name != "jax_fa4._native":
                raise
            raise ImportError(
                f"The extension jax_fa4._native is not built beside the imported package in {Path(__file__).parent}: "
                "install the package with `pip install .` or `pip install -e .`, and if that is done, "
                "start Python in a directory other than the source tree."
            ) from error
        extension.set_kernel_directory(str(kernel_directory()))
        try:
            unpack(_files_for_gpus())
        except RuntimeError as error:
            raise ImportError(str(error)) from error
        for platform, targets in extension.registrations().items():
            for name, handler in targets.items():
                _register(name, handler, platform)
        _registered = True


def _register(name: str, handler: Any, platform: str) -> None:
    try:
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    except jax.errors.JaxRuntimeError as error:
        raise ImportError(
            f"jaxlib {jaxlib.version.__version__} refuses the handlers of the extension jax_fa4._native, which was "
            f"compiled with another jaxlib's headers than `pip install .` takes: {error}"
        ) from error


@jax.jit
def _call_probe() -> jax.Array:
    return jax.ffi.ffi_call("jax_fa4_probe_v1", jax.ShapeDtypeStruct((2,), jnp.int32))()


def probe() -> tuple[int, int]:
    """Calls the extension through `jax.jit` on the CPU, as proof that the installed jaxlib accepts its handlers.

    Returns:
        The (major, minor) version of the XLA FFI API that the extension was compiled against.

    Raises:
        ImportError: as `register`.
        RuntimeError: JAX has no CPU backend in this process (for example JAX_PLATFORMS=cuda), or jaxlib refuses
            the handler because it was compiled against newer FFI headers than jaxlib's own.
    """
    register()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        major, minor = np.asarray(_call_probe()).tolist()
    return major, minor
