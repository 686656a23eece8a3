"""A generator is a model to write with: texts, beams, scores and decisions in one call each.

The commands of the same names print what these calls return, token for token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Unpack, overload

from minigen.arguments import checked, keywords_of
from minigen.decoding import candidates, scoring
from minigen.decoding.beams import beam_search
from minigen.decoding.candidates import Decision
from minigen.decoding.generation import (
    Continuation,
    Piece,
    Source,
    Task,
    complete,
    generate,
    stream_name,
)
from minigen.decoding.policy import SIZE, Policy, PolicyOptions
from minigen.decoding.scoring import Evaluation, Score
from minigen.decoding.speculation import speculate
from minigen.exact.streams import Stream
from minigen.model.model import Model
from minigen.text.corpus import Tokens
from minigen.text.tokenizer import ByteTokenizer, Text, Texts


class _TextSettings(PolicyOptions, total=False):
    """The keywords of ``Generator.pieces`` that shape a text."""

    seed: int | None
    stop: Text | Texts
    max_new_tokens: int
    policy: Policy | None
    draft: "Generator | None"
    num_draft_tokens: int


class _Settings(_TextSettings, total=False):
    log_probabilities: bool


class Generator:
    """A model to write with: ``minigen.load(MODEL)``, or the ``generator`` of a run in progress.

    What a decoding call takes, beside its own arguments, are the options of a ``Policy``, or
    ``policy``, one made of them. ``stop`` is a string or several, before which the text ends.
    ``seed`` names the random numbers. Sample 0 of each prompt draws from stream ``inference``,
    sample i from ``inference/i``, and with a draft from ``inference/draft`` and
    ``inference/accept`` (``inference/i/draft`` …), each from its start: a text depends on neither
    its neighbours nor earlier calls. Without a seed it is 0; a run's own generator then takes
    each word, when it needs it, from where the run's ``inference`` stands by then.

    Nothing here changes a weight. A wrong option raises OptionError.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: ByteTokenizer,
        *,
        read: Callable[[Text | Texts | None, Sequence[str | Path]], Tokens],
        stream: Source | None = None,
    ):
        # read: the tokens of a text, of files, or of what the model's run held back;
        # stream: the one to draw from where no seed is given.
        self.model, self.tokenizer = model, tokenizer
        self._read, self._stream = read, stream

    def __repr__(self) -> str:
        return f"Generator({self.model!r}, fingerprint {self.fingerprint[:12]}…)"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights."""
        return self.model.fingerprint

    @checked
    def pieces(
        self,
        prompts: Iterable[Text],
        *,
        num_samples: int = 1,
        seed: int | None = None,
        stop: Text | Texts = (),
        max_new_tokens: int = 200,
        policy: Policy | None = None,
        draft: "Generator | None" = None,
        num_draft_tokens: int = 4,
        log_probabilities: bool = False,
        **options: Unpack[PolicyOptions],
    ) -> Iterator[Piece]:
        """Continue prompts; yield every token of every text once it is chosen.

        A piece's ``row`` counts the texts, prompt by prompt, sample by sample. ``draft`` is a
        smaller generator with the same tokenizer, which proposes ``num_draft_tokens`` at a time
        (speculation); ``log_probabilities`` adds the model's own for each token, in nats.
        """
        SIZE.check("num_samples", num_samples)
        whole = Policy.of(policy, options)
        task = Task(self.model, self.tokenizer, whole, max_new_tokens, stop, log_probabilities)
        # Read as they are needed: any number of prompts and samples takes no memory.
        texts = (prompt for prompt in prompts for _ in range(num_samples))
        shared = self._stream if seed is None else None
        if seed is not None:
            Stream(seed, "")  # refuses a seed that names none, also where none is needed

        def stream(row: int, purpose: str = "") -> Source:
            return shared or Stream(seed or 0, stream_name(row % num_samples) + purpose)

        if draft is None:
            # One stream gives its words to one text after the other.
            return generate(task, texts, stream, one_by_one=shared is not None)
        return speculate(
            task,
            draft.model,
            draft.tokenizer,
            texts,
            lambda row: (stream(row, "/draft"), stream(row, "/accept")),
            num_draft_tokens=num_draft_tokens,
        )

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self, prompt: Text = "", *, num_samples: None = None, **settings: Unpack[_Settings]
    ) -> Continuation: ...

    @overload
    def generate(
        self, prompt: Text, *, num_samples: int, **settings: Unpack[_Settings]
    ) -> list[Continuation]: ...

    @overload
    def generate(
        self, prompt: Texts, *, num_samples: int | None = None, **settings: Unpack[_Settings]
    ) -> list[Continuation]: ...

    @keywords_of(pieces)
    @checked
    def generate(
        self,
        prompt: Text | Texts = "",
        *,
        num_samples: int | None = None,
        **settings: Unpack[_Settings],
    ) -> Continuation | list[Continuation]:
        """Continue a prompt, or each of a list, with the settings of ``pieces``.

        Returns the continuation of one prompt; of several prompts, or where ``num_samples`` is
        given, a list: prompt by prompt, sample by sample.
        """
        pieces = self.pieces(
            [prompt] if isinstance(prompt, Text) else prompt,
            num_samples=1 if num_samples is None else num_samples,
            **settings,
        )
        texts = complete(pieces)
        return texts[0] if isinstance(prompt, Text) and num_samples is None else texts

    @keywords_of(pieces)
    @checked
    def stream(self, prompt: Text = "", **settings: Unpack[_TextSettings]) -> Iterator[str]:
        """Continue a prompt as ``generate`` does; yield its text in parts, each once it is certain.

        Held back is what may become a stop string, or is not a whole character yet.
        """
        return (piece.text for piece in self.pieces([prompt], **settings) if piece.text)

    @checked
    def beams(
        self,
        prompt: Text = "",
        *,
        num_beams: int = 4,
        length_penalty: float = 1.0,
        stop: Text | Texts = (),
        max_new_tokens: int = 200,
        policy: Policy | None = None,
        log_probabilities: bool = False,
        **options: Unpack[PolicyOptions],
    ) -> list[Continuation]:
        """Search for the likeliest continuations of a prompt; return up to B, best first.

        A score is the log-probability in nats divided by the length to the power of
        ``length_penalty``. No random number is drawn: an option that shapes a draw is refused.
        """
        whole = Policy.of(policy, options)
        task = Task(self.model, self.tokenizer, whole, max_new_tokens, stop, log_probabilities)
        return beam_search(task, prompt, num_beams=num_beams, length_penalty=length_penalty)

    @checked
    def score(self, text: Text) -> Score:
        """Say how likely the model holds a text, token by token; an empty one is refused."""
        return scoring.score(self.model, self.tokenizer, text)

    @checked
    def next(
        self,
        prompt: Text = "",
        *,
        top: int = 10,
        policy: Policy | None = None,
        **options: Unpack[PolicyOptions],
    ) -> Decision:
        """Show the ``top`` likeliest tokens to follow a prompt, after all rules and filters."""
        policy = Policy.of(policy, options)
        return candidates.decide(self.model, self.tokenizer, prompt, policy, top=top)

    @checked
    def evaluate(
        self, text: Text | Texts | None = None, *, paths: Sequence[str | Path] = ()
    ) -> Evaluation:
        """Measure loss and calibration on a text, or on the text that the run held back.

        ``text`` is one text, cut into documents as the run's own was, or a list of documents;
        ``paths`` name files and folders instead. Raises MinigenError where a run held none back,
        or where its text is not to be found.
        """
        return scoring.evaluate(self.model, self._read(text, paths))
