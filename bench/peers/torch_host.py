"""PyTorch's policy for pinned memory, compiled from its own header, over a simulated device.

The policy is a template in a header of the wheel, `at::CachingHostAllocatorImpl`, which each kind
of device completes with its streams, its events and its host memory. CUDA's part of it,
`ATen/cuda/CachingHostAllocator.cpp`, is in no header: what stands for it here is ours
(`torch_host_shim.cpp`). So the original decides which block a request gets, what is freed and when,
which events are recorded and asked, and counts; what a call of the driver does is made up.

`build(version)` downloads that version's smallest wheel once and keeps the headers. Nothing else of
PyTorch is needed. Two versions are of interest:

- 2.11.0, the version that `bfc` reproduces. It has no `limit`, and its active statistics are wrong:
  a free without events leaves them as they are, and one that waited for events takes away -1 byte.
- 2.15.0, with both limits, and these statistics mended.

`python -m bench.peers.torch_host` builds both and checks them.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import struct
import tempfile
from pathlib import Path
from typing import cast

from bench.peers.server import (
    SOURCES,
    Encoded,
    Failure,
    Peer,
    decode_calls,
    encode_fault,
    environment_for,
)
from bench.peers.tensorflow import PeerUnavailable, compiler, default_cache, run
from bench.peers.torch_wheel import keep

VERSIONS = ("2.11.0", "2.15.0")
HEADER = "ATen/core/CachingHostAllocator.h"
SHIM = Path(__file__).with_name("torch_host_shim.cpp")
# What of c10 the header names and never calls stays unresolved.
FLAGS = ("-std=c++20", "-O2", "-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files")
INCLUDE = "torch/include/"

FIGURES = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
FIELDS = ("current", "peak", "allocated", "freed")
TIMERS = ("host_alloc_time", "host_free_time")
TIMES = ("total", "max", "min", "count")
#: The keys of `TorchHostPeer.stats`, those of `torch.cuda.host_memory_stats` without averages.
STATS = (
    *(f"{figure}.{field}" for figure in FIGURES for field in FIELDS),
    *(f"{timer}.{time}" for timer in TIMERS for time in TIMES),
    "num_host_alloc",
    "num_host_free",
)
UNLIMITED = (1 << 64) - 1
_NO_SLOT = (1 << 64) - 1

# In the order of the shim's numbers.
_CODES = {
    name: code
    for code, name in enumerate(
        (
            "configure",
            "limit",
            "reserve",
            "allocate",
            "free",
            "record_event",
            "empty_cache",
            "stats",
            "reset_peak_stats",
            "reset_accumulated_stats",
            "calls",
            "fail_at",
            "hold",
            "finish",
            "finish_events",
            "live_bytes",
        )
    )
}


def microseconds(calls: int) -> int:
    """What the device's call of that number, from 1, is said to have taken."""
    return calls * 5 % 7


def build(version: str, cache: Path | None = None) -> Path:
    """The server's path; downloads and compiles only what the cache does not hold yet."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise PeerUnavailable("the server is only compiled for Linux on x86_64")
    root = (cache or default_cache()).resolve()
    made = root / f"torch_host-{version}-{_fingerprint()}"
    if not made.exists():
        if shutil.which(compiler()[0]) is None:
            raise PeerUnavailable(f"no C++ compiler: {compiler()[0]} is not on the path")
        _compile(headers(version, root), made)
    return made


def headers(version: str, cache: Path | None = None) -> Path:
    """The folder of PyTorch's headers, with `include` and `licences` in it; downloads them once."""
    root = (cache or default_cache()).resolve()
    return keep(root / f"torch_include-{version}", version, _place)


def _fingerprint() -> str:
    """Of all the server is made from, so that a changed source or compiler gets a new name."""
    text = "\0".join((*compiler(), *FLAGS)).encode()
    sources = b"".join(path.read_bytes() for path in (SHIM, *SOURCES))
    return hashlib.sha256(text + sources).hexdigest()[:16]


def _place(name: str) -> str | None:
    """Where a file of the wheel is kept. The licences are."""
    header = name.removeprefix(INCLUDE)
    if header != name:
        return f"include/{header}"
    folder, _, rest = name.partition("/")
    if folder.endswith(".dist-info") and "license" in rest.lower():
        return f"licences/{Path(rest).name}"
    return None


def _compile(upstream: Path, wanted: Path) -> None:
    if not (upstream / "include" / HEADER).exists():
        raise PeerUnavailable(f"{upstream.name} holds no {HEADER}")
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=wanted.parent) as name:
        made = Path(name) / wanted.name
        headers = ["-isystem", str(upstream / "include")]
        run([*compiler(), *FLAGS, *headers, str(SHIM), "-o", str(made)], "compiling the shim")
        made.replace(wanted)


def _decode_stats(data: memoryview) -> dict[str, int]:
    return dict(zip(STATS, struct.unpack(f"<{len(STATS)}q", data), strict=True))


def _encode_record(slot: int, stream: int, offset: int = 0, owner: int | None = None) -> Encoded:
    return (slot, offset, _NO_SLOT if owner is None else owner, stream), b""


class TorchHostPeer(Peer):
    """The original of one version, in a process of its own. Settings are the methods `limit` and
    `reserve`; background threads are off.

    The device gives the next multiple of `alignment` at or after the end of the last block, never
    reuses an address, and refuses what would take its live bytes past `capacity`. Streams are
    numbers. Work queued on a stream is over at once unless the stream is held; see `hold`. Each
    event has a number of its own.

    Blocks stand in slots, any numbers, so that a list of operations can name what it makes. A slot
    that was freed still names its block.
    """

    codes = _CODES
    encoders = {"record_event": _encode_record, "fail_at": encode_fault}  # noqa: RUF012
    decoders = {"stats": _decode_stats, "calls": decode_calls}  # noqa: RUF012

    def __init__(
        self,
        version: str = VERSIONS[0],
        *,
        capacity: int = 1 << 50,
        base: int = 1 << 40,
        alignment: int = 4096,
    ) -> None:
        super().__init__(build(version), environment_for(None, None))
        self._one("configure", capacity, base, alignment)

    # Settings

    def limit(self, round_at_most: int = UNLIMITED, cached_at_most: int = UNLIMITED) -> None:
        """pinned_max_round_threshold_mb and pinned_max_cached_size_mb, in bytes. 2.11 does not ask
        for them."""
        self._one("limit", round_at_most, cached_at_most)

    def reserve(self, nbytes: int) -> None:
        """pinned_reserve_segment_size_mb, in bytes, before the first allocation."""
        self._one("reserve", nbytes)

    # Blocks

    def allocate(self, nbytes: int, slot: int) -> int | Failure:
        """The address; 0 for 0 bytes."""
        return cast("int | Failure", self._one("allocate", nbytes, slot))

    def free(self, slot: int) -> Failure | None:
        """Free the slot's block; that of 0 bytes is a no-op."""
        return cast("Failure | None", self._one("free", slot))

    def record_event(
        self, slot: int, stream: int, offset: int = 0, owner: int | None = None
    ) -> bool | Failure:
        """Whether it knows the slot's address, plus an offset, or the context of `owner`, a slot:
        then the stream uses that block."""
        answer = self._one("record_event", slot, stream, offset, owner)
        return answer if isinstance(answer, Failure) else bool(answer)

    def empty_cache(self) -> Failure | None:
        """Give what is free back to the device."""
        return cast("Failure | None", self._one("empty_cache"))

    # Reading back

    def stats(self) -> dict[str, int]:
        """All figures, by the names in `STATS`."""
        return cast("dict[str, int]", self._one("stats"))

    def reset_peak_stats(self) -> None:
        """Every peak falls to what is current."""
        self._one("reset_peak_stats")

    def reset_accumulated_stats(self) -> None:
        """Zero what only ever rises."""
        self._one("reset_accumulated_stats")


def main() -> None:
    """Build, then show on one screen that the originals answer."""
    for version in VERSIONS:
        print(f"server    {build(version)}")
        with TorchHostPeer(version) as peer:
            first = peer.allocate(40_960, 0)
            peer.free(0)
            again = peer.allocate(50_000, 1)
            stats, calls = peer.stats(), peer.calls
        print(f"calls     {calls}")
        print(f"figures   { ({name: value for name, value in stats.items() if value}) }")
        if first != again or calls != [("host_malloc", 65_536, first)]:
            raise SystemExit("the self check failed")
    print("the self check passed")


if __name__ == "__main__":
    try:
        main()
    except PeerUnavailable as error:
        raise SystemExit(f"not available: {error}") from None
