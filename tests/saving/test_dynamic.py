"""The dynamic mixture: bits go where they save most, within the size; and what an error costs is measured rightly."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import pytest
import torch

import fastft
from fastft import FastModel
from fastft.saving.dynamic import Option, _sample, budget_bytes, cost, lower_hull, spend
from fastft.saving.importance import Importance, measure_importance
from tests import support
from tests.saving.tokenizers import VOCABULARY, byte_level

gguf = pytest.importorskip("gguf")

TEXTS = ["the cat in the hat", "a bird in the hand is worth two in the bush", "the end"]


def build(family: str = "llama", **overrides: Any) -> Any:
    settings = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return support.build_model(family, **(settings | special | overrides))


def importance_of(model: Any, texts: list[str] = TEXTS) -> Importance:
    return measure_importance(model, byte_level(), texts)


def options(seed: int) -> dict[str, list[Option]]:
    """Four tensors whose costs fall with size, not always convexly."""
    numbers = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)).tolist()
    return {
        str(index): [Option(f"{step}", 10 + 7 * step + index, sum(row[step:])) for step in range(5)]
        for index, row in enumerate(numbers)
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("price", [0.001, 0.003, 0.01, 0.03, 0.1])
def test_where_one_price_of_a_byte_gives_a_choice_that_choice_is_found(price: float, seed: int) -> None:
    tensors = options(seed)
    best = [min(choices, key=lambda option: option.cost + price * option.size) for choices in tensors.values()]
    found = spend(tensors, sum(option.size for option in best))
    assert list(found.values()) == [option.kind for option in best]


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_nearly_the_best_of_its_size(seed: int) -> None:
    """Against every other choice of any size."""
    tensors = options(seed)
    for budget in range(50, 190, 9):
        chosen = {
            name: next(o for o in tensors[name] if o.kind == kind) for name, kind in spend(tensors, budget).items()
        }
        size = sum(option.size for option in chosen.values())
        assert size <= budget
        others = (c for c in itertools.product(*tensors.values()) if sum(o.size for o in c) <= budget)
        best = min(sum(o.cost for o in c) for c in others)
        step = max(a.cost - b.cost for choices in tensors.values() for a, b in itertools.pairwise(lower_hull(choices)))
        found = sum(option.cost for option in chosen.values())
        assert best - 1e-9 <= found <= best + step


def test_what_another_type_does_better_is_left_out() -> None:
    choices = [
        Option("a", 10, 9.0),
        Option("b", 12, 8.0),
        Option("c", 14, 3.0),
        Option("d", 15, 3.5),
        Option("e", 20, 1.0),
    ]
    assert [option.kind for option in lower_hull(choices)] == ["a", "c", "e"]


def test_sizes_are_read() -> None:
    shapes = {"a": (256, 256), "b": (256,)}
    weights = 256 * 257
    assert budget_bytes("4.5bpw", shapes, 1000) == int(4.5 * weights / 8)
    assert budget_bytes("1MiB", shapes, 1000) == 2**20 - 1000
    assert budget_bytes("0.1 MB", shapes, 0) == budget_bytes(100_000, shapes, 0) == 100_000
    for wrong in ("4.5", "1.2.3MB", "large", "3 bits", "-5MB"):
        with pytest.raises(ValueError, match=r"is no size|cannot be had"):
            budget_bytes(wrong, shapes, 0)


def test_importance_is_that_of_gradients_and_inputs() -> None:
    """Against autograd, token by token, labels drawn; q's rows in GGUF's order; the model is as before."""
    model = support.add_lora(build())
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    found = importance_of(model)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert not [m for m in model.modules() if m._forward_hooks]

    seen: dict[str, list[Any]] = {"q_proj": [], "down_proj": [], "lm_head": []}
    inner = model.get_base_model().eval()
    layer = inner.model.layers[1]
    for name, module in {
        "q_proj": layer.self_attn.q_proj,
        "down_proj": layer.mlp.down_proj,
        "lm_head": inner.lm_head,
    }.items():
        module.register_forward_hook(lambda _, args, output, name=name: seen[name].append((args[0], output)))
    g: dict[str, list[torch.Tensor]] = {name: [] for name in seen}
    generator = torch.Generator().manual_seed(0)
    for text in TEXTS:
        ids = torch.tensor([byte_level()(text)["input_ids"]])
        log_probabilities = inner(ids).logits[0].log_softmax(-1)
        drawn = torch.multinomial(log_probabilities.detach().exp(), 1, generator=generator)
        loss = -log_probabilities.gather(1, drawn).sum()
        for name, gradient in zip(seen, torch.autograd.grad(loss, [seen[n][-1][1] for n in seen]), strict=True):
            g[name].append(gradient[0])
    for name, target in {"q_proj": "blk.1.attn_q", "down_proj": "blk.1.ffn_down", "lm_head": "output"}.items():
        x, gradient = torch.cat([pair[0][0] for pair in seen[name]]), torch.cat(g[name])
        ((rows, columns),) = found.terms[f"{target}.weight"]
        expected = gradient.square().mean(0)
        if name == "q_proj":
            expected = expected.view(4, 2, 32).transpose(1, 2).reshape(-1)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-12)
        worth = gradient.square().sum(1, keepdim=True)
        torch.testing.assert_close(columns, (worth * x.square()).sum(0) / worth.sum(), rtol=1e-4, atol=1e-12)
    assert found.tokens == sum(len(byte_level()(text)["input_ids"]) for text in TEXTS)
    assert len(found.terms) == 2 * 7 + 2


def test_importance_is_summed_in_float32_under_autocast() -> None:
    """In bfloat16 a sum over some hundred texts would not grow any more."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = importance_of(support.add_lora(build()))
    assert {part.dtype for terms in found.terms.values() for term in terms for part in term} == {torch.float32}


def test_a_cost_is_what_the_formula_says() -> None:
    """Σ rowsᵢ columnsⱼ Δᵢⱼ², over all rows from a sample of them; without terms the share of noise."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 256, generator=generator)
    rows, columns = torch.rand(8, generator=generator), torch.rand(256, generator=generator)
    from fastft.saving.quantizers import quantize

    dense = torch.from_numpy(gguf.dequantize(quantize(matrix, "q3_k", columns), gguf.GGMLQuantizationType.Q3_K))
    expected = float((rows[:, None] * columns * (dense - matrix).square()).sum())
    everything = slice(None)
    assert cost(matrix, everything, "q3_k", [(rows, columns)], columns) == pytest.approx(expected, rel=1e-5)
    assert 0.01 < cost(matrix, everything, "q3_k", None, None) < 0.03
    kept = slice(1, None, 2)
    sampled = cost(matrix[kept], kept, "q3_k", [(rows, columns)], columns)
    assert sampled == pytest.approx(expected, rel=0.2)


def test_a_sample_has_rows_whatever_the_shape() -> None:
    for shape in ((1, 2**21), (3, 2**20), (4096, 512), (2, 32)):
        matrix = torch.zeros(1).expand(shape)
        rows, kept = _sample(matrix)
        assert 0 < len(rows) == len(matrix[kept])
        assert rows.numel() <= max(2 * 2**19, shape[1])


def test_a_tied_head_counts_as_both(tmp_path: pathlib.Path) -> None:
    found = importance_of(build(tie_word_embeddings=True))
    assert len(found.terms["token_embd.weight"]) == 2
    assert "output.weight" not in found.terms
    columns = found.columns("token_embd.weight")
    assert columns is not None
    assert columns.shape == (256,)


def test_a_four_bit_model_is_measured_too(tmp_path: pathlib.Path) -> None:
    base = support.load_4bit(support.build_model(vocab_size=VOCABULARY), tmp_path / "base")
    model = fastft.patch(support.add_lora(base))
    found = importance_of(model)
    assert all(
        bool((rows > 0).any() and (columns > 0).any()) for terms in found.terms.values() for rows, columns in terms
    )


@pytest.mark.parametrize("calibration", [None, TEXTS], ids=["plain", "calibrated"])
def test_a_file_keeps_to_its_size_and_spends_it(calibration: Any, tmp_path: pathlib.Path) -> None:
    model = support.add_lora(build())
    saved = FastModel.save_gguf(
        model, byte_level(), tmp_path / "out", quantization="dynamic", size="4.2bpw", calibration=calibration
    )
    weights = sum(parameter.numel() for parameter in build().parameters())
    data = sum(tensor.n_bytes for tensor in gguf.GGUFReader(saved.file).tensors)
    assert 4.0 < 8 * data / weights <= 4.2
    assert len(set(saved.types.values())) > 2
    assert saved.file.name == "out-dynamic.gguf"
    size = 900_000
    saved = FastModel.save_gguf(
        model, byte_level(), tmp_path / "out", quantization="dynamic", size=size, calibration=calibration
    )
    assert 0.95 * size < saved.file.stat().st_size <= size


def test_without_a_size_it_is_as_large_as_the_usual_mixture(tmp_path: pathlib.Path) -> None:
    model = support.add_lora(build())
    dynamic = FastModel.save_gguf(model, byte_level(), tmp_path / "dynamic", quantization="dynamic")
    usual = FastModel.save_gguf(model, byte_level(), tmp_path / "usual", quantization="quantized")
    sizes = [saved.file.stat().st_size for saved in (dynamic, usual)]
    assert 0.97 * sizes[1] < sizes[0] <= sizes[1]


def test_bits_go_to_what_the_texts_need(tmp_path: pathlib.Path) -> None:
    """One MLP is switched off by its down projection: errors of its gate and up cost nothing, so they get no bits."""
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-4)
    saved = FastModel.save_gguf(
        model, byte_level(), tmp_path / "out", quantization="dynamic", size="4.5bpw", calibration=TEXTS
    )
    assert saved.types["blk.1.ffn_gate.weight"] == saved.types["blk.1.ffn_up.weight"] == "q2_k"
    assert saved.types["blk.0.ffn_up.weight"] > "q2_k"
