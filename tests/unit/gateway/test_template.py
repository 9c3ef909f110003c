from __future__ import annotations

import pytest

from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.gateway.template import ChatTemplate

USER = [{"role": "user", "content": "<b> ü"}]


def render(source: str, *, add_generation_prompt: bool = False) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(USER, add_generation_prompt=add_generation_prompt)


def test_special_tokens_and_generation_prompt_are_there() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "<s><b> ü"
    assert render(source, add_generation_prompt=True) == "<s><b> ü>"


def test_blocks_are_trimmed_as_transformers_does() -> None:
    assert render("  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n") == "user\n"


def test_tojson_escapes_nothing_but_json() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<b> ü"}'


def test_generation_block_and_loop_controls_are_known() -> None:
    source = "{% generation %}x{% endgeneration %}{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"  # noqa: E501 -- one template
    assert render(source) == "x1"


def test_strftime_now_formats_the_date() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_raise_exception_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now.__globals__ }}",
    ],
)
def test_sandbox_keeps_templates_inside(source: str) -> None:
    try:
        text = render(source)
    except InvalidRequestError:
        return
    assert "class" not in text
    assert "globals" not in text


def test_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}", {})
