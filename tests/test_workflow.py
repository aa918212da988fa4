"""The GitHub Actions workflow: it parses, what it runs exists, and its shards cover everything once."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.hopper.conftest import one_gpu
from tools import cli
from tools.shard import parse

REPOSITORY = Path(__file__).parent.parent
WORKFLOW = REPOSITORY / ".github" / "workflows" / "goldens.yml"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    content = yaml.safe_load(WORKFLOW.read_text())
    assert set(content) >= {"name", True, "permissions", "jobs"}  # YAML 1.1 reads the key `on` as true
    return content["jobs"]


def scripts(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_the_jobs_are_there(jobs: dict[str, Any]) -> None:
    assert set(jobs) == {"cpu", "on-demand", "hopper"}
    assert "self-hosted" in jobs["hopper"]["runs-on"]
    assert all("timeout-minutes" in job for job in jobs.values())
    for job in (jobs["cpu"], jobs["hopper"]):
        assert any(step.get("uses", "").startswith("actions/upload-artifact@") for step in job["steps"])
        assert "cat reports/" in scripts(job)
        assert '"$GITHUB_STEP_SUMMARY"' in scripts(job)


def test_what_it_makes_is_in_the_makefile(jobs: dict[str, Any]) -> None:
    targets = set(re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    called = {name: set(re.findall(r"make (\w+)", scripts(jobs[name]))) for name in ("cpu", "on-demand")}
    assert called == {"cpu": {"goldens", "test"}, "on-demand": {"digests"}}
    assert set().union(*called.values()) <= targets


def test_every_night_all_cases_are_made_again(jobs: dict[str, Any]) -> None:
    assert yaml.safe_load(WORKFLOW.read_text())[True]["schedule"][0]["cron"]
    assert "schedule" in jobs["on-demand"]["if"]
    assert "--check --all --shard $(SHARD)" in (REPOSITORY / "Makefile").read_text()


def test_its_commands_and_options_exist(jobs: dict[str, Any]) -> None:
    text = scripts(jobs["hopper"]).replace("\\\n", " ")
    lines = [line.partition("tools.cli ")[2] for line in text.splitlines() if "tools.cli " in line]
    commands = typer.main.get_command(cli.app).commands
    assert [shlex.split(line)[0] for line in lines] == ["doctor", "verify"]
    for line in lines:
        name, *words = shlex.split(line)
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
    assert "pytest -m hopper tests/hopper" in text


def test_its_shards_are_all_of_them(jobs: dict[str, Any]) -> None:
    for job in jobs.values():
        numbers = job["strategy"]["matrix"]["shard"]
        found = re.findall(r"(?:--shard |SHARD=\")\$\{\{ matrix\.shard \}\}/(\d+)", scripts(job))
        assert found
        assert {int(count) for count in found} == {len(numbers)}
        assert [parse(f"{n}/{len(numbers)}")[0] for n in numbers] == list(range(1, len(numbers) + 1))


def test_each_worker_has_one_gpu() -> None:
    assert [one_gpu(f"gw{i}", None, 4) for i in range(5)] == ["0", "1", "2", "3", "0"]
    assert [one_gpu(f"gw{i}", "5,7", 2) for i in range(3)] == ["5", "7", "5"]
    assert one_gpu(None, None, 4) is None
    assert one_gpu("gw1", None, 1) is None
    assert one_gpu("master", None, 4) is None
