"""Tasks in the project `gridroute`."""

from __future__ import annotations

from examples_text.coding_task import Edit, Failure, Task, after, changelog, failure

PROJECT = "gridroute"
GRID, SEARCH, DRAW = "gridroute/grid.py", "gridroute/search.py", "gridroute/draw.py"
TEST_ROUTE, TEST_DRAW = "tests/test_route.py", "tests/test_draw.py"
LAST_ROUTE = "    assert route.cost == 2\n"

DIAGONAL = Task(
    "diagonal",
    PROJECT,
    "With diagonal=True the route is not always the cheapest. On this map it finds a way for 9, but I "
    "can see one for 8 by hand:\n\nS~.~~\n.~~..\n#.#.G\n\nWithout diagonal steps I have never seen a "
    "wrong result.",
    (SEARCH, GRID, TEST_ROUTE),
    "estimate",
    "A* finds the cheapest way only if the estimate never exceeds what is really still to pay. The "
    "estimate here is the sum of rows and columns, which is right for straight steps. A diagonal step "
    "covers one row and one column for the price of one, so with diagonal=True the sum can be twice too "
    "high, and a good cell is looked at too late.",
    after(
        TEST_ROUTE,
        LAST_ROUTE,
        "\n\ndef test_diagonal_way_is_the_cheapest():\n"
        '    route = find_route(Grid.parse("S~.~~\\n.~~..\\n#.#.G", diagonal=True))\n'
        "    assert route.cost == 8\n",
        "Your map is small enough to be the test.",
    ),
    (
        failure(
            f"{TEST_ROUTE}::test_diagonal_way_is_the_cheapest",
            "assert route.cost == 8",
            "assert 9 == 8",
            " +  where 9 = Route(cells=((0, 0), (1, 0), (2, 1), (1, 2), (2, 3), (2, 4)), cost=9).cost",
        ),
    ),
    (
        Edit(
            SEARCH,
            "    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])\n",
            "    down, right = abs(cell[0] - goal[0]), abs(cell[1] - goal[1])\n"
            "    return max(down, right) if grid.diagonal else down + right\n",
            "9 instead of 8, as you said. With diagonal steps at least max(rows, columns) steps are "
            "needed, and each costs at least 1, so that is the largest estimate that is never too high.",
        ),
    ),
    "The estimate was too high when diagonal steps are allowed, so A* passed over cheaper ways. It is "
    "the larger of rows and columns now, in estimate() in gridroute/search.py, and the sum as before "
    "without diagonal steps. The search looks at a few more cells on open maps, which is the price of "
    "being right.",
    follow=(
        "Thanks, I had suspected the swamp. Please add a line to the changelog.",
        (changelog("Routes with diagonal steps are the cheapest ones again."),),
        "It is in CHANGELOG.md. The swamp was innocent, but it is what made the difference visible: on "
        "maps where every cell costs 1 the wrong estimate rarely matters.",
    ),
)

RAGGED = Task(
    "ragged",
    PROJECT,
    "My editor removes spaces at the end of lines, so some rows of my maps are shorter than the first. "
    "Then I get an IndexError from is_open. Rows that are too short should behave as if there were walls.",
    (GRID, TEST_ROUTE),
    "is_open",
    "is_open compares the column with the length of the first row, whatever row the cell is in. In a "
    "shorter row the column can be outside, and in a longer one the last cells can never be entered, "
    "which nobody would notice.",
    after(
        TEST_ROUTE,
        LAST_ROUTE,
        "\n\ndef test_short_rows_end_with_walls():\n"
        '    route = find_route(Grid.parse("S...\\n..\\n...G"))\n'
        "    assert route.cost == 5\n"
        "\n\ndef test_long_rows_can_be_used():\n"
        '    route = find_route(Grid.parse("S.\\n#..\\n..G"))\n'
        "    assert route.cost == 4\n",
        "One test for a short row. I also test a row that is longer than the first.",
    ),
    (
        Failure(
            f"{TEST_ROUTE}::test_short_rows_end_with_walls",
            (
                (
                    (
                        (TEST_ROUTE, "test_short_rows_end_with_walls", 'find_route(Grid.parse("S...'),
                        (SEARCH, "find_route", "for other in grid.neighbours(cell):"),
                        (GRID, "neighbours", "if self.is_open(other):"),
                        (GRID, "is_open", "return self.rows[row][column] in COSTS"),
                    ),
                    ("IndexError: string index out of range",),
                ),
            ),
        ),
        failure(
            f"{TEST_ROUTE}::test_long_rows_can_be_used",
            "assert route.cost == 4",
            "AttributeError: 'NoneType' object has no attribute 'cost'",
        ),
    ),
    (
        Edit(
            GRID,
            "column >= len(self.rows[0]):",
            "column >= len(self.rows[row]):",
            "That is the IndexError. The length of the row itself is the one that counts; the test "
            "before it makes sure that the row exists.",
        ),
    ),
    "Each row is now as wide as it is: cells beyond its end are closed, and a row that is longer than "
    "the first can be used to its end, which was silently impossible before. The change is one word in "
    "is_open (gridroute/grid.py). I noticed that parse() strips spaces at the beginning of lines as "
    "well, which shifts rows that begin with a space; a space is not a valid cell today, so I left it.",
)

SWAMP = Task(
    "swamp",
    PROJECT,
    "find_route(grid, start=(0, 0)) on the map \"~.G\" says that the cost is 6. The README says that "
    "swamp costs 5 to enter, and I'm not entering it, I'm leaving it. So it should be 2, right?",
    (SEARCH, GRID, TEST_ROUTE),
    ".cost",
    "You are right. find_route adds the cost of the cell it leaves instead of the one it enters. As long "
    "as start and goal both cost 1 the sum is the same in the end, because every cell in between is "
    "counted once either way. It shows only if the start is a swamp, or the goal.",
    after(
        TEST_ROUTE,
        LAST_ROUTE,
        "\n\ndef test_leaving_the_swamp_is_free():\n"
        '    route = find_route(Grid.parse("~.G"), start=(0, 0))\n'
        "    assert route.cost == 1 + 1\n",
        "",
    ),
    (
        failure(
            f"{TEST_ROUTE}::test_leaving_the_swamp_is_free",
            "assert route.cost == 1 + 1",
            "assert 6 == (1 + 1)",
            " +  where 6 = Route(cells=((0, 0), (0, 1), (0, 2)), cost=6).cost",
        ),
    ),
    (
        Edit(
            SEARCH,
            "cost = best[cell] + grid.cost(cell)",
            "cost = best[cell] + grid.cost(other)",
            "6 is what leaving costs. The step goes to `other`, so that is what has to be paid.",
        ),
    ),
    "A step now costs what the cell it enters costs, as the README says. Before, it cost what the cell "
    "it leaves costs, which gives the same sum unless the start or the goal is a swamp. The estimate is "
    "still never too high, because every step costs at least 1.",
    follow=(
        "Great. Would a goal in the swamp have been wrong as well?",
        (
            after(
                TEST_ROUTE,
                "    assert route.cost == 1 + 1\n",
                "\n\ndef test_a_goal_in_the_swamp_is_paid():\n"
                '    route = find_route(Grid.parse("S.~"), goal=(0, 2))\n'
                "    assert route.cost == 1 + 5\n",
                "It would have been 2 instead of 6. I'll add that case, since it is the other half of "
                "the same mistake.",
            ),
        ),
        "Yes, it was too cheap: 2 instead of 6. It is right now, and there is a test for it. The worst "
        "part would have been the choice between two goals, where the one in the swamp would have looked "
        "better than it is.",
    ),
)

DRAWING = Task(
    "drawing",
    PROJECT,
    "draw() paints over S and G, so one can't see any more where the route begins. The docstring "
    "promises that they stay. There don't seem to be any tests for draw.py at all, could you add a file "
    "for them?",
    (DRAW, SEARCH, GRID),
    "draw",
    "draw() puts a star on every cell of the route, and the first and the last cell are the start and "
    "the goal. The steps are the cells in between. There is no tests/test_draw.py yet, so I'll make one.",
    Edit(
        TEST_DRAW,
        "",
        "from gridroute import Grid, find_route\n"
        "from gridroute.draw import draw\n"
        "\n\ndef drawn(text):\n"
        "    grid = Grid.parse(text)\n"
        "    return draw(grid, find_route(grid))\n"
        "\n\ndef test_start_and_goal_stay():\n"
        '    assert drawn("S..G") == "S**G"\n'
        "\n\ndef test_walls_stay():\n"
        '    assert drawn("S#\\n.G").splitlines()[0] == "S#"\n'
        "\n\ndef test_neighbours_need_no_stars():\n"
        '    assert drawn("SG") == "SG"\n',
        "Three tests: the promise, a map with a wall, and the shortest route there is.",
    ),
    (
        failure(
            f"{TEST_DRAW}::test_start_and_goal_stay",
            'assert drawn("S..G") == "S**G"',
            "AssertionError: assert '****' == 'S**G'",
            "  ",
            "  - S**G",
            "  + ****",
        ),
        failure(
            f"{TEST_DRAW}::test_walls_stay",
            '.splitlines()[0] == "S#"',
            "AssertionError: assert '*#' == 'S#'",
            "  ",
            "  - S#",
            "  + *#",
        ),
        failure(
            f"{TEST_DRAW}::test_neighbours_need_no_stars",
            'assert drawn("SG") == "SG"',
            "AssertionError: assert '**' == 'SG'",
            "  ",
            "  - SG",
            "  + **",
        ),
    ),
    (
        Edit(
            DRAW,
            "for row, column in route.cells:",
            "for row, column in route.cells[1:-1]:",
            "The ends have to be left out. The slice is empty for a route of two cells, so that case is "
            "right, too.",
        ),
    ),
    "draw() leaves the first and the last cell of the route alone now, as its docstring says. "
    "tests/test_draw.py is new and has three tests, all of which failed before. A route of a single "
    "cell, where start and goal are the same, draws nothing, and I think that is right.",
)

TASKS = (DIAGONAL, RAGGED, SWAMP, DRAWING)
