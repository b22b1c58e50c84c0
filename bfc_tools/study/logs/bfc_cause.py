"""Why TensorFlow or JAX refused, by what its log says."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from bfc.units import format_bytes
from bfc_tools.study.logs.dump import Dump
from bfc_tools.study.logs.refusal import OTHERS, UNKNOWN, LoggedRanOut
from bfc_tools.study.logs.sizes import Printed
from bfc_tools.study.ran_out import CAPACITY, ELSEWHERE, PIECES, REQUEST

JAX, TENSORFLOW, EITHER = "JAX", "TensorFlow", "TensorFlow or JAX"
#: By default JAX takes three quarters of the device, and can be told to take nearly all.
LARGER = 0.95 / 0.75

_RECORD = {
    JAX: "the same run with TF_CPP_MIN_LOG_LEVEL=0, since JAX hides the list of chunks otherwise; "
    'jax.profiler.save_device_memory_profile("memory.prof") before it says which lines hold most',
    TENSORFLOW: "the same run with TF_CPP_MIN_LOG_LEVEL=0, so that the log lists the chunks",
}
_FRACTION = "XLA_CLIENT_MEM_FRACTION=.95 (XLA_PYTHON_CLIENT_MEM_FRACTION in older versions)"


@dataclass
class Told:
    """What a log says about one refusal of a BFC allocator, in whatever words."""

    line: int
    asked: Printed | None = None
    rounded: Printed | None = None
    allocator: str = ""
    device: str = ""
    name: str = ""
    dump: Dump | None = None
    occupancy: str = ""
    is_error: bool = False  # whether the program saw an error
    #: What XLA says of the program's own memory, and what the device refused before.
    compiled: dict[str, Printed] = field(default_factory=dict)
    device_refused: Printed | None = None
    largest_buffer: tuple[str, int] = ("", 0)
    program: str = EITHER
    knows_async: bool = False

    @property
    def where(self) -> str:
        """The device, or the allocator that is not one of a device."""
        number = re.search(r"GPU_(\d+)", self.allocator)
        if number is not None:
            return f"GPU {number[1]}"
        device = f"device {self.device}" if self.device.isdigit() else self.device
        return self.allocator or device.replace(":", " ")


def refusal_of(told: Told, who: str, refusals: int) -> LoggedRanOut:
    """What a log says of a refusal."""
    asked = told.rounded or told.asked or (told.dump and told.dump.asked)
    name, most = told.largest_buffer
    found = LoggedRanOut(
        who=who or told.where,
        program=told.program,
        line=told.line,
        nbytes=asked.nbytes if asked else None,
        refusals=refusals,
        most_line=name,
        most_bytes=most,
        to_record=_RECORD.get(told.program, _RECORD[TENSORFLOW]),
    )
    if told.dump is not None:
        found = _with_figures(found, told.dump)
    if found.nbytes is None or (found.limit is None and found.free_in_segments is None):
        return _of_words(found, told)
    return _explained(found, told)


def _with_figures(found: LoggedRanOut, dump: Dump) -> LoggedRanOut:
    faults = dump.faults()
    values = {name: size.nbytes for name, size in dump.figures.items()}
    listed, live = dump.listed, dump.live
    if faults:
        listed = values.get("pool", listed)
        live = values.get("in use", values.get("sum", live))
    limit = values.get("limit")
    if not dump.regions and not values:
        remark = f"its dump is not whole: {'; '.join(faults)}"
        return replace(found, is_whole=False, remarks=(*found.remarks, remark))
    largest = values.get("largest free", values.get("largest block"))
    if not faults and "gap" not in values:  # else it names what this end of the memory may use
        largest = max(dump.free(), default=0)
    available = None if limit is None else max(limit - listed, 0)
    names: Counter[str] = Counter()
    for region in dump.regions:
        for number, name in region.names.items():
            names[name] += region.nbytes[number] if region.in_use[number] else 0
    most = names.most_common(1)[0] if names else (found.most_line, found.most_bytes)
    is_known = not faults or bool({"pool", "in use", "sum"} & values.keys())
    remark = f"its dump is not whole: {'; '.join(faults)}"
    if not is_known:
        free = list(dump.free())
        remark += (
            f". Its lines list {format_bytes(dump.live)} in use, and {format_bytes(sum(free))} "
            f"free, the largest piece {format_bytes(max(free, default=0))}"
        )
    return replace(
        found,
        live=live if is_known else None,
        reserved=listed if is_known else None,
        free_in_segments=max(listed - live, 0) if is_known else None,
        largest_free=largest,
        free_on_device=available,
        limit=limit,
        most_line=most[0],
        most_bytes=most[1],
        is_whole=not faults,
        to_record="" if not faults else found.to_record,
        remarks=(*found.remarks, remark) if faults else found.remarks,
    )


def _explained(found: LoggedRanOut, told: Told) -> LoggedRanOut:
    asked, limit = found.nbytes or 0, found.limit
    free, left = found.free_in_segments or 0, found.free_on_device or 0
    if limit is not None and asked > limit:
        why = f"this is more than the allocator's limit, {format_bytes(limit)}"
        missing = asked - limit
        return replace(found, cause=REQUEST, missing=missing, why=why, to_try=_more(found, told))
    if found.free_in_segments is None:
        return _of_words(found, told)
    if left >= asked:
        why = (
            f"the allocator might have taken {format_bytes(left)} more, and the device did not "
            "give it: another process, or another library of this one, holds it"
        )
        return replace(found, cause=OTHERS, missing=0, why=why, to_try=_alone(told))
    if free >= asked and max(_largest_listed(told), found.largest_free or 0) >= asked:
        why = "a free piece is large enough, and was not for this request: " + _kept(told)
        to_try = "to wait for the device's work before it (block_until_ready), or fewer at a time"
        return replace(found, cause=ELSEWHERE, missing=0, why=why, to_try=to_try)
    if free + left >= asked:
        why = f"this is fragmentation, since {format_bytes(free + left)} would do in one piece"
        return replace(found, cause=PIECES, missing=0, why=why, to_try=_joined(told))
    missing = asked - free - left
    why = (
        f"this is capacity, since {format_bytes(missing)} would be missing even if that were one "
        "piece"
    )
    return replace(
        found, cause=CAPACITY, missing=missing, why=why, to_try=_more(found, told, missing)
    )


def _largest_listed(told: Told) -> int:
    """The largest free chunk, whatever it is kept for; 0 if not all are known."""
    return max(told.dump.free(), default=0) if told.dump is not None and told.dump.is_whole else 0


def _kept(told: Told) -> str:
    dump = told.dump
    if dump is not None and "gap" in dump.figures:
        return "it belongs to the other end of the memory"
    return "it waits for the device, or is kept for another purpose"


def _alone(told: Told) -> str:
    if told.program == JAX:
        return (
            "to end other processes (nvidia-smi lists them); of several on one GPU, give each its "
            "part: XLA_CLIENT_MEM_FRACTION=.4, and leave room for cuDNN, NCCL and other libraries"
        )
    return (
        "to end other processes (nvidia-smi lists them), or CUDA_VISIBLE_DEVICES for another GPU; "
        "of several on one GPU, tf.config.set_logical_device_configuration gives each its part"
    )


def _joined(told: Told) -> str:
    """What joins pieces, or makes fewer."""
    dump = told.dump
    several = dump is not None and len(dump.regions) > 1
    if told.program == JAX:
        if several:
            return (
                "to let JAX take its memory at once (without XLA_PYTHON_CLIENT_PREALLOCATE=false), "
                "so that pieces are not kept apart in regions; XLA_PYTHON_CLIENT_ALLOCATOR="
                "cuda_async, where this version has it"
            )
        return (
            "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async, where this version has it: the driver joins "
            "pieces; donate_argnums, so that results take the place of arguments"
        )
    start = "without memory growth, so that there is one region; " if several else ""
    known = "TF_GPU_ALLOCATOR=cuda_malloc_async: the driver joins pieces"
    if told.program == TENSORFLOW and not told.knows_async:
        known += " (from TensorFlow 2.4 on)"
    return start + known


def _more(found: LoggedRanOut, told: Told, missing: int | None = None) -> str:
    lacking = found.missing or missing or (found.nbytes or 0) - (found.limit or 0)
    less = "a smaller batch, or less in each step (jax.checkpoint, donate_argnums)"
    if told.program == TENSORFLOW:
        less = "a smaller batch, or tf.recompute_grad"
    if found.most_line:
        less += f"; {found.most_line} holds most ({format_bytes(found.most_bytes)})"
    if told.program == JAX and found.limit and lacking <= found.limit * (LARGER - 1):
        return f"{_FRACTION}, if the limit is JAX's 75 % of the device; else {less}"
    if told.program == TENSORFLOW and found.limit:
        return f"{less}; if the program sets a memory limit, a higher one"
    return less


def _of_words(found: LoggedRanOut, told: Told) -> LoggedRanOut:
    """Of a log without figures of the pool."""
    values = {name: size.nbytes for name, size in told.compiled.items()}
    if "hbm" in values and "hbm limit" in values:
        missing = max(values["hbm"] - values["hbm limit"], 0)
        why = (
            f"the compiled program needs {format_bytes(values['hbm'])} of "
            f"{format_bytes(values['hbm limit'])}: {format_bytes(missing)} are missing"
        )
        return replace(
            found,
            cause=CAPACITY,
            missing=missing,
            limit=values["hbm limit"],
            why=why,
            to_try=_more(found, told, missing),
        )
    said = ""
    needs = max(values.get("total", 0), values.get("needs", 0))
    if needs:
        said = f"; the compiled program alone needs {format_bytes(needs)}"
    if told.occupancy and "_" not in told.occupancy:
        why = f"the allocator's map shows no free piece above 1 % of its memory{said}"
        return replace(found, cause=CAPACITY, why=why, to_try=_more(found, told))
    if told.occupancy:
        largest = max(map(len, re.findall("_+", told.occupancy)))
        why = (
            f"the text does not say how large the memory is; its map shows some "
            f"{told.occupancy.count('_')} % free, in pieces of at most {largest} %{said}"
        )
    else:
        why = f"the text does not say what was free{said}"
    if told.device_refused is not None:
        refused = format_bytes(told.device_refused.nbytes)
        why += f"; the device had refused {refused} before: others may hold it"
    to_try = _more(found, told) if needs else ""
    return replace(found, cause=UNKNOWN, why=why, to_try=to_try)
