"""The files of a model whose digest tells a resumed run that it is the same one."""

from __future__ import annotations

from pathlib import Path

from apcbatch.data.model_files import model_files_digest


def test_what_is_read_is_part_of_what_a_run_is(tmp_path: Path) -> None:
    """Fault: a run continues with another template or tokenizer than it began with, one by name among them; or is
    refused because something else lies in the folder."""
    converted = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json",
             "generation_config.json", "hf_quant_config.json", "quantize_config.json", "chat_template.jinja",
             "additional_chat_templates/tool_use.jinja")  # fmt: skip
    (tmp_path / "additional_chat_templates").mkdir()
    seen: set[str] = set()
    for content in ("", "one", "another"):
        for name in (*names, *converted):
            (tmp_path / name).write_text(content)
            seen.add(model_files_digest(tmp_path))
    assert len(seen) == 3 * len((*names, *converted))
    (tmp_path / "tokenizer.json").write_text("{}")  # from here on those that are converted are not read
    before = model_files_digest(tmp_path)
    for name in (*converted, "README.txt", "preprocessor_config.json", "model.safetensors", "old.jinja"):
        (tmp_path / name).write_text("changed")
    assert model_files_digest(tmp_path) == before not in seen
