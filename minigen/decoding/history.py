"""The history of a text is what the rules of decoding ask about the tokens so far."""

from collections.abc import Sequence

import numpy as np

from minigen.exact.arithmetic import Floats


class Ngrams:
    """The n-grams of one text: which tokens would complete one that it already holds.

    Where the text is shorter than n − 1 tokens, its prefix is too, as no later one is.
    """

    def __init__(self, size: int, text: Sequence[int] = ()):
        self._size = size
        self._text: list[int] = []
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}  # n − 1 tokens → next → times
        for token in text:
            self.append(int(token))

    def _prefix(self) -> tuple[int, ...]:
        return tuple(self._text[max(0, len(self._text) - self._size + 1) :])

    def repeating(self) -> list[int]:
        """Tokens that, coming next, would repeat an n-gram."""
        return list(self._followers.get(self._prefix(), ()))

    def append(self, token: int) -> None:
        """Add a token to the text."""
        times = self._followers.setdefault(self._prefix(), {})
        times[token] = times.get(token, 0) + 1
        self._text.append(token)

    def pop(self) -> None:
        """Take the last token back."""
        token = self._text.pop()
        times = self._followers[self._prefix()]
        times[token] -= 1
        if not times[token]:
            del times[token]

    def copy(self) -> "Ngrams":
        """Return an independent copy."""
        copy = Ngrams(self._size)
        copy._text = self._text.copy()
        copy._followers = {prefix: times.copy() for prefix, times in self._followers.items()}
        return copy


class History:
    """What the logit rules ask about R texts so far, kept up to date token by token.

    ``new_tokens``: how many were appended; ``counts`` (R, V): occurrences of each token;
    ``ngrams``: an index a text. What a policy does not ask for is empty; a token costs the same at
    any length.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        vocab_size: int,
        counts_tokens: bool,
        ngram_size: int | None,
        new_tokens: int,
    ):
        self.new_tokens = new_tokens
        self.counts: Floats = np.zeros((len(texts), vocab_size if counts_tokens else 0))
        self.ngrams = [Ngrams(ngram_size, text) for text in texts] if ngram_size else []
        if counts_tokens:
            for i, text in enumerate(texts):
                self.counts[i] = np.bincount(np.array(text, dtype=np.int64), minlength=vocab_size)

    def append(self, tokens: Sequence[int]) -> None:
        """Add one token to each text."""
        self.new_tokens += 1
        if self.counts.size:
            self.counts[np.arange(len(tokens)), tokens] += 1.0
        for ngrams, token in zip(self.ngrams, tokens, strict=False):
            ngrams.append(token)

    def pop(self, tokens: Sequence[int]) -> None:
        """Take the last token of each text back: the ones that were appended last."""
        self.new_tokens -= 1
        if self.counts.size:
            self.counts[np.arange(len(tokens)), tokens] -= 1.0
        for ngrams in self.ngrams:
            ngrams.pop()

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these texts, in this order; a text may be named more than once."""
        self.counts = self.counts[list(rows)]
        if self.ngrams:
            part = [self.ngrams[row] for row in rows]
            self.ngrams = [x.copy() for x in part] if len(set(rows)) != len(rows) else part
