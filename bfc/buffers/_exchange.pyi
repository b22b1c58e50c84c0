def read_capsule(
    capsule: object,
) -> tuple[int, int, tuple[int, ...], tuple[int, ...] | None, tuple[int, int, int], bool]:
    """The contents of a DLPack capsule of either kind. It is not consumed: the memory lives as long as the capsule.

    Parameters
    ----------
    capsule : PyCapsule
        From the `__dlpack__` of a producer.

    Returns
    -------
    tuple of (int, int, tuple of int, tuple of int or None, tuple of int, bool)
        `data` (0 for NULL), `byte_offset`, the shape, the strides in items (None: row by row), the dtype as
        (code, bits, lanes), and whether the memory may only be read.

    Raises
    ------
    ValueError
        If it is not a DLPack capsule, or was consumed.
    """
