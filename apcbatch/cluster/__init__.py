"""A run on several machines: a driver that assigns units of the plan to workers, each of which is an engine.

Only `ray_*.py` import Ray, and only `worker.py` imports torch.
"""
