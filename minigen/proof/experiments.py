"""The experiments: each shows one thing that leaves the bits as they are, and one that does not."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add

import numpy as np

from minigen.decoding.beams import beam_search
from minigen.decoding.generation import Task, complete, generate, padded_contexts
from minigen.decoding.policy import Policy
from minigen.decoding.speculation import speculate
from minigen.errors import MinigenError
from minigen.exact.arithmetic import Floats, Integers
from minigen.exact.streams import Stream, bounded
from minigen.model import head
from minigen.model.model import Model
from minigen.proof import plain
from minigen.proof.floats import FloatModel, with_floats
from minigen.proof.laboratory import TOKENS, Claim, Laboratory, claim, difference, state
from minigen.training.run import Run

PROMPTS = ("Once", "", "The end", b"\xff")


# ── Ways to ask a run for text ───────────────────────────────────────────────────────────────────


def by_greedy(run: Run) -> None:
    """Take the likeliest token each time."""
    run.generate(PROMPTS[0], max_new_tokens=TOKENS, temperature=0)


def by_sampling(run: Run) -> None:
    """Draw each token with a word of the stream ``inference``."""
    run.generate(PROMPTS[0], max_new_tokens=TOKENS, min_new_tokens=TOKENS)


def by_beams(run: Run) -> None:
    """Search with three beams."""
    task = Task(run.model, run.tokenizer, max_new_tokens=TOKENS)
    beam_search(task, PROMPTS[0], num_beams=3)


def by_speculation(run: Run) -> None:
    """Let an untrained model propose tokens."""
    draft = Model(run.model.vocab_size, run.model.context_length, run.model.embedding_dim)
    draft.initialize(Stream(run.config.run.seed, "init"))
    task = Task(run.model, run.tokenizer, max_new_tokens=TOKENS)
    pair = Stream(0, "inference/draft"), Stream(0, "inference/accept")
    pieces = speculate(task, draft, run.tokenizer, PROMPTS[:1], lambda _: pair)
    complete(pieces)


WAYS: Mapping[str, Callable[[Run], None]] = {
    "greedy": by_greedy,
    "sampling": by_sampling,
    "beams": by_beams,
    "speculation": by_speculation,
}


# ── The experiments ──────────────────────────────────────────────────────────────────────────────


def sampling(lab: Laboratory) -> Claim:
    """Show that asking for text while training, by any policy, does not change the training."""
    never = lab.train(lab.run())
    differences = {
        name: difference(never, lab.train(lab.run(), after_each=way)) for name, way in WAYS.items()
    }
    differences["the config's policy"] = difference(
        never, lab.train(lab.run({"sampling.every": 1}))
    )
    shared = lab.run()
    shared.streams["inference"] = shared.streams["optimizer"]
    return claim(
        "sampling",
        f"{lab.steps} steps with text after each ({', '.join(differences)}): "
        "same batches, losses and weights as with none",
        differences,
        "samples and batches share one stream",
        difference(never, lab.train(shared, after_each=by_sampling)),
    )


class EvaluatesRandomly(Run):
    """The mistake: its evaluation draws from the stream that batches come from."""

    def evaluate(self) -> float | None:
        """Mean loss of a random validation batch."""
        validation = self.read_corpus().validation
        words = self.streams["optimizer"].words(self.config.training.batch_size)
        pairs = validation.contexts_and_targets(
            bounded(words, len(validation)), self.model.context_length
        )
        return float(self.model.statistics(*pairs, len(words)).mean_loss)


def evaluation(lab: Laboratory) -> Claim:
    """Show that measuring the loss while training does not change the training."""
    never = lab.train(lab.run())
    return claim(
        "evaluation",
        f"{lab.steps} steps, evaluated never, after every step, after every 7th: "
        "same batches, losses and weights",
        {
            f"every {every}": difference(never, lab.train(lab.run({"evaluation.every": every})))
            for every in (1, 7)
        },
        "evaluation draws its batch from the optimizer's stream",
        difference(never, lab.train(lab.run({"evaluation.every": 1}, kind=EvaluatesRandomly))),
    )


def resume(lab: Laboratory) -> Claim:
    """Show that a run stopped and taken up again ends as one that was never stopped."""
    changes = {"evaluation.every": 3 + lab.steps // 8, "sampling.every": 2 + lab.steps // 8}
    whole = lab.run(changes)
    trace, end = lab.train(whole), lab.stored(whole)
    path, last = lab.folder / "stopped.safetensors", lab.steps

    def stopped(stops: tuple[int, ...]) -> str:
        run, steps = lab.run(changes), []
        try:
            for stop in stops:
                steps += lab.train(run, stop - run.step)
                run.save(path)
                run = lab.run(changes, path=path)
            steps += lab.train(run)
            found = difference(trace, steps, ("positions", "batches", "losses", "weights", "texts"))
            return found or ("" if lab.stored(run) == end else "other file")
        except MinigenError as error:
            return str(error)

    plans = [(0,), (1,), (last // 2,), (last,), (1, 2), (1, last // 2, last - 1)]
    warm_up = lab.config.optimizer.warmup_steps
    inside = f", inside the warm-up of {warm_up}" if warm_up > 1 else ""

    half = lab.run(changes)
    lab.train(half, last // 2)
    half.save(path)
    forgetful = lab.run(changes, path=path)
    forgetful.streams["optimizer"].position = 0
    return claim(
        "resume",
        f"stopped at step 0, 1{inside}, {last // 2}, {last}, twice in a row, three times: "
        f"the same losses, weights, samples and final file as {last} steps without a stop",
        {f"stopped at {', '.join(map(str, stops))}": stopped(stops) for stops in plans},
        f"taken up at step {last // 2} without the stream's position",
        difference(trace[last // 2 :], lab.train(forgetful), first_step=last // 2 + 1),
    )


def decoding(lab: Laboratory) -> Claim:
    """Show that writing text changes neither weights nor moments."""
    run = lab.run()
    lab.train(run, lab.steps - 1)
    before, differences = state(run), {}
    for name, way in WAYS.items():
        way(run)
        differences[name] = "" if state(run) == before else "other weights or moments"
    lab.train(run, 1)
    return claim(
        "decoding does not train",
        f"text by {', '.join(WAYS)}: same weights and moments before and after",
        differences,
        "one gradient step",
        state(run) != before,
    )


def own_streams(seed: int) -> list[Stream]:
    """Return a stream for each of the prompts."""
    return [Stream(seed, "inference") for _ in PROMPTS]


def texts(
    run: Run, streams: Sequence[Stream], rows: Sequence[int] = range(len(PROMPTS))
) -> dict[int, list[int]]:
    """Continue some of the prompts, each by its stream: number of the prompt → token ids."""
    task = Task(run.model, run.tokenizer, Policy(min_new_tokens=TOKENS), max_new_tokens=TOKENS)
    pieces = generate(task, [PROMPTS[row] for row in rows], lambda i: streams[rows[i]])
    return {row: text.token_ids for row, text in zip(rows, complete(pieces), strict=True)}


def replay(lab: Laboratory) -> Claim:
    """Show that a text depends on its prompt and its stream, and on no neighbour in the batch."""
    run = lab.run()

    def own(rows: tuple[int, ...], seed: int = 0) -> dict[int, list[int]]:
        return texts(run, own_streams(seed), rows)

    def of_one_stream(rows: tuple[int, ...]) -> dict[int, list[int]]:
        return texts(run, [Stream(0, "inference")] * len(PROMPTS), rows)

    everyone = tuple(range(len(PROMPTS)))
    batches = {
        "the same again": everyone,
        "the other way round": everyone[::-1],
        "two of them": everyone[1:3],
        **{f"prompt {row} alone": (row,) for row in everyone},
    }
    expected, shared = own(everyone), of_one_stream(everyone)
    differences = {
        name: "" if own(rows).items() <= expected.items() else "another text"
        for name, rows in batches.items()
    }
    differences["another seed"] = "the same text" if own(everyone, seed=1) == expected else ""
    return claim(
        "replay",
        f"{len(PROMPTS)} prompts: same seed, same text, in any order, together or alone; "
        "another seed, another text",
        differences,
        "all prompts draw from one stream",
        any(not of_one_stream(rows).items() <= shared.items() for rows in batches.values()),
    )


def incremental(lab: Laboratory) -> Claim:
    """Show that logits updated token by token are those of the whole context, bit for bit."""
    run = lab.run()
    lab.train(run)
    model, K = run.model, run.model.context_length
    tokens = lab.corpus.training.part(0, 64).array.tolist()
    contexts = padded_contexts([tokens[:n] for n in range(1, len(tokens) + 1)], K)  # (N, K)
    W, b = model.parameters["W"], model.parameters["b"]
    whole = head.project(model.hidden(contexts), W, b)  # (N, V)
    alone = np.concatenate([model.logits(row[None]) for row in contexts])
    ways = {"one pass": model.logits(contexts), "alone": alone, "updated": updated(model, contexts)}
    forwards, backwards = float_sums(with_floats(run), contexts)
    return claim(
        "incremental = whole",
        f"{len(tokens)} tokens: logits updated token by token, alone, in one pass and by the "
        "plain projection have the same bits",
        {name: "" if same_bits(way, whole) else "other logits" for name, way in ways.items()},
        "plain float sums, from first to last and from last to first",
        not same_bits(forwards, backwards),
        untested="" if K * run.model.embedding_dim > 1 else "a sum of one product has one order",
    )


def updated(model: Model, contexts: Integers) -> Floats:
    """Logits of contexts that each append one token: (N, K) → (N, V).

    A token v adds the rows T[v] to what is known of the next K predictions.
    """
    b, K = model.parameters["b"], model.context_length
    ahead = np.zeros((K, model.vocab_size))  # row j: the sum so far, j predictions ahead
    logits = []
    for token in (*contexts[0], *contexts[1:, -1]):
        rows, unit = model.table(np.array([token]))
        ahead[:-1] = ahead[1:]
        ahead[-1] = 0.0
        ahead += rows[0, ::-1]  # as the newest token first, as the oldest last
        logits.append(ahead[0] * unit + b)
    return np.stack(logits[K - 1 :])


def float_sums(model: FloatModel, contexts: Integers) -> tuple[Floats, Floats]:
    """Return z = b + Σ hᵢ·Wᵢ in plain floats, added from the first to the last i, and backwards."""
    h, W = model.hidden(contexts), plain.head(model.parameters["W"])  # (N, K·D), (K·D, V)
    orders = range(len(W)), range(len(W) - 1, -1, -1)
    forwards, backwards = (
        reduce(lambda z, i: z + h[:, i, None] * W[i], order, model.parameters["b"])
        for order in orders
    )
    return forwards, backwards


def same_bits(a: Floats, b: Floats) -> bool:
    """Whether two arrays are equal byte by byte."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def micro_batches(lab: Laboratory) -> Claim:
    """Show that parts of a batch, in any order, add up to the gradient of the whole."""
    size = max(8, lab.config.training.batch_size)

    lab = lab.changed({"training.batch_size": size})

    def parts(count: int) -> Run:
        return lab.run({"training.micro_batches": count})

    whole = lab.train(parts(1))
    run = parts(1)
    training, model = lab.corpus.training, run.model
    indices = run.streams["optimizer"].integers(size, len(training))
    statistics = [
        model.statistics(*training.contexts_and_targets(part, model.context_length), size)
        for part in np.array_split(indices, 8)
    ]
    orders = statistics, statistics[::-1], statistics[1::2] + statistics[::2]
    first, *others = (model.gradient(reduce(add, order)) for order in orders)
    in_one, in_four = parts(1), parts(4)
    for run in (in_one, in_four):
        with_floats(run)
    return claim(
        "micro-batches",
        f"{lab.steps} steps of {size} predictions in 1, 2, 4 and 8 parts: same losses and weights; "
        "8 parts added in three orders: same gradient",
        {
            **{f"{n} parts": difference(whole, lab.train(parts(n))) for n in (2, 4, 8)},
            "order": "" if all(same_bits(first, other) for other in others) else "other gradient",
        },
        "plain float sums, in 1 and in 4 parts",
        difference(lab.train(in_one), lab.train(in_four)),
    )
