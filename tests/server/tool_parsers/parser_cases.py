"""Texts in every tool-call format, well-formed and broken, with the content and calls in them."""

from __future__ import annotations

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now"}},
]
ARGS = '{"city": "Kö}ln \\"x\\"",  "days":[1, {"a": null}]}'
W, N = ("weather", ARGS), ("now", "{}")
W2 = ("weather", '{"city": "Köln", "days": 3}')
T1, T2 = "<tool_call>", "</tool_call>"
DS, DE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DC, DSEP, DCE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MB, ME = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
MI, MIE = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
MP, MPE = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
MW = f'{MI}weather">\n{MP}city" string="true">Kö"}}\n{MPE}\n{MP}days" string="false"> 3{MPE}\n{MIE}'
MN = f'{MI}now">\n{MIE}'
JW, JN = f'{{"name": "weather", "arguments": {ARGS}}}', '{"name": "now", "arguments": {}}'
PW = f'{{"name": "weather", "parameters": {ARGS}}}'
Q = '<|"|>'
PE, FE = "</parameter>", "</function>"
XW = (
    "<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"
    + PE
    + "\n"
    + FE
)
XN = "<function=now>\n</function>"
XP, XQ, XD = "<function=w><parameter=", "<parameter=", "<function=weather><parameter=days>"

# format -> (text, content, calls)
CASES: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        (f"{T1}\n{JW}\n{T2}", "", [W]),
        (f"Sure. \n{T1}{JW}{T2}\n{T1}\n{JN}\n{T2}\n", "Sure.", [W, N]),
        (f'{T1}{{"arguments": {ARGS}, "name": "weather"}}\n{T2} done', " done", [W]),
        (f'{T1}{{"name": "now"}}{T2}', "", [N]),
        (f'{T1}{{"name": "now", "arguments": null}}{T2}', "", [N]),
        (f'{T1}{{"name":"now","arguments":{{"a":"{T2}"}}}}{T2}', "", [("now", f'{{"a":"{T2}"}}')]),
        (f'{T1}{{"name": "now", "arguments": "{{\\"a\\": 1}}"}}{T2}', "", [("now", '{"a": 1}')]),
        (f'{T1}{{"name": "now", "arguments": {{}}, "id": "7"}}{T2}x', "x", [N]),
        (f'{T1}{{"name": "now", "arguments": {{}}{T2}x', "x", [N]),
        (f'{T1}{{"name": "now", "arguments": {{"a": [1{T2}x', "x", [("now", '{"a": [1')]),
        (f'{T1}{{"name": "weather", "arguments": {{"city": "Kö', "", [("weather", '{"city": "Kö')]),
        (f'{T1}{{"name": "now", "arguments": {{}}, bad}}{T2}x', f", bad}}{T2}x", [N]),
        (f"a {T1} not json {T2} b", f"a {T1} not json {T2} b", []),
        (f"{T1}{{'name': 'x'}}{T2}", f"{T1}{{'name': 'x'}}{T2}", []),
        (f'{T1}{{"name": "", "arguments": {{}}}}', f'{T1}{{"name": "", "arguments": {{}}}}', []),
        (f'{T1}{{"name": "x", "arguments": 5}}', f'{T1}{{"name": "x", "arguments": 5}}', []),
        (f'{T1}{{"arguments": {{}}}}{T2}', f'{T1}{{"arguments": {{}}}}{T2}', []),
        (f'{T1}{{"name": "no', f'{T1}{{"name": "no', []),
        (f"{T1}{{bad}}{T2} {T1}{JN}{T2}", f"{T1}{{bad}}{T2}", [N]),
        ("plain <b>text</b> <tool_cal\n ", "plain <b>text</b> <tool_cal\n ", []),
        ("", "", []),
    ],
    "llama3_json": [
        (PW, "", [W]),
        (f"\n<|python_tag|>{PW}; {PW}", "", [W, W]),
        (f"{PW}\n{JN}", "", [W, N]),
        (f'{{"type": "function", {PW[1:]}', "", [W]),
        (f"I look. <|python_tag|>{PW} ok", "I look. ok", [W]),
        ('{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
        ('{"name": "now"}', '{"name": "now"}', []),
        (PW.replace("weather", "unknown"), PW.replace("weather", "unknown"), []),
        ('<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
        ("{x} " + PW, "{x} " + PW, []),
        ('<|python_tag|>weather.call(city="Köln", days=3)', "", [W2]),
        ('Ok <|python_tag|>weather.call(city="Köln", days=3) ', "Ok", [W2]),
        ('<|python_tag|>other.call(a="b")', '<|python_tag|>other.call(a="b")', []),
        ("<|python_tag|>weather.call(city=f())", "<|python_tag|>weather.call(city=f())", []),
        ("<|python_tag|>weather.ca", "<|python_tag|>weather.ca", []),
        (PW[:-3], "", [("weather", ARGS[:-2])]),
    ],
    "qwen3_coder": [
        (f"{T1}\n{XW}\n{T2}", "", [W2]),
        (f"Sure.\n{T1}\n{XW}\n{T2}\n{T1}\n{XN}\n{T2}", "Sure.", [W2, N]),
        (f"{XW} then", " then", [W2]),
        (f"{T1}<function=now>{T2}x", "x", [N]),
        (
            f'{T1}{XP}city>\na\n\n"b"\\\n\n{PE}{FE}',
            "",
            [("w", '{"city": "a\\n\\n\\"b\\"\\\\\\n"}')],
        ),
        (f"{XP}days>3{XQ}x>1{PE}{FE}", "", [("w", '{"days": "3", "x": "1"}')]),
        (f"{XP}city>a < b </para{FE}", "", [("w", '{"city": "a < b </para"}')]),
        (
            f"{XD}{{'a': None, 'b': [1.5]}}{PE}{FE}",
            "",
            [("weather", '{"days": {"a": null, "b": [1.5]}}')],
        ),
        (f"{XD}True{PE}{FE}", "", [("weather", '{"days": true}')]),
        (f"{XD}many{PE}{FE}", "", [("weather", '{"days": "many"}')]),
        (f"{XP}city>Kö", "", [("w", '{"city": "Kö')]),
        (f"{XP}city>a{PE} junk", " junk", [("w", '{"city": "a"}')]),
        (f"{XP}ci", "", [("w", "{")]),
        (f"{XD}3", "", [("weather", '{"days": ')]),
        (f"{T1}\n<function", f"{T1}\n<function", []),
        (f"{T1} {JN} {T2}", f"{T1} {JN} {T2}", []),
        ("a <function=>b", "a <function=>b", []),
        ("a <function=x\n>b", "a <function=x\n>b", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{JW}, {JN}]", "", [W, N]),
        (f"[TOOL_CALLS] [{JW}]\n", "", [W]),
        (f"Hm.\n[TOOL_CALLS]weather{ARGS}[TOOL_CALLS]now{{}}", "Hm.", [W, N]),
        (f"[TOOL_CALLS]weather[ARGS]{ARGS} x", " x", [W]),
        (f"[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{ARGS}", "", [W]),
        (f"[TOOL_CALLS]{JN}", "", [N]),
        ("[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
        ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
        (f"[TOOL_CALLS][{JN}, oops] x", ", oops] x", [N]),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("[TOOL_CALL] [1]", "[TOOL_CALL] [1]", []),
    ],
    "deepseek_v3": [
        (f"{DS}{DC}function{DSEP}weather\n```json\n{ARGS}\n```{DCE}{DE}", "", [W]),
        (
            f"Ok.\n{DS}{DC}function{DSEP}now\n```json\n{{}}\n```{DCE}\n"
            f"{DC}function{DSEP}weather\n```json\n{ARGS}\n```{DCE}{DE} end",
            "Ok. end",
            [N, W],
        ),
        (f"{DS}{DC}weather{DSEP}{ARGS}{DCE}{DC}now{DSEP}{{}}{DCE}{DE}", "", [W, N]),
        (f'{DC}now{DSEP}{{"a": [{DCE}x', "x", [("now", '{"a": [')]),
        (f"{DS}nothing{DE}", f"{DS}nothing{DE}", []),
        (f"{DS}{DC}now{DCE}{DE}", f"{DS}{DC}now{DCE}{DE}", []),
        (f"{DC}function{DSEP}now\nno json{DCE}", f"{DC}function{DSEP}now\nno json{DCE}", []),
        (f"x{DS}{DC}fun", f"x{DS}{DC}fun", []),
    ],
    "deepseek_v4": [
        (f"{MB}\n{MW}\n{ME}", "", [MW2 := ("weather", '{"city": "Kö\\"}\\n", "days": 3}')]),
        (f"Ok.\n\n{MB}\n{MN}\n{MW}\n{ME} end", "Ok. end", [N, MW2]),
        (f"{MW}\n", "", [MW2]),
        (
            f'{MB}{MI}f">{MP}a" string="false">[1, {{"b": null}}]{MPE}{MIE}{ME}',
            "",
            [("f", '{"a": [1, {"b": null}]}')],
        ),
        (f'{MI}f">{MP}a" string="false">many{MPE}{MIE}', "", [("f", '{"a": "many"}')]),
        (f'{MI}f">{MP}a">x{MP}b">y{MIE}', "", [("f", '{"a": "x", "b": "y"}')]),
        (f'{MI}f">{MP}a" string="true">half', "", [("f", '{"a": "half')]),
        (f'{MI}f">{MP}a" string="false">3', "", [("f", '{"a": ')]),
        (f'{MI}f">{MP}a', "", [("f", "{")]),
        (f'{MI}f"> junk', " junk", [("f", "{}")]),
        (f"{MB}\nnothing{ME}", f"{MB}\nnothing{ME}", []),
        (f"{MI}f>x", f"{MI}f>x", []),
        (f"Hm.\n\n<｜DSML｜toolcalls>\n{MN}\n{ME}", "Hm.", [N]),
        (f"{MN}\n{ME}.", ".", [N]),
        (f"x{MB}{MI}fun", f"x{MB}{MI}fun", []),
    ],
    "gemma": [
        (
            '```tool_code\nweather(city="Köln", days=3)\n```',
            "",
            [W2 := ("weather", '{"city": "Köln", "days": 3}')],
        ),
        ("See:\n```tool_code\nprint(weather('Köln', 3))\nnow()\n```\nbye", "See:\nbye", [W2, N]),
        ("```tool_code\nimport os\n```", "```tool_code\nimport os\n```", []),
        ("```tool_code\nweather(1", "```tool_code\nweather(1", []),
        (PW, "", [W]),
        (f"Yes\n```json\n{PW}\n```", "Yes", [W]),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
        (
            f"Hm <|tool_call>call:weather{{city:{Q}Köln, {{x}}{Q},days:3}}<tool_call|>",
            "Hm",
            [("weather", '{"city": "Köln, {x}", "days": 3}')],
        ),
        (
            "<start_function_call>call:f{a:<escape>x<escape>, b:[1,{c:true}],d:{},e:[]}"
            "<end_function_call><start_function_call>call:now{}<end_function_call>",
            "",
            [("f", '{"a": "x", "b": [1, {"c": true}], "d": {}, "e": []}'), N],
        ),
        (
            '<|tool_call>call:f{"a":"b\\n",c:two words}<tool_call|>',
            "",
            [("f", '{"a": "b\\n", "c": "two words"}')],
        ),
        ("<|tool_call>call:f{a:}<tool_call|>", "<|tool_call>call:f{a:}<tool_call|>", []),
        ("<|tool_call>call:f{a:1} x<tool_call|>", "<|tool_call>call:f{a:1} x<tool_call|>", []),
        (
            f"<|tool_call>call:f{{a:{Q}x}}<tool_call|>",
            f"<|tool_call>call:f{{a:{Q}x}}<tool_call|>",
            [],
        ),
        ("<|tool_call>call:f{a:1}", "", [("f", '{"a": 1}')]),
    ],
    "pythonic": [
        ('[weather(city="Köln", days=3), now()]', "", [W2, N]),
        (" [now()]\n", "", [N]),
        ("<|python_start|>[now()]<|python_end|> hi", " hi", [N]),
        (
            '[weather(city="a]b\\"", days={"k": [None, true, -1.5]})]',
            "",
            [("weather", '{"city": "a]b\\"", "days": {"k": [null, true, -1.5]}}')],
        ),
        ("[weather('Köln', days=3)]", "", [W2]),
        ("[1, 2, 3] are numbers", "[1, 2, 3] are numbers", []),
        ("[link](http://x)", "[link](http://x)", []),
        ("[now(), 5] x", "[now(), 5] x", []),
        ("[unknown(a=1)]", "[unknown(a=1)]", []),
        ("[now(__import__('os'))]", "[now(__import__('os'))]", []),
        ("[weather(**x)]", "[weather(**x)]", []),
        ("[weather(city=1e999)]", "[weather(city=1e999)]", []),
        ("[now(", "[now(", []),
        ("[]", "[]", []),
        ("text [now()]", "text [now()]", []),
    ],
}
CASES["deepseek_v32"] = [
    (
        text.replace("tool_calls", "function_calls"),
        content.replace("tool_calls", "function_calls"),
        c,
    )
    for text, content, c in CASES["deepseek_v4"]
]
