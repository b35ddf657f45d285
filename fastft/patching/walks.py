"""What a trainer does to every module or parameter at every step, in one flat walk instead of nested generators.

At every step transformers' Trainer calls `model.train()`, `model.num_parameters()` (for `total_flos`),
`model.parameters()` (to clip) and `model.zero_grad()`. PyTorch answers each by recursion: `train` sets one attribute a
module through `Module.__setattr__`, and what `named_modules` yields climbs one generator for each level of the tree. A
1B model with adapters has 1,337 modules, eight levels deep, and the device has nothing to do meanwhile
(docs/benchmarks.md has the figures).

The same answers come from a loop over a stack: the same parameters, in the same order, each once; the same count; the
same flag on every module. A module that has its own `train` or `named_modules` is asked itself. `zero_grad` needs no
version of its own, it goes through `parameters`. Nothing is remembered from one call to the next, so nothing can be
stale when adapters come and go.

These are class patches like the others: methods on the planned model's class and on `PeftModel`, which inherit theirs,
so that undoing them deletes an attribute. An instance without a plan gets what it inherits.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from fastft.patching import registry

_third = operator.itemgetter(2)


def install(model_class: type[nn.Module]) -> None:
    """Give `model_class`, a transformers model's, the flat walks, each where it has no such method of its own."""
    for name, make in (("train", _make_train), ("parameters", _make_parameters), ("num_parameters", _make_count)):
        _add(model_class, name, make)
    install_on_peft()


def install_on_peft() -> None:
    """The same for the wrapper around an adapted model, once peft is imported (which may be after `patch`)."""
    peft = sys.modules.get("peft")
    wrapper = getattr(peft, "PeftModel", None)
    if wrapper is not None:
        _add(wrapper, "parameters", _make_parameters)


def _add(owner: type, name: str, make: Callable[[type, Any], Any]) -> None:
    what = f"{owner.__name__}.{name}"
    if registry.is_ours(owner, name):
        registry.installed(what)
    elif name in owner.__dict__:
        registry.skip(what, f"{what} is the class's own: it stays as it is")
    else:
        registry.add_method(owner, name, make(owner, getattr(owner, name)))
        registry.installed(what)


def _is_planned(model: nn.Module) -> bool:
    """Whether `model` is planned, or a head (a causal LM's, a classifier's) or PEFT's wrapper around what is."""
    inside: nn.Module | None = model
    while inside is not None:
        if registry.PLAN in inside.__dict__:
            return True
        inside = inside._modules.get("base_model", inside._modules.get("model"))
    return False


def _is_known(owner: type, name: str, *modules: types.ModuleType) -> bool:
    """Whether what `owner` calls `name` is the function written in one of `modules`, and nobody's replacement of it."""
    code = getattr(getattr(owner, name), "__globals__", None)
    return any(code is vars(module) for module in modules)


def _is_torchs(module: nn.Module, name: str) -> bool:
    return name not in module.__dict__ and _is_known(type(module), name, torch_module)


def _own_parameters(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Each parameter once, with the first module that holds it and its name there, in the order of `named_parameters`.

    A parent comes before its children, these in the order they were added. Written for time: this is the inner loop.
    """
    found: dict[int, nn.Parameter] = {}  # held, so that an id stays its parameter's
    seen: set[int] = set()
    plain: set[type] = set()  # classes met that walk as nn.Module does
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is None:
            continue
        attributes = module.__dict__
        if type(module) not in plain or "named_modules" in attributes:
            if not _is_torchs(module, "named_modules"):
                for path, parameter in module.named_parameters():
                    if id(parameter) not in found:
                        found[id(parameter)] = parameter
                        parent, _, name = path.rpartition(".")
                        yield module.get_submodule(parent), name, parameter
                continue
            plain.add(type(module))
        children = attributes["_modules"]
        if children:
            if id(module) in seen:  # a leaf met twice brings nothing new
                continue
            seen.add(id(module))
            stack.extend(reversed(children.values()))
        for name, parameter in attributes["_parameters"].items():
            if parameter is not None and id(parameter) not in found:
                found[id(parameter)] = parameter
                yield module, name, parameter


def _make_parameters(owner: type, inherited: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def parameters(self: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
        if not recurse or not _is_planned(self) or not _is_torchs(self, "named_parameters"):
            yield from super(owner, self).parameters(recurse)  # type: ignore[misc]
            return
        yield from map(_third, _own_parameters(self))

    return parameters


def _make_train(owner: type, inherited: Callable[..., Any]) -> Callable[..., Any]:
    from transformers import modeling_utils  # whose `train` exchanges kernels where use_kernels is on, and no more

    def flag_alone(module: nn.Module) -> bool:
        if _is_torchs(module, "train"):
            return True
        known = "train" not in module.__dict__ and _is_known(type(module), "train", modeling_utils)
        return known and not getattr(module, "use_kernels", False)

    @functools.wraps(inherited)
    def train(self: Any, mode: bool = True) -> Any:
        known = _is_known(super(owner, type(self)), "train", torch_module, modeling_utils)  # type: ignore[arg-type]
        if not known or not isinstance(mode, bool) or not _is_planned(self) or self.use_kernels:
            return super(owner, self).train(mode)  # type: ignore[misc]
        self.training = mode
        plain: set[type] = set()  # classes met whose `train` does no more than this
        stack = [child for child in self._modules.values() if child is not None]
        while stack:
            module = stack.pop()
            attributes = module.__dict__
            if type(module) not in plain or "train" in attributes:
                if not flag_alone(module):
                    module.train(mode)
                    continue
                if not hasattr(module, "use_kernels"):
                    plain.add(type(module))
            if module.training is not mode:
                module.training = mode
            children = attributes["_modules"]
            if children:
                stack += [child for child in children.values() if child is not None]
        return self

    return train


def _make_count(owner: type, inherited: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        if not _is_planned(self) or not _is_torchs(self, "named_parameters"):
            return int(super(owner, self).num_parameters(only_trainable, exclude_embeddings))  # type: ignore[misc]
        packed: tuple[type, ...] = ()
        if getattr(self, "is_loaded_in_4bit", False):
            from bitsandbytes.nn import Params4bit

            packed = (Params4bit,)
        total = 0
        for module, name, parameter in _own_parameters(self):
            if exclude_embeddings and name == "weight" and isinstance(module, nn.Embedding):
                continue
            if only_trainable and not parameter.requires_grad:
                continue
            # Two weights a byte of what 4 bits are stored in.
            total += parameter.numel() * (2 * parameter.element_size() if isinstance(parameter, packed) else 1)
        return total

    return num_parameters
