"""The functions that PyTorch calls, called as it calls them: from C++, with a mutex held."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from bfc.integrations import _torch

SOURCE = Path(__file__).with_suffix(".cpp")


def build(folder: Path) -> Path:
    """Compiles the part in C++."""
    made = folder / "harness.so"
    flags = ["-std=c++17", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, "-o", made, SOURCE], check=True)
    return made


class Harness:
    """`alloc` raises MemoryError with the text of the C++ exception."""

    def __init__(self, library: Path, pool: int | None = None) -> None:
        self.calls = ctypes.CDLL(str(library))
        self.calls_with_gil = ctypes.PyDLL(str(library))
        functions = ctypes.CDLL(_torch.__file__)
        alloc, free = "bfc_torch_alloc", "bfc_torch_free"
        if pool is not None:
            alloc, free = f"bfc_torch_pool_alloc_{pool}", f"bfc_torch_pool_free_{pool}"
        self._alloc = ctypes.cast(getattr(functions, alloc), ctypes.c_void_p)
        self._free = ctypes.cast(getattr(functions, free), ctypes.c_void_p)

    def alloc(self, nbytes: int, device: int = 0, stream: int = 0) -> int:
        ptr, text = ctypes.c_void_p(), ctypes.create_string_buffer(512)
        failed = self.calls.harness_alloc(
            self._alloc,
            ctypes.c_size_t(nbytes),
            device,
            ctypes.c_void_p(stream),
            ctypes.byref(ptr),
            text,
            ctypes.c_size_t(512),
        )
        if failed:
            raise MemoryError(text.value.decode())
        return ptr.value or 0

    def hammer(self, streams: list[int], *, rounds: int, seed: int) -> int:
        """A thread for each stream, all at once. How often one found another's bytes in its own."""
        return self.calls.harness_hammer(
            self._alloc,
            self._free,
            (ctypes.c_void_p * len(streams))(*streams),
            len(streams),
            rounds,
            ctypes.c_uint64(seed),
        )

    def free(self, ptr: int, device: int = 0, stream: int = 0, *, with_gil: bool = False) -> None:
        calls = self.calls_with_gil if with_gil else self.calls
        calls.harness_free(
            self._free, ctypes.c_void_p(ptr), ctypes.c_size_t(0), device, ctypes.c_void_p(stream)
        )

    def begin_pool(self, pool: tuple[int, int], captured: int, device: int = 0) -> None:
        """What torch.cuda.CUDAGraph does before it captures on a stream: from then on the pool gets
        what is allocated for the streams of that capture."""
        self._use("begin", device, *map(ctypes.c_ulonglong, pool), ctypes.c_void_p(captured))

    def end_pool(self, pool: tuple[int, int], device: int = 0) -> None:
        self._use("end", device, *map(ctypes.c_ulonglong, pool))

    def release_pool(self, pool: tuple[int, int], device: int = 0) -> None:
        """What the end of a CUDAGraph does, as a destructor."""
        self._use("release", device, *map(ctypes.c_ulonglong, pool))

    def empty_cache(self) -> None:
        """What torch.cuda.empty_cache() calls."""
        text = ctypes.create_string_buffer(512)
        function = ctypes.cast(ctypes.CDLL(_torch.__file__).bfc_torch_empty_cache, ctypes.c_void_p)
        if self.calls.harness_empty_cache(function, text, ctypes.c_size_t(512)):
            raise RuntimeError(text.value.decode())

    def _use(self, what: str, *arguments: object) -> None:
        functions = ctypes.CDLL(_torch.__file__)
        function = ctypes.cast(getattr(functions, f"bfc_torch_{what}_pool"), ctypes.c_void_p)
        text = ctypes.create_string_buffer(512)
        call = getattr(self.calls, f"harness_{what}_pool")
        if call(function, *arguments, text, ctypes.c_size_t(512)):
            raise RuntimeError(text.value.decode())
