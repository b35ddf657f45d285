"""Optimizers whose learning rates differ: which parameter is in which group, and that trainers take them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import fastft
from tests import support
from tests.trainers.cases import arguments, plain

RATE = 2e-3


def args(folder: pathlib.Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(**arguments(folder, learning_rate=RATE, weight_decay=0.1, **settings))


def rates(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """(learning rate, weight decay) of every trained parameter by name; each must be there once."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    found = [(names[id(p)], (g["lr"], g["weight_decay"])) for g in optimizer.param_groups for p in g["params"]]
    assert len(found) == len(dict(found)) == len(names)
    return dict(found)


def test_loraplus_gives_b_its_ratio(tmp_path: pathlib.Path) -> None:
    model = fastft.patch(support.add_lora(support.build_model()))
    found = rates(model, fastft.create_optimizer(model, args(tmp_path), loraplus_lr_ratio=16))
    assert {value for name, value in found.items() if "lora_A" in name} == {(RATE, 0.1)}
    assert {value for name, value in found.items() if "lora_B" in name} == {(RATE * 16, 0.1)}


@pytest.mark.parametrize("ratio", [None, 4.0])
def test_embeddings_in_modules_to_save_have_their_rate(ratio: float | None, tmp_path: pathlib.Path) -> None:
    model = support.add_lora(support.build_model(), modules_to_save=["embed_tokens", "lm_head"])
    optimizer = fastft.create_optimizer(model, args(tmp_path), loraplus_lr_ratio=ratio, embedding_learning_rate=5e-6)
    found = rates(model, optimizer)
    embeddings = {name: value for name, value in found.items() if "modules_to_save" in name}
    assert len(embeddings) == 2
    assert set(embeddings.values()) == {(5e-6, 0.1)}
    assert {rate for name, (rate, _) in found.items() if "lora_A" in name} == {RATE}
    assert {rate for name, (rate, _) in found.items() if "lora_B" in name} == {RATE * (ratio or 1)}


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_fine_tuning_decays_what_transformers_decays(tied: bool, tmp_path: pathlib.Path) -> None:
    model = support.build_model(tie_word_embeddings=tied)
    found = rates(model, fastft.create_optimizer(model, args(tmp_path), embedding_learning_rate=1e-5))
    stock = rates(model, plain(learning_rate=RATE, weight_decay=0.1)(model, tmp_path).create_optimizer())
    assert {name: decay for name, (_, decay) in found.items()} == {name: decay for name, (_, decay) in stock.items()}
    slow = {name for name, (rate, _) in found.items() if rate == 1e-5}
    assert slow == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert {decay for _, decay in found.values()} == {0.0, 0.1}


def test_adapters_on_embeddings_and_head(tmp_path: pathlib.Path) -> None:
    """Those on the embedding follow its rate (PEFT's 1e-6 without one); the head's are adapters like others."""
    model = support.add_lora(support.build_model(), target_modules=["q_proj", "embed_tokens", "lm_head"])
    for rate, expected in ((None, 1e-6), (3e-5, 3e-5)):
        optimizer = fastft.create_optimizer(model, args(tmp_path), loraplus_lr_ratio=4, embedding_learning_rate=rate)
        found = {name: value for name, (value, _) in rates(model, optimizer).items()}
        assert {value for name, value in found.items() if "lora_embedding" in name} == {expected}
        assert {value for name, value in found.items() if "lm_head.lora_B" in name} == {RATE * 4}


def test_a_trainer_takes_it_and_the_schedule_scales_each_rate(tmp_path: pathlib.Path) -> None:
    """With a ratio of 1 it is the trainer's own run; with another, B moves by that factor in the first step."""
    moved = {}
    for ratio in (None, 1.0, 8.0):
        model = fastft.patch(support.add_lora(support.build_model()))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        settings = {"max_steps": 1, "learning_rate": RATE, "optim": "adamw_torch"}
        optimizer = None
        if ratio is not None:
            optimizer = fastft.create_optimizer(
                model, TrainingArguments(**arguments(tmp_path, **settings)), loraplus_lr_ratio=ratio
            )
        trainer = plain(trainer={"optimizers": (optimizer, None)}, **settings)(model, tmp_path)
        trainer.train()
        moved[ratio] = {name: p.detach() - before[name] for name, p in model.named_parameters() if p.requires_grad}
        assert trainer.lr_scheduler.get_last_lr()[0] == RATE
    for name, step in moved[None].items():
        assert torch.equal(moved[1.0][name], step), name
        torch.testing.assert_close(moved[8.0][name], step * (8 if "lora_B" in name else 1), rtol=1e-3, atol=1e-7)


def test_eight_bit_optimizers_are_made_by_their_own_settings(tmp_path: pathlib.Path) -> None:
    import bitsandbytes

    model = support.add_lora(support.build_model(), modules_to_save=["embed_tokens"])
    optimizer = fastft.create_optimizer(model, args(tmp_path, optim="adamw_8bit"), embedding_learning_rate=1e-5)
    assert isinstance(optimizer, bitsandbytes.optim.AdamW)
    assert optimizer.args.optim_bits == 8
    overrides = bitsandbytes.optim.GlobalOptimManager.get_instance().module_weight_config_triple
    assert any(model.get_input_embeddings().modules_to_save["default"] is module for module, *_ in overrides)


@pytest.mark.parametrize(
    ("keywords", "adapters", "match"),
    [
        ({}, True, "neither loraplus_lr_ratio nor embedding_learning_rate"),
        ({"loraplus_lr_ratio": 0}, True, "loraplus_lr_ratio=0 is not positive"),
        ({"embedding_learning_rate": float("nan")}, True, "embedding_learning_rate=nan is not positive"),
        ({"loraplus_lr_ratio": 16}, False, "trains no LoRA adapter"),
        ({"embedding_learning_rate": 1e-5}, True, "no embedding is trained"),
    ],
)
def test_what_cannot_be_is_said(keywords: dict[str, Any], adapters: bool, match: str, tmp_path: pathlib.Path) -> None:
    model = support.build_model()
    model = support.add_lora(model) if adapters else model
    with pytest.raises(ValueError, match=match):
        fastft.create_optimizer(model, args(tmp_path), **keywords)


def test_an_optimizer_with_its_own_groups_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GaLore's, LOMO's and APOLLO's are, none of which has to be installed for this."""
    from transformers import Trainer

    brought = staticmethod(lambda args, model: (torch.optim.AdamW, {"lr": 1e-3, "params": []}))
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", brought)
    with pytest.raises(ValueError, match="makes its own parameter groups"):
        fastft.create_optimizer(support.add_lora(support.build_model()), args(tmp_path), loraplus_lr_ratio=16)
