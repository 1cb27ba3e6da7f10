"""Every error that zfx raises on purpose. Each carries its facts as attributes, and says in words what to change."""

from __future__ import annotations

from collections.abc import Sequence


class ZfxError(Exception):
    """Root of the errors below. Wrong arguments are plain `ValueError` or `TypeError`."""


class CaptureError(ZfxError):
    """The model's forward could not be captured as one graph.

    Common causes: a graph break (data-dependent Python branch, `.item()`, a function under `torch.compiler.disable`), an
    operator without a fake implementation, or a Python value on the module that changes at every call.

    Attributes:
        location: `file:line` in the user's code where capture stopped, or None if torch did not say.
        reason: what torch said, in one line.
    """

    def __init__(self, reason: str, *, location: str | None = None, advice: str = "") -> None:
        self.reason, self.location, self.advice = reason, location, advice
        where = f" at {location}" if location else ""
        super().__init__(f"cannot capture the model as one graph{where}: {reason}" + (f"\n{advice}" if advice else ""))


class LoopError(ZfxError, RuntimeError):
    """The code around a compiled model asks for what its sharded parameters can't do, or at a time when they can't.

    A `RuntimeError` too, as torch raises one for most of these. The message says what to do instead.
    """


class InfeasibleBudget(ZfxError):
    """No schedule of this program can respect the limit.

    Attributes:
        limit_name: the field of `Limits` that cannot be met.
        limit: its value (elements for `max_live_parameters`, bytes for `memory_budget`).
        step: name of the first step that does not fit.
        needed: what that step needs at the least, in the limit's unit.
        smallest_limit: the smallest value with which every step fits.
    """

    def __init__(self, *, limit_name: str, limit: int, step: str, needed: int, smallest_limit: int) -> None:
        self.limit_name, self.limit, self.step = limit_name, limit, step
        self.needed, self.smallest_limit = needed, smallest_limit
        unit = "bytes" if limit_name == "memory_budget" else "elements"
        super().__init__(
            f"{limit_name}={limit:,} {unit} is too small: step {step!r} needs {needed:,} {unit} at the least; "
            f"the smallest limit that works for this model is {limit_name}={smallest_limit:,}"
        )


class ScheduleError(ZfxError):
    """A schedule breaks a rule of the verifier; it never runs.

    Attributes:
        rule: name of the rule.
        step: index of the step (or point before it) where it is broken, or None.
        parameter: the parameter concerned, or None.
        pass_name: the pass that returned it, where a user's own passes planned; else None.
    """

    def __init__(
        self, message: str, *, rule: str, step: int | None = None, parameter: str | None = None, pass_name: str | None = None
    ) -> None:
        self.rule, self.step, self.parameter, self.pass_name = rule, step, parameter, pass_name
        self.message = message
        super().__init__(f"[{rule}] {message}" if pass_name is None else f"[{rule}] after pass {pass_name!r}: {message}")

    def after(self, pass_name: str) -> ScheduleError:
        """The same error, which also says which pass returned the schedule."""
        return ScheduleError(self.message, rule=self.rule, step=self.step, parameter=self.parameter, pass_name=pass_name)


class PassError(ZfxError):
    """A planning pass raised, or returned something other than a schedule of the program and the limits that it was given.

    Attributes:
        pass_name: name of the pass.
    """

    def __init__(self, pass_name: str, what: str) -> None:
        self.pass_name = pass_name
        super().__init__(f"pass {pass_name!r} {what}")


class RankMismatch(ZfxError):
    """Ranks do not run the same plan, or one of them is missing. Raised on every rank that is still there.

    Attributes:
        ranks: the ranks that differ from this one, or that are missing.
        first_difference: the first instruction (or fact) that differs, in words.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), first_difference: str = "") -> None:
        self.ranks, self.first_difference = tuple(ranks), first_difference
        super().__init__(message)


class CheckpointError(ZfxError):
    """A checkpoint can't be written, read or trusted: a file is missing, truncated, changed or hostile, or it holds something else
    than what is to be loaded. Raised on every rank, and nothing is committed.

    Attributes:
        path: the file or directory concerned, or None.
        name: the parameter, key or file concerned, or None.
        ranks: the ranks that failed first, where it is known.
    """

    def __init__(self, message: str, *, path: object = None, name: str | None = None, ranks: Sequence[int] = ()) -> None:
        self.path, self.name, self.ranks = None if path is None else str(path), name, tuple(ranks)
        super().__init__(message)
