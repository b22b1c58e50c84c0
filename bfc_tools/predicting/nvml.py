"""What NVML answers while a prediction runs. `pynvml` asks the driver, which is not there, and
programs that print how much memory is in use import it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.memory import Memory

if TYPE_CHECKING:
    from bfc_tools.predicting.recorder import Recorder

NAME = "pynvml"
#: What is answered with a text.
TEXTS = ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlDeviceGetUUID")
#: What `from pynvml import *` brings beside the methods of the module.
ALSO = (
    *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature"),
    *("nvmlDeviceGetPowerUsage", "NVMLError", "NVML_TEMPERATURE_GPU", *TEXTS),
)


class NVMLError(Exception):
    """What `pynvml` raises; the classes for each cause are this one, too."""


class Nvml(ModuleType):
    """In the place of `pynvml`: one device, which rests.

    Parameters
    ----------
    gpu : GPU
        The device.
    memory : Memory
        Its memory, and what is free of it.
    """

    def __init__(self, gpu: GPU, memory: Memory) -> None:
        super().__init__(NAME, self.__doc__)
        self.__spec__ = ModuleSpec(NAME, None)
        self.__all__ = [*(name for name in vars(Nvml) if name.startswith("nvml")), *ALSO]
        self._gpu, self._memory = gpu, memory

    def _used(self) -> int:
        return self._gpu.memory - self._memory.free_bytes

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802, as in NVML
        """One."""
        return 1

    def nvmlDeviceGetName(self, handle: Any) -> str:  # noqa: N802
        """As `torch.cuda.get_device_name` says it."""
        return self._gpu.name

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:  # noqa: N802
        """Such as (9, 0)."""
        return self._gpu.cc

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:  # noqa: N802
        """In bytes. The CUDA context is in use."""
        used, total = self._used(), self._gpu.memory
        return SimpleNamespace(total=total, free=total - used, used=used, reserved=0)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:  # noqa: N802
        """Nothing runs on it."""
        return SimpleNamespace(gpu=0, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:  # noqa: N802
        """This one alone."""
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=self._used())]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:  # noqa: N802
        """None."""
        return []

    def __getattr__(self, name: str) -> Any:
        unversioned = re.sub(r"_v\d+$", "", name)
        if unversioned != name:
            return getattr(self, unversioned)
        if name.startswith("nvml"):  # temperatures and the like, and what only begins or ends
            answer = "0" if name in TEXTS else 0
            return lambda *args, **kwargs: answer
        if name.startswith("NVMLError"):
            return NVMLError
        if name.startswith("NVML_"):
            return 0
        raise AttributeError(f"module {NAME!r} has no attribute {name!r}")


@contextlib.contextmanager
def answered(recorder: Recorder) -> Iterator[None]:
    """Imports of `pynvml` get this module, also where that is not installed."""
    before = sys.modules.get(NAME)
    sys.modules[NAME] = Nvml(recorder.gpu, recorder.memory)
    try:
        yield
    finally:
        del sys.modules[NAME]
        if before is not None:
            sys.modules[NAME] = before
