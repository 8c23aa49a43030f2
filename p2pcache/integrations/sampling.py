"""Choosing tokens: greedy, or nucleus sampling with a generator of each sequence's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from blake3 import blake3

from p2pcache.serve.engine import Sampling
from p2pcache.types import ConfigError

TEMPERATURE_MIN = 1e-6  # less is 0: it would overflow fp32
_LARGE = 1e30


class Sampler:
    """Chooses the tokens of one sequence.

    One seed gives one choice at each place of an answer, whatever else is in the batch, and whichever
    replica comes to that place.
    """

    def __init__(self, sampling: Sampling, drawn: int = 0):
        """drawn: tokens of the answer that were chosen elsewhere. Raises ConfigError for a temperature or a
        top_p that is out of range.
        """
        if not 0.0 <= sampling.temperature < math.inf:
            raise ConfigError(f"temperature is a number from 0 on, not {sampling.temperature}")
        if not 0.0 < sampling.top_p <= 1.0:
            raise ConfigError(f"top_p is above 0 and at most 1, not {sampling.top_p}")
        self.greedy = sampling.temperature < TEMPERATURE_MIN
        self._sampling = sampling
        self._place = drawn
        self._generator = torch.Generator()
        self._generator.seed()

    def choose(self, logits: torch.Tensor) -> int:
        """One token by `[vocab]` logits of any float dtype, on any device."""
        if self.greedy:
            return int(logits.argmax())
        chances = probabilities(logits, self._sampling.temperature, self._sampling.top_p)
        if self._sampling.seed is not None:
            place = f"{self._sampling.seed}:{self._place}".encode()
            self._generator.manual_seed(int.from_bytes(blake3(place).digest(8), "little") >> 1)
        self._place += 1
        return int(torch.multinomial(chances, 1, generator=self._generator))


def probabilities(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """The chances, fp32 `[vocab]` on the CPU, of the tokens that nucleus sampling keeps; 0 for others.

    Kept are the likeliest tokens up to the one with which they reach `top_p` together (Holtzman et al.,
    *The Curious Case of Neural Text Degeneration*, 2020). They are not scaled up to a sum of 1.
    """
    # Infinities and NaN, which a model in half precision can give, must not fail a whole batch.
    scores = logits.float().cpu().nan_to_num(nan=-_LARGE, posinf=_LARGE, neginf=-_LARGE)
    chances = ((scores - scores.max()) / temperature).softmax(dim=-1)
    if top_p < 1.0:
        falling, order = chances.sort(descending=True, stable=True)
        cut = falling.cumsum(-1) - falling >= top_p
        cut[0] = False  # a top_p that is 0 in fp32 keeps one all the same
        chances[order[cut]] = 0.0
    return chances


def sample(samplers: Sequence[Sampler], logits: torch.Tensor) -> list[int]:
    """One token for each row of `[B, vocab]` logits."""
    likeliest = logits.argmax(dim=-1).tolist()  # for all rows at once: one wait for the device
    return [
        token if sampler.greedy else sampler.choose(row)
        for sampler, token, row in zip(samplers, likeliest, logits, strict=True)
    ]
