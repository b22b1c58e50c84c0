"""What processes send to one another, as far as it decides what they do: `letters.py` keeps it.

From torch/distributed/distributed_c10d.py (send_object_list and recv_object_list, which send a
pickle and its length as tensors) and torch/distributed/pipelining/stage.py (whose stages vote, and
tell their neighbours which tensors will come).
"""

from __future__ import annotations

import functools
import json
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting import letters
from bfc_tools.predicting.arrivals import Arrivals
from bfc_tools.predicting.rules.distributed import is_small, unboxed
from bfc_tools.predicting.rules.interface import Call
from bfc_tools.predicting.rules.operators import answer, around, file

OPS = file("torch/csrc/distributed/c10d/Ops.cpp", read="2.6.0")

#: Tensors of so many whole numbers that one process sends to another say what is to be done.
FEW = 16


@answer("c10d::send", source=OPS)
def sent(call: Call, run: Callable[[], Any]) -> Any:
    """A tensor goes to another process, and stays as it is: its numbers, where they are known."""
    recorder: Any = call.recording
    tensors, group, to = call.args[:3]
    if all(map(_is_small, tensors)):
        letters.here.send(_rank(), _global(group, to), "numbers", _written(call, tensors))
    with recorder.known.unchanged():
        return run()


@answer("c10d::broadcast_", source=OPS)
def broadcast(call: Call, run: Callable[[], Any]) -> Any:
    """What a process sends to all others it has still, and these have the few whole numbers of it
    that are known."""
    recorder: Any = call.recording
    tensors, script_object, root = call.args[:3]
    group, sender = unboxed(script_object), _global(script_object, root)
    small = all(map(is_small, tensors))
    among = repr(torch.distributed.get_process_group_ranks(group))
    what = f"numbers among {zlib.crc32(among.encode())}"
    if root == group.rank():
        if small and group.size() > 1:
            letters.here.send(sender, letters.ALL, what, _written(call, tensors))
        with recorder.known.unchanged():
            return run()
    result = run()
    if small:
        _note(recorder, tensors, letters.here.receive(letters.ALL, sender, what, lambda: None))
    return result


@answer("c10d::recv_", source=OPS)
def received(call: Call, run: Callable[[], Any]) -> Any:
    """A tensor comes from another process. Without a letter, that answers with what it was sent:
    processes that vote vote alike."""
    result = run()
    tensors, group, sender = call.args[:3]
    if all(map(_is_small, tensors)):
        us, them, here = _rank(), _global(group, sender), letters.here
        text = here.receive(us, them, "numbers", lambda: _answered(us, them))
        _note(call.recording, tensors, text)
    return result


def _written(call: Call, tensors: list[Any]) -> bytes | None:
    """A letter with the numbers of tensors, if these are known."""
    numbers = [call.numbers_of(one.reshape(-1)) for one in tensors]
    return None if None in numbers else json.dumps(numbers).encode()


def _note(recorder: Any, tensors: list[Any], text: bytes | None) -> None:
    """Notes the numbers of a letter as those of tensors."""
    numbers = [] if text is None else json.loads(text)
    if [len(one) for one in numbers] == [one.numel() for one in tensors]:
        for tensor, values in zip(tensors, numbers, strict=True):
            recorder.known.note_numbers(tensor, values)


def _answered(us: int, them: int) -> bytes | None:
    return json.dumps(_votes).encode() if _votes else letters.here.last_to(us, them, "numbers")


def _is_small(tensor: Any) -> bool:
    return is_small(tensor, FEW)


def _rank() -> int:
    return int(torch.distributed.get_rank())


def _global(group: Any, rank: int) -> int:
    """The rank among all processes of one of a group."""
    return int(torch.distributed.get_global_rank(unboxed(group), rank))


@around(
    source=(
        file(
            "torch/distributed/distributed_c10d.py",
            "send_object_list",
            "recv_object_list",
            read="2.15.0",
        ),
        file("torch/distributed/pipelining/stage.py", read="2.15.0"),
    )
)
@contextmanager
def objects(recorder: Any) -> Iterator[None]:
    """Objects are sent as pickles in tensors, which are made here, too."""
    import torch.distributed as distributed

    if not distributed.is_available():
        yield
        return
    with ExitStack() as stack:
        for module in (distributed, distributed.distributed_c10d):
            for name, function in (
                ("send_object_list", _send_objects),
                ("recv_object_list", _receive_objects),
            ):
                stack.enter_context(patch.object(module, name, function))
        stages = Arrivals(["torch.distributed.pipelining.stage"], _guess_metadata(stack))
        stack.enter_context(stages)
        yield


def _send_objects(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    **others: Any,
) -> None:
    texts = [pickle.dumps(one) for one in object_list]
    letters.here.send(_rank(), _peer(group, dst, group_dst), "objects", pickle.dumps(texts))
    device = device or torch.device("cuda")
    tensors, sizes = [], []
    for text in texts:
        tensors.append(torch.empty(len(text), dtype=torch.uint8, device=device))
        sizes.append(torch.empty(1, dtype=torch.int64, device=device))
    kept = [torch.cat(sizes)]
    if len(tensors) > 1:
        kept.append(torch.cat(tensors))


def _receive_objects(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    **others: Any,
) -> int:
    sender = _peer(group, src, group_src)
    text = letters.here.receive(_rank(), sender, "objects", _guessed)
    if text is None:
        raise RuntimeError(
            f"rank {_rank()} gets objects from rank {sender}, which has not run before it. bfc "
            "predict --nproc with the number of all processes runs them in their order"
        )
    texts: list[bytes] = pickle.loads(text)
    device = device or torch.device("cuda")
    sizes = torch.empty(len(object_list), dtype=torch.int64, device=device)
    torch.sum(sizes)
    whole = torch.empty(sum(map(len, texts)), dtype=torch.uint8, device=device)
    offset: Any = 0
    for at, one in enumerate(texts):
        offset + sizes[at]
        offset = offset + sizes[at]
        object_list[at] = pickle.loads(one)
    del whole
    return sender


def _peer(group: Any, rank: int | None, rank_in_group: int | None) -> int:
    """The rank among all processes that a process names as one of a group, or of all."""
    if rank is not None:
        return rank
    if group is None or rank_in_group is None:
        return rank_in_group or 0
    return int(torch.distributed.get_global_rank(group, rank_in_group))


#: What comes next, where its sender has not run: objects, or the numbers of tensors.
_expected: list[Any] = []
_votes: list[list[int]] = []


def _guessed() -> bytes | None:
    return pickle.dumps([pickle.dumps(one) for one in _expected]) if _expected else None


def _guess_metadata(stack: ExitStack) -> Callable[[Any], None]:
    """Of the gradients of its results a stage is told by the next one. They are mostly as PyTorch
    itself takes them to be where it is not told. Stages mostly vote alike."""

    def replace(module: Any) -> None:
        stage: Any = getattr(module, "PipelineStage", None)
        receive = getattr(stage, "_recv_meta", None)
        derive = getattr(module, "_derive_grad_metas", None)
        if receive is None or derive is None:  # before PyTorch 2.13
            return

        @functools.wraps(receive)
        def of_gradients(self: Any, source: int) -> Any:
            if source < self.stage_index:
                return receive(self, source)
            made = module._StageBackwardMeta(backward_metas=derive(self._stage_meta.outputs))
            _expected[:] = [made]
            try:
                return receive(self, source)
            finally:
                _expected.clear()

        vote: Any = stage._warmup_forward_vote

        @functools.wraps(vote)
        def alike(self: Any, has_backward: bool, *args: Any, **kwargs: Any) -> Any:
            dynamic = module.InferenceMode.needs_dynamic(self._user_meta, has_backward)
            _votes[:] = [[0 if dynamic else 1]]
            try:
                return vote(self, has_backward, *args, **kwargs)
            finally:
                _votes.clear()

        stack.enter_context(patch.object(stage, "_recv_meta", of_gradients))
        stack.enter_context(patch.object(stage, "_warmup_forward_vote", alike))

    return replace
