"""The demonstration: a run that is asked for text and its twin that is not, compared step by step.

Everything that ``minigen demo`` says of the two is read from both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minigen.proof.laboratory import Observed, Step, difference, kept_text, temporary_folder
from minigen.training.config import Config
from minigen.training.run import Run, StepRecord


@dataclass(frozen=True)
class Finding:
    """A line that the demonstration says, and whether it is as it should be."""

    text: str
    holds: bool


class Demonstration:
    """A run of a config, and its twin with the same config but for samples: ``run``, ``twin``."""

    def __init__(self, config: Config):
        text = kept_text(config.corpus.text, temporary_folder(self))  # to be read by both
        kept = config.override({"corpus.text": text})
        self.run, self.twin = Run(kept), Run(kept.override({"sampling.every": 0}))
        self.run.config = config  # which goes into the run folder
        self._steps: dict[Run, list[Step]] = {self.run: [], self.twin: []}
        for run in self._steps:
            run.streams["optimizer"] = Observed(config.run.seed, "optimizer")

    def watch(self, run: Run, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """Pass on the records of one of the two while it trains, keeping what each step was."""
        for record in records:
            self._steps[run].append(Step.of(run, record))
            yield record

    def findings(self) -> list[Finding]:
        """Say what the two have in common and what not, once both are trained."""
        drawn, drawn_by_twin = (run.streams["inference"].position for run in self._steps)
        samples, samples_of_twin = (
            len([step for step in steps if step.texts is not None])
            for steps in self._steps.values()
        )
        found = [
            Finding(
                f"Random numbers drawn for {samples} samples: {drawn} by the run, "
                f"{drawn_by_twin} by its twin.",
                samples > 0 and drawn_by_twin == samples_of_twin == 0,
            )
        ]
        for what in ("batches", "losses", "weights"):
            parting = difference(self._steps[self.run], self._steps[self.twin], fields=(what,))
            answer = f"NO, {parting}" if parting else "yes"
            found.append(Finding(f"Same {what} at every step: {answer}", not parting))
        fingerprint, of_twin = self.run.fingerprint, self.twin.fingerprint
        other = "" if fingerprint == of_twin else f", of the twin: {of_twin}"
        found.append(Finding(f"Fingerprint: {fingerprint}{other}", not other))
        return found
