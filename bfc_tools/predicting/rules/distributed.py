"""Several processes: the memory of one of them, over a process group that sends nothing.

From torch/distributed/device_mesh.py (which computes with ranks), torch/nn/parallel/distributed.py
(which compares shapes between processes), torch/distributed/utils.py and
torch/multiprocessing/spawn.py.

The program itself makes the group: `torch.distributed.init_process_group("fake", ...)`. NCCL's own
buffers are not counted.
"""

from __future__ import annotations

import _thread
import collections
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting import letters, ordinal
from bfc_tools.predicting.arrivals import Arrivals
from bfc_tools.predicting.kinds import BUCKETS
from bfc_tools.predicting.rules.interface import Call
from bfc_tools.predicting.rules.operators import answer, around, file
from bfc_tools.predicting.rules.tensors import operator

#: Tensors of so many whole numbers say what is sent next; larger ones are data.
FEW = 1024

OPS = file("torch/csrc/distributed/c10d/Ops.cpp", read="2.6.0")


def unboxed(group: Any) -> Any:
    """The process group of a script object, as operators are given it."""
    return torch._C._distributed_c10d.ProcessGroup.unbox(group)


@answer(
    "c10d::allreduce_",
    "c10d::reduce_",
    "c10d::allreduce_coalesced_",
    source=OPS,
)
def kept(call: Call, run: Callable[[], Any]) -> Any:
    """A sum of one process is itself."""
    if unboxed(call.args[1]).size() > 1:
        return run()
    with _recorder(call).known.unchanged():
        return run()


@answer("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_", source=OPS)
def copied(call: Call, run: Callable[[], Any]) -> Any:
    """What a process alone gets is what it has sent; of several, as if each had the same."""
    into, sent, script_object = call.args[:3]
    group, recorder = unboxed(script_object), _recorder(call)
    with recorder.known.unchanged():
        found = run()
    if group.size() == 1:
        recorder.known.learn("copy_", (into, sent), {}, into)
    else:
        recorder.known.forget(into)
        _note_alike(call, into, sent, group)
    return found


@answer(
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::all_to_all_single",
    source=file("torch/csrc/distributed/c10d/Functional.cpp", read="2.6.0"),
)
def returned(call: Call, run: Callable[[], Any]) -> Any:
    """What comes from several processes, as if each had the same."""
    with _recorder(call).known.unchanged():
        found = run()
    group = torch.distributed.distributed_c10d._resolve_process_group(call.args[-1])
    _note_alike(call, found, call.args[0], group)
    return found


def _recorder(call: Call) -> Any:
    return call.recording


def _note_alike(call: Call, into: Any, sent: Any, group: Any) -> None:
    """Notes the few whole numbers that say what is sent next: how many tokens each expert has."""
    numbers = call.numbers_of(sent) if is_small(sent) and sent.dim() == 1 else None
    if numbers is None or into.numel() % group.size() or not is_small(into):
        return
    if "gather" in operator(call):
        numbers = numbers * group.size()
    elif "all" in operator(call) and into.numel() == len(numbers):
        each = len(numbers) // group.size()
        numbers = numbers[group.rank() * each :][:each] * group.size()
    else:
        return
    _recorder(call).known.note_numbers(into, numbers)


def is_small(tensor: Any, few: int = FEW) -> bool:
    """Whether a tensor has so many whole numbers at most, and its storage no others."""
    whole: bool = not tensor.is_floating_point() and not tensor.is_complex()
    if not (whole and 0 < int(tensor.numel()) <= few):
        return False
    held, seen = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
    return int(held) == int(seen)


@answer(
    "_c10d_functional::wait_tensor",
    source=file("torch/csrc/distributed/c10d/Functional.cpp", read="2.6.0"),
)
def waited(call: Call, run: Callable[[], Any]) -> Any:
    """Who waits for a tensor gets that tensor."""
    return call.args[0]


@around(
    source=(
        file("torch/distributed/device_mesh.py", read="2.15.0"),
        file("torch/nn/parallel/distributed.py", read="2.15.0"),
        file("torch/distributed/utils.py", read="2.15.0"),
        file("torch/distributed/distributed_c10d.py", read="2.15.0"),
    )
)
@contextmanager
def one_of_many(recorder: Any) -> Iterator[None]:
    """While a prediction runs, process groups send nothing, and ranks are real numbers."""
    import torch.distributed as distributed

    if not distributed.is_available():
        yield
        return
    import torch.distributed.device_mesh as meshes
    import torch.nn.parallel.comm as comm
    import torch.nn.parallel.distributed as parallel

    with ExitStack() as stack:
        replace = functools.partial(_replace, stack)
        replace(meshes.DeviceMesh, "__init__", _real(_with_ranks(meshes.DeviceMesh.__init__)))
        for name in ("__getitem__", "_flatten", "get_local_rank", "get_coordinate"):
            if name in vars(meshes.DeviceMesh):
                replace(meshes.DeviceMesh, name, _real(getattr(meshes.DeviceMesh, name)))
        replace(meshes, "init_device_mesh", _real(meshes.init_device_mesh))
        replace(distributed, "init_device_mesh", _real(distributed.init_device_mesh))
        wrapper = parallel.DistributedDataParallel
        replace(wrapper, "__init__", _with_hook(recorder, wrapper))
        replace(wrapper, "register_comm_hook", lambda self, state, hook: None)
        replace(wrapper, "_set_static_graph", lambda self: None)  # which asks for what is used
        verify = distributed._verify_params_across_processes
        replace(distributed, "_verify_params_across_processes", _verified(verify))
        # its clock is events of the device, where the build knows them
        replace(distributed.Reducer, "prepare_for_forward", lambda self: None)
        replace(distributed.Reducer, "_rebuild_buckets", _rebuilt(recorder, distributed.Reducer))
        replace(comm, "scatter", _scattered)
        replace(distributed, "_broadcast_coalesced", _broadcast_coalesced)
        new_group = _of_no_backend(distributed.new_group)
        for module in (distributed, distributed.distributed_c10d):
            replace(module, "new_group", new_group)
            for name, function in OBJECTS.items():
                replace(module, name, function)
        begin = _group(distributed.init_process_group, recorder, replace)
        for module in (distributed, distributed.distributed_c10d, meshes):  # a mesh makes one, too
            replace(module, "init_process_group", begin)
        yield


@around(source=file("torch/multiprocessing/spawn.py", read="2.15.0"))
@contextmanager
def first_process(recorder: Any) -> Iterator[None]:
    """`torch.multiprocessing.spawn` runs what one process would run, in this one: a new one would
    not know of the prediction. It is the first, or that of LOCAL_RANK."""
    import torch.multiprocessing as multiprocessing

    def run(
        fn: Callable[..., object],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        *others: Any,
        **kw: Any,
    ) -> Any:
        if letters.here.world and nprocs != ordinal.count():
            raise ValueError(_another_world(nprocs))
        rank = ordinal.number() if ordinal.number() < nprocs else 0
        which = "the first" if rank == 0 else f"number {rank}"
        recorder.assume(f"{nprocs} processes: {which} of them, in this one", f"rank {rank}")
        fn(rank, *args)
        join = others[0] if others else kw.get("join", True)
        return None if join else _Joined()

    with ExitStack() as stack:
        for name in ("spawn", "start_processes"):
            stack.enter_context(patch.object(multiprocessing, name, run))
        yield


@around(seen="programs that start processes, in the tests")
@contextmanager
def processes_of_its_own(recorder: Any) -> Iterator[None]:
    """A process that the program starts itself has no GPU. Where it fails, that is said at once:
    the program may wait for it."""
    from multiprocessing.process import BaseProcess

    start = BaseProcess.start

    def followed(self: Any) -> None:
        start(self)
        # no thread of the program, which would be under the prediction
        _thread.start_new_thread(_tell_of_failure, (self.name, self.pid))

    with patch.object(BaseProcess, "start", followed):
        yield


def _tell_of_failure(name: str, pid: int) -> None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except (AttributeError, ChildProcessError):  # Windows; of another process, or already over
        return
    if ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status:
        print(
            f"bfc: {name}, which the program has started, failed. A prediction does not follow "
            "such processes, and they have no GPU: if the program waits for this one, end it, and "
            "let it call for rank 0 what the process was to run",
            file=sys.stderr,
            flush=True,
        )


class _Joined:
    """As the context that `spawn` returns: its process has ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *args: Any, **kwargs: Any) -> bool:
        """All have ended."""
        return True

    def pids(self) -> list[int]:
        """None is left."""
        return []


@around(
    source=(
        file("torch/distributed/checkpoint/state_dict_saver.py", read="2.15.0"),
        file("torch/distributed/checkpoint/_state_dict_stager.py", read="2.15.0"),
    )
)
@contextmanager
def checkpoints(recorder: Any) -> Iterator[None]:
    """What is saved in the background is saved at once: its copy is in host memory, which is not
    counted. From torch/distributed/checkpoint/state_dict_saver.py and _state_dict_stager.py, which
    copies what a tensor is made of."""

    def replace(module: Any) -> None:
        import torch.distributed.checkpoint.state_dict_saver as saver

        build, kept = saver.save, ("checkpoint_id", "storage_writer", "planner", "no_dist")

        def async_save(state_dict: Any, **options: Any) -> Any:
            given = {key: value for key, value in options.items() if key in kept}
            made = build(state_dict, process_group=options.get("process_group"), **given)
            if options.get("async_stager") is None:
                return _done(made)
            return saver.AsyncSaveResponse(_done(None), _done(made))

        for holder in (module, saver):
            stack.enter_context(patch.object(holder, "async_save", async_save))

    with ExitStack() as stack:
        stack.enter_context(Arrivals(["torch.distributed.checkpoint"], replace))
        yield


SHARDS = "torch.distributed.fsdp._fully_shard._fsdp_param"


@around(source=file("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", read="2.15.0"))
@contextmanager
def shards_padded_once(recorder: Any) -> Iterator[None]:
    """`fully_shard` pads a shard that is smaller than the others', and not again before the first
    forward pass, where it asks for the very type of a tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    def kind(value: Any) -> type:
        return torch.Tensor if isinstance(value, FakeTensor) else type(value)

    with ExitStack() as stack:
        stack.enter_context(
            Arrivals(
                [SHARDS],
                lambda module: stack.enter_context(patch.object(module, "type", kind, create=True)),
            )
        )
        yield


def _done(value: Any) -> Any:
    from concurrent.futures import Future

    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _replace(stack: ExitStack, holder: Any, name: str, what: Any) -> None:
    if hasattr(holder, name):
        stack.enter_context(patch.object(holder, name, what))


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes with real tensors: with ranks, not with data."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _with_ranks(build: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of a mesh, given ranks in their order where it is given fake ones."""

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *map(_ranks, args), **{name: _ranks(one) for name, one in kwargs.items()})
        letters.here.meshes.append(tuple(self.shape))

    return init


def _ranks(value: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, FakeTensor):
        return value
    return torch.arange(value.numel(), dtype=value.dtype, device="cpu").view(tuple(value.shape))


def _with_hook(recorder: Any, wrapper: Any) -> Callable[..., Any]:
    """The constructor of `DistributedDataParallel`; its buckets come back as they were sent."""
    build, register = wrapper.__init__, wrapper.register_comm_hook

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make = _that_asks_nothing(torch.distributed.Reducer)
        with _made_as_buckets(recorder), patch.object(torch.distributed, "Reducer", make):
            build(self, *args, **kwargs)
        if kwargs.get("static_graph"):
            _STATIC.add(self.reducer)
        elif self.find_unused_parameters:
            _STAY.add(self.reducer)
        _returned.__annotations__.clear()  # they are compared with types of torch.distributed
        register(self, None, _returned)

    return init


def _that_asks_nothing(build: Any) -> Callable[..., Any]:
    """What makes a reducer that does not ask the device which parameters are used: what that takes
    is a number for each of them."""

    def make(*args: Any) -> Any:
        return build(*args[:6], False, *args[7:])

    return make


@contextmanager
def _made_as_buckets(recorder: Any) -> Iterator[None]:
    """What is made in a block, and stays, are buckets."""
    before = len(recorder.memory.history.kinds)
    yield
    for allocation in list(recorder.live.values()):
        if allocation.number >= before:
            recorder.memory.know(allocation, BUCKETS, 0)


#: Reducers whose buckets stay as they were made.
_STAY: weakref.WeakSet[Any] = weakref.WeakSet()
#: Reducers that would learn in the first backward pass which parameters are used: here they do not.
_STATIC: weakref.WeakSet[Any] = weakref.WeakSet()


def _rebuilt(recorder: Any, reducer: Any) -> Callable[[Any], bool]:
    """What makes buckets anew after the first backward pass, by the order of its gradients."""
    build = reducer._rebuild_buckets

    def rebuild(self: Any) -> bool:
        from bfc_tools.predicting.host_numbers import HostNumbers

        if self in _STAY:
            return False
        try:
            with _made_as_buckets(recorder), HostNumbers(0):
                return bool(build(self))
        except RuntimeError:  # some gradients never came
            if self not in _STATIC:
                raise
            return False

    return rebuild


def _verified(verify: Callable[..., Any]) -> Callable[..., None]:
    """Processes compare how many parameters they have, and of which shapes."""

    def run(group: Any, parameters: Any, *args: Any) -> None:
        from bfc_tools.predicting.host_numbers import HostNumbers

        with HostNumbers(len(parameters)):
            verify(group, parameters, *args)

    return run


# Objects are sent as tensors of bytes, which have no values: each process has what this one has.


def _all_gather_object(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any
) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


OBJECTS: dict[str, Callable[..., None]] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": _nothing,
    "monitored_barrier": _nothing,  # which only gloo has
}


def _of_no_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    """`new_group`, whose group sends nothing: the store of the first one knows of no other."""

    @functools.wraps(function)
    def call(ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        others = {name: one for name, one in kwargs.items() if name in ("group_desc",)}
        return function(ranks, **others)

    return call


def _returned(state: Any, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _broadcast_coalesced(group: Any, tensors: Any, buffer_size: int, src: int = 0) -> None:
    """Buckets of parameters lie side by side while they are sent, two at a time; each process has
    what it had. From comm.cpp, where the buckets are those of gradients."""
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [buffer_size])
    sent: collections.deque[Any] = collections.deque(maxlen=2)
    for bucket in buckets:
        if len(sent) == 2:
            sent.popleft()
        parts = [tensors[at].detach().contiguous().view(-1) for at in bucket]
        sent.append(torch.cat(parts) if len(parts) > 1 else parts[0])


def _scattered(tensor: Any, *args: Any, **kwargs: Any) -> tuple[Any]:
    """The parts of a tensor on one device, for `DataParallel`."""
    return (tensor.to("cuda"),)


def _begin(recorder: Any, replace: Callable[[Any, str, Any], None]) -> None:
    """What only a program with a process group needs, and takes a while to import."""
    import torch.distributed.tensor._sharding_prop as sharding

    # which shape a DTensor's result has is found on fake tensors that are no program's
    name, propagator = "_propagate_tensor_meta_non_cached", sharding.ShardingPropagator
    replace(propagator, name, _real(getattr(propagator, name)))
    if not recorder.installed.has_fake_collectives:
        import torch.distributed._tools.fake_collectives  # noqa: F401  # collectives of fakes


def _another_world(size: int) -> str:
    asked = letters.here.world
    return (
        f"bfc predict was asked for {asked} processes (--nproc times --nnodes), and the program "
        f"makes a group of {size}: ask for {size}, or let it take WORLD_SIZE from the environment"
    )


def _group(
    function: Callable[..., Any], recorder: Any, replace: Callable[[Any, str, Any], None]
) -> Callable[..., Any]:
    """`init_process_group`, which makes a group that sends nothing, whatever it is asked for."""

    @functools.wraps(function)
    def call(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from torch.utils._python_dispatch import _disable_current_modes

        rank = kwargs.get("rank", -1)
        size = kwargs.get("world_size", -1)
        rank = int(os.environ.get("RANK", 0)) if rank < 0 else rank
        size = int(os.environ.get("WORLD_SIZE", 1)) if size < 0 else size
        if letters.here.world not in (0, size):
            raise ValueError(_another_world(size))
        recorder.process = rank, size
        recorder.assume(f"a process group of {size} that sends nothing", f"rank {rank}")
        with _disable_current_modes():
            _begin(recorder, replace)
            return function("fake", rank=rank, world_size=size, store=FakeStore())

    return call
