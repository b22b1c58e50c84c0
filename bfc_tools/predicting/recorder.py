"""Runs each operator on fake tensors, and follows the births and deaths of the storages.

It stands above PyTorch's FakeTensorMode, so that it sees what the kernels of CUDA would be called
with. It holds no tensor and no storage: each storage is watched by a weak reference, whose callback
runs when PyTorch gives the memory back.

Three things are not as on a GPU, and are put right here:

- Under `inference_mode` composite operators arrive whole, and are taken apart.
- Autograd avoids to work in place on subclasses of tensors (`isTensorSubclassLike`), where it would
  on a GPU: in `InputBuffer::accumulate` (torch/csrc/autograd/input_buffer.cpp), and in formulas of
  gradients that fill zeros (torch/csrc/autograd/FunctionsManual.cpp). The new storage takes over
  the allocation of the old one there.
- Kernels allocate memory beside their results: the rules.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from bfc.files import replacing
from bfc.pytorch.extension import torch_version
from bfc_tools.predicting import ordinal
from bfc_tools.predicting.conditions import asking
from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.imagined import Imagined, become
from bfc_tools.predicting.kinds import WORKSPACES
from bfc_tools.predicting.known_values import KnownValues, follows
from bfc_tools.predicting.memory import Allocation, Memory
from bfc_tools.predicting.outside import keep
from bfc_tools.predicting.places import users_line
from bfc_tools.predicting.releases import TorchRelease, release_of
from bfc_tools.predicting.rules.compressed import FLIPPED
from bfc_tools.predicting.rules.in_place import COPY_SLICES, FILLS_NO_ZEROS
from bfc_tools.predicting.rules.inductor import IN_INDUCTOR
from bfc_tools.predicting.rules.interface import Call, Release, Result, Workspace
from bfc_tools.predicting.rules.operators import OPERATORS, Spec, spec_of
from bfc_tools.predicting.rules.triton_kernels import body_of
from bfc_tools.predicting.rules.unknowable import unknowable

if TYPE_CHECKING:
    from bfc_tools.predicting.hooks import Follower

_aten = torch.ops.aten
_device = torch.ops.prim.device.default
_to_copy = torch.ops.aten._to_copy.default
_graph_task = torch._C._current_graph_task_id
_sequence = torch._C._autograd._get_sequence_nr
#: The most times that a value is made up at one line before the program is taken to wait for it.
MOST_ANSWERS = 20_000


def _no_fake_form(name: str, error: Exception) -> str:
    """What is said of an operator that cannot run on tensors that are only shapes."""
    if isinstance(error, DynamicOutputShapeException) and not name.startswith("aten::"):
        return (
            f"how large a result of {name} is depends on values, and a prediction has only shapes. "
            "Call it with options that give a size, or put an operator in its place that returns "
            "as much"
        )
    if name.startswith("aten::"):
        return (
            f"PyTorch does not say what {name} returns for tensors that are only shapes, so a "
            "prediction cannot run it. Leave it out of the prediction, or put an operator in its "
            "place that returns as much"
        )
    return (
        f"nobody has said what {name} returns for tensors that are only shapes; "
        f"@torch.library.register_fake({name!r}) on a function that returns such tensors does"
    )


def _write(path: Any, data: bytes) -> str:
    with replacing(path) as file:
        file.write(data)
    return str(path)


def _is_in_graph() -> bool:
    """Whether the code of a compiled graph runs the operator, which says what it does in place."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(("<eval_with_key>", IN_INDUCTOR)):
            return True
        frame = frame.f_back
    return False


def _is_view_of_result(args: Any) -> bool:
    """Whether the first argument is a view of a tensor that has a gradient to be computed."""
    first = args[0] if args else None
    base = first._base if isinstance(first, FakeTensor) else None
    return base is not None and base.requires_grad


#: Of compressed rows or columns.
LAYOUTS = frozenset(getattr(torch, f"sparse_{kind}") for kind in FLIPPED)


def _kind_of_sparse(args: Any) -> str:
    """The field of a `Spec` for the kind of sparse tensors that an operator gets, if any."""
    layouts = [one.layout for one in args if isinstance(one, FakeTensor)]
    for layout in layouts:
        if layout in LAYOUTS:
            return "compressed"
    return "sparse" if torch.sparse_coo in layouts else ""


class Operator:
    """What is known of an operator, looked up once."""

    __slots__ = (
        *("after", "answer", "before", "between", "composed", "computes", "follows"),
        *("in_place", "is_plain", "kernel", "mutates", "name", "of_numbers", "order", "spec"),
        *("targets", "unknowable", "writes"),
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name
        self.spec = spec = spec_of(schema.name, schema.overload_name)
        self.mutates: bool = schema.is_mutable
        #: Whether it may write to its arguments: collectives do, and their schemas do not say so.
        in_place = self.mutates and "looks_elsewhere" not in spec.marks
        self.writes = in_place or not self.name.startswith(("aten::", "prims::"))
        self.targets = _targets(schema) if self.mutates else None
        self.composed = _composed_by(func, spec)
        self.after, self.before, self.between = spec.after, spec.before, spec.between
        self.answer, self.kernel = spec.answer, spec.kernel
        self.order = spec.order
        in_the_open = spec.composition is not None or body_of(schema.name) is not None
        self.unknowable = None if in_the_open else unknowable(schema.name)
        self.follows = follows(schema.name)
        self.computes = _computes(func)
        rules = self.answer or self.kernel or self.composed
        #: Whether it allocates its results, and nothing else.
        self.is_plain = not (rules or self.after or self.before or self.between)
        #: Whether it makes or changes one tensor, of known numbers where it is given such.
        alone = [str(one.type) for one in schema.returns] == ["Tensor"]
        looks = "is_view" in spec.marks and not self.mutates
        self.of_numbers = alone and (self.computes or looks or _changes_numbers(func))
        #: Whether it may overwrite its first argument, where it would not for subclasses.
        overwrites = "adds_gradients" in spec.marks or "fills_zeros" in spec.marks
        self.in_place = overwrites or bool(spec.changes_in)


def _changes_numbers(func: Any) -> bool:
    """Whether an operator changes its first argument alone, and only the numbers of it."""
    schema, tags = func._schema, func.tags
    written = [at for at, one in enumerate(schema.arguments) if one.is_write]
    plain = schema.name.startswith("aten::") and schema.name.endswith("_") and written == [0]
    return plain and not {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & {*tags}


def _computes(func: Any) -> bool:
    """Whether an operator's result is new, and follows from its arguments."""
    schema = func._schema
    if schema.is_mutable or any(one.alias_info for one in schema.returns) or "empty" in schema.name:
        return False
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    return schema.name.startswith(("aten::", "prims::")) and not drawn


def _to_current_device(kwargs: Any) -> Any:
    """The arguments of a copy of given numbers. `torch.tensor(..., device="cuda")` asks for the
    first GPU where no GPU was used before (torch/csrc/utils/tensor_new.cpp)."""
    device = kwargs.get("device")
    if device is None or device.type != "cuda" or device.index != 0 or not ordinal.number():
        return kwargs
    return {**kwargs, "device": ordinal.device()}


def _targets(schema: Any) -> list[tuple[int, str]]:
    """The places and names of the arguments that an operator writes to."""
    named = enumerate(schema.arguments)
    return [(at, one.name) for at, one in named if one.alias_info and one.alias_info.is_write]


def _written(targets: list[tuple[int, str]] | None, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that were written to: any, where a schema does not say so."""
    if targets is None:
        return [*args, *kwargs.values()]
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in targets]


def _composed_by(func: Any, spec: Spec) -> Callable[..., Any] | None:
    """What computes an operator by others, or None."""

    def has(key: DispatchKey) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))

    if "whole" not in spec.marks and has(DispatchKey.CompositeImplicitAutograd):
        return func.decompose  # type: ignore[no-any-return]
    body = spec.composition or body_of(spec.name)
    if body is not None:
        return body
    if "composed" in spec.marks:
        for key in (
            DispatchKey.CompositeExplicitAutograd,
            DispatchKey.CompositeExplicitAutogradNonFunctional,
        ):
            if has(key):
                return functools.partial(func._op_dk, key)
    return None


class Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows its key and its allocation."""

    __slots__ = ("allocation", "key")
    key: int
    allocation: Allocation


class Compiling:
    """What the program compiles, by its name: how that is followed ("" for not at all), and why not
    as it is asked for."""

    def __init__(self) -> None:
        #: Whether a graph is made of what runs.
        self.tracing = False
        self.by_name: dict[str, tuple[str, str]] = {}

    def note(self, name: str, followed: str, why: str) -> None:
        """Notes how something is followed, unless one of its name is followed less."""
        before = self.by_name.get(name)
        if before is None or before[1] == "" or (followed == "" and before[0] != ""):
            self.by_name[name] = followed, why


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records what a program allocates on the device.

    Parameters
    ----------
    gpu : GPU
        The GPU.
    memory : Memory
        Where it allocates.
    release : TorchRelease
        The release of PyTorch whose rules hold.

    Attributes
    ----------
    memory : Memory
        As given.
    live : dict of int to Allocation
        What is live, by the address of PyTorch's storage.
    assumptions : dict
        Of (what, place): the value, how often, and how many events were before it.
    operators : int
        How many operators have run.
    """

    def __init__(self, gpu: GPU, memory: Memory, release: TorchRelease) -> None:
        super().__init__()
        self.gpu, self.memory, self.release = gpu, memory, release
        self.live: dict[int, Allocation] = {}
        self.assumptions: dict[tuple[str, str], list[Any]] = {}
        self.unknown: dict[str, str] = {}
        self.operators = 0
        #: The rank of the process, and how many there are.
        self.process = (0, 1)
        self.progress: Callable[[], object] | None = None
        #: Makes a fake tensor of one that has values.
        self.fake: Callable[[Any], Any] = lambda tensor: tensor
        #: While a checkpoint is read: called with an offset in it and a number of bytes, it returns
        #: a storage of them.
        self.checkpoint: Callable[[int, int], Any] | None = None
        #: What keeps the program's files apart; None: it works on the user's.
        self.files: Any = None
        #: What the function that runs adds in place, where it would not for subclasses: tensors
        #: of so many dimensions.
        self.adds_in_place: tuple[int, ...] = ()
        #: Whether there has been a sparse tensor, and a view that was changed.
        self._sparse = self._changed_view = False
        self.known = KnownValues(self.note)
        self.compiling = Compiling()
        #: What follows the modules. It is told of forward passes in which no module is called.
        self.follower: Follower | None = None
        self._known: dict[Any, Operator] = {}
        self._numbered = -1

    #: They come to `__torch_dispatch__`, which refuses them in words.
    supports_higher_order_operators = True

    @property
    def installed(self) -> TorchRelease:
        """The release whose Python runs."""
        return release_of(torch_version(torch))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else each call would go through torch._dynamo, and import it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _device:  # what C++ asks most
            tensor = args[0]
            if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
                return tensor.fake_device
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):
            return self._higher_order(func, args, kwargs)
        for one in types:
            if one is not FakeTensor and not issubclass(one, FakeTensor):
                return NotImplemented  # a DTensor, say, which calls operators on what it holds
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = Operator(func)
        kind = _kind_of_sparse(args) if self._sparse else ""
        if kind == "compressed" or (kind and "passes_sparse" not in known.spec.marks):
            return self._with_sparse(getattr(known.spec, kind), func, args, kwargs)
        if known.unknowable is not None and self._on_cuda(args):
            self.unknown.setdefault(known.name, known.unknowable)
        if known.answer is not None:
            call = self._call(func, args, kwargs)
            result = known.answer(
                call, lambda changed=args: self._run(known, func, changed, kwargs)
            )
            self._track_results(known, result)  # what the answer has made itself
            if known.computes:
                self.known.compute(func, args, kwargs, result)
            return result
        if known.composed is not None:
            with self:
                return known.composed(*args, **kwargs)
        return self._run(known, func, args, kwargs)

    def _run(self, known: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        self.operators += 1
        if kwargs.get("pin_memory"):  # how host memory is held makes no difference
            kwargs = {**kwargs, "pin_memory": False}
        if func is _to_copy and getattr(args[0], "constant", None) is not None:
            kwargs = _to_current_device(kwargs)
        if not self.operators & 1023 and self.progress is not None:
            self.progress()
        overwritten = None
        if _graph_task() != -1 or self.adds_in_place:
            overwritten = self._overwritten(known, args, kwargs)
        if torch.is_grad_enabled():
            number = _sequence()
            if number != self._numbered:
                self._numbered = number
                self.memory.places.remember(number - 1)
            if known.mutates and not self._changed_view:
                self._changed_view = _is_view_of_result(args)
        if (known.after or known.before or known.between) and self._on_cuda(args):
            result = self._with_rules(known, func, args, kwargs, overwritten)
        else:
            result = self._result(known, func, args, kwargs)
            if "is_view" in known.spec.marks and self._changed_view and _graph_task() != -1:
                result = self._of_changed_view(args[0], result)
            self._follow(known, args, kwargs, result, overwritten)
        if known.follows is not None:
            self.known.learn(known.follows, args, kwargs, result)
        elif known.writes and self.known:
            self.known.forget(_written(known.targets, args, kwargs))
        if known.computes:
            self.known.compute(func, args, kwargs, result)
        return result

    def _with_sparse(self, function: Any, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            made = NotImplemented if function is None else function(self._call(func, args, kwargs))
        if made is NotImplemented:
            raise NotImplementedError(
                f"bfc does not know what {func._schema.name} takes for sparse tensors. Give the "
                "program dense ones for the prediction: sparse=False for embeddings, or to_dense()"
            )
        return made

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that takes functions: by others, where it is computed by them, or as its
        compiled kernel, where a rule knows that."""
        name = f"higher_order::{func.name()}"
        if name not in OPERATORS:
            raise NotImplementedError(
                f"bfc does not know what {func.name()} does: it takes functions, and is made to be "
                "compiled. Give the program something else in its place"
            )
        if "composed" in OPERATORS[name].marks:
            with self:
                return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        call = self._call(func, args, kwargs)
        with self._workspaces() as held:
            with _pop_mode_temporarily() as fake_mode:
                run = func.python_key_table[FakeTensorMode]
                call.result = run(fake_mode, *args, **kwargs)
            self._track(call.result, name)
            for rule in OPERATORS[name].after:
                self._obey(rule(call), held)
        return call.result

    def _result(self, known: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator returns. One that only overwrites its arguments needs no kernel."""
        if known.kernel is not None:
            return known.kernel(self._call(func, args, kwargs))
        takes_values = "takes_values" in known.spec.marks
        if takes_values and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            args = (self.fake(args[0]), *args[1:])  # else PyTorch would move it to a real device
        if known.of_numbers and args and getattr(args[0], "constant", None) is not None:
            result = args[0].fake_mode.computed(func, args, kwargs)
            if result is not None:
                return result
        try:
            return func(*args, **kwargs)
        except (
            NotImplementedError,
            UnsupportedOperatorException,
            UnsupportedFakeTensorException,
            DataDependentOutputException,
            DynamicOutputShapeException,
        ) as error:
            if known.mutates and not func._schema.returns:
                # Frames of PyTorch's hold the error, and with it the arguments, until Python looks
                # for cycles.
                traceback.clear_frames(error.__traceback__)
                return None
            raise NotImplementedError(_no_fake_form(known.name, error)) from error

    # -- rules ----------------------------------------------------------------------------------

    def _call(self, func: Any, args: Any, kwargs: Any) -> Call:
        stream = self.memory.places.stream()
        thread = threading.get_ident()
        known = self.known
        knows = (self.assume, known.get, known.most, known.choices)
        place = (self.gpu, self.release, thread, stream)
        return Call(
            *(func, args, kwargs, None, *place, *knows, self),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            cudnn=torch.backends.cudnn.enabled,
            numbers_of=known.numbers,
            condition=known.conditions.answer,
        )

    def _with_rules(
        self, known: Operator, func: Any, args: Any, kwargs: Any, overwritten: int | None
    ) -> Any:
        call = self._call(func, args, kwargs)
        with self._workspaces() as held:
            for rule in known.before:
                self._obey(rule(call), held)
            call.result = self._result(known, func, args, kwargs)
            if known.between is not None:
                self._obey(known.between(call), held, call.result, known.name)
            self._follow(known, args, kwargs, call.result, overwritten)
            for rule in known.after:
                self._obey(rule(call), held)
        return call.result

    @contextlib.contextmanager
    def _workspaces(self) -> Iterator[dict[Workspace, Allocation]]:
        """The workspaces of one operator: what it has not freed is freed at its end."""
        held: dict[Workspace, Allocation] = {}
        try:
            yield held
        finally:
            for made in reversed(held.values()):
                self.memory.free(made)

    def _obey(
        self,
        wanted: Iterable[Workspace | Release | Result],
        held: dict[Workspace, Allocation],
        results: Any = (),
        name: str = "",
    ) -> None:
        memory = self.memory
        for one in wanted:
            if isinstance(one, Result):
                self._track(results[one.place], name)
            elif isinstance(one, Release):
                if one.workspace.nbytes > 0:
                    memory.free(held.pop(one.workspace))
            else:
                self._take(one, held)

    def _take(self, one: Workspace, held: dict[Workspace, Allocation]) -> None:
        memory = self.memory
        if one.nbytes > 0:
            if one.kept is None:
                held[one] = memory.allocate(one.nbytes, one.what, WORKSPACES)
            elif one.kept not in memory.kept:
                memory.kept[one.kept] = memory.allocate(one.nbytes, one.what, WORKSPACES)
        if one.doubt is not None:
            memory.doubt(one.doubt, held.get(one))

    def _on_cuda(self, args: Any) -> bool:
        for one in args:
            if type(one) in (list, tuple):
                if self._on_cuda(one):
                    return True
            elif isinstance(one, FakeTensor) and one.fake_device.type == "cuda":
                return True
        return False

    # -- storages -------------------------------------------------------------------------------

    def _follow(
        self, known: Operator, args: Any, kwargs: Any, result: Any, overwritten: int | None
    ) -> None:
        if overwritten is not None:
            self._take_over(overwritten, result)
        self._track_results(known, result)
        if known.mutates:
            self._track(args, known.name)
            if kwargs:
                self._track(tuple(kwargs.values()), known.name)

    def _track_results(self, known: Operator, result: Any) -> None:
        for place in known.order:
            self._track(result[place], known.name)
        self._track(result, known.name)

    def _track(self, value: Any, name: str) -> None:
        if isinstance(value, FakeTensor):
            device = value.fake_device
            if value.layout is torch.sparse_coo:
                self._sparse = True
                self._track((_aten._indices(value), _aten._values(value)), name)
                return
            if value.layout in LAYOUTS:  # its parts are counted as they are made
                self._sparse = True
                return
            if device.type == "cuda":
                ordinal.checked(device)
                if value.layout is not torch.strided:
                    self.unknown.setdefault(name, "a sparse tensor: its memory is not counted")
                    return
                self.track_storage(value.untyped_storage(), name)
        elif type(value) in (tuple, list):
            for one in value:
                self._track(one, name)

    def track_storage(self, storage: Any, name: str) -> None:
        """Notes a storage that is new, or has another size."""
        key, nbytes = storage._cdata, storage.nbytes()
        made = self.live.get(key)
        if made is None:
            if nbytes:
                made = self.memory.allocate(nbytes, name)
                if _graph_task() != -1:
                    made.made = (self._node(), name)
                self._watch(storage, key, made)
        elif made.nbytes != nbytes:
            self._resized(storage, key, made, nbytes, name)

    def resized(self, storage: Any) -> None:
        """Notes that the program itself has resized a storage, which is no operator."""
        if storage._cdata in self.live:
            self.track_storage(storage, "torch.UntypedStorage.resize_")

    def _resized(self, storage: Any, key: int, made: Allocation, nbytes: int, name: str) -> None:
        """As `resize_bytes_cuda` does: the new memory is taken before the old is given back."""
        del self.live[key]
        if nbytes:
            self._watch(storage, key, self.memory.allocate(nbytes, name))
        self.memory.free(made)

    def _watch(self, storage: Any, key: int, made: Allocation) -> None:
        watch = Watch(storage, self._died)
        watch.key, watch.allocation = key, made
        made.watch = watch
        self.live[key] = made

    def has_run(self, *names: str) -> bool:
        """Whether one of some operators has run."""
        return any(known.name in names for known in self._known.values())

    def has_run_prefix(self, prefix: str) -> bool:
        """Whether an operator has run whose name begins so."""
        return any(known.name.startswith(prefix) for known in self._known.values())

    def close(self) -> None:
        """Forgets the storages: what becomes of them is no longer recorded."""
        self.live.clear()

    def _died(self, watch: Watch) -> None:
        made = watch.allocation
        if self.live.get(watch.key) is made:
            del self.live[watch.key]
            self.memory.free(made)
        made.watch = None

    # -- work in place ----------------------------------------------------------------------------

    def _node(self) -> object:
        """What tells the running node of autograd from others, and does not keep it alive."""
        node = torch._C._current_autograd_node()
        return _graph_task(), node is not None and (node.name(), node._sequence_nr())

    def _overwritten(self, known: Operator, args: Any, kwargs: Any) -> int | None:
        """The key of the operand's storage that the operator overwrites on a GPU, or None."""
        spec = known.spec
        if not known.in_place or (self.compiling.by_name and _is_in_graph()):
            return None
        if "adds_gradients" in spec.marks and self.adds_in_place:
            return self._added_to(args)
        if _graph_task() == -1:
            return None
        if torch.is_grad_enabled() or not args or not isinstance(args[0], FakeTensor):
            return None
        old = args[0]
        storage = old.untyped_storage()
        key = storage._cdata
        found = self.live.get(key)
        made = None if found is None else found.made
        if spec.changes_in:
            node = torch._C._current_autograd_node()
            same = node is not None and node.name() in spec.changes_in
            return key if same and made is not None and made[0] == self._node() else None
        if "fills_zeros" in spec.marks:
            node = torch._C._current_autograd_node()
            if node is not None and node.name() in FILLS_NO_ZEROS:
                return None
            made_by = None if made is None else OPERATORS.get(made[1])
            of_zeros = made_by is not None and "makes_zeros" in made_by.marks
            return key if of_zeros and made[0] == self._node() else None  # type: ignore[index]
        new = args[1]
        if (
            isinstance(new, FakeTensor)
            and not kwargs
            and new.shape == old.shape
            and new.dtype == old.dtype
            and old._use_count() <= 4
            and torch._C._storage_Use_Count(key) <= 2
            and storage.nbytes() == old.numel() * old.element_size()
            and (made is None or made[0] != self._node())
        ):
            return int(key)
        return None

    def _of_changed_view(self, given: Any, gradient: Any) -> Any:
        """The gradient of a view, which is copied if the view was changed in place. What is copied
        is freed then, unless it is held elsewhere."""
        node = torch._C._current_autograd_node()
        following = () if node is None else node.next_functions
        if not following or following[0][0] is None or following[0][0].name() != COPY_SLICES:
            return gradient
        storage = gradient.untyped_storage()
        made = self.live.get(storage._cdata)
        held = given._use_count() > 5 or torch._C._storage_Use_Count(storage._cdata) > 3
        if made is None or held:
            return _aten.empty_like.default(gradient)
        copy = self.memory.allocate(made.nbytes, "aten::as_strided_backward")
        self._watch(storage, storage._cdata, copy)
        self.memory.free(made)
        return gradient

    def _added_to(self, args: Any) -> int | None:
        """The key of what `linear` adds its bias to (ATen/native/Linear.cpp), and attention its
        mask (ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math)."""
        if isinstance(args[0], FakeTensor) and len(args[1].shape) in self.adds_in_place:
            return int(args[0].untyped_storage()._cdata)
        return None

    def _take_over(self, key: int, result: Any) -> None:
        """The new storage has the allocation of the old one."""
        new = result.untyped_storage()
        made = self.live.get(key)
        if made is not None and new.nbytes() == made.nbytes:
            del self.live[key]
            self._watch(new, new._cdata, made)

    # -- files ----------------------------------------------------------------------------------

    def started(self, program: str) -> None:
        """Notes that the program has started another one, unless it is Inductor that asks."""
        if self.compiling.tracing:
            return
        self.note(f"another program ({program})", "what it writes is written")

    # -- files ----------------------------------------------------------------------------------

    def keep(self, path: Any, data: bytes) -> str:
        """Writes a file of the prediction's own, and returns its path."""
        if self.files is None:
            return _write(path, data)
        return keep(self.files, path, data)

    def is_plain(self, function: Any) -> bool:
        """Whether an operator allocates its results, and nothing else."""
        known = self._known.get(function)
        return known is not None and known.is_plain

    # -- what is only tried ---------------------------------------------------------------------

    @contextlib.contextmanager
    def imagining(self) -> Iterator[Imagined]:
        """Meanwhile what the program does is only imagined, and no module is followed. What it has
        made then, and what is still there at the end, is allocated at the end."""
        if isinstance(self.memory, Imagined):
            yield self.memory
            return
        memory, tracing = self.memory, self.compiling.tracing
        imagined = Imagined(memory)
        self.memory = imagined  # type: ignore[assignment]  # which it stands in for
        self.compiling.tracing = True
        try:
            yield imagined
        finally:
            self.memory, self.compiling.tracing = memory, tracing
            for made in list(self.live.values()):
                if made.number < 0:
                    become(made, memory.allocate(made.nbytes, "imagined"))
            for made in imagined.freed.values():
                memory.free(made)

    # -- assumptions ----------------------------------------------------------------------------

    def assume(self, what: str, value: object, element: int = 0) -> None:
        """Notes a value that was made up, with the line of the program that asks for it, and the
        place of the element that it is of: who goes through a tensor does not wait."""
        place = self.line()
        entry = self.assumptions.setdefault((what, place), [value, 0, len(self.memory.history)])
        entry[1] += 1
        if entry[1] - self.known.conditions.read_on((what, place), element) > MOST_ANSWERS:
            raise RuntimeError(
                f"{place}: the program waits for a value that a prediction does not have: it has "
                f"asked {MOST_ANSWERS} times for {what}, and was answered {value}"
            )

    def note(self, what: str, value: object) -> None:
        """Notes something else that is not as on a GPU, with the user's line that does it."""
        where = users_line(sys._getframe(1)) or self.line()
        self.assumptions.setdefault((what, where), [value, 0, len(self.memory.history)])[1] += 1

    @staticmethod
    def line() -> str:
        """The innermost line of the program, as "train.py:61"."""
        frame = asking(sys._getframe(1))
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
