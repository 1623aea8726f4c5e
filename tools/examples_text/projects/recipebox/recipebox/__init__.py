"""Recipes: reading, scaling, shopping."""
