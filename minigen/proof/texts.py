"""Texts that can be checked: each line of ``generate --json`` says all that its text depends on.

So it can be written again and compared, token by token. What is shown is that this model writes
this text from this prompt and seed; not that the text is true, or any good.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from typing import Any

from minigen.decoding.beams import beam_search
from minigen.decoding.generation import Continuation, Piece, Row, Task, generate, stream_name
from minigen.decoding.generator import Generator
from minigen.decoding.policy import Policy
from minigen.decoding.speculation import speculate
from minigen.errors import MinigenError
from minigen.exact.streams import Stream

_KEYS = ("prompt", "text", "token_ids", "log_probabilities", "finish_reason", "seed", "sample",
         "model", "policy", "max_new_tokens", "stop")  # fmt: skip
_KEYS_OF_A_DRAFT = ("draft", "num_draft_tokens", "acceptance_rate")
_KEYS_OF_BEAMS = ("num_beams", "length_penalty")
_LONGEST = 300  # characters of a reason, which may hold what anybody wrote


@dataclass(frozen=True)
class Verdict:
    """Whether a line, counted from 1, is what the model writes; None where that cannot be told.

    ``first_token`` is the index of the first token that differs, where one does; ``reason`` says
    what is wrong, or missing; ``tokens`` were written again.
    """

    holds: bool | None
    reason: str = ""
    first_token: int | None = None
    tokens: int = 0
    line: int = 0


def check(data: bytes, model: Generator, draft: Generator | None = None) -> Iterator[Verdict]:
    """Write each text of a file again, with the model that is said to have written it.

    ``draft`` is needed where a draft had a say. Blank lines are passed over.
    """
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield replace(_check(line, model, draft), line=number)


def _check(line: bytes, model: Generator, draft: Generator | None) -> Verdict:
    try:
        claim = json.loads(line, object_pairs_hook=_once_each)
        if not isinstance(claim, dict) or (missing := [key for key in _KEYS if key not in claim]):
            lacks = f": it lacks {missing[0]}" if isinstance(claim, dict) else ""
            return Verdict(False, f"it is no line of generate --json{lacks}")
        if claim["model"] != model.fingerprint:
            return Verdict(False, f"another model wrote it: {claim['model']}")
        if "draft" in claim and (draft is None or claim["draft"] != draft.fingerprint):
            verdict = _without_draft(claim, model)
        else:
            verdict = _compare(claim, _pieces(claim, model, draft))
        if len(verdict.reason) > _LONGEST:
            verdict = replace(verdict, reason=verdict.reason[:_LONGEST] + "…")
        # U+FFFD is what JSON holds in the place of bytes that are no UTF-8.
        for name, text in {"prompt": claim["prompt"], "stop": "".join(claim["stop"])}.items():
            if verdict.holds is False and "\ufffd" in text:
                reason = f"{verdict.reason}; its {name} was not UTF-8, most likely"
                return replace(verdict, holds=None, reason=reason)
        return verdict
    except (MinigenError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return Verdict(False, f"it cannot be written again: {error}")
    except RecursionError:
        return Verdict(False, "it is no line of generate --json: nested too deep")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that comes twice: a reader may have seen the other one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands in it twice")
    return found


def _task(claim: dict[str, Any], model: Generator) -> Task:
    """Return what a line says that it was asked for."""
    options = dict(claim["policy"])
    if "logit_bias" in options:  # the keys of JSON are strings
        options["logit_bias"] = {int(token): b for token, b in options["logit_bias"].items()}
    policy: Policy = Policy.of(None, options)  # type: ignore[arg-type]
    length, stop = claim["max_new_tokens"], tuple(claim["stop"])
    return Task(model.model, model.tokenizer, policy, length, stop, True)


def _pieces(claim: dict[str, Any], model: Generator, draft: Generator | None) -> Iterator[Piece]:
    """Write the text that a line claims, by the way that it claims."""
    task, prompt = _task(claim, model), claim["prompt"]
    if not isinstance(prompt, str):
        raise TypeError("its prompt must be a string")
    seed, sample = claim["seed"], claim["sample"]
    draws = not (task.policy.greedy or "num_beams" in claim)
    if draws and not (type(seed) is int and type(sample) is int and sample >= 0):
        raise TypeError("its seed and sample must be whole numbers")
    if not draws and (seed, sample) != (None, 0):
        raise TypeError("where nothing is drawn its seed must be null, its sample 0")
    if "num_beams" in claim:
        best, *_ = beam_search(
            task, prompt, num_beams=claim["num_beams"], length_penalty=claim["length_penalty"]
        )
        return iter([Piece(0, None, best.text, best)])
    seed, name = seed or 0, stream_name(sample)  # of a stream from which greedy draws no word
    if draft and "draft" in claim:
        pair = Stream(seed, f"{name}/draft"), Stream(seed, f"{name}/accept")
        return speculate(
            task,
            draft.model,
            draft.tokenizer,
            [prompt],
            lambda _: pair,
            num_draft_tokens=claim["num_draft_tokens"],
        )
    return generate(task, [prompt], lambda _: Stream(seed, name))


def _compare(claim: dict[str, Any], pieces: Iterator[Piece]) -> Verdict:
    """Compare token by token, no further than to the first that differs."""
    claimed, count = claim["token_ids"], 0
    again: Continuation | None = None
    for piece in pieces:
        if piece.token_id is not None:
            there = claimed[count] if count < len(claimed) else "missing"
            if there != piece.token_id:
                return _differs(count, there, piece.token_id)
            count += 1
        again = piece.continuation
    if again is None:
        raise ValueError("its text has no end")
    for i, (there, now) in enumerate(zip_longest(claimed, again.token_ids, fillvalue="missing")):
        if there != now or type(there) is not type(now):
            return _differs(i, there, now)
    figures: dict[str, Any] = {"finish_reason": again.finish_reason, "text": again.text}
    if again.acceptance_rate is not None:
        figures["acceptance_rate"] = again.acceptance_rate
    return _compare_figures(claim, again.log_probabilities or [], figures)


def _compare_figures(claim: dict[str, Any], log_p: list[float], figures: dict[str, Any]) -> Verdict:
    """Compare what goes with tokens that are right."""
    claimed = [-inf if value is None else value for value in claim["log_probabilities"]]
    for i, (there, now) in enumerate(zip_longest(claimed, log_p, fillvalue="missing")):
        if there != now:
            reason = f"the log-probability of token {i} is {there}, written again {now}"
            return Verdict(False, reason, i, len(log_p))
    for key, now in figures.items():
        if claim.get(key) != now:
            reason = f"its {key} is {claim.get(key)!r}, written again {now!r}"
            return Verdict(False, reason, tokens=len(log_p))
    own = _KEYS_OF_BEAMS if "num_beams" in claim else _KEYS_OF_A_DRAFT if "draft" in claim else ()
    for key in sorted(claim.keys() - {*_KEYS, *own}):
        reason = f"its {key} is {claim[key]!r}, written again there is none"
        return Verdict(False, reason, tokens=len(log_p))
    return Verdict(True, tokens=len(log_p))


def _differs(index: int, there: Any, now: Any) -> Verdict:
    return Verdict(False, f"token {index} is {there}, written again {now}", index, index)


def _without_draft(claim: dict[str, Any], model: Generator) -> Verdict:
    """Check what the model alone can tell of a text whose draft is not here."""
    claimed = claim["token_ids"]
    if not all(type(token) is int and 0 <= token < model.model.vocab_size for token in claimed):
        raise ValueError("its token_ids must be ids of this model")
    row = Row(_task(claim, model), 0, claim["prompt"])
    for token in claimed:
        row.add(token)
    is_ended = row.finish_reason is not None
    row.finish_reason = row.finish_reason or "dead_end"
    again = row.continuation()
    figures = {"finish_reason": again.finish_reason, "text": again.text} if is_ended else {}
    verdict = _compare_figures(claim, again.log_probabilities or [], figures)
    if not verdict.holds:
        return verdict
    told = (
        "the model gives its tokens these log-probabilities, but which tokens are drawn depends "
        f"on the draft too: give --draft, the model {claim['draft']}"
    )
    return replace(verdict, holds=None, reason=told)
