"""The files of a model whose digest tells a resumed run that it is the same one."""

from __future__ import annotations

from pathlib import Path

from apcbatch.model.small_files import model_files_digest


def test_small_model_files_are_part_of_what_a_run_is(tmp_path: Path) -> None:
    """Fault: a run goes on with another template or tokenizer than it began with."""
    for name in ("tokenizer.json", "chat_template.jinja", "vocab.txt", "spiece.model", "model.safetensors"):
        (tmp_path / name).write_text(name)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    seen = {model_files_digest(tmp_path)}
    for name in ("tokenizer.json", "chat_template.jinja", "vocab.txt", "spiece.model"):
        (tmp_path / name).write_text("another")
        seen.add(model_files_digest(tmp_path))
    assert len(seen) == 5
    (tmp_path / "vocab.txt").rename(tmp_path / "words.txt")
    seen.add(model_files_digest(tmp_path))
    assert len(seen) == 6
    (tmp_path / "model.safetensors").write_text("weights are in the fingerprint")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert model_files_digest(tmp_path) in seen
