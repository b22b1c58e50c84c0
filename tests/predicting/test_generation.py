"""Text that `generate` of transformers makes token by token, of which a few are run."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import bfc

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402  # which transformers brings

from bfc_tools.predicting import generation  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
CONFIGURATIONS = {
    "grouped": lambda: transformers.LlamaConfig(**SIZES),
    "one for each": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "windows": lambda: transformers.MistralConfig(**SIZES, sliding_window=32),
    "of positions": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=1
    ),
}
ASKED: dict[str, dict[str, Any]] = {
    "the most likely": {},
    "drawn": {"do_sample": True, "top_k": 20, "temperature": 0.7},
    "the cache, too": {"return_dict_in_generate": True},
}
PROMPT = 16


def generated(name: str, tokens: int, asked: dict[str, Any], gpu: str, whole: bool) -> Any:
    """The prediction of a program that generates tokens, and computes with them."""
    around = generation.whole() if whole else contextlib.nullcontext()
    with bfc.predict(gpu) as run, around:
        with torch.device("cuda"):
            config = CONFIGURATIONS[name]()
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        prompt = torch.randint(128, (2, PROMPT), device="cuda")
        words: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        found = model.eval().generate(prompt, **words | asked)
        made = getattr(found, "sequences", found)
        assert made.shape == (2, PROMPT + tokens)
        made = made + 1
        del found, made
    return run


def compare(name: str, tokens: int, asked: dict[str, Any], gpu: str) -> str:
    """All that happens is the same as if each token was run; returns what is told."""
    few, each = (generated(name, tokens, asked, gpu, whole) for whole in (False, True))
    assert few.trace.owners == each.trace.owners
    for column in ("op", "id", "size", "stream", "owner", "phase", "kinds"):
        one, other = (getattr(run._memory.history, column) for run in (few, each))
        assert one == other, column
    assert few.peak_reserved == each.peak_reserved
    assert few.peak_allocated == each.peak_allocated
    assert few.peak.event == each.peak.event
    assert few.peak.by_kind == each.peak.by_kind
    assert not [one for one in each.assumptions if "growing" in one["what"]]
    return str(next(one["value"] for one in few.assumptions if "growing" in one["what"]))


def test_few_tokens_are_run_for_what_all_would_take() -> None:
    """This GPU's attention takes other memory where a length is no multiple of 8."""
    assert compare("grouped", 20, {}, "a100") == "6 of 20 run"


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["h100", "a100", "rtx-4090"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("tokens", [16, 40, 64])
def test_lengths_of_all_kinds(name, tokens, gpu) -> None:
    """With windows the steps differ once one is full: some are run there again."""
    told = compare(name, tokens, {}, gpu)
    assert told == f"{11 if name == 'windows' and tokens > 24 else 6} of {tokens} run"


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("how", ASKED)
def test_what_is_asked_of_it(name, how) -> None:
    compare(name, 40, ASKED[how], "h100")


@pytest.mark.long
def test_splits_of_attention_change_with_the_length() -> None:
    """Attention is split among as many blocks as are free: what that takes jumps."""
    assert compare("grouped", 700, {}, "a100").endswith(" of 700 run")


def test_where_each_is_run_is_said() -> None:
    asked = {"output_scores": True, "return_dict_in_generate": True}
    run = generated("grouped", 6, asked, "h100", whole=False)
    told = {one["value"] for one in run.assumptions if "growing" in one["what"]}
    assert told == {"each is run: something is kept of each"}
