"""What a model may compute with a larger error than stock's, for speed: asked for by name, listed in the report.

Nothing of this kind is ever a default. docs/approximations.md has the measured error of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fastft.patching import registry

__all__ = ["APPROXIMATIONS", "chosen", "set_approximations", "skip_arguments", "summary"]

# name -> (the part whose site carries it, the site's field)
APPROXIMATIONS: dict[str, tuple[registry.Part, str]] = {
    "fold_adapters": ("decoder layer", "fold_adapters"),
    "skip_probabilities": ("loss", "skip_probabilities"),
}


def set_approximations(model: nn.Module, names: Sequence[str]) -> None:
    """Switch these on and all others off.

    Args:
        model: the planned transformers model.
        names: keys of `APPROXIMATIONS`.

    Raises:
        ValueError: for a name that is not known.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in wanted if name not in APPROXIMATIONS]
    if unknown:
        raise ValueError(
            f"approximations names {unknown[0]!r}, which is not known; choose from {', '.join(APPROXIMATIONS)}, or () "
            "for none."
        )
    sites = [site for module in model.modules() if (site := registry.site_of(module)) is not None]
    for name, (part, attribute) in APPROXIMATIONS.items():
        for site in sites:
            if site.part == part:
                setattr(site, attribute, name in wanted)


def skip_arguments(site: registry.Site | None) -> dict[str, Any]:
    """What the loss's operator is told, by keyword, about a model with this plan of its loss."""
    if site is None or not site.skip_probabilities:
        return {}
    from fastft.kernels.sparse_product import THRESHOLD  # loads Triton: not at import

    return {"skip_below": THRESHOLD, "on_skip": site.skipped_columns}


def chosen(sites: Iterable[registry.Site]) -> list[str]:
    """Names of the approximations that are switched on."""
    sites = list(sites)
    return [name for name, (_, attribute) in APPROXIMATIONS.items() if any(getattr(s, attribute) for s in sites)]


def summary(sites: Sequence[registry.Site]) -> str | None:
    """A note of the report: what is switched on and what of it did not apply, None where nothing is."""
    names = chosen(sites)
    if not names:
        return None
    note = f"approximations: {', '.join(names)} (docs/approximations.md has their errors)"
    if "skip_probabilities" in names:
        reason = next((s.whole_product for s in sites if s.skip_probabilities and s.whole_product is not None), None)
        note += "; skip_probabilities: gradients through the entropy take the whole head"
        if reason is not None:
            note += f", and so did the last training loss: {reason}"
    return note
