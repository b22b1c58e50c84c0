"""Where the iterations of a run begin, found from the sizes that it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bfc.libraries import NDArray, np

if TYPE_CHECKING:
    from bfc.plans.parts import Requests

#: How many sizes in a row are looked for elsewhere, and how many distances are tried.
WINDOW = 32
CANDIDATES = 40
#: Which part of the requests has the size of the request one iteration later.
REPEATS = 0.97
#: Which part of the run has to repeat: the last layers of a network alone are no iterations.
MOST_OF = 0.5


def iterations_in(requests: Requests) -> list[int]:
    """The events at which iterations begin, at the fewest live bytes. Empty unless the same sizes
    come again in the same order up to the end of the run, in most of it.

    Cost: O(n log n), and a pass over the sizes for each distance that is tried.
    """
    size = requests.size
    found = _period(size)
    if found is None:
        return []
    period, start = found
    live = _live_before(requests)
    count = len(size)
    if count - start < count * MOST_OF:
        return []
    last = count - period
    cut = last + int(live[last:count].argmin())
    cuts = range(cut - (cut - start) // period * period, count, period)
    return [int(requests.event[at]) for at in cuts]


def _period(size: NDArray[np.uint64]) -> tuple[int, int] | None:
    """After how many requests the sizes come again, and from which request on. A network repeats
    its layers within an iteration, too: so the longest stretch decides, and then the shortest
    period."""
    found = []
    for period in _distances(size):
        same = size[:-period] == size[period:]
        count = len(same)
        # How many are the same from each request on
        behind = np.cumsum(same[::-1])[::-1]
        good = np.flatnonzero(behind >= REPEATS * np.arange(count, 0, -1))
        start = int(good[0]) if len(good) else count
        start += int(same[start : start + period].argmax()) if start < count else 0
        if count - start >= period:
            found.append((period, start))
    if not found:
        return None
    longest = max(len(size) - start for _, start in found)
    return min(pair for pair in found if len(size) - pair[1] >= 0.9 * longest)


def _distances(size: NDArray[np.uint64]) -> list[int]:
    """The distances at which the same sizes in a row come again most often."""
    windows = len(size) - WINDOW + 1
    if windows < 2:
        return []
    hashed = np.zeros(windows, np.uint64)
    for i in range(WINDOW):  # modulo 2**64
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + size[i : i + windows]
    order = np.argsort(hashed, kind="stable")
    apart = np.diff(order)[hashed[order][1:] == hashed[order][:-1]]
    distance, times = np.unique(apart, return_counts=True)
    often = distance[np.argsort(-times, kind="stable")]
    # One size asked for again and again is a loop, and no iteration
    return [int(one) for one in often[often >= WINDOW][:CANDIDATES]]


def _live_before(requests: Requests) -> NDArray[np.int64]:
    """The bytes that are live right before each request."""
    count = len(requests.size)
    size = requests.size.astype(np.int64)
    change = np.zeros(count + 1, np.int64)
    change[1:] += size
    dies = requests.freed >= 0
    np.subtract.at(change, requests.freed[dies], size[dies])
    live: NDArray[np.int64] = np.cumsum(change)[:count]
    return live
