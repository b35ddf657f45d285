"""fastft as a plugin of Thunder's recipes: `thunder.compile(model, recipe=…, plugins=[Plugin()])`."""

from __future__ import annotations

from typing import Any

from thunder import Plugin as ThunderPlugin

from fastft.integrations.thunder.executor import executor

__all__ = ["Plugin"]


class Plugin(ThunderPlugin):
    """Puts the executor "fastft" before a recipe's own."""

    def setup_executors(self) -> list[Any]:
        return [executor]
