"""`jit`: compile a pure function over trees, with donation by position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from funcacc import trees
from funcacc.capture import context
from funcacc.engines import get_engine
from funcacc.stages import Compiled, Lowered, Signature
from funcacc.types import PyTree

log = logging.getLogger("funcacc")


class Jitted:
    """A function that is compiled once for each kind of arguments; made by `jit`.

    Calling it traces and compiles where that is needed, then runs. ``lower(*args)`` gives a
    `Lowered` stage and ``lower(*args).compile()`` a `Compiled` one; both can be printed.
    """

    def __init__(self, fn: Callable[..., PyTree], donate_argnums: Sequence[int]) -> None:
        self._fn = fn
        self._donate = donate_argnums
        self._name = f"jit({getattr(fn, '__name__', type(fn).__name__)})"
        self._programs: dict[Any, Compiled] = {}
        self._last: Signature | None = None

    def lower(self, *args: PyTree) -> Lowered:
        """Trace for arguments like these, without compiling or running anything.

        Args:
            *args: as for a call; only structure, shapes, dtypes, device and the values that
                aren't tensors matter.
        """
        engine = get_engine("auto", Signature(args).device)
        return Lowered(self._name, self._fn, args, self._donate, engine)

    def __call__(self, *args: PyTree) -> PyTree:
        """Run the program for arguments like these, after building it where it is missing."""
        if context.current() is not None:
            # Part of the program around it.
            return self._fn(*args)
        signature = Signature(args)
        key = (signature.key, context.autocast_state(signature.device.type))
        if key not in self._programs:
            if self._last is None:
                reason = "first call"
            else:
                reason = signature.difference(self._last) or "autocast changed"
            self._programs[key] = self.lower(*args).compile()
            self._last = signature
            log.info("%s: traced: %s", self._name, reason)
        return self._programs[key].run(signature, trees.flatten(args)[0])


def jit(fn: Callable[..., PyTree], donate_argnums: int | Sequence[int] = ()) -> Jitted:
    """Compile `fn` once for each structure, shapes, dtypes and static values of its arguments.

    Equals ``fn``, with these differences:

    - Python side effects happen when it is traced;
    - leaves that aren't tensors are static: another value is another program. Each new
      program is logged at INFO, with the argument that caused it;
    - the leaves of donated arguments are consumed: the first result leaves of equal shape and
      dtype take their memory, in order. Using one afterwards is an error that says so. Views
      of it, or what ``detach()`` gave, lose their values too;
    - random operations draw from one key for each call, taken from the device's generator.

    Args:
        fn: trees of tensors and static values in, a tree of tensors out; pure.
        donate_argnums: positions of arguments that the caller gives away, or one position.

    Returns:
        A `Jitted`: call it, or look at its stages by ``.lower(*args).compile()``.

    Raises:
        CarryError: when a donated leaf has no result of its shape and dtype, for a donated
            argument that isn't there or that `fn` closes over too, or for a result that is
            neither tensor nor number.

    Example:
        >>> import torch, funcacc
        >>> add = funcacc.jit(lambda a, b: {"sum": a + b["x"]})
        >>> add(torch.ones(2), {"x": torch.ones(2)})
        {'sum': tensor([2., 2.])}
    """
    return Jitted(fn, [donate_argnums] if isinstance(donate_argnums, int) else donate_argnums)
