"""What makes goldens: it refuses what it does not know, and makes again what is committed."""

from __future__ import annotations

import pytest

from scripts.goldens.command import run


def test_an_unknown_name_is_refused_before_a_folder_is_touched(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "notes" / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    monkeypatch.setattr("sys.argv", ["make_goldens", "llama", "notes", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run(None, ["llama", "qwen2"], "", lambda name, folder: None)
    assert ended.value.code == 2
    assert "nothing is called ['notes']; there are ['llama', 'qwen2']" in capsys.readouterr().err
    assert kept.read_text() == "mine" and not (tmp_path / "llama").exists()
