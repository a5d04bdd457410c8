"""Prompt lookup, draft models, stop strings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from internal_properties.internal import internal
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
from lfm2np.suite.properties.property import Violation
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
    """What followed the first place where the longest suffix stood before; a script goes on where the output ends."""
    ids, longest, shortest, count, script = example
    shortest = min(shortest, longest)
    context = DraftContext("a", ids, 1, SamplingParams(), 0, 0, count)
    proposal: Ids = ()
    for size in range(longest, shortest - 1, -1):
        places = [at for at in range(len(ids) - size) if ids[at : at + size] == ids[len(ids) - size :]]
        if places and size < len(ids) and not proposal:
            proposal = ids[places[0] + size : places[0] + size + count]
    (draft,) = NgramDrafter(longest, shortest).propose([context])
    if draft.token_ids != proposal or draft.weights is not None:
        raise Violation(f"prompt lookup in {ids}: {draft.token_ids}, by definition {proposal}")
    usual = NgramDrafter()
    if usual.is_random or ScriptedDrafter({}).is_random:
        raise Violation("what is looked up, or read from a script, is not drawn")
    if (usual.longest, usual.shortest) != (4, 1):
        raise Violation(f"prompt lookup of {usual.longest} to {usual.shortest} tokens, expected 4 to 1")
    (scripted, nothing) = ScriptedDrafter({"a": script}).propose([context, replace(context, request_id="b")])
    rest = script[len(ids) - 1 :][:count]
    if scripted.token_ids != rest or nothing.token_ids != ():
        raise Violation(f"script {script} after {len(ids) - 1} tokens: {scripted.token_ids}, expected {rest}")


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
    """Pieces of text, one a token: whatever the cuts, the text ends where the definition says."""
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
    if (shown, stopped) != expected:
        raise Violation(f"pieces {pieces} with stop {stop}: {(shown, stopped)}, expected {expected}")


@internal(
    "drawn-drafts-are-of-their-place",
    "With drafts drawn at random, a token depends on prefix, parameters, seed and draft model, on nothing else.",
    1,
    lambda: st.tuples(scenarios(most=2), st.integers(1, 4)),
    weight=2.0,
)
def drawn_drafts(example: tuple[Scenario, int]) -> None:
    """With a draft model that draws, tokens are those of one position after the other, whatever batch, memory and K."""
    scenario, most = example
    assert isinstance(scenario.model, TinyModel)
    model = loaded(scenario.model)
    small = loaded(replace(scenario.model, layers="c", seed=7))
    drafter = ModelDrafter(small, model, "random", block_size=2, num_blocks=200)
    sizes = {**scenario.sizes, "num_speculative_tokens": most}
    engine = AuditedEngine(model, drafter=drafter, **sizes)
    for request in scenario.requests:
        engine.add_request(
            request.request_id, request.prompt_token_ids, request.params, request.priority, request.cache_salt
        )
    outputs = {output.request_id: output for output in engine.stream()}
    for request in scenario.requests:
        seed = request_seed(request.params, 0, request.request_id)
        for answer in outputs[request.request_id].outputs:
            slow = ModelDrafter(small, model, "random", num_blocks=200, prefix_caching=False)
            steps = steps_alone(model, request.prompt_token_ids, request.params, seed, answer.index, slow)
            expected = tuple(step.token_id for step in steps)
            if answer.token_ids != expected:
                raise Violation(
                    f"request {request.request_id}, sample {answer.index}: {answer.token_ids}, not {expected}"
                )


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
    expected = tuple(step.token_id for step in steps)
    if draft.token_ids != expected:
        raise Violation(f"request {context.request_id}: drafts {draft.token_ids}, the draft model says {expected}")
    if (draft.weights is not None) != (drawn and bool(steps)):
        raise Violation(f"request {context.request_id}: weights {draft.weights}, drawn: {drawn}")
    for index, (step, weights) in enumerate(zip(steps, draft.weights or (), strict=drawn)):
        if weights.tolist() != distribution(step.row, params, (), (), ()).tolist():
            raise Violation(f"request {context.request_id}, draft {index}: not the weights that it was drawn from")
