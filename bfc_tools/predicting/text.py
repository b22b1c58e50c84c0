"""What a prediction says to people: the command prints it, and notebooks show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bfc.units import format_bytes, printable
from bfc_tools.predicting.places import layer
from bfc_tools.predicting.repeats import REPEATS
from bfc_tools.predicting.unsure import values

if TYPE_CHECKING:
    from bfc_tools.predicting.prediction import Prediction
    from bfc_tools.predicting.verdict import Verdict

#: How many rows a table has.
ROWS = 10


def lines(
    found: Prediction,
    verdict: Verdict,
    table: str = "by_module",
    *,
    advice: object = None,
    hint: str = "",
    stopped: str = "",
) -> Iterator[str]:
    """What a prediction says.

    The first line is the `verdict`, and what follows does not contradict it. `table` names what is
    shown of the peak beside its kinds: "by_module", "by_operator" or "by_line". `advice` stands
    below the tables, `hint` below the figures. `stopped` says after what the program was stopped,
    as "2 steps of the optimizer".
    """
    if not len(found.trace):
        yield verdict.answer if found.refusals else "It has allocated nothing on the GPU."
        yield from [hint] if hint else []
        yield from ["", str(advice)] if advice is not None else []
        return
    yield verdict.answer
    rank, size = found.process
    if size > 1:
        yield f"This is rank {rank} of {size}. With --nproc, bfc predict answers for all of them."
    yield from _peaks(found)
    if found.allocator_differs:
        yield f"           {found.allocator_differs}"
    yield from _at_other_addresses(found)
    yield from _repeated(found, verdict)
    yield from _open(found)
    yield from _between(found, verdict)
    yield from _compiled(found)
    yield from _refusals(found)
    yield from _changes(found)
    yield from [hint] if hint else []
    yield ""
    yield from _moment(found)
    yield ""
    yield from _rows("whose memory at the peak", found.peak.by_kind)
    yield ""
    title = {"by_module": "by module", "by_operator": "by operator", "by_line": "by line"}[table]
    rows: Mapping[str, int] = getattr(found.peak, table)
    yield from _rows(title, joined(rows) if table == "by_module" else rows)
    if not stopped and verdict.fits is not None:  # it has had its chance to make one
        yield from _graphs(found)
    if advice is not None:
        yield ""
        yield str(advice)
    yield ""
    yield "not in these numbers (the ranges are rough):"
    for one in found.not_counted:
        yield (f"  {one.what}: {format_bytes(one.low)} to {format_bytes(one.high)}, {one.why}")
    names: dict[str, list[str]] = {}
    for name, why in found.unknown.items():
        names.setdefault(why, []).append(name)
    yield from (f"  {', '.join(alike)}: {why}" for why, alike in names.items())
    yield ""
    yield "assumed:"
    yield from (f"  {line}" for line in _assumed(found, stopped))


def at_most(found: Prediction) -> str:
    """How peaks are told: "at most", unless something is not known."""
    return "as counted" if found.live_bounds.because else "at most"


def _peaks(found: Prediction) -> Iterator[str]:
    most = at_most(found)
    yield f"live       {format_bytes(found.peak_requested)} {most}, asked for by the program"
    yield f"allocated  {format_bytes(found.peak_allocated)} {most}, in blocks of the allocator"
    if found.settings:
        yield (
            f"reserved   {format_bytes(found.peak_reserved)} {most} under {found.settings}, "
            f"{format_bytes(found.reserved_under(''))} under the defaults"
        )
    else:
        yield (
            f"reserved   {format_bytes(found.peak_reserved)} {most}, under PyTorch's default "
            "settings"
        )


def _at_other_addresses(found: Prediction) -> Iterator[str]:
    """What is reserved in other processes, where that varies."""
    low, high = found.reserved_range()
    if low < high:
        yield (
            f"           {format_bytes(low)} to {format_bytes(high)} by the addresses that the "
            "driver gives: PyTorch 2.13 and later do not depend on them"
        )


def _compiled(found: Prediction) -> Iterator[str]:
    """How what is compiled was followed; where it was not, between which bounds it lies."""
    graphs = "the graphs of AOTAutograd, operator by operator"
    for one in found.compiled:
        followed, why = one["as"], one["why"]
        if followed == "inductor":
            told = "as Inductor plans its buffers"
        elif followed:
            told = f"{graphs}; Inductor mostly needs less: {why}" if why else graphs
        else:
            told = f"as it is written; compiled, it mostly needs less: {why}"
        yield f"compiled   {one['name']}: {told}"
    least = found.least_requested if any(one["why"] for one in found.compiled) else 0
    if least:
        most = format_bytes(found.peak_requested)
        yield (
            f"           live between {format_bytes(least)} (parameters, gradients and states, "
            f"whatever is fused) and mostly {most} (nothing is)"
        )


def _changes(found: Prediction) -> Iterator[str]:
    """The changes of the program that were tried."""
    for one in found.changes:
        told = one.to_dict()
        if one.times:
            where = f" of {', '.join(told['where'])}" if told["where"] else ""
            yield f"with       {one.name}{where}: {told['line']}"
        else:
            yield f"with       {one.name}, which has changed nothing: {told['reason']}"


def _repeated(found: Prediction, verdict: Verdict) -> Iterator[str]:
    """What many steps reserve, where that is more."""
    held = found.reserved_after()
    if held is not None and held > found.peak_reserved:
        has_room = held <= verdict.limit or verdict.fits is False
        more = "" if has_room else "; with less room it makes do with less"
        yield f"           {format_bytes(held)} if the last step is repeated {REPEATS} times{more}"


def _open(found: Prediction) -> Iterator[str]:
    """What the figures depend on that is not known, unless it is a small part of them."""
    for one in values(found):
        lines = one.made_up
        more = f", and at {len(lines) - 1} other lines" if len(lines) > 1 else ""
        yield f"{one.side:11}{one.why}{_place(lines[0]['where'])}{more}"


def _between(found: Prediction, verdict: Verdict) -> Iterator[str]:
    """Between which figures the peaks lie, if what is not known is no small part of them, or may
    turn the verdict."""
    live, held = found.live_bounds, found.reserved_bounds
    matters = live.matters(found.peak_requested) or held.matters(found.peak_reserved)
    if not (matters or verdict._as_counted):
        return
    since = "; ".join(live.because)
    if live.high is None or held.high is None:
        yield (
            f"at least   {format_bytes(live.low)} live, {format_bytes(held.low)} reserved: no "
            f"upper bound is known, since {since}"
        )
        return
    worst, held_worst = live.with_an_fft or live.high, held.with_an_fft or held.high
    more = ""
    if (worst, held_worst) != (live.high, held.high):
        too_much = verdict.fits_at_most and held_worst > verdict.limit
        size = ", which is more than there is," if too_much else ""
        more = (
            f", or up to {format_bytes(worst)} and {format_bytes(held_worst)}{size} if cuDNN takes "
            "an FFT"
        )
    would_not = ", which would not fit" if verdict.fits and verdict.fits_at_most is False else ""
    yield (
        f"between    {format_bytes(live.low)} and {format_bytes(live.high)} live, "
        f"{format_bytes(held.low)} and {format_bytes(held.high)} reserved{would_not}{more}, since "
        f"{since}"
    )


def _refusals(found: Prediction) -> Iterator[str]:
    """What the program was refused, and what it did then."""
    for one in found.refusals[:FEW]:
        yield (
            f"refused    {format_bytes(one.nbytes)} at {one.line or 'an unknown line'}: "
            f"{format_bytes(one.live)} were live, {format_bytes(one.reserved)} reserved, "
            f"{format_bytes(one.free)} free on the device"
        )
    if len(found.refusals) > FEW:
        yield f"refused    {len(found.refusals) - FEW} more"
    if found.went_on:
        yield "           the program caught the error and went on: the figures are of what it did"


_PHASES = {
    "": "outside of a step",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
}


def _moment(found: Prediction) -> Iterator[str]:
    peak = found.peak
    yield f"The peak is {_PHASES[peak.phase]}, at {peak.line or 'an unknown line'}:"
    if peak.of_line:
        yield f"  the gradient of {peak.of_line}"
    place = f"{peak.module}, " if peak.module else ""
    yield f"  {place}operator {peak.operator}"


def _graphs(found: Prediction) -> Iterator[str]:
    """What graphs keep that nobody uses."""
    kept = found.kept_for_backward
    if 2 * kept > found.peak.nbytes:
        yield ""
        yield (
            "No backward pass came, and the forward passes keep for one what it needs: that is in "
            f"the {format_bytes(kept)} of activations. Under `with torch.no_grad():` they keep "
            "none of it."
        )


def joined(rows: Mapping[str, int]) -> dict[str, int]:
    """Modules whose names differ only in numbers, as one."""
    totals: dict[str, int] = {}
    for name, nbytes in rows.items():
        totals[layer(name)] = totals.get(layer(name), 0) + nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _rows(title: str, rows: Mapping[str, int]) -> Iterator[str]:
    total = sum(rows.values()) or 1
    yield f"{title}:"
    shown = list(rows.items())[:ROWS]
    for name, nbytes in shown:
        named = printable(name) or "(no module)"
        yield f"  {format_bytes(nbytes):>11}  {nbytes / total:6.1%}  {named}"
    if len(rows) > ROWS:
        rest = total - sum(nbytes for _, nbytes in shown)
        yield f"  {format_bytes(rest):>11}  {rest / total:6.1%}  {len(rows) - ROWS} others"


def _assumed(found: Prediction, stopped: str) -> Iterator[str]:
    gpu = found.gpu
    yield (
        f"torch {found.torch_version}: predict with the version that will run, since others may "
        "call other operators"
    )
    yield from found.undecided
    yield (
        f"compute capability {gpu.cc[0]}.{gpu.cc[1]}, {gpu.sms} multiprocessors of "
        f"{gpu.threads_per_sm} threads"
    )
    if any(one["as"] for one in found.compiled):
        yield (
            "torch.compile: one graph for each kind of arguments, where Dynamo may break it; "
            "kernels are not run"
        )
    if stopped:
        yield f"what follows needs no more: it was stopped after {stopped}"
    values = [one for one in found.assumptions if one["what"].startswith(".")]
    in_packages = [one for one in values if _INSTALLED in one["where"]]
    hidden = in_packages if len(in_packages) > FEW else []
    for one in found.assumptions:
        if one in hidden:
            continue
        place = _place(one["where"])
        times = "" if one["times"] == 1 else f", {one['times']} times"
        if one["what"].startswith("."):
            yield f"{one['what']}{place} is {one['value']}{times}"
        else:
            yield f"{one['what']} ({one['value']}){place}{times}"
    if hidden:
        names = sorted({one["where"].rpartition(_INSTALLED)[2].split("/")[0] for one in hidden})
        yield (
            f".item() and the like at {len(hidden)} lines of {', '.join(names)}: 1, 1.0, False or "
            "zeros; --json, or assumptions in Python, lists them"
        )
    yield from _about_files(found)


#: More values than these that packages have read are counted, and not listed.
FEW = 3
_INSTALLED = "/site-packages/"


def _place(where: str) -> str:
    """Where a line is: with its package, if it is in one."""
    if where == "?":
        return " in the backward pass"  # whose thread has no lines
    _, installed, path = where.rpartition(_INSTALLED)
    return f" at {path if installed else where.rsplit('/', 1)[-1]}"


def _about_files(found: Prediction) -> Iterator[str]:
    """What became of the files that the program has changed."""
    written, removed = found.files_written, found.files_removed
    if written:
        size = format_bytes(found.files_bytes)
        yield f"the program wrote {_some(written)}, {size}: thrown away"
    if removed:
        yield f"it removed or renamed {_some(removed)}: yours are there still"


def _some(paths: list[str]) -> str:
    """A few paths, and how many there are."""
    here = Path.cwd()
    first = Path(paths[0])
    name = printable(str(first.relative_to(here) if first.is_relative_to(here) else first))
    return name if len(paths) == 1 else f"{name} and {len(paths) - 1} more"
