"""Traffic like that of two public traces, drawn from their statistics: no trace is needed, none is contained.

`mooncake-like`: Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl,
Apache-2.0), an hour of Kimi. `azure-conversation-like`: Azure's conversation trace of 2023 (Azure/AzurePublicDataset,
AzureLLMInferenceTrace_conv.csv, CC BY 4.0), an hour of a service at Azure.

fixtures/fit_traffic.py reads the two files, prints the constants below, and compares file and generator. Drawn are
- arrivals with the trace's rate, minute by minute for 58 minutes and then again, and Gamma gaps within a minute;
  Mooncake's times come in ticks of three seconds;
- lengths from quantiles, an output's by the rank of its prompt's length;
- for Mooncake, of whose prompts the blocks are known: a system prompt that all share, and requests that continue an
  earlier one with its prompt, its outputs and new tokens (the next turn), or with the beginning of its prompt and
  another end (another question). Azure's file does not say what prompts share, so these share nothing.

Not drawn is that lengths and gaps depend on the hour, on each other within a conversation, or on the user. The bits of
all of it are the same on every machine (draws.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate.draws import Draws, Floats, each, time_blocks
from lfm2np.commands.simulate.traffic import (
    NANOSECONDS,
    Arrival,
    Runs,
    faster,
    merge_runs,
    output_token_id,
    prompt_token_id,
    shared_token_id,
)

Quantiles = tuple[float, ...]  # at `probabilities`
TAIL = (0.5, 0.25, 0.0625)
SECTION = 60  # seconds in which the rate is constant


@dataclass(frozen=True)
class Stream:
    """When requests come, and how long those are that continue none."""

    rate: float  # requests a second, on average
    curve: tuple[float, ...]  # rate of each section, relative to it; begins again after the last
    cv: float  # of the gaps within a section
    tick: int  # seconds to which times are cut down; 0: none
    prompts: Quantiles
    outputs: tuple[Quantiles, ...]  # by the rank of the prompt's length, in parts of equal probability


@dataclass(frozen=True)
class Continued:
    """How requests continue others."""

    system: int  # tokens that all prompts begin with
    probability: tuple[float, ...]  # that a request is continued, by its turn; the last for all turns after it
    gaps: Quantiles  # seconds between the two
    is_next_turn: float  # probability; else it is another question
    growth: Quantiles  # of the next turn's prompt beyond prompt and outputs before it
    kept: Quantiles  # of another question: share of the earlier prompt that it begins with
    ends: Quantiles  # of another question: tokens after that
    outputs: Quantiles
    longest: int  # prompt and outputs


TOKEN_TIME = 20_000_000  # nanoseconds that a user waits for an output token at least, before the next turn

# fixtures/fit_traffic.py --write: begin
MOONCAKE = Stream(
    rate=3.3989,
    curve=(0.794, 0.868, 1.064, 0.858, 0.917, 0.804, 0.706, 0.897, 0.794, 0.878, 1.069, 0.912, 0.912, 1.0,
        0.902, 0.794, 0.927, 0.829, 0.932, 1.079, 0.995, 1.01, 1.069, 1.02, 0.843, 1.177, 0.878, 1.03, 1.059,
        1.025, 1.152, 0.966, 0.951, 0.922, 1.103, 1.02, 1.211, 0.863, 1.118, 1.147, 1.015, 1.147, 1.01, 1.098,
        1.069, 1.054, 0.961, 1.128, 1.113, 1.152, 1.074, 1.211, 1.089, 1.059, 0.981, 1.167, 1.069, 1.103),
    cv=1.049,
    tick=3,
    prompts=(891, 894, 895, 895, 896, 897, 898, 900, 901, 903, 905, 908, 913, 921, 931, 943, 965, 994, 1024,
        1060, 1092, 1133, 1184, 1236, 1287, 1336, 1392, 1466, 1537, 1629, 1757, 1878, 2038, 2290, 2535, 2767,
        3035, 3297, 3537, 3747, 3913, 4078, 4220, 4347, 4445, 4587, 4737, 4860, 5016, 5132, 5264, 5427, 5621,
        5798, 5982, 6188, 6413, 6648, 6879, 7139, 7418, 7706, 7950, 8239, 8509, 8828, 9177, 9508, 9899, 10276,
        10771, 11125, 11596, 12073, 12518, 13056, 13619, 14016, 14562, 15294, 15871, 16564, 17191, 18020, 18686,
        19437, 20389, 21486, 22898, 24322, 25559, 27487, 29228, 31725, 34382, 38494, 43058, 51772, 67126, 89868,
        111632, 118430, 122890, 126195),
    outputs=((1, 9, 25, 40, 72, 128, 185, 213, 247, 283, 315, 343, 365, 395, 418, 445, 474, 508, 560, 625, 679,
        741, 972, 1126), (1, 9, 16, 26, 36, 54, 83, 111, 143, 185, 240, 284, 318, 353, 395, 439, 469, 520, 573,
        665, 782, 882, 1153, 1298), (1, 13, 29, 75, 141, 201, 242, 279, 314, 345, 372, 395, 419, 446, 467, 496,
        532, 565, 629, 723, 846, 964, 1446, 2000), (1, 10, 27, 66, 122, 184, 238, 276, 312, 333, 367, 395, 414,
        437, 465, 490, 526, 581, 640, 721, 833, 1164, 1781, 2000), (1, 13, 31, 94, 135, 190, 225, 253, 282, 308,
        328, 346, 366, 383, 398, 423, 450, 474, 514, 592, 669, 747, 1072, 2000), (1, 10, 23, 52, 116, 194, 229,
        273, 309, 345, 365, 387, 406, 424, 445, 464, 490, 528, 552, 618, 687, 755, 991, 1325), (1, 5, 21, 45,
        132, 210, 256, 297, 321, 346, 367, 389, 405, 418, 436, 459, 483, 518, 594, 671, 819, 934, 1288, 2000),
        (1, 10, 20, 41, 123, 206, 258, 292, 319, 340, 366, 390, 407, 428, 460, 478, 506, 533, 572, 689, 809,
        965, 1195, 1644), (1, 8, 18, 31, 94, 168, 239, 287, 318, 355, 371, 394, 416, 434, 454, 480, 509, 541,
        590, 703, 858, 987, 1965, 2000), (1, 6, 16, 28, 84, 164, 238, 288, 318, 351, 383, 402, 429, 453, 478,
        503, 533, 575, 636, 743, 976, 1181, 1999, 2000)),
)  # fmt: skip
MOONCAKE_CONTINUED = Continued(
    system=512,
    probability=(0.307, 0.419, 0.51, 0.587, 0.588, 0.683, 0.772, 0.716),
    gaps=(0.0, 30.0, 42.0, 51.0, 60.0, 66.0, 75.0, 84.0, 96.0, 108.0, 123.0, 138.0, 162.0, 189.0, 222.0, 264.0,
        318.0, 390.0, 483.0, 615.4, 906.1, 1374.0, 2161.0, 3030.0),
    is_next_turn=0.85,
    growth=(1, 1, 1, 1, 1, 4, 6, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 18, 20, 23, 26, 29, 33, 41, 52, 66, 88,
        120, 172, 260, 356, 483, 694, 1337, 2543, 3544, 4194, 5315, 6921, 10324, 14921, 20781, 36087, 91467),
    kept=(0.015, 0.053, 0.069, 0.083, 0.099, 0.113, 0.132, 0.152, 0.174, 0.191, 0.218, 0.256, 0.292, 0.349,
        0.404, 0.456, 0.539, 0.713, 0.889, 0.935, 0.957, 0.967, 0.982, 0.99),
    ends=(10, 896, 1773, 3780, 4985, 5790, 7016, 7924, 8542, 8939, 9567, 10178, 10940, 11970, 13680, 14831,
        15906, 17378, 19891, 26341, 30148, 37140, 62165, 94968),
    outputs=(1, 6, 13, 20, 29, 39, 57, 80, 104, 130, 159, 187, 212, 234, 253, 273, 287, 305, 320, 335, 348, 364,
        375, 389, 401, 414, 426, 439, 453, 464, 479, 495, 513, 532, 552, 582, 618, 663, 738, 898, 1240, 1960,
        2000, 2000),
    longest=131072,
)  # fmt: skip
AZURE = Stream(
    rate=5.5543,
    curve=(0.573, 0.795, 0.987, 1.059, 0.921, 0.819, 0.804, 0.783, 0.966, 0.894, 0.903, 0.906, 1.035, 0.978,
        0.849, 0.837, 0.84, 0.924, 1.029, 1.053, 1.053, 1.029, 1.224, 1.188, 1.158, 1.194, 1.296, 1.44, 1.428,
        1.359, 1.344, 1.521, 1.314, 1.239, 1.269, 1.254, 1.395, 0.933, 0.987, 0.948, 0.999, 1.065, 0.957, 1.08,
        1.002, 1.125, 0.99, 0.747, 0.663, 0.747, 0.795, 0.84, 0.768, 0.762, 0.726, 0.78, 0.738, 0.675),
    cv=1.026,
    tick=0,
    prompts=(2, 29, 91, 161, 181, 181, 191, 197, 201, 203, 207, 212, 222, 242, 317, 372, 375, 378, 381, 384,
        387, 390, 392, 394, 395, 396, 398, 399, 400, 402, 403, 405, 406, 408, 411, 414, 419, 424, 433, 456, 703,
        863, 903, 946, 972, 984, 994, 1002, 1009, 1014, 1020, 1025, 1031, 1036, 1041, 1045, 1050, 1055, 1060,
        1065, 1071, 1076, 1081, 1086, 1092, 1097, 1102, 1109, 1116, 1122, 1130, 1139, 1147, 1159, 1171, 1189,
        1214, 1249, 1311, 1314, 1315, 1321, 1368, 1508, 1689, 1876, 2032, 2221, 2401, 2584, 2734, 3291, 4073,
        4076, 4079, 4083, 4086, 4090, 4098, 4142, 4831, 5404, 6459, 14050),
    outputs=((11, 16, 67, 86, 101, 112, 122, 134, 144, 154, 161, 163, 169, 177, 182, 189, 204, 217, 217, 217,
        247, 279, 508, 1000), (7, 18, 18, 46, 53, 59, 62, 66, 69, 72, 76, 79, 82, 87, 92, 99, 110, 131, 162,
        184, 217, 217, 223, 436), (24, 72, 80, 83, 86, 88, 89, 91, 92, 94, 96, 98, 100, 102, 106, 109, 114, 122,
        131, 143, 155, 169, 187, 200), (25, 75, 81, 85, 87, 89, 91, 93, 95, 97, 99, 101, 103, 106, 109, 113,
        121, 129, 140, 153, 169, 199, 355, 739), (10, 57, 82, 91, 104, 122, 373, 383, 389, 394, 395, 397, 401,
        406, 411, 415, 423, 429, 448, 514, 565, 602, 643, 921), (33, 370, 379, 386, 391, 394, 396, 397, 399,
        401, 406, 411, 414, 415, 420, 428, 431, 444, 477, 538, 605, 657, 949, 1000), (28, 363, 377, 383, 388,
        393, 396, 396, 398, 402, 407, 411, 414, 418, 426, 429, 439, 456, 500, 569, 620, 648, 954, 1000), (26,
        60, 92, 137, 157, 180, 207, 373, 383, 391, 396, 397, 401, 406, 412, 417, 423, 429, 452, 523, 597, 623,
        915, 992), (15, 44, 50, 55, 63, 70, 75, 80, 85, 91, 95, 101, 108, 116, 126, 138, 149, 165, 191, 233,
        376, 413, 522, 918), (17, 30, 35, 38, 41, 43, 46, 48, 51, 54, 58, 63, 68, 73, 79, 87, 100, 113, 132,
        154, 185, 237, 481, 757)),
)  # fmt: skip
# fixtures/fit_traffic.py --write: end


def probabilities(steps: int) -> Floats:
    """Of a table's quantiles: equal steps, of which the last is halved and halved again, as the tail lies there."""
    return np.array([*(step / steps for step in range(steps)), *(1 - part / steps for part in TAIL), 1.0])


def quantile(table: Quantiles, probability: Floats) -> Floats:
    """Straight lines between the quantiles of a table."""
    return between(np.array([table], np.float64), probability, np.zeros(len(probability), np.int64))


def between(tables: Floats, probability: Floats, row: NDArray[np.int64]) -> Floats:
    """The same in the `row` of tables [rows, quantiles]."""
    known = probabilities(tables.shape[1] - 1 - len(TAIL))
    left = np.searchsorted(known, probability, side="right") - 1
    low, high = tables[row, left], tables[row, left + 1]
    return low + (high - low) * ((probability - known[left]) / (known[left + 1] - known[left]))


def arrival_times(stream: Stream, seed: int) -> Iterator[int]:
    """Gamma gaps of mean 1 second / rate, run through the curve: where it is high, they are short."""
    draws, shape = Draws(seed, "gaps"), 1 / (stream.cv * stream.cv)
    section = SECTION * NANOSECONDS
    even = [round(level * section) for level in stream.curve]  # how long sections would be, were the rate even
    ends = np.cumsum(even, dtype=np.int64)
    begins, period, tick = ends - np.diff(ends, prepend=0), int(ends[-1]), stream.tick * NANOSECONDS or 1
    levels = np.asarray(stream.curve)
    for begin, block in time_blocks(lambda: draws.gamma(shape) / (shape * stream.rate)):
        hours, rest = np.divmod(begin % period + block, period)
        index = np.searchsorted(ends, rest, side="right")
        into = np.floor((rest - begins[index]) / levels[index]).astype(np.int64)
        at = (hours * len(levels) + index) * section + np.minimum(into, section - 1)
        before = begin // period * len(levels) * section
        yield from (before + when for when in (at // tick * tick).tolist())


def lengths(stream: Stream, seed: int) -> Iterator[tuple[int, int]]:
    """Prompt and outputs of requests that continue none."""
    draws, tables = Draws(seed, "lengths"), np.array(stream.outputs, np.float64)
    while True:
        rank = draws.uniform()
        prompts = quantile(stream.prompts, rank)
        outputs = between(tables, draws.uniform(), (rank * len(tables)).astype(np.int64))
        yield from zip(*(np.rint(each).astype(np.int64).tolist() for each in (prompts, outputs)), strict=True)


def azure_conversation_like(*, rate: float | None = None, requests: int = 1000, seed: int = 0) -> Iterator[Arrival]:
    """`rate`: requests a second, on average; None: as the trace. The whole is run as much faster."""
    return at_rate(unrelated(AZURE, requests, seed), AZURE, rate)


def unrelated(stream: Stream, requests: int, seed: int) -> Iterator[Arrival]:
    drawn = zip(range(requests), arrival_times(stream, seed), lengths(stream, seed), strict=False)
    for number, at, (prompt, outputs) in drawn:
        yield Arrival(at, ((prompt_token_id(number), prompt),), outputs, output_token_id(number))


def mooncake_like(*, rate: float | None = None, requests: int = 1000, seed: int = 0) -> Iterator[Arrival]:
    """`rate`: requests a second, on average; None: as the trace. The whole is run as much faster, pauses as well."""
    return at_rate(related(MOONCAKE, MOONCAKE_CONTINUED, requests, seed), MOONCAKE, rate)


def at_rate(arrivals: Iterator[Arrival], stream: Stream, rate: float | None) -> Iterator[Arrival]:
    return arrivals if rate is None else faster(arrivals, rate / stream.rate)


def related(stream: Stream, continued: Continued, requests: int, seed: int) -> Iterator[Arrival]:
    """Requests of which each may be continued, once. Who is due takes the next arrival; else one begins anew.

    So arrivals are those of the stream, whatever is continued.
    """

    def drawn(table: Quantiles, name: str) -> Iterator[float]:
        draws = Draws(seed, name)
        return each(lambda: quantile(table, draws.uniform()))

    drawn_lengths = lengths(stream, seed)
    chance, kind = (each(Draws(seed, name).uniform) for name in ("continued", "kinds"))
    gaps, growth = drawn(continued.gaps, "pauses"), drawn(continued.growth, "growth")
    kept, ends = drawn(continued.kept, "kept"), drawn(continued.ends, "ends")
    all_outputs, probability = drawn(continued.outputs, "outputs"), continued.probability
    # A heap: when, number of the request that it continues, turn, what it begins with, new tokens, outputs.
    due: list[tuple[int, int, int, Runs, int, int]] = []
    for number, at in zip(range(requests), arrival_times(stream, seed), strict=False):
        if due and due[0][0] <= at:
            _, _, turn, before, new, outputs = heapq.heappop(due)
        else:
            turn, before = 0, ((shared_token_id(0), continued.system),)
            length, outputs = next(drawn_lengths)
            new = max(1, length - continued.system)
        arrival = Arrival(at, (*before, (prompt_token_id(number), new)), outputs, output_token_id(number))
        yield arrival
        if next(chance) >= probability[min(turn, len(probability) - 1)]:
            continue
        later = at + max(round(next(gaps) * NANOSECONDS), outputs * TOKEN_TIME)
        if next(kind) < continued.is_next_turn:
            before = (*arrival.prompt, (arrival.output_token_id, outputs))
            new = max(1, round(next(growth)))
        else:
            begin = math.floor(next(kept) * arrival.num_prompt_tokens)
            before = beginning(arrival.prompt, max(begin, continued.system))
            new = max(1, round(next(ends)))
        outputs = round(next(all_outputs))
        if sum(count for _, count in before) + new + outputs <= continued.longest:
            heapq.heappush(due, (later, number, turn + 1, before, new, outputs))


def beginning(runs: Runs, tokens: int) -> Runs:
    """The first `tokens` of them, 1 or more."""
    kept, left = [], tokens
    for token_id, count in runs:
        kept.append((token_id, min(count, left)))
        left -= count
        if left <= 0:
            break
    return merge_runs(kept)
