"""A dataset, or a dict of them: what the helpers take, and give back as the kind they got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def each(datasets: Any, apply: Callable[[str, Any], Any], name: str) -> Any:
    """`apply(name, dataset)` to a dataset, or to each of a dict of them, which stays the kind of dict it was.

    Raises:
        ValueError: it is neither.
    """
    from datasets import Dataset, IterableDataset

    if isinstance(datasets, dict):
        return type(datasets)({key: each(rows, apply, f"{name}[{key!r}]") for key, rows in datasets.items()})
    if not isinstance(datasets, Dataset | IterableDataset):
        raise ValueError(
            f"{name} is a {type(datasets).__name__}, not a datasets.Dataset, IterableDataset or dict of them. "
            "Dataset.from_list makes one of a list of rows."
        )
    return apply(name, datasets)


def column_names(dataset: Any) -> list[str]:
    """Names of the columns; a stream that does not know them is asked for its first row (none: no columns)."""
    from trl.data_utils import get_dataset_column_names

    if dataset.column_names is None and next(iter(dataset), None) is None:
        return []
    return list(get_dataset_column_names(dataset))
