from collections.abc import Iterable
from typing import Any, SupportsIndex

from bfc._buffer import Buffer
from bfc._ledger import Ledger
from bfc.streams import StreamLike

OVER: Any
VIEWED: str

def is_forking() -> bool: ...

class Frees(Ledger):
    def deallocate_raw(self, ptr: SupportsIndex) -> None: ...
    def deallocate_many(self, ptrs: Iterable[SupportsIndex]) -> None: ...
    def record_stream(
        self, ptr_or_buffer: SupportsIndex | Buffer, stream: StreamLike | None
    ) -> None: ...
