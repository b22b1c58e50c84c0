"""Numbers for stacks of frames. In a recording a stack is a list, which many entries share."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp.vector cimport vector

cdef extern from "number_map.hpp" namespace "bfc" nogil:
    cdef cppclass NumberMap:
        NumberMap() except +
        int64_t find(uint64_t key) noexcept
        void put(uint64_t key, int64_t value) except +
    const int64_t NOT_THERE "bfc::NumberMap::kNone"


cdef class Stacks:
    """A tree of stacks. Each is a frame and the stack that called it, so that stacks share their common part.

    Number 0 is the empty stack. No object is made for each frame of a stack: a list is walked once, and a frame,
    which is a dict in the file, becomes a row at its first use.
    """

    cdef vector[uint32_t] parents, frames
    cdef NumberMap children         # parent and frame -> stack
    cdef NumberMap lists            # which list -> stack
    cdef NumberMap dicts            # which dict -> frame; -1 if it is not a frame
    cdef dict numbers               # row -> frame
    cdef object kept                # keeps the lists and dicts alive, so that no other object gets their address
    cdef readonly list rows         # (file, line, function) of each frame

    def __init__(self, content):
        if self.kept is not None:
            raise RuntimeError("a table is set up once: make another")
        self.kept = content
        self.rows, self.numbers = [], {}
        self.parents.push_back(0)
        self.frames.push_back(0)

    def __len__(self):
        return self.parents.size()

    def number_of(self, frames):
        """The number of the stack for a list of frames, innermost first; 0 if it is not a list."""
        cdef uint64_t key = <uint64_t><PyObject*>frames
        cdef int64_t stack
        if self.kept is None:
            raise RuntimeError("this table was never set up: its __init__ did not run, or failed")
        if type(frames) is not list:
            return 0
        stack = self.lists.find(key)
        if stack == NOT_THERE:
            stack = self.walk(frames)
            self.lists.put(key, stack)
        return stack

    cdef int64_t walk(self, list frames) except -1:
        cdef int64_t stack = 0, frame, child
        cdef uint64_t key
        cdef Py_ssize_t i = len(frames)
        while i > 0:
            i -= 1
            frame = self.frame(frames[i])
            if frame < 0:
                continue
            key = <uint64_t>stack << 32 | <uint64_t>frame
            child = self.children.find(key)
            if child == NOT_THERE:
                self.parents.push_back(<uint32_t>stack)
                self.frames.push_back(<uint32_t>frame)
                child = <int64_t>(self.parents.size() - 1)
                self.children.put(key, child)
            stack = child
        return stack

    cdef int64_t frame(self, item) except -3:
        cdef uint64_t key = <uint64_t><PyObject*>item
        cdef int64_t number = self.dicts.find(key)
        if number != NOT_THERE:
            return number
        number = -1
        row = row_of(item)
        if row is not None:
            number = self.numbers.setdefault(row, len(self.rows))
            if number == len(self.rows):
                self.rows.append(row)
        self.dicts.put(key, number)
        return number

    def fill(self, uint32_t[:, ::1] out):
        """Writes the parent and the frame of each stack."""
        cdef size_t i
        if out.shape[0] != <Py_ssize_t>self.parents.size() or out.shape[1] != 2:
            raise ValueError("a row of two numbers is needed for each stack")
        for i in range(self.parents.size()):
            out[i, 0] = self.parents[i]
            out[i, 1] = self.frames[i]

    def first_of(self, const int64_t[::1] ranks, bint outermost, int64_t[::1] out):
        """Writes one rank for each stack: that of the outermost frame that has one (`outermost`), or the smallest rank
        of its frames. `ranks` has the rank of each frame, or -1 for none. -1 is written if no frame has a rank."""
        cdef size_t i
        cdef int64_t above, own
        if out.shape[0] != <Py_ssize_t>self.parents.size() or ranks.shape[0] != <Py_ssize_t>len(self.rows):
            raise ValueError("a rank is needed for each frame, and a place for each stack")
        out[0] = -1
        for i in range(1, self.parents.size()):
            above, own = out[self.parents[i]], ranks[self.frames[i]]
            if own < 0 or (above >= 0 and (outermost or above < own)):
                own = above
            out[i] = own


cdef row_of(item):
    """(file, line, function) of a frame in a file, or None if it is not a frame."""
    if type(item) is not dict:
        return None
    filename, line, name = item.get("filename"), item.get("line"), item.get("name")
    if type(filename) is not str or type(name) is not str:
        return None
    if type(line) is not int or not 0 <= line < 1 << 32:
        line = 0
    return filename, line, name
