"""How far bfloat16 alone moves log-probs: the library's model in it against the same random weights in float32.

    python tests/gpu/bf16_floor.py SHAPE     (a folder with a config.json of Qwen2 or Llama)

All layers have the first one's weights, so that a large shape fits a small machine. Prints the mean absolute difference
of the log-probs of tokens drawn from the model.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, DRAWN = 96, 8


def logprobs(model: Any, layers: int, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """`[TOKENS, V]` float32."""
    body = model.to(dtype).model
    x, positions = body.embed_tokens(ids), torch.arange(TOKENS)[None]
    rotary = body.rotary_emb(x, positions)
    mask = torch.full((1, 1, TOKENS, TOKENS), -torch.inf, dtype=dtype).triu(1)
    for _ in range(layers):
        out = body.layers[0](x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        x = out[0] if isinstance(out, tuple) else out
    return torch.log_softmax(model.lm_head(body.norm(x)).float()[0], -1)


@torch.no_grad()
def main(folder: str) -> None:
    torch.manual_seed(0)
    config: Any = AutoConfig.from_pretrained(folder)
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    config.layer_types = (getattr(config, "layer_types", None) or ["full_attention"])[:1]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16().float())
    ids = torch.randint(3, 5000, (1, TOKENS))
    exact = logprobs(model, layers, ids, torch.float32)
    drawn = torch.multinomial(exact.exp(), DRAWN)
    difference = (exact - logprobs(model, layers, ids, torch.bfloat16)).gather(1, drawn).abs()
    print(f"{folder}: {layers} layers, mean {float(difference.mean()):.4f}, max {float(difference.max()):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
