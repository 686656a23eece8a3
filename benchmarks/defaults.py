"""Why the default config is what it is: one key at a time is varied, for each of three seeds.

`python -m benchmarks.defaults` trains the runs, those apart that its folder holds already, and
writes `benchmarks/defaults.md`: what they have learned, and how their texts read.
"""

import argparse
import json
import re
from importlib import resources
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import minigen
from benchmarks.harness import Table

VALUES: dict[str, list[Any]] = {
    "tokenizer.vocab_size": [512, 1280],
    "model.context_length": [1, 3, 4],
    "model.embedding_dim": [32, 64],
    "training.batch_size": [512, 1024, 6144],
    "optimizer.learning_rate": [0.01, 0.04],
    "optimizer.weight_decay": [0.3, 0.7, 1.6],
}
SEEDS = range(3)
QUIET = {"evaluation.every": 0, "sampling.every": 0, "checkpoint.every": 0}
LAST = 100  # steps over which the training loss is averaged
TEMPERATURES = [0.3, 0.5, 0.7, 1.0]
FILTERS: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_p": 0.8}, {"min_p": 0.05}]
PROMPTS = ["Once", "The", "A", "“What"]
SAMPLES, LENGTH = 16, 100


def words(text: str) -> list[str]:
    return re.findall(r"[a-z’]+", text.lower())


def read(model: minigen.Generator, **policy: float) -> tuple[float, float]:
    """Per cent of the words of its texts that its source has, and of their triples that differ."""
    known = set(words((resources.files("minigen") / "corpora" / "fables.txt").read_text("utf-8")))
    texts = model.generate(PROMPTS, num_samples=SAMPLES, max_new_tokens=LENGTH, **policy)
    said = [words(text.text)[1:-1] for text in texts]  # the prompt's may go on, the last is cut
    triples = [triple for text in said for triple in zip(text, text[1:], text[2:], strict=False)]
    found = [word in known for text in said for word in text]
    return 100 * mean(found), 100 * len(set(triples)) / len(triples)


def measure(folder: Path) -> tuple[float, float, float, float]:
    """Bits a byte and nats a token of the validation text, nats a token while training, words."""
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]
    model = minigen.load(folder)
    evaluation, (known, _) = model.evaluate(), read(model, temperature=0.5)
    return evaluation.bits_per_byte, evaluation.loss, mean(losses[-LAST:]), known


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defaults", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"), help="for the runs")
    folder = parser.parse_args().out
    config = minigen.Config.load("fables", overrides=QUIET)
    table = Table(
        "The default config, and one key at a time varied",
        ["key", "value", "validation, bits/byte", "validation, nats", "training, nats", "words, %"],
        f"Seeds {SEEDS[0]} to {SEEDS[-1]}: mean ± standard deviation. Nats are per token, so that "
        f"they compare within one vocabulary; training is the mean of the last {LAST} steps. The "
        "shipped value of each key stands in [`configs/fables.toml`](../configs/fables.toml). With "
        "64 numbers a token the published file would be larger than 3 MB. Words are those of its "
        f"texts ({len(PROMPTS)} prompts, {SAMPLES} each, {LENGTH} tokens, temperature 0.5) that "
        "stand in what it was trained on, too.",
    )

    def add(key: str, value: object, runs: list[dict[str, Any]]) -> None:
        figures = [measure(run["folder"]) for run in runs]
        bits, *rest = zip(*figures, strict=True)
        validation, training, known = map(mean, rest)
        spread = f"{mean(bits):.3f} ± {stdev(bits):.3f}"
        table.add(key, value, spread, f"{validation:.2f}", f"{training:.2f}", f"{known:.0f}")

    shipped = minigen.sweep(config, {}, out=folder / "shipped", seeds=SEEDS)
    add("as shipped", "", shipped)
    for key, values in VALUES.items():
        runs = minigen.sweep(config, {key: values}, out=folder / key, seeds=SEEDS)
        for value in values:
            add(f"`{key}`", value, [run for run in runs if run[key] == value])

    texts = Table(
        "How the texts of the default config read",
        ["temperature", "filter", "words, %", "different triples, %"],
        "As above, for seed 0: the words that the source has, and how many of all runs of three "
        "words are different ones. Colder texts have hardly more real words, and repeat "
        "themselves.",
    )
    model = minigen.load(shipped[0]["folder"])
    for temperature in TEMPERATURES:
        for options in FILTERS:
            name = ", ".join(f"`{option} = {value}`" for option, value in options.items())
            texts.add(
                str(temperature),
                name,
                *(f"{share:.0f}" for share in read(model, temperature=temperature, **options)),
            )
    page = f"{table}\n{texts}"
    (Path(__file__).parent / "defaults.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
