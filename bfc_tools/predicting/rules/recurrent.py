"""Recurrent networks, which cuDNN computes in one call.

From PyTorch's ATen/native/RNN.cpp (cuDNN where it can), ATen/native/cudnn/RNN.cpp (the results, and
a buffer for weights that do not lie side by side) and ATen/native/cuda/RNN.cu (single steps). A
build without CUDA would compute step by step, and keep the gates of each.

How large cuDNN's reserve and workspace are, only a device knows. The reserve is as measured with
cuDNN 9.19 on an H200 and an H100, to the byte. The formula of the workspace was found in 303
networks in TF32 and float16 on an H100. Of 138 others, in float32 and bfloat16, 110 are within 2 %
and 126 within 10 %, the others 0.61 to 1.35 times as large.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.kinds import WORKSPACES
from bfc_tools.predicting.rules.convolution_workspaces import HOPPER
from bfc_tools.predicting.rules.interface import (
    Call,
    Doubt,
    Release,
    Result,
    Workspace,
    on_cuda,
)
from bfc_tools.predicting.rules.operators import (
    answer,
    around,
    before,
    between,
    file,
    kernel,
    order,
)
from bfc_tools.predicting.rules.tensors import argument, contiguous_copy, nbytes, numel

RNN_CPP = file("ATen/native/cudnn/RNN.cpp", read="2.6.0")
RNN_CU = file("ATen/native/cuda/RNN.cu", read="2.6.0")
SEEN = "cuDNN 9.19 on an H100: 303 networks"

#: cuDNN's number of a network, and how many numbers its reserve keeps of each step and unit.
KINDS = {"rnn_relu": (0, 1), "rnn_tanh": (1, 1), "lstm": (2, 5), "gru": (3, 6)}
#: What the reserve has beside them.
RESERVE_MORE = 256
#: The workspace has so many bytes for each layer and direction, beside the weights.
WORKSPACE_OF_LAYER = 8 << 20
#: Networks of up to so many units have kernels of their own.
FEW_UNITS = 128


@dataclass(frozen=True)
class _Numbers:
    """How many numbers the workspace has: in one direction, and in two."""

    # for each step and unit, beside the input, of networks of few units and of others
    few_inference: tuple[int, int]
    few_training: tuple[int, int]
    few_weights: tuple[int, int]  # for the gradient of the weights, where the input counts thrice
    inference: tuple[int, int]
    training: tuple[int, int]
    weights: tuple[int, int]
    packed: tuple[int, int]  # for each step and unit of packed sequences
    state: int  # for each sequence and unit of a layer


LSTM = _Numbers((21, 30), (21, 30), (15, 18), (5, 14), (5, 14), (3, 6), (4, 12), 10)
GRU = _Numbers((16, 25), (17, 25), (17, 20), (4, 12), (4, 12), (3, 6), (3, 10), 5)
RNN = _Numbers((6, 12), (13, 19), (12, 15), (2, 8), (4, 10), (2, 6), (1, 7), 5)
NUMBERS = {"lstm": LSTM, "gru": GRU, "rnn_tanh": RNN, "rnn_relu": RNN}
#: The state of cuDNN's random numbers, for each multiprocessor: 6,488,064 bytes on an H100.
DROPOUT_STATE_EACH = 48 << 10
#: What networks took on an H100 that the formula had not seen, at least and at most.
LEAST_OFF, MOST_OFF = 0.61, 1.35
WORKSPACES_OF_CUDNN = "cuDNN's workspaces of recurrent networks"


def reserve_bytes(
    kind: str, steps: int, hidden: int, layers: int, directions: int, element: int, masked: int
) -> int:
    """The reserve that cuDNN keeps for the backward pass, in bytes, as measured. `kind` is "lstm",
    "gru", "rnn_tanh" or "rnn_relu"; `steps` the elements of all sequences of a batch together;
    `element` the bytes of a number; `masked` the elements if all were as long as the longest, with
    dropout between layers, else 0."""
    units = hidden * directions
    kept = steps * units * (layers * KINDS[kind][1] + layers - 1) * element
    masks = masked * units // 4 if layers > 1 else 0  # for all layers
    return kept + masks + RESERVE_MORE


def workspace_bytes(
    kind: str,
    weights: int,
    steps: int,
    batch: int,
    inputs: int,
    hidden: int,
    layers: int,
    directions: int,
    element: int,
    *,
    train: bool,
    dropout: bool,
    packed: bool,
) -> int:
    """The workspace, in bytes, nearly as measured: `weights` are the bytes of the weights, `batch`
    the sequences, `inputs` the numbers of a step of the input; the others are as in
    `reserve_bytes`."""
    numbers, place = NUMBERS[kind], directions - 1
    few = hidden <= FEW_UNITS
    more = directions if layers > 1 and train and not packed and (dropout or few) else 0
    if packed:
        kept = steps * hidden * numbers.packed[place]
    elif train:
        least = (numbers.few_training if few else numbers.training)[place]
        of_weights = (numbers.few_weights if few else numbers.weights)[place]
        kept = steps * max(hidden * least + inputs, hidden * of_weights + 3 * directions * inputs)
    else:
        least = (numbers.few_inference if few else numbers.inference)[place]
        kept = steps * (hidden * least + inputs)
    kept += steps * hidden * more + numbers.state * layers * directions * batch * hidden
    return weights + layers * directions * WORKSPACE_OF_LAYER + kept * element


@dataclass
class Network:
    """The arguments of a call, of sequences of one length or of packed ones."""

    kind: str
    data: Any
    batch_sizes: Any
    state: tuple[Any, ...]
    weights: list[Any]
    biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @classmethod
    def of(cls, kind: str, args: tuple[Any, ...]) -> Network:
        """From what `torch._VF` is called with."""
        if isinstance(args[3], (list, tuple)):
            data, sizes, state, weights, *rest = args
            rest.append(False)
        else:
            data, state, weights, *rest = args
            sizes = None
        states = tuple(state) if kind == "lstm" else (state, None)
        return cls(kind, data, sizes, states, list(weights), *rest)

    def cast(self) -> None:
        """As autocast would."""
        if torch.is_autocast_enabled("cuda"):
            half = torch.get_autocast_dtype("cuda")
            self.data, *self.weights = (one.to(half) for one in (self.data, *self.weights))
            self.state = tuple(None if one is None else one.to(half) for one in self.state)

    def steps(self) -> list[int]:
        """How many sequences have each step: as many as there can be, if it is not known."""
        if self.batch_sizes is None:
            return []
        known = _known(self.batch_sizes)
        if known is not None:
            return known
        count = int(self.batch_sizes.shape[0])
        whole, rest = divmod(int(self.data.shape[0]), count)
        return [whole + 1] * rest + [whole] * (count - rest)

    def run(self) -> Any:
        """cuDNN's operator."""
        self.cast()
        hidden, cell = self.state
        size = int(hidden.shape[-1])
        width = size if cell is None else int(cell.shape[-1])
        projected = size if width != size else 0
        with torch.autocast("cuda", enabled=False):  # a build for CUDA would flatten weights itself
            return self._called(hidden, cell, width, projected)

    def _called(self, hidden: Any, cell: Any, width: int, projected: int) -> Any:
        found = torch.ops.aten._cudnn_rnn(
            self.data,
            self.weights,
            (4 if self.biases else 2) + (1 if projected else 0),
            None,
            hidden,
            cell,
            KINDS[self.kind][0],
            width,
            projected,
            self.layers,
            self.batch_first,
            self.dropout,
            self.train,
            self.bidirectional,
            self.steps(),
            None,
        )
        return found[:3] if self.kind == "lstm" else found[:2]


@around(
    source=(
        file("ATen/native/RNN.cpp", read="2.6.0"),
        file("torch/nn/modules/rnn.py", read="2.15.0"),
    )
)
@contextmanager
def replaced(recorder: Any) -> Iterator[None]:
    """While a prediction runs, `nn.LSTM` and its like call cuDNN's operator."""
    acceptable = torch.backends.cudnn.is_acceptable
    ready = _dropout_state(recorder)
    functions = {kind: _function(kind, getattr(torch._VF, kind), ready) for kind in KINDS}
    functions["_pad_packed_sequence"] = _padded
    functions["_pack_padded_sequence"] = _packing(recorder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patch.object(
                torch.backends.cudnn,
                "is_acceptable",  # whether weights are moved side by side
                lambda tensor: False if on_cuda(tensor) else acceptable(tensor),
            )
        )
        flatten = torch.nn.RNNBase.flatten_parameters
        stack.enter_context(
            patch.object(torch.nn.RNNBase, "flatten_parameters", _side_by_side(flatten))
        )
        for name, function in functions.items():
            stack.enter_context(patch.object(torch._VF, name, function))
        yield


def _function(
    kind: str, build: Callable[..., Any], ready: Callable[[Network], None]
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not on_cuda(args[0]):
            return build(*args)
        network = Network.of(kind, args)
        ready(network)
        return network.run()

    return run


def _dropout_state(recorder: Any) -> Callable[[Network], None]:
    """The first dropout of a process draws a seed on the device, and makes a state that stays
    (get_dropout_state in ATen/native/cudnn/RNN.cpp)."""
    memory, state = recorder.memory, "the state of cuDNN's dropout"

    def ready(network: Network) -> None:
        if state in memory.kept or not (network.train and network.dropout > 0):
            return
        seed = torch.empty((), dtype=torch.int64, device=network.data.device)
        del seed
        nbytes = DROPOUT_STATE_EACH * recorder.gpu.sms
        memory.kept[state] = memory.allocate(nbytes, state, WORKSPACES)

    return ready


def _side_by_side(build: Callable[..., None]) -> Callable[..., None]:
    """`flatten_parameters`: on the device all weights get places in one memory."""

    def flatten(self: Any) -> None:
        weights = self._flat_weights
        if not all(map(on_cuda, weights)) or len({one.dtype for one in weights}) > 1:
            build(self)
            return
        with torch.no_grad():
            together = weights[0].new_empty(sum(map(numel, weights)))
            begin = 0
            for weight in weights:
                weight.data = together[begin : begin + numel(weight)].view(weight.shape)
                begin += numel(weight)

    return flatten


def _padded(data: Any, batch_sizes: Any, batch_first: bool, value: float, length: int) -> Any:
    """Packed sequences side by side again (_pad_packed_sequence in ATen/native/PackedSequence.cpp);
    each is as long as the longest, if it is not known how long they are."""
    sizes = _known(batch_sizes)
    steps = int(batch_sizes.shape[0])
    if sizes is None:
        found = data.reshape(steps, -1, *data.shape[1:]).clone()
        lengths = torch.full((found.shape[1],), steps)
    else:
        shape = (max(steps, length), sizes[0], *data.shape[1:])
        found = torch.full(shape, value, dtype=data.dtype, device=data.device)
        row = 0
        for begin, end, size in _runs(sizes):
            count = (end - begin) * size
            part = data.narrow(0, row, count).view(end - begin, size, *data.shape[1:])
            found.narrow(0, begin, end - begin).narrow(1, 0, size).copy_(part)
            row += count
        lengths = torch.tensor([sum(size > at for size in sizes) for at in range(sizes[0])])
    return (found.transpose(0, 1) if batch_first else found), lengths


def _known(tensor: Any) -> list[int] | None:
    """The numbers of a tensor on the host, if they are known."""
    constant = getattr(tensor, "constant", None)
    return None if constant is None else list(map(int, constant.tolist()))


def _runs(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Steps that as many sequences have: the first, the one after the last, and how many."""
    begin = 0
    for size, same in itertools.groupby(sizes):
        end = begin + len(list(same))
        yield begin, end, size
        begin = end


def _packing(recorder: Any) -> Callable[..., Any]:
    """`_pack_padded_sequence`, whose gradient reads in C++ how long the sequences are. Where that
    is not known, they are as long as the longest."""

    class Packed(torch.autograd.Function):  # type: ignore[misc]
        """All steps of all sequences, one after the other; the gradient is in zeros."""

        @staticmethod
        def forward(context: Any, data: Any, sizes: list[int]) -> Any:
            context.shape = tuple(data.shape)
            parts = [
                data[begin:end, :size].contiguous().view((end - begin) * size, *data.shape[2:])
                for begin, end, size in _runs(sizes)
            ]
            return torch.cat(parts)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return gradient.new_zeros(context.shape), None

    def pack(data: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
        data = data.transpose(0, 1) if batch_first else data
        steps, batch = map(int, data.shape[:2])
        known = _known(lengths)
        if known is None:
            recorder.assume("the lengths of packed sequences: all as long as the longest", steps)
            return Packed.apply(data, [batch] * steps), torch.full((steps,), batch)
        sizes = [sum(length > at for length in known) for at in range(max(known))]
        return Packed.apply(data, sizes), torch.tensor(sizes)

    return pack


def _workspace(call: Call, *, train: bool) -> Workspace:
    data, weights = call.args[:2]
    inputs = int(data.shape[-1])
    size = workspace_bytes(
        _kind(call),
        sum(map(nbytes, weights)),
        numel(data) // inputs,
        int(argument(call, "hx").shape[1]),
        inputs,
        int(argument(call, "hidden_size")),
        int(argument(call, "num_layers")),
        2 if argument(call, "bidirectional") else 1,
        int(data.element_size()),
        train=train,
        dropout=bool(argument(call, "dropout")),
        packed=bool(argument(call, "batch_sizes")),
    )
    return Workspace(size, what="cuDNN's workspace", doubt=_doubt(call, size))


def _doubt(call: Call, size: int) -> Doubt:
    """How far the formula may be off: as far as it was on an H100. Nobody has compared others."""
    if call.gpu.cc != HOPPER:
        return Doubt(0, None, f"{WORKSPACES_OF_CUDNN} have not been compared with this GPU")
    least, most = LEAST_OFF, MOST_OFF
    why = f"{WORKSPACES_OF_CUDNN} were {least} to {most} times those that are counted on an H100"
    return Doubt(int(least * size), math.ceil(most * size), why)


def _kind(call: Call) -> str:
    mode = argument(call, "mode")
    return next(name for name, (number, _) in KINDS.items() if number == mode)


@dataclass(frozen=True)
class _StepsFirst:
    """A tensor of sequences, with the dimension of their steps first."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        sequences, steps, *rest = self.tensor.shape
        return (steps, sequences, *rest)

    def stride(self) -> tuple[int, ...]:
        sequences, steps, *rest = self.tensor.stride()
        return (steps, sequences, *rest)

    def element_size(self) -> int:
        return int(self.tensor.element_size())


def _turned(call: Call) -> bool:
    """Whether the dimension of sequences comes first: cuDNN wants that of steps there."""
    return bool(argument(call, "batch_first")) and not argument(call, "batch_sizes")


def _in_order(call: Call, tensor: Any, what: str) -> list[Workspace]:
    """The copy for cuDNN."""
    if tensor is None:
        return []
    return contiguous_copy(_StepsFirst(tensor) if _turned(call) else tensor, what)


@between("aten::_cudnn_rnn", source=RNN_CPP, seen=SEEN)
def workspace(call: Call) -> Iterator[Workspace | Release | Result]:
    """cuDNN's workspace lies between the results and the reserve."""
    yield from _in_order(call, call.args[0], "input in order")
    yield from map(Result, range(3))
    yield _workspace(call, train=bool(argument(call, "train")))


@before("aten::_cudnn_rnn_backward", source=RNN_CPP)
def gradients_of_nothing(call: Call) -> Iterator[Workspace | Release]:
    """Zeros, where the output or the last state leads to no gradient."""
    for name, like in (("grad_output", "output"), ("grad_hy", "hx"), ("grad_cy", "cx")):
        tensor = argument(call, like)
        if tensor is not None and argument(call, name) is None:
            yield Workspace(nbytes(tensor), what="zeros")


@between("aten::_cudnn_rnn_backward", source=RNN_CPP, seen=SEEN)
def workspaces(call: Call) -> Iterator[Workspace | Release | Result]:
    """One for the gradient of the input, and one for that of the weights: each is a call with
    copies of its own."""
    data, gradient = call.args[0], argument(call, "grad_output")
    copies = [
        *_in_order(call, data, "input in order"),
        *_in_order(call, gradient, "gradient in order"),
    ]
    yield from copies
    yield from map(Result, range(3))
    yield from _for_a_moment(copies, _workspace(call, train=True))
    if not argument(call, "output_mask")[3]:
        return
    copies = _in_order(call, data, "input in order")
    yield from copies
    yield Result(3)
    yield from _for_a_moment(copies, _workspace(call, train=True))


def _for_a_moment(copies: list[Workspace], one: Workspace) -> Iterator[Workspace | Release]:
    yield one
    for each in (one, *reversed(copies)):
        yield Release(each)


@kernel("aten::_cudnn_rnn", source=RNN_CPP, seen="cuDNN 9.19 on an H200 and an H100, to the byte")
def forward(call: Call) -> Any:
    """The results, and the reserve."""
    output, hidden, cell, *_ = call.func(*call.args, **call.kwargs)
    data = call.args[0]
    if _turned(call):
        output = output.new_empty(_StepsFirst(output).shape).transpose(0, 1)
    reserve = 0
    if argument(call, "train"):  # without gradients, too
        directions = 2 if argument(call, "bidirectional") else 1
        steps = numel(data) // int(data.shape[-1])
        sizes = argument(call, "batch_sizes")
        longest = len(sizes) * int(sizes[0]) if sizes else steps
        reserve = reserve_bytes(
            _kind(call),
            steps,
            int(argument(call, "hidden_size")),
            int(argument(call, "num_layers")),
            directions,
            int(data.element_size()),
            longest if argument(call, "dropout") else 0,
        )
    kept = torch.empty(reserve, dtype=torch.uint8, device=data.device)
    return output, hidden, cell, kept, data.new_empty(0)


@kernel("aten::_cudnn_rnn_backward", source=RNN_CPP)
def backward(call: Call) -> Any:
    """The gradients of the weights lie side by side."""
    data, weights = call.args[0], call.args[1]
    hidden, cell = argument(call, "hx"), argument(call, "cx")
    mask = argument(call, "output_mask")
    inputs = data.new_empty(data.shape)
    if _turned(call):
        inputs = data.new_empty(_StepsFirst(data).shape).transpose(0, 1)
    states = [None if one is None else one.new_empty(one.shape) for one in (hidden, cell)]
    if not mask[3]:
        return inputs, *states, []
    together = data.new_zeros(sum(map(numel, weights)))
    gradients = []
    begin = 0
    for weight in weights:
        gradients.append(together[begin : begin + numel(weight)].view(weight.shape))
        begin += numel(weight)
    return inputs, *states, gradients


# -- one step, for which PyTorch has kernels of its own ------------------------------------------

#: What the kernels of cells keep for the backward pass, in sizes of the state (RNN.cu).
LSTM_KEEPS, GRU_KEEPS = 4, 5
# which they allocate first
order(
    {"aten::_thnn_fused_lstm_cell": (2,), "aten::_thnn_fused_gru_cell": (1,)},
    source=file("ATen/native/cuda/RNN.cu", read="2.6.0"),
)


@answer("aten::_thnn_fused_lstm_cell", source=RNN_CU)
def lstm_cell(call: Call, run: Callable[..., Any]) -> Any:
    """The two states, and the gates."""
    cell = call.args[2]
    rows, size = cell.shape
    return cell.new_empty(cell.shape), cell.new_empty(cell.shape), _kept(cell, rows, size)


def _kept(state: Any, rows: int, size: int, times: int = LSTM_KEEPS) -> Any:
    return state.new_empty((rows, size * times))


@answer("aten::_thnn_fused_lstm_cell_backward_impl", source=RNN_CU)
def lstm_cell_backward(call: Call, run: Callable[..., Any]) -> Any:
    """The gradients of the gates, of the cell, and of the bias."""
    cell, kept = argument(call, "cx"), argument(call, "workspace")
    bias = kept.new_empty(kept.shape[1:]) if argument(call, "has_bias") else None
    return kept.new_empty(kept.shape), cell.new_empty(cell.shape), bias


@answer("aten::_thnn_fused_gru_cell", source=RNN_CU)
def gru_cell(call: Call, run: Callable[..., Any]) -> Any:
    """The state, and what its gradient needs."""
    state = call.args[2]
    rows, size = state.shape
    return state.new_empty(state.shape), _kept(state, rows, size, GRU_KEEPS)


@answer("aten::_thnn_fused_gru_cell_backward", source=RNN_CU)
def gru_cell_backward(call: Call, run: Callable[..., Any]) -> Any:
    """The gradients of the gates of input and state, of the state, and of both biases."""
    gradient = call.args[0]
    rows, size = gradient.shape
    biases = [
        gradient.new_empty(3 * size) if argument(call, "has_bias") else None for _ in range(2)
    ]
    gates = [gradient.new_empty((rows, 3 * size)) for _ in range(2)]
    return *gates, gradient.new_empty(gradient.shape), *biases
