"""Transformers that read and write text."""

from __future__ import annotations

import importlib
from typing import Any

from bench.programs._shared import Step, cast, configured, language_model, training

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
