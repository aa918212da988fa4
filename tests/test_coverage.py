"""What a trial judged of what it was asked for, and the exit code where that was not all."""

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from tools import cli
from tools.coverage import Coverage, Seen

pytestmark = pytest.mark.usefixtures("in_process")

REPOSITORY = Path(__file__).parent.parent
THEIRS = REPOSITORY / "tests" / "on_trial" / "theirs.py"
INSERT, ATTENTION = "cache_insert/b1-p1x1-unit", "fmha/d64-n64-zeros"
MODEL_ONLY, EXACT_ONLY = "fmha/d64-q1-k65-normal", "fmha/d64-n64-overflow"


def verify(name: str, *options: str | Path) -> Result:
    words = ["verify", "--candidate", f"{THEIRS}:{name}", "--device", "cpu", *map(str, options)]
    return CliRunner().invoke(cli.app, words)


def share(result: Result) -> str:
    [line] = [line for line in result.stdout.splitlines() if line.startswith("judged: ")]
    return line


def test_all_judged_is_a_success() -> None:
    result = verify("attention", "--case", ATTENTION, "--case", MODEL_ONLY)
    assert result.exit_code == 0
    assert share(result) == "judged: 2 of 2 runs, 2 of 2 cases, 4,225 elements"


def test_refusing_all_cases_but_one_is_no_success_unless_it_is_meant() -> None:
    result = verify("refuses_but_one", "--kernel", "cache_insert")
    assert result.exit_code == 2
    assert "; refused by the candidate: " in share(result)
    assert "not all was judged: refused by the candidate: " in result.stderr
    assert "--partial says that this is meant" in result.stderr
    meant = verify("refuses_but_one", "--kernel", "cache_insert", "--partial")
    assert (meant.exit_code, share(meant), meant.stderr) == (0, share(result), meant.stderr)


@pytest.mark.parametrize("options", [(), ("--partial",), ("--invariance",), ("--invariance", "--partial")])
def test_nothing_judged_is_no_success_whatever_is_meant(options: tuple) -> None:
    result = verify("refuses", "--case", INSERT, *options)
    assert result.exit_code == 2
    assert "not supported: pages of one row" in result.stdout
    assert "nothing was judged: the candidate does none of it" in result.stderr


OUTPUTS = {
    "declared": ("only_o", "never judged: fmha lse (which it says it does not return)"),
    "undeclared": ("silent_o", "never judged: fmha lse"),
}


@pytest.mark.parametrize(("name", "words"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_that_is_never_judged_is_no_success_unless_it_is_meant(name: str, words: str) -> None:
    result = verify(name, "--case", ATTENTION)
    assert result.exit_code == 2
    assert share(result).endswith(words)
    assert f"not all was judged: {words}. --partial" in result.stderr
    assert verify(name, "--case", ATTENTION, "--partial").exit_code == 0


def test_an_adapter_of_this_checkout_declares_what_it_leaves_out() -> None:
    words = ["verify", "--candidate", "sdpa", "--device", "cpu", "--case", ATTENTION]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0
    assert share(result).endswith("never judged: fmha lse (which it says it does not return)")


def test_a_schedule_is_asked_for_its_own_outputs_alone() -> None:
    """k2 makes no lse."""
    words = ["verify", "--candidate", "exact", "--device", "cpu", "--case", ATTENTION, "--schedule", "k2"]
    result = CliRunner().invoke(cli.app, words)
    assert (result.exit_code, "never judged" in result.stdout) == (0, False)


def test_what_cannot_be_judged_without_a_claim_is_said_and_is_no_gap() -> None:
    result = verify("attention", "--case", EXACT_ONLY, "--case", ATTENTION)
    assert result.exit_code == 0
    assert "judged: 1 of 2 runs, 1 of 2 cases" in share(result)
    assert "1 runs on which only a schedule's bits decide" in share(result)


def test_no_output_at_all_passes_no_property() -> None:
    result = verify("empties", "--case", INSERT, "--invariance")
    assert result.exit_code == 1
    assert f"{INSERT} any cache against invariance: missing: the candidate returned no such output" in result.stdout
    assert "0 of 1 runs passed" in result.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reshapes", "cache against invariance: shape: got (576,), wanted (1, 1, 576)"),
        ("adds", "lse against invariance: extra: the golden has no such output"),
        ("widens", "cache against invariance: dtype: got torch.float32, wanted torch.float8_e4m3fn"),
    ],
)
def test_outputs_of_another_form_pass_no_property(name: str, words: str) -> None:
    result = verify(name, "--case", INSERT, "--case", "cache_insert/b2-crossing-normal", "--invariance")
    assert result.exit_code == 1
    assert words in result.stdout
    assert "0 of 2 runs passed" in result.stdout


def test_the_reports_say_it(tmp_path: Path) -> None:
    files = ("--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md", "--html", tmp_path / "r.html")
    result = verify("only_o", "--case", ATTENTION, "--case", EXACT_ONLY, *files)
    assert result.exit_code == 2
    content = json.loads((tmp_path / "r.json").read_text())
    jsonschema.validate(content, json.loads((REPOSITORY / "docs" / "report_schema.json").read_text()))
    said = content["trial"]
    assert (said["runs"], said["runs_judged"], said["cases"], said["cases_judged"]) == (2, 1, 2, 1)
    assert said["never_judged"] == ["fmha lse (which it says it does not return)"]
    assert [(x["case"], x["schedule"]) for x in content["not_supported"]] == [(EXACT_ONLY, "any")]
    assert f"- {EXACT_ONLY} any: not judged" in (tmp_path / "r.md").read_text()
    for kind in ("md", "html"):
        assert "judged: 1 of 2 runs" in (tmp_path / f"r.{kind}").read_text()


def test_a_gap_is_an_output_of_a_run_that_could_have_been_judged() -> None:
    whole = Seen("a", "k", ("o", "lse"), judged=("o",), elements=3)
    assert Coverage((whole,)).never == ("k lse",)
    assert Coverage((whole, Seen("b", "k", ("lse",), judged=("lse",)))).gaps == []
    assert Coverage((whole, Seen("b", "m", ("lse",), judged=("lse",)))).never == ("k lse",)
    assert Coverage((Seen("a", "k", ("o",), unjudgeable=True),)).gaps == []
    assert Coverage((Seen("a", "k", ("o",), refused=1),)).gaps == [
        "refused by the candidate: 1 calls",
        "never judged: k o",
    ]
    assert str(Coverage((Seen(**json.loads(json.dumps(whole.plain()))),))) == str(Coverage((whole,)))
