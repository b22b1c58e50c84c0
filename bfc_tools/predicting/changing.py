"""Changes of a program that are tried without editing it: what `bfc predict --with` and `--what-if`
make. Each does while the program runs what a line in the program would do."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from bfc_tools.predicting.changes import BY_NAME
from bfc_tools.predicting.cuda_module import replaced
from bfc_tools.predicting.places import BACKWARD, Places, layer


class Change:
    """A change while it is tried. `times` says how often it has changed something, and `reason` why
    it has not."""

    name: ClassVar[str]
    reason = ""
    #: What to write in this program, if it is another line than mostly.
    line = ""

    def __init__(self, places: Places) -> None:
        self.places, self.times = places, 0
        #: What it has changed, such as the names of modules.
        self.where: dict[str, None] = {}

    def made(self) -> contextlib.AbstractContextManager[object]:
        """Makes it inside of a block."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """What came of it, for JSON."""
        return {
            "name": self.name,
            "times": self.times,
            "where": list(self.where),
            "reason": "" if self.times else self.reason,
            "line": self.line or BY_NAME[self.name].line,
        }


@contextlib.contextmanager
def changed(names: Sequence[str], places: Places) -> Iterator[list[Change]]:
    """The changes of these names, made in a block."""
    found = [_CHANGES[name](places) for name in names]
    with contextlib.ExitStack() as stack:
        for one in found:
            stack.enter_context(one.made())
        yield found


# -- of the forward pass --------------------------------------------------------------------------


#: What models of Hugging Face say that have a switch for it.
_OWN_SWITCH = "supports_gradient_checkpointing"


class _Checkpoint(Change):
    """Modules that repeat compute their activations again in the backward pass."""

    name = "checkpoint"
    reason = "no modules repeat: no list of them has two of one class that have parts"

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        handle = register_module_forward_pre_hook(self._look_at)
        try:
            yield
        finally:
            handle.remove()

    def _look_at(self, module: Any, inputs: object) -> None:
        if module in self._seen:
            return
        parts = list(module.modules())
        for one in parts:
            self._seen.add(one)
        own = next((one for one in parts if getattr(one, _OWN_SWITCH, False)), None)
        if own is not None:  # which knows what else has to change, such as a cache
            self._switch(own)
            return
        for path, block in _repeating(module, ""):
            self.where[layer(path)] = None
            self._wrap(block)

    def _switch(self, model: Any) -> None:
        """Makes a model of Hugging Face checkpoint itself."""
        if getattr(model, "is_gradient_checkpointing", False):
            self.reason = "the model has it already"
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            self.times, self.line = self.times + 1, "model.gradient_checkpointing_enable()"

    def _wrap(self, block: Any) -> None:
        forward = block.forward

        @functools.wraps(forward)
        def again(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.times += 1
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        block.forward = again


def _repeating(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The outermost modules that repeat, with their names: of one class, in one list, and with
    parts of their own."""
    by_class: dict[type, list[tuple[str, Any]]] = {}
    if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)):
        for name, one in module.named_children():
            if next(one.children(), None) is not None:
                by_class.setdefault(type(one), []).append((f"{path}.{name}".lstrip("."), one))
    alike = [found for group in by_class.values() if len(group) > 1 for found in group]
    yield from alike
    chosen = {id(one) for _, one in alike}
    for name, one in module.named_children():
        if id(one) not in chosen:
            yield from _repeating(one, f"{path}.{name}".lstrip("."))


class _Around(Change):
    """Something around the forward pass and the loss, which ends where the backward pass begins, or
    the step of an optimizer."""

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        self._open: contextlib.ExitStack | None = None

    def around(self) -> contextlib.AbstractContextManager[object] | None:
        """What stands around it; None if the program has it already."""
        raise NotImplementedError

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        begins = register_module_forward_pre_hook(self._begin)
        ends = register_optimizer_step_pre_hook(lambda *step: self._end())
        autograd = torch.autograd
        changes = [(autograd, name, self._ending(getattr(autograd, name))) for name in _ENDS]
        try:
            with replaced(iter(changes)):
                yield
        finally:
            self._end()
            begins.remove()
            ends.remove()

    def _begin(self, module: object, inputs: object) -> None:
        if self._open is None and torch.is_grad_enabled() and self.places.phase != BACKWARD:
            context = self.around()
            if context is not None:
                self.times += 1
                self._open = contextlib.ExitStack()
                self._open.enter_context(context)

    def _end(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _ending(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._end()
            return function(*args, **kwargs)

        return call


#: What ends a forward pass.
_ENDS = ("backward", "grad")


class _Autocast(_Around):
    """Autocast to bfloat16."""

    name = "bf16"
    reason = "no forward pass makes a graph"

    def around(self) -> contextlib.AbstractContextManager[object] | None:
        if torch.is_autocast_enabled("cuda"):
            self.reason = "the program has autocast already"
            return None
        context: contextlib.AbstractContextManager[object] = torch.autocast("cuda", torch.bfloat16)
        return context


class _Offload(_Around):
    """What is saved for the backward pass lies on the host."""

    name = "offload"
    reason = "no forward pass makes a graph"

    def around(self) -> contextlib.AbstractContextManager[object] | None:
        return torch.autograd.graph.save_on_cpu()  # type: ignore[no-any-return]


class _NoGrad(Change):
    """No graphs are made."""

    name = "no_grad"
    reason = "no module was called"

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        with torch.no_grad():
            self.times = 1
            yield


# -- of the optimizer -----------------------------------------------------------------------------


class _OfOptimizers(Change):
    """Other options of optimizers."""

    def change(self, group: dict[str, Any]) -> bool:
        """Changes the options of a group. Returns whether it did."""
        raise NotImplementedError

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(self._begin)
        try:
            yield
        finally:
            handle.remove()

    def _begin(self, optimizer: Any, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            if self.change(group):
                self.times += 1
                self.where[type(optimizer).__name__] = None


class _Fused(_OfOptimizers):
    """One kernel for all parameters, and no memory beside them."""

    name = "fused"
    reason = "no optimizer takes fused=True, or each has it already"

    def change(self, group: dict[str, Any]) -> bool:
        if "fused" not in group or group["fused"]:
            return False
        group["fused"], group["foreach"] = True, False
        return True


class _ForLoop(_OfOptimizers):
    """One parameter after the other."""

    name = "for_loop"
    reason = "no optimizer takes foreach=False, or each has it already"

    def change(self, group: dict[str, Any]) -> bool:
        if "foreach" not in group or group["foreach"] is False or group.get("fused"):
            return False
        group["foreach"] = False
        return True


class _SetToNone(Change):
    """Gradients are given back, and not filled with zeros."""

    name = "set_to_none"
    reason = "zero_grad is not called"

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        owners = (Optimizer, torch.nn.Module)
        with replaced(iter([(one, "zero_grad", self._of(one.zero_grad)) for one in owners])):
            yield

    def _of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def zero_grad(this: Any, set_to_none: bool = True) -> None:
            self.times += not set_to_none
            self.reason = "gradients are set to None already"
            function(this, set_to_none=True)

        return zero_grad


class _HalfBatch(Change):
    """Half as many samples at a time, and a step of the optimizer for every two times."""

    name = "half_batch"
    reason = "no DataLoader has a batch to be halved: --largest varies the size of another batch"

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        #: By optimizer: how often the program wanted a step.
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: By the id of a data set: the batch that its loader got.
        self._halves: dict[int, int] = {}

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        changes = [
            (DataLoader, "__init__", self._halved(DataLoader.__init__)),
            (Optimizer, "__init__", self._accumulating(Optimizer.__init__)),
            (torch.nn.Module, "zero_grad", self._kept(torch.nn.Module.zero_grad)),
        ]
        with replaced(iter(changes)):
            yield

    def _halved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def begin(this: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
            is_new = self._halves.get(id(dataset)) != batch_size  # else one is made of another
            if batch_size and batch_size > 1 and is_new:
                self.times += 1
                batch_size //= 2
                self.where[f"batch_size={batch_size}"] = None
                self._halves[id(dataset)] = batch_size
            function(this, dataset, batch_size, *args, **kwargs)

        return begin

    def _accumulating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """An optimizer's `__init__`: of its steps every second is made."""

        @functools.wraps(function)
        def begin(this: Any, *args: Any, **kwargs: Any) -> None:
            function(this, *args, **kwargs)
            real = this.step

            def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                self._passes[optimizer] = self._passes.get(optimizer, 0) + 1
                return real(*args, **kwargs) if self._is_whole(optimizer) else None

            this.step = types.MethodType(step, this)
            this.zero_grad = types.MethodType(self._kept(type(this).zero_grad), this)

        return begin

    def _kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A `zero_grad` that leaves what the first half has added."""

        @functools.wraps(function)
        def zero_grad(this: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_whole(this):
                function(this, *args, **kwargs)

        return zero_grad

    def _is_whole(self, this: Any) -> bool:
        """Whether both halves of a batch were seen, by an optimizer, or by all for a module."""
        passes = self._passes.get(this, max(self._passes.values(), default=0))
        return passes % 2 == 0 or not self.times


_CHANGES: dict[str, type[Change]] = {
    one.name: one
    for one in (
        _Checkpoint,
        _Autocast,
        _Offload,
        _NoGrad,
        _Fused,
        _ForLoop,
        _SetToNone,
        _HalfBatch,
    )
}
