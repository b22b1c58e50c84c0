"""The arguments of the programs that run a model."""

from __future__ import annotations

import argparse

#: By name: the weights, and what autocast computes in; None is no autocast.
PRECISIONS = {"bf16": ("float32", "bfloat16"), "bf16-true": ("bfloat16", None)}
PRECISIONS |= {"fp32": ("float32", None), "fp16": ("float32", "float16")}
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor"}
#: Servers whose arithmetic is known.
ENGINES = ("vllm", "sglang")
#: Tokens of all sequences in a pass of the prefill, unless something else is asked.
PREFILL = 8192


def load_in_words(concurrency: int, context: int) -> str:
    """What is served, in words."""
    sequences = "sequence" if concurrency == 1 else "sequences"
    return f"{concurrency} {sequences} of {context} tokens"


def _parser_of(task: str) -> argparse.ArgumentParser:
    """With the arguments that say which model it is."""
    parser = argparse.ArgumentParser(f"bfc predict hf:MODEL --task {task}", allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG", help="a config.json, or a class")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value in the configuration, such as num_hidden_layers=4",
    )
    parser.add_argument(
        "--attention",
        choices=("sdpa", "eager"),
        default="sdpa",
        help="how attention is computed (default: sdpa)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python files beside the config.json, if transformers does not know it",
    )
    return parser


def train_options() -> argparse.ArgumentParser:
    """What it reads its arguments with."""
    parser = _parser_of("train")
    add = parser.add_argument
    add("--batch", type=int, default=8, help="sequences in a batch (default: 8)")
    add("--seq", type=int, default=2048, help="tokens in a sequence (default: 2048)")
    add("--accumulate", type=int, default=1, metavar="N", help="batches in a step (default: 1)")
    add(
        "--precision",
        choices=list(PRECISIONS),
        default="bf16",
        help="bf16 and fp16: weights in 32 bits, and autocast (default: bf16); bf16-true: weights, "
        "gradients and states in 16 bits, too; fp32",
    )
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="(default: adamw)")
    return parser


def serve_options() -> argparse.ArgumentParser:
    """What it reads its arguments with."""
    parser = _parser_of("serve")
    add = parser.add_argument
    add("--context", type=int, default=8192, help="tokens in each sequence (default: 8192)")
    add("--concurrency", type=int, default=1, help="sequences at a time (default: 1)")
    add(
        "--prefill",
        type=int,
        default=PREFILL,
        metavar="TOKENS",
        help=f"tokens of all prompts in one pass (default: {PREFILL}; 0: all of them, as "
        "generate() does)",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the weights and the cache (default: bfloat16)",
    )
    return parser


def engine_options() -> argparse.ArgumentParser:
    """What is asked of a server, by arithmetic. The names are those of vLLM and SGLang."""
    parser = _parser_of("serve")
    add = parser.add_argument
    add("--engine", choices=ENGINES, required=True)
    add("--context", "--max-model-len", type=int, default=8192)
    add("--concurrency", type=int, default=1)
    add("--tensor-parallel-size", "--tp", type=int, default=1)
    add("--kv-cache-dtype", default="auto")
    add("--block-size", "--page-size", type=int)
    add("--gpu-memory-utilization", type=float, default=0.9)
    add("--mem-fraction-static", type=float, default=0.88)
    add("--max-num-batched-tokens", "--chunked-prefill-size", type=int, default=8192)
    add("--max-num-seqs", type=int, default=256)
    add("--weights", help="what the weights take on each GPU, if they are not in 16 bits: 5.2GiB")
    return parser
