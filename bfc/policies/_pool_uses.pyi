class PoolUses:
    """References to private pools, and the scopes that divert allocations into them."""
