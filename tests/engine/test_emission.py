"""Tokens are emitted one by one, whatever a window brings (case B38)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.helpers import make_request

from page4 import embedded_checkpoint
from page4.engine.detokenize import Detokenizer
from page4.engine.emission import Delta, Emission
from page4.engine.sampling import TokenLogprob
from page4.engine.tokenizer import Tokenizer

EOS, STOP = 2, 99


class Letters:
    """A tokenizer whose token i has the text `texts[i]`; enough of the interface for a detokenizer."""

    special_ids = frozenset({EOS})
    is_byte_level = True

    def __init__(self, texts: dict[int, str | bytes]) -> None:
        self.texts = texts

    def bytes_of(self, token_id: int) -> bytes:
        text = self.texts.get(token_id, f"<{token_id}>")
        return text if isinstance(text, bytes) else text.encode()


def emission(texts: dict[int, str | bytes] | None = None, **params: Any) -> Emission:
    request = make_request("r", 0, 3, **params)
    request.stop_ids = frozenset({EOS, STOP, *request.params.stop_token_ids})
    tokenizer: Any = Letters(texts or {})
    return Emission(request, Detokenizer(tokenizer, skip_special_tokens=True))


def in_blocks(emit: Emission, tokens: list[int], size: int) -> Delta:
    """Push `tokens` in blocks until the end, and join what came out."""
    ids: list[int] = []
    text = ""
    for start in range(0, len(tokens), size):
        delta = emit.push(tokens[start : start + size])
        ids.extend(delta.token_ids)
        text += delta.text
        if delta.finish_reason is not None:
            break
    return Delta(tuple(ids), text, None, delta.finish_reason, delta.stop_reason)


BLOCK = [10, 11, STOP, 20, 21, 22]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("budget", "ids", "reason"), [(5, (10, 11, STOP), "stop"), (2, (10, 11), "length"), (3, (10, 11, STOP), "stop")]
)
def test_first_of_stop_and_length_wins(size: int, budget: int, ids: tuple[int, ...], reason: str) -> None:
    emit = emission(max_tokens=budget)
    delta = in_blocks(emit, BLOCK, size)
    assert (delta.token_ids, delta.finish_reason) == (ids, reason)
    assert emit._request.num_emitted == len(ids)
    assert delta.text == "<10><11>"


@pytest.mark.parametrize("size", range(1, 9))
def test_stop_string_across_tokens(size: int) -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 12]
    delta = in_blocks(emission({5: "xa", 6: "b"}, stop=["ab"]), tokens, size)
    assert (delta.token_ids, delta.text, delta.finish_reason, delta.stop_reason) == ((5, 6), "x", "stop", "ab")


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("texts", "stop", "text", "count", "reason"),
    [
        (["hello", " wor", "ld!"], ["world"], "hello ", 3, "world"),
        (["aab", "c"], ["ab", "b"], "a", 1, "ab"),  # the earlier one in the text wins
        (["x", "ab"], ["ab", "abc"], "x", 2, "ab"),
        (["aa", "aa", "b"], ["aab"], "aa", 3, "aab"),
        (["a", "b", "c"], ["zz"], "abc", 3, None),
        (["stop", "x"], ["stop"], "", 1, "stop"),
        (["st", "o", "q"], ["stop"], "stoq", 3, None),  # what was held back comes out
    ],
)
def test_stop_strings(size: int, texts: list[str], stop: list[str], text: str, count: int, reason: str | None) -> None:
    emit = emission(dict(enumerate(texts, 10)), stop=stop, max_tokens=len(texts))
    delta = in_blocks(emit, list(range(10, 10 + len(texts))), size)
    assert (delta.text, len(delta.token_ids), delta.stop_reason) == (text, count, reason)
    assert delta.finish_reason == ("length" if reason is None else "stop")


def test_text_that_may_become_a_stop_string_is_held_back_and_nothing_else() -> None:
    emit = emission({5: "one st", 6: "o", 7: "red"}, stop=["stop"])
    assert [emit.push([t]).text for t in (5, 6, 7)] == ["one ", "", "stored"]


def test_the_stop_string_and_the_stop_token_can_be_kept() -> None:
    kept = emission({5: "xa", 6: "bz"}, stop=["ab"], include_stop_str_in_output=True)
    assert in_blocks(kept, [5, 6, 7], 3).text == "xab"
    kept = emission(stop_token_ids=[7], include_stop_str_in_output=True)
    assert in_blocks(kept, [5, 7, 8], 3).text == "<5><7>"


def test_end_of_text_has_no_stop_reason_and_a_stop_id_has() -> None:
    assert emission().push([5, EOS, 6]) == Delta((5, EOS), "<5>", None, "stop", None)
    assert emission(stop_token_ids=[7]).push([5, 7, 6]) == Delta((5, 7), "<5>", None, "stop", 7)


def test_nothing_stops_before_min_tokens() -> None:
    emit = emission({10: "ab"}, stop=["ab"], min_tokens=3, max_tokens=9)
    assert emit.push([10, STOP, 10]).token_ids == (10, STOP, 10)
    assert emit._finish == "stop"
    emit = emission({10: "ab", 11: "c"}, stop=["ab"], min_tokens=2, max_tokens=9)
    assert emit.push([10, 11, 11, 10, 11]).text == "abcc"


def test_logprobs_are_those_of_the_emitted_tokens() -> None:
    entries = [(TokenLogprob(t, -1.0, 1),) for t in BLOCK]
    delta = emission(max_tokens=5).push(BLOCK, entries)
    assert delta.logprobs == tuple(entries[:3])


def test_characters_come_out_whole_and_a_broken_end_is_dropped() -> None:
    euro, face = "€".encode(), "😀".encode()
    texts: dict[int, str | bytes] = {
        10: euro[:1],
        11: euro[1:],
        12: b"a" + face[:2],
        13: face[2:3],
        14: face[3:] + b"b",
    }
    emit = emission(texts, max_tokens=9)
    assert [emit.push([t]).text for t in (10, 11, 12, 13, 14, 10)] == ["", "€", "a", "", "😀b", ""]
    assert emit.end("abort").text == ""
    broken = emission({10: b"\xff", 11: "a", 12: euro[:2]}, max_tokens=3)
    assert in_blocks(broken, [10, 11, 12], 1).text == "\ufffda"


def test_length_counts_the_prompt_too() -> None:
    request = make_request("r", 0, 90, max_tokens=20, max_model_len=96)
    delta = Emission(request, None).push(list(range(10, 30)))
    assert len(delta.token_ids) == 6 and delta.finish_reason == "length" and delta.text == ""


def test_the_embedded_tokenizer_gives_the_text_of_decode(rng: Any) -> None:
    tokenizer = Tokenizer.from_folder(embedded_checkpoint())
    assert tokenizer is not None and tokenizer.is_byte_level
    for text in (
        "def add(a, b):\n    return a + b  # naïve 加法 😀\n",
        "\u200d\U0001f469\u200d\U0001f4bb é\u0301 \x00",
    ):
        ids = tokenizer.encode(text)
        pieces = Detokenizer(tokenizer, skip_special_tokens=True)
        assert "".join(pieces.push(t) for t in ids) == text == tokenizer.decode(ids)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(2000)]
    pieces = Detokenizer(tokenizer, skip_special_tokens=True)
    streamed = "".join(pieces.push(t) for t in ids)
    whole = tokenizer.decode(ids)
    assert whole.startswith(streamed) and set(whole[len(streamed) :]) <= {"\ufffd"}
