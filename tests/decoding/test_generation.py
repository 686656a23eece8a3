"""Generation continues prompts token by token; each text depends on its own prompt and stream."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minigen.decoding.beams import beam_search
from minigen.decoding.candidates import decide
from minigen.decoding.generation import Task, complete, find_stop, generate, padded_contexts
from minigen.decoding.policy import Policy
from minigen.decoding.scoring import score
from minigen.decoding.speculation import speculate
from minigen.errors import MinigenError, OptionError
from minigen.exact.streams import Stream
from minigen.model import head
from minigen.model.model import Model
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer

TOKENIZER = ByteTokenizer()
GREEDY = Policy(temperature=0)


class Reciter:
    """A fake model that is sure of one text: after n tokens comes the next of its tokens."""

    vocab_size, context_length = 257, 64

    def __init__(self, *tokens):
        self.tokens = [t for part in tokens for t in (part if isinstance(part, bytes) else [part])]

    def logits(self, contexts):
        read = np.add.reduce(contexts != END_OF_TEXT, axis=1)
        z = np.full((len(contexts), self.vocab_size), -5.0)
        z[np.arange(len(contexts)), [self.tokens[n % len(self.tokens)] for n in read]] = 5.0
        return z


def small_model(context_length=4):
    model = Model(257, context_length, 8)
    model.initialize(Stream(3, "init"))
    model.parameters["W"] *= 8.0
    model.changed()
    return model


def inference(count=1):
    return [Stream(0, f"inference/{i}" if i else "inference") for i in range(count)]


def run(model, prompts, policy=GREEDY, streams=None, **options):
    given = [] if streams is None else [streams.__getitem__]
    return complete(generate(Task(model, TOKENIZER, policy, **options), prompts, *given))


POLICIES = {
    "plain": Policy(suppress_tokens=[END_OF_TEXT]),
    "greedy": GREEDY,
    "everything": Policy(
        temperature=0.9,
        top_k=100,
        top_p=0.97,
        min_p=0.001,
        typical_p=0.95,
        eta_cutoff=0.001,
        epsilon_cutoff=0.001,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        no_repeat_ngram_size=2,
        min_new_tokens=5,
    ),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_text_is_the_same_bits_alone_and_in_a_batch(policy, size):
    model = small_model()
    prompts = [f"prompt {i}" for i in range(size)]
    options = {"max_new_tokens": 12, "log_probabilities": True}
    together = run(model, prompts, policy, inference(size), **options)
    for i in range(0, size, 7):
        assert run(model, [prompts[i]], policy, [inference(size)[i]], **options)[0] == together[i]


def test_a_prompt_gives_one_text_whatever_stands_before_or_after_it():
    model, policy = small_model(), POLICIES["everything"]
    texts = [
        {
            c.prompt: c.text
            for c in run(model, order, policy, [Stream(0, "inference") for _ in order])
        }
        for order in (["a", "b"], ["b", "a"], ["a"])
    ]
    assert texts[0]["a"] == texts[1]["a"] == texts[2]["a"]
    assert texts[0]["b"] == texts[1]["b"] != texts[0]["a"]


def test_texts_that_end_early_leave_the_others_as_they_are():
    model = small_model()
    policy = Policy(logit_bias={END_OF_TEXT: 4.0}, no_repeat_ngram_size=3, frequency_penalty=0.1)
    together = run(model, ["x"] * 20, policy, inference(20), max_new_tokens=30)
    alone = [run(model, ["x"], policy, [s], max_new_tokens=30)[0] for s in inference(20)]
    assert together == alone
    assert {c.finish_reason for c in together} == {"end_of_text", "length"}


def test_each_sampled_token_takes_one_word_of_its_own_stream():
    streams = [Stream(0, "inference", position=5), Stream(0, "inference/1", position=70)]
    policy = Policy(suppress_tokens=[END_OF_TEXT])
    run(small_model(), ["a", "b"], policy, streams, max_new_tokens=100)
    assert [stream.position for stream in streams] == [105, 170]


def test_a_generation_that_is_left_early_has_used_the_words_of_what_it_gave():
    stream = Stream(0, "inference")
    pieces = generate(Task(small_model(), TOKENIZER, POLICIES["plain"]), ["a"], lambda _: stream)
    for _ in range(3):
        next(pieces)
    assert stream.position == 3


def test_a_generation_in_parts_goes_on_where_the_stream_stands():
    model, policy = small_model(), POLICIES["plain"]
    whole = run(model, ["abcdefgh"], policy, inference(), max_new_tokens=8)[0]
    stream = Stream(0, "inference")
    first = run(model, ["abcdefgh"], policy, [stream], max_new_tokens=3)[0]
    prompt = b"abcdefgh" + TOKENIZER.decode(first.token_ids)
    second = run(model, [prompt], policy, [stream], max_new_tokens=5)[0]
    assert first.token_ids + second.token_ids == whole.token_ids


def test_prompts_are_read_as_they_are_needed_and_give_the_texts_that_they_give_alone():
    model, policy, read = small_model(), POLICIES["everything"], []

    def prompts():
        for i in range(100_000):
            read.append(i)
            yield f"prompt {i}"

    task = Task(model, TOKENIZER, policy, max_new_tokens=2)
    pieces = generate(task, prompts(), lambda i: Stream(0, f"inference/{i}"))
    texts = {}
    while len(texts) < 600:
        piece = next(pieces)
        if piece.continuation:
            texts[piece.row] = piece.continuation
    assert len(read) < 1000  # of 100,000: a batch or two ahead
    assert sorted(texts) == [*range(600)]
    for i in (0, 255, 256, 599):
        own = [Stream(0, f"inference/{i}")]
        assert run(model, [f"prompt {i}"], policy, own, max_new_tokens=2) == [texts[i]]


def test_a_policy_that_draws_is_refused_where_no_streams_are_given():
    with pytest.raises(OptionError, match=r"takes streams for each text \(got none\)"):
        run(small_model(), ["a"], POLICIES["plain"])


def test_texts_may_be_made_one_by_one():
    task = Task(Reciter(b"ab"), TOKENIZER, GREEDY, max_new_tokens=2)
    pieces = generate(task, iter(["", "x", "y"]), one_by_one=True)
    assert [piece.row for piece in pieces] == [0, 0, 1, 1, 2, 2]


def test_the_texts_of_a_batch_grow_token_by_token_side_by_side():
    pieces = generate(Task(Reciter(b"ab"), TOKENIZER, GREEDY, max_new_tokens=2), ["", "x"])
    assert [piece.row for piece in pieces] == [0, 1, 0, 1]


def test_a_part_of_a_character_in_the_prompt_becomes_whole_in_the_continuation():
    model = Reciter(b"..\x9d!", END_OF_TEXT)
    assert run(model, [b"\xe2\x80"])[0].text == "\u201d!"
    assert run(Reciter(b".a", END_OF_TEXT), [b"\xc3"])[0].text == "\ufffda"
    assert run(Reciter("é".encode() + b"a", END_OF_TEXT), ["é"])[0].text == "a"
    for never in (b"\xed\xa0", b"\xed\xbf", b"\xc0", b"\xf4\x90", b"\xe0\x80", b"\xf5"):
        assert run(Reciter(never + b"a", END_OF_TEXT), [never])[0].text == "a"


def test_a_stop_string_counts_from_the_minimum_on_and_what_was_held_back_comes_out():
    policy = Policy(temperature=0, min_new_tokens=4)
    options = {"stop": ["ab", "cabd"], "max_new_tokens": 9}
    text = run(Reciter(b"abcabd"), [""], policy, **options)[0]
    assert (text.text, text.finish_reason) == ("abc", "stop")
    pieces = [*generate(Task(Reciter(b"abcabd"), TOKENIZER, policy, **options), [""])]
    assert [piece.text for piece in pieces] == ["", "ab", "", "", "c"]


def test_greedy_draws_no_word_and_needs_no_stream():
    stream = Stream(0, "inference")
    assert run(small_model(), ["a"], GREEDY, [stream]) == run(small_model(), ["a"], GREEDY)
    assert stream.position == 0


def test_every_token_is_the_policys_choice_for_its_history():
    model, policy = small_model(), POLICIES["everything"]
    text = run(model, ["so"], policy, inference(), max_new_tokens=15)[0]
    words, history = Stream(0, "inference"), [*b"so"]
    for token in text.token_ids:
        z = model.logits(padded_contexts([history], model.context_length))[0]
        assert policy.choose(z, history, words.word(), prompt_length=2) == token
        history.append(token)


def test_log_probabilities_are_the_models_before_penalties_and_filters():
    model = small_model()
    policy = Policy(top_k=3, temperature=2.0, frequency_penalty=1.0)
    options = {"max_new_tokens": 6, "log_probabilities": True}
    text = run(model, ["so"], policy, inference(), **options)[0]
    history = [*b"so"]
    for token, log_p in zip(text.token_ids, text.log_probabilities, strict=True):
        z = model.logits(padded_contexts([history], model.context_length))[0]
        assert head.log_softmax(z)[token] == log_p
        history.append(token)


def test_an_empty_prompt_starts_from_a_padded_context():
    model = small_model()
    first = run(model, [""], max_new_tokens=1)[0].token_ids[0]
    assert first == model.logits(np.full((1, 4), END_OF_TEXT))[0].argmax()


@pytest.mark.parametrize("length", [3, 4, 5, 40])
def test_only_the_last_tokens_of_a_prompt_count(length):
    model, policy = small_model(), POLICIES["plain"]
    prompt = b"0123456789" * 4
    expected = run(model, [prompt[:length][-4:]], policy, inference(), max_new_tokens=9)[0]
    got = run(model, [prompt[:length]], policy, inference(), max_new_tokens=9)[0]
    assert got.token_ids == expected.token_ids


def test_end_of_text_ends_a_text_and_is_a_token_without_text():
    text = run(Reciter(b"ab", END_OF_TEXT), [""])[0]
    assert (text.text, text.token_ids) == ("ab", [97, 98, END_OF_TEXT])
    assert text.finish_reason == "end_of_text"


def test_end_of_text_as_the_last_token_allowed_is_the_reason():
    assert (
        run(Reciter(b"ab", END_OF_TEXT), [""], max_new_tokens=3)[0].finish_reason == "end_of_text"
    )
    assert run(Reciter(b"ab", END_OF_TEXT), [""], max_new_tokens=2)[0].finish_reason == "length"


def test_a_text_does_not_end_before_its_minimum():
    policy = Policy(temperature=0, min_new_tokens=4)
    text = run(Reciter(b"ab", END_OF_TEXT), [""], policy, max_new_tokens=9)[0]
    assert END_OF_TEXT not in text.token_ids[:4]


def test_end_of_text_written_in_a_prompt_is_ordinary_text():
    text = run(Reciter(b"<|endoftext|>yes", END_OF_TEXT), ["<|endoftext|>"])[0]
    assert text.text == "yes"
    assert text.prompt == "<|endoftext|>"


def pieces_of(model, **options):
    return list(generate(Task(model, TOKENIZER, GREEDY, **options), [""]))


def test_a_character_of_four_tokens_is_streamed_as_one():
    pieces = pieces_of(Reciter("😀z".encode()), max_new_tokens=5)
    assert [piece.text for piece in pieces] == ["", "", "", "😀", "z"]


def test_a_character_that_stays_incomplete_comes_out_at_the_end():
    pieces = pieces_of(Reciter("a😀".encode()), max_new_tokens=3)
    assert [piece.text for piece in pieces] == ["a", "", "\ufffd"]


@pytest.mark.parametrize("stop", [(), ["st"], ["zz", "é!"]])
def test_joined_pieces_equal_the_whole_text(stop):
    pieces = pieces_of(Reciter("astonished é! \xff".encode()), max_new_tokens=15, stop=stop)
    assert "".join(piece.text for piece in pieces) == pieces[-1].continuation.text


def test_a_stop_string_ends_the_text_across_tokens_and_is_not_in_it():
    text = run(Reciter(b"one two three"), [""], stop="two")[0]
    assert (text.text, text.finish_reason) == ("one ", "stop")
    assert bytes(text.token_ids) == b"one two"


def test_a_stop_string_is_found_inside_multi_byte_characters():
    assert run(Reciter("aé—z".encode()), [""], stop="—")[0].text == "aé"
    assert run(Reciter("aé—z".encode()), [""], stop=b"\xa9")[0].text == "a\ufffd"


def test_of_several_stop_strings_the_one_complete_first_counts():
    assert run(Reciter(b"xabcd"), [""], stop=["abcd", "bc"])[0].text == "xa"
    assert run(Reciter(b"xabcd"), [""], stop=["bc", "abc"])[0].text == "x"
    assert run(Reciter(b"aabc"), [""], stop="abc")[0].text == "a"


def test_text_that_may_become_a_stop_string_is_held_back_and_then_released():
    pieces = pieces_of(Reciter(b"ststop."), max_new_tokens=6, stop="stall")
    assert [piece.text for piece in pieces] == ["", "", "st", "", "sto", "p"]


def test_a_stop_string_that_begins_in_the_prompt_does_not_count():
    text = run(Reciter(b"stop it", END_OF_TEXT), ["stop"], stop=["op i", "stop"])[0]
    assert text.text == " it"


AB = st.text("ab", max_size=16).map(str.encode)


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), AB, st.integers(1, 5))
@example(["b", "cde"], b"abcde", 5)  # the longer one begins later
def test_stop_strings_are_found_as_a_plain_search_finds_them(stop, text, size):
    ends = [
        (end, -len(s))
        for end in range(len(text) + 1)
        for s in stop
        if text[:end].endswith(s.encode())
    ]
    strings = [string.encode() for string in stop]
    start, end, stop = 0, 0, None
    while end < len(text) and stop is None:  # start … end is what is held back
        certain, stop = find_stop(strings, text[start:end], text[end : end + size])
        end, stop = end + size, None if stop is None else start + stop
        start += certain
        assert strings or start == min(end, len(text))  # nothing is held back for no string
    assert stop == (sum(min(ends)) if ends else None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ""}, r"a stop string must not be empty \(got ''\)"),
        ({"stop": ["a", b""]}, "a stop string must not be empty"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be a whole number, at least 1 \(got 0\)"),
        ({"max_new_tokens": 1.5}, r"max_new_tokens must be a whole number, .* \(got 1.5\)"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_it_starts(options, message):
    with pytest.raises(OptionError, match=message):
        Task(small_model(), TOKENIZER, GREEDY, **options)


def test_a_task_has_200_tokens_and_no_log_probabilities_unless_it_says_so():
    task = Task(small_model(), TOKENIZER)
    assert (task.max_new_tokens, task.log_probabilities, task.policy) == (200, False, Policy())


OTHER = Model(300, 4, 8)
CALLS = {  # each call of this room: what it needs, and the counts that it takes
    "generate": (
        lambda model, **options: generate(Task(model, TOKENIZER, GREEDY, **options), ["a"]),
        ["max_new_tokens"],
    ),
    "beams": (
        lambda model, num_beams=2, **options: beam_search(
            Task(model, TOKENIZER, **options), "a", num_beams=num_beams
        ),
        ["num_beams", "max_new_tokens"],
    ),
    "next": (lambda model, **options: decide(model, TOKENIZER, "a", **options), ["top"]),
    "score": (lambda model, **options: score(model, TOKENIZER, "a", **options), []),
    "a draft's target": (
        lambda model, num_draft_tokens=4, **options: speculate(
            Task(model, TOKENIZER, GREEDY, **options),
            small_model(),
            TOKENIZER,
            ["a"],
            num_draft_tokens=num_draft_tokens,
        ),
        ["num_draft_tokens", "max_new_tokens"],
    ),
    "a draft": (
        lambda model: speculate(Task(small_model(), TOKENIZER, GREEDY), model, TOKENIZER, ["a"]),
        [],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_of_another_vocabulary_is_refused(name):
    with pytest.raises(MinigenError, match=r"must have one vocabulary \(got 300 and 257") as caught:
        CALLS[name][0](OTHER)
    assert type(caught.value) is MinigenError


@pytest.mark.parametrize("name", CALLS)
def test_a_count_starts_at_1_and_is_called_by_its_name(name):
    call, counts = CALLS[name]
    for count in counts:
        call(small_model(), **{count: 1})
        for wrong in (0, 1.5, True):
            with pytest.raises(OptionError, match=rf"^{count} must be a whole number, at least 1 "):
                call(small_model(), **{count: wrong})


def test_generation_imports_none_of_trainings_libraries():
    code = (
        "import sys\n"
        "from minigen.decoding import beams, generation, speculation\n"
        "print(*sorted({'scipy', 'numba', 'pydantic', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("\n", "")
