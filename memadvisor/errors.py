"""Errors that a user can cause: one line saying what is wrong, one saying what to do."""

from __future__ import annotations


class MemadvisorError(Exception):
    """What is wrong with the value seen (`str(error)`) and what to do about it (`hint`)."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint is not None:
            self.add_note(
                f"Hint: {hint}"
            )  # for whoever sees it in a traceback, as callers of the Python interface do

    def one_line(self) -> str:
        """Message and hint on one line, as the command line prints them."""
        text = str(self) if self.hint is None else f"{self} Hint: {self.hint}"
        return " ".join(text.split())


class UsageError(MemadvisorError):
    """An argument, option or file name that the user gave cannot be used."""


class RunFormatError(MemadvisorError):
    """A directory is not a run, or nothing in it could be read."""


class PlanError(MemadvisorError):
    """A plan cannot be read, or does not fit the model, script or machine at hand."""


class UnknownHardwareError(MemadvisorError):
    """A figure of the hardware is needed and nobody measured or published it."""
