"""A tokenizer turns bytes into integer ids and back: a byte is its own value, merges come above.

Inside minigen a text is a string of *characters*, each of which stands for one id of the byte
vocabulary: chr(0) … chr(255) are the bytes and chr(256) is ``<|endoftext|>``, which no bytes can
spell. ``bytes.decode("latin-1")`` is all it takes, any bytes are legal, and the UTF-16 code units
of such a string are its ids.
"""

import json
import re
from codecs import BufferedIncrementalDecoder, utf_8_decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minigen.arguments import checked
from minigen.errors import MinigenError, OptionError, shown

if TYPE_CHECKING:  # generation with the plain byte vocabulary never imports it
    from tokenizers import Tokenizer

Text = str | bytes
Texts = Sequence[Text]

END_OF_TEXT = 256
END_OF_TEXT_CHARACTER = chr(END_OF_TEXT)
BYTE_VOCABULARY = 257
MOST_TOKENS = 2**21

# Merges stay inside a word: letters, digits or signs with the space before them, or white space.
# Bytes from 0x80 on count as letters. A word is at most 60 bytes and a space long (whole
# characters of 2, 3 or 4 bytes), so that text without spaces is no trouble; a line end closes it.
_LETTER, _BLANK = "A-Za-z\x80-\xff", "\t\v\f\r "
_WORD = re.compile(
    f" ?[{_LETTER}]{{1,60}}"
    f"| ?[0-9]{{1,60}}"
    f"| ?[^{_LETTER}0-9{_BLANK}\n{END_OF_TEXT_CHARACTER}]{{1,60}}"
    f"|{END_OF_TEXT_CHARACTER}"
    f"|[{_BLANK}]{{0,59}}\n"
    # The last blank before a word is left to the word.
    f"|[{_BLANK}]{{1,60}}(?![^{_BLANK}\n{END_OF_TEXT_CHARACTER}])"
    f"|[{_BLANK}]"
)
_LONGEST_WORD = 61
_REMEMBERED_WORDS = 1 << 17


@dataclass(frozen=True, eq=False)
class Encoding:
    """The ids of one text: ``array`` (T,) of an unsigned type, ``ids`` the same as a list."""

    array: NDArray[Any]

    def __len__(self) -> int:
        return len(self.array)

    @property
    def ids(self) -> list[int]:
        """The ids as Python integers."""
        return list(self.array.tolist())


class ByteTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016): 256 bytes, ``<|endoftext|>``, merges.

    ``merges`` lists pairs of ids in the order learned; merge i makes token 257 + i. Every text
    round-trips: ``decode(encode(text).ids)`` gives its bytes.

    >>> ByteTokenizer([(104, 105)]).encode("hi, hi").ids
    [257, 44, 32, 257]
    """

    @checked
    def __init__(self, merges: Sequence[tuple[int, int]] = ()) -> None:
        merges = tuple((int(left), int(right)) for left, right in merges)
        self._bytes = [bytes([value]) for value in range(256)] + [b""]
        for left, right in merges:
            size = len(self._bytes)
            if not (0 <= left < size and 0 <= right < size) or END_OF_TEXT in (left, right):
                raise MinigenError(
                    f"merge {size - BYTE_VOCABULARY} must join two tokens below {size} other than "
                    f"<|endoftext|> (got {shown(left)}, {shown(right)}); the tokenizer is damaged"
                )
            self._bytes.append(self._bytes[left] + self._bytes[right])
            # Doubling merges would otherwise fill the memory from a few bytes of a file.
            if len(self._bytes[-1]) > _LONGEST_WORD:
                raise MinigenError(
                    f"token {size} must be at most {_LONGEST_WORD} bytes long "
                    f"(got {len(self._bytes[-1])}); the tokenizer is damaged"
                )
        if len(set(self._bytes)) < len(self._bytes):
            raise MinigenError("two merges spell the same token; the tokenizer is damaged")
        self.merges = merges
        self.vocab_size = len(self._bytes)
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self._tokens_of_word: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"ByteTokenizer({self.vocab_size:,} tokens, {len(self.merges):,} of them merges)"

    @checked
    def encode(self, text: Text) -> Encoding:
        """Return the ids of a text; a ``str`` is taken as UTF-8."""
        return Encoding(
            np.concatenate(list(self.encode_stream([to_bytes(text).decode("latin-1")])))
        )

    @checked
    def encode_stream(self, texts: Iterable[str]) -> Iterator[NDArray[Any]]:
        """Yield the ids of one long text of characters that arrives in blocks, cut anywhere.

        Where the blocks are cut changes no id. Memory is bounded by the blocks.
        """
        if not self.merges:
            yield from (ids for _, ids in _characters(texts))
            return
        for words in _words(texts):
            known = self._tokens_of_word  # another thread may put a new one in its place
            unseen = set(words).difference(known)
            if len(known) + len(unseen) > _REMEMBERED_WORDS:
                known = self._tokens_of_word = {}
                unseen = set(words)
            self._remember(list(unseen), known)
            joined = b"".join(map(known.__getitem__, words))
            yield np.frombuffer(joined, self.dtype)

    def _remember(self, words: list[str], known: dict[str, bytes]) -> None:
        """Encode new words with the library, on all cores: lists of words, ended by chr(256)."""
        lists = [words[start : start + 512] for start in range(0, len(words), 512)]
        texts = ["".join(word + END_OF_TEXT_CHARACTER for word in part) for part in lists]
        for part, encoding in zip(lists, self._library.encode_batch_fast(texts), strict=True):
            ids = np.array(encoding.ids, self.dtype)
            behind = np.flatnonzero(ids == END_OF_TEXT) + 1
            if END_OF_TEXT_CHARACTER in part:  # a word of its own, behind which no list goes on
                behind = np.delete(behind, part.index(END_OF_TEXT_CHARACTER))
            for word, tokens in zip(part, np.split(ids, behind), strict=False):
                known[word] = tokens[:-1].tobytes()

    @cached_property
    def _library(self) -> "Tokenizer":
        from tokenizers import Tokenizer, models

        spelling = [token.decode("latin-1") for token in self._bytes]
        spelling[END_OF_TEXT] = END_OF_TEXT_CHARACTER
        vocabulary = {token: index for index, token in enumerate(spelling)}
        merges = [(spelling[left], spelling[right]) for left, right in self.merges]
        return Tokenizer(models.BPE(vocabulary, merges))

    @checked
    def decode(self, ids: ArrayLike) -> bytes:
        """Return the bytes of the ids (T,); ``<|endoftext|>`` has none.

        Raises OptionError for an id that is not an integer from 0 to vocab_size - 1.
        """
        array = np.asarray(ids)
        if array.ndim > 1:
            raise OptionError(f"token ids must be one list (got shape {array.shape}); decode each")
        if array.size and array.dtype.kind not in "iu":
            raise OptionError(f"token ids must be integers (got {array.dtype})")
        require_tokens(array, self.vocab_size)
        return b"".join(map(self._bytes.__getitem__, array.ravel().tolist()))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id; raises OptionError as ``decode`` does."""
        return self.decode([token])

    @classmethod
    @checked
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> "ByteTokenizer":
        """Learn merges from documents, until there are ``vocab_size`` tokens or no pair is left."""
        return cls.train_stream(
            (to_bytes(text).decode("latin-1") + END_OF_TEXT_CHARACTER for text in documents),
            vocab_size,
        )

    @classmethod
    @checked
    def train_stream(cls, texts: Iterable[str], vocab_size: int) -> "ByteTokenizer":
        """Learn merges from one long text of characters that arrives in blocks, cut anywhere.

        The library counts words, whose order cannot matter, and breaks ties between equally
        frequent pairs by the lower ids. A byte's id there is its rank among the 256, so the
        merges are the same for any order of the lines and any number of threads.
        """
        if vocab_size < BYTE_VOCABULARY:
            raise OptionError(
                f"vocab_size must be at least {BYTE_VOCABULARY} (got {shown(vocab_size)})"
            )
        if vocab_size > MOST_TOKENS:  # the library takes memory for each, and aborts without
            raise OptionError(f"vocab_size must be at most {MOST_TOKENS} (got {shown(vocab_size)})")
        if vocab_size == BYTE_VOCABULARY:
            return cls()
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        library = Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.Split(END_OF_TEXT_CHARACTER, "removed")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,  # it knows no <|endoftext|>
            initial_alphabet=[chr(value) for value in range(256)],
            show_progress=False,
        )
        library.train_from_iterator(
            (END_OF_TEXT_CHARACTER.join(words) for words in _words(texts)), trainer
        )
        ids = {chr(value): value for value in range(256)}
        merges: list[tuple[int, int]] = []
        for left, right in json.loads(library.to_str())["model"]["merges"]:
            if left + right not in ids:  # a second spelling would add no token
                ids[left + right] = BYTE_VOCABULARY + len(merges)
                merges.append((ids[left], ids[right]))
        return cls(merges)

    def state(self) -> dict[str, Any]:
        """Return what ``from_state`` needs, as JSON can hold it."""
        return {"merges": [list(pair) for pair in self.merges]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ByteTokenizer":
        """Return the tokenizer of a state; raises MinigenError where it is damaged."""
        merges = state.get("merges") if isinstance(state, Mapping) and len(state) == 1 else None
        try:
            return cls(cast("Sequence[tuple[int, int]]", merges))
        except OptionError:
            raise MinigenError(
                "a tokenizer must hold a list of pairs of token ids, 'merges', and nothing else "
                f"(got {shown(state)})"
            ) from None


class TextDecoder(BufferedIncrementalDecoder):
    """Make text of bytes that come in parts: what can become no character is U+FFFD at once."""

    def __init__(self) -> None:
        super().__init__("replace")

    def _buffer_decode(self, data: Any, errors: str, final: bool) -> tuple[str, int]:
        text, used = utf_8_decode(data, errors, final)
        if b"\xed\xa0" <= data[used:] < b"\xee":  # half a surrogate, which Python waits for
            return text + "\ufffd\ufffd", len(data)
        return text, used


def to_bytes(text: Text) -> bytes:
    """Return a text's bytes; a ``str`` is taken as UTF-8.

    Command lines carry bytes that are not UTF-8 as lone surrogates: those become bytes again.
    """
    if not isinstance(text, Text):
        raise OptionError(f"a text must be a str or bytes (got {shown(text)})")
    try:
        return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        got = error.object[error.start]
        raise OptionError(f"a text must be Unicode (got the lone surrogate {got!r})") from None


def require_tokens(ids: NDArray[Any], vocab_size: int) -> None:
    """Raise OptionError where one of the ids is no token of a vocabulary."""
    lowest, highest = ids.min(initial=0), ids.max(initial=0)
    if lowest < 0 or highest >= vocab_size:
        got = lowest if lowest < 0 else highest
        raise OptionError(f"token ids must be from 0 to {vocab_size - 1} (got {shown(int(got))})")


def _characters(texts: Iterable[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield blocks of text, and each one's numbers; OptionError where one is no character."""
    for text in texts:
        units = text.encode("utf-16-le", "surrogatepass") if isinstance(text, str) else b"\xff\xff"
        numbers = np.frombuffer(units, "<u2")
        if numbers.max(initial=0) > END_OF_TEXT:
            raise OptionError(
                "a block of text must hold characters from chr(0) to chr(256), as "
                f"bytes.decode('latin-1') gives (got {shown(text)})"
            )
        yield text, numbers


def _words(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the words of one long text block by block."""
    held = ""
    for text, _ in _characters(texts):
        words = _WORD.findall(held + text)
        # More text may lengthen the last word; it can change no other.
        held = words.pop() if words else ""
        yield words
    yield [held] if held else []
