"""Reports as text and JSON, the schema that documents the JSON, and what changed since an older one."""

import copy
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from rich.console import Console

from goldens.case import Case
from goldens.compare import LOCATED, PART_NUMBERS, Verdict, against_exact
from tests import planted
from tools import environment, report
from tools.report.html import histogram
from tools.report.text import MARKDOWN_LINES, MARKDOWN_ROWS

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "report_schema.json").read_text())


def as_json(results):
    """A report as it comes back from a file."""
    return json.loads(json.dumps(report.to_json(results), allow_nan=False))


@pytest.fixture(scope="module")
def faulty():
    return [
        planted.run(planted.CASE, planted.warp(3)),
        planted.run("fmha/d64-causal-n64-normal", planted.special),
        planted.run("fmha/d64-n64-zeros", planted.missing),
        planted.run("attn_res/nb1-t2-half-nan"),
    ]


def test_details_name_the_warp(faulty):
    lines = report.details(faulty[0])
    assert "  all 512 come from tile 0, batch 0, warp 3" in lines
    assert lines[-1] == f"  again: goldens verify --case {planted.CASE}"
    assert report.details(faulty[3]) == []


def test_json_keeps_to_its_schema(faulty):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(as_json(faulty), SCHEMA)


def test_schema_documents_every_field_and_no_other(faulty):
    """Each object of a report is closed in the schema, and requires all it allows."""
    names = ("result", "verdict", "element", "tensor_map", "kernel_map")
    assert SCHEMA["additionalProperties"] is False
    for definition in (SCHEMA["$defs"][name] for name in names):
        assert definition["additionalProperties"] is False
        assert sorted(definition["required"]) == sorted(definition["properties"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.pop("environment"),
        lambda r: r.update(format=1),
        lambda r: r["results"][0].update(passed="no"),
        lambda r: r["results"][0]["verdicts"][0].update(used=1.0),
        lambda r: r["results"][0]["verdicts"][0]["worst"][0].update(got_bits="3e74"),
        lambda r: r["results"][0]["verdicts"][0].update(max_ulps=None),
    ],
    ids=["lacks-environment", "format", "passed", "old-name", "bits", "null"],
)
def test_schema_refuses(faulty, spoil):
    content = as_json(faulty)
    spoil(content)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, SCHEMA)


def test_json_has_numbers_that_json_lacks_as_words(faulty):
    exact = as_json(faulty)["results"][1]["verdicts"][0]
    assert [e["got"] for e in exact["worst"]] == ["nan", "-inf"]


def test_a_run_of_nothing_but_nan_is_infinitely_far_in_every_form():
    result = planted.run(planted.CASE, lambda outputs: outputs["o"].fill_(math.nan))
    content = as_json([result])
    jsonschema.validate(content, SCHEMA)
    exact, model = content["results"][0]["verdicts"]
    assert (exact["max_ulps"], model["max_ulps"], model["max_error_over_bound"]) == ("inf", "inf", "inf")
    [row] = report.rows(result)
    assert row.cells[4:6] == ("inf", "inf%")
    assert "| inf | inf% |" in report.to_markdown([result], "Title")
    assert " inf │ inf% " in " ".join("\n".join(terminal([result], 160)).split())
    assert report.against([result], content) == []
    page = report.to_html([result, planted.run("fmha/d64-n64-ties")], "Title")
    assert 'data-label="ULPs from model">inf<' in page
    assert 'data-label="error / bound">inf%<' in page


def test_a_call_that_failed_has_no_figures_against_the_model():
    verdict = Verdict("call", "model", False, "raised ValueError")
    page = report.to_html([replace(planted.run(planted.CASE), verdicts=(verdict,))], "Title")
    assert 'data-label="ULPs from model">–<' in page


def test_json_maps_where_the_failures_lie(faulty):
    exact = as_json(faulty)["results"][0]["verdicts"][0]
    kernel, tensor = exact["kernel_map"], exact["tensor_map"]
    assert kernel["located"] == exact["failing"] == 512
    assert kernel["parts"]["warp"] == {"3": 512}
    assert kernel["parts"]["lane"] == {str(lane): 16 for lane in range(32)}
    assert (tensor["rows"], tensor["columns"], tensor["cell_rows"], tensor["cell_columns"]) == (64, 64, 2, 1)
    assert tensor["cells"] == [[row, column, 2] for row in range(12, 16) for column in range(64)]


def test_many_failures_are_sampled_evenly():
    want = torch.zeros(3, 50_000)
    verdict = against_exact("o", want + 1, want, locate=lambda index: {"row": index[0], "column": index[1]})
    found = verdict.kernel_map
    assert found.located == LOCATED
    assert sum(found.parts["row"].values()) == LOCATED
    assert all(abs(n - LOCATED / 3) <= 1 for n in found.parts["row"].values())
    assert len(found.parts["column"]) == PART_NUMBERS < found.numbers["column"]
    assert sum(n for _, _, n in verdict.tensor_map.cells) == 150_000


def test_a_tensor_without_dimensions_is_mapped():
    verdict = against_exact("o", torch.tensor(1.0), torch.tensor(2.0), locate=lambda index: {"thread": len(index)})
    assert verdict.kernel_map.parts == {"thread": {0: 1}}
    assert verdict.tensor_map.cells == ((0, 0, 1),)


def terminal(results, width: int) -> list[str]:
    """The lines of a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(report.to_table(results, "Title"))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 80])
def test_a_narrow_terminal_has_lines_that_cut_nothing(faulty, width):
    lines = terminal(faulty, width)
    assert lines[0].strip() == "Title"
    assert max(map(len, lines)) <= width
    text = "".join("".join(lines).split())
    for row in (row for result in faulty for row in report.rows(result)):
        *name, verdict = (row.cells[i] for i in (0, 1, 2, -1))
        assert "".join([*name, verdict]).replace(" ", "") in text
        for column, cell in zip(report.COLUMNS[3:-1], row.cells[3:-1], strict=True):
            assert (f"{column}{cell}".replace(" ", "") in text) or not cell


def test_a_wide_terminal_has_a_table(faulty):
    lines = terminal(faulty, 140)
    [header] = [line for line in lines if "case" in line]
    assert all(column in header for column in report.COLUMNS)
    for row in (row for result in faulty for row in report.rows(result)):
        [line] = [line for line in lines if f" {row.cells[0]} " in line and f" {row.output} " in line]
        assert line.split("│")[-2].strip() == row.cells[-1]


def test_square_brackets_of_an_error_are_no_markup(faulty):
    words = "raised IndexError: [red]x[/]"
    verdict = Verdict("call", "exact", False, words)
    assert words in "\n".join(terminal([replace(faulty[0], verdicts=(verdict,))], 200))


def test_markdown(faulty):
    text = report.to_markdown(faulty, "Title")
    assert text.startswith("# Title\n\n1 of 4 runs passed; ")
    assert f"| {planted.CASE} | k2 | o | 512 of 4096 elements differ | " in text
    assert "missing: the candidate returned no such output" in text
    assert "all 512 come from tile 0, batch 0, warp 3" in text
    assert "Since the older report" not in text
    assert f"- commit: {environment.environment()['commit'] or 'none'}" in text


def test_markdown_says_what_changed(faulty):
    text = report.to_markdown(faulty, "Title", report.against(faulty, as_json([planted.run(planted.CASE)])))
    assert f"- newly failing: {planted.CASE} k2 o against exact: 512 of 4096 elements differ" in text
    assert "Nothing changed." in report.to_markdown(faulty, "Title", report.against(faulty, as_json(faulty)))


def test_markdown_of_thousands_is_bounded_and_says_so():
    failed, passed = planted.run(planted.CASE, planted.warp(0)), planted.run(planted.CASE)
    text = report.to_markdown([passed] * 3000 + [failed] * 200, "Title")
    assert f"{MARKDOWN_ROWS} of 3200 rows, failures first." in text
    assert text.count("| FAIL |") == 200
    assert text.count("| pass |") == MARKDOWN_ROWS - 200
    lines = 200 * len(report.details(failed))
    assert f"… {lines - MARKDOWN_LINES} of {lines} lines left out" in text
    assert len(text.encode()) < 1 << 20


def test_commands_make_the_run_again():
    case = Case("fmha", "a b", {}, {}, "normal", 0, ("k2",))
    runs = [report.Result(case, "k2", who, ()) for who in (report.EXACT_MODEL, report.OURS, "my.module:run it")]
    assert [r.command for r in runs] == [
        "goldens report --case 'fmha/a b'",
        "goldens verify --case 'fmha/a b'",
        "goldens verify --case 'fmha/a b' --candidate 'my.module:run it'",
    ]


def described(changes):
    return [str(change) for change in changes]


def test_against_itself_nothing_changed(faulty):
    assert report.against(faulty, as_json(faulty)) == []


def test_against_names_each_kind_of_change(faulty):
    warp3, special, absent, good = faulty
    worse = planted.run(planted.CASE, lambda o: o["o"].mul_(1.5))
    old = [planted.run(good.case.id, lambda o: o["prefix"].add_(1)), warp3, planted.run(special.case.id)]
    changes = report.against([good, worse, special, absent], as_json([*old, planted.run("fmha/d64-n64-ties")]))
    text = described(changes)
    assert [change.kind for change in changes] == sorted(
        (change.kind for change in changes), key=["newly failing", "removed", "changed", "fixed", "added"].index
    )
    assert f"newly failing: {special.case.id} k2 o against exact: {special.verdicts[0].reason}" in text
    assert "removed: fmha/d64-n64-ties k2" in text
    assert any(
        line.startswith(f"changed: {planted.CASE} k2 o against exact: failing elements 512 → 4096") for line in text
    )
    assert any(line.startswith(f"fixed: {good.case.id} cluster7 prefix against exact: was: ") for line in text)
    assert f"added: {absent.case.id} k2: fails" in text


def test_against_sees_moved_ulps_of_a_passing_verdict():
    result = planted.run(planted.CASE)
    moved = replace(result, verdicts=tuple(replace(v, max_ulps=v.max_ulps + 1) for v in result.verdicts))
    lines = described(report.against([moved], as_json([result])))
    assert lines[0] == f"changed: {planted.CASE} k2 o against exact: largest ULPs 0.0 → 1.0"
    assert len(lines) == 2


def test_against_does_not_take_nan_for_a_change():
    verdict = Verdict("o", "exact", False, "all differ", max_ulps=math.nan)
    result = replace(planted.run(planted.CASE), verdicts=(verdict,))
    assert report.against([result], as_json([result])) == []


def test_against_leaves_aside_cases_that_the_run_is_not_about(faulty):
    other = planted.run("fmha/d64-n64-ties")
    old = as_json([faulty[3], other])
    assert report.against([faulty[3]], old, [faulty[3].case.id]) == []
    assert [change.kind for change in report.against([faulty[3]], old)] == ["removed"]
    assert [change.case for change in report.against([], old, [other.case.id])] == [other.case.id]


def test_html_lists_what_was_not_judged(faulty):
    text = report.to_html(faulty[3:], "Title", None, ["fmha/x any: not supported: no <masks>"])
    assert "all judged passed" in text
    assert "1 not supported or not judged" in text
    assert "fmha/x any: not supported: no &lt;masks&gt;" in text
    assert "not judged" not in report.to_html(faulty[3:], "Title")


def test_against_sees_an_output_that_is_new_or_gone(faulty):
    _, _, absent, _ = faulty
    before = as_json([planted.run(absent.case.id)])
    text = described(report.against([absent], before))
    assert f"added: {absent.case.id} k2 O against exact: fails: extra: the golden has no such output" in text
    assert f"removed: {absent.case.id} k2 o against model: passes" in text


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ({}, "old report: this is no JSON report of"),
        ([], "old report: this is no JSON report of"),
        ({"format": 2, "results": None}, "old report: this is no JSON report of"),
        ({"format": 1, "results": []}, "old report: its format is 1, allowed is 2; make it again"),
        ({"format": 2, "results": [{"case": "a"}]}, r"old report: a run or a verdict is not as it should be"),
        ({"format": 2, "results": [3]}, r"old report: a run or a verdict is not as it should be"),
    ],
)
def test_against_refuses_what_is_no_report(old, message):
    with pytest.raises(ValueError, match=message):
        report.against([], copy.deepcopy(old))


def test_a_small_bar_is_seen_beside_a_large_one():
    bars = histogram({"0": 1 << 30, "inf": 1, "1": 0})
    assert [(bar.label, bar.count) for bar in bars] == [("0", 1 << 30), ("more", 1)]
    assert bars[0].length == 1.0
    assert 0.03 < bars[1].length < 0.1


def test_the_commit_may_be_given(monkeypatch):
    monkeypatch.setenv("GOLDENS_COMMIT", "0123abc-dirty")
    assert environment.commit() == ("0123abc", True)
    assert environment.environment()["commit"] == "0123abc-dirty"
    assert environment.headline().endswith(", commit 0123abc-dirty")
    monkeypatch.setenv("GOLDENS_COMMIT", "0123abc")
    assert environment.commit() == ("0123abc", False)


def test_the_commit_is_that_of_this_checkout(monkeypatch, tmp_path):
    monkeypatch.delenv("GOLDENS_COMMIT", raising=False)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "tools" / "environment.py"))
    assert environment.commit() == (None, None)
    words = ("init -q", "config user.name x", "config user.email x@x", "commit -q --allow-empty -m x")
    for line in words:
        environment.subprocess.run(["git", "-C", tmp_path, *line.split()], check=True)
    head, dirty = environment.commit()
    assert (len(head), dirty) == (40, False)
    (tmp_path / "new").touch()
    assert environment.commit() == (head, True)
