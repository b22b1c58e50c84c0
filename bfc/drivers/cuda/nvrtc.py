"""NVRTC, CUDA's compiler at run time."""

from __future__ import annotations

from typing import Any

from bfc.errors import DeviceUnavailableError


def compiled(text: str, arch: int) -> bytes:
    """Compiles a program for compute capability `arch` (90 for 9.0): to machine code, or to PTX if
    NVRTC is older than the device."""
    nvrtc = _nvrtc()
    error, known = nvrtc.nvrtcGetSupportedArchs()
    _check_nvrtc(error, "nvrtcGetSupportedArchs")
    older = [number for number in known if number <= arch]
    if not older:
        raise DeviceUnavailableError(
            f"this NVRTC compiles for compute capability {min(known) / 10} and later, and the "
            f"device has {arch / 10}: install an older one"
        )
    exact = arch in known
    target = f"sm_{arch}" if exact else f"compute_{max(older)}"
    return compiled_for(text, target)


def compiled_for(text: str, target: str) -> bytes:
    nvrtc = _nvrtc()
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), b"bfc_copy.cu", 0, [], [])
    _check_nvrtc(error, "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture={target}".encode()]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(error):
            length = nvrtc.nvrtcGetProgramLogSize(program)[1]
            log = b" " * length
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC does not compile the copy kernel:\n{log.decode()}")
        size, get = (
            (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
            if target.startswith("sm_")
            else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        image = bytes(size(program)[1])
        _check_nvrtc(get(program, image)[0], "nvrtcGetPTX")
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    """cuda-python's module of NVRTC's calls. Raises DeviceUnavailableError."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-python has a class of its own for a missing library
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DeviceUnavailableError(
            f"this copy compiles a kernel, and NVRTC was not found ({reason}): "
            f"{_nvrtc_to_install()}"
        ) from error
    return nvrtc


def _nvrtc_to_install() -> str:
    """What to install: NVRTC must match the CUDA version of cuda-bindings."""
    from importlib import metadata

    try:
        bindings = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        bindings = ""
    if bindings.startswith("12."):
        return "pip install 'nvidia-cuda-nvrtc-cu12==12.*', which 'bfc-allocator[cuda12]' brings"
    return "pip install 'nvidia-cuda-nvrtc==13.*', which 'bfc-allocator[cuda]' brings"


def _check_nvrtc(error: Any, name: str) -> None:
    if int(error):
        raise RuntimeError(f"{name}: {error}")
