"""Bring the loader of every rank back to its place, also with another number of ranks."""

from __future__ import annotations

from collections.abc import Collection

from stepguard.engine.context import Context
from stepguard.state.resumable_loader import ResumableLoader
from stepguard.state.rng import RngState
from stepguard.state.run_state import SavedState
from stepguard.state.tree_json import tree_from_json


def resume_data(
    context: Context, feed: ResumableLoader, state: SavedState, random_numbers: RngState | None
) -> None:
    """Go to this rank's stored place; a rank that has none goes to the one that all others share.

    Every rank reads the same checkpoint, so all come to the same answer without an exchange.
    """
    agreement = context.agreement
    stored = {int(rank): place for rank, place in state.facts.get("loader", {}).items()}
    places: set[tuple[int, int]] = set()
    for position in stored.values():
        place = tree_from_json(position, state.tensors)
        places.add((int(place["epoch"]), int(place["delivered"])))
    shared = places.pop() if len(places) == 1 else None
    own = stored.get(agreement.rank)
    if own is not None:
        feed.go_to(tree_from_json(own, state.tensors), random_numbers)
    elif shared is not None:
        feed.go_to_number(*shared)
    if agreement.rank == 0 and len(stored) != agreement.size:
        same_ranks = len(state.facts.get("saved_alone", {}).get("ranks", ())) == agreement.size
        story = _story(stored.keys(), agreement.size, shared, same_ranks=same_ranks)
        context.outputs.note("checkpoint", story)


def _story(
    stored: Collection[int], size: int, shared: tuple[int, int] | None, *, same_ranks: bool
) -> str:
    """What becomes of the data with another number of ranks than the checkpoint has places for.

    `same_ranks`: there were as many, and one of them saved alone.
    """
    if not stored:
        return "the checkpoint holds no place in the data: the loader starts at the beginning"
    said = f"the checkpoint holds places in the data for {len(stored)} ranks, this run has {size}"
    without = [str(rank) for rank in range(size) if rank not in stored]
    if without and shared is None:
        said += f": ranks {', '.join(without)} START THE DATA AGAIN, for the places differ"
    elif without:
        epoch, number = shared or (0, 0)
        place = f"batch {number} of pass {epoch}, as the others"
        said += f": ranks {', '.join(without)} go on at {place}, with random numbers of their own"
    if same_ranks:
        return said
    share = "each rank's share of the data is another one now"
    return f"{said}; {share}: until this pass ends some samples come twice and some not at all"
