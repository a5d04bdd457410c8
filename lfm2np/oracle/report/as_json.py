"""A report for programs; schemas/report.schema.json says what it holds."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from lfm2np.oracle.report.report import Report, environment

FORMAT_VERSION = 1


def as_json(report: Report, command_line: str = "") -> dict[str, Any]:
    """Numbers that are not finite become text, as JSON has none."""
    fields: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "command": report.command,
        "command_line": command_line,
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "findings": [asdict(finding) for finding in report.findings],
        "not_tested": list(report.not_tested),
        "facts": dict(report.facts),
        "figures": dict(report.figures),
        "environment": environment(),
    }
    plain: dict[str, Any] = finite(fields)
    return plain


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
