"""Ctrl-C that saves: the first lets the step end and the checkpoint be written, the second stops at once.

A KeyboardInterrupt arrives between any two instructions: half of the weights may be updated, the random numbers of the
next step half drawn. A checkpoint saved then resumes to a run that never was. So the signal is only noted, and acted
on where a checkpoint is a straight run's own: at the end of an optimizer step, or inside an evaluation.

Python's own handler is what is replaced, for the time of one `train()` and in the main thread only; anybody else's
(a notebook server's, a scheduler's) stays. `train()` may also end by an error, which no callback hears of. The handler
then is still in place, and finds by the stack that nothing trains any more: it takes itself away and hands the signal
to Python's.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from types import CodeType, FrameType
from typing import Any

__all__ = ["InterruptGuard"]

_MESSAGE = (
    "\nfastft: interrupted. The step is being finished and a checkpoint saved; Ctrl-C again stops at once, saving "
    "nothing.\n"
)


class InterruptGuard:
    """Notes SIGINT while `trainer` trains.

    Args:
        trainer: a `transformers.Trainer`; it is not kept alive.
    """

    def __init__(self, trainer: Any) -> None:
        self.requested = False
        self._installed = False
        # the code object, because a frame says which code it runs without opening its locals
        self._train: CodeType = inspect.unwrap(type(trainer).train).__code__

    def install(self) -> bool:
        """Take SIGINT over from Python's own handler; returns whether that was possible."""
        if self._installed:
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        signal.signal(signal.SIGINT, self._handle)
        self._installed = True
        return True

    def remove(self) -> None:
        """Give SIGINT back, unless somebody else has taken it since."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested or not self._trains(frame):
            self.remove()
            signal.default_int_handler(signum, frame)
        self.requested = True
        with contextlib.suppress(OSError):  # nobody has to be listening
            # Not through sys.stderr: the signal may have come in the middle of somebody's write to it.
            os.write(2, _MESSAGE.encode())

    def _trains(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is self._train:
                return True
            frame = frame.f_back
        return False
