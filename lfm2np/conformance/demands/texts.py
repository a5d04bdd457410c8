"""Requests whose text matters, and checks on text and drafts of our own engine: characters, BOS, random drafts."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from lfm2np import plain
from lfm2np.checkpoint.loaded import trained_fixture
from lfm2np.conformance.trials.driver import Violation
from lfm2np.conformance.trials.models import Checkpoint, TinyModel, loaded
from lfm2np.conformance.trials.strategies import Scenario, models, prompts, sampling_params, schedules
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.engine import Engine
from lfm2np.engine.sequential import alone
from lfm2np.engine_protocol import Factory, Request
from lfm2np.loading import Model, load
from lfm2np.sampling.choice import distribution, request_seed
from lfm2np.sampling.params import SamplingParams
from lfm2np.sampling.stop_strings import StopChecker
from lfm2np.speculation.drafters import Draft, DraftContext

Ids = tuple[int, ...]


@cache
def trained() -> Model:
    """The only fixture with a tokenizer."""
    return load()


COUNTS = ("2", " 2", "2 3", "24", "5 26", "6 27 2", "27", "é", "\ufffd", "zz")
COPIES = ("i", "iv", "vu", "zo", "a", " s", "e", "mu re", "u z", "o sa d")
MOST_SAID = 18


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
    ops = draw(schedules(len(requests), kinds, steps=9)) if kinds else ()
    return Scenario(Checkpoint(str(trained_fixture())), requests, sizes, ops)


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
def said_by_a_user(text: str) -> Ids:
    """The prompt of a conversation; kept, as each rendering starts a process."""
    return tuple(trained().tokenizer.encode_chat([{"role": "user", "content": text}]))


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


@st.composite
def draft_contexts(draw: st.DrawFn) -> tuple[TinyModel, tuple[DraftContext, ...], str, int]:
    """A small model, what a step may ask of it, how it draws, and the blocks of its cache."""
    contexts = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        params = draw(sampling_params())
        ids = draw(prompts())
        index, count = draw(st.integers(0, 2)), draw(st.integers(0, 4))
        contexts.append(DraftContext(name, ids, len(ids), params, draw(st.integers(0, 2**64 - 1)), index, count))
    model = replace(draw(models()), positions=draw(st.sampled_from([96, 8, 12])))
    return model, tuple(contexts), draw(st.sampled_from(["greedy", "random"])), draw(st.sampled_from([200, 2]))


def draft_models_propose(factory: Factory, example: tuple[TinyModel, tuple[DraftContext, ...], str, int]) -> None:
    """What it says alone, as far as its context and its cache go; drawn, one token more, and the weights of each."""
    tiny, contexts, sampling, num_blocks = example
    model, block_size = loaded(tiny), 4
    drafter = ModelDrafter(model, model, sampling, block_size, num_blocks=num_blocks)
    if drafter.is_random != (sampling == "random"):
        raise Violation(f"sampling {sampling!r}, but is_random is {drafter.is_random}")
    for _ in range(2):  # the second time over what its cache holds
        drafts = drafter.propose(contexts)
        if len(drafts) != len(contexts):
            raise Violation(f"{len(drafts)} drafts for {len(contexts)} contexts")
        for one, draft in zip(contexts, drafts, strict=True):
            require_draft(model, one, draft, sampling, min(tiny.positions, num_blocks * block_size + 1))


def require_draft(model: Model, context: DraftContext, draft: Draft, sampling: str, longest: int) -> None:
    """`longest` is the length of a sequence whose last token needs no place in the draft model's cache."""
    asked = context.params
    drawn = sampling == "random" and asked.temperature != 0.0
    params = SamplingParams(
        temperature=asked.temperature if drawn else 0.0,
        **{name: getattr(asked, name) for name in ("top_k", "top_p", "min_p", "logit_bias", "profile")},
        **{name: getattr(asked, name) for name in ("allowed_token_ids", "banned_token_ids")},
        max_tokens=max(1, min(context.count + drawn, longest - len(context.token_ids))),
        ignore_eos=True,
    )
    said = hashlib.sha256(b"draft" + context.seed.to_bytes(8, "big") + context.sample_index.to_bytes(8, "big"))
    seed = int.from_bytes(said.digest()[:8], "big")
    steps = []
    if context.count + drawn and longest > len(context.token_ids):
        steps = list(alone(model, context.token_ids, params, seed, 0))
    expected = tuple(step.token_id for step in steps)
    if draft.token_ids != expected:
        raise Violation(f"request {context.request_id}: drafts {draft.token_ids}, the draft model says {expected}")
    if (draft.weights is not None) != (drawn and bool(steps)):
        raise Violation(f"request {context.request_id}: weights {draft.weights}, drawn: {drawn}")
    for index, (step, weights) in enumerate(zip(steps, draft.weights or (), strict=drawn)):
        if weights.tolist() != distribution(step.logits, params, (), (), ()).tolist():
            raise Violation(f"request {context.request_id}, draft {index}: not the weights that it was drawn from")


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
