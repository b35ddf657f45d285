"""Minutes and memory of every way to save a model of a real size: merged, and GGUF in several types.

usage: export.py SHAPE FOLDER [--forms original merged f16 q8_0 q4_k_m dynamic] [--threads 2] [--delete-base]
                 [--out FILE.csv]        SHAPE: llama-8b | llama-1b | tiny

Writes a random-weight checkpoint of the shape (bfloat16, a shard a layer; Llama 3's sizes and RoPE scaling) to
FOLDER/base, one layer in memory at a time, loads it in 4 bits on the CPU, adds LoRA of rank 16 to all projections, and
saves it to FOLDER/saved: merged into the original base, then into the dequantized one. GGUF files are made beside what
is there (the part of save_gguf that comes after merging; the live model is gone by then). Each GGUF is deleted before
the next is made, and FOLDER/saved at the end. --delete-base deletes the checkpoint as soon as nothing needs it: then
the disk holds two 16-bit copies of the model at most. What an earlier run left in FOLDER is used again.

Of each save: minutes of the wall clock, and the peak of memory above what the process (the live model, mostly) held
before. "own" is memory that only swapping could free (RssAnon, sampled every 20 ms); "resident" counts pages of files
too, which the kernel drops when it needs room (VmHWM, the kernel's own high-water mark).
"""

import argparse
import csv
import gc
import json
import pathlib
import shutil
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

ap = argparse.ArgumentParser()
ap.add_argument("shape", choices=["llama-8b", "llama-1b", "tiny"])
ap.add_argument("folder", type=pathlib.Path)
FORMS = "original merged f16 q8_0 q4_k_m dynamic"
ap.add_argument("--forms", nargs="*", default=FORMS.split(), choices=FORMS.split())
ap.add_argument("--threads", type=int, default=2)
ap.add_argument("--delete-base", action="store_true")
ap.add_argument("--out")
a = ap.parse_args()

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastft import FastModel
from fastft.saving import gguf_file

torch.set_num_threads(a.threads)

BASES = {"original": "original", "merged": "dequantized"}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES = {
    "llama-8b": LLAMA_3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
    | {"tie_word_embeddings": False, "rope_parameters": ROPE | {"factor": 8.0}},
    "llama-1b": LLAMA_3
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    | {"tie_word_embeddings": True, "rope_parameters": ROPE | {"factor": 32.0}},
    "tiny": {
        "vocab_size": 512,
        "max_position_embeddings": 16384,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    }
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPE | {"factor": 8.0}},
}


def make_base(folder: pathlib.Path) -> None:
    """A checkpoint of random weights, shard by shard."""
    config = transformers.LlamaConfig(**SHAPES[a.shape], rms_norm_eps=1e-5, bos_token_id=256, eos_token_id=257)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.tie_weights()
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():  # a tied head is the embedding, named once
        part = name.split(".")
        shards.setdefault(part[2] if part[1] == "layers" else name, {})[name] = parameter.shape
    partial = folder.with_suffix(".partial")
    partial.mkdir(parents=True)
    generator, files = torch.Generator().manual_seed(0), {}
    for index, shapes in enumerate(shards.values()):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        weights = {}
        for name, shape in shapes.items():
            weight = torch.empty(shape, dtype=torch.bfloat16)
            weights[name] = weight.normal_(0, 0.02, generator=generator) if len(shape) > 1 else weight.fill_(1)
            files[name] = file
        save_file(weights, partial / file, metadata={"format": "pt"})
    (partial / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config.save_pretrained(partial)
    make_tokenizer().save_pretrained(partial)
    partial.rename(folder)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level without merges: the rest of the vocabulary is unused tokens, which take their space all the same."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def status() -> dict[str, int]:
    """Lines of /proc/self/status that count kB, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}


class Watch:
    """Minutes and peak memory of a `with` block, above what was held before it."""

    def __enter__(self) -> "Watch":
        gc.collect()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        self.before, self.start, self.own, self.done = status(), time.perf_counter(), 0, threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self) -> None:
        while not self.done.wait(0.02):
            self.own = max(self.own, status()["RssAnon"])

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        self.minutes = (time.perf_counter() - self.start) / 60
        self.own = max(0, self.own - self.before["RssAnon"])
        self.resident = status()["VmHWM"] - self.before["VmRSS"]


def live_model(base: pathlib.Path) -> tuple[Any, Any]:
    """In 4 bits, with LoRA whose B is not zero."""
    model, tokenizer = FastModel.from_pretrained(base, load_in_4bit=True, dtype=torch.bfloat16, device_map="cpu")
    model = FastModel.get_peft_model(model, r=16, lora_alpha=16, random_state=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 1e-3, generator=generator)
    return model, tokenizer


def measure(form: str, model: Any, tokenizer: Any) -> dict[str, object]:
    """Save in one form; returns the row of the table."""
    folder = a.folder / "saved"
    saved = SimpleNamespace(folder=folder)  # all that the rest of save_gguf asks of a merged save
    with Watch() as watch:
        if form in BASES:
            files = list(FastModel.save_merged(model, tokenizer, folder, base=BASES[form]).folder.glob("*.safetensors"))
        else:
            with mock.patch.object(gguf_file, "save_merged", return_value=saved):
                files = [FastModel.save_gguf(model, tokenizer, folder, quantization=form).file]
    row = {
        "form": form,
        "GiB": round(sum(file.stat().st_size for file in files) / 2**30, 2),
        "minutes": round(watch.minutes, 2),
        "own GiB": round(watch.own / 2**30, 2),
        "resident GiB": round(watch.resident / 2**30, 2),
    }
    if form not in BASES:
        files[0].unlink()
    return row


def main() -> None:
    base, saved, rows, model = a.folder / "base", a.folder / "saved", [], None
    print(f"{a.shape}, {a.threads} threads, torch {torch.__version__}, transformers {transformers.__version__}")
    for form in [form for form in FORMS.split() if form in a.forms]:
        if form in BASES:
            if not base.is_dir():
                make_base(base)
            if model is None:
                with Watch() as watch:
                    model, tokenizer = live_model(base)
                print(f"loaded in 4 bits: {watch.minutes:.1f} minutes, {watch.own / 2**30:.2f} GiB", flush=True)
            shutil.rmtree(saved, ignore_errors=True)
            if a.delete_base and form == "merged":
                shutil.rmtree(base)
        elif model is None or model.device.type != "meta":
            # From here the checkpoint is what counts: of the model only what it looks like.
            config, tokenizer = AutoConfig.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        rows.append(measure(form, model, tokenizer))
        print(rows[-1], flush=True)
    shutil.rmtree(saved, ignore_errors=True)
    if a.out:
        with open(a.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


main()
