"""Drawing a route on its map."""

from gridroute.grid import Grid
from gridroute.search import Route


def draw(grid: Grid, route: Route) -> str:
    """The map with the steps of the route as stars; start and goal stay as they are."""
    rows = [list(row) for row in grid.rows]
    for row, column in route.cells:
        rows[row][column] = "*"
    return "\n".join("".join(row) for row in rows)
