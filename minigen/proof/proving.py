"""Every experiment on the claim "one config, one fingerprint", one after the other.

A control is the same comparison on a set-up that is known to break the claim; where it is not
caught, the experiment is worth nothing.
"""

from collections.abc import Callable, Iterator, Sequence

from minigen.arguments import checked
from minigen.proof import experiments, wholeness, workers
from minigen.proof.environments import environment
from minigen.proof.laboratory import Claim, Laboratory
from minigen.text.documents import Progress
from minigen.training.config import Config

Experiment = Callable[[Laboratory], Claim]

EXPERIMENTS: tuple[Experiment, ...] = (
    experiments.sampling,
    experiments.evaluation,
    experiments.resume,
    wholeness.interrupt,
    wholeness.copies,
    experiments.decoding,
    experiments.replay,
    wholeness.threads,
    experiments.incremental,
    experiments.micro_batches,
    environment,
    workers.workers,
)


@checked
def prove(config: Config, *, progress: Progress | None = None) -> Iterator[Claim]:
    """Read a config's text, and run every experiment on it; yield each claim once it is decided.

    ``progress`` follows the reading. Raises MinigenError where the text cannot be read or the
    config does not train.
    """
    laboratory = Laboratory(config, progress)
    return (experiment(laboratory) for experiment in EXPERIMENTS)


def proven(claims: Sequence[Claim]) -> bool:
    """Whether every claim that could be tested holds, and every control of these was caught."""
    tested = [claim for claim in claims if claim.holds is not None]
    return all(claim.holds and claim.control.caught for claim in tested)
