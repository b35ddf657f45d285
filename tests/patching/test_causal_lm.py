"""The causal LM's forward: which loss, over which targets, and what becomes of the logits."""

from __future__ import annotations

import copy
import pathlib
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional

import fastft
from fastft.patching.plan import inner_model
from tests import support
from tests.patching.helpers import (
    assert_ran_fast,
    assert_same_step,
    relative_error,
    rows,
    runs,
    sites,
    step,
    twins,
)

Batch = dict[str, torch.Tensor]


@pytest.fixture(params=["lora", "all trained"])
def model_pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """(stock, fast), with adapters over a frozen head, and with a trained head."""
    model = support.build_model()
    return twins(support.add_lora(model) if request.param == "lora" else model)


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# --- which tokens count, and by what the sum is divided --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:fastft. a batch had no supervised tokens")
@pytest.mark.parametrize("count", [None, 7, 0, torch.tensor(0)], ids=["no count", "7", "0", "tensor 0"])
@pytest.mark.parametrize("nothing", ["all ignored", "only the first position", "one token"])
def test_nothing_to_learn_is_exactly_zero(nothing: str, count: Any, model_pair: tuple[Any, Any]) -> None:
    """C01, C02: joined to the graph, a finite zero gradient on every trainable tensor (stock: NaN)."""
    _, fast = model_pair
    ids = torch.randint(3, support.VOCABULARY, (2, 1 if nothing == "one token" else 9))
    labels = torch.full_like(ids, -100)
    if nothing != "all ignored":
        labels[:, 0] = ids[:, 0]
    loss = fast(input_ids=ids, labels=labels, num_items_in_batch=count).loss
    assert loss.item() == 0
    assert loss.requires_grad
    loss.backward()
    for name, parameter in fast.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name
    assert runs(fast, "loss") == (1, 0)


def test_nothing_to_learn_warns_with_the_usual_causes() -> None:
    fast = fastft.patch(support.build_model())
    ids = torch.randint(3, support.VOCABULARY, (2, 9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast(input_ids=ids, labels=torch.full_like(ids, -100))
    messages = [str(w.message) for w in caught if "fastft" in str(w.message)]
    assert len(messages) == 1
    assert "truncation" in messages[0]
    assert "response markers" in messages[0]


@pytest.mark.filterwarnings("ignore:fastft. a batch had no supervised tokens")
def test_an_empty_batch_among_others_changes_nothing(batch: Batch, model_pair: tuple[Any, Any]) -> None:
    """C01: the other micro-batch's gradients are as they would have been alone."""
    _, fast = model_pair
    alone = step(fast, batch, num_items_in_batch=16)
    fast.zero_grad()
    fast(
        input_ids=batch["input_ids"], labels=torch.full_like(batch["labels"], -100), num_items_in_batch=16
    ).loss.backward()
    fast(**batch, num_items_in_batch=16).loss.backward()
    for name, parameter in fast.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, alone.gradients[name]), name


def test_accumulated_micro_batches_equal_one_batch(model_pair: tuple[Any, Any]) -> None:
    """C03: with the count over all of them; the mean of two means is not it."""
    _, fast = model_pair
    batch = support.random_batch(rows=2, length=10)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, 0] = batch["labels"][0, 1] = -100  # 8 targets
    batch["labels"][1, :8] = -100  # 2 targets
    whole = step(fast, batch)
    fast.zero_grad(set_to_none=True)
    losses = []
    for row in range(2):
        loss = fast(**{k: v[row : row + 1] for k, v in batch.items()}, num_items_in_batch=10).loss
        loss.backward()
        losses.append(loss.item())
    assert sum(losses) == pytest.approx(whole.loss.item(), rel=1e-6)
    summed = support.trainable_gradients(fast)
    for name, gradient in whole.gradients.items():
        assert relative_error(summed[name], gradient) < 1e-5, name
    means = [step(fast, {k: v[r : r + 1] for k, v in batch.items()}) for r in range(2)]
    name = next(iter(whole.gradients))
    assert relative_error((means[0].gradients[name] + means[1].gradients[name]) / 2, whole.gradients[name]) > 0.05


COUNTS = [
    16,
    16.0,
    torch.tensor(16),
    torch.tensor(16, dtype=torch.int32),
    torch.tensor(16.0),
    torch.tensor(16.0, dtype=torch.float64),
    torch.tensor([16]),
]


@pytest.mark.parametrize("count", COUNTS, ids=lambda c: f"{c!r}")
def test_the_count_may_be_a_number_or_a_tensor(count: Any, batch: Batch) -> None:
    """C06."""
    stock, fast = twins(support.add_lora(support.build_model()))
    expected = step(stock, batch, num_items_in_batch=16)
    got = step(fast, batch, num_items_in_batch=count)
    assert got.loss.shape == expected.loss.shape
    assert_same_step(expected, got)
    assert torch.equal(got.loss, step(fast, batch, num_items_in_batch=16).loss)


def test_explicit_shifted_labels(model_pair: tuple[Any, Any], batch: Batch) -> None:
    """C07: used as they are; contiguous or not (stock raises on a view)."""
    stock, fast = model_pair
    shift = torch.randint(3, support.VOCABULARY, batch["input_ids"].shape)
    shift[0, 3] = -100
    logits = stock(input_ids=batch["input_ids"]).logits
    plain = functional.cross_entropy(logits.flatten(0, 1), shift.flatten())
    got = step(fast, batch, shift_labels=shift)
    assert relative_error(got.loss, plain.detach()) < 1e-6
    assert_same_step(step(stock, batch, shift_labels=shift), got)
    strided = shift.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(step(fast, batch, shift_labels=strided).loss, got.loss)
    assert relative_error(got.loss, step(fast, batch).loss) > 1e-3


def test_shifted_labels_alone_give_no_loss(batch: Batch) -> None:
    """C07, as stock."""
    stock, fast = twins(support.build_model())
    for model in (stock, fast):
        outputs = model(input_ids=batch["input_ids"], shift_labels=batch["labels"])
        assert outputs.loss is None
        assert outputs.logits is not None


@pytest.mark.parametrize("bad", [support.VOCABULARY, -1, 10**6])
def test_a_label_outside_the_vocabulary_is_an_error(bad: int, model_pair: tuple[Any, Any], batch: Batch) -> None:
    """C08: it names the value and the vocabulary; never a silent read or a skipped token."""
    _, fast = model_pair
    batch["labels"][1, 5] = bad
    for training in (True, False):
        with pytest.raises(ValueError, match=rf"(?s){bad}.*{support.VOCABULARY}"):
            fast.train(training)(**batch)


def test_nothing_is_added_to_cross_entropy(batch: Batch) -> None:
    """C16: the loss is plain cross-entropy, to 1e-6."""
    stock, fast = twins(support.build_model())
    logits = stock(input_ids=batch["input_ids"]).logits[:, :-1]
    plain = functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert fast(**batch).loss.item() == pytest.approx(plain.item(), rel=1e-6)


def test_a_padded_row_equals_the_row_alone(model_pair: tuple[Any, Any]) -> None:
    """C26: right-padded with a mask, labels ignored on pads: loss and gradients of the row alone."""
    stock, fast = model_pair
    row = support.random_batch(rows=1, length=6)
    pad = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    row["attention_mask"] = torch.ones_like(row["input_ids"])
    right = {k: functional.pad(v, (0, 3), value=pad[k]) for k, v in row.items()}
    alone = step(fast, row)
    assert_same_step(alone, step(fast, right))
    assert_same_step(step(stock, right), step(fast, right))


@pytest.mark.parametrize("first_token_counts", [False, True])
def test_a_left_padded_row(first_token_counts: bool, model_pair: tuple[Any, Any]) -> None:
    """C26: equal to the row alone if its first token is no target; where it is one, stock counts it, and so do we."""
    stock, fast = model_pair
    row = support.random_batch(rows=1, length=6)
    row["labels"] = row["input_ids"].clone()
    if not first_token_counts:
        row["labels"][0, 0] = -100
    pad = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    row["attention_mask"] = torch.ones_like(row["input_ids"])
    left = {k: functional.pad(v, (3, 0), value=pad[k]) for k, v in row.items()}
    assert_same_step(step(stock, left), step(fast, left))
    if not first_token_counts:
        assert_same_step(step(fast, row), step(fast, left))


@pytest.mark.parametrize("mask", [False, True], ids=["no mask", "all-ones mask"])
def test_a_document_s_first_token_is_no_target_of_the_one_before(mask: bool, model_pair: tuple[Any, Any]) -> None:
    """C28: the loss of a packed row is the token-weighted mean of its documents' losses, gradients too."""
    _, fast = model_pair
    ids = torch.randint(3, support.VOCABULARY, (1, 9))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed: Batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    if mask:
        packed["attention_mask"] = torch.ones_like(ids)
    got = step(fast, packed)
    parts = [
        step(fast, {"input_ids": part, "labels": part}, num_items_in_batch=3 + 4) for part in (ids[:, :4], ids[:, 4:])
    ]
    assert got.loss.item() == pytest.approx(sum(part.loss.item() for part in parts), rel=1e-6)
    for name, gradient in got.gradients.items():
        assert relative_error(gradient, parts[0].gradients[name] + parts[1].gradients[name]) < 1e-5, name
    shifted_only = fast(input_ids=ids, labels=ids).loss
    assert relative_error(got.loss, shifted_only.detach()) > 1e-5


def test_per_token_weights() -> None:
    """C19: `fastft.functional.linear_cross_entropy(reduction="none")` is the weighted-loss route."""
    model = fastft.patch(support.add_lora(support.build_model()))
    batch = support.random_batch()
    weights = torch.tensor([0.0, 0.5, 1.0])[torch.randint(0, 3, (2, 12))]
    head = inner_model(model).lm_head.weight

    def hidden() -> torch.Tensor:
        return inner_model(model).model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)

    targets = batch["labels"][:, 1:].flatten()

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss.backward()
        return support.trainable_gradients(model)

    ours = fastft.functional.linear_cross_entropy(hidden(), head, targets, reduction="none")
    assert not ours[targets == -100].any()
    weighted = (ours * weights.flatten()).sum() / weights.sum()
    got = gradients(weighted)
    full = functional.cross_entropy(hidden() @ head.t(), targets, reduction="none")
    expected = gradients((full * weights.flatten()).sum() / weights.sum())
    torch.testing.assert_close(ours, full, rtol=1e-5, atol=1e-6)
    for name in expected:
        assert relative_error(got[name], expected[name]) < 1e-5, name
    unweighted = fastft.functional.linear_cross_entropy(hidden(), head, targets, reduction="none")
    count = (targets != -100).sum()
    assert relative_error((unweighted.sum() / count).detach(), model(**batch).loss.detach()) < 1e-6


# --- the head --------------------------------------------------------------------------------------------------------


def test_lora_on_the_head(batch: Batch) -> None:
    """C10: the loss goes through the adapter, stock and reported; switching the adapter off changes it."""
    stock, fast = twins(support.add_lora(support.build_model(), target_modules=["lm_head"]))
    expected, got = step(stock, batch), step(fast, batch)
    assert_same_step(expected, got)
    assert {name.rsplit(".", 3)[-3] for name in got.gradients} == {"lora_A", "lora_B"}
    (row,) = rows(fast, "lm_head + loss")
    assert row.runs == "stock"
    assert "lm_head is" in row.reason
    assert (row.fast_runs, row.stock_runs) == (0, 1)
    assert runs(fast, "decoder layer") == (2, 0)
    with fast.disable_adapter():
        assert relative_error(fast(**batch).loss.detach(), got.loss) > 1e-3


@pytest.mark.parametrize("how", ["target_modules", "modules_to_save"])
def test_embeddings_and_head_requested(how: str, batch: Batch) -> None:
    """C11: every requested module trains as in stock and moves after one step."""
    ends = ["embed_tokens", "lm_head"]
    if how == "target_modules":
        model = support.add_lora(support.build_model(), target_modules=["q_proj", *ends])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_embedding" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
    else:
        model = support.add_lora(support.build_model(), target_modules=["q_proj"], modules_to_save=ends)
    stock, fast = twins(model)
    expected, got = step(stock, batch), step(fast, batch)
    assert_same_step(expected, got)
    for end in ends:
        assert any(end in name for name in got.gradients)
    before = {n: p.detach().clone() for n, p in fast.named_parameters() if p.requires_grad}
    torch.optim.SGD(trainable(fast), lr=0.1).step()
    assert all(not torch.equal(p, before[n]) for n, p in fast.named_parameters() if n in before)
    assert runs(fast, "decoder layer") == (2, 0)
    assert rows(fast, "lm_head + loss")[0].runs == ("stock" if how == "target_modules" else "fast")


def test_a_head_trained_as_a_copy_needs_no_logits(batch: Batch) -> None:
    """`modules_to_save` puts a wrapper in the head's place; which copy counts is read at each call, as PEFT does."""
    from peft import LoraConfig

    model = support.add_lora(support.build_model(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    support.randomize_adapters(model, seed=9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    stock, fast = twins(model)
    losses = []
    for adapter in ("default", "other", "default"):
        stock.set_adapter(adapter)
        fast.set_adapter(adapter)
        got = step(fast, batch)
        assert_same_step(step(stock, batch), got)
        assert any(f"modules_to_save.{adapter}" in name for name in got.gradients)
        losses.append(got.loss)
    assert losses[0] == losses[2] != losses[1]
    with stock.disable_adapter(), fast.disable_adapter():
        assert relative_error(fast(**batch).loss.detach(), stock(**batch).loss.detach()) < 1e-6
    assert fast(**batch).logits is None
    fast.eval()
    stock.eval()
    torch.testing.assert_close(fast(**batch).logits, stock(**batch).logits)
    assert rows(fast, "lm_head + loss")[0].stock_runs == 0
    fast.base_model.model.lm_head.register_forward_hook(lambda *_: None)
    assert "hook" in rows(fast, "lm_head + loss")[0].reason


@pytest.mark.parametrize("which", ["model.norm", "norm", "input_layernorm"])
def test_trained_norms(which: str, batch: Batch) -> None:
    """C12: modules_to_save; PEFT wraps what ends so ("norm" means every norm), and a wrapped norm costs its layer."""
    targets = ["q_proj"]
    stock, fast = twins(support.add_lora(support.build_model(), target_modules=targets, modules_to_save=[which]))
    got = step(fast, batch)
    assert_same_step(step(stock, batch), got)
    assert any("norm" in name for name in got.gradients)
    if which == "model.norm":
        assert runs(fast, "decoder layer") == (2, 0)
    else:
        assert runs(fast, "decoder layer") == (0, 2)
        assert "ModulesToSaveWrapper" in (sites(fast, "decoder layer")[0].last_reason or "")


def test_norms_trained_beside_lora_without_a_wrapper(batch: Batch) -> None:
    """C12: requires_grad set by hand: the layer's node returns the norm weights' gradients."""
    model = support.add_lora(support.build_model())
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)
    stock, fast = twins(model)
    got = step(fast, batch)
    assert sum("norm" in name for name in got.gradients) == 5
    assert_same_step(step(stock, batch), got)
    assert_ran_fast(fast)


def test_a_hook_on_the_head_fires(batch: Batch) -> None:
    stock, fast = twins(support.build_model())
    shapes = []
    fast.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    assert_same_step(step(stock, batch), step(fast, batch))
    assert shapes == [(2, 13, support.VOCABULARY)]
    assert rows(fast, "lm_head + loss")[0].reason == "lm_head has a hook or its own forward"


def test_a_loss_function_of_the_user_s_own_is_used(batch: Batch) -> None:
    stock, fast = twins(support.build_model())
    for model in (stock, fast):
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().pow(2).mean()
    assert_same_step(step(stock, batch), step(fast, batch))
    assert rows(fast, "lm_head + loss")[0].reason == "the model has its own loss function"


def test_logits_to_keep_with_labels_runs_as_in_stock(batch: Batch) -> None:
    stock, fast = twins(support.build_model())
    labels = batch["labels"][:, -5:]
    outputs = [m(input_ids=batch["input_ids"], labels=labels, logits_to_keep=5) for m in (stock, fast)]
    assert outputs[1].logits.shape == (2, 5, support.VOCABULARY)
    assert relative_error(outputs[1].loss.detach(), outputs[0].loss.detach()) < 1e-5
    assert runs(fast, "loss") == (0, 1)


# --- logits ----------------------------------------------------------------------------------------------------------


def test_no_labels_real_logits(batch: Batch) -> None:
    """C20: a Trainer subclass with its own loss: logits with a gradient, the same curve for three steps."""
    stock, fast = twins(support.add_lora(support.build_model()))
    curves = []
    for model in (stock, fast):
        optimizer, curve = torch.optim.SGD(trainable(model), lr=0.5), []
        for seed in range(3):
            rows_of = support.random_batch(seed)
            logits = model(input_ids=rows_of["input_ids"]).logits
            assert logits.requires_grad
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows_of["labels"][:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[0][0] != curves[0][1]
    assert runs(fast, "decoder layer") == (6, 0)


def test_training_with_labels_has_no_logits(batch: Batch) -> None:
    """C52."""
    fast = fastft.patch(support.build_model())
    outputs = fast(**batch)
    assert outputs.logits is None
    assert list(outputs) == ["loss"]
    plain = fast(**batch, return_dict=False)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], outputs.loss)


@pytest.mark.parametrize("training", [True, False])
def test_logits_on_request(training: bool, batch: Batch) -> None:
    """C52: return_logits=True gives plain logits with a gradient, beside the same loss."""
    stock, fast = twins(support.build_model())
    for model in (stock, fast):
        model.train(training)
    outputs, expected = fast(**batch, return_logits=True), stock(**batch)
    assert relative_error(outputs.logits.detach(), expected.logits.detach()) < 1e-5
    assert outputs.logits.requires_grad
    assert torch.equal(outputs.loss, fast(**batch).loss)


def test_return_logits_without_labels_is_harmless(batch: Batch) -> None:
    fast = fastft.patch(support.build_model())
    assert fast(input_ids=batch["input_ids"], return_logits=True).logits is not None


READS = {
    "attribute": lambda o: o.logits,
    "key": lambda o: o["logits"],
    "index": lambda o: o[1],
    "slice": lambda o: o[:2][1],
    "get": lambda o: o.get("logits"),
    "items": lambda o: dict(o.items())["logits"],
    "values": lambda o: list(o.values())[1],
    "dict": lambda o: dict(o)["logits"],
    "double star": lambda o: dict(**o)["logits"],
    "to_tuple": lambda o: o.to_tuple()[1],
    "getattr": lambda o: getattr(o, "logits", None),
    "deepcopy": lambda o: copy.deepcopy(o).logits,
    "copy": lambda o: copy.copy(o).logits,
    "pickle": lambda o: pickle.loads(pickle.dumps(o)).logits,
    "another output": lambda o: type(o)(**o).logits,
}


@pytest.mark.parametrize("read", READS)
def test_evaluation_logits_are_there_however_they_are_read(read: str, batch: Batch) -> None:
    """C52: values, keys and order are stock's."""
    stock, fast = twins(support.build_model().eval())
    with torch.no_grad():
        expected, outputs = stock(**batch), fast(**batch)
    assert list(outputs.keys()) == list(expected.keys())
    assert len(outputs) == len(expected)
    assert "logits" in outputs
    logits = READS[read](outputs)
    assert type(logits) is torch.Tensor
    assert relative_error(logits, expected.logits) < 1e-5
    assert outputs.logits is outputs.logits


def test_evaluation_logits_are_not_built_unless_read(batch: Batch) -> None:
    fast = fastft.patch(support.build_model().eval())
    made = []
    head = fast.lm_head
    original = type(head).forward

    def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self is head:
            made.append(x.shape)
        return original(self, x)

    type(head).forward = counting
    try:
        with torch.no_grad():
            outputs = fast(**batch)
        assert outputs.loss.item() > 0
        assert outputs["loss"].item() > 0
        assert outputs[0].item() > 0
        assert made == []
        assert outputs.logits.shape == (2, 13, support.VOCABULARY)
        assert outputs.logits is outputs["logits"]
        assert len(made) == 1
    finally:
        type(head).forward = original


@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "autocast"])
def test_logits_read_later_are_those_of_the_forward(context: str, batch: Batch) -> None:
    """C52: read after the forward's context has ended, as Trainer does: its dtype, no graph where it had none."""
    stock, fast = twins(support.build_model().eval())
    contexts = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    with contexts[context]():
        expected, got = stock(**batch), fast(**batch)
    assert got.logits.dtype == expected.logits.dtype
    assert got.logits.requires_grad == expected.logits.requires_grad
    assert relative_error(got.logits.detach(), expected.logits.detach()) < (2e-2 if context == "autocast" else 1e-5)


def test_return_dict_false_in_evaluation(batch: Batch) -> None:
    """C52: (loss, logits, cache), as stock."""
    stock, fast = twins(support.build_model().eval())
    with torch.no_grad():
        expected, got = stock(**batch, return_dict=False), fast(**batch, return_dict=False)
    assert type(got) is tuple
    assert len(got) == len(expected) == 3
    assert type(got[1]) is torch.Tensor
    assert relative_error(got[1], expected[1]) < 1e-5
    assert type(got[2]) is type(expected[2])


def test_evaluation_loss_is_the_training_loss(batch: Batch) -> None:
    fast = fastft.patch(support.build_model())
    training = fast(**batch).loss
    with torch.no_grad():
        assert relative_error(fast.eval()(**batch).loss, training.detach()) < 1e-6


@pytest.mark.slow
def test_compute_metrics(tmp_path: pathlib.Path) -> None:
    """C52: predictions and labels of a Trainer's evaluation are whole plain arrays, equal to stock's."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    lengths = (14, 9, 11, 5, 13, 8)
    batches = [support.random_batch(seed, rows=1, length=n) for seed, n in enumerate(lengths)]
    data = [{k: v[0].tolist() for k, v in b.items()} for b in batches]
    seen: dict[str, Any] = {}
    for name, model in zip(("stock", "fast"), twins(support.build_model()), strict=True):
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
            ),
            data_collator=DataCollatorForSeq2Seq(support.build_tokenizer(), padding="max_length", max_length=14),
            compute_metrics=lambda prediction, name=name: seen.__setitem__(name, prediction) or {},
            eval_dataset=data,
        )
        seen[f"{name} loss"] = trainer.evaluate()["eval_loss"]
    assert seen["fast"].predictions.shape == (6, 14, support.VOCABULARY)
    assert seen["fast"].label_ids.shape == (6, 14)
    assert (seen["fast"].label_ids == seen["stock"].label_ids).all()
    torch.testing.assert_close(
        *(torch.from_numpy(seen[n].predictions) for n in ("fast", "stock")), rtol=1e-4, atol=1e-5
    )
    assert seen["fast loss"] == pytest.approx(seen["stock loss"], rel=1e-5)


def test_positional_arguments(batch: Batch) -> None:
    """input_ids, attention_mask by position, as the signature allows."""
    stock, fast = twins(support.build_model())
    mask = torch.ones_like(batch["input_ids"])
    losses = [model(batch["input_ids"], mask, labels=batch["labels"]).loss for model in (stock, fast)]
    assert relative_error(losses[1].detach(), losses[0].detach()) < 1e-6
    assert runs(fast, "loss") == (1, 0)


def test_inputs_embeds(batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    results = []
    for model in (stock, fast):
        embeds = inner_model(model).get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        loss = model(inputs_embeds=embeds, labels=batch["labels"]).loss
        loss.backward()
        results.append((loss.detach(), embeds.grad))
    assert relative_error(results[1][0], results[0][0]) < 1e-5
    assert relative_error(results[1][1], results[0][1]) < 1e-5
    assert_ran_fast(fast)


def test_the_backbone_alone_is_fast() -> None:
    """A reward head, an embedding model: `AutoModel`, or the backbone called by hand."""
    from transformers import AutoModel

    batch = support.random_batch()
    with support.seeded(0):
        model = AutoModel.from_config(support.tiny_config("llama")).train()
    stock, fast = twins(model)
    gradients = []
    for candidate in (stock, fast):
        hidden = candidate(input_ids=batch["input_ids"]).last_hidden_state
        with support.seeded(5):
            (hidden * torch.randn_like(hidden)).mean().backward()
        gradients.append(support.trainable_gradients(candidate))
    for name, gradient in gradients[0].items():
        assert relative_error(gradients[1][name], gradient) < 1e-5, name
    assert runs(fast, "decoder layer") == (2, 0)
