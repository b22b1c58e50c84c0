from collections.abc import Mapping
from typing import SupportsIndex

from bfc._recorded import Recorded
from bfc.settings import CachingSettings
from bfc.streams import StreamLike
from bfc.suballocators.base import SubAllocator

class CachingAllocator(Recorded):
    """PyTorch's caching policy over one sub-allocator: free memory is kept by stream, small and large apart.

    `settings` is the text that PyTorch takes in PYTORCH_CUDA_ALLOC_CONF; the keyword arguments of the same names are
    the same as values, and come after it. `bfc.CachingSettings.from_environment()` reads BFC_ALLOC_CONF.
    `memory_limit` (bytes, "4 GiB", or a float up to 1.0: PyTorch's memory fraction) bounds what it takes, whatever
    `per_process_memory_fraction` the settings name; both as arguments are a ValueError. None: that fraction, or only
    the sub-allocator says no. `strict` places, refuses and counts exactly as PyTorch 2.11 does. Without it, the first
    two of three switches are on; each can be set on its own:

    - `search_again`: where the retry, which waits for other streams, finds no room on the device either, what they gave
      back is looked at (upstream #189504);
    - `collect_without_limit`: `garbage_collection_threshold` counts from the device's total where no limit is set.
      Upstream ignores it then, so that it may place otherwise from there on;
    - `release_only_what_is_needed`: that retry gives back what the request needs, and everything only if that fails.
      It saves calls to the driver, but the cache that is kept may be cut up, and a later request refused for it.

    Any thread may use it. Raises SettingsError (a ValueError), ValueError or TypeError for arguments that are none.
    Source: `c10::cuda::CUDACachingAllocator` of PyTorch 2.11; docs/design.md lists where it differs on purpose.

    >>> import bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), settings="max_split_size_mb:64")
    >>> buffer = allocator.allocate("5 MiB")
    >>> allocator.stats().pool_bytes
    20971520
    """

    def __init__(
        self,
        sub_allocator: SubAllocator,
        *,
        memory_limit: SupportsIndex | str | float | None = None,
        settings: str | CachingSettings = "",
        strict: bool = False,
        stream: StreamLike | None = 0,
        retry_seconds: float = 0.0,
        max_split_size_mb: int | None = None,
        max_non_split_rounding_mb: int | None = None,
        garbage_collection_threshold: float | None = None,
        roundup_power2_divisions: int | Mapping[int | str, int] | None = None,
        large_segment_size_mb: int | None = None,
        per_process_memory_fraction: float | None = None,
        search_again: bool | None = None,
        collect_without_limit: bool | None = None,
        release_only_what_is_needed: bool | None = None,
    ) -> None: ...
    @property
    def settings(self) -> str:
        """The text that was applied last, as PyTorch remembers it."""

    def set_settings(self, text: str) -> None:
        """New settings from now on, in PyTorch's words. Those that each text resets fall back to their defaults, as in
        `torch.cuda.memory._set_allocator_settings`. Raises SettingsError, and changes nothing then. A new
        `per_process_memory_fraction` is refused too, as it would not be looked at any more (in PyTorch, and if strict,
        it is only remembered): `set_memory_fraction` sets it. Source: spec 2.18.

        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.set_settings("roundup_power2_divisions:4")
        >>> address = allocator.allocate_raw(84 << 20)
        >>> allocator.allocated_size(address) >> 20
        96
        """

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits what it takes to this part of the device's total; 1.0 takes the limit away. What is taken already
        stays. Raises TypeError for what is no float, ValueError outside 0 to 1. Source: spec 2.14.
        """

    @property
    def memory_fraction(self) -> float:
        """The limit as a part of the device's total; 1.0 without one."""

    @property
    def search_again(self) -> bool: ...
    @property
    def collect_without_limit(self) -> bool: ...
    @property
    def release_only_what_is_needed(self) -> bool: ...
    def release_free_regions(self) -> int:
        """Waits for the streams that still use freed memory, and gives every wholly free region back. Returns the bytes
        given back. What a private pool holds goes only when the pool was released. Raises SubAllocatorError.
        Source: spec 2.13 (`empty_cache`).

        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.deallocate_raw(allocator.allocate_raw(100))
        >>> allocator.release_free_regions()
        2097152
        """

    def _create_pool(
        self, pool: tuple[int, int], use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        """Makes a private pool, or adds a reference to it. What it lends, and whether it splits, is remembered."""

    def _begin_pool(self, pool: tuple[int, int], streams: str | int = "thread") -> None:
        """Diverts allocations into a pool, and adds a reference to it: those of this thread ("thread"), on every
        stream ("all"), on one, or none ("none").
        """

    def _end_pool(self, pool: tuple[int, int]) -> None:
        """Ends what _begin_pool began; the reference stays."""

    def _release_pool(self, pool: tuple[int, int]) -> None:
        """Takes one reference away. Without any, what the pool caches goes back with the next emptying."""

    def _pool_use_count(self, pool: tuple[int, int]) -> int:
        """How many references a pool has; 0 of one that is not known."""

    def _set_use_on_oom(self, pool: tuple[int, int], use: bool = True) -> None:
        """Whether a pool serves requests that would be refused."""

    def _set_no_split(self, pool: tuple[int, int], no_split: bool = True) -> None:
        """Whether a pool's chunks are handed out whole."""

    def _empty_pool(self, pool: tuple[int, int], or_later: bool = False) -> int:
        """Gives back what a released pool caches, after waiting for the streams that use its memory. Nothing happens
        to one that still has a reference. Returns the bytes given back. `or_later`: where strict's order does not allow
        it now, the next emptying does it.
        """
