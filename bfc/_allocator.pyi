from collections.abc import Callable, Iterable
from typing import Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from bfc._buffer import Buffer
from bfc._frees import Frees
from bfc.streams import StreamLike

class Allocator(Frees):
    @property
    def strict(self) -> bool: ...
    @property
    def retry_seconds(self) -> float: ...
    @property
    def closed(self) -> bool: ...
    def allocate_raw(
        self,
        nbytes: SupportsIndex,
        stream: StreamLike | None = None,
        *,
        alignment: SupportsIndex | None = None,
        freed_before: SupportsIndex | Callable[[], SupportsIndex] | None = None,
    ) -> int: ...
    def allocate(
        self,
        nbytes: SupportsIndex | str,
        stream: StreamLike | None = None,
        *,
        alignment: SupportsIndex | None = None,
    ) -> Buffer: ...
    def allocate_many(
        self, sizes: Iterable[SupportsIndex], stream: StreamLike | None = None
    ) -> NDArray[np.uint64]: ...
    def _swap_noter(
        self, noter: Callable[[int], object] | None
    ) -> Callable[[int], object] | None: ...
    def release_free_regions(self) -> int: ...
    def empty_cache(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def __del__(self) -> None: ...
