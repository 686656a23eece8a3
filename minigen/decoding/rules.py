"""Logit rules: what penalties and bans do to logits (R, V), given the history of each of R texts.

Each is elementwise. A rule may take a token's logit to −inf, which stands for "never"; where the
rules of a policy leave a text no token at all, that text has come to a dead end.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from minigen.decoding.history import History
from minigen.exact.arithmetic import Floats
from minigen.text.tokenizer import END_OF_TEXT


def add_bias(z: Floats, history: History, bias: Mapping[int, float]) -> Floats:
    """Add a constant to the logits of some tokens. Source: OpenAI API, ``logit_bias``."""
    z = z.copy()
    z[..., list(bias)] += list(bias.values())
    return z


def penalize_repetition(z: Floats, history: History, penalty: float) -> Floats:
    """Divide positive logits of tokens that occurred by the penalty, multiply negative ones.

    Source: Keskar et al. 2019, "CTRL", section 4.1; the sign rule is the transformers library's.
    """
    return np.where(history.counts > 0, np.where(z < 0, z * penalty, z / penalty), z)


def penalize_frequency(z: Floats, history: History, penalty: float) -> Floats:
    """Subtract the penalty once for every occurrence. Source: OpenAI API, ``frequency_penalty``."""
    return z - penalty * history.counts


def penalize_presence(z: Floats, history: History, penalty: float) -> Floats:
    """Subtract the penalty once if the token occurred. Source: OpenAI API, ``presence_penalty``."""
    return z - penalty * (history.counts > 0)


def forbid_repeated_ngrams(z: Floats, history: History, size: int) -> Floats:
    """Forbid what would repeat an n-gram. Source: Paulus et al. 2017, section 2.5."""
    z = z.copy()
    for logits, ngrams in zip(z, history.ngrams, strict=True):
        logits[ngrams.repeating()] = -np.inf
    return z


def suppress(z: Floats, history: History, tokens: Sequence[int]) -> Floats:
    """Forbid some tokens. Source: the transformers library, ``suppress_tokens``."""
    z = z.copy()
    z[..., list(tokens)] = -np.inf
    return z


def delay_end_of_text(z: Floats, history: History, min_new_tokens: int) -> Floats:
    """Forbid ``<|endoftext|>`` until a text has so many new tokens."""
    if history.new_tokens >= min_new_tokens or z.shape[-1] <= END_OF_TEXT:
        return z
    return suppress(z, history, [END_OF_TEXT])
