"""Tags: names for parts of an allocator's memory, which can sleep, each for itself.

A scope of a tag is a context variable: it holds in this thread, or in this asyncio task. While one is open, `must_look`
sends every allocation down the slow path, which looks for the scope. Each policy defines what sleeping does.
"""

from collections.abc import Mapping
from contextvars import ContextVar

cimport cython
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc.buffers._owners cimport Entered, enter as enter_owner, leave as leave_owner, number_of_owner

from bfc.errors import AsleepError, ClosedError, SettingsError

_entries = ContextVar("bfc.tags", default=())

#: Where the contents of a tag may go.
WAYS = ("host", "pinned")


cdef list names_from(object names, str argument):
    if isinstance(names, str):
        return [names]
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{argument} takes names of tags, not {name!r}")
    return found


cdef object way_from(object way):
    if way in WAYS or callable(way):
        return way
    raise ValueError(f'contents are kept in "host" or "pinned" memory, or by a callable, not {way!r}')


@cython.final
cdef class Tag:
    """A name, and whether what was allocated under it sleeps."""


@cython.final
cdef class Entry:
    """One time that a scope was entered."""


cdef class Scope:
    """What `with allocator.tag(name):` enters. It can be nested; the innermost one of an allocator holds."""

    cdef Tagged owner
    cdef Tag tag
    cdef list entered       # [token, Entry, the owner's], for each time that it was entered and not left

    def __init__(self):
        raise TypeError("a scope comes from allocator.tag(name)")

    def __enter__(self):
        cdef Entry entry = Entry()
        if self.owner is None:
            raise TypeError("a scope comes from allocator.tag(name)")
        entry.owner = self.owner
        entry.tag = self.tag
        cdef list item = [None, entry, None]
        self.entered.append(item)   # before the variables are set, since the host may have no memory for it
        try:
            item[2] = enter_owner(number_of_owner(self.tag.name), self.owner)
            item[0] = _entries.set((*_entries.get(), entry))
        except BaseException:
            self.entered.remove(item)
            entry.owner = None      # CPython 3.11 may have set the variable all the same
            if item[2] is not None:
                self.stop_owning(item)
            raise
        self.owner.tags_open += 1
        self.owner.must_look = True
        return self

    def __exit__(self, kind=None, error=None, traceback=None):     # *exc_info would need memory for a tuple
        cdef Entry entry
        cdef list item
        cdef Py_ssize_t i
        for i in range(len(self.entered) - 1 if self.entered is not None else -1, -1, -1):
            item = self.entered[i]
            try:
                _entries.reset(item[0])
            except ValueError:
                continue    # another thread, or another task, has entered it too
            except MemoryError:
                pass        # the entry stays in the variable, but counts as left
            del self.entered[i]
            entry = item[1]
            entry.owner = None
            self.stop_owning(item)
            self.owner.tags_open -= 1
            self.owner.must_look = self.owner.has_more_to_do()
            return
        raise RuntimeError("this tag was not entered here: write `with allocator.tag(name):`")

    cdef int stop_owning(self, list item) except -1:
        """From now on nothing gets the tag's owner, not even in tasks that were started in the scope."""
        cdef Entered entered = item[2]
        leave_owner(entered)
        return entered.scope.stop()

    def __repr__(self):
        return f"<tag {self.tag.name!r} of {self.owner!r}>" if self.owner is not None else "<tag of nothing>"


@cython.no_gc_clear
cdef class Tagged(Frees):
    """How parts of an allocator's memory sleep and wake: a part of `Allocator`."""

    def __cinit__(self, *args, **kwargs):
        self.tags = {}

    def tag(self, name):
        """A context manager: what is allocated within belongs to a tag, which `sleep` can put to sleep.

        It holds in this thread, and in this asyncio task. It can be nested; the innermost one wins.

        Parameters
        ----------
        name : str
            Any name. A new one makes a new tag.

        Returns
        -------
        context manager
            To be used in a `with` statement, any number of times.

        Raises
        ------
        TypeError
            If `name` is not a str.
        ValueError
            If `name` is empty.

        Notes
        -----
        What is allocated within also has an owner of the tag's name (see `bfc.owner`), unless another
        owner is set further in.

        Each tag has memory of its own, if the allocator maps memory. An allocation within both a tag
        and a `use_mem_pool` raises a RuntimeError. PyTorch, under `bfc.use`, allocates without the GIL, and
        its tensors belong to no tag. While a tag of an allocator is entered, its allocations and frees
        take their slow way, a few hundred nanoseconds more.

        Examples
        --------
        >>> import bfc
        >>> pool = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"), settings="expandable_segments:True")
        >>> with pool.tag("weights"):
        ...     weights = pool.allocate("64 MiB")
        >>> report = pool.sleep(keep={"weights": "host"})
        >>> pool.asleep, pool.stats().bytes_reserved
        (frozenset({'weights'}), 0)
        >>> pool.wake("weights")
        """
        cdef Scope scope = Scope.__new__(Scope)
        if not isinstance(name, str):
            raise TypeError(f"a tag is a str, not {type(name).__name__}")
        if not name:
            raise ValueError("a tag needs a name")
        scope.owner = self
        scope.tag = self.find_tag(name)
        scope.entered = []
        return scope

    cdef Tag find_tag(self, name):
        cdef Tag found = self.tags.get(name)
        if found is None:
            found = Tag()
            found.name = str(name)
            found.number = <uint64_t>len(self.tags) + 1
            found = self.tags.setdefault(name, found)
        return found

    cdef uint64_t tag_here(self) except? 0xFFFFFFFFFFFFFFFF:
        """The number of the tag whose scope this call is in, or NO_TAG."""
        cdef Entry entry
        if self.tags_open:
            for entry in reversed(_entries.get()):
                if entry.owner is self:
                    return entry.tag.number
        return NO_TAG

    cdef cbool is_tag_asleep(self, uint64_t number) noexcept nogil:
        """Whether nothing can be allocated in a tag. Needs the lock."""
        cdef uint64_t asleep
        for asleep in self.tags_asleep:
            if asleep == number:
                return True
        return False

    cdef int refuse_if_asleep(self, uint64_t tag) except -1 with gil:
        """Refuses a request for a tag that sleeps."""
        self.acquire()
        cdef cbool asleep = self.is_tag_asleep(tag)
        self.lock.release()
        if asleep:
            name = self.tag_of_pool(TAG_POOLS, tag)
            raise AsleepError(f"tag {name!r} sleeps: wake({name!r}) before more is allocated in it")
        return 0

    cdef bint has_more_to_do(self) noexcept:
        return self.tags_open > 0

    cdef object tag_of_pool(self, uint64_t first, uint64_t second):
        cdef Tag tag
        if first == TAG_POOLS:
            for tag in list(self.tags.values()):
                if tag.number == second:
                    return tag.name
        return None

    cdef void drop_kept(self) noexcept:
        """Gives up what sleeping tags held: the allocator closes."""
        cdef Tag tag
        for tag in self.tags.values():
            tag.kept = None

    def sleep(self, keep=None, drop=None):
        """Give the memory of tags back to the device. Their allocations stay, at the same addresses.

        With no argument all tags sleep, and their contents are dropped. Otherwise those that are named
        do, and the others stay awake. A tag that sleeps already is left as it is.

        Parameters
        ----------
        keep : mapping, "host", "pinned" or callable, optional
            Where the contents go, by tag: {"weights": "host"}. "host" is ordinary memory of the host,
            "pinned" is pinned memory, which a GPU reads and writes faster. A callable is called with a
            number of bytes, 32 MiB at most at a time, and returns a writable buffer for them, such as
            an `mmap.mmap` of a file. One of these, not in a mapping, holds for all tags that `drop`
            does not name.
        drop : str or iterable of str, optional
            Tags whose contents are lost.

        Returns
        -------
        SleepReport
            What went, and how long it took.

        Raises
        ------
        BufferError
            If another object holds a view of memory of these tags (an array, a memoryview).
        SettingsError
            If the allocator maps no memory (`virtual_memory=True` and `expandable_segments:True` do), a
            part of the tag's memory is not mapped, or contents are to be kept of a simulated device,
            which has none.
        ValueError
            If a tag is unknown or named twice, or `keep` has another value.
        TypeError
            If a name is not a str.
        SubAllocatorError
            If the device fails, or one of the streams is being captured into a CUDA graph.
        MemoryError
            If the host has no room for what is to be kept.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        It waits for all streams that used the memory and that the allocator knows of. Wait yourself for
        a stream that it was not told of. After an error everything is as before, and the call can be
        repeated; only what was to be dropped may be lost. If the device fails a second time while that
        is undone, the tags sleep all the same, and a note of the error says so.

        While a tag sleeps, its buffers can be freed; that copies and maps nothing. Allocating in the
        tag, and reading or exporting a buffer, raises `AsleepError`. Only live allocations are copied.

        Cost: one driver call to unmap each run of addresses, one to release each page, and the copy.

        Examples
        --------
        >>> import bfc
        >>> pool = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"), settings="expandable_segments:True")
        >>> with pool.tag("weights"):
        ...     weights = pool.allocate(4).from_host(b"abcd")
        >>> with pool.tag("kv"):
        ...     cache = pool.allocate("256 MiB")
        >>> pool.sleep(keep={"weights": "host"}, drop=["kv"]).kept_bytes
        4
        >>> pool.wake()
        >>> bytes(weights)
        b'abcd'
        """
        if self.is_closed:
            raise ClosedError("this allocator is closed")
        return self.put_to_sleep(self.ways_from(keep, drop))

    def wake(self, *tags, fill=None):
        """Give sleeping tags memory again, at the same addresses, and their contents if they were kept.

        Parameters
        ----------
        *tags : str
            Which ones; without any, all that sleep. A tag that is awake is left as it is.
        fill : int, optional
            A byte, from 0 to 255. Memory whose contents were dropped is filled with it. By default
            the contents of such memory are undefined.

        Raises
        ------
        OutOfMemoryError
            If there is no room for all of them, even after what is cached was given back.
        ValueError
            If a tag is unknown, or `fill` is not a byte.
        TypeError
            If a name is not a str.
        SubAllocatorError
            If the device fails.
        AsleepError
            If the contents of a tag were lost, since the process was forked while they were copied.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        All of the tags wake, or none. After an error they sleep as before, what was kept is still
        kept, and the call can be repeated. The host's memory is given back once it has succeeded.
        What was freed meanwhile is neither mapped nor copied.

        Cost: one driver call to create each page, one to map it, one to give access to each run of
        addresses, and the copy.
        """
        cdef dict chosen = {}
        if self.is_closed:
            raise ClosedError("this allocator is closed")
        if fill is not None and not (isinstance(fill, int) and 0 <= fill <= 255):
            raise ValueError(f"fill is a byte, from 0 to 255, not {fill!r}")
        for name in names_from(tags, "wake"):
            chosen.setdefault(self.known_tag(name))
        self.wake_up(list(chosen or self.tags.values()), fill)

    @property
    def asleep(self):
        """The names of the tags that sleep, as a frozenset."""
        cdef Tag tag
        cdef set names = set()
        for tag in list(self.tags.values()):
            if tag.is_asleep:
                names.add(tag.name)
        return frozenset(names)

    cdef Tag known_tag(self, name):
        found = self.tags.get(name)
        if found is None:
            known = ", ".join(map(repr, self.tags)) or "none"
            raise ValueError(f"unknown tag {name!r}; this allocator has: {known}")
        return found

    cdef dict ways_from(self, keep, drop):
        """The way of each tag that is to sleep: None drops its contents."""
        cdef dict ways = {}
        if keep is None and drop is None:
            return dict.fromkeys(self.tags.values())
        for name in names_from(() if drop is None else drop, "drop"):
            ways[self.known_tag(name)] = None
        if isinstance(keep, Mapping):
            for name in names_from(keep, "keep"):
                tag = self.known_tag(name)
                if tag in ways:
                    raise ValueError(f"tag {name!r} is to be kept and to be dropped: name it once")
                ways[tag] = way_from(keep[name])
        elif keep is not None:
            way = way_from(keep)
            for tag in list(self.tags.values()):
                ways.setdefault(tag, way)
        return ways

    # -- what a policy overrides --------------------------------------------------------------------------------------

    cdef object put_to_sleep(self, dict ways):
        raise no_mapping(self)

    cdef int wake_up(self, list tags, object fill) except -1:
        return 0    # none of them sleeps


cdef object no_mapping(Tagged allocator):
    return SettingsError(f"only memory that is mapped can sleep, and {allocator!r} maps none",
                         key="expandable_segments", allowed="True", where="sleep()",
                         hint="bfc.CachingAllocator(sub_allocator, settings='expandable_segments:True'), or "
                              "bfc.BFCAllocator(sub_allocator, virtual_memory=True)")


cdef bint some_sleep(list tags) noexcept:
    cdef Tag tag
    for tag in tags:
        if tag.is_asleep:
            return True
    return False
