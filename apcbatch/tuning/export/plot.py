"""Plot hit rate, bytes and predicted seconds over block size.

matplotlib is optional, so it is imported only to draw.
"""

from __future__ import annotations

import importlib.util
import io

from apcbatch.errors import UsageError
from apcbatch.tuning.choice import Tuning

FORMATS = ("svg", "png")


def check_plot(path: str) -> str:
    """Return the image format of a file name; UsageError for one that cannot be drawn."""
    suffix = path.rpartition(".")[2].lower()
    if suffix not in FORMATS:
        raise UsageError(f"--plot {path}: expected a name that ends in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not there; run: pip install 'apcbatch[plot]'")
    return suffix


def draw(tuning: Tuning, format: str) -> bytes:
    """Draw the plot, and return it as an image file in this format."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "apcbatch"
    sizes = [candidate.block_size for candidate in tuning.candidates]
    panels = {
        "hit rate, %": [100 * candidate.table.hit_rate for candidate in tuning.candidates],
        "kept in the run, MiB": [candidate.table.written_bytes / 2**20 for candidate in tuning.candidates],
        "predicted seconds": [candidate.total_s for candidate in tuning.candidates],
    }
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.plot(sizes, values, marker="o", markersize=4)
        axes.axvline(tuning.recommended.block_size, linestyle=":", color="gray")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes], rotation=90)
        axes.set_ylim(bottom=0)
        axes.set(title=title, xlabel="block size, tokens")
        axes.grid(alpha=0.3)
        if title == "hit rate, %":
            axes.axhline(100 * tuning.forecast.ideal_hit_rate, linestyle="--", color="gray", label="ideal")
            axes.legend()
        verified = [candidate for candidate in tuning.candidates if candidate.verified is not None]
        if title == "predicted seconds" and verified:
            seconds = [candidate.verified.total_s for candidate in verified if candidate.verified]
            axes.plot([candidate.block_size for candidate in verified], seconds, "x", label="measured")
            axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format=format, metadata={"Date": None})
    return file.getvalue()
