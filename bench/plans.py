"""How good plans are, and how long they take to make: `python -m bench.plans`.

First every trace of `bench/traces` and every recording of `tests/recordings` is laid out as a
whole, on one stream and in units of 512 bytes: the span and what PyTorch's policy and growing BFC
reserve, each divided by the most that is live, and the processor time of this thread.

Then MiniMalloc's eleven public instances, if there is a folder of them: for each the greedy span,
and the time until it fits 1 MiB, next to MiniMalloc itself. Clone google/minimalloc from GitHub
with its submodules, build it with `cmake -B build -DCMAKE_BUILD_TYPE=Release` and `cmake --build
build`, and name the folder: `python -m bench.plans --minimalloc ../minimalloc`.

`--served` serves plans instead: of each trace the iteration with the highest peak is repeated six
times, as it was and disturbed, with a plan made of four iterations that are disturbed in the same
way with other random numbers. Then with an evaluation, or an iteration of another shape, between
two iterations, of which the plan knows nothing. What each policy reserves, with and without the
plan, is divided by the most that is live; an asterisk is where the default gate declined the plan.
Then the processor time of a replay, for each event, of the undisturbed run.

`--pages` does the same on memory that is mapped in pages of 2 MiB, beside stitching, with all
requests on one stream. `--streams` takes the runs of several streams as they are, whose plans have
areas of their own for each: it also says what it costs that these share pages, in waits of a stream
for another and in calls of the driver, for each iteration after the first twelve.

`--lengths` serves two runs whose lengths vary with plans of their first iterations. Most of the
lengths, and in the first run the longest, come only after these. `--made-up` does so with the runs
of `bench.lengths` and `bench.varied`: least, median and most of ten seeds, of plans of ten
iterations; the last of three columns is that of steps that begin by themselves. Names after
`--made-up`, or seeds after `--seeds`, are only these.

`--beside-alone` looks whether a plan costs: what each policy reserves with a plan of the first
iterations of a run, divided by what it does alone, for that run, for its iterations in another
order, and for another program of the kind, which has another depth and other sizes; with steps that
are marked, and with those that begin by themselves. It counts those above 1.03, and says of each
how many iterations it holds so much for, and what repeats it, and of all how many hold it for more
than two. Runs are those of `--made-up` and `bench.varied.PROGRAMS`; names after it are only these,
and `--pages` puts all into pages, but for BFC's runs of several streams: no plan serves them there.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import resource
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import bfc
from bench import lengths, varied
from bench.histories import TRACES, Maker
from bench.repeated import (
    BETWEEN,
    DISTURBED,
    RECORDED,
    ROUNDS,
    Repeated,
    between,
    blocks_of,
    caching,
    disturbed,
    growing_bfc,
    history,
    most_live,
    ns_of_first_replay,
    runs_that_repeat,
)
from bench.report import geometric_mean, machine, say
from bfc.plans import lay_out
from bfc.plans.layout import Layout, planned
from bfc.plans.parts import HEAD, Requests, lives_of
from bfc.plans.trying import in_other_order

FOLDERS = (TRACES, Path(__file__).parents[1] / "tests" / "recordings")
UNIT = 512
PAGE = 2 << 20
MANY_ROUNDS = 40
TURNS = 3
SEEDS = 10
CAPACITY = 1 << 20
#: Of runs whose lengths vary: how many iterations a plan is made of, and how iterations begin.
LEARNED = {"gpt2s_varlen": 13, "llama7b_zero3_lro": 5}
BEGINS = {
    "gpt2s_varlen": [(384, 16, "train"), (384, 32, "eval")],
    "llama7b_zero3_lro": [(1024, 8, "train")],
}
POLICIES = ("caching", "bfc")
#: Made-up runs, by name.
MADE_UP = lengths.RUNS | varied.RUNS | varied.LATER
#: A plan costs where more than this part of what the policy alone reserves is.
COSTS = 1.03
#: Another program of a kind has the seed that comes so many later.
OTHER = 500
#: More than any of the instances takes.
STEPS = 10_000_000_000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minimalloc", type=Path, metavar="FOLDER", help="a built clone")
    parser.add_argument("--served", action="store_true", help="serve plans of repeated runs")
    parser.add_argument("--pages", action="store_true", help="serve them from mapped pages")
    parser.add_argument("--streams", action="store_true", help="serve runs of several streams")
    parser.add_argument("--lengths", action="store_true", help="serve lengths that vary")
    parser.add_argument(
        "--made-up", nargs="*", metavar="NAME", help="the same of made-up runs, or of these"
    )
    parser.add_argument(
        "--beside-alone",
        nargs="*",
        metavar="NAME",
        help="whether plans cost: of all runs, or these",
    )
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", nargs="*", type=int, default=range(SEEDS), metavar="SEED")
    parser.add_argument("--folder", type=Path, help="traces other than those of bench/traces")
    parser.add_argument("--traces", nargs="*", metavar="NAME", help="only these traces")
    chosen = parser.parse_args(arguments)
    say(machine())
    if chosen.served:
        show_served(chosen.folder or TRACES, chosen.traces)
        return
    if chosen.beside_alone is not None:
        names = chosen.beside_alone or [*MADE_UP, *varied.PROGRAMS]
        show_beside_alone(names, chosen.seeds, chosen.policies, in_pages=chosen.pages)
        return
    if chosen.pages:
        show_pages(chosen.folder or TRACES, chosen.traces)
        return
    if chosen.streams:
        show_streams(chosen.folder or TRACES, chosen.traces)
        return
    if chosen.lengths:
        show_lengths(chosen.folder or TRACES)
        return
    if chosen.made_up is not None:
        show_made_up(chosen.made_up or list(MADE_UP), chosen.seeds)
        return
    show_runs(chosen.traces)
    if chosen.minimalloc is not None:
        show_instances(chosen.minimalloc)


def runs() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted(folder.glob("*.npz"))


def show_runs(names: list[str] | None) -> None:
    say("divided by the most that is live; seconds of processor time, min / median / max")
    say(f"{'':44}{'lives':>8}{'span':>9}{'caching':>9}{'BFC':>7}{'seconds':>28}")
    ratios: list[tuple[float, float, float]] = []
    for path in runs():
        if names is not None and path.stem not in names:
            continue
        trace = bfc.Trace.load(path)
        found, seconds = timed(lambda: laid_out(trace))  # noqa: B023
        most = found.bound * UNIT
        span, lives = found.span / found.bound, len(found.offsets)
        torch, growing = (reserved(trace, make) / most for make in (caching, growing_bfc))
        ratios.append((span, torch, growing))
        say(f"{path.stem:44}{lives:8}{span:9.4f}{torch:9.3f}{growing:7.3f}  {spread3(seconds)}")
    if not ratios:
        return
    means = [geometric_mean(column) for column in zip(*ratios, strict=True)]
    say(f"{'geometric mean':44}{'':8}{means[0]:9.4f}{means[1]:9.3f}{means[2]:7.3f}")


def laid_out(trace: bfc.Trace) -> Layout:
    unit = np.uint64(UNIT)
    requests = Requests.of(trace, lambda size: (size + unit - np.uint64(1)) // unit * unit)
    count = len(requests.size)
    part = requests.part(HEAD, "", 0, count, count)
    return planned(part.size.astype(np.int64) // UNIT, lives_of([part]))


def stitching_caching(source: bfc.SubAllocator) -> bfc.Allocator:
    return bfc.CachingAllocator(source, stitch=True, page_size=PAGE)


def stitching_bfc(source: bfc.SubAllocator) -> bfc.Allocator:
    return bfc.BFCAllocator(source, virtual_memory=True, page_size=PAGE)


def in_few_pages(source: bfc.SubAllocator) -> bfc.Allocator:
    return bfc.BFCAllocator(source, virtual_memory=True, page_size="1 GiB")


def reserved(trace: bfc.Trace, make: Maker) -> int:
    with make(bfc.SimulatedSubAllocator("1 TiB")) as allocator:
        return trace.replay(allocator).peak_bytes_reserved


def reserved_with(
    plan: bfc.Plan, trace: bfc.Trace, make: Maker, *, by_itself: bool = False
) -> tuple[int, float]:
    """The same with a plan, and which part of the requests it had places for: NaN if declined."""
    with make(bfc.SimulatedSubAllocator("1 TiB")) as allocator:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it may be declined
            allocator.use_plan(plan, steps="auto" if by_itself else None)
            taken = trace.replay(allocator).peak_bytes_reserved  # it may end, too
        return taken, allocator.plan_stats().get("agreement", math.nan)


def timed(call: Callable[[], Layout]) -> tuple[Layout, list[float]]:
    seconds = []
    for _ in range(TURNS):
        begun = time.thread_time()
        found = call()
        seconds.append(time.thread_time() - begun)
    return found, seconds


def spread3(seconds: list[float]) -> str:
    low, middle, high = sorted(seconds)[0], sorted(seconds)[len(seconds) // 2], max(seconds)
    return f"{low:7.3f} /{middle:7.3f} /{high:7.3f}"


def show_served(folder: Path, names: list[str] | None) -> None:
    """What is reserved with and without plans, and how long an event takes."""
    runs = runs_that_repeat(folder, names)
    say("reserved / most live; hits of 100 requests with PyTorch's policy beside the plan")
    columns = ("caching", "+ plan", "hits", "BFC", "+ plan")
    say(f"{'':40}" + "".join(f"{name:>9}" for name in columns))
    every: list[Served] = []
    for label in (*DISTURBED, *BETWEEN):
        rows = []
        for name, run in runs.items():
            rows.append(served(run, label))
            say(f"{label:16}{name:24}{shown(rows[-1].figures, rows[-1].declined)}")
        if rows:
            means = [mean_of(column) for column in zip(*(row.figures for row in rows), strict=True)]
            say(f"{label:16}{'geometric mean':24}{shown(means, ())}")
        every += rows
    for policy, at in (("caching", 0), ("bfc", 3)):
        ratios = [row.figures[at + 1] / row.figures[at] for row in every]
        declined = sum(policy in row.declined for row in every)
        say(
            f"{policy} with a plan / without, {len(every)} histories, {declined} declined: "
            f"geometric mean {geometric_mean(ratios):.3f}, worst {max(ratios):.3f}, "
            f"{sum(ratio > 1 for ratio in ratios)} above 1"
        )
    say("\nnanoseconds an event, min / median / max of five turns")
    for name, run in runs.items():
        say(f"{name:24}" + "  ".join(times_served(run)))


def show_pages(folder: Path, names: list[str] | None) -> None:
    """What stitching reserves with and without plans, and how long an event takes."""
    runs = runs_that_repeat(folder, names)
    say("reserved / most live; hits of 100 requests with PyTorch's policy and the plan")
    columns = ("caching", "+ plan", "hits", "BFC", "+ plan")
    say(f"{'':40}" + "".join(f"{name:>9}" for name in columns))
    every: list[list[float]] = []
    for label in (*DISTURBED, *BETWEEN):
        rows = []
        for name, run in runs.items():
            rows.append(in_pages(run, label))
            say(f"{label:16}{name:24}" + "".join(f"{figure:9.4f}" for figure in rows[-1]))
        for what, of in (("geometric mean", geometric_mean), ("worst", max)):
            if rows:
                means = [of(list(column)) for column in zip(*rows, strict=True)]
                say(f"{label:16}{what:24}" + "".join(f"{figure:9.4f}" for figure in means))
        every += rows
    for policy, at in (("caching", 1), ("bfc", 4)):
        figures = [row[at] for row in every]
        say(
            f"{policy} with a plan in pages, {len(figures)} histories: geometric mean "
            f"{geometric_mean(figures):.4f}, worst {max(figures):.4f}"
        )
    say("\nnanoseconds an event, min / median / max of five turns, where hardly a page is mapped")
    makes: dict[str, Maker] = {"bfc": growing_bfc, "bfc + plan": growing_bfc}
    makes |= {"stitching": in_few_pages, "stitching + plan": in_few_pages}
    for name, run in runs.items():
        trace = one_stream(history(run, [run.iteration] * ROUNDS))
        plan = bfc.Plan.from_trace(trace, fallback="bfc")
        trace = one_stream(history(run, [run.iteration] * MANY_ROUNDS))
        plans = {kind: plan if kind.endswith("plan") else None for kind in makes}
        say(f"{name:24}" + "  ".join(timed_in_turn(trace, makes, plans)))


def in_pages(run: Repeated, label: str) -> list[float]:
    recording, trace = (one_stream(each) for each in histories(run, label))
    most, row = most_live(trace), []
    for fallback, make in (("caching", stitching_caching), ("bfc", stitching_bfc)):
        row.append(reserved(trace, make) / most)
        with make(bfc.SimulatedSubAllocator("1 TiB")) as allocator:
            allocator.use_plan(bfc.Plan.from_trace(recording, fallback=fallback))
            row.append(trace.replay(allocator).peak_bytes_reserved / most)
            if fallback == "caching":
                row.append(100 * allocator.plan_stats()["agreement"])
    return row


def show_streams(folder: Path, names: list[str] | None) -> None:
    """What stitching reserves for several streams, with and without plans, and what that costs."""
    say("reserved / most live; waits between streams and calls of the driver, an iteration")
    columns = ("caching", "waits", "calls", "+ plan", "waits", "calls", "hits")
    say(f"{'':40}" + "".join(f"{name:>11}" for name in columns))
    for name, run in runs_that_repeat(folder, names).items():
        if not run.iteration.stream.any():
            continue
        for label in DISTURBED:
            row = "".join(
                f"{f:11.4f}" for with_plan in (False, True) for f in shared(run, label, with_plan)
            )
            say(f"{label:16}{name:24}{row}")


def shared(run: Repeated, label: str, with_plan: bool) -> list[float]:
    recording, _ = histories(run, label)
    counts, reserved = [], 0.0
    for rounds in (2 * ROUNDS, 4 * ROUNDS):
        trace = histories(run, label, rounds)[1]
        with stitching_caching(bfc.SimulatedSubAllocator("1 TiB")) as allocator:
            if with_plan:
                allocator.use_plan(bfc.Plan.from_trace(recording))
            reserved = trace.replay(allocator).peak_bytes_reserved / most_live(trace)
            figures = allocator.page_stats()
            calls = sum(
                figures[kind] for kind in ("creates", "maps", "set_accesses", "unmaps", "releases")
            )
            counts.append((figures["stream_waits"], calls))
            hits = 100 * allocator.plan_stats().get("agreement", 0)
    each = [(last - first) / (2 * ROUNDS) for first, last in zip(*counts, strict=True)]
    return [reserved, *each, *([hits] if with_plan else [])]


def one_stream(trace: bfc.Trace) -> bfc.Trace:
    return bfc.Trace(trace.op, trace.id, trace.size, np.zeros_like(trace.stream), meta=trace.meta)


@dataclass(frozen=True)
class Served:
    """What was reserved with and without plans, and whose plans were declined."""

    figures: list[float]
    declined: list[str]


def mean_of(figures: Iterable[float]) -> float:
    """Without those of plans that were declined."""
    known = [figure for figure in figures if not math.isnan(figure)]
    return geometric_mean(known) if known else math.nan


def shown(figures: list[float], declined: Sequence[str]) -> str:
    marks = ["", "caching", "", "", "bfc"]
    return "".join(
        f"{value:8.3f}{'*' if mark in declined else ' '}"
        for value, mark in zip(figures, marks, strict=True)
    )


def histories(run: Repeated, label: str, rounds: int = ROUNDS) -> tuple[bfc.Trace, bfc.Trace]:
    """What a plan is made of, and what it then serves."""
    parts = DISTURBED.get(label, {})
    dice = np.random.default_rng(100)
    recording = history(run, [disturbed(run, dice, **parts) for _ in range(RECORDED)])
    dice = np.random.default_rng(200)
    iterations = [disturbed(run, dice, **parts) for _ in range(rounds)]
    if label not in BETWEEN:
        return recording, history(run, iterations)
    mixed = [each for part in iterations for each in (part, between(run, label))]
    return recording, history(run, mixed, ["train", label] * rounds)


def served(run: Repeated, label: str) -> Served:
    recording, trace = histories(run, label)
    most, row, declined = most_live(trace), [], []
    for fallback, make in (("caching", caching), ("bfc", growing_bfc)):
        plan = bfc.Plan.from_trace(recording, fallback=fallback)
        taken, agreement = reserved_with(plan, trace, make)
        row += [reserved(trace, make) / most, taken / most]
        if fallback == "caching":
            row.append(100 * agreement)
        if plan.declined is not None:
            declined.append(fallback)
    return Served(row, declined)


def times_served(run: Repeated) -> Iterator[str]:
    """The time of an event, by the policy without and with a plan, all in turn."""
    trace = history(run, [run.iteration] * ROUNDS)
    makes: dict[str, Maker] = {}
    plans: dict[str, bfc.Plan | None] = {}
    for fallback, policy in (("bfc", growing_bfc), ("caching", caching)):
        makes[fallback] = makes[f"{fallback} + plan"] = policy
        plans[fallback] = None
        plans[f"{fallback} + plan"] = bfc.Plan.from_trace(trace, fallback=fallback)
    return timed_in_turn(trace, makes, plans)


def timed_in_turn(
    trace: bfc.Trace, makes: dict[str, Maker], plans: dict[str, bfc.Plan | None]
) -> Iterator[str]:
    taken: dict[str, list[float]] = {kind: [] for kind in makes}
    for _ in range(5):
        for kind, make in makes.items():
            taken[kind].append(ns_of_first_replay(trace, make, plans[kind]))
    for kind, nanoseconds in taken.items():
        low, middle, high = (sorted(nanoseconds)[i] for i in (0, 2, 4))
        yield f"{kind} {low:.1f} / {middle:.1f} / {high:.1f}"


def show_lengths(folder: Path) -> None:
    """Runs whose lengths vary, and what plans of their first iterations make of them."""
    say("reserved / most live; hits of 100 requests")
    for name, learned in LEARNED.items():
        trace = with_lengths(bfc.Trace.load(folder / f"{name}.npz"), name)
        first = first_iterations(trace, learned)
        most = most_live(trace)
        say(f"{name}: {len(trace.meta['marks'])} iterations, of which the plan has seen {learned}")
        for fallback, make in (("caching", caching), ("bfc", growing_bfc)):
            plan = bfc.Plan.from_trace(first, fallback=fallback)
            with make(bfc.SimulatedSubAllocator("1 TiB")) as allocator:
                allocator.use_plan(plan, gate=None)
                taken = trace.replay(allocator).peak_bytes_reserved / most
                hits = 100 * allocator.plan_stats()["agreement"]
            alone = reserved(trace, make) / most
            say(f"{fallback:10}{alone:9.4f}  with a plan {taken:9.4f}, hits {hits:.1f}")


def show_made_up(names: Sequence[str], seeds: Sequence[int]) -> None:
    say(f"least / median / most of {len(seeds)} seeds")
    columns = ("caching", "with a plan", "by itself", "BFC", "with a plan", "by itself")
    say(f"{'':26}" + "".join(f"{name:>22}" for name in columns))
    for name in names:
        rows = [made_up(name, seed) for seed in seeds]
        shown = (" / ".join(f"{f:5.3f}" for f in spread(c)) for c in zip(*rows, strict=True))
        say(f"{name:26}" + "".join(f"{text:>22}" for text in shown))


def spread(figures: Iterable[float]) -> tuple[float, float, float]:
    every = sorted(figures)
    return every[0], every[len(every) // 2], every[-1]


def made_up(name: str, seed: int) -> list[float]:
    """What both policies reserve without and with a plan, divided by the most that is live: with
    steps where the run has marks, and with those that begin by themselves."""
    trace = MADE_UP[name](seed)
    most, row = most_live(trace), []
    for fallback, make in (("caching", caching), ("bfc", growing_bfc)):
        plan = bfc.Plan.from_trace(first_iterations(trace, 10), fallback=fallback)
        row += [
            reserved(trace, make) / most,
            reserved_with(plan, trace, make)[0] / most,
            reserved_with(plan, without_marks(trace), make, by_itself=True)[0] / most,
        ]
    return row


def show_beside_alone(
    names: Sequence[str], seeds: Sequence[int], policies: Sequence[str], *, in_pages: bool
) -> None:
    """Whether plans cost: what is reserved with one, divided by what the policy alone does."""
    every: dict[str, list[tuple[float, int]]] = {}
    for name in names:
        for seed in seeds:
            for policy in policies:
                for what, way, part, iterations in beside_alone(name, seed, policy, in_pages):
                    every.setdefault(what, []).append((part, iterations))
                    if part > COSTS:
                        say(
                            f"{part:6.3f}, {iterations:3} iterations  {what}, {way}: "
                            f"--beside-alone {name!r} --seeds {seed} --policies {policy}"
                            f"{' --pages' * in_pages}"
                        )
    for what, parts in every.items():
        above = [(part, count) for part, count in parts if part > COSTS]
        long = sum(count > 2 for _, count in above)
        say(
            f"{what:20}{len(above):4} of {len(parts)} above {COSTS}, {long} of them in more than "
            f"two iterations, at most {max((count for _, count in above), default=0)}; worst "
            f"{max(part for part, _ in parts):.3f}, geometric mean "
            f"{geometric_mean([part for part, _ in parts]):.4f}"
        )


def beside_alone(
    name: str, seed: int, policy: str, in_pages: bool
) -> Iterator[tuple[str, str, float, int]]:
    """For each run that a plan serves, and each way in which steps begin: what is reserved divided
    by what the policy alone does, and in how many iterations it is more than `COSTS`."""
    made = (MADE_UP | varied.PROGRAMS)[name]
    make = {
        "caching": stitching_caching if in_pages else caching,
        "bfc": stitching_bfc if in_pages else growing_bfc,
    }[policy]
    run, dice = made(seed), random.Random(seed)
    count = len(run.meta["marks"])
    plan = bfc.Plan.from_trace(first_iterations(run, dice.choice([3, 4, 6, 10])), fallback=policy)
    if in_pages and policy == "bfc" and run.stream.any():
        return  # its streams share memory: no plan of several is served in pages
    later = list(range(1, count))
    dice.shuffle(later)
    orders = in_other_order(run, [0, *later])
    for what, trace in (
        ("the same run", run),
        ("in another order", orders),
        ("another program", made(seed + OTHER)),
    ):
        alone = reserved(trace, make)
        for way, by_itself in (("marked", False), ("by itself", True)):
            taken = reserved_in_iterations(plan, trace, make, by_itself=by_itself)
            above = int((taken > COSTS * alone).sum())
            yield what, way, float(taken.max()) / alone, above


def reserved_in_iterations(
    plan: bfc.Plan, trace: bfc.Trace, make: Maker, *, by_itself: bool
) -> NDArray[np.int64]:
    """The most that is reserved in each iteration, with a plan; first what is before all."""
    marks = [event for event, _ in trace.meta["marks"]]
    with make(bfc.SimulatedSubAllocator("1 TiB")) as allocator, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it may be declined, or end
        allocator.use_plan(plan, steps="auto" if by_itself else None)
        played = without_marks(trace) if by_itself else trace
        replay = played.replay(allocator, samples=len(trace))
    assert replay.timeline is not None
    most = np.zeros(len(marks) + 1, np.int64)
    iteration = np.searchsorted(marks, replay.timeline.event, "right")
    np.maximum.at(most, iteration, replay.timeline.reserved.astype(np.int64))
    return most


def without_marks(trace: bfc.Trace) -> bfc.Trace:
    return bfc.Trace(trace.op, trace.id, trace.size, trace.stream)


def first_iterations(trace: bfc.Trace, learned: int) -> bfc.Trace:
    """What a plan is made of that has seen so many iterations."""
    marks = trace.meta["marks"]
    event, _ = marks[learned]
    columns = (trace.op[:event], trace.id[:event], trace.size[:event], trace.stream[:event])
    return bfc.Trace(*columns, meta={"marks": marks[:learned]})


def with_lengths(trace: bfc.Trace, name: str) -> bfc.Trace:
    """A run with marks. An iteration asks for the words of a batch (8 bytes each), their vectors
    (so many times as much), and the positions of one sentence of so many."""
    blocks = blocks_of(trace)
    words, vectors, positions = blocks.size[:-2], blocks.size[1:-1], blocks.size[2:]
    marks = []
    for wide, sentences, kind in BEGINS[name]:
        begins = (vectors == wide * words) & (positions * sentences == words)
        marks += [[int(blocks.birth[i]), kind] for i in np.flatnonzero(begins)]
    return bfc.Trace(trace.op, trace.id, trace.size, trace.stream, meta={"marks": sorted(marks)})


def show_instances(folder: Path) -> None:
    """Ours and MiniMalloc's in turn, one pass each: the times differ by factors."""
    program = folder / "build" / "minimalloc"
    paths = sorted((folder / "benchmarks" / "challenging").glob("*.csv"))
    heading = "".join(f"{name:>9}" for name in ("bound", "greedy", "span", "ours s"))
    say(f"\n{'instance':12}{'blocks':>7}{heading}{'theirs s':>10}")
    ours = theirs = 0.0
    for path in paths:
        sizes, births, deaths = instance(path)
        greedy = lay_out(sizes, births, deaths, steps=0)
        begun = time.thread_time()
        found = lay_out(sizes, births, deaths, capacity=CAPACITY, steps=STEPS)
        mine = time.thread_time() - begun
        other = minimalloc(program, path) if program.exists() else float("nan")
        ours, theirs = ours + mine, theirs + other
        ratios = (span / CAPACITY for span in (found.bound, greedy.span, found.span))
        columns = "".join(f"{ratio:9.3f}" for ratio in ratios)
        say(f"{path.name.split('.')[0]:12}{len(sizes):7}{columns}{mine:9.2f}{other:10.2f}")
    say(f"{'sum':12}{'':34}{ours:9.2f}{theirs:10.2f}")


def instance(path: Path) -> tuple[list[int], list[int], list[int]]:
    """The sizes, births and deaths of MiniMalloc's CSV."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ([int(row[name]) for row in rows] for name in ("size", "lower", "upper"))
    sizes, births, deaths = columns
    return sizes, births, deaths


def minimalloc(program: Path, path: Path) -> float:
    """The processor time that MiniMalloc takes; raises if it finds nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program), f"--capacity={CAPACITY}", f"--input={path}"]
        subprocess.run(
            [*command, f"--output={folder}/out.csv"], check=True, capture_output=True, timeout=600
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
