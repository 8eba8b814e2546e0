"""Questions about units and their answers: generated from exact factors (`toy`), or by pint in many
units (`real`).

Both are lists of [question, number], as `train.json` and `valid.json` of the original have them;
`real` writes these two files into `data.folder`, or reads them where they are there already.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Pair = tuple[str, float]
Families = dict[str, dict[str, float]]

TOY: Families = {
    "length": {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0},
    "mass": {"g": 0.001, "kg": 1.0, "t": 1000.0},
    "volume": {"mL": 0.001, "L": 1.0},
    "time": {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0},
    "data": {"bit": 0.125, "B": 1.0, "kB": 1000.0, "MB": 1e6},
}
REAL = {
    "length": "inch foot yard mile millimeter centimeter meter kilometer nautical_mile",
    "mass": "gram kilogram metric_ton ounce pound stone",
    "volume": "milliliter liter cup pint quart gallon",
    "time": "second minute hour day week",
    "data": "bit byte kilobyte megabyte gigabyte",
    "speed": "meter/second kilometer/hour mile/hour knot",
}
TEMPLATES = (
    "What is {v} {a} in {b}?",
    "Convert {v} {a} to {b}?",
    "How many {b} make up {v} {a}?",
    "Can you provide the conversion value from {a} to {b} for {v} units?",
)
LEAST, MOST = 1e-3, 1e5
TRIES = 100
"""Draws for every question that is wanted, before there are too few different ones."""
CLOSE = 0.05
"""Share of the true value that an answer may be off by."""


def spelled(value: float) -> str:
    """`11.265`, `7000`: six digits and no exponent."""
    return f"{value:.6f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:.6g}"


def answer_of(value: float) -> str:
    return f"<answer>{spelled(value)}</answer>"


def parse_answer(text: str) -> float:
    """The number between the tags; NaN where there is none."""
    try:
        return float(text.split("<answer>")[1].split("</answer>")[0])
    except (IndexError, ValueError):
        return math.nan


def is_right(given: float, true: float) -> bool:
    return abs(round(given, 3) - round(true, 3)) < CLOSE * abs(round(true, 3))


def scores(answers: Sequence[float], pairs: Sequence[Pair]) -> tuple[float, float]:
    """Accuracy and answer rate."""
    right = sum(is_right(given, true) for given, (_, true) in zip(answers, pairs, strict=True))
    return right / len(pairs), sum(not math.isnan(given) for given in answers) / len(pairs)


def base_text(source: random.Random, *, tagged: bool) -> str:
    """What the toy base model is pre-trained on: `7 km = 7000 m` for all units, tagged answers for
    lengths only.

    Questions that are held out for the validation are not among them.
    """
    if not tagged:
        value, a, b, result = _drawn(source, TOY)
        return f"{value} {a} = {spelled(result)} {b}"
    while True:
        value, a, b, result = _drawn(source, {"length": TOY["length"]})
        question = source.choice(TEMPLATES).format(v=value, a=a, b=b)
        if not held_out(question):
            return f"{question} {answer_of(result)}"


def toy_pairs(part: str, number: int, seed: int) -> list[Pair]:
    source = random.Random(seed)

    def draw() -> Pair:
        value, a, b, result = _drawn(source, TOY)
        return source.choice(TEMPLATES).format(v=value, a=a, b=b), result

    return distinct(draw, part, number)


def held_out(question: str) -> bool:
    """One question in eight is for the validation, by its text, so that no other part ever holds
    it.
    """
    return zlib.crc32(question.encode()) % 8 == 0


def distinct(draw: Callable[[], Pair], part: str, number: int) -> list[Pair]:
    """So many different questions of one part."""
    found: dict[str, float] = {}
    for _ in range(TRIES * number):
        if len(found) == number:
            return list(found.items())
        question, value = draw()
        if held_out(question) == (part == "valid"):
            found.setdefault(question, value)
    raise SystemExit(
        f"data.{part}={number}: only {len(found)} different questions were found; ask for fewer."
    )


def _drawn(source: random.Random, families: Families) -> tuple[int, str, str, float]:
    while True:
        units = families[source.choice(list(families))]
        a, b = source.sample(list(units), 2)
        value = source.randint(1, 10)
        result = value * units[a] / units[b]
        if LEAST <= result <= MOST:
            return value, a, b, result


def real_pairs(folder: Path, part: str, number: int, seed: int) -> list[Pair]:
    """`folder/<part>.json`; made by pint if it is not there."""
    path = folder / f"{part}.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_by_pint(part, number, seed), indent=0) + "\n", encoding="utf-8")
    found: list[list[Any]] = json.loads(path.read_text(encoding="utf-8"))
    if len(found) < number:
        raise SystemExit(
            f"{path} holds {len(found)} questions, data.{part} asks for {number}; remove it or ask "
            f"for fewer."
        )
    return [(str(question), float(value)) for question, value in found[:number]]


def _by_pint(part: str, number: int, seed: int) -> list[Pair]:
    try:
        from pint import UnitRegistry
    except ImportError:
        raise SystemExit("data.name=real needs pint: make recipes-real") from None
    registry, source = UnitRegistry(), random.Random(seed)

    def draw() -> Pair:
        while True:
            a, b = source.sample(REAL[source.choice(list(REAL))].split(), 2)
            value = source.randint(1, 10)
            result = float((value * registry(a)).to(registry(b)).magnitude)
            if LEAST <= result <= MOST:
                names = {"v": value, "a": _short(registry, a), "b": _short(registry, b)}
                return source.choice(TEMPLATES).format(**names), round(result, 6)

    return distinct(draw, part, number)


def _short(registry: Any, unit: str) -> str:
    """`mi`, `km/h`."""
    return f"{registry(unit).units:~}".replace(" ", "")


def pairs_of(data: Any, part: str) -> list[Pair]:
    """Questions of `train` or `valid`, none of them twice and none in both."""
    number, seed = data[part], data.seed + (1000 if part == "valid" else 0)
    sources: dict[str, Callable[[], list[Pair]]] = {
        "toy": lambda: toy_pairs(part, number, seed),
        "real": lambda: real_pairs(Path(data.folder), part, number, seed),
    }
    if data.name not in sources:
        raise SystemExit(f"data.name={data.name!r} is not known; use toy or real.")
    return sources[data.name]()
