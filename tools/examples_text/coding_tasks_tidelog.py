"""Tasks in the project `tidelog`."""

from __future__ import annotations

from examples_text.coding_task import Edit, Failure, Task, after, changelog, failure

PROJECT = "tidelog"
RECORD, SERIES, SUMMARY = "tidelog/record.py", "tidelog/series.py", "tidelog/summary.py"
TEST_RECORD, TEST_SERIES = "tests/test_record.py", "tests/test_series.py"
LAST_RECORD = '        list(read(["2024-05-01T00:10:00Z 318", "318"]))\n'
LAST_SERIES = '    assert summary(at((0, 1), (10, 5), (20, 2))) == "1 to 5 cm, high water at 00:10"\n'

ZONES = Task(
    "zones",
    PROJECT,
    "One of our gauges writes times without the Z at the end. As soon as its file is mixed with another "
    "one, gaps() fails with TypeError: can't subtract offset-naive and offset-aware datetimes. All our "
    "gauges run on UTC.",
    (RECORD, SERIES, TEST_RECORD),
    "parse_time",
    "parse_time returns a time with a zone if the text has one, and a naive one if it hasn't. Python "
    "refuses to subtract one from the other, and rightly so. Since every gauge runs on UTC, a time "
    "without a zone should get UTC when it is read, so that the rest of the program never sees a naive "
    "one.",
    after(
        TEST_RECORD,
        LAST_RECORD,
        "\n\ndef test_times_without_a_zone_are_utc():\n"
        '    with_zone, without = read(["2024-05-01T00:00:00Z 312", "2024-05-01T00:10:00 318"])\n'
        "    assert (without.time - with_zone.time).seconds == 600\n",
        "The subtraction itself is the test.",
    ),
    (
        failure(
            f"{TEST_RECORD}::test_times_without_a_zone_are_utc",
            "assert (without.time - with_zone.time).seconds == 600",
            "TypeError: can't subtract offset-naive and offset-aware datetimes",
        ),
    ),
    (
        Edit(
            RECORD,
            "    return datetime.fromisoformat(text)\n",
            "    time = datetime.fromisoformat(text)\n"
            "    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)\n",
            "The same error as yours. I set the zone only if there is none, so offsets like +02:00 keep "
            "working.",
        ),
        Edit(
            RECORD,
            "from datetime import datetime\n",
            "from datetime import datetime, timezone\n",
            "And the import.",
        ),
    ),
    "Times without a zone are taken as UTC now, in parse_time in tidelog/record.py, and everything after "
    "that works with zones only. Times with an offset are kept as they are; they compare and subtract "
    "correctly, but the summary prints them in their own zone. If a gauge ever runs on local time, this "
    "would be wrong without anybody noticing.",
    follow=(
        "Please write that last sentence into the docstring, it's important. And the changelog.",
        (
            Edit(
                RECORD,
                '    """A time in ISO 8601."""\n',
                '    """A time in ISO 8601, UTC without a zone; a gauge on local time must write it."""\n',
                "",
            ),
            changelog("Times without a zone are UTC."),
        ),
        "The docstring of parse_time says it now, and so does the changelog. Tests are unchanged and pass.",
    ),
)

END = Task(
    "end",
    PROJECT,
    "gaps() has a parameter `end`, \"when the record should end\", but it doesn't do anything. If a "
    "gauge dies at noon, the afternoon should be a gap.",
    (SERIES, TEST_SERIES),
    "gaps",
    "The parameter is accepted and never used. With it, the span from the last reading to `end` has to "
    "be treated like any other. Without readings there is nothing to measure from, so that case should "
    "stay empty.",
    after(
        TEST_SERIES,
        LAST_SERIES,
        "\n\ndef test_a_record_that_stops_early_has_a_gap():\n"
        "    readings, end = at((0, 1), (10, 2)), START + timedelta(hours=1)\n"
        "    assert gaps(readings, TEN, end) == [(readings[1].time, end)]\n"
        "\n\ndef test_nothing_read_is_no_gap():\n"
        "    assert gaps([], TEN, START) == []\n",
        "One test for the afternoon, one for a file that is empty.",
    ),
    (
        failure(
            f"{TEST_SERIES}::test_a_record_that_stops_early_has_a_gap",
            "assert gaps(readings, TEN, end) ==",
            "assert [] == [(datetime.da...imezone.utc))]",
            "  ",
            "  Right contains one more item: (datetime.datetime(2024, 5, 1, 0, 10, "
            "tzinfo=datetime.timezone.utc), datetime.datetime(2024, 5, 1, 1, 0, "
            "tzinfo=datetime.timezone.utc))",
            "  Use -v to get more diff",
        ),
    ),
    (
        Edit(
            SERIES,
            "    found = []\n"
            "    for before, after in pairwise(readings):\n"
            "        if after.time - before.time > longest:\n"
            "            found.append((before.time, after.time))\n"
            "    return found\n",
            "    times = [reading.time for reading in readings]\n"
            "    if times and end is not None:\n"
            "        times.append(end)\n"
            "    return [(before, after) for before, after in pairwise(times) if after - before > longest]\n",
            "Only the times matter for gaps, so I collect them, put the end behind them if it is given, "
            "and compare neighbours as before.",
        ),
    ),
    "gaps() now treats `end` as one more time after the last reading, so a record that stops early has a "
    "gap at its end. An empty record has no gaps, with or without an end. If `end` is before the last "
    "reading nothing is reported, since the difference is negative.",
)

EMPTY_SPANS = Task(
    "empty-spans",
    PROJECT,
    "means() crashes with ZeroDivisionError when there is a hole in the record that is longer than the "
    "width. A span without readings should simply be missing from the result.",
    (SERIES, TEST_SERIES),
    "means",
    "The loop collects the levels of a span, and if there is none, it divides by the length of an empty "
    "list. The span has to be skipped, while its start still moves on.",
    after(
        TEST_SERIES,
        LAST_SERIES,
        "\n\ndef test_empty_spans_are_left_out():\n"
        "    result = means(at((0, 10), (40, 30)), TEN)\n"
        "    assert [reading.level for reading in result] == [10, 30]\n"
        "    assert result[1].time == START + timedelta(minutes=40)\n",
        "A hole of three spans, and the time of what comes after it.",
    ),
    (
        Failure(
            f"{TEST_SERIES}::test_empty_spans_are_left_out",
            (
                (
                    (
                        (TEST_SERIES, "test_empty_spans_are_left_out", "means(at((0, 10), (40, 30)), TEN)"),
                        (SERIES, "means", "result.append(Reading(start, sum(levels) / len(levels)))"),
                    ),
                    ("ZeroDivisionError: division by zero",),
                ),
            ),
        ),
    ),
    (
        Edit(
            SERIES,
            "        result.append(Reading(start, sum(levels) / max(1, len(levels))))\n",
            "        if levels:\n            result.append(Reading(start, sum(levels) / len(levels)))\n",
            "That was careless: dividing by one makes a level of 0 out of nothing, which is worse than a "
            "crash. A span without readings has no mean, so nothing is appended.",
        ),
    ),
    "Spans without readings are left out of means() now. My first attempt only avoided the division and "
    "reported a level of 0 for them, and the test caught it. The times of the others are still multiples "
    "of the width after the first reading, holes or not.",
    wrong=(
        Edit(
            SERIES,
            "        result.append(Reading(start, sum(levels) / len(levels)))\n",
            "        result.append(Reading(start, sum(levels) / max(1, len(levels))))\n",
            "The division fails as reported. The shortest change is to divide by at least one.",
        ),
        failure(
            f"{TEST_SERIES}::test_empty_spans_are_left_out",
            "assert [reading.level for reading in result] == [10, 30]",
            "assert [10.0, 0.0, 0.0, 0.0, 30.0] == [10, 30]",
            "  ",
            "  At index 1 diff: 0.0 != 30",
            "  Left contains 3 more items, first extra item: 0.0",
            "  Use -v to get more diff",
        ),
    ),
)

PLATEAUS = Task(
    "plateaus",
    PROJECT,
    "When the level stays the same for two readings at high water, high_waters() reports both, and the "
    "summary says \"high water at 06:10, 06:20\". It should be one. A short standstill while the water "
    "is still rising is not a high water, by the way.",
    (SERIES, SUMMARY, TEST_SERIES),
    "high_waters",
    "A reading counts if it is at least as high as both neighbours, so each reading of a plateau counts. "
    "The second sentence is important: a standstill on the way up is a plateau as well, and it must not "
    "be reported at all. Three readings in a row are not enough to tell the two apart.",
    after(
        TEST_SERIES,
        LAST_SERIES,
        "\n\ndef test_a_plateau_is_one_high_water():\n"
        "    readings = at((0, 1), (10, 5), (20, 5), (30, 2))\n"
        "    assert [r.time.minute for r in high_waters(readings)] == [10]\n"
        "    rising = at((0, 1), (10, 5), (20, 5), (30, 6), (40, 4))\n"
        "    assert [r.level for r in high_waters(rising)] == [6]\n",
        "Both cases in one test: a plateau at the top, and one on the way up.",
    ),
    (
        failure(
            f"{TEST_SERIES}::test_a_plateau_is_one_high_water",
            "assert [r.time.minute for r in high_waters(readings)] == [10]",
            "assert [10, 20] == [10]",
            "  ",
            "  Left contains one more item: 20",
            "  Use -v to get more diff",
        ),
    ),
    (
        Edit(
            SERIES,
            "    found = []\n"
            "    for before, here, after in zip(readings, readings[1:], readings[2:], strict=False):\n"
            "        if here.level > before.level and here.level >= after.level:\n"
            "            found.append(here)\n"
            "    return found\n",
            "    found: list[Reading] = []\n"
            "    top: Reading | None = None\n"
            "    for before, here in pairwise(readings):\n"
            "        if here.level > before.level:\n"
            "            top = here\n"
            "        elif here.level < before.level and top is not None:\n"
            "            found.append(top)\n"
            "            top = None\n"
            "    return found\n",
            "As I feared, the standstill on the way up is reported now: it is higher than what was "
            "before and not lower than what comes next. I have to remember where the water last rose, "
            "and report that place when it falls.",
        ),
    ),
    "high_waters() now remembers the reading at which the level last rose, and reports it when the level "
    "falls for the first time after that. So a plateau is one high water, at its beginning, and a "
    "standstill on the way up is none. My first attempt compared three readings at a time, which cannot "
    "work for the second case.",
    wrong=(
        Edit(
            SERIES,
            "if here.level >= before.level and here.level >= after.level:",
            "if here.level > before.level and here.level >= after.level:",
            "Two are reported for the plateau at the top. I try a strict comparison with the reading "
            "before it.",
        ),
        failure(
            f"{TEST_SERIES}::test_a_plateau_is_one_high_water",
            "assert [r.level for r in high_waters(rising)] == [6]",
            "assert [5, 6] == [6]",
            "  ",
            "  At index 0 diff: 5 != 6",
            "  Left contains one more item: 6",
            "  Use -v to get more diff",
        ),
    ),
)

TASKS = (ZONES, END, EMPTY_SPANS, PLATEAUS)
