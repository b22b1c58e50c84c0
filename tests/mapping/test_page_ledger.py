"""The account of mapped memory that other tests rely on (`tests/helpers/page_ledger.py`): it finds
each fault, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from page_ledger import LedgerDevice, PageLedger, RuleError

import bfc

PAGE = 2 << 20
KIB = 1 << 10


class Puppet:
    """Hands out what the test says."""

    def __init__(self) -> None:
        self.device = LedgerDevice("64 MiB", is_late=True)
        self.sizes: dict[int, int] = {}
        self.figures: dict[str, int] = {}
        self.ledger = PageLedger(self.device, self)
        for stream in (1, 2, 3):
            self.device.hold(stream)
        self.base = self.device.reserve(8 * PAGE) or 0
        pages = [self.device.create(PAGE) for _ in range(3)]
        #: Slots 0 and 1 have pages 1 and 2; slots 4 and 5 the same, the other way round.
        self.device.map(self.at(0), pages[:2])
        self.device.map(self.at(4), [pages[1], pages[0]])
        self.device.set_access(self.at(0), 2 * PAGE)
        self.device.set_access(self.at(4), 2 * PAGE)
        self.pages = pages

    def at(self, slot: float) -> int:
        return self.base + int(slot * PAGE)

    def take(self, slot: float, nbytes: int, stream: int = 1) -> int:
        ptr = self.at(slot)
        self.sizes[ptr] = nbytes
        self.ledger.take(ptr, stream)
        return ptr

    def allocated_size(self, ptr: int) -> int:
        return self.sizes[ptr]

    requested_size = allocated_size

    def check(self) -> None:
        pass

    def page_stats(self) -> dict[str, int]:
        owned = self.ledger.pages_in_use()
        return {"pages": 3, "page_size": PAGE, "pages_owned": owned} | self.figures

    def stats(self) -> bfc.Stats:
        in_use = sum(it.nbytes for it in self.ledger.live.values())
        with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB")) as other:
            stats = other.stats()
        return replace(stats, bytes_reserved=3 * PAGE, bytes_in_use=in_use)


@pytest.fixture
def puppet() -> Puppet:
    return Puppet()


def test_blocks_that_share_pages_and_no_byte_are_as_they_should_be(puppet: Puppet) -> None:
    puppet.take(0, PAGE + 512)
    puppet.take(1.5, PAGE // 2)
    puppet.take(4.25, 4 * KIB)  # page 2 through its other address
    puppet.ledger.examine()
    assert puppet.ledger.pages_in_use() == 2


FAULTS: dict[str, tuple[str, Callable[[Puppet], object]]] = {
    "no page": ("no page behind it", lambda it: it.take(2, 100)),
    "page ends": ("no page behind it", lambda it: it.take(1.5, PAGE)),
    "outside": ("no page behind it", lambda it: it.take(30, 100)),
    "twice": ("handed out twice", lambda it: (it.take(0, 512), it.take(0, 512))),
    "overlap": ("are handed out: 1024 bytes", lambda it: (it.take(0, KIB), it.take(5, 4 * KIB))),
    "end of another": ("are handed out", lambda it: (it.take(0, PAGE + 1), it.take(4, 512))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_is_not_there_or_is_somebodys(puppet: Puppet, fault: str) -> None:
    words, hand_out = FAULTS[fault]
    with pytest.raises(RuleError, match=words):
        hand_out(puppet)


def test_memory_without_access(puppet: Puppet) -> None:
    puppet.device.map(puppet.at(6), [puppet.pages[2]])
    with pytest.raises(RuleError, match="without access"):
        puppet.take(6, 512)


def test_memory_that_is_given_back_is_reused_on_its_stream_through_another_address(puppet) -> None:
    puppet.ledger.give_back(puppet.take(0, PAGE))
    puppet.take(5, PAGE)


def give_back_used_on_two(puppet: Puppet) -> None:
    ptr = puppet.take(0, 2 * PAGE)
    puppet.ledger.record(ptr, 3)
    puppet.ledger.give_back(ptr)


def order_1_before_2(puppet: Puppet) -> None:
    puppet.device.order(1, 2)


def order_1_before_3_before_2(puppet: Puppet) -> None:
    puppet.device.order(1, 3)
    puppet.device.order(3, 2)


def finish_1(puppet: Puppet) -> None:
    puppet.device.finish(1)
    puppet.device.hold(1)


def finish_what_waits_for_1(puppet: Puppet) -> None:
    puppet.device.order(1, 3)
    puppet.device.wait(3)


@pytest.mark.parametrize(
    "wait", [order_1_before_2, order_1_before_3_before_2, finish_1, finish_what_waits_for_1]
)
def test_memory_goes_to_another_stream_that_waits(puppet: Puppet, wait) -> None:
    puppet.ledger.give_back(puppet.take(0, PAGE))
    wait(puppet)
    puppet.take(5, PAGE, 2)


@pytest.mark.parametrize(
    "wait",
    [
        lambda puppet: None,
        lambda puppet: puppet.device.order(2, 1),
        lambda puppet: puppet.device.order(1, 3),
        lambda puppet: puppet.device.wait(2),
    ],
)
def test_memory_goes_to_another_stream_that_does_not_wait(puppet: Puppet, wait) -> None:
    puppet.ledger.give_back(puppet.take(0, PAGE))
    wait(puppet)
    with pytest.raises(RuleError, match="does not wait for stream 1"):
        puppet.take(5, 512, 2)


def test_an_order_from_before_the_free_is_no_order(puppet: Puppet) -> None:
    ptr = puppet.take(0, PAGE)
    puppet.device.order(1, 2)
    puppet.ledger.give_back(ptr)
    with pytest.raises(RuleError, match="does not wait for stream 1"):
        puppet.take(5, 512, 2)


def test_memory_that_two_streams_used_waits_for_both(puppet: Puppet) -> None:
    give_back_used_on_two(puppet)
    with pytest.raises(RuleError, match="does not wait for stream 3"):
        puppet.take(0, 512, 1)


def test_memory_that_two_streams_used_comes_back_when_both_have_finished(puppet: Puppet) -> None:
    give_back_used_on_two(puppet)
    puppet.device.wait(3)
    with pytest.raises(RuleError, match="does not wait for stream 1"):
        puppet.take(1, 512, 2)
    puppet.device.wait(1)
    puppet.take(0, 512, 2)


def test_a_stream_that_is_not_held_has_nothing_pending(puppet: Puppet) -> None:
    puppet.ledger.give_back(puppet.take(0, PAGE, 7))
    puppet.take(0, PAGE, 2)


@pytest.mark.parametrize("slot", [0, 1, 4])
def test_addresses_are_unmapped_under_a_block(puppet: Puppet, slot: int) -> None:
    puppet.take(slot + 0.5, 512)
    puppet.device.unmap(puppet.at(slot), PAGE)
    with pytest.raises(RuleError, match="is unmapped under 512 bytes"):
        puppet.ledger.read()


def test_addresses_are_unmapped_while_work_may_use_them(puppet: Puppet) -> None:
    puppet.ledger.give_back(puppet.take(1.5, 512))
    puppet.device.unmap(puppet.at(4), PAGE)  # nobody used the page through this address
    puppet.device.unmap(puppet.at(0), PAGE)
    puppet.ledger.read()
    puppet.device.unmap(puppet.at(1), PAGE)
    with pytest.raises(RuleError, match="is unmapped while stream 1 may use it"):
        puppet.ledger.read()


def test_addresses_are_unmapped_when_their_work_is_done(puppet: Puppet) -> None:
    puppet.ledger.give_back(puppet.take(1.5, 512))
    puppet.device.wait(1)
    puppet.device.unmap(puppet.at(1), PAGE)
    puppet.ledger.read()


def test_a_page_is_released_that_is_mapped(puppet: Puppet) -> None:
    puppet.device.unmap(puppet.at(1), PAGE)
    puppet.device.release(puppet.pages[1])
    with pytest.raises(RuleError, match="released while mapped"):
        puppet.ledger.read()


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ({"pages": 2}, "pages is 2, not 3"),
        ({"page_size": 4 << 20}, "a page of another size"),
        ({"pages_owned": 1}, "pages_owned is 1, not 0"),
    ],
)
def test_figures_that_are_not_those_of_the_log(puppet: Puppet, figure, words: str) -> None:
    puppet.figures = figure
    with pytest.raises(RuleError, match=words):
        puppet.ledger.examine()


def test_counters_that_are_not_those_of_the_log(puppet: Puppet) -> None:
    puppet.take(0, PAGE)
    right = {"creates": 3, "maps": 4, "set_accesses": 2, "unmaps": 0, "releases": 0}
    puppet.figures = right | {"slots_mapped": 4, "lost_slots": 0}
    puppet.ledger.examine_counters()
    for name, count in list(puppet.figures.items()):
        puppet.figures[name] = count + 1
        with pytest.raises(RuleError, match=name):
            puppet.ledger.examine_counters()
        puppet.figures[name] = count


def test_what_is_left_after_closing(puppet: Puppet) -> None:
    device, ledger = puppet.device, puppet.ledger
    with pytest.raises(RuleError, match="the driver still has"):
        ledger.examine_closed()
    device.unmap(puppet.at(0), 2 * PAGE)
    device.unmap(puppet.at(4), 2 * PAGE)
    for page in puppet.pages:
        device.release(page)
    with pytest.raises(RuleError, match="the driver still has"):
        ledger.examine_closed()
    device.unreserve(puppet.base, 8 * PAGE)
    ledger.examine_closed()


# -- allocators that map nothing, or whose pages lie at one place ----------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda device: bfc.BFCAllocator(device, allow_growth=True),
        lambda device: bfc.CachingAllocator(device),
        lambda device: bfc.CachingAllocator(device, settings="expandable_segments:True"),
    ],
    ids=["bfc", "caching", "expandable"],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_other_allocators_are_found_to_be_right(make, is_late: bool, dice) -> None:
    device = LedgerDevice("400 MiB", is_late=is_late)
    allocator = make(device)
    ledger = PageLedger(device, allocator)
    live: list[int] = []
    for _ in range(400):
        if live and dice.random() < 0.5:
            ptr = live.pop(dice.randrange(len(live)))
            if dice.random() < 0.3:
                stream = dice.randrange(3)
                allocator.record_stream(ptr, stream)
                ledger.record(ptr, stream)
            ledger.give_back(ptr)
            allocator.deallocate_raw(ptr)
        elif dice.random() < 0.2:
            dice.choice([device.hold, device.finish])(dice.randrange(3))
        else:
            try:
                stream = dice.randrange(3)
                ptr = allocator.allocate_raw(int(2 ** dice.uniform(0, 26)), stream)
            except bfc.OutOfMemoryError:
                continue
            ledger.take(ptr, stream)
            live.append(ptr)
    assert len(ledger.live) == len(live)
    for ptr in live:
        ledger.give_back(ptr)
        allocator.deallocate_raw(ptr)
    allocator.close()
    ledger.examine_closed()
