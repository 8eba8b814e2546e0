"""Tell what a healthy run is heading for: every clear trend once, as a line."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

from stepguard.diagnose.engine import forecasts, trend_begins
from stepguard.engine.context import Context
from stepguard.probes.look_schedule import LookSchedule
from stepguard.records import Finding, Reading
from stepguard.records.probes import Forecast, Look

MOST_READINGS = 64
MOST_FORECAST_LOOKS = 64
MOST_SCALES = 32
"""Changes of the loss scale that are kept, however long ago."""
QUICK = 6
"""Steps over which the loss is compared at every step."""
GREW = 2.0
"""Growth of the loss over these steps that is worth a closer check."""
OFTEN = 8
"""Steps between two comparisons with everything that is remembered: slow growth shows there."""


class ForecastCheck:
    """Keeps the history that the rules on coming trouble need, and tells each trend once."""

    def __init__(self, context: Context, schedule: LookSchedule) -> None:
        self._context = context
        self._schedule = schedule
        self._looks: deque[Look] = deque(maxlen=MOST_FORECAST_LOOKS)
        self._recent: deque[Reading] = deque(maxlen=MOST_READINGS)
        self._scales: deque[Reading] = deque(maxlen=MOST_SCALES)
        self._at_looks: deque[Reading] = deque(maxlen=MOST_FORECAST_LOOKS)
        """The step before each look, however long ago."""
        self._told: dict[str, int] = {}
        """Code -> last step of the interval that was told."""

    def read(self, reading: Reading) -> None:
        """A step went through, or a GradScaler skipped it."""
        if self._recent and reading.step < self._recent[-1].step:
            self._forget(reading.step)
        before = self._recent[-1].scale if self._recent else None
        scale_changed = reading.scale is not None and reading.scale != before
        if scale_changed:
            # the last step of a scale says whether it worked
            if before is not None:
                self._scales.append(self._recent[-1])
            self._scales.append(reading)
        self._recent.append(reading)
        if scale_changed or self._loss_grows():
            self._check()

    def looked(self, look: Look) -> None:
        """A deep look was taken."""
        self._looks.append(look)
        if self._recent:
            self._at_looks.append(self._recent[-1])
        self._check()

    def _loss_grows(self) -> bool:
        if len(self._recent) < QUICK:
            return False
        newest = self._recent[-1]
        now = newest.loss
        before = self._recent[-QUICK].loss
        if now is None or before is None:
            return False
        if newest.step % OFTEN == 0:
            before = min(abs(one.loss) for one in self._recent if one.loss is not None)
        return abs(now) > GREW * abs(before)

    def _forget(self, step: int) -> None:
        """The run went back: what came after this step did not happen."""
        self._looks = deque((one for one in self._looks if one.step < step), MOST_FORECAST_LOOKS)
        self._recent = deque((one for one in self._recent if one.step < step), MOST_READINGS)
        self._at_looks = deque(
            (one for one in self._at_looks if one.step < step), MOST_FORECAST_LOOKS
        )
        self._scales = deque((one for one in self._scales if one.step < step), MOST_SCALES)

    def _check(self) -> None:
        oldest = self._recent[0].step if self._recent else 0
        earlier = {}
        for reading in (*self._scales, *self._at_looks):
            if reading.step < oldest:
                earlier[reading.step] = reading
        recent = [*(earlier[step] for step in sorted(earlier)), *self._recent]
        for finding, forecast in forecasts(self._looks, recent):
            if forecast.now > self._told.get(finding.code, -1):
                self._told[finding.code] = forecast.latest
                self._tell(finding, forecast)
        self._schedule.hurry = trend_begins(self._looks, recent)

    def _tell(self, finding: Finding, forecast: Forecast) -> None:
        evidence = "; ".join(finding.evidence)
        now = finding.remedies[0].title
        self._context.outputs.note(
            "forecast",
            f"{finding.code} {finding.title}: {evidence}. What to do now: {now} (stepguard explain "
            f"{finding.code})",
            code=finding.code,
            certainty=finding.certainty,
            forecast=asdict(forecast),
        )
