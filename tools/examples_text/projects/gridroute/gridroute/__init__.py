"""Shortest ways across maps drawn with characters."""

from gridroute.grid import Grid
from gridroute.search import find_route

__all__ = ["Grid", "find_route"]
