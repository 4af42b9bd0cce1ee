"""Where a model's chat templates are found, and which one wins."""

from __future__ import annotations

import pytest

from gateway.prompt.template import TemplateError, load_templates


def test_the_file_wins_over_the_configuration(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("file")
    found = load_templates(tmp_path, {"chat_template": "configuration"}, None, {})
    assert found is not None
    assert [one.source for one in found] == ["file", "file"]


def test_a_template_of_the_configuration_is_taken(tmp_path):
    found = load_templates(tmp_path, {"chat_template": "configuration"}, None, {})
    assert found is not None
    assert found[0].source == "configuration"


def test_requests_with_tools_get_the_template_for_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    found = load_templates(tmp_path, {"chat_template": named}, None, {})
    assert found is not None
    assert [one.source for one in found] == ["plain", "tools"]


def test_templates_lie_beside_the_default_one_in_a_directory(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "chat_template.jinja").write_text("plain")
    found = load_templates(tmp_path, {}, None, {})
    assert found is not None
    assert [one.source for one in found] == ["plain", "tools"]


def test_a_processors_template_is_taken_where_there_is_no_other(tmp_path):
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor"}')
    found = load_templates(tmp_path, {}, None, {})
    assert found is not None
    assert found[0].source == "processor"


def test_an_override_wins_over_all(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "mine.jinja").write_text("mine")
    found = load_templates(tmp_path, {}, tmp_path / "mine.jinja", {})
    assert found is not None
    assert [one.source for one in found] == ["mine", "mine"]


def test_no_template_is_no_error(tmp_path):
    assert load_templates(tmp_path, {}, None, {}) is None


def test_an_override_that_is_not_there_is_one(tmp_path):
    with pytest.raises(TemplateError, match=r"nowhere\.jinja: cannot be read"):
        load_templates(tmp_path, {}, tmp_path / "nowhere.jinja", {})


@pytest.mark.parametrize("own", [5, [{"name": "default"}], ["x"], {"default": "x"}])
def test_a_template_of_an_unknown_form_is_named(own, tmp_path):
    with pytest.raises(TemplateError, match="neither a text nor a list"):
        load_templates(tmp_path, {"chat_template": own}, None, {})
