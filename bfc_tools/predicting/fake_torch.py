"""What is replaced in PyTorch so that its programs run on fake tensors of a device "cuda"."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.nn.parameter as parameters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

#: Types of arguments that stand for themselves in the key of a call.
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.layout))
_to_copy = torch.ops.aten._to_copy.default
_make_subclass = torch.Tensor._make_subclass


class Mode(FakeTensorMode):  # type: ignore[misc]
    """The mode under which every tensor is fake. Several threads may be in it: whether one of them
    is inside a kernel concerns no other.

    PyTorch keeps what operators return by their arguments. To make such a key, and a tensor of what
    is kept, took almost half of the time of a prediction: both take less here.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        super().__init__(allow_non_fake_inputs=True)
        #: Called with a tensor that has become a shape, and with the one that has values.
        self.converted: Callable[[Any, Any], object] = lambda made, real: None
        build = self.fake_tensor_converter.from_real_tensor

        def convert(mode: Any, real: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs == {"make_constant": True} and _is_few_numbers(real):
                return self._constant_of(real)
            made = build(mode, real, *args, **kwargs)
            if isinstance(made, FakeTensor) and made.constant is None:
                self.converted(made, real)
            return made

        self.fake_tensor_converter.from_real_tensor = convert

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread runs a kernel for shapes."""
        return getattr(self._local, "inside", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, inside: bool) -> None:
        self._local.inside = inside

    def _cache_key(self, state: Any, func: Any, *others: Any) -> Any:
        """The key of a call. Where in their memory its tensors begin matters for views alone, and
        for those only that do not begin at a fixed distance from there. A copy to the GPU takes no
        numbers with it, nor do they matter."""
        self._local.places = _returns_views(func) and not _is_at_a_distance(func)
        device = others[-1].get("device") if func is _to_copy else None
        self._local.numbers = device is None or device.type == "cpu"
        return super()._cache_key(state, func, *others)

    def _get_output_info_for_cache_entry(self, *given: Any) -> Any:
        """What is kept of an operator's result: of a view, how far behind its tensor it begins."""
        self._local.making = True
        try:
            entry = super()._get_output_info_for_cache_entry(*given)
        finally:
            self._local.making = False
        kept = entry.metadata
        if entry.view_idx is not None and kept is not None:
            if kept.is_conj or kept.is_neg:
                raise fake_tensor._BypassDispatchCache("a view that is computed as it is read")
            kept.storage_offset -= given[3][entry.view_idx].storage_offset()
        return entry

    def _prep_args_for_hash(self, result: Any, args: Any, state: Any, hashed: Any) -> None:
        """Adds arguments to the key of a call. Of a tensor PyTorch takes what follows from its
        sizes and strides, too, and what only sparse ones have."""
        if type(args) not in (tuple, list):
            super()._prep_args_for_hash(result, args, state, hashed)
            return
        result += (type(args), len(args))
        for one in args:
            if type(one) in _PLAIN:
                result += (type(one), one)
            elif isinstance(one, FakeTensor) and self._is_plain(one):
                result += (one.dtype, one.shape, one.stride(), one.fake_device)
                if getattr(self._local, "places", True):
                    result += (one.storage_offset(),)
                result += (one.untyped_storage().nbytes(), one.requires_grad)
                result += (one.is_quantized, one.is_conj(), one.is_neg(), one.is_inference())
            elif isinstance(one, torch.UntypedStorage):  # which the key would keep alive
                raise fake_tensor._BypassDispatchCache("a storage")
            else:
                super()._prep_args_for_hash(result, (one,), state, hashed)

    def _is_plain(self, tensor: Any) -> bool:
        return (
            tensor.fake_mode is self
            and (tensor.constant is None or not getattr(self._local, "numbers", True))
            and tensor.layout is torch.strided
            and not tensor._has_symbolic_sizes_strides
        )

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, *others: Any) -> Any:
        """What an operator returns that was called so before. The last argument is what it was
        called with."""
        kept = entry.metadata
        if kept is None or entry.inplace_idx is not None or kept.is_conj or kept.is_neg:
            return super()._get_output_tensor_from_cache_entry(state, entry, *others)
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(
                kept.shape,
                kept.stride,
                dtype=kept.dtype,
                layout=kept.layout,
                device="meta",
                requires_grad=kept.requires_grad,
            )
            if entry.view_idx is not None:
                of, begin = others[-1][entry.view_idx], kept.storage_offset
                if not getattr(self._local, "making", False):
                    begin += of.storage_offset()
                made.set_(of.untyped_storage(), begin, kept.shape, kept.stride)
        return self._faked(made, kept.device)

    def view_of(self, tensor: Any, shape: Any, strides: Any, offset: int) -> Any:
        """A view of a fake tensor."""
        with torch._C._DisableTorchDispatch():
            made = torch.empty(0, dtype=tensor.dtype, device="meta")
            made.set_(tensor.untyped_storage(), offset, shape, strides)
        return self._faked(made, tensor.fake_device)

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator returns whose tensors all have values, as PyTorch finds it; None, if
        that is not so plain."""
        given = []
        for one in args:
            if isinstance(one, FakeTensor):
                if one.constant is None or one.fake_mode is not self:
                    return None
                one = one.constant
            elif type(one) in (list, tuple):
                if not all(type(each) in _PLAIN for each in one):
                    return None
            elif type(one) not in _PLAIN:
                return None
            given.append(one)
        if not all(type(one) in _PLAIN for one in kwargs.values()):
            return None
        with torch._C._DisableTorchDispatch():
            real = func(*given, **kwargs)
            if real is given[0]:
                return args[0]
            made = self.may_turn_const(real) and _is_few_numbers(real)
        return self._constant_of(real) if made else None

    def _constant_of(self, real: Any) -> Any:
        """A fake tensor of a new one that has values, which it keeps: as PyTorch makes it."""
        with torch._C._DisableTorchDispatch():
            like = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        made = self._faked(like, real.device)
        made.constant = real
        self.fake_tensor_converter.add_constant_storage_mapping(made)
        return made

    def _faked(self, made: Any, device: torch.device) -> Any:
        """A fake tensor, with the attributes of one that PyTorch makes itself."""
        attributes = self._attributes.get(device)
        if attributes is None:
            with torch._C._DisableTorchDispatch():
                attributes = dict(vars(FakeTensor(self, torch.empty(0, device="meta"), device)))
            self._attributes[device] = attributes
        fake = _make_subclass(
            FakeTensor,
            made,
            made.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(attributes)
        return fake


@functools.cache
def _returns_views(func: Any) -> bool:
    """Whether an operator may return a view of what it is given. One of a higher order may."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    named = any(one in schema.name for one in ("view", "reshape", "strided", "alias"))
    looks = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
    return named or looks or not schema.name.startswith("aten::")


#: Views that begin where their tensor does, or behind it: how far follows from its sizes and
#: strides, and from the other arguments.
_AT_A_DISTANCE = frozenset(
    f"aten::{name}"
    for name in (
        *("select", "slice", "narrow", "view", "_unsafe_view", "permute", "transpose", "t"),
        *("unsqueeze", "squeeze", "expand", "unbind", "split", "split_with_sizes", "chunk"),
        *("diagonal", "detach", "alias", "unfold"),
    )
)


@functools.cache
def _is_at_a_distance(func: Any) -> bool:
    # As numbers of another size, a view begins at another place.
    schema = getattr(func, "_schema", None)
    known = schema is not None and schema.name in _AT_A_DISTANCE
    return known and func is not torch.ops.aten.view.dtype


def _is_few_numbers(real: Any) -> bool:
    """Whether a tensor is as `torch.tensor` makes it of numbers."""
    plain = type(real) is torch.Tensor and real.layout is torch.strided
    alone = plain and real.device.type == "cpu" and not (real.requires_grad or real.is_quantized)
    return alone and real.is_contiguous() and not (real.is_conj() or real.is_neg())


#: Tensors on the host of so many numbers are computed by PyTorch, as far as those are known that
#: they are made of: lengths of sequences, and rates of layers. Of whole numbers on the GPU
#: `known_values` computes fewer.
MOST_COMPUTED = 4096
#: The fake parameters of those that have values.
_MADE = WeakTensorKeyDictionary()


def forget() -> None:
    """Drops what is kept for all predictions."""
    FakeTensorMode.cache_clear()
    _MADE.clear()
    _fake_class.cache_clear()


#: Whether this process has begun a prediction: PyTorch's engine has threads then.
engine_runs = False


class _Passed(torch.autograd.Function):  # type: ignore[misc]
    """Its gradient is that of its result: a backward pass without an operator."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class Backward:
    """The thread of PyTorch's engine that runs what is on the GPU. The first pass fails if the
    engine has counted its devices before."""

    def __init__(self, mode: Any, too_late: str) -> None:
        global engine_runs
        engine_runs = True
        with mode:  # of no numbers, which have no memory
            self._x = torch.ones(0, device="cuda", requires_grad=True)
            self._y = _Passed.apply(self._x)
            self._gradient = torch.ones(0, device="cuda")
            try:
                self.let_go()
            except RuntimeError as error:
                raise RuntimeError(too_late) from error

    def let_go(self) -> None:
        """Waits until that thread holds nothing of the passes before. It lets go of a graph some
        microseconds after `backward` has returned: what is live then would be left to chance."""
        torch.autograd.Variable._execution_engine.run_backward(
            (self._y,),
            (self._gradient,),
            True,  # keeps its graph
            False,
            (self._x,),
            allow_unreachable=False,
            accumulate_grad=False,
        )


@contextlib.contextmanager
def in_threads(*modes: Any) -> Iterator[None]:
    """The threads that the program starts are under these modes, too, the last one innermost."""
    start = threading.Thread.start

    def followed(self: Any) -> None:
        run = self.run

        def under() -> None:
            del self.run
            for mode in modes:
                torch._C._push_on_torch_dispatch_stack(mode)
            try:
                run()
            finally:
                for mode in reversed(modes):
                    torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))

        self.run = under
        start(self)

    threading.Thread.start = followed  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """(holder, name, what stands there) of all that is replaced."""
    yield torch.nn.Module, "_apply", _apply
    yield fake_tensor, "init_gpu_context", lambda device: None
    yield FakeTensorMode, "avoid_device_init", property(lambda self: True)
    yield fake_tensor, "run_fallback_kernel", _without_the_device(fake_tensor.run_fallback_kernel)
    yield fake_tensor.log, "disabled", True  # what it says is in the error that it raises
    yield fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST_COMPUTED
    yield FakeTensor, "__new__", staticmethod(_new(FakeTensor.__new__))
    yield FakeTensor, "data", property(torch.Tensor.data.__get__, _set_data)
    yield FakeTensor, "__deepcopy__", _deepcopy
    yield FakeTensor, "__reduce_ex__", _reduced
    yield FakeTensor, "as_subclass", _as_subclass
    yield torch.Tensor, "_make_subclass", staticmethod(_made_subclass(torch.Tensor._make_subclass))
    yield FakeTensorMode, "create_symbolic_nested_int", _nested_int
    for lazy in (parameters.UninitializedParameter, parameters.UninitializedBuffer):
        yield lazy, "__new__", _refuse_lazy
    dispatch = vars(FakeTensorMode)["__torch_dispatch__"]
    while hasattr(dispatch, "__wrapped__"):  # what keeps torch._dynamo out, and imports it
        dispatch = dispatch.__wrapped__
    yield FakeTensorMode, "__torch_dispatch__", dispatch


def _refuse_lazy(cls: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "a prediction cannot run lazy modules, whose parameters change what they are: give the "
        "layer its sizes, as nn.Linear instead of nn.LazyLinear does"
    )


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """As of a tensor or a parameter; PyTorch's own would copy what a fake tensor is made of."""
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user support deepcopy")
    with torch.no_grad():
        new = self.detach().clone()
    if isinstance(self, torch.nn.Parameter):
        new = torch.nn.Parameter(new, self.requires_grad)
    else:
        new.requires_grad_(self.requires_grad)
        if self.grad is not None:
            new.grad = _deepcopy(self.grad, memo)
    memo[id(self)] = new
    return new


@functools.cache
def _fake_class(cls: Any) -> Any:
    """A subclass of tensors, whose tensors are fake."""
    made = type(cls)(cls.__name__, (cls, FakeTensor), {"__module__": cls.__module__})
    function = getattr(cls.__torch_function__, "__func__", None)
    if function is not None:  # a class that dispatches has been given one that changes nothing
        made.__torch_function__ = classmethod(function)
    return made


def _as_subclass(self: Any, cls: Any) -> Any:
    """As of a real tensor, which becomes one of another class: images of torchvision are such."""
    with torch._C.DisableTorchFunctionSubclass():
        made = self.view_as(self)
    if not issubclass(FakeTensor, cls):
        made.__class__ = cls if issubclass(cls, FakeTensor) else _fake_class(cls)
    return made


def _made_subclass(build: Any) -> Any:
    def make(cls: Any, data: Any, require_grad: bool = False, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, FakeTensor):
            return build(cls, data, require_grad, *args, **kwargs)
        return _as_subclass(data.detach(), cls).requires_grad_(require_grad)

    return make


def _new(build: Any) -> Any:
    """What makes fake tensors. Libraries copy a parameter by calling its class with a tensor, and
    with what is in its dictionary: accelerate does. A parameter on a GPU has nothing there."""

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            return torch.nn.Parameter(args[0], kwargs.get("requires_grad", True))
        return build(cls, *args, **kwargs)

    return make


def _set_data(self: Any, new: Any) -> None:
    """`tensor.data = other`, which takes the device of the other."""
    torch.Tensor.data.__set__(self, new)
    if isinstance(new, FakeTensor):
        self.fake_device = new.fake_device


def _reduced(self: Any, protocol: int) -> tuple[Any, ...]:
    """What is pickled of a fake tensor: what makes one like it."""
    made = (tuple(self.shape), tuple(self.stride()), self.dtype, str(self.fake_device))
    is_parameter = isinstance(self, torch.nn.Parameter)
    return _restored, (*made, self.requires_grad and self.is_leaf, is_parameter)


def _restored(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: Any,
    device: str,
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_(requires_grad)


#: The numbers that stand for lengths of nested tensors, which no one knows.
_NUMBERS = itertools.count(1 << 20)


def _nested_int(self: Any, *, nt_tensor_id: int | None = None) -> Any:
    """The length of the rows of a nested tensor, as one of real numbers has it."""
    return torch._C._get_nested_int(next(_NUMBERS) if nt_tensor_id is None else nt_tensor_id, 1)


def _without_the_device(build: Any) -> Any:
    """What runs an operator that has no fake form on zeros, as long as they are on the host: with a
    build for CUDA it would touch a GPU."""

    def run(mode: Any, func: Any, flat_args: Any, args_spec: Any, error: Any) -> Any:
        for one in flat_args:
            device = one if isinstance(one, torch.device) else getattr(one, "fake_device", None)
            if device is not None and device.type == "cuda":
                raise error
        return build(mode, func, flat_args, args_spec, error)

    return run


def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
    """`Module._apply`, which moves a model to the device. PyTorch's own swaps subclasses of
    tensors, which fails for parameters; on a GPU it sets `param.data`, as is done here."""
    if recurse:
        for child in self.children():
            child._apply(fn)  # metrics and others override it, with arguments of their own
    for key, parameter in self._parameters.items():
        if parameter is not None:
            self._parameters[key] = _moved(parameter, fn)
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = fn(buffer)
    return self


def _moved(parameter: Any, fn: Any) -> Any:
    if not isinstance(parameter, FakeTensor):  # made of an array, or before the prediction began
        if parameter not in _MADE:  # by the same one for all modules that share it
            with torch.no_grad():
                _MADE[parameter] = torch.nn.Parameter(fn(parameter), parameter.requires_grad)
        return _MADE[parameter]
    with torch.no_grad():
        new = fn(parameter)
        gradient = None if parameter.grad is None else fn(parameter.grad)
    if "meta" in (parameter.fake_device.type, new.device.type):  # memory of no other device's kind
        return torch.nn.Parameter(new, parameter.requires_grad)
    if new is not parameter:
        parameter.data = new
    if gradient is not None and gradient is not parameter.grad:
        parameter.grad.data = gradient
    return parameter
