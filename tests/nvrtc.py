"""Compiles CUDA C++ to PTX with NVRTC, from the wheel nvidia-cuda-nvrtc-cu12; needs no GPU and no CUDA toolkit."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata

_PACKAGE = "nvidia-cuda-nvrtc-cu12"


@functools.cache
def _library() -> ctypes.CDLL:
    files = importlib.metadata.files(_PACKAGE) or []
    paths = {file.name: str(file.locate()) for file in files}
    # NVRTC looks for its builtins by name only, where the loader would not find them: so they are loaded first.
    ctypes.CDLL(paths["libnvrtc-builtins.so.12.9"], mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(paths["libnvrtc.so.12"])


def _check(status: int) -> None:
    if status:
        _library().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {_library().nvrtcGetErrorString(status).decode()}.")


def _text(size_of: str, text_of: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(getattr(_library(), size_of)(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), text_of)(program, text))
    return text.value.decode()


def _compile(source: str, arch: str, options: tuple[str, ...]) -> ctypes.c_void_p:
    """A compiled program, which the caller destroys; raises RuntimeError with the compiler's messages."""
    library = _library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    arguments = [f"--gpu-architecture={arch}", "--std=c++17", "--generate-line-info", "--diag-suppress=177", *options]
    encoded = (ctypes.c_char_p * len(arguments))(*(x.encode() for x in arguments))
    if library.nvrtcCompileProgram(program, len(arguments), encoded):
        log = _text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
        library.nvrtcDestroyProgram(ctypes.byref(program))
        raise RuntimeError(log)
    return program


@functools.cache
def compile_ptx(source: str, arch: str = "compute_100a", options: tuple[str, ...] = ()) -> str:
    """The PTX of CUDA C++ text; raises RuntimeError with the compiler's messages.

    Args:
      source: the text. Kernels that are extern "C" keep their names.
      arch: of the PTX.
      options: of the compiler, besides.
    """
    program = _compile(source, arch, options)
    try:
        return _text("nvrtcGetPTXSize", "nvrtcGetPTX", program)
    finally:
        _library().nvrtcDestroyProgram(ctypes.byref(program))


def compile_cubin(source: str, arch: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """The machine code of CUDA C++ text for a GPU such as sm_90a, and what the compilers remarked on."""
    program = _compile(source, arch, options)
    try:
        size = ctypes.c_size_t()
        _check(_library().nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check(_library().nvrtcGetCUBIN(program, image))
        return image.raw, _text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
    finally:
        _library().nvrtcDestroyProgram(ctypes.byref(program))
