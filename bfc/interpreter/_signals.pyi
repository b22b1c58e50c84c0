from types import FrameType

def put_off(number: int, frame: FrameType | None) -> object:
    """The handler of every signal while a sub-allocator is called: the real one runs after the call has returned."""
