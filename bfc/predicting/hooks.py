"""Follows the program through its modules, backward passes and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bfc.predicting.memory import Memory
from bfc.predicting.places import NONE, OPTIMIZER, Places


@contextlib.contextmanager
def followed(recorder: Any) -> Iterator[None]:
    """Installs the hooks, and removes them at the end."""
    follower = Follower(recorder)
    with contextlib.ExitStack() as stack:
        for handle in (
            register_module_forward_pre_hook(follower.enter),
            register_module_forward_hook(follower.leave, always_call=True),
            register_optimizer_step_pre_hook(follower.begin_step),
            register_optimizer_step_post_hook(follower.end_step),
        ):
            stack.callback(handle.remove)
        yield


class Follower:
    """What the hooks call."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.places: Places = recorder.places
        self.memory: Memory = recorder.memory

    def enter(self, module: Any, inputs: Any) -> None:
        self.places.enter(module)

    def leave(self, module: Any, inputs: Any, outputs: Any) -> None:
        self.places.leave()

    def begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.places.phase = OPTIMIZER

    def end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.places.phase = NONE
