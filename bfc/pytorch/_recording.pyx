"""What is kept of a recording while its file is read: numbers for its stacks of frames, and its entries.

In a file a stack is a list of dicts, in a snapshot a tuple of `Frame`. Many entries share one.

A history has hundreds of thousands of entries. As a dict each takes five times the memory that it takes in the file,
and its list of frames twice as much. So the machine that reads a file gives each dict and each list to a `Packer` as
soon as it is whole, which makes an `Event` of an entry, and walks a list of frames. What is not as PyTorch writes it
stays as it is: the reader looks at it and says what is wrong with it.
"""


cimport cython
from cpython.dict cimport PyDict_GetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.ref cimport PyObject, _Py_REFCNT as count_references
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from bfc.errors import TraceError
from bfc.pytorch import releases, words

cdef dict _ACTIONS = {action: action for action in (*words.BLOCK_ACTIONS, *words.SEGMENT_ACTIONS)}
cdef frozenset _SEGMENTS = frozenset(words.SEGMENT_ACTIONS)
cdef object _TOP = 1 << 64

cdef enum:
    MOST_POOLS = 1 << 16


cdef class Walked:
    """Stands for a list of frames that was walked as soon as it was read, and then dropped."""


cdef class Stacks:
    """A tree of stacks. Each is a frame and the stack that called it, so that stacks share their common part.

    Number 0 is the empty stack. No object is made for each frame of a stack: a list or a tuple is walked once, and a
    frame becomes a row at its first use.

    `content` holds the lists or tuples, and `source` is the table that walked those of a file while it was read. Stacks
    get their numbers here in the order in which they are asked for.
    """

    def __init__(self, content, Stacks source=None):
        if self.rows is not None:
            raise RuntimeError("a table is set up once: make another")
        self.content, self.source = content, source
        self.rows, self.numbers, self.kept, self.walked = [], {}, [], [None]
        self.parents.push_back(0)
        self.frames.push_back(0)

    def __len__(self):
        return self.parents.size()

    def number_of(self, frames):
        """The number of the stack for a list of frames, innermost first; 0 if it is not a list."""
        cdef uint64_t key = <uint64_t><PyObject*>frames
        cdef int64_t stack
        if self.rows is None:
            raise RuntimeError("this table was never set up: its __init__ did not run, or failed")
        if type(frames) is Walked:
            return self.from_source((<Walked>frames).number)
        if type(frames) is not list:
            return 0
        stack = self.lists.find(key)
        if stack == NOT_THERE:
            stack = self.walk(frames, False)
            # By identity: the reader makes one list of frames, which thousands of entries share.
            self.lists.put(key, stack)
        return stack

    def number_of_frames(self, tuple frames not None):
        """The number of the stack for a tuple of frames, each a tuple (file, line, function), innermost first."""
        cdef uint64_t key = <uint64_t><PyObject*>frames
        cdef int64_t stack
        if self.rows is None:
            raise RuntimeError("this table was never set up: its __init__ did not run, or failed")
        stack = self.lists.find(key)
        if stack == NOT_THERE:
            stack = self.walk(list(frames), True)
            self.lists.put(key, stack)
        return stack

    def number_walked(self, int64_t number):
        """The number of the stack that has this number in the table that walked the lists of the file."""
        return self.from_source(number)

    def frames_walked(self, int64_t number):
        """The frames of a stack, innermost first, as dicts with a "filename", a "line" and a "name"."""
        cdef list found = []
        if not 0 <= number < <int64_t>self.parents.size():
            raise IndexError(f"there is no stack {number}")
        while number:
            filename, line, name = self.rows[self.frames[number]]
            found.append({"filename": filename, "line": line, "name": name})
            number = self.parents[number]
        return found

    cdef Walked walked_at_once(self, list frames):
        """What stands for a list of frames; None if something in it is no frame."""
        cdef int64_t stack = 0, frame
        cdef Py_ssize_t i = PyList_GET_SIZE(frames)
        cdef PyObject* item
        # From the outermost frame: stacks that begin alike share their nodes.
        while i > 0:
            i -= 1
            item = PyList_GET_ITEM(frames, i)
            frame = self.dicts.find(<uint64_t>item)
            if frame == NOT_THERE:
                row = row_of(<object>item)
                if row is None:
                    return None
                frame = self.row_number(row)
                if count_references(item) > 1:      # something else can name it again
                    self.kept.append(<object>item)
                    self.dicts.put(<uint64_t>item, frame)
            stack = self.child(stack, frame)
        while PyList_GET_SIZE(self.walked) <= stack:
            self.walked.append(None)
        made = self.walked[stack]
        if made is None:
            made = self.walked[stack] = Walked()
            (<Walked>made).number = <uint32_t>stack
        return made

    cdef int64_t walk(self, list frames, bint are_rows) except -1:
        cdef int64_t stack = 0, frame
        cdef Py_ssize_t i = len(frames)
        while i > 0:
            i -= 1
            frame = self.row_number(frames[i]) if are_rows else self.frame(frames[i])
            if frame >= 0:
                stack = self.child(stack, frame)
        return stack

    cdef int64_t from_source(self, int64_t number) except -1:
        cdef vector[int64_t] path
        cdef int64_t stack = 0, found
        if self.source is None or not 0 <= number < <int64_t>self.source.parents.size():
            raise IndexError(f"no stack {number} was walked")
        while number:
            found = self.of_source.find(number)
            if found != NOT_THERE:
                stack = found
                break
            path.push_back(number)
            number = self.source.parents[number]
        while path.size():
            number = path.back()
            path.pop_back()
            stack = self.child(stack, self.row_number(self.source.rows[self.source.frames[number]]))
            self.of_source.put(number, stack)
        return stack

    cdef int64_t child(self, int64_t parent, int64_t frame) except -1:
        # Both have 32 bits in what is written, so one word names the pair.
        cdef uint64_t key = <uint64_t>parent << 32 | <uint64_t>frame
        cdef int64_t child = self.children.find(key)
        if child == NOT_THERE:
            self.parents.push_back(<uint32_t>parent)
            self.frames.push_back(<uint32_t>frame)
            child = <int64_t>(self.parents.size() - 1)
            self.children.put(key, child)
        return child

    cdef int64_t frame(self, item) except -3:
        cdef uint64_t key = <uint64_t><PyObject*>item
        cdef int64_t number = self.dicts.find(key)
        if number != NOT_THERE:
            return number
        row = row_of(item)
        number = -1 if row is None else self.row_number(row)
        self.dicts.put(key, number)
        return number

    cdef int64_t row_number(self, row) except -1:
        cdef int64_t number = self.numbers.setdefault(row, PyList_GET_SIZE(self.rows))
        if number == PyList_GET_SIZE(self.rows):
            self.rows.append(row)
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


cdef class Pools:
    """The private pools of a recording, by number. 0 is the default pool."""

    def __init__(self):
        if self.numbers is not None:
            raise RuntimeError("a table is set up once: make another")
        self.numbers, self.ids = {(0, 0): 0}, [(0, 0)]

    def __len__(self):
        return len(self.numbers)

    def number_of(self, pool_id):
        """The number of a pool, by its id."""
        first, second = pool_id
        return self.number_of_id(first, second)

    def id_of(self, number):
        """The id of the pool that has a number."""
        if self.ids is None or not 0 <= number < len(self.ids):
            raise IndexError(f"there is no pool {number}")
        return self.ids[number]

    cdef uint32_t number_of_id(self, uint64_t first, uint64_t second) except? 0xFFFFFFFF:
        if self.numbers is None:
            raise RuntimeError("this table was never set up: its __init__ did not run, or failed")
        if first == 0 and second == 0:
            return 0
        pool_id = first, second
        number = self.numbers.get(pool_id)
        if number is None:
            number = len(self.ids)
            if number >= MOST_POOLS:
                raise TraceError(f"it has more than {MOST_POOLS - 1} private pools")
            self.numbers[pool_id] = number
            self.ids.append(pool_id)
        return number


@cython.no_gc       # it holds texts and a number only
cdef class Event:
    """An entry of the history, checked."""

    def __init__(self, str action not None, uint64_t address=0, uint64_t size=0, stream=0, uint16_t pool=0,
                 uint8_t named=0, uint64_t time_us=0):
        self.action, self.address, self.size, self.stream = action, address, size, stream
        self.pool, self.named, self.time_us = pool, named, time_us

    def number(self, uint32_t stack, uint16_t owner):
        """Sets the numbers of its stack and its owner."""
        self.stack, self.owner = stack, owner

    def put_in_pool(self, uint16_t number):
        """Sets the number of its private pool."""
        self.pool = number


cdef class Packer:
    """Makes what is kept of the lists and dicts of one file."""

    def __init__(self):
        if self.stacks is not None:
            raise RuntimeError("a packer is set up once: make another")
        self.stacks, self.pools, self.named = Stacks(None), Pools(), {}

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
        if found != NULL and not self.is_pool(<object>found, event):
            return None
        if type(frames) is Walked:
            event.walked = (<Walked>frames).number
        elif frames is not None and (type(frames) is not list or PyList_GET_SIZE(frames)):
            return None
        is_word(value.get("time_us", 0), &time_us)
        note = value.get("user_metadata")
        event.action, event.stream, event.note = action, stream, note if type(note) is str else None
        event.address, event.size, event.time_us = address, size, time_us
        event.named = self.said_by(frames) if action in _SEGMENTS else 0
        return event

    cdef bint is_pool(self, value, Event event) except -1:
        """Whether it is the two numbers of a pool, whose number is given to an event."""
        cdef uint64_t first, second
        if type(value) is not tuple and type(value) is not list or len(value) != 2:
            return False
        if not (is_word(value[0], &first) and is_word(value[1], &second)):
            return False
        event.pool = <uint16_t>self.pools.number_of_id(first, second)
        return True


cdef bint is_word(value, uint64_t* word) except -1:
    """Whether it is a number from 0 to 2**64 - 1, which is written to `word`."""
    if type(value) is not int or not 0 <= value < _TOP:
        return False
    word[0] = value
    return True
