"""The pictures of the report in docs/images are those that the tool makes, and small."""

from __future__ import annotations

from tools.make_report_pictures import FOLDER, MOST_BYTES, PICTURES


def test_the_pictures_are_those_of_the_tool_and_small() -> None:
    """Fault: a picture that nothing makes anew when the page changes, or one as heavy as a photograph."""
    assert {path.name for path in FOLDER.glob("*.png")} == {f"{picture.name}.png" for picture in PICTURES}
    for path in FOLDER.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size <= MOST_BYTES, path.name
