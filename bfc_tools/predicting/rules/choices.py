"""What PyTorch decides by asking what a tensor is, and would decide otherwise for a fake one.

From torch/optim (`_foreach_supported_types`), torch/amp/grad_scaler.py (a step is skipped where
gradients are infinite), torch/jit, torch/utils/data, and
ATen/native/Onehot.cpp.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.arrivals import Arrivals
from bfc_tools.predicting.rules.interface import on_cuda
from bfc_tools.predicting.rules.operators import OPERATORS, around, file
from bfc_tools.predicting.rules.stand_ins import standing_in
from bfc_tools.predicting.rules.tensors import even_parts

TENSOR = file("torch/_tensor.py", read="2.15.0")
SEEN = "what is made up is told as an assumption"


@around(
    source=(
        file("torch/optim/optimizer.py", "_default_to_fused_or_foreach", read="2.15.0"),
        file("torch/utils/_foreach_utils.py", read="2.15.0"),
    )
)
@contextmanager
def lists_of_tensors(recorder: Any) -> Iterator[None]:
    """Optimizers and gradient norms work on lists of fake tensors, as on lists of real ones."""
    import torch.optim.optimizer as optimizer
    import torch.utils._foreach_utils as foreach
    from torch._subclasses.fake_tensor import FakeTensor

    lists = []
    for module in (optimizer, foreach):
        types = module._foreach_supported_types
        if FakeTensor not in types:
            types.append(FakeTensor)
            lists.append(types)
    try:
        yield
    finally:
        for types in lists:
            types.remove(FakeTensor)


@around(source=file("ATen/native/native_functions.yaml", read="2.15.0"))
@contextmanager
def kernels_of_their_own(recorder: Any) -> Iterator[None]:
    """A build without CUDA has no kernel for some operators that a GPU has one for, and would
    compose them of others before a prediction sees them. It never calls the kernel."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a kernel for CUDA, in a build without")

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in (one.name for one in OPERATORS.values() if "whole" in one.marks):
            known = hasattr(torch.ops.aten, name.partition("::")[2])
            if known and not has(name, "CUDA"):
                library.impl(name, never, "CUDA")
        yield


@around(source=file("torch/optim/nadam.py", read="2.15.0"))
@contextmanager
def products_of_momenta(recorder: Any) -> Iterator[None]:
    """NAdam divides by 1 less what it reads of the device, if that is the default one: not by 0,
    as a number that is made up would have it (torch/optim/nadam.py)."""
    import torch.optim.nadam as nadam
    from torch._subclasses.fake_tensor import FakeTensor

    build = nadam._get_value

    def get(tensor: Any) -> Any:
        value = build(tensor)
        made_up = isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"
        return 0.5 if made_up and value == 1.0 else value

    with patch.object(nadam, "_get_value", get):
        yield


@around(source=file("torch/amp/grad_scaler.py", read="2.15.0"))
@contextmanager
def finite_gradients(recorder: Any) -> Iterator[None]:
    """No gradient overflows: a `GradScaler` makes each step."""
    from torch.amp.grad_scaler import GradScaler

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    with patch.object(GradScaler, "_maybe_opt_step", step):
        yield


@around(
    source=(
        file("torch/distributions/distribution.py", read="2.15.0"),
        file("torch/distributions/constraints.py", read="2.15.0"),
    )
)
@contextmanager
def valid_numbers(recorder: Any) -> Iterator[None]:
    """A number that is asked for is finite, and what a distribution is given is valid: `if not
    torch.isfinite(loss)` is not taken."""
    from torch._subclasses.fake_tensor import FakeTensor

    def true(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def ask(tensor: Any) -> Any:
            found = build(tensor)
            if isinstance(found, FakeTensor) and found.constant is None:
                recorder.known.note(found, True)
            return found

        return ask

    geometric = torch.distributions.Geometric
    build = geometric.__init__

    def chances(self: Any, *args: Any, **kwargs: Any) -> None:
        """None is 0, which this distribution asks in a way of its own."""
        try:
            build(self, *args, **kwargs)
        except ValueError:
            if not isinstance(self.probs, FakeTensor):
                raise

    with (
        patch.object(geometric, "__init__", chances),
        standing_in("isfinite", torch, torch.Tensor, of=true),
        standing_in("_is_all_true", torch, of=true),
    ):
        yield


@around(source=file("torch/distributions/von_mises.py", read="2.15.0"))
@contextmanager
def accepted_draws(recorder: Any) -> Iterator[None]:
    """A distribution that draws until each number is accepted draws once
    (torch/distributions/von_mises.py)."""
    import torch.distributions.von_mises as von_mises

    build = von_mises._rejection_sample

    def once(loc: Any, concentration: Any, proposal_r: Any, x: Any) -> Any:
        if not on_cuda(x):
            return build(loc, concentration, proposal_r, x)
        recorder.assume("draws until all are accepted", 1)
        first, second, third = torch.rand((3, *x.shape), dtype=x.dtype, device=x.device).unbind()
        near = (1 + proposal_r * first.cos()) / (proposal_r + first)
        rate = concentration * (proposal_r - near)
        accepted = (rate - second > 0) | (rate.log() >= second)
        drawn = torch.where(accepted, third.sign() * near.acos(), x)
        return (drawn + loc) % 1

    with patch.object(von_mises, "_rejection_sample", once):
        yield


@around(source=file("rtqichen/torchdiffeq: torchdiffeq/_impl/misc.py", read="0.2.5"))
@contextmanager
def accepted_steps(recorder: Any) -> Iterator[None]:
    """A solver's step is accepted: its error is half of what is allowed. What a refused one leaves
    is less than what any GPU keeps."""
    name = "_compute_error_ratio"

    def replace(module: Any) -> None:
        build: Any = getattr(module, name, None)

        def half(*args: Any, **kwargs: Any) -> Any:
            found = build(*args, **kwargs)
            recorder.known.note(found, 0.5)
            recorder.note("steps of a solver (torchdiffeq)", "accepted")
            return found

        if build is not None:
            stack.enter_context(patch.object(module, name, half))

    modules = [f"torchdiffeq._impl.{name}" for name in ("rk_common", "fixed_adams")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(Arrivals(modules, replace))
        yield


#: The dimensions of a bias.
BIAS = (1,)


@around(source=file("ATen/native/Linear.cpp", read="2.6.0"))
@contextmanager
def biases(recorder: Any) -> Iterator[None]:
    """`linear` adds its bias in place; for subclasses of tensors it would not."""
    import torch.nn.functional as functional

    def adding_in_place(build: Callable[..., Any]) -> Callable[..., Any]:
        def linear(*args: Any, **kwargs: Any) -> Any:
            before, recorder.adds_in_place = recorder.adds_in_place, BIAS
            try:
                return build(*args, **kwargs)
            finally:
                recorder.adds_in_place = before

        return linear

    with standing_in("linear", functional, torch._C._nn, of=adding_in_place):
        yield


@around(source=file("ATen/native/Onehot.cpp", read="2.6.0"))
@contextmanager
def one_hot(recorder: Any) -> Iterator[None]:
    """Zeros, with ones written into them; for subclasses a comparison of all numbers with all, in
    another type, which is then converted (ATen/native/Onehot.cpp)."""
    import torch.nn.functional as functional

    def scattered(build: Callable[..., Any]) -> Callable[..., Any]:
        def one_hot(tensor: Any, num_classes: int = -1) -> Any:
            given = on_cuda(tensor) and tensor.dtype == torch.int64 and tensor.numel()
            if not given or num_classes == 0 or num_classes < -1:
                return build(tensor, num_classes)
            if num_classes == -1:
                num_classes = int(tensor.max().item()) + 1
            shape = (*tensor.shape, num_classes)
            made = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
            return made.scatter_(-1, tensor.unsqueeze(-1), 1)

        return one_hot

    with standing_in("one_hot", functional, torch._C._nn, of=scattered):
        yield


@around(source=file("torch/nn/modules/adaptive.py", read="2.15.0"))
@contextmanager
def clusters_of_classes(recorder: Any) -> Iterator[None]:
    """`AdaptiveLogSoftmaxWithLoss` counts the targets in each cluster of classes, and insists that
    they are all: each class is as likely as the others, if nothing is known of them."""
    from torch._subclasses.fake_tensor import FakeTensor

    layer = torch.nn.AdaptiveLogSoftmaxWithLoss
    build = layer.forward

    def forward(self: Any, input_: Any, target_: Any) -> Any:
        choices = recorder.known.choices
        if isinstance(target_, FakeTensor) and choices.get(target_) is None:
            target_ = target_.clone()
            choices.note_classes(target_, self.n_classes)
        return build(self, input_, target_)

    with patch.object(layer, "forward", forward):
        yield


@around(source=file("huggingface/transformers: src/transformers/masking_utils.py", read="5.24.0"))
@contextmanager
def masks_of_transformers(recorder: Any) -> Iterator[None]:
    """transformers takes a program on fake tensors for one that is traced, and makes masks that a
    GPU would not be given: those of ones are left out there, for other kernels of attention. It
    looks at the positions of a batch for rows of several sequences, too: no row has more than one.
    What is compiled does not look, and gets a mask.
    """
    name, asks = "find_packed_sequence_indices", "is_fake_tensor"

    def replace(module: Any) -> None:
        build: Any = getattr(module, name, None)

        def find(*args: Any, **kwargs: Any) -> Any:
            found = build(*args, **kwargs)
            if torch.compiler.is_compiling():
                return found
            recorder.assume("rows of several sequences (transformers)", "none")
            return None

        if build is not None:
            stack.enter_context(patch.object(module, name, find))
        if hasattr(module, asks):
            stack.enter_context(patch.object(module, asks, lambda tensor: False))

    modules = ["transformers.masking_utils", "transformers.utils.import_utils"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(Arrivals(modules, replace))
        yield


def _whole_rows(tensor: Any, length: int | None) -> Any:
    """The rows of a length of which a tensor has the beginnings, up to a place that values say."""
    if not on_cuda(tensor) or not isinstance(length, int) or tensor.stride(0) < length:
        return tensor
    return tensor.as_strided((tensor.shape[0], length), tensor.stride())


@around(
    source=file("huggingface/transformers: src/transformers/generation/utils.py", read="5.24.0")
)
@contextmanager
def beams_of_transformers(recorder: Any) -> Iterator[None]:
    """A search with beams goes on to its longest length, and returns as many tokens: its scores,
    which could end it before, are not known."""
    name, search = "_beam_search_has_unfinished_sequences", "_beam_search"

    def replace(module: Any) -> None:
        mixin = module.GenerationMixin
        build: Any = getattr(mixin, name, None)
        run: Any = getattr(mixin, search, None)

        def goes_on(*args: Any, **kwargs: Any) -> bool:
            known = recorder.known.get(build(*args, **kwargs))
            if known is None:
                recorder.note("a search with beams (transformers)", "to its longest length")
            return known is None or bool(known)

        def whole(*args: Any, **kwargs: Any) -> Any:
            found = run(*args, **kwargs)
            asked = dict(zip(inspect.signature(run).parameters, args, strict=False)) | kwargs
            length = getattr(asked.get("generation_config"), "max_length", None)
            if isinstance(found, torch.Tensor):
                return _whole_rows(found, length)
            found.sequences = _whole_rows(found.sequences, length)
            return found

        if build is not None:
            stack.enter_context(patch.object(mixin, name, staticmethod(goes_on)))
        if run is not None:
            stack.enter_context(patch.object(mixin, search, whole))

    with contextlib.ExitStack() as stack:
        stack.enter_context(Arrivals(["transformers.generation.utils"], replace))
        yield


@around(source=TENSOR)
@contextmanager
def streams_of_tensors(recorder: Any) -> Iterator[None]:
    """Work is done at once: no stream still uses a tensor that is freed."""
    with patch.object(torch.Tensor, "record_stream", lambda self, stream: None):
        yield


@around(
    source=(
        file("torch/storage.py", read="2.15.0"),
        file("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", read="2.15.0"),
    )
)
@contextmanager
def resized_storages(recorder: Any) -> Iterator[None]:
    """FSDP gives memory back by resizing storages, which no operator does. Where one has grown
    again, the operator that fills it tells."""
    build = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        found = build(self, size)
        recorder.resized(self)
        return found

    with patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


class _Pool:
    """A pool whose memory is that of all."""

    allocator = None
    id = (0, 1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.use_count = lambda: 1
        self.snapshot: Callable[..., list[Any]] = lambda *args: []


@around(source=file("torch/testing/_comparison.py", read="2.15.0"))
@contextmanager
def close_enough(recorder: Any) -> Iterator[None]:
    """`torch.testing.assert_close` finds no difference, as `torch.allclose` does: programs compare
    their kernels so."""

    def replace(module: Any) -> None:
        pair = module.TensorLikePair
        build = pair._compare_regular_values_close

        def compare(self: Any, one: Any, other: Any, **given: Any) -> None:
            if not (on_cuda(one) or on_cuda(other)):  # which may have values
                build(self, one, other, **given)
                return
            given.pop("identifier", None)
            torch.all(torch.isclose(one, other, **given))
            recorder.note("torch.testing.assert_close", "close")

        stack.enter_context(patch.object(pair, "_compare_regular_values_close", compare))

    with contextlib.ExitStack() as stack:
        stack.enter_context(Arrivals(["torch.testing._comparison"], replace))
        yield


#: A bit that makes an address one where no memory can be.
NOWHERE = 1 << 62


class Unprofiled:
    """Stands in for a profiler, and for all that it returns: there is nothing to see."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self

    def __float__(self) -> float:
        return 0.0

    def __str__(self) -> str:
        return ""


@around(
    source=(
        file("torch/profiler/profiler.py", read="2.15.0"),
        file("torch/autograd/profiler.py", read="2.15.0"),
    )
)
@contextmanager
def no_profiles(recorder: Any) -> Iterator[None]:
    """A profiler sees nothing. PyTorch's own would ask the device for the time of each operator,
    and has ended the process."""
    import torch.autograd.profiler as old

    def profile(*args: Any, **kwargs: Any) -> Unprofiled:
        recorder.assume("a profiler", "sees nothing")
        return Unprofiled()

    with (
        patch.object(torch.profiler, "profile", profile),
        patch.object(torch.profiler, "_KinetoProfile", profile),
        patch.object(old, "profile", profile),
        patch.object(old, "emit_nvtx", profile),
    ):
        yield


@around(source=file("torch/cuda/graphs.py", read="2.15.0"))
@contextmanager
def no_graphs(recorder: Any) -> Iterator[None]:
    """A CUDA graph runs at once, in the memory of all: what its own pool would keep is not
    counted."""

    class Graph:
        """Stands in for `torch.cuda.CUDAGraph`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            recorder.assume("a CUDA graph: its memory is not kept apart", "run at once")

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    @contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    def callables(functions: Any, *args: Any, **kwargs: Any) -> Any:
        Graph()
        return functions

    @contextmanager
    def pool(*args: Any, **kwargs: Any) -> Iterator[None]:
        recorder.assume("a MemPool: its memory is not kept apart", "the memory of all")
        yield

    with contextlib.ExitStack() as stack:
        for name, what in (
            ("CUDAGraph", Graph),
            ("graph", graph),
            ("make_graphed_callables", callables),
            ("graph_pool_handle", lambda: (0, 0)),
            ("MemPool", _Pool),
            ("use_mem_pool", pool),
        ):
            if hasattr(torch.cuda, name):
                stack.enter_context(patch.object(torch.cuda, name, what))
        yield


@around(source=(file("torch/jit/_trace.py", "trace", read="2.15.0"),))
@contextmanager
def not_traced(recorder: Any) -> Iterator[None]:
    """`torch.jit.trace` returns what it is given, after a run: its values are no numbers, which
    fake tensors need."""

    def traced(function: Any, example_inputs: Any = None, *args: Any, **options: Any) -> Any:
        recorder.note("torch.jit.trace: run as it is written", "eager")
        if example_inputs is None:
            function(**options.get("example_kwarg_inputs") or {})
        elif isinstance(example_inputs, (list, tuple)):
            function(*example_inputs)
        else:
            function(example_inputs)
        return function

    def save(self: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """What a traced module has."""
        torch.save(self.state_dict(), file)

    with (
        patch.object(torch.jit, "trace", traced),
        patch.object(torch.nn.Module, "save", save, create=True),
    ):
        yield


@around(source=file("torch/utils/tensorboard/_pytorch_graph.py", "graph", read="2.15.0"))
@contextmanager
def graphs_of_tensorboard(recorder: Any) -> Iterator[None]:
    """`SummaryWriter.add_graph` draws what `torch.jit.trace` has found: the model runs, in
    evaluation, and the picture is empty."""

    def graph(model: Any, args: Any, verbose: bool = False, strict: bool = True) -> Any:
        training = model.training
        model.eval()
        try:
            torch.jit.trace(model, args, strict=strict)
        finally:
            model.train(training)
        protocols = f"{of_tensorboard}.proto."
        config, graphs = (import_module(protocols + one) for one in ("config_pb2", "graph_pb2"))
        return graphs.GraphDef(), config.RunMetadata()

    of_tensorboard = "tensorboard.compat"

    def replace(module: Any) -> None:
        stack.enter_context(patch.object(module, "graph", graph))

    with contextlib.ExitStack() as stack:
        stack.enter_context(Arrivals(["torch.utils.tensorboard.writer"], replace))
        yield


@around(source=file("torch/utils/data/dataloader.py", read="2.15.0"))
@contextmanager
def no_workers(recorder: Any) -> Iterator[None]:
    """A `DataLoader` loads in this process: others would not know fake tensors."""
    from torch.utils.data import DataLoader

    build = DataLoader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > 5:
            args = (*args[:5], 0, *args[6:])
        elif kwargs.get("num_workers"):
            kwargs["num_workers"] = 0
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            kwargs.pop(name, None)
        build(self, *args, **kwargs)

    with patch.object(DataLoader, "__init__", init):
        yield


@around(source=file("torch/random.py", read="2.15.0"))
@contextmanager
def generators(recorder: Any) -> Iterator[None]:
    """A generator of random numbers on the device is one of the host: no numbers are drawn."""

    class Generator(torch._C.Generator):  # type: ignore[misc]
        """One that says that it is on the device."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls, "cpu")
            made._device = torch.device(device)
            return made

        @property
        def device(self) -> Any:
            """Where it was asked to be."""
            return self._device

    with patch.object(torch, "Generator", Generator):
        yield


def _numpy_of(real: Any) -> Any:
    """The array of a tensor that has values."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return real.detach().numpy()


def _array(recorder: Any, tensor: Any) -> Any:
    """What is known of a tensor on the host, or zeros."""
    if tensor.fake_device.type == "cuda":
        raise TypeError(
            f"can't convert {tensor.fake_device} device type tensor to numpy. Use Tensor.cpu() "
            "to copy the tensor to host memory first."
        )
    import numpy as np

    real = recorder.known.array(tensor)
    if real is not None:
        return _numpy_of(real)
    dtype = getattr(np, str(tensor.dtype).removeprefix("torch."), np.float32)
    numbers = recorder.known.numbers(tensor)
    if numbers is not None:
        return np.array(numbers, dtype).reshape(tuple(tensor.shape))
    recorder.assume(".numpy()", "zeros")
    return np.zeros(tuple(tensor.shape), dtype)


class MadeUp(list[Any]):
    """Numbers that stand for those of a tensor that has none."""


@around(source=TENSOR, seen=SEEN)
@contextmanager
def values(recorder: Any) -> Iterator[None]:
    """What becomes an array is zeros, or what is known; a list has what `.item()` answers."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    def numpy(build: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, FakeTensor):
                return _array(recorder, self.cpu() if kwargs.get("force") else self)
            with _disable_current_modes():  # under which it would have no memory
                return build(self, *args, **kwargs)

        return call

    def tolist(self: Any) -> Any:
        if not self.shape:
            return self.item()
        if self.constant is not None:
            return self.constant.tolist()
        numbers = recorder.known.numbers(self)
        if numbers is not None:
            return numbers
        import numpy as np

        kind, value = (float, 1.0) if self.dtype.is_floating_point else (int, 1)
        if self.dtype == torch.bool:
            kind, value = bool, False
        recorder.assume(".tolist()", value)
        return MadeUp(np.full(tuple(self.shape), value, kind).tolist())

    def split(self: Any, split_size: Any, dim: int = 0) -> Any:
        """As a router splits the tokens for its experts, by how many each of them has."""
        whole = self.shape[dim]
        if isinstance(split_size, MadeUp) and sum(split_size) != whole:
            split_size = even_parts(whole, len(split_size))
            recorder.assume("split: even parts, each at most", max(split_size))
        return of_tensor(self, split_size, dim)

    of_tensor = torch.Tensor.split

    of_real = torch.UntypedStorage.data_ptr

    def place(self: Any) -> int:
        """A number that tells a storage from others: programs ask which tensors share one. A
        tensor's own address is 0, which programs that would read there take for no memory."""
        if self.device.type != "meta":
            return int(of_real(self))
        return int(self._cdata) | NOWHERE if self.nbytes() else 0

    def formatted(self: Any, spec: str) -> str:
        """As `f"{loss:.3f}"` of a real tensor."""
        return format(self.item() if not self.shape else repr(self), spec)

    with contextlib.ExitStack() as stack:
        for name in ("numpy", "__array__"):
            wrapped = numpy(getattr(torch.Tensor, name))
            stack.enter_context(patch.object(torch.Tensor, name, wrapped))
        stack.enter_context(patch.object(FakeTensor, "tolist", tolist))
        stack.enter_context(patch.object(torch.Tensor, "split", split))
        stack.enter_context(patch.object(torch.UntypedStorage, "data_ptr", place))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", lambda self: 0))
        stack.enter_context(patch.object(FakeTensor, "share_memory_", lambda self: self))
        stack.enter_context(patch.object(FakeTensor, "__format__", formatted))
        yield


@around(seen=SEEN)
@contextmanager
def one_of_what_is_selected(recorder: Any) -> Iterator[None]:
    """Where a program reads one number of what a mask selects, as schedulers of diffusion models do
    (`(steps == now).nonzero().item()`), it is one there, though here it may be all."""
    from torch._subclasses.fake_tensor import FakeTensor

    def one_of(build: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any) -> Any:
            if self.numel() > 1 and recorder.known.is_selected(self):
                recorder.assume("a number that a mask selects: the first", int(self.numel()))
                self = self.flatten()[0]
            return build(self)

        return read

    with contextlib.ExitStack() as stack:
        for name in ("item", "__int__", "__float__", "__index__"):
            wrapped = one_of(getattr(torch.Tensor, name))
            stack.enter_context(patch.object(FakeTensor, name, wrapped))
        yield
