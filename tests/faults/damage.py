"""A small checkpoint with each byte flipped, and cut at each length: refused, or unharmed."""

import numpy as np

from minigen.errors import MinigenError
from minigen.training import checkpoint
from minigen.training.config import Config
from minigen.training.run import Run
from tests.conftest import TINY
from tests.faults.campaign import Campaign

SMALLEST = {"model.context_length": 1, "model.embedding_dim": 1, "optimizer.name": "sgd"}


def damage(campaign: Campaign) -> None:
    """Every byte flipped in a bit or more, and every length cut."""
    run = Run(Config.load("fables", {**TINY, **SMALLEST}))
    run.train(1)
    path = campaign.fresh("damaged")
    run.save(path)
    whole, data = checkpoint.load(path), path.read_bytes()

    def is_refused_or_unharmed(what: str) -> None:
        try:
            loaded = checkpoint.load(path)
        except MinigenError as error:
            campaign.expect("\n" not in str(error), f"{what}: {error}")
        except BaseException as error:
            campaign.expect(False, f"{what}: {type(error).__name__}: {error}")
        else:
            same = vars(loaded) | {"tensors": 0} == vars(whole) | {"tensors": 0} and all(
                np.array_equal(loaded.tensors[name], whole.tensors[name]) for name in whole.tensors
            )
            campaign.expect(same, f"{what}: read, with another content")

    with open(path, "r+b") as file:
        for at in range(len(data)):
            file.seek(at)
            file.write(bytes([data[at] ^ campaign.random.randrange(1, 256)]))
            file.flush()
            is_refused_or_unharmed(f"byte {at} of {len(data)} flipped")
            file.seek(at)
            file.write(data[at : at + 1])
            campaign.counts["bytes flipped"] += 1
        for size in range(len(data) - 1, -1, -1):
            file.truncate(size)
            is_refused_or_unharmed(f"cut to {size} of {len(data)} bytes")
            campaign.counts["lengths cut"] += 1
