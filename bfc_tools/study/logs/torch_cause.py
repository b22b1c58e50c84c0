"""Why PyTorch refused, by its error text."""

from __future__ import annotations

from dataclasses import replace

from bfc.units import format_bytes
from bfc_tools.study.logs.refusal import OTHERS, UNKNOWN, LoggedRanOut
from bfc_tools.study.logs.sizes import Printed
from bfc_tools.study.logs.torch_text import TorchText
from bfc_tools.study.ran_out import CAPACITY, LIMIT, PIECES, REQUEST

#: What the CUDA context and the libraries of a process take, at most, where nothing else is known.
OF_LIBRARIES = 3 << 29
#: A share of the reserved memory that is too small to be worth a setting.
LITTLE = 0.05

RECORD = (
    "torch.cuda.memory._record_memory_history() before the run and "
    'torch.cuda.memory._dump_snapshot("snapshot.pickle") where the error is caught: '
    "`bfc advise snapshot.pickle --device SIZE` then replays settings"
)


def refusal_of(text: TorchText, who: str, line: int, refusals: int) -> LoggedRanOut:
    """What a text says of a refusal."""
    live, unallocated = _bytes(text.allocated), _bytes(text.unallocated)
    reserved = _bytes(text.reserved)
    if reserved is None and live is not None and unallocated is not None:
        reserved = live + unallocated
    if unallocated is None and live is not None and reserved is not None:
        unallocated = max(reserved - live, 0)
    found = LoggedRanOut(
        who=who or ("" if text.gpu is None else f"GPU {text.gpu}"),
        program="PyTorch",
        line=line,
        nbytes=_bytes(text.asked),
        refusals=refusals,
        live=live,
        reserved=reserved,
        free_in_segments=unallocated,
        free_on_device=_bytes(text.free),
        total=_bytes(text.total),
        limit=_bytes(text.allowed),
        private=_bytes(text.private),
        is_whole=text.is_whole,
        remarks=tuple(_remarks(text)),
        to_record=RECORD,
    )
    found = replace(found, others=_others(text, found))
    return _explained(text, found)


def _bytes(size: Printed | None) -> int | None:
    return None if size is None else size.nbytes


def _remarks(text: TorchText) -> list[str]:
    found = []
    if not text.is_whole:
        found.append("the text of the error is cut off, so that figures are missing")
    if text.total and text.allocated and text.allocated.nbytes > text.total.nbytes:
        found.append(
            "more is allocated than the device has: the driver has moved memory to the host, as "
            "under Windows and WSL, which is slow"
        )
    return found


def _others(text: TorchText, found: LoggedRanOut) -> int | None:
    """What is on the device and not this process's. In a container the process does not know its
    own number, so that its memory is listed as that of some process."""
    if found.total is None or found.free_on_device is None:
        return None
    used = found.total - found.free_on_device
    mine = _bytes(text.this_process)
    reserved = found.reserved or 0
    if mine is None:
        sizes = [size.nbytes for _, size in text.processes]
        likely = [size for size in sizes if reserved <= size + (16 << 20)]
        mine = min(likely, default=None)
    if mine is not None:
        return max(used - mine, 0)
    return max(used - reserved, 0) if found.reserved is not None else None


def _explained(text: TorchText, found: LoggedRanOut) -> LoggedRanOut:
    asked, total, free = found.nbytes, found.total, found.free_on_device
    if text.other is not None or (text.backend == "MPS" and found.limit is not None):
        return _of_mps(text, found)
    if text.is_preemptive:
        return replace(
            found,
            cause=LIMIT,
            missing=0,
            why="a limit of the program's refused it before the device was asked",
            to_try="a higher limit (torch.cuda.set_per_process_memory_fraction)",
        )
    if asked is None or free is None or total is None:
        why = "the text does not say what was free"
        return replace(found, cause=UNKNOWN, why=why, to_try="")
    held, idle = found.reserved, found.free_in_segments
    most = total if found.limit is None else min(found.limit, total)
    if asked > total:
        why = f"this is more than the device has, {format_bytes(total)} in all"
        to_try = "a smaller request: no setting makes room for it on this device"
        return replace(found, cause=REQUEST, missing=asked - total, why=why, to_try=to_try)
    if found.limit is not None and free >= asked and (held or 0) + asked >= 0.99 * most:
        enough = "since the device had enough"
        why = f"a limit of the program's refused it, {format_bytes(most)}, {enough}"
        to_try = "a higher limit (torch.cuda.set_per_process_memory_fraction)"
        return replace(found, cause=LIMIT, missing=0, why=why, to_try=to_try)
    if free >= asked:
        why = (
            "the driver refused although the device had enough: a limit outside of PyTorch (of a "
            "container, of MIG or MPS, or of the host's memory), or a process that has ended since"
        )
        return replace(found, cause=LIMIT, missing=0, why=why, to_try="nvidia-smi beside the run")
    if text.is_async:
        return _of_async(found, asked, free, total)
    if held is None or idle is None:
        why = "the text does not say what PyTorch held"
        return replace(found, cause=UNKNOWN, why=why)
    if free + idle >= asked:
        return _of_pieces(text, found, held, idle, asked)
    return _of_capacity(text, found, asked - free - idle)


def _of_async(found: LoggedRanOut, asked: int, free: int, total: int) -> LoggedRanOut:
    """Of the backend cudaMallocAsync: CUDA's pool joins pieces, and no text says what it keeps."""
    live = found.live or 0
    missing = asked - free
    beyond = max(total - live - free, 0)
    lacking = f"{format_bytes(missing)} more than the device had left were needed"
    if beyond - OF_LIBRARIES >= missing and 4 * beyond > total:
        why = (
            f"{lacking}, and {format_bytes(beyond)} of the device were neither free nor this "
            "program's tensors: other processes, or the cache of CUDA's pool, hold them"
        )
        to_try = "to end other processes (nvidia-smi lists them), or torch.cuda.empty_cache()"
        return replace(found, cause=OTHERS, missing=missing, why=why, to_try=to_try)
    why = f"this is capacity, since {lacking}"
    return replace(found, cause=CAPACITY, missing=missing, why=why, to_try=_less(found))


def _of_pieces(
    text: TorchText, found: LoggedRanOut, held: int, idle: int, asked: int
) -> LoggedRanOut:
    why = (
        f"{format_bytes(idle)} lay in PyTorch's cache, in pieces too small for it, or kept for "
        "other streams, private pools or requests of other sizes, which the text does not tell "
        "apart"
    )
    if idle < LITTLE * held:
        share = f"{1 - idle / held:.1%}"
        why += f"; {share} of what it had reserved was in use, so a setting gains little"
        return replace(
            found,
            cause=CAPACITY,
            missing=0,
            why=f"the device was full: {why}",
            to_try=_less(found),
        )
    why = f"this is fragmentation: {why}"
    return replace(found, cause=PIECES, missing=0, why=why, to_try=_setting(text, found))


def _of_capacity(text: TorchText, found: LoggedRanOut, missing: int) -> LoggedRanOut:
    others = found.others or 0
    is_known = text.this_process is not None or bool(text.processes)
    beyond = others if is_known else max(others - OF_LIBRARIES, 0)
    lacking = f"{format_bytes(missing)} would be missing even if all that was free were one piece"
    if beyond >= missing:
        who = "other processes" if is_known else "other processes, or other libraries of this one,"
        why = f"{who} held {format_bytes(others)} of the device; {lacking}"
        to_try = (
            "to end them (nvidia-smi lists them), or another GPU (CUDA_VISIBLE_DEVICES); of "
            "several ranks on one GPU, check that each sets its own device"
        )
        return replace(found, cause=OTHERS, missing=missing, why=why, to_try=to_try)
    why = f"this is capacity, since {lacking}"
    return replace(found, cause=CAPACITY, missing=missing, why=why, to_try=_less(found))


def _less(found: LoggedRanOut) -> str:
    text = "a smaller batch, activation checkpointing, or a larger device"
    if found.private and found.live and found.private > LITTLE * found.live:
        text += (
            f"; {format_bytes(found.private)} are in private pools, such as those of captured "
            "graphs: capture fewer sizes"
        )
    return text


def _setting(text: TorchText, found: LoggedRanOut) -> str:
    variable = text.variable or f"PYTORCH_{text.backend}_ALLOC_CONF"
    if text.knows_expandable:
        setting = f"{variable}=expandable_segments:True, if it is not set yet"
    elif text.knows_split:
        setting = (
            f"{variable}=max_split_size_mb:512, since this version has no expandable segments, or "
            "PyTorch 2.1 or later, which has them"
        )
    else:
        return "PyTorch 2.1 or later: this version has no setting against fragments"
    if found.private:
        setting += f"; {format_bytes(found.private)} are in private pools, which share nothing"
    return setting


def _of_mps(text: TorchText, found: LoggedRanOut) -> LoggedRanOut:
    """Apple's devices share the memory of the host; the text has other figures."""
    held = (found.live or 0) + (text.other.nbytes if text.other else 0)
    asked, most = found.nbytes or 0, found.limit or 0
    to_try = "a smaller batch, or torch.mps.empty_cache() before it"
    remark = (
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO raises the limit, at the risk that the system runs out "
        "of memory"
    )
    missing = max(held + asked - most, 0)
    cause = REQUEST if asked > most else LIMIT
    why = (
        f"with {format_bytes(held)} allocated it would pass the limit of {format_bytes(most)} by "
        f"{format_bytes(missing)}"
    )
    return replace(
        found,
        cause=cause,
        missing=missing,
        why=why,
        to_try=to_try,
        to_record="",
        remarks=(*found.remarks, remark),
    )
