"""`bfc.advise`: which settings let a recorded run fit on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import astuple
from dataclasses import replace as with_
from typing import TYPE_CHECKING, SupportsIndex

from bfc.pytorch.rules import rules_of
from bfc.trace import Trace
from bfc.units import format_bytes, parse_bytes
from bfc_tools.study import candidates, recorded_settings
from bfc_tools.study.advice import Advice, AdviceRow
from bfc_tools.study.candidates import Point
from bfc_tools.study.file_formats import read
from bfc_tools.study.iterations import Steady, figures_of, steady_of
from bfc_tools.study.planned import row_of_plan
from bfc_tools.study.ran_out import ran_out
from bfc_tools.study.recorded_settings import Recorded
from bfc_tools.study.torch_version import decided

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from bfc_tools.study.candidates import Outcome
    from bfc_tools.study.search import Candidate, Search

#: One that refuses nothing of a recorded run, and on which expandable segments find addresses.
LARGE = 1 << 40


def advise(
    trace: Trace | str | os.PathLike[str],
    device: SupportsIndex | str,
    executor: Executor | None = None,
    *,
    torch: str | None = None,
    thorough: bool = False,
    jobs: int | None = None,
    progress: Callable[[str, int], object] | None = None,
    also: Sequence[Trace] = (),
) -> Advice:
    """Find the settings under which a recorded run fits on a device.

    The run is replayed under PyTorch's settings, one key at a time, then under pairs of the best,
    and under the policies of bfc. `print` shows the advice: whether the run fits already, which
    line makes it fit, or how much is missing.

    Parameters
    ----------
    trace : Trace, str or os.PathLike
        The run, or the file that holds it: a memory snapshot of PyTorch, an `.npz` trace, or a log
        of RMM (`.csv`).
    device : int or str
        What the allocator may take, in bytes or as a text such as "34 GiB": without the CUDA
        context, NCCL and cuBLAS.
    executor : concurrent.futures.Executor, optional
        What runs the replays, such as `distributed.Client.get_executor()`: a Dask cluster gets the
        trace once. The default is new processes, which import the program's main file: its own
        work must stand behind `if __name__ == "__main__":`.
    torch : str, optional
        The version of PyTorch that will run: the rules of the replays, and the settings that are
        proposed. None takes the recorded one; where the recording does not say, a replay may tell,
        and else it is the newest. The advice says which.
    thorough : bool, optional
        Replay the full grid of settings, too: some 1,400 combinations.
    jobs : int, optional
        How many processes to start; 1 replays in this process. The default is one for each core
        that this process may use.
    progress : callable, optional
        Called with what is being done, in words, and the number of replays done since the last
        call.
    also : sequence of Trace, optional
        Other runs that must fit on the device, too, under the settings that are proposed, and under
        those in force, if these are said to fit.

    Returns
    -------
    Advice
        The rows, the best first, and how well a replay repeats the recorded run.

    Raises
    ------
    TraceError
        If the file is not a trace or a snapshot.
    OSError
        If it cannot be read.
    ValueError
        If `device` or `jobs` is malformed, or below 1, or bfc does not have the rules of the
        version `torch`.
    RuntimeError
        If processes cannot be started because the main file has no guard, or if a Dask cluster has
        no workers, or one of them has another version of bfc.

    Notes
    -----
    Rows of PyTorch's policy are replayed with `strict=True`, so that they refuse what that version
    of PyTorch refuses. Each size that is reported was replayed, since whether a run completes is
    not monotone in the device's size. Sizes and their order are as recorded; under other settings a
    framework may pick other algorithms.

    Where the run fits as it is, settings are tried one key at a time; where more is live than the
    device has, only the few that everybody compares with.

    Cost: 10 to 400 replays, each of 10 to 100 ns an event and some microseconds a driver call. The
    first two, of the settings in force and of expandable segments, are done in this process:
    `progress` gets what they say.

    Examples
    --------
    >>> import bfc
    >>> MIB = 1 << 20
    >>> trace = bfc.Trace([0, 1, 0, 0], [0, 0, 1, 2], [30 * MIB, 0, 18 * MIB, 30 * MIB])
    >>> advice = bfc.advise(trace, "56 MiB", jobs=1)
    >>> advice.fits, advice.rows[advice.best].settings, advice.live_peak // MIB
    (True, 'max_split_size_mb:21', 48)
    """
    from bfc_tools.study.search import DEFAULT, EXPANDABLE, Search
    from bfc_tools.study.workers import Replays

    nbytes = parse_bytes(device)
    if nbytes < 1:
        raise ValueError("a device has at least 1 byte")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is at least 1, not {jobs}")
    if torch is not None:
        rules_of(torch)  # what is wrong with it is said before a file is read
    run = decided(trace if isinstance(trace, Trace) else read(trace, frames=True), torch)
    whole, refused = recorded_settings.with_the_last_refusal(run)
    say = progress or (lambda text, done: None)
    text = ""

    def stage(now: str) -> None:
        nonlocal text
        text = now
        say(text, 0)

    stage("the recorded settings")
    proof = prove(run._bare(run.meta), recorded_settings.read(run))
    known = recorded_settings.known_to(proof)
    with Replays(whole, executor, jobs, lambda done: say(text, done)) as replays:
        in_force = known[0] if known else DEFAULT
        live = whole.peak_bytes_live()
        compared = list(dict.fromkeys((in_force, EXPANDABLE)))
        first = replays.run([(point, nbytes) for point in compared], here=True)
        stage("; ".join(map(_first_answer, compared, first)))
        (with_room,) = replays.run([(in_force, max(LARGE, 4 * live))], here=True)
        search = Search(replays, nbytes, live, stage)
        search.search(candidates.ours(), candidates.grid() if thorough else (), known)
        _refuse_what_others_refuse(search, in_force, also)
        rows, best, no_plan = _with_plan(*_rows(search), row_of_plan(whole, nbytes))
        at = [(row.policy, row.settings) for row in rows].index(astuple(in_force))
        calls = with_room.driver_calls
        counts = calls, len(whole), replays.count, refused
        private = whole._private_allocations()
        given_up = tuple(it.point.name for it in search.candidates.values() if it.given_up)
        of_run = ran_out(run), _steady(whole, in_force, with_room)
        return Advice(
            live, nbytes, proof, rows, best, at, *counts, no_plan, private, given_up, *of_run
        )


def _steady(trace: Trace, in_force: Point, with_room: Outcome) -> Steady | None:
    """The first iteration beside the later ones, and what the settings in force reserve up to
    there. `with_room` is the whole run under these settings, on a device with room."""
    found = trace.iterations()
    steady = steady_of(trace, figures_of(trace, found))
    if steady is None:
        return None
    ends = [one.end for one in found if one.kind == steady.kind][:2]
    room = max(LARGE, 4 * trace.peak_bytes_live())
    outcomes = [candidates.replay(trace[:end], in_force, room) for end in ends]
    reserved = [outcome.peak_reserved for outcome in (*outcomes, with_room)]
    return with_(steady, reserved=tuple(reserved))


def prove(trace: Trace, said: Recorded) -> Recorded:
    """What a recording says, with what a replay under its settings reserves, if there is anything
    to compare. The replay is on a device without a limit. If its peak differs, the replay is
    repeated on a device of the recorded peak, since the run may have met a limit."""
    point = recorded_settings.point_of(said)
    if point is None or said.peak_reserved is None:
        return said
    free = candidates.replay(trace, point, max(LARGE, 4 * said.peak_reserved), None)
    if free.peak_reserved != said.peak_reserved:
        full = candidates.replay(trace, point, said.peak_reserved, None)
        if full.completes and full.peak_reserved == said.peak_reserved:
            return with_(said, replayed=full.peak_reserved, capacity=said.peak_reserved)
    return with_(said, replayed=free.peak_reserved)


def _first_answer(point: Point, outcome: Outcome) -> str:
    """What is known of a point after its first replay."""
    name = point.settings or "the defaults"
    if outcome.completes:
        return f"{name}: fits, {format_bytes(outcome.peak_reserved)} reserved"
    return f"{name}: does not fit, {outcome.refused} refused"


def _refuse_what_others_refuse(search: Search, in_force: Point, also: Sequence[Trace]) -> None:
    """Counts as refused, of what would be chosen and of the settings in force, what other runs are
    refused on the device. Policies of bfc are asked only where nothing of PyTorch's is left."""
    _is_refused_by(also, search.candidates[in_force], search.device)
    for is_pytorch in (True, False):
        while (chosen := search.chosen(is_pytorch)) is not None:
            if not _is_refused_by(also, chosen, search.device):
                return


def _is_refused_by(also: Sequence[Trace], candidate: Candidate, device: int) -> bool:
    """Whether a run of others is refused something under a candidate that seemed to fit, which
    then does not."""
    if not candidate.outcome.completes:
        return False
    for trace in also:
        outcome = candidates.replay(trace, candidate.point, device)
        if not outcome.completes:
            candidate.outcome, candidate.high = outcome, None
            return True
    return False


def _rows(search: Search) -> tuple[tuple[AdviceRow, ...], int | None]:
    """The candidates, the best first, and the index of the best that fits."""
    step = search.coarse
    ranked: list[Candidate] = []
    best: int | None = None
    for is_pytorch in (True, False):
        mine = [it for it in search.ranked(is_pytorch) if not it.outcome.given_up]
        chosen = search.chosen(is_pytorch)
        if chosen is not None and best is None:
            best = len(ranked)
        first = [] if chosen is None else [chosen]
        ranked += first + [it for it in mine if it is not chosen]
    return tuple(_row(candidate, step) for candidate in ranked), best


def _with_plan(
    rows: tuple[AdviceRow, ...], best: int | None, planned: AdviceRow | str
) -> tuple[tuple[AdviceRow, ...], int | None, str]:
    """The rows with that of a plan at the end, which is the best if nothing else fits; and why
    there is none."""
    if isinstance(planned, str):
        return rows, best, planned
    return (*rows, planned), len(rows) if best is None and planned.fits else best, ""


def _row(candidate: Candidate, step: int) -> AdviceRow:
    return AdviceRow(
        candidate.point.policy,
        candidate.point.settings,
        candidate.outcome.completes,
        candidate.outcome.refused,
        candidate.outcome.peak_reserved,
        candidate.outcome.driver_calls,
        candidate.high if candidate.is_within(step) else None,
        tuple(sorted(candidate.refused_above)),
        candidate.outcome.beginning,
    )
