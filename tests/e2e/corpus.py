"""Request bodies of every form that is read here: what the gateway makes of them, a real engine must make, too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]

TEXTS = {
    "plain": "The quick brown fox jumps over the lazy dog. It's the 3rd time they've done so, isn't it?",
    "one letter": "a",
    "empty": "",
    "one space": " ",
    "spaces around": "   leading and trailing   ",
    "whitespace runs": "a  b   c    d\t\te\n\nf\n\n\n\ng \n h\r\n\r\ni\u00a0j\u2003k\u3000l",
    "lines ending in spaces": "one \ntwo  \n\n  three\n\t\n   \nfour   ",
    "only newlines": "\n\n\n\n",
    "german": "Die Größe des Übermuts läßt sich, weiß Gott, nicht bemäkeln; 12.345,67 €",
    "french": "« Où est-ce ? » demanda-t-elle, l’air étonné ; il n'y a qu'à l'œuvre…",
    "polish": "Zażółć gęślą jaźń. Pchnąć w tę łódź jeża lub ośm skrzyń fig.",
    "turkish": "İstanbul'da ılık bir gün; IĞDIR'ın dağları",
    "vietnamese": "Tiếng Việt có thanh điệu: ngã, hỏi, sắc, huyền, nặng.",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ὦ ἄνδρες Ἀθηναῖοι",
    "russian": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "ukrainian": "Щастям б'єш жук їх глицю в фон й ґедзь пріч.",
    "armenian and georgian": "Բարեւ աշխարհ։ გამარჯობა მსოფლიო",
    "hebrew": "שָׁלוֹם עוֹלָם, הַשּׁוּעָל הַחוּם 123 קופץ",
    "arabic": "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت ١٢٣٤",
    "persian": "می‌خواهم بروم؛ نمی‌دانم «کجا»؟",
    "hindi": "ऋषियों को सताने वाले दुष्ट राक्षसों का सर्वनाश १२३",
    "bengali and tamil": "বিশ্ব তোমায় স্বাগতম — தமிழ் மொழி அழகானது",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "khmer and lao": "ភាសាខ្មែរ ພາສາລາວ",
    "chinese": "我能吞下玻璃而不伤身体。繁體字也可以,全角!?",
    "japanese": "いろはにほへと ちりぬるを。カタカナとｶﾀｶﾅ、漢字もある。",
    "korean": "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. ㅋㅋㅋ",
    "amharic and cherokee": "ሰላም ለዓለም ᎣᏏᏲ",
    "emoji": "😀 😃👍🏽 \U0001f469\u200d\U0001f469\u200d\U0001f467 🇩🇪🇯🇵 ❤️ ☺︎ 1️⃣ \U0001f9d1\U0001f3ff\u200d\U0001f680",
    "combining marks": "e\u0301 n\u0303 Z\u0351\u036b\u0343\u036aa\u0346l\u035f \u1e9b\u0323 \ufb01 \u2126 \u212b",
    "invisible": "zero\u200bwidth\u200cjoin\u200der \u2060word \ufeffmark \u200eltr\u200f soft\u00adhyphen",
    "control characters": "nul\x00 bell\x07 back\x08 esc\x1b[31m del\x7f c1\x85\x9f sep\x1c\x1d\u2028\u2029",
    "private and last": "\ue000 \uf8ff \U000f0000 \U0010fffd \ufffd \U0001d54f \U00020000",
    "digits": "0 1 12 123 1234 12345 1234567890 3.14159 -1e-10 1,000,000 0xDEADBEEF ½ ² ① Ⅷ ٣ 七",
    "punctuation": "!!! ??? ... --- === *** ### ((([[[{{{ }}}]]]))) '\"`~^|\\/ <>&%$@ «»„“‚‘",
    "contractions": "I'm you're he'd THEY'LL we've DON'T it’s I’d o'clock rock'n'roll 's",
    "url": "https://user:pw@example.org:8443/a/b/../c?d=e&f=%20g#h mailto:x@example.org C:\\Users\\x",
    "python": 'def f(x: int) -> str:\n    """Doc."""\n    return f\'{x:>10}\'  # note\n\n\nclass A(B):\n\tpass\n',
    "c": '#include <stdio.h>\nint main(void) {\n\tprintf("%d\\n", 1 << 3);\n\treturn 0;\n}\n',
    "html": '<!DOCTYPE html>\n<p class="a&amp;b">x &lt; y</p><!-- note --><br/>\n',
    "json": '{"a": [1, 2.5, null, true], "b": {"c": "d\\u00e9\\n"}, "": []}',
    "sql and shell": "SELECT * FROM t WHERE a='b''c'; -- x\n$ ls -la | grep '^d' && echo \"$HOME\" > /dev/null 2>&1",
    "diff": "--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n-old\n+new\n \t same\n",
    "markdown": "# Title\n\n* a\n  * b\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    "latex": "$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$",
    "base64": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==",
    "repeated": "ha" * 200 + "=" * 100 + "-" * 33 + " " * 77 + "\n" * 19 + "0" * 50,
    "own special tokens": "before<|im_start|>user\nin the middle<|im_end|>\nafter <s> x </s> <|endoftext|>",
    "special tokens in a row": "<|im_end|><|im_end|> <|im_end|>\n<|im_start|><s></s><|endoftext|><|im_start|>",
    "special tokens cut short": "<|im_ <|im_end| <|im_start |im_end|> < |im_end|> <|IM_END|> <|im_end|>>",
    "other models' tokens": "[INST] x [/INST] <start_of_turn>user <|eot_id|><|channel|>final <｜User｜>",
    "template syntax": "{{ messages }} {% for x in y %} {# note #} {{ raise_exception('no') }}",
    "thinking": "<think>\nfirst this\n</think>\n\nthen that",
    "tool markup": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><tool_response>4</tool_response>',
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city — today, in °C.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "strict": True}},
    {"type": "function", "function": {"name": "é", "description": "", "parameters": {}}},
]


def long_text(words: int, seed: int) -> str:
    """Return words of all texts in random order."""
    rng = random.Random(seed)
    pool = [word for text in TEXTS.values() for word in text.split(" ")]
    return " ".join(rng.choices(pool, k=words))


def _user(content: Any) -> Body:
    return {"role": "user", "content": content}


def _assistant(content: Any, **more: Any) -> Body:
    return {"role": "assistant", "content": content, **more}


def _call(name: str, arguments: str, number: int = 0) -> Body:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _parts(*texts: str) -> list[Body]:
    return [{"type": "text", "text": text} for text in texts]


def conversations(one: str, two: str, three: str) -> Iterator[tuple[str, Body]]:
    """Yield chats of every form around three texts."""
    system = {"role": "system", "content": one}
    turns = [_user(two), _assistant(three), _user(one)]
    calls = [_call("get_weather", '{"city": "Zürich", "days": 2}', 1), _call("now", "", 2)]
    results = [
        {"role": "tool", "tool_call_id": "call00001", "content": two},
        {"role": "tool", "tool_call_id": "call00002", "content": _parts(three, "!")},
    ]
    used = [_user(one), _assistant(None, tool_calls=calls), *results]
    yield "system", {"messages": [system, _user(two)]}
    yield "developer", {"messages": [{"role": "developer", "content": one}, _user(two)]}
    yield "developer after system", {"messages": [system, {"role": "developer", "content": two}, _user(three)]}
    yield "turns", {"messages": turns}
    yield "turns with system", {"messages": [system, *turns]}
    yield "parts", {"messages": [_user(_parts(one, two, three))]}
    yield "strings as parts", {"messages": [_user([one, {"type": "text", "text": two}])]}
    yield (
        "parts everywhere",
        {
            "messages": [
                {"role": "system", "content": _parts(one)},
                _user(_parts(two)),
                _assistant(_parts(three)),
                _user("?"),
            ]
        },
    )
    yield "tools", {"messages": [system, _user(two)], "tools": TOOLS}
    yield "tools without system", {"messages": [_user(two)], "tools": TOOLS[:1]}
    yield "a tool call", {"messages": used[:3], "tools": TOOLS}
    yield "tool calls and results", {"messages": used, "tools": TOOLS}
    yield (
        "tool calls with text",
        {"messages": [_user(one), _assistant(two, tool_calls=calls[:1]), results[0], _user(three)], "tools": TOOLS},
    )
    yield "tool calls without tools", {"messages": used}
    yield (
        "empty arguments",
        {"messages": [_user(one), _assistant("", tool_calls=[_call("now", "{}")])], "add_generation_prompt": False},
    )
    yield (
        "nested arguments",
        {
            "messages": [
                _user(one),
                _assistant("", tool_calls=[_call("f", '{"a": {"b": [1, "ü", null, 1.50]}, "\\u00e9": " "}')]),
                _user(two),
            ]
        },
    )
    yield "reasoning", {"messages": [_user(one), _assistant(two, reasoning=three), _user("?")]}
    yield (
        "reasoning content and calls",
        {
            "messages": [_user(one), _assistant(two, reasoning_content=three, tool_calls=calls[:1]), results[0]],
            "tools": TOOLS,
        },
    )
    yield "no generation prompt", {"messages": turns, "add_generation_prompt": False}
    yield (
        "continued",
        {
            "messages": [_user(one), _assistant(f"{two} so")],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    )
    yield (
        "continued parts",
        {
            "messages": [_user(one), _assistant(_parts(three, "and so"))],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    )
    yield "not thinking", {"messages": turns, "chat_template_kwargs": {"enable_thinking": False}}
    yield (
        "template variables",
        {"messages": turns, "chat_template_kwargs": {"custom": one, "enable_thinking": True, "list": [1, {"a": None}]}},
    )
    yield "special tokens added", {"messages": turns, "add_special_tokens": True}
    yield (
        "names",
        {"messages": [{"role": "user", "name": "Zoë", "content": one}, _assistant(two, name="bot"), _user(three)]},
    )
    yield (
        "many messages",
        {
            "messages": [
                system,
                *[message for number in range(30) for message in (_user(f"{number} {two}"), _assistant(three))],
                _user("end"),
            ]
        },
    )


def chats() -> dict[str, Body]:
    """Return chats by name."""
    bodies: dict[str, Body] = {f"user: {name}": {"messages": [_user(text)]} for name, text in TEXTS.items()}
    names = list(TEXTS)
    random.Random(1).shuffle(names)
    for number in range(0, len(names) - 2, 8):
        chosen = names[number : number + 3]
        for form, body in conversations(*(TEXTS[name] for name in chosen)):
            bodies[f"{form}: {', '.join(chosen)}"] = body
    for words in (500, 2000):
        bodies[f"{words} words"] = {"messages": [_user(long_text(words, words))]}
    return bodies


def completions() -> dict[str, Body]:
    """Return completions by name."""
    bodies: dict[str, Body] = {f"text: {name}": {"prompt": text} for name, text in TEXTS.items() if text}
    bodies |= {
        f"no special tokens: {name}": {"prompt": text, "add_special_tokens": False}
        for name, text in list(TEXTS.items())[::5]
        if text
    }
    bodies["list of one text"] = {"prompt": [TEXTS["plain"]]}
    bodies["list of texts"] = {"prompt": [TEXTS["python"], TEXTS["emoji"]]}
    bodies["ids"] = {"prompt": [1, 2, 3, 500, 7, 7, 7]}
    bodies["list of ids"] = {"prompt": [[5, 6, 7], [8, 9]]}
    bodies["600 words"] = {"prompt": long_text(600, 3)}
    return bodies
