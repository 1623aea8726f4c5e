from queuelet import Backoff


def test_waits_grow():
    waits = list(Backoff(attempts=4, first=1.0, factor=2.0).waits())
    assert waits[:3] == [1.0, 2.0, 4.0]


def test_waits_have_a_ceiling():
    assert max(Backoff(attempts=12, ceiling=30.0).waits()) == 30.0


def test_gives_up():
    assert Backoff(attempts=2).after(9) is None
