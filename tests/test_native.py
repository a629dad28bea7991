"""The compiled extension: its build, its registration with JAX, and a call through the XLA FFI."""

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

import jax_fa4._native as extension
from jax_fa4 import native


@pytest.fixture
def unregistered() -> ModuleType:
    """A second copy of jax_fa4.native that has not registered anything yet."""
    spec = importlib.util.spec_from_file_location("unregistered_native", native.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runtime_ffi_api_version() -> tuple[int, int]:
    """The FFI API version of the installed jaxlib, from the header it carries."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(re.search(rf"^#define XLA_FFI_API_{part} (\d+)$", header, re.MULTILINE)[1]) for part in ("MAJOR", "MINOR")
    )
    return major, minor


def test_probe_returns_the_compiled_api_version():
    assert native.probe() == extension.ffi_api_version()


def test_compiled_headers_are_not_newer_than_the_runtime():
    # jaxlib refuses a handler in the opposite case, and only when it is first called.
    compiled, runtime = extension.ffi_api_version(), runtime_ffi_api_version()
    assert compiled[0] == runtime[0]
    assert compiled[1] <= runtime[1]


def test_handler_error_names_target_result_and_shape():
    native.register()
    call = jax.jit(jax.ffi.ffi_call("jax_fa4_probe_v1", jax.ShapeDtypeStruct((2, 3), jnp.float32)))
    with (
        jax.default_device(jax.local_devices(backend="cpu")[0]),
        pytest.raises(
            jax.errors.JaxRuntimeError,
            match=re.escape("jax_fa4_probe_v1: the result `version` must be int32[2], not float32[2,3]"),
        ),
    ):
        jax.block_until_ready(call())


def test_every_target_name_carries_a_version():
    names = [name for targets in extension.registrations().values() for name in targets]
    assert names
    for name in names:
        assert re.fullmatch(r"jax_fa4_[a-z0-9_]+_v[1-9][0-9]*", name), name


def test_registering_again_registers_nothing(unregistered, monkeypatch):
    registered = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, platform: registered.append((platform, name)))
    unregistered.register()
    unregistered.register()
    assert registered == [(p, name) for p, targets in extension.registrations().items() for name in targets]


def test_threads_that_register_together_register_once(unregistered, monkeypatch):
    count = 8
    together = threading.Barrier(count)
    target_count = sum(len(targets) for targets in extension.registrations().values())
    registered = []
    seen_on_return = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, platform: registered.append((platform, name)))

    def register() -> None:
        together.wait(timeout=60)
        unregistered.register()
        seen_on_return.append(len(registered))

    threads = [threading.Thread(target=register) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    # Each thread comes back to a finished registration, not to one that another thread is still at.
    assert seen_on_return == [target_count] * count


def test_a_second_copy_may_register_the_same_handlers(unregistered):
    # As importlib.reload does: the same handler under the same name is not an error to JAX.
    native.register()
    assert unregistered.probe() == extension.ffi_api_version()


def test_missing_extension_says_how_to_install(unregistered, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_fa4._native", None)
    with pytest.raises(ImportError, match=r"_native is not built.*`pip install \.`.*`pip install -e \.`") as caught:
        unregistered.register()
    message = str(caught.value)
    assert "\n" not in message
    assert message.count(". ") == 0
    assert str(Path(native.__file__).parent) in message


def test_extension_that_cannot_load_keeps_its_own_error(unregistered, monkeypatch):
    class Unloadable:
        """Finds the extension, as a file that the dynamic linker refuses."""

        def find_spec(self, name, path=None, target=None):
            if name == "jax_fa4._native":
                raise ImportError("undefined symbol: PyUnicode_AsUTF8")

    monkeypatch.delitem(sys.modules, "jax_fa4._native")
    monkeypatch.setattr(sys, "meta_path", [Unloadable(), *sys.meta_path])
    with pytest.raises(ImportError, match="undefined symbol"):
        unregistered.register()


def test_importing_the_package_does_not_need_the_extension():
    script = "import sys; sys.modules['jax_fa4._native'] = None; import jax_fa4, jax_fa4.native"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_wheel_is_stable_abi_from_python_3_12_on():
    wheel = importlib.metadata.distribution("jax_fa4").read_text("WHEEL")
    assert wheel is not None
    tag = re.search(r"^Tag: (\S+)$", wheel, re.MULTILINE)[1]
    if sys.version_info >= (3, 12):
        assert tag.startswith("cp312-abi3-")
        assert extension.__file__.endswith("_native.abi3.so")
    else:
        assert tag.startswith("cp311-cp311-")
        assert extension.__file__.endswith("_native" + importlib.machinery.EXTENSION_SUFFIXES[0])
