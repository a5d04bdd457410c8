"""Checks on text and drafts of our own engine: streams, stop strings, characters, BOS, drafts drawn at random."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from lfm2np.conformance.protocol import Factory
from lfm2np.conformance.trials import plain
from lfm2np.conformance.trials.driver import Violation
from lfm2np.conformance.trials.models import TinyModel, loaded
from lfm2np.conformance.trials.strategies import Scenario
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.engine import Engine
from lfm2np.engine.sequential import alone
from lfm2np.loading import Model, load
from lfm2np.sampling.choice import request_seed
from lfm2np.sampling.params import SamplingParams
from lfm2np.sampling.stop_strings import StopChecker

Ids = tuple[int, ...]


@cache
def trained() -> Model:
    """The only fixture with a tokenizer."""
    return load()


@st.composite
def texts(draw: st.DrawFn) -> tuple[Ids, tuple[str, ...], bool, int, int]:
    """A prompt for the trained fixture, and stop strings that its answers contain, or nearly."""
    counts = ["2", " 2", "2 3", "24", "5 26", "6 27 2", "27", "é", "\ufffd", "zz"]
    copies = ["i", "iv", "vu", "zo", "a", " s", "e", "mu re", "u z", "o sa d"]
    start = draw(st.integers(18, 25))
    kind = draw(st.sampled_from(["count", "copy"]))
    said = f"count: {start} to {start + 8}" if kind == "count" else "copy: tivu zo sa di zemu re"
    stop = st.lists(st.sampled_from(counts if kind == "count" else copies), max_size=2)
    prompt = trained().tokenizer.encode_chat([{"role": "user", "content": said}])
    return tuple(prompt), tuple(draw(stop)), draw(st.booleans()), draw(st.integers(0, 6)), draw(st.integers(1, 18))


def text_is_what_the_tokens_say(factory: Factory, example: tuple[Ids, tuple[str, ...], bool, int, int]) -> None:
    """The trained fixture counts or copies; stop strings end it where they must, and nothing that they held is lost."""
    prompt, stop, include, min_tokens, most = example
    params = SamplingParams(
        temperature=0.0,
        max_tokens=most,
        stop=list(stop),
        include_stop_str_in_output=include,
        min_tokens=min(min_tokens, most),
        ignore_eos=True,
    )
    require_text(prompt, params)


def require_text(prompt: Ids, params: SamplingParams) -> None:
    model = trained()
    engine = Engine(model, max_num_seqs=1)
    engine.add_request("a", prompt, params)
    shown, grown = "", ""
    for output in engine.stream():
        shown = output.outputs[0].text or ""
        if not shown.startswith(grown):
            raise Violation(f"text {grown!r} became {shown!r}: what was shown is taken back")
        grown = shown
    ids = output.outputs[0].token_ids
    pieces, said = [], b""
    for index, token in enumerate(ids):
        before = decoded(said, final=False)
        said += model.tokenizer.token_bytes(token)
        pieces.append(decoded(said, final=index == len(ids) - 1)[len(before) :])
    expected, stopped = plain.stop_text(pieces, params.stop, params.include_stop_str_in_output, params.min_tokens)
    if shown != expected:
        raise Violation(f"text {shown!r}, the tokens and stop strings say {expected!r}")
    if output.outputs[0].stop_reason != stopped:
        raise Violation(f"stop reason {output.outputs[0].stop_reason!r}, expected {stopped!r}")


def decoded(said: bytes, final: bool) -> str:
    """UTF-8 text; an unfinished character at the end counts only if nothing follows."""
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace").decode(said, final)


def stop_strings(factory: Factory, example: tuple[list[str], list[str], bool, int]) -> None:
    """Pieces of text, one a token: whatever the cuts, the text ends where the definition says."""
    pieces, stop, include, min_tokens = example
    checker = StopChecker(stop, include)
    shown, stopped = "", None
    for number, piece in enumerate(pieces, start=1):
        text, stopped = checker.push(piece, number > min_tokens)
        shown += text
        if stopped is not None:
            break
    if stopped is None:
        shown += checker.finish()[0]
    if (shown, stopped) != plain.stop_text(pieces, stop, include, min_tokens):
        expected = plain.stop_text(pieces, stop, include, min_tokens)
        raise Violation(f"pieces {pieces} with stop {stop}: {(shown, stopped)}, expected {expected}")


def drawn_drafts(factory: Factory, example: tuple[Scenario, int]) -> None:
    """With a draft model that draws, tokens are those of one position after the other, whatever batch, memory and K."""
    scenario, most = example
    assert isinstance(scenario.model, TinyModel)
    model = loaded(scenario.model)
    small = loaded(replace(scenario.model, layers="c", seed=7))
    drafter = ModelDrafter(small, model, "random", block_size=2, num_blocks=200)
    sizes = {**scenario.sizes, "num_speculative_tokens": most, "check": True}
    engine = Engine(model, drafter=drafter, **sizes)
    for one in scenario.requests:
        engine.add_request(one.request_id, one.prompt_token_ids, one.params, one.priority, one.cache_salt)
    outputs = {output.request_id: output for output in engine.stream()}
    for one in scenario.requests:
        seed = request_seed(one.params, 0, one.request_id)
        for answer in outputs[one.request_id].outputs:
            slow = ModelDrafter(small, model, "random", num_blocks=200, prefix_caching=False)
            steps = alone(model, one.prompt_token_ids, one.params, seed, answer.index, slow)
            expected = tuple(step.token_id for step in steps)
            if answer.token_ids != expected:
                raise Violation(f"request {one.request_id}, sample {answer.index}: {answer.token_ids}, not {expected}")


def split_characters(factory: Factory, example: tuple[bytes, bool]) -> None:
    """Bytes, one token each, as the tokenizer's stream decodes them: characters cut between tokens come whole."""
    said, _ = example
    tokenizer = trained().tokenizer
    ids = [byte_token(byte) for byte in said]
    stream = tokenizer.stream()
    shown = "".join(stream.push(token) for token in ids) + stream.finish()
    if shown != said.decode("utf-8", "replace"):
        raise Violation(f"bytes {said!r} are shown as {shown!r}")


@cache
def byte_token(byte: int) -> int:
    tokenizer = trained().tokenizer
    for token_id in range(trained().config.vocab_size):
        if tokenizer.token_bytes(token_id) == bytes([byte]):
            return token_id
    raise AssertionError(f"the fixture's tokenizer has no token for byte {byte}")


def one_bos(factory: Factory, text: str) -> None:
    """A prompt and a chat begin with the BOS token, once; plain text with a BOS of its own gets no second one."""
    model = trained()
    bos = model.config.bos_token_id
    assert bos is not None
    for ids in (model.prompt_ids(text), model.tokenizer.encode_chat([{"role": "user", "content": text}])):
        if ids[0] != bos or ids.count(bos) != 1:
            raise Violation(f"text {text!r}: {ids.count(bos)} BOS tokens in {ids}, expected one, at the beginning")
