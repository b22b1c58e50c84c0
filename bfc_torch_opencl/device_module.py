"""The module `torch.opencl`: PyTorch's functions of a device under the names that they have in
`torch.cuda`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch

from bfc.drivers.opencl import platform as _opencl
from bfc.integrations._torch_stats import memory_stats as _stats_of
from bfc.policies._caching import CachingAllocator
from bfc_torch_opencl.runtime import Runtime

NAME = "opencl"
Device: TypeAlias = "torch.device | int | str | None"


def make(runtime: Runtime, extension: ModuleType) -> ModuleType:
    """The module for a runtime."""
    module = ModuleType(f"torch.{NAME}", "PyTorch's device opencl, from bfc: see torch.cuda")
    functions = DeviceFunctions(runtime, extension)
    for name in dir(functions):
        if not name.startswith("__"):
            setattr(module, name, getattr(functions, name))
    module.__dict__["memory"] = module
    return module


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What OpenCL says of a device, under the names that `torch.cuda` and `torch.xpu` have for it.
    Memory is in bytes."""

    name: str
    vendor: str
    platform_name: str
    driver_version: str
    version: str
    total_memory: int
    multi_processor_count: int
    max_work_group_size: int
    local_mem_size: int


def refuse_dlpack() -> None:
    """Lets `Tensor.__dlpack__` refuse tensors on opencl. PyTorch has no place to say so, and would
    give out a capsule with an address that no other package can use."""
    made_by_torch = torch.Tensor.__dlpack__

    @functools.wraps(made_by_torch)
    def refusing(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if self.device.type == NAME:
            raise BufferError(
                f"a tensor on {self.device} has no address that other packages can use: "
                f"copy it with .cpu() first"
            )
        return made_by_torch(self, *arguments, **named)

    torch.Tensor.__dlpack__ = refusing


class DeviceFunctions:
    """What `torch.opencl` has. Each function does what its namesake in `torch.cuda` does."""

    def __init__(self, runtime: Runtime, extension: ModuleType) -> None:
        self._runtime = runtime
        self._extension = extension
        self.Stream = torch.Stream
        self.Event = torch.Event
        self.OutOfMemoryError = torch.OutOfMemoryError  # the same class, as in torch.cuda

    # -- devices -----------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return not self._is_in_bad_fork()

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        _opencl.refuse_child()

    def init(self) -> None:
        self._lazy_init()

    def _is_in_bad_fork(self) -> bool:
        return bool(self._extension.is_child())

    def device_count(self) -> int:
        return self._runtime.table.devices

    def current_device(self) -> int:
        return int(self._extension.current_device())

    def set_device(self, device: Device) -> None:
        torch.accelerator.set_device_index(self._index(device))

    @contextmanager
    def device(self, device: Device) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def get_device_name(self, device: Device = None) -> str:
        return self._runtime.place(self._index(device)).source.name

    def get_device_properties(self, device: Device = None) -> DeviceProperties:
        source = self._runtime.place(self._index(device)).source
        with _opencl.in_words("clGetDeviceInfo"):
            told = source.cl_device
            return DeviceProperties(
                name=source.name,
                vendor=told.vendor,
                platform_name=told.platform.name,
                driver_version=told.driver_version,
                version=told.version,
                total_memory=source.total_bytes,
                multi_processor_count=told.max_compute_units,
                max_work_group_size=told.max_work_group_size,
                local_mem_size=told.local_mem_size,
            )

    def synchronize(self, device: Device = None) -> None:
        self._runtime.finish(self._index(device))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _index(self, device: Device) -> int:
        if device is None:
            return self.current_device()
        if not isinstance(device, int):
            named = torch.device(device)
            if named.type != NAME:
                raise ValueError(f"torch.{NAME} is about devices of {NAME}, not {named}")
            device = self.current_device() if named.index is None else named.index
        if not 0 <= device < self.device_count():
            raise ValueError(
                f"there is no device {device}: there are {self.device_count()}, counted from 0"
            )
        return device

    # -- streams -----------------------------------------------------------------------------------

    def current_stream(self, device: Device = None) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device(NAME, self._index(device)))

    def default_stream(self, device: Device = None) -> torch.Stream:
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return torch.Stream(stream_id=0, device_index=self._index(device), device_type=kind)

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    # -- memory ------------------------------------------------------------------------------------

    def memory_stats(self, device: Device = None) -> dict[str, int]:
        """The pool's counters, and how often an address was freed that was not live."""
        found = dict(_stats_of(self._pool(device)))
        found["invalid_frees"] = self._runtime.table.invalid_frees
        return found

    def memory_stats_as_nested_dict(self, device: Device = None) -> dict[str, Any]:
        return _nested(self.memory_stats(device))

    def memory_allocated(self, device: Device = None) -> int:
        return self.memory_stats(device)["allocated_bytes.all.current"]

    def max_memory_allocated(self, device: Device = None) -> int:
        return self.memory_stats(device)["allocated_bytes.all.peak"]

    def memory_reserved(self, device: Device = None) -> int:
        return self.memory_stats(device)["reserved_bytes.all.current"]

    def max_memory_reserved(self, device: Device = None) -> int:
        return self.memory_stats(device)["reserved_bytes.all.peak"]

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        self._pool(device).reset_peak_stats()

    def reset_accumulated_memory_stats(self, device: Device = None) -> None:
        self._pool(device).reset_accumulated_stats()

    # PyTorch's old names, which scripts still have.

    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def set_per_process_memory_fraction(self, fraction: float, device: Device = None) -> None:
        """Limit a device's pool to a part of the device's memory. This takes the place of the
        limit that `enable` was given; 1.0 removes it."""
        self._with_fraction(device).set_memory_fraction(fraction)

    def get_per_process_memory_fraction(self, device: Device = None) -> float:
        return self._with_fraction(device).memory_fraction

    def _with_fraction(self, device: Device) -> CachingAllocator:
        pool = self._pool(device)
        if not isinstance(pool, CachingAllocator):
            raise RuntimeError(
                "policy='bfc' keeps the limit that it was made with: give enable() another one, or "
                "policy='caching'"
            )
        return pool

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        info: tuple[int, int] = self._pool(device).sub_allocator.memory_info()
        return info

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def ipc_collect(self) -> None:
        """Does nothing: no tensor on opencl is shared with another process."""

    def get_allocator_backend(self) -> str:
        return "bfc"

    def memory_summary(self, device: Device = None, abbreviated: bool = False) -> str:
        from bfc.snapshots.summary import summary

        pool = self._pool(device)
        return summary(_stats_of(pool), str(pool.device), abbreviated)

    def caching_allocator_alloc(
        self, size: int, device: Device = None, stream: torch.Stream | int | None = None
    ) -> int:
        """Allocate bytes, and return their address."""
        index = self._index(device)
        if stream is None:
            stream = self._extension.current_stream(index)
        return int(self._extension.allocate(size, index, getattr(stream, "stream_id", stream)))

    def caching_allocator_delete(self, mem_ptr: int) -> None:
        """Free an address that `caching_allocator_alloc` returned, through `raw_deleter`."""
        self._extension.free(mem_ptr)

    def pool(self, device: Device = None) -> Any:
        """The `bfc.Allocator` of a device, for all else that bfc has."""
        return self._pool(device)

    def _pool(self, device: Device) -> Any:
        return self._runtime.place(self._index(device)).pool

    # -- pinned memory of the host -----------------------------------------------------------------

    def host_memory_stats(self) -> dict[str, int | float]:
        return self._runtime.pinned().host_memory_stats()

    def host_memory_stats_as_nested_dict(self) -> dict[str, Any]:
        return _nested(self.host_memory_stats())

    def reset_accumulated_host_memory_stats(self) -> None:
        self._runtime.pinned().reset_accumulated_stats()

    def reset_peak_host_memory_stats(self) -> None:
        self._runtime.pinned().reset_peak_stats()

    # -- snapshots for PyTorch's viewer ------------------------------------------------------------

    def _snapshot(self, device: Device = None) -> dict[str, Any]:
        snapshot: dict[str, Any] = self._pool(device).snapshot().to_torch()
        return snapshot

    def memory_snapshot(self, device: Device = None) -> list[dict[str, Any]]:
        segments: list[dict[str, Any]] = self._snapshot(device)["segments"]
        return segments

    def _dump_snapshot(self, filename: str | os.PathLike[str] = "dump_snapshot.pickle") -> None:
        self._pool(None).snapshot().dump(filename)

    def _record_memory_history(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "python",
        max_entries: int | None = None,
        device: Device = None,
    ) -> None:
        pool = self._pool(device)
        stacks = "python" if stacks == "all" else stacks  # frames of C++ are never recorded
        pool.record_history(enabled, context=context, stacks=stacks, max_entries=max_entries)

    # -- random numbers ----------------------------------------------------------------------------

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(self._extension.default_generator(i) for i in range(self.device_count()))

    def manual_seed(self, seed: int) -> None:
        self._generator(None).manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(int(seed))

    def seed(self) -> None:
        self._generator(None).seed()

    def seed_all(self) -> None:
        self.seed()
        self.manual_seed_all(self.initial_seed())

    def initial_seed(self) -> int:
        return int(self._generator(None).initial_seed())

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Device = None) -> None:
        self._generator(device).set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, new_states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self.default_generators, new_states, strict=True):
            generator.set_state(state)

    def _generator(self, device: Device) -> torch.Generator:
        generator: torch.Generator = self._extension.default_generator(self._index(device))
        return generator


def _nested(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics with a dict for each part of their keys."""
    found: dict[str, Any] = {}
    for key, figure in stats.items():
        *groups, field = key.split(".")
        inner = found
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[field] = figure
    return found
