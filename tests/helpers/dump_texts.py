"""The dump of a BFC allocator as text, in the words of several releases, of a snapshot of ours.

`tests/peers/test_logged_dumps.py` compares the words of 2.21 with what the compiled one prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from bfc.snapshots.snapshot import ChunkInfo, Snapshot

TOP = (1 << 64) - 1
FORMS = ("1.8", "2.1 on Windows", "2.8", "2.21", "XLA 2025", "XLA 2026")


def readable(nbytes: int) -> str:
    """As TensorFlow writes a size: above 1 MiB, all divisions but the last truncate."""
    if nbytes < 1024:
        return f"{nbytes}B"
    units = "KMGTPE"
    while nbytes >= 1 << 20:
        nbytes //= 1024
        units = units[1:]
    return f"{nbytes / 1024:.{1 if units[0] == 'K' else 2}f}{units[0]}iB"


def head(form: str, allocator: str, asked: int) -> Iterator[str]:
    """What is printed before the dump."""
    rounded = (asked + 255) // 256 * 256
    refused = f"Allocator ({allocator}) ran out of memory trying to allocate {readable(asked)}"
    if form == "1.8":
        yield f"{refused}.  Current allocation summary follows."
        return
    if form == "XLA 2026":
        yield f"{refused} (rounded to {rounded}) from the lower end requested by op "
        yield "If this is caused by memory fragmentation, the environment variable may improve it."
        yield "Current allocation summary follows."
        return
    yield f"{refused} (rounded to {rounded})requested by op "
    if form != "2.1 on Windows":
        yield (
            "If the cause is memory fragmentation maybe the environment variable "
            "'TF_GPU_ALLOCATOR=cuda_malloc_async' will improve the situation. "
        )
        yield "Current allocation summary follows."
    yield "Current allocation summary follows."


def dump(form: str, snapshot: Snapshot, asked: int, *, grows: bool = True) -> Iterator[str]:
    """The dump, one line an item, without what a logger puts before it."""
    rounded = (asked + 255) // 256 * 256
    yield f"BFCAllocator dump for {snapshot.device}"
    for it in snapshot.bins:
        yield (
            f"Bin ({256 << it.bin}): \tTotal Chunks: {it.total_chunks_in_bin}, Chunks in use: "
            f"{it.total_chunks_in_use}. {readable(it.total_bytes_in_bin)} allocated for chunks. "
            f"{readable(it.total_bytes_in_use)} in use in bin. "
            f"{readable(it.total_requested_bytes_in_use)} client-requested in use in bin."
        )
    number = min(max(rounded >> 8, 1).bit_length() - 1, 20)
    yield f"Bin for {readable(rounded)} was {readable(256 << number)}, Chunk State: "
    numbers = iter(range(1, 1 << 40))
    for region in snapshot.regions:
        if form not in ("1.8",):
            yield f"Next region of size {region.size}"
        for chunk in region.chunks:
            is_last = chunk.ptr + chunk.size == region.end
            yield chunk_line(form, chunk, TOP if is_last else next(numbers))
    yield "     Summary of in-use Chunks by size: "
    sizes = Counter(chunk.size for chunk in snapshot.live_chunks())
    for size, count in sorted(sizes.items()):
        yield f"{count} Chunks of size {size} totalling {readable(size * count)}"
    yield f"Sum Total of in-use chunks: {readable(snapshot.stats.bytes_in_use)}"
    yield from figures(form, snapshot, rounded, grows)


def chunk_line(form: str, chunk: ChunkInfo, successor: int) -> str:
    used = chunk.in_use
    if form == "1.8":
        return f"{'Chunk' if used else 'Free '} at 0x{chunk.ptr:x} of size {chunk.size}"
    if form == "2.1 on Windows":
        state = "InUse" if used else "Free "
        return f"{state} at {chunk.ptr:016X} next {successor} of size {chunk.size}"
    tag = " tag lower" if form == "XLA 2026" else ""
    name = f" allocation_annotation {chunk.owner}" if chunk.owner and form == "XLA 2026" else ""
    freed = f" freed_at_count {chunk.freed_at_count}" if chunk.freed_at_count else ""
    state = "InUse" if used else "Free "
    return f"{state} at {chunk.ptr:x} of size {chunk.size}{tag}{name} next {successor}{freed}"


def figures(form: str, snapshot: Snapshot, rounded: int, grows: bool) -> Iterator[str]:
    stats = snapshot.stats
    pool, limit, left = stats.pool_bytes, stats.bytes_limit, stats.bytes_limit - stats.pool_bytes
    largest = max((chunk.size for chunk in snapshot.free_chunks()), default=0)
    names = {"2.21": "Total size in pool", "XLA 2025": "Total bytes in pool"}
    if form in ("2.1 on Windows", "2.8", "2.21", "XLA 2025"):
        shown = [readable(it) if form == "2.21" else it for it in (pool, limit, left, 2 * pool)]
        yield (
            f"{names.get(form, 'total_region_allocated_bytes_')}: {shown[0]} memory_limit_: "
            f"{shown[1]} available {'size' if form == '2.21' else 'bytes'}: {shown[2]} "
            f"curr_region_allocation_bytes_: {shown[3]}"
        )
    elif form == "XLA 2026":
        yield (
            f"Allocator memory summary: rounded request {readable(rounded)}, total free in pool "
            f"{readable(pool - stats.bytes_in_use)}, largest free chunk usable by lower end "
            f"{readable(largest)}, unallocated bytes {readable(left)}, pool size {readable(pool)}, "
            f"pool limit {readable(limit)}"
        )
        hint = "enabled" if grows else "disabled; fixed-size pool; not an attempted allocation"
        target = f"next region allocation target {readable(2 * pool)}"
        yield f"Allocator region growth hint: {target} (growth {hint})."
    yield "Stats: "
    is_readable = form in ("2.21", "XLA 2026")
    rows = {
        "Limit": limit, "InUse": stats.bytes_in_use, "MaxInUse": stats.peak_bytes_in_use,
        "NumAllocs": stats.num_allocs, "MaxAllocSize": stats.largest_alloc_size,
    }  # fmt: skip
    for name, value in rows.items():
        text = readable(value) if is_readable and name != "NumAllocs" else str(value)
        yield f"{name + ':':14}{text:>22}"
    yield ""
    if form != "1.8":
        yield snapshot.occupancy()


def prefixed(form: str, lines: Iterable[str]) -> list[str]:
    """The lines as TensorFlow's own logger writes them: those that go on have nothing before."""
    place = {
        "1.8": "tensorflow/core/common_runtime/bfc_allocator.cc:661",
        "2.1 on Windows": "tensorflow/core/common_runtime/bfc_allocator.cc:905",
        "2.8": "tensorflow/core/common_runtime/bfc_allocator.cc:1083",
        "2.21": "bfc_allocator.cc:1105",
        "XLA 2025": "external/xla/xla/tsl/framework/bfc_allocator.cc:1114",
        "XLA 2026": "bfc_allocator.cc:1410",
    }[form]
    found = []
    for at, line in enumerate(lines):
        goes_on = ("If th", "Current", "Limit", "InUse:", "MaxInUse", "Num", "MaxAlloc")
        bare = not line or line.startswith(goes_on)
        level = "W" if line.startswith(("Allocator (", "*", "_", "x")) else "I"
        if form in ("2.21", "XLA 2026"):
            before = f"{level}0000 00:00:1795910690.{at % 1000000:06}   32350 {place}] "
        else:
            before = f"2025-01-05 09:48:28.{at % 1000000:06}: {level} {place}] "
        found.append(line if bare else before + line)
    return found


def text(form: str, snapshot: Snapshot, asked: int, **options: bool) -> list[str]:
    """A whole log: what stands before the dump, and the dump."""
    lines = [*head(form, snapshot.device, asked), *dump(form, snapshot, asked, **options)]
    return prefixed(form, lines)


#: What loggers, launchers and containers make of a line, by name.
WRAPPERS: dict[str, Callable[[int, str], str]] = {
    "bare": lambda at, line: line,
    "torchrun": lambda at, line: f"[rank3]: {line}",
    "docker compose": lambda at, line: f"trainer-1  | {line}",
    "ray": lambda at, line: f"(TrainWorker pid=4711, ip=10.0.0.7) {line}",
    "kubernetes": lambda at, line: f"2025-01-05T09:48:28.{at % 10**9:09}Z stderr F {line}",
    "colours": lambda at, line: f"\x1b[33m{line[:20]}\x1b[0m{line[20:]}\x1b[K",
    "windows": lambda at, line: f"{line}\r",
    "srun": lambda at, line: f" 3: {line}",
    "mpirun": lambda at, line: f"[1,3]<stderr>:{line}",
    "kubectl": lambda at, line: f"[pod/train-0/main] {line}",
    "vllm": lambda at, line: f"(Worker_TP2 pid=99) ERROR 04-09 20:31:10 [executor.py:949] {line}",
    "python": lambda at, line: f"2025-01-05 09:48:28,123 ERROR worker.py:12 - {line}",
}
