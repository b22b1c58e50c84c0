"""The usual GPUs by name: what memory they have, and what the rules of operators ask of them.

Numbers of multiprocessors are from NVIDIA's data sheets and architecture papers. They were compared
with what `torch.cuda.get_device_properties` or other programs printed in public logs, for all but
the RTX 4070 and the V100 of 32 GB, which has the chip of the other. Threads of a multiprocessor are
from the table of compute capabilities in the CUDA programming guide. The memory is what such logs
and PyTorch's out-of-memory errors name on such a GPU under Linux: one of several, since drivers
differ by some MiB on GPUs for servers (81008 to 81090 on an H100, 81038 to 81251 on an A100, 40441
to 40654 on one of 40 GB), and by hundreds on GPUs that drive screens (24082 to 24563 on an RTX
4090). `bfc devices` says what yours has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import SupportsIndex

from bfc.units import format_bytes, parse_bytes

#: What CUDA's context takes before the first tensor: 300 to 600 MiB, by the driver, the GPU and
#: what is loaded.
CONTEXT = 512 << 20
#: Threads that are resident on a multiprocessor, by compute capability.
THREADS = {(7, 5): 1024, **dict.fromkeys([(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)], 1536)}
MOST_THREADS = 2048
#: How many clusters of 1, 2, 3 and so on blocks an H100 of 132 multiprocessors runs at once, if a
#: multiprocessor has room for one block (cudaOccupancyMaxActiveClusters): a cluster does not span
#: the groups in which the multiprocessors are.
CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7, 2, 2)


@dataclass(frozen=True)
class GPU:
    """What a prediction needs to know of a GPU."""

    name: str  # as `torch.cuda.get_device_name` returns it, or "a GPU of 24.00 GiB"
    memory: int  # bytes, as `torch.cuda.get_device_properties` tells it
    cc: tuple[int, int]  # the compute capability
    sms: int  # multiprocessors
    threads_per_sm: int  # that are resident at most
    usable: int  # without CUDA's context; a size that was given instead of a name is all usable


def _gpu(name: str, gib: float, cc: tuple[int, int], sms: int) -> GPU:
    memory = round(gib * 1024) << 20
    full = f"NVIDIA {name}"
    return GPU(full, memory, cc, sms, THREADS.get(cc, MOST_THREADS), memory - CONTEXT)


DEVICES: dict[str, GPU] = {
    "p100": _gpu("Tesla P100-PCIE-16GB", 15.90, (6, 0), 56),
    "v100": _gpu("Tesla V100-SXM2-16GB", 15.77, (7, 0), 80),
    "v100-32gb": _gpu("Tesla V100-SXM2-32GB", 31.74, (7, 0), 80),
    "titan-rtx": _gpu("TITAN RTX", 23.65, (7, 5), 72),
    "rtx2080ti": _gpu("GeForce RTX 2080 Ti", 10.75, (7, 5), 68),
    "t4": _gpu("Tesla T4", 14.74, (7, 5), 40),
    "a100": _gpu("A100-SXM4-80GB", 79.15, (8, 0), 108),
    "a100-40gb": _gpu("A100-SXM4-40GB", 39.49, (8, 0), 108),
    "a30": _gpu("A30", 23.60, (8, 0), 56),
    "a10": _gpu("A10", 22.06, (8, 6), 72),
    "a10g": _gpu("A10G", 22.06, (8, 6), 80),
    "a40": _gpu("A40", 44.35, (8, 6), 84),
    "rtx-a6000": _gpu("RTX A6000", 47.53, (8, 6), 84),
    "rtx3060": _gpu("GeForce RTX 3060", 11.76, (8, 6), 28),
    "rtx3080": _gpu("GeForce RTX 3080", 9.77, (8, 6), 68),
    "rtx3090": _gpu("GeForce RTX 3090", 23.56, (8, 6), 82),
    "l4": _gpu("L4", 22.03, (8, 9), 58),
    "l40s": _gpu("L40S", 44.39, (8, 9), 142),
    "rtx6000-ada": _gpu("RTX 6000 Ada Generation", 47.37, (8, 9), 142),
    "rtx4070": _gpu("GeForce RTX 4070", 11.71, (8, 9), 46),
    "rtx4080": _gpu("GeForce RTX 4080", 15.67, (8, 9), 76),
    "rtx4090": _gpu("GeForce RTX 4090", 23.52, (8, 9), 128),
    "h100": _gpu("H100 80GB HBM3", 79.18, (9, 0), 132),
    "h100-pcie": _gpu("H100 PCIe", 79.11, (9, 0), 114),
    "h100-nvl": _gpu("H100 NVL", 92.62, (9, 0), 132),
    "h200": _gpu("H200", 139.80, (9, 0), 132),
    "b200": _gpu("B200", 178.35, (10, 0), 148),
    "rtx5080": _gpu("GeForce RTX 5080", 15.47, (12, 0), 84),
    "rtx5090": _gpu("GeForce RTX 5090", 31.36, (12, 0), 170),
    "rtx-pro-6000": _gpu("RTX PRO 6000 Blackwell", 94.97, (12, 0), 188),
}
#: A few that are named where no name is like the one that was given.
SOME = ("a100", "h100", "l4", "rtx4090")
#: Other names of theirs.
ALIASES = {
    "v100-16gb": "v100",
    "a100-80gb": "a100",
    "a6000": "rtx-a6000",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
}
#: No device is smaller: a smaller number lacks its unit, or is a part of a name.
LEAST = 1 << 20
#: What a device is like of which only the bytes are said.
TYPICAL = DEVICES["a100"]


def _key(name: str) -> str:
    """Upper and lower case, spaces, dashes and the maker's names do not count."""
    text = name.lower()
    for word in ("nvidia", "geforce", "tesla"):
        text = text.replace(word, "")
    return "".join(filter(str.isalnum, text))


_NAMES = {
    **{_key(name): name for name in DEVICES},
    **{_key(gpu.name): name for name, gpu in DEVICES.items()},
    **{_key(alias): name for alias, name in ALIASES.items()},
}


def clusters_at_once(sms: int, blocks: int) -> int:
    """How many clusters of so many blocks, 18 at most, run at once on a Hopper of so many
    multiprocessors. Only an H100 was asked: of others it is assumed that they have as many in
    proportion.

    >>> clusters_at_once(132, 3), clusters_at_once(114, 3)
    (39, 33)
    """
    return max(1, CLUSTERS[blocks - 1] * sms // CLUSTERS[0])


def find(
    device: SupportsIndex | str,
    cc: str | Sequence[int] | None = None,
    sms: int | None = None,
) -> GPU:
    """A GPU by its name, such as "h100" or "RTX 4090", or one of which PyTorch can take so many
    bytes, such as "24 GiB".

    The compute capability, such as "9.0", and the number of multiprocessors are by default those of
    the named GPU; with bytes, those of an A100. Raises ValueError if the name is not in the table,
    with the names that are like it; or if a number is wrong.

    >>> find("RTX 4090").sms, find("24GiB", cc="8.6").threads_per_sm
    (128, 1536)
    """
    name = _NAMES.get(_key(device)) if isinstance(device, str) else None
    gpu = DEVICES[name] if name is not None else _of_size(device)
    if cc is not None:
        chosen = _capability(cc)
        gpu = replace(gpu, cc=chosen, threads_per_sm=THREADS.get(chosen, MOST_THREADS))
    if sms is not None:
        if sms < 1:
            raise ValueError(f"a GPU has at least 1 multiprocessor, not {sms}")
        gpu = replace(gpu, sms=sms)
    return gpu


def _of_size(device: SupportsIndex | str) -> GPU:
    try:
        size = parse_bytes(device)
    except ValueError:
        if not isinstance(device, str) or device.strip()[:1] in {*"0123456789.-"}:
            raise
        near = get_close_matches(_key(device), list(_NAMES), n=4, cutoff=0.5)
        names = dict.fromkeys(_NAMES[key] for key in near)
        known = f"near names are {', '.join(names)}" if names else f"such are {', '.join(SOME)}"
        raise ValueError(
            f"no GPU named {device!r} is known; {known}, and bfc predict --help lists all. Or say "
            "how many bytes PyTorch can take, such as 24GiB, with the compute capability (--cc "
            "8.9) and the number of multiprocessors (--sms 128)"
        ) from None
    if size == 0:
        raise ValueError("a device of 0 bytes holds nothing: say its size, such as 24GiB")
    if isinstance(device, str) and device.strip().isdecimal() and size < LEAST:
        number = device.strip()
        named = dict.fromkeys(name for key, name in _NAMES.items() if number in key)
        raise ValueError(
            f"{number} bytes? Write {number}{'GiB' if size < 1024 else 'MiB'}"
            + (f", or the name of a GPU: {', '.join(named)}" if named else "")
        )
    return replace(TYPICAL, name=f"a GPU of {format_bytes(size)}", memory=size, usable=size)


def _capability(given: str | Sequence[int]) -> tuple[int, int]:
    parts = given.split(".") if isinstance(given, str) else given
    try:
        major, minor = (int(part) for part in parts)
    except (TypeError, ValueError):
        raise ValueError(
            f"{given!r} is not a compute capability: write it as 9.0; NVIDIA lists it for each GPU"
        ) from None
    if not (5 <= major <= 20 and 0 <= minor <= 9):
        raise ValueError(f"{major}.{minor} is not a compute capability that PyTorch runs on")
    return major, minor
