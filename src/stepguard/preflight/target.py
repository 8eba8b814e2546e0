"""TARGET of `stepguard check`: a build function, a configuration file, or data."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.preflight.data.files import READERS as DATA_KINDS
from stepguard.preflight.inspection import CheckContext
from stepguard.preflight.settings.keys import flat
from stepguard.preflight.settings.settings_file import READERS as CONFIG_KINDS
from stepguard.preflight.settings.settings_file import UnquotedNumber, read_settings
from stepguard.preflight.subject import Subject, subject_of
from stepguard.preflight.tracking import Tracked, plain
from stepguard.state.importing import import_function, importable

FUNCTION = re.compile(r"[^:/]+:[^:/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The words of the command line."""

    target: str
    config: Path | None = None
    launcher: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Subject that options set; None and empty ones do not count."""


def resolve(request: Request) -> tuple[Subject, CheckContext]:
    """Say what is to be checked. Runs nothing but the build function, if the target is one."""
    kind = _kind(request.target)
    file = request.config
    if kind == "config":
        if file is not None:
            raise ConfigError(
                f"TARGET {request.target} is a configuration already; leave --config out."
            )
        file = Path(request.target)
    config = None
    if file is not None:
        config = read_settings(file)
    context = CheckContext(Path.cwd(), config_file=file)
    subject = Subject(config=config)
    if kind == "function":
        subject, context = _built(request.target, config, context)
    elif kind == "data":
        subject = replace(subject, data=request.target)
    if request.launcher is not None:
        facts = read_settings(request.launcher, "launcher")
        subject = replace(subject, launcher=facts, launcher_name=request.launcher.name)
    return subject.with_given(**request.given), context


def _kind(target: str) -> str:
    path = Path(target)
    suffix = path.suffix.lower()
    if path.is_dir() or (path.is_file() and suffix in DATA_KINDS):
        return "data"
    if path.is_file() and suffix in CONFIG_KINDS:
        return "config"
    if path.exists():
        kinds = ", ".join([*CONFIG_KINDS, *DATA_KINDS])
        raise ConfigError(
            f"{target}: files of kind {path.suffix or '(none)'} are not known; known are {kinds}."
        )
    if FUNCTION.fullmatch(target):
        return "function"
    raise ConfigError(
        f"{target!r} is neither a file nor a folder here, nor 'module:function'; give one of "
        "these, for instance stepguard check train:build."
    )


def _built(
    target: str, config: dict[str, Any] | None, context: CheckContext
) -> tuple[Subject, CheckContext]:
    """Call the build function, with the configuration if it takes a parameter."""
    tracked = None
    with importable():
        build = import_function(target, ConfigError)
        _fits(build, target, config)
        if config is not None:
            if _parameters(build):
                tracked = Tracked(config)
            else:
                why = f"{target} takes no parameter, so it cannot be given the configuration"
                context = replace(context, why_untracked=why)
        subject = subject_of(call_build(build, target, tracked), target)
        script = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    if isinstance(subject.config, Tracked):
        tracked = subject.config
    if config is not None and (subject.config is None or subject.config is tracked):
        subject = replace(subject, config=config)
    # A package without an __init__.py has no file.
    return subject, replace(context, tracked=tracked, script=Path(script) if script else None)


def call_build(build: Callable[..., Any], target: str, tracked: Tracked | None = None) -> Any:
    """Call the user's function. Raises ConfigError with what it raised."""
    try:
        if tracked is None:
            return build()
        return build(tracked)
    except Exception as fault:
        text = " ".join(str(fault).split()).replace(UnquotedNumber.__name__, "str")
        for leaf in flat(plain(tracked)) if isinstance(fault, TypeError) and tracked else ():
            if isinstance(leaf.value, UnquotedNumber):
                text += (
                    f" ({leaf.key}: {leaf.value} is text to PyYAML; write it with a dot: 1.0e-4)"
                )
                break
        raise ConfigError(f"{target} raised {type(fault).__name__}: {text}") from fault


def _parameters(build: Any) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        # Functions written in C may have no signature.
        return []
    return [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _fits(build: Any, target: str, config: dict[str, Any] | None) -> None:
    needed = []
    for parameter in _parameters(build):
        if parameter.default is parameter.empty:
            needed.append(parameter.name)
    if len(needed) > 1:
        raise ConfigError(
            f"{target} needs {', '.join(needed)}; it is called with the configuration and nothing "
            "else."
        )
    if needed and config is None:
        raise ConfigError(
            f"{target} takes {needed[0]!r}; give --config FILE, which it is called with."
        )
