"""`generate` of transformers, of whose tokens a few are run.

With a static cache each token takes the same. With a cache that grows the steps differ in a length,
and `lengths.py` plays those that are left out.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Set
from typing import Any
from unittest.mock import patch

import torch

from bfc_tools.predicting.arrivals import Arrivals
from bfc_tools.predicting.imagined import Imagined, become
from bfc_tools.predicting.lengths import (
    STEPS,
    Result,
    Step,
    Template,
    UnlikeError,
    Watching,
    results_of,
)
from bfc_tools.predicting.recorder import Recorder

#: Tokens that are made of many that need the same.
FEW_TOKENS = 4
#: So many tokens at least are left out, or all are run.
LEAST = 8
#: After so many more a token is tried, to see whether it still goes as before.
FAR = 512
#: The layers of caches that grow as is known here.
GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")
#: What looks at each token and decides nothing by it.
CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
#: What is kept of each token, if it is asked for.
KEPT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
UTILS = "transformers.generation.utils"
GROWING_TOKENS = "tokens of a growing cache (transformers)"
#: So many times a few tokens may have been left out, or none, before no more is tried.
POOR = 2


#: Whether each token is run.
_all = contextvars.ContextVar("all tokens", default=False)


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Runs each token meanwhile."""
    token = _all.set(True)
    try:
        yield
    finally:
        _all.reset(token)


@contextlib.contextmanager
def shortened(recorder: Recorder) -> Iterator[None]:
    """As many tokens as were asked for are returned, and a few of them are run."""

    def replace(module: Any) -> None:
        build: Any = getattr(module.GenerationMixin, "_sample", None)

        def sample(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            length = getattr(kwargs.get("stopping_criteria"), "max_length", None)
            missing = length - input_ids.shape[1] if isinstance(length, int) else 0
            if missing <= FEW_TOKENS or _all.get():
                return build(self, input_ids, *args, **kwargs)
            kind = _static if _is_static(kwargs) else _growing
            run = functools.partial(build, self, input_ids, *args, **kwargs)
            return kind(recorder, self, input_ids.shape[1], missing, kwargs, run)

        if build is not None:
            stack.enter_context(patch.object(module.GenerationMixin, "_sample", sample))

    with contextlib.ExitStack() as stack:
        stack.enter_context(Arrivals([UTILS], replace))
        yield


def _cache(asked: dict[str, Any]) -> Any:
    return asked.get("cache", asked.get("past_key_values"))


def _is_static(asked: dict[str, Any]) -> bool:
    """Whether a sequence is generated with a static cache, and nobody looks at each token."""
    cache, config = _cache(asked), asked.get("generation_config")
    static = getattr(cache, "layers", None) and getattr(cache, "is_compileable", False)
    watched = getattr(config, "return_dict_in_generate", True) or asked.get("streamer")
    return bool(static) and not watched and not asked.get("synced_gpus")


def _static(
    recorder: Recorder, model: Any, prompt: int, wanted: int, asked: Any, run: Callable[[], Any]
) -> Any:
    """Generates with a static cache, where each token takes the same memory."""
    goes_on, calls = model._has_unfinished_sequences, itertools.count()

    def some_are_left(*args: Any, **kwargs: Any) -> bool:
        return next(calls) < FEW_TOKENS and bool(goes_on(*args, **kwargs))

    with patch.object(model, "_has_unfinished_sequences", some_are_left):
        found = run()
    made = found.shape[1] - prompt
    if made >= wanted:
        return found
    recorder.note("tokens of a static cache (transformers)", f"{made} of {wanted} run")
    return torch.cat([found, found.new_zeros((found.shape[0], wanted - made))], 1)


def _growing(
    recorder: Recorder, model: Any, prompt: int, wanted: int, asked: Any, run: Callable[[], Any]
) -> Any:
    """Generates with a cache that grows, or with none."""
    why = _refused(recorder, model, asked)
    if why:
        recorder.note(GROWING_TOKENS, f"each is run: {why}")
        return run()
    course = _Course(recorder, model, prompt, prompt + wanted)
    with course.followed():
        found = run()
    if course.left_out:
        recorder.note(GROWING_TOKENS, f"{wanted - course.left_out} of {wanted} run")
    elif course.why:
        recorder.note(GROWING_TOKENS, f"each is run: {course.why}")
    return found


class _Course:
    """The steps of one call of `generate`, from a prompt of a length to another length.

    A generator, which is resumed where a token begins, watches steps; once some in a row are alike
    but for a length, it imagines later ones, to see how far that goes, and plays all up to there.
    To imagine a step far ahead it lets the cache take so many tokens at once.
    """

    def __init__(self, recorder: Recorder, model: Any, prompt: int, length: int) -> None:
        self.recorder, self.model, self.length = recorder, model, length
        self.watching = Watching(self._count)
        self.at = prompt  # the length where the next step begins
        self.left_out = self.poor = 0
        self.why = ""
        self.update = model._update_model_kwargs_for_generation
        self.prepare = model.prepare_inputs_for_generation
        self.kwargs: dict[str, Any] = {}
        #: By how many tokens the state of `before` grows when the next step begins; below 0: it is
        #: left as it is.
        self.grow = -1
        self.before: Any = ()
        #: What was imagined last: results by the number of the allocation.
        self.results: dict[int, Result] = {}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Meanwhile the loop of the model is followed."""
        goes_on, steps = self.model._has_unfinished_sequences, self._steps()

        def follow(*args: Any, **kwargs: Any) -> bool:
            answer = bool(goes_on(*args, **kwargs))
            next(steps, None)
            if not answer:
                self.kwargs = {}  # which the loop shall free
            return answer

        functional = torch.nn.functional
        attention = self.watching.whole(functional.scaled_dot_product_attention)
        with contextlib.ExitStack() as stack:
            for where, name, function in (
                (self.model, "_has_unfinished_sequences", follow),
                (self.model, "_update_model_kwargs_for_generation", self._update),
                (self.model, "prepare_inputs_for_generation", self._prepare),
                (functional, "scaled_dot_product_attention", attention),
            ):
                stack.enter_context(patch.object(where, name, function))
            stack.callback(steps.close)
            stack.enter_context(self.watching)
            yield

    def _count(self) -> int:
        memory: Any = self.recorder.memory
        return len(memory.events if isinstance(memory, Imagined) else memory.history)

    # -- what the loop calls --------------------------------------------------------------------

    def _update(self, outputs: Any, kwargs: Any, *args: Any, **more: Any) -> Any:
        self.kwargs = self.update(outputs, kwargs, *args, **more)
        return self.kwargs

    def _prepare(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.grow >= 0:
            calls, self.watching.calls = self.watching.calls, None
            self._become(input_ids)
            self.watching.calls = calls
            kwargs |= self.kwargs
        return self.prepare(input_ids, *args, **kwargs)

    # -- the steps ------------------------------------------------------------------------------

    def _steps(self) -> Generator[None, None, None]:
        yield  # the token that the prompt gives
        self.at += 1
        steps: list[Step] = []
        while True:
            step = yield from self._watched()
            steps = [*steps[1 - STEPS :], step]
            if len(steps) < STEPS or self.length - 1 - self.at < LEAST or self.poor > POOR:
                continue
            try:
                template = Template(self.recorder, steps)
            except (UnlikeError, RuntimeError) as error:
                self.why = str(error)
                continue
            end = template.reach(self.length - 2)
            if end >= self.at + LEAST:
                left_out = yield from self._leap(template, end)
                self.left_out += left_out
                self.poor += left_out < LEAST
                steps = []

    def _watched(self) -> Generator[None, None, Step]:
        begin = self._count()
        calls = self.watching.calls = []
        yield
        self.watching.calls = None
        self.at += 1
        return Step(self.at - 1, calls, begin, self._count())

    def _leap(self, template: Template, end: int) -> Generator[None, None, int]:
        """Plays the steps that follow a template, up to a length; returns how many."""
        start = self.at
        live = list(self.recorder.live.values())
        lasting = {made.number: made for made in live if template.has_left(made)}
        with self.recorder.imagining() as imagined:
            self.before = self._state()

            def fits(length: int) -> Generator[None, None, bool]:
                return self._try(template, imagined, length, lasting.keys())

            if not (yield from fits(start)):
                imagined.happen()
                self.before, self.at = (), start + 1
                return 0
            good, bad = start, end + 1
            ahead = [*range(start + FAR, end, FAR), end]
            while bad - good > 1:
                length = ahead.pop(0) if ahead else (good + bad) // 2
                if (yield from fits(length)):
                    good = length
                else:
                    bad, ahead = length, []
            if self.at != good + 1:
                yield from fits(good)
            left = template.play(good, lasting)
            for made in self.recorder.live.values():
                if made.number < 0:
                    become(made, left[self.results[made.number]])
            self.before, self.at = (), good + 1
        return good - start + 1

    def _try(
        self, template: Template, imagined: Imagined, length: int, lasting: Set[int]
    ) -> Generator[None, None, bool]:
        """Imagines a step of a length, and one before it: whether it makes the calls that follow
        from the template, frees nothing else of the memory, and leaves what is known."""
        start = template.length + 1
        first = max(start, length - 1)
        self.grow, self.results = first - start, {}
        for at in range(first, length + 1):
            imagined.begin()
            self.at = at
            step = yield from self._watched()
            self.results |= results_of(imagined, step.calls, length - at)
        new = {made.number for made in self.recorder.live.values() if made.number < 0}
        freed, known = imagined.freed.keys(), self.results.keys()
        return template.fits(step.calls, length) and freed <= lasting and new <= known

    # -- the state of the loop ------------------------------------------------------------------

    def _layers(self) -> list[Any]:
        cache = _cache(self.kwargs)
        cache = getattr(cache, "self_attention_cache", cache)
        return list(getattr(cache, "layers", None) or ())

    def _state(self) -> Any:
        return dict(self.kwargs), [dict(vars(one)) for one in self._layers()], self.at

    def _become(self, input_ids: Any) -> None:
        """Makes the state that of the beginning, and lets it grow by so many tokens at once."""
        more, self.grow = self.grow, -1
        kwargs, layers, at = self.before
        self.kwargs.clear()
        self.kwargs.update(kwargs)
        for layer, state in zip(self._layers(), layers, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
            if more and getattr(layer, "keys", None) is not None:
                shape = list(layer.keys.shape)
                values = list(layer.values.shape)
                shape[-2] = values[-2] = more
                layer.update(layer.keys.new_empty(shape), layer.values.new_empty(values))
        if input_ids.shape[1] != at + more:
            input_ids.resize_((input_ids.shape[0], at + more))
        if more:
            encodes = self.model.config.is_encoder_decoder
            self.update({}, self.kwargs, is_encoder_decoder=encodes, num_new_tokens=more)


def _refused(recorder: Recorder, model: Any, asked: dict[str, Any]) -> str:
    """Why each token is run, or an empty text."""
    config, cache = asked.get("generation_config"), _cache(asked)
    if recorder.memory.limited:
        return "the device runs out of memory where it would"
    if recorder.compiling.by_name:
        return "the program is compiled"
    if asked.get("synced_gpus") or asked.get("streamer"):
        return "something waits for each"
    if any(getattr(config, name, True) for name in KEPT):
        return "something is kept of each"
    if type(model)._update_model_kwargs_for_generation.__module__ != UTILS:
        return f"{type(model).__name__} has a state of its own"
    for one in asked.get("stopping_criteria") or ():
        if type(one).__name__ not in CRITERIA:
            return f"{type(one).__name__} looks at each"
    cache = getattr(cache, "self_attention_cache", cache)
    for layer in getattr(cache, "layers", None) or ():
        if type(layer).__name__ not in GROWING:
            return f"how a {type(layer).__name__} grows is not known"
    if getattr(cache, "offloading", False):
        return "the cache goes to the host"
    return "" if cache is None or hasattr(cache, "layers") else "the cache is not known"
