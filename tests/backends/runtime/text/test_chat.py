"""Chat templates: rendered as in transformers, with limits of time and memory, and conversations that use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.backends.runtime.text import chat
from weft.backends.runtime.text.chat import ChatTemplate, Renderer
from weft.ir.errors import WeftError

from .scripted import BOS, EOS, ids, speaker

CHATML = (
    "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] ~ eos_token ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


MESSAGES = [{"role": "system", "content": "Be <b>rief."}, {"role": "user", "content": "Hi 👋"}]


def write_chat(folder: Path, template: Any, own: bool) -> None:
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    if own:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("own", [True, False], ids=["jinja", "config"])
def test_chat_prompt_is_rendered_from_either_file(folder: Path, own: bool) -> None:
    write_chat(folder, CHATML, own)
    wanted = "<|system|>Be <b>rief.</s>\n<|user|>Hi 👋</s>\n"
    assert ChatTemplate(folder).render(MESSAGES, answer=False) == wanted
    model = speaker(folder, ids("Hello!"))
    prompt = model.chat_prompt(MESSAGES)
    assert BOS not in prompt and prompt.count(EOS) == 2  # the template writes what it wants; nothing is added
    assert "".join(model.stream(prompt)) == "Hello!"


def test_conversation_tracks_messages(folder: Path, renderer: Renderer) -> None:
    write_chat(folder, CHATML, own=True)
    system = {"role": "system", "content": "Be brief."}
    model = speaker(folder, ids("Yes! No"))
    model.chat_template.renderer = renderer
    talk = model.conversation([system])
    assert talk.tokenizer is model.tokenizer and talk.chat_template is model.chat_template
    asked = {"role": "user", "content": "Hi"}
    first = talk.say("Hi", max_tokens=4)
    assert first.result.prompt == model.chat_prompt([system, asked])
    assert talk.messages == [system, asked, {"role": "assistant", "content": ""}]
    assert next(first) == "Y"
    again = talk.say("Again", stop="N")  # while the first is still streaming
    assert list(first) == []
    answered = [system, asked, {"role": "assistant", "content": "Y"}, {"role": "user", "content": "Again"}]
    assert again.result.prompt == model.chat_prompt(answered)
    assert "".join(again) == "Yes! " and talk.messages[-1] == {"role": "assistant", "content": "Yes! "}
    before = talk.messages
    with pytest.raises(WeftError, match="temperature is -1"):
        talk.say("More", temperature=-1.0)
    with pytest.raises(WeftError, match="longer than the maximum"):
        talk.say("More" * 1000)
    assert talk.messages == before


def test_templates_render_as_in_transformers(folder: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = """{%- set ns = namespace(n=0) %}
    {% for m in messages %}
        {% if m.role == 'system' %}{% continue %}{% endif %}
        {% generation %}
{{ bos_token }}[{{ m.content | trim }}]{{ {'ä': m.content} | tojson }}
        {% endgeneration %}
        {% set ns.n = ns.n + 1 %}
    {% endfor %}
{{ ns.n }}{{ tools | tojson(indent=2) }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
"""
    write_chat(folder, template, own=True)
    more: dict[str, Any] = {"tools": [{"name": "f", "type": "<x>"}], "enable_thinking": False}
    found = ChatTemplate(folder).render(MESSAGES, **more)
    (wanted,), _ = render_jinja_template([MESSAGES], chat_template=template, bos_token="<s>", eos_token="</s>", **more)
    assert found == wanted


def test_one_of_several_templates(folder: Path) -> None:
    write_chat(folder, [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}], own=False)
    assert ChatTemplate(folder).render(MESSAGES) == "yes"


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, MESSAGES, "no chat template"),
        ("{% for %}", MESSAGES, "cannot be parsed"),
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", MESSAGES, "chat_template.jinja: the chat template refuses"),
        ("{{ messages.append(1) }}", MESSAGES, "refuses"),
        ("{{ messages.__class__.__mro__ }}", MESSAGES, "refuses"),
        ("{{ 1 / 0 }}", MESSAGES, "ZeroDivisionError"),
        ("{{ 1 // (messages | length - 2) }}", MESSAGES, "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", MESSAGES, "RecursionError"),
        ("{% break %}", MESSAGES, "cannot be parsed"),
        ("{{ 'a'.center(10 ** 9) }}", MESSAGES, "memory"),
        ("{{ '%999999999d' % messages | length }}", MESSAGES, "memory"),
        (
            "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            [],
            "memory",
        ),
        ("{{ 'a' * (messages | length + 20_000_000) }}", MESSAGES, "characters"),
        ("{{ messages | tojson(indent=999999999) }}", MESSAGES, "memory"),
        ("x", ["hello"], "a chat message is 'hello'"),
        ("x", [{"content": "hello"}], "role"),
    ],
)
def test_bad_chats_are_refused(
    folder: Path, template: str | None, messages: Any, words: str, renderer: Renderer
) -> None:
    model = speaker(folder, [])
    if template is not None:
        write_chat(folder, template, own=True)
        model.chat_template.renderer = renderer
    with pytest.raises(WeftError, match=words):
        model.chat_prompt(messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "takes longer than 1 seconds",
        ),
        ("{{ 9 ** (9 ** 9) }}", "takes longer than 1 seconds"),
        ("{{ 'a'.center(10 ** 9) }}", "takes too much memory"),
    ],
)
def test_limits_hold_in_a_new_process(folder: Path, template: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.SECONDS == 2
    monkeypatch.setattr(chat, "SECONDS", 1)
    write_chat(folder, template, own=True)
    with pytest.raises(WeftError, match=f"the chat template {words}"):
        speaker(folder, []).chat_prompt(MESSAGES)


def test_renderer_starts_again_after_a_close_but_not_after_a_kill(folder: Path) -> None:
    write_chat(folder, "{{ messages | length }}", own=True)
    template = ChatTemplate(folder)
    with Renderer() as template.renderer:
        assert [template.render(MESSAGES), template.render(MESSAGES[:1])] == ["2", "1"]
        template.renderer.close()
        assert template.render([]) == "0"
        template.renderer.kill()
        with pytest.raises(WeftError, match="cannot be rendered by another process: it was ended"):
            template.render(MESSAGES)
