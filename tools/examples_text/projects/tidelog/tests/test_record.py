import pytest
from tidelog.record import read


def test_reads_a_line():
    (reading,) = read(["2024-05-01T00:10:00Z 318"])
    assert reading.level == 318 and reading.time.minute == 10


def test_skips_comments():
    assert list(read(["# gauge 7", "", "2024-05-01T00:10:00Z 318 # calm"]))[0].level == 318


def test_names_a_bad_line():
    with pytest.raises(ValueError, match="line 2"):
        list(read(["2024-05-01T00:10:00Z 318", "318"]))
