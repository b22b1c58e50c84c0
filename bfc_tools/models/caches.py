"""What a decoder keeps of each token, by its configuration: the bytes of its cache, layer by layer.

Nothing is run: the figures follow from the numbers in a config.json, as vLLM and SGLang count them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bfc_tools.models.names import text_part

FULL, SLIDING, LATENT = "full", "sliding", "latent"
#: Bytes of a value, by the name that servers give the type of a cache.
CACHE_TYPES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
#: Of latent keys and values in 8 bits that are looked up sparsely, so many values share a scale of
#: so many bytes; the part with the positions has two bytes a value.
SHARE, SCALE, POSITION = 128, 4, 2
#: Kinds of layers, as configurations name them, that keep the same for any number of tokens.
STATES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm")
#: Models of which layers keep such a state, and whose configuration has no list of kinds.
OF_STATES = (
    *("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "rwkv"),
    *("recurrent_gemma", "nemotron_h", "kimi_linear", "minimax"),
)


@dataclass(frozen=True)
class Layer:
    """What a layer of attention keeps on one GPU, in bytes of each token: keys and values."""

    kind: str  # full, sliding or latent
    keys: int
    values: int = 0  # latent ones have both in one
    window: int | None = None  # the tokens that a sliding one looks back

    @property
    def nbytes(self) -> int:
        """The bytes of a token."""
        return self.keys + self.values


def layers_of(config: Mapping[str, Any], tp: int = 1, cache: str = "auto") -> list[Layer]:
    """What each layer of a model keeps on each of `tp` GPUs. `cache` names the type of the values.

    Raises ValueError with what the configuration lacks, or with what is not known of such a model.
    """
    if cache not in CACHE_TYPES:
        raise ValueError(f"a cache of {cache} is not known: it is one of {', '.join(CACHE_TYPES)}")
    config = text_part(config)
    count = _number(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    kinds = _kinds(config, count)
    if config.get("kv_lora_rank"):
        return [_latent(config, CACHE_TYPES[cache])] * count
    made = {kind: _attention(config, kind, tp, CACHE_TYPES[cache]) for kind in set(kinds)}
    return [made[kind] for kind in kinds]


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        found = config.get(name)
        if isinstance(found, int) and found > 0:
            return found
    raise ValueError(f"the configuration has no {names[0]}, without which its cache is not known")


def _latent(config: Mapping[str, Any], width: int) -> Layer:
    """What attention keeps that compresses keys and values: the same on each GPU."""
    rank = _number(config, "kv_lora_rank")
    position = _number(config, "qk_rope_head_dim")
    index = config.get("index_head_dim") or 0
    if not index:
        return Layer(LATENT, width * (rank + position))
    kept = 2 * (rank + position)
    if width == 1:
        kept = rank + rank // SHARE * SCALE + POSITION * position
    return Layer(LATENT, kept + index + index // SHARE * SCALE)


def _attention(config: Mapping[str, Any], kind: str, tp: int, width: int) -> Layer:
    """What a layer keeps of the heads that lie on one GPU."""
    heads = _number(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    swa = "swa_" if kind == SLIDING else ""  # a few models give these layers other heads
    total = config.get(f"{swa}num_key_value_heads") or _kv_heads(config, heads)
    size = config.get(f"{swa}head_dim") or config.get("head_dim")
    if not size:
        size = _number(config, "hidden_size", "n_embd", "d_model") // heads
    values = config.get(f"{swa}v_head_dim") or config.get("v_head_dim") or size
    if max(total, tp) % min(total, tp):
        raise ValueError(f"{total} heads of keys and values cannot be divided among {tp} GPUs")
    held = max(1, total // tp)
    window = config.get("sliding_window") if kind == SLIDING else None
    return Layer(kind, width * held * size, width * held * values, window)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """How many heads of keys and values all GPUs have together."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1  # Falcon
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_key_value_groups"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return heads


def _kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """Whether each layer looks at all tokens, or at a window of them."""
    listed = config.get("layer_types") or config.get("layers_block_type")
    listed = [str(one) for one in listed] if listed else []
    states = [one for one in listed if one in STATES]
    if states or config.get("model_type") in OF_STATES:
        what = f"layers of {states[0]}" if states else "such layers"
        raise ValueError(
            f"a {config.get('model_type')} has {what}, which keep a state that is not of tokens: "
            "how servers lay that out is not known here"
        )
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return [FULL] * count
    if listed:
        return [SLIDING if one == "sliding_attention" else FULL for one in listed]
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int):  # each so many layers the last is full
        return [FULL if (at + 1) % pattern == 0 else SLIDING for at in range(count)]
    return [SLIDING] * count
