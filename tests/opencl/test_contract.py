"""The contract of sources, on OpenCL buffers and on SVM."""

from __future__ import annotations

from typing import Any

import pytest
from plain_contract import PlainContract

import bfc

CAPACITY = 64 << 20


class TestOpenCL(PlainContract):
    @pytest.fixture(autouse=True, params=["buffers", "svm"])
    def _chosen(self, request: pytest.FixtureRequest, context: Any) -> None:
        self.context, self.svm = context, request.param == "svm"

    def make(self) -> bfc.SubAllocator:
        return bfc.OpenCLSubAllocator(self.context, svm=self.svm, capacity=CAPACITY)

    def test_it_says_its_size(self, source) -> None:
        assert source.total_bytes == source.allocation_limit() == CAPACITY
        assert source.device == bfc.Device("opencl", 0)
        assert source.memory_info() == (CAPACITY, CAPACITY)
        assert source.supports_coalescing is False
        assert "64.00 MiB" in repr(source)
        assert len(repr(source)) < 80
