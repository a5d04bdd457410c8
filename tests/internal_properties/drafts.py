"""Prompt lookup, draft models, stop strings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from internal_properties.internal import internal, require
from internal_properties.outputs import add
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.drafters import Draft, DraftContext, Drafter, NgramDrafter, ScriptedDrafter
from lfm2np.engine.loading import Model
from lfm2np.engine.sampler import Chosen
from lfm2np.engine.sampling.choice import distribution, request_seed
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sampling.stop_strings import StopChecker
from lfm2np.engine.sequence import make_sequences
from lfm2np.engine.sequential import alone
from lfm2np.suite.audit import AuditedEngine
from lfm2np.suite.properties.endings import stop_text
from lfm2np.suite.strategies.scenarios import Scenario, models, prompts, sampling_params, scenarios
from lfm2np.suite.strategies.tiny_models import TinyModel, loaded

Ids = tuple[int, ...]


@internal(
    "lookup-is-its-definition",
    "Prompt lookup proposes what followed the longest suffix where it stood first; a script, its own tokens.",
    2,
    lambda: st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple),
        st.sampled_from([4, 1, 2, 3]),
        st.integers(1, 2),
        st.integers(0, 4),
        st.lists(st.integers(0, 9), max_size=14).map(tuple),
    ),
    weight=20.0,
)
def lookup_is_its_definition(example: tuple[Ids, int, int, int, tuple[int, ...]]) -> None:
    ids, longest, shortest, count, script = example
    shortest = min(shortest, longest)
    context = DraftContext("a", ids, 1, SamplingParams(), 0, 0, count)
    proposal: Ids = ()
    for size in range(longest, shortest - 1, -1):
        places = [at for at in range(len(ids) - size) if ids[at : at + size] == ids[len(ids) - size :]]
        if places and size < len(ids) and not proposal:
            proposal = ids[places[0] + size : places[0] + size + count]
    (draft,) = NgramDrafter(longest, shortest).propose([context])
    require((draft.token_ids, draft.weights), (proposal, None), "draft", f"prompt lookup in {ids}")
    usual = NgramDrafter()
    require((usual.longest, usual.shortest), (4, 1), "n-grams", "prompt lookup")
    require((usual.is_random, ScriptedDrafter({}).is_random), (False, False), "are drawn:", "lookup and script")
    (scripted, nothing) = ScriptedDrafter({"a": script}).propose([context, replace(context, request_id="b")])
    rest = script[len(ids) - 1 :][:count]
    require((scripted.token_ids, nothing.token_ids), (rest, ()), f"after {len(ids) - 1} tokens:", f"script {script}")


@st.composite
def stopped_texts(draw: st.DrawFn) -> tuple[list[str], list[str], bool, int, int]:
    """A text cut into tokens, stop strings of its letters, `include`, the tokens that can't stop, and characters of the
    last token that come with `finish`, as those of an unfinished character do."""
    text = draw(st.text("ab\ufffd", max_size=12))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop = draw(st.lists(st.text("ab\ufffd", min_size=1, max_size=4), max_size=3))
    return pieces, stop, draw(st.booleans()), draw(st.integers(0, len(pieces) + 1)), draw(st.sampled_from([0, 0, 1, 5]))


@internal(
    "stop-strings-are-found",
    "A stop string ends the text across any token border, inside a token too, and not before min_tokens.",
    2,
    stopped_texts,
    weight=20.0,
    bugs=("vLLM 3572",),
)
def stop_strings(example: tuple[list[str], list[str], bool, int, int]) -> None:
    pieces, stop, include, min_tokens, late = example
    checker = StopChecker(stop, include)
    border = max(len(pieces[-1]) - late, 0)
    shown, stopped = "", None
    for number, piece in enumerate([*pieces[:-1], pieces[-1][:border]], start=1):
        text, stopped = checker.push(piece, number > min_tokens)
        shown += text
        if stopped is not None:
            break
    if stopped is None:
        text, stopped = checker.finish(pieces[-1][border:])
        shown += text
    expected = stop_text(pieces, stop, include, min_tokens)
    require((shown, stopped), expected, f"with stop {stop}:", f"pieces {pieces}")


@internal(
    "drawn-drafts-are-of-their-place",
    "With drafts drawn at random, a token depends on prefix, parameters, seed and draft model, on nothing else.",
    1,
    lambda: st.tuples(scenarios(most=2), st.integers(1, 4)),
    weight=2.0,
)
def drawn_drafts(example: tuple[Scenario, int]) -> None:
    scenario, most = example
    assert isinstance(scenario.model, TinyModel)
    model = loaded(scenario.model)
    small = loaded(replace(scenario.model, layers="c", seed=7))
    drafter = ModelDrafter(small, model, "random", block_size=2, num_blocks=200)
    sizes = {**scenario.sizes, "num_speculative_tokens": most}
    engine = AuditedEngine(model, drafter=drafter, **sizes)
    for request in scenario.requests:
        add(engine, request)
    outputs = {output.request_id: output for output in engine.stream()}
    for request in scenario.requests:
        seed = request_seed(request.params, 0, request.request_id)
        for answer in outputs[request.request_id].outputs:
            slow = ModelDrafter(small, model, "random", num_blocks=200, prefix_caching=False)
            steps = steps_alone(model, request.prompt_token_ids, request.params, seed, answer.index, slow)
            expected = tuple(step.token_id for step in steps)
            require(answer.token_ids, expected, f"sample {answer.index}:", f"request {request.request_id}")


def steps_alone(
    model: Model, ids: Sequence[int], params: SamplingParams, seed: int, index: int, drafter: Drafter | None = None
) -> list[Chosen]:
    """Of one sample."""
    (sample,) = make_sequences(model, "0", ids, replace(params, n=1), 0, "", 0, 0.0)
    sample.seed, sample.index = seed, index
    return list(alone(model, sample, drafter))


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


@internal(
    "draft-models-propose",
    "A draft model proposes what it says alone, as far as there is room, and the weights of what it drew.",
    2,
    draft_contexts,
    weight=3.0,
    bugs=("vLLM 50272",),
)
def draft_models_propose(example: tuple[TinyModel, tuple[DraftContext, ...], str, int]) -> None:
    tiny, contexts, sampling, num_blocks = example
    model, block_size = loaded(tiny), 4
    drafter = ModelDrafter(model, model, sampling, block_size, num_blocks=num_blocks)
    require(drafter.is_random, sampling == "random", "is random:", f"sampling {sampling!r}")
    for _ in range(2):  # the second time over what its cache holds
        drafts = drafter.propose(contexts)
        require(len(drafts), len(contexts), "drafts", "contexts")
        for context, draft in zip(contexts, drafts, strict=True):
            require_draft(model, context, draft, sampling, min(tiny.positions, num_blocks * block_size + 1))


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
        steps = steps_alone(model, context.token_ids, params, seed, 0)
    who = f"request {context.request_id}"
    require(draft.token_ids, tuple(step.token_id for step in steps), "drafts", who)
    require(draft.weights is not None, drawn and bool(steps), "has weights:", who)
    for step, weights in zip(steps, draft.weights or (), strict=drawn):
        require(weights.tolist(), distribution(step.row, params, (), (), ()).tolist(), "weights of a draft", who)
