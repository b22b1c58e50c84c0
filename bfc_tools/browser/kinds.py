"""What each allocation is for: weights, gradients, and so on. A prediction knows it, an owner may
say it; otherwise it is a guess from the functions of its stack, and from how long it lives.

The kinds are those of PyTorch's memory profiler, which knows them from the tensors themselves:
PARAMETER, GRADIENT, OPTIMIZER_STATE, ACTIVATION, INPUT and TEMPORARY. A recording has no tensors.
"""

from __future__ import annotations

import re

from bfc.libraries import NDArray, np
from bfc.trace import Trace
from bfc_tools.browser.lifetimes import Lives

KINDS = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "inputs",
    "temporary",
    "other",
)
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, INPUTS, TEMPORARY, OTHER = range(len(KINDS))

#: An allocation is temporary if fewer come between it and its free.
TEMPORARY_WITHIN = 10

#: What words in an owner's name say.
OF_OWNERS = (
    (OPTIMIZER, r"optim\w*|adam\w*|momentum|moments?|exp[ _]avg\w*"),
    (GRADIENTS, r"grads?|gradients?"),
    (WEIGHTS, r"weights?|params?|parameters?|model"),
    (ACTIVATIONS, r"activations?|logits"),
    (INPUTS, r"inputs?|batch|batches|data"),
    (TEMPORARY, r"temp|temporar(y|ies)|workspaces?|scratch"),
)
#: What a frame says: its file, or "" for any, and its function. The innermost frame that says
#: something counts, and of its rules the first.
OF_FRAMES = (
    (OPTIMIZER, r"/torch/optim/|/optimizers?/", r".*"),
    (OPTIMIZER, r"", r"_init_group|(\w*(Adam|SGD|Optimi[sz]er)\w*\.)\w+"),
    (GRADIENTS, r"", r"torch::autograd::(Engine|generated|AccumulateGrad|GraphTask|Node)\b.*"),
    (GRADIENTS, r"", r"(\w+\.)*(backward|_engine_run_backward)"),
    (ACTIVATIONS, r"", r"(\w+\.)*(forward|_call_impl|_wrapped_call_impl|_slow_forward)"),
    (ACTIVATIONS, r"/torch/nn/functional\.py", r".*"),
    (ACTIVATIONS, r"", r"(?!.*(backward|grad))(\w+\.)*\w*(_loss|cross_entropy|softmax|attention)"),
    (WEIGHTS, r"/torch/nn/(parameter|init|modules/module)\.py|/safetensors/", r".*"),
    (WEIGHTS, r"/torch/nn/modules/", r"__init__|reset_parameters"),
    (WEIGHTS, r"", r"(\w+\.)*(from_pretrained|load_state_dict|load_weights|_?init_weights)"),
    (INPUTS, r"/torch/utils/data/|/torchvision/(datasets|transforms)/", r".*"),
    (INPUTS, r"", r"(\w+\.)*((load|get|next|fetch)_(mini)?batch|collate\w*|send_to_device)"),
)
#: Functions of anybody's, which count only if no other frame says anything, and only for what lives
#: for more than half of the run: what a model's `__init__` and an optimizer's `step` make and keep.
OF_THOSE_THAT_KEEP = {"__init__": WEIGHTS, "step": OPTIMIZER}
_KEEPS = len(KINDS)


def kinds_of(trace: Trace, lives: Lives) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """What each allocation is for, as an index in `KINDS`, and whether the prediction or its owner
    says so.

    What the optimizer allocates is its state if it is still there when something else allocates,
    and temporary otherwise. What is freed before ten others are made is temporary, wherever it is
    made. Cost: a search in each frame's names.

    >>> from bfc_tools.browser.lifetimes import lives_of
    >>> rows = [("train.py", 7, "main"), ("model.py", 3, "forward")]
    >>> trace = Trace([0], [0], [8], stack=[2], frames=rows, stacks=[(0, 0), (0, 0), (1, 1)])
    >>> kinds, said = kinds_of(trace, lives_of(trace))
    >>> KINDS[kinds[0]], bool(said[0])
    ('activations', False)
    """
    known = _of_prediction(trace, lives)
    if known is not None:
        return known, np.ones(len(known), bool)
    found = _of_stacks(trace)[lives.stack]
    kept = lives.died < 0
    lives_long = kept | (lives.died - lives.born > len(trace) // 2)
    found = np.where((found >= _KEEPS) & ~lives_long, OTHER, found % _KEEPS)
    # The next allocation that is not the optimizer's: what is still there then is its state.
    others = np.append(lives.born[found != OPTIMIZER], np.iinfo(np.int64).max)
    after = others[np.searchsorted(others, lives.born)]
    found[(found == OPTIMIZER) & ~kept & (lives.died < after)] = TEMPORARY
    has_stack = lives.stack > 0
    found[has_stack & ~kept & (lives.between < TEMPORARY_WITHIN)] = TEMPORARY
    told = _of_owners(trace)[lives.owner]
    return np.where(told < OTHER, told, found).astype(np.uint8), told < OTHER


#: What a prediction's own kinds are here; the others have the same names, or are "other".
OF_PREDICTIONS = {
    "parameters": WEIGHTS,
    "buckets of gradients": GRADIENTS,
    "workspaces": TEMPORARY,
    "backward pass": TEMPORARY,
    "optimizer step": TEMPORARY,
} | {name: at for at, name in enumerate(KINDS)}


def _of_prediction(trace: Trace, lives: Lives) -> NDArray[np.uint8] | None:
    """What a prediction has noted of each allocation; None if the run was not predicted."""
    try:
        noted = trace.meta["predicted"]["kinds"]
        letters = np.frombuffer(noted["of"].encode(), np.uint8).astype(np.int64) - ord("a")
        names = np.array([OF_PREDICTIONS.get(name, OTHER) for name in noted["names"]], np.uint8)
        found: NDArray[np.uint8] = names[letters[np.asarray(trace.id)[lives.born].astype(np.int64)]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    return found


def named_owners(trace: Trace) -> set[int]:
    """The owners that somebody named: the others are lines, which `Trace.from_torch` takes where
    there is no name."""
    lines = {
        f"{frame.filename.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line} in {frame.name}"
        for frame in trace.frames
    }
    return {at for at, name in enumerate(trace.owners) if name and name not in lines}


def _of_owners(trace: Trace) -> NDArray[np.int64]:
    """What each owner's name says; the last entry is for allocations without an owner."""
    found = np.full(len(trace.owners) + 1, OTHER)
    rules = [
        (kind, re.compile(rf"(?:^|[\W_])(?:{words})(?:$|[\W_])", re.I)) for kind, words in OF_OWNERS
    ]
    for at in named_owners(trace):
        found[at] = next((kind for kind, rule in rules if rule.search(trace.owners[at])), OTHER)
    return found


def _of_stacks(trace: Trace) -> NDArray[np.int64]:
    """What each stack says: a stack stands behind the one that called it."""
    rules = [(kind, re.compile(file), re.compile(name)) for kind, file, name in OF_FRAMES]
    frames = [
        _of_frame(frame.filename.replace("\\", "/"), frame.name, rules) for frame in trace.frames
    ]
    found = [OTHER]
    for parent, frame in trace.stacks[1:].tolist():
        said, before = frames[frame], found[parent]
        is_weak = said == OTHER or (said >= _KEEPS and before != OTHER)
        found.append(before if is_weak else said)
    return np.array(found)


def _of_frame(
    filename: str, name: str, rules: list[tuple[int, re.Pattern[str], re.Pattern[str]]]
) -> int:
    for kind, file, function in rules:
        if file.search(filename) and function.fullmatch(name):
            return kind
    weak = OF_THOSE_THAT_KEEP.get(name.split(".")[-1])
    return OTHER if weak is None else weak + _KEEPS
