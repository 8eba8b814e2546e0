"""TARGET of `stepguard check`: a build function, a configuration file, or data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.preflight.data.files import READERS as DATA_KINDS
from stepguard.preflight.inspection import Place
from stepguard.preflight.settings.files import READERS as CONFIG_KINDS
from stepguard.preflight.settings.files import read_settings
from stepguard.preflight.subject import Subject, subject_of
from stepguard.preflight.tracking import Tracked
from stepguard.state.importing import import_function, importable


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The words of the command line."""

    target: str
    config: Path | None = None
    launcher: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Subject that options set; None and empty ones do not count."""


def resolve(request: Request) -> tuple[Subject, Place]:
    """What is to be checked. Runs the build function, if the target is one, and nothing else."""
    kind = _kind(request.target)
    if kind == "config" and request.config is not None:
        raise ConfigError(
            f"TARGET {request.target} is a configuration already; leave --config out."
        )
    file = Path(request.target) if kind == "config" else request.config
    config = read_settings(file) if file is not None else None
    place = Place(Path.cwd(), file)
    subject = Subject(config=config)
    if kind == "function":
        subject, place = _built(request.target, config, place)
    elif kind == "data":
        subject = replace(subject, data=request.target)
    if request.launcher is not None:
        facts = read_settings(request.launcher, "launcher")
        subject = replace(subject, launcher=facts, launcher_name=request.launcher.name)
    return subject.with_given(**request.given), place


def _kind(target: str) -> str:
    path = Path(target)
    if path.is_dir() or (path.is_file() and path.suffix.lower() in DATA_KINDS):
        return "data"
    if path.is_file() and path.suffix.lower() in CONFIG_KINDS:
        return "config"
    if path.exists():
        kinds = ", ".join([*CONFIG_KINDS, *DATA_KINDS])
        raise ConfigError(
            f"{target}: files of kind {path.suffix or '(none)'} are not known; known are {kinds}."
        )
    if (
        target.count(":") == 1
        and "/" not in target
        and not target.startswith(":")
        and not target.endswith(":")
    ):
        return "function"
    raise ConfigError(
        f"{target!r} is neither a file nor a folder here, nor 'module:function'; give one of "
        f"these, for instance "
        "stepguard check train:build."
    )


def _built(target: str, config: dict[str, Any] | None, place: Place) -> tuple[Subject, Place]:
    with importable():
        build = import_function(target, ConfigError)
        tracked = Tracked(config) if config is not None and _takes_one(build) else None
        _fits(build, target, config)
        if config is not None and tracked is None:
            place = replace(
                place,
                why_untracked=f"{target} takes no parameter, so it cannot be given the "
                f"configuration",
            )
        try:
            built = build(tracked) if tracked is not None else build()
        except Exception as fault:
            raise ConfigError(
                f"{target} raised {type(fault).__name__}: {' '.join(str(fault).split())}"
            ) from fault
    subject = subject_of(built, target)
    if isinstance(subject.config, Tracked):
        tracked = subject.config
    if subject.config is None or tracked is subject.config:
        subject = replace(subject, config=config if config is not None else subject.config)
    return subject, replace(place, tracked=tracked)


def _parameters(build: Any) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _takes_one(build: Any) -> bool:
    return bool(_parameters(build))


def _fits(build: Any, target: str, config: dict[str, Any] | None) -> None:
    needed = [p.name for p in _parameters(build) if p.default is p.empty]
    if len(needed) > 1:
        raise ConfigError(
            f"{target} needs {', '.join(needed)}; it is called with the configuration and nothing "
            f"else."
        )
    if needed and config is None:
        raise ConfigError(
            f"{target} takes {needed[0]!r}; give --config FILE, which it is called with."
        )
