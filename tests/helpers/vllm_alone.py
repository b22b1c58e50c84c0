"""The parts of vLLM that put memory to sleep, without the rest, which needs a GPU to be installed.

`stand_in(FOLDER, COMPILED)` makes `import vllm` find the files in a folder of vLLM's source, with
stand-ins for what these files import, and none of vLLM's own imports at the start. `give_view` has
our allocator show its books in the form of vLLM's, which its tests look into.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from bfc.allocators._tagged import kept_contents

#: Packages whose own files are found, but not what they import first.
PACKAGES = (
    *("vllm", "vllm.utils", "vllm.distributed", "vllm.distributed.device_communicators"),
    *("vllm.compilation", "vllm.config", "vllm.v1", "vllm.v1.worker"),
)


class Anything(ModuleType):
    """A module of which each name is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


def module(name: str, kind: type[ModuleType] = ModuleType, **members: Any) -> ModuleType:
    made = sys.modules[name] = kind(name)
    vars(made).update(members)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, made)
    return made


def loaded_library(name: str) -> str | None:
    """The file of a library in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return next((path for path in paths if Path(path).name.startswith(name)), None)


class Runtime:
    """The calls of the runtime that sleep makes, by the driver's: ours has not all that vLLM's
    wrapper looks for."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(loaded_library("libcuda.so"))

    def cudaMemcpy(self, to: int, origin: int, nbytes: int) -> None:  # noqa: N802
        words = ctypes.c_void_p(to), ctypes.c_void_p(origin), ctypes.c_size_t(nbytes)
        assert self.driver.cuMemcpy(*words) == 0

    def cudaMemset(self, to: int, value: int, nbytes: int) -> None:  # noqa: N802
        words = ctypes.c_void_p(to), ctypes.c_ubyte(value), ctypes.c_size_t(nbytes)
        assert self.driver.cuMemsetD8_v2(*words) == 0


def stand_in(folder: Path, compiled: Path) -> None:
    for name in PACKAGES:
        module(name, __path__=[str(folder / name.replace(".", "/"))])
    vars(sys.modules["vllm"]).update(LLM=None, SamplingParams=None)
    module("vllm.envs", Anything)
    module("vllm.logger", init_logger=logging.getLogger)
    sys.modules["vllm.config"].VllmConfig = object  # type: ignore[attr-defined]
    module("vllm.config.model", ModelConfig=type("ModelConfig", (), {"__post_init__": None}))
    platform = SimpleNamespace(
        device_type="cuda",
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        graph_pool_handle=torch.cuda.graph_pool_handle,
    )
    module("vllm.platforms", current_platform=platform)
    module("vllm.utils.torch_utils", PIN_MEMORY=True)
    module("vllm.utils.system_utils", find_loaded_library=loaded_library)
    module("vllm.distributed.device_communicators.cuda_wrapper", CudaRTLibrary=Runtime)
    module("vllm.distributed.device_communicators.pynccl", PyNcclCommunicator=object)
    module("vllm.v1.worker.ubatching", dbo_current_ubatch_id=lambda: 0)
    module("vllm.utils.nccl", Anything)
    spec = importlib.util.spec_from_file_location("vllm.cumem_allocator", compiled)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    sys.modules["vllm.cumem_allocator"] = made
    module("tests", __path__=[str(folder / "tests")])
    module("tests.utils", create_new_process_for_each_test=lambda _: in_a_fork)


def in_a_fork(test: Callable[..., None]) -> Callable[..., None]:
    """What vLLM's tests are decorated with."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 0
            try:
                test(*arguments, **named)
            except BaseException:
                os.write(writer, traceback.format_exc()[-4000:].encode())
                code = 1
            os._exit(code)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            said = file.read().decode()
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == 0, said or f"RuntimeError: the test ended with {ended}"

    return run


def give_view() -> None:
    """Gives our allocator vLLM's list of what it has: by address, a handle whose second field is
    the number of bytes, a tag, whether it sleeps, and what of it is kept. Also the tag that is
    open, and for each tag a list as long as it was entered often: vLLM has a pool for each time."""
    import bfc
    from bfc.integrations import _by_tag
    from bfc.integrations.vllm import Allocator

    enters, entered = Allocator.use_memory_pool, dict[str, list[None]]()

    def use_memory_pool(allocator: Allocator, tag: str | None = None) -> Any:
        entered.setdefault(tag or allocator.default_tag, []).append(None)
        return enters(allocator, tag)

    def current_tag(allocator: Allocator) -> str:
        scopes = _by_tag._scopes.get()
        return (scopes[-1].tag if scopes else None) or allocator.default_tag

    def pointer_to_data(allocator: Allocator) -> dict[int, Any]:
        pool = bfc.integrations.torch.pool()
        return {
            chunk.ptr: SimpleNamespace(
                handle=(0, chunk.size, chunk.ptr, 0),
                tag=chunk.owner,
                is_asleep=region.asleep,
                cpu_backup_tensor=kept_contents(pool, chunk.ptr, 1),
            )
            for region in pool.snapshot().regions
            for chunk in region.chunks
            if chunk.in_use and chunk.owner in pool.tag_stats()
        }

    Allocator.pointer_to_data = property(pointer_to_data)  # type: ignore[attr-defined]
    Allocator.current_tag = property(current_tag)  # type: ignore[attr-defined]
    Allocator.allocator_and_pools = entered  # type: ignore[attr-defined]
    Allocator.use_memory_pool = use_memory_pool  # type: ignore[method-assign]
