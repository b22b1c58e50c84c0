"""What `torch.cuda` and `torch.accelerator` answer while a prediction runs: one device, whose
memory is bfc's allocator."""

from __future__ import annotations

import contextlib
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch

from bfc_tools.predicting import legacy_types, ordinal
from bfc_tools.predicting.places import Places
from bfc_tools.predicting.recorder import Recorder
from bfc_tools.predicting.rules.choices import NOWHERE

#: The versions that a program is told: CUDA, cuDNN and NCCL as wheels of PyTorch bring them.
CUDA_VERSION, CUDNN_VERSION, NCCL_VERSION = "12.8", 91002, (2, 27, 5)


#: PyTorch has so many streams for each priority, and hands them out in turn (CUDAStream.cpp).
STREAMS = 32


class Stream:
    """A stream of the device. Work is done as soon as it is asked for."""

    #: How many were asked for, by whether their priority is high.
    _given: ClassVar[dict[bool, int]] = {False: 0, True: 0}

    def __init__(
        self, device: Any = None, priority: int = 0, stream_id: int | None = None, **others: Any
    ) -> None:
        self.device = ordinal.device()
        self.device_index, self.device_type = ordinal.number(), 1
        self.priority = priority
        if stream_id is None:
            high = priority < 0
            stream_id = 1 + high * STREAMS + self._given[high] % STREAMS
            self._given[high] += 1
        self.stream_id = self.cuda_stream = stream_id

    @classmethod
    def begin(cls) -> None:
        """Hands out the first stream again."""
        cls._given.update(dict.fromkeys(cls._given, 0))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> Self:
        self._before = torch.cuda.current_stream()
        torch.cuda.set_stream(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.cuda.set_stream(self._before)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """An event of the device: done as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = ordinal.device()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds. Nothing runs: it is 1, so that a program can divide by it."""
        return 1.0

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Device:
    """`torch.cuda.device(0)`."""

    def __init__(self, device: Any) -> None:
        ordinal.checked(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


class PlanCache:
    """`torch.backends.cuda.cufft_plan_cache`, also of one device: it holds no plan."""

    def __init__(self) -> None:
        self.size, self.max_size = 0, 4096

    def __getitem__(self, device: Any) -> Self:
        return self

    def clear(self) -> None:
        """Forgets nothing."""


def nothing(*args: Any, **kwargs: Any) -> None:
    """What has no effect on memory."""


@contextlib.contextmanager
def nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    """A range for a profiler: a context manager, and a decorator."""
    yield


class CudaModule:
    """The functions that stand in for those of `torch.cuda`."""

    def __init__(self, recorder: Recorder, guard: Any) -> None:
        self.recorder, self.memory, self.guard = recorder, recorder.memory, guard
        self.places: Places = recorder.memory.places
        self.seed, self.metadata = 0, ""
        Stream.begin()

    # -- memory ---------------------------------------------------------------------------------

    def counter(self, name: str) -> Callable[..., int]:
        def read(device: Any = None) -> int:
            ordinal.checked(device)
            return self.memory.stats()[name]

        return read

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        ordinal.checked(device)
        return dict(self.memory.stats())

    def nested_stats(self, device: Any = None) -> dict[str, Any]:
        """`memory_stats`, with a dictionary for each part of a name."""
        found: dict[str, Any] = {}
        for name, value in self.memory_stats(device).items():
            *parts, last = name.split(".")
            place = found
            for part in parts:
                place = place.setdefault(part, {})
            place[last] = value
        return found

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        ordinal.checked(device)
        return self.memory.free_bytes, self.recorder.gpu.memory

    def empty_cache(self) -> None:
        self.memory.empty_cache()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.memory.reset_peaks()

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        self.memory.allocator.reset_accumulated_stats()

    def set_memory_fraction(self, fraction: float, device: Any = None) -> None:
        ordinal.checked(device)
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0.0~1.0")
        self.memory.limit_to(float(fraction))

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        return self.memory.allocator.memory_summary(abbreviated)

    def record_memory_history(
        self,
        enabled: str | bool | None = "all",
        context: str | bool | None = "all",
        stacks: str | int = "python",
        max_entries: int | bool | None = None,
        device: Any = None,
        clear_history: bool = False,
        skip_actions: Any = None,
        **others: Any,
    ) -> None:
        """Both forms of `_record_memory_history`, the older one with a bool."""
        if isinstance(enabled, bool):
            most = others.get("trace_alloc_max_entries", stacks)
            most = most if isinstance(most, int) and not isinstance(most, bool) else None
            self.memory.record("all" if enabled else None, "all", most)
        else:
            entries = None if isinstance(max_entries, bool) else max_entries
            self.memory.record(enabled, context if isinstance(context, str) else None, entries)

    def snapshot(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.memory.snapshot()

    def dump_snapshot(self, filename: Any = "dump_snapshot.pickle", *args: Any, **kw: Any) -> None:
        data = pickle.dumps(self.memory.snapshot(), protocol=4)
        self.memory.dumped.append(self.recorder.keep(filename, data))

    def caching_allocator_alloc(self, size: int, device: Any = None, stream: Any = None) -> int:
        made = self.memory.allocate(int(size), "torch.cuda.caching_allocator_alloc")
        self.memory.kept["raw", made.address] = made
        return made.address

    def caching_allocator_delete(self, address: int) -> None:
        made = self.memory.kept.pop(("raw", address), None)
        if made is not None:
            self.memory.free(made)

    def allocation_traceback(self, address: int) -> list[dict[str, Any]] | None:
        """The lines that allocated what lies at an address, if the history was recorded."""
        made = self.recorder.live.get(address & ~NOWHERE) if address & NOWHERE else None
        wanted = address if made is None else made.address
        for segment in self.memory.snapshot()["segments"]:
            for block in segment["blocks"]:
                if block["address"] == wanted and block["state"].startswith("active"):
                    return block.get("frames") or None
        return None

    def set_memory_metadata(self, metadata: str) -> None:
        self.metadata = metadata

    # -- kernels --------------------------------------------------------------------------------

    def compile_kernel(self, kernel_source: str, kernel_name: str, *args: Any, **kw: Any) -> Any:
        """A kernel of the program's own source, which is neither compiled nor run."""
        return _Kernel(self.recorder, kernel_name)

    # -- streams --------------------------------------------------------------------------------

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(stream_id=self.guard.stream())

    def set_stream(self, stream: Stream | None) -> None:
        if stream is not None:
            self.places.reads_streams = True
            self.guard.set_stream(stream.stream_id)

    @contextlib.contextmanager
    def in_stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    # -- the device -----------------------------------------------------------------------------

    def properties(self, device: Any = None) -> Any:
        ordinal.asked_about(device)
        gpu = self.recorder.gpu
        return types.SimpleNamespace(
            name=gpu.name,
            major=gpu.cc[0],
            minor=gpu.cc[1],
            total_memory=gpu.memory,
            multi_processor_count=gpu.sms,
            max_threads_per_multi_processor=gpu.threads_per_sm,
            max_threads_per_block=1024,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=101376,
            shared_memory_per_multiprocessor=102400,
            L2_cache_size=50 << 20,
            warp_size=32,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName="",
            uuid="",
        )

    def manual_seed(self, seed: int) -> None:
        self.seed = int(seed)

    def new_seed(self) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.zeros(16, dtype=torch.uint8, device="cpu")

    # -- all of it ------------------------------------------------------------------------------

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(module, name, what stands there) of all that is replaced."""
        cuda = torch.cuda
        for modules, table in (
            ((cuda, cuda.memory), self._memory_functions()),
            ((cuda,), self._device_functions()),
            ((cuda, cuda.random), self._random_functions()),
        ):
            for module in modules:
                for name, function in table.items():
                    if module is cuda or hasattr(module, name):
                        yield module, name, function
        for name in ("range_push", "range_pop", "range_end", "mark"):
            yield cuda.nvtx, name, nothing
        yield cuda.nvtx, "range_start", lambda *args, **kwargs: 0
        yield cuda.nvtx, "range", nothing_around
        for name in ("start", "stop"):
            yield cuda.profiler, name, nothing
        for module in (cuda.streams, torch):
            yield module, "Stream", Stream
            yield module, "Event", Event
        yield from legacy_types.replacements()
        yield from self._elsewhere()
        yield from self._accelerator()

    def _memory_functions(self) -> dict[str, Any]:
        counters = {
            "memory_allocated": "allocated_bytes.all.current",
            "max_memory_allocated": "allocated_bytes.all.peak",
            "memory_reserved": "reserved_bytes.all.current",
            "max_memory_reserved": "reserved_bytes.all.peak",
            "memory_cached": "reserved_bytes.all.current",
            "max_memory_cached": "reserved_bytes.all.peak",
        }
        return {name: self.counter(key) for name, key in counters.items()} | {
            "memory_stats": self.memory_stats,
            "memory_stats_as_nested_dict": self.nested_stats,
            "device_memory_used": lambda device=None: self.memory.nbytes - self.memory.free_bytes,
            "mem_get_info": self.mem_get_info,
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "reset_max_memory_allocated": self.reset_peak_memory_stats,
            "reset_max_memory_cached": self.reset_peak_memory_stats,
            "reset_accumulated_memory_stats": self.reset_accumulated_memory_stats,
            "set_per_process_memory_fraction": self.set_memory_fraction,
            "get_per_process_memory_fraction": lambda device=None: self.memory.fraction,
            "_set_allocator_settings": self.memory.set_settings,
            "memory_summary": self.memory_summary,
            "memory_snapshot": lambda *args, **kwargs: self.memory.snapshot()["segments"],
            "caching_allocator_alloc": self.caching_allocator_alloc,
            "caching_allocator_delete": self.caching_allocator_delete,
            "get_allocator_backend": lambda: "native",
            "_record_memory_history": self.record_memory_history,
            "_snapshot": self.snapshot,
            "_dump_snapshot": self.dump_snapshot,
            "_save_segment_usage": nothing,
            "_save_memory_usage": nothing,
            "list_gpu_processes": lambda device=None: "",
            "_allocation_traceback": self.allocation_traceback,
            "_set_memory_metadata": self.set_memory_metadata,
            "_get_memory_metadata": lambda: self.metadata,
            # pinned memory of the host takes none of the GPU's, and is not followed
            "host_memory_stats": dict,
            "host_memory_stats_as_nested_dict": dict,
            "reset_peak_host_memory_stats": nothing,
            "reset_accumulated_host_memory_stats": nothing,
            "empty_host_cache": nothing,
            "caching_allocator_enable": nothing,
            "caching_allocator_disabled": nothing_around,
        }

    def _device_functions(self) -> dict[str, Any]:
        gpu = self.recorder.gpu
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": nothing,
            "_lazy_init": nothing,
            "_lazy_call": lambda function, **kwargs: function(),
            "device_count": ordinal.count,
            "current_device": ordinal.number,
            "set_device": ordinal.checked,
            "device": _Device,
            "device_of": _Device,
            "_exchange_device": lambda device: ordinal.number(),
            "_maybe_exchange_device": lambda device: ordinal.number(),
            "synchronize": lambda device=None: ordinal.checked(device) and None,
            "ipc_collect": nothing,
            "is_bf16_supported": lambda including_emulation=True: (
                including_emulation or gpu.cc >= (8, 0)
            ),
            "is_tf32_supported": lambda: gpu.cc >= (8, 0),
            "get_device_name": lambda device=None: self.properties(device).name,
            "get_device_capability": lambda device=None: (ordinal.asked_about(device), gpu.cc)[1],
            "get_device_properties": self.properties,
            "get_arch_list": lambda: [f"sm_{gpu.cc[0]}{gpu.cc[1]}"],
            "can_device_access_peer": lambda device, peer: False,
            **dict.fromkeys(
                ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"),
                lambda device=None: 0,
            ),
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": nothing,
            "current_blas_handle": lambda: 0,
            "check_error": nothing,
            "_sleep": nothing,
            "_compile_kernel": self.compile_kernel,
            "current_solver_handle": lambda: 0,
            "get_stream_from_external": lambda pointer, device=None: Stream(stream_id=int(pointer)),
            "Stream": Stream,
            "ExternalStream": Stream,
            "Event": Event,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: Stream(stream_id=0),
            "stream": self.in_stream,
            "StreamContext": self.in_stream,
            "set_stream": self.set_stream,
            "is_current_stream_capturing": lambda: False,
            "cudart": lambda: _Cudart(self.mem_get_info),
        }

    def _random_functions(self) -> dict[str, Any]:
        return {
            "manual_seed": self.manual_seed,
            "manual_seed_all": self.manual_seed,
            "seed": self.new_seed,
            "seed_all": self.new_seed,
            "initial_seed": lambda: self.seed,
            "get_rng_state": self.get_rng_state,
            "get_rng_state_all": lambda: [self.get_rng_state()],
            "set_rng_state": nothing,
            "set_rng_state_all": nothing,
            "_set_rng_state_offset": nothing,
            "_get_rng_state_offset": lambda device=None: 0,
        }

    def _elsewhere(self) -> Iterator[tuple[Any, str, Any]]:
        yield torch.backends.cudnn, "is_available", lambda: True
        yield torch.backends.cudnn, "version", lambda: CUDNN_VERSION
        yield torch.backends.cuda, "is_built", lambda: True
        yield torch.backends.cuda, "cufft_plan_cache", PlanCache()
        for name in ("preferred_linalg_library", "preferred_blas_library"):
            yield torch.backends.cuda, name, nothing
        yield torch.cuda.nccl, "version", lambda: NCCL_VERSION
        # what torch._inductor and packages of kernels import; a build for CUDA would ask the driver
        yield torch._C, "_cuda_getCurrentRawStream", lambda device=0: self.guard.stream()
        yield torch._C, "_cuda_clearCublasWorkspaces", self.memory.free_kept_by_blas
        attach = "_cuda_attach_out_of_memory_observer"
        yield torch._C, attach, self.memory.observers.append
        if not hasattr(torch._C, "_cuda_CUDAAllocator_AllocatorState"):
            yield torch._C, "_cuda_CUDAAllocator_AllocatorState", object
        if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
            settings = self.memory.set_settings
            yield torch._C, "_accelerator_setAllocatorSettings", settings
        if torch.version.cuda is None:
            yield torch.version, "cuda", CUDA_VERSION

    def _accelerator(self) -> Iterator[tuple[Any, str, Any]]:
        accelerator = torch.accelerator
        table = {
            "is_available": lambda: True,
            "device_count": ordinal.count,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "current_device_index": ordinal.number,
            "current_device_idx": ordinal.number,
            "set_device_index": ordinal.checked,
            "set_device_idx": ordinal.checked,
            "synchronize": nothing,
            "current_stream": self.current_stream,
            "set_stream": self.set_stream,
            "get_memory_info": self.mem_get_info,
        }
        memory = self._memory_functions()
        modules = (accelerator, getattr(accelerator, "memory", None))
        for module in modules:
            for name in dir(module):
                if name in memory or (module is accelerator and name in table):
                    yield module, name, memory.get(name) or table[name]
        if hasattr(accelerator, "get_memory_info"):
            yield accelerator, "get_memory_info", self.mem_get_info


class _Kernel:
    """What `torch.cuda._compile_kernel` returns: it writes into what it is given, and takes nothing
    itself."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(
        self,
        grid: Any = (1, 1, 1),
        block: Any = (1, 1, 1),
        args: Any = None,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        self._recorder.known.forget(list(args or ()))
        self._recorder.note(f"the CUDA kernel {self._name}", "not run; it allocates nothing")

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """It has as much as it asks for."""


class _Cudart:
    """`torch.cuda.cudart()`: every call succeeds."""

    def __init__(self, mem_get_info: Callable[..., tuple[int, int]]) -> None:
        self.cudaMemGetInfo = mem_get_info

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: 0


@contextlib.contextmanager
def replaced(replacements: Iterator[tuple[Any, str, Any]]) -> Iterator[None]:
    """Puts things in places, and puts back what was there."""
    missing = object()
    before: list[tuple[Any, str, Any]] = []
    try:
        for module, name, new in replacements:
            before.append((module, name, vars(module).get(name, missing)))
            setattr(module, name, new)
        yield
    finally:
        for module, name, old in reversed(before):
            if old is missing:
                delattr(module, name)
            else:
                setattr(module, name, old)
