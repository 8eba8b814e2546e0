"""Every case of the zoo, in a fixed order: the entries known in advance, then those written to be
unseen.
"""

from __future__ import annotations

from importlib import import_module

from benchmarks.zoo.case import CASES, Case

KNOWN = (
    "masks",
    "reductions",
    "domains",
    "gradients",
    "precision",
    "state",
    "rates",
    "data",
    "controls",
)
MORE = (
    "more_masks",
    "more_reductions",
    "more_divisions",
    "more_domains",
    "more_overflow",
    "more_gradients",
    "more_branches",
    "more_precision",
    "more_state",
    "more_rates",
    "more_data",
    "more_structure",
    "more_places",
    "more_distractors",
    "more_probability",
    "more_runaway",
    "more_controls",
    "more_healthy",
    "more_algebra",
    "more_geometry",
    "more_groups",
    "more_likelihoods",
    "more_updates",
    "more_nested",
    "more_fine",
    "more_audio",
    "more_policies",
    "more_objectives",
    "more_vision",
    "more_scenes",
    "more_decoders",
    "more_tables",
    "more_resumed",
    "more_steady",
    "more_language",
    "more_followers",
    "more_halves",
    "more_images",
    "more_relations",
    "more_fields",
    "more_restarts",
    "more_calm",
    "discarded",
    "outside",
)


def load() -> dict[str, Case]:
    """All cases by name."""
    for name in (*KNOWN, *MORE):
        import_module(f"benchmarks.zoo.{name}")
    return CASES


def chosen(names: list[str] | None = None) -> list[Case]:
    """The named cases, a group's name standing for all of its cases; everything when no name is
    given.
    """
    cases = load()
    if not names:
        return list(cases.values())
    known = {case.group for case in cases.values()} | set(cases)
    for name in names:
        if name not in known:
            raise SystemExit(
                f"{name!r} is neither a case nor a group of the zoo; groups are "
                f"{', '.join(KNOWN + MORE)}."
            )
    return [case for case in cases.values() if case.name in names or case.group in names]
