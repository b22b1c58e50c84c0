"""Models by name: a configuration in place of a script."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fresh_commands import command

from bfc_tools.cli import main
from bfc_tools.models import names

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
#: The same training, as somebody writes it.
BY_HAND = """
import torch, transformers

config = transformers.AutoConfig.from_pretrained("small")
with torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(2):
    tokens = torch.randint(1024, (4, 128), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        mask = torch.ones_like(tokens)
        loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder named small with a configuration, in the working folder. Nothing is in the cache of
    Hugging Face, and who asks the network fails."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, lambda *args, **kwargs: pytest.fail(f"asks {args}"))
    # pytest's own importer knows all modules of a plugin's distribution, and runs none as a program
    finders = [one for one in sys.meta_path if type(one).__name__ != "AssertionRewritingHook"]
    monkeypatch.setattr(sys, "meta_path", finders)
    small = tmp_path / "small"
    write(small, SMALL)
    return small


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def predicted(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["predict", *words, "--json", "--no-advice"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["error"] is None
    return found


def test_a_training_by_name_needs_what_the_same_script_needs(folder, script, capsys) -> None:
    by_hand = predicted(capsys, script(BY_HAND))
    (folder.parent / "other.py").write_text("torch.cuda.memory._dump_snapshot()")  # not its own
    by_name = predicted(capsys, "hf:small", "--task", "train", "--batch", "4", "--seq", "128")
    for figure in ("peak_requested", "peak_allocated", "peak_reserved"):
        assert by_name[figure] == by_hand[figure], figure
    assert by_name["peak"]["by_kind"] == by_hand["peak"]["by_kind"]
    assert "KV cache" not in by_name["peak"]["by_kind"]
    assert by_name["stopped_after"] == "2 steps of the optimizer"


def test_the_tasks_own_arguments_change_the_training(folder, capsys) -> None:
    words = ("hf:small", "--seq=128")
    usual = predicted(capsys, *words)
    more = predicted(capsys, *words, "--batch", "16")
    assert more["peak_requested"] > usual["peak_requested"]
    half = predicted(capsys, *words, "--precision", "bf16-true")
    assert 2 * half["peak"]["by_kind"]["optimizer state"] == pytest.approx(
        usual["peak"]["by_kind"]["optimizer state"], rel=0.01
    )
    no_states = predicted(capsys, *words, "--optimizer", "sgd")
    assert "optimizer state" not in no_states["peak"]["by_kind"]
    deeper = predicted(capsys, *words, "--set", "num_hidden_layers=4")
    assert deeper["peak"]["by_kind"]["parameters"] > usual["peak"]["by_kind"]["parameters"]


def test_a_class_of_transformers_is_a_model(folder, capsys) -> None:
    """With its defaults, but for what is set. An encoder and a decoder, and an encoder, too."""
    smaller = [f"--set=num_hidden_layers={SMALL['num_hidden_layers']}", "--set=vocab_size=1024"]
    shape = ["--batch=1", "--seq=64"]
    for name, widths in {
        "GPT2Config": ["--set=n_embd=64", "--set=n_head=4"],
        "T5Config": ["--set=d_model=64"],
        "BertConfig": ["--set=hidden_size=96"],
    }.items():
        assert predicted(capsys, f"hf:{name}", *smaller, *widths, *shape)["steps"] == 2


def test_a_model_in_the_cache_is_found_by_its_name(folder, tmp_path, capsys) -> None:
    kept = tmp_path / "home" / "hub" / "models--org--model"
    write(kept / "snapshots" / "abc", SMALL)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    here = predicted(capsys, "hf:small", "--seq=64")
    assert predicted(capsys, "hf:org/model", "--seq=64")["peak_reserved"] == here["peak_reserved"]
    assert Path(names.located("org/model@abc")).parent.name == "abc"


def test_the_largest_batch_of_a_model(folder) -> None:
    words = ("hf:small", "--seq", "512", "--device", "512MiB", "--largest", "batch=1..64")
    code, said, err = command("predict", *words)
    assert code == 0, err
    assert said.startswith("The largest batch that fits on a GPU of 512.00 MiB is ")
    assert "takes it as --batch N" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hf:nowhere/model"], "hf download nowhere/model config.json"),
        (["hf:nowhere/model@v2"], "config.json --revision v2"),
        (["hf:./nothing"], "there is no folder './nothing'"),
        (["hf:"], "there is no folder ''"),
        (["hf:empty"], "empty has no config.json"),
        (["hf:adapter"], "it is an adapter: name the model"),
        (["hf:pickle"], "is not JSON"),
        (["hf:list"], "it is a list in JSON"),
        (["hf:nameless"], "does not say which model it is"),
        (["hf:unknown"], "does not know the model new_thing: a newer one may"),
        (["hf:remote"], "--trust-remote-code runs that"),
        (["hf:odd"], "transformers makes no configuration of"),
        (["hf:vision"], "makes no model that reads and writes text"),
        (["hf:NothingConfig"], "has no class NothingConfig"),
        (["hf:small", "--task", "sing"], "--task is train or serve, not sing"),
        (["hf:small", "--task"], "not nothing"),
        (["hf:small", "--batch", "0"], "--batch is 1 or more, not 0"),
        (["hf:small", "--seq", "5000"], "has positions for 4096 tokens"),
        (["hf:small", "--set", "colour=1"], "has no colour"),
        (["hf:small", "--set", "colour"], "write NAME=VALUE"),
        (["hf:small", "--bach", "8"], "exited with 2"),
    ],
)
def test_what_is_wrong_is_said(folder, tmp_path, capsys, words, said) -> None:
    write(tmp_path / "list", [])
    write(tmp_path / "nameless", {"hidden_size": 8})
    write(tmp_path / "unknown", {"model_type": "new_thing"})
    write(tmp_path / "remote", {"model_type": "new_thing", "auto_map": {"AutoConfig": "c.C"}})
    write(tmp_path / "odd", SMALL | {"num_attention_heads": 7})
    write(tmp_path / "vision", {"model_type": "vit"})
    for name in ("empty", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_bytes(b"\x80\x04")
    assert main(["predict", *words]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("bfc: ")
    assert said in last


def test_without_transformers_it_is_asked_for(folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["predict", "hf:small"]) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_a_script_may_have_the_option_task(script, capsys) -> None:
    """Only behind the name of a model it is bfc's."""
    text = "import sys, torch; print(sys.argv[1:]); torch.ones(1, device='cuda')"
    assert main(["predict", script(text), "--task", "serve"]) == 0
    assert "['--task', 'serve']" in capsys.readouterr().err


def test_the_program_is_one_that_runs_by_itself() -> None:
    """Here it has no GPU, and says so."""
    config = Path(__file__).parents[2] / "examples" / "predicting" / "llama-3.1-8b" / "config.json"
    words = ["-m", "bfc_tools.models.train", str(config), "--set", "num_hidden_layers=1"]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "CUDA" in ran.stderr


#: Every pass of a prefill, and every token, with a cache that has room for all.
EACH_TOKEN = """
import inspect, torch, transformers

config = transformers.AutoConfig.from_pretrained("small")
with torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
cache, at = transformers.StaticCache(config, max_cache_len=256), 0
takes = inspect.signature(model.forward).parameters
name = "cache" if "cache" in takes else "past_key_values"
with torch.inference_mode():
    while at < 256:
        part = 32 if at < 192 else 1
        positions = torch.arange(at, at + part, device="cuda")[None]
        tokens = torch.randint(1024, (4, part)).cuda()
        found = model(input_ids=tokens, position_ids=positions, logits_to_keep=1, **{name: cache})
        found.logits[:, -1].float().argmax(-1)
        del found
        at += part
"""
SERVE = ("hf:small", "--task", "serve", "--context", "256", "--concurrency", "4")


def test_a_few_passes_need_what_all_of_them_need(folder, script, capsys) -> None:
    each = predicted(capsys, script(EACH_TOKEN))
    few = predicted(capsys, *SERVE, "--prefill", "128", "--by", "module")
    for figure in ("peak_requested", "peak_allocated", "peak_reserved"):
        assert few[figure] == each[figure], figure
    assert few["operators"] < each["operators"] / 8
    heads, size, layers = 2, 64, 2
    cache = 2 * layers * heads * size * 2 * 256 * 4
    assert few["peak"]["by_kind"]["KV cache"] == cache
    assert each["peak"]["by_kind"]["KV cache"] == cache


def test_a_whole_prefill_needs_more(folder, capsys) -> None:
    part = predicted(capsys, *SERVE, "--prefill", "64", "--by", "module")
    whole = predicted(capsys, *SERVE, "--prefill", "0", "--by", "module")
    assert whole["peak_requested"] > part["peak_requested"]
    assert whole["peak"]["by_kind"]["KV cache"] == part["peak"]["by_kind"]["KV cache"]


def test_it_says_whether_a_model_serves_and_how_much_would(folder) -> None:
    code, out, err = command("predict", *SERVE, "--device", "64MiB", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["answer"].startswith("It serves 4 sequences of 256 tokens on a GPU of 64.00 MiB")
    assert found["parts"]["cache"] == 2 * 2 * 2 * 64 * 2 * 256 * 4
    assert sum(found["parts"].values()) == found["figures"]["peak_requested"]
    for one in found["largest"].values():
        assert one["is_proven"]
        assert one["value"] < one["first_too_large"]
    assert found["largest"]["context"]["value"] >= 256
    assert found["largest"]["concurrency"]["value"] >= 4


def test_what_does_not_serve_ends_with_one(folder) -> None:
    code, out, err = command("predict", *SERVE, "--device", "8MiB")
    assert code == 1, err
    assert out.startswith("It does not serve 4 sequences of 256 tokens on a GPU of 8.00 MiB")
    assert "None of context 256..4096:256 fits" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "0"], "--concurrency is 1 or more, not 0"),
        (["--context", "1"], "--context is 2 or more, not 1"),
        (["--prefill", "-1"], "--prefill is 0 or more, not -1"),
    ],
)
def test_what_cannot_be_served_is_said(folder, words, said) -> None:
    code, out, err = command("predict", *SERVE, *words)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_an_encoder_serves_no_tokens(folder) -> None:
    code, _, err = command(
        "predict", "hf:BertConfig", "--set=num_hidden_layers=1", "--task", "serve"
    )
    assert code == 2
    assert "has no cache of tokens" in err.splitlines()[-1]


def test_a_server_is_answered_by_arithmetic(folder, capsys) -> None:
    """Of its budget the cache gets what the weights, others and a profile run leave."""
    words = [*SERVE, "--engine", "vllm", "--device", "4GiB", "--max-num-seqs", "8"]
    assert main(["predict", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_bytes"] == 2 * 2 * 2 * 64 * 2
    parameters = predicted(capsys, *SERVE, "--by", "module")["peak"]["by_kind"]["parameters"]
    assert 0.99 < found["taken"][0]["low"] / parameters <= 1  # blocks of the allocator are whole
    assert found["tokens"][0] < found["tokens"][1]
    assert found["available"][1] == int(0.9 * (4 << 30)) - sum(one["low"] for one in found["taken"])
    assert main(["predict", *words, "--engine", "sglang", "--kv-cache-dtype", "fp8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("SGLang serves 4 sequences of 256 tokens at a time: it has room for ")
    assert "512 bytes a token" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "0"], "--concurrency is 1 or more, not 0"),
        (["--gpu-memory-utilization", "90"], "--gpu-memory-utilization is between 0 and 1"),
        (["--kv-cache-dtype", "int3"], "a cache of int3 is not known"),
        (["--tp", "3"], "2 heads of keys and values cannot be divided among 3 GPUs"),
        (["--weights", "many"], "'many' is not a size"),
        (["--set", "colour=1"], "has no colour"),
        (["--largest", "context=1..9"], "is answered by arithmetic, and --largest needs a program"),
        (["--task", "train"], "--engine names a server: it goes with --task serve"),
    ],
)
def test_what_a_server_cannot_be_asked_is_said(folder, capsys, words, said) -> None:
    assert main(["predict", *SERVE, "--engine", "vllm", *words]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


GENERATES = """
import sys, torch, transformers

config = transformers.AutoConfig.from_pretrained("small")
with torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
tokens = torch.randint(1024, (4, 64), device="cuda")
more = {"return_dict_in_generate": True} if "watched" in sys.argv else {}
kind = {"cache_implementation": "static"} if "static" in sys.argv else {}
found = model.generate(tokens, max_new_tokens=48, do_sample=False, **kind, **more)
print("shape", list(getattr(found, "sequences", found).shape))
"""


def test_tokens_of_a_static_cache_are_not_all_run(folder, script, capsys) -> None:
    """They need what all of them need, which are run where somebody looks at each."""
    found = {}
    for words in (["static"], ["static", "watched"], ["dynamic"]):
        main(["predict", script(GENERATES), "--json", "--no-advice", *words])
        out, err = capsys.readouterr()
        found["".join(words)] = json.loads(out)
        assert "shape [4, 112]" in err
    few, each = found["static"], found["staticwatched"]
    assert few["operators"] < each["operators"] / 4
    told = [one["value"] for one in found["dynamic"]["assumptions"] if "growing" in one["what"]]
    assert told == ["6 of 48 run"]
    assert few["peak_reserved"] == each["peak_reserved"]
    assert few["peak"]["by_kind"]["KV cache"] == each["peak"]["by_kind"]["KV cache"]
    told = [one["value"] for one in few["assumptions"] if "static cache" in one["what"]]
    assert told == ["4 of 48 run"]
