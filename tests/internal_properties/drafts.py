"""Demands on this package's own parts, which other engines are not asked: machines, drafters, text."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from lfm2np.conformance.demands import texts
from lfm2np.conformance.properties.property import Machine, Property
from lfm2np.conformance.properties.engine_machine import engine_machine
from internal_properties.state_machines.scheduler_machine import PoolMachine, SchedulerMachine
from lfm2np.conformance.properties.driver import Violation
from lfm2np.conformance.strategies.scenarios import scenarios
from lfm2np.engine_protocol import Factory
from lfm2np.sampling.params import SamplingParams
from lfm2np.speculation.drafters import DraftContext, NgramDrafter, ScriptedDrafter

Ids = tuple[int, ...]


def lookup_is_its_definition(factory: Factory, example: tuple[Ids, int, int, int, tuple[int, ...]]) -> None:
    """What followed the first place where the longest suffix stood before; a script goes on where the output ends."""
    ids, longest, shortest, count, script = example
    shortest = min(shortest, longest)
    one = DraftContext("a", ids, 1, SamplingParams(), 0, 0, count)
    found: Ids = ()
    for size in range(longest, shortest - 1, -1):
        places = [at for at in range(len(ids) - size) if ids[at : at + size] == ids[len(ids) - size :]]
        if places and size < len(ids) and not found:
            found = ids[places[0] + size : places[0] + size + count]
    (draft,) = NgramDrafter(longest, shortest).propose([one])
    if draft.token_ids != found or draft.weights is not None:
        raise Violation(f"prompt lookup in {ids}: {draft.token_ids}, by definition {found}")
    usual = NgramDrafter()
    if usual.is_random or ScriptedDrafter({}).is_random:
        raise Violation("what is looked up, or read from a script, is not drawn")
    if (usual.longest, usual.shortest) != (4, 1):
        raise Violation(f"prompt lookup of {usual.longest} to {usual.shortest} tokens, expected 4 to 1")
    (scripted, nothing) = ScriptedDrafter({"a": script}).propose([one, replace(one, request_id="b")])
    rest = script[len(ids) - 1 :][:count]
    if scripted.token_ids != rest or nothing.token_ids != ():
        raise Violation(f"script {script} after {len(ids) - 1} tokens: {scripted.token_ids}, expected {rest}")


INTERNALS: tuple[Property | Machine, ...] = (
    Machine(
        "pool-machine",
        "The block pool does what a plain list and a dictionary do; misuse is refused and changes nothing.",
        5,
        ("own",),
        ("mistral.rs 2357", "sglang-jax 982", "vLLM 4764"),
        lambda factory, adapt: PoolMachine,
        steps=25,
    ),
    Machine(
        "scheduler-machine",
        "Over a model whose tokens encode what memory holds, any calls in any order give right tokens and memory.",
        5,
        ("own",),
        ("vLLM 4764", "vLLM 12621", "vLLM 5349", "vLLM 56525", "SGLang 38319", "vLLM 45357"),
        lambda factory, adapt: SchedulerMachine,
        steps=18,
        weight=8.0,
    ),
    Machine(
        "engine-machine",
        "Any calls in any order: every token and logit is the reference's.",
        2,
        ("steps",),
        ("vLLM 43090", "vLLM 5349", "SGLang 16067"),
        engine_machine,
        steps=20,
        weight=1.0,
    ),
    Property(
        "lookup-is-its-definition",
        "Prompt lookup proposes what followed the longest suffix where it stood first; a script, its own tokens.",
        2,
        ("own",),
        (),
        lambda: st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple),
            st.sampled_from([4, 1, 2, 3]),
            st.integers(1, 2),
            st.integers(0, 4),
            st.lists(st.integers(0, 9), max_size=14).map(tuple),
        ),
        lookup_is_its_definition,
        20.0,
    ),
    Property(
        "stop-strings-are-found",
        "A stop string ends the text across any token border, inside a token too, and not before min_tokens.",
        2,
        ("own",),
        ("vLLM 3572",),
        lambda: st.tuples(
            st.lists(st.text("a→", max_size=6), max_size=6),
            st.lists(st.text("a→", min_size=1, max_size=6), min_size=1, max_size=2),
            st.booleans(),
            st.integers(0, 3),
        ),
        texts.stop_strings,
        20.0,
    ),
    Property(
        "drawn-drafts-are-of-their-place",
        "With drafts drawn at random, a token depends on prefix, parameters, seed and draft model, on nothing else.",
        1,
        ("own", "drawn"),
        (),
        lambda: st.tuples(scenarios(most=2), st.integers(1, 4)),
        texts.drawn_drafts,
        1.0,
    ),
    Property(
        "draft-models-propose",
        "A draft model proposes what it says alone, as far as there is room, and the weights of what it drew.",
        2,
        ("own", "drawn"),
        ("vLLM 50272",),
        texts.draft_contexts,
        texts.draft_models_propose,
        3.0,
    ),
    Property(
        "characters-come-whole",
        "A character that is cut between tokens is shown when it is complete.",
        2,
        ("own",),
        ("vllm-mlx 109", "vLLM 48853"),
        lambda: st.tuples(
            st.one_of(st.binary(max_size=8), st.text("é→𝄞a ", max_size=4).map(lambda t: t.encode())), st.just(True)
        ),
        texts.split_characters,
        2.0,
    ),
    Property(
        "one-bos",
        "A prompt has one BOS token, a chat too.",
        2,
        ("own",),
        ("vLLM 16081", "vLLM 55288", "SGLang 888"),
        lambda: st.sampled_from(["Hi", "sort: 3 1 2", " ", "é", "a\nb"]),
        texts.one_bos,
        0.1,
    ),
)
