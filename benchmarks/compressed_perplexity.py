"""Size, logit error and perplexity of one model in every compressed format.

usage: compressed_perplexity.py MODEL --text FILE --calibration FILE [--tokens 4096] [--calibration-rows 128]
                                [--schemes fp8_dynamic w4a16+ …] [--group-size 64] [--dtype bfloat16] [--unround]
                                [--out FILE.csv]

In an environment with llm-compressor (docs/saving.md). MODEL is a folder, or a .gguf that is made dense first. FILE is
a text, or .jsonl whose rows' string fields are joined; the calibration text must be another one than what is measured
on. Each scheme is written by `compress_checkpoint`, which checks it, and loaded by plain transformers; perplexity is
over rows of 512 tokens, KL the mean divergence from the uncompressed model's predictions in nats a token. A scheme with
a + is calibrated, which fp8 and nvfp4 must be. --unround as in gguf_perplexity.py.
"""

import argparse
import csv
import math
import pathlib
import sys
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastft.loading.gguf import dequantized_folder
from fastft.saving.compressed.checkpoint import compress_checkpoint
from perplexity_data import read, unround

ap = argparse.ArgumentParser()
ap.add_argument("model")
ap.add_argument("--text", required=True)
ap.add_argument("--calibration", required=True)
ap.add_argument("--calibration-rows", type=int, default=128)
ap.add_argument("--tokens", type=int, default=4096)
SCHEMES = "fp8_dynamic fp8+ int8 int8+ w4a16 w4a16+ nvfp4a16 nvfp4+ mxfp4a16 mxfp4"
ap.add_argument("--schemes", nargs="*", default=SCHEMES.split())
ap.add_argument("--group-size", type=int, help="for w4a16")
ap.add_argument("--dtype", default="bfloat16")
ap.add_argument("--unround", action="store_true")
ap.add_argument("--out")
a = ap.parse_args()


@torch.no_grad()
def measure(folder: pathlib.Path) -> tuple[float, float, list[torch.Tensor]]:
    """Perplexity of the model in `folder`, its divergence from the first one measured, and its log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    total = divergence = count = 0.0
    found = []
    for index, ids in enumerate(rows):
        found.append(model(ids[None]).logits[0, :-1].float().log_softmax(-1))
        expected = reference[index] if reference else found[index]
        total -= float(found[index].gather(1, ids[1:, None]).sum())
        divergence += float((expected.exp() * (expected - found[index])).sum())
        count += len(ids) - 1
    return math.exp(total / count), divergence / count, found


folder = dequantized_folder(pathlib.Path(a.model)) if a.model.endswith(".gguf") else pathlib.Path(a.model)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
if a.unround:
    unround(model)
work = pathlib.Path(tempfile.mkdtemp(prefix="compressed-perplexity-"))
model.to(getattr(torch, a.dtype)).save_pretrained(work / "merged")
tokenizer.save_pretrained(work / "merged")
ids = torch.tensor(tokenizer("\n\n".join(read(a.text))[: 8 * a.tokens])["input_ids"])[: a.tokens]
rows = [row for row in ids.split(512) if len(row) > 1]
texts = read(a.calibration)[: a.calibration_rows]
reference: list[torch.Tensor] = []
perplexity, _, reference = measure(work / "merged")
size = (work / "merged" / "model.safetensors").stat().st_size
results: list[dict[str, object]] = [
    {"scheme": a.dtype, "MB": round(size / 1e6, 1), "perplexity": round(perplexity, 3), "KL": 0.0}
]
print(results[0], flush=True)
for name in a.schemes:
    start = time.perf_counter()
    saved = compress_checkpoint(
        work / "merged",
        work / "out",
        scheme=name.rstrip("+"),
        calibration=texts if name.endswith("+") else None,
        group_size=a.group_size if name.startswith("w4a16") else None,
    )
    seconds = time.perf_counter() - start
    perplexity, divergence, _ = measure(saved.folder)
    results.append(
        {
            "scheme": name,
            "algorithm": saved.algorithm,
            "MB": round(saved.bytes / 1e6, 1),
            "logit error": round(saved.difference, 4),
            "allowed": round(saved.allowed, 3),
            "worst weight": round(saved.largest_error, 4),
            "perplexity": round(perplexity, 3),
            "KL": round(divergence, 4),
            "seconds": round(seconds, 1),
        }
    )
    print(results[-1], flush=True)
if a.out:
    with open(a.out, "w", newline="", encoding="utf-8") as file:
        fields = list(results[-1])
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(results)
sys.stdout.flush()
