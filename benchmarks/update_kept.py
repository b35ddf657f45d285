"""How much of a small QLoRA update outlives rounding to nearest in each compressed format, on three bases.

usage: update_kept.py MODEL.gguf --text FILE.jsonl [--steps 8]

Trains LoRA (r=8) for a few steps over the NF4 model, in bfloat16. The update of each projection is then added to the
NF4 weights made dense, to the original weights, and to the original weights moved by noise within their 4-bit rounding
intervals (as --unround of gguf_perplexity.py does), and rounded by the formats' definitions: no llm-compressor needed.
Printed is the share ⟨R(W + Δ) − W, Δ⟩ / ⟨Δ, Δ⟩ over all projections.
"""

import argparse
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM

from fastft import FastModel
from fastft.loading.gguf import dequantized_folder
from fastft.patching.plan import inner_model
from fastft.saving.compressed.schemes import resolve_scheme, rounded
from fastft.saving.fold import fold
from fastft.saving.layout import owner

ap = argparse.ArgumentParser()
ap.add_argument("model")
ap.add_argument("--text", required=True)
ap.add_argument("--steps", type=int, default=8)
ap.add_argument("--group-size", type=int, default=64, help="of w4a16")
a = ap.parse_args()

model, tokenizer = FastModel.from_pretrained(a.model, dtype="bfloat16")
model = FastModel.get_peft_model(model, r=8).train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
lines = pathlib.Path(a.text).read_text(encoding="utf-8").splitlines()[:4]
texts = ["\n".join(value for value in json.loads(line).values() if isinstance(value, str)) for line in lines]
batches = [tokenizer(text, return_tensors="pt")["input_ids"][:, :128] for text in texts]
for step in range(a.steps):
    ids = batches[step % len(batches)]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def unround(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.reshape(-1, 32)
    step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    return (blocks + noise * step).reshape(weight.shape)


inner = inner_model(model)
original = AutoModelForCausalLM.from_pretrained(dequantized_folder(pathlib.Path(a.model)), dtype=torch.float32)
lost: dict[tuple[str, str], float] = {}
updates = weights = 0.0
with torch.no_grad():
    for name, parameter in original.named_parameters():
        if not name.endswith("_proj.weight"):
            continue
        base, folded = fold(*owner(inner, name), name)
        update = (folded - base).cpu()
        updates += float(update.square().sum(dtype=torch.float64))
        weights += float(base.square().sum(dtype=torch.float64))
        for kind, dense in (("nf4", base.cpu()), ("original", parameter), ("unrounded", unround(parameter))):
            merged = (dense + update).bfloat16().float()
            for scheme in ("int8", "fp8_dynamic", "mxfp4", "nvfp4", "w4a16"):
                error = rounded(merged, resolve_scheme(scheme), a.group_size if scheme == "w4a16" else None) - merged
                lost[kind, scheme] = lost.get((kind, scheme), 0.0) - float((error * update).sum(dtype=torch.float64))
print(f"the update is {(updates / weights) ** 0.5:.4f} of the weights")
for (kind, scheme), value in lost.items():
    print(f"{kind:10} {scheme:12} {1 - value / updates:.3f}")
