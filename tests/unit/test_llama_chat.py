"""Chat templates: the text that transformers makes of the same template, and what is refused."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from regions.cli.errors import WeirError
from services.engine import Message
from services.faults import Refused
from services.llama.chat import ChatTemplate
from services.llama.tokenizer import load
from services.models.store import find
from tests.llama_models import byte_tokenizer

pytestmark = pytest.mark.torch

CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Wie heißt der Fluß? 🌊"},
    {"role": "assistant", "content": "Isar."},
    {"role": "user", "content": "  And\n\nnow?  "},
]
TEMPLATES = [
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # Blocks on lines of their own: white space depends on trim_blocks and lstrip_blocks.
    "{{ bos_token }}\n  {% for m in messages %}\n    {% if m.role == 'system' %}\n{{ m.content | trim }}\n"
    "    {% continue %}\n    {% endif %}\n[{{ m.role }}] {{ m.content }}{{ eos_token }}\n  {% endfor %}\n",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_the_text_is_that_of_transformers(source: str) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", chat_template=source
    )
    ours = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    right = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.render(CHAT) == right


def test_a_template_that_refuses() -> None:
    template = ChatTemplate("{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}", {})
    assert template.render(CHAT[:1]) == ""
    with pytest.raises(Refused, match="one only") as caught:
        template.render(CHAT)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_gets_nothing_but_its_data() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(Refused, match="unsafe"):
        template.render(CHAT)
    with pytest.raises(Refused):
        ChatTemplate("{{ messages.append(1) }}", {}).render(CHAT)


def test_no_template_and_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match="line 2"):
        ChatTemplate("\n{% for %}", {})
    byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = load(tmp_path)
    assert not tokenizer.has_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([Message("user", "x")])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeirError, match="can't be read"):
        load(tmp_path)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    """JSON can write it; the tokenizer's library has a TypeError for it."""
    byte_tokenizer(tmp_path)
    tokenizer = load(tmp_path)
    with pytest.raises(Refused, match="U\\+D800") as caught:
        tokenizer.encode("a\ud83c")
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    with pytest.raises(Refused) as caught:
        tokenizer.chat([Message("user", "\udf0a")])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_the_date() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 11, 30))
    assert template.render(CHAT) == "30 Nov 2026"


def test_where_templates_and_end_tokens_are_found(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "!"}, "bos_token": "A",'
        ' "chat_template": [{"name": "default", "template": "{{ bos_token }}{{ eos_token }}"}]}'
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    tokenizer = load(tmp_path, eos=(9,))
    assert tokenizer.decode(tokenizer.chat([Message("user", "x")])) == "A!"
    assert tokenizer.eos == {7, 8, 9, *tokenizer.encode("!")}


def test_smollm2_as_transformers_says() -> None:
    folder = find("smollm2-135m-instruct")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert load(folder).chat([Message(m["role"], m["content"]) for m in CHAT]) == ids
