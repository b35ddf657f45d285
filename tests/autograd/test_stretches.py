"""Views that are moved by the memory they lie in."""

from __future__ import annotations

import torch

from fastft.autograd.stretches import stretches


def test_every_storage_is_there_once_and_every_view_comes_back() -> None:
    side_by_side = torch.arange(60.0).view(5, 12)
    tensors = [side_by_side[:, :4], side_by_side[:, 4:8].t(), None, side_by_side[2], torch.arange(6).view(2, 3).t()]
    whole, views = stretches(tensors)
    assert [(t.numel(), t.dtype) for t in whole] == [(60, torch.float32), (6, torch.int64)]
    assert all(t.is_contiguous() for t in whole)
    moved = [t.clone() for t in whole]
    side_by_side.fill_(-1)
    back = views.over(moved)
    expected = torch.arange(60.0).view(5, 12)
    assert back[2] is None
    for ours, theirs in zip(back, [expected[:, :4], expected[:, 4:8].t(), None, expected[2], tensors[4]], strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]
    assert back[0].untyped_storage().data_ptr() == moved[0].data_ptr()  # type: ignore[union-attr]
    assert [t.stride() for t in back if t is not None] == [t.stride() for t in tensors if t is not None]
