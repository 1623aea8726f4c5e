"""Rates: what is learnt of the workers from noisy units, answers and transfers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from apcbatch.cluster import tasks
from apcbatch.cluster.tasks import PRIOR_PREFILL_TOKENS_PER_S, Rates


def units(number: int, prefill_s: float, decode_s: float, noise: float) -> list[tuple[float, int, int]]:
    """(seconds, prefill tokens, decode tokens) of units whose sizes and mixture vary."""
    sizes = [(random.randrange(0, 20_000), random.randrange(1, 3_000)) for _ in range(number)]
    return [((p * prefill_s + d * decode_s) * random.uniform(1 - noise, 1 + noise), p, d) for p, d in sizes]


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
    """Catches a prior of another speed or weight, one that is not left behind, units that fade faster or slower, and a
    division by nothing where all units are alike."""
    for sent in (
        [(2.0, 1000, 100), (3.5, 400, 700), (0.5, 90, 60)],
        units(40, 1e-3, 5e-3, noise=0.2) + units(40, 4e-3, 5e-3, noise=0.0),
        [(10.0, 4000, 400)] * 40,
    ):
        rates = Rates()
        assert (rates.prefill_s, rates.decode_s) == (1e-3, 5e-3)
        for count, unit in enumerate(sent, start=1):
            rates.add_unit(*unit)
            expected = [max(1e-9, rate) for rate in fitted(sent[:count])]
            assert [rates.prefill_s, rates.decode_s] == pytest.approx(expected, rel=1e-6)


def test_a_rate_stays_above_nothing() -> None:
    """Catches a rate of nothing or less, by which the work that is left would take no time."""
    for swapped in [False, True]:
        rates = Rates()
        for unit in ((1.0, 10_000, 10_000), (2.0, 0, 10_000)) * 50:
            rates.add_unit(unit[0], unit[2] if swapped else unit[1], unit[1] if swapped else unit[2])
        least, other = (rates.decode_s, rates.prefill_s) if swapped else (rates.prefill_s, rates.decode_s)
        assert least == 1e-9 and other > 1e-4


def test_a_transfer_is_weighed_against_the_prior() -> None:
    """Catches a prior of another bandwidth, latency or weight, and a bandwidth that nothing was sent for."""
    rates = Rates()
    for nothing in ((0, 0.0), (0, 1.0), (10e6, 0.0)):
        rates.add_transfer(*nothing)
    assert rates.transfer_s(0) == 2e-3 and rates.transfer_s(10**9) == 1.002
    rates.add_transfer(10e6, 1.0)
    assert rates.bytes_per_s == pytest.approx((0.98e6 + 10e6) / (0.98e-3 + 1.0))
    rates.add_transfer(1e6, 1.0)
    assert rates.bytes_per_s == pytest.approx((0.98 * 10.98e6 + 1e6) / (0.98 * 1.00098 + 1.0))
