"""Which trainer is calling: read off the call stack, because a trainer never introduces itself to its model.

transformers hands a model to a trainer and tells the model nothing. The other ways to learn of it are a patch of
`Trainer` for the whole process, or one more line in everybody's script. A model's own forward, and its own
`load_state_dict`, run inside a method of that trainer, so the answer stands a few frames up the stack.

Only the frame of the named method is opened: up to Python 3.12, reading a frame's locals keeps them alive as long as
the frame lives, and these methods last one micro-batch. A walk costs a few microseconds, once a training forward.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

__all__ = ["trainer_running"]


def trainer_running(method: str) -> tuple[Any, dict[str, Any]] | None:
    """The innermost `transformers.Trainer` whose `method` is being executed in this thread.

    Args:
        method: name of a method that does not run for long: "training_step", "_load_from_checkpoint".

    Returns:
        (trainer, the method's local variables), or None.
    """
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer_class is None:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == method:
            found = frame.f_locals
            if isinstance(found.get("self"), trainer_class):
                return found["self"], dict(found)
        frame = frame.f_back
    return None
