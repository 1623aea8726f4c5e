"""Rates: what is learnt of the workers from noisy units, answers and transfers."""

from __future__ import annotations

import random

import pytest

from apcbatch.cluster.tasks import PRIOR_BYTES_PER_S, PRIOR_PREFILL_TOKENS_PER_S, Rates
from tests.effort import seeds


def units(seed: int, number: int, prefill_s: float, decode_s: float, noise: float) -> list[tuple[float, int, int]]:
    """(seconds, prefill tokens, decode tokens) of units whose sizes and mixture vary."""
    source = random.Random(seed)
    sizes = [(source.randrange(0, 20_000), source.randrange(1, 3_000)) for _ in range(number)]
    return [((p * prefill_s + d * decode_s) * source.uniform(1 - noise, 1 + noise), p, d) for p, d in sizes]


def test_true_rates_are_found_in_noise() -> None:
    """Catches a wrong normal equation, and a prior that is not left behind."""
    for seed in seeds(100):
        source = random.Random(seed)
        prefill_s = 10 ** source.uniform(-5, -2)
        decode_s = prefill_s * 10 ** source.uniform(0.5, 1)  # so that each takes a share that can be told from noise
        rates = Rates()
        for unit in units(seed, 200, prefill_s, decode_s, noise=0.2):
            rates.add_unit(*unit)
        measured = [
            rates.seconds(p, d) / (p * prefill_s + d * decode_s) for p, d in ((10_000, 0), (0, 3_000), (8_000, 500))
        ]
        assert measured == pytest.approx([1, 1, 1], rel=0.35)
        assert measured[2] == pytest.approx(1, rel=0.12), "what the units are like is known best"


def test_a_worker_that_changes_is_followed() -> None:
    """Catches old units that never fade."""
    rates = Rates()
    for unit in units(1, 300, 1e-3, 5e-3, noise=0.0):
        rates.add_unit(*unit)
    for unit in units(2, 300, 4e-3, 5e-3, noise=0.0):
        rates.add_unit(*unit)
    assert rates.prefill_s == pytest.approx(4e-3, rel=0.05) and rates.decode_s == pytest.approx(5e-3, rel=0.05)


def test_units_that_are_all_alike_keep_the_ratio() -> None:
    """Catches a division by nothing, or a negative rate, where only the sum of both can be known."""
    rates = Rates()
    for _ in range(400):
        rates.add_unit(10.0, 4000, 400)
    assert rates.seconds(4000, 400) == pytest.approx(10, rel=1e-3)
    assert rates.prefill_s > 0 and rates.decode_s > 0


def test_a_small_unit_says_little() -> None:
    """Catches a prior that the first few tokens overrule."""
    first = Rates()
    assert first.seconds(int(PRIOR_PREFILL_TOKENS_PER_S), 0) == pytest.approx(1)
    first.add_unit(0.1, 10, 1)
    assert first.prefill_s == pytest.approx(1 / PRIOR_PREFILL_TOKENS_PER_S, rel=0.3)


def test_answers_that_end_early_take_less() -> None:
    """Catches requests that are taken for as long as they may be."""
    rates, source = Rates(), random.Random(3)
    before = rates.seconds(0, 100)
    for _ in range(500):
        rates.add_answer(source.randrange(10, 41), 100)
    assert rates.seconds(0, 100) == pytest.approx(before / 4, rel=0.1)


def test_the_network_is_measured() -> None:
    """Catches a bandwidth that nothing was sent for, one that needs many slow transfers to be known, and one that stays
    when the network has become another."""
    rates = Rates()
    for nothing in ((0, 0.0), (0, 1.0), (10e6, 0.0)):
        rates.add_transfer(*nothing)
    assert rates.bytes_per_s == PRIOR_BYTES_PER_S
    rates.add_transfer(10e6, 1.0)
    assert rates.transfer_s(10_000_000) == pytest.approx(1, rel=0.15)
    for _ in range(200):
        rates.add_transfer(10e6, 0.02)
    assert rates.transfer_s(10_000_000) == pytest.approx(0.02, rel=0.6)


def test_units_of_one_mixture_scale_both_rates_exactly() -> None:
    """Fault: a wrong power or sum where all units have one ratio of prefill to decode tokens."""
    rates = Rates()
    rates._pp = rates._pd = rates._dd = rates._ps = rates._ds = 0.0  # without the prior
    prefill_s, decode_s = rates.prefill_s, rates.decode_s
    rates.add_unit(8.0, 4000, 400)
    factor = 8.0 / (4000 * prefill_s + 400 * decode_s)
    assert (rates.prefill_s, rates.decode_s) == pytest.approx((factor * prefill_s, factor * decode_s))
