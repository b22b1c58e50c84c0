"""Programs of PyTorch whose memory `bench.gpu_predictions` predicts and measures: each trains or
infers with random weights, and downloads nothing. Each function is given torch, and gives what it
calls once a step.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

Step = Callable[[], object]


def _training(torch: Any, model: Any, loss_of: Callable[[Any], Any], **options: Any) -> Step:
    make = options.pop("optimizer", torch.optim.AdamW)
    optimizer = make(model.parameters(), **options)

    def step() -> None:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _language_model(torch: Any, name: str, batch: int, length: int, **config: Any) -> Any:
    """A decoder of transformers, with a loss on random tokens."""
    transformers = importlib.import_module("transformers")
    made = getattr(transformers, f"{name}Config")(**config)
    kind = {"Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration"}
    kind |= {"GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, kind.get(name, f"{name}ForCausalLM"))(made).cuda().train()
    tokens = torch.randint(made.vocab_size, (batch, length), device="cuda")
    return model, lambda model: model(input_ids=tokens, labels=tokens).loss


def gpt2(torch: Any) -> Step:
    return _training(torch, *_language_model(torch, "GPT2", 4, 512))


def gpt2_autocast(torch: Any) -> Step:
    model, loss_of = _language_model(torch, "GPT2", 8, 768, n_layer=8)

    def cast(model: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return loss_of(model)

    return _training(torch, model, cast, fused=True)


def llama_checkpoints(torch: Any) -> Step:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
    model, loss_of = _language_model(torch, "Llama", 2, 1024, **sizes, **heads)
    model = model.to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    return _training(torch, model, loss_of, foreach=True)


def qwen_generates(torch: Any) -> Step:
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 50000}
    model, _loss = _language_model(torch, "Qwen2", 4, 64, **sizes, **heads)
    model = model.to(torch.bfloat16).eval()
    prompt = torch.randint(50000, (4, 64), device="cuda")
    return lambda: model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)


def bert(torch: Any) -> Step:
    return _training(torch, *_language_model(torch, "Bert", 16, 128))


def t5(torch: Any) -> Step:
    model, loss_of = _language_model(torch, "T5", 8, 128, decoder_start_token_id=0)
    return _training(torch, model, loss_of, optimizer=torch.optim.Adafactor)


def lora(torch: Any) -> Step:
    peft = importlib.import_module("peft")
    model, loss_of = _language_model(torch, "GPT2", 4, 256)
    names = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    return _training(torch, peft.get_peft_model(model, peft.LoraConfig(r=8, **names)), loss_of)


def _images(torch: Any, model: Any, batch: int, size: int, **options: Any) -> Step:
    cast = options.pop("cast", None)
    layout = options.pop("layout", torch.contiguous_format)
    images = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=layout)
    classes = torch.randint(1000, (batch,), device="cuda")
    model = model.cuda().to(memory_format=layout).train()

    def loss_of(model: Any) -> Any:
        with torch.autocast("cuda", cast, enabled=cast is not None):
            return torch.nn.functional.cross_entropy(model(images), classes)

    return _training(torch, model, loss_of, **options)


def resnet50(torch: Any) -> Step:
    model = importlib.import_module("torchvision").models.resnet50(num_classes=1000)
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    return _images(torch, model, 32, 224, **sgd)


def convnext_channels_last(torch: Any) -> Step:
    model = importlib.import_module("torchvision").models.convnext_tiny(num_classes=1000)
    return _images(
        torch, model, 16, 224, cast=torch.bfloat16, layout=torch.channels_last, fused=True
    )


def vit(torch: Any) -> Step:
    timm = importlib.import_module("timm")
    model = timm.create_model("vit_small_patch16_224", num_classes=1000)
    return _images(torch, model, 32, 224, cast=torch.bfloat16)


def swin(torch: Any) -> Step:
    model = importlib.import_module("torchvision").models.swin_t(num_classes=1000)
    return _images(torch, model, 8, 224)


def unet(torch: Any) -> Step:
    nn = torch.nn

    def block(before: int, after: int) -> Any:
        conv = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()
        return nn.Sequential(*conv, nn.Conv2d(after, after, 3, padding=1), nn.ReLU())

    class UNet(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            widths = 3, 32, 64, 128, 256
            self.down = nn.ModuleList(map(block, widths, widths[1:]))
            self.up = nn.ModuleList(block(a + b, a) for a, b in itertools.pairwise(widths[1:]))
            self.last = nn.Conv2d(32, 1, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for down in self.down:
                x = down(x)
                kept.append(x)
                x = nn.functional.max_pool2d(x, 2)
            x = kept.pop()
            for up, skip in zip(reversed(self.up), reversed(kept), strict=True):
                x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
                x = up(torch.cat([x, skip], 1))
            return self.last(x)

    images = torch.randn(4, 3, 256, 256, device="cuda")
    masks = torch.rand(4, 1, 256, 256, device="cuda")
    loss = nn.functional.binary_cross_entropy_with_logits
    return _training(torch, UNet().cuda(), lambda model: loss(model(images), masks))


def lstm(torch: Any) -> Step:
    nn = torch.nn
    embed, rnn, head = nn.Embedding(20000, 512), nn.LSTM(512, 512, 2), nn.Linear(512, 20000)
    model = nn.ModuleList([embed, rnn, head]).cuda()
    tokens = torch.randint(20000, (128, 32), device="cuda")

    def loss_of(model: Any) -> Any:
        hidden, _state = model[1](model[0](tokens))
        return nn.functional.cross_entropy(model[2](hidden).flatten(0, 1), tokens.flatten())

    return _training(torch, model, loss_of)


def encoder_scaled(torch: Any) -> Step:
    """Half precision, a scaler, gradients that are clipped, two micro-batches a step."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(768, 10)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
    x, y = torch.randn(8, 256, 768, device="cuda"), torch.randint(10, (8,), device="cuda")

    def step() -> None:
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(model(x).mean(1), y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def click_model(torch: Any) -> Step:
    """Bags of embeddings and a tower, with sparse gradients."""
    nn = torch.nn
    bags = nn.EmbeddingBag(200_000, 64, mode="sum", sparse=True).cuda()
    tower = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda()
    ids = torch.randint(200_000, (4096, 20), device="cuda")
    clicks = torch.rand(4096, 1, device="cuda")
    sparse = torch.optim.SparseAdam(bags.parameters())
    dense = torch.optim.Adam(tower.parameters(), fused=True)

    def step() -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(tower(bags(ids)), clicks)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()

    return step


def graph_network(torch: Any) -> Step:
    geometric = importlib.import_module("torch_geometric.nn")
    nodes, edges = 20_000, 200_000
    links = torch.randint(nodes, (2, edges), device="cuda")
    features = torch.randn(nodes, 128, device="cuda")
    classes = torch.randint(40, (nodes,), device="cuda")
    layers = [geometric.GCNConv(128, 256), geometric.GATConv(256, 64, heads=4)]
    model = torch.nn.ModuleList([*layers, geometric.SAGEConv(256, 40)]).cuda()

    def loss_of(model: Any) -> Any:
        x = features
        for layer in model:
            x = torch.relu(layer(x, links))
        return torch.nn.functional.cross_entropy(x, classes)

    return _training(torch, model, loss_of)


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

    return _training(torch, model, loss_of)


def evaluates(torch: Any) -> Step:
    model = importlib.import_module("torchvision").models.efficientnet_b0().cuda().eval()
    images = torch.randn(64, 3, 224, 224, device="cuda")

    def step() -> object:
        with torch.inference_mode():
            return model(images).argmax(1).cpu()

    return step


PROGRAMS: dict[str, Callable[[Any], Step]] = {
    program.__name__: program
    for program in (
        gpt2,
        gpt2_autocast,
        llama_checkpoints,
        qwen_generates,
        bert,
        t5,
        lora,
        resnet50,
        convnext_channels_last,
        vit,
        swin,
        unet,
        lstm,
        encoder_scaled,
        click_model,
        graph_network,
        experts,
        evaluates,
    )
}
