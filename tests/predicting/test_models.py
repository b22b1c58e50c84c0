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
    words = ["hf:small", "--seq", "512", "--device", "512MiB", "--largest", "batch=1..64"]
    command = [sys.executable, "-m", "bfc", "predict", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout
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
        (["hf:small", "--task", "sing"], "--task is train"),
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
