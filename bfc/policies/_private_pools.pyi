class PrivatePools:
    """The private pools of an allocator, as data. The default pool is none of them."""
