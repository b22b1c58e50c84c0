"""Changes that are tried need what the same program needs that was edited by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import prediction_programs as programs
import pytest
import torch
from fresh_commands import command
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import bfc
from bfc_tools.cli import main
from bfc_tools.predicting.changes import BY_NAME

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "resnet": lambda of, **more: torch.optim.SGD(of, lr=0.1, momentum=0.9, **more),
    "decoder": torch.optim.AdamW,
    "vit": torch.optim.Adam,
    "unet": torch.optim.RMSprop,
    "lstm": torch.optim.AdamW,
}


class Decoder(programs.Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x) @ self.words.weight.t()


class ViT(programs.ViT):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        for block in self.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False)
        return self.head(tokens[:, 0])


class ResNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = programs.resnet()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            again = isinstance(part, programs.Residual)
            x = checkpoint(part, x, use_reentrant=False) if again else part(x)
        return x


CHECKPOINTED = {"decoder": Decoder, "vit": ViT, "resnet": ResNet}


def batches(data: Callable[[], torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """From a loader of so many samples at a time; all at once without."""
    if not size:
        while True:
            yield data()
    for batch in DataLoader(list(data().cpu()), batch_size=size):
        yield batch.cuda()


def around(edits: tuple[str, ...]) -> Any:
    """What stands around the forward pass and the loss."""
    if "bf16" in edits:
        return torch.autocast("cuda", torch.bfloat16)
    return torch.autograd.graph.save_on_cpu() if "offload" in edits else nullcontext()


def train(program: str, edits: tuple[str, ...], changes: tuple[str, ...]) -> bfc.Prediction:
    """A training, edited by hand, and with changes that are tried. What the change is about stands
    in it in the way that it does where nobody has thought of it."""
    make, data, *_ = programs.PROGRAMS[program]
    all_of_it = {*edits, *changes}
    options: dict[str, Any] = {}
    if "fused" in edits:
        options["fused"] = True
    if "for_loop" in edits:
        options["foreach"] = False
    halved = "half_batch" in all_of_it
    size, passes = (2, 4) if halved else (0, 2)
    parts = 2 if "half_batch" in edits else 1
    with bfc.predict("h100", changes=changes) as run:
        model = (CHECKPOINTED[program] if "checkpoint" in edits else make)().cuda()
        optimizer = OPTIMIZERS[program](model.parameters(), **options)
        for number, batch in zip(range(1, passes + 1), batches(data, size // parts), strict=False):
            with around(edits):
                loss = model(batch).float().square().mean()
            loss.backward()
            if number % parts == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none="zeros" not in all_of_it)
    return run


def figures(run: bfc.Prediction) -> tuple[int, ...]:
    run.runs()
    return run.peak_requested, run.peak_allocated, run.peak_reserved, run.operators


PAIRS = [
    *((program, ("checkpoint",)) for program in CHECKPOINTED),
    *((program, (change,)) for change in ("bf16", "offload") for program in OPTIMIZERS),
    *((program, ("fused",)) for program in ("resnet", "decoder", "vit")),
    *((program, ("for_loop",)) for program in OPTIMIZERS),
    *((program, ("half_batch",)) for program in ("resnet", "decoder", "unet")),
    *((program, ("checkpoint", "bf16")) for program in CHECKPOINTED),
]
#: One of each change runs always.
ALWAYS = {
    *(("decoder", ("checkpoint",)), ("unet", ("bf16",)), ("lstm", ("offload",))),
    *(("resnet", ("fused",)), ("vit", ("for_loop",)), ("resnet", ("half_batch",))),
    ("decoder", ("checkpoint", "bf16")),
}


@pytest.mark.parametrize(
    ("program", "changes"),
    [pytest.param(*one, marks=[] if one in ALWAYS else pytest.mark.long) for one in PAIRS],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_a_change_needs_what_an_edited_program_needs(
    program: str, changes: tuple[str, ...]
) -> None:
    tried = train(program, (), changes)
    assert all(one.times for one in tried.changes)
    assert figures(tried) == figures(train(program, changes, ()))


@pytest.mark.parametrize("program", ["resnet", "decoder", "lstm"])
def test_gradients_that_are_given_back(program: str) -> None:
    def trained(set_to_none: bool, *changes: str) -> bfc.Prediction:
        make, data, *_ = programs.PROGRAMS[program]
        with bfc.predict("h100", changes=changes) as run:
            model = make().cuda()
            optimizer = OPTIMIZERS[program](model.parameters())
            for _ in range(2):
                model(data()).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return run

    tried = trained(False, "set_to_none")
    assert figures(tried) == figures(trained(True)) != figures(trained(False))
    assert tried.changes[0].times == 2
    assert not trained(True, "set_to_none").changes[0].times


@pytest.mark.parametrize("program", ["resnet", "decoder", "lstm"])
def test_graphs_that_nobody_needs(program: str) -> None:
    def ran(by_hand: bool, *changes: str) -> bfc.Prediction:
        make, data, *_ = programs.PROGRAMS[program]
        with bfc.predict("h100", changes=changes) as run:
            model = make().cuda()
            with torch.no_grad() if by_hand else nullcontext():
                kept = [model(data()) for _ in range(3)]
            del kept
        return run

    assert figures(ran(False, "no_grad")) == figures(ran(True)) != figures(ran(False))
    holder = ran(False).holders[0]
    assert holder.what == "graphs for a backward pass that never comes"
    assert "torch.no_grad()" in holder.cure


@pytest.mark.parametrize(
    ("program", "change", "reason"),
    [
        ("lstm", "checkpoint", "no modules repeat"),
        ("unet", "fused", "no optimizer takes fused=True"),
        ("unet", "half_batch", "no DataLoader"),
    ],
)
def test_a_change_that_changes_nothing_says_why(program: str, change: str, reason: str) -> None:
    make, data, *_ = programs.PROGRAMS[program]
    with bfc.predict("h100", changes=[change]) as run:
        model = make().cuda()
        optimizer = OPTIMIZERS[program](model.parameters())
        model(data()).float().square().mean().backward()
        optimizer.step()
    assert run.changes[0].to_dict()["reason"].startswith(reason)
    assert f"{change}, which has changed nothing: {reason}" in str(run)


def test_a_program_that_has_autocast_keeps_it() -> None:
    with bfc.predict("h100", changes=["bf16"]) as run:
        model = programs.Decoder().cuda()
        with torch.autocast("cuda", torch.float16):
            assert model(programs.tokens()).dtype is torch.float16
    assert not run.changes[0].times


def test_losses_that_are_kept_are_named_with_their_line() -> None:
    with bfc.predict("h100") as run:
        model = programs.ViT().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            losses.append(model(programs.images()).square().mean())
            losses[-1].backward(retain_graph=True)
            optimizer.step()
        del losses
    (first,) = (one for one in run.holders if one.what == "activations of steps that are over")
    assert "prediction_programs.py" in first.line
    assert 4 * first.nbytes == 3 * run.peak.by_kind["activations"]


def test_what_a_cross_entropy_holds_is_named() -> None:
    with bfc.predict("h100") as run:
        head = torch.nn.Linear(64, 50_000, device="cuda", dtype=torch.bfloat16)
        scores = head(torch.randn(512, 64, device="cuda", dtype=torch.bfloat16)).float()
        labels = torch.zeros(512, dtype=torch.long, device="cuda")
        torch.nn.functional.cross_entropy(scores, labels).backward()
    first = run.holders[0]
    assert first.what == "copies of the logits that the cross entropy makes, and their gradients"
    # the logits as 32 bits, their logarithms, and the gradients of both of these
    assert first.nbytes == 4 * 512 * 50_000 * 4
    assert not any("no module" in one.what for one in run.holders)


def test_a_chunked_loss_is_what_the_words_about_logits_ask_for() -> None:
    def trained(parts: int) -> bfc.Prediction:
        with bfc.predict("h100") as run:
            head = torch.nn.Linear(64, 50_000, device="cuda", dtype=torch.bfloat16)
            hidden = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            labels = torch.zeros(512, dtype=torch.long, device="cuda")

            def loss(some: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.cross_entropy(head(some).float(), of, reduction="sum")

            pairs = zip(hidden.chunk(parts), labels.chunk(parts), strict=True)
            sum(checkpoint(loss, *pair, use_reentrant=False) for pair in pairs).backward()
        return run

    logits = "copies of the logits that the cross entropy makes, and their gradients"
    whole, chunked = trained(1), trained(16)
    assert whole.holders[0].what == logits
    assert "chunked loss" in whole.holders[0].cure
    assert sum(one.nbytes for one in chunked.holders if one.what == logits) * 16 <= (
        whole.holders[0].nbytes
    )
    assert chunked.peak_requested < whole.peak_requested / 2


def test_states_and_activations_are_named_with_what_holds_them() -> None:
    with bfc.predict("h100") as run:
        blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4)]
        model = torch.nn.ModuleDict({"blocks": torch.nn.Sequential(*blocks)}).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model["blocks"](torch.randn(1024, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {one.what: one for one in run.holders}
    states = found["states of the optimizer"]
    assert states.nbytes == run.peak.by_kind["optimizer state"]
    # two of 32 bits for each parameter, and the number of steps of each tensor on the host
    assert states.nbytes == 2 * 4 * sum(one.numel() for one in model.parameters())
    assert "8 bits" in states.cure
    assert "sharded" in states.cure
    (name,) = (one for one in found if one.startswith("activations of "))
    assert name == "activations of Sequential.*.*"
    assert "checkpoint" in found[name].cure


def loaded(onto: str) -> bfc.Prediction:
    """A model whose weights are loaded by way of a device."""
    with bfc.predict("h100") as run:
        model = torch.nn.Linear(8192, 8192, device="cuda")
        weights = {name: one.to(onto, copy=True) for name, one in model.state_dict().items()}
        model.load_state_dict(weights)
        del weights
        with torch.no_grad():
            model(torch.ones(1, 8192, device="cuda"))
    return run


def test_a_copy_while_loading_is_named() -> None:
    run = loaded("cuda")
    (holder,) = run.holders
    assert holder.what == "a copy of the weights while they are loaded"
    assert holder.nbytes == 4 * (8192 * 8192 + 8192) == run.peak.by_kind["parameters"]
    assert "test_changes.py" in holder.line
    assert loaded("cpu").holders == []


SCRIPT = """
import torch
model = torch.nn.Sequential(*(
    torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)
)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8192, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(script: Callable[[str], str]) -> str:
    return script(SCRIPT)


def test_what_if(script: str) -> None:
    """It fits with one of the changes, and each row is what a prediction with it says."""
    code, out, err = command("predict", script, "--device", "260MiB", "--what-if", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["fits"], found["fits_unchanged"]) == (True, False)
    assert "It does not fit on a GPU of 260.00 MiB" in found["answer"]
    rows = {row["name"]: row for row in found["changes"]}
    assert rows["checkpoint"]["fits"]
    assert rows["checkpoint"]["more_operators"] > 0
    assert not rows["states in 8 bits"]["tried"]
    assert {*rows, *(text.partition(":")[0] for text in found["not_tried"])} >= {*BY_NAME} - {
        "no_grad"
    }
    for name in ("checkpoint", "bf16"):
        words = ("predict", script, "--device", "260MiB", "--with", name, "--json", "--no-advice")
        _, out, _ = command(*words)
        single = json.loads(out)
        assert rows[name]["live"] == single["peak_requested"]
        assert rows[name]["saved"] == found["reserved"] - rows[name]["reserved"]
        assert single["changes"][0]["times"]


@pytest.mark.long
def test_what_if_in_words(script: str) -> None:
    code, out, err = command("predict", script, "--device", "260MiB", "--what-if", "--jobs", "1")
    assert code == 0, err
    assert out.startswith("It does not fit on a GPU of 260.00 MiB")
    assert "It fits with " in out.partition("\n")[0]
    assert "activations of " in out
    assert "checkpoint: x = torch.utils.checkpoint.checkpoint(block" in out
    assert "half_batch: no DataLoader" in out
    assert "by arithmetic, and not tried" in out


def test_a_change_that_is_none_is_said(script: str, capsys) -> None:
    assert main(["predict", "--with", "checkpoints", script]) == 2
    assert (
        "no change is called 'checkpoints'; there are checkpoint, bf16" in capsys.readouterr().err
    )
