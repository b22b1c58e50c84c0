"""transformers#48131: the load-balancing loss of a mixture of experts."""

import bfc
from bfc_tools.museum.case import Case, Trial

TABLE = ((8192, "5.3 GB"), (32_768, "20.5 GB"), (65_536, "40.7 GB"), (131_072, "81.2 GB"))


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import one_hot

    for tokens, text in TABLE:
        with bfc.predict(device="h100"):
            gates = torch.randn(48, tokens, 128, device="cuda", dtype=torch.bfloat16).unbind()
            before = torch.cuda.memory_allocated()
            for is_cured in (False, True):
                torch.cuda.reset_peak_memory_stats()
                for logits in gates if is_cured else [torch.cat(gates)]:
                    chances = logits.softmax(-1)
                    chosen = torch.topk(chances, 8)
                    masks = one_hot(chosen[1], 128)
                    (masks.float().mean(0) * chances.mean(0)).sum()
                    del logits, chances, chosen, masks
                peak = torch.cuda.max_memory_allocated() - before
                if not is_cured:
                    trial.published(f"at most, {tokens >> 10}K tokens", text, peak)
    trial.cured("layer by layer, 128K tokens", "1793.1 MB", peak)


CASE = Case(
    title="The loss that balances 48 layers of experts takes 81 GB beside the model",
    source="huggingface/transformers#48131",
    date="2026-08-19",
    library="PyTorch",
    kind="prediction",
    version="as of August 2026",
    observed="For 48 layers of 128 experts, of which each token takes 8, the function alone takes "
    "5.3 GB for 8K tokens and 81.2 GB for 128K on an H100.",
    why="The choices of all layers are put together and become a mask of eight bytes for each "
    "token, choice and expert. Its copy in single precision, for the mean, is half as large again.",
    cure="one layer after the other",
    upstream="Merged; it also counts the choices without a mask, and takes 0.25 GB for 128K.",
    inferred=("The figures are those of the call alone, above what its inputs take.",),
    reproduce=reproduce,
    needs_torch=True,
)
