"""Which sub-allocator pinned memory comes from."""

from __future__ import annotations

from bfc import cuda
from bfc.drivers.cuda._driver import device_in_use
from bfc.suballocators.base import SubAllocator
from bfc.suballocators.cuda import CUDASubAllocator
from bfc.suballocators.host import HostSubAllocator


def source_for(sub_allocator: object) -> tuple[SubAllocator, str]:
    """The sub-allocator that a `PinnedAllocator` is to use, and, where None was given, why that has
    only pageable memory ("" otherwise)."""
    if sub_allocator is None:
        usable = cuda.is_available()
        if usable:
            return CUDASubAllocator(device_in_use(), kind="pinned"), ""
        return HostSubAllocator(), str(usable)
    if not isinstance(sub_allocator, SubAllocator):
        raise TypeError(
            f'the first argument is a sub-allocator, such as bfc.CUDASubAllocator(kind="pinned"), '
            f"or None, not {type(sub_allocator).__name__}"
        )
    kind = sub_allocator.device.kind
    if not sub_allocator.host_accessible and kind != "simulated":
        raise ValueError(
            f"a PinnedAllocator needs memory of the host, and that of {sub_allocator!r} is not: "
            f'take bfc.CUDASubAllocator(kind="pinned") or bfc.HostSubAllocator()'
        )
    return sub_allocator, ""
