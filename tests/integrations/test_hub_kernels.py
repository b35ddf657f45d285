"""Our mapping for Hugging Face's `kernels`: exchanged with no download, reported where it is not, never doubled.

Where `kernels` is not installed (or transformers counts its version as absent) only its absence is tested.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.utils import is_kernels_available

import fastft
from fastft.integrations import hub_kernels
from tests import support

kernels_here = pytest.mark.skipif(not is_kernels_available(), reason="needs the kernels version transformers asks for")


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), support.trainable_gradients(model)


def assert_same_step(one: Any, other: Any) -> None:
    torch.testing.assert_close(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        torch.testing.assert_close(grad, other[1][name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@kernels_here
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_norms_run_ours_and_the_step_is_the_model_s_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = support.build_model(family), support.random_batch()
    expected = step(model, batch)
    done = hub_kernels.kernelize(model)
    calls = []
    rms_norm = hub_kernels.functional.rms_norm
    monkeypatch.setattr(hub_kernels.functional, "rms_norm", lambda *a: calls.append(1) or rms_norm(*a))
    assert_same_step(step(model, batch), expected)
    norms = 5 if family == "llama" else 9
    assert done == hub_kernels.Kernelized(norms, False)
    assert len(calls) == norms


@kernels_here
def test_the_rotation_is_exchanged_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    rotation: Any = modeling_llama.apply_rotary_pos_emb
    before = rotation.forward
    monkeypatch.setattr(rotation, "forward", before)  # undone after the test: the object is every Llama's
    model, batch = support.build_model(), support.random_batch()
    expected = step(model, batch)
    assert hub_kernels.kernelize(model, rotary=True).rotary
    assert rotation.forward.__func__ is hub_kernels.FastftRotary.forward
    assert_same_step(step(model, batch), expected)


@kernels_here
def test_a_planned_model_and_the_hub_s_kernels_are_left_alone() -> None:
    planned = fastft.patch(support.build_model())
    assert "planned by fastft" in str(hub_kernels.kernelize(planned).skipped)
    assert all("forward" not in m.__dict__ for m in planned.modules() if type(m).__name__ == "LlamaRMSNorm")
    model = support.build_model()
    model._use_kernels = True
    assert "use_kernels=True" in str(hub_kernels.kernelize(model).skipped)
    fastft.patch(model)
    assert all("use_kernels=True" in row.reason for row in fastft.report(model).rows)
    other = support.build_model()
    other.config.model_type = "gpt9"
    assert "gpt9" in str(hub_kernels.kernelize(other).skipped)


@kernels_here
def test_kernelized_and_then_planned_no_norm_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = support.build_model(), support.random_batch()
    expected = step(model, batch)
    hub_kernels.kernelize(model)
    fastft.patch(model)
    calls = []
    rms_norm = hub_kernels.functional.rms_norm
    monkeypatch.setattr(hub_kernels.functional, "rms_norm", lambda *a: calls.append(1) or rms_norm(*a))
    assert_same_step(step(model, batch), expected)
    assert len(calls) == 5
    rows = {row.site: row for row in fastft.report(model).rows}
    assert "has a hook or its own forward" in rows["model.layers.[0–1]"].reason
    assert rows["model.layers.[0–1].mlp"].fast_runs == 2


def test_the_forwards_compute_what_transformers_functions_do() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotary = hub_kernels.FastftRotary()
    q, k, cos, sin = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    for ours, theirs in zip(rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs)
    views = q.transpose(1, 2), k.transpose(1, 2)
    both = zip(rotary(*views, cos, sin, 2), apply_rotary_pos_emb(*views, cos, sin, unsqueeze_dim=2), strict=True)
    for ours, theirs in both:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(is_kernels_available(), reason="kernels is here")
def test_without_kernels_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kernels", None)
    with pytest.raises(ImportError, match="KERNELS_MIN_VERSION"):
        hub_kernels.mapping()
