"""TARGET: what it may be, and one clear error for what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preflight.asking import PROJECT, ask, inside, written
from stepguard import ConfigError
from stepguard.check.preflight import check, resolve


def given(target: str, **more: Any) -> Any:
    with inside(PROJECT):
        return resolve(target, **more)


def test_configuration_alone_is_checked_as_far_as_it_goes() -> None:
    result = ask("config.json", config=None)
    assert result.outcome("config.types").status == "pass"
    assert result.outcome("precision.configured").status == "pass"
    assert result.alignment == "unproven"
    outcome = result.outcome("optimizer.eps")
    assert outcome.status == "not_checked"
    assert outcome.evidence == (
        "give TARGET as module:function whose function returns the optimizer",
    )


def test_points_of_the_checklist_are_judged_by_a_configuration_alone(tmp_path: Path) -> None:
    config = written(tmp_path, warmup_steps=2000, grad_clip=0.5)
    result = ask(str(config), "checklist", config=None)
    judged = {
        o.id.partition(".")[2]: o.status for o in result.outcomes if o.status != "not_checked"
    }
    # Which of the folder's programs it is for cannot be known, so nothing is said of their code.
    assert judged == dict.fromkeys(("lr", "clip", "warmup", "accumulation", "checkpoints"), "pass")
    assert "may belong to another program" in result.outcome("checklist.norms").evidence[0]


def test_source_is_not_judged_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with inside(tmp_path):
        subject, context = resolve("config.json")
        result = check(subject, only=["checklist.norms"], context=context)
    assert result.outcome("checklist.norms").status == "not_checked"


def test_data_alone_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1.5\nnan\n")
    result = ask(str(tmp_path), config=None, launcher=None)
    assert [o.id for o in result.of("fail")] == ["data.finite"]


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("nothing", {}, "'nothing' is neither a file nor a folder here, nor 'module:function'"),
        ("a/b:c", {}, "is neither a file"),
        ("json:loads", {}, "json:loads lies outside the current directory"),
        (
            "no_such_module:build",
            {},
            "there is no module 'no_such_module' below the current directory",
        ),
        ("tinychat.training:nothing", {}, "has no function 'nothing'"),
        (
            "tinychat.training:build",
            {},
            "tinychat.training:build takes 'config'; give --config FILE",
        ),
        ("tinychat.training:loss_of", {"config": PROJECT / "config.json"}, "returned a function"),
        (
            "config.json",
            {"config": PROJECT / "config.json"},
            "is a configuration already; leave --config out",
        ),
        ("config.json", {"launcher": Path("no.yaml")}, "no.yaml cannot be read as a launcher"),
        ("tinychat.faults:_lambda", {"config": PROJECT / "config.json"}, "needs config, factor"),
    ],
)
def test_unusable_target_is_one_clear_error(
    target: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        given(target, **more)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_build_function_that_raises_is_told_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken_build.py").write_text(
        "def build():\n    raise RuntimeError('no GPU here')\n"
    )
    with (
        inside(tmp_path),
        pytest.raises(ConfigError, match="broken_build:build raised RuntimeError: no GPU here"),
    ):
        resolve("broken_build:build")


def test_file_of_an_unknown_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.doc").touch()
    with inside(tmp_path), pytest.raises(ConfigError, match=r"files of kind \.doc are not known"):
        resolve("a.doc")


def test_number_that_yaml_reads_as_text_is_named_where_the_program_fails_on_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "yaml_build.py").write_text("def build(config):\n    return config['lr'] * 0.5\n")
    (tmp_path / "c.yaml").write_text("lr: 2e-3\n")
    with inside(tmp_path), pytest.raises(ConfigError) as raised:
        resolve("yaml_build:build", Path("c.yaml"))
    said = str(raised.value)
    assert (
        "raised TypeError: can't multiply sequence by non-int of type 'float' (lr: 2e-3 is" in said
    )
