from types import FrameType

def put_off(number: int, frame: FrameType | None) -> object:
    """Stands in for the handler of a signal, which runs when the source that is being called has returned."""
