"""Every trainer of `cases.py` on a real model or on a GPU, by hand: too long for CI. Prints how far the two runs part.

    python -m tests.trainers.real_model MODEL_DIR [CASE ...] [--learning-rate 2e-4] [--out FILE.jsonl]

MODEL_DIR is a checkpoint with its tokenizer (SmolLM2-135M-Instruct: as tests/test_real_model.py makes its folder), or
`tiny` for the random models of the test suite. Float32, ten optimizer steps, stock and planned from the same seed, on
the GPU if there is one. For each case one JSON line: the largest difference of any logged metric, over the metric's
size (of 1 where it is smaller), the metric and step, whether names, counts and completions are equal, and what the
harness says. A case that stock itself cannot run here (a chat template without `generation`) says so.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

import fastft
from tests import support
from tests.trainers import cases, harness


def differences(fast: harness.Log, stock: harness.Log) -> Iterator[tuple[float, str, int]]:
    """(difference over the metric's size, name, step) of every value that is neither a time nor an accuracy."""
    for name, step, value, expected in harness.compared(fast, stock):
        if not harness.is_accuracy(name) and not (math.isnan(expected) and math.isnan(value)):
            yield abs(value - expected) / max(1.0, abs(expected)), name, -1 if step is None else step


def quieted(model: Any) -> Any:
    """Adapters that leave the model its knowledge: the suite's random ones are made for random weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.1)
    return model


def use_real_model(folder: pathlib.Path) -> None:
    """Let the cases train this checkpoint with its own tokenizer."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def build(case: harness.Case) -> Any:
        if case.architecture == "classification":
            with support.seeded(0):  # the score head is new
                model = AutoModelForSequenceClassification.from_pretrained(
                    folder, num_labels=case.labels, dtype=torch.float32
                )
            model.config.pad_token_id = tokenizer.pad_token_id
            return quieted(harness.adapted_classifier(model.train()))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        return quieted(support.add_lora(model)) if case.lora else model

    cases.TOKENIZER = tokenizer
    harness.build = build


def measure(case: harness.Case) -> dict[str, Any]:
    """One case, stock and planned."""
    with tempfile.TemporaryDirectory(prefix="fastft-trainers-") as folder:
        try:
            _, stock, stock_noted = harness.run(case, pathlib.Path(folder) / "stock", fast=False)
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            return {"case": case.name, "stock cannot": f"{type(error).__name__}: {str(error)[:200]}"}
        model, fast, fast_noted = harness.run(case, pathlib.Path(folder) / "fast", fast=True)
    losses = [entry["loss"] for entry in stock if "loss" in entry]
    found: dict[str, Any] = {"case": case.name, "steps": len(losses), "losses": [losses[0], losses[-1]]}
    found["same names"] = [sorted(entry) for entry in fast] == [sorted(entry) for entry in stock]
    if found["same names"]:
        largest, name, step = max(differences(fast, stock))
        found |= {"largest difference": float(f"{largest:.2e}"), "of": name, "at step": step}
    found["same completions"] = fast_noted == stock_noted
    try:
        harness.assert_same_log(fast, stock, case.tolerance)
        harness.assert_ran(model, case)
        found["verdict"] = "ok"
    except AssertionError as error:
        found["verdict"] = str(error).splitlines()[0][:300] if str(error) else "not equal"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--out")
    options = parser.parse_args()
    original = cases.arguments

    def arguments(folder: pathlib.Path, **settings: Any) -> dict[str, Any]:
        here = {"learning_rate": options.learning_rate, "use_cpu": not torch.cuda.is_available()}
        return original(folder, **{**settings, **here})

    cases.arguments = arguments
    if options.model != "tiny":
        use_real_model(pathlib.Path(options.model))
    for case in cases.CASES:
        if case.name == "loop" or (options.cases and case.name not in options.cases):
            continue
        line = json.dumps(measure(case) | {"fastft": fastft.__version__, "torch": torch.__version__})
        print(line, flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    main()
