"""A* search."""

import heapq
from dataclasses import dataclass

from gridroute.grid import Cell, Grid


@dataclass(frozen=True)
class Route:
    """Cells from the start to the goal, and what the way costs."""

    cells: tuple[Cell, ...]
    cost: int


def estimate(grid: Grid, cell: Cell, goal: Cell) -> int:
    """How much is still to pay, at least."""
    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])


def find_route(grid: Grid, start: Cell | None = None, goal: Cell | None = None) -> Route | None:
    """The cheapest way, or None if there is none."""
    start = start or grid.find("S")
    goal = goal or grid.find("G")
    best = {start: 0}
    came_from: dict[Cell, Cell] = {}
    frontier = [(estimate(grid, start, goal), start)]
    while frontier:
        _, cell = heapq.heappop(frontier)
        if cell == goal:
            return Route(walk_back(came_from, goal), best[goal])
        for other in grid.neighbours(cell):
            cost = best[cell] + grid.cost(cell)
            if other not in best or cost < best[other]:
                best[other] = cost
                came_from[other] = cell
                heapq.heappush(frontier, (cost + estimate(grid, other, goal), other))
    return None


def walk_back(came_from: dict[Cell, Cell], goal: Cell) -> tuple[Cell, ...]:
    """The cells of the way, from the start on."""
    cells = [goal]
    while cells[-1] in came_from:
        cells.append(came_from[cells[-1]])
    return tuple(reversed(cells))
