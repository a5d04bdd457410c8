"""From logits to one token: processors in a named order, an exact distribution, noise that is a function of its place.

Nothing here depends on the machine or on a neighbour in the batch. Logits go through elementwise IEEE float64
operations and `elementary.exp`; the probabilities are then integers, so that every sum is exact in any order. The
distribution that a token is drawn from IS weights / sum(weights): tests and speculative decoding compute with it as
fractions. Log-probabilities come from the raw logits, as vLLM's do by default: logprobs.token_logprobs.

The order of the processors, by `SamplingParams.profile`:

    vllm          allowed, banned, min_tokens, logit_bias, repetition, frequency, presence,
                  temperature, min_p, top_k, top_p
    transformers  logit_bias, repetition, frequency, presence, banned, allowed, min_tokens,
                  temperature, top_k, top_p, min_p

Sources: vLLM V1, Sampler.apply_logits_processors and Sampler.sample (vllm/v1/sample/sampler.py), MinTokens-,
LogitBias- and MinPLogitsProcessor (logits_processor/builtin.py), apply_top_k_top_p_pytorch (ops/topk_topp_sampler.py);
transformers 5.23, GenerationMixin._get_logits_processor and generation/logits_process.py. transformers has no
frequency and presence penalty; they stand where vLLM has them, after repetition. Its suppress_tokens is
banned_token_ids (its bad_words_ids would not ban an EOS), its sequence_bias of single tokens logit_bias.

A mask is minus infinity, which no bias or positive factor changes: so the masks, first in one order and in the middle
of the other, are applied at one place. What then differs is whether min_p comes before or after top_p.
Greedy takes the largest logit after masks, biases and penalties; vLLM does so too, transformers with do_sample=False.

Defined here where the engines leave it to rounding or to an unstable sort: which of equally likely tokens top_p
removes, the argmax of equal logits (lowest id), and one quotient where vLLM multiplies by the rounded reciprocal of
repetition_penalty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.sampling.params import MAX_SEED, SamplingParams, bias_pairs
from lfm2np.errors import NumericsError, RequestError
from lfm2np.truth import elementary
from lfm2np.truth.config_values import SIZES
from lfm2np.values import require_count, show

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

WEIGHT_BITS = 45
MAX_TOKENS = SIZES["vocab_size"][1]  # 2**17 weights of at most 2**45: every sum is below 2**63
LIMIT = 2.0**1000  # what an extreme penalty or bias overflows to, so that differences stay finite
NOISE_BITS = 128


def process(
    row: NDArray[Any],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Sequence[int],
) -> NDArray[Any]:
    """Logits [V] (float32, or float64 under `float64`) after the processors: float64 [V], -inf where removed.

    Greedy: the logits after masks, biases and penalties, or the row itself where there are none. Else relative to the
    largest and divided by the temperature. NumericsError for logits that are not finite; RequestError for an id outside
    [0, V) or if no token is left.
    """
    if params.temperature == 0.0 and asks_for_no_change(params, len(output_ids)):
        return require_row(row)
    values = masked(penalised(row, params, prompt_ids, output_ids), params, len(output_ids), eos_token_ids)
    return values if params.temperature == 0.0 else filtered(values, params)[0]


def distribution(
    row: NDArray[Any],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Sequence[int],
) -> Int64:
    """The weights that `choose` draws from, int64 [V]: `integer_weights` of `process`; greedy is a single 1.

    The probability of token i is exactly weights[i] / sum(weights); the sum is at most 2**62. Errors as `process`.
    """
    values = masked(penalised(row, params, prompt_ids, output_ids), params, len(output_ids), eos_token_ids)
    if params.temperature != 0.0:
        return filtered(values, params)[1]
    weights = np.zeros(values.shape, np.int64)
    weights[np.argmax(values)] = 1
    return weights


def choose(
    row: NDArray[Any],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Sequence[int],
    seed: int,
    sample_index: int,
) -> int:
    """The next token: greedy, or drawn with the noise of this sample at position len(prompt) + len(output).

    A function of its arguments: neither batch nor preemption nor the tokens drawn before can change it (a generator
    that is drawn from, or shared with a neighbour, does: vLLM issue 51226). Errors as `process`.
    """
    if params.temperature == 0.0:
        return int(np.argmax(process(row, params, prompt_ids, output_ids, eos_token_ids)))
    weights = distribution(row, params, prompt_ids, output_ids, eos_token_ids)
    return draw(weights, uniform(seed, sample_index, len(prompt_ids) + len(output_ids)))


def asks_for_no_change(params: SamplingParams, produced: int) -> bool:
    """Whether no logit of this token can be changed or removed, so that its largest is that of the row."""
    neutral = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0)
    masks = params.allowed_token_ids is not None or params.banned_token_ids or produced < params.min_tokens
    return neutral and not masks and not params.logit_bias


def penalised(
    row: NDArray[Any], params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> Float64:
    """A float64 copy of the logits [V] after logit_bias, repetition, frequency and presence penalty.

    Repetition divides positive logits and multiplies the others, once for each id of prompt or output; frequency is
    subtracted for each occurrence in the output, presence once. Before that, values are cut to +-2**1000.
    """
    values = require_row(row).astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        if params.logit_bias:
            token_ids, biases = zip(*bias_pairs(params), strict=True)
            values[id_array("logit_bias", token_ids, len(values))] += np.asarray(biases, np.float64)
        if params.repetition_penalty != 1.0:
            seen = np.zeros(len(values), np.bool_)
            seen[id_array("prompt_ids", prompt_ids, len(values))] = True
            seen[id_array("output_ids", output_ids, len(values))] = True
            old = values[seen]
            values[seen] = np.where(old > 0.0, old / params.repetition_penalty, old * params.repetition_penalty)
        values = np.clip(values, -LIMIT, LIMIT)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = np.bincount(id_array("output_ids", output_ids, len(values)), minlength=len(values))
        values -= params.frequency_penalty * counts.astype(np.float64)
        values -= params.presence_penalty * (counts > 0).astype(np.float64)
    return values


def masked(values: Float64, params: SamplingParams, produced: int, eos_token_ids: Sequence[int]) -> Float64:
    """-inf for what is not allowed, is banned, or would stop before `min_tokens`.

    That mask covers stop_token_ids and the EOS, the latter also under ignore_eos, as in vLLM (all_stop_token_ids);
    transformers knows further stop tokens only as EOS and masks those.
    """
    size = len(values)
    blocked = np.zeros(size, np.bool_)
    if params.allowed_token_ids is not None:
        blocked[:] = True
        blocked[id_array("allowed_token_ids", params.allowed_token_ids, size)] = False
    blocked[id_array("banned_token_ids", params.banned_token_ids, size)] = True
    if produced < params.min_tokens:
        blocked[id_array("eos_token_ids", eos_token_ids, size)] = True
        blocked[id_array("stop_token_ids", params.stop_token_ids, size)] = True
    if blocked.all():
        raise RequestError(
            f"output token {produced}: allowed_token_ids, banned_token_ids and min_tokens={params.min_tokens} leave "
            "no token to choose from, expected at least one"
        )
    return np.where(blocked, -np.inf, values)


def filtered(values: Float64, params: SamplingParams) -> tuple[Float64, Int64]:
    """Temperature, then top_k, top_p and min_p in the profile's order: values [V] and their integer weights [V]."""
    with np.errstate(over="ignore", under="ignore"):  # 0 at the largest: no temperature overflows upwards or gives NaN
        values = (values - values.max()) / params.temperature
    weights = integer_weights(values)
    for keep in FILTERS[params.profile]:
        kept = keep(values, weights, params)
        if kept is not None:
            values, weights = np.where(kept, values, -np.inf), np.where(kept, weights, np.int64(0))
    return values, weights


def integer_weights(processed: Float64) -> Int64:
    """exp(x - max) in units of 2**-45, rounded to nearest: int64 [V], 2**45 for the largest, 0 for -inf.

    A token whose probability is below 2**-46 of the largest one's (32 below it in logits) gets weight 0 and is never
    drawn. Up to 2**17 weights sum to at most 2**62. RequestError where every entry is -inf.
    """
    largest = processed.max()
    if largest == -np.inf:
        raise RequestError("processed logits: all -inf, expected at least one token to choose from")
    return np.rint(np.ldexp(elementary.exp(processed - largest), WEIGHT_BITS)).astype(np.int64)


def keep_top_k(values: Float64, weights: Int64, params: SamplingParams) -> Bools | None:
    """The k largest and all that tie with the k-th, as in both engines; None (nothing to do) if k is 0 or >= V."""
    size = len(values)
    if not 0 < params.top_k < size:
        return None
    return np.asarray(values >= np.partition(values, size - params.top_k)[size - params.top_k])


def keep_min_p(values: Float64, weights: Int64, params: SamplingParams) -> Bools | None:
    """Tokens at least min_p times as likely as the likeliest, of weight 2**45; exact, as both sides are float64.

    So any min_p above 0 also removes what has weight 0.
    """
    if params.min_p == 0.0:
        return None
    return np.asarray(weights >= np.ldexp(np.float64(params.min_p), WEIGHT_BITS))


def keep_top_p(values: Float64, weights: Int64, params: SamplingParams) -> Bools | None:
    """The fewest likeliest tokens whose probabilities sum to at least top_p; of equally likely ones the lower ids.

    The engines say it from below: remove, in ascending order, while the cumulative probability is <= 1 - top_p, never
    the last. With c the sum before a token in descending order, its cumulative sum from below is total - c, so it
    stays where c < top_p * total. top_p is the rational number that the float is: the comparison is exact.
    """
    if params.top_p == 1.0:
        return None
    order = np.argsort(-weights, kind="stable")
    descending = weights[order]
    cumulative = np.cumsum(descending)
    numerator, denominator = params.top_p.as_integer_ratio()
    enough = -(-numerator * int(cumulative[-1]) // denominator)  # the least integer >= top_p * total
    kept = np.zeros(len(weights), np.bool_)
    kept[order[cumulative - descending < enough]] = True
    return kept


FILTERS: dict[str, tuple[Callable[[Float64, Int64, SamplingParams], Bools | None], ...]] = {
    "vllm": (keep_min_p, keep_top_k, keep_top_p),
    "transformers": (keep_top_k, keep_top_p, keep_min_p),
}


def draw(weights: Int64, noise: int) -> int:
    """The token on whose share of [0, total) the noise falls, a number of [0, 2**128). Weight 0 has no share.

    floor(noise * total / 2**128) meets each value of [0, total) for 2**128 / total noises, one more or less: with
    total <= 2**62 every probability is right to 2**-66 of itself or better.
    """
    cumulative = np.cumsum(weights)
    target = noise * int(cumulative[-1]) >> NOISE_BITS
    return int(np.searchsorted(cumulative, target, side="right"))


def uniform(seed: int, sample_index: int, position: int, purpose: int = 0) -> int:
    """Noise in [0, 2**128): the first half of `philox`. A caller that needs several numbers takes several purposes."""
    return philox(seed, sample_index, position, purpose) >> NOISE_BITS


def philox(seed: int, sample_index: int, position: int, purpose: int) -> int:
    """Noise in [0, 2**256): one Philox4x64-10 block, its first word the highest, without any state.

    key (seed, sample_index), counter (1, position, purpose, 0), lowest word first: NumPy's generator adds 1 to its
    counter before the first block. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    key = [require_count("seed", seed, 0, MAX_SEED), require_count("sample_index", sample_index, 0, MAX_SEED)]
    place = [require_count("position", position, 0, MAX_SEED), require_count("purpose", purpose, 0, MAX_SEED)]
    block = np.random.Philox(key=np.asarray(key, np.uint64), counter=np.asarray([0, *place, 0], np.uint64))
    first, second, third, fourth = (int(word) for word in block.random_raw(4))
    return (first << 192) | (second << 128) | (third << 64) | fourth


def request_seed(params: SamplingParams, engine_seed: int, request_id: str) -> int:
    """The request's own seed; else the first 8 bytes of SHA-256 over the engine's (8 bytes) and the request's name.

    Both big-endian. So a request without a seed differs from its neighbours, but not from itself in another batch.
    """
    if params.seed is not None:
        return params.seed
    if not isinstance(request_id, str):
        raise RequestError(f"request_id {show(request_id)}: expected a string")
    engine = require_count("engine_seed", engine_seed, 0, MAX_SEED).to_bytes(8, "big")
    digest = hashlib.sha256(engine + request_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def require_row(row: NDArray[Any]) -> NDArray[Any]:
    if row.ndim != 1 or row.dtype not in (np.float32, np.float64) or not 0 < len(row) <= MAX_TOKENS:
        raise NumericsError(
            f"logits: {row.dtype} of shape {row.shape}, expected float32 or float64 [V], V from 1 to {MAX_TOKENS}"
        )
    if not np.isfinite(row).all():
        raise NumericsError("logits: NaN or infinite, expected finite numbers")
    return row


def id_array(name: str, ids: Sequence[int], size: int) -> Int64:
    """Ids as int64; RequestError for one outside [0, size): a negative one would count from the end."""
    array = np.asarray(ids, np.int64)
    if len(array) and not 0 <= array.min() <= array.max() < size:
        wrong = array[(array < 0) | (array >= size)][0]
        raise RequestError(f"{name} {wrong}: expected a token id, 0 to {size - 1}")
    return array
