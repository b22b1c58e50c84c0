class Source:
    """Where an allocator's regions come from and go to. It never calls the allocator."""
