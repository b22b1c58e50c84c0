from types import FrameType

def put_off(number: int, frame: FrameType | None) -> object:
    """The handler of every signal while a source is called: it lets the real one run when the source has returned."""
