"""What ``kvway check`` has found, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from rich.console import Console
from rich.markup import escape


class Level(StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"  # worth knowing, or could not be checked
    PROBLEM = "problem"  # costs cache hits, or requests


_MARKS: Final = {Level.OK: "[green]✓[/]", Level.NOTE: "[yellow]·[/]", Level.PROBLEM: "[red]✗[/]"}


@dataclass(slots=True, frozen=True)
class Finding:
    """One check of one subject.

    Attributes:
        subject: a worker's name, ``redis`` or ``config``.
        check: what was looked at, one word.
        level: how it came out.
        message: what was seen.
        mend: what to change, down to the engine's flag; empty where there is nothing to do.
    """

    subject: str
    check: str
    level: Level
    message: str
    mend: str = ""


class Notebook:
    """Collects the findings about one subject.

    Args:
        subject: see ``Finding``.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.findings: list[Finding] = []

    def ok(self, check: str, message: str) -> None:
        """All is well."""
        self.findings.append(Finding(self.subject, check, Level.OK, message))

    def note(self, check: str, message: str, mend: str = "") -> None:
        """Worth knowing, or could not be checked."""
        self.findings.append(Finding(self.subject, check, Level.NOTE, message, mend))

    def problem(self, check: str, message: str, mend: str) -> None:
        """Something is wrong; ``mend`` says what to change."""
        self.findings.append(Finding(self.subject, check, Level.PROBLEM, message, mend))


def has_problems(findings: Sequence[Finding]) -> bool:
    """Return whether something has to be mended."""
    return any(finding.level is Level.PROBLEM for finding in findings)


def as_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as JSON data: ``ok``, and ``findings`` with the fields of ``Finding``."""
    return {"ok": not has_problems(findings), "findings": [asdict(finding) for finding in findings]}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print findings by subject, and a line that sums them up."""
    subject = None
    for finding in findings:
        if finding.subject != subject:
            subject = finding.subject
            console.print(f"[bold]{escape(subject)}[/]", highlight=False)
        line = f"  {_MARKS[finding.level]} {finding.check}: {escape(finding.message)}"
        console.print(line, highlight=False, soft_wrap=True)
        if finding.mend:
            console.print(f"      → {escape(finding.mend)}", highlight=False, soft_wrap=True)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    console.print("all is well" if not problems else f"{problems} problem{'s' * (problems > 1)}", highlight=False)
