"""Files that others can write to: links are not followed, and what is written is complete or absent."""

import os
import stat
import sys
import threading

import pytest

from membydesign import files

links = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")


@links
def test_a_planted_link_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.md.partial").symlink_to(victim)
    (out / "report.md").symlink_to(victim)
    files.write_text(out / "report.md", "new")
    assert victim.read_text() == "precious"
    assert not (out / "report.md").is_symlink()
    assert (out / "report.md").read_text() == "new"


@links
def test_appending_refuses_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "log.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="log.jsonl: expected a regular file, got a symbolic link"):
        files.append_text(tmp_path / "log.jsonl", "more")
    assert victim.read_text() == "precious"


def test_appending(tmp_path):
    for text in ("größer\n", "more\n"):
        files.append_text(tmp_path / "log.jsonl", text, sync=text == "more\n")
    assert (tmp_path / "log.jsonl").read_bytes() == "größer\nmore\n".encode()


def test_files_get_the_usual_permissions_and_nothing_stays_behind(tmp_path):
    (tmp_path / "usual").write_text("")
    files.write_text(tmp_path / "written", "text")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "written")}
    assert len(modes) == 1
    with pytest.raises(TypeError), files.replacing(tmp_path / "written") as file:
        file.writelines([b"half", None])  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert (tmp_path / "written").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["usual", "written"]


def test_two_writers_at_once_do_not_mix(tmp_path):
    texts = [letter * 200_000 for letter in "ab"]
    writers = [
        threading.Thread(target=lambda text=text: [files.write_text(tmp_path / "x", text) for _ in range(5)])
        for text in texts
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (tmp_path / "x").read_text() in texts
    assert os.listdir(tmp_path) == ["x"]


@links
def test_a_planted_folder_link_is_not_filled(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("")
    (tmp_path / "model.partial").symlink_to(victim)
    partial = files.partial_folder(tmp_path / "model")
    assert partial == tmp_path / "model.partial"
    assert not partial.is_symlink()
    (partial / "file").write_text("")
    assert os.listdir(victim) == ["kept"]
    assert files.partial_folder(tmp_path / "model") == partial
    assert not any(partial.iterdir()), "what a killed process left is removed"


@links
def test_links_out_of_a_folder_are_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "file").write_text("inside")
    (folder / "within").symlink_to("file")
    (folder / "out").symlink_to("../secret")
    (tmp_path / "alias").symlink_to(folder)
    for name in ("file", "within"):
        for start in (folder, tmp_path / "alias"):
            files.check_inside(start / name, start)
    with pytest.raises(ValueError, match=r"out: expected a file in .*folder, got a link to .*secret"):
        files.check_inside(folder / "out", folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "{", "1" * 5000, '"\\ud8'])
def test_json_that_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        files.parse_json(text)


def test_json_in_a_file_is_named(tmp_path):
    (tmp_path / "c.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"c.json: expected JSON, got .*utf-8"):
        files.read_json(tmp_path / "c.json")
    (tmp_path / "c.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"c.json: expected JSON, got values nested too deeply"):
        files.read_json(tmp_path / "c.json")
    (tmp_path / "c.json").write_text('{"a": [1, "ü"]}', encoding="utf-8")
    assert files.read_json(tmp_path / "c.json") == {"a": [1, "ü"]}
