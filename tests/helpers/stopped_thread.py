"""A source that stops in one call, and what forks meanwhile must not do to an allocator that maps
memory. The scripts run in an interpreter of their own (`own_interpreter.run`)."""

from __future__ import annotations

from collections.abc import Collection

import own_interpreter

STOPPED = """
class Stopped(bfc.SimulatedSubAllocator):
    '''Stops in one call of a kind, the first or a later one, before or after the work.'''
    kind, left, is_after = None, 1, False
    inside, go = threading.Event(), threading.Event()
    log = []

    def around(self, kind, call, *arguments):
        self.log.append(kind)
        Stopped.left -= kind == self.kind
        hit, here = kind == self.kind and self.left == 0, self.is_after
        if hit:
            Stopped.kind, Stopped.left = None, 1
        if hit and not here:
            self.stop()
        answer = call(self, *arguments)
        if hit and here:
            self.stop()
        return answer

    def stop(self):
        self.inside.set()
        self.go.wait(30)

KINDS = ["reserve", "create", "map", "set_access", "unmap", "release", "unreserve", "wait"]
for name in KINDS:
    def method(self, *arguments, name=name):
        return self.around(name, getattr(bfc.SimulatedSubAllocator, name), *arguments)
    setattr(Stopped, name, method)
"""

GO_ON = """
import traceback

@contextlib.contextmanager
def naming(kind, is_after):
    '''Says in which case it was that something failed.'''
    try:
        yield
    except BaseException as error:
        error.add_note(f"{kind} {is_after}")
        traceback.print_exc()
        raise

def go_on(device, allocator, lost=None):
    '''Allocates `SIZES` MiB, the second on another stream, and gives all of it back. `lost`: what
    only a thread that is not there any more knows, after one call.'''
    allocator.check()
    live = []
    if not allocator.closed:
        live = [allocator.allocate_raw(size << 20, int(size == SIZES[1])) for size in SIZES]
        for address, size in zip(live, SIZES):
            assert any(at <= address and address + (size << 20) <= at + length
                       for at, length in device.accessible), "not all of it is mapped"
    allocator.check()
    for address in live:
        allocator.deallocate_raw(address)
    for call in (allocator.empty_cache, allocator.release_free_regions, allocator.close):
        with contextlib.suppress(bfc.ClosedError):
            call()
        allocator.check()
    assert len(device.pages) == (lost == ("create", True)), device.pages
    assert len(device.reservations) == (lost == ("reserve", True)), device.reservations
    assert not device.mappings

forked = set()      # the kinds of calls that came
"""

MEANWHILE = """
def work_and_close(allocator):
    work(allocator)
    allocator.close()

def stops():
    '''The calls of the work: the kind of each, and which of its kind it is.'''
    work_and_close(made(Stopped("800 MiB")))
    for kind in KINDS:
        count = Stopped.log.count(kind)
        few = {1, count // 2, count} - {0}
        yield from ((kind, number) for number in (range(1, count + 1) if EVERY else few))

for kind, number in list(stops()):
    for is_after, closes in ((False, False), (True, False), (False, True), (True, True)):
        device = Stopped("800 MiB")
        allocator = made(device)
        Stopped.kind, Stopped.left, Stopped.is_after = kind, number, is_after
        Stopped.inside, Stopped.go = threading.Event(), threading.Event()
        thread = threading.Thread(target=work_and_close, args=(allocator,))
        thread.start()
        while thread.is_alive() and not device.inside.wait(0.01):
            pass
        if device.inside.is_set():
            forked.add(kind)

        def in_the_child():
            with naming(kind, is_after):
                if closes:
                    allocator.close()
                go_on(device, allocator, (kind, is_after))

        wait = in_child(in_the_child)
        wait()
        device.go.set()
        thread.join()
        allocator.check()
        allocator.close()
        assert not device.live_bytes and not device.reservations
"""

INSIDE = """
class Forking(Stopped):
    def stop(self):
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(30)

for kind in KINDS:
    for is_after in (False, True):
        device = Forking("800 MiB")
        device.pid = None
        allocator = made(device)
        Stopped.kind, Stopped.is_after = kind, is_after
        status = 1
        try:
            with naming(kind, is_after):
                work(allocator)
                allocator.check()
                go_on(device, allocator)
                assert not device.live_bytes and not device.reservations
            status = 0
        finally:
            if device.pid == 0:
                os._exit(status)
        if device.pid is not None:
            forked.add(kind)
            assert os.waitstatus_to_exitcode(os.waitpid(device.pid, 0)[1]) == 0, (kind, is_after)
"""


def fork_meanwhile(
    made: str, work: str, sizes: tuple[int, int, int], kinds: Collection[str], every: bool
) -> None:
    """Forks while another thread is inside of a call: of `every` one, or of a few of each kind. The
    child closes its allocator, at once or after it has used it, and nothing may be left of it.

    `made` is an expression for what makes an allocator on a source, `work` the text of a function
    `work(allocator)`, `sizes` are in MiB, and `kinds` are the calls that must have come.
    """
    run_script(f"EVERY = {every}\n{MEANWHILE}", made, work, sizes, kinds)


def fork_inside(made: str, work: str, sizes: tuple[int, int, int], kinds: Collection[str]) -> None:
    """The same, but the source itself forks in each call, and both processes come back from it."""
    run_script(INSIDE, made, work, sizes, kinds)


def run_script(
    script: str, made: str, work: str, sizes: tuple[int, int, int], kinds: Collection[str]
) -> None:
    begin = f"made = {made}\nSIZES = {sizes}\n"
    end = f"assert {set(kinds)} <= forked, forked\n"
    own_interpreter.run(STOPPED + begin + work + GO_ON + script + end)


def exit_while_mapping(made: str, source: str, request: int) -> None:
    """Ends an interpreter with live memory, while daemon threads map `request` MiB again and again,
    and a finaliser does, too."""
    own_interpreter.run(
        f"""
allocator = ({made})(bfc.{source}("1 GiB"))
live = [allocator.allocate(size << 20, stream) for size in (1, 5, 25) for stream in (0, 1)]
live[2].free()

def map_for_ever():
    while True:
        allocator.deallocate_raw(allocator.allocate_raw({request} << 20, 2))
        allocator.empty_cache()

threads = [threading.Thread(target=map_for_ever, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
time.sleep(0.2)

class Late:
    def __del__(self):
        allocator.allocate(30 << 20, 3).free()
        allocator.empty_cache()

late = Late()
late.itself = late
"""
    )
