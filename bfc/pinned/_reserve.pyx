"""A reserve: one large block, taken once, that smaller ones are cut from and never given back to (PyTorch's behaviour,
4.5)."""

cimport cython

cdef enum:
    PIECE = 4096


# The collector must not take the source away before the reserve has gone back to it.
@cython.final
@cython.no_gc_clear
cdef class Reserve:
    """One large block, taken at the first allocation, that smaller ones are cut from."""

    def __cinit__(self, Source source):
        self.source = source

    cdef bint is_missing(self) noexcept:
        return self.whole.nbytes == 0

    cdef bint take(self, uint64_t wanted, threads) except -1:
        """Asks the source for the reserve, and returns whether there was room. If the allocator was closed meanwhile,
        there is no reserve."""
        cdef Range whole
        if not self.source.ask(min(wanted, (<uint64_t>1 << 63) - 1), threads, &whole):
            return False
        if self.is_missing() and not self.is_closed:
            self.whole = whole
        else:                   # another thread was faster
            self.source.give_back_block(whole)
        return True

    cdef bint cut(self, uint64_t size, Range* piece) noexcept:
        """Cuts the next piece, which is marked by 0 bytes received. Returns whether as much was left."""
        if size > self.whole.nbytes - self.used:
            return False
        piece.ptr = self.whole.ptr + self.used
        piece.nbytes = 0
        self.used = min(self.whole.nbytes, self.used + (size + PIECE - 1) // PIECE * PIECE)
        return True

    cdef void close(self) noexcept:
        """Puts the reserve among the blocks that the source is to give back."""
        self.is_closed = True
        if not self.is_missing():
            self.source.leave(self.whole)
        self.whole.nbytes = 0
