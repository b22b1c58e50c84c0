"""What memory is for, as the report guesses it, on stacks as PyTorch records them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bfc
from bfc_tools.browser.data import data_of
from bfc_tools.browser.kinds import KINDS, kinds_of
from bfc_tools.browser.lifetimes import lives_of
from bfc_tools.cli.miniature import record

RECORDINGS = sorted((Path(__file__).parents[1] / "recordings").glob("*.npz"))
TORCH = "/usr/lib/python3/dist-packages/torch"
MAIN = ("/home/me/train.py", 90, "main")
CALL = (f"{TORCH}/nn/modules/module.py", 1553, "_call_impl")
FORWARD = ("/home/me/model.py", 12, "forward")
STEP = (f"{TORCH}/optim/adamw.py", 200, "step")
BACKWARD = (f"{TORCH}/autograd/__init__.py", 260, "backward")
#: Stacks, the innermost call first, and what an allocation there is for that is never freed.
STACKS: dict[str, list[tuple[tuple[str, int, str], ...]]] = {
    "weights": [
        ((f"{TORCH}/nn/modules/module.py", 1160, "convert"), MAIN),
        ((f"{TORCH}/nn/modules/linear.py", 98, "__init__"), ("/home/me/model.py", 3, "__init__")),
        (("/home/me/model.py", 5, "__init__"), MAIN),
        (("/home/me/hub.py", 5, "Model.from_pretrained"), MAIN),
    ],
    "gradients": [
        (("", 0, "torch::autograd::AccumulateGrad::apply"), ("", 0, "torch::autograd::Engine::f")),
        (BACKWARD, MAIN),
        (("/home/me/model.py", 40, "Scale.backward"), MAIN),
        (("/home/me/model.py", 50, "grad_of_attention"), BACKWARD, MAIN),
    ],
    "optimizer state": [((f"{TORCH}/optim/adamw.py", 120, "_init_group"), STEP, MAIN)],
    "activations": [
        (FORWARD, CALL, MAIN),
        ((f"{TORCH}/nn/functional.py", 20, "gelu"), FORWARD, CALL, MAIN),
        # Functions of one's own outside of every module, as in recordings of course work.
        (
            ("/home/me/nn_utils.py", 13, "log_softmax"),
            ("/home/me/nn_utils.py", 17, "cross_entropy"),
        ),
        (("/home/me/peak.py", 12, "custom_scaled_dot_product_attention"), MAIN),
        (FORWARD, CALL, (f"{TORCH}/utils/checkpoint.py", 70, "unpack_hook"), BACKWARD, MAIN),
    ],
    "inputs": [
        ((f"{TORCH}/utils/data/_utils/pin_memory.py", 57, "pin_memory"), MAIN),
        (("/home/me/train.py", 30, "get_batch"), MAIN),
    ],
    "other": [(MAIN,), (("/home/me/cache.py", 8, "grow"), MAIN), ()],
}


def trace_of(rows: list[tuple[int, int, int]], stacks: list[Any], **more: Any) -> bfc.Trace:
    """A trace with rows of op, id and stack."""
    frames, table, numbers = {}, [(0, 0)], [0]
    for stack in stacks:
        parent = 0
        for frame in reversed(stack):
            table.append((parent, frames.setdefault(frame, len(frames))))
            parent = len(table) - 1
        numbers.append(parent)
    op, ids, chosen = zip(*rows, strict=True)
    stack = [numbers[at] for at in chosen]
    return bfc.Trace(
        op, ids, [512] * len(op), stack=stack, frames=list(frames), stacks=table, **more
    )


def kinds(trace: bfc.Trace) -> list[str]:
    return [KINDS[at] for at in kinds_of(trace, lives_of(trace))[0]]


@pytest.mark.parametrize("kind", STACKS)
def test_stacks_say_what_memory_is_for(kind: str) -> None:
    for stack in STACKS[kind]:
        assert kinds(trace_of([(0, 0, 1)], [stack])) == [kind], stack


def test_what_is_freed_at_once_is_temporary_wherever_it_is_made() -> None:
    for stacks in STACKS.values():
        for stack in stacks:
            found = kinds(trace_of([(0, 0, 1), (1, 0, 1)], [stack]))
            assert found == ["temporary" if stack else "other"], stack


def test_what_an_optimizer_frees_before_the_next_forward_is_no_state() -> None:
    """The lists of `foreach` optimizers: one for each of many weights, all freed at the end."""
    made = [(0, at, 1) for at in range(20)]
    freed = [(1, at, 1) for at in range(20)]
    found = kinds(
        trace_of([(0, 50, 1), *made, *freed, (0, 60, 2)], [(STEP, MAIN), (FORWARD, MAIN)])
    )
    assert found == ["optimizer state", *["temporary"] * 20, "activations"]


def test_an_owner_who_says_it_is_believed() -> None:
    owners = ["", "layer 3 weights", "kv cache", "train.py:90 in main", "adam", "Gradients"]
    rows = [(0, at, 1) for at in range(6)]
    trace = trace_of(rows, [(FORWARD, MAIN)], owner=range(6), owners=owners)
    found, said = kinds_of(trace, lives_of(trace))
    assert [KINDS[at] for at in found] == [
        *("activations", "weights", "activations"),
        *("activations", "optimizer state", "gradients"),
    ]
    assert said.tolist() == [False, True, False, False, True, True]
    page = data_of([("run", trace)])
    assert page["kinds_said"] == 3 * 512
    assert page["opens"] == "owner"
    # A line in place of a name is no owner: the lines themselves then have the colours.
    derived = trace_of(rows, [(FORWARD, MAIN)], owner=[1] * 6, owners=["", "train.py:90 in main"])
    assert data_of([("run", derived)])["opens"] == "line"


def test_the_guess_of_a_training_is_right_about_most_of_its_peak(tmp_path: Path) -> None:
    """The owners of the demo say what is what. Without them, most is found."""
    record(tmp_path / "run.pickle")
    trace = bfc.Trace.from_torch(tmp_path / "run.pickle")
    columns = trace.op, trace.id, trace.size, trace.stream
    bare = bfc.Trace(*columns, stack=trace.stack, frames=trace.frames, stacks=trace.stacks)
    lives = lives_of(trace)
    there, size = lives.live_after(trace.fullest_event()), lives.size.astype(float)
    known, said = kinds_of(trace, lives)
    guessed, nobody = kinds_of(bare, lives_of(bare))
    assert said[there].any()
    assert not nobody.any()
    right = size[there][known[there] == guessed[there]].sum()
    assert right > 0.85 * size[there].sum()
    wrong = {KINDS[at] for at in guessed[there][known[there] != guessed[there]]}
    assert wrong == {"temporary"}  # the last activations, which are freed at once


@pytest.mark.parametrize("file", RECORDINGS[:2], ids=lambda file: file.stem)
def test_numbers_alone_say_nothing(file: Path) -> None:
    trace = bfc.Trace.load(file)
    assert set(kinds(trace)) == {"other"}
    page = data_of([(file.stem, trace)])
    assert (page["opens"], page["painted"], page["lines"]) == ("lane", {}, None)
    assert page["ran_out"] == []
