"""A job queue inside one process."""

from queuelet.job import Job
from queuelet.queue import Queue
from queuelet.retry import Backoff

__all__ = ["Backoff", "Job", "Queue"]
