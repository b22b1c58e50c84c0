from collections.abc import Callable
from typing import SupportsIndex

from bfc._core import SharedCounter
from bfc.allocators._allocator import Allocator
from bfc.plans.plan import Plan
from bfc.policies.ends import EndPolicy
from bfc.streams import StreamLike
from bfc.suballocators.base import SubAllocator

class BFCAllocator(Allocator):
    def __init__(
        self,
        sub_allocator: SubAllocator,
        *,
        memory_limit: SupportsIndex | str | float | None = None,
        allow_growth: bool = False,
        garbage_collection: bool = True,
        fragmentation_fraction: float = 0.0,
        strict: bool = False,
        retry_seconds: float = 0.0,
        stream: StreamLike | None = 0,
        virtual_memory: bool = False,
        page_size: SupportsIndex | str | None = None,
        headroom: float = 0.0,
        tensorflow: str = "2.21",
        enable_spatial_partitioning: bool = False,
        initial_region_bytes: SupportsIndex | str | None = None,
        lower_end_policy: EndPolicy | None = None,
        upper_end_policy: EndPolicy | None = None,
        plan: Plan | None = None,
    ) -> None: ...
    @property
    def virtual_memory(self) -> bool: ...
    @property
    def allow_growth(self) -> bool: ...
    @property
    def garbage_collection(self) -> bool: ...
    @property
    def fragmentation_fraction(self) -> float: ...
    @property
    def tensorflow(self) -> str: ...
    @property
    def enable_spatial_partitioning(self) -> bool: ...
    @property
    def initial_region_bytes(self) -> int: ...
    @property
    def lower_end_policy(self) -> EndPolicy: ...
    @property
    def upper_end_policy(self) -> EndPolicy: ...
    @property
    def next_region_size(self) -> int: ...
    def _empty_pool(self, pool: tuple[int, int]) -> int: ...
    def set_timing_counter(self, counter: SharedCounter) -> None: ...
    def set_safe_frontier(self, count: SupportsIndex | Callable[[], SupportsIndex]) -> None: ...
