"""Continuous batching over states and snapshots. Must not know: text, files, the command line."""

from apcbatch.config import settle_thread_waiting

settle_thread_waiting()  # here, because importing any module of the engine comes before torch is loaded
