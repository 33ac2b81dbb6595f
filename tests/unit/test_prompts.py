"""Text and conversations -> ids: one rule for the beginning of sequence, one for every way to send a message."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from paxpage.models.embedded import default_model_path
from paxpage.models.gguf_files import open_gguf
from paxpage.models.gguf_tokenizer import gguf_tokenizer
from paxpage.prompts import ROLES, encode_plain, encode_text, render_chat

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools, please') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]
BOS, EOS = 256, 257


def byte_tokenizer(adds: str, chat_template: str | None = TEMPLATE) -> Any:
    """A token a byte, and <s>, </s>; adds is a template of what is put around a text."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    special_tokens = [("<s>", BOS), ("</s>", EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=special_tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )


@pytest.fixture(scope="module")
def with_bos() -> Any:
    return byte_tokenizer("<s> $A")


@pytest.fixture(scope="module")
def without_bos() -> Any:
    return byte_tokenizer("$A")


@pytest.fixture(scope="module")
def smol() -> Any:
    return gguf_tokenizer(open_gguf(default_model_path()))


def plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "num_bos"),
    [("Hi", 1), ("<s>Hi", 1), ("<s>", 1), ("<s><s>Hi", 2), (" <s>Hi", 2), ("", 1), ("Hi<s>", 2)],
)
def test_a_bos_that_is_there_is_not_doubled(text: str, num_bos: int, with_bos: Any) -> None:
    token_ids = encode_text(with_bos, text)
    assert token_ids.count(BOS) == num_bos and token_ids[0] == BOS
    assert with_bos.decode(token_ids) == (text if text.startswith("<s>") else f"<s>{text}")


@pytest.mark.parametrize("text", ["Hi", "<s>Hi", "<s><s>Hi", ""])
def test_nothing_is_taken_from_a_tokenizer_that_adds_nothing(text: str, without_bos: Any) -> None:
    assert encode_text(without_bos, text) == plain(without_bos, text)


def test_what_else_a_tokenizer_adds_is_kept() -> None:
    both = byte_tokenizer("<s> $A </s>")
    assert encode_text(both, "Hi") == encode_text(both, "<s>Hi") == [BOS, *plain(both, "Hi"), EOS]
    eos_alone = byte_tokenizer("$A </s>")
    assert encode_text(eos_alone, "<s>Hi") == [BOS, *plain(eos_alone, "Hi"), EOS]


def test_smollm2_gets_no_bos(smol: Any) -> None:
    assert encode_text(smol, "Hello world") == [19556, 905]
    assert encode_text(smol, "<|im_start|>user") == [1, 4093]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_broken_unicode_is_a_value_error(text: str, with_bos: Any) -> None:
    with pytest.raises(ValueError, match="prompt is not valid Unicode"):
        encode_text(with_bos, text)
    with pytest.raises(ValueError, match=r"messages\[0\]\.content is not valid Unicode"):
        render_chat(with_bos, [{"role": "user", "content": text}])
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\] is not valid Unicode"):
        render_chat(with_bos, [{"role": "user", "content": [{"type": "text", "text": text}]}])


def test_case_15_one_bos_by_every_way(with_bos: Any, smol: Any) -> None:
    """Chat, the rendered template as text, and apply_chat_template agree, whether a BOS is added or not."""
    for tokenizer in (with_bos, smol):
        token_ids = render_chat(tokenizer, HI)
        options = {"tokenize": True, "add_generation_prompt": True}
        assert token_ids == tokenizer.apply_chat_template(HI, return_dict=False, **options)
        text = tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
        assert encode_text(tokenizer, text) == token_ids
        assert all(type(token_id) is int for token_id in token_ids)
    assert render_chat(with_bos, HI).count(BOS) == 1


def test_text_parts_equal_the_string(smol: Any) -> None:
    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]

    assert render_chat(smol, parts("Hi")) == render_chat(smol, HI)
    assert render_chat(smol, parts("H", "i")) == render_chat(smol, HI)
    assert render_chat(smol, parts()) == render_chat(smol, [{"role": "user", "content": ""}])


def test_an_assistant_turn_at_the_end_is_closed_or_continued(with_bos: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    closed = with_bos.decode(render_chat(with_bos, messages))
    assert closed == "<s>[user]Hi</s>[assistant]Well, </s>[assistant]"
    bare = with_bos.decode(render_chat(with_bos, messages, add_generation_prompt=False))
    assert bare == "<s>[user]Hi</s>[assistant]Well, </s>"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert with_bos.decode(render_chat(with_bos, messages, **options)) == "<s>[user]Hi</s>[assistant]Well, "
    with pytest.raises(ValueError, match="add_generation_prompt is True; allowed: False when continue_final_message"):
        render_chat(with_bos, messages, continue_final_message=True)


def test_messages_are_not_changed(with_bos: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    render_chat(with_bos, messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def test_another_template(without_bos: Any) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.get('name', '') }};{% endfor %}"
    messages = [{"role": "user", "content": "Hi", "name": "Ann"}]
    assert without_bos.decode(render_chat(without_bos, messages, chat_template=template)) == "user:HiAnn;"
    bare = byte_tokenizer("$A", chat_template=None)
    assert bare.decode(render_chat(bare, messages, chat_template=template)) == "user:HiAnn;"


def test_no_template_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="chat_template is None; allowed: a Jinja template"):
        render_chat(byte_tokenizer("$A", chat_template=None), HI)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is []; allowed: a list of at least one message"),
        ([{}], "messages[0].role is None; allowed: system"),
        ([{"role": 5, "content": "x"}], "messages[0].role is 5"),
        ([{"role": "alien", "content": "x"}], "messages[0].role is 'alien'; allowed: " + ", ".join(ROLES)),
        ([*HI, {"role": "user"}], "messages[1].content is None; allowed: a string or a list"),
        ([{"role": "user", "content": 7}], "messages[0].content is 7"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] is 'x'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0] is"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0] is"),
        ([{"role": "tool", "content": "x"}], "messages do not fit the chat template: no tools, please"),
    ],
)
def test_other_messages_are_refused_by_name(messages: list, words: str, with_bos: Any) -> None:
    with pytest.raises(ValueError) as caught:
        render_chat(with_bos, messages)
    assert words in str(caught.value)


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 / 0 }}", "{{ messages[5].content }}", "{{ undefined.field }}"])
def test_a_template_that_fails_is_a_value_error(template: str, with_bos: Any) -> None:
    with pytest.raises(ValueError, match="messages do not fit the chat template"):
        render_chat(with_bos, HI, chat_template=template)


def test_tools_and_calls_reach_the_template(with_bos: Any) -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}|{% endfor %}{% for m in messages %}[{{ m.role }}]"
        "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for arguments in ('{"city": "Rome"}', {"city": "Rome"}):
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
        token_ids = render_chat(with_bos, messages, chat_template=template, tools=tools)
        assert with_bos.decode(token_ids) == "weather|[user]Hi[assistant]Rome"
        assert with_bos.decode(render_chat(with_bos, messages, chat_template=template)) == "[user]Hi[assistant]Rome"
        assert messages[1]["content"] is None and call["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "call", [5, {}, {"function": {}}, *({"function": {"name": "f", "arguments": a}} for a in ("{", "5", [1]))]
)
def test_tool_calls_of_another_form_are_refused(call: Any, with_bos: Any) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_calls is .*; allowed: "):
        render_chat(with_bos, [*HI, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("text", ["Hi", "<s>Hi", ""])
def test_a_text_and_nothing_else(text: str, with_bos: Any) -> None:
    assert encode_plain(with_bos, "bad_words", text) == plain(with_bos, text)
    with pytest.raises(ValueError, match=r"^bad_words is not valid Unicode"):
        encode_plain(with_bos, "bad_words", "\ud800")
