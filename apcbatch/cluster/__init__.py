"""One run on several machines: a driver that assigns units of the plan to workers, which are engines.

Must not know: text. Only `ray_*.py` know Ray; only `worker.py` knows torch.
"""
