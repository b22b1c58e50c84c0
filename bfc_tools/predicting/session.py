"""`bfc.predict`: a block of a program, run on fake tensors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsIndex

from bfc.pytorch.rules import nearest_rules
from bfc_tools.predicting import devices, guard, ordinal, outside
from bfc_tools.predicting.changes import named
from bfc_tools.predicting.file_layer import Layer, laid_over
from bfc_tools.predicting.memory import Memory, settings_in_force
from bfc_tools.predicting.places import Places
from bfc_tools.predicting.prediction import Prediction
from bfc_tools.predicting.releases import parsed, release_of
from bfc_tools.scratch import scratch

STARTED_TOO_LATE = (
    "this process has made a backward pass already, and PyTorch counts its devices at the first "
    "one: begin the prediction before it, or in a process of its own (bfc predict script.py)"
)


@contextlib.contextmanager
def predict(
    device: SupportsIndex | str = "h100",
    *,
    cc: str | tuple[int, int] | None = None,
    sms: int | None = None,
    settings: str | None = None,
    oom: bool = False,
    real_files: bool = False,
    changes: Sequence[str] = (),
    as_torch: str | None = None,
    after_step: Callable[[int], object] | None = None,
    after_forward: Callable[[int], object] | None = None,
    progress: Callable[[Prediction], object] | None = None,
) -> Iterator[Prediction]:
    """Find how much GPU memory a block of a PyTorch program needs, without a GPU.

    Inside the block every tensor is only a shape, on the host and on the device "cuda": the
    operators compute nothing, and what they would allocate goes to PyTorch's allocator on a
    simulated device. `torch.cuda` answers as it would there.

    Parameters
    ----------
    device : int or str, optional
        A GPU by its name, such as "h100", or the bytes that it leaves to PyTorch, as "24 GiB".
    cc : str or tuple of int, optional
        The compute capability, such as "9.0". None is that of the GPU.
    sms : int, optional
        The number of multiprocessors. None is that of the GPU.
    settings : str, optional
        As in PYTORCH_CUDA_ALLOC_CONF. None is what that variable has.
    oom : bool, optional
        Whether the device runs out of memory where it would: `torch.OutOfMemoryError`. Otherwise
        the program goes on, and the peaks say how much it would have needed.
    real_files : bool, optional
        Whether what the program writes is written. Otherwise its files lie over the user's while
        the prediction runs, and are thrown away then.
    changes : sequence of str, optional
        Changes of the program that are tried without editing it, as `bfc predict --with` has them:
        "checkpoint", "bf16" and so on.
    as_torch : str, optional
        The release of PyTorch whose rules hold, such as "2.9", where it is another one than that
        which is installed: of its allocator, and of what operators take beside their results. Which
        operators are called is as the installed one has it.
    after_step : callable, optional
        Called after each step of an optimizer with the number of steps. What it raises ends the
        program.
    after_forward : callable, optional
        The same after each forward pass of a module that no other module calls, with the number of
        these passes.
    progress : callable, optional
        Called with the prediction after each thousand operators. What it raises ends the program.

    Yields
    ------
    Prediction
        What was found, up to now inside the block, and in all after it.

    Raises
    ------
    DeviceUnavailableError
        If there is no torch, or one of a version that is not known.
    ValueError
        If the GPU is not known, or a change, or `as_torch` is no release from 2.9 on.
    SettingsError
        If the settings are wrong; it names the variable that they stand in.
    RuntimeError
        If the process has made a backward pass already.

    Notes
    -----
    Begin it before the process makes its first backward pass: PyTorch counts the devices then.
    Cost: about 0.2 ms for each operator. `python -m bench.predict` measures it.

    Examples
    --------
    >>> import bfc
    >>> def peak(width):
    ...     import torch
    ...
    ...     with bfc.predict("h100") as run:
    ...         model = torch.nn.Linear(width, width, device="cuda")
    ...         model(torch.randn(64, width, device="cuda")).sum().backward()
    ...     return run.peak_reserved
    """
    gpu = devices.find(device, cc, sms)
    asked = None if as_torch is None else parsed(as_torch)
    torch = guard.supported_torch()
    settings_in_force(settings)  # before anything is done
    module = guard.load()

    from bfc.pytorch.extension import torch_version
    from bfc_tools.predicting import changing, fake_torch, generation, hooks, nvml, rules
    from bfc_tools.predicting.cuda_module import CudaModule, replaced
    from bfc_tools.predicting.recorder import Recorder

    version = torch_version(torch)
    places = Places()
    held = asked or version
    memory = Memory(gpu.usable, settings, oom, places, gpu.memory, *nearest_rules(held))
    recorder = Recorder(gpu, memory, release_of(held))
    follower, places.get_stream = hooks.Follower(recorder), module.stream
    found = Prediction(gpu, memory, recorder, asked)
    follower.after_step, follower.after_forward = after_step, after_forward
    recorder.progress = progress and (lambda: progress(found))
    with contextlib.ExitStack() as stack:
        mode = fake_torch.Mode()  # which imports torch._dynamo: before torch is changed
        recorder.fake, mode.converted = mode.from_tensor, recorder.known.stored.put_tensor
        module.install(*ordinal.begin())
        stack.callback(module.remove)
        stack.callback(fake_torch.forget)
        stack.enter_context(replaced(CudaModule(recorder, module).replacements()))
        stack.enter_context(replaced(fake_torch.replacements()))
        follower.let_go = fake_torch.Backward(mode, STARTED_TOO_LATE).let_go
        if not real_files:
            recorder.files = found.files = stack.enter_context(_kept_apart(recorder.started))
        stack.enter_context(replaced(follower.replacements()))
        stack.enter_context(hooks.followed(follower))
        found.changes = stack.enter_context(changing.changed(named(*changes), places))
        for around in (nvml.answered, generation.shortened, *rules.operators.AROUND):
            stack.enter_context(around(recorder))
        for at_the_end in (gc.collect, recorder.close, follower.mark_gradients):
            stack.callback(at_the_end)
        stack.enter_context(mode)
        stack.enter_context(recorder)
        stack.enter_context(fake_torch.in_threads(mode, recorder))
        try:
            yield found
        except BaseException as error:
            found.ended_by(error)
            raise


@contextlib.contextmanager
def _kept_apart(started: Callable[[str], object]) -> Iterator[Layer | outside.Outside]:
    """What keeps the files of the program apart: its process has it, or the block."""
    with contextlib.ExitStack() as stack:
        keeper: Layer | outside.Outside | None = outside.link
        if outside.link is None or not outside.link.apart:
            folder = stack.enter_context(scratch(outside.PREFIX))
            keeper = stack.enter_context(laid_over(folder, started))
        assert keeper is not None
        stack.callback(keeper.end)
        yield keeper
