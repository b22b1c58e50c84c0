class Source:
    """Guarded by the GIL. It never calls an allocator."""
