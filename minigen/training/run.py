"""A run: config, text, model, optimizer and streams; it trains, writes text, and goes on."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import reduce
from operator import add, index
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, Self, Unpack

import numpy as np

from minigen.arguments import checked
from minigen.decoding.generation import Continuation
from minigen.decoding.generator import Generator
from minigen.decoding.policy import PolicyOptions
from minigen.decoding.scoring import mean_loss
from minigen.errors import MinigenError, OptionError
from minigen.exact.arithmetic import Floats, Integers
from minigen.exact.streams import Stream
from minigen.model import memory
from minigen.model.gradient import Statistics
from minigen.model.model import Model
from minigen.model.optimizer import Optimizer
from minigen.model.parallel import scratch
from minigen.text import corpus
from minigen.text.corpus import Corpus, Tokens
from minigen.text.documents import Progress
from minigen.text.tokenizer import ByteTokenizer, Text, Texts
from minigen.training import checkpoint
from minigen.training.config import Config, located, lost_text, require_same
from minigen.training.workers import join


@dataclass(frozen=True)
class StepRecord:
    """What one update left: its number, from 1, and the mean loss of its batch in nats.

    The positions are those of the streams once everything due at this step was done. A field that
    was not measured at this step is None.
    """

    step: int
    loss: float
    learning_rate: float
    optimizer_position: int
    inference_position: int
    validation_loss: float | None = None
    fingerprint: str | None = None
    sample: Continuation | None = None

    def metrics(self) -> dict[str, Any]:
        """Return the record as a line of ``metrics.jsonl``: without what was not measured."""
        line = {"step": self.step, "loss": self.loss, "loss_bits": self.loss.hex(), **vars(self)}
        return {key: value for key, value in line.items() if key != "sample" and value is not None}

    def sample_line(self) -> dict[str, Any]:
        """Return its sample as a line of ``samples.jsonl``, which says where it was a dead end."""
        if self.sample is None:
            return {}
        told = ["prompt", "text", "token_ids", *["finish_reason"] * bool(self.sample.explanation)]
        return {"step": self.step, **{name: getattr(self.sample, name) for name in told}}


class Run:
    """Everything that training changes, and the two streams that keep it reproducible.

    Training draws from ``streams["optimizer"]``, text from ``streams["inference"]``: asking for
    text moves the second and nothing else, so later training is the same with and without it.

    ``text`` replaces the configured corpus: str or bytes (cut into documents as configured), or a
    list of documents, which the config then says (``corpus.documents`` is ``"file"``).
    ``workers`` is a communicator of mpi4py: each of its processes makes the same run and the same
    calls, works through its share of each batch, and gets the same bits.

    A step is made on the side and takes its place at once: whatever is raised on the way, the run
    is as before the step or as after it, and other threads that ask it for text find it so, too.
    Threads that train it take turns, each step once. Copies and pickles of a run are runs.

    >>> config = Config.load("fables", overrides={"training.steps": 2})
    >>> [record.step for record in Run(config).steps()]
    [1, 2]
    """

    @checked
    def __init__(
        self,
        config: Config,
        *,
        text: Text | Texts | None = None,
        progress: Progress | None = None,
        workers: Any = None,
    ):
        if text is not None:
            cut = {} if isinstance(text, Text) else {"corpus.documents": "file"}
            config = config.override({"corpus.text": "external", **cut})
        self.config, self.workers, self._progress = config, join(workers), progress
        self._format, self._source = checkpoint.FORMAT, Path()
        self.corpus_sha256 = ""  # any text will do
        self._corpus_files: int | None = None
        self.corpus: Corpus | None = self._read(text)
        self._build(self.corpus.tokenizer)
        self.model.initialize(self.streams["init"])

    def _read(self, text: Text | Texts | None, tokenizer: ByteTokenizer | None = None) -> Corpus:
        """Read the corpus; raise MinigenError where the run was trained on another one."""
        read = self.workers.each(lambda: self._load(text, tokenizer))
        self.corpus_sha256, self._corpus_files = read.sha256, read.files
        return read

    def _load(self, text: Text | Texts | None, tokenizer: ByteTokenizer | None) -> Corpus:
        table = self.config.corpus
        options: Any = table.model_dump(exclude={"text"}) | {
            "vocab_size": self.config.tokenizer.vocab_size,
            "tokenizer": tokenizer,
            "progress": self._progress,
        }
        if not isinstance(text, Text | None) and table.documents != "file":
            raise MinigenError(
                f"the text of this run was cut into documents by corpus.documents = "
                f"{table.documents!r}, not given as a list of them: give it as one text"
            )
        if text is None and table.text == "external":
            raise MinigenError(
                f"this run was trained on {lost_text(self._source.parent)}: give that text (--text)"
            )
        if text is None and self.workers.size > 1 and "-" in table.text:
            raise OptionError(
                "standard input reaches the first worker alone: name files that all can read "
                "(got -)"
            )
        if text is None:
            read = corpus.load(table.text, **options)
        else:
            read = corpus.from_memory(text, **options)
        known = self.corpus_sha256
        if known and not checkpoint.is_text(read.sha256, known, self._corpus_files):
            raise MinigenError(
                f"the text is not the one this run was trained on: its SHA-256 is "
                f"{read.sha256}, the run's {known}; give the same text"
            )
        return read

    def __repr__(self) -> str:
        loss = f"loss {self.last.loss:.4f}" if self.last else "no loss yet"
        total = self.config.training.steps
        return f"Run(step {self.step} of {total}, {loss}, fingerprint {self.fingerprint[:12]}…)"

    def _repr_html_(self) -> str:
        """Show the run in a notebook."""
        facts = {
            "step": f"{self.step} of {self.config.training.steps}",
            "loss": f"{self.last.loss:.4f} nats per token" if self.last else "none measured yet",
            "weights": f"{self.model.flat.size:,}",
            "fingerprint": f"<code>{self.fingerprint}</code>",
        }
        rows = "".join(f"<tr><th>{name}</th><td>{fact}</td></tr>" for name, fact in facts.items())
        return f"<table>{rows}</table>"

    def _build(self, tokenizer: ByteTokenizer) -> None:
        config = self.config
        tables = config.portable().items()
        self.workers.agree(
            {"text (by its SHA-256)": self.corpus_sha256}
            | {f"[{name}] in their config": json.dumps(table) for name, table in tables}
        )
        config.sampling.policy.check_ids(tokenizer.vocab_size)  # now, not at the first sample
        self.last: StepRecord | None = None  # what the latest step left, in this process
        self._training = RLock()  # held by the thread that takes a step
        self._drawing = RLock()  # held by the thread that draws from ``inference``
        self.tokenizer = tokenizer
        V, K, D = tokenizer.vocab_size, config.model.context_length, config.model.embedding_dim
        weights = V * (D + K * D + 1)
        memory.require(
            8 * weights * 6,  # weights, two grids of them, sums, gradient, a moment at least
            f"training {weights:,} weights",
            "lower model.embedding_dim, model.context_length or tokenizer.vocab_size",
        )
        self.model = Model(V, K, D)
        self.optimizer = Optimizer(
            self.model.flat.size, total_steps=config.training.steps, **config.optimizer.model_dump()
        )
        seed = config.run.seed
        self.streams = {name: Stream(seed, name) for name in ("init", "optimizer", "inference")}

    @property
    def step(self) -> int:
        """Completed updates."""
        return self.optimizer.step

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights: what two runs compare."""
        return self.model.fingerprint

    @checked
    def train(self, steps: int | None = None, *, progress: bool = False) -> list[StepRecord]:
        """Train some steps, by default all that are left; return a record of each.

        ``progress`` shows a bar, in a notebook its own kind. A run that is done warns so. The
        records make a table as they are: ``pandas.DataFrame(run.train())``. See ``steps``.
        """
        if steps is None and self.step == self.config.training.steps:
            # One level more than usual, since ``checked`` stands between.
            warnings.warn(f"nothing left to train: {self._all_done()}", stacklevel=3)
        records = self.steps(steps)
        if progress:
            from tqdm.auto import tqdm

            total = self.config.training.steps - self.step if steps is None else steps
            records = tqdm(records, total=total, unit="step")
        return list(records)

    @checked
    def steps(self, steps: int | None = None) -> Iterator[StepRecord]:
        """Train, yielding a record per update; evaluates and samples where the config says so.

        Raises OptionError where fewer than ``steps`` are left, and MinigenError with the step's
        number where training diverges.
        """
        checkpoint.require_trainable(self._source, self._format)
        left = self.config.training.steps - self.step
        steps = left if steps is None else steps
        if steps > left == 0:
            raise OptionError(self._all_done())
        if not 0 <= steps <= left:
            raise OptionError(
                f"steps must be from 0 to the {left} left of training.steps = "
                f"{self.config.training.steps} (got {steps}); more of them take a new run"
            )
        return (self._take_step() for _ in range(steps))

    def _all_done(self) -> str:
        done = f"all {self.step} steps of training.steps are done"
        return f"{done}; more of them take a new run"

    def _take_step(self) -> StepRecord:
        with self._training:
            if self.step == self.config.training.steps:  # of two iterators, the other took the last
                raise OptionError(self._all_done())
            self.read_corpus()
            samples = is_due(self.step + 1, self.config.sampling.every)
            with self._drawing if samples else nullcontext():
                return self._step_aside()

    def _step_aside(self) -> StepRecord:
        """Take a step in a copy, and its place at once: see ``Run``."""
        after = copy(self)
        positions = {name: stream.position for name, stream in after.streams.items()}
        record = self.workers.step(self.step + 1, after._advance)
        # A stream that the step did not use stays: another thread may be drawing from it.
        moved = {name: s for name, s in after.streams.items() if s.position != positions[name]}
        # One call, so that neither an interruption nor another thread comes between.
        vars(self).update(
            model=after.model,
            optimizer=after.optimizer,
            streams=self.streams | moved,
            last=record,
        )
        return record

    def __copy__(self) -> Self:
        """Return this run once more, sharing with it whatever no step writes into."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        # Copied as a whole, so that two names of one stream still mean one.
        twin.optimizer, twin.streams = copy(self.optimizer), deepcopy(self.streams)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Return the whole run, but for who watches its text being read, and locks."""
        return {**vars(self), "_progress": None, "_training": None, "_drawing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _training=RLock(), _drawing=RLock())

    def _advance(self) -> StepRecord:
        """Take a step, in place: see ``_take_step``."""
        step = self.step + 1
        try:
            statistics = self._draw_statistics()
            gradient = self.model.gradient(statistics, out=statistics.vector)
            weights = self.optimizer.update(self.model.flat, gradient)
            self.model = self.model.with_weights(weights)
            self.model.check()
        except MinigenError as error:
            raise MinigenError(
                f"training diverged at step {step}: {error}; most often optimizer.learning_rate "
                f"is too large (it is {self.config.optimizer.learning_rate:g})"
            ) from error
        every = self.config.evaluation.every
        is_measured = step == self.config.training.steps or is_due(step, every)
        validation_loss = self.evaluate() if is_measured and every else None
        sample = self._sample() if is_due(step, self.config.sampling.every) else None
        fingerprint = self.fingerprint if is_measured else None
        if fingerprint:
            self.workers.agree({f"fingerprint after step {step}": fingerprint})
        return StepRecord(
            step=step,
            loss=statistics.mean_loss,
            learning_rate=self.optimizer.rate,
            optimizer_position=self.streams["optimizer"].position,
            inference_position=self.streams["inference"].position,
            validation_loss=validation_loss,
            fingerprint=fingerprint,
            sample=sample,
        )

    def _draw_statistics(self) -> Statistics:
        """Draw a batch, N words of the stream ``optimizer``, and add up what its parts say.

        Every worker draws the whole batch and works through its own share.
        """
        training = self.read_corpus().training
        batch_size = self.config.training.batch_size
        indices = self.streams["optimizer"].integers(batch_size, below=len(training))
        share = self.workers.share(indices)
        most = max(1, len(share))
        parts = np.array_split(share, min(self.config.training.micro_batches, most))
        out = scratch("statistics", self.model.flat.size) if len(parts) == 1 else None

        def say(indices: Integers) -> Statistics:
            pairs = training.contexts_and_targets(indices, self.model.context_length)
            return self.model.statistics(*pairs, batch_size, out)

        return self.workers.total(lambda: reduce(add, map(say, parts)), self.model.flat.size)

    def read_corpus(self) -> Corpus:
        """Return the corpus, read at first need in a run that was loaded from a file.

        Raises MinigenError where it is not the text that the run was trained on.
        """
        if self.corpus is None:
            self.corpus = self._read(None, self.tokenizer)
        return self.corpus

    @checked
    def read(self, text: Text | Texts | None = None, paths: Sequence[str | Path] = ()) -> Tokens:
        """Return the tokens of a text, or of files and folders, or of the validation part.

        A text is cut into documents as the run's own is; a list holds documents. Raises
        MinigenError where a file cannot be read, or no text is held back for validation.
        """
        if text is not None and len(paths):
            raise OptionError("give a text or paths, not both")
        cut: Any = {"documents": self.config.corpus.documents, "tokenizer": self.tokenizer}
        if text is not None:
            return corpus.from_memory(text, **cut).training
        if len(paths):
            return corpus.load(paths, **cut).training
        validation = self.read_corpus().validation
        if not len(validation):
            raise MinigenError("this run holds no text back for validation: give one (--text)")
        return validation

    def evaluate(self) -> float | None:
        """Mean loss of the validation tokens in nats per token; None if there are none."""
        validation = self.read_corpus().validation
        return mean_loss(self.model, validation) if len(validation) else None

    @property
    def generator(self) -> Generator:
        """The model as it is now, to write with: all that ``minigen.load`` gives.

        Without a seed it draws on from where ``streams["inference"]`` stands.
        """
        return Generator(self.model, self.tokenizer, read=self.read, stream=_Inference(self))

    @checked
    def generate(
        self, prompt: Text = "", *, max_new_tokens: int = 200, **options: Unpack[PolicyOptions]
    ) -> str:
        """Continue a prompt, drawing on from where ``streams["inference"]`` stands.

        The options are those of a ``Policy``. Returns the continuation alone; ``generator`` has
        more.
        """
        with self._drawing:  # no other thread takes a word between those of this text
            stream = self.streams["inference"]
            position, write = stream.position, self.generator.generate
            try:
                return write(prompt, max_new_tokens=max_new_tokens, **options).text
            except BaseException:
                stream.position = position  # a text that never came has drawn nothing
                raise

    def _sample(self) -> Continuation:
        table = self.config.sampling
        return self.generator.generate(
            table.prompt, policy=table.policy, max_new_tokens=table.max_new_tokens
        )

    @checked
    def save(self, path: str | Path, *, logs: dict[str, Any] | None = None) -> None:
        """Write a checkpoint from which ``load`` goes on as if nothing had happened.

        A run folder gives the state of its ``logs`` to go into it. Of several workers, the first
        one writes it.
        """
        now = copy(self)  # another thread may be training this one
        now._check_batches()
        now.model.check()  # weights that no step could take up again are not worth a file
        saved = checkpoint.Checkpoint(
            config=now.config.portable(),
            tokenizer=now.tokenizer.state(),
            step=now.step,
            streams={name: index(stream.position) for name, stream in now.streams.items()},
            corpus_sha256=now.corpus_sha256,
            tensors=now._tensors(),
            format=self._format,
            logs=logs,
            corpus_files=None if now.config.corpus.text == "fables" else now._corpus_files,
        )
        self.workers.from_first(lambda: checkpoint.save(path, saved))

    def _tensors(self) -> dict[str, Floats]:
        """Return what a checkpoint keeps: the parameters, and as ``m.E`` the moment m of E."""
        tensors = dict(self.model.parameters)
        for moment, flat in self.optimizer.moments.items():
            tensors |= {f"{moment}.{name}": view for name, view in self.model.views(flat).items()}
        return tensors

    def _check_batches(self) -> None:
        """Refuse a state that the steps so far do not lead to: they took N words each."""
        batch_size, position = self.config.training.batch_size, self.streams["optimizer"].position
        if position != self.step * batch_size:
            raise MinigenError(
                f"the run is broken: after {self.step} steps of {batch_size} predictions the "
                f"stream optimizer must be at word {self.step * batch_size} (got {position})"
            )

    @classmethod
    @checked
    def load(
        cls,
        path: str | Path,
        *,
        text: Text | Texts | None = None,
        config: Config | None = None,
        progress: Progress | None = None,
        workers: Any = None,
    ) -> Self:
        """Take up a checkpoint, or the latest one of a run folder.

        An external corpus is found by the config of the run folder, or given as ``text``;
        ``config`` replaces the one in the file. Raises MinigenError where it changes what decides
        the weights; the steps may be raised where the learning rate does not decay.
        Of several workers, as many as you like, the first one reads the file for all.
        """

        def found() -> tuple[Path, checkpoint.Checkpoint, Config, Config]:
            file = checkpoint.locate(path)
            saved = checkpoint.load(file)
            as_saved = Config.from_dict(saved.config, source=str(file), is_saved=True)
            is_given = config is not None or text is not None
            return file, saved, as_saved, as_saved if is_given else located(as_saved, file)

        run = cls.__new__(cls)
        run.workers, run.corpus, run._progress = join(workers), None, progress
        run._source, saved, as_saved, run.config = run.workers.from_first(found)
        if config is not None:
            run.config = config if text is None else config.override({"corpus.text": "external"})
            require_same(as_saved, run.config)
        run._format = saved.format
        run.corpus_sha256, run._corpus_files = saved.corpus_sha256, saved.corpus_files
        run._build(ByteTokenizer.from_state(saved.tokenizer))
        run.optimizer.resume(saved.step)
        for name, position in saved.streams.items():
            run.streams[name] = Stream(run.config.run.seed, name, position)
        try:
            run._check_batches()
        except MinigenError as error:
            raise MinigenError(f"{run._source} cannot be right: {error}") from None
        tensors = run._tensors()
        if missing := sorted(tensors.keys() - saved.tensors.keys()):
            raise MinigenError(
                f"{run._source} lacks what {run.config.optimizer.name} needs to go on: "
                f"{', '.join(missing)}"
            )
        for name, tensor in tensors.items():
            tensor[...] = saved.tensors[name]
        run.model.changed()
        is_named = as_saved.corpus.text == "fables" != run.config.corpus.text
        if text is not None or is_named:  # by its hash the text is the same, and keeps its name
            run.corpus = run._read(text, run.tokenizer)
            run.config = run.config.override({"corpus.text": as_saved.corpus.text})
        return run


class _Inference(NamedTuple):
    """The stream ``inference`` of a run: a step that samples puts another in its place."""

    run: Run

    def word(self) -> int:
        """Return the word at which it stands now, which nobody else is given."""
        with self.run._drawing:
            return self.run.streams["inference"].word()


def is_due(step: int, every: int) -> bool:
    """Whether something is to be done after this step; with ``every`` 0 it never is."""
    return every > 0 and step % every == 0
