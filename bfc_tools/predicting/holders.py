"""What holds the memory at the peak, in a person's words, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bfc.libraries import np
from bfc.trace import Trace
from bfc.trace.trace import ALLOCATE, FREE
from bfc_tools.predicting.kinds import ACTIVATIONS, OPTIMIZER_STATE, PARAMETERS
from bfc_tools.predicting.memory import Memory
from bfc_tools.predicting.places import FORWARD, layer
from bfc_tools.study.source_lines import Lines, short

#: A holder of less than this share of the peak is not told.
LEAST = 0.05
#: The modules whose activations are named.
MODULES = 3
#: Operators that change the type of a tensor.
COPIES = frozenset(("_to_copy",))
#: Operators of a cross entropy whose results are as large as its logits.
OF_LOSS = frozenset(("_log_softmax", "_log_softmax_backward_data", "nll_loss_backward"))
#: The part of the parameters that a copy of them holds at least.
COPY = 0.5


@dataclass(frozen=True)
class Holder:
    """Who holds memory at the peak.

    Attributes
    ----------
    what : str
        What it is.
    nbytes : int
        How much it holds, in bytes. What two of them have in common counts for both.
    line : str
        The line of the program that made most of it; empty if that says nothing.
    cure : str
        What to do about it.
    """

    what: str
    nbytes: int
    line: str
    cure: str


def alive_at(trace: Trace, event: int) -> tuple[Any, Any]:
    """The allocations that are live after an event, by their numbers, and the events that made
    them."""
    op, ids = trace.op[: event + 1], trace.id[: event + 1]
    made = np.flatnonzero(op == ALLOCATE)
    events = np.full(int(trace.id.max()) + 1, -1, np.int64)
    events[ids[made]] = made
    events[ids[op == FREE]] = -1
    numbers = np.flatnonzero(events >= 0)
    return numbers, events[numbers]


def operator_of(trace: Trace, frame: int) -> str:
    """The name of an operator by its frame, without PyTorch's namespace."""
    return trace.frames[frame].name.removeprefix("at::_ops::").removesuffix("::call")


def holders(trace: Trace, memory: Memory, event: int, kept_for_backward: int) -> list[Holder]:
    """Those of the moment after an event, the largest first. `kept_for_backward` is what graphs
    hold of which no backward pass came."""
    found = _Moment(trace, memory, event)
    parts = [
        *_graphs(found, kept_for_backward),
        *_earlier_steps(found),
        *_loss(found),
        *_states(found),
        *_modules(found),
        *_copy(found),
    ]
    least = LEAST * found.sizes.sum()
    return sorted((one for one in parts if one.nbytes >= least), key=lambda one: -one.nbytes)


class _Moment:
    """What is live at a moment: of each allocation its bytes, its kind, the event that made it."""

    def __init__(self, trace: Trace, memory: Memory, event: int) -> None:
        self.trace, self.memory, self.event = trace, memory, event
        numbers, self.events = alive_at(trace, event)
        self.sizes = trace.size[self.events].astype(np.int64)
        self.kinds = np.frombuffer(memory.history.kinds, np.uint8)[numbers]
        self._stacks = np.frombuffer(memory.history.made_for, np.uint32)[numbers]

    def bytes_of(self, which: Any) -> int:
        """The bytes of those that a mask chooses."""
        return int(self.sizes[which].sum())

    def is_of(self, operators: frozenset[str]) -> Any:
        """A mask of those that some operators made."""
        trace = self.trace
        assert trace.stack is not None
        frames = trace.stacks[trace.stack[self.events], 1]
        chosen = [one for one in np.unique(frames) if operator_of(trace, int(one)) in operators]
        return np.isin(frames, chosen)

    def line_of(self, which: Any) -> str:
        """The line of the program that made most of them."""
        lines = Lines(self.trace)
        totals: dict[int, int] = {}
        for line, size in zip(lines.of(self._stacks[which]), self.sizes[which], strict=True):
            totals[int(line)] = totals.get(int(line), 0) + int(size)
        most = max(totals, key=lambda line: totals[line], default=None)
        return "" if most is None else short(lines.text(most))


def _graphs(found: _Moment, nbytes: int) -> Iterator[Holder]:
    if nbytes:
        yield Holder(
            "graphs for a backward pass that never comes",
            nbytes,
            found.line_of(found.kinds == ACTIVATIONS),
            "with torch.no_grad(): around the forward pass",
        )


def _earlier_steps(found: _Moment) -> Iterator[Holder]:
    """Activations of steps that are over, such as losses hold that are added up."""
    ends = [end for end in found.memory.step_ends if end <= found.event]
    if ends:
        which = (found.kinds == ACTIVATIONS) & (found.events < ends[-1])
        yield Holder(
            "activations of steps that are over",
            found.bytes_of(which),
            found.line_of(which),
            "keep loss.item() or loss.detach() over steps, and not the loss",
        )


def _loss(found: _Moment) -> Iterator[Holder]:
    """Logits, often in 32 bits, and their gradients, as cross entropy holds them."""
    of_loss = found.is_of(OF_LOSS)
    if of_loss.any():
        as_large = found.is_of(COPIES) & (found.sizes == found.sizes[of_loss].max())
        which = of_loss | as_large
        yield Holder(
            "copies of the logits that the cross entropy makes, and their gradients",
            found.bytes_of(which),
            found.line_of(which),
            "a fused or chunked loss, such as liger_kernel's, keeps none of them",
        )


def _states(found: _Moment) -> Iterator[Holder]:
    which = found.kinds == OPTIMIZER_STATE
    yield Holder(
        "states of the optimizer",
        found.bytes_of(which),
        "",
        "states in 8 bits take a quarter of 32 bits; sharded ones an equal part on each GPU",
    )


def _modules(found: _Moment) -> Iterator[Holder]:
    """The modules with most activations, but for what a loss holds: of that, no module computes
    anything again."""
    owner, owners = found.trace.owner, found.trace.owners
    assert owner is not None
    which = (found.kinds == ACTIVATIONS) & ~found.is_of(OF_LOSS)
    totals: dict[str, int] = {}
    for number, size in zip(owner[found.events[which]], found.sizes[which], strict=True):
        name = layer(owners[int(number)])
        if name:
            totals[name] = totals.get(name, 0) + int(size)
    for name in sorted(totals, key=lambda name: -totals[name])[:MODULES]:
        yield Holder(
            f"activations of {name}",
            totals[name],
            "",
            "checkpoint computes them again in the backward pass",
        )


def _copy(found: _Moment) -> Iterator[Holder]:
    """A second copy of the weights, before the first forward pass: blocks of the same sizes, or of
    twice these, or of half."""
    phases = np.frombuffer(found.memory.history.phase, np.uint8)[: found.event + 1]
    if (phases >= FORWARD).any():
        return
    weights = found.kinds == PARAMETERS
    sizes = np.unique(found.sizes[weights])
    which = ~weights & np.isin(found.sizes, np.concatenate((sizes, 2 * sizes, sizes // 2)))
    if found.bytes_of(which) > COPY * found.bytes_of(weights) > 0:
        yield Holder(
            "a copy of the weights while they are loaded",
            found.bytes_of(which),
            found.line_of(which),
            'torch.load(..., map_location="cpu"), and then the model to the GPU',
        )
