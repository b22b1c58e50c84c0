"""PyTorch's whole allocator over pools of bfc: what its C++ part asks Python, and how it is made.

`torch_cuda.cpp` is compiled against the user's PyTorch when it is first used, and kept.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from bfc.allocators._tagged import sleeps_with
from bfc.errors import AsleepError, DeviceUnavailableError, SettingsError
from bfc.include import get_include
from bfc.integrations._torch_table import Table, allocate_at, changes_of, report_error
from bfc.policies._caching import CachingAllocator
from bfc.pytorch import extension
from bfc.pytorch.rules import nearest_rules
from bfc.pytorch.settings import CachingSettings
from bfc.suballocators.cuda import CUDASubAllocator

#: The versions of torch whose table of functions was looked at. 2.12's was not.
KNOWN = ((2, 11), (2, 13), (2, 14), (2, 15))
DEVICES = 64
#: The bit in which PyTorch's pools differ from our own: see kOurs in torch_cuda.cpp.
_OURS = 1 << 32

#: What a header of NVIDIA's compiler defines, which the wheels of its runtime leave out.
_NOTHING = (
    "__host__ __device__ __device_builtin__ __device_builtin_texture_type__ __no_return__ "
    "__device_builtin_surface_type__ __cudart_builtin__ CUDARTAPI CUDARTAPI_CDECL CUDA_CB CUDART_CB"
)
_DEFINITIONS = "\n".join(
    (
        *(f"#define {name}" for name in _NOTHING.split()),
        "#define __builtin_align__(n) __attribute__((aligned(n)))",
        "#define __align__(n) __attribute__((aligned(n)))",
        "",
    )
)

EXTENSION = extension.Extension(
    source=Path(__file__).with_name("torch_cuda.cpp"),
    name="_bfc_torch_cuda",
    folder="torch_cuda",
    what="the allocator for PyTorch",
    needed_by="an allocator in PyTorch's place needs",
    install="pip install torch",
    oldest=KNOWN[0],
    libraries=("c10", "c10_cuda", "torch", "torch_cuda"),
    stand_ins=(("crt/host_defines.h", _DEFINITIONS), ("crt/host_config.h", "")),
)

PoolMaker = Callable[[int], CachingAllocator]


class Books:
    """The pools of the devices, and what PyTorch asks of them. Every method is called with the GIL
    held and with no lock: another thread may run another one meanwhile."""

    def __init__(self, make: PoolMaker) -> None:
        self.is_initialized = False
        self.context: str | None = None  # the frames that our pools keep, beside PyTorch's own
        self._make = make
        self._pools: dict[int, CachingAllocator] = {}
        self._settings: list[str] = []  # what was set since, in order
        self._history: dict[str, Any] | None = None
        self._refusal = threading.local()
        self._for_each: list[Callable[[CachingAllocator], object]] = []

    # -- pools -------------------------------------------------------------------------------------

    def initialized(self) -> None:
        self.is_initialized = True

    def open(self, device: int) -> CachingAllocator:
        """The pool of a device. Another thread may make it, too, meanwhile: the first one stays."""
        pool = self._pools.get(device)
        if pool is not None:
            return pool
        made = self._make(device)
        if not isinstance(made, CachingAllocator):
            raise TypeError(
                f"PyTorch's whole allocator is a CachingAllocator, and device {device} has a "
                f"{type(made).__name__}: bfc.integrations.torch.replace takes either policy"
            )
        for text in self._settings:
            made.set_settings(text)
        pool = self._pools.setdefault(device, made)
        if pool is made:
            made.attach_oom_observer(self._note_refusal)
            made.attach_oom_rejection_observer(self._note_rejection)
            if self._history is not None:
                made.record_history(**self._history)
            for call in self._for_each:
                call(made)
        return pool

    def for_each(self, call: Callable[[CachingAllocator], object]) -> None:
        """Calls something with each pool, also with those that are made later."""
        self._for_each.append(call)
        for pool in self.pools.values():
            call(pool)

    @property
    def pools(self) -> dict[int, CachingAllocator]:
        """Those of the devices that were used, by their numbers."""
        return dict(self._pools)

    def memory_fraction(self, device: int) -> float:
        return float(self._pools[device].memory_fraction)

    def set_memory_fraction(self, device: int, fraction: float) -> None:
        self._pools[device].set_memory_fraction(fraction)

    def empty_cache(self, first: int, second: int) -> None:
        """Of all that there is, or of one private pool: the destructor of a MemPool asks for that,
        and what it raises would end the process."""
        for pool in self.pools.values():
            if not (first or second):
                pool.empty_cache()
                continue
            try:
                pool._empty_pool((first, second), or_later=True)
            except BaseException as error:
                report_error(error, "the release of a MemPool of PyTorch's")

    def enable_peer(self, device: int, peer: int) -> None:
        """Lets another device reach what is mapped on a device."""
        source: Any = self._pools[device].sub_allocator  # of CUDA
        if source.supports_virtual_memory:
            source.enable_peer(peer)

    # -- figures -----------------------------------------------------------------------------------

    def rows(self, device: int, with_history: bool) -> tuple[bytes, bytes, bytes, int]:
        """Regions, chunks and the history as rows of numbers (see `native/columns.hpp`), and how
        often memory had come or gone before."""
        pool = self._pools[device]
        changes = changes_of(pool)
        snapshot = pool.snapshot() if with_history else pool._look()
        regions, history = snapshot._region_columns(), snapshot._history_columns()
        return regions.regions, regions.chunks, history.records, changes

    def largest_free(self, device: int) -> int:
        return int(self._pools[device].stats().largest_free_block_bytes)

    def newer_stats(self, device: int) -> tuple[int, ...]:
        """The requests that were rejected; then of each private pool its id, and the bytes that it
        has reserved: twelve counters."""
        stats = self._pools[device].memory_stats()
        row = [stats.get("num_oom_rejections", 0)]
        prefix = "reserved_bytes_by_private_pools."
        ids = dict.fromkeys(key.split(".")[1] for key in stats if key.startswith(prefix))
        for name in ids:
            row += map(int, name.split("_"))
            row += (
                stats.get(f"{prefix}{name}.{kind}.{field}", 0)
                for kind in ("all", "small_pool", "large_pool")
                for field in ("current", "peak", "allocated", "freed")
            )
        return tuple(row)

    def settings(self) -> tuple[float, int, bool, str, tuple[int, ...]]:
        """Those of the first pool, as a snapshot shows them."""
        found = next((pool._look().settings for pool in self.pools.values()), None)
        if found is None:
            return 0.0, 0, False, "", ()
        largest = (1 << 64) - 1 if found.max_split_size is None else found.max_split_size
        return (
            found.garbage_collection_threshold,
            largest,
            found.expandable_segments,
            found.text,
            tuple(found.roundup_power2_divisions),
        )

    def set_settings(self, text: str) -> None:
        """For all devices, also for those that come."""
        for pool in self.pools.values():
            pool.set_settings(text)
        self._settings.append(text)

    def record_history(self, enabled: int, most: int, skipped: str) -> None:
        """PyTorch keeps the frames itself: our pools record what happens."""
        self._history = None
        if enabled:
            entries = None if most >= 1 << 62 else max(1, most)
            self._history = {
                "context": self.context,
                "max_entries": entries,
                "skip_actions": tuple(skipped.split()),
            }
        for pool in self.pools.values():
            pool.record_history(**(self._history or {"enabled": None}))

    # -- refusals ----------------------------------------------------------------------------------

    def _note_refusal(self, device: int, asked: int, limit: int, device_free: int) -> None:
        self._refusal.row = asked, limit, device_free, 0

    def _note_rejection(self, device: int, asked: int, taken: int, total: int) -> None:
        self._refusal.row = asked, taken, total, 1

    def last_refusal(self) -> tuple[int, int, int, int]:
        """What this thread was refused last: the bytes that were asked of the device, the limit,
        and what the device had free; or of a rejection the bytes taken, and the device's total."""
        row: tuple[int, int, int, int] = getattr(self._refusal, "row", (0, 0, 0, 0))
        return row

    # -- private pools -----------------------------------------------------------------------------

    def begin_pool(self, device: int, first: int, second: int, marks: int) -> None:
        """PyTorch's filter says which requests are the pool's, and not a scope of ours."""
        pool = self._pools[device]
        pool.begin_allocate_to_pool((first, second), "none")
        if marks:
            pool.mark_capture_begin()

    def end_pool(self, device: int, first: int, second: int, marks: int) -> None:
        pool = self._pools[device]
        try:
            if marks:
                pool.mark_capture_end()
        finally:
            pool.end_allocate_to_pool((first, second))

    def mark_capture(self, device: int, begins: int) -> None:
        pool = self._pools[device]
        if begins:
            pool.mark_capture_begin()
        else:
            pool.mark_capture_end()

    def release_pool(self, device: int, first: int, second: int) -> None:
        self._pools[device].release_pool((first, second))

    def create_pool(self, device: int, first: int, second: int) -> None:
        self._pools[device]._create_pool((first, second))

    def pool_use_count(self, device: int, first: int, second: int) -> int:
        return int(self._pools[device]._pool_use_count((first, second)))

    def refuse_replay(self, pools: Iterable[tuple[int, int]]) -> None:
        """Raises AsleepError for a graph, some memory of whose pools sleeps."""
        sleeping = [pool for pool in self._pools.values() if pool.asleep]
        for first, second in pools if sleeping else ():
            for pool in sleeping:
                name = sleeps_with(pool, (first | _OURS, second))
                if name is not None:
                    raise AsleepError(
                        f"this graph's memory sleeps with tag {name!r}: wake({name!r}) before it "
                        "is launched"
                    )

    def set_use_on_oom(self, device: int, first: int, second: int, use: int) -> None:
        self._pools[device]._set_use_on_oom((first, second), bool(use))

    def set_no_split(self, device: int, first: int, second: int) -> None:
        self._pools[device]._set_no_split((first, second))

    def allocate_at(
        self, device: int, first: int, second: int, address: int, nbytes: int, stream: int
    ) -> None:
        """Puts a block of a checkpoint back at its address."""
        allocate_at(self._pools[device], (first, second), address, nbytes, stream)


def checked_torch() -> Any:
    """torch, a build with CUDA that is known. Raises DeviceUnavailableError, which says what else
    there is."""
    torch = extension.supported_torch(EXTENSION)
    if torch.version.cuda is None:
        raise DeviceUnavailableError(f"this PyTorch ({torch.__version__}) was built without CUDA")
    if extension.torch_version(torch) not in KNOWN:
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN)
        raise DeviceUnavailableError(
            f"bfc can take the place of the allocator of torch {known}, and this is torch "
            f"{torch.__version__}: bfc.integrations.torch.replace works with it, without "
            "memory_stats() and snapshots"
        )
    return torch


def rules_for(torch: Any) -> str:
    """The version of PyTorch's policy that is nearest."""
    return nearest_rules(extension.torch_version(torch))[0]


def load() -> ModuleType:
    """The module of torch_cuda.cpp, compiled if it was not."""
    torch = checked_torch()
    headers = _cuda_headers(torch)
    if headers is None:
        raise DeviceUnavailableError(
            "the allocator for PyTorch is compiled with the headers of CUDA's runtime, which are "
            "not there\n  try: pip install nvidia-cuda-runtime, or set CUDA_HOME"
        )
    native = Path(get_include()).parent / "native"
    made = extension.load(replace(EXTENSION, headers=(str(headers), str(native))))
    if torch.__version__.partition("+")[0] != made.torch.partition("+")[0]:
        raise RuntimeError(f"it was compiled for torch {made.torch}, not {torch.__version__}")
    return made


def _cuda_headers(torch: Any) -> Path | None:
    """The folder with the runtime's headers: of the wheel that PyTorch needs, or CUDA_HOME's."""
    packages = Path(torch.__file__).parents[1]
    major = torch.version.cuda.partition(".")[0]
    places = [
        packages / "nvidia" / f"cu{major}" / "include",
        packages / "nvidia" / "cuda_runtime" / "include",
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include",
    ]
    found = (place for place in places if (place / "cuda_runtime_api.h").exists())
    return next(found, None)


def settings_of_environment() -> str:
    """What PYTORCH_CUDA_ALLOC_CONF, or PYTORCH_ALLOC_CONF, says. Raises ValueError for another back
    end, which would not be PyTorch's caching allocator, and so not ours."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    text = next((os.environ[name] for name in names if os.environ.get(name)), "")
    for word in "".join(text.split()).split(","):
        if word.startswith("backend:") and word != "backend:native":
            raise ValueError(
                f"PYTORCH_CUDA_ALLOC_CONF says {word}, and bfc takes the place of PyTorch's own "
                "caching allocator: leave it out, or run without bfc"
            )
    return _without_backend(text)


def _without_backend(text: str) -> str:
    words = "".join(text.split()).split(",")
    return ",".join(word for word in words if not word.startswith("backend:"))


def checked_settings(text: str, version: str, *, stitch: bool) -> CachingSettings:
    """What PYTORCH_CUDA_ALLOC_CONF says, for pools that stitch or do not. Raises SettingsError."""
    try:
        checked = CachingSettings().apply(text, torch=version)
    except SettingsError as error:
        raise error.found_in("PYTORCH_CUDA_ALLOC_CONF") from None
    if stitch and checked.expandable_segments:
        raise SettingsError(
            "PYTORCH_CUDA_ALLOC_CONF says expandable_segments:True, and memory is stitched here, "
            "which does more: leave it out, or choose pools that do not stitch (bfc run --policy "
            "caching)"
        )
    return checked


def device_memory(device: int, kind: type[CUDASubAllocator] = CUDASubAllocator) -> CUDASubAllocator:
    """Memory of a device. Pages of it can be given to other processes where the driver can."""
    source = kind(device)
    if source.supports_virtual_memory:
        with contextlib.suppress(ValueError):  # the device has no such handles
            return kind(device, handle_type="posix")
    return source


def stitching(torch: Any, settings: str) -> PoolMaker:
    """A function that makes pools that stitch. Raises SettingsError at once."""
    version = rules_for(torch)
    checked = checked_settings(settings, version, stitch=True)

    def make(device: int) -> CachingAllocator:
        return CachingAllocator(device_memory(device), settings=checked, stitch=True, torch=version)

    return make


_serving: Books | None = None


def serving() -> Books | None:
    """What serves PyTorch in this process, if something of bfc does."""
    return _serving


def take_over(torch: Any, make: PoolMaker) -> None:
    """Puts pools in the place of PyTorch's allocator, for good. `make` returns the pool of a
    device, when that is first used. Raises RuntimeError if PyTorch has used CUDA already."""
    global _serving
    module = load()
    books = Books(make)
    module.serve(Table(books.open, DEVICES).capsule(), books)
    _serving = books
    _follow_settings(torch, books)
    torch.cuda.memory.change_current_allocator = _refuse_change
    torch.cuda.change_current_allocator = _refuse_change
    torch._C._cuda_changeCurrentAllocator = _refuse_change  # where others have the functions above
    torch.cuda._lazy_call(lambda: _look_who_serves(module))
    _look_before_replays(torch, books)


def _follow_settings(torch: Any, books: Books) -> None:
    """Has settings that the program makes while it runs go to our pools, and to PyTorch, whose
    pinned memory has some of them."""
    for_pinned = torch._C._accelerator_setAllocatorSettings

    def set_allocator_settings(text: str) -> None:
        books.set_settings(text)
        for_pinned(_without_backend(text))  # which asks its allocator for the name of that

    torch.cuda.memory._set_allocator_settings = set_allocator_settings
    torch._C._accelerator_setAllocatorSettings = set_allocator_settings


def _look_before_replays(torch: Any, books: Books) -> None:
    """Has `replay` of a graph refuse one whose memory sleeps: on a GPU that would be an illegal
    access, which ends the context."""
    graphs = torch.cuda.CUDAGraph
    replay = graphs.replay
    pools_of = getattr(graphs, "pools", lambda graph: [graph.pool()])

    @functools.wraps(replay)
    def replay_awake(graph: Any) -> None:
        books.refuse_replay(pools_of(graph))
        replay(graph)

    graphs.replay = replay_awake


def _refuse_change(allocator: object) -> None:
    raise RuntimeError(
        "bfc has taken the place of PyTorch's allocator in this process, and stays there: change "
        "it to another one in a process without bfc"
    )


def _look_who_serves(module: ModuleType) -> None:
    """Called when CUDA has been initialised, after which PyTorch exchanges no allocator. Code in
    C++ may have done so before."""
    if not module.is_serving():
        warnings.warn(
            "another library has put its allocator in PyTorch's place after bfc, and before CUDA "
            "was used: PyTorch's memory does not come from bfc. Run without the one or the other",
            RuntimeWarning,
            stacklevel=2,
        )
