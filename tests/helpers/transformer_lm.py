"""A language model with the sizes of the assignment "Systems" of Stanford's course CS336, and three
programs that train and run it, written for these tests.

What counts is the order of operators and of the names that hold their results, since both decide
what is allocated, and when it is freed: attention by hand, rotary embeddings, RMSNorm, SwiGLU, no
biases, and an AdamW that makes new tensors at each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: The passes that the recorded programs made before. Fewer bring the allocator into the same state,
#: but their inputs are live.
WARM_ONES = 5


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    context: int
    vocabulary: int = 10_000


def medium(context: int) -> Sizes:
    return Sizes(1024, 4096, 24, 16, context)


def small(context: int) -> Sizes:
    return Sizes(768, 3072, 12, 12, context)


class Projection(nn.Module):
    """A linear layer without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Table(nn.Module):
    """An embedding, read by an index."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    """Turns pairs of neighbours by an angle that grows with the position."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        angles = torch.arange(context)[:, None] * 10_000.0 ** -(torch.arange(0, width, 2) / width)
        turned = torch.stack((angles.cos(), angles.sin()))
        self.register_buffer("turned", turned, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cosine, sine = self.turned[:, : x.size(-2), :].unbind(0)
        first = cosine * even - sine * odd
        second = sine * even + cosine * odd
        return torch.concat((first, second), dim=-1)


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        width, self.heads = sizes.d_model, sizes.heads
        self.q, self.k, self.v = (Projection(width, width) for _ in range(3))
        self.out = Projection(width, width)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        at = torch.arange(x.size(-2), device=x.device)
        mask = at[:, None] >= at[None, :]
        mask = mask[None, ...]
        mixed = attend(q=q, k=k, v=v, mask=mask)
        mixed = mixed.transpose(1, 2).flatten(2).contiguous()
        return self.out(mixed)


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = Projection(sizes.d_model, sizes.d_ff)
        self.down = Projection(sizes.d_ff, sizes.d_model)
        self.gate = Projection(sizes.d_model, sizes.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.up(x)) * self.gate(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        self.attention = Attention(sizes, rotary)
        self.gated = Gated(sizes)
        self.before_attention = RootMeanSquare(sizes.d_model)
        self.before_gated = RootMeanSquare(sizes.d_model)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.before_attention(x))
        middle = x + attended
        gated = self.gated(self.before_gated(middle))
        return middle + gated


class TransformerLM(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = Table(sizes.vocabulary, sizes.d_model)
        self.rotary = Rotary(sizes.context, sizes.d_model // sizes.heads)
        self.blocks = nn.ModuleList(Block(sizes, self.rotary) for _ in range(sizes.layers))
        self.last = RootMeanSquare(sizes.d_model)
        self.head = Projection(sizes.d_model, sizes.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.table(x)  # which is held until the end, as theirs was
        x = embedded
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return self.head(x)


def log_softmax(x: Tensor) -> Tensor:
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """AdamW whose moments are new tensors at each step."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 1e-3, "decay": 0.01, "betas": (0.9, 0.999)})

    def step(self, closure: object = None) -> None:
        """One loop, in one function: the tensors of a parameter are freed by those of the next."""
        for group in self.param_groups:
            rate, decay, (one, two) = group["lr"], group["decay"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.data
                state = self.state[parameter]
                step = state.get("step", 1)
                corrected = rate * math.sqrt(1 - two**step) / (1 - one**step)
                parameter.data -= rate * decay * parameter.data
                first_before = state.get("first", torch.zeros_like(gradient))
                second_before = state.get("second", torch.zeros_like(gradient))
                first = one * first_before + ((1 - one) * gradient)
                second = two * second_before + ((1 - two) * torch.square(gradient))
                parameter.data -= corrected * first / (torch.sqrt(second) + 1e-8)
                state["first"], state["second"], state["step"] = first, second, step + 1


def tokens(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randint(sizes.vocabulary, (*shape, sizes.context), device="cuda")


def inference(sizes: Sizes, warm: int, path: str, autocast: bool) -> None:
    """Runs the model; the last pass is recorded."""
    model = TransformerLM(sizes).to("cuda").eval()
    before, recorded = tokens(sizes, WARM_ONES, 4), tokens(sizes, 1, 4)
    with torch.inference_mode():
        for number in range(warm):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                model(before[number])
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            model(recorded[0])
    torch.cuda.memory._dump_snapshot(path)


def training(sizes: Sizes, warm: int, path: str, autocast: bool) -> None:
    """Trains the model; the last step is recorded."""
    model = TransformerLM(sizes).to("cuda")
    optimizer = AdamW(model.parameters())
    before, recorded = tokens(sizes, WARM_ONES, 4), tokens(sizes, 1, 4)
    targets, last_targets = tokens(sizes, WARM_ONES, 4), tokens(sizes, 1, 4)
    for number in range(warm):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output = model(before[number])
            loss = cross_entropy(output, targets[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del output, loss
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        output = model(recorded[0])
        loss = cross_entropy(output, last_targets[0])
    loss.backward()
    optimizer.step()
    torch.cuda.memory._dump_snapshot(path)


def forward_and_backward(sizes: Sizes, warm: int, path: str, batch: int) -> None:
    """Forward and backward passes without an optimizer; gradients add up. The last is recorded."""
    model = TransformerLM(sizes).to("cuda")
    data, targets = (
        torch.randint(sizes.vocabulary, (batch, sizes.context)).to("cuda") for _ in range(2)
    )
    for number in range(warm + 1):
        if number == warm:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        output = model(data)
        loss = cross_entropy(output, targets)
        loss.backward()
    torch.cuda.memory._dump_snapshot(path)
