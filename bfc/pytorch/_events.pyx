"""What is kept of the entries of a recording while its file is read.

A history has hundreds of thousands of entries. As a dict each takes five times the memory that it takes in the file,
and its list of frames twice as much. So the machine that reads a file gives each dict and each list to a `Packer` as
soon as it is whole, which makes an `Event` of an entry, and walks a list of frames. What is not as PyTorch writes it
stays as it is: the reader looks at it and says what is wrong with it.
"""

cimport cython
from cpython.dict cimport PyDict_GetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from bfc.pytorch._stacks cimport Stacks, Walked

from bfc.pytorch import releases, words

cdef dict _ACTIONS = {action: action for action in (*words.BLOCK_ACTIONS, *words.SEGMENT_ACTIONS)}
cdef tuple _GOES = releases.GOES
cdef object _TOP = 1 << 64


@cython.no_gc       # it holds texts and a number only
cdef class Event:
    """An entry of the history, checked."""

    def __init__(self, str action not None, uint64_t address=0, uint64_t size=0, stream=0, bint is_private=False,
                 uint8_t named=0, uint64_t time_us=0):
        self.action, self.address, self.size, self.stream = action, address, size, stream
        self.is_private, self.named, self.time_us = is_private, named, time_us

    def number(self, uint32_t stack, uint16_t owner):
        """Sets the numbers of its stack and its owner."""
        self.stack, self.owner = stack, owner


cdef class Packer:
    """Makes what is kept of the lists and dicts of one file."""

    def __init__(self):
        if self.stacks is not None:
            raise RuntimeError("a packer is set up once: make another")
        self.stacks, self.named = Stacks(None), {}

    def said_by(self, frames):
        """What frames say about the call (see `releases.py`), for what stands for a list of them or for the list."""
        if type(frames) is not Walked:
            return releases.what_frames_say(frames)
        number = (<Walked>frames).number
        said = self.named.get(number)
        if said is None:
            said = self.named[number] = releases.what_frames_say(self.stacks.frames_walked(number))
        return said

    cdef object packed_list(self, list value):
        """What stands for a list of frames; None for any other list."""
        if PyList_GET_SIZE(value) == 0 or type(<object>PyList_GET_ITEM(value, 0)) is not dict:
            return None
        return self.stacks.walked_at_once(value)

    cdef object packed_dict(self, dict value):
        """What stands for an entry of a history; None for any other dict, and for an entry that is to be looked at."""
        cdef uint64_t address, size, time_us = 0
        cdef PyObject* found
        cdef Event event
        action, stream, frames = value.get("action"), value.get("stream", 0), value.get("frames")
        if type(action) is not str:
            return None
        if not self.has_internal_metadata and PyDict_GetItem(value, "internal_metadata") != NULL:
            self.has_internal_metadata = True
        action = _ACTIONS.get(action)
        if action is None or type(stream) is not int or not -_TOP <= stream < _TOP:
            return None
        if not (is_word(value.get("addr"), &address) and is_word(value.get("size"), &size)):
            return None
        if size > 0 and address > <uint64_t>0 - size:      # it ends beyond all addresses
            return None
        event = Event.__new__(Event)
        found = PyDict_GetItem(value, "pool_id")
        if found != NULL and not is_pool(<object>found, event):
            return None
        if type(frames) is Walked:
            event.walked = (<Walked>frames).number
        elif frames is not None and (type(frames) is not list or PyList_GET_SIZE(frames)):
            return None
        is_word(value.get("time_us", 0), &time_us)
        note = value.get("user_metadata")
        event.action, event.stream, event.note = action, stream, note if type(note) is str else None
        event.address, event.size, event.time_us = address, size, time_us
        event.named = self.said_by(frames) if action in _GOES else 0
        return event


cdef bint is_word(value, uint64_t* word) except -1:
    """Whether it is a number from 0 to 2**64 - 1, which is written to `word`."""
    if type(value) is not int or not 0 <= value < _TOP:
        return False
    word[0] = value
    return True


cdef bint is_pool(value, Event event) except -1:
    """Whether it is the two numbers of a pool, which are written to an event."""
    cdef uint64_t first, second
    if type(value) is not tuple and type(value) is not list or len(value) != 2:
        return False
    if not (is_word(value[0], &first) and is_word(value[1], &second)):
        return False
    event.is_private = first != 0 or second != 0
    return True
