"""The compiled CUDA caching allocators of PyTorch 2.11.0 and 2.15.0, over a device that hands out
integers.

`build()` downloads the published CUDA wheel of a version once, keeps two libraries and the headers
it needs, and compiles `torch_shim.cpp` and a stand-in for the CUDA runtime (`cudart_standin.cpp`)
against them.
`TorchPeer` then drives the original, with no GPU and no memory behind the addresses.
`python -m bench.peers.torch` builds both and checks them.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from bench.peers.server import (
    SOURCES,
    Encoded,
    Failure,
    Operation,
    Peer,
    as_words,
    decode_calls,
    encode_fault,
    environment_for,
)
from bench.peers.tensorflow import PeerUnavailable, compiler, default_cache, run
from bench.peers.torch_wheel import download, extract, rename
from bfc_slow_models.torch_words import (
    ACTIONS as ACTIONS,
)
from bfc_slow_models.torch_words import (
    COUNTERS as COUNTERS,
)
from bfc_slow_models.torch_words import (
    DEFAULT_POOL as DEFAULT_POOL,
)
from bfc_slow_models.torch_words import (
    FIELDS as FIELDS,
)
from bfc_slow_models.torch_words import (
    GROUPS as GROUPS,
)
from bfc_slow_models.torch_words import (
    POOLS as POOLS,
)
from bfc_slow_models.torch_words import (
    REJECTIONS as REJECTIONS,
)
from bfc_slow_models.torch_words import (
    STATS as STATS,
)
from bfc_slow_models.torch_words import (
    Block as Block,
)
from bfc_slow_models.torch_words import (
    Pool as Pool,
)
from bfc_slow_models.torch_words import (
    Segment as Segment,
)
from bfc_slow_models.torch_words import (
    TraceEntry as TraceEntry,
)
from bfc_slow_models.torch_words import (
    pool_stats as pool_stats,
)

#: What is downloaded of each version: PyTorch, and the headers of the CUDA that it was built with.
PACKAGES = {
    "2.11": ("torch==2.11.0", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"),
    "2.15": ("torch==2.15.0", "nvidia-cuda-runtime==13.2.86", "nvidia-cuda-crt==13.2.86"),
}
NEWEST = "2.15"
LIBRARIES = ("libc10_cuda.so", "libc10.so")
RUNTIME = "libcudart.so.13"
SERVER = "torch_peer"
SHIM = Path(__file__).with_name("torch_shim.cpp")
STANDIN = Path(__file__).with_name("cudart_standin.cpp")
FLAGS = ("-std=c++20", "-O2")
# Any Python will do to drive the server, so the wheel need not be the running interpreter's.
WHEEL = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
#: What is kept of the wheels, and where.
KEPT = {
    "torch/lib/libc10.so": "lib/libc10.so",
    "torch/lib/libc10_cuda.so": "lib/libc10_cuda.so",
    "torch/include/c10/": "include/c10/",
    "torch/include/torch/headeronly/": "include/torch/headeronly/",
    "nvidia/cu13/include/": "include/cuda/",
}

_NO_SLOT = (1 << 64) - 1
#: Where the device puts its next block.
Placement = Literal["rise", "reuse", "fall"]
PLACEMENTS = ("rise", "reuse", "fall")  # in the order of the device's numbers


# Building ------------------------------------------------------------------------------------


def build(cache: Path | None = None, version: str = NEWEST) -> Path:
    """The path of a version's server; downloads and compiles only what the cache does not hold yet.

    Whatever appears in the cache is complete: it is made in a temporary folder and then renamed.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise PeerUnavailable("the compiled PyTorch is only fetched for Linux on x86_64")
    root = (cache or default_cache()).resolve()
    made = root / f"torch_shim-{version}-{_fingerprint(version)}"
    if not made.exists():
        if shutil.which(compiler()[0]) is None:
            raise PeerUnavailable(f"no C++ compiler: {compiler()[0]} is not on the path")
        root.mkdir(parents=True, exist_ok=True)
        _compile(_upstream(root, version), made, _flags(version))
    return made / SERVER


def _flags(version: str) -> tuple[str, ...]:
    return (*FLAGS, f"-DBFC_TORCH_MINOR={version.split('.')[1]}")


def _fingerprint(version: str) -> str:
    """Of all the server is made from, so that a changed source or compiler gets a new name."""
    text = "\0".join((*PACKAGES[version], *compiler(), *_flags(version))).encode()
    sources = b"".join(path.read_bytes() for path in (SHIM, STANDIN, *SOURCES))
    return hashlib.sha256(text + sources).hexdigest()[:16]


def _upstream(root: Path, version: str) -> Path:
    """The folder with upstream's libraries and headers, downloaded if it is not there yet."""
    packages = PACKAGES[version]
    folder = root / packages[0].replace("==", "-")
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as name:
        kept = Path(name) / "kept"
        for wheel in download(Path(name), packages, WHEEL, PLATFORMS):
            extract(wheel, kept, _place)
        missing = [library for library in LIBRARIES if not (kept / "lib" / library).exists()]
        if missing:
            raise PeerUnavailable(f"the wheel of {packages[0]} holds no {missing[0]}")
        rename(kept, folder)
    return folder


def _place(name: str) -> str | None:
    """Where a file of a wheel is kept; None where it is not. The licences are."""
    for prefix, target in KEPT.items():
        if name.startswith(prefix):
            return target + name.removeprefix(prefix)
    folder, _, rest = name.partition("/")
    if folder.endswith(".dist-info") and "license" in rest.lower():
        return f"licences/{folder.removesuffix('.dist-info')}/{Path(rest).name}"
    return None


def _compile(upstream: Path, wanted: Path, flags: Sequence[str]) -> None:
    """The stand-in runtime, then the server next to it: upstream's library needs both."""
    headers = ["-isystem", str(upstream / "include"), "-isystem", str(upstream / "include/cuda")]
    libraries = [str(upstream / "lib" / name) for name in LIBRARIES]
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=wanted.parent) as name:
        made = Path(name) / wanted.name
        made.mkdir()
        runtime = str(made / RUNTIME)
        # Upstream asks for symbols of the version that is the library's own name.
        shared = ["-fPIC", "-shared", f"-Wl,-soname,{RUNTIME}", "-Wl,--default-symver"]
        source = [str(STANDIN), "-o", runtime]
        run([*compiler(), *flags, *headers, *shared, *source], "compiling the stand-in")
        # Found next to the server wherever the cache is moved to, and before LD_LIBRARY_PATH, or
        # a real CUDA runtime that is installed would be taken.
        rpath = f"-Wl,--disable-new-dtags,-rpath,$ORIGIN:$ORIGIN/../{upstream.name}/lib"
        inputs = [str(SHIM), *libraries, runtime, "-ldl", "-rdynamic", rpath]
        target = ["-o", str(made / SERVER)]
        run([*compiler(), *flags, *headers, *inputs, *target], "compiling the shim")
        rename(made, wanted)


# Encoding ------------------------------------------------------------------------------------

_STATS = struct.Struct(f"<{len(STATS)}q")
_POOL_STATS = struct.Struct(f"<2Q{len(POOLS) * len(FIELDS)}q")
_SCOPES = {"all": 0, "none": 1}

# In the order of the shim's numbers.
_CODES = {
    name: code
    for code, name in enumerate(
        (
            "configure",
            "list_addresses",
            "init",
            "malloc",
            "allocate",
            "free",
            "free_slot",
            "record_stream",
            "record_stream_slot",
            "empty_cache",
            "set_settings",
            "set_memory_fraction",
            "memory_fraction",
            "reset_peak_stats",
            "reset_accumulated_stats",
            "enable",
            "create_pool",
            "begin_pool",
            "end_pool",
            "release_pool",
            "pool_use_count",
            "set_use_on_oom",
            "set_no_split",
            "stats",
            "snapshot",
            "record_history",
            "trace",
            "calls",
            "fail_at",
            "hold",
            "finish",
            "finish_events",
            "live_bytes",
            "replay",
            "resize",
            "mark_capture",
            "capture",
            "rejections",
            "malloc_at",
            "capture_work",
            "capture_wait",
            "keep_records",
        )
    )
}


def _as_word(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def _even(stream: int) -> int:
    """Upstream keeps an odd handle for streams of its own making."""
    if stream % 2:
        raise ValueError(f"a stream's handle must be even, not {stream}")
    return stream


def _encode_malloc(nbytes: int, stream: int = 0, slot: int | None = None) -> Encoded:
    return (nbytes, stream, _NO_SLOT if slot is None else slot), b""


def _encode_allocate(nbytes: int, stream: int = 0, slot: int | None = None) -> Encoded:
    return _encode_malloc(nbytes, _even(stream), slot)


def _encode_record(where: int, stream: int) -> Encoded:
    return (where, _even(stream)), b""


def _encode_pool(pool: Pool = DEFAULT_POOL, *words: int) -> Encoded:
    return (*pool, *words), b""


def _encode_begin(pool: Pool, streams: str | int = "all") -> Encoded:
    if isinstance(streams, str):
        return (*pool, _SCOPES[streams], 0), b""
    return (*pool, len(_SCOPES), streams), b""


def _encode_history(enabled: bool, entries: int, skip: Sequence[str] = ()) -> Encoded:
    return (enabled, entries), "\n".join(skip).encode()


_ENCODE: dict[str, Callable[..., Encoded]] = {
    "malloc": _encode_malloc,
    "allocate": _encode_allocate,
    "record_stream": _encode_record,
    "record_stream_slot": _encode_record,
    "capture": lambda stream, captures=True: ((_even(stream), captures), b""),
    "malloc_at": lambda address, nbytes, slot: ((address, nbytes, slot), b""),
    "empty_cache": _encode_pool,
    "set_settings": lambda text: ((), text.encode()),
    "set_memory_fraction": lambda fraction: ((_as_word(fraction),), b""),
    "create_pool": _encode_pool,
    "begin_pool": _encode_begin,
    "end_pool": _encode_pool,
    "release_pool": _encode_pool,
    "pool_use_count": _encode_pool,
    "set_use_on_oom": _encode_pool,
    "set_no_split": _encode_pool,
    "snapshot": _encode_pool,
    "record_history": _encode_history,
    "fail_at": encode_fault,
    # The rest takes numbers as they are, or, for the shim alone, numbers and bytes.
    "configure": lambda words, text: (words, text),
    "list_addresses": lambda words, text: (words, text),
    "replay": lambda words, text: (words, text),
}


# Decoding ------------------------------------------------------------------------------------


def _decode_stats(data: memoryview) -> dict[str, int]:
    """Behind what both versions have, 2.15 has the rejections, and an entry for each pool."""
    stats = dict(zip(STATS, _STATS.unpack_from(data), strict=True))
    if len(data) > _STATS.size:
        (stats[REJECTIONS],) = struct.unpack_from("<q", data, _STATS.size)
    entries = [
        (first, second, figures)
        for first, second, *figures in _POOL_STATS.iter_unpack(data[_STATS.size + 8 :])
    ]
    for first, second, figures in sorted(entries):
        stats.update(zip(pool_stats((first, second)), figures, strict=True))
    return stats


def _decode_blocks(words: tuple[int, ...], address: int) -> list[Block]:
    blocks = []
    for at in range(0, len(words), 4):
        size, requested, allocated, active = words[at : at + 4]
        states = ("inactive", "active_pending_free", "active_allocated")
        state = states[active + allocated]
        blocks.append(Block(address=address, size=size, requested_size=requested, state=state))
        address += size
    return blocks


def _decode_snapshot(data: memoryview) -> list[Segment]:
    words = as_words(data)
    segments, at = [], 0
    while at < len(words):
        address, total, requested, allocated, active, stream = words[at : at + 6]
        large, expandable, first, second, count = words[at + 6 : at + 11]
        at += 11
        segments.append(
            Segment(
                address=address,
                total_size=total,
                requested_size=requested,
                allocated_size=allocated,
                active_size=active,
                stream=stream,
                segment_type="large" if large else "small",
                is_expandable=bool(expandable),
                segment_pool_id=(first, second),
                blocks=_decode_blocks(words[at : at + 4 * count], address),
            )
        )
        at += 4 * count
    return segments


def _decode_trace(data: memoryview) -> list[TraceEntry]:
    words = as_words(data)
    return [
        TraceEntry(
            action=ACTIONS[words[at]],
            addr=words[at + 1],
            size=words[at + 2],
            stream=words[at + 3],
            pool_id=(words[at + 4], words[at + 5]),
        )
        for at in range(0, len(words), 6)
    ]


def _decode_rejections(data: memoryview) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("<3Q", data))


def _decode_replay(data: memoryview) -> tuple[npt.NDArray[np.uint64], float]:
    (seconds,) = struct.unpack_from("<d", data)
    return np.frombuffer(data[8:], np.uint64), seconds


_DECODE: dict[str, Callable[[memoryview], Any]] = {
    "memory_fraction": lambda data: struct.unpack("<d", data)[0],
    "stats": _decode_stats,
    "rejections": _decode_rejections,
    "snapshot": _decode_snapshot,
    "trace": _decode_trace,
    "calls": decode_calls,
    "replay": _decode_replay,
}


# Driving -------------------------------------------------------------------------------------


class TorchPeer(Peer):
    """The compiled allocator of one device, in a process of its own: that of the version `torch`.

    `settings` is the text of PYTORCH_CUDA_ALLOC_CONF when the process starts; `environment` adds
    further variables. What upstream throws is returned as a `Failure`, but here it is raised as a
    ValueError where it refuses the settings. A process that an upstream fault ends raises PeerDied.

    The device refuses what would take its live bytes past `capacity`, and the growth chosen by
    `fail_at`. It gives the next multiple of `alignment` at or after the end of the last block and
    `gap`, and never reuses an address; or, with `placement` "reuse", the lowest one at which the
    block and its gap fit; with "fall", each below the last one; or, with `addresses`, those in
    their order, where 0 stands for a refusal and the end of the list for a driver error. Virtual
    memory for expandable segments is reserved from `reserve_base` upwards, end to end. A physical
    piece of it counts towards the capacity. Without `fabric` the device has no fabric handles, as
    most: upstream then asks for file descriptors, and raises an error of the driver other than a
    lack of memory at once. 2.15 never asks for them here.

    Streams are numbers, 0 the default one, and even where they are recorded. Work queued on a
    stream is over at once unless the stream is held; see `hold`. A wait finishes it. A stream
    captures where `capture` says so, and `capture_work` and `capture_wait` make its graph.

    So that a list of operations can name a block that it makes, `malloc` and `allocate` take a slot
    as third argument, any number, and `("free_slot", slot)` and `("record_stream_slot", slot,
    stream)` stand for it. The slot of a failed request is empty: both then do nothing.
    """

    codes = _CODES
    encoders = _ENCODE
    decoders = _DECODE

    def __init__(
        self,
        *,
        capacity: int = 80 << 30,
        settings: str | None = None,
        environment: Mapping[str, str] | None = None,
        base: int = 1 << 40,
        alignment: int = 2 << 20,
        gap: int = 0,
        reserve_base: int = 1 << 44,
        fabric: bool = True,
        addresses: Sequence[int] | None = None,
        placement: Placement = "rise",
        torch: str = NEWEST,
    ) -> None:
        if alignment < 1:
            raise ValueError("alignment is at least 1")
        super().__init__(build(version=torch), environment_for(settings, environment))
        words = (capacity, base, alignment, gap)
        more = struct.pack("<3Q", reserve_base, fabric, PLACEMENTS.index(placement))
        operations: list[Operation] = [("configure", words, more)]
        if addresses is not None:
            packed = struct.pack(f"<{len(addresses)}Q", *addresses)
            operations.append(("list_addresses", (len(addresses),), packed))
        refusal = self.run([*operations, ("init",)])[-1]
        if isinstance(refusal, Failure):
            self.close()
            raise ValueError(f"{refusal.kind}: {refusal.text}")

    # Blocks

    def malloc(self, nbytes: int, stream: int = 0, slot: int | None = None) -> int | Failure:
        """The address, by the raw entry point. 0 bytes have address 0."""
        return cast("int | Failure", self._one("malloc", nbytes, stream, slot))

    def allocate(self, nbytes: int, stream: int = 0, slot: int | None = None) -> int | Failure:
        """As `malloc`, but the way that a tensor takes; it leaves `stream` the current one."""
        return cast("int | Failure", self._one("allocate", nbytes, stream, slot))

    def free(self, address: int) -> Failure | None:
        """Free; 0 is a no-op."""
        return cast("Failure | None", self._one("free", address))

    def record_stream(self, address: int, stream: int) -> Failure | None:
        """The block is used on this stream too."""
        return cast("Failure | None", self._one("record_stream", address, stream))

    def empty_cache(self, pool: Pool = DEFAULT_POOL) -> Failure | None:
        """Give what is free back to the device."""
        return cast("Failure | None", self._one("empty_cache", pool))

    def enable(self, enabled: bool) -> Failure | None:
        """Switch caching for the raw entry points on or off."""
        return cast("Failure | None", self._one("enable", enabled))

    def resize(self, capacity: int) -> None:
        """Make the device larger or smaller. What is live stays."""
        self._one("resize", capacity)

    # Settings

    def set_settings(self, text: str) -> Failure | None:
        """New settings at run time, in the words of PYTORCH_CUDA_ALLOC_CONF."""
        return cast("Failure | None", self._one("set_settings", text))

    def set_memory_fraction(self, fraction: float) -> Failure | None:
        """Limit the reserved bytes to this part of the device; 1.0 takes the limit away."""
        return cast("Failure | None", self._one("set_memory_fraction", fraction))

    def memory_fraction(self) -> float:
        """The limit in force as a part of the device."""
        return cast(float, self._one("memory_fraction"))

    # Private pools

    def create_pool(self, pool: Pool, own_allocator: bool = False) -> Failure | None:
        """Create the pool, or add one reference to it. With an allocator of its own, its memory
        comes from the same device by "pool_malloc" and "pool_free"."""
        return cast("Failure | None", self._one("create_pool", pool, own_allocator))

    def begin_pool(
        self, pool: Pool, streams: Literal["all", "none"] | int = "all"
    ) -> Failure | None:
        """Open a scope that diverts allocations into the pool: those on all streams, on one, or
        on none, as on a thread that a scope is not for."""
        return cast("Failure | None", self._one("begin_pool", pool, streams))

    def end_pool(self, pool: Pool) -> Failure | None:
        """Close the scope; its reference stays."""
        return cast("Failure | None", self._one("end_pool", pool))

    def release_pool(self, pool: Pool) -> Failure | None:
        """Take one reference away."""
        return cast("Failure | None", self._one("release_pool", pool))

    def pool_use_count(self, pool: Pool) -> int | Failure:
        """The references to the pool."""
        return cast("int | Failure", self._one("pool_use_count", pool))

    def set_use_on_oom(self, pool: Pool, use: bool = True) -> Failure | None:
        """Let requests that would fail be served from the pool."""
        return cast("Failure | None", self._one("set_use_on_oom", pool, use))

    def set_no_split(self, pool: Pool) -> Failure | None:
        """Hand out the pool's blocks whole."""
        return cast("Failure | None", self._one("set_no_split", pool))

    # Captures, which only 2.15 tells from scopes

    def mark_capture(self, begins: bool) -> Failure | None:
        """A capture of a graph begins, or ends."""
        return cast("Failure | None", self._one("mark_capture", begins))

    def capture(self, stream: int, captures: bool = True) -> Failure | None:
        """Makes a stream the current one, and begins a capture there, or ends that of the stream
        and of all that have joined it. Does nothing else if it is so already."""
        return cast("Failure | None", self._one("capture", stream, captures))

    def capture_work(self, stream: int) -> None:
        """A stream that captures is given something to do, which becomes a node of the graph."""
        self._one("capture_work", stream)

    def capture_wait(self, stream: int, on: int) -> None:
        """A stream waits for one that captures, and joins its capture."""
        self._one("capture_wait", stream, on)

    def keep_records(self, keeps: bool = True) -> None:
        """From now on the process uses no memory of the host twice, so that no record of a block
        has the address of an earlier one."""
        self._one("keep_records", keeps)

    # Reading back

    def rejections(self) -> list[tuple[int, int, int]] | Failure:
        """What the observer of rejections was told: the bytes asked for, those allocated, and the
        device's. (2.15)"""
        return cast("list[tuple[int, int, int]] | Failure", self._one("rejections"))

    def stats(self) -> dict[str, int]:
        """All counters of the device, by the names in `STATS`, and what 2.15 adds to them."""
        return cast("dict[str, int]", self._one("stats"))

    def reset_peak_stats(self) -> Failure | None:
        """Every peak falls to what is current."""
        return cast("Failure | None", self._one("reset_peak_stats"))

    def reset_accumulated_stats(self) -> Failure | None:
        """Zero what only ever rises."""
        return cast("Failure | None", self._one("reset_accumulated_stats"))

    def snapshot(self, pool: Pool = DEFAULT_POOL) -> list[Segment]:
        """All segments, or one private pool's, by address."""
        return cast("list[Segment]", self._one("snapshot", pool))

    def record_history(
        self, enabled: bool, max_entries: int = 1 << 20, skip_actions: Sequence[str] = ()
    ) -> Failure | None:
        """Start to keep a trace of at most so many entries, without these; or stop."""
        return cast(
            "Failure | None", self._one("record_history", enabled, max_entries, skip_actions)
        )

    def trace(self) -> list[TraceEntry]:
        """The trace kept since `record_history`; to read it adds a "snapshot" entry."""
        return cast("list[TraceEntry]", self._one("trace"))

    # Timing

    def replay(
        self,
        op: npt.ArrayLike,
        ident: npt.ArrayLike,
        size: npt.ArrayLike,
        stream: npt.ArrayLike | None = None,
    ) -> tuple[npt.NDArray[np.uint64], float]:
        """Run a trace in one compiled loop: each event's address, and the loop's seconds.

        `op` is 0 to allocate, 1 to free and 2 to empty the cache, `ident` ties the first two
        together, and `stream` holds handles (None: all 0). The address is 0 where nothing was
        allocated, which is also a failure for lack of memory; the free of such an allocation is
        skipped. Only the upstream calls and the arrays' reads and writes are timed. Raises
        RuntimeError where upstream throws anything else.
        """
        sizes = np.ascontiguousarray(size, np.uint64)
        none = np.zeros(sizes.size, np.uint64)
        streams = none if stream is None else np.ascontiguousarray(stream, np.uint64)
        idents = np.ascontiguousarray(ident, np.uint32)
        ops = np.ascontiguousarray(op, np.uint8)
        arrays = (sizes, streams, idents, ops)
        if any(array.shape != (ops.size,) for array in arrays):
            raise ValueError("a trace is one-dimensional arrays of one length")
        words = (ops.size, int(idents.max(initial=0)) + 1)
        answer = self._one("replay", words, b"".join(array.tobytes() for array in arrays))
        if isinstance(answer, Failure):
            raise RuntimeError(f"{answer.kind}: {answer.text}")
        return cast("tuple[npt.NDArray[np.uint64], float]", answer)


def main() -> None:
    """Build, then show on a screen that the originals answer."""
    for version in PACKAGES:
        check(version)


def check(version: str) -> None:
    print(f"server    {build(version=version)}")
    with TorchPeer(capacity=1 << 30, torch=version) as peer:
        first, second = peer.malloc(1), peer.malloc(5 << 20)
        assert isinstance(first, int)
        assert isinstance(second, int)
        print(f"1 B       {first:#x}")
        print(f"5 MiB     {second:#x}")
        print(f"2 GiB     {peer.malloc(2 << 30)}")
        for name, value in peer.stats().items():
            if value and (".all.current" in name or name in COUNTERS):
                print(f"  {name:34}{value}")
        for segment in peer.snapshot():
            print(f"  {segment}")
        pairs = 100_000
        ident = np.repeat(np.arange(pairs), 2)
        _, seconds = peer.replay(np.tile([0, 1], pairs), ident, np.full(2 * pairs, 1000))
        print(f"replay    {seconds / (2 * pairs) * 1e9:.0f} ns an event")
        calls = peer.calls
    print(f"calls     {calls}")
    good = calls[:2] == [("malloc", 2 << 20, 1 << 40), ("malloc", 20 << 20, second)]
    if not good or first != 1 << 40:
        raise SystemExit("the self check failed")
    print("the self check passed")


if __name__ == "__main__":
    try:
        main()
    except PeerUnavailable as error:
        raise SystemExit(f"not available: {error}") from None
