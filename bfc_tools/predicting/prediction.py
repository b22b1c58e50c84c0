"""What a prediction has found."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

from bfc.libraries import np, torch
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.rules import rules_of
from bfc.trace import Trace
from bfc.trace.trace import ALLOCATE
from bfc.units import format_bytes, parse_bytes
from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.file_layer import Changes
from bfc_tools.predicting.holders import Holder, alive_at, holders, operator_of
from bfc_tools.predicting.kinds import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    MADE_ONCE,
    OPTIMIZER_STATE,
    PARAMETERS,
    told,
)
from bfc_tools.predicting.memory import ENOUGH, Memory, simulated_driver
from bfc_tools.predicting.places import BACKWARD, PHASES, layer
from bfc_tools.predicting.releases import differences
from bfc_tools.predicting.repeats import REPEATS, repeated
from bfc_tools.predicting.text import lines
from bfc_tools.predicting.unsure import AT_WORST, LEAST, MOST, Bounds, at, bounds, steps
from bfc_tools.predicting.verdict import (
    ADDRESSES,
    REPEATED,
    STEPS,
    Refusal,
    Run,
    Verdict,
    decide,
    settings_under_a_limit,
)
from bfc_tools.study.source_lines import Lines, short

if TYPE_CHECKING:
    from bfc_tools.predicting.changing import Change
    from bfc_tools.predicting.file_layer import Layer
    from bfc_tools.predicting.outside import Outside
    from bfc_tools.predicting.recorder import Recorder
    from bfc_tools.study.advice import Advice

MIB = 1 << 20
#: At how many layouts of addresses a trace is replayed.
LAYOUTS = 8


@dataclass(frozen=True)
class Peak:
    """The moment at which most was live, and whose memory it was. Sizes are bytes asked for.

    Attributes
    ----------
    event : int
        The index of the event in the trace.
    nbytes : int
        How much was live.
    phase : str
        "forward", "backward", "optimizer", or "" outside of a step.
    line : str
        The line of the program that ran, such as "train.py:61 in step".
    of_line : str
        In the backward pass, the line of the forward pass whose gradient was computed; else empty.
    module : str
        The module, such as "layers.3.attn"; empty if none was running.
    operator : str
        The operator that allocated.
    by_kind : dict of str to int
        What was live, by what it is for: "parameters", "gradients", "optimizer state",
        "activations", "workspaces" and so on.
    by_module : dict of str to int
        The same by module.
    by_operator : dict of str to int
        The same by operator.
    by_line : dict of str to int
        The same by line; in the backward pass, by the line of the forward pass.
    """

    event: int
    nbytes: int
    phase: str
    line: str
    of_line: str
    module: str
    operator: str
    by_kind: dict[str, int]
    by_module: dict[str, int]
    by_operator: dict[str, int]
    by_line: dict[str, int]


@dataclass(frozen=True)
class NotCounted:
    """Memory of the GPU that is not in the prediction.

    Attributes
    ----------
    what : str
        What takes it.
    low : int
        The least that it may be, in bytes: rough, as public reports of runs have it.
    high : int
        The most that it usually is, in bytes; as rough.
    why : str
        What it depends on.
    """

    what: str
    low: int
    high: int
    why: str


class Prediction:
    """The memory that a program needs. `bfc.predict` makes it; printed, it tells all of it.

    Parameters
    ----------
    gpu : GPU
        The GPU that was assumed.
    memory : Memory
        The memory of the device, which the program uses.
    recorder : Recorder
        What records the program.
    asked : tuple of int, optional
        The release whose rules hold, if it is not the installed one.

    Attributes
    ----------
    gpu : GPU
        As given.
    torch_version : str
        The version of torch whose operators ran.
    as_torch : str
        The release whose rules held, such as "2.9", if another one was asked for.
    """

    def __init__(
        self,
        gpu: GPU,
        memory: Memory,
        recorder: Recorder,
        asked: tuple[int, ...] | None = None,
    ) -> None:
        self.gpu = gpu
        self.torch_version: str = torch.__version__
        self.as_torch = "" if asked is None else "{}.{}".format(*asked)
        self._memory = memory
        self._recorder = recorder
        self._until = ""  # how the program ended too early
        #: What keeps the program's files apart, unless they are real.
        self.files: Layer | Outside | None = None
        #: The changes of the program that were tried.
        self.changes: list[Change] = []
        self._trace: Trace | None = None
        self._state: tuple[int, ...] = ()
        self._runs: tuple[Run, ...] = ()
        self._peak: Peak | None = None
        self._found_bounds: tuple[Bounds, ...] = ()

    @property
    def peak_allocated(self) -> int:
        """The most bytes that were allocated, as `torch.cuda.max_memory_allocated()` counts.

        That is in whole blocks of the allocator: `peak_requested` is less.
        """
        return self._memory.note_peaks().allocated

    @property
    def peak_requested(self) -> int:
        """The most bytes that were asked for and not freed."""
        return self._memory.peaks.requested

    @property
    def requested_in_all(self) -> int:
        """The bytes of all requests together, also of those whose memory was freed."""
        trace = self.trace
        return int(trace.size[trace.op == ALLOCATE].sum(dtype=np.int64))

    @property
    def peak_reserved(self) -> int:
        """The most bytes taken from the device, as `torch.cuda.max_memory_reserved()` counts."""
        return self._memory.note_peaks().reserved

    @property
    def settings(self) -> str:
        """The settings in force, as in PYTORCH_CUDA_ALLOC_CONF."""
        return self._memory.settings

    @property
    def limited(self) -> bool:
        """Whether the device runs out of memory (`oom=True`)."""
        return self._memory.limited

    @property
    def operators(self) -> int:
        """How many operators have run."""
        return self._recorder.operators

    @property
    def process(self) -> tuple[int, int]:
        """The rank of the process that was predicted, and how many its program has."""
        return self._recorder.process

    @property
    def snapshots(self) -> list[str]:
        """The files that the program has written with `_dump_snapshot`."""
        return list(self._memory.dumped)

    @property
    def files_written(self) -> list[str]:
        """The files that the program has written, and that were thrown away: absolute paths."""
        return self._changes().written

    @property
    def files_removed(self) -> list[str]:
        """The user's files that the program has removed or renamed; they are there still."""
        return self._changes().removed

    @property
    def files_bytes(self) -> int:
        """The bytes on the disk that the files it has written took."""
        return self._changes().nbytes

    def _changes(self) -> Changes:
        return Changes([], [], 0) if self.files is None else self.files.changes()

    @property
    def trace(self) -> Trace:
        """All allocations and frees, with owners (modules) and stacks (lines, operators)."""
        memory = self._memory
        state = len(memory.history), len(memory.refusals), len(memory.step_ends)
        if self._trace is None or state != self._state:
            self._state, self._peak, self._runs = state, None, ()
            self._found_bounds = ()
            about = {
                "gpu": self.gpu.name,
                "torch": self.torch_version,
                "settings": settings_under_a_limit(self.settings),
                "limit": memory.limit_of(memory.nbytes, memory.total),
                "refused": [(one.event, one.nbytes, one.free) for one in memory.refusals],
                "refused_stacks": [one.stack for one in memory.refusals],
                "kinds": told(memory.history.kinds),
            }
            self._trace = memory.trace(
                {
                    "predicted": about,
                    "torch_version": memory.rules,
                    "torch_version_sign": self._sign(),
                }
            )
        return self._trace

    @property
    def refusals(self) -> list[Refusal]:
        """The requests that the program was refused, whether or not it caught the error."""
        lines = Lines(self.trace)
        return [
            Refusal(
                one.event, one.nbytes, _line(lines, one.stack), one.live, one.reserved, one.free
            )
            for one in self._memory.refusals
        ]

    @property
    def ran_out(self) -> bool:
        """Whether the program ended because it ran out of memory, or said so."""
        return self._memory.ran_out

    @property
    def went_on(self) -> bool:
        """Whether the program allocated again after what it was refused last."""
        refused = self._memory.refusals
        return bool(refused) and ALLOCATE in self._memory.history.op[refused[-1].event :]

    @property
    def peak(self) -> Peak:
        """The moment at which most was live, and whose memory it was.

        Raises
        ------
        RuntimeError
            If nothing was allocated on the GPU.
        """
        trace = self.trace
        if self._peak is None:
            if not len(trace):
                raise RuntimeError("the program has allocated nothing on the GPU")
            self._peak = _find_peak(trace, self._memory)
        return self._peak

    def reserved_under(self, settings: str) -> int:
        """The most bytes that would be taken from the device under other settings.

        Parameters
        ----------
        settings : str
            As in PYTORCH_CUDA_ALLOC_CONF; "" are the defaults.

        Returns
        -------
        int
            In bytes, on a device that never refuses.

        Raises
        ------
        SettingsError
            If the settings are wrong.
        """
        if settings == self.settings:
            return self.peak_reserved
        return int(self._replay(ENOUGH, settings).peak_bytes_reserved)

    def reserved_range(self) -> tuple[int, int]:
        """The least and the most bytes reserved as the driver's addresses vary.

        Before 2.13, PyTorch takes, of free blocks of one size, the one at the lowest address. So
        equal runs of a program can reserve more or less than `peak_reserved`, for which all
        addresses fall. Later versions take the block in the oldest segment, and reserve the same.

        Returns
        -------
        tuple of (int, int)
            In bytes, of `peak_reserved` and eight replays of the trace on devices that never
            refuse, whose addresses jump between three gaps as a seed says. Others may be outside.
            It takes time as the replays do: a second or two for a million events. With `oom=True`
            both are `peak_reserved`.

        Examples
        --------
        >>> import bfc
        >>> def least_and_most(run: bfc.Prediction) -> tuple[int, int]:
        ...     return run.reserved_range()
        """
        found = [run.peak_reserved for run in self.runs() if run.kind != REPEATED]
        return min(found), max(found)

    @property
    def live_bounds(self) -> Bounds:
        """Between which figures `peak_requested` lies, where sizes are not known, and why."""
        return self._bounds()[0]

    @property
    def allocated_bounds(self) -> Bounds:
        """The same for `peak_allocated`."""
        return self._bounds()[1]

    @property
    def reserved_bounds(self) -> Bounds:
        """The same for `peak_reserved`, at the same addresses."""
        return self._bounds()[2]

    def _bounds(self) -> tuple[Bounds, ...]:
        trace, doubted = self.trace, self._memory.doubted  # `trace` forgets what was found earlier
        if not self._found_bounds:
            peaks = [(self.peak_requested, self.peak_allocated, self.peak_reserved)]
            sizes = [LEAST, MOST] if doubted else []
            if any(one.doubt.at_worst is not None for one in doubted):
                sizes.append(AT_WORST)
            for which in sizes:
                run = self._replayed(at(trace, doubted, which), ENOUGH, self.settings)
                peaks.append((run.peak_bytes_live, run.peak_bytes_in_use, run.peak_bytes_reserved))
            self._found_bounds = bounds(self, doubted, peaks)
        return self._found_bounds

    def _at(self, which: str) -> Trace:
        """The run with all sizes that are not known at their LEAST, MOST or AT_WORST."""
        return at(self.trace, self._memory.doubted, which)

    def reserved_after(self, repeats: int = REPEATS) -> int | None:
        """The most bytes taken from the device if the last step is repeated.

        Equal steps may need a little more each, since the free blocks of one do not always fit the
        next.

        Parameters
        ----------
        repeats : int, optional
            How often the last step of the optimizer that was recorded is made again.

        Returns
        -------
        int or None
            In bytes, on a device that never refuses; None if no two steps were recorded. What came
            before counts, too, and what came after the last step does not. It takes time as a
            replay of so many steps does: some tenths of a second for a million events.
        """
        if repeats == REPEATS:
            found = (run.peak_reserved for run in self.runs() if run.kind == REPEATED)
            return next(found, None)
        trace = self._repeated(repeats)
        return None if trace is None else self._peak_of(trace)

    def _repeated(self, repeats: int) -> Trace | None:
        """The run with its last step made so many times more; None if no two steps were made."""
        ends = self._memory.step_ends
        if len(ends) < 2:
            return None
        kinds = np.frombuffer(self._memory.history.kinds, np.uint8)
        lasting = set(np.flatnonzero(np.isin(kinds, MADE_ONCE)).tolist())
        return repeated(self.trace, ends[-2], ends[-1], repeats, lasting)

    def runs(self) -> tuple[Run, ...]:
        """The runs that have to fit.

        These are the steps that were made, the same at other addresses of the driver, if PyTorch
        depends on them, and the last step made again and again.

        Returns
        -------
        tuple of Run
            With what they reserve on a device that never refuses. They are made once, in the time
            of `reserved_range` and `reserved_after`.
        """
        trace = self.trace
        if not self._runs:
            found = [Run(STEPS, trace, self.peak_reserved)]
            if not (self.limited or rules_of(self._memory.rules).by_registration):
                about = trace.meta["predicted"]
                for seed in range(LAYOUTS):
                    there = trace._with_meta(trace.meta | {"predicted": about | {"layout": seed}})
                    found.append(Run(ADDRESSES, there, self._peak_of(there, seed)))
            again = self._repeated(REPEATS)
            if again is not None:
                found.append(Run(REPEATED, again, self._peak_of(again)))
            self._runs = tuple(found)
        return self._runs

    def _peak_of(self, trace: Trace, seed: int | None = None) -> int:
        return int(self._replayed(trace, ENOUGH, self.settings, seed).peak_bytes_reserved)

    def limit(self, device: SupportsIndex | str | None = None) -> int:
        """What PyTorch may take of a device.

        Parameters
        ----------
        device : int or str, optional
            As in `fits`.

        Returns
        -------
        int
            In bytes: what is given, or what the GPU of the prediction leaves; or, if it is less,
            the fraction of that GPU's memory that the program (`set_per_process_memory_fraction`)
            or its settings allow.
        """
        if device is not None:
            return parse_bytes(device)
        return self._memory.limit_of(self.gpu.usable, self.gpu.memory)

    def verdict(
        self,
        device: SupportsIndex | str | None = None,
        *,
        budget: SupportsIndex | str | None = None,
        until: str = "",
    ) -> Verdict:
        """Whether it fits, under the settings in force, as a sentence, too.

        Parameters
        ----------
        device : int or str, optional
            As in `fits`.
        budget : int or str, optional
            The most that PyTorch may take there, in bytes or as a text, if not all of it.
        until : str, optional
            How the program ended too early, if not by an error about memory, as "failed": that it
            fits is not known then. The default is how `ended_by` was told.

        Returns
        -------
        Verdict
            What the first line of `bfc predict` and its exit code come from.
        """
        gpu, limit = self.gpu, self.limit(device)
        usable = gpu.usable if device is None else limit
        on = gpu.name if device is None else f"a GPU of {format_bytes(usable)}"
        if budget is not None and parse_bytes(budget) < limit:
            limit = parse_bytes(budget)
            on += f" with a budget of {format_bytes(limit)}"
        elif limit < usable:
            on += f", of which the program allows PyTorch {format_bytes(limit)}"
        elif device is None and gpu.memory != usable:
            on += f", of which PyTorch can take {format_bytes(usable)}"
        return decide(self, limit, on, until=until or self._until)

    def fits(self, device: SupportsIndex | str | None = None) -> bool:
        """Whether it fits, under the settings in force.

        Parameters
        ----------
        device : int or str, optional
            What the GPU leaves to PyTorch, in bytes or as a text such as "24 GiB". The default is
            what the GPU of the prediction leaves.

        Returns
        -------
        bool
            Whether PyTorch serves every request there, also if the last step goes on, and, before
            PyTorch 2.13, whatever addresses the driver gives. False if the program was refused
            memory (`oom=True`), even if it has caught the error, or if an error ended it before
            that it fits was known.
        """
        return bool(self.verdict(device).fits)

    def ended_by(self, error: BaseException) -> None:
        """Notes that an error ended the program; `with bfc.predict()` does so itself.

        Where it ran out of memory, it does not fit. After another error it is not known whether it
        fits.

        Parameters
        ----------
        error : BaseException
            What the program raised.
        """
        if type(error).__name__ == "OutOfMemoryError":
            self._memory.ran_out = True
        elif isinstance(error, KeyboardInterrupt):
            self._until = "was interrupted"
        elif not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._until = "failed"

    def advise(self, device: SupportsIndex | str | None = None) -> Advice:
        """Find the settings that make it fit.

        Parameters
        ----------
        device : int or str, optional
            As in `fits`.

        Returns
        -------
        Advice
            What `bfc.advise` says of the trace.
        """
        from bfc_tools.study.advise import advise

        limit, runs = self.limit(device), self.runs()
        reason = self.verdict(device).reason
        first = next((run for run in runs if run.kind == reason), runs[0])
        also = [run.trace for run in runs if run is not first]
        return advise(first.trace, limit, jobs=1, also=also)

    @property
    def assumptions(self) -> list[dict[str, Any]]:
        """The values that were made up.

        Each is a dict with `what`, `where`, `value`, `times`, and `event`: how many events the
        trace had when it was first.
        """
        return [
            {"what": what, "where": where, "value": value, "times": times, "event": event}
            for (what, where), (value, times, event) in self._recorder.assumptions.items()
        ]

    @property
    def unknown(self) -> dict[str, str]:
        """Why it is not known what operators allocate beside their results: by their names."""
        return dict(self._recorder.unknown)

    @property
    def compiled(self) -> list[dict[str, str]]:
        """What the program compiles with `torch.compile`.

        Each has its name; `as`, how it was followed: "inductor", "aot_eager", or "" if it ran as it
        is written; and `why` it was not followed as the program asks.
        """
        rows = self._recorder.compiling.by_name.items()
        return [{"name": name, "as": how, "why": why} for name, (how, why) in rows]

    @property
    def least_requested(self) -> int:
        """The most bytes of parameters, gradients and optimizer states together."""
        trace, lasting = self.trace, [PARAMETERS, GRADIENTS, OPTIMIZER_STATE]
        if not len(trace):
            return 0
        of_kind = np.isin(np.frombuffer(self._memory.history.kinds, np.uint8), lasting)
        places = np.minimum(trace.id, len(of_kind) - 1)
        return int(np.cumsum(np.where(of_kind[places], steps(trace), 0)).max())

    @property
    def kept_for_backward(self) -> int:
        """The activations at the peak, in bytes, if graphs were made and no backward pass was."""
        memory = self._memory
        if not len(self.trace) or not memory.peaks.in_graph or BACKWARD in memory.history.phase:
            return 0
        return self.peak.by_kind.get(KINDS[ACTIVATIONS], 0)

    @property
    def allocator_differs(self) -> str:
        """In what this PyTorch's allocator differs, where the program meets it; else empty."""
        memory, version = self._memory, self.as_torch or self.torch_version
        if memory.different is None:
            return (
                f"PyTorch {version} orders free blocks as no other version does: live and "
                f"allocated figures stand, and reserved ones are those of {memory.rules}, and not "
                "exact"
            )
        if "checks_range" in memory.different and memory.refusals and self._in_ranges():
            return (
                f"PyTorch {version} does not give back at once a range of addresses that was too "
                f"small, as {memory.rules} does: after the first request that was refused, what is "
                "reserved may differ"
            )
        pools = any(
            one["what"].startswith(("a MemPool", "a CUDA graph")) for one in self.assumptions
        )
        if "forgets_unsplit" in memory.different and pools:
            return (
                f"under PyTorch {version}, unlike {memory.rules}, it outlives a private pool that "
                "its memory is handed out whole: a later pool of the same id may reserve more"
            )
        return ""

    @property
    def holders(self) -> list[Holder]:
        """What holds the memory at the peak, in a person's words, with what to do about it."""
        if not len(self.trace):
            return []
        memory = self._memory
        return holders(self.trace, memory, self.peak.event, self.kept_for_backward)

    def _in_ranges(self) -> bool:
        return "expandable_segments:true" in self.settings.lower().replace(" ", "")

    def _sign(self) -> str:
        """How the trace says which rules it was placed by."""
        version = self.as_torch or self.torch_version
        if self._memory.different is None or self._is_newer_than_known:
            return f"whose rules are not those of torch {version}, but the nearest"
        return f"whose rules torch {version} has"

    @property
    def _is_newer_than_known(self) -> bool:
        return bool(self.as_torch) and self._recorder.release.name != self.as_torch

    @property
    def undecided(self) -> list[str]:
        """What the rules of `as_torch` decide, and what they cannot; empty without it."""
        if not self.as_torch:
            return []
        release, installed = self._recorder.release, self._recorder.installed
        differ = ", ".join(differences(release, installed)) or "nothing that is known"
        told = (
            f"PyTorch {self.as_torch}: its rules, of the allocator and of what operators take; "
            f"they differ from those of {installed.name} in {differ}"
        )
        undecided = (
            f"not decided: which operators PyTorch {self.as_torch} calls, and in which order; they "
            f"are those of torch {self.torch_version}"
        )
        found = [told, undecided]
        if self._is_newer_than_known:
            found.append(
                f"PyTorch {self.as_torch} is newer than all that is known: these are the rules of "
                f"{release.name}, and what has changed since is not in them. In a checkout of bfc, "
                f"make upstream FROM={release.name}.0 TO={self.as_torch}.0 lists it"
            )
        return found

    @property
    def not_counted(self) -> list[NotCounted]:
        """Memory of the GPU that is not in these numbers, with a range for each."""
        found = [
            NotCounted(
                "CUDA context", 300 * MIB, 600 * MIB, "by the driver, the GPU and what is loaded"
            )
        ]
        in_a_group = any(one["what"].startswith("a process group") for one in self.assumptions)
        if in_a_group or self._recorder.has_run_prefix("c10d::"):
            found.append(
                NotCounted("NCCL", 100 * MIB, 1500 * MIB, "by the number of ranks and channels")
            )
        if self.compiled:
            found.append(NotCounted("compiled code", 0, 200 * MIB, "Triton's kernels themselves"))
        if any(one["as"] == "inductor" for one in self.compiled):
            found.append(
                NotCounted(
                    "Inductor's tuning, in the first step",
                    0,
                    200 * MIB,
                    "a buffer as large as the L2 cache, and copies; none where its cache knows",
                )
            )
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the run as an .npz trace.

        Layers whose names differ only in numbers are one owner there, as "layers.*.attn". It says
        what each allocation is for, too.

        Parameters
        ----------
        path : str or os.PathLike
            The file.
        """
        trace = self.trace
        names = {name: at for at, name in enumerate(dict.fromkeys(map(layer, trace.owners)))}
        joined = np.array([names[layer(name)] for name in trace.owners], np.uint16)
        assert trace.owner is not None
        Trace(
            trace.op,
            trace.id,
            trace.size,
            trace.stream,
            owner=joined[trace.owner],
            owners=list(names),
            stack=trace.stack,
            frames=trace.frames,
            stacks=trace.stacks,
            meta=trace.meta,
        ).save(path)

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON: sizes are in bytes.

        Returns
        -------
        dict of str
            Lists, dicts, texts and numbers.
        """
        return self._figures(self.verdict())

    def _figures(self, verdict: Verdict) -> dict[str, Any]:
        """All figures, beside a verdict that may be for less than the GPU."""
        return {
            "fits": verdict.fits,
            "answer": verdict.answer,
            "reason": verdict.reason,
            "limit": verdict.limit,
            "fits_at_least": verdict.fits_at_least,
            "fits_at_most": verdict.fits_at_most,
            "refused": [asdict(one) for one in self.refusals],
            "device": asdict(self.gpu),
            "torch": self.torch_version,
            "as_torch": self.as_torch,
            "undecided": self.undecided,
            "allocator": self._memory.rules,
            "allocator_differs": self.allocator_differs,
            "settings": self.settings,
            "requested_in_all": self.requested_in_all,
            "peak_requested": self.peak_requested,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "peak_reserved_range": self.reserved_range(),
            "live_bounds": asdict(self.live_bounds),
            "allocated_bounds": asdict(self.allocated_bounds),
            "reserved_bounds": asdict(self.reserved_bounds),
            "peak_reserved_by_default": self.reserved_under(""),
            "peak_reserved_after_repeats": self.reserved_after(),
            "repeats": REPEATS,
            "kept_for_backward": self.kept_for_backward,
            "compiled": self.compiled,
            "least_requested": self.least_requested,
            "holders": [asdict(one) for one in self.holders],
            "changes": [one.to_dict() for one in self.changes],
            "peak": asdict(self.peak) if len(self.trace) else None,
            "not_counted": [asdict(one) for one in self.not_counted],
            "unknown": self.unknown,
            "assumptions": self.assumptions,
            "events": len(self.trace),
            "operators": self.operators,
            "rank": self.process[0],
            "processes": self.process[1],
            "snapshots": self.snapshots,
            "files_written": self.files_written,
            "files_removed": self.files_removed,
            "files_bytes": self.files_bytes,
        }

    def to_json(self) -> str:
        """`to_dict()` as JSON.

        Returns
        -------
        str
            The text.
        """
        return json.dumps(self.to_dict(), indent=1, default=str)

    def __str__(self) -> str:
        """What `bfc predict` prints, but for a search for settings, which takes longer."""
        verdict = self.verdict()
        advice = None if verdict.fits else "run.advise() looks for settings that make it fit."
        return "\n".join(lines(self, verdict, advice=advice))

    def _repr_html_(self) -> str:
        """What a notebook shows: the same, the answer first."""
        from bfc.snapshots import inline

        answer, _, rest = str(self).partition("\n")
        return inline.framed(answer, inline.preformatted(rest))

    def __repr__(self) -> str:
        return (
            f"<bfc.Prediction: {format_bytes(self.peak_reserved)} reserved, "
            f"{format_bytes(self.peak_requested)} live at most>"
        )

    def _replay(self, nbytes: int, settings: str) -> Any:
        return self._replayed(self.trace, nbytes, settings)

    def _replayed(self, trace: Trace, nbytes: int, settings: str, seed: int | None = None) -> Any:
        source = simulated_driver(nbytes, seed)
        return trace.replay(CachingAllocator(source, settings=settings, torch=self._memory.rules))


def _find_peak(trace: Trace, memory: Memory) -> Peak:
    at = int(np.argmax(np.cumsum(steps(trace))))
    numbers, where = alive_at(trace, at)
    held = trace.size[where].astype(np.int64)
    kinds = np.frombuffer(memory.history.kinds, np.uint8)[numbers]
    lines, stacks = Lines(trace), np.frombuffer(memory.history.made_for, np.uint32)
    assert trace.owner is not None
    assert trace.stack is not None
    of_lines = lines.of(stacks[numbers])
    operators = trace.stacks[trace.stack[where], 1]
    now = int(trace.id[at])
    phase = memory.history.phase[at]
    line = _line(lines, int(trace.stack[at]))
    of_line = _line(lines, int(stacks[now]))
    return Peak(
        event=at,
        nbytes=int(held.sum()),
        phase=PHASES[phase],
        line=line,
        of_line="" if of_line == line else of_line,
        module=trace.owners[int(trace.owner[at])],
        operator=operator_of(trace, int(trace.stacks[int(trace.stack[at]), 1])),
        by_kind=_sums(kinds, held, lambda number: KINDS[number]),
        by_module=_sums(trace.owner[where], held, lambda number: trace.owners[number]),
        by_operator=_sums(operators, held, lambda number: operator_of(trace, number)),
        by_line=_sums(of_lines, held, lambda number: short(lines.text(number))),
    )


def _sums(keys: Any, held: Any, name: Any) -> dict[str, int]:
    """The bytes of each key, by its name, the largest first."""
    found, inverse = np.unique(keys, return_inverse=True)
    totals: dict[str, int] = {}
    for number, total in zip(
        found.tolist(), np.bincount(inverse, weights=held).tolist(), strict=True
    ):
        text = name(int(number))
        totals[text] = totals.get(text, 0) + int(total)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _line(lines: Lines, stack: int) -> str:
    """The line of the program that a stack counts for."""
    return short(lines.text(int(lines.of(np.array([stack], np.uint32))[0])))
