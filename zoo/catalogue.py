"""Every case of the zoo in a fixed order: those known in advance, then the unseen ones."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

from zoo.case import CASES, Case

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
UNSEEN = (
    "masked_softmax",
    "empty_means",
    "division_by_zero",
    "log_and_root_domains",
    "exp_overflow",
    "singular_gradients",
    "unselected_branches",
    "half_precision",
    "bad_stored_tensors",
    "steps_too_large",
    "bad_batches",
    "faults_inside_blocks",
    "faults_in_criteria",
    "harmless_beside_harmful",
    "density_domains",
    "empty_experts",
    "exploding_updates",
    "healthy_nonfinite_values",
    "healthy_unusual_losses",
    "matrix_and_complex_functions",
    "degenerate_geometry",
    "empty_groups",
    "likelihood_bounds",
    "zero_in_the_update",
    "inner_derivatives_and_casts",
    "healthy_suspicious_signs",
    "audio_extremes",
    "policy_gradient_losses",
    "preference_losses",
    "image_statistics",
    "rendering_and_rotations",
    "transformer_overflow",
    "lookups_and_counts",
    "resumed_optimizers",
    "healthy_zeros_and_jumps",
    "sequence_losses",
    "packed_sequences",
    "teachers_and_targets",
    "half_precision_epsilons",
    "image_losses",
    "attention_and_messages",
    "fields_and_flows",
    "custom_optimizers",
    "healthy_masked_values",
    "discarded",
    "outside",
    "kernels",
)


PER_KIND = 2


def load() -> dict[str, Case]:
    """All cases by name; of each kind (cause, phase, operation) the first two are the core."""
    if not CASES:
        for name in (*KNOWN, *UNSEEN):
            import_module(f"zoo.scenes.{name}")
        kinds: Counter[tuple[str | None, ...]] = Counter()
        for case in CASES.values():
            if case.expected is not None:
                kind = (case.accepted[0], case.expected.phase, case.expected.op)
                kinds[kind] += 1
                case.core = kinds[kind] <= PER_KIND
    return CASES


def chosen(names: list[str] | None = None) -> list[Case]:
    """Choose cases by name, or by the name of their group; all of them without a name."""
    cases = load()
    if not names:
        return list(cases.values())
    known = {case.group for case in cases.values()} | set(cases)
    for name in names:
        if name not in known:
            raise SystemExit(
                f"{name!r} is neither a case nor a group of the zoo; groups are "
                f"{', '.join(KNOWN + UNSEEN)}."
            )
    return [case for case in cases.values() if case.name in names or case.group in names]
