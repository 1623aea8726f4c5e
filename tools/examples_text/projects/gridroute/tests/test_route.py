from gridroute import Grid, find_route

ROOM = """
#######
#S....#
#.###.#
#....G#
#######
"""

WALLED = """
#####
#S#G#
#####
"""


def test_finds_a_way():
    route = find_route(Grid.parse(ROOM))
    assert route is not None and route.cost == 6


def test_begins_and_ends_where_it_should():
    route = find_route(Grid.parse(ROOM))
    assert route.cells[0] == (1, 1) and route.cells[-1] == (3, 5)


def test_says_when_there_is_none():
    assert find_route(Grid.parse(WALLED)) is None


def test_diagonal_is_shorter():
    route = find_route(Grid.parse("S..\n...\n..G", diagonal=True))
    assert route.cost == 2
