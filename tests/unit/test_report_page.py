"""Templates of pages are compiled once per process: what one page must not show is no matter of another's."""

from pathlib import Path

from trew.runs.report.page import render


def test_each_page_hides_its_own_secrets_also_inside_macros(tmp_path: Path) -> None:
    template = tmp_path / "page.html.jinja"
    template.write_text(
        "{% macro said(x) %}<b>{{ x }}</b>{% endmacro %}{{ text }} {{ said(text) }} {{ 'first-secret' }}"
    )
    text = "first-secret & second-secret"
    first, second = (render(template, (hidden,), text=text) for hidden in ("first-secret", "second-secret"))
    assert "first-secret" not in first
    assert first.count("second-secret") == 2
    assert "second-secret" not in second
    assert second.count("first-secret") == 3
    assert "&amp;" in first
    assert "& " not in first


def test_a_template_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    template = tmp_path / "page.html.jinja"
    for text in ("one", "another"):
        template.write_text(text)
        assert render(template, ()) == text
