"""TensorFlow's compiled `tsl::BFCAllocator`, over a device that hands out integers.

`build()` downloads a published CPU wheel once, keeps one library and the headers it needs, and
compiles `tensorflow_shim.cpp` against them. `TensorFlowBFC` then drives the original, with no GPU
and no memory behind the addresses. `python -m bench.peers.tensorflow` builds it and checks it.

There are two versions: the release 2.21.0, and a nightly build of what becomes 2.23, with the
allocator of today's XLA and JAX. Its wheel has 645 MB: what runs on every change does without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int64, c_uint64, c_void_p
from enum import IntFlag
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from bench.peers.closing import Closing

RELEASE = "2.21.0"
#: The newest build that the index has of TensorFlow's main branch, by its date: nightly builds go.
NIGHTLY = "2.23.0.dev20261026"
#: The distribution of each version.
PACKAGES = {RELEASE: "tensorflow-cpu", NIGHTLY: "tf-nightly"}
LIBRARY = "libtensorflow_framework.so.2"
NIGHTLY_LIBRARY = "libtensorflow_nightly_d.so.2"  # of as many letters: see `_rename_library`
HEADERS = ("Eigen/", "absl/", "google/", "ml_dtypes/", "tsl/", "xla/tsl/")
SOURCE = Path(__file__).with_name("tensorflow_shim.cpp")
FLAGS = ("-std=c++17", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility-inlines-hidden")
# Any Python will do to drive the library, so the wheel need not be the running interpreter's.
WHEEL = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311")
PLATFORM = ("--platform", "manylinux_2_27_x86_64")

STATS = (
    "num_allocs",
    "bytes_in_use",
    "peak_bytes_in_use",
    "largest_alloc_size",
    "bytes_limit",
    "pool_bytes",
    "peak_pool_bytes",
    "bytes_reserved",
    "peak_bytes_reserved",
    "largest_free_block_bytes",
    "peak_allocated_bytes",
)

U64 = 1 << 64


class PeerUnavailable(RuntimeError):  # noqa: N818 - what is the case, not what went wrong
    """The compiled original cannot be had here; the text says in one line what failed."""


class MappedChunk(TypedDict):
    """One chunk of `TensorFlowBFC.memory_map`. `bin` is -1 for a chunk in use."""

    address: int
    size: int
    requested_size: int
    bin: int
    freed_at_count: int
    in_use: bool


# Building ------------------------------------------------------------------------------------


def default_cache() -> Path:
    """`$BFC_PEER_CACHE`, or `build/peers` in the repository root."""
    chosen = os.environ.get("BFC_PEER_CACHE")
    return Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "build" / "peers"


def build(cache: Path | None = None, version: str = RELEASE) -> Path:
    """The compiled shim's path; downloads and compiles only what the cache does not hold yet.

    Whatever appears in the cache is complete: it is made in a temporary folder and then renamed.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise PeerUnavailable("the compiled TensorFlow is only fetched for Linux on x86_64")
    shim = shim_of(version, cache)
    if not shim.exists():
        root = shim.parent
        root.mkdir(parents=True, exist_ok=True)
        _compile(_upstream(root, version), shim, _flags(version))
    return shim


def shim_of(version: str, cache: Path | None = None) -> Path:
    """Where the compiled shim of a version is, or will be."""
    root = (cache or default_cache()).resolve()
    return root / f"tensorflow_shim-{_fingerprint(version)}.so"


def _flags(version: str) -> tuple[str, ...]:
    return (*FLAGS, f"-DBFC_TF_ENDS={int(version != RELEASE)}")


def _fingerprint(version: str) -> str:
    """Of all the shim is made from, so that a changed source or compiler gets a new file name."""
    text = "\0".join((version, *compiler(), *_flags(version))).encode()
    return hashlib.sha256(text + SOURCE.read_bytes()).hexdigest()[:16]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _upstream(root: Path, version: str) -> Path:
    """The folder with upstream's library and headers, downloaded if it is not there yet."""
    folder = root / f"tensorflow-{version}"
    if folder.exists():
        return folder
    if shutil.which(compiler()[0]) is None:
        raise PeerUnavailable(f"no C++ compiler: {compiler()[0]} is not on the path")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as name:
        wheel = _download(Path(name), version)
        _extract(wheel, Path(name) / "kept")
        if version != RELEASE:
            _rename_library(Path(name) / "kept" / LIBRARY)
        try:
            (Path(name) / "kept").rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same files
                raise
    return folder


def _download(folder: Path, version: str) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
    distribution = f"{PACKAGES[version]}=={version}"
    package = [distribution, *WHEEL, *PLATFORM, "-d", str(folder)]
    run([sys.executable, "-m", "pip", "download", *options, *package], "the download")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise PeerUnavailable(f"the download of {distribution} left no wheel")
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Keep the library, the headers and the licence of a wheel, and delete the wheel."""
    headers = tuple(f"tensorflow/include/{prefix}" for prefix in HEADERS)
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename
            licence = name.endswith("/LICENSE") and name.count("/") == 1
            if not (name.startswith(headers) or name == f"tensorflow/{LIBRARY}" or licence):
                continue
            path = target / (name.rpartition("/")[2] if licence else name.partition("/")[2])
            if info.is_dir() or ".." in path.parts:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    wheel.unlink()
    if not (target / LIBRARY).exists():
        raise PeerUnavailable(f"the wheel {wheel.name} holds no {LIBRARY}")


def _rename_library(library: Path) -> None:
    """Give a library another name, in its own table of names, too: a process loads one library of
    a name, and would take the other version for this one."""
    name = f"\0{LIBRARY}\0".encode()
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        at = content.find(name)
        if at < 0 or content.find(name, at + 1) >= 0:
            raise PeerUnavailable(f"{library} does not have its name once")
        content[at : at + len(name)] = f"\0{NIGHTLY_LIBRARY}\0".encode()
    library.rename(library.with_name(NIGHTLY_LIBRARY))


def _compile(upstream: Path, shim: Path, flags: Sequence[str]) -> None:
    if shutil.which(compiler()[0]) is None:
        raise PeerUnavailable(f"no C++ compiler: {compiler()[0]} is not on the path")
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=shim.parent) as name:
        made = Path(name) / shim.name
        # The library is found next to the shim, wherever the cache has been moved to.
        rpath = f"-Wl,-z,defs,-rpath,$ORIGIN/{upstream.name}"
        (library,) = upstream.glob("lib*")
        inputs = ["-isystem", str(upstream / "include"), str(SOURCE), str(library)]
        run([*compiler(), *flags, *inputs, rpath, "-o", str(made)], "compiling the shim")
        made.replace(shim)


def run(command: Sequence[str], what: str) -> None:
    """Run a command quietly; its first line with the word "error" is the reason if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerUnavailable(f"{what} failed: {error}") from error
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    reasons = [line for line in lines if "error" in line.lower()] or lines[-1:]
    raise PeerUnavailable(f"{what} failed: {(reasons or [f'exit status {done.returncode}'])[0]}")


# Loading -------------------------------------------------------------------------------------


class _Options(ctypes.Structure):
    """`bfc_tf_options` in the shim, field by field."""

    _fields_ = [
        ("memory_limit", c_uint64),
        ("capacity", c_uint64),
        ("base", c_uint64),
        ("alignment", c_uint64),
        ("gap", c_uint64),
        ("max_bytes", c_uint64),
        ("overdeliver", c_uint64),
        ("fragmentation_fraction", c_double),
        ("allow_growth", c_uint64),
        ("garbage_collection", c_uint64),
        ("supports_coalescing", c_uint64),
        ("timing_counter", c_uint64),
        ("granularity", c_uint64),
        ("partitioned", c_uint64),
        ("initial_region_bytes", c_uint64),
        ("lower_policy", c_uint64),
        ("upper_policy", c_uint64),
    ]


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new": (c_void_p, (POINTER(_Options),)),
    "close": (None, (c_void_p,)),
    "delete": (None, (c_void_p,)),
    "allocate": (c_uint64, (c_void_p, *(c_uint64,) * 4)),
    "deallocate": (None, (c_void_p, c_uint64)),
    "stats": (None, (c_void_p, c_void_p)),
    "clear_stats": (None, (c_void_p,)),
    "requested_size": (c_uint64, (c_void_p, c_uint64)),
    "allocated_size": (c_uint64, (c_void_p, c_uint64)),
    "allocation_id": (c_int64, (c_void_p, c_uint64)),
    "set_safe_frontier": (None, (c_void_p, c_uint64)),
    "fail_at": (None, (c_void_p, c_uint64)),
    "call_count": (c_uint64, (c_void_p,)),
    "copy_calls": (None, (c_void_p, c_void_p)),
    "map_chunks": (c_uint64, (c_void_p,)),
    "copy_chunks": (None, (c_void_p, c_void_p)),
    "dump": (c_char_p, (c_void_p,)),
    "read_dump": (c_char_p, (c_void_p, c_char_p)),
    "replay": (c_double, (c_void_p,) * 6 + (c_uint64, c_uint64, c_void_p)),
}

# Both are read while the library loads, so they need not stay for the process's other libraries.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}

_loaded: dict[Path, ctypes.CDLL] = {}


def _load(path: Path) -> ctypes.CDLL:
    """The shim as a library, with upstream's warnings and its greeting off unless asked for."""
    if path not in _loaded:
        ours = {name: value for name, value in _QUIET.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise PeerUnavailable(f"loading the shim failed: {error}") from error
        finally:
            for name in ours:
                del os.environ[name]
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"bfc_tf_{name}")
            function.restype, function.argtypes = result, arguments
        _loaded[path] = library
    return _loaded[path]


# Driving -------------------------------------------------------------------------------------


class EndPolicy(IntFlag):
    """How the nightly serves one end. The shim reads the bits."""

    DESCENDING = 1  # of free chunks of one size, the one at the highest address
    EXACT_HOLES = 2  # what is left over of a free chunk is always split off
    EXACT_GAP = 4  # so is what is left over of the free memory between the ends


def _u64(value: int) -> int:
    """ctypes would wrap what does not fit; a request of -1 must not become one of 2**64 - 1."""
    if not 0 <= value < U64:
        raise OverflowError(f"{value} does not fit in 64 unsigned bits")
    return value


class TensorFlowBFC(Closing):
    """The compiled allocator. Its device hands out rising addresses and never reuses one.

    The device refuses what would take its live bytes past `capacity` (None: no end), a call above
    `max_bytes`, and the call chosen by `fail_at`. Otherwise it gives the next multiple of
    `alignment` at or after the end of the last block and `gap`; `overdeliver` bytes are added to
    what was asked. Coalescing of touching regions follows `supports_coalescing`. Retry is off:
    a request that fails does so at once. `timing_counter` stamps frees, as a timestamped allocator.

    Upstream does not defend itself, and a mistake ends or stops the whole process:

    - A pointer it does not know, a pointer into a chunk's later bytes and a double free abort, in
      `deallocate_raw` and in the size queries; a pointer below a region may crash.
    - A size above 2**64 - 256 rounds to 0 and corrupts its books, and so does a
      `fragmentation_fraction` so small that the slack cap truncates to 0.
    - A device that keeps refusing makes a request of at most 2304 bytes retry for ever, and so does
      the growth target once it has doubled past 2**64 (43 regions from 2 MiB).
    - A block that is not a multiple of 256 bytes, or a pool past its limit, is accepted unchecked.
    - Garbage collection together with `timing_counter` can read freed regions.

    `version` is that of the original. What follows it is for the nightly alone: the device gives
    whole multiples of `granularity` and says so, and `partitioned` serves requests from two ends,
    each with a policy of its own. Growing, it begins with `initial_region` bytes for both ends, and
    what comes later is for the upper one.

    Its books take one part in 32 of the pool in real memory: 2.5 GiB for a pool of 80 GiB.
    """

    _peer: int | None = None

    def __init__(
        self,
        *,
        memory_limit: int,
        allow_growth: bool = False,
        garbage_collection: bool = True,
        fragmentation_fraction: float = 0.0,
        capacity: int | None = None,
        base: int = 1 << 40,
        alignment: int = 2 << 20,
        gap: int = 0,
        supports_coalescing: bool = False,
        max_bytes: int | None = None,
        overdeliver: int = 0,
        timing_counter: bool = False,
        version: str = RELEASE,
        granularity: int = 1,
        spatial_partitioning: bool = False,
        initial_region: int = 0,
        lower_end: EndPolicy = EndPolicy.EXACT_GAP,
        upper_end: EndPolicy = EndPolicy.EXACT_GAP,
    ) -> None:
        if alignment < 1 or max_bytes == 0:
            raise ValueError("alignment and max_bytes are at least 1")
        if version == RELEASE and (granularity != 1 or spatial_partitioning):
            raise ValueError(
                f"TensorFlow {RELEASE} has one end, and does not ask for a granularity"
            )
        options = _Options(
            memory_limit=_u64(memory_limit),
            capacity=U64 - 1 if capacity is None else _u64(capacity),
            base=_u64(base),
            alignment=_u64(alignment),
            gap=_u64(gap),
            max_bytes=_u64(max_bytes or 0),
            overdeliver=_u64(overdeliver),
            fragmentation_fraction=fragmentation_fraction,
            allow_growth=allow_growth,
            garbage_collection=garbage_collection,
            supports_coalescing=supports_coalescing,
            timing_counter=timing_counter,
            granularity=granularity,
            partitioned=spatial_partitioning,
            initial_region_bytes=_u64(initial_region),
            lower_policy=lower_end,
            upper_policy=upper_end,
        )
        self._log: list[tuple[str, int, int | None]] = []
        self._library = _load(build(version=version))
        self._peer = self._library.bfc_tf_new(ctypes.byref(options))

    def close(self) -> None:
        """Destroy the allocator. `calls` stays, with the frees of its destructor."""
        if self._peer is None:
            return
        self._library.bfc_tf_close(self._peer)
        self._log = self.calls
        peer, self._peer = self._peer, None
        self._library.bfc_tf_delete(peer)

    @property
    def _open(self) -> int:
        if self._peer is None:
            raise ValueError("this allocator is closed")
        return self._peer

    def allocate_raw(
        self, nbytes: int, freed_before: int = 0, *, alignment: int = 0, upper: bool = False
    ) -> int:
        """The address, or 0 on failure. With `freed_before`, only chunks freed by that count. The
        release ignores the alignment and the end."""
        address: int = self._library.bfc_tf_allocate(
            self._open, _u64(nbytes), _u64(freed_before), _u64(alignment), upper
        )
        return address

    def deallocate_raw(self, ptr: int) -> None:
        """Free; 0 is a no-op. A pointer upstream does not know aborts the process."""
        self._library.bfc_tf_deallocate(self._open, _u64(ptr))

    def stats(self) -> dict[str, int]:
        """Upstream's counters by name; this version never fills the largest free block."""
        values = (c_int64 * len(STATS))()
        self._library.bfc_tf_stats(self._open, values)
        return dict(zip(STATS, values, strict=True))

    def clear_stats(self) -> None:
        """Zero the number of allocations and the largest; the peak falls to what is in use."""
        self._library.bfc_tf_clear_stats(self._open)

    def requested_size(self, ptr: int) -> int:
        """The bytes asked for; for a free chunk, those of its last user."""
        size: int = self._library.bfc_tf_requested_size(self._open, _u64(ptr))
        return size

    def allocated_size(self, ptr: int) -> int:
        """The bytes of the whole chunk."""
        size: int = self._library.bfc_tf_allocated_size(self._open, _u64(ptr))
        return size

    def allocation_id(self, ptr: int) -> int:
        """The number of the allocation, from 1; -1 for a free chunk."""
        ident: int = self._library.bfc_tf_allocation_id(self._open, _u64(ptr))
        return ident

    def set_safe_frontier(self, n: int) -> None:
        """Say that all frees stamped below `n` are over on the device. It only ever rises."""
        self._library.bfc_tf_set_safe_frontier(self._open, _u64(n))

    def fail_at(self, n: int) -> None:
        """Refuse the n-th call of the device's alloc from now (1 is the next); 0 takes it back."""
        self._library.bfc_tf_fail_at(self._open, _u64(n))

    @property
    def calls(self) -> list[tuple[str, int, int | None]]:
        """The device's log: ("alloc" or "free", bytes, address, or None for a refusal)."""
        if self._peer is None:
            return list(self._log)
        rows = np.empty((self._library.bfc_tf_call_count(self._peer), 3), np.uint64)
        self._library.bfc_tf_copy_calls(self._peer, rows.ctypes.data)
        return [
            ("free", nbytes, address) if kind else ("alloc", nbytes, address or None)
            for kind, nbytes, address in rows.tolist()
        ]

    def memory_map(self) -> list[MappedChunk]:
        """All chunks, by region end and then by address. A free one's requested size is stale."""
        rows = np.empty((self._library.bfc_tf_map_chunks(self._open), 6), np.int64)
        self._library.bfc_tf_copy_chunks(self._peer, rows.ctypes.data)
        return [
            MappedChunk(
                address=address % U64,
                size=size,
                requested_size=requested,
                bin=number,
                freed_at_count=freed_at,
                in_use=bool(in_use),
            )
            for address, size, requested, number, freed_at, in_use in rows.tolist()
        ]

    def memory_dump(self) -> dict[str, Any]:
        """All of `RecordMemoryMap`, as protobuf writes it as JSON."""
        dump: dict[str, Any] = json.loads(self._library.bfc_tf_dump(self._open))
        return dump

    def read_dump(self, dump: dict[str, Any]) -> dict[str, Any]:
        """A dump after upstream's message has read it. ValueError: it cannot, or not all of it."""
        text = self._library.bfc_tf_read_dump(self._open, json.dumps(dump).encode())
        if text is None:
            raise ValueError("this is no MemoryDump")
        read: dict[str, Any] = json.loads(text)
        return read

    def replay(
        self,
        op: npt.ArrayLike,
        ident: npt.ArrayLike,
        size: npt.ArrayLike,
        *,
        freed_before: npt.ArrayLike | None = None,
        upper: npt.ArrayLike | None = None,
    ) -> tuple[npt.NDArray[np.uint64], float]:
        """Run a trace in one compiled loop: each event's address, and the loop's seconds.

        `op` is 0 to allocate and 1 to free, and `ident` ties the two together. The address is 0 at
        a free and at a failure; the free of an allocation that failed is skipped. Only the two
        upstream calls and the arrays' reads and writes are timed.
        """
        ops = np.ascontiguousarray(op, np.uint8)
        idents = np.ascontiguousarray(ident, np.uint32)
        sizes = np.ascontiguousarray(size, np.uint64)
        before = None if freed_before is None else np.ascontiguousarray(freed_before, np.uint64)
        arrays = (ops, idents, sizes) if before is None else (ops, idents, sizes, before)
        if any(array.shape != (ops.size,) for array in arrays):
            raise ValueError("a trace is one-dimensional arrays of one length")
        if ops.size and ops.max() > 1:
            raise ValueError("the trace releases what is cached: TensorFlow has no call for that")
        ends = None if upper is None else np.ascontiguousarray(upper, np.uint8)
        addresses = np.empty(ops.size, np.uint64)
        seconds: float = self._library.bfc_tf_replay(
            self._open,
            ops.ctypes.data,
            idents.ctypes.data,
            sizes.ctypes.data,
            None if before is None else before.ctypes.data,
            None if ends is None else ends.ctypes.data,
            ops.size,
            int(idents.max(initial=0)) + 1,
            addresses.ctypes.data,
        )
        return addresses, seconds


def main() -> None:
    """Build, then show on one screen that the original answers."""
    print(f"shim      {build()}")
    with TensorFlowBFC(memory_limit=1 << 30, allow_growth=True) as allocator:
        first, second = allocator.allocate_raw(1), allocator.allocate_raw(5 << 20)
        print(f"1 B       {first:#x}, chunk of {allocator.allocated_size(first)}")
        print(f"5 MiB     {second:#x}, chunk of {allocator.allocated_size(second)}")
        print(f"2 GiB     {allocator.allocate_raw(2 << 30)} (past the limit)")
        for name, value in allocator.stats().items():
            print(f"  {name:26}{value}")
        for chunk in allocator.memory_map():
            print(f"  {chunk}")
        pairs = 100_000
        ident = np.repeat(np.arange(pairs), 2)
        _, seconds = allocator.replay(np.tile([0, 1], pairs), ident, np.full(2 * pairs, 1000))
        print(f"replay    {seconds / (2 * pairs) * 1e9:.0f} ns an event")
    print(f"calls     {allocator.calls}")
    good = allocator.calls[0] == ("alloc", 2 << 20, 1 << 40) and second - first == 2 << 20
    if not good:
        raise SystemExit("the self check failed")
    print("the self check passed")


if __name__ == "__main__":
    try:
        main()
    except PeerUnavailable as error:
        raise SystemExit(f"not available: {error}") from None
