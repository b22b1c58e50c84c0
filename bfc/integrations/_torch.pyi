from bfc.allocators._allocator import Allocator

def serve_pool(allocator: Allocator) -> int:
    """Assigns a pair of the functions above to an allocator, and returns its number. One allocator has one pair."""

def serve_device(allocator: Allocator | None, device: int) -> None:
    """Lets an allocator serve a device instead of PyTorch's own. None takes that back, before PyTorch has called."""
