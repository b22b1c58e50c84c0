class Emptying:
    """Gives back what an allocator caches. It needs no lock, and never calls the allocator."""
