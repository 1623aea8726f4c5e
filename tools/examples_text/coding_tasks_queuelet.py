"""Tasks in the project `queuelet`."""

from __future__ import annotations

from examples_text.coding_task import Edit, Failure, Task, after, changelog, failure

PROJECT = "queuelet"
QUEUE, RETRY, JOB = "queuelet/queue.py", "queuelet/retry.py", "queuelet/job.py"
TEST_QUEUE, TEST_RETRY = "tests/test_queue.py", "tests/test_retry.py"
SAME_PRIORITY = "test_same_priority_runs_in_the_order_of_adding"
LAST_QUEUE = "    assert job.failures == 1 and len(queue) == 1\n"
LAST_RETRY = "    assert Backoff(attempts=2).after(9) is None\n"

ATTEMPTS = Task(
    "attempts",
    PROJECT,
    "With Backoff(attempts=3) a job that always fails is called four times. I expected three: the first "
    "try and two more. Somebody on the list says it's documented that way, but the docstring says \"the "
    "waits between the attempts\". Please make it three.",
    (RETRY, QUEUE, TEST_RETRY),
    "waits",
    "I agree with the docstring: between three attempts there are two waits, but waits() yields one for "
    "each attempt. after(3) then finds a third wait and the queue tries a fourth time. The test of the "
    "growing waits looks only at the first three of four, so it would not notice.",
    after(
        TEST_RETRY,
        LAST_RETRY,
        "\n\ndef test_no_wait_after_the_last_attempt():\n"
        "    assert len(list(Backoff(attempts=3).waits())) == 2\n",
        "The smallest test is about waits() itself.",
    ),
    (
        failure(
            f"{TEST_RETRY}::test_no_wait_after_the_last_attempt",
            "assert len(list(Backoff(attempts=3).waits())) == 2",
            "assert 3 == 2",
            " +  where 3 = len([1.0, 2.0, 4.0])",
            " +    where [1.0, 2.0, 4.0] = list(<generator object Backoff.waits at 0x7f13bebd3880>)",
            " +      where <generator object Backoff.waits at 0x7f13bebd3880> = waits()",
            " +        where waits = Backoff(attempts=3, first=1.0, factor=2.0, ceiling=60.0).waits",
            " +          where Backoff(attempts=3, first=1.0, factor=2.0, ceiling=60.0) = "
            "Backoff(attempts=3)",
        ),
    ),
    (
        Edit(
            RETRY,
            "for _ in range(self.attempts):",
            "for _ in range(self.attempts - 1):",
            "Three waits for three attempts: the last one leads to a fourth attempt. One less is right.",
        ),
    ),
    "Backoff(attempts=3) now means three attempts with two waits between them. waits() in "
    "queuelet/retry.py yielded one wait too many. Everybody who relies on the old count gets one attempt "
    "less, so this should be in the release notes. With attempts=1 there are no waits at all, and the "
    "job fails at once, which I think is what it says.",
    follow=(
        "Right. Add a test that counts the calls of a whole queue, so that this can't come back from the "
        "other side, and the line for the changelog.",
        (
            after(
                TEST_QUEUE,
                LAST_QUEUE,
                "\n\ndef test_gives_up_after_the_last_attempt():\n"
                "    queue = Queue(Backoff(attempts=3))\n"
                "    job = queue.add(boom)\n"
                "    for now in range(1, 100, 10):\n"
                "        queue.run_due(now=float(now))\n"
                '    assert job.failures == 3 and job.state == "failed"\n',
                "The clock runs far enough for every wait to be over.",
            ),
            changelog("`Backoff(attempts=n)` means n attempts, not n + 1."),
        ),
        "There is a test now that runs a queue until the job has failed for good and counts three calls, and "
        "CHANGELOG.md says that the number of attempts has changed. All tests pass.",
    ),
)

TIES = Task(
    "ties",
    PROJECT,
    "Adding two jobs without a priority makes run_due crash now and then:\n\n"
    "TypeError: '<' not supported between instances of 'Job' and 'Job'\n\n"
    "It worked with one job. What's going on, and can you fix it so that equal jobs run in the order in "
    "which they "
    "were added?",
    (QUEUE, JOB, TEST_QUEUE),
    "_heap",
    "Entries of the heap are tuples of priority, time and job. If priority and time are equal, Python "
    "compares the jobs, and a Job has no order. Jobs with different priorities never get that far, which "
    "is why the tests pass. The queue already counts what was added in _added, but does not use it; it "
    "looks as if somebody has had the same idea.",
    after(
        TEST_QUEUE,
        LAST_QUEUE,
        "\n\ndef test_same_priority_runs_in_the_order_of_adding():\n"
        "    queue, seen = Queue(), []\n"
        '    for name in "abc":\n'
        "        queue.add(seen.append, name)\n"
        "    queue.run_due(now=1.0)\n"
        '    assert seen == ["a", "b", "c"]\n',
        "Three jobs, so that the order is tested and not only that nothing crashes.",
    ),
    (
        Failure(
            f"{TEST_QUEUE}::{SAME_PRIORITY}",
            (
                (
                    (
                        (TEST_QUEUE, SAME_PRIORITY, "queue.add(seen.append, name)"),
                        (QUEUE, "add", "self._push(job, priority, not_before)"),
                        (QUEUE, "_push", "heapq.heappush(self._heap, (-priority, not_before, job))"),
                    ),
                    ("TypeError: '<' not supported between instances of 'Job' and 'Job'",),
                ),
            ),
        ),
    ),
    (
        Edit(
            QUEUE,
            "heapq.heappush(self._heap, (-priority, not_before, job))",
            "heapq.heappush(self._heap, (-priority, not_before, self._added, job))",
            "It even happens while adding. I put the running number in front of the job: it is different "
            "for every entry, so the comparison never reaches the job, and it keeps the order.",
        ),
        Edit(
            QUEUE,
            "            priority, not_before, job = heapq.heappop(self._heap)\n"
            "            if job.state == CANCELLED:\n"
            "                continue\n"
            "            (due if not_before < now else later).append((priority, not_before, job))\n",
            "            entry = heapq.heappop(self._heap)\n"
            "            if entry[-1].state == CANCELLED:\n"
            "                continue\n"
            "            (due if entry[1] < now else later).append(entry)\n",
            "run_due takes the entries apart, so it has to know about the fourth member.",
        ),
        Edit(
            QUEUE,
            "        for priority, _, job in due:\n"
            "            self._run(job, -priority, now)\n"
            "        return [job for _, _, job in due]\n",
            "        for priority, *_, job in due:\n"
            "            self._run(job, -priority, now)\n"
            "        return [entry[-1] for entry in due]\n",
            "The same for the loop that runs them, and the type of the heap is still to do.",
        ),
        Edit(
            QUEUE,
            "list[tuple[int, float, Job]]",
            "list[tuple[int, float, int, Job]]",
            "",
        ),
    ),
    "Entries of the heap now carry the running number between the time and the job, so two jobs are "
    "never compared, and equal jobs run in the order in which they were added. The crash did not depend "
    "on luck: it happened whenever two entries had the same priority and the same time. A job that is "
    "tried again gets a new number and so goes behind the others, which seems fair.",
)

CANCELLED = Task(
    "cancelled",
    PROJECT,
    "len(queue) counts jobs that I have cancelled, until the next run_due. We use it to decide whether "
    "the process may exit, so we wait for jobs that will never run. Can cancelled jobs be left out?",
    (QUEUE, JOB, TEST_QUEUE),
    "cancel",
    "cancel() only marks the job, and the entry stays in the heap until run_due meets it. That is the "
    "usual way with a heap, because removing something from the middle would mean rebuilding it. So "
    "__len__ should not count the entries but the jobs that still wait.",
    after(
        TEST_QUEUE,
        LAST_QUEUE,
        "\n\ndef test_a_cancelled_job_is_not_counted():\n"
        "    queue = Queue()\n"
        "    queue.add(boom, priority=1)\n"
        "    queue.cancel(queue.add(boom))\n"
        "    assert len(queue) == 1  # the other one\n",
        "Two jobs, one of them cancelled.",
    ),
    (
        failure(
            f"{TEST_QUEUE}::test_a_cancelled_job_is_not_counted",
            "assert len(queue) == 1  # the other one",
            "assert 2 == 1",
            " +  where 2 = len(<queuelet.queue.Queue object at 0x7fbbab05cb10>)",
        ),
    ),
    (
        Edit(
            QUEUE,
            "        return len(self._heap)\n",
            "        return sum(job.state == WAITING for *_, job in self._heap)\n",
            "Two are counted, one of them cancelled. I count what is waiting. That takes time in "
            "proportion to the length of the queue, where it took none before.",
        ),
    ),
    "len(queue) now counts only jobs that wait. It goes through the queue each time, which is fine for "
    "asking now and then; if you ask in a tight loop with many thousands of jobs, a counter would be "
    "better, and I would add one. The heap itself still holds cancelled entries until run_due removes "
    "them.",
    follow=(
        "We ask once a second with at most a few hundred jobs, so that's fine. Changelog please.",
        (changelog("`len(queue)` does not count cancelled jobs."),),
        "Added under Unreleased. Nothing else has changed since the last run of the tests, which passed.",
    ),
)

ON_TIME = Task(
    "on-time",
    PROJECT,
    "A job with not_before=5.0 does not run in run_due(now=5.0), only in the next call after that. With "
    "our clock of one tick a second everything is a second late. I think \"not before\" should include "
    "the moment itself.",
    (QUEUE, TEST_QUEUE),
    "not_before",
    "run_due takes what has not_before < now. \"Not before five\" includes five, so it should be <=. "
    "With the default of 0.0 and a clock that starts at 0 a new job would not run in the first tick "
    "either, for the same reason.",
    after(
        TEST_QUEUE,
        LAST_QUEUE,
        "\n\ndef test_runs_at_its_very_time():\n"
        "    queue, seen = Queue(), []\n"
        '    queue.add(seen.append, "on time", not_before=5.0)\n'
        "    queue.run_due(now=5.0)\n"
        '    assert seen == ["on time"]\n',
        "",
    ),
    (
        failure(
            f"{TEST_QUEUE}::test_runs_at_its_very_time",
            'assert seen == ["on time"]',
            "AssertionError: assert [] == ['on time']",
            "  ",
            "  Right contains one more item: 'on time'",
            "  Use -v to get more diff",
        ),
    ),
    (
        Edit(
            QUEUE,
            "due if not_before < now else later",
            "due if not_before <= now else later",
            "Nothing has run, as you describe. The comparison has to include the moment itself.",
        ),
    ),
    "Jobs run at their very time now, because run_due compares with `<=`. I checked what happens to a "
    "job that fails with a wait of zero: it is put back for the same moment, but run_due has taken its "
    "list before, so it runs in the next call and there is no endless loop.",
    follow=(
        "Can you prove the part about the endless loop with a test? That would worry me.",
        (
            after(
                TEST_QUEUE,
                '    assert seen == ["on time"]\n',
                "\n\ndef test_a_wait_of_zero_runs_in_the_next_call():\n"
                "    queue = Queue(Backoff(attempts=5, first=0.0))\n"
                "    job = queue.add(boom)\n"
                "    queue.run_due(now=1.0)\n"
                "    assert job.failures == 1 and len(queue) == 1\n",
                "With a first wait of 0 the job comes back for the same moment.",
            ),
        ),
        "The test adds a job that fails at once, with a wait of zero, and sees exactly one attempt for "
        "each call of run_due. It passes, and it would hang if run_due took new entries while it runs.",
    ),
)

TASKS = (ATTEMPTS, TIES, CANCELLED, ON_TIME)
