from bfc.buffers._buffer import BufferOwner

class ChunkAllocator(BufferOwner):
    @property
    def strict(self) -> bool: ...
    @property
    def retry_seconds(self) -> float: ...
