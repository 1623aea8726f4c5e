from datetime import datetime, timedelta, timezone

from tidelog.record import Reading
from tidelog.series import gaps, high_waters, means
from tidelog.summary import summary

TEN = timedelta(minutes=10)
START = datetime(2024, 5, 1, tzinfo=timezone.utc)


def at(*pairs):
    return [Reading(START + timedelta(minutes=minute), level) for minute, level in pairs]


def test_finds_a_gap():
    readings = at((0, 1), (10, 2), (40, 3))
    assert gaps(readings, TEN) == [(readings[1].time, readings[2].time)]


def test_no_gap():
    assert gaps(at((0, 1), (10, 2)), TEN) == []


def test_means_of_spans():
    result = means(at((0, 10), (10, 20), (20, 60), (30, 80)), timedelta(minutes=20))
    assert [reading.level for reading in result] == [15, 70]


def test_finds_high_water():
    assert [r.level for r in high_waters(at((0, 1), (10, 5), (20, 2)))] == [5]


def test_summary():
    assert summary(at((0, 1), (10, 5), (20, 2))) == "1 to 5 cm, high water at 00:10"
