"""The one story of a run folder, told by every reader: report, plot, compare, live, doctor, page.

    story = read_story(Path("runs/demo"))     # a folder, or one journal file
    run = story.latest                        # the last run started in that folder
    run.steps.step                            # numpy columns, one row for each step line, in time
    run.steps.series["loss"]                  # `rows` into the columns, and `values` as they were
    run.steps.kept                            # does this row's step still count?

What is one run. A process that starts opens an `Attempt`. It goes on with an earlier `Run` if it
restored a checkpoint of that run, or if its steps go on above 0; else it begins a run of its own.
`Story.runs` holds all runs of the folder, oldest first; nothing of one shows up in another.

Time, not step numbers. Rows, incidents and notes are in the order in which they were written, and
point at each other by row. A step number may occur many times: a step that was run again, and all
steps after a rewind or a restart. `Branch` is a stretch of rows without going back. Where it ended
by going back, `Branch.left` says why and to which step; rows of that step and above are not `kept`.
The kept rows, in order, are the line that led to the present weights.

Nothing is dropped. Non-finite values stay in their series; a step that has no value has no row in
it. `StoryIncident.done` is what was really done, with the row it was done to. Lines that cannot be
read are counted in `torn`.

Ranks. `run.steps` is of one rank (the lowest, or the one asked for); `run.by_rank` has the tables
of all ranks that were read. Incidents of all ranks are joined: one that several ranks recorded is
one `StoryIncident` with all of their `ranks`.

`StoryReader` reads a run that is still being written: `read()` takes in what is new, `story()`
gives the model of what was read so far. `story_of(lines)` takes the lines of one journal.
"""

from __future__ import annotations

from stepguard.report.story.model import (
    Attempt,
    Branch,
    CheckpointEvent,
    Done,
    Left,
    Note,
    Run,
    Series,
    StepTable,
    Story,
    StoryIncident,
)
from stepguard.report.story.reader import StoryReader, read_story, story_of

__all__ = [
    "Attempt",
    "Branch",
    "CheckpointEvent",
    "Done",
    "Left",
    "Note",
    "Run",
    "Series",
    "StepTable",
    "Story",
    "StoryIncident",
    "StoryReader",
    "read_story",
    "story_of",
]
