"""Models of transformers, diffusers and timm, as these packages save and load them, and torchao's
numbers of 8 bits. `make test-torch-cuda` runs these tests: the packages stand beside a PyTorch for
CUDA, whose torchvision timm needs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read as they are imported: what is not in a file is an error

with warnings.catch_warnings():  # of what is compiled as it is first imported, too
    warnings.simplefilter("ignore")
    import diffusers
    import safetensors.torch
    import timm
    import torch
    import torchao.optim as optimizers
    import torchao.quantization as quantization
    import transformers

import bfc
from bfc_tools.models.quantized import bytes_of

pytestmark = pytest.mark.filterwarnings("ignore")  # what they say of each other's versions

CAUSAL = transformers.AutoModelForCausalLM
TOKENS = 512


def allocated() -> int:
    return torch.cuda.memory_allocated()


def blocks(model: Any) -> int:
    """What its parameters and buffers take of the allocator, each once."""
    return sum(-(-one.nbytes // 512) * 512 for one in [*model.parameters(), *model.buffers()])


def device_of(model: Any) -> set[str]:
    return {one.device.type for one in model.parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with what these packages wrote: configurations and weights."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    llama = transformers.LlamaForCausalLM(config)
    llama.save_pretrained(folder / "llama")
    llama.save_pretrained(folder / "pieces", max_shard_size="200KB")
    diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).save_pretrained(folder / "unet")
    resnet = timm.create_model("resnet10t", num_classes=10).state_dict()
    safetensors.torch.save_file(resnet, folder / "resnet.safetensors")
    torch.save(resnet, folder / "resnet.pth")
    assert len(list((folder / "pieces").glob("*.safetensors"))) > 1
    return folder


@pytest.fixture(scope="module")
def first(saved: Path) -> float:
    """A number of the model of transformers."""
    tensors = safetensors.torch.load_file(saved / "llama" / "model.safetensors")
    return float(tensors["model.embed_tokens.weight"][3, 4])


@pytest.mark.parametrize("name", ["llama", "pieces"])
def test_transformers_loads_values_on_the_host(name: str, saved: Path, first: float) -> None:
    with bfc.predict("h100"):
        model = CAUSAL.from_pretrained(saved / name)
        assert model.model.embed_tokens.weight[3, 4].item() == first
        assert (device_of(model), allocated()) == ({"cpu"}, 0)
        model.cuda()
        assert (device_of(model), allocated()) == ({"cuda"}, blocks(model))


@pytest.mark.parametrize("name", ["llama", "pieces"])
@pytest.mark.parametrize("place", ["cuda", "auto", {"": 0}], ids=["cuda", "auto", "by number"])
def test_transformers_loads_onto_the_gpu(name: str, place: Any, saved: Path) -> None:
    with bfc.predict("h100"):
        model = CAUSAL.from_pretrained(saved / name, dtype=torch.bfloat16, device_map=place)
        assert (device_of(model), allocated()) == ({"cuda"}, blocks(model))


def test_what_transformers_has_loaded_trains_and_generates(saved: Path) -> None:
    with bfc.predict("h100") as run:
        model = CAUSAL.from_pretrained(saved / "llama").cuda()
        tokens = torch.randint(0, TOKENS, (4, 64), device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = model.generate(tokens[:, :8], max_new_tokens=4, do_sample=False)
        assert found.shape == (4, 12)
        weights = sum(one.nbytes for one in model.parameters())
    assert run.peak.by_kind["parameters"] >= weights
    assert run.peak.by_kind["optimizer state"] >= 2 * weights


def test_diffusers_loads_its_models(saved: Path) -> None:
    with bfc.predict("h100"):
        on_host = diffusers.UNet2DConditionModel.from_pretrained(saved / "unet")
        assert (device_of(on_host), allocated()) == ({"cpu"}, 0)
        del on_host
        options = {"torch_dtype": torch.float16, "device_map": "cuda"}
        model = diffusers.UNet2DConditionModel.from_pretrained(saved / "unet", **options)
        assert (device_of(model), allocated()) == ({"cuda"}, blocks(model))
        image = torch.randn(2, 4, 16, 16, device="cuda", dtype=torch.float16)
        text = torch.randn(2, 7, 32, device="cuda", dtype=torch.float16)
        found = model(image, 3, text).sample
        assert found.shape == image.shape
        found.sum().backward()


@pytest.mark.parametrize("name", ["resnet.safetensors", "resnet.pth"])
def test_timm_loads_a_checkpoint(name: str, saved: Path) -> None:
    weight = safetensors.torch.load_file(saved / "resnet.safetensors")["fc.weight"]
    with bfc.predict("h100"):
        model = timm.create_model("resnet10t", num_classes=10, checkpoint_path=saved / name)
        assert model.fc.weight[2, 3].item() == weight[2, 3].item()
        model.cuda()
        assert allocated() >= blocks(model)
        model(torch.randn(2, 3, 64, 64, device="cuda")).sum().backward()


QUANTIZED = {
    "weights": quantization.Int8WeightOnlyConfig,
    "weights and activations": quantization.Int8DynamicActivationInt8WeightConfig,
    "floating point": quantization.Float8WeightOnlyConfig,
}


@pytest.mark.parametrize("what", QUANTIZED)
def test_torchao_makes_weights_of_8_bits(what: str, saved: Path) -> None:
    """The layers take half of what they do in 16 bits, and a scale for each row."""
    with bfc.predict("h100") as run:
        model = CAUSAL.from_pretrained(saved / "llama", dtype=torch.bfloat16).cuda()
        before = allocated()
        layers = [one.weight for one in model.model.modules() if type(one) is torch.nn.Linear]
        halved, rows = (sum(one.numel() for one in layers), sum(one.shape[0] for one in layers))
        del layers
        quantization.quantize_(model.model, QUANTIZED[what]())
        scales = 8 * rows + 512 * 2 * len(model.model.layers) * 7  # and how blocks are rounded
        assert halved - scales <= before - allocated() <= halved
        tokens = torch.randint(0, TOKENS, (4, 64), device="cuda")
        with torch.no_grad():
            assert model(input_ids=tokens).logits.shape == (4, 64, TOKENS)
    assert run.peak.by_kind["parameters"] >= before - halved


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao_keeps_the_state_of_an_optimizer_in_fewer_bits(name: str) -> None:
    optimizer_of: Callable[..., Any] = getattr(optimizers, name)
    bits = 4 if name == "AdamW4bit" else 8
    with bfc.predict("h100") as run:
        model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        optimizer = optimizer_of(model.parameters())
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
    state = run.peak.by_kind["optimizer state"]
    plain = 2 * 1024 * 1024 * bits // 8
    assert plain <= state < 1.1 * plain


@pytest.mark.parametrize("kind", ["Int8WeightOnly", "Float8WeightOnly"])
def test_a_configuration_says_what_torchao_s_weights_take(kind: str) -> None:
    layer, said = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False)), f"{kind}Config"
    plain = bytes_of(layer, {"quant_method": "torchao", "quant_type": {"default": {"_type": said}}})
    quantization.quantize_(layer, getattr(quantization, said)())
    weight = layer[0].weight
    names = [*weight.tensor_data_names, *getattr(weight, "optional_tensor_data_names", ())]
    parts = [one for one in (getattr(weight, name) for name in names) if one is not None]
    assert plain == sum(one.numel() * one.element_size() for one in parts)
