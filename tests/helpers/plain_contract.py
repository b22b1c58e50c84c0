"""The contract of sources that map no memory."""

from __future__ import annotations

import inspect

import bfc
from bfc.testing import SubAllocatorContract


class PlainContract(SubAllocatorContract):
    """`SubAllocatorContract` without the tests of what is mapped, which would all be skipped."""

    def test_it_says_whether_it_maps_memory(self, source: bfc.SubAllocator) -> None:
        assert not source.supports_virtual_memory
        super().test_it_says_whether_it_maps_memory(source)


for name, test in vars(SubAllocatorContract).items():
    if name.startswith("test_") and "mapping" in inspect.signature(test).parameters:
        setattr(PlainContract, name, None)  # pytest collects what can be called
