"""What keeps a step whole: one thread at a time, and signals that wait for it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

lock = threading.RLock()
"""Held while anything is traced, lowered or dispatched.

Tracing replaces functions of the whole process and values of the model, and lowering leaves
work pending on the device that another thread's sync would take for real.
"""


def _renew() -> None:
    global lock
    # In a forked child the thread that held it doesn't exist.
    lock = threading.RLock()
    for held in _held:
        held.waiting = False
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class _Held:
    """Handlers that wait, and the signals that came for them.

    Args:
        interruptible: whether Ctrl-C, as Python handles it by default, goes through.
    """

    def __init__(self, interruptible: bool) -> None:
        # Until the handlers are all in place, and again once they are put back.
        self.waiting = False
        self.arrived: list[tuple[int, Any]] = []
        self.handlers: dict[int, Any] = {}
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            through = interruptible and handler is signal.default_int_handler
            if callable(handler) and not through:
                self.handlers[number] = handler
                signal.signal(number, self._arrive)

    def _arrive(self, number: int, frame: Any) -> None:
        if self.waiting:
            self.arrived.append((number, frame))
        else:
            self.handlers[number](number, frame)

    def deliver(self) -> None:
        """Let handlers run, those that waited first."""
        self.waiting = False
        if self.arrived:
            number, frame = self.arrived.pop(0)
            try:
                self.handlers[number](number, frame)
            finally:
                self.deliver()

    def release(self) -> None:
        """Put the handlers back."""
        self.waiting = False
        try:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        finally:
            self.deliver()


_held: list[_Held] = []


@contextlib.contextmanager
def deferred(*, interruptible: bool = False) -> Iterator[None]:
    """Signals that arrive inside are handled after the block, in the main thread.

    So an interrupt can't come between a dispatch, which consumes the old state, and the moment
    when the user's tensors have the new one; and a handler that saves the model doesn't meet
    it half exchanged.

    Args:
        interruptible: let Ctrl-C through where nothing but `KeyboardInterrupt` comes of it.
    """
    if _held or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held(interruptible)
    try:
        _held.append(held)
        held.waiting = True
        yield
    finally:
        _held.clear()
        held.release()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Inside `deferred`: signals are handled at once again."""
    if not _held or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _held[0]
    held.deliver()
    try:
        yield
    finally:
        held.waiting = True
