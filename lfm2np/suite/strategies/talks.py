"""Requests to the trained fixture, the only one with a tokenizer: their text matters."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from lfm2np.checkpoint.loaded import trained_fixture
from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.records import Request
from lfm2np.suite.strategies.scenarios import Scenario, schedules
from lfm2np.suite.strategies.tiny_models import Checkpoint, loaded

COUNTS = ("2", " 2", "2 3", "24", "5 26", "6 27 2", "27", "é", "\ufffd", "zz")
COPIES = ("i", "iv", "vu", "zo", "a", " s", "e", "mu re", "u z", "o sa d")
MOST_SAID = 18
CHARACTERS = ("é", "éa", "→")


@cache
def trained() -> Checkpoint:
    return Checkpoint(str(trained_fixture()))


def trained_model() -> Model:
    return loaded(trained())


@st.composite
def talks(draw: st.DrawFn, kinds: tuple[str, ...] = ()) -> Scenario:
    """Requests that the trained fixture answers by counting or copying, and stop strings that come, or nearly."""
    requests = tuple(draw(talk(name)) for name in "abc"[: draw(st.integers(1, 3))])
    sizes = {
        "block_size": draw(st.sampled_from([4, 16, 2])),
        "num_blocks": draw(st.integers(30, 60)),
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.sampled_from([64, 3, 9])),
        "drafter": draw(st.sampled_from(["ngram", None])),
        "num_speculative_tokens": draw(st.integers(1, 4)),
    }
    return Scenario(trained(), requests, sizes, draw(schedules(len(requests), kinds, steps=9)))


@st.composite
def talk(draw: st.DrawFn, name: str) -> Request:
    start = draw(st.integers(18, 25))
    said, stops = draw(
        st.sampled_from([(f"count: {start} to {start + 8}", COUNTS), ("copy: tivu zo sa di zemu re", COPIES)])
    )
    most = draw(st.integers(1, MOST_SAID))
    temperature = draw(st.sampled_from([0.0, 0.0, 1.0]))
    params = SamplingParams(
        temperature=temperature,
        n=1 if temperature == 0.0 else draw(st.integers(1, 2)),
        max_tokens=most,
        stop=draw(st.lists(st.sampled_from(stops), max_size=3)),
        include_stop_str_in_output=draw(st.booleans()),
        min_tokens=min(draw(st.integers(0, 6)), most),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.sampled_from([None, 0, 1])),
    )
    return Request(name, said_by_a_user(said), params)


@cache
def said_by_a_user(text: str) -> tuple[int, ...]:
    """The prompt of a conversation; kept, as each rendering starts a process."""
    return tuple(trained_model().tokenizer.encode_chat([{"role": "user", "content": text}]))


def split_characters() -> st.SearchStrategy[Scenario]:
    """Outputs of byte tokens, drawn at random: characters that are cut between tokens, and some never completed."""

    def scenario(characters: str, seed: int, most: int) -> Scenario:
        params = SamplingParams(
            temperature=1e6, max_tokens=most, allowed_token_ids=byte_tokens(characters), seed=seed, ignore_eos=True
        )
        return Scenario(trained(), (Request("a", said_by_a_user("é"), params),), {}, (("add", 0),), any_noise=True)

    return st.builds(scenario, st.sampled_from(CHARACTERS), st.integers(0, 99), st.integers(3, 18))


@cache
def byte_tokens(characters: str) -> tuple[int, ...]:
    wanted, tokenizer = {bytes([byte]) for byte in characters.encode()}, trained_model().tokenizer
    ids = range(trained_model().config.vocab_size)
    return tuple(token_id for token_id in ids if tokenizer.token_bytes(token_id) in wanted)
