from collections.abc import Callable

from bfc.allocators._allocator import Allocator

class Table:
    """The functions for some pools, which are opened when their device is first used.

    Parameters
    ----------
    open_pool : callable
        Returns the `Allocator` of a device, by its number.
    devices : int
        How many there are.

    Raises
    ------
    ValueError
        If there are none, or more than 64.
    """

    @property
    def devices(self) -> int: ...
    def __init__(self, open_pool: Callable[[int], Allocator], devices: int) -> None: ...
    @property
    def invalid_frees(self) -> int:
        """How often an address was freed that was not live."""

    def capsule(self) -> object:
        """The table in a PyCapsule, which keeps it alive.

        Returns
        -------
        PyCapsule
            Named "bfc.allocator".
        """

    def note_ordered(self, device: int, stream: int) -> None:
        """Note that a stream runs its work in order, so that a hit there need not ask the device.

        Parameters
        ----------
        device : int
            The number of the device.
        stream : int
            The stream's handle. It must live as long as the table.
        """
