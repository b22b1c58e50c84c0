"""Transformers that read and write text."""

from __future__ import annotations

import importlib
from typing import Any

from bench.programs._shared import Step, cast, configured, language_model, module, training

SMALL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000}


def gpt2(torch: Any) -> Step:
    return training(torch, *language_model(torch, "GPT2", 4, 512))


def gpt2_autocast(torch: Any) -> Step:
    model, loss_of = language_model(torch, "GPT2", 8, 768, n_layer=8)
    return training(torch, model, cast(torch, torch.bfloat16, loss_of), fused=True)


def llama_checkpoints(torch: Any) -> Step:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
    model, loss_of = language_model(torch, "Llama", 2, 1024, **sizes, **heads)
    model = model.to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    return training(torch, model, loss_of, foreach=True)


def qwen_generates(torch: Any) -> Step:
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 50000}
    model, _loss = language_model(torch, "Qwen2", 4, 64, **sizes, **heads)
    model = model.to(torch.bfloat16).eval()
    prompt = torch.randint(50000, (4, 64), device="cuda")
    return lambda: model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)


def bert(torch: Any) -> Step:
    return training(torch, *language_model(torch, "Bert", 16, 128))


def t5(torch: Any) -> Step:
    model, loss_of = language_model(torch, "T5", 8, 128, decoder_start_token_id=0)
    return training(torch, model, loss_of, optimizer=torch.optim.Adafactor)


def lora(torch: Any) -> Step:
    peft = importlib.import_module("peft")
    model, loss_of = language_model(torch, "GPT2", 4, 256)
    names = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    return training(torch, peft.get_peft_model(model, peft.LoraConfig(r=8, **names)), loss_of)


def experts(torch: Any) -> Step:
    """Tokens go to experts that the data chooses: the numbers are not known before. The experts
    share their weights here."""
    nn = torch.nn
    router = nn.Linear(512, 8)
    towers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))] * 8
    model = nn.ModuleList([router, *towers]).cuda()
    x = torch.randn(8192, 512, device="cuda")

    def loss_of(model: Any) -> Any:
        weights, chosen = model[0](x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in range(8):
            token, place = torch.where(chosen == number)
            found = model[1 + number](x[token]) * weights[token, place, None]
            out.index_add_(0, token, found)
        return out.square().mean()

    return training(torch, model, loss_of)


def mistral(torch: Any) -> Step:
    """Its attention looks 256 tokens back. The gradients are clipped."""
    model, loss_of = language_model(torch, "Mistral", 2, 1024, **SMALL, **HEADS, sliding_window=256)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_of = cast(torch, torch.bfloat16, loss_of)

    def step() -> None:
        loss_of(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def gemma_lora(torch: Any) -> Step:
    peft = importlib.import_module("peft")
    heads = HEADS | {"head_dim": 64, "vocab_size": 64000}
    model, loss_of = language_model(torch, "Gemma", 4, 512, **SMALL, **heads)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    adapted = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=names)
    return training(torch, peft.get_peft_model(model.to(torch.bfloat16), adapted), loss_of)


def phi_accumulates(torch: Any) -> Step:
    """Four micro-batches make one step."""
    heads = HEADS | {"num_key_value_heads": 12}
    model, loss_of = language_model(torch, "Phi", 2, 512, **SMALL, **heads)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-4)

    def step() -> None:
        for _ in range(4):
            (loss_of(model) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def opt_scaled(torch: Any) -> Step:
    sizes = {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 8, "vocab_size": 32000}
    model, loss_of = language_model(torch, "OPT", 4, 512, **sizes, word_embed_proj_dim=768)
    loss_of = cast(torch, torch.float16, loss_of)
    return training(torch, model, loss_of, scaler=torch.amp.GradScaler())


def neox_checkpoints(torch: Any) -> Step:
    heads = {"num_attention_heads": 12, "vocab_size": 50432}
    model, loss_of = language_model(torch, "GPTNeoX", 4, 1024, **SMALL, **heads)
    model.gradient_checkpointing_enable()
    return training(torch, model, cast(torch, torch.bfloat16, loss_of))


def mixtral(torch: Any) -> Step:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
    heads = HEADS | {"num_attention_heads": 8, "num_key_value_heads": 2}
    model, loss_of = language_model(torch, "Mixtral", 4, 512, **sizes, **heads, **experts)
    return training(torch, model.to(torch.bfloat16), loss_of)


def falcon_scores(torch: Any) -> Step:
    """Tells how likely each of some texts is, without gradients."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16}
    model = configured("Falcon", "ForCausalLM", vocab_size=50000, **sizes).half().eval()
    texts = torch.randint(50000, (4, 512), device="cuda")

    def step() -> object:
        with torch.no_grad():
            logits = model(texts).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, texts[:, 1:, None]).sum(1).tolist()

    return step


def mamba(torch: Any) -> Step:
    """A state-space model, whose states follow one another in Python where its kernels are not
    installed."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 16000}
    return training(torch, *language_model(torch, "Mamba", 4, 64, **sizes, use_cache=False))


def prefers(torch: Any) -> Step:
    """Direct preference optimisation: the policy and its frozen copy each read both answers."""
    texts = torch.randint(32000, (4, 256), device="cuda")
    policy, reference = (
        configured("Llama", "ForCausalLM", **SMALL, **HEADS).to(torch.bfloat16) for _ in range(2)
    )
    reference.load_state_dict(policy.state_dict())
    reference.requires_grad_(False).eval()

    def likelihood(model: Any) -> Any:
        logits = model(texts).logits[:, :-1].float().log_softmax(-1)
        return logits.gather(-1, texts[:, 1:, None]).squeeze(-1)[:, 64:].sum(1)

    def loss_of(policy: Any) -> Any:
        with torch.no_grad():
            before = likelihood(reference)
        chosen, rejected = (likelihood(policy) - before).chunk(2)
        return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()

    return training(torch, policy, loss_of, optimizer=torch.optim.RMSprop, lr=1e-6)


def cached_answers(torch: Any) -> Step:
    """Reads a prompt, then draws eight tokens one by one with the keys and values it kept."""
    model = configured("Llama", "ForCausalLM", **SMALL, **HEADS).to(torch.bfloat16).eval()
    prompt = torch.randint(32000, (8, 512), device="cuda")

    def step() -> object:
        tokens, kept, answer = prompt, None, []
        with torch.inference_mode():
            for _ in range(8):
                out = model(tokens, past_key_values=kept, use_cache=True)
                kept = out.past_key_values
                likely, which = (out.logits[:, -1].float() / 0.8).topk(50)
                drawn = torch.multinomial(likely.softmax(-1), 1)
                tokens = which.gather(-1, drawn)
                answer.append(tokens)
        return torch.cat(answer, 1).tolist()

    return step


def sentence_encoder(torch: Any) -> Step:
    """Pairs of sentences: each should be nearest to its own partner in the batch."""
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
    model = configured("Bert", "Model", **sizes, num_attention_heads=12, vocab_size=30522)
    pairs = torch.randint(30522, (2, 64, 96), device="cuda")
    lengths = torch.arange(33, 97, device="cuda")
    mask = (torch.arange(96, device="cuda") < lengths[:, None]).long()

    def embedded(model: Any, tokens: Any) -> Any:
        states = model(tokens, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    def loss_of(model: Any) -> Any:
        left, right = (embedded(model, tokens) for tokens in pairs)
        own = torch.arange(64, device="cuda")
        return torch.nn.functional.cross_entropy(left @ right.T * 20, own)

    return training(torch, model, loss_of)


def _gpt(torch: Any, block: Any, width: int, depth: int, length: int, words: int) -> Any:
    """A GPT of `block()`s. Embedding and head share a weight."""
    nn = torch.nn
    parts = {
        "embed": nn.Embedding(words, width),
        "places": nn.Embedding(length, width),
        "drop": nn.Dropout(0.1),
        "blocks": nn.ModuleList(block() for _ in range(depth)),
        "normal": nn.LayerNorm(width),
        "head": nn.Linear(width, words, bias=False),
    }
    parts["embed"].weight = parts["head"].weight

    def forward(self: Any, tokens: Any, wanted: Any) -> Any:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.places(place))
        for one in self.blocks:
            x = one(x)
        logits = self.head(self.normal(x))
        return nn.functional.cross_entropy(logits.view(-1, words), wanted.reshape(-1))

    return module(torch, forward, **parts)


def _fused_block(torch: Any, width: int, heads: int, dropout: float) -> Any:
    nn = torch.nn

    def forward(self: Any, x: Any) -> Any:
        batch, length, _width = x.size()
        qkv = self.attend(self.before(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, heads, width // heads).transpose(1, 2) for t in qkv)
        drop = dropout if self.training else 0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + self.drop(self.project(y.transpose(1, 2).contiguous().view(batch, length, width)))
        return x + self.mlp(self.after(x))

    plain = {"bias": False}
    grow, shrink = nn.Linear(width, 4 * width, **plain), nn.Linear(4 * width, width, **plain)
    parts = {
        "attend": nn.Linear(width, 3 * width, **plain),
        "project": nn.Linear(width, width, **plain),
        "drop": nn.Dropout(dropout),
        "before": nn.LayerNorm(width, **plain),
        "after": nn.LayerNorm(width, **plain),
        "mlp": nn.Sequential(grow, nn.GELU(), shrink, nn.Dropout(dropout)),
    }
    return module(torch, forward, **parts)


def gpt_accumulates(torch: Any) -> Step:
    """Eight micro-batches come from the CPU's pinned memory; weights alone decay."""
    model = _gpt(torch, lambda: _fused_block(torch, 384, 6, 0.2), 384, 6, 256, 50304)
    weights = [w for w in model.parameters() if w.dim() >= 2]
    others = [w for w in model.parameters() if w.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    text = torch.randint(50304, (100_000,))

    def batch() -> tuple[Any, Any]:
        starts = torch.randint(len(text) - 256, (16,)).tolist()
        chunks = torch.stack([text[i : i + 257] for i in starts]).pin_memory()
        chunks = chunks.to("cuda", non_blocking=True)
        return chunks[:, :-1], chunks[:, 1:]

    def step() -> None:
        tokens, wanted = batch()
        for _ in range(8):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens, wanted) / 8
            tokens, wanted = batch()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def gpt_by_hand(torch: Any) -> Step:
    """Attention with its whole matrix, a mask and dropout."""
    nn = torch.nn
    blank = torch.triu(torch.ones(128, 128, dtype=torch.bool, device="cuda"), 1)

    def forward(self: Any, x: Any) -> Any:
        y = self.before(x)
        named = self.query(y), self.key(y), self.value(y)
        q, k, v = (t.unflatten(2, (8, 64)).transpose(1, 2) for t in named)
        scores = (q @ k.transpose(-2, -1)) * 64**-0.5
        seen = self.drop(scores.masked_fill(blank, float("-inf")).softmax(-1))
        x = x + self.drop(self.project((seen @ v).transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.mlp(self.after(x)))

    def block() -> Any:
        parts = {name: nn.Linear(512, 512) for name in ("query", "key", "value", "project")}
        parts |= {"before": nn.LayerNorm(512), "after": nn.LayerNorm(512), "drop": nn.Dropout(0.1)}
        mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        return module(torch, forward, mlp=mlp, **parts)

    model = _gpt(torch, block, 512, 8, 128, 10000)
    text = torch.randint(10000, (64, 129), device="cuda")
    return training(torch, model, lambda m: m(text[:, :-1], text[:, 1:]), lr=3e-4)


def llama_by_hand(torch: Any) -> Step:
    """Turned queries and keys, few heads of keys, gated layers, each of them run twice."""
    nn, checkpoint = torch.nn, importlib.import_module("torch.utils.checkpoint").checkpoint
    turns = torch.outer(torch.arange(1024.0), 10000 ** (-torch.arange(0, 64, 2) / 64)).cuda()
    cos, sin = turns.cos()[:, None], turns.sin()[:, None]

    def turned(x: Any) -> Any:
        left, right = x.float().chunk(2, -1)
        both = [left * cos - right * sin, left * sin + right * cos]
        return torch.cat(both, -1).type_as(x)

    def forward(self: Any, x: Any) -> Any:
        y = self.before(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        q, k, v = (t.unflatten(2, (-1, 64)) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (turned(q), turned(k), v))
        k, v = (t.repeat_interleave(4, dim=1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    sizes = {"query": (1024, 1024), "key": (1024, 256), "value": (1024, 256)}
    sizes |= {"project": (1024, 1024), "gate": (1024, 2816), "up": (1024, 2816)}
    sizes |= {"down": (2816, 1024)}

    def block() -> Any:
        parts = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        return module(torch, forward, before=nn.RMSNorm(1024), after=nn.RMSNorm(1024), **parts)

    embed, head = nn.Embedding(32000, 1024), nn.Linear(1024, 32000, bias=False)
    body = [nn.ModuleList(block() for _ in range(8)), nn.RMSNorm(1024)]
    model = nn.ModuleList([embed, *body, head]).cuda().to(torch.bfloat16)
    text = torch.randint(32000, (4, 1025), device="cuda")

    def loss_of(model: Any) -> Any:
        embed, blocks, normal, head = model
        x = embed(text[:, :-1])
        for one in blocks:
            x = checkpoint(one, x, use_reentrant=False)
        logits = head(normal(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    return training(torch, model, loss_of, fused=True)


def qwen_trains(torch: Any) -> Step:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 151936}
    tied = {"tie_word_embeddings": True}
    model, loss_of = language_model(torch, "Qwen2", 2, 512, **sizes, **heads, **tied)
    return training(torch, model.to(torch.bfloat16), loss_of, fused=True, lr=1e-4)


def gemma2(torch: Any) -> Step:
    """Logits are bounded; every other layer looks back a little only."""
    heads = HEADS | {"head_dim": 64, "vocab_size": 64000, "sliding_window": 256}
    options = {"attn_implementation": "eager"}
    model, loss_of = language_model(torch, "Gemma2", 2, 512, **SMALL, **heads, **options)
    return training(torch, model.to(torch.bfloat16), loss_of, fused=True)


def olmo_clipped(torch: Any) -> Step:
    heads = HEADS | {"num_key_value_heads": 12, "vocab_size": 50304}
    model, loss_of = language_model(torch, "Olmo", 4, 512, **SMALL, **heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    loss_of = cast(torch, torch.bfloat16, loss_of)

    def step() -> float:
        loss = loss_of(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


def bart_summarises(torch: Any) -> Step:
    sizes = {"d_model": 512, "encoder_layers": 4, "decoder_layers": 4, "vocab_size": 50265}
    widths = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    model = configured("Bart", "ForConditionalGeneration", **sizes, **widths, **heads)
    texts = torch.randint(4, 50265, (8, 512), device="cuda")
    lengths = torch.arange(512, 256, -32, device="cuda")
    mask = (torch.arange(512, device="cuda") < lengths[:, None]).long()
    summaries = torch.randint(4, 50265, (8, 64), device="cuda")
    summaries[:, 56:] = -100

    def loss_of(model: Any) -> Any:
        return model(input_ids=texts, attention_mask=mask, labels=summaries).loss

    half = {"scaler": torch.amp.GradScaler("cuda"), "lr": 5e-5}
    return training(torch, model, cast(torch, torch.float16, loss_of), **half)


def lora_by_hand(torch: Any) -> Step:
    """Thin layers beside frozen ones, which alone learn."""
    nn = torch.nn
    model = configured("Llama", "ForCausalLM", **SMALL, **HEADS).to(torch.bfloat16)
    model.requires_grad_(False)

    def forward(self: Any, x: Any) -> Any:
        thin = self.drop(x).to(self.down.dtype) @ self.down.T @ self.up.T
        return self.frozen(x) + (thin * 2.0).to(x.dtype)

    def adapted(linear: Any) -> Any:
        down = nn.Parameter(torch.randn(8, linear.in_features) * 0.02)
        up = nn.Parameter(torch.zeros(linear.out_features, 8))
        parts = {"frozen": linear, "drop": nn.Dropout(0.05), "down": down, "up": up}
        return module(torch, forward, **parts)

    for layer in model.model.layers:
        layer.self_attn.q_proj = adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = adapted(layer.self_attn.v_proj)
    learns = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=2e-4)
    texts = torch.randint(32000, (8, 256), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=texts, labels=texts, use_cache=False).loss.backward()
        optimizer.step()

    return step


def orthogonal_updates(torch: Any) -> Step:
    """Matrices move by their momentum made orthogonal, by five rounds of products; AdamW moves
    the rest."""
    model = _gpt(torch, lambda: _fused_block(torch, 768, 12, 0.0), 768, 6, 512, 50304)
    matrices = [w for w in model.blocks.parameters() if w.dim() == 2]
    rest = [w for w in model.parameters() if all(w is not one for one in matrices)]
    adam = torch.optim.AdamW(rest, lr=3e-4)
    momenta = [torch.zeros_like(weight) for weight in matrices]
    text = torch.randint(50304, (8, 513), device="cuda")

    def orthogonal(gradient: Any) -> Any:
        x = gradient.bfloat16()
        tall = x.size(0) > x.size(1)
        x = x.T if tall else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            squared = x @ x.T
            x = 3.4445 * x + (-4.775 * squared + 2.0315 * squared @ squared) @ x
        return x.T if tall else x

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        adam.step()
        with torch.no_grad():
            for weight, momentum in zip(matrices, momenta, strict=True):
                momentum.lerp_(weight.grad, 0.05)
                update = orthogonal(weight.grad.lerp(momentum, 0.95))
                scale = max(1, weight.size(0) / weight.size(1)) ** 0.5
                weight.add_(update.type_as(weight), alpha=-0.02 * scale)
        model.zero_grad()

    return step


def dense_experts(torch: Any) -> Step:
    """Every expert sees every token, and a gate weighs what they say."""
    nn = torch.nn
    parts = {
        "embed": nn.Embedding(10000, 256),
        "gate": nn.Linear(256, 8),
        "grow": nn.Parameter(torch.randn(8, 256, 1024) * 0.02),
        "shrink": nn.Parameter(torch.randn(8, 1024, 256) * 0.02),
        "head": nn.Linear(256, 10000),
    }
    text = torch.randint(10000, (16, 129), device="cuda")

    def forward(self: Any, tokens: Any) -> Any:
        x = self.embed(tokens)
        weights = self.gate(x).softmax(-1)
        grown = nn.functional.gelu(torch.einsum("bld,edh->bleh", x, self.grow))
        said = torch.einsum("bleh,ehd->bled", grown, self.shrink)
        x = x + torch.einsum("bled,ble->bld", said, weights)
        return self.head(x), weights.mean((0, 1))

    def loss_of(model: Any) -> Any:
        logits, load = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), text[:, 1:])
        return loss + 0.01 * 8 * load.square().sum()

    return training(torch, module(torch, forward, **parts), loss_of)
