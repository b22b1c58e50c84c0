"""`torch.compile`, followed: the graphs that AOTAutograd makes, and the plans of Inductor.

Dynamo, which reads the program's bytecode, is left out: the function is called once for each kind
of arguments, under AOTAutograd, which sees its operators. So there is one graph where Dynamo would
break it in two, and what the function does besides is done when the graph is made, and not again.
What cannot be followed so runs as it is written, which needs more memory.

From torch/__init__.py (compile), torch/_dynamo/backends, torch/_functorch/aot_autograd.py and
torch/_higher_order_ops/wrap.py (the tags of checkpoints).
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.rules import inductor
from bfc_tools.predicting.rules.interface import on_cuda
from bfc_tools.predicting.rules.operators import around, file
from bfc_tools.predicting.rules.stand_ins import standing_in

#: Backends that make no graph of their own.
AS_WRITTEN = ("eager", "eager_noexcept", "eager_debug")
#: Whose graphs run operator by operator.
OF_AOT = ("aot_eager", "aot_eager_decomp_partition", "aot_eager_default_partitioner")
#: Errors of a function that asks for what a graph has not.
VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")
#: How many kinds of arguments are followed of one function. Dynamo recompiles as often.
MOST = 8


class NotFollowedError(Exception):
    """Why something that is compiled runs as it is written."""


@dataclass(frozen=True)
class How:
    """How something is compiled."""

    backend: str
    settings: dict[str, Any] = field(default_factory=dict)  # of Inductor
    why: str = ""  # it runs as it is written


# -- arguments and results ------------------------------------------------------------------------


class _Writer(pickle.Pickler):
    """Writes objects without their tensors, modules and functions, which it keeps apart."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Any] = []
        self.others: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        """What stands for a value that is kept apart."""
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor and not isinstance(value, (torch.nn.Module, types.FunctionType)):
            return None
        kept = self.tensors if is_tensor else self.others
        if id(value) not in self._places:
            self._places[id(value)] = len(kept)
            kept.append(value)
        return "tensor" if is_tensor else "other", self._places[id(value)]


class _Reader(pickle.Unpickler):
    """Reads them back, around other tensors."""

    def __init__(self, shape: Shape, tensors: Any) -> None:
        super().__init__(io.BytesIO(shape.text))
        self._kept = {"tensor": tensors, "other": shape.others}

    def persistent_load(self, place: Any) -> Any:
        """The value that was kept apart."""
        kind, number = place
        return self._kept[kind][number]


@dataclass(eq=False)
class Shape:
    """Objects around tensors: a tuple of arguments, a result."""

    text: bytes
    others: list[Any]

    def around(self, tensors: Any) -> Any:
        """The objects, around these tensors."""
        return _Reader(self, tensors).load()

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others."""
        return self.text, *map(id, self.others)


def shape_of(value: Any) -> tuple[Shape, list[Any]]:
    """Objects without their tensors, and these. Raises NotFollowedError."""
    written = io.BytesIO()
    writer = _Writer(written)
    try:
        writer.dump(value)
    except Exception as error:
        raise NotFollowedError(
            f"what it is given or returns cannot be taken apart: {error}"
        ) from error
    return Shape(written.getvalue(), writer.others), writer.tensors


# -- what a function holds ------------------------------------------------------------------------


def modules_of(function: Any) -> list[Any]:
    """The modules that a function may call: itself, whose method it is, in its closure, and of the
    global names in its code."""
    if isinstance(function, torch.nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        inner = [function.func, *function.args, *function.keywords.values()]
        return [one for it in inner for one in modules_of(it)]
    found = []
    owner = getattr(function, "__self__", None)
    code = getattr(function, "__code__", None)
    held = [owner, *(vars(owner).values() if hasattr(owner, "__dict__") else ())]
    if isinstance(owner, torch.nn.Module):
        held = [owner]
    held += _in_closure(function)
    if code is not None:
        held += [function.__globals__.get(name) for name in code.co_names]
    for one in held:
        if isinstance(one, torch.nn.Module):
            found.append(one)
        elif isinstance(one, types.FunctionType) and one is not function:
            found += [it for it in _in_closure(one) if isinstance(it, torch.nn.Module)]
    return list({id(one): one for one in found}.values())


def _in_closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents


class Held:
    """The parameters and buffers of modules, which become arguments of a graph."""

    def __init__(self, modules: list[Any]) -> None:
        unique = {id(one): one for module in modules for one in module.modules()}
        self.modules = list(unique.values())
        tables = [it for one in self.modules for it in (one._parameters, one._buffers)]
        tensors = {id(one): one for it in tables for one in it.values() if one is not None}
        self.tensors = list(tensors.values())

    @property
    def key(self) -> tuple[Any, ...]:
        """What else decides what modules do."""
        return tuple(one.training for one in self.modules)

    @contextlib.contextmanager
    def replaced(self, tensors: Any) -> Iterator[None]:
        """Other tensors in their places. What modules are given meanwhile is taken from them again:
        raises NotFollowedError if these are tensors."""
        new = dict(zip(map(id, self.tensors), tensors, strict=True))
        before = [
            (one, dict(vars(one)), dict(one._parameters), dict(one._buffers))
            for one in self.modules
        ]
        for module, _, *tables in before:
            for now, table in zip((module._parameters, module._buffers), tables, strict=True):
                now.update({name: new.get(id(it)) for name, it in table.items()})
        kept = ""
        try:
            yield
            kept = next((it for it in (_kept(new, *one) for one in before) if it), "")
        finally:
            for module, attributes, *tables in before:
                vars(module).clear()
                vars(module).update(attributes)
                for now, table in zip((module._parameters, module._buffers), tables, strict=True):
                    now.clear()
                    now.update(table)
        if kept:
            raise NotFollowedError(f"it keeps a tensor in {kept}")


def _kept(
    new: dict[int, Any],
    module: Any,
    attributes: dict[str, Any],
    parameters: dict[str, Any],
    buffers: dict[str, Any],
) -> str:
    """The attribute in which a module keeps a tensor that it had not; empty if there is none."""
    for name, value in vars(module).items():
        if attributes.get(name, module) is not value and _has_tensor(value):
            return f"{type(module).__name__}.{name}"
    for now, table in ((module._parameters, parameters), (module._buffers, buffers)):
        for name, value in now.items():
            if value is not new.get(id(table.get(name))):
                return f"{type(module).__name__}.{name}"
    return ""


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


# -- graphs ---------------------------------------------------------------------------------------


def _flat(call: Callable[..., Any], given: Shape, held: Held, found: list[Shape]) -> Any:
    """A module of tensors alone, as AOTAutograd wants it: what is held comes first, then those that
    are given. The shape of the result is put into a list."""
    count = len(held.tensors)

    class Flat(torch.nn.Module):  # type: ignore[misc]
        """What AOTAutograd calls."""

        def forward(self, *tensors: Any) -> Any:
            """The tensors of the result."""
            with held.replaced(tensors[:count]):
                args, kwargs = given.around(tensors[count:])
                result = call(*args, **kwargs)
                after, kept = shape_of((args, kwargs))
                if after.text != given.text or any(
                    one is not two for one, two in zip(kept, tensors[count:], strict=True)
                ):
                    raise NotFollowedError("it changes what it is given, beside its tensors")
            shape, made = shape_of(result)
            found[:] = [shape]
            return tuple(made)

    return Flat()


class Graph:
    """What a function becomes for one kind of arguments: it makes the tensors of its result.

    Parameters
    ----------
    recorder : Recorder
        What records the program.
    call : callable
        The function.
    how : How
        How it is compiled.
    given : Shape
        Its arguments, without their tensors.
    tensors : list
        These.
    modules : list
        The modules that it uses. Nothing of them is kept, nor of the tensors.
    """

    def __init__(
        self,
        recorder: Any,
        call: Callable[..., Any],
        how: How,
        given: Shape,
        tensors: list[Any],
        modules: list[Any],
    ) -> None:
        from torch._functorch import aot_autograd
        from torch.utils._python_dispatch import _disable_current_modes

        found: list[Shape] = []
        held, given = Held(modules), Shape(given.text, list(given.others))
        count = len(held.tensors)
        flat = _flat(call, given, held, found)
        static = "_try_get_metadata_from_dynamo"
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(inductor.constants_on_the_host())
            if how.backend == "inductor":
                stack.enter_context(inductor.without_a_gpu(recorder))
            if hasattr(aot_autograd, static):  # parameters live on, and cost nothing to save
                free = patch.object(aot_autograd, static, lambda *_: (None, list(range(count))))
                stack.enter_context(free)
            stack.enter_context(patch.object(recorder.compiling, "tracing", True))
            for name in ("is_compiling", "is_dynamo_compiling"):  # programs ask
                stack.enter_context(patch.object(torch.compiler, name, lambda: True))
            alike = [_like(one) for one in (*held.tensors, *tensors)]
            self._run = _backend(how)(flat, alike)
        self._result = found[0]
        for kept in (held.modules, held.tensors, given.others):
            kept.clear()

    def __call__(self, tensors: list[Any]) -> Any:
        """The result, for the tensors that modules hold, and those that are given."""
        return self._result.around(self._run(*tensors))


def _like(tensor: Any) -> Any:
    """A tensor of the same kind."""
    with tensor.fake_mode:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.fake_device
        )
    return made.requires_grad_(tensor.requires_grad)


def _backend(how: How) -> Callable[[Any, list[Any]], Callable[..., Any]]:
    """What makes a function of tensors of a module and tensors like those it is given."""
    if how.backend == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return functools.partial(compile_fx, config_patches=dict(how.settings))
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[[Any, list[Any]], Callable[..., Any]] = lookup_backend(how.backend)
    return found


# -- what is compiled -----------------------------------------------------------------------------


class Compiled:
    """Stands for a function, or the forward pass of a module, that is compiled.

    Parameters
    ----------
    recorder : Recorder
        What records the program.
    function : callable
        What is compiled; of a module, what is called with it first.
    how : How
        How it is compiled.
    module : Module, optional
        The module.
    """

    def __init__(
        self, recorder: Any, function: Callable[..., Any], how: How, module: Any = None
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._recorder, self._function, self._how = recorder, function, how
        self._module = None if module is None else weakref.ref(module)
        self._graphs: dict[Any, Graph | None] = {}
        self._torchdynamo_orig_callable = function
        named = function if module is None else type(module)
        name = getattr(named, "__qualname__", type(named).__name__)
        self._name = name.rpartition("<locals>.")[2]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """What is a method stays one."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of a module that is copied: for the copy."""
        module = self._module and memo.get(id(self._module()))
        if self._module is None or module is None:
            return self
        return Compiled(self._recorder, self._function, self._how, module)

    def __reduce__(self) -> Any:
        """What is pickled is as it was written."""
        if self._module is None:
            return self._function.__qualname__
        return types.MethodType, (self._function, self._module())

    def written(self, *args: Any, **kwargs: Any) -> Any:
        """The function, as it is written."""
        if self._module is None:
            return self._function(*args, **kwargs)
        return self._function(self._module(), *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result: of a graph, if there is one."""
        import torch._dynamo as dynamo

        recorder = self._recorder
        if recorder.compiling.tracing or dynamo.config.disable:
            return self.written(*args, **kwargs)
        try:
            graph, tensors, modules = self._graph_of(args, kwargs)
        except NotFollowedError as error:
            self._say(str(error))
            return self.written(*args, **kwargs)
        del args, kwargs
        enters = modules if self._module is None else []
        for module in enters:
            recorder.follower.enter(module, tensors)
        try:
            return graph(tensors)
        finally:
            for module in reversed(enters):
                recorder.follower.leave(module, tensors, None)

    def _graph_of(self, args: Any, kwargs: Any) -> tuple[Graph, list[Any], list[Any]]:
        """The graph for some arguments, the tensors among them, and the modules that it uses."""
        if self._how.why:
            raise NotFollowedError(self._how.why)
        given, tensors = shape_of((args, kwargs))
        owner = None if self._module is None else self._module()
        modules = modules_of(self._function) if owner is None else [owner]
        modules += [one for one in given.others if isinstance(one, torch.nn.Module)]
        held = Held(modules)
        self._check([*held.tensors, *tensors])
        key = given.key, held.key, *map(_kind, [*held.tensors, *tensors]), _state()
        graph = self._graphs.get(key)
        if graph is None:
            if key in self._graphs:
                raise NotFollowedError(self._why)
            if len(self._graphs) >= MOST:
                raise NotFollowedError(f"it was given more than {MOST} kinds of arguments")
            self._graphs[key] = None
            graph = self._graphs[key] = self._made(given, tensors, modules)
        return graph, [*held.tensors, *tensors], modules

    def _made(self, given: Shape, tensors: list[Any], modules: list[Any]) -> Graph:
        hows = [self._how]
        if self._how.backend == "inductor":
            hows.append(How("aot_eager_decomp_partition"))
        self._why = ""
        for how in hows:
            try:
                graph = Graph(self._recorder, self.written, how, given, tensors, modules)
            except Exception as error:
                self._why = self._why or _why(error)
                if isinstance(error, NotFollowedError):
                    break
                continue
            self._say(self._why, how)
            return graph
        raise NotFollowedError(self._why)

    def _check(self, tensors: list[Any]) -> None:
        """Raises NotFollowedError if AOTAutograd is not given such tensors here."""
        from torch._subclasses.fake_tensor import FakeTensor

        for one in tensors:
            if type(one) is not FakeTensor and not (
                isinstance(one, FakeTensor) and isinstance(one, torch.nn.Parameter)
            ):
                raise NotFollowedError(f"it uses a {type(one).__name__}, a tensor of its own class")
        if not any(map(on_cuda, tensors)):
            raise NotFollowedError("nothing that it uses is on the GPU")

    def _say(self, why: str, how: How | None = None) -> None:
        """Notes how it is followed; None: it is not. The worst counts of those that are alike."""
        self._recorder.compiling.note(self._name, how.backend if how else "", why)


#: How long a reason may be.
LONGEST = 160


def _why(error: BaseException) -> str:
    """Why something is not followed, of an error, in one line."""
    if isinstance(error.__cause__, NotFollowedError):
        error = error.__cause__
    said = next(iter(str(error).strip().splitlines()), "")[:LONGEST]
    if isinstance(error, NotFollowedError):
        return said
    if "data-dependent" in said or type(error).__name__ in VALUES:
        return "it asks for values of tensors"
    return f"{type(error).__name__}: {said}"


def _kind(tensor: Any) -> tuple[Any, ...]:
    """What of a tensor decides what becomes of it."""
    return (
        *(id(tensor.fake_mode), tensor.fake_device, tensor.dtype, tensor.layout, tensor.shape),
        *(tensor.stride(), tensor.requires_grad, tensor.is_leaf, tensor.storage_offset()),
    )


def _state() -> tuple[Any, ...]:
    """What else does: gradients, and autocast."""
    casts = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts


@around(
    source=(
        file("torch/__init__.py", "compile", read="2.15.0"),
        file("torch/_dynamo/backends/debugging.py", read="2.15.0"),
        file("torch/_functorch/aot_autograd.py", "aot_module_simplified", read="2.15.0"),
        file("torch/_inductor/compile_fx.py", read="2.15.0"),
    )
)
@contextlib.contextmanager
def compiling(recorder: Any) -> Iterator[None]:
    """`torch.compile` makes graphs, and the program that Inductor writes for each of them runs; its
    kernels are not compiled. What cannot be followed runs as it is written."""

    def compiled(
        model: Any = None,
        *,
        backend: Any = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        disable: bool = False,
        **others: Any,
    ) -> Any:
        if model is None:
            again = {"backend": backend, "mode": mode, "options": options, "disable": disable}
            return lambda function: compiled(function, **again)
        how = None if disable else _how(recorder, backend, mode, options)
        if isinstance(model, torch.nn.Module):
            object.__setattr__(model, "_orig_mod", model)  # how programs reach the model inside
            if how is not None:
                _compile_module(recorder, model, how)
            return model
        return model if how is None else Compiled(recorder, model, how)

    def in_place(self: Any, *args: Any, **kwargs: Any) -> None:
        compiled(self, *args, **kwargs)

    with (
        patch.object(torch, "compile", compiled),
        patch.object(torch.nn.Module, "compile", in_place),
    ):
        yield


def _how(recorder: Any, backend: Any, mode: str | None, options: Any) -> How:
    """How something is compiled."""
    name = backend if isinstance(backend, str) else getattr(backend, "compiler_name", "")
    if name == "inductor":
        settings, words = inductor.left_out(inductor.asked(mode, options))
        for one in words:
            recorder.note(one, "not followed")
        return How(name, settings)
    if name in OF_AOT:
        return How(name)
    called = name or getattr(backend, "__name__", type(backend).__name__)
    told = "runs it so" if name in AS_WRITTEN else "is not followed"
    return How("", {}, f"the backend {called} {told}")


def _compile_module(recorder: Any, model: Any, how: How) -> None:
    """Lets the forward pass of a module be compiled."""
    own = vars(model).get("forward")
    if isinstance(own, Compiled):
        return
    if own is not None:  # a package has put it there
        made = Compiled(recorder, own, how)
    else:
        made = Compiled(recorder, type(model).forward, how, model)
    object.__setattr__(model, "forward", made)


@around(
    source=(
        file("torch/utils/checkpoint.py", read="2.15.0"),
        file("torch/_higher_order_ops/wrap.py", "tag_activation_checkpoint_impl", read="2.15.0"),
    )
)
@contextlib.contextmanager
def checkpoints_in_graphs(recorder: Any) -> Iterator[None]:
    """In a graph, what a checkpoint runs is marked as what may be computed again: the partitioner
    does the rest."""
    import torch.utils.checkpoint as checkpoints

    numbers = itertools.count(1 << 20)

    def marking(build: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.compiling.tracing:
                return build(function, *args, **kwargs)
            if (
                kwargs.pop("context_fn", checkpoints.noop_context_fn)
                is not checkpoints.noop_context_fn
            ):
                raise NotFollowedError("a checkpoint chooses what it saves")
            for name in (
                "use_reentrant",
                "preserve_rng_state",
                "determinism_check",
                "debug",
                "early_stop",
            ):
                kwargs.pop(name, None)
            from torch.fx import traceback

            tags = {
                "recompute": checkpoints.CheckpointPolicy.PREFER_RECOMPUTE,
                "ac_graph_id": next(numbers),
            }
            with traceback.preserve_node_meta():
                before = dict(traceback.current_meta)
                traceback.current_meta.update(tags)
                try:
                    return function(*args, **kwargs)
                finally:
                    traceback.current_meta.clear()
                    traceback.current_meta.update(before)

        return checkpoint

    with standing_in("checkpoint", checkpoints, of=marking):
        yield
