"""Follows the program through its modules, backward passes and optimizers, and learns from them
what an allocation is for: parameters, gradients, optimizer state, inputs."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bfc_tools.predicting.kinds import (
    GRADIENTS,
    INPUTS,
    KV_CACHE,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
)
from bfc_tools.predicting.places import BACKWARD, FORWARD, NONE, OPTIMIZER, Places
from bfc_tools.predicting.recorder import Recorder


class Follower:
    """What the hooks call. `steps` is how many steps the optimizer has made that made the fewest,
    of those that made any; `forwards` is how many forward passes were made of modules that no other
    module calls. `after_step` and `after_forward`, if given, are called
    after each, with these numbers."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.places: Places = recorder.memory.places
        self.after_step: Callable[[int], object] | None = None
        self.after_forward: Callable[[int], object] | None = None
        #: Called after a backward pass, until which its graph may be held.
        self.let_go: Callable[[], object] = lambda: None
        self.forwards = 0
        recorder.follower = self
        #: By the id of a parameter: itself, and its module.
        self._parameters: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._named: weakref.WeakSet[Any] = weakref.WeakSet()
        #: By optimizer: the number of events after each of its steps.
        self._ends: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    @property
    def steps(self) -> int:
        return min(map(len, self._ends.values()), default=0)

    # -- modules --------------------------------------------------------------------------------

    def enter(self, module: Any, inputs: Any) -> None:
        if self.recorder.compiling.tracing:
            return
        if module not in self._named:
            self._name(module)
        places = self.places
        if not places.modules.get(threading.get_ident()):
            for one in inputs:
                self.mark(one, INPUTS, only=OTHER)
            if places.phase == NONE:
                places.phase = FORWARD
        places.enter(module)

    def leave(self, module: Any, inputs: Any, outputs: Any) -> None:
        if self.recorder.compiling.tracing:
            return
        places = self.places
        places.leave()
        outermost = not places.modules.get(threading.get_ident())
        if not outermost or places.phase == BACKWARD:  # what a checkpoint computes again
            return
        if places.phase == FORWARD and not torch.is_grad_enabled():
            places.phase = NONE
        self._mark_cache(outputs)
        self.forwards += 1
        if self.after_forward is not None:
            self.after_forward(self.forwards)

    def _mark_cache(self, outputs: Any) -> None:
        """Notes the keys and values that a model of transformers keeps for the next token; in a
        training they are activations. What holds them is called `cache` since 5.24, and who asks
        for the name before is warned."""
        if torch.is_grad_enabled() or not isinstance(outputs, dict):
            return
        cache = outputs["cache"] if "cache" in outputs else outputs.get("past_key_values")
        for layer in getattr(cache, "layers", None) or ():
            for name in ("keys", "values"):
                self.mark(getattr(layer, name, None), KV_CACHE)

    def _name(self, module: Any) -> None:
        """Names a module and all below it, by their place in the outermost one that runs."""
        for name, one in module.named_modules():
            if one not in self._named:
                self._named.add(one)
                if not name or name[0].isdigit():  # of a list of layers at the top
                    name = ".".join(filter(None, (type(module).__name__, name)))
                owner = self.places.names[one] = self.places.owner(name)
                for parameter in one._parameters.values():
                    if parameter is not None:
                        self._know(parameter, owner)
                for buffer in one._buffers.values():
                    self.mark(buffer, PARAMETERS, owner)

    def _know(self, parameter: Any, owner: int = 0) -> None:
        self.mark(parameter, PARAMETERS, owner)
        self._parameters[id(parameter)] = weakref.ref(parameter), owner

    # -- the backward pass ----------------------------------------------------------------------

    def backward(self, function: Callable[..., Any], phase_after: int | None) -> Any:
        """`torch.autograd.backward` or `torch.autograd.grad`, followed."""

        @functools.wraps(function)
        def followed(*args: Any, **kwargs: Any) -> Any:
            places = self.places
            before, outer = places.phase, (places.backward_stack, places.backward_of)
            places.phase, places.backward_stack = BACKWARD, places.stack()
            places.backward_of = threading.get_ident()
            try:
                found = function(*args, **kwargs)
                if before != BACKWARD:  # else this is the thread that holds it
                    self.let_go()
                return found
            finally:
                places.phase = before if phase_after is None or before == BACKWARD else phase_after
                places.backward_stack, places.backward_of = outer
                self.mark_gradients()

        return followed

    def mark_gradients(self) -> None:
        """Notes which allocations hold gradients of parameters, and parameters."""
        for key, (reference, owner) in list(self._parameters.items()):
            parameter = reference()
            if parameter is None:
                del self._parameters[key]
                continue
            self.mark(parameter, PARAMETERS, owner)
            if parameter.grad is not None:
                self.mark(parameter.grad, GRADIENTS, owner)

    # -- optimizers -----------------------------------------------------------------------------

    def begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.places.phase = OPTIMIZER
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if held and all(map(_is_left_behind, held)):
            raise RuntimeError(
                "the optimizer holds parameters that were made before the prediction began: make "
                "model and optimizer inside of the block, the optimizer after model.cuda()"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._parameters:
                    self._know(parameter)
                if parameter.grad is not None:
                    self.mark(parameter.grad, GRADIENTS)

    def end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.places.phase = NONE
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict):
                _, owner = self._parameters.get(id(parameter), (None, 0))
                for value in state.values():
                    self.mark(value, OPTIMIZER_STATE, owner)
        memory = self.recorder.memory
        self._ends.setdefault(optimizer, []).append(len(memory.history))
        # of several the one that comes last: a step of the program ends with it
        memory.step_ends = min(self._ends.values(), key=lambda ends: (len(ends), -ends[-1]))
        if self.after_step is not None:
            self.after_step(self.steps)

    def mark(self, value: Any, kind: int, owner: int = 0, only: int | None = None) -> None:
        """Notes what the memory of a tensor on the GPU is for, and whose it is; with `only`, if
        that is what it was taken to be for."""
        if is_traceable_wrapper_subclass(value):
            # of a DTensor, as FSDP makes them, its part; of torchao's weights numbers and scales
            for name in value.__tensor_flatten__()[0]:
                self.mark(getattr(value, name), kind, owner, only)
        elif isinstance(value, torch.Tensor):
            device = getattr(value, "fake_device", None)
            strided = value.layout is torch.strided
            if device is not None and device.type == "cuda" and strided:
                made = self.recorder.live.get(value.untyped_storage()._cdata)
                kinds = self.recorder.memory.history.kinds
                if made is not None and (only is None or kinds[made.number] == only):
                    self.recorder.memory.know(made, kind, owner)

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(module, name, what stands there) of what has no hook."""
        autograd = torch.autograd
        yield autograd, "backward", self.backward(autograd.backward, NONE)
        yield autograd, "grad", self.backward(autograd.grad, None)


def _is_left_behind(parameter: Any) -> bool:
    """Whether a parameter has values and no gradient: the model has a fake one in its place."""
    return type(parameter) is torch.nn.Parameter and parameter.grad is None


@contextlib.contextmanager
def followed(follower: Follower) -> Iterator[None]:
    """Installs the hooks, and removes them at the end."""
    with contextlib.ExitStack() as stack:
        for handle in (
            register_module_forward_pre_hook(follower.enter),
            register_module_forward_hook(follower.leave, always_call=True),
            register_optimizer_step_pre_hook(follower.begin_step),
            register_optimizer_step_post_hook(follower.end_step),
        ):
            stack.callback(handle.remove)
        yield
