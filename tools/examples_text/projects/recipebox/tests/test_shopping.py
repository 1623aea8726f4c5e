from recipebox.parser import parse
from recipebox.shopping import shopping_list
from recipebox.units import convert


def names(recipes):
    return [str(item) for item in shopping_list(recipes)]


def test_adds_up():
    assert names([parse("200 g butter"), parse("50 g butter")]) == ["250 g butter"]


def test_adds_different_units():
    assert names([parse("1 cup milk"), parse("60 ml milk")]) == ["300 ml milk"]


def test_is_sorted():
    assert names([parse("200 g sugar\n100 g butter")]) == ["100 g butter", "200 g sugar"]


def test_converts_volumes():
    assert convert(2, "tbsp", "tsp") == 6
