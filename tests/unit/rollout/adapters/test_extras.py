"""Packages of adapters that are not there."""

import pytest

from conf.errors import ConfigError
from conf.imports import import_function
from rollout.adapters.extras import import_extra


def test_extra_that_is_installed_is_imported():
    assert import_extra("json.decoder", "gymnasium").JSONDecoder


def test_extra_that_is_missing_names_what_to_install():
    with pytest.raises(ConfigError, match=r"env=nothing: the package no_such is not .* 'tandem-rl\[nothing\]'"):
        import_extra("no_such.part", "nothing")


def test_extra_that_lacks_a_package_of_its_own_names_both(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import no_such_part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the package no_such_part, which half_there imports, is not installed"):
        import_extra("half_there", "nothing")


def test_environment_that_lacks_its_extra_says_so_and_nothing_else(tmp_path, monkeypatch):
    lines = "from rollout.adapters.extras import import_extra\nimport_extra('no_such', 'nothing')\nclass Env: ...\n"
    (tmp_path / "wraps_nothing.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^env=nothing: the package no_such"):
        import_function("wraps_nothing.Env", "env._target_")
