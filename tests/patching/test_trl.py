"""TRL's loss hook: when it acts, when TRL's own class runs, and that neither shows in the numbers."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fastft.patching import registry
from fastft.patching import trl as hook
from tests import support

utils = pytest.importorskip("trl.trainer.utils")

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# trl 1.15's own function is a CUDA kernel: on the CPU there is nothing there to compare with, or to fall back on.
RUNS_HERE = torch.cuda.is_available() or hasattr(sys.modules["trl.kernels.chunked_logprob"], "_forward_tile")
needs_trls_own = pytest.mark.skipif(not RUNS_HERE, reason="trl 1.15 runs its function on CUDA only")


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[nn.Module]:
    """The planned heads, none to begin with."""
    planned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    monkeypatch.setattr(registry, "planned_heads", lambda: planned)
    return planned


@pytest.fixture
def original() -> Any:
    """TRL's own class."""
    hook.uninstall()
    return utils._ChunkedLogProbFunction


@pytest.fixture
def installed(original: Any) -> Iterator[Any]:
    """The hook in place; TRL's own class is what is handed over, and what is put back."""
    assert hook.install() is None
    yield original
    hook.uninstall()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two ran: "ours" or "theirs"."""
    from fastft.autograd import linear_cross_entropy

    ran: list[str] = []
    real = linear_cross_entropy.linear_log_probs

    @functools.wraps(real)
    def ours(*arguments: Any) -> Any:
        ran.append("ours")
        return real(*arguments)

    monkeypatch.setattr(linear_cross_entropy, "linear_log_probs", ours)
    stand_in = types.SimpleNamespace(apply=lambda *arguments: ran.append("theirs"))
    monkeypatch.setattr(hook.LogProbFunction, "original", stand_in)
    return ran


def arguments(head: nn.Linear, rows: int = 9, outputs: tuple[str, ...] = OUTPUTS) -> tuple[Any, ...]:
    """The nine arguments, as TRL gives them."""
    hidden = torch.randn(rows, head.in_features, dtype=head.weight.dtype, requires_grad=True)
    targets = torch.randint(0, head.out_features, (rows,))
    return hidden, head.weight, head.bias, targets, 0.9, 32768, None, 1.0, outputs


# --- installing ---


def test_installs_once_and_restores_by_identity(original: Any) -> None:
    assert not hook.installed()
    assert hook.install() is None
    assert hook.install() is None
    assert hook.installed()
    assert utils._ChunkedLogProbFunction is hook.LogProbFunction
    assert hook.LogProbFunction.original is original  # not ourselves, though installed twice
    assert hook.uninstall()
    assert utils._ChunkedLogProbFunction is original
    assert not hook.uninstall()
    assert not hook.installed()


def test_leaves_alone_what_somebody_else_has_put_there_since(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody = type("Somebody", (), {})
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", somebody)
    assert not hook.uninstall()
    assert utils._ChunkedLogProbFunction is somebody


def test_does_nothing_before_trl_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trl.trainer.utils")
    assert hook.install() == "trl is not imported"
    assert not hook.installed()
    assert not hook.uninstall()


def test_never_imports_trl() -> None:
    code = (
        "import sys; from fastft.patching import trl; trl.install();"
        "assert 'trl' not in sys.modules; assert 'fastft.kernels.cross_entropy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def _with_forward(forward: Any) -> Any:
    return type("Other", (), {"forward": staticmethod(forward)})


def _renamed(ctx, hidden, weight, bias, labels, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs):
    pass


def _one_more(ctx, hidden, weight, bias, targets, temperature, chunk_size, cap, logit_scale, outputs, extra):
    pass


def _other_outputs(
    ctx,
    hidden,
    weight,
    bias,
    targets,
    temperature,
    chunk_size,
    final_logit_softcapping=None,
    logit_scale=1.0,
    outputs=("entropy",),
):
    pass


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (None, "no usable .*_ChunkedLogProbFunction"),
        (object(), "no readable forward"),
        (_with_forward(_renamed), "takes .*'labels'"),
        (_with_forward(_one_more), "takes .*'extra'"),
        (_with_forward(_other_outputs), r"can give \('entropy',\)"),
    ],
    ids=["absent", "no forward", "renamed argument", "one more argument", "other outputs"],
)
def test_another_signature_is_left_alone_c37(
    other: Any, reason: str, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C37: that one optimization is off, with a reason; nothing raises and nothing is exchanged."""
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", other)
    message = hook.install()
    assert re.search(reason, message or "")
    assert (message or "").endswith("the loss stays TRL's own")
    assert utils._ChunkedLogProbFunction is other


def test_an_output_type_without_the_five_fields_is_left_alone_c37(
    original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "FusedCausalLMOutput", type("Output", (), {}))
    assert "FusedCausalLMOutput" in (hook.install() or "")
    assert utils._ChunkedLogProbFunction is original


def test_the_stand_in_takes_trls_own_arguments(original: Any) -> None:
    theirs = list(inspect.signature(original.forward).parameters.values())[1:]
    ours = list(inspect.signature(hook.LogProbFunction.apply).parameters.values())
    assert [p.name for p in ours] == [p.name for p in theirs]
    assert [p.default for p in ours[:-1]] == [p.default for p in theirs[:-1]]
    assert set(ours[-1].default) == set(theirs[-1].default)


# --- acting ---


def test_acts_only_on_the_weight_of_a_planned_head(
    installed: Any, heads: weakref.WeakSet[nn.Module], calls: list[str]
) -> None:
    planned, plain = (nn.Linear(8, 23, bias=False) for _ in range(2))
    heads.add(planned)
    apply = utils._ChunkedLogProbFunction.apply
    apply(*arguments(planned))
    apply(*arguments(plain))
    equal = copy.deepcopy(planned)  # the same numbers are not the same weight
    apply(*arguments(equal))
    hidden, weight, *others = arguments(planned)
    apply(hidden, weight.detach(), *others)
    assert calls == ["ours", "theirs", "theirs", "theirs"]
    heads.discard(planned)
    apply(*arguments(planned))
    heads.add(planned)
    planned.weight = nn.Parameter(planned.weight.detach().clone())  # FSDP and resizing replace it: looked up again
    apply(*arguments(planned))
    assert calls[4:] == ["theirs", "ours"]


def test_a_planned_head_does_not_outlive_its_model(installed: Any, heads: weakref.WeakSet[nn.Module]) -> None:
    head = nn.Linear(8, 23)
    heads.add(head)
    assert len(heads) == 1
    del head
    assert len(heads) == 0


def test_stock_only_and_zero3_run_trls_own(installed: Any, heads: weakref.WeakSet[nn.Module], calls: list[str]) -> None:
    head = nn.Linear(8, 23)
    heads.add(head)
    with registry.stock_only():
        utils._ChunkedLogProbFunction.apply(*arguments(head))
    head.weight.ds_id = 0  # what DeepSpeed ZeRO-3 writes on a partitioned parameter
    utils._ChunkedLogProbFunction.apply(*arguments(head))
    assert calls == ["theirs", "theirs"]


@needs_trls_own
@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_gives_what_trls_own_gives(installed: Any, heads: weakref.WeakSet[nn.Module], trained: bool, rows: int) -> None:
    head = nn.Linear(16, 97).requires_grad_(trained)
    call = arguments(head, rows)
    theirs = utils._ChunkedLogProbFunction.apply(*call)
    heads.add(head)
    ours = utils._ChunkedLogProbFunction.apply(*call)
    inputs = [call[0], *(head.parameters() if trained else ())]
    grads = [torch.randn(rows), torch.randn(rows)]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        torch.testing.assert_close(one, other, rtol=5e-6, atol=5e-6)
    results = [torch.autograd.grad(outputs[:2], inputs, grads) for outputs in (ours, theirs)]
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 5e-6 * max(other.norm().item(), 1e-6)


@needs_trls_own
def test_fp32_hidden_over_a_16_bit_head(installed: Any, heads: weakref.WeakSet[nn.Module]) -> None:
    """GRPO's cast_lm_head_to_fp32: hidden fp32, weight as loaded, autocast off."""
    head = nn.Linear(16, 97, bias=False).bfloat16().requires_grad_(False)
    hidden, *others = arguments(head, 37)
    hidden = hidden.detach().float().requires_grad_()
    with torch.autocast("cpu", enabled=False):
        theirs = utils._ChunkedLogProbFunction.apply(hidden, *others)
        heads.add(head)
        ours = utils._ChunkedLogProbFunction.apply(hidden, *others)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-6, atol=5e-6)
    gradients = [torch.autograd.grad(outputs[0].sum(), hidden)[0] for outputs in (ours, theirs)]
    assert gradients[0].dtype == torch.float32
    assert (gradients[0] - gradients[1]).norm() <= 5e-6 * gradients[1].norm()


def test_values_do_not_depend_on_grad_mode(installed: Any, heads: weakref.WeakSet[nn.Module]) -> None:
    """RLOO's first ratio is exp of a difference between a call without grad and one with: it must be 1."""
    head = nn.Linear(16, 97).requires_grad_(False)
    heads.add(head)
    call = arguments(head, 37)
    with torch.no_grad():
        without = utils._ChunkedLogProbFunction.apply(*call)
    for one, other in zip(utils._ChunkedLogProbFunction.apply(*call), without, strict=True):
        assert torch.equal(one, other)
        assert not other.requires_grad


# --- through TRL's fused head ---


def fused(model: Any, outputs: tuple[str, ...], **options: Any) -> Any:
    """The model with TRL's head on it, as its trainers put it."""
    utils.add_fused_lm_head(model, outputs=outputs, **options)
    return model


@needs_trls_own
@pytest.mark.parametrize("outputs", [OUTPUTS, ("log_probs",)], ids=["DPO's outputs", "a reference model's"])
@pytest.mark.parametrize("cast", [False, True], ids=["", "cast_lm_head_to_fp32"])
def test_a_planned_models_fused_loss_equals_a_plain_ones(
    installed: Any,
    heads: weakref.WeakSet[nn.Module],
    outputs: tuple[str, ...],
    cast: bool,
    batch: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = support.build_model("llama")
    planned = copy.deepcopy(plain)
    for model in (plain, planned):
        fused(model, outputs, temperature=0.7, cast_lm_head_to_fp32=cast)
    heads.add(planned.get_output_embeddings())
    results = [model(**batch, fused_lm_head=True) for model in (plain, planned)]
    for name in outputs:
        theirs, ours = (getattr(result, name) for result in results)
        torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=5e-6)
    for result in results:
        result.loss.backward()
    for (name, theirs), ours in zip(plain.named_parameters(), planned.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 5e-6 * theirs.grad.norm(), name


def test_a_batch_without_a_valid_label_is_a_differentiable_zero(
    installed: Any, heads: weakref.WeakSet[nn.Module], batch: dict[str, torch.Tensor]
) -> None:
    model = fused(support.build_model("llama"), ("log_probs", "entropy", "is_top1"))
    heads.add(model.get_output_embeddings())
    labels = torch.full_like(batch["labels"], -100)
    loss = model(**{**batch, "labels": labels}, fused_lm_head=True).loss
    assert loss.item() == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.count_nonzero(parameter.grad) == 0, name


def test_what_ran_is_counted_at_the_loss_site(installed: Any, batch: dict[str, torch.Tensor]) -> None:
    import fastft

    model = fastft.patch(support.build_model("llama"))
    try:
        site = registry.site_of(model)
        assert site is not None
        fused(model, ("log_probs", "entropy", "is_top1"))
        model(**batch, fused_lm_head=True)
        assert (site.fast_runs, site.stock_runs) == (1, 0)
        if RUNS_HERE:
            with registry.stock_only():  # asked for, so not counted
                model(**batch, fused_lm_head=True)
            assert (site.fast_runs, site.stock_runs) == (1, 0)
            model.get_output_embeddings().weight.ds_id = 0
            model(**batch, fused_lm_head=True)
            assert (site.fast_runs, site.stock_runs) == (1, 1)
            assert "ZeRO-3" in (site.last_reason or "")
    finally:
        fastft.unpatch(model)


def test_a_head_exchanged_after_patching_is_ours_and_a_copys_is_reported(
    installed: Any, batch: dict[str, torch.Tensor]
) -> None:
    """Resizing the vocabulary makes a new head; a deep copy's head is known only once the copy is patched."""
    import fastft

    model = fastft.patch(support.build_model("llama"))
    try:
        model.resize_token_embeddings(support.VOCABULARY + 8)
        fused(model, ("log_probs", "entropy", "is_top1"))
        model(**batch, fused_lm_head=True)
        site = registry.site_of(model)
        assert site is not None
        assert (site.fast_runs, site.stock_runs) == (1, 0)
        assert not any("copy" in note for note in fastft.report(model).notes)
        copied = copy.deepcopy(model)
        assert any("copy" in note for note in fastft.report(copied).notes)
        assert not any("copy" in note for note in fastft.report(fastft.patch(copied)).notes)
    finally:
        fastft.unpatch(model)
