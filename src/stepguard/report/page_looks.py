"""The section of a run's page that shows its deep looks, silent failures and forecasts."""

from __future__ import annotations

from typing import Any

from stepguard.diagnose import forecast, silent
from stepguard.report.look_tables import LookRow, LookTable, look_tables
from stepguard.report.looks import headline, remarks
from stepguard.report.page_incident import clipped
from stepguard.report.story import Run

MOST_LISTED = 15
"""Rows of each table, the worst ones."""
MOST_POINTS = 60
"""Looks that the history of a row draws, the newest."""


def looks_section(run: Run) -> dict[str, Any] | None:
    """Tables of the newest look with their history, and what was told; None where there is none."""
    findings = _findings(run)
    if not run.looks:
        return {"line": "", "findings": findings, "tables": [], "remarks": []} if findings else None
    return {
        "line": headline(run.looks),
        "findings": findings,
        "tables": [_table(one) for one in look_tables(run.looks, MOST_LISTED)],
        "remarks": [clipped(sentence) for sentence in remarks(run.looks[-1])],
    }


def _findings(run: Run) -> list[list[str]]:
    """Step, code and sentence of everything that was told about a healthy step."""
    found = []
    for note in run.notes:
        code = str(note.fields.get("code", ""))
        if code.startswith((*silent.SERIES, forecast.SERIES)):
            words = clipped(str(note.fields.get("summary", "")))
            found.append([str(note.fields.get("step", "")), code, words])
    return found


def _table(table: LookTable) -> dict[str, Any]:
    return {
        "title": table.title,
        "headings": list(table.headings),
        "history": table.history,
        "rows": [_row(row) for row in table.rows],
    }


def _row(row: LookRow) -> dict[str, Any]:
    return {
        "cells": [clipped(cell) for cell in row.cells],
        "warns": list(row.warns),
        "history": [list(point) for point in row.history[-MOST_POINTS:]],
    }
