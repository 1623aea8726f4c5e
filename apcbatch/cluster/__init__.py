"""One run on many machines: a driver that hands out the plan in units, and workers that are engines.

Must not know: text. Only `ray_seam` knows Ray; only the workers' side knows torch.
"""
