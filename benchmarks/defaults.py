"""Why the default config is what it is: one key at a time is varied, for each of three seeds.

`python -m benchmarks.defaults` trains the runs, those apart that its folder holds already, and
writes `benchmarks/defaults.md`.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import minigen
from benchmarks.harness import Table

VALUES: dict[str, list[Any]] = {
    "tokenizer.vocab_size": [512, 1536],
    "model.context_length": [1, 3, 4],
    "model.embedding_dim": [24, 64],
    "training.batch_size": [256, 1024],
    "optimizer.learning_rate": [0.005, 0.02],
    "optimizer.weight_decay": [0.1, 0.3, 0.8],
}
SEEDS = range(3)
QUIET = {"evaluation.every": 0, "sampling.every": 0, "checkpoint.every": 0}
LAST = 100  # steps over which the training loss is averaged


def measure(folder: Path) -> tuple[float, float, float]:
    """Bits a byte and nats a token of the validation text, nats a token while training."""
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]
    evaluation = minigen.load(folder).evaluate()
    return evaluation.bits_per_byte, evaluation.loss, mean(losses[-LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defaults", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"), help="for the runs")
    folder = parser.parse_args().out
    config = minigen.Config.load("fables", overrides=QUIET)
    table = Table(
        "The default config, and one key at a time varied",
        ["key", "value", "validation, bits/byte", "validation, nats", "training, nats"],
        f"Seeds {SEEDS[0]} to {SEEDS[-1]}: mean ± standard deviation. Nats are per token, so that "
        f"they compare within one vocabulary; training is the mean of the last {LAST} steps. The "
        "shipped value of each key stands in [`configs/fables.toml`](../configs/fables.toml). With "
        "64 numbers a token the published file would be larger than 3 MB.",
    )

    def add(key: str, value: object, runs: list[dict[str, Any]]) -> None:
        figures = [measure(run["folder"]) for run in runs]
        bits, validation, training = zip(*figures, strict=True)
        spread = f"{mean(bits):.3f} ± {stdev(bits):.3f}"
        table.add(key, value, spread, f"{mean(validation):.2f}", f"{mean(training):.2f}")

    add("as shipped", "", minigen.sweep(config, {}, out=folder / "shipped", seeds=SEEDS))
    for key, values in VALUES.items():
        runs = minigen.sweep(config, {key: values}, out=folder / key, seeds=SEEDS)
        for value in values:
            add(f"`{key}`", value, [run for run in runs if run[key] == value])
    (Path(__file__).parent / "defaults.md").write_text(str(table), encoding="utf-8")


if __name__ == "__main__":
    main()
