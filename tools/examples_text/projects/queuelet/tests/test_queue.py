from queuelet import Backoff, Queue


def boom():
    raise RuntimeError("no")


def test_runs_what_is_due():
    queue, seen = Queue(), []
    queue.add(seen.append, "a")
    queue.run_due(now=1.0)
    assert seen == ["a"]


def test_higher_priority_first():
    queue, seen = Queue(), []
    queue.add(seen.append, "low", priority=1)
    queue.add(seen.append, "high", priority=9)
    queue.run_due(now=1.0)
    assert seen == ["high", "low"]


def test_waits_for_its_time():
    queue, seen = Queue(), []
    queue.add(seen.append, "a", not_before=5.0)
    assert queue.run_due(now=4.0) == [] and seen == []
    assert len(queue) == 1


def test_a_cancelled_job_does_not_run():
    queue, seen = Queue(), []
    queue.cancel(queue.add(seen.append, "a"))
    queue.run_due(now=1.0)
    assert seen == []


def test_tries_again():
    queue = Queue(Backoff(attempts=3))
    job = queue.add(boom)
    queue.run_due(now=1.0)
    assert job.failures == 1 and len(queue) == 1
