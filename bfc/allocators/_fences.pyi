from bfc.allocators._users import Users

class Late:
    """A chunk that was freed, and how many fences it still waits for."""

class Waiting:
    """One of these fences, in the queue of its stream."""

class Fences(Users):
    """Which streams use memory, and what was freed and waits for them."""
