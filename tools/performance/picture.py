"""The picture: seconds to the first token by the length of the prompt, computed and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the SVG file; the same bytes for the same document."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "apcbatch", "svg.fonttype": "none"})
    models = list(dict.fromkeys(one["model"] for one in document["measured"]))
    figure = Figure(figsize=(4.2 * len(models), 3.4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for color, one in zip(("C0", "C1"), (m for m in document["measured"] if m["model"] == model), strict=False):
            for group, style, kind in (("prefill", "-", "computed"), ("reuse", "--", "restored from RAM")):
                points = [(f["tokens"], f["seconds"]) for f in one["figures"] if f["group"] == group and "tokens" in f]
                if points:
                    label = f"{kind}, {one['dtype']}"
                    axes.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=model, xlabel="prompt, tokens", ylabel="seconds to the first token")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, format="svg", metadata={"Date": None})
