from fractions import Fraction

from recipebox.parser import Ingredient, parse, parse_line


def test_reads_an_amount_and_a_unit():
    assert parse_line("200 g butter") == Ingredient("butter", Fraction(200), "g")


def test_reads_things_that_are_counted():
    assert parse_line("2 eggs") == Ingredient("eggs", Fraction(2))


def test_reads_fractions():
    assert parse_line("1/2 teaspoon salt") == Ingredient("salt", Fraction(1, 2), "tsp")


def test_skips_empty_lines():
    assert len(parse("2 eggs\n\n200 g butter\n")) == 2


def test_scales():
    assert parse_line("3 eggs").scaled(Fraction(2)).amount == 6
