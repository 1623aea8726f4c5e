"""`python -m tests.fuzz --seconds 600`: case after case until the time is over; `--target` and `--seed` repeat one."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded; the cases are small

import random
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
import datasets  # noqa: F401  (so that a child has it)
import transformers  # noqa: F401

import apcbatch  # noqa: F401  (before torch: it settles how threads wait)
import apcbatch.engine.engine
import apcbatch.job.job  # noqa: F401
from tests.fuzz import checkpoints, inputs, outputs, stores, tools
from tests.fuzz.case import Case
from tests.fuzz.child import Fault

TARGETS: dict[str, Callable[[Case], None]] = {
    name.removeprefix("fuzz_"): target
    for module in (inputs, outputs, checkpoints, stores, tools)
    for name, target in vars(module).items()
    if name.startswith("fuzz_")
}


@click.command()
@click.option("--seconds", type=float, help="Begin no case after so long; --cases bounds them otherwise.")
@click.option("--cases", type=int, default=150, show_default=True, help="Cases in all, without --seconds.")
@click.option("--seed", type=int, help="The first case's seed; with --target and --cases 1 it repeats it.")
@click.option("--target", "only", type=click.Choice(sorted(TARGETS)), multiple=True, help="These targets alone.")
@click.option("--patience", default=1.0, show_default=True, help="Multiplies what a case may take.")
@click.option("--keep-going", is_flag=True, help="Go on after a fault; its folder stays.")
@click.option("--folder", type=click.Path(path_type=Path), default="fuzz-out", show_default=True, help="Work there.")
def fuzz(
    seconds: float | None,
    cases: int,
    seed: int | None,
    only: tuple[str, ...],
    patience: float,
    keep_going: bool,
    folder: Path,
) -> None:
    """Mutate what is read; every case must end soon, in bounded memory, in an answer, an error record or a sentence."""
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    stock = folder / "stock"
    stores.stock_store(stock, Case(folder / "stocking", random.Random(0), stock, patience))
    names = sorted(only) or sorted(TARGETS)
    first = random.randrange(1 << 31) if seed is None else seed
    random.Random(first).shuffle(names)
    begin, counts, faults = time.monotonic(), Counter[str](), []
    number = 0
    while (time.monotonic() - begin < seconds) if seconds is not None else number < cases:
        name, case_seed = names[number % len(names)], first + number // len(names)
        number += 1
        counts[name] += 1
        fault = _play(name, case_seed, folder, stock, patience)
        if fault is not None:
            faults.append(fault)
            click.echo(fault)
            if not keep_going:
                break
    click.echo(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    click.echo(f"{number} cases in {time.monotonic() - begin:.0f} s, {len(faults)} faults")
    if not faults:
        shutil.rmtree(folder)
    sys.exit(bool(faults))


def _play(name: str, seed: int, folder: Path, stock: Path, patience: float) -> str | None:
    """Play one case; what broke, with the command that repeats it, or None."""
    case = Case(folder / f"{name}-{seed}", random.Random(f"{name} {seed}"), stock, patience)
    try:
        TARGETS[name](case)
    except Fault as fault:
        again = shlex.join(["python", "-m", "tests.fuzz", "--target", name, "--seed", str(seed), "--cases", "1"])
        ran = "\n".join(shlex.join(["apcbatch", *command]) for command in case.commands)
        return f"FAULT {name} {seed}: {fault}\nin {case.folder}:\n{ran}\nrepeat with: {again}\n"
    shutil.rmtree(case.folder, ignore_errors=True)
    return None


if __name__ == "__main__":
    fuzz()
