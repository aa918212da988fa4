"""The picture of FMHA's speed: what it shows, and which files it takes."""

import json

import pytest

from tools import plot_fmha


def figures(tmp_path, name, cells, tflops):
    path = tmp_path / name
    path.write_text(json.dumps({"rows": [{"d": d, "causal": c, "n": n, "tflops": tflops} for d, c, n in cells]}))
    return path


def test_every_implementation_has_a_line_in_every_panel(tmp_path):
    speeds = {"SDPA cuDNN": 500.0, "k2": 5.0, "k6/wgmma128": 450.0}
    paths = [
        figures(tmp_path, "64.json", [(64, False, 1024), (64, False, 4096)], speeds),
        figures(tmp_path, "128.json", [(128, True, 1024)], {"k2": 5.0}),
    ]
    out = tmp_path / "fmha.svg"
    plot_fmha.main([str(out), *map(str, paths)])
    picture = out.read_text()
    for text in (*speeds, "d = 64, no mask", "d = 128, causal", "1024", "4096", "TFLOP/s"):
        assert f">{text}</text>" in picture
    assert picture == plot_fmha.plot(plot_fmha.read(paths))  # the same bytes each time


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "no figures of tools.bench"), ("[", "no figures of tools.bench"), ('{"rows": []}', "got cells")],
)
def test_other_files_are_refused(tmp_path, capsys, content, message):
    path, out = tmp_path / "x.json", tmp_path / "x.svg"
    path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        plot_fmha.main([str(out), str(path)])
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_cell_is_taken_once(tmp_path, capsys):
    path = figures(tmp_path, "64.json", [(64, False, 1024)], {"k2": 5.0})
    with pytest.raises(SystemExit, match="2"):
        plot_fmha.main([str(tmp_path / "x.svg"), str(path), str(path)])
    assert "once" in capsys.readouterr().err
