"""`python -m tests.soak --seconds 600`: draw after draw until the time is over; `--seed N` repeats one."""

from __future__ import annotations

import random
import shlex
import shutil
import sys
import time
from pathlib import Path

import click

import apcbatch  # noqa: F401  (before torch: it settles how threads wait)
from tests.soak.compare import Difference
from tests.soak.play import Player, Tally
from tests.soak.ways import Draw, make_draw

KILL_EVERY = 4


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="Begin no draw after so long.")
@click.option("--seed", type=int, help="Play this draw alone.")
@click.option("--kill", is_flag=True, help="With --seed: the draw has a way with SIGKILL.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default="soak-out", show_default=True, help="Work there.")
def soak(seconds: float, seed: int | None, kill: bool, device: str, folder: Path) -> None:
    """Compare random runs with cold ones, bit for bit. A draw that differs ends it: exit status 1, its files stay."""
    player = Player(folder.absolute(), device)
    if seed is not None:
        same = _played(player, make_draw(seed, kill), kill, Tally())
    else:
        same = _soak(player, seconds)
        if same:
            shutil.rmtree(folder)
    sys.exit(not same)


def _soak(player: Player, seconds: float) -> bool:
    """Play fresh draws for some seconds, or until one differs; whether all were the same."""
    begin, tally, same = time.monotonic(), Tally(), True
    while same and time.monotonic() - begin < seconds:
        kill = tally.draws % KILL_EVERY == KILL_EVERY - 1
        same = _played(player, make_draw(random.randrange(1 << 31), kill), kill, tally)
    click.echo(
        f"{tally.draws} draws, {tally.answers} answers compared with the cold run's, "
        f"{tally.cached_tokens} of {tally.prompt_tokens} prompt tokens restored, "
        f"{tally.accepted_tokens} of {tally.drafted_tokens} drafted tokens accepted, of {tally.new_tokens} new ones, "
        f"{'none differed' if same else 'the last one differs'}"
    )
    return same


def _played(player: Player, draw: Draw, kill: bool, tally: Tally) -> bool:
    """Play a draw, say how it went, and add it to the tally; whether all was the same."""
    begin = time.monotonic()
    played, what = Tally(draws=1), "same"
    try:
        played = player.play(draw)
    except Difference as difference:
        what = f"DIFFERS\n{difference}\nrepeat with: {repeat_command(draw.seed, kill, player.device)}"
    tally.add(played)
    click.echo(
        f"{draw.seed:>10} {draw.family:<12} {draw.form:<26} {draw.dtype:<8} {draw.generation['turns']:<7} "
        f"{len(draw.lines):>3} lines "
        f"{len(draw.ways)} ways {played.answers:>4} answers {played.cached_tokens:>6} restored "
        f"{played.accepted_tokens:>5} of {played.drafted_tokens:>5} drafted tokens accepted "
        f"{time.monotonic() - begin:5.1f} s{' kill' if kill else ''}  {what}"
    )
    return what == "same"


def repeat_command(seed: int, kill: bool, device: str) -> str:
    """What a user pastes to see a draw again, with its files left behind."""
    words = ["python", "-m", "tests.soak", "--seed", str(seed), *["--kill"] * kill]
    return shlex.join(words + ["--device", device] * (device != "cpu"))


if __name__ == "__main__":
    soak()
