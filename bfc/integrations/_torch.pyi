from bfc.allocators._allocator import Allocator

def serve_pool(allocator: Allocator) -> int:
    """The number of the pair of functions that this allocator serves from now on. Always the same for one allocator."""

def serve_device(allocator: Allocator | None, device: int) -> None:
    """Lets an allocator serve a device instead of PyTorch's own. None takes that back, before PyTorch has called."""
