"""All properties, in the order in which they are tried: what is drawn for each, and the check."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Request
from lfm2np.suite.properties import answer_checks, checks
from lfm2np.suite.properties.engine_machine import engine_machine
from lfm2np.suite.properties.property import Machine, Property
from lfm2np.suite.strategies.lengths import ALPHABET, Lengths
from lfm2np.suite.strategies.scenarios import (
    MOST_REQUESTS,
    MOST_TOKENS,
    Scenario,
    crowds,
    families,
    greedy_params,
    long_prompts,
    models,
    models_at,
    prompts,
    requests,
    sampling_params,
    scenarios,
    scenarios_that_overflow,
    schedules,
    sizes,
)
from lfm2np.suite.strategies.talks import split_characters, talks

PLAIN_LENGTH = 128  # of the second implementation, which is in plain Python


@st.composite
def reordered(draw: st.DrawFn, lengths: Lengths | None = None) -> tuple[Scenario, list[int], tuple[Any, ...]]:
    scenario = draw(scenarios(lengths=lengths))
    order = draw(st.permutations(range(len(scenario.requests))))
    return scenario, list(order), draw(schedules(len(order), ()))


@st.composite
def overflowing(draw: st.DrawFn) -> tuple[Scenario, int, bool]:
    scenario = draw(scenarios_that_overflow())
    place = draw(st.integers(0, len(scenario.requests)))
    return scenario, place, draw(st.booleans())


def sequences(lengths: Lengths | None = None) -> st.SearchStrategy[tuple[Any, ...]]:
    if lengths is None:
        return st.tuples(models(), token_ids())
    few = replace(lengths, longest=min(lengths.longest, PLAIN_LENGTH))
    return st.tuples(models_at(few), long_prompts(few, few.longest - 1).filter(lambda ids: len(ids) > 1))


def token_ids() -> st.SearchStrategy[tuple[int, ...]]:
    free = st.lists(st.sampled_from((*ALPHABET, 6, 9)), min_size=2, max_size=9).map(tuple)
    return st.one_of(prompts(), free).filter(lambda ids: len(ids) > 1)


def greedily(params: SamplingParams) -> SamplingParams:
    return replace(params, temperature=0.0, n=1)


PROCESSORS: tuple[dict[str, Any], ...] = (
    *({}, {"top_k": 3}, {"top_p": 0.7}, {"top_p": 0.4}, {"min_p": 0.2}),
    *({"repetition_penalty": 1.5}, {"logit_bias": {6: 2.0}}, {"banned_token_ids": (7,)}),
)


@st.composite
def single_requests(draw: st.DrawFn) -> Scenario:
    """One request with one processor at most, whose tokens an engine may draw with noise of its own."""
    processor = draw(st.sampled_from(PROCESSORS))
    temperature, most = draw(st.sampled_from([1.0, 2.5, 0.5])), draw(st.integers(1, MOST_TOKENS))
    params = SamplingParams(temperature=temperature, max_tokens=most, logprobs=0, prompt_logprobs=0, **processor)
    return Scenario(draw(models()), (Request("a", draw(prompts()), params),), any_noise=True)


def ending_requests() -> st.SearchStrategy[Scenario]:
    """Requests whose tokens are drawn from flat distributions, so that every token that ends them comes."""

    def flat(params: SamplingParams, temperature: float) -> SamplingParams:
        return replace(
            params, temperature=temperature, stop_token_ids=(*params.stop_token_ids, 3), max_tokens=MOST_TOKENS
        )

    params = st.builds(flat, sampling_params(), st.sampled_from([1e6, 2.5, 1.0]))
    return scenarios(params, most=3).map(lambda scenario: replace(scenario, any_noise=True))


at_lengths = partial(Property, at_length=True)  # also with examples at an engine's own lengths
ALL: tuple[Property | Machine, ...] = (
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
    at_lengths(
        "equals-reference",
        "Every token, and every logit that the engine shows, is the reference's.",
        2,
        ("generate",),
        ("transformers 46588", "vLLM 32118", "SGLang 24717", "mlx-lm 1169"),
        lambda lengths=None: scenarios(greedy_params(), lengths=lengths),
        checks.equals_reference,
    ),
    at_lengths(
        "batched-is-sequential",
        "A request in a batch gives what it gives alone.",
        1,
        ("generate",),
        ("transformers 41790", "mlx-vlm 1946", "mistral.rs 2306", "vLLM 5639"),
        lambda lengths=None: scenarios(greedy_params(), lengths=lengths),
        checks.batched_is_sequential,
        0.5,
    ),
    at_lengths(
        "every-schedule",
        "Whatever arrives, is aborted or sampled when, under any policy and memory: every token is the reference's.",
        2,
        ("steps",),
        ("vLLM 5349", "vLLM 43090", "vLLM 56196", "SGLang 34760", "nano-vllm 217"),
        lambda lengths=None: scenarios(kinds=("abort",), lengths=lengths),
        checks.every_schedule,
        3.0,
    ),
    at_lengths(
        "chunked-is-whole",
        "A prompt in chunks gives what it gives whole.",
        1,
        ("generate", "max_num_batched_tokens"),
        ("transformers 45513", "transformers 46084", "vLLM 56196"),
        lambda lengths=None: scenarios(lengths=lengths),
        checks.chunked_is_whole,
        0.5,
    ),
    at_lengths(
        "order-and-arrival",
        "Neither the order of requests nor the steps at which they arrive change an answer.",
        1,
        ("steps",),
        ("vLLM 5639", "R-KV 25"),
        reordered,
        checks.other_order,
        0.5,
    ),
    at_lengths(
        "neighbours",
        "Other neighbours do not change an answer.",
        1,
        ("generate",),
        ("mlx-vlm 1946", "vLLM 51226"),
        lambda lengths=None: st.tuples(scenarios(lengths=lengths), requests(most=3)),
        checks.neighbours,
        0.5,
    ),
    at_lengths(
        "sizes",
        "Block size, pool size, step size, caching and policy do not change an answer.",
        1,
        ("generate", "block_size"),
        ("vLLM 27547", "vLLM 16832", "nano-vllm 274"),
        lambda lengths=None: st.tuples(scenarios(lengths=lengths), sizes(lengths)),
        checks.other_sizes,
        0.5,
    ),
    at_lengths(
        "preempted-is-undisturbed",
        "A request that loses its memory and goes on later gives what it gives undisturbed.",
        1,
        ("steps", "preempt"),
        ("vLLM 5349", "vLLM 16832", "vllm-gaudi 524", "nano-vllm 217", "vLLM 8844"),
        lambda lengths=None: scenarios(kinds=("preempt",), lengths=lengths),
        checks.preempted,
        0.5,
    ),
    at_lengths(
        "cold-is-warm",
        "An answer does not depend on what the prefix cache holds, or whether there is one.",
        1,
        ("generate", "prefix_caching"),
        ("vLLM 43090", "vLLM 47861", "vLLM 12621", "vLLM 44701", "vLLM 3251", "SGLang 38319"),
        lambda lengths=None: scenarios(lengths=lengths),
        checks.cold_is_warm,
        0.5,
    ),
    at_lengths(
        "forks",
        "A fork goes on as its parent would, or with its own noise; n samples are n requests.",
        2,
        ("steps", "fork"),
        ("vLLM 417", "transformers 46117", "vLLM 8844", "xLLM 1984"),
        lambda lengths=None: scenarios(kinds=("fork",), lengths=lengths),
        checks.every_schedule,
    ),
    at_lengths(
        "aborts-harm-nobody",
        "When a request is aborted, at any moment, the others give what they give without that.",
        7,
        ("steps",),
        ("vLLM 14326", "vLLM 45357", "SGLang 35049", "vLLM 56525"),
        lambda lengths=None: scenarios(kinds=("abort",), lengths=lengths),
        checks.aborts,
        0.5,
    ),
    Property(
        "speculative-is-plain",
        "Drafts, right or wrong, change how long it takes, and no token.",
        1,
        ("generate", "drafter"),
        ("vLLM 44296", "transformers 46937", "vLLM 52942", "vLLM 39273"),
        lambda lengths=None: st.tuples(
            scenarios(lengths=lengths), st.lists(st.booleans(), min_size=1, max_size=4), st.integers(1, 5)
        ),
        checks.speculative,
        at_length=True,
    ),
    Property(
        "text-is-what-the-tokens-say",
        "An answer ends where a stop string says, found across token borders, with drafts too, and says which it was.",
        2,
        ("generate", "stops", "stop-strings", "drawn"),
        ("vLLM 3572", "vLLM 8468", "vLLM 48853"),
        talks,
        checks.equals_reference,
        1.5,
    ),
    Property(
        "text-is-not-taken-back",
        "Text and tokens only grow, step by step; what was held back comes when a request ends, aborted or not.",
        2,
        ("steps", "stops", "stop-strings", "drawn"),
        ("vLLM 3572", "vllm-mlx 109"),
        lambda: talks(("abort", "abort", "fork")),
        checks.every_schedule,
        2.0,
    ),
    at_lengths(
        "seed-of-its-own",
        "With a seed of its own, a request's tokens depend on prompt, parameters and seed, and on nothing else.",
        1,
        ("generate", "sampling", "reference-noise"),
        ("vLLM 51226",),
        lambda lengths=None: scenarios(sampling_params(), most=3, lengths=lengths),
        checks.own_seed,
        0.5,
    ),
    Property(
        "noise-differs",
        "Other seeds, samples, names and positions draw other noise.",
        1,
        ("generate", "sampling", "samples"),
        ("vLLM 51226", "vLLM 31081"),
        models,
        checks.seeds_differ,
        0.2,
    ),
    Property(
        "engine-seed-counts",
        "The engine's seed decides what a request without one draws.",
        1,
        ("generate", "sampling", "seed"),
        (),
        models,
        checks.engine_seed_counts,
        0.2,
    ),
    at_lengths(
        "conservation",
        "At no moment is more free than there is, and in the end everything is.",
        5,
        ("steps", "state"),
        ("SGLang 16067", "mistral.rs 2357", "vLLM 14326", "sglang-jax 982"),
        lambda lengths=None: scenarios(kinds=("abort",), lengths=lengths),
        checks.conservation,
    ),
    at_lengths(
        "memory-is-right",
        "After every step, cached blocks and running requests' memory hold what the reference demands, bit for bit.",
        5,
        ("steps", "verify"),
        ("vLLM 56525", "SGLang 29973", "SGLang 38319", "vLLM 417", "mini-sglang 142"),
        lambda lengths=None: scenarios(kinds=("abort",), most=3, lengths=lengths),
        checks.memory_is_right,
        0.5,
    ),
    at_lengths(
        "progress",
        "Every request ends within a bound, also where memory just fits one of them.",
        7,
        ("steps",),
        ("vLLM 25538", "vLLM 45414", "vLLM 45388", "nano-vllm 274"),
        lambda lengths=None: scenarios(greedy_params(), most=MOST_REQUESTS, lengths=lengths),
        checks.progress,
        0.5,
    ),
    at_lengths(
        "work-adds-up",
        "Budget respected; work done is work needed and what was computed again; metrics are what the trace says.",
        4,
        ("steps", "trace", "metrics"),
        ("vLLM 45238", "vLLM 17305", "transformers 45943"),
        lambda lengths=None: scenarios(kinds=("abort",), lengths=lengths),
        checks.work_adds_up,
    ),
    at_lengths(
        "trace-replays",
        "The trace alone gives every plan, token and ending again.",
        4,
        ("steps", "trace"),
        ("transformers 45943",),
        lambda lengths=None: scenarios(kinds=("abort",), lengths=lengths),
        checks.replays,
        0.5,
    ),
    at_lengths(
        "refusals",
        "What can't be met is refused when it comes, and nobody else notices.",
        7,
        ("generate", "steps", "refusals"),
        ("nano-vllm 274", "vLLM 3239"),
        lambda lengths=None: st.tuples(scenarios(greedy_params(), most=3, lengths=lengths), st.integers(0, 4)),
        checks.refusals,
        0.5,
    ),
    Property(
        "overflow-stays-home",
        "A request whose numbers overflow ends in an error, alone.",
        7,
        ("generate", "steps", "overflow", "drawn"),
        ("llama.cpp 23652",),
        overflowing,
        checks.overflow_stays_home,
        0.5,
    ),
    Property(
        "wrong-drafts-that-overflow",
        "A draft that overflows where the truth does not changes nothing.",
        7,
        ("generate", "drafter", "overflow", "drawn"),
        ("llama.cpp 23652",),
        lambda: st.tuples(scenarios_that_overflow(), st.integers(0, 3)),
        checks.overflowing_drafts,
        0.3,
    ),
    at_lengths(
        "is-lfm2",
        "Log-probabilities are those of a second, plain implementation of LFM2 in float64.",
        2,
        ("score", "drawn"),
        ("ollama37 437", "llama.cpp 17548", "mlx-lm 908"),
        sequences,
        answer_checks.scores_lfm2,
        0.5,
    ),
    at_lengths(
        "generates-lfm2",
        "What is generated, and its log-probabilities, are those of that implementation, too.",
        2,
        ("generate", "drawn"),
        ("ollama37 437", "llama.cpp 17548", "mlx-lm 908"),
        sequences,
        answer_checks.generates_lfm2,
        0.5,
    ),
    Property(
        "requests-end-where-they-must",
        "A request ends with the first token that ends it, for that reason, whatever noise drew its tokens.",
        2,
        ("generate", "stops"),
        ("vLLM 48853",),
        ending_requests,
        answer_checks.ends_where_it_must,
        2.0,
    ),
    Property(
        "characters-come-whole",
        "A character that is cut between tokens is shown when it is complete.",
        2,
        ("generate", "processors", "drawn"),
        ("vllm-mlx 109", "vLLM 48853"),
        split_characters,
        answer_checks.ends_where_it_must,
        1.0,
    ),
    Property(
        "one-bos",
        "A prompt has one BOS token, a chat too, and both are the reference's tokens.",
        2,
        ("encode", "drawn"),
        ("vLLM 16081", "vLLM 55288", "SGLang 888"),
        lambda: st.sampled_from(["Hi", "sort: 3 1 2", " ", "é", "a\nb"]),
        answer_checks.has_one_bos,
        0.1,
    ),
    Property(
        "processors-are-their-definition",
        "A greedy token is the likeliest after penalties, biases and masks, of equal ones the lowest id.",
        2,
        ("generate", "processors"),
        ("vLLM 5639",),
        lambda: scenarios(sampling_params(1).map(greedily), most=3),
        answer_checks.follows_its_processors,
        4.0,
    ),
    Property(
        "draws-are-distributed",
        "Tokens are drawn with the documented probabilities, by whatever noise.",
        2,
        ("generate", "sampling"),
        ("vLLM 5639",),
        single_requests,
        answer_checks.draws_the_distribution,
        0.75,
    ),
    Property(
        "logprobs-are-raw",
        "Log-probabilities are those of the raw logits, before temperature, penalties, biases and filters.",
        2,
        ("generate", "sampling", "logprobs", "drawn"),
        (),
        single_requests,
        answer_checks.has_raw_logprobs,
        1.0,
    ),
    Property(
        "prefix-hits",
        "What follows full blocks that an earlier request had, too, is the reference's, taken from a cache or not.",
        5,
        ("generate",),
        ("vLLM 43090", "vLLM 47861", "SGLang 38319"),
        families,
        checks.after_prefix_hits,
        only_at_length=True,
    ),
    Property(
        "wide-batches",
        "In a batch of more than eight, up to eighteen, every token is the reference's.",
        1,
        ("generate",),
        ("mlx-vlm 1946",),
        crowds,
        checks.in_wide_batches,
        only_at_length=True,
    ),
)


def by_id(property_id: str) -> Property | Machine:
    """RequestError for an id that no property has."""
    for candidate in ALL:
        if candidate.id == property_id:
            return candidate
    raise RequestError(f"property {property_id!r}: expected one of {', '.join(each.id for each in ALL)}")
