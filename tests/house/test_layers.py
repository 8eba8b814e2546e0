"""Imports point down only, there are no cycles, and the thinking layers know no torch."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepguard
from house import graph

MODULES = graph.sources(Path(stepguard.__file__).parents[1])
EDGES = graph.edges(MODULES)


def _edges(**modules: str) -> list[graph.Edge]:
    """Edges of a made-up package: `_edges(judge__judge="import torch")`."""
    named = {
        f"stepguard.{name}"
        if name.startswith("__")
        else "stepguard." + name.replace("__", ".", 1): text
        for name, text in modules.items()
    }
    return graph.edges({"stepguard": "", **named})


def test_source_is_really_read() -> None:
    assert "stepguard.records.incident" in MODULES
    assert ("stepguard.judge.judge", "stepguard.records.incident") in {
        (e.importer, e.target) for e in EDGES
    }


def test_every_module_has_a_layer() -> None:
    assert graph.without_layer(MODULES) == []


def test_imports_point_down_only() -> None:
    assert [str(edge) for edge in graph.wrong_direction(EDGES)] == []


def test_modules_form_no_cycle() -> None:
    assert graph.cycles(EDGES) == []


def test_pure_layers_import_no_torch() -> None:
    assert [str(edge) for edge in graph.torch_in_pure_layers(EDGES)] == []


def test_frameworks_are_imported_by_integrations_only() -> None:
    assert [str(edge) for edge in graph.frameworks_outside_integrations(EDGES)] == []


def test_rich_that_draws_random_numbers_is_imported_at_start_by_report_only() -> None:
    assert graph.rich_at_start_outside_report(MODULES) == []
    made_up = {
        "stepguard.engine.protect": "from rich.console import Console",
        "stepguard.report.terminal": "import rich",
    }
    assert graph.rich_at_start_outside_report(made_up) == ["stepguard.engine.protect"]


def test_module_without_layer_would_be_caught() -> None:
    assert graph.without_layer(["stepguard", "stepguard.records", "stepguard.utils"]) == [
        "stepguard.utils"
    ]


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("records__origin", "import stepguard.judge.judge"),
        ("judge__judge", "from stepguard.diagnose import engine"),
        ("journal", "from stepguard.report import terminal"),
        ("sentinel__taps", "from stepguard.state.rng import capture_rng"),
        ("state__rng", "from stepguard.sentinel import taps"),
        ("state__rng", "from stepguard.numerics import losses"),
        ("locate__replay", "from stepguard.engine import flow"),
        ("engine__flow", "from stepguard.guard import Guard"),
        ("cli__run", "from stepguard.integrations import transformers"),
        ("run__replay", "import stepguard.cli.app"),
        ("_errors", "from stepguard.records.incident import Incident"),
        ("state__rng", "def f():\n    from stepguard.guard import Guard"),
        (
            "state__rng",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stepguard.guard import "
            "Guard",
        ),
        ("state__rng", "from ..guard import Guard"),
        ("state__rng", "from .. import guard"),
        ("state__rng", "from importlib import import_module\nimport_module('stepguard.guard')"),
        ("judge__judge", "from stepguard.utils import anything"),
    ],
)
def test_import_that_does_not_point_down_would_be_caught(importer: str, statement: str) -> None:
    found = _edges(**{importer: statement, "guard": "", "utils": ""})
    assert len(graph.wrong_direction(found)) == 1


def test_public_name_counts_as_its_home_module() -> None:
    facade = "_HOMES = {'Guard': 'stepguard.guard'}"
    found = graph.edges(
        {"stepguard": facade, "stepguard.state.rng": "from stepguard import Guard, __version__"}
    )
    assert [edge.target for edge in graph.wrong_direction(found)] == ["stepguard.guard"]


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("records__settings", "from stepguard._errors import ConfigError"),
        ("journal", "from stepguard.records import Reading"),
        ("engine__flow", "from stepguard.locate import replay"),
        ("cli__run", "from stepguard.guard import Guard"),
        ("cli__run", "from stepguard import __version__"),
        ("__main__", "from stepguard.cli.app import main"),
        ("state__rng", "from .buffers import BufferKeeper"),
        (
            "_errors",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stepguard.records "
            "import Incident",
        ),
    ],
)
def test_import_that_points_down_is_let_through(importer: str, statement: str) -> None:
    assert graph.wrong_direction(_edges(**{importer: statement})) == []


def test_cycle_would_be_caught_however_long() -> None:
    found = _edges(
        state__a="from stepguard.state import b",
        state__b="def late():\n    from stepguard.state.c import thing",
        state__c="from . import a",
        state__d="from stepguard.state import a",
    )
    assert graph.cycles(found) == [["stepguard.state.a", "stepguard.state.b", "stepguard.state.c"]]


def test_module_that_imports_what_its_own_package_exports_is_a_cycle() -> None:
    found = graph.edges(
        {
            "stepguard.judge": "from stepguard.judge.judge import judge",
            "stepguard.judge.judge": "from stepguard.judge import History",
        }
    )
    assert graph.cycles(found) == [["stepguard.judge", "stepguard.judge.judge"]]


@pytest.mark.parametrize(
    "statement",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch import Tensor",
        "from safetensors.torch import save_file",
        "def f():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ],
)
@pytest.mark.parametrize("importer", ["records__origin", "judge__judge", "report__html", "journal"])
def test_torch_in_a_pure_layer_would_be_caught(importer: str, statement: str) -> None:
    assert len(graph.torch_in_pure_layers(_edges(**{importer: statement}))) == 1
    assert graph.torch_in_pure_layers(_edges(state__rng=statement)) == []


def test_framework_in_the_library_would_be_caught() -> None:
    found = _edges(
        engine__flow="import transformers", integrations__transformers="import transformers"
    )
    assert [edge.importer for edge in graph.frameworks_outside_integrations(found)] == [
        "stepguard.engine.flow"
    ]
