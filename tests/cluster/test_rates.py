"""Rates: what is learnt of the workers from noisy units, answers and transfers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from apcbatch.cluster import tasks
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


def test_units_of_one_mixture_scale_both_rates_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a wrong power or sum where all units have one ratio of prefill to decode tokens."""
    monkeypatch.setattr(tasks, "PRIOR_TOKENS", 0)
    for unit in ((8.0, 4000, 400), (0.02, 4, 0), (0.02, 0, 4)):
        rates = Rates()
        prefill_s, decode_s = rates.prefill_s, rates.decode_s
        rates.add_unit(0.0, 0, 0)
        assert (rates.prefill_s, rates.decode_s) == (prefill_s, decode_s), "nothing was learnt"
        rates.add_unit(*unit)
        factor = unit[0] / (unit[1] * prefill_s + unit[2] * decode_s)
        assert (rates.prefill_s, rates.decode_s) == pytest.approx((factor * prefill_s, factor * decode_s))


def fitted(units: list[tuple[float, int, int]]) -> list[float]:
    """The rates by an outside least-squares solver: the prior as two rows, and older rows with less weight."""
    rows, seconds, weights = [[256.0, 0.0], [0.0, 256.0]], [256 / 1000, 256 / 200], [1.0, 1.0]
    for unit in units:
        weights = [weight * 0.98 for weight in weights] + [1.0]
        seconds.append(unit[0])
        rows.append([float(unit[1]), float(unit[2])])
    scale = np.sqrt(weights)
    return np.linalg.lstsq(np.array(rows) * scale[:, None], np.array(seconds) * scale, rcond=None)[0].tolist()


def test_the_rates_are_the_weighted_least_squares_fit() -> None:
    """Catches a prior of another speed or weight, and units that fade faster or slower."""
    rates, seen = Rates(), list[tuple[float, int, int]]()
    assert (rates.prefill_s, rates.decode_s) == (1e-3, 5e-3)
    for unit in ((2.0, 1000, 100), (3.5, 400, 700), (0.5, 90, 60)):
        seen.append(unit)
        rates.add_unit(*unit)
        assert [rates.prefill_s, rates.decode_s] == pytest.approx(fitted(seen), rel=1e-9)


def test_a_rate_stays_above_nothing() -> None:
    """Catches a rate of nothing or less, by which the work that is left would take no time."""
    for swapped in [False, True]:
        rates = Rates()
        for unit in ((1.0, 10_000, 10_000), (2.0, 0, 10_000)) * 50:
            rates.add_unit(unit[0], unit[2] if swapped else unit[1], unit[1] if swapped else unit[2])
        least, other = (rates.decode_s, rates.prefill_s) if swapped else (rates.prefill_s, rates.decode_s)
        assert least == 1e-9 and other > 1e-4


def test_a_transfer_is_weighed_against_the_prior() -> None:
    """Catches a prior of another bandwidth, latency or weight."""
    rates = Rates()
    assert rates.transfer_s(0) == 2e-3 and rates.transfer_s(10**9) == 1.002
    rates.add_transfer(10e6, 1.0)
    assert rates.bytes_per_s == pytest.approx((0.98e6 + 10e6) / (0.98e-3 + 1.0))
    rates.add_transfer(1e6, 1.0)
    assert rates.bytes_per_s == pytest.approx((0.98 * 10.98e6 + 1e6) / (0.98 * 1.00098 + 1.0))
