"""Checks the answers of a sub-allocator against the contract of `suballocators/base.py`. In this file it is called
"the source".

After the source has returned, nothing here creates an object: a block must not be lost because the host has no memory.
"""

from cpython.number cimport PyNumber_Index

from bfc.interpreter._signals cimport Deferral, defer_handlers, resume_handlers

from bfc.errors import SubAllocatorError


cdef int ask_for_block(object source, object alloc, uint64_t alignment, uint64_t nbytes, bint strict,
                       uint64_t* address, uint64_t* received, list rejected) except -1:
    """Calls `source.alloc`, or another function of the source with the same contract. Returns whether it gave a block.
    Raises SubAllocatorError for any other answer than a block or None.

    `strict` accepts a block that is smaller than was asked for, as TensorFlow does (TensorFlow's behaviour, CC-36). No
    signal handler runs before this function returns: the caller must call `run_handlers` once the block is in its
    books. `rejected` collects blocks that break the contract and that the source did not take back: see `offer_again`.
    """
    cdef Deferral deferral
    defer_handlers(&deferral)
    try:
        block = alloc(alignment, nbytes)
        if block is None:
            return 0
        read_block(source, block, nbytes, alignment, 1 if strict else nbytes, address, received, rejected)
        return 1
    except MemoryError:
        return 0
    except SubAllocatorError:
        raise
    except Exception as error:
        raise SubAllocatorError(f"{source!r}.alloc({alignment}, {nbytes}) raised {error!r}") from error
    finally:
        resume_handlers(&deferral)


cdef int read_block(object source, object block, uint64_t nbytes, uint64_t alignment, uint64_t least,
                    uint64_t* address, uint64_t* received, list rejected) except -1:
    try:
        given_address, given_bytes = block
        given_address, given_bytes = PyNumber_Index(given_address), PyNumber_Index(given_bytes)
    except (TypeError, ValueError):
        raise SubAllocatorError(f"{source!r}.alloc({alignment}, {nbytes}) must return (address, bytes received) or "
                                f"None, not {block!r}") from None
    try:
        address[0], received[0] = given_address, given_bytes
    except OverflowError:
        address[0] = received[0] = 0
    if (address[0] > 0 and least <= received[0] and address[0] % alignment == 0
            and received[0] <= ~<uint64_t>0 - address[0]):
        return 0
    offer_back(source, (given_address, given_bytes), rejected)
    raise SubAllocatorError(
        f"{source!r}.alloc({alignment}, {nbytes}) returned address {given_address:#x} and {given_bytes} bytes: the "
        f"address must be above 0 and a multiple of {alignment}, and the bytes at least what was asked for")


cdef int offer_back(object source, tuple block, list rejected) except -1:
    """Gives back a block that breaks the contract, since it may still be real memory. If the source does not take it,
    it is offered once more when the allocator closes."""
    try:
        source.free(*block)
    except BaseException as error:
        rejected.append(block)
        if not isinstance(error, Exception):
            raise
    return 0


cdef int offer_again(object source, list rejected) except -1:
    """Offers such blocks once more. No error is raised if the source does not take them: the violation was reported."""
    while rejected:
        block = rejected.pop()
        try:
            source.free(*block)
        except Exception:
            pass
    return 0
