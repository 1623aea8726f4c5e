"""`apcbatch doctor`: a line a check, the fix at the end of a failing one, and the exit status."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from apcbatch.cli.program import main
from apcbatch.job.doctor import Finding
from apcbatch.model.locate import locate_model
from tests.effort import table


def findings(capsys):
    """{check: (verdict, text)} of what was printed."""
    words = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    return {name: (verdict, text) for verdict, name, text in words}


def test_everything_is_there(capsys, tmp_path):
    """Fault: doctor finds fault with a machine on which everything runs."""
    code = main(["doctor", "--store", str(tmp_path / "states"), "--device", "cpu"])
    found = findings(capsys)
    checks = "python torch extension threads kernels cuda model memory ends template store"
    assert list(found) == checks.split()
    del found["threads"]  # which may say what is to be done about the machine
    assert code == 0 and all(verdict == "ok" for verdict, _ in found.values()), found


@pytest.fixture
def model(tmp_path):
    """A copy of the bundled model, to be damaged."""
    return shutil.copytree(locate_model("demo"), tmp_path / "model")


def test_an_incomplete_model_fails_and_names_the_file(capsys, model):
    """Fault: a missing tensor file passes, or ends in a traceback."""
    (model / "model.safetensors").unlink()
    assert main(["doctor", "--model", str(model), "--device", "cpu"]) == 1
    verdict, text = findings(capsys)["model"]
    assert verdict == "FAIL" and "model.safetensors" in text


def test_a_template_that_is_not_prefix_stable_is_named(capsys, model):
    """Fault: a template that spoils reuse goes unnoticed."""
    template = "{% for m in messages %}[{{ loop.revindex }} {{ m.role }}] {{ m.content }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    main(["doctor", "--model", str(model), "--device", "cpu"])
    assert "not prefix-stable" in findings(capsys)["template"][1]


def test_a_store_that_cannot_be_one_fails_with_the_fix(capsys, tmp_path):
    """Fault: the store is found unusable only when the run is over."""
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--store", str(tmp_path / "file"), "--device", "cpu"]) == 1
    verdict, text = findings(capsys)["store"]
    assert verdict == "FAIL" and "give a folder" in text


def test_a_store_below_a_folder_without_access_fails_with_the_fix(capsys, monkeypatch, tmp_path):
    """Fault: doctor advises to install apcbatch again."""

    def refuse(path, *more, **options):
        if "closed" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *more, **options)

    stat = os.stat
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "lstat", refuse)
    assert main(["doctor", "--store", str(tmp_path / "closed" / "store"), "--device", "cpu"]) == 1
    verdict, text = findings(capsys)["store"]
    assert verdict == "FAIL" and text.endswith("cannot be made: Permission denied; give another --store")


def test_the_instruction_set_can_be_chosen(capsys, monkeypatch):
    """Fault: APCBATCH_ISA is ignored, or one that the processor lacks ends in an illegal instruction."""
    from apcbatch.kernels.processor import isa, set_isa

    before = isa()
    try:
        monkeypatch.setenv("APCBATCH_ISA", "plain")
        assert main(["doctor", "--device", "cpu"]) == 0
        assert findings(capsys)["extension"] == ("ok", "instruction set plain")
    finally:
        set_isa(before)
    monkeypatch.setenv("APCBATCH_ISA", "avx3")
    assert main(["doctor", "--device", "cpu"]) == 2
    assert "APCBATCH_ISA is 'avx3'; expected one of" in capsys.readouterr().err


@table("faults, code", [(1, 1), (0, 0)])
def test_each_finding_is_a_row(capsys, monkeypatch, faults, code):
    """Fault: a warning fails a script, a fault does not, or the words of two rows do not stand below each other."""
    found = [Finding("python", True, "3.11"), Finding("template", True, "none", is_warning=True)]
    found += [Finding("extension", False, "missing")] * faults
    monkeypatch.setattr("apcbatch.job.doctor.examine", lambda resolved: found)
    assert main(["doctor"]) == code
    rows = ["ok    python     3.11", "WARN  template   none", "FAIL  extension  missing"]
    assert capsys.readouterr().out.splitlines() == rows[: 2 + faults]
