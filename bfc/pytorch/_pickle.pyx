# cython: boundscheck=True
"""The machine that reads a pickle of plain values. `plain_pickle.py` says what it accepts and what it refuses."""

import struct

cimport cython
from cpython.dict cimport PyDict_SetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_GetSlice
from cpython.ref cimport PyObject, _Py_REFCNT as count_references
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from bfc.pytorch._recording cimport Packer

from bfc.errors import TraceError

cdef extern from "Python.h":
    int PyList_SET_SLICE "PyList_SetSlice"(object list, Py_ssize_t low, Py_ssize_t high, PyObject* items) except -1

cdef enum:
    NUMBER_BITS = 14
    ITEMS_OF_A_BATCH = 1000     # of a longer list or dict, writers add the items in such batches

cdef object _FLOAT = struct.Struct(">d")

cdef struct Limits:
    Py_ssize_t containers, values, waiting
    Py_ssize_t turn         # how many operations are read between two calls of look()


@cython.final
cdef class _Numbers:
    """Objects of numbers that were made lately: an address or a size stands in many entries of a history."""

    cdef list objects
    cdef int64_t[1 << NUMBER_BITS] made     # what they are, by a hash

    def __cinit__(self):
        self.objects = [None] * (1 << NUMBER_BITS)

    cdef object known(self, int64_t number):
        cdef size_t slot = (<uint64_t>number * <uint64_t>0x9E3779B97F4A7C15) >> (64 - NUMBER_BITS)
        if self.made[slot] == number and self.objects[slot] is not None:
            return self.objects[slot]
        self.made[slot] = number
        self.objects[slot] = number
        return self.objects[slot]


@cython.auto_pickle(False)      # it would read `bytes_` as a string, even if it is NULL
cdef class Machine:
    """The stack, the marks and the memo of a pickle that is being read.

    The limits are those of `plain_pickle.py`. `refusal` makes the error text for an operation that is refused, and
    `shown` makes the text for a value. What `packer` makes of a list or a dict takes its place, here and in the memo.
    """

    cdef bytes data
    cdef const uint8_t* bytes_
    cdef Py_ssize_t size
    cdef Py_ssize_t next            # the next byte to read
    cdef readonly Py_ssize_t at     # where the current operation begins
    cdef readonly list stack
    cdef list marks, memo
    cdef list memo_at_marks         # how long the memo was at each mark
    cdef Py_ssize_t slot            # where in the memo the dict stands to which the last items belong; so for the
    cdef Py_ssize_t list_slot       # last list, of those that hold no other list
    cdef Packer packer
    cdef _Numbers numbers
    cdef Py_ssize_t containers, values
    cdef Limits most
    cdef bint done
    cdef object refusal, shown

    def __init__(self, bytes data, Py_ssize_t most_containers, Py_ssize_t most_values, Py_ssize_t most_waiting,
                 Py_ssize_t turn_length, refusal, shown, Packer packer=None):
        self.data, self.bytes_, self.size = data, data, len(data)
        self.next = 2
        self.stack, self.marks, self.memo, self.memo_at_marks = [], [], [], []
        self.slot, self.list_slot, self.packer = -1, -1, packer
        self.numbers = _Numbers()
        self.most = Limits(most_containers, most_values, most_waiting, turn_length)
        self.refusal, self.shown = refusal, shown

    def run(self):
        """Returns the value. Raises TraceError, which says what is wrong and at which byte."""
        if self.bytes_ == NULL:
            raise RuntimeError("this machine was never set up: its __init__ did not run, or failed")
        try:
            while not self.done:
                self.turn()
                self.look()
        except IndexError:
            if self.at >= self.size - 9:
                raise TraceError(f"it ends in the middle, after {self.size} bytes") from None
            raise TraceError(f"byte {self.at}: it uses a value that was never read") from None
        except UnicodeDecodeError:
            raise TraceError(f"byte {self.at}: its text is not UTF-8") from None
        if len(self.stack) != 1:
            raise TraceError(f"it ends with {len(self.stack)} values, where one is expected")
        return self.stack[0]

    cdef int look(self) except -1:
        if self.containers > self.most.containers or max(self.values, <Py_ssize_t>len(self.memo)) > self.most.values:
            raise TraceError(f"byte {self.at}: it makes more values than are read")
        if max(len(self.stack), len(self.marks)) > self.most.waiting:
            raise TraceError(f"byte {self.at}: too many values belong to no list, dict or object")
        return 0

    cdef int turn(self) except -1:
        """Reads some operations; `other` has the rarer ones."""
        cdef list stack = self.stack, memo = self.memo
        cdef uint8_t code
        cdef Py_ssize_t _i
        for _i in range(self.most.turn):
            self.at = self.next
            code = self.byte()
            if code == 0x68:                                    # BINGET
                stack.append(memo[self.byte()])
            elif code == 0x94:                                  # MEMOIZE
                memo.append(self.last())
            elif code == 0x6A:                                  # LONG_BINGET
                stack.append(memo[self.four()])
            elif code == 0x8A:                                  # LONG1
                stack.append(self.long_number())
            elif code == 0x4B:                                  # BININT1
                stack.append(self.byte())
            elif code == 0x4D:                                  # BININT2
                stack.append(self.byte() | <int>self.byte() << 8)
            elif code == 0x4A:                                  # BININT
                stack.append(self.numbers.known(<int32_t>self.four()))
            elif code == 0x28:                                  # MARK
                self.marks.append(len(stack))
                self.memo_at_marks.append(PyList_GET_SIZE(memo))
            elif code == 0x65:                                  # APPENDS
                self.extend(self.above_mark())
            elif code == 0x75:                                  # SETITEMS
                self.set_items(self.above_mark())
            elif code == 0x7D:                                  # EMPTY_DICT
                self.put_container({})
            elif code == 0x5D:                                  # EMPTY_LIST
                self.put_container([])
                self.list_slot = PyList_GET_SIZE(memo)
            else:
                self.other(code)
                if self.done:
                    break
        return 0

    cdef int other(self, uint8_t code) except -1:
        if code == 0x8C:                                        # SHORT_BINUNICODE
            self.text(self.byte())
        elif code == 0x58:                                      # BINUNICODE
            self.text(self.four())
        elif code == 0x71:                                      # BINPUT
            self.put(self.byte())
        elif code == 0x72:                                      # LONG_BINPUT
            self.put(self.four())
        elif code == 0x85 or code == 0x86 or code == 0x87:      # TUPLE1, TUPLE2, TUPLE3
            self.values += code - 0x84
            self.put_container(tuple(self.top(code - 0x84)))
        elif code == 0x29:                                      # EMPTY_TUPLE
            self.put_container(())
        elif code == 0x4E:                                      # NONE
            self.stack.append(None)
        elif code == 0x88 or code == 0x89:                      # NEWTRUE, NEWFALSE
            self.stack.append(code == 0x88)
        elif code == 0x47:                                      # BINFLOAT
            self.need(8)
            self.stack.append(_FLOAT.unpack_from(self.data, self.next)[0])
            self.next += 8
        elif code == 0x61:                                      # APPEND
            self.extend(self.top(1))
        elif code == 0x73:                                      # SETITEM
            self.set_items(self.top(2))
        elif code == 0x74:                                      # TUPLE
            self.put_container(tuple(self.above_mark()))
        elif code == 0x6C:                                      # LIST
            self.put_container(self.above_mark())
        elif code == 0x64:                                      # DICT
            taken = self.above_mark()
            self.put_container({})
            self.set_items(taken)
        elif code == 0x95:                                      # FRAME: a hint for readers of streams
            self.next += 8
        elif code == 0x2E:                                      # STOP
            self.done = True
        elif code == 0x80:
            raise TraceError(f"byte {self.at}: a second pickle begins inside the first")
        else:
            raise TraceError(f"byte {self.at}: {self.refusal(self.data, self.at, self.stack)}")
        return 0

    # -- what is read --------------------------------------------------------------------------------------------------

    cdef int need(self, Py_ssize_t count) except -1:
        """Raises IndexError if the file ends before so many bytes."""
        if count > self.size - self.next:
            raise IndexError
        return 0

    cdef inline uint8_t byte(self) except? 0xFF:
        if self.next >= self.size:
            raise IndexError
        self.next += 1
        return self.bytes_[self.next - 1]

    cdef inline uint32_t four(self) except? 0xFFFFFFFF:
        cdef uint32_t number
        self.need(4)
        memcpy(&number, self.bytes_ + self.next, 4)     # little-endian, like every system that this is built for
        self.next += 4
        return number

    cdef object long_number(self):
        cdef Py_ssize_t length = self.byte(), start
        cdef uint64_t number = 0
        self.need(length)
        start = self.next
        self.next += length
        if 0 < length <= 8:
            # Two's complement: a negative number is filled up with ones.
            if self.bytes_[start + length - 1] & 0x80:
                number = ~number
            memcpy(&number, self.bytes_ + start, length)
            return self.numbers.known(<int64_t>number)
        return int.from_bytes(self.data[start:start + length], "little", signed=True)

    cdef int text(self, Py_ssize_t length) except -1:
        self.need(length)
        self.stack.append(PyUnicode_DecodeUTF8(<const char*>self.bytes_ + self.next, length, "surrogatepass"))
        self.next += length
        return 0

    # -- what is made --------------------------------------------------------------------------------------------------

    cdef inline object last(self):
        if PyList_GET_SIZE(self.stack) == 0:
            raise IndexError
        return self.stack[PyList_GET_SIZE(self.stack) - 1]

    cdef int put_container(self, made) except -1:
        self.containers += 1
        self.stack.append(made)
        return 0

    cdef list top(self, Py_ssize_t count):
        """Takes the last values off the stack."""
        cdef Py_ssize_t size = PyList_GET_SIZE(self.stack)
        if size < count:
            raise IndexError
        return self.taken_from(size - count)

    cdef list above_mark(self):
        if PyList_GET_SIZE(self.marks) == 0:
            raise IndexError
        cdef list taken = self.taken_from(self.marks.pop())
        self.slot = <Py_ssize_t>self.memo_at_marks.pop() - 1
        self.values += PyList_GET_SIZE(taken)
        return taken

    cdef list taken_from(self, Py_ssize_t first):
        cdef Py_ssize_t size = PyList_GET_SIZE(self.stack)
        cdef list taken = PyList_GetSlice(self.stack, first, size)
        PyList_SET_SLICE(self.stack, first, size, NULL)
        return taken

    cdef int extend(self, list taken) except -1:
        target = self.last()
        if type(target) is not list:
            raise TraceError(f"byte {self.at}: it appends to something that is not a list")
        self.values += 1
        if self.packer is not None and PyList_GET_SIZE(target) == 0 and PyList_GET_SIZE(taken) < ITEMS_OF_A_BATCH:
            packed = self.packer.packed_list(taken)
            if packed is not None and self.has_replaced(<PyObject*>target, packed, self.list_slot):
                return 0
        (<list>target).extend(taken)
        return 0

    cdef int set_items(self, list taken) except -1:
        cdef Py_ssize_t i, count = PyList_GET_SIZE(taken)
        target = self.last()
        if type(target) is not dict:
            raise TraceError(f"byte {self.at}: it sets an item of something that is not a dict")
        if count % 2:
            raise IndexError
        self.values += 1
        for i in range(0, count, 2):
            key = taken[i]
            if type(key) is not str:    # others could be made to collide, or be nested without end
                raise TraceError(f"byte {self.at}: a dict has the key {self.shown(key)}, no text")
            PyDict_SetItem(target, key, taken[i + 1])
        if self.packer is not None and count > 2:
            packed = self.packer.packed_dict(target)
            if packed is not None:
                self.has_replaced(<PyObject*>target, packed, self.slot)
        return 0

    cdef bint has_replaced(self, PyObject* value, packed, Py_ssize_t slot) except -1:
        """Puts what was made of the last value in its place. Not done, and False, where something else has the value,
        too.

        Its references are the stack's, the caller's, and perhaps the memo's. This thread has made the value, and no
        other has seen it. So all are counted, without the GIL too; one that a garbage collection adds meanwhile leaves
        the value as it was."""
        cdef Py_ssize_t references = count_references(value)
        cdef bint is_known = references == 3
        if references > 3 or is_known and not (
            0 <= slot < PyList_GET_SIZE(self.memo) and PyList_GET_ITEM(self.memo, slot) == value
        ):
            return False
        self.stack[PyList_GET_SIZE(self.stack) - 1] = packed
        if is_known:
            self.memo[slot] = packed
        return True

    cdef int put(self, Py_ssize_t number) except -1:
        """Memoizes the last value under a number. Writers use 0, 1, 2, ..., so a number that skips some is refused."""
        cdef Py_ssize_t known = PyList_GET_SIZE(self.memo)
        value = self.last()
        if number < known:
            self.memo[number] = value
        elif number == known:
            self.memo.append(value)
        else:
            raise TraceError(f"byte {self.at}: it stores a value under number {number}, which skips some numbers")
        return 0
