"""All properties, in the order in which they are tried: what is drawn for each, and the check.

None implies another: that a batch gives what its requests give alone, chunks what a whole prompt gives, a preempted
request what an undisturbed one gives, and so on, all follow from "every answer is the reference's" under any sizes,
neighbours and schedule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Request
from lfm2np.suite.properties import checks
from lfm2np.suite.properties.property import Property
from lfm2np.suite.strategies.lengths import ALPHABET, Lengths, at_lengths
from lfm2np.suite.strategies.scenarios import (
    MOST_TOKENS,
    Scenario,
    crowds,
    greedy_params,
    long_prompts,
    models,
    poisoned,
    prompts,
    sampling_params,
    scenarios,
    shared_prefixes,
)
from lfm2np.suite.strategies.talks import split_characters, talks

DISTURBANCES = ("abort", "preempt", "fork")


@st.composite
def overflowing(draw: st.DrawFn) -> tuple[Scenario, int, bool]:
    scenario = draw(poisoned(most=3))
    place = draw(st.integers(0, len(scenario.requests)))
    return scenario, place, draw(st.booleans())


def drafted(lengths: Lengths | None = None) -> st.SearchStrategy[tuple[Scenario, list[bool], int]]:
    """Which drafts are wrong, and how many are proposed at once."""
    runs = st.one_of(scenarios(lengths=lengths), poisoned(lengths=lengths))
    return st.tuples(runs, st.lists(st.booleans(), min_size=1, max_size=4), st.integers(1, 5))


def sequences(lengths: Lengths | None = None) -> st.SearchStrategy[tuple[Any, ...]]:
    free = st.lists(st.sampled_from((*ALPHABET, 6, 9)), min_size=2, max_size=9).map(tuple)
    ids = st.one_of(prompts(), free) if lengths is None else long_prompts(lengths, lengths.longest - 1)
    return st.tuples(models(lengths), ids.filter(lambda ids: len(ids) > 1))


PROCESSORS: tuple[dict[str, Any], ...] = (
    *({}, {"top_k": 3}, {"top_p": 0.7}, {"top_p": 0.4}, {"min_p": 0.2}),
    *({"repetition_penalty": 1.5}, {"logit_bias": {6: 2.0}}, {"banned_token_ids": (7,)}),
)


@st.composite
def single_requests(draw: st.DrawFn) -> Scenario:
    """One request with one processor at most, whose tokens an engine may draw with noise of its own."""
    params = SamplingParams(temperature=draw(st.sampled_from([1.0, 2.5, 0.5])), **draw(st.sampled_from(PROCESSORS)))
    return Scenario(draw(models()), (Request("a", draw(prompts()), params),), any_noise=True)


def ending_requests() -> st.SearchStrategy[Scenario]:
    """Requests whose tokens are drawn from flat distributions, so that every token that ends them comes."""

    def flat(params: SamplingParams, temperature: float) -> SamplingParams:
        stops = (*params.stop_token_ids, 3)
        asked = replace(params, stop_token_ids=stops, max_tokens=MOST_TOKENS, logprobs=0, prompt_logprobs=0)
        return replace(asked, temperature=temperature)

    params = st.builds(flat, sampling_params(), st.sampled_from([1e6, 2.5, 1.0]))
    return scenarios(params, most=3).map(lambda scenario: replace(scenario, any_noise=True))


def noisy(model: Any) -> Scenario:
    """Requests with seeds and without, alike but for these and their names, whose tokens are all equally likely."""
    params = SamplingParams(temperature=1e6, n=2, max_tokens=12, ignore_eos=True)
    seeds = {"a": 1, "b": 2, "c": None, "d": None}
    requests = tuple(Request(name, (3, 4), replace(params, seed=seed)) for name, seed in seeds.items())
    return Scenario(model, requests, {"seed": 1}, any_noise=True)


ALL: tuple[Property, ...] = (
    Property(
        "equals-reference",
        "Every token and every logit that the engine shows is the reference's, whatever batch, chunks and parameters.",
        2,
        ("generate",),
        ("transformers 46588", "vLLM 32118", "transformers 41790", "mlx-vlm 1946", "transformers 45513", "vLLM 27547"),
        at_lengths(lambda at: scenarios(st.one_of(greedy_params(), sampling_params()), lengths=at)),
        checks.equals_reference,
        10.0,
    ),
    Property(
        "every-schedule",
        "Whatever is added, aborted, preempted or forked when, under any policy: all ends, and as in the reference.",
        2,
        ("steps",),
        ("vLLM 5349", "vLLM 43090", "vLLM 56196", "SGLang 34760", "nano-vllm 217", "vLLM 14326", "vLLM 417"),
        at_lengths(lambda at: scenarios(kinds=DISTURBANCES, lengths=at)),
        checks.every_schedule,
        16.0,
    ),
    Property(
        "speculative-is-plain",
        "Drafts, right, wrong or overflowing, change how long it takes, and no token.",
        1,
        ("generate", "drafter"),
        ("vLLM 44296", "transformers 46937", "vLLM 52942", "vLLM 39273", "llama.cpp 23652"),
        at_lengths(drafted),
        checks.with_drafts,
        3.0,
    ),
    Property(
        "text-is-what-the-tokens-say",
        "Text comes by whole characters, only grows, and ends where a stop string or an abort says, with drafts too.",
        2,
        ("generate", "stops"),
        ("vLLM 3572", "vLLM 8468", "vLLM 48853", "vllm-mlx 109"),
        lambda _: st.one_of(split_characters(), *(talks(kinds) for kinds in (("abort", "fork"), ("abort",)))),
        checks.in_steps_where_it_can,
        4.0,
    ),
    Property(
        "any-noise",
        "Whatever noise drew tokens, the first that ends a request does, and log-probabilities are of raw logits.",
        2,
        ("generate", "sampling"),
        ("vLLM 48853",),
        lambda _: ending_requests(),
        checks.equals_reference,
        3.0,
    ),
    Property(
        "draws-are-distributed",
        "Tokens are drawn with the documented probabilities, by whatever noise.",
        2,
        ("generate", "sampling"),
        ("vLLM 5639",),
        lambda _: single_requests(),
        checks.draws_the_distribution,
        1.5,
    ),
    Property(
        "noise-differs",
        "Other seeds, samples, names and positions draw other noise; for requests without a seed the engine's decides.",
        1,
        ("generate", "sampling"),
        ("vLLM 51226", "vLLM 31081"),
        lambda _: models().map(noisy),
        checks.noise_differs,
        0.5,
    ),
    Property(
        "conservation",
        "At no moment is more free than there is, and in the end everything is.",
        5,
        ("steps", "state"),
        ("SGLang 16067", "mistral.rs 2357", "vLLM 14326", "sglang-jax 982"),
        at_lengths(lambda at: scenarios(kinds=("abort", *DISTURBANCES), lengths=at)),
        checks.conservation,
        4.0,
    ),
    Property(
        "memory-is-right",
        "After every step, cached blocks and running requests' memory hold what the reference demands, bit for bit.",
        5,
        ("steps", "verify"),
        ("vLLM 56525", "SGLang 29973", "SGLang 38319", "vLLM 417", "mini-sglang 142"),
        at_lengths(lambda at: scenarios(kinds=("abort",), most=3, lengths=at)),
        checks.memory_is_right,
        1.5,
    ),
    Property(
        "refusals",
        "What can't be met is refused when it comes, and nobody else notices.",
        7,
        ("steps", "refusals"),
        ("nano-vllm 274", "vLLM 3239"),
        at_lengths(lambda at: st.tuples(scenarios(greedy_params(), most=3, lengths=at), st.integers(0, 4))),
        checks.refusals,
        1.5,
    ),
    Property(
        "overflow-stays-home",
        "A request whose numbers overflow ends in an error, alone.",
        7,
        ("steps", "overflow"),
        ("llama.cpp 23652",),
        lambda _: overflowing(),
        checks.overflow_stays_home,
        1.0,
    ),
    Property(
        "scores",
        "The log-probability of each given token is the reference's.",
        2,
        ("score",),
        ("ollama37 437", "llama.cpp 17548", "mlx-lm 908"),
        at_lengths(sequences),
        checks.has_scores,
        1.5,
    ),
    Property(
        "one-bos",
        "A prompt has one BOS token, a chat too, and both are the reference's tokens.",
        2,
        ("encode",),
        ("vLLM 16081", "vLLM 55288", "SGLang 888"),
        lambda _: st.sampled_from(["Hi", "sort: 3 1 2", " ", "é", "a\nb"]),
        checks.has_one_bos,
        0.1,
    ),
    Property(
        "prefix-hits",
        "What follows full blocks of an earlier request is the reference's; hits are counted, and under their salt.",
        5,
        ("generate",),
        ("vLLM 43090", "vLLM 47861", "SGLang 38319", "vLLM 12621", "vLLM 44701"),
        shared_prefixes,
        checks.after_prefix_hits,
        2.0,
    ),
    Property(
        "wide-batches",
        "In a batch of more than eight, up to eighteen, every token is the reference's.",
        1,
        ("generate",),
        ("mlx-vlm 1946",),
        crowds,
        checks.in_steps_where_it_can,
        1.5,
    ),
)


def by_id(property_id: str) -> Property:
    """RequestError for an id that no property has."""
    for candidate in ALL:
        if candidate.id == property_id:
            return candidate
    raise RequestError(f"property {property_id!r}: expected one of {', '.join(each.id for each in ALL)}")
